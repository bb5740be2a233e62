"""Which workers a run has: requests, spares, leavers, and the replicas that they pass on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

from raydl.core.worker_group import Draining, GaveUp, HandedIn
from raydl.elastic import facts
from raydl.elastic.limits import Limits
from raydl.elastic.run_state import State
from raydl.elastic.state import INF, Phase, RunState, Worker, number_of

Actions = Iterator[Any]
HANDOVER_S = 120.0
"""The longest wait for a leaver to hand in its replica, and for a newcomer to read it, in seconds.
The others may be waiting meanwhile, and a newcomer can start from the center instead."""
DRAINS = "is on a draining node"

# Requests


def fill(s: RunState, heirs: Sequence[tuple[bool, str]] = ()) -> Actions:
    """Request the workers that are missing, and the spares once workers have trained.

    A spare that trains goes on without CPUs of its own: the worker that replaces the lost one has
    CPUs, and is the next spare. A spare that trains beyond the number of spares counts as a worker.

    Args:
        s: the state.
        heirs: (whether it is a spare, origin) of the workers that a request replaces.
    """
    if s.stage in (State.FINISHING, State.DONE):
        return
    left = list(heirs)

    def start(*, is_spare: bool) -> facts.Start:
        heir = next((heir for heir in left if heir[0] == is_spare), None)
        if heir is not None:
            left.remove(heir)
        return facts.Start(f"w{s.next_id}", is_spare, heir[1] if heir else "")

    while s.num_staying[False] + max(0, s.num_staying[True] - s.spares) < s.max_workers:
        yield start(is_spare=False)
    # The start of the workers has priority over that of the spares.
    while s.run is not None and s.num_staying[True] < s.spares:
        yield start(is_spare=True)


# Leaving


def drain(s: RunState, p: Limits, e: Draining) -> Actions:
    """Request the replacement of a worker whose node will be removed, and let it leave.

    It trains on until the replacement is ready, but for half of the time at most: then it still
    has to complete its round and to hand in its replica.
    """
    w = s.workers[e.worker_id]
    round_s = w.report.round_s if w.report else 0.0
    stay_s = e.left_s / 2 - 2 * round_s
    if w.phase is not Phase.TRAINING or stay_s <= 0:
        yield from release(s, p, w, DRAINS)
        return
    yield facts.Stay(w.worker_id, stay_s)
    yield from fill(s)


def release_drained(s: RunState, p: Limits, now: float) -> Actions:
    """Let workers on draining nodes leave whose replacements are ready, or whose time is up."""
    draining = [w for w in s.in_phase(Phase.TRAINING) if w.leave_by < INF]
    if not draining:
        return
    num_ready = len(s.in_phase(Phase.READY)) - len(held_back(s, p))
    num_replaced = num_ready - num_free_places(s)
    for number, w in enumerate(draining):
        if number < num_replaced or now >= w.leave_by:
            yield from release(s, p, w, DRAINS)


def release(s: RunState, p: Limits, w: Worker, why: str) -> Actions:
    """Let a worker leave, and request another one if too few are left."""
    if w.phase is Phase.LEAVING:
        return
    is_idle = w.phase in (Phase.STARTING, Phase.READY)
    yield facts.Release(w.worker_id, why, is_now=is_idle)
    if is_idle:
        yield from end(s, p, w, why)
    yield from fill(s)


def remove(s: RunState, p: Limits, worker_id: str) -> Actions:
    """Let a worker leave at the user's request: it was a spare, or it has had a place."""
    w = s.workers[worker_id]
    if is_removed_spare(s, w):
        yield facts.FewerPlaces(s.max_workers, s.spares - 1)
    else:
        yield facts.FewerPlaces(max(p.min_workers, s.max_workers - 1), s.spares)
    yield from release(s, p, w, "was removed")


def is_removed_spare(s: RunState, w: Worker) -> bool:
    """Whether the run has a spare less if a worker is removed, instead of a place."""
    is_idle = w.phase in (Phase.STARTING, Phase.READY)
    return is_idle and s.spares > 0 and not num_free_places(s)


def end(s: RunState, p: Limits, w: Worker, why: str) -> Actions:
    """End a worker at once, without a replacement."""
    yield facts.End(w.worker_id, why)
    yield from forget(s, p, w, why)


