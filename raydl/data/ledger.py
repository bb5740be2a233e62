"""The ledger: which samples of an epoch are free, claimed or done.

Positions 0..n-1 count along the order of an epoch; the ledger does not know which sample is at a
position. Each position is completed exactly once per epoch: a claim is either completed or given
back. The same calls in the same order give the same state, so every worker of a synchronous method
keeps its own ledger and sends no message about it.

If an order has blocks (row groups of a streamed file), a worker reserves one block at a time and
claims from it, so that it trains on all samples that it reads. If the blocks are shares that differ
by class, a worker claims from its own share first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

from raydl.config.typed import Count, Positive, typed

Span = tuple[int, int]
"""Positions start..stop-1."""
Cuts = Callable[[int], Sequence[int] | None]
"""Returns the ends of the blocks of an epoch, ascending, or None if its order has no blocks."""
_NUM_RESERVED = 2
"""Blocks that a worker reserves: one to train on, and one to read meanwhile."""


def _no_blocks(epoch: int) -> None:
    return None


@dataclass(frozen=True)
class Claim:
    """A worker's claim in one epoch. A long round has claims in several epochs."""

    epoch: int
    spans: list[Span]
    """Positions of the epoch; empty if other workers have claimed the last ones."""
    num_steps: int
    """Local steps to take with these positions."""

    @property
    def num_samples(self) -> int:
        """Number of positions."""
        return _size(self.spans)


@dataclass(frozen=True)
class RoundShare:
    """The share of each worker in the samples of one epoch in a synchronous round."""

    num_steps: tuple[int, ...]
    """Local steps per worker, by rank."""
    counts: tuple[int, ...]
    """Samples per worker, by rank."""


