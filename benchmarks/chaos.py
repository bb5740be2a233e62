"""What an hour of strikes at random does to a run: is any sample lost, or anything stale written.

Command:   python -m benchmarks.chaos               (--quick: four minutes in all; --minutes N: in
           all, 60 where it is not given; --only sync or async; --seed N: other strikes)

Three hosts train on a Ray cluster of four network namespaces (``hosts.py``); driver and center live
in the fourth. Some seconds after one another these fall, wherever the run stands:

cut             a host, the head's too, is cut off in both directions for 5 to 60 s
kill, halt      a worker's process; one that is halted goes on after some seconds, or never
center          the center's process is killed
driver          is killed, and started again with ``--resume``; in the first half alone, so that one
                driver lives for long enough to judge its memory
node            all processes of a host are killed; its Ray node starts anew some seconds later
thin            all links have 1 to 10 Mbit/s for 10 to 40 s

Strikes overlap. Ray nodes that end because they were cut off start anew, too. Each sample adds one
to a weight of its own at the center (``counting.py``). These must hold:

stale           nothing that ``outside.py`` finds, while the run trains and after
samples         each counts once an epoch: exactly by rounds. By messages each loss, of a strike or
                of a node that Ray ended, may change what the workers have under way
alone           no driver ends but by a strike, and after the last one all workers come back
memory          of a driver that has lived for two minutes and more: after a third of its life it
                grows by a fifth at most
left            no process is halted still once the run has ended

``pause`` is the longest time in which no sample was counted. What a killed driver has refused is
known as far as it told it, which it does less often the more there is.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.hosts import HostsError
from benchmarks.measure import Figure, Report, Spread, options_of
from benchmarks.outside import BACK_S, HEAD, UP_S, Run, falls, why_not_once
from benchmarks.programs import RunError, end_cleanly
from benchmarks.ray_on_hosts import USUAL_PULL_MS
from benchmarks.runs_on_hosts import Cluster, cluster
from benchmarks.storm import KINDS, Seen, Storm, is_halted

MINUTES, QUICK_MINUTES = 60.0, 4.0
RULES = {"sync": "AllProgress", "async": "AllProgressByMessages"}
NUM_HOSTS = 3
"""That train."""
GROWTH = 1.2
"""Of a driver's memory after a third of its life, at most."""
_GAP_S = 5.0, 20.0
_MEMORY_EVERY_S = 1.0
_LOOK_EVERY_S = 0.1
_TELLS_S = 8.0
"""A run that counts samples so long after a strike has got over it, or did not feel it."""
_STORM_OVER_S = 300.0
"""The longest wait for all workers after the last strike."""
_GONE_S = 30.0
"""The longest life of processes whose run has ended."""
_LIFE_S = 120.0
"""Of a driver whose memory is judged, at least."""


def growth(memory: list[tuple[float, int]]) -> float | None:
    """Return the most memory after a third of the time over that then; None: it was too short.

    Args:
        memory: (seconds, bytes), in the order of time.
    """
    if not memory or memory[-1][0] - memory[0][0] < _LIFE_S:
        return None
    third = memory[0][0] + (memory[-1][0] - memory[0][0]) / 3
    later = [num_bytes for at, num_bytes in memory if at >= third]
    return max(later) / later[0]


