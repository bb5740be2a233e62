"""The Ray job that ``raydl submit`` makes, tested without Ray."""

import itertools
import re
import shlex
from pathlib import Path

import pytest

from raydl import cli
from raydl.cli import submitting
from raydl.cli.commands import COMMANDS
from raydl.cli.options import parse_train
from raydl.config import TrainConfig, to_dict
from raydl.errors import ConfigError
from raydl.launch.submission import (
    EXCLUDES,
    check_what_travels,
    make_runtime_env,
    plan_run,
    read_runtime_env,
    without_ray,
)
from raydl.ray_backend import session as ray_session


def plan_of(*options):
    return plan_run(options, parse_train(options), message_id="20261121-150000")


def error_of(capsys, *arguments):
    """Run ``raydl submit``, which must fail with one sentence, and return it."""
    assert cli.main(["submit", *arguments]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text.removeprefix("error: ").strip()


# the command


def test_a_run_without_a_folder_is_kept_in_the_heads_home_under_a_fixed_name():
    plan = plan_of("--epochs", "2")
    assert plan.place == "~/raydl-runs/sync-easgd-auto-20261121-150000"
    assert plan.command() == (
        "exec python -m raydl train --epochs 2 "
        '--run-dir "$HOME"/raydl-runs/sync-easgd-auto-20261121-150000'
    )
    assert "--run-name sync-easgd-auto-20261121-150000 and --resume" in plan.how_to_continue


@pytest.mark.parametrize(
    ("options", "place", "folder"),
    [
        (("--run-dir", "runs/a"), "~/raydl-runs/a", '"$HOME"/raydl-runs/a'),
        (("--run-dir", "/shared/a"), "/shared/a", "/shared/a"),
        (("--storage-path", "s3://b/c/", "--run-dir", "x/a"), "s3://b/c/a", "runs/a"),
        (("--run-dir", "/a place/a"), "/a place/a", "'/a place/a'"),
        (("--name", "a"), "~/raydl-runs/a", '"$HOME"/raydl-runs/a'),
        (("--name=a", "--storage-path", "s3://b/c"), "s3://b/c/a", "runs/a"),
    ],
)
def test_a_run_is_kept_where_every_later_job_finds_it(options, place, folder):
    plan = plan_of(*options)
    assert plan.place == place
    assert plan.options.endswith(f" --run-dir {folder}")
    assert plan.how_to_continue == "the same command with --resume"


def test_the_command_has_the_options_of_the_run():
    options = ["--method", "async-easgd", "--data", "/a folder/with spaces", "--run-dir", "/runs/a"]
    command = shlex.split(plan_of(*options).command())
    assert command[:5] == ["exec", "python", "-m", "raydl", "train"]
    assert to_dict(parse_train(command[5:])) == to_dict(parse_train(options))


def test_a_run_must_not_be_kept_in_the_jobs_own_folder():
    with pytest.raises(ConfigError, match=r"^run\.storage_path must be an absolute path or a URI"):
        plan_of("--storage-path", "kept")


def test_a_setting_that_names_a_local_file_is_refused_before_submission(tmp_path):
    (tmp_path / "plan.yaml").touch()
    (tmp_path / "mine.py").touch()
    (tmp_path / "words").touch()
    (tmp_path / "part-0.parquet").touch()
    for folder in ("pictures", "digits", "torchvision", "hf"):
        (tmp_path / folder).mkdir()
    for options in (
        ["--fault-plan", "plan.yaml"],
        ["--method", "mine:Rule"],
        ["--model", "mine:net"],
        ["--task", "mine:Task"],
        ["--optimizer", "mine:Optimizer"],
        ["--lr-schedule", "mine:schedule"],
        ["--data", "pictures"],
        ["--data", "text:words"],
        ["--data", "part-*.parquet"],
    ):
        with pytest.raises(ConfigError, match=r"is in this folder.* add --working-dir \. "):
            check_what_travels(parse_train(options), here=tmp_path)
    for options in (
        [],
        ["--method", "elsewhere:Rule"],
        ["--model", "torchvision:resnet18"],
        ["--model", "hf:/shared/llama"],
        ["--data", str(tmp_path / "pictures")],
        ["--data", "s3://bucket/pictures"],
        ["--data", "digits"],  # the bundled ones
        ["--data", "synthetic:64"],
    ):
        check_what_travels(parse_train(options), here=tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        ["--data", "text:docs/*.md"],
        ["--data", "docs"],
        ["--data", "../elsewhere"],
        ["--fault-plan", "tests/plan.yaml"],
        ["--task", "tests.mine:Task"],
        ["--data", "secret.npz"],
    ],
)
def test_a_setting_that_names_a_file_which_is_not_uploaded_is_refused(options, tmp_path):
    folder = folder_to_upload(tmp_path)
    with pytest.raises(ConfigError, match=r" is not uploaded: it is outside .*/work, or "):
        submitting._plan(submitting._SubmitOptions(working_dir=folder), options)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--data", "text:texts/*.md"],
        ["--data", "texts"],
        ["--data", "."],
        ["--data", "/shared/docs"],
        ["--data", "nowhere"],
        ["--task", "mine:Task"],
        ["--task", "texts.mine:Task"],
        ["--fault-plan", "plan.yaml"],
        ["--optimizer", "mine:Optimizer"],
        ["--lr-schedule", "mine:schedule"],
    ],
)
def test_a_setting_that_names_an_uploaded_file_is_accepted(options, tmp_path):
    submitting._plan(submitting._SubmitOptions(working_dir=folder_to_upload(tmp_path)), options)


def test_a_fault_plan_in_the_working_folder_is_checked(tmp_path):
    folder = folder_to_upload(tmp_path)
    Path(folder, "plan.yaml").write_text("faults: [{fault: kill, target: rank 9, at: round 1}]")
    with pytest.raises(ConfigError, match="target must be a rank below 2"):
        submitting._plan(
            submitting._SubmitOptions(working_dir=folder),
            ["--fault-plan", "plan.yaml", "--workers", "2"],
        )


def folder_to_upload(parent):
    """Return a new folder with files that are uploaded and files that are not."""
    for name in (
        "work/docs/a.md", "work/texts/a.md", "work/texts/mine.py", "work/mine.py", "work/plan.yaml",
        "work/tests/plan.yaml", "work/tests/mine.py", "work/secret.npz", "elsewhere/a.npz",
    ):  # fmt: skip
        (parent / name).parent.mkdir(parents=True, exist_ok=True)
        (parent / name).touch()
    (parent / "work/plan.yaml").write_text("faults: [{fault: kill, target: any, at: round 1}]")
    (parent / "work/.rayignore").write_text("secret.*\n")
    return str(parent / "work")


def environment_of(*, working_dir=None, requirements=(), users=None):
    """Return the runtime environment of a job."""
    return make_runtime_env(
        package=Path("/here/raydl"),
        working_dir=working_dir,
        requirements=requirements,
        stop_grace_s=60,
        submission="s1",
        users=users,
    )


def test_the_runtime_environment_has_raydl_and_time_for_the_last_checkpoint():
    env = environment_of()
    assert env["py_modules"] == ["/here/raydl"]
    assert env["env_vars"] == {
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
        "RAY_SCHEDULER_EVENTS": "0",
        "RAYDL_SUBMISSION": "s1",
    }
    assert not {"working_dir", "pip"} & set(env)
    env = environment_of(working_dir=".", requirements=["tyro"])
    assert (env["working_dir"], env["pip"]) == (".", {"packages": ["tyro"]})


def test_the_users_file_adds_packages_and_variables_to_the_jobs_environment(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("pip: [transformers]\nenv_vars: {HF_HUB_OFFLINE: '1'}\n")
    env = environment_of(requirements=["tyro"], users=read_runtime_env(str(path)))
    assert env["pip"] == {"packages": ["tyro", "transformers"]}
    assert env["py_modules"] == ["/here/raydl"]
    assert env["env_vars"]["HF_HUB_OFFLINE"] == "1"
    assert env["env_vars"]["RAYDL_SUBMISSION"] == "s1"


def test_the_users_packages_are_installed_without_those_of_raydl_too(tmp_path):
    path = tmp_path / "job.json"
    path.write_text('{"pip": {"packages": ["transformers"], "pip_check": false}}')
    env = environment_of(users=read_runtime_env(str(path)))
    assert env["pip"] == {"packages": ["transformers"], "pip_check": False}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("pip: [", "is no YAML or JSON"),
        ("- pip", "must have fields by name"),
        ("working_dir: .", "has working_dir; pass it as --working-dir"),
        ("py_modules: [mine]", "has py_modules; put the code into the folder of --working-dir"),
        ("excludes: [data]", "has excludes; list the files in .rayignore"),
        ("env_vars: {RAY_JOB_STOP_WAIT_TIME_S: '9'}", "pass it as --stop-grace-s"),
        ("pip: ['--extra-index-url https://me:secret@host/simple']", "a URI with credentials"),
        ("pip: requirements.txt", "must list packages, as in pip: [transformers]"),
        ("pip: {pip_check: true}", "must list packages"),
        ("env_vars: [A=1]", "must have env_vars by name"),
        ("env_vars: {A: 1}", 'must have a text for A, as in A: "1"'),
        ("env_vars: {URI: 's3://key:secret@bucket'}", "has a URI with credentials"),
    ],
)
def test_an_environment_that_a_job_cannot_have_is_refused(tmp_path, capsys, text, sentence):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    error = error_of(capsys, "--runtime-env", str(path), "--", "--data", "digits")
    assert error.startswith(f"submit.runtime_env: {path} ")
    assert sentence in error
    assert "secret" not in error


def test_an_environment_that_is_not_there_is_refused(tmp_path, capsys):
    error = error_of(capsys, "--runtime-env", str(tmp_path / "none"), "--", "--data", "digits")
    assert error.endswith("cannot be read: No such file or directory")


def test_ray_itself_and_extras_are_not_installed_for_a_job():
    requirements = ["numpy>=1.26", "ray[default]>=2.60", "tyro", 'mutmut>=3.8; extra == "mutants"']
    assert without_ray(requirements) == ["numpy>=1.26", "tyro"]


def test_tests_docs_runs_and_the_history_are_not_uploaded_but_the_digits_are(root):
    sizes, limit = ray_session.folder_sizes(ray_session.uploaded_files(str(root), list(EXCLUDES)))
    assert {"raydl", "jobs", "pyproject.toml"} <= set(sizes)
    assert not {".git", ".venv", "tests", "docs", "runs", "raydl.egg-info"} & set(sizes)
    assert sum(sizes.values()) < 5 * 2**20 < limit


def test_all_of_raydl_is_uploaded(root):
    package = root / "raydl"
    sizes, _ = ray_session.folder_sizes(ray_session.uploaded_files(str(package), list(EXCLUDES)))
    files = [p for p in package.rglob("*") if p.is_file() and p.suffix != ".pyc"]
    assert sum(sizes.values()) == sum(p.stat().st_size for p in files)


def test_a_fresh_clone_uploads_little_with_ray_job_submit(root):
    sizes, _ = ray_session.folder_sizes(ray_session.uploaded_files(str(root), []))
    assert not {".git", ".venv", "tests", "runs"} & set(sizes)
    assert sum(sizes.values()) < 5 * 2**20


def test_the_texts_that_a_job_learns_from_are_uploaded_by_ray_job_submit(root):
    [texts] = re.findall(r'"text:(.+)"', (root / "jobs/language_model.py").read_text())
    uploaded = ray_session.uploaded_files(str(root), [])
    assert {path for path in uploaded if path.parts[0] == "docs"} == {
        path.relative_to(root) for path in root.glob(texts)
    }


def test_a_folder_that_is_too_large_for_ray_is_refused_with_its_largest_entries(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "film.bin").open("wb") as file:
        file.truncate(600 * 2**20)  # sparse
    sentence = error_of(capsys, "--working-dir", ".", "--", "--epochs", "1")
    assert "600 MiB, but Ray accepts less than 100 MiB" in sentence
    assert sentence.endswith("film.bin (600 MiB)")
    (tmp_path / ".rayignore").write_text("*.bin\n")
    submitting._check_size(".", ray_session.uploaded_files(".", list(EXCLUDES)))


# mistakes


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--", "--beta", "1.8"], "method.beta must be in (0, 1]"),
        (["--", "--workers", "0"], "scaling.num_workers must be 1 or more in a job"),
        (["--epochs", "2"], "raydl submit has no option --epochs; the options of raydl train come"),
        (["--retries", "-1"], "submit.retries must be 0 or more, got -1"),
        (["--retries", "1", "--no-follow"], "submit.retries needs a job that is submitted here"),
        (
            ["--run-name", "a/b"],
            "submit.run_name must be a name of letters, digits, _ . and - that ",
        ),
        (["--run-name", ""], "submit.run_name must be a name"),
        (["--run-name", ".."], "submit.run_name must be a name"),
        (["--run-name", "a b"], "submit.run_name must be a name"),
        (["--", "--run-dir", ""], "run.run_dir must be the name of a folder"),
        (["--", "--run-dir", "."], "the last part of run.run_dir must be a name"),
        (["--", "--run-dir", "/"], "the last part of run.run_dir must be a name"),
        (["--", "--run-dir", "/shared/.."], "the last part of run.run_dir must be a name"),
        (["--", "--run-dir", "s3://b/a"], "run.run_dir must be a folder, got s3://b/a; give a URI"),
        (["--follow", "x", "--", "--epochs", "1"], "submit.follow submits nothing"),
        (["--follow", "x", "--no-follow"], "submit.follow and submit.no_follow exclude each other"),
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
            "run.name must be the last part of run.run_dir, got a and b; give one of them",
        ),
        (
            ["--run-name", "a", "--", "--name", "b"],
            "submit.run_name and run.name exclude each other; give one",
        ),
        (["--", "--resume"], "run.resume needs run.name or run.run_dir"),
        (["--", "--name", "a/b"], "run.name must be a name of letters"),
        (
            ["--working-dir", "no/such"],
            "submit.working_dir must be a folder of this machine, got no/such",
        ),
        (["--wait-s", "0"], "submit.wait_s must be a positive number, got 0"),
    ],
)
def test_a_mistake_is_reported_before_a_cluster_is_contacted(capsys, arguments, sentence):
    assert error_of(capsys, *arguments).startswith(sentence)


def test_a_run_name_makes_resume_possible():
    options = submitting._SubmitOptions(run_name="digits")
    plan = submitting._plan(options, ["--resume"])
    assert plan.options == '--resume --run-dir "$HOME"/raydl-runs/digits'


def test_a_submitted_run_accepts_every_option_of_a_run():
    assert COMMANDS["submit"] is submitting.submit
    for low, high in itertools.pairwise((1, 2, 8)):
        plan = plan_of("--workers", f"{low}:{high}")
        assert f"--workers {low}:{high}" in plan.command(again=True)
    assert isinstance(parse_train(["--workers", "1:2"]), TrainConfig)
