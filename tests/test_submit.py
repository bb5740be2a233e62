"""Runs as Ray jobs, without Ray: what is submitted, what an end means, what is sent again."""

import itertools
import json
import shlex
import shutil
from pathlib import Path

import pytest
from ray._private.state import state
from ray.core.generated.autoscaler_pb2 import ClusterConfig
from ray.exceptions import RpcError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raydl import cli, ray_session, trainer
from raydl.cli import again, submitting
from raydl.config import TrainConfig, to_dict
from raydl.errors import ConfigError, RaydlError
from raydl.on_ray import cluster, job_client
from raydl.on_ray.cluster import what_is_missing
from raydl.runs.folder import RunFolder
from raydl.runs.hold import held
from raydl.runs.job_end import SILENT, UNKNOWN, Fate, JobState, judge
from raydl.storage import Storage
from raydl.submission import (
    EXCLUDES,
    Plan,
    Submitter,
    check_what_travels,
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
        (("--run-dir", "/a place/a"), "/a place/a", "'/a place/a'"),
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
        package=Path("/here/raydl"),
        working_dir=None,
        requirements=(),
        stop_grace_s=60,
        submission="s1",
    )
    assert env["py_modules"] == ["/here/raydl"]
    assert env["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "60", "RAYDL_SUBMISSION": "s1"}
    assert not {"working_dir", "pip"} & set(env)
    env = make_runtime_env(
        package=Path("/here/raydl"),
        working_dir=".",
        requirements=["tyro"],
        stop_grace_s=60,
        submission="s1",
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
    assert "600 MiB, Ray takes less than 100 MiB" in sentence
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
        (["--run-name", "a/b"], "submit.run_name must be a name of letters, digits, _ . and -, "),
        (["--run-name", ""], "submit.run_name must be a name"),
        (["--run-name", ".."], "submit.run_name must be a name"),
        (["--run-name", "a b"], "submit.run_name must be a name"),
        (["--", "--run-dir", ""], "run.run_dir must be the name of a folder"),
        (["--", "--run-dir", "."], "the last part of run.run_dir must be a name"),
        (["--", "--run-dir", "/"], "the last part of run.run_dir must be a name"),
        (["--", "--run-dir", "/shared/.."], "the last part of run.run_dir must be a name"),
        (["--", "--run-dir", "s3://b/a"], "run.run_dir names a folder; a URI goes into --storage"),
        (["--follow", "x", "--", "--epochs", "1"], "submit.follow submits nothing"),
        (
            ["--address", "ray://h:10001"],
            "submit.address must be the cluster's dashboard, http://h:8265, got ray://h:10001",
        ),
        (["--address", "h:6379"], "submit.address must be the cluster's dashboard, http://h:8265"),
        (
            ["--address", "[::1]:6379"],
            "submit.address must be the cluster's dashboard, http://[::1]:8265",
        ),
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


def test_a_driver_that_could_not_be_placed_is_lost_with_the_reason_that_ray_gives():
    state = JobState("FAILED", None, "JOB_SUPERVISOR_ACTOR_START_TIMEOUT", "not within\n900 s")
    assert judge(state)[2].endswith("(JOB_SUPERVISOR_ACTOR_START_TIMEOUT: not within 900 s)")


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


def test_a_silent_cluster_is_come_back_to_by_the_way_that_fits():
    told = Told(FakeJobs(refusals=10**6), wait_s=1.0)
    with pytest.raises(RaydlError, match=r"once it is back: the same command$"):
        told.submitter.run()
    told = Told(FakeJobs(*[JobState(SILENT)] * 9), wait_s=1.0)
    with pytest.raises(RaydlError, match=r"once it is back: raydl submit --follow digits-\w{6}$"):
        told.submitter.run()


def test_the_id_of_a_job_is_plain_ascii():
    told = Told(FakeJobs(DONE))
    told.submitter.plan = Plan("zählen", "/runs/zählen", "")
    told.submitter.run()
    assert told.said[0].startswith("z.hlen-")


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


def test_ctrl_c_in_a_pause_does_not_say_that_a_job_goes_on():
    submitter = Submitter(FakeJobs(KILLED), PLAN, retries=2, say=lambda text: None)

    def interrupt(seconds):
        raise KeyboardInterrupt

    submitter.sleep, submitter.write = interrupt, lambda text: None
    with pytest.raises(KeyboardInterrupt):
        submitter.run()
    assert (submitter.job_id, submitter.sending) == ("", "")


def test_ctrl_c_while_a_job_is_sent_says_that_the_cluster_may_have_it(capsys):
    class Interrupting(FakeJobs):
        def submit(self, job_id, command):
            raise KeyboardInterrupt

    submitter = Submitter(Interrupting(), PLAN)
    options = submitting._SubmitOptions(address="h:8265")
    assert submitting._watch(options, submitter, ray="RAY_AUTH_MODE=token ray") == 130
    out = capsys.readouterr().out
    assert f"the cluster may have {submitter.sending} already; RAY_AUTH_MODE=token ray job" in out
    assert "RAY_AUTH_MODE=token ray job stop --address http://h:8265 digits-" in out
    assert "goes on" not in out


def test_what_is_printed_to_be_typed_is_quoted():
    options = submitting._SubmitOptions(address="http://h:8265/a b")
    assert submitting._hints("x y", options, "ray").endswith("'http://h:8265/a b' 'x y'")
    assert Plan("a", "a", "", python="my python").command().startswith("exec 'my python' -m")


# what Ray's client says


class FakeClient:
    """Ray's client of a cluster that answers everything with one error."""

    error = None

    def __init__(self, address):
        if address == "no":
            raise self.error

    def get_address(self):
        return "http://h:8265"

    def get_job_info(self, job_id):
        raise self.error if self.looks is None else self.looks

    def submit_job(self, **options):
        raise self.error

    looks = None


def http_error(code, text):
    return RuntimeError(f"Request failed with status code {code}: {text}.")


@pytest.fixture
def client(monkeypatch):
    """Return RayJobs with a client that raises, and says of every job that it is not there."""

    def make(error, looks=None):
        monkeypatch.setattr(FakeClient, "error", error)
        monkeypatch.setattr(FakeClient, "looks", looks)
        monkeypatch.setattr(job_client, "_Client", FakeClient)
        return job_client.RayJobs("yes")

    return make


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (http_error(404, "Job x does not exist"), UNKNOWN),
        (http_error(404, "<html>no such page"), SILENT),
        (http_error(404, "Job y does not exist"), SILENT),
        (http_error(500, "Traceback"), SILENT),
        (ValueError("no JSON"), SILENT),
        (ConnectionError(), SILENT),
    ],
)
def test_only_rays_own_word_means_that_a_cluster_was_started_anew(client, error, status):
    assert client(error).look("x").status == status


