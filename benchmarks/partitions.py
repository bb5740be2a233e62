"""What real partitions of the network do to a run: is anything stale ever taken for new.

Command:   python -m benchmarks.partitions          (--quick: sync-easgd, two partitions, of 5 and
           of 9 s; --number N: so many in all, 50 where it is not given)

Two hosts train on a Ray cluster of three network namespaces (``hosts.py``); driver and center live
in the third. Again and again one of the three is cut off from the others, in both directions, for
5 to 60 s: a worker's host, which may be shorter or longer than the lease (``elastic.lease_s`` is
6 s here), or the head's, behind which all workers train on without a center. Ray takes a host for
lost that is away for half a minute and more; its node is started again when the network is back.
After each partition both workers must train again before the next one comes.

While the run trains, its folder is read from outside. What must hold of it stands in
``outside.py``; else the partition counts as a stale write.

A last start with ``--resume`` ends the run. ``refused`` counts what came too late, by kind, as
``result.json`` has it; a partition that refuses nothing has let nothing late come.
"""

from __future__ import annotations

import math
import random
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
from benchmarks.outside import BACK_S, HEAD, UP_S, Run, Watched, falls
from benchmarks.programs import RunError, end_cleanly
from benchmarks.ray_on_hosts import USUAL_PULL_MS, rejoin_ray
from benchmarks.runs_on_hosts import Cluster, cluster

NUMBER, QUICK_NUMBER = 50, 2
METHODS = ("sync-easgd", "async-easgd")
QUICK_METHODS = METHODS[:1]
SHORTEST_S, LONGEST_S = 5.0, 60.0
QUICK_S = (5.0, 9.0)
_EPOCH_SAMPLES = 1438
"""Of the bundled digits."""
_REJOIN_S = 90.0
"""The longest start of a node."""
_TURN_S = 10.0
"""How long both workers are waited for before it is looked whether a node has ended."""
DIGITS = (
    "--data", "digits", "--model", "mlp", "--batch-size", "16", "--evaluation.every-epochs", "1",
)  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """One partition."""

    host: int
    """Which is cut off; the head's is 0."""
    for_s: float


def cuts_of(number: int, seed: int) -> list[Cut]:
    """Return so many partitions: each third is the head's, their lengths spread evenly by ratio."""
    ratio = LONGEST_S / SHORTEST_S
    lengths = [SHORTEST_S * ratio ** (i / max(1, number - 1)) for i in range(number)]
    random.Random(seed).shuffle(lengths)
    return [Cut((1, 2, HEAD)[i % 3], round(for_s, 1)) for i, for_s in enumerate(lengths)]


def partitioned(made: Cluster, method: str, cuts: Sequence[Cut]) -> Watched:
    """Return what partitions do to a run of a method.

    Raises:
        RunError: the run ended, or did not come back after one of them.
    """
    from raydl.tools.report.events import read_history

    watched = Watched()
    run_dir = made.folder / f"{method}-{len(list(made.folder.iterdir()))}"
    words = (*DIGITS, "--method", method, "--period", "4")
    with Run(made, run_dir, *words, "--epochs", "1000000") as run:
        run.until_all_train(watched, UP_S)
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
            run.until_all_train(watched, _TURN_S)
            break
        except RunError:
            if run.process.poll() is not None or time.monotonic() > began + BACK_S:
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
            with cluster(2, has_master=True, pull_ms=USUAL_PULL_MS) as made:
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
    report.add_table(columns, rows)
    for watched in seen.values():
        for sentence in watched.stale:
            report.add_text(sentence)
    report.add_figures(*figures_of(list(seen.values())))
    report.close(options.out)


if __name__ == "__main__":
    main()
