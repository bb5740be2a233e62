"""Measures how costs grow with the parameters, the workers and the number of exchanges.

Command:   python -m benchmarks.growth        (--quick: the controller, and two sizes)

- An exchange (``crowd.py``) of 1e4 to 1e8 parameters, and of 1 to 8 workers, over a limit that the
  same processes measure in the same repeat: for sync a bare all-reduce of the same size and
  workers, for async four passes over the vector, the cost of copying it twice. The slope of log
  seconds over log size is 1 if the cost is linear. It is measured from a million parameters on: an
  exchange of fewer is dominated by its messages. If memory or cores are the limit, p workers take p
  times as long for one exchange each.
- CPU seconds of the controller for one poll, per worker, over those with 10 workers. A fake worker
  group answers the poll, so Ray's work is not included.
- The memory of workers and center after 10,000 exchanges, over that after 1,000.
- The communication share that ``raydl.tools.plan`` predicts for runs with 2 and 4 workers on hosts
  with links of 25 and of 250 Mbit/s (``hosts.py``), over the measured share. The prediction takes
  the measured step time. A gradient takes 20 ms longer than its computation, without using the CPU:
  the prediction is for workers that do not slow down each other.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.crowd import Crowd, own_bytes
from benchmarks.hosts import Hosts, why_not
from benchmarks.measure import Figure, Report, Spread, interleaved, ratios
from benchmarks.parts import parser_of_parts, ray_here, run_part, write_answer
from benchmarks.runs_on_hosts import PAUSING_MODEL, cluster

METHODS = ("sync-easgd", "async-easgd")
STRAIGHT_FROM = 1_000_000
SLOPE_TARGET = 1.1
_PART_S = 600.0
_POLL_S = 0.25
LATENCY_S, PERIOD, BATCH_SIZE = 2e-4, 5, 36
"""Settings of the predicted runs, with which an epoch of the digits is a whole number of rounds."""
PAUSE_S = 0.02
"""Seconds that a gradient of the predicted runs takes beyond its computation."""
NUM_ROUNDS = {25.0: 20, 250.0: 120}
"""Rounds of the predicted runs by link rate in Mbit/s. The communication share is nearly 1 at the
first rate and about 1/3 at the second."""

Series = dict[str, list[float]]


# exchanges, within the cluster


def exchanges(num_parameters: int, num_workers: int, repeats: int) -> Series:
    """Return the seconds of exchanges and of their limits by case, one value per repeat."""
    count = max(2, min(100, 10_000_000 // num_parameters))
    with Crowd(num_parameters, num_workers) as crowd:
        for method in METHODS:
            crowd.enter(method)
        cases: dict[str, Callable[[], float]] = {
            "sync": lambda: crowd.exchange("sync-easgd", count).whole_s,
            "bare": lambda: crowd.allreduce(count),
            "async": lambda: crowd.exchange("async-easgd", count).whole_s,
            "passes": lambda: 2 * crowd.copy(num_parameters, count),
        }
        measured = interleaved(cases, repeats=repeats + 1)
    return {case: values[1:] for case, values in measured.items()}  # the first one is a warm-up


def memory(num_parameters: int, first: int, last: int) -> dict[str, float]:
    """Return the memory after ``last`` exchanges over that after ``first``, by method."""
    ratios_of_methods = {}
    with Crowd(num_parameters, num_workers=2) as crowd:
        for method in METHODS:
            crowd.enter(method)
            pids = [*crowd.pids, crowd.centers[method][1]]
            crowd.exchange(method, first)
            before = sum(map(own_bytes, pids))
            for _ in range(9):  # in parts: records are collected in between, as in a run
                crowd.exchange(method, (last - first) // 9)
            ratios_of_methods[method] = sum(map(own_bytes, pids)) / before
    return ratios_of_methods


def report_sizes(report: Report, sizes: list[int], repeats: int) -> None:
    """Report the growth with the parameters, of two workers that exchange simultaneously."""
    measured = {n: _measure(n, 2, repeats) for n in sizes}
    rows = [
        (f"{n:,}", ratios(s["sync"], s["bare"]).text(), ratios(s["async"], s["passes"]).text())
        for n, s in measured.items()
    ]
    report.add_table(("parameters", "sync / all-reduce", "async / four passes"), rows)
    linear = [n for n in sizes if n >= STRAIGHT_FROM]
    for case in ("sync", "async", "bare", "passes"):
        slopes = [
            _slope([(math.log(n), math.log(measured[n][case][r])) for n in linear])
            for r in range(repeats)
        ]
        is_ours = case in ("sync", "async")
        report.add_figures(
            Figure(
                name=f"growth.parameters.{case}-slope", value=Spread.of(slopes),
                target=SLOPE_TARGET if is_ours else None, is_better="less",
            )
        )  # fmt: skip


def report_workers(report: Report, workers: list[int], num_parameters: int, repeats: int) -> None:
    """Report the growth with the workers, of the seconds in which each exchanges once."""
    measured = {p: _measure(num_parameters, p, repeats) for p in workers}
    rows = [
        (p, ratios(s["sync"], s["bare"]).text(), ratios(s["async"], s["passes"]).text())
        for p, s in measured.items()
    ]
    report.add_table(("workers", "sync / all-reduce", "async / four passes"), rows)
    # A single worker has no all-reduce, so sync starts at two.
    most, fewest = workers[-1], {"sync": 2, "async": 1, "bare": 2, "passes": 1}
    for case, p in fewest.items():
        share = [s * p / most for s in measured[most][case]]
        report.add_figures(
            Figure(
                name=f"growth.workers.{case}-{most}-per-worker-over-{p}",
                value=ratios(share, measured[p][case]),
                target=SLOPE_TARGET if case in ("sync", "async") and most > 2 else None,
                is_better="less",
            )
        )  # fmt: skip


def _measure(num_parameters: int, num_workers: int, repeats: int) -> Series:
    arguments = (
        "--part", "exchanges", "--parameters", str(num_parameters),
        "--workers", str(num_workers), "--repeats", str(repeats),
    )  # fmt: skip
    print(f"{num_parameters:,} parameters, {num_workers} workers", flush=True)
    series: Series = run_part("benchmarks.growth", *arguments, timeout_s=_PART_S)
    return series


def _slope(points: list[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through some points."""
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    above = sum((a - x) * (b - y) for a, b in points)
    return float(above / sum((a - x) ** 2 for a, _ in points))


