"""When the membership of a run changes: between rounds, or while the others train.

In synchronous methods all members leave after the same round, and a new generation forms. In
methods with messages only the center changes its members.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from raydl.core.membership import Candidates, Membership, next_membership
from raydl.core.reports import Outcome
from raydl.elastic import facts
from raydl.elastic.center_policy import CENTER_S, ensure_center
from raydl.elastic.failure_policy import SILENT_S, check_losses
from raydl.elastic.limits import Limits
from raydl.elastic.run_state import State
from raydl.elastic.scaling_policy import (
    awaits_handover,
    fill,
    first_key,
    held_back,
    join_key,
    relieved_spares,
    replicas_of,
    take_replicas,
)
from raydl.elastic.state import Phase, RunState, Worker
from raydl.elastic.stragglers import late_workers

Actions = Iterator[Any]
PATIENCE_S = 5.0
"""How long a run with its fewest workers waits for more before it starts, in seconds."""
CAUSE_S = 2.0
"""Seconds after a failed exchange in which its cause may be reported: a lost worker or center."""
_ANSWER_S = 0.75
"""The shortest time-out for survivors to leave an abandoned exchange, in seconds."""
_LONGEST_STAY_S = 60.0
"""The longest time that a worker stays left out, in seconds."""

# The next membership


def choose(
    s: RunState, p: Limits, now: float, *, waited_s: float = 0.0
) -> tuple[Membership | None, str]:
    """Return the next membership and why; see ``raydl.core.membership.next_membership``."""
    members = s.run.membership if s.run else None
    candidates = candidates_of(s, p, now, waited_s=waited_s)
    candidates = candidates.without(held_back(s, p), "stands by")
    return next_membership(
        members,
        candidates.without(relieved_spares(s, p), "makes room for a worker on an idle node"),
        min_workers=p.min_workers,
        max_workers=s.max_workers,
        patience_s=PATIENCE_S,
        group_size=p.group_size,
    )


def candidates_of(s: RunState, p: Limits, now: float, *, waited_s: float) -> Candidates:
    """Return the workers that decide the next membership."""
    ready = [w for w in s.workers.values() if could_train(w, now)]
    if s.run is not None:  # members keep their ranks
        members = [w for w in ready if w.worker_id in s.run.membership]
        others = [w for w in ready if w.worker_id not in s.run.membership]
        ready = [*members, *sorted(others, key=join_key(s))]
    elif p.group_size > 1:
        ready.sort(key=first_key(s))
    ids = tuple(w.worker_id for w in ready)
    causes = {w.worker_id: w.cause for w in s.workers.values() if w.cause}
    known = set(ids)
    return Candidates(
        ready=ids,
        waited_s=waited_s,
        absent=tuple(w.worker_id for w in s.in_phase(Phase.LEFT_OUT) if w.worker_id not in known),
        causes={**s.causes, **causes},
    )


def could_train(w: Worker, now: float) -> bool:
    """Whether a worker may be a member of the next generation."""
    if w.phase is not Phase.LEFT_OUT:
        return w.phase in (Phase.READY, Phase.TRAINING)
    stay_s = min(_LONGEST_STAY_S, 2.0 ** (w.num_late - 1))
    return not w.in_loop and now - w.since >= stay_s


def are_all_absent(s: RunState, now: float) -> bool:
    """Whether workers were left out, and none of them may rejoin yet."""
    left_out = s.in_phase(Phase.LEFT_OUT)
    return bool(left_out) and not any(could_train(w, now) for w in left_out)


def form(s: RunState, p: Limits, membership: Membership, why: str) -> Actions:
    """Form a generation, which trains from the center's round on."""
    if s.run and membership == s.run.membership:
        why = "the same workers continue"
    numbered = dataclasses.replace(membership, generation=s.generation + 1)
    replicas = replicas_of(s, membership.worker_ids)
    yield from take_replicas(s, membership.worker_ids)
    yield facts.Form(numbered, s.round, why, replicas)
    yield from _await_center(s, p)
    yield from fill(s)


def change(s: RunState, p: Limits, membership: Membership, why: str) -> Actions:
    """Change the membership at the center while the members that stay train on."""
    assert s.run is not None
    numbered = dataclasses.replace(membership, generation=s.generation + 1)
    new = [w for w in membership.worker_ids if w not in s.run.membership]
    replicas = replicas_of(s, new)
    yield from take_replicas(s, new)
    yield facts.Change(numbered, why, replicas)
    yield from _await_center(s, p)


def is_changing(s: RunState) -> bool:
    """Whether the center has not confirmed the newest membership yet."""
    return ("change", "") in s.waits


