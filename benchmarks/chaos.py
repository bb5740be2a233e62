"""Injects random faults into a run, and checks that no sample is lost and nothing stale is written.

Command:   python -m benchmarks.chaos               (--quick: four minutes in all; --minutes N: N
           minutes in all, 60 by default; --only sync or async; --seed N: other faults)

Three hosts train on a Ray cluster of four network namespaces (``hosts.py``); driver and center run
in the fourth. Every few seconds one of these faults is injected, whatever the run is doing:

cut             a host, possibly the head's, is cut off in both directions for 5 to 60 s
kill, halt      a worker's process is killed, or halted for some seconds or for good
center          the center's process is killed
driver          the driver is killed and started again with ``--resume``; only in the first half, so
                that one driver lives long enough to judge its memory
node            all processes of a host are killed; its Ray node is restarted some seconds later
thin            all links have 1 to 10 Mbit/s for 10 to 40 s

Faults overlap. Ray nodes that end after a partition are restarted, too. Each sample adds one to its
own weight at the center (``counting.py``). These conditions must hold:

stale           no invariant of ``outside.py`` is violated, during the run and at its end
samples         each sample counts once per epoch: exactly in rounds. With messages, each loss, by a
                fault or of a node that Ray ended, may change the count of samples in flight
alone           no driver ends except by a fault, and all workers recover after the last fault
memory          the memory of a driver that lives two minutes or more grows by at most a fifth after
                a third of its life
left            no halted process remains after the end of the run

``pause`` is the longest time without a newly counted sample. The refusals of a killed driver are
known only as far as it logged them; it logs them less often the more there are.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.hosts import HostsError
from benchmarks.measure import Figure, Report, Spread, options_of
from benchmarks.outside import BACK_S, HEAD, UP_S, Run, falls, miscounted
from benchmarks.programs import RunError, end_cleanly
from benchmarks.ray_on_hosts import USUAL_PULL_MS
from benchmarks.runs_on_hosts import Cluster, cluster
from benchmarks.storm import KINDS, Outcome, Storm, is_halted

MINUTES, QUICK_MINUTES = 60.0, 4.0
RULES = {"sync": "AllProgress", "async": "AllProgressByMessages"}
NUM_HOSTS = 3
"""Number of hosts that train."""
GROWTH = 1.2
"""Limit for the growth of a driver's memory after a third of its life."""
_GAP_S = 5.0, 20.0
_STATUS_EVERY_S = 1.0
_POLL_EVERY_S = 0.1
_RECOVERED_S = 8.0
"""A run that counts samples this many seconds after a fault has recovered from it."""
_STORM_OVER_S = 300.0
"""Time-out for the recovery of all workers after the last fault, in seconds."""
_GONE_S = 30.0
"""Time-out for the end of the processes of a finished run, in seconds."""
_LIFE_S = 120.0
"""Shortest life of a driver whose memory is judged, in seconds."""


def growth(memory: list[tuple[float, int]]) -> float | None:
    """Return the peak memory after a third of the time over the memory at that third.

    Return None if the time is too short.

    Args:
        memory: (seconds, bytes), in the order of time.
    """
    if not memory or memory[-1][0] - memory[0][0] < _LIFE_S:
        return None
    third = memory[0][0] + (memory[-1][0] - memory[0][0]) / 3
    later = [num_bytes for at, num_bytes in memory if at >= third]
    return max(later) / later[0]