class Ordeal:
    """A run in a storm.

    Args:
        made: hosts with Ray.
        rule: of the run, one of ``RULES``.
        seed: of the strikes.
        seconds: the storm lasts.
    """

    def __init__(self, made: Cluster, rule: str, *, seed: int, seconds: float) -> None:
        from benchmarks import counting  # imports torch

        self.seen = Seen()
        self._counting = counting
        self._made = made
        self._rule = rule
        self._seconds = seconds
        self._random = random.Random(f"{seed} {rule}")
        self._storm = Storm(made, self.seen, self._random, self._resume)
        self._run_dir = made.folder / "run"
        self._words = (
            "--data", counting.write_table(made.folder / "table"),
            "--method", f"benchmarks.counting:{RULES[rule]}", *counting.OPTIONS,
            "--evaluation.every-epochs", "50",
        )  # fmt: skip
        self._memory: list[tuple[float, int]] = []
        self._pid: int | None = None
        self._counted = 0
        self._counted_at = time.monotonic()
        self._struck: list[tuple[float, str]] = []
        self._looked_at = 0.0

    @property
    def log(self) -> Path:
        """What the run has printed."""
        return self._run_dir.with_suffix(".log")

    def go(self) -> Seen:
        """Let the storm come over the run, then let it end; return what was seen.

        Raises:
            RunError: the run did not come up, or did not end.
        """
        self._start("--epochs", "1000000")
        try:
            self._run.until_all_train(self.seen, UP_S)
            began = self._counted_at = time.monotonic()
            while (passed := time.monotonic() - began) < self._seconds:
                self._strike(passed, with_driver=passed < self._seconds / 2)
                self._look_on(self._random.uniform(*_GAP_S))
                if self._random.random() < 0.5:  # else it may be struck before it is back
                    self._look_on(BACK_S, until=lambda: not self._struck)
            self._storm.calm()
            if not self._look_on(_STORM_OVER_S, until=self._run.all_train()):
                self.seen.ended.append(f"not all workers were back {_STORM_OVER_S:.0f} s after it")
            self._run.stop(self.seen)
            self._judge_memory()
            samples = self._run.result()["samples"]
            self.seen.num_epochs = samples // self._counting.NUM_SAMPLES + 2
            self._start("--epochs", str(self.seen.num_epochs), "--resume")
            self._run.end(self.seen)
            self._judge_end()
        finally:
            self._run.process.kill()
            self._run.process.wait()
        return self.seen

    def _start(self, *words: str) -> None:
        self._run = self._storm.run = Run(self._made, self._run_dir, *self._words, *words)
        self._memory, self._pid = [], None

    def _resume(self) -> None:
        """Start the driver again, once the one that ran has ended."""
        self._run.process.wait()
        self.seen.take_refused(self._run.said)
        self._judge_memory()
        self.seen.stale += why_not_once(self._run_dir)
        self._start("--epochs", "1000000", "--resume")

    def _strike(self, passed: float, *, with_driver: bool) -> None:
        kinds = {kind: n for kind, n in KINDS.items() if with_driver or kind != "driver"}
        done = self._storm.strike(kinds=kinds)
        if done:
            self._struck.append((time.monotonic(), done))
            print(f"  {self._rule} {passed:4.0f} s: {done}", flush=True)

    def _look_on(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Look at the run for so many seconds, or until something holds; return whether it does."""
        deadline = time.monotonic() + seconds
        while not (holds := until()) and time.monotonic() < deadline:
            self._storm.tick()
            self.seen.look(self._run_dir)
            if time.monotonic() >= self._looked_at + _MEMORY_EVERY_S:
                self._looked_at = time.monotonic()
                self._look_at_status()
            if self._run.process.poll() is not None:
                said = "\n".join(self._run.said[-20:])
                self.seen.ended.append(f"a driver ended with {self._run.process.returncode}")
                print(f"  {self._rule}: {self.seen.ended[-1]}:\n{said}", flush=True)
                self._resume()
            time.sleep(_LOOK_EVERY_S)
        return holds

    def _look_at_status(self) -> None:
        """Note how long no sample was counted, and the driver's memory."""
        now, counted = time.monotonic(), self._run.status().get("num_samples", 0)
        self._note_memory(now)
        if now - self._counted_at > self.seen.pause_s:
            self.seen.pause_s = now - self._counted_at
            self.seen.paused_by = "; ".join(done for _, done in self._struck)
        if counted > self._counted:
            self._counted_at = now
            self._struck = [(at, done) for at, done in self._struck if now - at < _TELLS_S]
        self._counted = counted

    def _note_memory(self, now: float) -> None:
        if self._pid is None:
            drivers = self._made.hosts.processes(HEAD).items()
            self._pid = next((p for p, words in drivers if " -m raydl train " in words), None)
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
            self._memory.append((now, pages * os.sysconf("SC_PAGE_SIZE")))

    def _judge_memory(self) -> None:
        grown = growth(self._memory)
        self.seen.growth += [] if grown is None else [grown]

    def _judge_end(self) -> None:
        """Look at all that the run has left."""
        from safetensors.torch import load_file

        from raydl.tools.report.events import read_history

        samples, wanted = self._run.result()["samples"], self.seen.num_epochs
        if samples != wanted * self._counting.NUM_SAMPLES:
            self.seen.stale.append(f"{wanted} epochs have counted {samples} samples")
        counts = load_file(self._run_dir / "center.safetensors")["counts"].round().long()
        self.seen.num_out = int((counts - wanted).abs().sum())
        files = [path.read_bytes() for path in sorted(self._run_dir.glob("events.out.tfevents*"))]
        self.seen.stale += falls(read_history(files).curves["workers/generation"].values)
        deadline = time.monotonic() + _GONE_S
        while (left := self._num_halted()) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        self.seen.num_left = left

    def _num_halted(self) -> int:
        hosts = range(self._made.hosts.number)
        return sum(is_halted(pid) for host in hosts for pid in self._made.hosts.processes(host))


def figures_of(rule: str, seen: Seen) -> Iterator[Figure]:
    """Yield what was found in a run."""
    from benchmarks import counting

    def one(name: str, value: float, target: float | None = None) -> Figure:
        spread = Spread.of([value])
        return Figure(name=f"chaos.{rule}.{name}", value=spread, target=target, is_better="less")

    yield one("stale", len(seen.stale), 0)
    most_out = 0 if rule == "sync" else seen.num_losses * counting.MOST_OUT
    yield one("samples-out", seen.num_out, most_out)
    yield one("alone", len(seen.ended), 0)
    yield one("left", seen.num_left, 0)
    if seen.growth:
        yield one("memory", max(seen.growth), GROWTH)
    yield one("pause-s", seen.pause_s)
    for kind in KINDS:
        yield one(f"hits.{kind}", seen.hits[kind])
    for kind, count in seen.refused.items():
        yield one(f"refused.{kind}", count)


def weathered(rule: str, *, seed: int, seconds: float, out: Path | None = None) -> Seen:
    """Return what a storm of so many seconds does to a run.

    Args:
        rule: one of ``RULES``.
        seed: of the strikes.
        seconds: the storm lasts.
        out: a folder for what the run prints, however it ends.

    Raises:
        HostsError: this machine does not permit hosts.
        RunError: the run did not come up, or did not end.
    """
    with cluster(NUM_HOSTS, has_master=True, pull_ms=USUAL_PULL_MS) as made:
        ordeal = Ordeal(made, rule, seed=seed, seconds=seconds)
        try:
            return ordeal.go()
        finally:
            if out is not None and ordeal.log.exists():
                out.mkdir(parents=True, exist_ok=True)
                shutil.copy(ordeal.log, out / f"chaos-{rule}.log")


def main() -> None:
    """Run the benchmark."""
    end_cleanly()
    parser = options_of(
        __doc__,
        minutes={"type": float, "help": "of strikes in all"},
        seed={"type": int, "default": 0, "help": "of the strikes"},
        only={"choices": tuple(RULES), "help": "one method alone"},
    )
    options = parser.parse_args()
    report = Report.of_command("chaos", options)
    rules = (options.only,) if options.only else tuple(RULES)
    minutes = options.minutes or (QUICK_MINUTES if options.quick else MINUTES)
    seconds = 60 * minutes / len(rules)
    found: dict[str, Seen] = {}
    try:
        for rule in rules:
            found[rule] = weathered(rule, seed=options.seed, seconds=seconds, out=options.out)
    except (HostsError, RunError) as error:
        sys.exit(str(error))
    tell(report, found)
    report.close(options.out)


def tell(report: Report, found: dict[str, Seen]) -> None:
    """Tell and judge what was found in the runs."""
    rows = [
        (
            rule, seen.hits.total(), seen.num_rejoined, len(seen.written), len(seen.stale),
            f"{seen.num_out} of {seen.num_epochs} epochs",
            ", ".join(f"{count} {kind}" for kind, count in seen.refused.items()) or "nothing",
            f"{seen.pause_s:.0f} s",
        )
        for rule, seen in found.items()
    ]  # fmt: skip
    columns = (
        "method", "strikes", "nodes started again", "checkpoints", "stale", "samples out",
        "refused", "longest pause",
    )  # fmt: skip
    report.add_table(columns, rows)
    for rule, seen in found.items():
        hits = ", ".join(f"{count} {kind}" for kind, count in seen.hits.items())
        report.add_text(f"{rule}: {hits}. Longest pause: {seen.paused_by}.")
        for sentence in (*seen.stale, *seen.ended):
            report.add_text(f"{rule}: {sentence}")
        report.add_figures(*figures_of(rule, seen))


if __name__ == "__main__":
    main()
