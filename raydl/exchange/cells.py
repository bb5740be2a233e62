"""Which of the flat parameters each shard of the center, and each fragment, holds."""

from __future__ import annotations

import itertools

from raydl.ledger import Span, split_evenly


def shard_spans(size: int, num_shards: int) -> list[Span]:
    """Return which of ``size`` parameters each shard, or each fragment, holds."""
    edges = [0, *itertools.accumulate(split_evenly(size, num_shards))]
    return list(itertools.pairwise(edges))


def cells(size: int, *, num_shards: int, num_fragments: int) -> list[list[Span]]:
    """Return the spans of each shard: its part of every fragment that meets it."""
    fragments = shard_spans(size, num_fragments)
    return [
        [span for part in fragments if (span := _common(part, shard))]
        for shard in shard_spans(size, num_shards)
    ]


def cell_size(size: int, *, num_shards: int, num_fragments: int) -> int:
    """Return how many parameters the first cell has: what a rule gets to see at once."""
    start, stop = cells(size, num_shards=num_shards, num_fragments=num_fragments)[0][0]
    return stop - start


def _common(a: Span, b: Span) -> Span | None:
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None
