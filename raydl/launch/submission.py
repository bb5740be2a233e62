"""A run as a Ray job, without Ray: its command, and whether it is sent again.

Ray starts the driver of a job once. If the head's machine goes, or the driver is killed, the
actors go with it; who submitted the job has to submit it again, and ``--resume`` goes on from
the newest checkpoint. This module decides and waits; ``raydl.ray_backend.job_client`` does the
talking, behind the protocol ``Jobs``.
"""

from __future__ import annotations

import re
import shlex
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from raydl.config import TrainConfig, dotted, to_dict
from raydl.config.checks import require
from raydl.errors import ConfigError, RaydlError
from raydl.ray_backend.job_end import RUNNING, SILENT, UNKNOWN, Fate, JobState, judge
from raydl.redaction import has_credentials

EXCLUDES = (
    "/.git", "/.ci", "/.venv", "/venv", "/runs/*/*", "/tests", "/docs", "/benchmarks", "/build",
    "/dist", "__pycache__", "*.pyc", "*.egg-info", ".*_cache", ".hypothesis", ".ipynb_checkpoints",
)  # fmt: skip
"""Files that are not sent, as .gitignore patterns; .gitignore and .rayignore may name more.

Ray applies them to raydl's own folder as well: no file of it may be among them.
"""
HOME_RUNS = "raydl-runs"
"""The folder in the head's home that keeps runs for which no other place was named."""
_EVERY_S = 1.0
_LOG_CHARS_PER_S = 1_000_000
_PAUSE_S = 5.0


# the command


@dataclass(frozen=True)
class Plan:
    """A run to submit: where it is kept, and the command that the cluster runs."""

    name: str
    place: str
    """The run's folder, as a person on the cluster would write it."""
    options: str
    """The options of ``raydl train``, quoted for a shell."""
    is_named: bool = False
    """Whether the user named the run, so that the same command finds it again."""
    python: str = "python"

    def command(self, *, again: bool = False) -> str:
        """Return the entrypoint; ``again``: that of one sent after a lost one."""
        module = "raydl.cli.resume_job" if again else "raydl train"
        # exec: the driver's end is the job's own, with no shell between them.
        return f"exec {shlex.quote(self.python)} -m {module} {self.options}"

    @property
    def how_to_continue(self) -> str:
        """Command that resumes the run."""
        name = "" if self.is_named else f"--run-name {self.name} and "
        return f"the same command with {name}--resume"


def plan_run(
    words: Sequence[str], config: TrainConfig, *, message_id: str, python: str = "python"
) -> Plan:
    """Return the plan of a run that can be found again: by its name, in a place that stays.

    Args:
        words: the options of ``raydl train``.
        config: what they mean.
        message_id: names the run where they do not.
        python: the Python of the cluster.

    Raises:
        ConfigError: the run has no usable name, or the place would not stay.
    """
    from raydl.storage import below  # imports PyArrow, for which --help should not wait

    run = config.run
    if run.storage_path is not None and not _stays(run.storage_path):
        raise ConfigError(
            "run.storage_path",
            f"must be an absolute path or a URI: no later job finds {run.storage_path} again",
        )
    name = _ascii(f"{config.method.name}-{config.model}-{message_id}")
    if run.run_dir is not None:
        name = PurePosixPath(run.run_dir).name
        check_name("the last part of run.run_dir", name)
    if run.storage_path is not None:
        place, folder = below(run.storage_path, name), shlex.quote(f"runs/{name}")
    elif run.run_dir is not None and _stays(run.run_dir):
        place, folder = run.run_dir, shlex.quote(run.run_dir)
    else:  # the shell that starts the driver knows the head's home; we do not
        place, folder = f"~/{HOME_RUNS}/{name}", f'"$HOME"/{shlex.quote(f"{HOME_RUNS}/{name}")}'
    options = f"{shlex.join(words)} --run-dir {folder}".lstrip()
    return Plan(name, place, options, run.run_dir is not None, python)


def check_name(setting: str, name: str) -> None:
    """Refuse a name that is none for a run: it becomes a folder's and a part of the job's id.

    Raises:
        ConfigError: naming what a name may hold.
    """
    wanted = "a name of letters, digits, _ . and -, the first of them no . or -"
    require(re.fullmatch(r"\w[\w.-]*", name) is not None, setting, wanted, repr(name))


