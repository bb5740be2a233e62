"""Runs as Ray jobs, without Ray: what is submitted, what an end means, what is sent again."""

import itertools
import shlex
from pathlib import Path

import pytest
from ray._private.state import state
from ray.core.generated.autoscaler_pb2 import ClusterConfig

from raydl import cli, ray_session
from raydl.cli import again, submitting
from raydl.config import TrainConfig, to_dict
from raydl.errors import ConfigError, RaydlError
from raydl.on_ray.cluster import what_is_missing
from raydl.submission import (
    EXCLUDES,
    SILENT,
    UNKNOWN,
    Fate,
    JobState,
    Plan,
    Submitter,
    check_what_travels,
    judge,
    make_runtime_env,
    plan_run,
    without_ray,
)

PLAN = Plan("digits", "/runs/digits", "--epochs 2 --run-dir /runs/digits")
DONE = JobState("SUCCEEDED", 0)
RUNNING = JobState("RUNNING")
KILLED = JobState("FAILED", -9)


def plan_of(*words):
    return plan_run(words, cli.parse_train(words), stamp="20261121-150000")


def error_of(capsys, *arguments):
    """Run ``raydl submit`` with a mistake and return its one sentence."""
    assert cli.main(["submit", *arguments]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text.removeprefix("error: ").strip()


# the command


def test_a_run_without_a_place_is_kept_in_the_heads_home_under_a_name_that_stays():
    plan = plan_of("--epochs", "2")
    assert plan.place == "~/raydl-runs/sync-easgd-lenet-20261121-150000"
    assert plan.command() == (
        "exec python -m raydl train --epochs 2 "
        '--run-dir "$HOME"/raydl-runs/sync-easgd-lenet-20261121-150000'
    )
    assert "--run-name sync-easgd-lenet-20261121-150000 and --resume" in plan.how_to_go_on


@pytest.mark.parametrize(
    ("words", "place", "folder"),
    [
        (("--run-dir", "runs/a"), "~/raydl-runs/a", '"$HOME"/raydl-runs/a'),
        (("--run-dir", "/shared/a"), "/shared/a", "/shared/a"),
        (("--storage-path", "s3://b/c/", "--run-dir", "x/a"), "s3://b/c/a", "runs/a"),
        (("--storage-path", "/shared", "--run-dir", "a b"), "/shared/a b", "'runs/a b'"),
    ],
)
def test_a_run_is_kept_where_every_later_job_finds_it(words, place, folder):
    plan = plan_of(*words)
    assert plan.place == place
    assert plan.options.endswith(f" --run-dir {folder}")
    assert plan.how_to_go_on == "the same command with --resume"


def test_the_command_means_what_was_asked_for():
    words = ["--method", "async-easgd", "--data", "/a folder/with spaces", "--run-dir", "/runs/a"]
    command = shlex.split(plan_of(*words).command())
    assert command[:5] == ["exec", "python", "-m", "raydl", "train"]
    assert to_dict(cli.parse_train(command[5:])) == to_dict(cli.parse_train(words))


def test_a_run_must_not_be_kept_in_the_jobs_own_folder():
    with pytest.raises(ConfigError, match=r"^run\.storage_path must be an absolute path or a URI"):
        plan_of("--storage-path", "kept")


def test_what_lies_in_this_folder_only_is_missed_before_the_cluster_misses_it(tmp_path):
    (tmp_path / "plan.yaml").touch()
    (tmp_path / "mine.py").touch()
    (tmp_path / "pictures").mkdir()
    for words in (
        ["--fault-plan", "plan.yaml"],
        ["--method", "mine:Rule"],
        ["--data", "pictures"],
    ):
        with pytest.raises(ConfigError, match=r"lies in this folder.* add --working-dir \. "):
            check_what_travels(cli.parse_train(words), here=tmp_path)
    for words in (
        [],
        ["--method", "elsewhere:Rule"],
        ["--data", str(tmp_path / "pictures")],
        ["--data", "s3://bucket/pictures"],
    ):
        check_what_travels(cli.parse_train(words), here=tmp_path)


def test_the_job_brings_raydl_itself_and_time_for_its_last_checkpoint():
    env = make_runtime_env(
        package=Path("/here/raydl"), working_dir=None, requirements=(), stop_grace_s=60
    )
    assert env["py_modules"] == ["/here/raydl"]
    assert env["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "60"}
    assert not {"working_dir", "pip"} & set(env)
    env = make_runtime_env(
        package=Path("/here/raydl"), working_dir=".", requirements=["tyro"], stop_grace_s=60
    )
    assert (env["working_dir"], env["pip"]) == (".", ["tyro"])


def test_ray_itself_and_extras_are_not_installed_for_a_job():
    asked = ["numpy>=1.26", "ray[default]>=2.60", "tyro", 'matplotlib>=3.8; extra == "report"']
    assert without_ray(asked) == ["numpy>=1.26", "tyro"]


def test_tests_docs_runs_and_the_history_do_not_travel_and_the_digits_do(root):
    sizes, limit = ray_session.folder_sizes(str(root), list(EXCLUDES))
    assert {"raydl", "jobs", "pyproject.toml"} <= set(sizes)
    assert not {".git", ".venv", "tests", "docs", "runs", "raydl.egg-info"} & set(sizes)
    assert sum(sizes.values()) < 5 * 2**20 < limit


def test_all_of_raydl_travels(root):
    package = root / "raydl"
    sizes, _ = ray_session.folder_sizes(str(package), list(EXCLUDES))
    files = [p for p in package.rglob("*") if p.is_file() and p.suffix != ".pyc"]
    assert sum(sizes.values()) == sum(p.stat().st_size for p in files)


def test_what_a_fresh_clone_sends_by_ray_job_submit_is_little(root):
    sizes, _ = ray_session.folder_sizes(str(root), [])
    assert not {".git", ".venv", "tests", "docs", "runs"} & set(sizes)
    assert sum(sizes.values()) < 5 * 2**20


def test_a_folder_that_ray_would_not_take_is_refused_with_what_is_large(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "film.bin").open("wb") as file:
        file.truncate(600 * 2**20)  # sparse
    sentence = error_of(capsys, "--working-dir", ".", "--", "--epochs", "1")
    assert "600 MiB, Ray takes less than 512 MiB" in sentence
    assert sentence.endswith("film.bin (600 MiB)")
    (tmp_path / ".rayignore").write_text("*.bin\n")
    submitting._check_size(".")


# mistakes


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--", "--beta", "1.8"], "method.beta must be in (0, 1]"),
        (["--", "--workers", "0"], "scaling.num_workers must be 1 or more in a job"),
        (["--epochs", "2"], "submit has no option --epochs; options of raydl train come after"),
        (["--retries", "-1"], "submit.retries must be 0 or more, got -1"),
        (["--retries", "1", "--no-follow"], "submit.retries needs a job submitted here"),
        (["--run-name", "a/b"], "submit.run_name must be a name without slashes, got a/b"),
        (
            ["--run-name", "a", "--", "--run-dir", "b"],
            "submit.run_name and run.run_dir exclude each other",
        ),
        (["--", "--resume"], "run.resume needs run.run_dir"),
        (["--working-dir", "no/such"], "submit.working_dir is no folder here: no/such"),
        (["--wait-s", "0"], "submit.wait_s must be a positive number, got 0"),
    ],
)
def test_a_mistake_is_told_before_a_cluster_is_looked_for(capsys, arguments, sentence):
    assert error_of(capsys, *arguments).startswith(sentence)


