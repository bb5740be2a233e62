"""Where training continues from, and when the center is scored and written."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from raydl.core.reports import Outcome
from raydl.elastic import facts
from raydl.elastic.limits import Limits
from raydl.elastic.run_state import State
from raydl.elastic.state import Copy, Phase, RunState

Actions = Iterator[Any]
CENTER_S = 300.0
"""The longest wait for the round that training continues from, in seconds: the center may have to
restart."""

# The round that training continues from


def furthest_copy(s: RunState) -> Copy | None:
    """Return the furthest copy of the center that a worker has, or None if there is none.

    Of two copies of a round, the newer generation's is preferred; of equal copies, that of a worker
    that stays.
    """
    ages = [
        ((*w.copy.age, w.phase is not Phase.LEAVING), w.copy)
        for w in s.workers.values()
        if w.copy is not None and not w.in_loop and w.copy.round >= s.first_round
    ]
    return max(ages, key=lambda age: age[0])[1] if ages else None


def resume_round(s: RunState, copy: Copy | None) -> int | None:
    """Return the round that training continues from, or None to wait for it.

    In rounds it is the furthest of a copy or the center; with messages the center's newest.
    """
    newest = s.center.newest
    if s.is_sync:
        # The survivors may be behind the center, if members ahead of them were lost. And a worker
        # that was left out may have a round that the others trained again without it.
        is_of_now = copy is not None and copy.generation >= s.center.generation
        at = copy.round if copy and is_of_now else -1
        return at if at >= s.round else max(at, newest)
    # The center makes the last snapshot by itself; a restarted one has no later round.
    end = s.run.newest_end if s.run else None
    is_there = end is None or s.center.is_new or newest >= end.round
    return newest if is_there else None


def ensure_center(s: RunState, now: float) -> Generator[Any, None, bool]:
    """Bring the center to the round that training continues from; return whether it holds it."""
    copy = furthest_copy(s)
    if s.center.is_lost:
        yield rebuild(s, copy)
    round = resume_round(s, copy)
    if s.center.rounds and round is not None:  # otherwise it is starting
        if copy is not None and copy.round == round and not s.center.holds(copy):
            # A late worker may have a copy with more claims while another copy is being sent.
            if copy != s.center.publishing:
                yield facts.Publish(copy.worker_id, copy.round, copy.num_changes, copy.generation)
        elif round in s.center.rounds:
            newest_known = max(s.scores.evaluated, s.checkpoints.collected)
            is_news = round != s.round or s.center.publishing or ("center", "") in s.waits
            if is_news or newest_known > s.center.newest:
                yield facts.GoOnFrom(round, s.round)
            return True
    if ("center", "") not in s.waits:
        yield facts.Await("center", CENTER_S)
    elif now > s.waits["center", ""]:
        what = "receive its newest copy" if s.center.was_up else "start"
        yield facts.Fail(
            "stalled",
            "center",
            f"the center did not {what} within {CENTER_S:.0f} s; the same command with --resume "
            f"resumes from the newest checkpoint",
        )
    return False


def rebuild(s: RunState, copy: Copy | None) -> facts.Rebuild:
    """Return the restart of the center from a copy, or from a checkpoint that is newer."""
    if copy is None or copy.round < s.checkpoints.collected:
        return facts.Rebuild()
    return facts.Rebuild(copy.worker_id, copy.round)


# Scores


def score(s: RunState, p: Limits) -> Actions:
    """Have the newest snapshot scored, unless a score is under way or exists.

    A change of the workers and a restart of the center make a snapshot, too, which is scored only
    if it is the last one: the evaluator would take CPU time from workers that have just lost some.
    If the workers score, the evaluator does it only at the end, if they could not. The start of the
    workers has priority over a score of the center that they start from.
    """
    is_end = s.stage is State.FINISHING
    if (s.run is None and not is_end) or s.outcome is Outcome.STOPPED or s.halt is not None:
        return
    if is_end and s.run is not None and s.run.scorers:
        return
    newest, scores = s.center.newest, s.scores
    is_due = is_end or (not p.is_scored_by_workers and newest != scores.not_to_score)
    if is_due and scores.evaluating == scores.evaluated < newest:
        yield facts.Evaluate(newest)


# Checkpoints


def keep_checkpoints(s: RunState, p: Limits, now: float) -> Actions:
    """Vote for a checkpoint when one is due, and collect it once all members keep their states.

    Rounds before the generation began, or before the vote, do not count: a member may keep one from
    an earlier vote that led to no checkpoint, or reached some members a round later than others.
    """
    run, k = s.run, s.checkpoints
    assert run is not None
    if _is_due(s, p, now):
        at_round = max((report.round for report in run.reports.values()), default=0)
        yield facts.Vote(run.number, {"checkpoint": 1.0}, "a checkpoint is due", at_round)
    if "checkpoint" in s.votes and not k.is_collecting:
        before = max(k.collected, run.began_at_round)
        ready = {r for r in _kept_everywhere(s) if r > before}
        if ready:
            yield facts.Collect(max(ready), run.present)


def _is_due(s: RunState, p: Limits, now: float) -> bool:
    k = s.checkpoints
    if "checkpoint" in s.votes or k.is_collecting or k.is_writing:
        return False
    every_s, every_epochs = p.checkpoint.every_s, p.checkpoint.every_epochs
    by_time = every_s is not None and now - k.at >= every_s
    by_epoch = every_epochs is not None and s.epoch - k.epoch >= every_epochs
    return by_time or by_epoch


def _kept_everywhere(s: RunState) -> set[int]:
    """Return the rounds since the newest vote that the center and all members keep."""
    run = s.run
    assert run is not None
    present = run.present
    if not present or len(run.reports) < len(present):
        return set()
    kept = set(s.center.rounds)
    for worker_id in present:
        report = run.reports.get(worker_id)
        kept &= set(report.kept) if report else set()
    return {round for round in kept if round > run.voted_at_round}


def collect_ended(s: RunState) -> Actions:
    """Collect the states of all members that have left their loops at a round, once."""
    if s.run is not None and not s.checkpoints.is_collecting and s.checkpoints.collected < s.round:
        # By rank: a resumed run assigns ranks in this order.
        yield facts.Collect(s.round, tuple(w for w in s.run.present if w in s.run.ended))