def check_confirmed(s: RunState, now: float) -> Actions:
    """End the run if the center has not confirmed the newest membership in time."""
    if now > s.waits["change", ""]:
        kind, name = ("raised", s.halt.name) if s.halt else ("stalled", "center")
        yield facts.Fail(
            kind,
            name,
            f"the center did not confirm generation {s.generation} in time; the same command with "
            f"--resume resumes from the newest checkpoint",
        )


def _await_center(s: RunState, p: Limits) -> Actions:
    """Await that the center has received the members, where they join one by one."""
    if not s.is_sync:
        yield facts.Await("change", max(CENTER_S, p.elastic.max_busy_s))


# Rounds


def watch_rounds(s: RunState, p: Limits, now: float) -> Actions:
    """Let all members leave after the same round when a worker joins or leaves.

    The vote is part of the exchange, so no worker waits for it. When a worker is lost in an
    exchange, the others cannot vote. They abandon it, and the next generation continues from the
    furthest round that a member has completed.
    """
    run = s.run
    assert run is not None
    if run.lost or run.is_broken:
        yield abandon(s, p)
    elif run.is_idle:
        yield from end_generation(s, p, now)
    elif run.ended:  # the others leave after the same round
        return
    elif late := late_members(s, p, now):
        yield facts.LeaveOut(late)
        yield abandon(s, p)
    elif s.stage is State.TRAINING:
        yield from _regroup(s, p, now)


def _regroup(s: RunState, p: Limits, now: float) -> Actions:
    """Let all members leave by vote, if another membership is better or the center is new."""
    run = s.run
    assert run is not None
    if s.center.is_lost:
        # Training continues: each worker holds the center, and the group has formed already.
        yield facts.Rebuild(is_adopting=True)
    if not s.center.rounds:  # no generation could form before the new center has started
        return
    membership, why = choose(s, p, now)
    if membership == run.membership:
        if not s.center.is_new:
            return
        why = "the center has restarted"
    elif not s.center.is_new and membership is not None:
        # No member leaves, and the replica of a newcomer is being handed over.
        is_growing = set(run.membership.worker_ids) < set(membership.worker_ids)
        if is_growing and awaits_handover(s, membership.worker_ids):
            return
    yield facts.Vote(run.number, {"regroup": 1.0}, why)
    yield facts.Enter(State.REGROUPING.name, f"{why}: regrouping after this round")


def late_members(s: RunState, p: Limits, now: float) -> tuple[str, ...]:
    """Return the stragglers to leave out."""
    assert s.run is not None
    at_work = s.run.at_work
    if not p.elastic.leave_out_slow or len(at_work) == 1:
        return ()
    # With a fixed number of workers none can be left out: --deterministic relies on that.
    return late_workers(
        {w: waiting_s(s, s.workers[w], now) for w in at_work},
        grace_s=s.pace.grace_s(),
        quorum=min(1.0, max(p.elastic.quorum, p.min_workers / len(at_work))),
    )


def waiting_s(s: RunState, w: Worker, now: float) -> float:
    """Return how many seconds a member has waited for others; 0: it computes or is silent.

    A report of an earlier generation counts as 0. Its wait would make the members that have
    reported this generation look late. So does a wait for others that still score: a score takes
    longer than a round.
    """
    assert s.run is not None
    report = w.report
    if report is None or report.generation != s.run.number or now - w.reported_at > SILENT_S:
        return 0.0
    return report.waiting_s if report.num_scored is None else 0.0


def abandon(s: RunState, p: Limits) -> facts.Abandon:
    """Return the release of the members from an exchange, with the time that they have to leave."""
    assert s.run is not None
    answer_s = p.elastic.lease_s  # a worker waits only for the center
    if s.is_sync:
        answer_s = max(_ANSWER_S, min(s.pace.grace_s(), p.exchange_s))
    return facts.Abandon(s.run.number, answer_s)


# Messages


def watch_messages(s: RunState, p: Limits, now: float) -> Actions:
    """Change the membership only at the center; the members that stay train on.

    One change at a time: until the center has confirmed it, nothing else is decided.
    """
    run = s.run
    assert run is not None
    if s.center.is_lost:
        yield abandon(s, p)
        return
    if is_changing(s):
        yield from check_confirmed(s, now)
        return
    yield from drop_ended(s, p, now)
    if s.stage is State.REGROUPING:
        yield from _leave_by_vote(s, p, now)
    elif s.halt is not None:
        if run.lost:
            yield from _without_the_lost(s, p)
        # Until the others have left by vote, and the center has a snapshot taken later.
        elif run.is_idle and s.center.num_snapshots > 1:
            yield from end_generation(s, p, now)
    elif run.is_idle and run.is_broken:
        return  # the loss of the center may be reported next
    elif run.is_idle and not run.lost:
        yield from end_generation(s, p, now)
    else:
        yield from _join_and_leave(s, p, now)


