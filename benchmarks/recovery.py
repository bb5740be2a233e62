"""What the loss of a worker costs the others, beside Ray Train's restart.

Command:   python -m benchmarks.recovery            (--quick: sync-easgd and Ray Train, once, with
           two workers and a fifth of the training set)

Three workers train LeNet on one Ray cluster; one of them is killed with SIGKILL in the middle, in
each repeat another one. Every worker notes when it begins a step (``watching.py``), and from these
notes alone, beside how many samples the run counted, come:

pause           the longest time from one step of a survivor to its next, from the kill until all
                three train again, less its usual step; the mean over the survivors
pauses          the same of all times that are longer than any in the seconds before the kill: to
                take in a newcomer is a pause, too
thrown away     samples that were trained on and did not count, among them those that the killed
                worker had in hand, in seconds at the pace before
lost progress   pauses and what was thrown away; of Ray Train, which begins again from a checkpoint:
                from the kill until it is further than it was
full strength   from the kill until three workers have completed a step again

Ray Train keeps a checkpoint every second or so, which is to its advantage: with fewer it would
throw more away. raydl keeps one every minute, and needs none for this. Both have the same cluster,
which hands out three CPUs however many there are, the same batches, one thread per worker, and no
scores. ``2:3`` may train with two workers, which is what the target is about. With a fixed number
of workers all wait until the third one is back, by its setting.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measure import Figure, Report, Spread, interleaved, options_of, ratios
from benchmarks.programs import data_at, end_cleanly
from benchmarks.runs_on_hosts import cut_set
from benchmarks.watching import MODEL, Cluster, Step, Watched, WatchError

NUM_WORKERS, QUICK_WORKERS = 3, 2
BATCH_SIZE = 64
CHECKPOINT_SAMPLES = 10_000
"""From one checkpoint of Ray Train to the next, by all workers."""
PEER = "Ray Train"
CASES = {
    "sync-easgd 2:3": ("sync-easgd", "2:3"),
    "async-easgd 2:3": ("async-easgd", "2:3"),
    "hogwild-easgd 2:3": ("hogwild-easgd", "2:3"),
    "sync-easgd 3": ("sync-easgd", "3"),
}
"""The method and the workers of each case."""
_QUICK_SAMPLES = 12_000
QUICK_CASES = {"sync-easgd 1:2": ("sync-easgd", "1:2")}
_ENDLESS = "1000000000"
_UP_S, _BACK_S, _END_S = 180.0, 180.0, 60.0
"""The longest waits: for the first steps, for full strength again, for the end."""
_STEADY_S = 3.0
"""Of training before the kill."""
_AFTER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What the kill of a worker cost, in seconds."""

    pause_s: float
    pauses_s: float
    thrown_samples: int
    thrown_s: float
    lost_s: float
    full_s: float


def pauses_of(steps: list[Step], *, killed_at: float, until: float) -> tuple[float, list[float]]:
    """Return a survivor's longest pause and all its pauses, in seconds.

    A pause is longer than any time between two steps just before the kill; the longest time
    after the kill counts as one whether it is or not. Of each a usual step is taken off.

    Args:
        steps: of the survivor.
        killed_at: when the first pause may end.
        until: when the last one may begin.
    """
    times = [(a.began_at, b.began_at) for a, b in pairwise(steps)]
    before = [b - a for a, b in times if killed_at - _STEADY_S <= a and b < killed_at]
    after = [b - a for a, b in times if b > killed_at and a < until]
    usual, longest = median(before), max(after)
    pauses = [gap - usual for gap in after if gap > max(before) or gap == longest]
    return longest - usual, pauses


