"""The first rounds of a generation, measured, and what all its workers choose by them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from raydl.exchange.sync import Group
from raydl.exchange_tuning import Choice, ExchangeTuning, Limits, Measured, choose
from raydl.metrics import TimeParts

SKIPPED = 2
"""Rounds that are not measured: processes warm up, connections open."""
COUNTED = 3
_CPU = torch.device("cpu")


class ExchangeProfiler:
    """Measures rounds and chooses how often to exchange; see ``raydl/exchange_tuning.py``.

    All call it in the same rounds, and choose by the same numbers.

    Args:
        group: the workers.
        rank: of this worker.
        generation: the membership.
        limits: what the user's settings leave open.
        time_parts: know how long this worker waited.
        device: of what the group sums.
        clock: seconds, rising.
    """

    def __init__(
        self,
        group: Group,
        rank: int,
        *,
        generation: int,
        limits: Limits,
        time_parts: TimeParts,
        device: torch.device = _CPU,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._group = group
        self._rank = rank
        self._generation = generation
        self._limits = limits
        self._parts = time_parts
        self._device = device
        self._clock = clock
        self._rounds: list[tuple[float, float]] = []
        self._before: tuple[float, float] | None = None
        self._is_first, self._is_settled = True, False

    def next(self, now: ExchangeTuning, *, num_steps: int, round: int) -> Choice | None:
        """Take note of the round before; return the tuning of the next ones if it changes.

        A choice is measured in its turn, until nothing is left to change.

        Args:
            now: the exchange tuning of the round before.
            num_steps: its local steps; one that was cut short does not count.
            round: the number of the next round.

        Raises:
            ExchangeError: somebody did not come to the choice.
        """
        if self._is_settled:
            return None
        at, waited_s = self._clock(), self._parts.as_dict()["device_device_parameters"]
        if self._before is not None and num_steps == now.period:
            in_round_s, in_waits_s = at - self._before[0], waited_s - self._before[1]
            self._rounds.append(((in_round_s - in_waits_s) / num_steps, in_waits_s))
        self._before = at, waited_s
        if len(self._rounds) < SKIPPED + COUNTED:
            return None
        choice = choose(now, self._measured(round), self._limits, generation=self._generation)
        self._rounds, self._before, self._is_settled = [], None, choice is None
        self._is_first = False
        return choice

    def _measured(self, round: int) -> Measured:
        """Return the steps of the slowest worker, and the waiting of who waits least."""
        steps, waits = zip(*self._rounds[SKIPPED:], strict=True)
        p = self._group.num_workers
        times = torch.zeros(2, p, dtype=torch.float32, device=self._device)
        times[0, self._rank] = statistics.median(steps)
        # First the least, for what else crosses the link while a run starts, the samples above
        # all, is soon gone. What is chosen too mildly by it is seen when the choice is measured.
        times[1, self._rank] = min(waits) if self._is_first else statistics.median(waits)
        with self._parts.measure("device_device_parameters"):
            self._group.start_allreduce(times.view(-1), round=round).wait()
        return Measured(float(times[0].max()), float(times[1].min()), p)
