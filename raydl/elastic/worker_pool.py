"""Requests, releases and replaces workers, and hands a leaver's replica to its replacement."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from typing import Any

from raydl.config import TrainConfig
from raydl.core.compression import LostResidual
from raydl.core.membership import Membership, next_membership
from raydl.core.saved_state import SavedState
from raydl.core.worker_group import WorkerGroup
from raydl.elastic.failures import WorkerErrors
from raydl.elastic.generation import Generation
from raydl.elastic.residuals import LostResiduals
from raydl.elastic.worker_registry import Phase, WorkerEntry, WorkerRegistry
from raydl.errors import CapacityError, ProcessLostError, in_one_line

_PATIENCE_S = 5.0
"""How long a run with its fewest workers waits for more before it starts, in seconds."""
_HANDOVER_S = 120.0
"""The longest wait for a leaver to hand in its replica, and for a newcomer to read it, in seconds.
The others may be waiting meanwhile, and a newcomer can start from the center instead."""
_DRAINS = "is on a draining node"


class WorkerPool:
    """The workers of a run.

    Args:
        worker_group: their processes.
        config: the run's settings.
        worker_registry: the phase and the reports of each worker.
        own_states: states of workers from a checkpoint, by id, in the order of their ranks.
        hands_over: whether a leaver's state is worth keeping. With rules that send weights each
            replica is distinct; otherwise it is a copy of the center, but compressed messages may
            have left something out.
        lost_residuals: counts what compressed messages have left out and nobody will send.
        log: logs one line.
        clock: seconds, rising.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        config: TrainConfig,
        worker_registry: WorkerRegistry,
        *,
        own_states: dict[str, Any],
        hands_over: bool,
        lost_residuals: LostResiduals,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker_group = worker_group
        self._config = config
        self._worker_registry = worker_registry
        self._max_workers = max(1, config.scaling.max_workers)
        # A later replacement must not get the id and the old state of one that is not resumed.
        worker_registry.reserve_ids(own_states)
        self._saved_order = list(own_states)[: self._max_workers]
        self._own_states = {w: own_states[w] for w in self._saved_order}
        for worker_id in list(own_states)[self._max_workers :]:
            lost_residuals.note(worker_id, LostResidual(None, "fewer workers resume"))
        self._handed_in: list[SavedState] = []
        self._handover_since: dict[str, float | None] = {}
        """By newcomer, when it began to read a leaver's replica; None once it has it."""
        self._hands_over = hands_over
        self._lost_residuals = lost_residuals
        self._log = log
        self._num_spares = config.scaling.spares
        self._do_spares_share = self._num_spares > 0 and set(config.scaling.resources()) <= {"CPU"}
        """Whether a spare that trains may share cores: it reserves no GPU, for example."""
        self._has_trained = False
        self._members: tuple[str, ...] = ()
        """The workers of the newest generation, by rank."""
        self._num_losses = 0
        self._most_trained = -1
        """The most samples that a record or a collected checkpoint had."""
        self._num_requests = 0
        self._request_number: dict[str, int] = {}
        self._next_loss_from = 0
        """The first request number whose loss counts as a further one."""
        self._clock = clock
        is_in_process = config.scaling.max_workers == 0
        self._errors = WorkerErrors(config.elastic, clock, is_in_process=is_in_process)
        self.is_requesting = True
        """Whether the run requests workers; near its end it does not."""
        for worker_id in self._saved_order:
            self._request(worker_id)
        self._request_missing()

    def _request(self, worker_id: str) -> None:
        self._add(worker_id)
        self._worker_group.request_worker(worker_id, self._own_states.get(worker_id))

    def _add(self, worker_id: str, *, reserves_cpu: bool = True) -> None:
        self._request_number[worker_id] = self._num_requests
        self._num_requests += 1
        self._worker_registry.add(worker_id, reserves_cpu=reserves_cpu)

    def request_again(self) -> None:
        """Request the missing workers, if the run has stopped requesting but has to train on."""
        if not self.is_requesting:
            self.is_requesting = True
            self._request_missing()

    def _request_missing(self) -> list[str]:
        """Request the workers and the spares that are missing; return their ids."""
        requested, registry = [], self._worker_registry
        while self.is_requesting and self._num_workers_coming() < self._max_workers:
            worker_id = registry.new_id()
            self._request(worker_id)
            requested.append(worker_id)
        return requested + self._request_spares()

    def _num_workers_coming(self) -> int:
        """Return how many workers train or will train, besides the spares.

        A spare that replaced a lost worker counts as a worker once the user has removed the spare
        that followed it.
        """
        num_without_cpus = self._worker_registry.num_coming(reserves_cpu=False)
        no_spares = max(0, num_without_cpus - self._num_spares)
        return self._worker_registry.num_coming() + no_spares

    def _request_spares(self) -> list[str]:
        """Request the missing spares, once workers train: the start of those has priority.

        A spare that trains goes on without CPUs of its own. The worker that replaces the lost one
        has CPUs, and is the next spare.
        """
        requested, registry = [], self._worker_registry
        while (
            self.is_requesting
            and self._has_trained
            and registry.num_coming(reserves_cpu=False) < self._num_spares
        ):
            worker_id = registry.new_id()
            self._add(worker_id, reserves_cpu=False)
            self._worker_group.request_spare(worker_id)
            requested.append(worker_id)
        return requested

    def note_formed(self, membership: Membership) -> None:
        """Note that a generation trains."""
        self._has_trained, self._members = True, membership.worker_ids
        self._request_spares()

    # leaving

    def remove(self, worker_id: str) -> tuple[bool, str]:
        """Let a worker leave at the user's request; return (whether it will, a sentence).

        It is replaced only if too few workers would be left.
        """
        if worker_id not in self._worker_registry:
            known = ", ".join(e.worker_id for e in self._worker_registry.entries())
            return False, f"the run has no worker {worker_id}; it has {known}"
        phase = self._worker_registry[worker_id].phase
        if phase is Phase.LEAVING:
            return True, f"{worker_id} is leaving already"
        is_idle = phase in (Phase.STARTING, Phase.READY)
        if is_idle and self._num_spares and not self._num_free_places():
            self._num_spares -= 1
            self.release(worker_id, "was removed")
            return True, f"{worker_id} was ended; it was a spare"
        fewest = max(1, self._config.scaling.min_workers)
        is_replaced = self._max_workers <= fewest
        self._max_workers = max(fewest, self._max_workers - 1)
        self.release(worker_id, "was removed")
        how = "was ended; it was not training" if is_idle else "leaves after its next exchange"
        then = f"; it is replaced, since at least {fewest} must train" if is_replaced else ""
        return True, f"{worker_id} {how}{then}"

    def drain(self, worker_id: str, left_s: float) -> None:
        """Request the replacement of a worker whose node will be removed, and let it leave.

        It trains on until the replacement is ready, but for half of the time at most: then it still
        has to complete its round and to hand in its replica.

        Args:
            worker_id: the worker.
            left_s: seconds until the node is removed; 0: not known.
        """
        entry = self._worker_registry[worker_id]
        round_s = entry.report.round_s if entry.report else 0.0
        stay_s = left_s / 2 - 2 * round_s
        if entry.phase is not Phase.TRAINING or stay_s <= 0:
            self.release(worker_id, _DRAINS)
            return
        entry.leave_by = self._clock() + stay_s
        self._log(
            f"{worker_id} {_DRAINS}; it trains on until its replacement is ready, for "
            f"{stay_s:.0f} s at most"
        )
        self._request_missing()

    def release_draining(self) -> None:
        """Let workers on draining nodes leave whose replacements are ready, or whose time is up."""
        entries = self._worker_registry.entries()
        draining = [e for e in entries if e.leave_by is not None and e.phase is Phase.TRAINING]
        if not draining:
            return
        num_ready = sum(e.phase is Phase.READY for e in entries) - len(self._held_back())
        num_replaced = num_ready - self._num_free_places()
        for number, entry in enumerate(draining):
            assert entry.leave_by is not None
            if number < num_replaced or self._clock() >= entry.leave_by:
                self.release(entry.worker_id, _DRAINS)

    def release(self, worker_id: str, cause: str) -> None:
        """Let a worker leave, and request another one if fewer than the maximum are left."""
        phase = self._worker_registry[worker_id].phase
        if phase is Phase.LEAVING:
            return
        self._log(f"{worker_id} {cause}")
        if phase in (Phase.STARTING, Phase.READY):
            self.end(worker_id, cause)
        else:
            self._worker_registry.note_leaving(worker_id, cause)
        self._request_missing()

    def lose(self, worker_id: str, reason: str) -> str:
        """Record that a worker was lost; return the id of its replacement, or "" if it has none.

        A worker without CPUs of its own is replaced by a spare.
        """
        self._log(f"{worker_id} was lost: {reason}")
        # Workers requested before a loss count as one loss with it, however many are lost: they
        # may be those of a rack, or of a spot market that reclaims its machines.
        if self._request_number[worker_id] >= self._next_loss_from:
            self._next_loss_from = self._num_requests
            self.count_loss(worker_id, reason)
        registry = self._worker_registry
        reserves_cpu = registry[worker_id].reserves_cpu
        self._forget(worker_id, "was lost")
        requested = self._request_missing()
        return next((w for w in requested if registry[w].reserves_cpu == reserves_cpu), "")

    def note_error(self, worker_id: str, error: Exception) -> str:
        """Replace a worker that raised an error, if the settings permit it.

        A spare with too many errors is not replaced: the run needs none, unless the spare trains
        instead of a worker that is missing.

        Returns:
            Why the run stops instead, or "" if it continues without the worker.
        """
        if why := self._errors.why_stop(worker_id, error):
            return why
        entry = self._worker_registry[worker_id]
        if why := self._errors.why_not_replaced(worker_id):
            if entry.reserves_cpu or self._is_needed(entry):
                return why
            self._num_spares = max(0, self._num_spares - 1)
            self._log(f"{why}; it was a spare and is not replaced")
        node = entry.node
        self._worker_group.end(worker_id)
        if self._errors.note(worker_id, node) and self._worker_group.avoid(node):
            self._log(
                f"no further worker is started on node {node[:12]}: within an hour its workers had "
                f"more errors than elastic.max_worker_errors"
            )
        if replacement := self.lose(worker_id, in_one_line(error)):
            self._errors.replace(worker_id, replacement)
        return ""

    def _is_needed(self, entry: WorkerEntry) -> bool:
        """Whether a worker trains without which too few would be left."""
        in_phase = self._worker_registry.in_phase
        present = {*in_phase(Phase.TRAINING), *in_phase(Phase.READY)}
        is_training = entry.phase is Phase.TRAINING
        return is_training and len(present) <= max(1, self._config.scaling.min_workers)

    def end(self, worker_id: str, cause: str) -> None:
        """End a worker at once, without a replacement."""
        self._worker_group.end(worker_id)
        self._forget(worker_id, cause)

    def _forget(self, worker_id: str, cause: str) -> None:
        entry = self._worker_registry[worker_id]
        if (
            entry.report is not None
            and not entry.has_passed_on
            and not self._has_partner(worker_id)
        ):
            lost = LostResidual(entry.report.residual, f"{worker_id} {cause}")
            self._lost_residuals.note(worker_id, lost)
        self._worker_registry.remove(worker_id, cause)
        self._request_number.pop(worker_id, None)
        state = self._own_states.pop(worker_id, None)
        if worker_id in self._handover_since:
            # No other newcomer gets this replica: it may have been the cause of the loss.
            del self._handover_since[worker_id]
            self._forget_state(state)

    def _has_partner(self, worker_id: str) -> bool:
        """Whether another worker shares the replica of this one, and so has the same residual."""
        if worker_id not in self._members:
            return False
        size = self._config.method.group_size
        start = self._members.index(worker_id) // size * size
        group = self._members[start : start + size]
        return any(w != worker_id and w in self._worker_registry for w in group)

    def _forget_state(self, state: SavedState) -> None:
        """Delete a leaver's state that no worker will continue from."""
        self._worker_group.forget(state)
        self._lost_residuals.note_not_taken(state)

    def leave_out(self, run: Generation, worker_ids: tuple[str, ...]) -> None:
        """Continue without stragglers; they may rejoin."""
        self._worker_registry.leave_out(worker_ids)
        for worker_id in worker_ids:
            run.lose(worker_id)

    def lose_stuck(self) -> list[str]:
        """End the workers that are stuck in a step; return their ids."""
        stuck = self._worker_registry.stuck()
        for worker_id, seconds in stuck:
            self._worker_group.end(worker_id)
            self.lose(
                worker_id,
                f"it is stuck: one step has taken {seconds:.0f} s (elastic.max_step_s, or "
                f"elastic.max_busy_s while it computes)",
            )
        return [worker_id for worker_id, _ in stuck]

    def count_loss(self, name: str, reason: str) -> None:
        """Count a loss, of one process or of several at once.

        Raises:
            ProcessLostError: if there were too many without progress of the training.
        """
        self._num_losses += 1
        if self._num_losses > self._config.elastic.max_restarts:
            raise ProcessLostError(
                name,
                f"{reason}; this is loss {self._num_losses} in a row without training progress, "
                f"more than elastic.max_restarts allows",
            )

    def note_trained(self, num_samples: int) -> None:
        """Note how many samples are trained: if more than ever, the count of losses starts again.

        Those that are trained again after a loss are no progress.
        """
        if num_samples > self._most_trained:
            self._most_trained = num_samples
            self._num_losses = self._next_loss_from = 0

    # handovers

    def end_leavers(self, still_needed: Container[str]) -> list[str]:
        """Have leavers hand in their replicas, then end them; return the ids of the ended ones.

        A replica is as large as the model and its optimizer. So it is kept only if a newcomer needs
        one.

        Args:
            still_needed: workers whose copies or states are still needed.
        """
        self._end_long_handovers()
        ended = []
        for worker_id in self._worker_registry.in_phase(Phase.LEAVING):
            entry = self._worker_registry[worker_id]
            if entry.in_loop:
                continue
            if self._needs_more_replicas and entry.hand_in_since is None:
                entry.hand_in_since = self._clock()
                self._worker_group.hand_in(worker_id)
            is_free = entry.has_handed_in or entry.hand_in_since is None
            if is_free and worker_id not in still_needed:
                self.end(worker_id, entry.cause)
                ended.append(worker_id)
        return ended

    def _end_long_handovers(self) -> None:
        began_before = self._clock() - _HANDOVER_S
        why = f"it took longer than {_HANDOVER_S:.0f} s"
        for worker_id in self._handing_in():
            if (self._worker_registry[worker_id].hand_in_since or 0.0) < began_before:
                self.note_handed_in(worker_id, None, why)
        for worker_id, since in list(self._handover_since.items()):
            if since is not None and since < began_before:
                self.note_not_taken_over(worker_id, why)

    def _handing_in(self) -> list[str]:
        """Return the leavers whose replicas are being written to the storage."""
        leavers = [self._worker_registry[w] for w in self._worker_registry.in_phase(Phase.LEAVING)]
        return [e.worker_id for e in leavers if e.hand_in_since is not None and not e.has_handed_in]

    @property
    def _needs_more_replicas(self) -> bool:
        """Whether more newcomers need a replica than were handed in or are being written."""
        num_replicas = len(self._handed_in) + len(self._handing_in())
        return self._hands_over and num_replicas < self._num_newcomers()

    def _num_newcomers(self) -> int:
        """Return the number of workers that will join and need a replica; spares only stand by."""
        in_phase = self._worker_registry.in_phase
        waiting = set(in_phase(Phase.STARTING) + in_phase(Phase.READY)) - self._held_back()
        return min(sum(map(self._needs_replica, waiting)), self._num_free_places())

    def _num_free_places(self) -> int:
        """Return how many workers may join those that train or were left out."""
        in_phase = self._worker_registry.in_phase
        taken = len(in_phase(Phase.TRAINING)) + len(in_phase(Phase.LEFT_OUT))
        return max(0, self._max_workers - taken)

    def note_handed_in(self, worker_id: str, state: SavedState | None, why_none: str = "") -> None:
        """Note that the storage has the replica of a leaver, which a newcomer may get.

        Args:
            worker_id: the leaver.
            state: its replica; None: there is none.
            why_none: the reason, if there is none.
        """
        if worker_id not in self._handing_in():  # it was lost, or took too long
            if state is not None:
                self._worker_group.forget(state)
            return
        entry = self._worker_registry[worker_id]
        entry.has_handed_in = True
        if state is None:
            self._log(f"the replica of {worker_id} is not handed over: {why_none}")
            return
        entry.has_passed_on = True
        residual = entry.report.residual if entry.report else 0.0
        self._lost_residuals.pass_on(state, worker_id, residual)
        self._handed_in.append(state)

    def hand_over(self) -> None:
        """Hand replicas from leavers to workers that are ready and have not trained."""
        if not self._handed_in:  # the usual case
            return
        held_back = self._held_back()
        for worker_id in sorted(self._worker_registry.in_phase(Phase.READY), key=self._join_key()):
            is_joining = worker_id not in held_back
            if self._handed_in and is_joining and self._needs_replica(worker_id):
                state = self._own_states[worker_id] = self._handed_in.pop(0)
                self._handover_since[worker_id] = self._clock()
                self._worker_group.hand_over(worker_id, state)
        # The newcomer may have been lost, and the replica would soon be out of date.
        num_newcomers = self._num_newcomers()
        surplus, self._handed_in = self._handed_in[num_newcomers:], self._handed_in[:num_newcomers]
        for state in surplus:
            self._forget_state(state)

    def note_state_unreadable(self, worker_id: str) -> None:
        """Note that a worker of a resumed run could not read its state; it needs a replica."""
        lost = LostResidual(None, "its state in the checkpoint cannot be read")
        self._lost_residuals.note(worker_id, lost)
        self._own_states.pop(worker_id, None)

    def note_taken_over(self, worker_id: str) -> None:
        """Note that a newcomer has read a leaver's replica."""
        if worker_id in self._handover_since:
            self._handover_since[worker_id] = None

    def note_not_taken_over(self, worker_id: str, reason: str) -> None:
        """Let a newcomer start from the center, since it could not read a leaver's replica."""
        if self._handover_since.pop(worker_id, None) is not None:
            self._forget_state(self._own_states.pop(worker_id))
            self._log(f"{worker_id} starts from the center: {reason}")

    def awaits_handover(self, newcomers: Iterable[str]) -> bool:
        """Whether a handover is under way that one of these newcomers could start from."""
        newcomers = list(newcomers)
        if any(self._handover_since.get(w) is not None for w in newcomers):
            return True
        return bool(self._handing_in()) and any(map(self._needs_replica, newcomers))

    def _needs_replica(self, worker_id: str) -> bool:
        has_trained = self._worker_registry[worker_id].has_trained
        return worker_id not in self._own_states and not has_trained

    # joining

    def decide(
        self, now: Membership | None, *, waited_s: float = 0.0
    ) -> tuple[Membership | None, str]:
        """Return the next membership and why; see ``raydl.core.membership.next_membership``."""
        scaling, group_size = self._config.scaling, self._config.method.group_size
        sort_key: Callable[[str], Any] | None = self._join_key()
        if now is None:
            sort_key = self._first_key if group_size > 1 else None
        candidates = self._worker_registry.candidates(waited_s, sort_key=sort_key)
        candidates = candidates.without(self._held_back(), "stands by")
        return next_membership(
            now,
            candidates.without(self.relieved_spares(), "makes room for a worker on an idle node"),
            min_workers=max(1, scaling.min_workers),
            max_workers=self._max_workers,
            patience_s=_PATIENCE_S,
            group_size=group_size,
        )

    def _held_back(self) -> set[str]:
        """Return the spares that are ready but would share cores, beyond the fewest workers.

        After the loss of a whole node the nodes of the spares are full, and a worker that shares
        cores makes a synchronous round longer for all.
        """
        if not self._do_spares_share:
            return set()
        registry = self._worker_registry
        entries = [e for e in registry.entries() if e.phase in (Phase.TRAINING, Phase.READY)]
        num_training = registry.num_training_by_node()
        full = [
            e.worker_id
            for e in entries
            if e.phase is Phase.READY
            and not e.reserves_cpu
            and 0 < registry.num_places(e.node) <= num_training[e.node]
        ]
        num_needed = max(1, self._config.scaling.min_workers) - (len(entries) - len(full))
        return set(full[max(0, num_needed) :])

    def relieved_spares(self) -> list[str]:
        """Return the spares that train on a shared node although a worker of an idler one is ready.

        After the loss of a whole node a spare trains beside a worker of another node, and both are
        slow. Once the replacement is ready, the spare stands by again.
        """
        if not self._do_spares_share or self._num_free_places():
            return []
        registry = self._worker_registry
        entries = registry.entries()
        spares = [e for e in entries if e.phase is Phase.TRAINING and not e.reserves_cpu]
        ready = [e for e in entries if e.phase is Phase.READY and e.reserves_cpu]
        num_training = registry.num_training_by_node()
        relieved = []
        for newcomer in ready[: len(spares)]:
            spare = max(spares, key=lambda e: num_training[e.node])
            if num_training[newcomer.node] + 1 < num_training[spare.node]:
                spares.remove(spare)
                relieved.append(spare.worker_id)
                num_training[spare.node] -= 1
                num_training[newcomer.node] += 1
        return relieved

    def _join_key(self) -> Callable[[str], tuple[bool, int, int]]:
        """Return the sort key of newcomers: with a leaver's replica first, then on idle nodes."""
        num_training = self._worker_registry.num_training_by_node()

        def key(worker_id: str) -> tuple[bool, int, int]:
            num_beside = num_training[self._worker_registry[worker_id].node]
            return worker_id not in self._handover_since, num_beside, int(worker_id.lstrip("w"))

        return key

    def _first_key(self, worker_id: str) -> tuple[str, int]:
        """Return the sort key of a worker: its rank in the checkpoint, or else its node."""
        if worker_id in self._saved_order:
            return "", self._saved_order.index(worker_id)
        return self._worker_registry[worker_id].node, int(worker_id.lstrip("w"))

    def are_all_absent(self) -> bool:
        """Whether workers were left out, and none of them may rejoin yet."""
        ready = self._worker_registry.candidates(0.0).ready
        left_out = self._worker_registry.in_phase(Phase.LEFT_OUT)
        return bool(left_out) and not any(w in ready for w in left_out)

    def states_for(self, worker_ids: tuple[str, ...]) -> dict[str, Any]:
        """Return the states that newcomers start from: their own, or a leaver's replica."""
        states = {w: self._own_states.pop(w) for w in worker_ids if w in self._own_states}
        for worker_id, state in states.items():
            if worker_id in self._handover_since:
                del self._handover_since[worker_id]
                self._worker_group.forget(state)  # the worker has it in memory
                self._lost_residuals.note_taken(state)
        return states

    def waiting(self, reason: str, waited_s: float, *, has_trained: bool) -> str:
        """Return one sentence on why the run waits for workers.

        Raises:
            CapacityError: if it has waited longer than ``scaling.start_timeout_s``.
        """
        if waited_s <= _PATIENCE_S:
            return reason
        pending = self._worker_group.waiting_for()
        missing = f"; waiting for {pending}" if pending else ""
        if waited_s <= self._config.scaling.start_timeout_s:
            return f"{reason}{missing}"
        resume = "; the same command with --resume resumes the run" if has_trained else ""
        raise CapacityError(
            f"{reason} after {waited_s:.0f} s{missing}; lower scaling.num_workers or raise "
            f"scaling.start_timeout_s{resume}"
        )
