"""The meaning of a Ray job's end for its submitter: done, stopped, failed, or lost."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

from raydl.errors import STOPPED, WORTH_RETRYING

RUNNING = ("PENDING", "RUNNING")
SILENT = "SILENT"
"""The cluster does not answer."""
UNKNOWN = "UNKNOWN"
"""The cluster answers but does not know the job: it was restarted."""

_STOPPED_EXITS = {
    **{status: status for status in STOPPED.values()},
    -signal.SIGHUP: STOPPED["SIGHUP"],
    -signal.SIGINT: STOPPED["SIGINT"],
    -signal.SIGTERM: STOPPED["SIGTERM"],
    signal.SIGTERM: STOPPED["SIGTERM"],  # Ray's own handler exits with the number of the signal
}
"""Exit status of the command, by that of its driver if something stopped that."""
_LOST_ERRORS = (
    "JOB_SUPERVISOR_ACTOR_DIED",
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE",
    "JOB_SUPERVISOR_ACTOR_START_FAILURE",
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT",
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE",
)


@dataclass(frozen=True)
class JobState:
    """The state of a job, as its cluster reports it."""

    status: str
    """Ray's PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED, or else SILENT or UNKNOWN."""
    exit_code: int | None = None
    """Exit status of the driver; below 0: the signal that ended it."""
    error: str = ""
    """Ray's name of the error."""
    message: str = ""


class Fate(enum.Enum):
    """Meaning of a job's end for the command that submitted it."""

    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"
    """By its own error: it would fail again."""
    LOST = "lost"
    """Its driver or its machines were lost: the run can be resumed."""


def judge(state: JobState) -> tuple[Fate, int, str]:
    """Return (meaning of a job's end, exit status for the submitter, reason in a few words)."""
    code, message = state.exit_code, " ".join(state.message.split())[-600:]
    if state.status == "SUCCEEDED":
        return Fate.DONE, 0, "done"
    if state.status == "STOPPED":
        return Fate.STOPPED, STOPPED["SIGTERM"], "it was stopped"
    if state.status == UNKNOWN:
        return Fate.LOST, WORTH_RETRYING, "the cluster was restarted and does not know the job"
    if code in _STOPPED_EXITS:
        return Fate.STOPPED, _STOPPED_EXITS[code], "it was stopped"
    if code is not None and (code < 0 or code > 128):
        return Fate.LOST, WORTH_RETRYING, f"the driver was killed ({_signal_name(code)})"
    if code == WORTH_RETRYING:
        return Fate.LOST, code, f"its machines failed (exit status {code}; see the end of its log)"
    if code is not None:
        return Fate.FAILED, code, f"the driver ended with exit status {code}"
    if state.error in _LOST_ERRORS:
        why = f"{state.error}: {message}" if message else state.error
        return Fate.LOST, WORTH_RETRYING, f"the driver's node or its supervisor was lost ({why})"
    return Fate.FAILED, 1, f"it could not start: {message}"


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code if code < 0 else code - 128).name
    except ValueError:
        return f"exit status {code}"
