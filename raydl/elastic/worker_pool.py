"""Requests, releases and replaces workers, and hands a leaver's replica to its replacement."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from typing import Any

from raydl.config import TrainConfig
from raydl.core.membership import Membership, next_membership
from raydl.core.saved_state import SavedState
from raydl.core.worker_group import WorkerGroup
from raydl.elastic.failures import WorkerErrors, in_one_line
from raydl.elastic.generation import Generation
from raydl.elastic.worker_registry import Phase, WorkerRegistry
from raydl.errors import CapacityError, ProcessLostError

_PATIENCE_S = 5.0
"""How long a run that has its fewest workers waits for more before it starts."""
_HANDOVER_S = 120.0
"""The longest wait for a replica to be handed in, and as long for one to be taken over, in seconds:
others may stand still meanwhile, and a newcomer can start at the center."""


class WorkerPool:
    """The workers of a run.

    Args:
        worker_group: their processes.
        config: the run's settings.
        worker_registry: what is known of each.
        own_states: states of workers from a checkpoint, by id, in the order of their ranks.
        takes_over: whether the replica of one that leaves is worth keeping: with rules that
            send weights it is its own, otherwise it is a copy of the center.
        log: takes one line on what happened.
        clock: seconds, rising.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        config: TrainConfig,
        worker_registry: WorkerRegistry,
        *,
        own_states: dict[str, Any],
        takes_over: bool,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker_group = worker_group
        self._config = config
        self._worker_registry = worker_registry
        self._own_states = dict(own_states)
        self._saved_order = list(own_states)
        self._handed_in: list[SavedState] = []
        self._taking_over: dict[str, float | None] = {}
        self._takes_over = takes_over
        self._log = log
        self._max_workers = max(1, config.scaling.max_workers)
        self._num_losses = 0
        self._num_asked = 0
        self._asked: dict[str, int] = {}
        self._new_from = 0
        self._clock = clock
        self._errors = WorkerErrors(config.elastic, clock)
        self.is_requesting = True
        """Whether the run may go on; near its end nobody is asked for any more."""
        for worker_id in self._saved_order[: self._max_workers]:
            self._ask(worker_id)
        self._ask_for_missing()

    def _ask(self, worker_id: str) -> None:
        self._asked[worker_id] = self._num_asked
        self._num_asked += 1
        self._worker_registry.add(worker_id)
        self._worker_group.request_worker(worker_id, self._own_states.get(worker_id))

    def stop_requesting(self) -> None:
        """Ask for nobody any more: the run is about to end."""
        self.is_requesting = False

    def _ask_for_missing(self) -> str:
        """Ask for as many workers as are missing; return the id of the first, "": none is."""
        first = ""
        while self.is_requesting and self._worker_registry.num_coming < self._max_workers:
            worker_id = self._worker_registry.new_id()
            self._ask(worker_id)
            first = first or worker_id
        return first

    # who goes

    def remove(self, worker_id: str) -> tuple[bool, str]:
        """Let a worker leave because the user wants it; return (whether it will, a sentence).

        Another one takes its place only if too few would be left.
        """
        if worker_id not in self._worker_registry:
            there = ", ".join(e.worker_id for e in self._worker_registry.entries())
            return False, f"there is no worker {worker_id}; there are {there}"
        if self._worker_registry[worker_id].phase is Phase.LEAVING:
            return True, f"{worker_id} is leaving already"
        fewest = max(1, self._config.scaling.min_workers)
        is_replaced = self._max_workers <= fewest
        self._max_workers = max(fewest, self._max_workers - 1)
        is_out = self._worker_registry[worker_id].phase in (Phase.STARTING, Phase.READY)
        self.send_away(worker_id, "was removed")
        how = "is ended; it did not train" if is_out else "leaves after its next exchange"
        then = "; another one takes its place, for fewer may not train" if is_replaced else ""
        return True, f"{worker_id} {how}{then}"

    def send_away(self, worker_id: str, cause: str) -> None:
        """Let a worker leave, and ask for another one if there is room."""
        entry = self._worker_registry[worker_id]
        if entry.phase is Phase.LEAVING:
            return
        self._log(f"{worker_id} {cause}")
        if entry.phase in (Phase.STARTING, Phase.READY):
            self._worker_group.end(worker_id)
            self._remove(worker_id, cause)
        else:
            self._worker_registry.send_away(worker_id, cause)
        self._ask_for_missing()

    def lose(self, worker_id: str, reason: str) -> str:
        """Note that a worker was lost, and ask for another one; return its id, "": none is due."""
        self._log(f"{worker_id} was lost: {reason}")
        # Workers that were there when it began are one loss, however many: of a rack, say, or a
        # market that takes its machines back.
        if self._asked[worker_id] >= self._new_from:
            self._new_from = self._num_asked
            self.count_loss(worker_id, reason)
        self._remove(worker_id, "was lost")
        return self._ask_for_missing()

    def note_error(self, worker_id: str, error: Exception) -> str:
        """Replace a worker in which something was raised, if it may be.

        Returns:
            Why the run stops instead; empty: the worker is replaced.
        """
        why = self._errors.why_stop(worker_id, error)
        if why:
            return why
        node = self._worker_registry[worker_id].node
        self._worker_group.end(worker_id)
        if self._errors.note(worker_id, node) and self._worker_group.avoid(node):
            self._log(
                f"no further worker is started on node {node[:12]}: within an hour its workers had "
                f"more errors than elastic.max_worker_errors"
            )
        replacement = self.lose(worker_id, in_one_line(error))
        if replacement:
            self._errors.replace(worker_id, replacement)
        return ""

    def end(self, worker_id: str) -> None:
        """End a worker near the end of the run, when none takes its place."""
        self._worker_group.end(worker_id)
        self._remove(worker_id, "failed")

    def _remove(self, worker_id: str, cause: str) -> None:
        self._worker_registry.remove(worker_id, cause)
        self._asked.pop(worker_id, None)
        state = self._own_states.pop(worker_id, None)
        if (
            worker_id in self._taking_over
        ):  # not for the next one: it may have been too much for this one
            del self._taking_over[worker_id]
            self._worker_group.forget(state)

    def leave_out(self, run: Generation, worker_ids: tuple[str, ...]) -> None:
        """Go on without workers that are late; they may come back."""
        self._worker_registry.leave_out(worker_ids)
        for worker_id in worker_ids:
            run.lose(worker_id)

    def lose_stuck(self) -> list[str]:
        """End the workers that do not get out of a step; return who they are."""
        stuck = self._worker_registry.stuck()
        for worker_id, seconds in stuck:
            self._worker_group.end(worker_id)
            self.lose(
                worker_id,
                f"it is stuck, in one step for {seconds:.0f} s (elastic.lease_s, or "
                f"elastic.max_busy_s where it computes)",
            )
        return [worker_id for worker_id, _ in stuck]

    def count_loss(self, name: str, reason: str) -> None:
        """Note a loss, of a process or of several at once.

        Raises:
            ProcessLostError: there were too many, without any progress of the training.
        """
        self._num_losses += 1
        if self._num_losses > self._config.elastic.max_restarts:
            raise ProcessLostError(
                name,
                f"{reason}; it is loss {self._num_losses} in a row while the training did not "
                f"go on, more than elastic.max_restarts",
            )

    def saw_progress(self) -> None:
        """Note that the training goes on."""
        self._num_losses = self._new_from = 0

    def release_leavers(self, still_needed: Container[str]) -> list[str]:
        """Keep the replicas of workers that have left, then end these; return their ids.

        A replica is as large as the model and its optimizer: it is kept only for somebody who
        comes.

        Args:
            still_needed: who has something yet that the others may need.
        """
        self._end_long_waits()
        gone = []
        for worker_id in self._worker_registry.named(Phase.LEAVING):
            entry = self._worker_registry[worker_id]
            if entry.in_loop:
                continue
            if self._lacks_replicas and entry.asked_at is None:
                entry.asked_at = self._clock()
                self._worker_group.hand_in(worker_id)
            is_free = entry.has_handed_in or entry.asked_at is None
            if is_free and worker_id not in still_needed:
                self._worker_group.end(worker_id)
                self._remove(worker_id, entry.cause)
                gone.append(worker_id)
        return gone

    def _end_long_waits(self) -> None:
        """Wait no longer for what has taken too long."""
        late = self._clock() - _HANDOVER_S
        why = f"it took longer than {_HANDOVER_S:.0f} s"
        for worker_id in self._under_way():
            if (self._worker_registry[worker_id].asked_at or 0.0) < late:
                self.note_handed_in(worker_id, None, why)
        for worker_id, since in list(self._taking_over.items()):
            if since is not None and since < late:
                self.note_not_taken_over(worker_id, why)

    def _under_way(self) -> list[str]:
        """Return those whose replicas are on their way to the storage."""
        leavers = [self._worker_registry[w] for w in self._worker_registry.named(Phase.LEAVING)]
        return [e.worker_id for e in leavers if e.asked_at is not None and not e.has_handed_in]

    @property
    def _lacks_replicas(self) -> bool:
        """Whether somebody comes for whom no replica is kept, nor on its way."""
        num_kept = len(self._handed_in) + len(self._under_way())
        return self._takes_over and num_kept < self._num_newcomers()

    def _num_newcomers(self) -> int:
        """Return how many come and have no replica of their own."""
        coming = self._worker_registry.named(Phase.STARTING) + self._worker_registry.named(
            Phase.READY
        )
        return sum(map(self._needs_replica, coming))

    def note_handed_in(self, worker_id: str, state: SavedState | None, why_none: str = "") -> None:
        """Note that the replica of one that leaves is kept for one that comes.

        Args:
            worker_id: who leaves.
            state: its replica; None: there is none.
            why_none: then tells why.
        """
        if worker_id not in self._under_way():  # it was lost, or is not waited for any more
            if state is not None:
                self._worker_group.forget(state)
            return
        self._worker_registry[worker_id].has_handed_in = True
        if state is None:
            self._log(f"the replica of {worker_id} is not handed over: {why_none}")
            return
        self._handed_in.append(state)
        self.hand_over()
        # The newcomer may have gone, and soon the replica is out of date.
        surplus = self._handed_in[self._num_newcomers() :]
        del self._handed_in[self._num_newcomers() :]
        for state in surplus:
            self._worker_group.forget(state)

    def hand_over(self) -> None:
        """Let those who are up and have not trained take over what leavers have handed in."""
        for worker_id in self._worker_registry.named(Phase.READY):
            if self._handed_in and self._needs_replica(worker_id):
                state = self._own_states[worker_id] = self._handed_in.pop(0)
                self._taking_over[worker_id] = self._clock()
                self._worker_group.hand_over(worker_id, state)

    def note_taken_over(self, worker_id: str) -> None:
        """Note that a newcomer has the replica of one that left."""
        if worker_id in self._taking_over:
            self._taking_over[worker_id] = None

    def note_not_taken_over(self, worker_id: str, reason: str) -> None:
        """Let a newcomer start at the center, since a replica does not come to it."""
        if self._taking_over.pop(worker_id, None) is not None:
            self._worker_group.forget(self._own_states.pop(worker_id))
            self._log(f"{worker_id} starts at the center: {reason}")

    def awaits_handover(self, newcomers: Iterable[str]) -> bool:
        """Whether a replica is on its way that a newcomer could start from."""
        newcomers = list(newcomers)
        if any(self._taking_over.get(w) is not None for w in newcomers):
            return True
        return bool(self._under_way()) and any(map(self._needs_replica, newcomers))

    def _needs_replica(self, worker_id: str) -> bool:
        return (
            worker_id not in self._own_states and not self._worker_registry[worker_id].has_trained
        )

    # who comes

    def decide(
        self, now: Membership | None, *, waited_s: float = 0.0
    ) -> tuple[Membership | None, str]:
        """Return the next membership and why; see ``raydl.core.membership.next_membership``."""
        scaling, group_size = self._config.scaling, self._config.method.group_size
        sort_key = self._place if now is None and group_size > 1 else None
        return next_membership(
            now,
            self._worker_registry.candidates(waited_s, sort_key=sort_key),
            min_workers=max(1, scaling.min_workers),
            max_workers=self._max_workers,
            patience_s=_PATIENCE_S,
            group_size=group_size,
        )

    def are_all_absent(self) -> bool:
        """Whether workers were left out, and none of them could come back yet."""
        ready = self._worker_registry.candidates(0.0).ready
        left_out = self._worker_registry.named(Phase.LEFT_OUT)
        return bool(left_out) and not any(w in ready for w in left_out)

    def _place(self, worker_id: str) -> tuple[str, int]:
        """Return the sort key of a worker: in groups as they were; else by node."""
        if worker_id in self._saved_order:
            return "", self._saved_order.index(worker_id)
        return self._worker_registry[worker_id].node, int(worker_id.lstrip("w"))

    def states_for(self, worker_ids: tuple[str, ...]) -> dict[str, Any]:
        """Return the replica states that newcomers start from: their own, or a leaver's."""
        states = {w: self._own_states.pop(w) for w in worker_ids if w in self._own_states}
        for worker_id in states.keys() & self._taking_over.keys():
            del self._taking_over[worker_id]
            self._worker_group.forget(states[worker_id])  # it has it
        return states

    def waiting(self, reason: str, waited_s: float, *, has_trained: bool) -> str:
        """Return the reason for waiting, in one sentence.

        Raises:
            ResourceError: it has waited for too long.
        """
        if waited_s <= _PATIENCE_S:
            return reason
        missing = f"waiting for {self._worker_group.waiting_for()}"
        if waited_s <= self._config.scaling.start_timeout_s:
            return f"{reason}; {missing}"
        go_on = "; the same command with --resume goes on" if has_trained else ""
        raise CapacityError(
            f"{reason} after {waited_s:.0f} s; {missing}; lower scaling.num_workers or raise "
            f"scaling.start_timeout_s{go_on}"
        )