def share_round(remaining: int, *, max_steps: Sequence[int], batch_size: int) -> RoundShare:
    """Share the samples of one epoch that a round trains among the workers.

    A full round gives each worker ``batch_size`` samples per local step. If fewer remain in the
    epoch, they are split in proportion to ``max_steps``, in as few steps as possible, and the round
    continues in the next epoch.

    Args:
        remaining: samples left in this epoch; with 0, the share is one step without samples.
        max_steps: most local steps per worker, by rank: the period, or the rest of the round or of
            the run.
        batch_size: most samples in one step of one worker.
    """
    quotas = tuple(batch_size * steps for steps in max_steps)
    if remaining >= sum(quotas):
        return RoundShare(tuple(max_steps), quotas)
    counts = _split_in_proportion(remaining, max_steps)
    most = max(max_steps)
    needed = max(1, -(-counts[max_steps.index(most)] // batch_size))
    num_steps = tuple(
        max(min(steps, 1), -(-count // batch_size), round(needed * steps / most))
        for steps, count in zip(max_steps, counts, strict=True)
    )
    return RoundShare(num_steps, counts)


def _split_in_proportion(count: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Return sizes that sum to ``count``, in proportion to weights; the first ones are rounded up.

    A part without weight gets nothing.
    """
    total = sum(weights)
    sizes = [count * weight // total for weight in weights]
    for part in [part for part, weight in enumerate(weights) if weight][: count - sum(sizes)]:
        sizes[part] += 1
    return tuple(sizes)


def split_evenly(count: int, num_parts: int) -> list[int]:
    """Return ``num_parts`` sizes that sum to ``count`` and differ by at most one."""
    return list(_split_in_proportion(count, [1] * num_parts))


class Ledger:
    """The positions of each epoch: free, claimed by a worker, or done.

    The next epoch opens when all positions of earlier epochs are claimed, so that no worker waits
    for the last samples of a slower one. Positions that were given back are claimed first.

    Args:
        num_samples: positions in an epoch, 1 or more.
        cuts: returns the ends of the blocks of an epoch.
    """

    def __init__(self, num_samples: int, *, cuts: Cuts = _no_blocks) -> None:
        assert num_samples > 0
        self.num_samples = num_samples
        self._cuts = cuts
        self.epoch = 0
        """Completed epochs, which is the number of the first incomplete epoch."""
        self.num_changes = 0
        """Calls since the run began that changed the ledger; the newer of two copies has more."""
        self._num_done: dict[int, int] = {}
        self._free: dict[int, list[Span]] = {}
        self._claimed: dict[str, list[tuple[int, Span]]] = {}
        self._reserved: dict[str, list[tuple[int, Span]]] = {}
        self._num_claimed = 0
        self._num_reserved: Counter[int] = Counter()
        """Reserved positions by epoch, without zeros."""

    @property
    def num_free(self) -> int:
        """Free and reserved positions in the epoch of the next claim."""
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
        """Positions that are claimed and not completed."""
        return self._num_claimed

    @property
    def claimants(self) -> tuple[str, ...]:
        """Workers with claims that are not completed."""
        return tuple(self._claimed)

    def num_claimed_by(self, worker_id: str) -> int:
        """Return the number of positions that a worker has claimed and not completed."""
        return _size([span for _, span in self._claimed.get(worker_id, [])])

    def claims_of(self, worker_id: str) -> list[tuple[int, Span]]:
        """Return the incomplete claims of a worker as (epoch, span), in claim order."""
        return list(self._claimed.get(worker_id, []))

    def reserved_by(self, worker_id: str) -> list[tuple[int, Span]]:
        """Return the reservations of a worker, its next claims, as (epoch, span)."""
        return list(self._reserved.get(worker_id, []))

    def _next_epoch(self) -> int:
        """Return the first epoch with a free or a reserved position."""
        epochs = [e for e, free in self._free.items() if free]
        return min([*epochs, *self._num_reserved], default=self._first_unopened())

    def _first_unopened(self) -> int:
        return max(self._free, default=self.epoch - 1) + 1

    def claim(
        self, worker_id: str, count: int, *, share: int | None = None
    ) -> tuple[int, list[Span]]:
        """Claim the next ``count`` free positions of one epoch for a worker.

        Positions in the worker's own blocks come first, positions in other workers' blocks last.

        Args:
            worker_id: the worker.
            count: number of positions.
            share: the block whose positions come first, if the blocks are shares
                (``raydl.data.skew``): then no worker reserves any, and the block with the most free
                positions is next.

        Returns:
            (epoch, spans); fewer than ``count`` positions if the epoch has fewer.
        """
        self.num_changes += 1
        epoch = self._next_epoch()
        self._open(epoch)
        if self._cuts(epoch) is None:
            spans, self._free[epoch] = _split(self._free[epoch], count)
        elif share is not None:
            spans = self._claim_in_shares(share, epoch, count)
        else:
            spans = self._claim_in_blocks(worker_id, epoch, count)
        self._num_claimed += _size(spans)
        if spans:
            self._claimed.setdefault(worker_id, []).extend((epoch, span) for span in spans)
        return epoch, spans

    def _open(self, epoch: int) -> None:
        if epoch not in self._free:
            self._free[epoch], self._num_done[epoch] = [(0, self.num_samples)], 0

    def _claim_in_shares(self, share: int, epoch: int, count: int) -> list[Span]:
        cuts = self._cuts(epoch)
        assert cuts is not None
        shares, spans = _cut(self._free[epoch], cuts), list[Span]()
        share %= len(shares)
        while count and any(shares):
            if not shares[share]:
                share = max(range(len(shares)), key=lambda number: _size(shares[number]))
            taken, shares[share] = _split(shares[share], count)
            spans += taken
            count -= _size(taken)
        self._free[epoch] = [span for free in shares for span in free]
        return spans

    def _claim_in_blocks(self, worker_id: str, epoch: int, count: int) -> list[Span]:
        spans = self._pop_reserved(worker_id, epoch, count)
        while _size(spans) < count and self._free[epoch]:
            self._reserve(worker_id, epoch)
            spans += self._pop_reserved(worker_id, epoch, count - _size(spans))
        while _size(spans) < count and (other := self._most_reserved(epoch)):
            spans += self._pop_reserved(other, epoch, count - _size(spans), from_end=True)
        while count and len(self._reserved.get(worker_id, [])) < _NUM_RESERVED:
            next_free = min((e for e, free in self._free.items() if free), default=None)
            if next_free is None:
                self._open(next_free := self._first_unopened())
            self._reserve(worker_id, next_free)
        return spans

    def _reserve(self, worker_id: str, epoch: int) -> None:
        """Reserve the free part of the next block for a worker."""
        (start, stop), *others = self._free[epoch]
        cuts = self._cuts(epoch)
        assert cuts is not None
        cut = min(stop, cuts[bisect_right(cuts, start)])
        self._free[epoch] = ([(cut, stop)] if cut < stop else []) + others
        self._reserved.setdefault(worker_id, []).append((epoch, (start, cut)))
        self._num_reserved[epoch] += cut - start

    def _count_unreserved(self, epoch: int, count: int) -> None:
        self._num_reserved[epoch] -= count
        if not self._num_reserved[epoch]:
            del self._num_reserved[epoch]

    def _most_reserved(self, epoch: int) -> str | None:
        """Return the worker with the most reserved positions of an epoch, or None without any."""
        sizes: Counter[str] = Counter()
        for worker_id, spans in sorted(self._reserved.items()):
            sizes[worker_id] = _size([span for e, span in spans if e == epoch])
        most = max(sizes, key=sizes.__getitem__, default="")
        return most if sizes[most] else None

    def _pop_reserved(
        self, worker_id: str, epoch: int, count: int, *, from_end: bool = False
    ) -> list[Span]:
        """Remove and return up to ``count`` positions of an epoch that a worker has reserved."""
        reserved = self._reserved.pop(worker_id, [])
        spans = [span for e, span in reserved if e == epoch]
        if from_end:  # the worker with the reservation continues at the front
            rest, popped = _split(spans, max(0, _size(spans) - count))
        else:
            popped, rest = _split(spans, count)
        kept = [(epoch, span) for span in rest] + [pair for pair in reserved if pair[0] != epoch]
        if kept:
            self._reserved[worker_id] = kept
        if popped:
            self._count_unreserved(epoch, _size(popped))
        return popped

    def complete(self, worker_id: str, count: int | None = None) -> int:
        """Mark claims of a worker as done, in claim order; return the number of positions.

        Args:
            worker_id: the worker.
            count: positions to complete, at most all that it has claimed; None: all.
        """
        self.num_changes += 1
        pairs = self._claimed.pop(worker_id, [])
        if count is not None:
            pairs, rest = _split_pairs(pairs, count)
            if rest:
                self._claimed[worker_id] = rest
        for epoch, span in pairs:
            self._num_done[epoch] += _size([span])
            self._num_claimed -= _size([span])
        while self._num_done.get(self.epoch) == self.num_samples:
            del self._num_done[self.epoch], self._free[self.epoch]
            self.epoch += 1
        return _size([span for _, span in pairs])

    def give_back(self, worker_id: str, *, keep: int = 0) -> int:
        """Free the claims of a worker but the first ``keep`` positions; return how many it freed.

        The worker keeps its reservations.
        """
        self.num_changes += 1
        kept, freed = _split_pairs(self._claimed.pop(worker_id, []), keep)
        if kept:
            self._claimed[worker_id] = kept
        for epoch, span in freed:
            self._free[epoch] = sorted([*self._free[epoch], span])
            self._num_claimed -= _size([span])
        return _size([span for _, span in freed])

    def release(self, *, keep: Iterable[str] = (), members: Iterable[str] | None = None) -> int:
        """Free claims and reservations of workers; return the number of claimed positions freed.

        Args:
            keep: workers that keep their claims.
            members: workers that keep their reservations; None: the workers in ``keep``.
        """
        keep = set(keep)
        members = keep if members is None else set(members)
        for worker_id in [w for w in self._reserved if w not in members]:
            self.num_changes += 1
            for epoch, span in self._reserved.pop(worker_id):
                self._free[epoch] = sorted([*self._free[epoch], span])
                self._count_unreserved(epoch, _size([span]))
        return sum(self.give_back(w) for w in [w for w in self._claimed if w not in keep])

    def state_dict(self, *, with_claims: bool = False) -> dict[str, Any]:
        """Return the state as plain values, reservations included.

        Args:
            with_claims: whether to include the claims, for workers that continue with them;
                without them, claimed positions count as free.
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

    def compact_state(self) -> dict[str, Any]:
        """Return the state to restore a lost ledger from, in few objects.

        As in ``state_dict``, claimed positions count as free. But adjacent spans are joined, and
        spans are not copied: the coordinator sends this state often, behind its lock.
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
        """Return the ledger of a ``state_dict``; claims need the cuts."""
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


_SavedSpan: TypeAlias = tuple[Count, Count]


class _OpenEpochs(TypedDict):
    num_samples: Positive
    epoch: Count
    open: list[tuple[Count, Count, list[_SavedSpan]]]


class _State(_OpenEpochs, total=False):
    reserved: list[tuple[str, Count, _SavedSpan]]


def check_state(state: dict[str, Any]) -> None:
    """Check a ``Ledger.state_dict`` without claims, from a file.

    Raises:
        ValueError: it is damaged.
    """
    checked = typed(_State, state, "ledger")
    size = checked["num_samples"]
    for epoch, num_done, free in checked["open"]:
        spans = free + [span for _, e, span in checked.get("reserved", []) if e == epoch]
        ends = [0, *(end for span in sorted(spans) for end in span), size]
        if epoch < checked["epoch"] or ends != sorted(ends) or num_done + _size(spans) != size:
            raise ValueError(f"ledger: the samples of epoch {epoch} do not add up to {size}")


def num_done_by(state: dict[str, Any]) -> int:
    """Return the positions completed since epoch 0, from a ``Ledger.state_dict``."""
    done: int = state["epoch"] * state["num_samples"] + sum(entry[1] for entry in state["open"])
    return done


def _listed(spans: dict[str, list[tuple[int, Span]]]) -> list[Any]:
    return [[worker_id, e, list(span)] for worker_id, pairs in spans.items() for e, span in pairs]


def _joined(spans: list[Span]) -> list[Span]:
    """Return sorted spans, adjacent ones joined."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and joined[-1][1] == span[0]:
            joined[-1] = joined[-1][0], span[1]
        else:
            joined.append(span)
    return joined


def _size(spans: list[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _cut(spans: list[Span], cuts: Sequence[int]) -> list[list[Span]]:
    """Return the parts of sorted spans in each block; ``cuts`` are the ends of the blocks."""
    blocks: list[list[Span]] = [[] for _ in cuts]
    for start, stop in spans:
        while start < stop:
            block = bisect_right(cuts, start)
            end = min(stop, cuts[block])
            blocks[block].append((start, end))
            start = end
    return blocks


def _split(spans: list[Span], count: int) -> tuple[list[Span], list[Span]]:
    """Split spans after ``count`` positions: (first, rest)."""
    first, rest = _split_pairs([(0, span) for span in spans], count)
    return [span for _, span in first], [span for _, span in rest]


def _split_pairs(
    pairs: list[tuple[int, Span]], count: int
) -> tuple[list[tuple[int, Span]], list[tuple[int, Span]]]:
    """Split (epoch, span) pairs after ``count`` positions: (first, rest)."""
    first, rest = [], []
    for epoch, (start, stop) in pairs:
        cut = min(stop, start + count)
        count -= cut - start
        if start < cut:
            first.append((epoch, (start, cut)))
        if cut < stop:
            rest.append((epoch, (cut, stop)))
    return first, rest
