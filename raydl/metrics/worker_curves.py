"""Selects the workers that have their own curves, to bound the number of curves.

Ids are never reused: with a replacement every 30 s, a run would add 2,900 curves a day.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from statistics import median

MOST = 64
"""Most workers with curves at one time, and number of ids that name their own curves."""
PLACE = "place"


class WorkerCurves:
    """The names of the curves of a run's members.

    Curves of w0 to w63 are named by their ids. A later worker gets the lowest free place, such as
    ``place0``, if fewer than 64 workers have curves.
    """

    def __init__(self) -> None:
        self._places: dict[str, str] = {}

    def follow(self, worker_ids: Collection[str]) -> dict[str, str]:
        """Update the members; return the places assigned to newcomers, by worker.

        Args:
            worker_ids: members by rank; places of all others become free.
        """
        later = [w for w in worker_ids if not _is_early(w)]
        self._places = {w: self._places[w] for w in later if w in self._places}
        num_left = MOST - len(self._places) - sum(map(_is_early, worker_ids))
        newcomers = [w for w in later if w not in self._places][: max(0, num_left)]
        used = set(self._places.values())
        free = [place for n in range(MOST) if (place := f"{PLACE}{n}") not in used]
        assigned = dict(zip(newcomers, free, strict=False))
        self._places |= assigned
        return assigned

    def name_of(self, worker_id: str) -> str:
        """Return the last part of the names of a worker's curves, or an empty text without any."""
        return worker_id if _is_early(worker_id) else self._places.get(worker_id, "")


def spread_of(name: str, values: Iterable[float]) -> Mapping[str, float]:
    """Return minimum, median and maximum over all workers, by the names of their curves."""
    ordered = sorted(values)
    least, most = ordered[0], ordered[-1]
    return {f"{name}_least": least, f"{name}_median": median(ordered), f"{name}_most": most}


def _is_early(worker_id: str) -> bool:
    return int(worker_id.lstrip("w")) < MOST
