"""The ledger: which samples of an epoch are claimed, done, or given back.

Positions 0..n-1 count along the epoch's order; which sample stands at a position is not
known here. Over an epoch every position is completed exactly once: what is claimed is
either completed or given back. The same calls in the same order lead to the same state, so
every worker of a synchronous method keeps its own ledger and no message is needed.

Where an order has blocks (row groups of a file that is read as it is needed), a worker reserves a
block at a time and claims from it; so what it reads of a file is what it trains on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Span = tuple[int, int]
"""Positions start..stop-1."""
Cuts = Callable[[int], Sequence[int] | None]
"""Returns where the blocks of an epoch end, rising; or None, if its order has none."""
_AHEAD = 2
"""Blocks that a worker holds: one that it trains on, one that it can read meanwhile."""


def _no_blocks(epoch: int) -> None:
    return None


@dataclass(frozen=True)
class Claim:
    """A worker's claim in one epoch. A round of many steps has claims in several epochs."""

    epoch: int
    spans: list[Span]
    """Positions of the epoch; none where others have the last ones."""
    num_steps: int
    """Local steps to take over them."""

    @property
    def num_samples(self) -> int:
        """How many they are."""
        return _size(self.spans)


@dataclass(frozen=True)
class RoundShare:
    """Each worker's share of one epoch in a synchronous round."""

    num_steps: int
    """Local steps, the same for all workers."""
    counts: tuple[int, ...]
    """Samples per worker, by rank."""


