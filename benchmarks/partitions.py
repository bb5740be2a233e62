"""Partitions the network of a run and checks that it writes nothing stale.

Command:   python -m benchmarks.partitions          (--quick: sync-easgd, two partitions, of 5 and
           of 9 s; --number N: N partitions in all, 50 by default)

Two hosts train on a Ray cluster of three network namespaces (``hosts.py``); driver and center run
in the third. Repeatedly, one of the three hosts is cut off from the others, in both directions, for
5 to 60 s. It is either a worker's host, for shorter or longer than the lease (``elastic.lease_s``
is 6 s here), or the head's, while all workers go on without the center. Ray declares a host dead
after half a minute; its node is restarted after the partition. Both workers must train again before
the next partition begins.

While the run trains, its folder is read from outside. Each violation of an invariant of
``outside.py`` counts as a stale write.

A last start with ``--resume`` ends the run. ``refused`` counts the late arrivals by kind, as in
``result.json``. A partition after which nothing arrives late refuses nothing.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.hosts import HostsError
from benchmarks.measure import Figure, Report, Spread, options_of
from benchmarks.outside import BACK_S, HEAD, UP_S, Observed, Run, falls
from benchmarks.programs import RunError, end_cleanly
from benchmarks.ray_on_hosts import USUAL_PULL_MS, rejoin_ray
from benchmarks.runs_on_hosts import Cluster, cluster

NUMBER, QUICK_NUMBER = 50, 2
METHODS = ("sync-easgd", "async-easgd")
QUICK_METHODS = METHODS[:1]
SHORTEST_S, LONGEST_S = 5.0, 60.0
QUICK_S = (5.0, 9.0)
_EPOCH_SAMPLES = 1438
"""Samples in an epoch of the bundled digits."""
_REJOIN_S = 90.0
"""Time-out for the start of a node, in seconds."""
_TURN_S = 10.0
"""Seconds to wait for both workers between two checks for ended nodes."""
DIGITS = (
    "--data", "digits", "--model", "mlp", "--batch-size", "16", "--evaluation.every-epochs", "1",
)  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """One partition."""

    host: int
    """Number of the host that is cut off; 0 is the head."""
    for_s: float


def cuts_of(number: int, seed: int) -> list[Cut]:
    """Return partitions, every third one of the head, with geometrically spaced lengths."""
    ratio = LONGEST_S / SHORTEST_S
    lengths = [SHORTEST_S * ratio ** (i / max(1, number - 1)) for i in range(number)]
    random.Random(seed).shuffle(lengths)
    return [Cut((1, 2, HEAD)[i % 3], round(for_s, 1)) for i, for_s in enumerate(lengths)]


def run_partitioned(made: Cluster, method: str, cuts: Sequence[Cut]) -> Observed:
    """Run a method, inject the partitions, and return the observations.

    Raises:
        RunError: if the run ended, or did not recover from a partition.
    """
    from raydl.tools.report.events import read_history

    observed = Observed()
    run_dir = made.folder / f"{method}-{len(list(made.folder.iterdir()))}"
    arguments = (*DIGITS, "--method", method, "--period", "4")
    with Run(made, run_dir, *arguments, "--epochs", "1000000") as run:
        run.wait_until_all_train(observed, UP_S)
        for number, cut in enumerate(cuts):
            cut_off(made, run, cut, observed)
            outcome = f"back after {observed.back_s[-1]:.1f} s, {len(observed.stale)} stale"
            print(f"  {method} {number + 1}/{len(cuts)} {cut}: {outcome}", flush=True)
            run.print_refused()
        run.stop(observed)
        num_epochs = math.floor(run.result()["samples"] / _EPOCH_SAMPLES) + 2
    with Run(made, run_dir, *arguments, "--epochs", str(num_epochs), "--resume") as run:
        run.end(observed)
        samples = run.result()["samples"]
        if samples != num_epochs * _EPOCH_SAMPLES:
            observed.stale.append(f"{num_epochs} epochs have counted {samples} samples")
    files = [path.read_bytes() for path in sorted(run_dir.glob("events.out.tfevents*"))]
    observed.stale += falls(read_history(files).curves["workers/generation"].values)
    return observed


def cut_off(made: Cluster, run: Run, cut: Cut, observed: Observed) -> None:
    """Cut a host off for the time of the partition, and wait until both workers train again."""
    made.hosts.cut(cut.host)
    try:
        end = time.monotonic() + cut.for_s
        what = "the end of the partition"
        run.wait_until(lambda: time.monotonic() >= end, 2 * cut.for_s, what, observed)
    finally:
        made.hosts.join(cut.host)
    began = time.monotonic()
    while True:
        try:
            run.wait_until_all_train(observed, _TURN_S)
            break
        except RunError:
            if run.process.poll() is not None or time.monotonic() > began + BACK_S:
                raise
        # A node notices only after some seconds that Ray declared it dead, and ends.
        observed.num_rejoined += sum(rejoin(made, host) for host in (1, 2))
    observed.back_s.append(time.monotonic() - began)


def rejoin(made: Cluster, host: int) -> bool:
    """Restart the Ray node of a host if it has ended, and return whether it had."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir=made.folder))
    return rejoin_ray(made.hosts, host, folder, made.environment, timeout_s=_REJOIN_S)


