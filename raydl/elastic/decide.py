"""All control of a run: what follows an event.

``decide(state, event, now, limits)`` returns facts: the event, if it is news, and then the actions.
It has no clock, no process, no log and no thread, and raises nothing: an error is the action
``Fail``. The same events at the same times give the same facts, and the state is their fold
(``facts.apply``).

A loss, an error, a divergence and a notice are answered at once: the worker is replaced, or the
run stops. Who trains, and from where, is decided at the ``Tick`` that ends a poll, so the loss of a
rack is one new membership. A policy is a generator of actions, each applied before the next is
asked for: it sees the effect of what it has yielded.

    WAITING ──form──> TRAINING ──a worker joins or leaves──> REGROUPING ──all left──┐
       ^                 │  └────a worker is lost or late──> RECOVERING ──all left──┤
       └─────────────────┼─────────────────────────────────────────────────────────┘
                         └──finished or stopped──> FINISHING ──> DONE

In methods with messages, workers join and leave while the others train. The run stays in TRAINING
unless the center is lost or too few workers are left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from raydl.core import worker_group as group
from raydl.core.reports import Outcome
from raydl.elastic import center_policy, facts, failure_policy, membership_policy, scaling_policy
from raydl.elastic.facts import apply
from raydl.elastic.limits import Limits
from raydl.elastic.run_state import State
from raydl.elastic.state import (
    Checkpoints,
    Phase,
    RunState,
    Scores,
    Worker,
    is_part_of_center,
    is_worker_id,
    number_of,
)

Actions = Iterator[Any]
_TELEMETRY = (group.Reported, group.Scoring, facts.EpochsDone)
"""Events that only change what the policies read."""
SILENCE_S = 300.0
"""The longest wait after the last round without progress of the last states or the score, in
seconds."""
MAX_LOST_SCORES = 5
"""Lost scores in a row after which the run ends without a score of its last center."""


def new_state(
    p: Limits,
    now: float,
    *,
    first_round: int = 0,
    is_first_scored: bool = True,
    first_generation: int = 0,
    first_cuts: int = 0,
    saved: tuple[str, ...] = (),
) -> RunState:
    """Return the state at the start of a driver.

    Args:
        p: the limits.
        now: the time, in seconds.
        first_round: the round that the center starts from.
        is_first_scored: whether the center of that round needs no score.
        first_generation: number of the last generation before this start.
        first_cuts: cuts of the learning rate before this start.
        saved: workers with a state in the checkpoint, in the order of their ranks.
    """
    scored = first_round - (not is_first_scored)
    numbers = [number_of(worker_id) for worker_id in saved]
    return RunState(
        is_sync=p.is_sync,
        max_workers=p.max_workers,
        spares=p.spares,
        checkpoints=Checkpoints(now, before=(now, 0, -1)),
        scores=Scores(scored, scored),
        first_round=first_round,
        first_cuts=first_cuts,
        cuts=first_cuts,
        # A later replacement must not get the id and the old state of one that is not resumed.
        next_id=1 + max(numbers, default=-1),
        saved_order=saved[: p.max_workers],
        since=now,
        generation=first_generation,
        round=first_round,
        progress_at=now,
    )


def begin(s: RunState, p: Limits, now: float, *, saved: tuple[str, ...] = ()) -> list[Any]:
    """Return the facts before the first event: the requests of workers."""
    return _taken(s, _first_requests(s, p, saved), now)


def _first_requests(s: RunState, p: Limits, saved: tuple[str, ...]) -> Actions:
    for worker_id in saved[p.max_workers :]:
        if p.may_leave_out:
            yield facts.ResidualLost(worker_id, None, "fewer workers resume")
    for worker_id in s.saved_order:
        yield facts.Start(worker_id)
    yield from scaling_policy.fill(s)


def decide(s: RunState, event: Any, now: float, p: Limits) -> list[Any]:
    """Note an event and return the facts, in order: the event and the actions.

    An event that is not news, since it is late or repeated, changes nothing.
    """
    if not is_news(s, event):
        return _taken(s, _refuse(s, event), now)
    if type(event) in _TELEMETRY:  # nearly all events of a large run
        apply(s, event, now)
        return [event]
    former = s.workers.get(_worker_of(event))
    was_lost = s.center.is_lost
    apply(s, event, now)
    return [event, *_taken(s, _answer(s, p, event, now, former, was_lost=was_lost), now)]


def _taken(s: RunState, actions: Actions, now: float) -> list[Any]:
    """Apply actions one by one, and return them."""
    taken = []
    for action in actions:
        apply(s, action, now)
        taken.append(action)
        if s.failed is not None:  # nothing follows the end
            break
    return taken


def _worker_of(event: Any) -> str:
    """Return the worker that an event is of, or ""."""
    if isinstance(event, group.Reported):
        return event.report.worker_id
    return getattr(event, "worker_id", "") or getattr(event, "name", "")


def is_news(s: RunState, e: Any) -> bool:
    """Whether an event is of now: late and repeated ones are refused here, in one place."""
    if s.stage is State.DONE:
        return False
    w = s.workers.get(_worker_of(e))
    if isinstance(e, group.Reported):
        return w is None or w.report is None or e.report.sent_s >= w.report.sent_s
    match e:
        case group.WorkerReady():
            return w is not None and w.phase is Phase.STARTING
        case facts.Trained():
            return e.num_samples > s.most_trained
        case group.Failed():
            return w is not None or not is_worker_id(e.name)
        case group.RunEnded():
            return w is not None and w.in_loop and e.generation == w.generation
        case group.Draining():
            return w is not None and w.phase is not Phase.LEAVING
        case facts.Remove():
            return w is not None and w.phase is not Phase.LEAVING
        case group.Lost():
            return w is not None or is_part_of_center(e.name)
        case group.Published():
            return _is_new_answer(s, e)
        case group.Changed():
            return ("change", "") in s.waits
        case group.HandedIn():
            return w is not None and bool(w.hands_in)
        case group.TookOver():
            return ("hand over", e.worker_id) in s.waits
        case group.GaveUp("hand in" | "hand over"):
            return (e.task, e.worker_id) in s.waits
        case group.GaveUp("saved state"):
            return w is not None
        case group.Collected():
            k = s.checkpoints
            return k.is_collecting and e.snapshot.progress.round == k.round
        case facts.Stop():
            return not s.stop
        case facts.Unfrozen():
            return not set(e.names) <= set(s.unfrozen)
        case facts.Cut():
            return e.number > s.cuts
        case facts.ResidualLost():
            return e.norm != 0
    return True


def _is_new_answer(s: RunState, e: group.Published) -> bool:
    """Whether an answer of the center is of the present one, in order, and of this generation."""
    c = s.center
    is_former = bool(e.process) and (e.process in c.former or c.is_lost)
    is_late = bool(e.process) and e.process == c.process and e.sent_s < c.sent_s
    formed_as = s.run.formed_as if s.run else 0
    return not (is_former or is_late or 0 < e.generation < formed_as)


def _refuse(s: RunState, e: Any) -> Actions:
    """Delete a replica that comes too late for its newcomer."""
    if isinstance(e, group.HandedIn) and e.worker_id not in s.handed_in:
        yield facts.Forget(e.worker_id)


def _answer(
    s: RunState, p: Limits, e: Any, now: float, former: Worker | None, *, was_lost: bool
) -> Actions:
    """Return the actions that follow an event.

    Args:
        s: the state, with the event.
        p: the limits.
        e: the event.
        now: the time, in seconds.
        former: the worker of the event, which may have removed it.
        was_lost: whether the center was lost before the event.
    """
    match e:
        case facts.Tick():
            yield from tick(s, p, e, now)
        case facts.Trained():
            if s.budgets.losses or s.budgets.next_loss_from:
                yield facts.Progressed(e.num_samples)
        case group.Lost() if former is not None:
            yield from failure_policy.replace_lost(s, p, e, former)
        case group.Lost() if not was_lost:
            yield from failure_policy.check_losses(s, p, e.name, e.reason)
        case group.Failed():
            yield from failure_policy.answer_error(s, p, e, now)
        case group.RunEnded(error=error) if error is not None and s.is_member(e.worker_id):
            yield from failure_policy.roll_back(s, p, e.worker_id, error)
        case group.Draining():
            yield from scaling_policy.drain(s, p, e)
        case facts.Remove():
            yield from scaling_policy.remove(s, p, e.worker_id)
        case group.HandedIn():
            yield from scaling_policy.pass_on(s, e)
        case group.GaveUp():
            yield from scaling_policy.note_given_up(s, p, e)


def tick(s: RunState, p: Limits, e: facts.Tick, now: float) -> Actions:
    """Let the policies decide; their order matters."""
    yield from scaling_policy.hand_over(s, p)
    yield from center_policy.score(s, p)
    yield from failure_policy.end_stuck(s, p, now)
    yield from scaling_policy.release_drained(s, p, now)
    match s.stage:
        case State.WAITING:
            yield from _wait(s, p, e, now)
        case State.TRAINING:
            yield from _train(s, p, now)
        case State.REGROUPING:
            yield from _watch(s, p, now)
        case State.RECOVERING:
            yield from _recover(s, p, now)
        case State.FINISHING:
            yield from _finish(s, p, now)
    if s.stage is not State.FINISHING:
        yield from scaling_policy.end_leavers(s, p, now)


def _watch(s: RunState, p: Limits, now: float) -> Actions:
    if s.is_sync:
        yield from membership_policy.watch_rounds(s, p, now)
    else:
        yield from membership_policy.watch_messages(s, p, now)


def _wait(s: RunState, p: Limits, e: facts.Tick, now: float) -> Actions:
    """Wait for the center and for workers, then form a generation."""
    if s.why_stop:
        end = membership_policy.finish(s, is_stop=True)
        if s.run is None:
            why = f"{s.why_stop}: the run ends before it trained"
            yield dataclasses.replace(end, state=State.DONE.name, why=why)
        else:
            yield from _say_stop(s)
            yield end
        return
    if not (yield from center_policy.ensure_center(s, now)):
        return
    yield from scaling_policy.fill(s)  # what had ended the training may have been lost
    if s.is_idle and membership_policy.are_all_absent(s, now):
        why = (
            "all remaining samples are claimed by workers that were left out; the run waits until "
            "they return"
        )
        if why != s.why_waiting:
            yield facts.Await("absent", p.elastic.max_busy_s, why)
        return
    waited_s = now - s.since
    membership, why = membership_policy.choose(s, p, now, waited_s=waited_s)
    if membership is None:
        yield from center_policy.collect_ended(s)  # the wait may be long
        yield from _await_workers(s, p, e, why, waited_s)
    elif not scaling_policy.awaits_handover(s, membership.worker_ids):
        yield from membership_policy.form(s, p, membership, why)


def _await_workers(s: RunState, p: Limits, e: facts.Tick, why: str, waited_s: float) -> Actions:
    is_long = waited_s > membership_policy.PATIENCE_S
    missing = f"; waiting for {e.missing}" if is_long and e.missing else ""
    if waited_s > p.start_s:
        resume = "; the same command with --resume resumes the run" if s.run else ""
        yield facts.Fail(
            "capacity",
            "",
            f"{why} after {waited_s:.0f} s{missing}; lower scaling.num_workers or raise "
            f"scaling.start_timeout_s{resume}",
        )
    elif why + missing != s.why_waiting:
        yield facts.Await("workers", p.start_s - waited_s, why + missing)


def _say_stop(s: RunState) -> Actions:
    """Say, once, why the run stops."""
    if s.why_stop != s.why_stopping:
        yield facts.Stopping(s.why_stop)


def _train(s: RunState, p: Limits, now: float) -> Actions:
    """Cast the votes that are due, and watch the members."""
    run = s.run
    assert run is not None
    if not s.center.is_lost:
        if membership_policy.is_changing(s):  # the center would not count a vote yet
            yield from membership_policy.check_confirmed(s, now)
            return
        # In rounds the worker votes itself, in a round that does not depend on the clock.
        has_unfrozen = bool(s.unfrozen) and not s.is_sync
        if (s.why_stop or has_unfrozen) and "stop" not in s.votes:
            if s.why_stop:
                yield from _say_stop(s)
            yield facts.Vote(run.number, _votes_to_stop(s, p), s.why_stop)
        if s.cuts > s.votes.get("num_cuts", s.first_cuts):
            yield facts.Vote(run.number, {"num_cuts": s.cuts}, "the center stopped improving")
    yield from _watch(s, p, now)
    if s.stage is State.TRAINING and not run.ended and not membership_policy.is_changing(s):
        yield from center_policy.keep_checkpoints(s, p, now)


def _votes_to_stop(s: RunState, p: Limits) -> dict[str, float]:
    """Return the votes of a stop: the last center is scored, unless the stop is urgent."""
    is_scored = p.is_scored_by_workers and s.is_ended_by_callback
    return {"stop": 1.0, "score": 1.0} if is_scored else {"stop": 1.0}


def _recover(s: RunState, p: Limits, now: float) -> Actions:
    """Wait for the members to leave the failed exchange, and leave out those that do not."""
    run = s.run
    assert run is not None
    if not run.is_idle and now <= s.waits["answer", ""]:
        return
    if run.at_work:
        yield facts.LeaveOut(run.at_work)
    is_late = now - run.broken_at > membership_policy.CAUSE_S
    if membership_policy.is_explained(s) or is_late:
        yield from membership_policy.end_generation(s, p, now)


def _finish(s: RunState, p: Limits, now: float) -> Actions:
    """Collect the last states, wait for the score, and end; silence ends both waits."""
    run = s.run
    assert run is not None
    silent_s = now - max(s.since, s.progress_at)
    if s.checkpoints.collected < s.round:
        yield from _collect_last(s, p, now, silent_s)
        return
    if s.center.is_lost:  # needed only for the score, which is optional
        yield center_policy.rebuild(s, center_policy.furthest_copy(s))
    is_complete = run.has_final_reports() and not s.checkpoints.waits_for_files
    if not is_complete and silent_s <= SILENCE_S:
        return
    # Not before: earlier scores are in the reports.
    for worker_id in run.scorers:
        if worker_id not in s.scores.used and not is_scored(s):
            yield facts.UseScore(worker_id)
            return
    why = ""
    if lacks_score(s):
        why = _why_no_score(s, silent_s)
        if not why:
            return
        why = f"{why}: the run ends without a score of its last center"
    yield facts.Enter(State.DONE.name, why)


def _collect_last(s: RunState, p: Limits, now: float, silent_s: float) -> Actions:
    if not _holds_end(s):
        # The center was lost: whether this is the end is open again.
        yield from membership_policy.end_generation(s, p, now)
        return
    yield from center_policy.collect_ended(s)
    if silent_s > SILENCE_S:
        kind, name = ("raised", s.halt.name) if s.halt else ("stalled", "")
        yield facts.Fail(
            kind,
            name,
            f"the last states of the workers did not arrive: there was no progress for "
            f"{SILENCE_S:.0f} s; the same command with --resume resumes from the newest checkpoint",
        )


def _holds_end(s: RunState) -> bool:
    """Whether the center holds the round that the training ended with, and what it knew."""
    is_early = s.outcome is Outcome.STOPPED or bool(s.ended_by)
    is_held = s.round in s.center.rounds and not s.center.is_lost
    return is_held and (is_early or s.center.is_complete)


def is_scored(s: RunState) -> bool:
    """Whether the newest round or a newer one was scored."""
    return s.scores.evaluated >= s.round


def lacks_score(s: RunState) -> bool:
    """Whether the run has finished without a score of its last center."""
    return s.outcome is Outcome.FINISHED and not is_scored(s)


def _why_no_score(s: RunState, silent_s: float) -> str:
    """Return why the last center will have no score, or "" if the score may still arrive."""
    if s.stop:  # the process may be killed soon
        return s.stop
    if s.halt is not None:
        return s.halt.why
    if s.scores.num_lost >= MAX_LOST_SCORES:
        return f"the evaluation was abandoned {MAX_LOST_SCORES} times"
    if silent_s > SILENCE_S:
        return f"the evaluator has scored nothing for {SILENCE_S:.0f} s"
    return ""
