"""Measures the cost of losing a worker, compared with a restart of Ray Train.

Command:   python -m benchmarks.recovery            (--quick: sync-easgd and Ray Train, once, with
           two workers and a fifth of the training set)

Three workers train LeNet on one Ray cluster; one of them, another one in each repeat, gets SIGKILL
during the training. Each worker notes when it begins a step (``watching.py``). These notes, and the
samples that the run counted, give:

pause           the longest time between two steps of a survivor, from the kill until all three
                train again, minus a median step; mean over the survivors
pauses          the same, as the sum of all times that are longer than any in the seconds before the
                kill; to admit the newcomer is a pause, too
thrown away     trained samples that did not count, including those of the killed worker's last
                steps, also in seconds at the speed before the kill
                (with torchft also up to a period of each replica, not counted yet at the end)
lost progress   pauses plus thrown away; for Ray Train, which restarts from a checkpoint: from the
                kill until the training passes its earlier progress
full strength   from the kill until three workers have completed a step again

Ray Train writes a checkpoint every 10,000 samples, about every two seconds, to its advantage: with
fewer it would throw away more. The kill comes after a quarter, a half and three quarters of the way
to the next one, in turn. raydl writes one every minute and needs none for the recovery. Both sides
have the same cluster, which offers three CPUs to Ray, the same batches, one thread per worker, and
no evaluations. Ray Train with torchft replaces the lost worker alone (``TorchftConfig``). ``2:3``
may train with two workers. With a fixed number of workers, the survivors wait for the replacement.
``3 + spare`` keeps a hot spare, which is ready when the worker is killed. In the cases
``without fork server`` Ray starts the replacement in its own way.
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
"""Samples of all workers between two checkpoints of Ray Train."""
NUM_WAYS = 3
"""Points between two checkpoints at which a worker is killed, in turn."""
PEER = "Ray Train"
REPLACING_PEER = "Ray Train with torchft DiLoCo"
"""Its controller replaces the lost worker alone; the others train on."""
NO_FORK_SERVER = "--scaling.no-fork-server"
"""With it, Ray starts the processes of raydl in its own way."""
CASES: dict[str, tuple[Any, ...]] = {
    "sync-easgd 2:3": ("sync-easgd", "2:3", 0),
    "async-easgd 2:3": ("async-easgd", "2:3", 0),
    "hogwild-easgd 2:3": ("hogwild-easgd", "2:3", 0),
    "sync-easgd 3": ("sync-easgd", "3", 0),
    "sync-easgd 3 + spare": ("sync-easgd", "3", 1),
    "async-easgd 3 + spare": ("async-easgd", "3", 1),
    "sync-easgd 2:3 without fork server": ("sync-easgd", "2:3", 0, NO_FORK_SERVER),
    "sync-easgd 3 without fork server": ("sync-easgd", "3", 0, NO_FORK_SERVER),
}
"""Method, workers, hot spares and further options of each case."""
_QUICK_SAMPLES = 12_000
QUICK_CASES: dict[str, tuple[Any, ...]] = {
    "sync-easgd 1:2": ("sync-easgd", "1:2", 0),
    "sync-easgd 2 + spare": ("sync-easgd", "2", 1),
}
_ENDLESS = "1000000000"
_UP_S, _BACK_S, _END_S = 180.0, 180.0, 60.0
"""Time-outs for the first steps, for the recovery, and for the end, in seconds."""
_STEADY_S = 3.0
"""Seconds of training before the kill."""
_AFTER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The cost of a killed worker."""

    pause_s: float
    pauses_s: float
    thrown_samples: int
    thrown_s: float
    lost_s: float
    full_s: float


def pauses_of(steps: list[Step], *, killed_at: float, until: float) -> tuple[float, list[float]]:
    """Return a survivor's longest pause and all its pauses, in seconds.

    A pause is a time between two steps that is longer than any just before the kill; the longest
    time after the kill always counts as a pause. The median step is subtracted from each.

    Args:
        steps: steps of the survivor.
        killed_at: earliest end of a pause.
        until: latest start of a pause.
    """
    times = [(a.began_at, b.began_at) for a, b in pairwise(steps)]
    before = [b - a for a, b in times if killed_at - _STEADY_S <= a and b < killed_at]
    after = [b - a for a, b in times if b > killed_at and a < until]
    step_s, longest = median(before), max(after)
    pauses = [gap - step_s for gap in after if gap > max(before) or gap == longest]
    return longest - step_s, pauses