def test_a_run_name_makes_resume_possible():
    options = submitting._SubmitOptions(run_name="digits")
    plan = submitting._plan(options, ["--resume"])
    assert plan.options == '--resume --run-dir "$HOME"/raydl-runs/digits'


# what an end means


@pytest.mark.parametrize(
    ("state", "fate", "status"),
    [
        (DONE, Fate.DONE, 0),
        (JobState("STOPPED"), Fate.STOPPED, 143),
        (JobState("FAILED", 143), Fate.STOPPED, 143),
        (JobState("FAILED", -15), Fate.STOPPED, 143),
        (JobState("FAILED", 15), Fate.STOPPED, 143),
        (JobState("FAILED", 130), Fate.STOPPED, 130),
        (JobState("FAILED", 2), Fate.FAILED, 2),
        (JobState("FAILED", 1), Fate.FAILED, 1),
        (KILLED, Fate.LOST, 1),
        (JobState("FAILED", 137), Fate.LOST, 1),
        (JobState("FAILED", -11), Fate.LOST, 1),
        (JobState("FAILED", None, "JOB_SUPERVISOR_ACTOR_DIED"), Fate.LOST, 1),
        (JobState("FAILED", None, "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE"), Fate.LOST, 1),
        (JobState(UNKNOWN), Fate.LOST, 1),
        (JobState("FAILED", None, "RUNTIME_ENV_SETUP_FAILURE", "no tyro"), Fate.FAILED, 1),
    ],
)
def test_only_a_driver_that_was_taken_away_is_lost(state, fate, status):
    assert judge(state)[:2] == (fate, status)