class StormRun:
    """A run in a storm.

    Args:
        made: the cluster.
        rule: rule of the run, one of ``RULES``.
        seed: seed of the faults.
        seconds: length of the storm.
    """

    def __init__(self, made: Cluster, rule: str, *, seed: int, seconds: float) -> None:
        from benchmarks import counting  # imports torch

        self.outcome = Outcome()
        self._counting = counting
        self._made = made
        self._rule = rule
        self._seconds = seconds
        self._random = random.Random(f"{seed} {rule}")
        self._storm = Storm(made, self.outcome, self._random, self._resume)
        self._run_dir = made.folder / "run"
        self._arguments = (
            "--data", counting.write_table(made.folder / "table"),
            "--method", f"benchmarks.counting:{RULES[rule]}", *counting.OPTIONS,
            "--evaluation.every-epochs", "50",
        )  # fmt: skip
        self._memory: list[tuple[float, int]] = []
        self._pid: int | None = None
        self._counted = 0
        self._counted_at = time.monotonic()
        self._recent: list[tuple[float, str]] = []
        """Faults that the run has not recovered from, with their times."""
        self._status_at = 0.0

    @property
    def log(self) -> Path:
        """The log of the run."""
        return self._run_dir.with_suffix(".log")

    def execute(self) -> Outcome:
        """Run through the storm, stop, resume to the end of an epoch, and return the outcome.

        Raises:
            RunError: if the run did not start or did not end.
        """
        self._start("--epochs", "1000000")
        try:
            self._run.wait_until_all_train(self.outcome, UP_S)
            began = self._counted_at = time.monotonic()
            while (passed := time.monotonic() - began) < self._seconds:
                self._inject(passed, with_driver=passed < self._seconds / 2)
                self._observe(self._random.uniform(*_GAP_S))
                if self._random.random() < 0.5:  # else the next fault may hit before the recovery
                    self._observe(BACK_S, until=lambda: not self._recent)
            self._storm.end_all()
            if not self._observe(_STORM_OVER_S, until=self._run.all_train()):
                sentence = f"not all workers were back {_STORM_OVER_S:.0f} s after the storm"
                self.outcome.ended.append(sentence)
            self._run.stop(self.outcome)
            self._judge_memory()
            samples = self._run.result()["samples"]
            self.outcome.num_epochs = samples // self._counting.NUM_SAMPLES + 2
            self._start("--epochs", str(self.outcome.num_epochs), "--resume")
            self._run.end(self.outcome)
            self._judge_end()
        finally:
            self._run.process.kill()
            self._run.process.wait()
        return self.outcome

    def _start(self, *arguments: str) -> None:
        self._run = self._storm.run = Run(self._made, self._run_dir, *self._arguments, *arguments)
        self._memory, self._pid = [], None

    def _resume(self) -> None:
        """Wait for the end of the driver and start it again."""
        self._run.process.wait()
        self.outcome.add_refused(self._run.log_lines)
        self._judge_memory()
        self.outcome.stale += miscounted(self._run_dir)
        self._start("--epochs", "1000000", "--resume")

    def _inject(self, passed: float, *, with_driver: bool) -> None:
        kinds = {kind: n for kind, n in KINDS.items() if with_driver or kind != "driver"}
        fault = self._storm.inject(kinds=kinds)
        if fault:
            self._recent.append((time.monotonic(), fault))
            print(f"  {self._rule} {passed:4.0f} s: {fault}", flush=True)

    def _observe(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Observe the run for some seconds or until a condition holds; return whether it holds."""
        deadline = time.monotonic() + seconds
        while not (holds := until()) and time.monotonic() < deadline:
            self._storm.tick()
            self.outcome.read_manifests(self._run_dir)
            if time.monotonic() >= self._status_at + _STATUS_EVERY_S:
                self._status_at = time.monotonic()
                self._read_status()
            if self._run.process.poll() is not None:
                log = "\n".join(self._run.log_lines[-20:])
                self.outcome.ended.append(f"a driver ended with {self._run.process.returncode}")
                print(f"  {self._rule}: {self.outcome.ended[-1]}:\n{log}", flush=True)
                self._resume()
            time.sleep(_POLL_EVERY_S)
        return holds

    def _read_status(self) -> None:
        """Record the time without a newly counted sample, and the driver's memory."""
        now, counted = time.monotonic(), self._run.status().get("num_samples", 0)
        self._record_memory(now)
        if now - self._counted_at > self.outcome.pause_s:
            self.outcome.pause_s = now - self._counted_at
            self.outcome.paused_by = "; ".join(fault for _, fault in self._recent)
        if counted > self._counted:
            self._counted_at = now
            self._recent = [(at, fault) for at, fault in self._recent if now - at < _RECOVERED_S]
        self._counted = counted

    def _record_memory(self, now: float) -> None:
        if self._pid is None:
            drivers = self._made.hosts.processes(HEAD).items()
            self._pid = next((p for p, command in drivers if " -m raydl train " in command), None)
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
            self._memory.append((now, pages * os.sysconf("SC_PAGE_SIZE")))

    def _judge_memory(self) -> None:
        grown = growth(self._memory)
        self.outcome.growth += [] if grown is None else [grown]

    def _judge_end(self) -> None:
        """Check the samples, curves and processes after the end of the run."""
        from safetensors.torch import load_file

        from raydl.tools.report.events import read_history

        samples, wanted = self._run.result()["samples"], self.outcome.num_epochs
        if samples != wanted * self._counting.NUM_SAMPLES:
            self.outcome.stale.append(f"{wanted} epochs have counted {samples} samples")
        counts = load_file(self._run_dir / "center.safetensors")["counts"].round().long()
        self.outcome.num_out = int((counts - wanted).abs().sum())
        files = [path.read_bytes() for path in sorted(self._run_dir.glob("events.out.tfevents*"))]
        self.outcome.stale += falls(read_history(files).curves["workers/generation"].values)
        deadline = time.monotonic() + _GONE_S
        while (left := self._num_halted()) and time.monotonic() < deadline:
            time.sleep(_POLL_EVERY_S)
        self.outcome.num_left = left

    def _num_halted(self) -> int:
        hosts = range(self._made.hosts.number)
        return sum(is_halted(pid) for host in hosts for pid in self._made.hosts.processes(host))


def figures_of(rule: str, outcome: Outcome) -> Iterator[Figure]:
    """Yield the figures of a run."""
    from benchmarks import counting

    def figure(name: str, value: float, target: float | None = None) -> Figure:
        spread = Spread.of([value])
        return Figure(name=f"chaos.{rule}.{name}", value=spread, target=target, is_better="less")

    yield figure("stale", len(outcome.stale), 0)
    most_out = 0 if rule == "sync" else outcome.num_losses * counting.MOST_OUT
    yield figure("samples-out", outcome.num_out, most_out)
    yield figure("alone", len(outcome.ended), 0)
    yield figure("left", outcome.num_left, 0)
    if outcome.growth:
        yield figure("memory", max(outcome.growth), GROWTH)
    yield figure("pause-s", outcome.pause_s)
    for kind in KINDS:
        yield figure(f"hits.{kind}", outcome.hits[kind])
    for kind, count in outcome.refused.items():
        yield figure(f"refused.{kind}", count)


def run_in_storm(rule: str, *, seed: int, seconds: float, out: Path | None = None) -> Outcome:
    """Run a rule in a storm and return the outcome.

    Args:
        rule: one of ``RULES``.
        seed: seed of the faults.
        seconds: length of the storm.
        out: folder for the run's log, also after an error.

    Raises:
        HostsError: if this machine does not permit hosts.
        RunError: if the run did not start or did not end.
    """
    with cluster(NUM_HOSTS, has_master=True, pull_ms=USUAL_PULL_MS) as made:
        run = StormRun(made, rule, seed=seed, seconds=seconds)
        try:
            return run.execute()
        finally:
            if out is not None and run.log.exists():
                out.mkdir(parents=True, exist_ok=True)
                shutil.copy(run.log, out / f"chaos-{rule}.log")


def main() -> None:
    """Run the benchmark."""
    end_cleanly()
    parser = options_of(
        __doc__,
        minutes={"type": float, "help": "minutes of faults in all"},
        seed={"type": int, "default": 0, "help": "seed of the faults"},
        only={"choices": tuple(RULES), "help": "only this method"},
    )
    options = parser.parse_args()
    report = Report.of_command("chaos", options)
    rules = (options.only,) if options.only else tuple(RULES)
    minutes = options.minutes or (QUICK_MINUTES if options.quick else MINUTES)
    seconds = 60 * minutes / len(rules)
    outcomes: dict[str, Outcome] = {}
    failed = []
    for rule in rules:
        try:
            outcomes[rule] = run_in_storm(rule, seed=options.seed, seconds=seconds, out=options.out)
        except HostsError as error:
            sys.exit(str(error))
        except (RunError, subprocess.SubprocessError) as error:
            report.add_text(f"{rule} failed: {error}")
            failed.append(rule)
    add_results(report, outcomes)
    report.close(options.out)
    sys.exit(1 if failed else 0)


def add_results(report: Report, outcomes: dict[str, Outcome]) -> None:
    """Add the tables and figures of the runs to a report."""
    rows = [
        (
            rule, outcome.hits.total(), outcome.num_rejoined, len(outcome.written),
            len(outcome.stale), f"{outcome.num_out} of {outcome.num_epochs} epochs",
            ", ".join(f"{count} {kind}" for kind, count in outcome.refused.items()) or "nothing",
            f"{outcome.pause_s:.0f} s",
        )
        for rule, outcome in outcomes.items()
    ]  # fmt: skip
    columns = (
        "method", "faults", "restarted nodes", "checkpoints", "stale", "samples out",
        "refused", "longest pause",
    )  # fmt: skip
    report.add_table(columns, rows)
    for rule, outcome in outcomes.items():
        hits = ", ".join(f"{count} {kind}" for kind, count in outcome.hits.items())
        report.add_text(f"{rule}: {hits}. Longest pause: {outcome.paused_by}.")
        for sentence in (*outcome.stale, *outcome.ended):
            report.add_text(f"{rule}: {sentence}")
        report.add_figures(*figures_of(rule, outcome))


if __name__ == "__main__":
    main()