def endless_run(data: str, method: str, workers: str, spares: int, *more: str) -> list[str]:
    """Return the arguments of a run of raydl that does not end by itself.

    Args:
        data: folder of the data set.
        method: name of the method.
        workers: N, or MIN:MAX.
        spares: number of hot spares.
        more: further arguments.
    """
    return [
        "-m", "raydl", "train", "--data", data, "--model", MODEL, "--method", method,
        "--workers", workers, "--spares", str(spares), "--batch-size", str(BATCH_SIZE),
        "--samples", _ENDLESS, "--evaluation.every-epochs", _ENDLESS,
        "--run-dir", "{folder}/run", "--run.progress", "plain", *more,
    ]  # fmt: skip


def endless_peer(data: str, *, num_workers: int, max_failures: int) -> list[str]:
    """Return the arguments of a run of Ray Train that does not end by itself."""
    return [
        "-m", "benchmarks.peers.ray_train", "--data", data, "--model", MODEL,
        "--workers", str(num_workers), "--batch-size", str(BATCH_SIZE), "--samples", _ENDLESS,
        "--max-failures", str(max_failures), "--checkpoint-every", str(CHECKPOINT_SAMPLES),
        "--events", "{folder}/events",
    ]  # fmt: skip


def endless_replicas(data: str, module: str, *more: str, num_workers: int) -> list[str]:
    """Return the arguments of a run of torchft or hivemind that does not end by itself.

    Args:
        data: folder of the data set.
        module: module in ``benchmarks.peers``.
        more: further arguments.
        num_workers: number of replicas.
    """
    return [
        "-m", f"benchmarks.peers.{module}", "--data", data, "--model", MODEL,
        "--workers", str(num_workers), "--batch-size", str(BATCH_SIZE),
        "--samples", _ENDLESS, "--events", "{folder}/events", *more,
    ]  # fmt: skip


def raydl_case(
    cluster: Cluster, data: str, turn: list[int], method: str, workers: str, spares: int, *more: str
) -> Recovery:
    """Return the cost of a killed worker of raydl.

    Args:
        cluster: cluster of the run.
        data: folder of the data set.
        turn: number of workers killed before, in a list; it is incremented.
        method: name of the method.
        workers: N, or MIN:MAX.
        spares: number of hot spares.
        more: further arguments of the run.

    Raises:
        WatchError: if the run timed out.
    """
    with Watched(endless_run(data, method, workers, spares, *more), cluster) as run:
        num_workers = int(workers.rpartition(":")[2])
        ready = f"{spares} spares are ready"
        run.wait_until(lambda: num_ready(run.folder / "run") >= spares, ready, within_s=_UP_S)
        victim, killed_at = _kill_one(run, num_workers, turn)
        again = f"{num_workers} workers train again"
        run.wait_until(lambda: run.num_training() > num_workers, again, within_s=_BACK_S)
        time.sleep(_AFTER_S)
        run.end(within_s=_END_S)
        steps = run.steps()
        counted = json.loads((run.folder / "run" / "result.json").read_text())["samples"]
    return _cost_of(steps, victim, killed_at, counted)


def replacing_case(data: str, num_workers: int, turn: list[int]) -> Recovery:
    """Return the cost of a killed replica of torchft under Ray Train; see ``raydl_case``.

    Its cluster offers one CPU more: Ray's actor with torchft's lighthouse reserves one to start.

    Raises:
        WatchError: if the run timed out.
    """
    arguments = endless_replicas(
        data, "ray_train_torchft", "--max-failures", "3", num_workers=num_workers
    )
    with Cluster(num_workers + 1) as cluster, Watched(arguments, cluster) as run:
        victim, killed_at = _kill_one(run, num_workers, turn)
        again = f"{num_workers} workers train again"
        run.wait_until(lambda: run.num_training() > num_workers, again, within_s=_BACK_S)
        time.sleep(_AFTER_S)
        lines = (run.folder / "events").read_text().splitlines()
        steps = run.steps()
    counted = max(json.loads(line)["samples"] for line in lines)
    return _cost_of(steps, victim, killed_at, counted)


