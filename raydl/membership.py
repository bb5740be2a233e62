"""Who trains: pure functions of what is known now.

A membership is numbered by its generation. The controller asks here and acts on the
answer; nothing here acts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Membership:
    """The workers of one generation, by rank."""

    generation: int
    worker_ids: tuple[str, ...]
    absent: tuple[str, ...] = ()
    """Workers left out for now: they finish what they have claimed, and come back."""

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
    """What the controller knows about the workers, now."""

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
    Later on members that are ready stay, and others join until ``max_workers`` train; with
    fewer than ``min_workers`` nobody trains. Always whole groups of ``group_size`` train;
    those that are whole stay together.
    """
    if now is None:
        ready = _whole(candidates.ready[:max_workers], group_size)
        if len(ready) < min_workers:
            return None, f"{len(ready)} of {min_workers} workers are ready"
        if len(ready) < max_workers and candidates.waited_s < patience_s:
            return None, f"{len(ready)} workers are ready; up to {max_workers} are wanted"
        return Membership(1, ready), f"{_names(ready)} start{_s(ready)}"
    chosen = _whole(_chosen(now, candidates.ready, max_workers, group_size), group_size)
    if len(chosen) < min_workers:
        why = _why_gone(now, candidates, chosen)
        return None, f"{len(chosen)} of {min_workers} workers are left{f' ({why})' if why else ''}"
    if chosen == now.worker_ids and candidates.absent == now.absent:
        return now, "nobody joins or leaves"
    next = Membership(now.generation + 1, chosen, candidates.absent)
    return next, _reason(now, candidates, chosen)


def _chosen(
    now: Membership, ready: tuple[str, ...], max_workers: int, group_size: int
) -> tuple[str, ...]:
    """Return members of whole groups by rank, then all others as they come, up to the most."""
    groups = [now.worker_ids[i : i + group_size] for i in range(0, now.num_workers, group_size)]
    staying = [w for group in groups if set(group) <= set(ready) for w in group]
    others = [w for w in ready if w not in staying]
    return (*staying, *others[: max(0, max_workers - len(staying))])


def _reason(now: Membership, candidates: Candidates, chosen: tuple[str, ...]) -> str:
    joining = [w for w in chosen if w not in now.worker_ids]
    back = tuple(w for w in joining if w in now.absent)
    new = tuple(w for w in joining if w not in now.absent)
    parts = [_why_gone(now, candidates, chosen)]
    parts += [f"{_names(back)} come{_s(back)} back"] if back else []
    parts += [f"{_names(new)} join{_s(new)}"] if new else []
    return ", ".join(part for part in parts if part) or "the exchange broke, all go on"


def _why_gone(now: Membership, candidates: Candidates, chosen: tuple[str, ...]) -> str:
    gone = [w for w in now.worker_ids if w not in chosen]
    return ", ".join(f"{w} {candidates.causes.get(w, 'stands by')}" for w in gone)


def _whole(worker_ids: tuple[str, ...], group_size: int) -> tuple[str, ...]:
    return worker_ids[: len(worker_ids) - len(worker_ids) % group_size]


def _names(worker_ids: tuple[str, ...]) -> str:
    return ", ".join(worker_ids)


def _s(worker_ids: tuple[str, ...]) -> str:
    return "s" if len(worker_ids) == 1 else ""
