"""Who trains: pure functions of what is known now.

A membership is numbered by its generation. The controller asks here and acts on the
answer; nothing here acts.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """Workers that could train, in the order of their numbers."""
    waited_s: float
    """Seconds since the first worker was asked for."""


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
    Later on, ready workers join until ``max_workers`` train. Always whole groups of
    ``group_size`` train.
    """
    ready = _whole(candidates.ready[:max_workers], group_size)
    if now is None:
        if len(ready) < min_workers:
            return None, f"{len(ready)} of {min_workers} workers are ready"
        if len(ready) < max_workers and candidates.waited_s < patience_s:
            return None, f"{len(ready)} workers are ready; up to {max_workers} are wanted"
        return Membership(1, ready), f"{_names(ready)} start{_s(ready)}"
    joining = tuple(w for w in candidates.ready if w not in now.worker_ids)
    joining = _whole(joining[: max_workers - now.num_workers], group_size)
    if not joining:
        return now, "nobody joins or leaves"
    return (
        Membership(now.generation + 1, now.worker_ids + joining),
        f"{_names(joining)} join{_s(joining)}",
    )


def _whole(worker_ids: tuple[str, ...], group_size: int) -> tuple[str, ...]:
    return worker_ids[: len(worker_ids) - len(worker_ids) % group_size]


def _names(worker_ids: tuple[str, ...]) -> str:
    return ", ".join(worker_ids)


def _s(worker_ids: tuple[str, ...]) -> str:
    return "s" if len(worker_ids) == 1 else ""
