"""Submits a run as a Ray job, and resubmits it after a loss. Does not import Ray.

Ray starts the driver of a job once. If the head node is lost or the driver is killed, the actors
end, too. The submitter must then submit the job again, with ``--resume`` to continue from the
newest checkpoint. This module decides and waits; ``raydl.ray_backend.job_client`` calls the
cluster, behind the protocol ``Jobs``.
"""

from __future__ import annotations

import os
import re
import shlex
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from raydl.config import TrainConfig, dotted, to_dict
from raydl.config.checks import require_name
from raydl.config.custom_code import hugging_face_folder
from raydl.config.run import RUNS
from raydl.errors import ConfigError, RaydlError, StalledError
from raydl.ray_backend.job_end import RUNNING, SILENT, UNKNOWN, Fate, JobState, judge
from raydl.text.redaction import has_credentials

EXCLUDES = (
    "/.git", "/.ci", "/.venv", "/venv", "/runs/*/*", "/tests", "/docs", "/benchmarks", "/build",
    "/dist", "__pycache__", "*.pyc", "*.egg-info", ".*_cache", ".hypothesis", ".ipynb_checkpoints",
)  # fmt: skip
"""Files that are not uploaded, as .gitignore patterns; .gitignore and .rayignore may add others.

Ray applies them to raydl's own folder as well: they must not match a file of it.
"""
HOME_RUNS = "raydl-runs"
"""The folder in the home of the head node for runs without another place."""
_STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
_NOT_IN_FILE = {
    "working_dir": "pass it as --working-dir",
    "py_modules": "put the code into the folder of --working-dir",
    "excludes": "list the files in .rayignore",  # Ray applies them to raydl's own folder, too
}
"""Fields of a runtime environment that a user's file cannot have, and what to do instead."""
_POLL_S = 1.0
_LOG_CHARS_PER_S = 1_000_000
_RETRY_AFTER_S = 5.0


# the command


@dataclass(frozen=True)
class Plan:
    """A run to submit: its folder, and the command that the cluster runs."""

    name: str
    place: str
    """The run's folder, as a user of the cluster would write it."""
    options: str
    """The options of ``raydl train``, quoted for a shell."""
    is_named: bool = False
    """Whether the user named the run, so that the same command finds it again."""
    python: str = "python"
    """The Python interpreter of the cluster."""

    def command(self, *, again: bool = False) -> str:
        """Return the entry point of the job.

        Args:
            again: resume after a lost job.
        """
        module = "raydl.cli.resume_job" if again else "raydl train"
        # exec: without a shell in between, the driver's exit status is that of the job.
        return f"exec {shlex.quote(self.python)} -m {module} {self.options}"

    @property
    def how_to_continue(self) -> str:
        """How to resume the run, for the user."""
        name = "" if self.is_named else f"--run-name {self.name} and "
        return f"the same command with {name}--resume"


def plan_run(
    words: Sequence[str], config: TrainConfig, *, message_id: str, python: str = "python"
) -> Plan:
    """Return the plan of a run that a later job finds again, by its name and place.

    Args:
        words: the options of ``raydl train``.
        config: the settings that they give.
        message_id: makes the name of the run unique if the options do not name it.
        python: the Python interpreter of the cluster.

    Raises:
        ConfigError: the name of the run is not valid, or its place depends on the working folder.
    """
    from raydl.storage import below  # imports PyArrow, which delays --help

    run = config.run
    if run.storage_path is not None and not _is_absolute(run.storage_path):
        raise ConfigError(
            "run.storage_path",
            f"must be an absolute path or a URI, got {run.storage_path}: a later job would not "
            f"find it",
        )
    name = _ascii(f"{config.method.name}-{config.model}-{message_id}")
    if run.folder is not None:
        name = PurePosixPath(run.folder).name
        require_name("the last part of run.run_dir", name)
    if run.storage_path is not None:
        place, folder = below(run.storage_path, name), shlex.quote(f"{RUNS}/{name}")
    elif run.run_dir is not None and _is_absolute(run.run_dir):
        place, folder = run.run_dir, shlex.quote(run.run_dir)
    else:  # only the shell that starts the driver knows the home of the head node
        place, folder = f"~/{HOME_RUNS}/{name}", f'"$HOME"/{shlex.quote(f"{HOME_RUNS}/{name}")}'
    options = f"{shlex.join(words)} --run-dir {folder}".lstrip()
    return Plan(name, place, options, run.folder is not None, python)


