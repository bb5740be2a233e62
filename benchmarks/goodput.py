"""Measures the share of its quiet speed that a run keeps while its processes are killed.

Command:   python -m benchmarks.goodput            (--quick: sync-easgd with a hot spare, once)

Two workers train LeNet on one Ray cluster. After some quiet seconds, a process gets SIGKILL every
15 seconds, for three minutes:

worker   a worker that trains, each in turn; if none does then, as soon as one does
center   the Center actor, which holds the center

Two further cases kill nothing; a fault plan of the run inflicts them:

notice   every 15 s, for a minute, the node of one worker is drained with 10 s of notice; each
         worker has a node of its own, and a further node per notice stands by
link     once a minute, for three minutes, the messages from and to one worker are held back for
         20 s, as if the link of its host was cut

goodput  counted samples per second from the first fault on, over those of the quiet seconds before
         and after the faults in the same run; of those before alone, if not all workers train again
         within three minutes. A sample counts when the run counts it (``status.json``), so steps
         that were thrown away or repeated do not count. For torchft these are the samples of
         committed steps, for hivemind those that all peers have reported. For Ray Train, which has
         no such count, it is the progress of the group that trains last, from the checkpoint that
         it started from; it writes one every 10,000 samples.
expected for kills of workers, the goodput that the simulation behind ``raydl plan --preemptions``
         gives: two workers share a machine of two cores, which stays. The speeds of one and of two
         workers are measured in the same run; the durations are the defaults, except that a worker
         starts in 1.2 s, since the machine's fork server runs. For a link that is cut, the goodput
         without any loss but the worker that is cut off: one worker trains meanwhile, with the
         speed that it has alone.

A case that fails is reported, the others go on, and the exit status is 1.

With ``2 + spare`` a hot spare stands by; ``1:2`` continues with one worker until the replacement
has started; ``2`` waits for it. A new process uses CPU time until it trains, on the cores that the
workers use, too. torchft's DDP is left out: with torch 2.13 a survivor ends by an assertion in
torchft 0.2.0 (``ddp.py``), and its state is lost with it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.measure import Figure, Report, Spread, interleaved, options_of
from benchmarks.programs import data_at, end_cleanly
from benchmarks.recovery import endless_peer, endless_replicas, endless_run, num_ready
from benchmarks.watching import Cluster, Watched, WatchError, processes_of
from raydl.tools.simulated_group import simulate
from raydl.tools.spot import Fleet, Preemption

NUM_WORKERS = 2
TARGET = 0.97
PEERS: dict[str, Callable[[str], list[str]]] = {
    "Ray Train, worker": lambda data: endless_peer(
        data, num_workers=NUM_WORKERS, max_failures=1000
    ),
    "Ray Train with torchft DiLoCo, worker": lambda data: endless_replicas(
        data, "ray_train_torchft", "--max-failures", "1000", num_workers=NUM_WORKERS
    ),
    "torchft DiLoCo, worker": lambda data: endless_replicas(
        data, "torchft_replicas", "--method", "diloco", num_workers=NUM_WORKERS
    ),
    "hivemind, worker": lambda data: endless_replicas(
        data, "hivemind_peers", num_workers=NUM_WORKERS
    ),
}
"""The arguments of each peer, given the data."""
WITH_ONE_CPU_MORE = ("Ray Train with torchft DiLoCo, worker",)
"""Peers whose cluster offers one CPU more: Ray's actor with torchft's lighthouse reserves one, and
does not start without it."""
CASES = {
    "sync-easgd 2 + spare, worker": ("sync-easgd", "2", 1, "worker"),
    "async-easgd 2 + spare, worker": ("async-easgd", "2", 1, "worker"),
    "sync-easgd 1:2, worker": ("sync-easgd", "1:2", 0, "worker"),
    "async-easgd 1:2, worker": ("async-easgd", "1:2", 0, "worker"),
    "sync-easgd 2, center": ("sync-easgd", "2", 0, "center"),
    "async-easgd 2, center": ("async-easgd", "2", 0, "center"),
    "sync-easgd 2, notice": ("sync-easgd", "2", 0, "notice"),
    "async-easgd 2, notice": ("async-easgd", "2", 0, "notice"),
    "sync-easgd 1:2, link": ("sync-easgd", "1:2", 0, "link"),
    "async-easgd 1:2, link": ("async-easgd", "1:2", 0, "link"),
}
"""Method, workers, hot spares, and the process that is killed, or another fault."""
QUICK_CASES = {"sync-easgd 2 + spare, worker": CASES["sync-easgd 2 + spare, worker"]}
_RELATIVE_TO_ONE = ("worker", "link")
"""Cases whose expected goodput depends on the speed of one worker alone."""
_START_S = 1.2
"""Seconds until a worker has started on a machine whose fork server runs."""
_ROUND_S = 0.2
"""Seconds of a round of LeNet at the default period, as the simulation assumes."""
_WITHIN = 0.1
"""Largest difference between the expected goodput and the measured one."""
_UP_S = 180.0
_SETTLE_S = 2.0
"""Seconds of training before the quiet ones."""
_START_OF_STORM_S = 1.0
"""Seconds from the end of the quiet ones to the first fault of a fault plan."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Durations of a case, in seconds."""

    quiet_s: float
    """Before the faults, and again after them."""
    storm_s: float
    every_s: float


