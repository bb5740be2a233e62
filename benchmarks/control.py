"""Measures the decisions of a run with 10,000 light workers, whose racks are lost again and again.

Command:   python -m benchmarks.control                 (--quick: 1,000 workers, 30 s)

No process starts: the workers are entries of a simulation, and time is simulated. Only the CPU time
of ``raydl.elastic.decide`` counts, not that of the simulation.

- ``storm``: ten minutes, a report of every worker each half second, four polls a second, and each
  ten seconds the loss of a rack, one worker in a hundred.
- ``day``: a day with a report a minute and a lost rack every ten minutes; polls a second apart
  while anything is to be done, else with the reports and at the end of a wait.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.measure import Figure, Report, Spread, options_of
from raydl.config import ElasticConfig
from raydl.core.reports import Outcome, WorkerReport
from raydl.core.worker_group import Changed, Lost, Published, Reported, RunEnded, WorkerReady
from raydl.elastic import facts
from raydl.elastic.decide import begin, decide, new_state
from raydl.elastic.limits import Limits
from raydl.elastic.run_state import State

_START_S = 5.0
_WORKERS_OF_A_NODE = 8
_TARGET_S = 60.0
"""CPU seconds that the storm of 10,000 workers may take."""


@dataclass(frozen=True)
class Weather:
    """What happens to the workers; all times in seconds."""

    name: str
    length_s: float
    report_s: float
    poll_s: float
    loss_s: float
    """Time between two lost racks."""
    is_lazy: bool = False
    """Whether nothing is polled while all train, but at the end of a wait."""


@dataclass
class LightWorkers:
    """Simulated workers, which answer the actions of the control.

    Args:
        num_workers: workers of the run.
        is_sync: whether all exchange at once.
        weather: what happens to them.
    """

    num_workers: int
    is_sync: bool
    weather: Weather
    now: float = 0.0
    """Simulated seconds."""
    spent_s: float = 0.0
    """CPU seconds of the decisions."""
    num_events: int = 0
    num_losses: int = 0
    _starting: dict[str, float] = field(default_factory=dict)
    _generations: dict[str, int] = field(default_factory=dict)
    """By worker, the generation of its loop; 0: it is in none."""
    _rounds: tuple[int, ...] = (0,)
    _is_broken: bool = False
    """Whether the members wait for a lost one."""
    _answers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(0)
        self.limits = Limits(
            is_sync=self.is_sync,
            min_workers=self.num_workers // 2,
            max_workers=self.num_workers,
            elastic=ElasticConfig(max_restarts=10**9, lease_s=1e6, max_step_s=1e6),
        )
        self.state = new_state(self.limits, 0.0)

    def run(self) -> None:
        """Simulate the whole time."""
        weather = self.weather
        next_report, next_loss = weather.report_s, weather.loss_s
        self._act(begin(self.state, self.limits, self.now))
        while self.now < weather.length_s:
            self.now = min(next_report, next_loss, self._next_poll())
            events, self._answers = self._answers, []
            events += self._started()
            if self.now >= next_loss:
                next_loss += weather.loss_s
                events += self._lose_rack()
            if self.now >= next_report:
                next_report += weather.report_s
                events += self._reports()
            events.append(Published(self._rounds, process="center", sent_s=self.now))
            self._feed(events)

    def _next_poll(self) -> float:
        """Return when the control is asked next, if nothing happens before."""
        is_busy = bool(self._answers or self._starting) or self.state.stage is not State.TRAINING
        if is_busy or not self.weather.is_lazy:
            return self.now + self.weather.poll_s
        return min((until for until in self.state.waits.values() if until > self.now), default=1e9)

    def _feed(self, events: list[Any]) -> None:
        self.num_events += len(events)
        began = time.process_time()
        answers = [decide(self.state, event, self.now, self.limits) for event in events]
        answers.append(decide(self.state, facts.Tick(), self.now, self.limits))
        self.spent_s += time.process_time() - began
        for found in answers:
            self._act(found)

    def _started(self) -> Iterable[Any]:
        ready = [worker_id for worker_id, at in self._starting.items() if at <= self.now]
        for worker_id in ready:
            del self._starting[worker_id]
            self._generations[worker_id] = 0
        return [WorkerReady(w, f"node {int(w[1:]) // _WORKERS_OF_A_NODE}") for w in ready]

    def _lose_rack(self) -> Iterable[Any]:
        members = [w for w, generation in self._generations.items() if generation]
        if not members:
            return []
        first, size = self._random.randrange(len(members)), max(1, self.num_workers // 100)
        rack = members[first : first + size]
        for worker_id in rack:
            del self._generations[worker_id]
        self._is_broken, self.num_losses = self.is_sync, self.num_losses + len(rack)
        return [Lost(worker_id, "its rack was lost") for worker_id in rack]

    def _reports(self) -> Iterable[Any]:
        if self.state.stage is State.TRAINING and not self._is_broken:
            self._rounds = (*self._rounds[-2:], self._rounds[-1] + 1)
        return [
            Reported(
                WorkerReport(
                    worker_id,
                    self._rounds[-1],
                    (),
                    (),
                    {},
                    generation=generation,
                    local_step=self._rounds[-1],
                    step_s=0.1,
                    round_s=0.5,
                    sent_s=self.now,
                )
            )
            for worker_id, generation in self._generations.items()
        ]

    def _act(self, found: list[Any]) -> None:
        for fact in found:
            match fact:
                case facts.Start(worker_id):
                    self._starting[worker_id] = self.now + _START_S
                case facts.End(worker_id):
                    self._starting.pop(worker_id, None)
                    self._generations.pop(worker_id, None)
                case facts.Form(membership) | facts.Change(membership):
                    self._enter(membership.worker_ids, membership.generation)
                case facts.Abandon():
                    self._leave(Outcome.BROKEN)
                case facts.Vote(votes=votes) if "regroup" in votes:
                    self._leave(Outcome.REGROUP)

    def _enter(self, worker_ids: Iterable[str], generation: int) -> None:
        self._is_broken = False
        for worker_id in worker_ids:
            if self._generations.get(worker_id) == 0:
                self._generations[worker_id] = generation
        self._answers.append(Changed())

    def _leave(self, outcome: Outcome) -> None:
        for worker_id, generation in self._generations.items():
            if generation:
                end = RunEnded(worker_id, outcome, self._rounds[-1], generation, "a reset")
                self._answers.append(end)
                self._generations[worker_id] = 0


def main() -> int:
    """Simulate and report."""
    options = options_of(__doc__, workers={"type": int, "default": 10_000}).parse_args()
    num_workers = 1_000 if options.quick else options.workers
    scale = 20 if options.quick else 1
    report = Report("control", "python -m benchmarks.control", options.quick)
    weathers = (
        Weather("storm", 600 / scale, report_s=0.5, poll_s=0.25, loss_s=10.0),
        Weather("day", 86_400 / scale, report_s=60.0, poll_s=1.0, loss_s=600.0, is_lazy=True),
    )
    rows = []
    for weather in weathers:
        for is_sync in (True, False):
            workers = LightWorkers(num_workers, is_sync, weather)
            workers.run()
            name = f"{weather.name}.{'rounds' if is_sync else 'messages'}"
            rows.append(
                (
                    name,
                    f"{workers.spent_s:.1f} s",
                    f"{workers.num_events:,}",
                    f"{workers.spent_s / workers.num_events * 1e6:.1f} µs",
                    f"{workers.num_losses:,}",
                    f"{workers.state.generation:,}",
                )
            )
            print(f"  {name}: {workers.spent_s:.1f} s of {workers.num_events:,} events", flush=True)
            is_bound = weather.name == "storm" and not options.quick
            report.add_figures(
                Figure(
                    name=f"control.{name}",
                    value=Spread.of([workers.spent_s]),
                    target=_TARGET_S if is_bound else None,
                    is_better="less",
                )
            )
    columns = ("case", "CPU time", "events", "of an event", "lost workers", "generations")
    report.add_table(columns, rows)
    report.close(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