def test_the_signal_that_took_a_driver_is_named():
    assert (
        judge(KILLED)[2] == judge(JobState("FAILED", 137))[2] == "the driver was killed (SIGKILL)"
    )
    assert "no tyro" in judge(JobState("FAILED", None, "RUNTIME_ENV_SETUP_FAILURE", "no tyro"))[2]


# doing it


class FakeJobs:
    """A cluster that tells one state after another; the log grows by a line with each look."""

    def __init__(self, *states, refusals=0):
        self.states = iter(states)
        self.refusals = refusals
        self.commands = []
        self.num_looks = 0

    def submit(self, job_id, command):
        if self.refusals:
            self.refusals -= 1
            return False
        self.commands.append(command)
        self.num_looks = 0
        return True

    def look(self, job_id):
        self.num_looks += 1
        return next(self.states)

    def log(self, job_id):
        return "".join(f"line {i}\n" for i in range(self.num_looks))


class Told:
    """A submitter with a clock that moves only when it sleeps."""

    def __init__(self, jobs, **settings):
        self.said, self.written, self.now = [], [], 0.0
        self.submitter = Submitter(
            jobs,
            PLAN,
            say=self.said.append,
            write=self.written.append,
            clock=lambda: self.now,
            sleep=self.sleep,
            **settings,
        )

    def sleep(self, seconds):
        self.now += seconds


def test_the_log_is_passed_on_once_and_to_its_end():
    told = Told(FakeJobs(RUNNING, RUNNING, DONE))
    assert told.submitter.run() == 0
    assert "".join(told.written) == "line 0\nline 1\nline 2\n"
    assert told.said[-1].endswith(": done")


def test_a_lost_driver_is_sent_again_to_go_on_and_each_loss_is_one_line():
    jobs = FakeJobs(RUNNING, KILLED, JobState(UNKNOWN), RUNNING, DONE)
    told = Told(jobs, retries=3)
    assert told.submitter.run() == 0
    assert [c.split()[3] for c in jobs.commands] == ["raydl", "raydl.cli.again", "raydl.cli.again"]
    assert sum("sending it again" in line for line in told.said) == 2
    assert "the driver was killed (SIGKILL)" in told.said[1]
    assert "retries left: 2" in told.said[1]


def test_retries_are_bounded_and_the_end_says_how_to_go_on():
    jobs = FakeJobs(KILLED, KILLED, KILLED)
    told = Told(jobs, retries=1)
    assert told.submitter.run() == 1
    assert len(jobs.commands) == 2
    assert "to go on: the same command with --run-name digits and --resume" in told.said[-1]


@pytest.mark.parametrize("status", [2, 1, 143])
def test_a_mistake_a_failure_and_a_stop_are_not_tried_again(status):
    jobs = FakeJobs(JobState("FAILED", status))
    assert Told(jobs, retries=5).submitter.run() == status
    assert len(jobs.commands) == 1


def test_a_cluster_that_is_silent_for_a_while_is_waited_for():
    silent = [JobState(SILENT)] * 20
    told = Told(FakeJobs(RUNNING, *silent, DONE, refusals=7), wait_s=30.0)
    assert told.submitter.run() == 0
    assert sum("does not answer" in line for line in told.said) == 2


@pytest.mark.parametrize(
    "jobs",
    [FakeJobs(refusals=10**6), FakeJobs(RUNNING, *[JobState(SILENT)] * 100)],
    ids=["at submission", "while it follows"],
)
def test_a_cluster_that_stays_silent_is_given_up_in_bounded_time(jobs):
    told = Told(jobs, wait_s=30.0)
    with pytest.raises(RaydlError, match=r"did not answer for 30 s; raise --wait-s, or go on"):
        told.submitter.run()
    assert 30 < told.now < 40


def test_following_only_ends_like_the_job_and_knows_a_job_that_is_not_there():
    assert Told(FakeJobs(RUNNING, KILLED)).submitter.follow_only("x") == 1
    with pytest.raises(RaydlError, match="the cluster has no job x"):
        Told(FakeJobs(JobState(UNKNOWN))).submitter.follow_only("x")


def test_a_long_log_is_asked_for_less_often():
    jobs = FakeJobs(RUNNING, DONE)
    jobs.log = lambda job_id: "x" * 8_000_000
    told = Told(jobs)
    told.submitter.run()
    assert told.now == 8.0