def figures_of(observations: Sequence[Observed]) -> Iterator[Figure]:
    """Yield the figures over all runs."""

    def figure(name: str, value: float, target: float | None = None) -> Figure:
        return Figure(
            name=f"partitions.{name}", value=Spread.of([value]), target=target, is_better="less"
        )

    back_s = [seconds for observed in observations for seconds in observed.back_s]
    yield figure("stale_writes", sum(len(observed.stale) for observed in observations), 0)
    yield figure("number", len(back_s))
    yield Figure(name="partitions.back_s", value=Spread.of(back_s), is_better="less")
    for kind, count in sum((observed.refused for observed in observations), Counter[str]()).items():
        yield figure(f"refused.{kind}", count)


def main() -> None:
    """Run the benchmark."""
    end_cleanly()
    parser = options_of(
        __doc__,
        number={"type": int, "help": "number of partitions in all"},
        seed={"type": int, "default": 0, "help": "seed for the order of their lengths"},
        only={"choices": METHODS, "help": "only this method"},
    )
    options = parser.parse_args()
    report = Report.of_command("partitions", options)
    methods = (options.only,) if options.only else QUICK_METHODS if options.quick else METHODS
    number = options.number or (QUICK_NUMBER if options.quick else NUMBER)
    cuts = [Cut(1, QUICK_S[0]), Cut(HEAD, QUICK_S[1])] if options.quick else None
    cuts = cuts or cuts_of(number, options.seed)
    observations: dict[str, Observed] = {}
    failed = []
    for index, method in enumerate(methods):
        try:
            with cluster(2, has_master=True, pull_ms=USUAL_PULL_MS) as made:
                observations[method] = run_partitioned(made, method, cuts[index :: len(methods)])
        except HostsError as error:
            sys.exit(str(error))
        except (RunError, subprocess.SubprocessError) as error:
            report.add_text(f"{method} failed: {error}")
            failed.append(method)
    rows = [
        (
            method, len(o.back_s), len(o.written), len(o.stale),
            ", ".join(f"{count} {kind}" for kind, count in o.refused.items()) or "nothing",
            f"{median(o.back_s):.1f} s", o.num_rejoined,
        )
        for method, o in observations.items()
    ]  # fmt: skip
    columns = (
        "method", "partitions", "checkpoints", "stale", "refused", "back (median)",
        "restarted nodes",
    )  # fmt: skip
    report.add_table(columns, rows)
    for observed in observations.values():
        for sentence in observed.stale:
            report.add_text(sentence)
    if observations:
        report.add_figures(*figures_of(list(observations.values())))
    report.close(options.out)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