def _cost_of(steps: dict[int, list[Step]], victim: int, killed_at: float, counted: int) -> Recovery:
    """Return the cost if the survivors train on, from the steps of all workers.

    Args:
        steps: steps by process id.
        victim: process id of the killed worker.
        killed_at: when it was killed.
        counted: samples that the run has counted.
    """
    _, speed = _before(list(steps.values()), killed_at)
    new = [s for s in steps.values() if s[0].began_at > killed_at]
    full_at = min(s[1].began_at for s in new if len(s) > 1)
    survivors = [s for pid, s in steps.items() if pid != victim and s not in new]
    pauses = [pauses_of(s, killed_at=killed_at, until=full_at) for s in survivors]
    pauses_s = mean(sum(of_worker) for _, of_worker in pauses)
    thrown = sum(s.num_samples for of_worker in steps.values() for s in of_worker) - counted
    return Recovery(
        pause_s=mean(longest for longest, _ in pauses),
        pauses_s=pauses_s,
        thrown_samples=thrown,
        thrown_s=thrown / speed,
        lost_s=pauses_s + thrown / speed,
        full_s=full_at - killed_at,
    )


def peer_case(cluster: Cluster, data: str, num_workers: int, turn: list[int]) -> Recovery:
    """Return the cost of a killed worker of Ray Train; see ``raydl_case``.

    Raises:
        WatchError: if the run timed out.
    """
    with Watched(endless_peer(data, num_workers=num_workers, max_failures=3), cluster) as run:
        _, killed_at = _kill_one(run, num_workers, turn)
        before = run.steps()
        reached = _reached(before, killed_at)

        def new_steps() -> dict[int, list[Step]]:
            return {pid: steps for pid, steps in run.steps().items() if pid not in before}

        def is_beyond() -> bool:
            return _beyond_at(new_steps(), _began_again(run, killed_at), reached) is not None

        def trains_again() -> bool:
            return run.num_training() >= 2 * num_workers

        run.wait_until(trains_again, "all workers train again", within_s=_BACK_S)
        run.wait_until(is_beyond, "training passes its earlier progress", within_s=_BACK_S)
        after, from_samples = new_steps(), _began_again(run, killed_at)
    step_s, speed = _before(list(before.values()), killed_at)
    beyond_at = _beyond_at(after, from_samples, reached)
    assert beyond_at is not None
    pause_s = min(s[0].began_at for s in after.values()) - killed_at
    return Recovery(
        pause_s=pause_s,
        pauses_s=pause_s,
        thrown_samples=reached - from_samples,
        thrown_s=(reached - from_samples) / speed,
        lost_s=beyond_at - killed_at - step_s,
        full_s=max(s[1].began_at for s in after.values()) - killed_at,
    )


def num_ready(folder: Path) -> int:
    """Return the number of workers of a run that stand by."""
    try:
        status = json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return 0
    return sum(worker["state"] == "ready" for worker in status["workers"])


def _kill_one(run: Watched, num_workers: int, turn: list[int]) -> tuple[int, float]:
    """Wait for steady training, kill a worker, and return (its process id, the time)."""
    start = f"{num_workers} workers train"
    run.wait_until(lambda: run.num_training() >= num_workers, start, within_s=_UP_S)
    time.sleep(_STEADY_S)
    # Enough for a checkpoint, and at another time between two checkpoints in each repeat.
    way = 2 + (turn[0] % NUM_WAYS + 1) / (NUM_WAYS + 1)
    num_steps = round(way * CHECKPOINT_SAMPLES / BATCH_SIZE)
    first = f"{num_steps} steps are taken"
    run.wait_until(lambda: run.num_steps() > num_steps, first, within_s=_UP_S)
    victim = sorted(run.steps())[turn[0] % num_workers]
    turn[0] += 1
    os.kill(victim, signal.SIGKILL)
    return victim, time.monotonic()


def _before(workers: list[list[Step]], killed_at: float) -> tuple[float, float]:
    """Return (median seconds of a step, samples per second of all workers) before the kill."""
    since = killed_at - _STEADY_S
    steady = [[s for s in steps if since <= s.began_at < killed_at] for steps in workers]
    gaps = [b.began_at - a.began_at for steps in steady for a, b in pairwise(steps)]
    return median(gaps), sum(s.num_samples for steps in steady for s in steps) / _STEADY_S


