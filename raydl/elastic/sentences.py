"""What the log says of a fact. Nothing reads these sentences back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raydl.core import worker_group as group
from raydl.core.compression import LostResidual
from raydl.elastic import facts
from raydl.elastic.scaling_policy import DRAINS

_LOGGED_SCORES = 20
"""Lost scores in a row that are logged one by one; after them, every tenth is logged."""


def sentence(fact: Any, *, num_lost_scores: int = 0, max_rollbacks: int = 0) -> str:
    """Return the log's sentence of a fact, or "" if it has none.

    Args:
        fact: an event or an action.
        num_lost_scores: scores that were lost in a row, with this one.
        max_rollbacks: rollbacks that an epoch may have.
    """
    match fact:
        case group.GaveUp():
            return _given_up(fact, num_lost_scores)
        case facts.RollBack():
            return _rolled_back(fact, max_rollbacks) if fact.is_allowed else ""
    say = _SENTENCES.get(type(fact))
    return say(fact) if say else ""


def _given_up(e: group.GaveUp, number: int) -> str:
    match e.task:
        case "checkpoint":
            return f"a checkpoint was abandoned: {e.reason}"
        case "saved state":
            return f"{e.worker_id} starts from the center: {e.reason}"
        case "evaluation" if number == 1:
            return f"an evaluation was abandoned: {e.reason}"
        case "evaluation" if number <= _LOGGED_SCORES or number % 10 == 0:
            return f"an evaluation was abandoned, {number} in a row: {e.reason}"
    return ""


def _rolled_back(a: facts.RollBack, limit: int) -> str:
    what = f"{a.name} is rolled back to the center"
    if a.name == "center":
        what = "all workers are rolled back to the newest good center"
    return f"{a.problem}; {what} (rollback {a.number} of {limit} in this epoch)"


def _rebuilt(a: facts.Rebuild) -> str:
    if a.is_adopting:
        return "the center restarts and will adopt the workers' copy"
    if not a.source:
        return "the center restarts from the newest checkpoint, or from where this run began"
    return f"the center is rebuilt from the last copy of {a.source}, of round {a.round}"


def _stays(a: facts.Stay) -> str:
    return (
        f"{a.worker_id} {DRAINS}; it trains on until its replacement is ready, for "
        f"{a.stay_s:.0f} s at most"
    )


def _lost(e: group.Lost | facts.End) -> str:
    if isinstance(e, group.Lost):
        return f"{e.name} was lost: {e.reason}"
    return f"{e.worker_id} was lost: {e.why}" if e.is_loss else ""


def _broke(a: facts.Drop | facts.Blame) -> str:
    return f"{a.worker_id} left its exchange: {a.problem}" if a.problem else ""


def _went_back(a: facts.GoOnFrom) -> str:
    if a.round >= a.instead_of:
        return ""
    return f"no worker has the center of round {a.instead_of}: continuing from round {a.round}"


def _stopping(a: facts.Stopping) -> str:
    return f"{a.why}: stopping after this round, with a checkpoint"


_SENTENCES: dict[type, Callable[[Any], str]] = {
    group.Lost: _lost,
    group.StatesLost: lambda e: f"a checkpoint was abandoned: {e.reason}",
    facts.Cut: lambda e: e.why,
    facts.FaultFired: lambda e: e.sentence,
    facts.End: _lost,
    facts.Release: lambda a: f"{a.worker_id} {a.why}",
    facts.Stay: _stays,
    facts.FewerPlaces: lambda a: a.why,
    facts.Avoid: lambda a: f"no further worker is started on node {a.node[:12]}: {a.why}",
    facts.Drop: _broke,
    facts.Blame: _broke,
    facts.NoHandIn: lambda a: f"the replica of {a.worker_id} is not handed over: {a.why}",
    facts.NoHandOver: lambda a: f"{a.worker_id} starts from the center: {a.why}",
    facts.ResidualLost: lambda a: LostResidual(a.norm, a.why).sentence(a.worker_id),
    facts.Form: lambda a: f"generation {a.membership.generation}: {a.why}",
    facts.Change: lambda a: f"generation {a.membership.generation}: {a.why}",
    facts.Rebuild: _rebuilt,
    facts.GoOnFrom: _went_back,
    facts.Await: lambda a: a.why,
    facts.Enter: lambda a: a.why,
    facts.Stopping: _stopping,
}


def busy(e: group.Busy, max_busy_s: float) -> str:
    """Return the log's sentence of a process that is busy, and is not lost yet."""
    return (
        f"{e.name} has not answered for {e.silent_s:.0f} s but is busy: a long call may hold the "
        f"interpreter lock, or a large state is being sent; it counts as lost after "
        f"{max_busy_s:g} s (elastic.max_busy_s)"
    )


def removed(
    worker_id: str, *, is_spare: bool, is_idle: bool, fewest: int, is_replaced: bool
) -> str:
    """Return the answer to the user who has removed a worker.

    Args:
        worker_id: the worker.
        is_spare: whether the run has a spare less.
        is_idle: whether it was not training.
        fewest: the fewest workers of the run.
        is_replaced: whether it is replaced, since the run has no more than these.
    """
    if is_spare:
        return f"{worker_id} was ended; it was a spare"
    how = "was ended; it was not training" if is_idle else "leaves after its next exchange"
    then = f"; it is replaced, since at least {fewest} must train" if is_replaced else ""
    return f"{worker_id} {how}{then}"
