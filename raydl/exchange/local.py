"""A group of threads in one process: for one worker without Ray, and for tests."""

from __future__ import annotations

import threading

from torch import Tensor

from raydl.errors import ExchangeTimeoutError


class LocalGroup:
    """Members that meet in shared memory and sum in the order of their ranks.

    Args:
        num_workers: members; each takes its own :meth:`member`.
        timeout_s: the longest wait for the others, in seconds.
        generation: the membership it belongs to, for messages.
    """

    def __init__(self, num_workers: int, *, timeout_s: float, generation: int = 1) -> None:
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self.generation = generation
        self._arrived: dict[int, dict[int, Tensor]] = {}
        self._changed = threading.Condition()

    def member(self, rank: int) -> LocalMember:
        """Return the group as one rank sees it."""
        return LocalMember(self, rank)

    def arrive(self, rank: int, round: int, tensor: Tensor) -> None:
        """Hand in a tensor for a round; the group keeps a copy."""
        with self._changed:
            self._arrived.setdefault(round, {})[rank] = tensor.clone()
            self._arrived.pop(round - 2, None)  # everybody has left the round before last
            self._changed.notify_all()

    def total(self, round: int) -> list[Tensor]:
        """Wait for all tensors of a round, and return them in the order of the ranks.

        Raises:
            ExchangeTimeoutError: somebody did not come in time.
        """
        with self._changed:
            complete = self._changed.wait_for(
                lambda: len(self._arrived[round]) == self.num_workers, self.timeout_s
            )
            here = self._arrived[round]
            if not complete:
                missing = [f"rank {r}" for r in range(self.num_workers) if r not in here]
                raise ExchangeTimeoutError(round, self.generation, self.timeout_s, missing)
            return [here[rank] for rank in range(self.num_workers)]


class LocalMember:
    """One rank's side of a :class:`LocalGroup`."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    @property
    def num_workers(self) -> int:
        """Members of the group."""
        return self._group.num_workers

    def start_allreduce(self, tensor: Tensor, *, round: int) -> LocalWork:
        """Hand in the tensor; the sum is taken in :meth:`LocalWork.wait`."""
        self._group.arrive(self._rank, round, tensor)
        return LocalWork(self._group, tensor, round)


class LocalWork:
    """A sum under way among threads."""

    def __init__(self, group: LocalGroup, tensor: Tensor, round: int) -> None:
        self._group = group
        self._tensor = tensor
        self._round = round

    def wait(self) -> None:
        """Wait for all ranks, then put their sum into the tensor."""
        first, *others = self._group.total(self._round)
        self._tensor.copy_(first)
        for other in others:
            self._tensor.add_(other)
