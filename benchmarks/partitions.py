"""What real partitions of the network do to a run: is anything stale ever taken for new.

Command:   python -m benchmarks.partitions          (--quick: sync-easgd, two partitions, of 5 and
           of 9 s; --number N: so many in all, 50 where it is not given)

Two hosts train on a Ray cluster of three network namespaces (``hosts.py``); driver and center live
in the third. Again and again one of the three is cut off from the others, in both directions, for
5 to 60 s: a worker's host, which may be shorter or longer than the lease (``elastic.lease_s`` is
6 s here), or the head's, behind which all workers train on without a center. Ray takes a host for
lost that is away for half a minute and more; its node is started again when the network is back.
After each partition both workers must train again before the next one comes.

While the run trains, its folder is read from outside. These must hold, or the partition counts as
a stale write:

manifests       a checkpoint is of the newest driver epoch and generation of all before it, and of
                a higher round than those of its own generation
samples         in each checkpoint every sample of an epoch that is under way is either done or
                free, once; in the end a run has counted as many as its epochs hold
curves          the generation never falls

A last start with ``--resume`` ends the run. ``refused`` counts what came too late, by kind, as
``result.json`` has it; a partition that refuses nothing has let nothing late come.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.hosts import HostsError
from benchmarks.measure import Figure, Report, Spread, options_of
from benchmarks.programs import ROOT, RunError, end_cleanly, end_of
from benchmarks.ray_on_hosts import rejoin_ray
from benchmarks.runs_on_hosts import Cluster, cluster

NUMBER, QUICK_NUMBER = 50, 2
LEASE_S = 6.0
METHODS = ("sync-easgd", "async-easgd")
QUICK_METHODS = METHODS[:1]
SHORTEST_S, LONGEST_S = 5.0, 60.0
QUICK_S = (5.0, 9.0)
HEAD = 0
_EPOCH_SAMPLES = 1438
"""Of the bundled digits."""
_UP_S, _BACK_S, _END_S, _REJOIN_S = 180.0, 150.0, 120.0, 90.0
"""The longest waits: for the first rounds, for both workers after a partition, for the end of a
run, for a node that starts again."""
_ROUNDS_BACK = 10
"""So many rounds of both workers after a partition say that they train again."""
_TURN_S = 10.0
"""How long both workers are waited for before it is looked whether a node has ended."""
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class Cut:
    """One partition."""

    host: int
    """Which is cut off; the head's is 0."""
    for_s: float


@dataclass(frozen=True, order=True)
class Written:
    """What orders a checkpoint among those of its run."""

    driver_epoch: int
    generation: int
    round: int


@dataclass
class Watched:
    """What was seen of a run's folder from outside."""

    stale: list[str] = field(default_factory=list)
    """A sentence for each thing that should not be there."""
    written: list[Written] = field(default_factory=list)
    """Checkpoints, in the order in which they came."""
    back_s: list[float] = field(default_factory=list)
    """From the end of each partition until both workers train again."""
    num_rejoined: int = 0
    """Hosts whose Ray node had to be started again."""
    refused: Counter[str] = field(default_factory=Counter)
    _seen: set[str] = field(default_factory=set)

    def look(self, run_dir: Path) -> None:
        """Read the manifests that are new."""
        for path in sorted((run_dir / "checkpoints").glob("round-*/manifest.json")):
            with contextlib.suppress(OSError, ValueError):  # it is deleted while it is read
                if path.parent.name not in self._seen:
                    manifest = json.loads(path.read_text())
                    self._seen.add(path.parent.name)
                    self.take(path.parent.name, manifest)

    def take(self, name: str, manifest: dict[str, Any]) -> None:
        """Note a checkpoint, and whether it belongs after those before it."""
        now = Written(manifest["driver_epoch"], manifest["generation"], manifest["round"])
        before = max(self.written, default=now)
        if now < before and "copy_of" not in manifest:
            self.stale.append(f"{name} of {now} came after {before}")
        self.written.append(now)


def cuts_of(number: int, seed: int) -> list[Cut]:
    """Return so many partitions: each third is the head's, their lengths spread evenly by ratio."""
    ratio = LONGEST_S / SHORTEST_S
    lengths = [SHORTEST_S * ratio ** (i / max(1, number - 1)) for i in range(number)]
    random.Random(seed).shuffle(lengths)
    return [Cut((1, 2, HEAD)[i % 3], round(for_s, 1)) for i, for_s in enumerate(lengths)]