def _join_and_leave(s: RunState, p: Limits, now: float) -> Actions:
    run = s.run
    assert run is not None
    membership, why = choose(s, p, now)
    if membership is None:
        why = f"{why}: all workers leave after their next exchange"
        yield facts.Enter(State.REGROUPING.name, why)
        return
    if run.lost:
        yield from _without_the_lost(s, p)
        return
    leavers = [w.worker_id for w in s.in_phase(Phase.LEAVING)] + relieved_spares(s, p)
    at_work = set(run.at_work)
    for worker_id in leavers:
        if worker_id in at_work and not s.workers[worker_id].is_dismissed:
            yield facts.Dismiss(worker_id)
    if membership.worker_ids == run.membership.worker_ids:
        return
    # A leaver may be before its last exchange, or its replica on the way to a newcomer.
    is_leaving = not at_work.isdisjoint(leavers)
    if not is_leaving and not awaits_handover(s, membership.worker_ids):
        yield from change(s, p, membership, why)


def _leave_by_vote(s: RunState, p: Limits, now: float) -> Actions:
    run = s.run
    assert run is not None
    if run.lost:
        yield from _without_the_lost(s, p)
    elif run.is_idle and run.is_broken:
        return  # the loss of the center may be reported next
    elif "regroup" not in s.votes:
        yield facts.Vote(run.number, {"regroup": 1.0})
    elif run.is_idle:
        yield from end_generation(s, p, now)


def drop_ended(s: RunState, p: Limits, now: float) -> Actions:
    """Drop members whose loops have ended while the others train."""
    run = s.run
    assert run is not None
    # Within CAUSE_S of a failed exchange the loss of the center may still be reported.
    is_halted = s.halt is not None
    is_explained = is_halted or now - run.broken_at > CAUSE_S
    for worker_id, end in list(run.ended.items()):
        if end.outcome is Outcome.BROKEN and (is_explained or end.error is not None):
            is_known = end.error is not None or is_halted
            why = "diverged" if end.error else ""
            yield facts.Drop(worker_id, why, "" if is_known else end.problem or "it broke")
            if not is_known:
                yield from check_losses(s, p, worker_id, end.problem)
        elif end.outcome is Outcome.LEFT:
            yield facts.Drop(worker_id, "made room")


def _without_the_lost(s: RunState, p: Limits) -> Actions:
    """Drop the lost members; newcomers join with the next change."""
    run = s.run
    assert run is not None
    lost = [w for w in run.membership.worker_ids if w in run.lost]
    why = ", ".join(f"{w} {_cause_of(s, w)}" for w in lost)
    yield from change(s, p, Membership(0, run.present), why)


def _cause_of(s: RunState, worker_id: str) -> str:
    """Return why a member no longer trains: the rest of a sentence that begins with its id."""
    w = s.workers.get(worker_id)
    return (w.cause if w else s.causes.get(worker_id, "")) or "left its exchange"


# The end of a generation


def end_generation(s: RunState, p: Limits, now: float) -> Actions:
    """Finish the run, or wait for the next generation to form; all members have left."""
    run = s.run
    assert run is not None
    if not (yield from ensure_center(s, now)):
        return
    outcome = run.outcome
    if outcome is Outcome.STOPPED or (outcome is Outcome.FINISHED and s.center.is_complete):
        yield finish(s, is_stop=outcome is Outcome.STOPPED)
        return
    if outcome is Outcome.BROKEN and not is_explained(s):
        end = next(e for e in run.ended.values() if e.outcome is Outcome.BROKEN)
        yield facts.Blame(end.worker_id, end.problem)
        yield from check_losses(s, p, end.worker_id, end.problem)
    is_idle = s.is_sync and outcome is Outcome.REGROUP and s.stage is State.TRAINING
    yield facts.Enter(State.WAITING.name, is_idle=is_idle)


def finish(s: RunState, *, is_stop: bool) -> facts.Enter:
    """Return the entry of the last stage; a run that a callback ended counts as finished."""
    if is_stop and s.is_ended_by_callback:
        assert s.ended is not None
        outcome, by = Outcome.FINISHED, s.ended.by
    else:
        outcome, by = (Outcome.STOPPED if is_stop else Outcome.FINISHED), ""
    return facts.Enter(State.FINISHING.name, outcome=outcome.value, ended_by=by)


def is_explained(s: RunState) -> bool:
    """Whether the cause of a failed exchange is known."""
    run = s.run
    assert run is not None
    is_of_center = s.center.is_lost or s.center.is_new
    return is_of_center or bool(run.lost) or run.has_diverged or s.halt is not None