@pytest.mark.parametrize(
    "error",
    [
        http_error(500, "No available agent to submit job, please try again later"),
        http_error(502, "bad gateway"),
        http_error(503, "not yet"),
        http_error(504, "too late"),
        ConnectionError(),
    ],
)
def test_a_cluster_that_is_not_ready_yet_is_asked_again(client, error):
    assert client(error, http_error(404, "Job x does not exist")).submit("x", "true") is False


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (
            http_error(400, "Traceback (most recent call last):\n  File a\nValueError: bad pip\n"),
            "did not take the job: ValueError: bad pip",
        ),
        (http_error(413, "<html>"), "or keep data where all nodes see them"),
        (PermissionError(13, "denied", "a.bin"), "denied: 'a.bin'"),
    ],
)
def test_a_refusal_is_one_sentence_with_the_reason(client, error, end):
    with pytest.raises(RaydlError, match=r"^the cluster did not take the job: ") as caught:
        client(error, http_error(404, "Job x does not exist")).submit("x", "true")
    assert str(caught.value).endswith(end)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RpcError("failed to connect"), "no Ray cluster answers at no: failed to connect; give"),
        (KeyError("ray_version"), "what answers at no is no Ray dashboard; give --address"),
        (TypeError("list"), "what answers at no is no Ray dashboard; give --address"),
    ],
)
def test_whatever_else_answers_is_told_in_one_sentence(client, error, sentence):
    client(error)
    with pytest.raises(RaydlError) as caught:
        job_client.RayJobs("no")
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("head:8265", "http://head:8265"),
        ("head", "http://head"),
        ("https://head:8265/", "https://head:8265/"),
        ("auto", "auto"),
    ],
)
def test_an_address_without_a_scheme_is_one_of_http(address, url):
    assert ray_session.dashboard_url(address) == url


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


def begin(run, monkeypatch, submission):
    """Leave what an attempt leaves that was lost before its first checkpoint."""
    monkeypatch.setenv("RAYDL_SUBMISSION", submission)
    assert cli.main(["train", *options_of(run)]) == 0
    shutil.rmtree(run / "checkpoints")
    (run / "result.json").unlink()