def _ascii(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", ".", name)


def _is_absolute(place: str) -> bool:
    """Whether a path or URI names the same place for every job."""
    return "://" in place or place.startswith("/")


def check_credentials(words: Sequence[str], config: TrainConfig) -> None:
    """Refuse options with credentials: everybody can read the command of a job.

    Ray stores it; its dashboard and ``ray job list`` show it, like the environment variables.

    Args:
        words: the options of ``raydl train``.
        config: the settings that they give.

    Raises:
        ConfigError: a URI has credentials; the message says how to give them to the job.
    """
    if not has_credentials(list(words)):
        return
    settings = dotted(to_dict(config)).items()
    setting = next((name for name, value in settings if has_credentials(value)), "submit")
    raise ConfigError(
        setting,
        "has credentials in its URI, and a job's command is shown in Ray's dashboard and by ray "
        "job list; leave them out of the URI and give them to the cluster: as a role of its "
        "machines, or in the environment in which its nodes run ray start (AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY, …)",
    )


def check_what_travels(
    config: TrainConfig, *, here: Path, uploaded: Collection[Path] | None = None
) -> None:
    """Refuse options that name something in a folder of this machine that the job will not have.

    Args:
        config: the settings of a run.
        here: its working folder; without one, the folder from which it is submitted.
        uploaded: the files of the working folder that are uploaded, by their paths in it; None: the
            run has no working folder.

    Raises:
        ConfigError: a setting names such a file, folder or module.
    """
    is_of_library = config.model.startswith(("hf:", "torchvision:"))
    code = {
        "method.name": config.method.name,
        "task": config.task,
        "model": "" if is_of_library else config.model,
        "optimizer.name": config.optimizer.name or "",
        "optimizer.lr_schedule": config.optimizer.lr_schedule,
    }
    files = {
        "model": hugging_face_folder(config.model),
        "run.fault_plan": config.run.fault_plan,
        "data": _path_of_data(config.data),
    }
    travels = {path for file in uploaded or () for path in (file, *file.parents)}

    def is_left(paths: Sequence[Path]) -> bool:
        return any(Path(os.path.relpath(path, here)) not in travels for path in paths)

    found = [(setting, name) for setting, name in code.items() if is_left(_code_in(here, name))]
    found += [
        (setting, path)
        for setting, path in files.items()
        if path and not _is_absolute(path) and is_left(_paths_in(here, path))
    ]
    if not found:
        return
    setting, value = found[0]
    if uploaded is None:
        raise ConfigError(
            setting,
            f": {value} is in this folder, which the job does not have; add --working-dir . "
            f"(before the --) to upload the folder, or name a place that all nodes can access",
        )
    raise ConfigError(
        setting,
        f": {value} is not uploaded: it is outside {here}, or raydl submit, .gitignore or "
        f".rayignore leaves it out; move it within this folder, or name a place that all nodes can "
        f"access",
    )


def _path_of_data(source: str) -> str | None:
    """Return the path that a source of data names; None: raydl brings the data itself."""
    is_bundled = source == "digits" or source.partition(":")[0] == "synthetic"
    return None if is_bundled else source.removeprefix("text:")


def _paths_in(here: Path, path: str) -> list[Path]:
    """Return what a folder has of this path: one file or folder, or those that match it."""
    if (here / path).exists():
        return [here / path]
    return list(here.glob(path)) if "*" in path else []


def _code_in(here: Path, name: str) -> list[Path]:
    """Return the file or folder of the module of ``module:name``, if it lies in a folder."""
    module, mark, _ = name.partition(":")
    if not mark:
        return []
    path = here / module.replace(".", "/")
    file = path.with_name(f"{path.name}.py")
    return [file] if file.exists() else [path] if path.is_dir() else []


def read_runtime_env(path: str) -> dict[str, Any]:
    """Return the user's part of a job's runtime environment, with ``pip`` as a dict if present.

    Args:
        path: a YAML or JSON file, as for ``ray job submit --runtime-env``.

    Raises:
        ConfigError: it cannot be read, is not a mapping, has a field that is an option of
            ``raydl submit``, or a URI with credentials.
    """
    import yaml  # not at the top: only a job with such a file needs it

    setting = "submit.runtime_env"
    try:
        env = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(setting, f": {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(setting, f": {path} is no YAML or JSON: {problem}") from error
    if not isinstance(env, dict):
        raise ConfigError(setting, f": {path} must have fields by name, as in pip: [transformers]")
    for field, instead in _NOT_IN_FILE.items():
        if field in env:
            raise ConfigError(setting, f": {path} has {field}; {instead}")
    if has_credentials(env):
        raise ConfigError(
            setting,
            f": {path} has a URI with credentials, and Ray's dashboard shows it; give it to the "
            "cluster: in the environment in which its nodes run ray start, or in pip.conf",
        )
    _check_variables(env.get("env_vars", {}), path)
    if "pip" in env:
        pip = {"packages": env["pip"]} if isinstance(env["pip"], list) else env["pip"]
        if not isinstance(pip, dict) or not isinstance(pip.get("packages"), list):
            raise ConfigError(setting, f": {path} must list packages, as in pip: [transformers]")
        env["pip"] = pip
    return env


def _check_variables(variables: Any, path: str) -> None:
    """Raise a ConfigError unless these are environment variables that everybody may see."""
    setting = "submit.runtime_env"
    if not isinstance(variables, dict):
        raise ConfigError(
            setting, f': {path} must have env_vars by name, as in env_vars: {{A: "1"}}'
        )
    for name, value in variables.items():
        if not isinstance(value, str):
            raise ConfigError(setting, f': {path} must have a text for {name}, as in {name}: "1"')
    if _STOP_WAIT in variables:
        raise ConfigError(setting, f": {path} has {_STOP_WAIT}; pass it as --stop-grace-s")


def make_runtime_env(
    *,
    package: Path,
    working_dir: str | None,
    requirements: Sequence[str],
    stop_grace_s: int,
    submission: str,
    users: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the Ray runtime environment of a run's job.

    Args:
        package: raydl's own folder; it is uploaded, so that the cluster runs the same code.
        working_dir: a folder of the user to upload.
        requirements: packages that Ray installs on every node before the job.
        stop_grace_s: seconds that ``ray job stop`` waits for the last checkpoint.
        submission: an id that all attempts of this run share, and no other job has.
        users: the user's part, as ``read_runtime_env`` returns it.
    """
    from raydl.run.folder import SUBMISSION  # imports PyArrow

    users = users or {}
    env: dict[str, Any] = {
        **users,
        "py_modules": [str(package)],
        "excludes": list(EXCLUDES),
        "env_vars": {
            # For the job's supervisor, which runs in this environment. Ray's default is 3 s.
            _STOP_WAIT: str(stop_grace_s),
            # Keeps the autoscaler's messages out of the run's log; ray status shows them.
            "RAY_SCHEDULER_EVENTS": "0",
            **users.get("env_vars", {}),
            SUBMISSION: submission,
        },
    }
    if working_dir is not None:
        env["working_dir"] = working_dir
    if requirements:
        pip = users.get("pip", {})
        env["pip"] = {**pip, "packages": [*requirements, *pip.get("packages", [])]}
    return env


def without_ray(requirements: Sequence[str]) -> list[str]:
    """Return a package's requirements for Ray to install: without extras, and without Ray."""
    plain = [r for r in requirements if "extra ==" not in r]
    return [r for r in plain if re.split(r"[^\w-]", r, maxsplit=1)[0].lower() != "ray"]


# submitting it


class Jobs(Protocol):
    """The jobs of a cluster. No call raises an error because the cluster does not answer."""

    def submit(self, job_id: str, command: str) -> str | None:
        """Submit a job, unless the cluster has it.

        Returns:
            None once the cluster has accepted it; else the cluster's reason why it has not yet,
            or an empty text if the cluster did not answer.

        Raises:
            RaydlError: the cluster rejected the job.
        """

    def look(self, job_id: str) -> JobState:
        """Return the state of a job; its message is the reason if the cluster is not ready."""

    def log(self, job_id: str) -> str | None:
        """Return all output of a job, or None if it cannot be read now."""


@dataclass
class Submitter:
    """Submits a run as a job, follows it, and resubmits it if its driver is lost.

    Args:
        jobs: the cluster.
        plan: the run.
        retries: limit of resubmissions.
        wait_s: seconds to wait for a cluster that does not answer.
        say: receives each message for the user.
        write: receives the output of the job.
        clock: the time in seconds, from any origin.
        sleep: waits for a number of seconds.
    """

    jobs: Jobs
    plan: Plan
    retries: int = 0
    wait_s: float = 300.0
    say: Callable[[str], None] = print
    write: Callable[[str], None] = print
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    job_id: str = ""
    """The id of the newest job that the cluster has accepted; empty while there is none."""
    sending: str = ""
    """The id of a job that the cluster may have accepted."""

    def run(self) -> int:
        """Submit, follow to the end, and return the exit status.

        Raises:
            RaydlError: the cluster rejected the job, or did not answer for too long.
        """
        self.send()
        for left in range(self.retries - 1, -1, -1):
            fate, _, why = judge(state := self.follow(self.job_id))
            if fate is not Fate.LOST:
                return self._end(state)
            self.say(
                f"{self.job_id}: {why}; resubmitting it, to resume from its newest checkpoint "
                f"(retries left: {left})"
            )
            self.job_id = ""  # a Ctrl-C before the next submission leaves no job behind
            self.sleep(_RETRY_AFTER_S)
            self.send(again=True)
        return self._end(self.follow(self.job_id))

    def follow_only(self, job_id: str) -> int:
        """Follow a job that was submitted before, and return its exit status.

        Raises:
            RaydlError: the cluster does not know it, or did not answer for too long.
        """
        self.job_id = job_id
        state = self.follow(job_id)
        if state.status == UNKNOWN:
            raise RaydlError(f"the cluster has no job {job_id}; ray job list shows its jobs")
        return self._end(state)

    def send(self, *, again: bool = False) -> None:
        """Submit the run, waiting for a cluster that does not answer.

        Args:
            again: resume after a lost job.

        Raises:
            RaydlError: the cluster rejected the job, or did not answer for too long.
        """
        job_id = f"{_ascii(self.plan.name)}-{uuid.uuid4().hex[:6]}"
        outage = _Outage(self, self.plan.how_to_continue if again else "the same command")
        self.sending = job_id
        while (why := self.jobs.submit(job_id, self.plan.command(again=again))) is not None:
            outage.note(why)
            self.sleep(_POLL_S)
        self.job_id, self.sending = job_id, ""
        self.say(f"{job_id}: submitted; the run is kept in {self.plan.place}")

    def follow(self, job_id: str) -> JobState:
        """Write the output of a job until it ends, and return its last state.

        Raises:
            RaydlError: the cluster did not answer for too long.
        """
        num_shown, outage = 0, _Outage(self, f"raydl submit --follow {job_id}")
        while True:
            state = self.jobs.look(job_id)  # before its log, so that the last log is complete
            log = None if state.status in (SILENT, UNKNOWN) else self.jobs.log(job_id)
            if log is not None and len(log) > num_shown:
                self.write(log[num_shown:])
                num_shown = len(log)
            if state.status == SILENT:
                outage.note(state.message)
            elif state.status not in RUNNING:
                return state
            else:
                outage.end()
            # Ray returns only whole logs: poll a long one less often.
            self.sleep(max(_POLL_S, num_shown / _LOG_CHARS_PER_S))

    def _end(self, state: JobState) -> int:
        fate, status, why = judge(state)
        can_resume = self.plan.options and fate in (Fate.STOPPED, Fate.LOST)
        hint = f"; to resume: {self.plan.how_to_continue}" if can_resume else ""
        self.say(f"{self.job_id}: {why}{hint}")
        return status


class _Outage:
    """The time, with a limit, for which a cluster has not answered or has not been ready."""

    def __init__(self, submitter: Submitter, how_to_continue: str) -> None:
        self._submitter, self._how_to_continue = submitter, how_to_continue
        self._since: float | None = None

    def note(self, why: str) -> None:
        """Note that a call failed.

        Args:
            why: the cluster's reason, or an empty text if it did not answer.

        Raises:
            StalledError: the outage has exceeded the limit.
        """
        submitter = self._submitter
        limit = f"{submitter.wait_s:.0f} s"
        if self._since is None:
            self._since = submitter.clock()
            problem = f"is not ready: {why}" if why else "does not answer"
            submitter.say(f"the cluster {problem}; waiting up to {limit}")
        if submitter.clock() - self._since > submitter.wait_s:
            problem = f"was not ready for {limit}: {why}" if why else f"did not answer for {limit}"
            raise StalledError(
                f"the cluster {problem}; raise --wait-s, or continue once it is "
                f"{'ready' if why else 'back'}: {self._how_to_continue}"
            )

    def end(self) -> None:
        """Note that the cluster answers."""
        if self._since is not None:
            self._submitter.say("the cluster answers again")
        self._since = None