def report_memory(report: Report, num_parameters: int, first: int, last: int) -> None:
    """Report the growth of memory; the allocators need the first exchanges to settle."""
    arguments = ("--part", "memory", "--parameters", str(num_parameters), "--first", str(first))
    answer = run_part("benchmarks.growth", *arguments, "--last", str(last), timeout_s=_PART_S)
    for method, ratio in answer.items():
        report.add_figures(
            Figure(
                name=f"growth.memory.{method}-{last}-over-{first}", value=Spread.of([ratio]),
                target=1.02, is_better="less",
            )
        )  # fmt: skip


# the controller


class FakeWorkerGroup:
    """A worker group without processes, whose workers report progress at every poll."""

    def __init__(self) -> None:
        self.now = 0.0
        self._round = 0
        self._workers: list[str] = []
        self._events: list[Any] = []

    def request_worker(self, worker_id: str, own_state: Any = None) -> None:
        """Add a worker that is ready at once."""
        from raydl.core.worker_group import WorkerReady

        self._workers.append(worker_id)
        self._events.append(WorkerReady(worker_id, "node"))

    def form(self, membership: Any, round: int, own_states: Any) -> None:
        """Confirm the membership."""
        from raydl.core.worker_group import Changed

        self._events.append(Changed())

    def poll(self, timeout_s: float) -> list[Any]:
        """Return events: reports of all workers after ten more rounds, and one of the center."""
        from raydl.core.reports import WorkerReport
        from raydl.core.worker_group import Published, Reported

        self.now += timeout_s
        self._round += 10
        reports = [
            WorkerReport(w, self._round, (), (), {}, local_step=self._round, step_s=0.1)
            for w in self._workers
        ]
        events, self._events = self._events, []
        return [*events, *map(Reported, reports), Published((0,))]

    def __getattr__(self, name: str) -> Callable[..., str]:
        return lambda *arguments, **more: ""


class NullRecorder:
    """Ignores all records of a controller."""

    is_writing = is_given_up = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **more: None


def poll_s(num_workers: int, num_polls: int, *, is_sync: bool) -> float:
    """Return the CPU seconds of a controller for one poll of ``num_workers`` workers."""
    from raydl.config import MethodConfig, ScalingConfig, TrainConfig, TrainingConfig
    from raydl.elastic.controller import Controller
    from raydl.elastic.run_state import State
    from raydl.methods import resolve

    worker_group: Any = FakeWorkerGroup()
    recorder: Any = NullRecorder()
    config = TrainConfig(
        method=MethodConfig(name=METHODS[0] if is_sync else METHODS[1]),
        scaling=ScalingConfig(num_workers=num_workers),
        training=TrainingConfig(epochs=5),
    )
    controller = Controller(
        worker_group, config, resolve(config), recorder, first_round=0, own_states={},
        clock=lambda: worker_group.now,
    )  # fmt: skip
    for _ in range(10):
        controller.step()
    assert controller.state is State.TRAINING, f"the controller is {controller.state.value}"
    assert controller.num_workers == num_workers
    began = time.process_time()
    for _ in range(num_polls):
        controller.step()
    seconds = (time.process_time() - began) / num_polls
    assert controller.state is State.TRAINING, f"the controller is {controller.state.value}"
    return seconds