def test_a_run_that_was_lost_before_it_wrote_anything_is_begun(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYDL_SUBMISSION", "ours")
    assert again.again(options_of(tmp_path / "run")) == 0
    assert json.loads((tmp_path / "run/config.json").read_text())["submission"] == "ours"


def test_a_run_that_was_lost_before_its_first_checkpoint_begins_anew(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    begin(run, monkeypatch, "ours")
    (run / "notes.txt").write_text("mine")
    assert again.again([*options_of(run), "--run.progress", "plain"]) == 0
    assert capsys.readouterr().out.count(f"no checkpoint yet: the run begins anew in {run}") == 1
    assert (run / "result.json").exists()
    assert (run / "notes.txt").read_text() == "mine"
    events = EventAccumulator(str(run)).Reload()
    for tag in events.Tags()["scalars"]:
        steps = [e.step for e in events.Scalars(tag)]
        assert steps == sorted(set(steps)), tag


@pytest.mark.parametrize("whose", ["another submission", "a stranger", "nobody"])
def test_a_folder_of_others_is_refused_and_keeps_all_it_has(tmp_path, capsys, monkeypatch, whose):
    run = tmp_path / "run"
    if whose == "another submission":
        begin(run, monkeypatch, "theirs")
    else:
        run.mkdir()
        (run / "config.json").write_text("{}" if whose == "a stranger" else "no JSON")
    (run / "notes.txt").write_text("mine")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    monkeypatch.setenv("RAYDL_SUBMISSION", "ours")
    assert again.again(options_of(run)) == 2
    assert "already holds a run; add --resume, or name another" in capsys.readouterr().err
    after = {p: p.read_bytes() for p in before}
    assert {p.name: d for p, d in after.items() if p.name != "driver.lock"} == {
        p.name: d for p, d in before.items() if p.name != "driver.lock"
    }


def test_a_folder_whose_driver_lives_is_refused(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    begin(run, monkeypatch, "ours")
    monkeypatch.setattr(again, "HOLD_WAIT_S", 0.0)
    with held(Storage(str(run)), "run.run_dir"):
        assert again.again(options_of(run)) == 2
    assert "is in use by process" in capsys.readouterr().err


def test_resume_of_what_is_not_there_fails_when_it_is_sent_again_too(tmp_path, capsys):
    assert again.again([*options_of(tmp_path / "run"), "--resume"]) == 2
    assert "no run is there" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_resume_needs_a_config_of_raydl_and_a_run_that_has_not_ended(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    begin(run, monkeypatch, "ours")
    (run / "result.json").write_text("{}")
    assert cli.main(["train", *options_of(run), "--resume"]) == 2
    assert "there is none to go on from" in capsys.readouterr().err
    (run / "config.json").write_text("[]")
    assert cli.main(["train", *options_of(run), "--resume"]) == 2
    assert "its config.json is not of raydl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "place"),
    [("s3://b/runs/a?region=eu", "runs/a"), ("/shared/a", "/shared/a"), ("runs/a", "runs/a")],
)
def test_a_stopped_run_is_gone_on_with_by_a_folder_and_not_a_uri(capsys, monkeypatch, path, place):
    result = trainer.Result({"samples": 1}, path, "", "SIGTERM")
    monkeypatch.setattr(trainer.Trainer, "fit", lambda self: result)
    assert cli.main(["train"]) == 143
    assert f"the same command with --run-dir {place} --resume\n" in capsys.readouterr().out


def test_a_storage_that_fails_a_second_attempt_is_one_sentence(tmp_path, capsys, monkeypatch):
    def fail(self):
        raise OSError("the disk is gone")

    monkeypatch.setenv("RAYDL_SUBMISSION", "ours")
    monkeypatch.setattr(RunFolder, "begun_by", fail)
    assert again.again(options_of(tmp_path / "run")) == 2
    error = capsys.readouterr().err
    assert error == f"error: checkpoint {tmp_path}/run: can not be read: the disk is gone\n"
    assert again.again(["--run-dir", "s3://b/a"]) == 2
    assert capsys.readouterr().err.startswith("error: run.run_dir names a folder; a URI goes into")


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
    assert what_is_missing(2, need, have, free={"CPU": 2.0}) == f"{start}, free {{CPU: 2, GPU: 0}}"


def test_a_cluster_that_does_not_say_what_there_is_ends_no_run(monkeypatch):
    def fail():
        raise RpcError("gone")

    monkeypatch.setattr(cluster.ray, "cluster_resources", fail)
    sentence = "2 more, {CPU: 1} each; Ray does not say what there is"
    assert cluster.awaited(2, {"CPU": 1.0}) == sentence


def test_what_an_autoscaler_may_start_is_asked_for_until_it_is_known(monkeypatch):
    answers = iter([RpcError("gone"), [], [("spot", {"CPU": 4.0}, 8)]])

    def answer():
        value = next(answers)
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(cluster, "_known_to_add", [])
    monkeypatch.setattr(cluster, "nodes_to_add", answer)
    monkeypatch.setattr(cluster.ray, "cluster_resources", dict)
    monkeypatch.setattr(cluster.ray, "available_resources", dict)
    sentences = [cluster.awaited(1, {"CPU": 1.0}) for _ in range(4)]
    assert ["spot" in sentence for sentence in sentences] == [False, False, True, True]


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