def raydl_case(cluster: Cluster, data: str, method: str, workers: str, turn: list[int]) -> Recovery:
    """Return what a kill costs raydl.

    Args:
        cluster: where it trains.
        data: a folder.
        method: its name.
        workers: N, or MIN:MAX.
        turn: how many were killed before; one is added.

    Raises:
        WatchError: the run did not do what was waited for.
    """
    words = [
        "-m", "raydl", "train", "--data", data, "--model", MODEL, "--method", method,
        "--workers", workers, "--batch-size", str(BATCH_SIZE), "--samples", _ENDLESS,
        "--evaluation.every-epochs", _ENDLESS, "--run-dir", "{folder}/run",
        "--run.progress", "plain",
    ]  # fmt: skip
    with Watched(words, cluster) as run:
        num_workers = int(workers.rpartition(":")[2])
        victim, killed_at = _kill_one(run, num_workers, turn)
        again = f"{num_workers} workers train again"
        run.wait_until(lambda: run.num_training() > num_workers, again, within_s=_BACK_S)
        time.sleep(_AFTER_S)
        run.end(within_s=_END_S)
        steps = run.steps()
        counted = json.loads((run.folder / "run" / "result.json").read_text())["samples"]
    _, stragglers = _usual(list(steps.values()), killed_at)
    new = [s for s in steps.values() if s[0].began_at > killed_at]
    full_at = min(s[1].began_at for s in new if len(s) > 1)
    survivors = [s for pid, s in steps.items() if pid != victim and s not in new]
    pauses = [pauses_of(s, killed_at=killed_at, until=full_at) for s in survivors]
    pauses_s = mean(sum(of_one) for _, of_one in pauses)
    thrown = _samples(steps) - counted
    return Recovery(
        pause_s=mean(longest for longest, _ in pauses),
        pauses_s=pauses_s,
        thrown_samples=thrown,
        thrown_s=thrown / stragglers,
        lost_s=pauses_s + thrown / stragglers,
        full_s=full_at - killed_at,
    )


def peer_case(cluster: Cluster, data: str, num_workers: int, turn: list[int]) -> Recovery:
    """Return what a kill costs Ray Train with so many workers; see ``raydl_case``.

    Raises:
        WatchError: the run did not do what was waited for.
    """
    words = [
        "-m", "benchmarks.peers.ray_train", "--data", data, "--model", MODEL,
        "--workers", str(num_workers), "--batch-size", str(BATCH_SIZE), "--samples", _ENDLESS,
        "--max-failures", "3", "--checkpoint-every", str(CHECKPOINT_SAMPLES),
        "--events", "{folder}/events",
    ]  # fmt: skip
    with Watched(words, cluster) as run:
        _, killed_at = _kill_one(run, num_workers, turn)
        before = run.steps()
        reached = _reached(before, killed_at)

        def new_steps() -> dict[int, list[Step]]:
            return {pid: steps for pid, steps in run.steps().items() if pid not in before}

        def is_beyond() -> bool:
            return _beyond_at(new_steps(), _began_again(run, killed_at), reached) is not None

        run.wait_until(
            lambda: run.num_training() >= 2 * num_workers, "it trains again", within_s=_BACK_S
        )
        run.wait_until(is_beyond, "it is further than it was", within_s=_BACK_S)
        after, from_samples = new_steps(), _began_again(run, killed_at)
    usual_s, stragglers = _usual(list(before.values()), killed_at)
    beyond_at = _beyond_at(after, from_samples, reached)
    assert beyond_at is not None
    pause_s = min(s[0].began_at for s in after.values()) - killed_at
    return Recovery(
        pause_s=pause_s,
        pauses_s=pause_s,
        thrown_samples=reached - from_samples,
        thrown_s=(reached - from_samples) / stragglers,
        lost_s=beyond_at - killed_at - usual_s,
        full_s=max(s[1].began_at for s in after.values()) - killed_at,
    )


def _kill_one(run: Watched, num_workers: int, turn: list[int]) -> tuple[int, float]:
    """Wait for steady training and kill a worker; return its process id, and when that was."""
    start = f"{num_workers} workers train"
    run.wait_until(lambda: run.num_training() >= num_workers, start, within_s=_UP_S)
    time.sleep(_STEADY_S)
    enough = 2 * CHECKPOINT_SAMPLES // BATCH_SIZE  # so that there is a checkpoint
    run.wait_until(lambda: run.num_steps() > enough, "some steps are taken", within_s=_UP_S)
    victim = sorted(run.steps())[turn[0] % num_workers]
    turn[0] += 1
    os.kill(victim, signal.SIGKILL)
    return victim, time.monotonic()


def _usual(workers: list[list[Step]], killed_at: float) -> tuple[float, float]:
    """Return (seconds per step of a worker, samples per second of all) before the kill."""
    since = killed_at - _STEADY_S
    steady = [[s for s in steps if since <= s.began_at < killed_at] for steps in workers]
    gaps = [b.began_at - a.began_at for steps in steady for a, b in pairwise(steps)]
    return median(gaps), sum(s.num_samples for steps in steady for s in steps) / _STEADY_S