def _reached(steps: dict[int, list[Step]], killed_at: float) -> int:
    """Return the samples of the steps that all workers had completed before the kill."""
    begun = [[s for s in of_worker if s.began_at < killed_at] for of_worker in steps.values()]
    complete = min(map(len, begun)) - 1
    return sum(step.num_samples for of_worker in begun for step in of_worker[:complete])


def _began_again(run: Watched, killed_at: float) -> int:
    """Return the samples at the checkpoint from which Ray Train restarted."""
    lines = (run.folder / "events").read_text().splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    to_unix = time.time() - time.monotonic()
    starts = [e for e in events if e.get("event") == "first_step"]
    new = [e["samples"] for e in starts if e["time"] - to_unix > killed_at]
    if not new:
        raise WatchError(f"Ray Train trains again but has not logged its first step: {starts}")
    return int(new[-1])


def _beyond_at(after: dict[int, list[Step]], samples: int, reached: int) -> float | None:
    """Return when the steps after a restart at ``samples`` pass ``reached``, or None."""
    steps = [step for of_worker in after.values() for step in of_worker]
    for step in sorted(steps, key=lambda step: step.began_at):
        samples += step.num_samples
        if samples > reached:
            return step.began_at
    return None


def add_results(report: Report, results: dict[str, list[Recovery]]) -> None:
    """Add the table and the figures to a report."""
    columns = ("", "pause, s", "pauses, s", "thrown away, samples", "thrown away, s")
    report.add_table(
        (*columns, "lost progress, s", "full strength, s"),
        [(name, *_cells(of_case)) for name, of_case in results.items()],
    )
    peer, peers = results[PEER], (PEER, REPLACING_PEER)
    for name, of_case in results.items():
        lost = [r.lost_s for r in of_case]
        short = f"recovery.{name.replace(' + ', ' ').replace(' ', '-').lower()}"
        is_fixed = " 3" in name and "spare" not in name
        target, tenth = (None, None) if is_fixed or name in peers else (1.0, 0.1)
        report.add_figures(_figure(f"{short}.lost_s", Spread.of(lost), target))
        if name != PEER:
            full = ratios([r.full_s for r in of_case], [r.full_s for r in peer])
            of_peer = ratios(lost, [r.lost_s for r in peer])
            report.add_figures(
                _figure(f"{short}.lost_of_ray_train", of_peer, tenth),
                _figure(f"{short}.full_strength_of_ray_train", full, None),
            )
        at_work = Spread.of([r.full_s for r in of_case])
        target = 0.5 if "spare" in name else None
        report.add_figures(_figure(f"{short}.full_strength_s", at_work, target))


def _figure(name: str, value: Spread, target: float | None) -> Figure:
    return Figure(name=name, value=value, target=target, is_better="less")


def _cells(of_case: list[Recovery]) -> list[str]:
    names = ("pause_s", "pauses_s", "thrown_samples", "thrown_s", "lost_s", "full_s")
    return [Spread.of([getattr(r, name) for r in of_case]).text() for name in names]


def main() -> None:
    """Measure and report."""
    data_option = {"default": "../shared/data/mnist", "help": "folder of MNIST"}
    parser = options_of(__doc__, data=data_option)
    options = parser.parse_args()
    end_cleanly()
    data = data_at(options.data)
    ours, num_workers = (QUICK_CASES, QUICK_WORKERS) if options.quick else (CASES, NUM_WORKERS)
    report = Report.of_command("recovery", options)
    with TemporaryDirectory() as folder, Cluster(num_workers) as cluster:
        if options.quick:
            data = cut_set(data, Path(folder) / "set", num_train=_QUICK_SAMPLES)
        cases: dict[str, Callable[[], Recovery]] = {
            name: partial(raydl_case, cluster, data, [0], *case) for name, case in ours.items()
        }
        cases[PEER] = partial(peer_case, cluster, data, num_workers, [0])
        if not options.quick:
            cases[REPLACING_PEER] = partial(replacing_case, data, num_workers, [0])
        try:
            repeats = options.repeats or (1 if options.quick else 3)
            add_results(report, interleaved(cases, repeats=repeats))
        except WatchError as error:
            sys.exit(f"the recovery was not measured: {error}")
    report.add_text(
        f"{num_workers} workers on {os.cpu_count()} cores, which a newcomer uses, too, while it "
        f"starts."
    )
    report.close(options.out)


if __name__ == "__main__":
    main()
