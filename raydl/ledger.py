"""Which samples of this epoch are claimed, done, or given back.

Positions 0..n-1 count along the epoch's order; which sample stands at a position is not
known here. Over an epoch every position is completed exactly once: what is claimed is
either completed or given back. The same calls in the same order lead to the same state, so
every worker of a synchronous method keeps its own ledger and no message is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Span = tuple[int, int]
"""Positions start..stop-1."""


@dataclass(frozen=True)
class RoundShare:
    """What each worker does in one synchronous round."""

    num_steps: int
    """Local steps, the same for all workers."""
    counts: tuple[int, ...]
    """Samples per worker, by rank."""


def share_round(remaining: int, *, num_workers: int, batch_size: int, max_steps: int) -> RoundShare:
    """Share the next round among the workers.

    Full rounds give everyone ``batch_size * max_steps`` samples. The last one of an epoch
    splits what remains as evenly as it goes, in as few steps as hold it.

    Args:
        remaining: samples left in this epoch, 1 or more.
        num_workers: workers in the round.
        batch_size: the most samples in one step of one worker.
        max_steps: the most local steps: the period, or what is left of the run.
    """
    assert remaining > 0
    quota = batch_size * max_steps
    if remaining >= num_workers * quota:
        return RoundShare(max_steps, (quota,) * num_workers)
    least, extra = divmod(remaining, num_workers)
    counts = tuple(least + (rank < extra) for rank in range(num_workers))
    return RoundShare(-(-counts[0] // batch_size), counts)


def split_evenly(count: int, num_parts: int) -> list[int]:
    """Return ``num_parts`` sizes that sum to ``count`` and differ by one at most."""
    least, extra = divmod(count, num_parts)
    return [least + (part < extra) for part in range(num_parts)]


class Ledger:
    """The positions of one epoch: free, claimed by a worker, or done.

    Args:
        num_samples: positions in an epoch, 1 or more.
        epoch: the epoch that begins, counted from 0.
    """

    def __init__(self, num_samples: int, *, epoch: int = 0) -> None:
        assert num_samples > 0
        self.num_samples = num_samples
        self.epoch = epoch
        self.num_done = 0
        self._free: list[Span] = [(0, num_samples)]
        self._claimed: dict[str, list[Span]] = {}

    @property
    def num_free(self) -> int:
        """Positions that nobody has claimed."""
        return _size(self._free)

    @property
    def num_done_ever(self) -> int:
        """Positions completed since epoch 0."""
        return self.epoch * self.num_samples + self.num_done

    def claim(self, worker_id: str, count: int) -> list[Span]:
        """Give the worker the next ``count`` free positions and return them as spans.

        Fewer are returned when fewer are free.
        """
        taken, self._free = _take(self._free, count)
        if taken:
            self._claimed.setdefault(worker_id, []).extend(taken)
        return taken

    def complete(self, worker_id: str) -> int:
        """Count all that the worker has claimed as done; return how many it was."""
        count = _size(self._claimed.pop(worker_id, []))
        self.num_done += count
        return count

    def give_back(self, worker_id: str) -> int:
        """Free all that the worker has claimed; return how many it was."""
        spans = self._claimed.pop(worker_id, [])
        self._free = sorted(self._free + spans)
        return _size(spans)

    @property
    def epoch_is_complete(self) -> bool:
        """Whether every position of this epoch is done."""
        return self.num_done == self.num_samples

    def next_epoch(self) -> None:
        """Begin the next epoch, all positions free."""
        assert self.epoch_is_complete, "an epoch ends when every sample is done"
        self.__init__(self.num_samples, epoch=self.epoch + 1)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values; what is claimed and not done counts as free."""
        claimed = [span for spans in self._claimed.values() for span in spans]
        free = sorted(self._free + claimed)
        return {
            "num_samples": self.num_samples,
            "epoch": self.epoch,
            "num_done": self.num_done,
            "free": [list(span) for span in free],
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Ledger:
        """Return the ledger that :meth:`state_dict` described."""
        ledger = cls(state["num_samples"], epoch=state["epoch"])
        ledger.num_done = state["num_done"]
        ledger._free = [(start, stop) for start, stop in state["free"]]
        return ledger


def _size(spans: list[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _take(spans: list[Span], count: int) -> tuple[list[Span], list[Span]]:
    """Split off the first ``count`` positions: (taken, rest)."""
    taken: list[Span] = []
    for index, (start, stop) in enumerate(spans):
        if count == 0:
            return taken, spans[index:]
        cut = min(stop, start + count)
        taken.append((start, cut))
        count -= cut - start
        if cut < stop:
            return taken, [(cut, stop), *spans[index + 1 :]]
    return taken, []