FULL = Times(quiet_s=30.0, storm_s=180.0, every_s=15.0)
QUICK = Times(quiet_s=6.0, storm_s=16.0, every_s=8.0)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A fault that the run's fault plan inflicts again and again, on a worker drawn each time."""

    fault: str
    for_s: float
    times: Times
    target: float
    """Target for the goodput; for a link, relative to the expected goodput."""

    @property
    def count(self) -> int:
        """The number of faults."""
        return int(self.times.storm_s / self.times.every_s)

    def plan(self) -> str:
        """Return the fault plan, as YAML; the first fault comes after the quiet seconds."""
        first = _SETTLE_S + self.times.quiet_s + _START_OF_STORM_S
        faults = [
            {"fault": self.fault, "target": "any", "for_s": self.for_s,
             "at": f"second {first + self.times.every_s * k:g}"}
            for k in range(self.count)
        ]  # fmt: skip
        return json.dumps({"faults": faults})  # which is YAML, too


PLANNED = {
    "notice": Planned(
        fault="drain", for_s=10.0, target=0.99,
        times=Times(quiet_s=30.0, storm_s=60.0, every_s=15.0),
    ),
    "link": Planned(
        fault="partition", for_s=20.0, target=0.97,
        times=Times(quiet_s=30.0, storm_s=180.0, every_s=60.0),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The speed of a run in quiet seconds and between kills."""

    quiet_speed: float
    """Counted samples per second."""
    speed: float
    num_kills: int

    @property
    def share(self) -> float:
        """The goodput."""
        return self.speed / self.quiet_speed


def raydl_case(
    cluster: Cluster, data: str, times: Times, method: str, workers: str, spares: int, target: str
) -> Goodput:
    """Return the goodput of raydl.

    Args:
        cluster: cluster of the run.
        data: folder of the data set.
        times: durations.
        method: name of the method.
        workers: N, or MIN:MAX.
        spares: number of hot spares.
        target: the process that is killed: worker or center.

    Raises:
        WatchError: if the run ended or timed out.
    """
    with Watched(endless_run(data, method, workers, spares), cluster) as run:
        folder = run.folder / "run"
        ready = f"{spares} spares are ready"
        run.wait_until(lambda: num_ready(folder) >= spares, ready, within_s=_UP_S)
        victim = partial(_center, cluster) if target == "center" else partial(_worker, run)
        return _storm(run, times, victim, lambda: _counted(folder))


def planned_case(
    cluster: Cluster | None, data: str, method: str, workers: str, planned: Planned
) -> Goodput:
    """Return the goodput of raydl under a fault plan; see ``raydl_case``.

    Args:
        cluster: cluster of the run; None: one of its own, with a node per worker and per fault.
        data: folder of the data set.
        method: name of the method.
        workers: N, or MIN:MAX.
        planned: the fault.

    Raises:
        WatchError: if the run ended or timed out, or if the faults did not fire.
    """
    if cluster is None:
        with Cluster(num_nodes=NUM_WORKERS + planned.count) as nodes:
            return planned_case(nodes, data, method, workers, planned)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as plan:
        plan.write(planned.plan())
        plan.flush()
        arguments = [*endless_run(data, method, workers, 0), "--fault-plan", plan.name]
        with Watched(arguments, cluster) as run:
            result = _storm(run, planned.times, None, lambda: _counted(run.folder / "run"))
            fired = len(set(re.findall(r"fault (\d+):", run.log())))
            if fired != planned.count:
                raise WatchError(f"{fired} of {planned.count} faults fired:\n{run.log()}")
    return replace(result, num_kills=fired)


def speed_alone(cluster: Cluster, data: str, times: Times, method: str) -> float:
    """Return the counted samples per second of one worker that has the machine for itself.

    Raises:
        WatchError: if the run ended or timed out.
    """
    with Watched(endless_run(data, method, "1", 0), cluster) as run:
        counted = partial(_counted, run.folder / "run")
        run.wait_until(lambda: run.num_training() >= 1, "a worker trains", within_s=_UP_S)
        time.sleep(_SETTLE_S)
        first = counted()
        _pass(run, times.quiet_s / 2)
        return _speed(first, counted())


def expected(
    times: Times, method: str, workers: str, spares: int, speeds: dict[int, float]
) -> float:
    """Return the goodput that the simulation behind ``raydl plan`` gives for kills of workers.

    Args:
        times: durations.
        method: name of the method.
        workers: N, or MIN:MAX.
        spares: number of hot spares.
        speeds: samples per second by the number of workers that train.
    """
    low, _, high = workers.partition(":")
    fleet = Fleet(
        num_workers=int(high or low), min_workers=int(low), spares=spares,
        workers_per_machine=NUM_WORKERS, replace_s=0.0, start_s=_START_S,
    )  # fmt: skip
    kills = [Preemption(times.every_s * k, 0) for k in range(round(times.storm_s / times.every_s))]
    return simulate(
        fleet, kills, method=method, speed=speeds.__getitem__, round_s=_ROUND_S,
        until_s=times.storm_s,
    ).prediction.goodput  # fmt: skip


def peer_case(cluster: Cluster | None, times: Times, arguments: list[str]) -> Goodput:
    """Return the goodput of a peer, by its arguments; see ``raydl_case``.

    Args:
        cluster: cluster of the run; None: one of its own, with a CPU more.
        times: durations.
        arguments: arguments of the peer.

    Raises:
        WatchError: if the run ended or timed out.
    """
    place = Cluster(NUM_WORKERS + 1) if cluster is None else nullcontext(cluster)
    with place as own, Watched(arguments, own) as run:
        return _storm(run, times, partial(_worker, run), lambda: _reached(run))


def _storm(
    run: Watched,
    times: Times,
    victim: Callable[[int], int | None] | None,
    counted: Callable[[], tuple[float, int]],
) -> Goodput:
    """Let a run train in quiet, kill its processes, let it train in quiet, and return its speeds.

    Args:
        run: the run.
        times: durations.
        victim: returns the process to kill, given the number of kills before; None: none now, or
            no process at all.
        counted: returns (when, the number of counted samples then).
    """
    quiet = [_quiet_speed(run, times, counted)]
    first, num_kills, began_at = counted(), 0, time.monotonic()
    for number in range(round(times.storm_s / times.every_s)):
        next_at = began_at + times.every_s * (number + 1)
        if victim is not None:
            num_kills += _kill(run, partial(victim, num_kills), before=next_at)
        _pass(run, max(0.0, next_at - time.monotonic()))
    speed = _speed(first, counted())
    try:
        quiet.append(_quiet_speed(run, times, counted))
    except WatchError as error:
        if run.process.poll() is not None:  # it ended, for which nothing of it counts
            raise
        print(f"  no quiet seconds after the faults: {str(error).splitlines()[0]}", flush=True)
    return Goodput(quiet_speed=sum(quiet) / len(quiet), speed=speed, num_kills=num_kills)


def _kill(run: Watched, victim: Callable[[], int | None], *, before: float) -> bool:
    """Kill a process as soon as there is one; return whether there was one in time."""
    while time.monotonic() < before:
        if (pid := victim()) is not None:
            with suppress(ProcessLookupError):  # the process has just ended: another one is killed
                os.kill(pid, signal.SIGKILL)
                return True
        _pass(run, 0.1)
    return False


def _quiet_speed(run: Watched, times: Times, counted: Callable[[], tuple[float, int]]) -> float:
    """Return the samples per second of a run without faults, once all its workers train."""
    train = f"{NUM_WORKERS} workers train"
    run.wait_until(lambda: len(run.training_now()) >= NUM_WORKERS, train, within_s=_UP_S)
    time.sleep(_SETTLE_S)
    first = counted()
    _pass(run, times.quiet_s)
    return _speed(first, counted())


def _pass(run: Watched, seconds: float) -> None:
    """Wait for some seconds.

    Raises:
        WatchError: if the run ends meanwhile.
    """
    deadline = time.monotonic() + seconds
    over = lambda: time.monotonic() >= deadline  # noqa: E731
    run.wait_until(over, "the storm was over", within_s=2 * seconds + 1)


def _speed(earlier: tuple[float, int], later: tuple[float, int]) -> float:
    return (later[1] - earlier[1]) / (later[0] - earlier[0])


def _worker(run: Watched, number: int) -> int | None:
    """Return a worker that trains, each in turn."""
    training = run.training_now()
    return training[number % len(training)] if training else None


def _center(cluster: Cluster, number: int) -> int | None:
    """Return the process of the Center actor."""
    commands = processes_of(cluster.process.pid)
    centers = [pid for pid, command in commands.items() if command.startswith("ray::CenterActor")]
    return max(centers, default=None)


def _counted(folder: Path) -> tuple[float, int]:
    """Return when a run of raydl last wrote its status, and the samples that counted then."""
    path = folder / "status.json"
    status = json.loads(path.read_text())
    return path.stat().st_mtime, status["num_samples"]


def _reached(run: Watched) -> tuple[float, int]:
    """Return the time now and the progress of a peer, in samples of all workers."""
    newest = (run.folder / "events").read_text().rstrip("\n").rpartition("\n")[2]
    return time.time(), json.loads(newest)["samples"]


def limit_of_link(planned: Planned, alone: float, quiet: float) -> float:
    """Return the goodput of a run whose link is cut, without any loss but the worker cut off.

    Args:
        planned: the fault.
        alone: samples per second of one worker alone.
        quiet: samples per second of all workers.
    """
    share_cut = planned.for_s / planned.times.every_s
    return 1 - share_cut * (1 - alone / quiet)


def add_results(
    report: Report, results: dict[str, list[Goodput]], alone: dict[str, float], times: Times
) -> None:
    """Add the table and the figures to a report.

    Args:
        report: the report.
        results: results by case.
        alone: samples per second of one worker alone, by method.
        times: durations.
    """
    rows = []
    for name, of_case in results.items():
        share = Spread.of([goodput.share for goodput in of_case])
        quiet = Spread.of([goodput.quiet_speed for goodput in of_case])
        kills = sum(goodput.num_kills for goodput in of_case)
        short = name.replace(",", "").replace(" ", "-").replace("-+-", "-").lower()
        method, workers, spares, victim = CASES.get(name, ("", "", 0, ""))
        expected_text, target = "", TARGET if spares or victim == "center" else None
        if victim == "worker":
            speeds = {1: alone[method], NUM_WORKERS: quiet.median}
            simulated = expected(times, method, workers, spares, speeds)
            expected_text = f"{simulated:.3g}"
            error = Spread.of([abs(simulated / goodput.share - 1) for goodput in of_case])
            named = f"goodput.{short}.error_of_plan"
            report.add_figures(Figure(name=named, value=error, target=_WITHIN, is_better="less"))
        elif victim == "link":
            limit = limit_of_link(PLANNED[victim], alone[method], quiet.median)
            expected_text, target = f"{limit:.3g}", round(PLANNED[victim].target * limit, 3)
        elif victim in PLANNED:
            target = PLANNED[victim].target
        report.add_figures(Figure(name=f"goodput.{short}", value=share, target=target))
        rows.append((name, share.text(), expected_text, quiet.text(".4g"), kills))
    report.add_table(("", "goodput", "expected", "quiet samples/s", "faults"), rows)


def _measured(name: str, case: Callable[[], Goodput]) -> Goodput | None:
    """Return the result of a case; None: it failed. Either is printed: all take most of an hour."""
    try:
        goodput = case()
    except Exception as error:  # of any kind: the other cases shall not be lost
        print(f"{name} was not measured: {error}", file=sys.stderr, flush=True)
        return None
    print(f"{name}: goodput {goodput.share:.3g}", file=sys.stderr, flush=True)
    return goodput


def main() -> None:
    """Measure and report."""
    more = {
        "data": {"default": "../shared/data/mnist", "help": "folder of MNIST"},
        "only": {
            "default": "",
            "help": "beginnings of the names of the only cases, with ; between them",
        },
    }
    parser = options_of(__doc__, **more)
    options = parser.parse_args()
    end_cleanly()
    data = data_at(options.data)
    times = QUICK if options.quick else FULL
    report = Report.of_command("goodput", options)
    ours = QUICK_CASES if options.quick else CASES
    beginnings = tuple(options.only.split(";"))
    if not any(name.startswith(beginnings) for name in (*ours, *PEERS)):
        parser.error(f"--only: no case begins with {options.only}: {'; '.join((*ours, *PEERS))}")
    with Cluster(NUM_WORKERS) as cluster:
        cases: dict[str, Callable[[], Goodput]] = {}
        for name, (method, workers, spares, victim) in ours.items():
            if planned := PLANNED.get(victim):
                place = None if victim == "notice" else cluster
                cases[name] = partial(planned_case, place, data, method, workers, planned)
            else:
                cases[name] = partial(
                    raydl_case, cluster, data, times, method, workers, spares, victim
                )
        if not options.quick:
            for name, arguments_of in PEERS.items():
                place = None if name in WITH_ONE_CPU_MORE else cluster
                cases[name] = partial(peer_case, place, times, arguments_of(data))
        cases = {name: case for name, case in cases.items() if name.startswith(beginnings)}
        methods = {CASES[n][0] for n in cases if n in CASES and CASES[n][3] in _RELATIVE_TO_ONE}
        try:
            alone = {m: speed_alone(cluster, data, times, m) for m in sorted(methods)}
        except WatchError as error:
            sys.exit(f"the goodput was not measured: {error}")
        tries = interleaved(
            {name: partial(_measured, name, case) for name, case in cases.items()},
            repeats=options.repeats or 1,
        )
    results = {name: [one for one in of_case if one] for name, of_case in tries.items()}
    measured = {name: of_case for name, of_case in results.items() if of_case}
    add_results(report, measured, alone, times)
    failed = [name for name, of_case in tries.items() if None in of_case]
    if failed:
        report.add_text(f"Failed, and not counted: {', '.join(failed)}.")
    cores = f"{NUM_WORKERS} workers on {os.cpu_count()} cores"
    report.add_text(f"{cores}; a kill every {times.every_s:g} s.")
    report.close(options.out)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
