"""Chooses the workers that have curves of their own, so that names stay few.

Ids are never used again: with a replacement every 30 s a run would have 2,900 curves more each day.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from statistics import median

MOST = 64
"""The most workers that have curves at one time; and so many of the first ones by their ids."""
PLACE = "place"


class WorkerCurves:
    """The names under which the members of a run have their curves.

    w0 to w63 have them by their ids. One that comes later takes the lowest place that is free, if
    fewer than 64 workers have curves: its own goes on in ``place0``, say.
    """

    def __init__(self) -> None:
        self._places: dict[str, str] = {}

    def follow(self, worker_ids: Collection[str]) -> dict[str, str]:
        """Take note of the workers; return the places that newcomers have taken, by worker.

        Args:
            worker_ids: by rank; all others have gone.
        """
        later = [w for w in worker_ids if not _is_early(w)]
        self._places = {w: self._places[w] for w in later if w in self._places}
        num_left = MOST - len(self._places) - sum(map(_is_early, worker_ids))
        newcomers = [w for w in later if w not in self._places][: max(0, num_left)]
        used = set(self._places.values())
        free = [place for n in range(MOST) if (place := f"{PLACE}{n}") not in used]
        taken = dict(zip(newcomers, free, strict=False))
        self._places |= taken
        return taken

    def name_of(self, worker_id: str) -> str:
        """Return the last part of the names of a worker's curves; empty: it has none."""
        return worker_id if _is_early(worker_id) else self._places.get(worker_id, "")


def spread_of(name: str, values: Iterable[float]) -> Mapping[str, float]:
    """Return the least, the median and the most of all workers, by the names of their curves."""
    known = sorted(values)
    return {f"{name}_least": known[0], f"{name}_median": median(known), f"{name}_most": known[-1]}


def _is_early(worker_id: str) -> bool:
    return int(worker_id.lstrip("w")) < MOST