class Run:
    """``raydl train`` in host 0 of a cluster, for as long as this context is entered.

    Args:
        made: the cluster.
        run_dir: of the run.
        words: of its command line.
    """

    def __init__(self, made: Cluster, run_dir: Path, *words: str) -> None:
        self.run_dir = run_dir
        self._made = made
        self._log = run_dir.with_suffix(".log")
        pid_file = run_dir.with_suffix(".pid")
        command = [
            sys.executable, "-m", "raydl", "train", "--data", "digits", "--model", "mlp",
            "--batch-size", "16", "--workers", "1:2", "--elastic.lease-s", str(LEASE_S),
            "--checkpoint.every-s", "1", "--evaluation.every-epochs", "1",
            "--run.progress", "plain", "--run-dir", str(run_dir), *words,
        ]  # fmt: skip
        with self._log.open("a") as log:
            self.process = made.hosts.popen(
                HEAD, ["sh", "-c", f'echo $$ > {pid_file}; exec "$@"', "sh", *command],
                env=made.environment, cwd=ROOT, stdout=log, stderr=log,
            )  # fmt: skip
        self._pid_file = pid_file
        self._num_told = 0

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def until(self, holds: Callable[[], bool], bound_s: float, what: str, watched: Watched) -> None:
        """Wait until something holds; look into the folder meanwhile.

        Raises:
            RunError: the run ended, or it took too long.
        """
        deadline = time.monotonic() + bound_s
        while not holds():
            watched.look(self.run_dir)
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RunError(f"waited in vain for {what}:\n{end_of(self._log)}")
            time.sleep(_LOOK_EVERY_S)

    def status(self) -> dict[str, Any]:
        """Return what the run tells of itself."""
        with contextlib.suppress(OSError, ValueError):
            status: dict[str, Any] = json.loads((self.run_dir / "status.json").read_text())
            return status
        return {"num_workers": 0, "round": -1, "state": ""}

    def until_both_train(self, watched: Watched, bound_s: float) -> None:
        """Wait until both workers have trained some rounds together."""
        since = math.inf

        def holds() -> bool:
            nonlocal since
            now = self.status()
            if (now["num_workers"], now["state"]) != (2, "training"):
                since = math.inf
                return False
            since = min(since, now["round"])
            return bool(now["round"] >= since + _ROUNDS_BACK)

        self.until(holds, bound_s, "both workers", watched)

    def stop(self, watched: Watched) -> None:
        """Let the run end after its round, with a checkpoint."""
        pid = self._pid_file.read_text().strip()
        self._made.hosts.run(HEAD, ["kill", "-TERM", pid], timeout_s=_REJOIN_S)
        self.end(watched)

    def end(self, watched: Watched) -> None:
        """Wait for the end; note what was refused."""
        deadline = time.monotonic() + _END_S
        while self.process.poll() is None:
            watched.look(self.run_dir)
            if time.monotonic() > deadline:
                raise RunError(f"the run did not end:\n{end_of(self._log)}")
            time.sleep(_LOOK_EVERY_S)
        watched.look(self.run_dir)
        result = self.result()
        watched.refused.update(result["refused"])
        watched.stale += why_not_once(self.run_dir)

    def tell_refused(self) -> None:
        """Print what the run has said of things that came too late."""
        lines = self._log.read_text(errors="replace").splitlines()
        for line in [line for line in lines if "refused" in line][self._num_told :]:
            self._num_told += 1
            print(f"    {line}", flush=True)

    def result(self) -> dict[str, Any]:
        """Return the run's figures.

        Raises:
            RunError: it wrote none.
        """
        with contextlib.suppress(OSError, ValueError):
            result: dict[str, Any] = json.loads((self.run_dir / "result.json").read_text())
            return result
        raise RunError(f"the run has no result:\n{end_of(self._log)}")


def why_not_once(run_dir: Path) -> list[str]:
    """Return a sentence for each epoch in which a sample is lost, or counted twice."""
    from raydl.checkpoint import CheckpointStore  # imports torch
    from raydl.storage import Storage

    checkpoint, damage = CheckpointStore(Storage(str(run_dir))).read()
    ledger = checkpoint.state["ledger"]
    found = list(damage)
    for epoch, num_done, free in ledger["open"]:
        spans = sorted((*map(tuple, free), *reserved_in(ledger, epoch)))
        num_free = sum(stop - start for start, stop in spans)
        overlaps = any(a[1] > b[0] for a, b in pairwise(spans))
        if overlaps or num_done + num_free != ledger["num_samples"]:
            found.append(f"epoch {epoch}: {num_done} done and {num_free} free, {spans}")
    return found


def reserved_in(ledger: dict[str, Any], epoch: int) -> list[tuple[int, int]]:
    """Return the positions of an epoch that workers have been promised, and have not begun."""
    return [tuple(span) for _, of_epoch, span in ledger["reserved"] if of_epoch == epoch]


def falls(curve: Sequence[float]) -> list[str]:
    """Return a sentence for each place where a curve that should rise falls."""
    return [f"the curve of generations falls from {a} to {b}" for a, b in pairwise(curve) if b < a]