def _samples(steps: dict[int, list[Step]]) -> int:
    return sum(step.num_samples for of_one in steps.values() for step in of_one)


def _reached(steps: dict[int, list[Step]], killed_at: float) -> int:
    """Return the samples of the steps that all workers had completed together."""
    begun = [[s for s in of_one if s.began_at < killed_at] for of_one in steps.values()]
    complete = min(map(len, begun)) - 1
    return sum(step.num_samples for of_one in begun for step in of_one[:complete])


def _began_again(run: Watched, killed_at: float) -> int:
    """Return the samples at the checkpoint that Ray Train has gone on from."""
    lines = (run.folder / "events").read_text().splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    to_unix = time.time() - time.monotonic()
    starts = [e for e in events if e.get("event") == "first_step"]
    new = [e["samples"] for e in starts if e["time"] - to_unix > killed_at]
    if not new:
        raise WatchError(f"Ray Train trains and has not said from where: {starts}")
    return int(new[-1])


def _beyond_at(after: dict[int, list[Step]], samples: int, reached: int) -> float | None:
    """Return when the steps after a restart at so many samples come to more than were reached."""
    for step in sorted((s for of_one in after.values() for s in of_one), key=_by_time):
        samples += step.num_samples
        if samples > reached:
            return step.began_at
    return None


def _by_time(step: Step) -> float:
    return step.began_at


def tell(report: Report, results: dict[str, list[Recovery]]) -> None:
    """Put the table and the figures into a report."""
    columns = ("", "pause, s", "pauses, s", "thrown away, samples", "thrown away, s")
    report.add_table(
        (*columns, "lost progress, s", "full strength, s"),
        [(name, *_cells(of_case)) for name, of_case in results.items()],
    )
    peer = results[PEER]
    for name, of_case in results.items():
        lost, short = [r.lost_s for r in of_case], f"recovery.{name.replace(' ', '-').lower()}"
        is_elastic = ":" in name
        target, tenth = (1.0, 0.1) if is_elastic else (None, None)
        report.add_figures(_figure(f"{short}.lost_s", Spread.of(lost), target))
        if name != PEER:
            full = ratios([r.full_s for r in of_case], [r.full_s for r in peer])
            of_peer = ratios(lost, [r.lost_s for r in peer])
            report.add_figures(
                _figure(f"{short}.lost_of_ray_train", of_peer, tenth),
                _figure(f"{short}.full_strength_of_ray_train", full, None),
            )


def _figure(name: str, value: Spread, target: float | None) -> Figure:
    return Figure(name=name, value=value, target=target, is_better="less")


def _cells(of_case: list[Recovery]) -> list[str]:
    names = ("pause_s", "pauses_s", "thrown_samples", "thrown_s", "lost_s", "full_s")
    return [Spread.of([getattr(r, name) for r in of_case]).text() for name in names]


def main() -> None:
    """Measure, and tell."""
    parser = options_of(__doc__, data={"default": "../shared/data/mnist", "help": "a folder"})
    options = parser.parse_args()
    end_cleanly()
    data = data_at(options.data)
    ours, num_workers = (QUICK_CASES, QUICK_WORKERS) if options.quick else (CASES, NUM_WORKERS)
    report = Report.of_command("recovery", options)
    with TemporaryDirectory() as folder, Cluster(num_workers) as cluster:
        if options.quick:
            data = cut_set(data, Path(folder) / "set", num_train=_QUICK_SAMPLES)
        cases: dict[str, Callable[[], Recovery]] = {
            name: partial(raydl_case, cluster, data, *words, [0]) for name, words in ours.items()
        }
        cases[PEER] = partial(peer_case, cluster, data, num_workers, [0])
        try:
            repeats = options.repeats or (1 if options.quick else 3)
            tell(report, interleaved(cases, repeats=repeats))
        except WatchError as error:
            sys.exit(f"the recovery was not measured: {error}")
    report.add_text(
        f"{num_workers} workers on {os.cpu_count()} cores. A newcomer imports torch while the "
        f"others train, so that on few cores they pause for that, too."
    )
    report.close(options.out)


if __name__ == "__main__":
    main()
