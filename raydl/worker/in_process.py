"""Both transports within one process: for one worker without Ray, and for tests."""

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
"""The node of a center and workers that share a process."""


class LocalGroup:
    """Members that meet in shared memory and sum in the order of their ranks.

    Args:
        num_workers: members; each takes its own ``member``.
        timeout_s: the longest wait for the others, in seconds.
        generation: the membership it belongs to, for messages.
    """

    def __init__(self, num_workers: int, *, timeout_s: float, generation: int = 1) -> None:
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self.generation = generation
        self._arrived: dict[int, dict[int, Tensor]] = {}
        self._num_left: dict[int, int] = {}
        self._gone: set[int] = set()
        self._changed = threading.Condition()

    def member(self, rank: int) -> LocalMember:
        """Return the group as one rank sees it."""
        return LocalMember(self, rank)

    def arrive(self, rank: int, turn: int, tensor: Tensor) -> None:
        """Hand in a tensor for the turn-th sum; the group keeps a copy."""
        with self._changed:
            here = self._arrived.setdefault(turn, {})
            if rank not in self._gone:
                here[rank] = tensor.clone()
            self._changed.notify_all()

    def remove_member(self, rank: int) -> None:
        """Let a member go: sums that it has handed nothing in for fail, for those who wait too."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def total(self, turn: int, round: int) -> list[Tensor]:
        """Wait for all tensors of a turn, and return them in the order of the ranks.

        Raises:
            ExchangeTimeoutError: somebody did not come in time.
            ExchangeError: somebody has gone.
        """
        with self._changed:
            here = self._arrived[turn]

            def is_decided() -> bool:
                return len(here) == self.num_workers or not self._gone <= here.keys()

            if not self._changed.wait_for(is_decided, self.timeout_s):
                missing = [f"rank {r}" for r in range(self.num_workers) if r not in here]
                raise ExchangeTimeoutError(round, self.generation, self.timeout_s, missing)
            if len(here) < self.num_workers:
                gone = [f"rank {r}" for r in sorted(self._gone - here.keys())]
                raise ExchangeError(round, self.generation, f"{', '.join(gone)} left the group")
            self._num_left[turn] = self._num_left.get(turn, 0) + 1
            if self._num_left[turn] == self.num_workers:
                del self._num_left[turn], self._arrived[turn]
            return [here[rank] for rank in range(self.num_workers)]


class LocalMember:
    """One rank's side of a ``LocalGroup``."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self._group = group
        self._rank = rank
        self._turn = 0

    @property
    def num_workers(self) -> int:
        """Members of the group."""
        return self._group.num_workers

    def start_allreduce(self, tensor: Tensor, *, round: int) -> LocalWork:
        """Hand in the tensor; the sum is taken in ``LocalWork.wait``."""
        turn, self._turn = self._turn, self._turn + 1
        self._group.arrive(self._rank, turn, tensor)
        return LocalWork(self._group, tensor, turn, round)

    def start_allgather(self, tensor: Tensor, out: Tensor, *, round: int) -> LocalWork:
        """Hand in the tensor; ``out``, shape [num_workers, n], is filled in ``wait``."""
        turn, self._turn = self._turn, self._turn + 1
        self._group.arrive(self._rank, turn, tensor)
        return LocalWork(self._group, out, turn, round, is_sum=False)

    def report(self) -> AllreduceReport | None:
        """Return None: threads choose nothing."""
        return None

    def close(self) -> None:
        """Leave the group: what this member has not handed in yet fails, here and at the others."""
        self._group.remove_member(self._rank)


class LocalWork:
    """A sum, or a collection, under way among threads."""

    def __init__(
        self, group: LocalGroup, tensor: Tensor, turn: int, round: int, *, is_sum: bool = True
    ) -> None:
        self._group = group
        self._tensor = tensor
        self._is_sum = is_sum
        self._turn = turn
        self._round = round

    def wait(self) -> None:
        """Wait for all ranks, then put their sum, or each of them, into the tensor."""
        first, *others = self._group.total(self._turn, self._round)
        if not self._is_sum:
            torch.stack([first, *others], out=self._tensor)
            return
        self._tensor.copy_(first)
        for other in others:
            self._tensor.add_(other)


class LocalCenterClient:
    """Messages to shards in this process: each is taken at once, in the sender's thread.

    Args:
        center: the home shard and its coordinator.
        others: the other shards, in their order.
    """

    def __init__(self, center: CenterServer, others: Sequence[Shard] = ()) -> None:
        self._center = center
        self._shards: list[CenterServer | Shard] = [center, *others]

    @property
    def num_shards(self) -> int:
        """Shards of the center."""
        return len(self._shards)

    def request(self, shard: int, request: Request) -> LocalPendingResponse:
        """Let the shard take the message, and keep the answer."""
        return LocalPendingResponse(self._shards[shard].exchange(request))

    def shared_cells(self, message_id: MessageId) -> dict[Span, CellAddress]:
        """Return the memory that the shards let a worker map."""
        shared: dict[Span, CellAddress] = {}
        for shard in self._shards:
            shared |= shard.shared_cells(message_id.worker_id, HERE)
        return shared

    def enter(self, message_id: MessageId, local_step: int) -> Assignment:
        """Return the first orders."""
        return self._center.enter(message_id, local_step)

    def take_turn(self, message_id: MessageId) -> None:
        """Wait until it is this worker's turn."""
        self._center.take_turn(message_id)

    def end_turn(self, message_id: MessageId) -> None:
        """Let the next in rank order begin."""
        self._center.end_turn(message_id)

    def leave_generation(self, message_id: MessageId) -> None:
        """Leave the generation."""
        self._center.leave_generation(message_id)


class LocalPendingResponse:
    """A message that has arrived."""

    def __init__(self, response: Response) -> None:
        self._response = response

    def wait(self) -> Response:
        """Return the answer."""
        return self._response