def share_round(remaining: int, *, num_workers: int, batch_size: int, max_steps: int) -> RoundShare:
    """Share what a round trains of one epoch among the workers.

    A full round gives everyone ``batch_size * max_steps`` samples. What remains of an epoch and is
    less is split as evenly as it goes, in as few steps as hold it; the round then goes on in the
    next epoch.

    Args:
        remaining: samples left in this epoch; with none there is one step without samples.
        num_workers: workers in the round.
        batch_size: the most samples in one step of one worker.
        max_steps: the most local steps: of the period, or what is left of the run.
    """
    quota = batch_size * max_steps
    if remaining >= num_workers * quota:
        return RoundShare(max_steps, (quota,) * num_workers)
    least, extra = divmod(remaining, num_workers)
    counts = tuple(least + (rank < extra) for rank in range(num_workers))
    return RoundShare(max(1, -(-counts[0] // batch_size)), counts)


def split_evenly(count: int, num_parts: int) -> list[int]:
    """Return ``num_parts`` sizes that sum to ``count`` and differ by one at most."""
    least, extra = divmod(count, num_parts)
    return [least + (part < extra) for part in range(num_parts)]


class Ledger:
    """The positions of each epoch: free, claimed by a worker, or done.

    The next epoch opens when all positions of the ones before are claimed, so that nobody
    waits for a slower worker's last samples; what is given back is claimed again first.

    Args:
        num_samples: positions in an epoch, 1 or more.
        cuts: where the blocks of an epoch end.
    """

    def __init__(self, num_samples: int, *, cuts: Cuts = _no_blocks) -> None:
        assert num_samples > 0
        self.num_samples = num_samples
        self._cuts = cuts
        self.epoch = 0
        """Epochs completed: the number of the first one that is not."""
        self.num_changes = 0
        """Calls that changed it since the run began: of two copies the one with more is newer."""
        self._num_done: dict[int, int] = {}
        self._free: dict[int, list[Span]] = {}
        self._claimed: dict[str, list[tuple[int, Span]]] = {}
        self._reserved: dict[str, list[tuple[int, Span]]] = {}
        self._num_claimed = 0
        self._num_reserved: Counter[int] = Counter()
        """By epoch, where there are any."""

    @property
    def num_free(self) -> int:
        """Positions free, reserved ones too, in the epoch that the next claim takes from."""
        epoch = self._next_epoch()
        if epoch not in self._free:
            return self.num_samples
        return _size(self._free[epoch]) + self._num_reserved[epoch]

    @property
    def num_done_ever(self) -> int:
        """Positions completed since epoch 0."""
        return self.epoch * self.num_samples + sum(self._num_done.values())

    @property
    def num_claimed(self) -> int:
        """Positions claimed and not completed."""
        return self._num_claimed

    @property
    def claimants(self) -> tuple[str, ...]:
        """Workers that have claimed positions and not completed them."""
        return tuple(self._claimed)

    def num_claimed_by(self, worker_id: str) -> int:
        """Positions that a worker has claimed and not completed."""
        return _size([span for _, span in self._claimed.get(worker_id, [])])

    def claims_of(self, worker_id: str) -> list[tuple[int, Span]]:
        """Return a worker's claims that are not completed: (epoch, span), in their order."""
        return list(self._claimed.get(worker_id, []))

    def reserved_by(self, worker_id: str) -> list[tuple[int, Span]]:
        """Return a worker's next claims, as far as they are known: (epoch, span)."""
        return list(self._reserved.get(worker_id, []))

    def _next_epoch(self) -> int:
        """Return the first epoch with a free or a reserved position."""
        epochs = [e for e, free in self._free.items() if free]
        return min([*epochs, *self._num_reserved], default=self._first_unopened())

    def _first_unopened(self) -> int:
        return max(self._free, default=self.epoch - 1) + 1

    def claim(self, worker_id: str, count: int) -> tuple[int, list[Span]]:
        """Give the worker the next ``count`` free positions: (epoch, spans).

        Those of its own blocks come first, and those of other workers' blocks last. Fewer are
        returned when fewer are free in that epoch.
        """
        self.num_changes += 1
        epoch = self._next_epoch()
        self._open(epoch)
        if self._cuts(epoch) is None:
            taken, self._free[epoch] = _take(self._free[epoch], count)
        else:
            taken = self._claim_in_blocks(worker_id, epoch, count)
        self._num_claimed += _size(taken)
        if taken:
            self._claimed.setdefault(worker_id, []).extend((epoch, span) for span in taken)
        return epoch, taken

    def _open(self, epoch: int) -> None:
        if epoch not in self._free:
            self._free[epoch], self._num_done[epoch] = [(0, self.num_samples)], 0

    def _claim_in_blocks(self, worker_id: str, epoch: int, count: int) -> list[Span]:
        taken = self._take_reserved(worker_id, epoch, count)
        while _size(taken) < count and self._free[epoch]:
            self._reserve(worker_id, epoch)
            taken += self._take_reserved(worker_id, epoch, count - _size(taken))
        while _size(taken) < count and (other := self._most_reserved(epoch)):
            taken += self._take_reserved(other, epoch, count - _size(taken), from_end=True)
        while count and len(self._reserved.get(worker_id, [])) < _AHEAD:
            ahead = min((e for e, free in self._free.items() if free), default=None)
            if ahead is None:
                self._open(ahead := self._first_unopened())
            self._reserve(worker_id, ahead)
        return taken

    def _reserve(self, worker_id: str, epoch: int) -> None:
        """Set the next block with a free position aside for a worker."""
        (start, stop), *others = self._free[epoch]
        cuts = self._cuts(epoch)
        assert cuts is not None
        cut = min(stop, cuts[bisect_right(cuts, start)])
        self._free[epoch] = ([(cut, stop)] if cut < stop else []) + others
        self._reserved.setdefault(worker_id, []).append((epoch, (start, cut)))
        self._num_reserved[epoch] += cut - start

    def _unreserve(self, epoch: int, count: int) -> None:
        """Count so many positions as reserved no more."""
        self._num_reserved[epoch] -= count
        if not self._num_reserved[epoch]:
            del self._num_reserved[epoch]

    def _most_reserved(self, epoch: int) -> str | None:
        """Return the worker with the largest reserved part of an epoch, if there is one."""
        sizes = {
            worker_id: _size([span for e, span in spans if e == epoch])
            for worker_id, spans in self._reserved.items()
        }
        return max(
            sorted(w for w, size in sizes.items() if size), key=sizes.__getitem__, default=None
        )

    def _take_reserved(
        self, worker_id: str, epoch: int, count: int, *, from_end: bool = False
    ) -> list[Span]:
        """Take up to ``count`` positions of an epoch out of what a worker has set aside."""
        reserved = self._reserved.pop(worker_id, [])
        spans = [span for e, span in reserved if e == epoch]
        if from_end:  # who is helped goes on at the front
            rest, taken = _take(spans, max(0, _size(spans) - count))
        else:
            taken, rest = _take(spans, count)
        left = [(epoch, span) for span in rest] + [pair for pair in reserved if pair[0] != epoch]
        if left:
            self._reserved[worker_id] = left
        if taken:
            self._unreserve(epoch, _size(taken))
        return taken

    def complete(self, worker_id: str, count: int | None = None) -> int:
        """Count what the worker has claimed as done, in its order; return how many it was.

        Args:
            worker_id: whose.
            count: the first so many, or all there are if those are fewer; None: all.
        """
        self.num_changes += 1
        spans = self._claimed.pop(worker_id, [])
        if count is not None:
            spans, rest = _take_pairs(spans, count)
            if rest:
                self._claimed[worker_id] = rest
        for epoch, span in spans:
            self._num_done[epoch] += _size([span])
            self._num_claimed -= _size([span])
        while self._num_done.get(self.epoch) == self.num_samples:
            del self._num_done[self.epoch], self._free[self.epoch]
            self.epoch += 1
        return _size([span for _, span in spans])

    def give_back(self, worker_id: str, *, keep: int = 0) -> int:
        """Free what the worker has claimed, but for the first ``keep``; return how many it was.

        Its reservations stay its own.
        """
        self.num_changes += 1
        kept, freed = _take_pairs(self._claimed.pop(worker_id, []), keep)
        if kept:
            self._claimed[worker_id] = kept
        for epoch, span in freed:
            self._free[epoch] = sorted([*self._free[epoch], span])
            self._num_claimed -= _size([span])
        return _size([span for _, span in freed])

    def release(self, *, keep: Iterable[str] = (), members: Iterable[str] | None = None) -> int:
        """Free what workers have claimed; return how many it was. Free their reserves, too.

        Args:
            keep: workers whose claims stay.
            members: workers whose reserves stay, as they go on; those of ``keep``, if not given.
        """
        keep = set(keep)
        for worker_id in set(self._reserved) - set(keep if members is None else members):
            self.num_changes += 1
            for epoch, span in self._reserved.pop(worker_id):
                self._free[epoch] = sorted([*self._free[epoch], span])
                self._unreserve(epoch, _size([span]))
        return sum(self.give_back(w) for w in set(self._claimed) - keep)

    def state_dict(self, *, with_claims: bool = False) -> dict[str, Any]:
        """Return the state as plain values.

        Args:
            with_claims: tell who has claimed what, for workers that go on with it; otherwise
                what is claimed and not done counts as free. What is reserved stays so.
        """
        free = {epoch: list(spans) for epoch, spans in self._free.items()}
        claimed, reserved = _listed(self._claimed), _listed(self._reserved)
        if not with_claims:
            for _, epoch, (start, stop) in claimed:
                free[epoch].append((start, stop))
            claimed = []
        return {
            "num_samples": self.num_samples,
            "epoch": self.epoch,
            "num_changes": self.num_changes,
            "open": [
                [epoch, self._num_done[epoch], [list(span) for span in sorted(spans)]]
                for epoch, spans in sorted(free.items())
            ],
            "claimed": claimed,
            "reserved": reserved,
        }

    def as_told(self) -> dict[str, Any]:
        """Return the state for one that makes a lost ledger again, in few objects.

        As ``state_dict``: what is claimed and not done counts as free. But neighbours are one
        span, and spans are not copied: it is told often, behind a lock.
        """
        free = {epoch: list(spans) for epoch, spans in self._free.items()}
        for pairs in self._claimed.values():
            for epoch, span in pairs:
                free[epoch].append(span)
        return {
            "num_samples": self.num_samples,
            "epoch": self.epoch,
            "num_changes": self.num_changes,
            "open": [(e, self._num_done[e], _joined(free[e])) for e in sorted(free)],
            "reserved": _listed(self._reserved),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], *, cuts: Cuts = _no_blocks) -> Ledger:
        """Return the ledger that ``state_dict`` described; to claim from it, give the cuts."""
        ledger = cls(state["num_samples"], cuts=cuts)
        ledger.epoch = state["epoch"]
        ledger.num_changes = state.get("num_changes", 0)
        for epoch, num_done, free in state["open"]:
            ledger._num_done[epoch] = num_done
            ledger._free[epoch] = [(start, stop) for start, stop in free]
        for worker_id, epoch, (start, stop) in state.get("claimed", []):
            ledger._claimed.setdefault(worker_id, []).append((epoch, (start, stop)))
            ledger._num_claimed += stop - start
        for worker_id, epoch, (start, stop) in state.get("reserved", []):
            ledger._reserved.setdefault(worker_id, []).append((epoch, (start, stop)))
            ledger._num_reserved[epoch] += stop - start
        return ledger


def num_done_by(state: dict[str, Any]) -> int:
    """Return the positions completed since epoch 0 by what ``Ledger.state_dict`` returned."""
    done: int = state["epoch"] * state["num_samples"]
    for _, num_done, _ in state["open"]:
        done += num_done
    return done


def _listed(spans: dict[str, list[tuple[int, Span]]]) -> list[Any]:
    return [[worker_id, e, list(span)] for worker_id, pairs in spans.items() for e, span in pairs]


def _joined(spans: list[Span]) -> list[Span]:
    """Return spans in their order, neighbours as one."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and joined[-1][1] == span[0]:
            joined[-1] = joined[-1][0], span[1]
        else:
            joined.append(span)
    return joined


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


def _take_pairs(
    pairs: list[tuple[int, Span]], count: int
) -> tuple[list[tuple[int, Span]], list[tuple[int, Span]]]:
    """Split off the first ``count`` positions of (epoch, span) pairs: (taken, rest)."""
    taken, rest = [], []
    for epoch, (start, stop) in pairs:
        cut = min(stop, start + count)
        count -= cut - start
        if start < cut:
            taken.append((epoch, (start, cut)))
        if cut < stop:
            rest.append((epoch, (cut, stop)))
    return taken, rest