def partitioned(made: Cluster, method: str, cuts: Sequence[Cut]) -> Watched:
    """Return what partitions do to a run of a method.

    Raises:
        RunError: the run ended, or did not come back after one of them.
    """
    from raydl.report.events import read_history

    watched = Watched()
    run_dir = made.folder / f"{method}-{len(list(made.folder.iterdir()))}"
    words = ("--method", method, "--period", "4")
    with Run(made, run_dir, *words, "--epochs", "1000000") as run:
        run.until_both_train(watched, _UP_S)
        for number, cut in enumerate(cuts):
            cut_off(made, run, cut, watched)
            took = f"back after {watched.back_s[-1]:.1f} s, {len(watched.stale)} stale"
            print(f"  {method} {number + 1}/{len(cuts)} {cut}: {took}", flush=True)
            run.tell_refused()
        run.stop(watched)
        num_epochs = math.floor(run.result()["samples"] / _EPOCH_SAMPLES) + 2
    with Run(made, run_dir, *words, "--epochs", str(num_epochs), "--resume") as run:
        run.end(watched)
        samples = run.result()["samples"]
        if samples != num_epochs * _EPOCH_SAMPLES:
            watched.stale.append(f"{num_epochs} epochs have counted {samples} samples")
    files = [path.read_bytes() for path in sorted(run_dir.glob("events.out.tfevents*"))]
    watched.stale += falls(read_history(files).curves["workers/generation"].values)
    return watched


def cut_off(made: Cluster, run: Run, cut: Cut, watched: Watched) -> None:
    """Cut a host off for a while, and wait until both workers train again."""
    made.hosts.cut(cut.host)
    try:
        until = time.monotonic() + cut.for_s
        run.until(lambda: time.monotonic() >= until, 2 * cut.for_s, "the partition", watched)
    finally:
        made.hosts.join(cut.host)
    began = time.monotonic()
    while True:
        try:
            run.until_both_train(watched, _TURN_S)
            break
        except RunError:
            if run.process.poll() is not None or time.monotonic() > began + _BACK_S:
                raise
        # Ray's node may notice some seconds later that it was taken for lost.
        watched.num_rejoined += sum(rejoin(made, host) for host in (1, 2))
    watched.back_s.append(time.monotonic() - began)


def rejoin(made: Cluster, host: int) -> bool:
    """Start the Ray node of a host again if it has ended; return whether it had."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir=made.folder))
    return rejoin_ray(made.hosts, host, folder, made.environment, timeout_s=_REJOIN_S)


def figures_of(seen: Sequence[Watched]) -> Iterator[Figure]:
    """Yield what was found over all runs."""

    def one(name: str, value: float, target: float | None = None) -> Figure:
        return Figure(
            name=f"partitions.{name}", value=Spread.of([value]), target=target, is_better="less"
        )

    back_s = [seconds for watched in seen for seconds in watched.back_s]
    yield one("stale_writes", sum(len(watched.stale) for watched in seen), 0)
    yield one("number", len(back_s))
    yield Figure(name="partitions.back_s", value=Spread.of(back_s))
    for kind, count in sum((watched.refused for watched in seen), Counter[str]()).items():
        yield one(f"refused.{kind}", count)


def main() -> None:
    """Run the benchmark."""
    end_cleanly()
    parser = options_of(
        __doc__,
        number={"type": int, "help": "partitions in all"},
        seed={"type": int, "default": 0, "help": "shuffles their lengths"},
        only={"choices": METHODS, "help": "one method alone"},
    )
    options = parser.parse_args()
    report = Report.of_command("partitions", options)
    methods = (options.only,) if options.only else QUICK_METHODS if options.quick else METHODS
    number = options.number or (QUICK_NUMBER if options.quick else NUMBER)
    cuts = [Cut(1, QUICK_S[0]), Cut(HEAD, QUICK_S[1])] if options.quick else None
    cuts = cuts or cuts_of(number, options.seed)
    seen: dict[str, Watched] = {}
    try:
        for index, method in enumerate(methods):
            with cluster(2, has_master=True) as made:
                seen[method] = partitioned(made, method, cuts[index :: len(methods)])
    except (HostsError, RunError) as error:
        sys.exit(str(error))
    rows = [
        (
            method, len(w.back_s), len(w.written), len(w.stale),
            ", ".join(f"{count} {kind}" for kind, count in w.refused.items()) or "nothing",
            f"{median(w.back_s):.1f} s", w.num_rejoined,
        )
        for method, w in seen.items()
    ]  # fmt: skip
    columns = (
        "method", "partitions", "checkpoints", "stale", "refused", "back (median)",
        "nodes started again",
    )  # fmt: skip
    report.table(columns, rows)
    for watched in seen.values():
        for sentence in watched.stale:
            report.say(sentence)
    report.judge(*figures_of(list(seen.values())))
    report.close(options.out)


if __name__ == "__main__":
    main()