def end_leavers(s: RunState, p: Limits, now: float) -> Actions:
    """Have leavers hand in their replicas if newcomers need them, then end them.

    A replica is as large as the model and its optimizer. So it is kept only if it is needed. A
    leaver stays as long as its copy of the center or its states are needed.
    """
    yield from _end_long_handovers(s, now)
    if not (leavers := s.in_phase(Phase.LEAVING)):
        return
    needed = _needed_workers(s)
    for w in leavers:
        if w.in_loop:
            continue
        if w.hands_in is None and _needs_more_replicas(s, p):
            yield facts.HandIn(w.worker_id)
            yield facts.Await("hand in", HANDOVER_S, worker_id=w.worker_id)
        if not w.hands_in and w.worker_id not in needed:
            yield from end(s, p, w, w.cause)


def _needed_workers(s: RunState) -> Container[str]:
    is_settled = s.stage is State.WAITING and s.checkpoints.collected >= s.round
    needed = set() if is_settled or s.run is None else set(s.run.ended)
    k = s.checkpoints
    return needed.union(k.sources, k.writing if k.waits_for_files else ())


# Places and spares


def num_free_places(s: RunState) -> int:
    """Return how many workers may join those that train or were left out."""
    return max(0, s.max_workers - len(s.in_phase(Phase.TRAINING, Phase.LEFT_OUT)))


def num_training_by_node(s: RunState) -> Counter[str]:
    """Return how many workers train on each node."""
    return Counter(w.node for w in s.in_phase(Phase.TRAINING))


def held_back(s: RunState, p: Limits) -> set[str]:
    """Return the spares that are ready but would share cores, beyond the fewest workers.

    After the loss of a whole node the nodes of the spares are full, and a worker that shares cores
    makes a synchronous round longer for all.
    """
    if not p.spares_share:
        return set()
    present, num_training = s.in_phase(Phase.TRAINING, Phase.READY), num_training_by_node(s)
    full = [
        w.worker_id
        for w in present
        if w.phase is Phase.READY
        and w.is_spare
        and 0 < s.num_places[w.node] <= num_training[w.node]
    ]
    num_needed = p.min_workers - (len(present) - len(full))
    return set(full[max(0, num_needed) :])


def relieved_spares(s: RunState, p: Limits) -> list[str]:
    """Return the spares that train on a shared node although a worker of an idler one is ready.

    After the loss of a whole node a spare trains beside a worker of another node, and both are
    slow. Once the replacement is ready, the spare stands by again.
    """
    if not p.spares_share or num_free_places(s):
        return []
    spares = [w for w in s.in_phase(Phase.TRAINING) if w.is_spare]
    ready = [w for w in s.in_phase(Phase.READY) if not w.is_spare]
    num_training, relieved = num_training_by_node(s), []
    for newcomer in ready[: len(spares)]:
        spare = max(spares, key=lambda w: num_training[w.node])
        if num_training[newcomer.node] + 1 < num_training[spare.node]:
            spares.remove(spare)
            relieved.append(spare.worker_id)
            num_training[spare.node] -= 1
            num_training[newcomer.node] += 1
    return relieved


def join_key(s: RunState) -> Callable[[Worker], tuple[bool, int, int]]:
    """Return the sort key of newcomers: with a leaver's replica first, then on idle nodes."""
    num_training = num_training_by_node(s)
    return lambda w: (not w.is_handed_over, num_training[w.node], number_of(w.worker_id))


def first_key(s: RunState) -> Callable[[Worker], tuple[str, int]]:
    """Return the sort key of the first workers: by rank in the checkpoint, or else by node."""
    ranks = {worker_id: rank for rank, worker_id in enumerate(s.saved_order)}

    def key(w: Worker) -> tuple[str, int]:
        if w.worker_id in ranks:
            return "", ranks[w.worker_id]
        return w.node, number_of(w.worker_id)

    return key


# Replicas of leavers


def hand_over(s: RunState, p: Limits) -> Actions:
    """Hand replicas from leavers to workers that are ready and have not trained.

    Not between two events of a poll: the loss of a newcomer may be one of them.
    """
    if not s.replicas:  # the usual case
        return
    held = held_back(s, p)
    for w in sorted(s.in_phase(Phase.READY), key=join_key(s)):
        if w.worker_id not in held and w.needs_replica and (free := _free_replicas(s)):
            yield facts.HandOver(w.worker_id, free[0])
            yield facts.Await("hand over", HANDOVER_S, worker_id=w.worker_id)
    # The newcomer may have been lost, and the replica would soon be out of date.
    for leaver in _free_replicas(s)[_num_newcomers(s, p) :]:
        yield from _forget_replica(s, leaver)