def _ascii(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", ".", name)


def _stays(place: str) -> bool:
    """Whether a place is the same for every job."""
    return "://" in place or place.startswith("/")


def check_credentials(words: Sequence[str], config: TrainConfig) -> None:
    """Refuse options with credentials: the command of a job is there for all to read.

    Ray keeps it, and its dashboard and ``ray job list`` show it; the environment variables of a
    job they show as well.

    Args:
        words: the options of ``raydl train``.
        config: what they mean.

    Raises:
        ConfigError: a URI has some; it says how else the job gets them.
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


def check_what_travels(config: TrainConfig, *, here: Path) -> None:
    """Refuse options that name something in this folder, which the cluster would not have.

    Args:
        config: the settings of a run that is submitted without a working folder.
        here: the folder it is submitted from.

    Raises:
        ConfigError: naming what stays behind, and what to add.
    """
    module = config.method.name.partition(":")[0].replace(".", "/")
    is_own_code = ":" in config.method.name and (
        (here / f"{module}.py").exists() or (here / module).is_dir()
    )
    candidates = {
        "method.name": config.method.name if is_own_code else None,
        "run.fault_plan": config.run.fault_plan,
        "data": config.data,
    }
    for setting, value in candidates.items():
        if value and not _stays(value) and (is_own_code or (here / value).exists()):
            raise ConfigError(
                setting,
                f"{value} lies in this folder, which the job does not see; add --working-dir . "
                f"(before the --) to send the folder along, or name a place that all nodes see",
            )


def make_runtime_env(
    *,
    package: Path,
    working_dir: str | None,
    requirements: Sequence[str],
    stop_grace_s: int,
    submission: str,
) -> dict[str, Any]:
    """Return the runtime environment of a run's job, in Ray's words.

    Args:
        package: raydl's own folder, sent along: the cluster trains with this very code.
        working_dir: a folder of the user's to send along.
        requirements: what Ray installs on every node before the job; none: nothing.
        stop_grace_s: how long ``ray job stop`` waits for the last checkpoint.
        submission: an id that all attempts of the run have in common, and no other job has.
    """
    from raydl.run.folder import SUBMISSION  # imports PyArrow

    env: dict[str, Any] = {
        "py_modules": [str(package)],
        "excludes": list(EXCLUDES),
        # Read by the job's supervisor, which runs in this environment. Ray's default is 3 s.
        "env_vars": {
            "RAY_JOB_STOP_WAIT_TIME_S": str(stop_grace_s),
            "RAY_SCHEDULER_EVENTS": "0",  # the log is the run's; ray status has the autoscaler's
            SUBMISSION: submission,
        },
    }
    if working_dir is not None:
        env["working_dir"] = working_dir
    if requirements:
        env["pip"] = list(requirements)
    return env


def without_ray(requirements: Sequence[str]) -> list[str]:
    """Return a package's requirements as Ray may install them: no extras, and not Ray itself."""
    plain = [r for r in requirements if "extra ==" not in r]
    return [r for r in plain if re.split(r"[^\w-]", r, maxsplit=1)[0].lower() != "ray"]


# doing it


class Jobs(Protocol):
    """A cluster's jobs. No call raises because the cluster does not answer."""

    def submit(self, job_id: str, command: str) -> str | None:
        """Submit a job, unless it is there.

        Returns:
            None once the cluster has taken it; else why it has not yet, in its own words, or
            an empty text where it did not answer.

        Raises:
            RaydlError: it will not.
        """
        ...

    def look(self, job_id: str) -> JobState:
        """Return how a job stands; of a cluster that is not ready, why, as the message."""
        ...

    def log(self, job_id: str) -> str | None:
        """Return all that a job has printed; None: it can not be read now."""
        ...


@dataclass
class Submitter:
    """Sends a run as a job, follows it, and sends it again when its driver was lost.

    Args:
        jobs: the cluster.
        plan: the run.
        retries: how often it is sent again at most.
        wait_s: how long a cluster that does not answer is waited for, in seconds.
        say: tells the user a sentence.
        write: passes on what the job prints.
        clock: seconds, rising.
        sleep: waits so many seconds.
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
    """Of the newest job that the cluster has taken; empty while none is under way."""
    sending: str = ""
    """Of a job that the cluster may have taken or not."""

    def run(self) -> int:
        """Submit, follow to the end, and return the exit status.

        Raises:
            RaydlError: the cluster turned the job down, or did not answer for too long.
        """
        self.send()
        for left in range(self.retries - 1, -1, -1):
            fate, _, why = judge(state := self.follow(self.job_id))
            if fate is not Fate.LOST:
                return self._end(state)
            self.say(
                f"{self.job_id}: {why}; sending it again, to go on from its newest checkpoint "
                f"(retries left: {left})"
            )
            self.job_id = ""  # until the next is taken, Ctrl-C leaves nothing behind
            self.sleep(_PAUSE_S)
            self.send(again=True)
        return self._end(self.follow(self.job_id))

    def follow_only(self, job_id: str) -> int:
        """Follow a job that somebody has submitted, and return its exit status.

        Raises:
            RaydlError: the cluster does not know it, or did not answer for too long.
        """
        self.job_id = job_id
        state = self.follow(job_id)
        if state.status == UNKNOWN:
            raise RaydlError(f"the cluster has no job {job_id}; ray job list names those it has")
        return self._end(state)

    def send(self, *, again: bool = False) -> None:
        """Submit the run, waiting for a cluster that does not answer.

        Raises:
            RaydlError: the cluster turned the job down, or did not answer for too long.
        """
        job_id = f"{_ascii(self.plan.name)}-{uuid.uuid4().hex[:6]}"
        silence = _Silence(self, self.plan.how_to_continue if again else "the same command")
        self.sending = job_id
        while (why := self.jobs.submit(job_id, self.plan.command(again=again))) is not None:
            silence.go_on(why)
            self.sleep(_EVERY_S)
        self.job_id, self.sending = job_id, ""
        self.say(f"{job_id}: submitted; the run is kept in {self.plan.place}")

    def follow(self, job_id: str) -> JobState:
        """Pass on what a job prints until it ends, and return its last state.

        Raises:
            RaydlError: the cluster did not answer for too long.
        """
        num_shown, silence = 0, _Silence(self, f"raydl submit --follow {job_id}")
        while True:
            state = self.jobs.look(job_id)  # before its log, so that the last one is whole
            log = None if state.status in (SILENT, UNKNOWN) else self.jobs.log(job_id)
            if log is not None and len(log) > num_shown:
                self.write(log[num_shown:])
                num_shown = len(log)
            if state.status == SILENT:
                silence.go_on(state.message)
            elif state.status not in RUNNING:
                return state
            else:
                silence.end()
            # Ray hands out a log as a whole: a long one is asked for less often.
            self.sleep(max(_EVERY_S, num_shown / _LOG_CHARS_PER_S))

    def _end(self, state: JobState) -> int:
        fate, status, why = judge(state)
        go_on = ""
        if self.plan.options and fate in (Fate.STOPPED, Fate.LOST):
            go_on = f"; to go on: {self.plan.how_to_continue}"
        self.say(f"{self.job_id}: {why}{go_on}")
        return status


class _Silence:
    """The time for which a cluster has not answered, or only that it is not ready; bounded."""

    def __init__(self, submitter: Submitter, how_to_continue: str) -> None:
        self._submitter, self._how_to_go_on = submitter, how_to_continue
        self._since: float | None = None

    def go_on(self, why: str) -> None:
        """Note it once more; ``why`` are the cluster's words, empty where it said nothing."""
        who = self._submitter
        if self._since is None:
            self._since = who.clock()
            now = f"is not ready: {why}" if why else "does not answer"
            who.say(f"the cluster {now}; waiting up to {who.wait_s:.0f} s")
        if who.clock() - self._since > who.wait_s:
            waited = f"{who.wait_s:.0f} s"
            past = f"was not ready for {waited}: {why}" if why else f"did not answer for {waited}"
            raise RaydlError(
                f"the cluster {past}; raise --wait-s, or go on once it is "
                f"{'ready' if why else 'back'}: {self._how_to_go_on}"
            )

    def end(self) -> None:
        """Note that it answers."""
        if self._since is not None:
            self._submitter.say("the cluster answers again")
        self._since = None