def test_ctrl_c_ends_the_following_and_not_the_job(capsys):
    class Interrupting(FakeJobs):
        def look(self, job_id):
            raise KeyboardInterrupt

    jobs = Interrupting()
    options = submitting._SubmitOptions(address="http://head:8265", retries=2)
    submitter = Submitter(jobs, PLAN, retries=2)
    assert submitting._watch(options, submitter) == 130
    out = capsys.readouterr().out
    assert "the job goes on; nobody sends it again now" in out
    assert f"raydl submit --address http://head:8265 --follow {submitter.job_id}" in out
    assert f"ray job stop --address http://head:8265 {submitter.job_id}" in out


# what the cluster does with a run that is sent again


def options_of(run_dir):
    return [
        "--workers", "0", "--run.progress", "none", "--model", "mlp", "--data", "synthetic:96",
        "--epochs", "2", "--run-dir", str(run_dir),
    ]  # fmt: skip


def test_a_run_sent_again_goes_on_from_its_checkpoint(tmp_path, capsys):
    options = options_of(tmp_path / "run")
    assert cli.main(["train", *options, "--epochs", "1"]) == 0
    assert again.again([*options, "--resume"]) == 0
    assert "(192 samples" not in capsys.readouterr().out.splitlines()[0]
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_run_that_was_lost_before_its_first_checkpoint_begins_anew(tmp_path, capsys, has_begun):
    run = tmp_path / "run"
    if has_begun:
        run.mkdir()
        (run / "config.json").write_text("{}")
    assert again.again(options_of(run)) == 0
    assert ("begins anew" in capsys.readouterr().out) is has_begun
    assert (run / "result.json").exists()


# pending resources


def test_what_pending_workers_need_and_what_could_come_is_one_sentence():
    need, have = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 8.0, "memory": 1e9}
    start = "2 more workers: needs {CPU: 1, GPU: 1} each; the cluster has {CPU: 8, GPU: 0}"
    assert what_is_missing(2, need, have) == start
    types = [("gpu", {"CPU": 4.0, "GPU": 1.0, "memory": 1e9}, 3), ("cpu", {"CPU": 4.0}, 9)]
    assert what_is_missing(2, need, have, types) == (
        f"{start}; the autoscaler can add gpu nodes with {{CPU: 4, GPU: 1}}, 3 in all"
    )
    assert what_is_missing(2, need, have, types[1:]) == (
        f"{start}; no node the autoscaler can add is large enough"
    )
    assert what_is_missing(1, {"tpu": 1.0}, {}).startswith("1 more worker: needs {tpu: 1} each;")


def test_what_ray_up_may_start_is_read_on_its_head(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "get_cluster_config", lambda: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ray_session.nodes_to_add() == []
    (tmp_path / "ray_bootstrap_config.yaml").write_text(
        "max_workers: 8\n"
        "head_node_type: head\n"
        "available_node_types:\n"
        "  head: {resources: {CPU: 2}}\n"
        "  spot: {resources: {CPU: 4, GPU: 1}, max_workers: 20}\n"
        "  none: {resources: {CPU: 4}, max_workers: 0}\n"
    )
    assert ray_session.nodes_to_add() == [("spot", {"CPU": 4, "GPU": 1}, 8)]
    (tmp_path / "ray_bootstrap_config.yaml").write_text("- not\n- a cluster\n")
    assert ray_session.nodes_to_add() == []


def test_what_kubernetes_may_start_is_read_from_ray(monkeypatch):
    config = ClusterConfig()
    config.node_group_configs.add(name="gpu", max_count=-1, resources={"CPU": 4, "GPU": 1})
    config.node_group_configs.add(name="off", max_count=0, resources={"CPU": 4})
    monkeypatch.setattr(state, "get_cluster_config", lambda: config)
    assert ray_session.nodes_to_add() == [("gpu", {"CPU": 4, "GPU": 1}, -1)]
    assert what_is_missing(1, {"GPU": 1.0}, {}, ray_session.nodes_to_add()).endswith(
        "; the autoscaler can add gpu nodes with {CPU: 4, GPU: 1}"
    )


def test_a_submitted_run_takes_every_option_of_a_run():
    assert cli.COMMANDS["submit"] is submitting.submit
    for low, high in itertools.pairwise((1, 2, 8)):
        plan = plan_of("--workers", f"{low}:{high}")
        assert f"--workers {low}:{high}" in plan.command(again=True)
    assert isinstance(cli.parse_train(["--workers", "1:2"]), TrainConfig)
