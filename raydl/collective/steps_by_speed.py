"""Divides the local steps of synchronous rounds by the measured speeds of the workers.

With equal steps, every worker waits for the slowest. Here the fastest worker takes a whole period
and the others take as many steps as they complete in the same time, as in Dynamic Local Updates
(Liu et al., arXiv 2401.09135), but with all workers in one exchange. Speeds are measured again and
again, so a worker whose speed changes gets its new share some rounds later.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

import torch

from raydl.collective.sync_exchange import Group, gather_numbers
from raydl.core.strategy import steps_at_speed
from raydl.metrics import TimeParts

EVERY = 3
"""Rounds between two comparisons of the speeds."""
_CPU = torch.device("cpu")


def steps_by_speed(step_s: Sequence[float], *, period: int) -> tuple[int, ...]:
    """Return the local steps of each worker in a round.

    Args:
        step_s: seconds per local step of each worker; 0 if it has taken none yet.
        period: steps of the fastest worker, and of a worker that has taken none yet.
    """
    least = min((seconds for seconds in step_s if seconds > 0), default=0.0)
    return tuple(
        steps_at_speed(period, step_s=seconds, least_step_s=least) if seconds > 0 else period
        for seconds in step_s
    )


class StepsBySpeed:
    """The local steps of each worker; all workers compute the same ones.

    Args:
        group: the workers.
        rank: of this worker.
        period: steps of the fastest worker.
        time_parts: count how long this worker waits.
        device: where the group sums.
    """

    def __init__(
        self,
        group: Group,
        rank: int,
        *,
        period: int,
        time_parts: TimeParts,
        device: torch.device = _CPU,
    ) -> None:
        self.steps = (period,) * group.num_workers
        """Local steps in a round, by rank."""
        self._group = group
        self._rank = rank
        self._period = period
        self._parts = time_parts
        self._device = device
        self._recent: deque[float] = deque(maxlen=EVERY)
        self._num_rounds = 0

    def update(self, step_s: float, *, round: int) -> None:
        """Record the previous round; in the first two rounds and every third compare the speeds.

        In the first round of a generation the workers compare what they know of the rounds before,
        so a slow worker that rejoins gets its share at once.

        Args:
            step_s: seconds per local step in the previous round, without waiting; 0: unknown.
            round: number of the next round.

        Raises:
            ExchangeError: if a worker did not take part; nothing has changed.
        """
        if step_s > 0:
            self._recent.append(step_s)
        if self._num_rounds == 1 or self._num_rounds % EVERY == 0:
            own = statistics.mean(self._recent) if self._recent else 0.0
            with self._parts.measure("device_device_parameters"):
                [times] = gather_numbers(
                    self._group, self._rank, [own], round=round, device=self._device
                )
            self.steps = steps_by_speed(times, period=self._period)
        self._num_rounds += 1
