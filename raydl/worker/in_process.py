"""Both transports within one process, for a run without Ray and for tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from raydl.core.reports import AllreduceReport
from raydl.data.ledger import Span
from raydl.errors import ExchangeError, ExchangeTimeoutError
from raydl.parameter_server.protocol import Assignment, CellAddress, MessageId, Request, Response
from raydl.parameter_server.server import CenterServer
from raydl.parameter_server.shard import Shard

HERE = "here"
"""The node name of a center and workers in one process."""


class LocalGroup:
    """Members in threads that sum in shared memory, in rank order.

    Args:
        num_workers: number of members; each uses its own ``member``.
        timeout_s: the longest wait for the others, in seconds.
        generation: the membership, for messages.
    """

    def __init__(self, num_workers: int, *, timeout_s: float, generation: int = 1) -> None:
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self.generation = generation
        self._tensors: dict[int, dict[int, Tensor]] = {}
        """By operation and rank, the tensors submitted so far."""
        self._num_returned: dict[int, int] = {}
        self._left: set[int] = set()
        self._changed = threading.Condition()

    def member(self, rank: int) -> LocalMember:
        """Return one rank's view of the group."""
        return LocalMember(self, rank)

    def submit(self, rank: int, operation: int, tensor: Tensor) -> None:
        """Submit a rank's tensor for an operation; the group keeps a copy."""
        with self._changed:
            tensors = self._tensors.setdefault(operation, {})
            if rank not in self._left:
                tensors[rank] = tensor.clone()
            self._changed.notify_all()

    def remove_member(self, rank: int) -> None:
        """Remove a member: operations without its tensor fail, for waiting members, too."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def wait_for_all(self, operation: int, round: int) -> list[Tensor]:
        """Wait for all tensors of an operation, and return them in rank order.

        Raises:
            ExchangeTimeoutError: if a rank did not submit its tensor in time.
            ExchangeError: if a rank left before.
        """
        with self._changed:
            tensors = self._tensors[operation]

            def is_decided() -> bool:
                return len(tensors) == self.num_workers or not self._left <= tensors.keys()

            if not self._changed.wait_for(is_decided, self.timeout_s):
                missing = [f"rank {r}" for r in range(self.num_workers) if r not in tensors]
                raise ExchangeTimeoutError(round, self.generation, self.timeout_s, missing)
            if len(tensors) < self.num_workers:
                left = [f"rank {r}" for r in sorted(self._left - tensors.keys())]
                raise ExchangeError(round, self.generation, f"{', '.join(left)} left the group")
            self._num_returned[operation] = self._num_returned.get(operation, 0) + 1
            if self._num_returned[operation] == self.num_workers:
                del self._num_returned[operation], self._tensors[operation]
            return [tensors[rank] for rank in range(self.num_workers)]


class LocalMember:
    """One rank's view of a ``LocalGroup``."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self.num_workers = group.num_workers
        self._group = group
        self._rank = rank
        self._operation = -1

    def start_allreduce(self, tensor: Tensor, *, round: int) -> LocalWork:
        """Submit the tensor; ``LocalWork.wait`` computes the sum."""
        return self._start(tensor, tensor, round, is_sum=True)

    def start_allgather(self, tensor: Tensor, out: Tensor, *, round: int) -> LocalWork:
        """Submit the tensor; ``LocalWork.wait`` fills ``out``, shape [num_workers, n]."""
        return self._start(tensor, out, round, is_sum=False)

    def _start(self, tensor: Tensor, out: Tensor, round: int, *, is_sum: bool) -> LocalWork:
        self._operation += 1
        self._group.submit(self._rank, self._operation, tensor)
        return LocalWork(self._group, out, self._operation, round, is_sum=is_sum)

    def raise_if_abandoned(self, *, round: int) -> None:
        """Do nothing: no member is asked to leave."""

    def report(self) -> AllreduceReport | None:
        """Return None: there is one algorithm."""
        return None

    def close(self) -> None:
        """Leave the group: operations that this member has not submitted to fail everywhere."""
        self._group.remove_member(self._rank)


class LocalWork:
    """A sum or a gather in progress among threads."""

    def __init__(
        self, group: LocalGroup, out: Tensor, operation: int, round: int, *, is_sum: bool
    ) -> None:
        self._group = group
        self._out = out
        self._is_sum = is_sum
        self._operation = operation
        self._round = round

    def wait(self) -> None:
        """Wait for all ranks, then write their sum, or each rank's tensor, to the result."""
        first, *others = self._group.wait_for_all(self._operation, self._round)
        if not self._is_sum:
            torch.stack([first, *others], out=self._out)
            return
        self._out.copy_(first)
        for other in others:
            self._out.add_(other)


class LocalCenterClient:
    """Messages to shards in this process, which the sender's thread applies at once.

    Args:
        center: the home shard and its coordinator.
        others: the other shards, in order.
    """

    def __init__(self, center: CenterServer, others: Sequence[Shard] = ()) -> None:
        self._center = center
        self._shards: list[CenterServer | Shard] = [center, *others]
        self.num_shards = len(self._shards)

    def request(self, shard: int, request: Request) -> LocalPendingResponse:
        """Apply the message to a shard, and keep the answer."""
        return LocalPendingResponse(self._shards[shard].exchange(request))

    def shared_cells(self, message_id: MessageId) -> dict[Span, CellAddress]:
        """Return the memory that the shards share with a worker."""
        shared: dict[Span, CellAddress] = {}
        for shard in self._shards:
            shared |= shard.shared_cells(message_id.worker_id, HERE)
        return shared

    def enter(self, message_id: MessageId, local_step: int) -> Assignment:
        """Return the first assignment."""
        return self._center.enter(message_id, local_step)

    def applied(self, message_id: MessageId, generation: int) -> dict[Span, int]:
        """Return which messages of a worker the shards have applied."""
        applied: dict[Span, int] = {}
        for shard in self._shards:
            applied |= shard.applied(message_id.worker_id, generation)
        return applied

    def take_turn(self, message_id: MessageId) -> None:
        """Wait for this worker's turn."""
        self._center.take_turn(message_id)

    def end_turn(self, message_id: MessageId) -> None:
        """Pass the turn to the next rank."""
        self._center.end_turn(message_id)

    def leave_generation(self, message_id: MessageId) -> None:
        """Leave the generation."""
        self._center.leave_generation(message_id)


class LocalPendingResponse:
    """A message that was answered."""

    def __init__(self, response: Response) -> None:
        self._response = response

    def wait(self) -> Response:
        """Return the answer."""
        return self._response
