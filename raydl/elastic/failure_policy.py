"""What follows a failure: a lost worker, an error in one, a step without end, a divergence.

Each rule reads the state and yields actions. A lost worker is replaced while losses in a row stay
within a budget; one that raised an error, as the settings say; a diverged replica restarts from the
center. What cannot be mended stops the run after a last checkpoint (``Halt``), or at once, if no
checkpoint can follow (``Fail``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from raydl.core.worker_group import Failed, Lost
from raydl.elastic import facts
from raydl.elastic.limits import Limits
from raydl.elastic.run_state import State
from raydl.elastic.scaling_policy import end, fill, forget
from raydl.elastic.state import Phase, RunState, Worker
from raydl.errors import (
    InfrastructureError,
    NonFiniteCenterError,
    NonFiniteError,
    in_one_line,
)

Actions = Iterator[Any]
_STUCK_STEPS = 20
"""A worker whose step takes longer than this many of its usual steps is stuck."""
SILENT_S = 1.0
"""Age in seconds from which a report no longer counts: the worker may have stopped waiting."""

# Losses


def replace_lost(s: RunState, p: Limits, e: Lost, w: Worker) -> Actions:
    """Replace a lost worker, while losses in a row stay within the budget.

    Args:
        s: the state, without the worker.
        p: the limits.
        e: the loss.
        w: the worker.
    """
    yield from _replace(s, p, w, e.reason)


def _replace(s: RunState, p: Limits, w: Worker, why: str, *, origin: str = "") -> Actions:
    """Replace a worker that has been counted as lost, and is gone.

    Args:
        s: the state, without the worker.
        p: the limits.
        w: the worker.
        why: the reason.
        origin: the first worker in its chain of replacements, if its errors are inherited.
    """
    yield from check_losses(s, p, w.worker_id, why)
    yield from forget(s, p, w, "was lost")
    yield from fill(s, [(w.is_spare, origin)] if origin else [])


def check_losses(s: RunState, p: Limits, name: str, why: str) -> Actions:
    """End the run if there were too many losses without progress of the training."""
    if s.budgets.losses > p.elastic.max_restarts:
        yield facts.Fail(
            "lost",
            name,
            f"{why}; this is loss {s.budgets.losses} in a row without training progress, more than "
            f"elastic.max_restarts allows",
        )


def end_stuck(s: RunState, p: Limits, now: float) -> Actions:
    """End the workers that are stuck in a step, and replace them.

    A worker that answers is alive, however long its step takes: a read from a file server may
    stall, which a replacement would only repeat. So a limit of its own decides, not the lease.
    While a worker uses CPU time only ``elastic.max_busy_s`` limits its step: a single step may be
    long.
    """
    shortest_s = min(p.elastic.max_step_s, p.exchange_s)
    for w in [w for w in s.workers.values() if w.in_loop and now - w.moved_at > shortest_s]:
        if now - w.reported_at > SILENT_S:  # its lease decides
            continue
        step_s = now - w.moved_at
        idle_s, longest_s = min(step_s, now - w.busy_at), _longest_step_s(w, p)
        if idle_s > longest_s or step_s > max(longest_s, p.elastic.max_busy_s):
            why = (
                f"it is stuck: one step has taken {step_s:.0f} s (elastic.max_step_s, or "
                f"elastic.max_busy_s while it computes)"
            )
            yield facts.End(w.worker_id, why, is_loss=True)
            yield from _replace(s, p, w, why)


def _longest_step_s(w: Worker, p: Limits) -> float:
    """Return the longest time without progress of a worker that uses no CPU, in seconds."""
    usual_s = w.report.step_s if w.report else 0.0
    if w.report is None or w.report.generation < w.generation:
        # It waits for its group to form, which ends by its own time-out.
        return max(_STUCK_STEPS * usual_s, p.exchange_s + p.elastic.lease_s)
    limit_s = max(p.elastic.max_step_s, _STUCK_STEPS * usual_s)
    if w.report.is_starting or not usual_s:
        return max(limit_s, p.exchange_s)
    return limit_s


# Errors


def answer_error(s: RunState, p: Limits, e: Failed, now: float) -> Actions:
    """Replace a worker that raised an error, or stop the run after a checkpoint.

    The run ends at once if no checkpoint can follow: before the first generation, after an error
    in the center, and if the last checkpoint itself fails.
    """
    w = s.workers.get(e.name)
    is_needed = w is not None and s.stage not in (State.FINISHING, State.DONE)
    if e.name == "callback":
        why = f"a callback raised {in_one_line(e.error)}"
        # At the end the training is complete: its last states are collected and written first.
        is_end = s.stage is State.FINISHING and s.halt is None
        yield facts.Halt(e.name, why) if is_end else facts.Fail("raised", e.name, why)
    elif s.halt is not None:  # mostly the same mistake in another process
        if e.name == "evaluator":
            return
        if not is_needed or e.name in s.raised:
            yield facts.Fail("raised", s.halt.name, s.halt.why)
            return
        yield facts.Halt(e.name, s.halt.why)
    elif e.name == "center" and isinstance(e.error, NonFiniteError) and s.run is not None:
        yield from roll_back(s, p, e.name, e.error)
        return
    else:
        why = f"{e.name} raised {in_one_line(e.error)}"
        if w is not None:
            why = why_not_replaced(s, p, w, e.error, now)
            if not why:
                yield from _replace_failed(s, p, w, e.error, now)
                return
        if s.run is None or not (is_needed or e.name == "evaluator"):
            yield facts.Fail("raised", e.name, why)
            return
        yield facts.Halt(e.name, why)
    if w is not None and isinstance(e.error, InfrastructureError):  # its state is unusable
        yield from end(s, p, w, "failed")


def why_not_replaced(s: RunState, p: Limits, w: Worker, error: Exception, now: float) -> str:
    """Return why an error in a worker stops the run, or "" if the run goes on without it."""
    policy = p.elastic.on_worker_error
    if p.is_in_process:
        return f"{w.worker_id} raised {in_one_line(error)}"
    if policy == "stop":
        return f"{w.worker_id} failed, and elastic.on_worker_error is stop"
    if policy == "auto" and not isinstance(error, InfrastructureError):
        return f"{w.worker_id} raised {in_one_line(error)}"
    why = _why_over_budget(s, p, w, now)
    return why if not w.is_spare or _is_needed(s, p, w) else ""


def _why_over_budget(s: RunState, p: Limits, w: Worker, now: float) -> str:
    """Return a sentence if a worker and those that it replaces have failed too often, or ""."""
    origin = w.origin or w.worker_id
    number = 1 + sum(other == origin for _, other, _ in s.recent_errors(now))
    if number <= p.elastic.max_worker_errors:
        return ""
    place = "" if origin == w.worker_id else f", which replaces {origin},"
    return (
        f"{w.worker_id}{place} failed for the {ordinal(number)} time within an hour, more often "
        f"than elastic.max_worker_errors"
    )


def _is_needed(s: RunState, p: Limits, w: Worker) -> bool:
    """Whether a worker trains without which too few would be left."""
    num_present = len(s.in_phase(Phase.TRAINING, Phase.READY))
    return w.phase is Phase.TRAINING and num_present <= p.min_workers


def _replace_failed(s: RunState, p: Limits, w: Worker, error: Exception, now: float) -> Actions:
    """Replace a worker that raised an error; its replacement inherits its errors.

    Otherwise a worker that runs out of memory would be replaced forever. A spare with too many
    errors is not replaced, since the run needs none.
    """
    if why := _why_over_budget(s, p, w, now):
        fewer = max(0, s.spares - 1)
        yield facts.FewerPlaces(s.max_workers, fewer, f"{why}; it was a spare and is not replaced")
    why = in_one_line(error)
    yield facts.End(w.worker_id, why, is_loss=True, is_error=True)
    num_on_node = Counter(node for _, _, node in s.budgets.errors)[w.node]
    if w.node and num_on_node > p.elastic.max_worker_errors:
        often = "within an hour its workers had more errors than elastic.max_worker_errors"
        yield facts.Avoid(w.node, often)
    yield from _replace(s, p, w, why, origin=w.origin or w.worker_id)


# Divergence


def roll_back(s: RunState, p: Limits, name: str, error: NonFiniteError) -> Actions:
    """Let a diverged replica restart from the center, at most so often in an epoch.

    If the center itself has diverged, all workers restart from its newest good snapshot. In rounds
    each worker reports that.

    Args:
        s: the state.
        p: the limits.
        name: the worker, or ``center``.
        error: what the process found.
    """
    assert s.run is not None
    is_of_center, budgets = isinstance(error, NonFiniteCenterError), s.budgets
    if is_of_center and s.run.number == budgets.bad_center_in:
        return
    # An epoch that is trained again after a rollback has no budget of its own.
    number = 1 if s.epoch > budgets.rollback_epoch else budgets.rollbacks + 1
    is_never = p.elastic.on_worker_error == "stop"
    is_allowed = number <= p.elastic.max_rollbacks and not is_never
    who = "center" if is_of_center else name
    yield facts.RollBack(who, number, s.epoch, str(error), is_allowed)
    if not is_allowed and s.halt is None:
        often = (
            f" for the {ordinal(number)} time in this epoch, more often than elastic.max_rollbacks"
        )
        diverged = f"{'the center' if is_of_center else name} diverged"
        yield facts.Halt(name, diverged if is_never else diverged + often, is_divergence=True)


def ordinal(number: int) -> str:
    """Return 1 as first, 4 as 4th, 21 as 21st."""
    if number <= 3:
        return ("first", "second", "third")[number - 1]
    is_teen = number % 100 in (11, 12, 13)
    suffix = "th" if is_teen else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