def _free_replicas(s: RunState) -> list[str]:
    """Return the leavers whose replicas no newcomer has."""
    taken = {w.replica for w in s.workers.values()}
    return [leaver for leaver in s.replicas if leaver not in taken]


def pass_on(s: RunState, e: HandedIn) -> Actions:
    """Keep the replica of a leaver for a newcomer."""
    report = s.workers[e.worker_id].report
    yield facts.PassOn(e.worker_id, report.residual if report else 0.0)


def note_given_up(s: RunState, p: Limits, e: GaveUp) -> Actions:
    """Continue without the replica of a leaver, or without a worker's state in the checkpoint."""
    match e.task:
        case "hand in":
            yield facts.NoHandIn(e.worker_id, e.reason)
        case "hand over":
            yield from _no_hand_over(s, e.worker_id, e.reason)
        case "saved state" if p.may_leave_out:
            why = "its state in the checkpoint cannot be read"
            yield facts.ResidualLost(e.worker_id, None, why)


def _end_long_handovers(s: RunState, now: float) -> Actions:
    why = f"it took longer than {HANDOVER_S:.0f} s"
    for (what, worker_id), until in list(s.waits.items()):
        if worker_id and until < now:
            if what == "hand in":
                yield facts.NoHandIn(worker_id, why)
            else:
                yield from _no_hand_over(s, worker_id, why)


def _no_hand_over(s: RunState, worker_id: str, why: str) -> Actions:
    leaver = s.workers[worker_id].replica
    yield from _forget_replica(s, leaver)
    yield facts.NoHandOver(worker_id, why)


def _forget_replica(s: RunState, leaver: str) -> Actions:
    """Delete a leaver's state that no worker will continue from."""
    norm = s.replicas[leaver]
    yield facts.Forget(leaver)
    if norm:
        yield facts.ResidualLost(leaver, norm, "no worker continues from its state")


def forget(s: RunState, p: Limits, w: Worker, why: str) -> Actions:
    """Settle what a worker leaves behind that has ended: its residual, and a replica it had.

    No other newcomer gets that replica, since it may have been the cause of the end.

    Args:
        s: the state, without the worker.
        p: the limits.
        w: the worker.
        why: the rest of a sentence that begins with its id.
    """
    residual = w.report.residual if w.report else 0.0
    if residual and not w.has_passed_on and not _has_partner(s, p, w):
        yield facts.ResidualLost(w.worker_id, residual, f"{w.worker_id} {why}")
    if w.replica in s.replicas:
        yield from _forget_replica(s, w.replica)


def take_replicas(s: RunState, worker_ids: Iterable[str]) -> Actions:
    """Delete the replicas that newcomers have in memory when they enter."""
    for worker_id in worker_ids:
        if s.workers[worker_id].is_handed_over:
            yield facts.Forget(s.workers[worker_id].replica, is_taken=True)


def replicas_of(s: RunState, worker_ids: Iterable[str]) -> dict[str, str]:
    """Return what newcomers start from, by worker, without those that start from the center."""
    return {w: s.workers[w].replica for w in worker_ids if s.workers[w].replica}


def awaits_handover(s: RunState, newcomers: Iterable[str]) -> bool:
    """Whether a handover is under way that one of these newcomers could start from."""
    newcomers = list(newcomers)
    if any(("hand over", w) in s.waits for w in newcomers):
        return True
    is_handing_in = any(w.hands_in for w in s.in_phase(Phase.LEAVING))
    return is_handing_in and any(s.workers[w].needs_replica for w in newcomers)


def _needs_more_replicas(s: RunState, p: Limits) -> bool:
    """Whether more newcomers need a replica than were handed in or are being written."""
    num_handing_in = sum(bool(w.hands_in) for w in s.in_phase(Phase.LEAVING))
    num_replicas = len(_free_replicas(s)) + num_handing_in
    return p.hands_over and num_replicas < _num_newcomers(s, p)


def _num_newcomers(s: RunState, p: Limits) -> int:
    """Return the number of workers that will join and need a replica; spares only stand by."""
    held = held_back(s, p)
    waiting = [w for w in s.in_phase(Phase.STARTING, Phase.READY) if w.worker_id not in held]
    return min(sum(w.needs_replica for w in waiting), num_free_places(s))


def _has_partner(s: RunState, p: Limits, w: Worker) -> bool:
    """Whether another worker shares the replica of this one, and so has the same residual."""
    if p.group_size == 1 or s.run is None or w.worker_id not in s.run.membership:
        return False
    _, partners = s.run.membership.partners_of(w.worker_id, p.group_size)
    return any(other != w.worker_id and other in s.workers for other in partners)