def report_controller(report: Report, repeats: int) -> None:
    """Report the load of the controller with 10, 50 and 200 workers."""
    workers, num_polls = (10, 50, 200), 100
    rows = []
    for kind, is_sync in (("rounds", True), ("messages", False)):

        def case(p: int, is_sync: bool = is_sync) -> Callable[[], float]:
            return lambda: poll_s(p, num_polls, is_sync=is_sync)

        measured = interleaved({str(p): case(p) for p in workers}, repeats=repeats)
        for p in workers:
            load = Spread.of([s / _POLL_S for s in measured[str(p)]])
            rows.append((kind, p, load.text(".2%")))
        per_worker = [s / 200 * 10 for s in measured["200"]]
        report.add_figures(
            Figure(
                name=f"growth.controller.{kind}-200-per-worker-over-10",
                value=ratios(per_worker, measured["10"]), target=SLOPE_TARGET, is_better="less",
            )
        )  # fmt: skip
    head = ("controller", "workers", f"share of a core with a poll every {_POLL_S} s")
    report.add_table(head, rows)


# the cost model


def report_plan(report: Report, cases: Sequence[tuple[str, int]]) -> None:
    """Report predictions for runs (method, workers) on hosts, if this machine permits hosts."""
    if reason := why_not():
        report.add_text(f"Predictions are not measured: {reason}.")
        return
    with cluster(max(p for _, p in cases), pause_s=PAUSE_S) as made:
        for mbit, (method, num_workers) in itertools.product(NUM_ROUNDS, cases):
            made.limit(mbit)
            case = f"{method}-{num_workers}-{mbit:.0f}-mbit"
            made.run([_train_command(made.folder / case, method, num_workers, NUM_ROUNDS[mbit])])
            share, predicted = _shares(made.folder / case, method, num_workers, made.hosts)
            report.add_text(f"{case}: share {share:.1%} measured, {predicted:.1%} predicted.")
            report.add_figures(
                Figure(
                    name=f"growth.plan.{case}-off",
                    value=Spread.of([abs(predicted / share - 1)]), target=0.2, is_better="less",
                )
            )  # fmt: skip


def _train_command(run_dir: Path, method: str, num_workers: int, num_rounds: int) -> list[str]:
    options = {
        "data": "digits", "model": PAUSING_MODEL, "method": method, "workers": num_workers,
        "batch-size": BATCH_SIZE, "period": PERIOD, "steps": num_rounds * PERIOD,
        "evaluation.every-epochs": 1000, "run-dir": run_dir, "run.progress": "plain",
    }  # fmt: skip
    command = [sys.executable, "-m", "raydl", "train"]
    return command + [str(w) for name, value in options.items() for w in (f"--{name}", value)]


def _shares(run_dir: Path, method: str, num_workers: int, hosts: Hosts) -> tuple[float, float]:
    """Return the measured and the predicted communication share of a run."""
    from raydl.tools.plan import Plan, parse_network, predict
    from raydl.tools.report.events import read_history

    files = sorted(run_dir.glob("**/events.out.tfevents.*"))
    curves = read_history([file.read_bytes() for file in files]).curves
    # The first points are left out: they include the forming of the generation.
    steps = [c.values[1:] for tag, c in curves.items() if tag.startswith("worker_step_s/")]
    result = json.loads((run_dir / "result.json").read_text())
    plan = Plan(
        strategy="sync", period=PERIOD, overlaps=method == "sync-easgd",
        step_s=sum(Spread.of(values).median for values in steps) / len(steps),
        num_bytes=result["exchange_bytes"], batch_size=BATCH_SIZE,
    )  # fmt: skip
    network = parse_network(f"{LATENCY_S},{hosts.seconds_per_byte}")
    predicted = predict(plan, network, num_workers).communication_share
    return result["communication_share"], predicted


def main() -> None:
    """Measure and report."""
    numbers = ("parameters", "workers", "first", "last")
    options = parser_of_parts(__doc__, **{name: {"type": int} for name in numbers}).parse_args()
    repeats = options.repeats or (2 if options.quick else 5)
    if options.part:
        _measure_part(vars(options), repeats)
        return
    report = Report.of_command("growth", options)
    report_controller(report, repeats)
    if options.quick:
        report_sizes(report, [1_000_000, 10_000_000], repeats)
        report.add_text("Only the full form measures more workers, memory and predictions.")
    else:
        report_sizes(report, [10**e for e in range(4, 9)], repeats)
        report_workers(report, [1, 2, 4, 8], 1_000_000, repeats)
        report_memory(report, 100_000, 1_000, 10_000)
        report_plan(report, [(method, p) for method in ("sync-sgd", "sync-easgd") for p in (2, 4)])
    report.close(options.out)


def _measure_part(options: Mapping[str, Any], repeats: int) -> None:
    """Measure one part in this process, with its own Ray, and write the answer."""
    n = options["parameters"]
    with ray_here():
        if options["part"] == "memory":
            answer: Mapping[str, Any] = memory(n, options["first"], options["last"])
        else:
            answer = exchanges(n, options["workers"], repeats)
        write_answer(options["answer"], answer)


if __name__ == "__main__":
    main()
