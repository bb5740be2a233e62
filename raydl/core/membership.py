"""Decides who trains next, by pure functions of what is known now.

A membership is numbered by its generation. The controller asks here and acts on the
answer; nothing here acts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Membership:
    """The workers of one generation, by rank."""

    generation: int
    worker_ids: tuple[str, ...]
    absent: tuple[str, ...] = ()
    """Workers left out for now: they finish what they have claimed, and come back."""

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
        """Return (number of the group, its workers) where groups share a replica.

        Consecutive ranks are a group.
        """
        number = self.worker_ids.index(worker_id) // group_size
        return number, self.worker_ids[number * group_size : (number + 1) * group_size]


@dataclass(frozen=True)
class Candidates:
    """The controller's knowledge of the workers, now."""

    ready: tuple[str, ...]
    """Workers that can train from now on, members and others, in the order they should have."""
    waited_s: float
    """Seconds since the first worker was asked for."""
    absent: tuple[str, ...] = ()
    """Workers left out for now."""
    causes: Mapping[str, str] = field(default_factory=dict)
    """Why a worker that is not ready left: ``was lost``, ``drains``, …"""


def next_membership(
    now: Membership | None,
    candidates: Candidates,
    *,
    min_workers: int,
    max_workers: int,
    patience_s: float,
    group_size: int = 1,
) -> tuple[Membership | None, str]:
    """Return (who trains next, the reason in one sentence).

    With nobody training, the first membership forms as soon as all wanted workers are
    ready, or at least ``min_workers`` and ``patience_s`` seconds have passed. None: not yet.
    Later on members that are ready stay, also beyond ``max_workers``, which only limits who
    joins; with fewer than ``min_workers`` nobody trains. Always whole groups of ``group_size``
    train; those that are whole stay together. Where nothing changes ``now`` itself is returned.
    """
    if now is None:
        return _first(candidates, min_workers, max_workers, patience_s, group_size)
    chosen = _chosen(now, candidates.ready, max_workers, group_size)
    out = _out(now, candidates, chosen)
    if len(chosen) < min_workers:
        why = f" ({_told(out, candidates)})" if out else ""
        return None, f"{len(chosen)} of {min_workers} workers are left{why}"
    if chosen == now.worker_ids and set(candidates.absent) == set(now.absent):
        return now, "nobody joins or leaves"
    next = Membership(now.generation + 1, chosen, candidates.absent)
    return next, _reason(now, next, candidates, out)


def _first(
    candidates: Candidates,
    min_workers: int,
    max_workers: int,
    patience_s: float,
    group_size: int,
) -> tuple[Membership | None, str]:
    num_ready = len(candidates.ready)
    chosen = _whole(candidates.ready[:max_workers], group_size)
    if len(chosen) < min_workers:
        return None, f"{num_ready} of {min_workers} workers are ready"
    if num_ready < max_workers and candidates.waited_s < patience_s:
        return None, f"{num_ready} workers are ready; up to {max_workers} are wanted"
    return Membership(1, chosen), f"{_names(chosen)} start{_s(chosen)}"


def _chosen(
    now: Membership, ready: tuple[str, ...], max_workers: int, group_size: int
) -> tuple[str, ...]:
    """Return whole groups: those that are, members of broken ones by rank, then newcomers."""
    groups = [now.worker_ids[i : i + group_size] for i in range(0, now.num_workers, group_size)]
    are_ready = set(ready)
    whole = [w for group in groups if are_ready.issuperset(group) for w in group]
    of_broken = are_ready.difference(whole)
    members = [*whole, *(w for w in now.worker_ids if w in of_broken)]
    newcomers = [w for w in ready if w not in now]
    joining = newcomers[: max(0, max_workers - len(members))]
    return _whole((*members, *joining), group_size)


def _out(now: Membership, candidates: Candidates, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """Return all that trained or were to come back, and do not train now."""
    known = dict.fromkeys((*now.worker_ids, *now.absent, *candidates.absent))
    train = set(chosen)
    return tuple(w for w in known if w not in train)


def _reason(now: Membership, next: Membership, candidates: Candidates, out: tuple[str, ...]) -> str:
    """Tell what is new about each worker."""
    still_absent = set(now.absent) & set(next.absent)
    gone = tuple(w for w in out if w not in still_absent)
    joining = [w for w in next.worker_ids if w not in now]
    back = tuple(w for w in joining if w in now.absent)
    new = tuple(w for w in joining if w not in now.absent)
    parts = [_told(gone, candidates)] if gone else []
    parts += [f"{_names(back)} come{_s(back)} back"] if back else []
    parts += [f"{_names(new)} join{_s(new)}"] if new else []
    return ", ".join(parts)


def _told(worker_ids: tuple[str, ...], candidates: Candidates) -> str:
    return ", ".join(f"{w} {_why_out(w, candidates)}" for w in worker_ids)


def _why_out(worker_id: str, candidates: Candidates) -> str:
    if worker_id in candidates.ready:  # why it was out once does not matter any more
        return "stands by"
    return candidates.causes.get(worker_id, "is not ready")


def _whole(worker_ids: tuple[str, ...], group_size: int) -> tuple[str, ...]:
    return worker_ids[: len(worker_ids) - len(worker_ids) % group_size]


def _names(worker_ids: tuple[str, ...]) -> str:
    return ", ".join(worker_ids)


def _s(worker_ids: tuple[str, ...]) -> str:
    return "s" if len(worker_ids) == 1 else ""
