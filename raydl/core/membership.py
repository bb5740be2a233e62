"""Decides which workers train next: pure functions that the controller acts on.

Each membership has a number, its generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property


@dataclass(frozen=True)
class Membership:
    """The workers of one generation, by rank."""

    generation: int
    worker_ids: tuple[str, ...]
    absent: tuple[str, ...] = ()
    """Workers left out for now: they finish the samples they have claimed, then return."""

    def __contains__(self, worker_id: object) -> bool:
        """Return whether a worker trains."""
        return worker_id in self._members

    @cached_property
    def _members(self) -> frozenset[str]:
        return frozenset(self.worker_ids)

    @property
    def num_workers(self) -> int:
        """Workers that train (p)."""
        return len(self.worker_ids)

    def partners_of(self, worker_id: str, group_size: int) -> tuple[int, tuple[str, ...]]:
        """Return the number and the workers of a worker's group, which shares one replica.

        Groups consist of consecutive ranks.
        """
        number = self.worker_ids.index(worker_id) // group_size
        return number, self.worker_ids[number * group_size : (number + 1) * group_size]


@dataclass(frozen=True)
class Candidates:
    """The workers as the controller knows them now."""

    ready: tuple[str, ...]
    """Workers that can train, members and others, in the preferred order."""
    waited_s: float
    """Seconds since the first worker was requested."""
    absent: tuple[str, ...] = ()
    """Workers left out for now."""
    causes: Mapping[str, str] = field(default_factory=dict)
    """Why a worker is not ready: ``was lost``, ``is on a draining node``, …"""

    def without(self, worker_ids: Iterable[str], cause: str) -> Candidates:
        """Return the candidates if these workers are not ready, for one cause."""
        causes = dict.fromkeys(worker_ids, cause)
        ready = tuple(w for w in self.ready if w not in causes)
        return replace(self, ready=ready, causes={**self.causes, **causes})


def next_membership(
    now: Membership | None,
    candidates: Candidates,
    *,
    min_workers: int,
    max_workers: int,
    patience_s: float,
    group_size: int = 1,
) -> tuple[Membership | None, str]:
    """Return the next membership, or None if too few workers can train, and the reason.

    The first membership (``now`` is None) forms as soon as ``max_workers`` are ready, or once at
    least ``min_workers`` are ready and ``patience_s`` seconds have passed. Later, members that are
    ready stay, even beyond ``max_workers``, which only limits newcomers. Only whole groups of
    ``group_size`` workers train; complete groups stay together. If nothing changes, ``now`` itself
    is returned.
    """
    if now is None:
        num_ready = len(candidates.ready)
        chosen = _whole_groups(candidates.ready[:max_workers], group_size)
        if len(chosen) < min_workers:
            return None, f"{num_ready} of {min_workers} workers are ready"
        if num_ready < max_workers and candidates.waited_s < patience_s:
            return None, f"{num_ready} of up to {max_workers} workers are ready"
        return Membership(1, chosen), _all(chosen, "start")
    chosen = _chosen(now, candidates.ready, max_workers, group_size)
    known = dict.fromkeys((*now.worker_ids, *now.absent, *candidates.absent))
    trains = set(chosen)
    out = [w for w in known if w not in trains]
    if len(chosen) < min_workers:
        why = f" ({_causes(out, candidates)})" if out else ""
        return None, f"{len(chosen)} of {min_workers} workers are left{why}"
    if chosen == now.worker_ids and set(candidates.absent) == set(now.absent):
        return now, "no worker joins or leaves"
    next = Membership(now.generation + 1, chosen, candidates.absent)
    return next, _reason(now, next, candidates, out)


def _chosen(
    now: Membership, ready: tuple[str, ...], max_workers: int, group_size: int
) -> tuple[str, ...]:
    """Return members of complete groups, then other members by rank, then newcomers."""
    groups = [now.worker_ids[i : i + group_size] for i in range(0, now.num_workers, group_size)]
    are_ready = set(ready)
    complete = [w for group in groups if are_ready.issuperset(group) for w in group]
    others = are_ready.difference(complete)
    members = [*complete, *(w for w in now.worker_ids if w in others)]
    newcomers = [w for w in ready if w not in now]
    joining = newcomers[: max(0, max_workers - len(members))]
    return _whole_groups((*members, *joining), group_size)


def _reason(now: Membership, next: Membership, candidates: Candidates, out: list[str]) -> str:
    """Return a description of what changes for each worker."""
    still_absent = set(now.absent) & set(next.absent)
    leaving = [w for w in out if w not in still_absent]
    joining = [w for w in next.worker_ids if w not in now]
    returning = [w for w in joining if w in now.absent]
    new = [w for w in joining if w not in now.absent]
    parts = [_causes(leaving, candidates)] if leaving else []
    parts += [_all(returning, "return")] if returning else []
    parts += [_all(new, "join")] if new else []
    return ", ".join(parts)


def _causes(worker_ids: list[str], candidates: Candidates) -> str:
    """Return why workers do not train; the cause of an earlier absence no longer counts."""
    standby = dict.fromkeys(candidates.ready, "is on standby")
    causes = {**candidates.causes, **standby}
    return ", ".join(f"{w} {causes.get(w, 'is not ready')}" for w in worker_ids)


def _whole_groups(worker_ids: tuple[str, ...], group_size: int) -> tuple[str, ...]:
    return worker_ids[: len(worker_ids) - len(worker_ids) % group_size]


def _all(worker_ids: Sequence[str], verb: str) -> str:
    return f"{', '.join(worker_ids)} {verb}{'s' if len(worker_ids) == 1 else ''}"
