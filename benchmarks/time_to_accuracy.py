"""Measures the time to 99.0% on MNIST with two workers, for raydl's methods and two peers.

Command:   python -m benchmarks.time_to_accuracy    (--quick: 97%, two cases, one seed)

LeNet, batch 64, two workers with one thread each, with the defaults of ``raydl train``; each repeat
has another seed. The learning rate warms up for a twentieth of five epochs and then decays along a
cosine to 0 at their end; no case trains longer. The test set is evaluated every 15,000 samples, and
the first evaluation that reaches the accuracy ends the run.

The time is wall-clock time from the first step to the moment when the evaluated weights existed.
Earlier evaluations cost both sides time: raydl's evaluator takes CPU from the workers, and a
peer's two ranks pause and evaluate one half each. The last evaluation costs neither side time.
raydl skips an evaluation while its evaluator is busy, and may then detect the accuracy late. The
clock of both sides starts when their workers have formed the group, just before the first step. The
table also has the peers' time without their evaluations.

The peers are DistributedDataParallel, started by torchrun, and in Ray Train's TorchTrainer, which
computes the same. Their learning rate and momentum are the best of ten, chosen first with one seed:
those that need the fewest samples, with torchrun; the quick form takes one of them and runs Ray
Train alone. raydl's methods run with their defaults and, as further cases, at the best of the same
ten, chosen in the same way. async-msgd, hogwild-msgd and eamsgd are tried only with momentum;
async-, hogwild- and sync-measgd and sync-msgd are not tuned, since each equals another method with
momentum. ``--tuned`` names other methods to tune. ``--also`` measures sync-easgd with further
settings beside the defaults.

A case that does not reach the accuracy in five epochs, or times out, counts with the time that it
had; ratios to it are lower bounds. A case of which a run crashes has no figures. The full form
takes two and a half hours on two cores, the tuning 90 minutes of it. The targets are that each
method needs longer than sync-easgd with its defaults, except hogwild-easgd, which may tie; that the
peers need 1.3 times as long; and that the first of all methods, tuned or not, is one of the EASGD
or DiLoCo family.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.measure import Figure, Report, Spread, interleaved, options_of, ratios
from benchmarks.programs import RunError, TimeOutError
from benchmarks.runs import BOUND_S, Trained, Workplace, workplace
from raydl.methods import METHODS

NUM_WORKERS = 2
OURS, ALSO, TIED = "sync-easgd", "also", "hogwild-easgd"
RAY_TRAIN, DDP = "Ray Train", "torchrun DDP"
PEERS = (RAY_TRAIN, DDP)
TUNED = " tuned"
"""Suffix of the name of a method whose learning rate and momentum were chosen."""
OURS_TUNED = f"{OURS}{TUNED}"
FAMILIES = re.compile("easgd|eamsgd|diloco")
"""Matches the names of the methods of the EASGD and DiLoCo families."""
SAME_WITH_MOMENTUM = ("async-measgd", "hogwild-measgd", "sync-measgd", "sync-msgd")
"""Methods that equal another one with momentum; tuning covers them there."""
_MISSED = Spread(0.0, 0.0, 0.0)
OVER_PEER = 1.3
TIE = 0.95
"""Lower bound for the time of ``TIED``: runs with the same seed differ by as much."""


@dataclass(frozen=True)
class Rate:
    """A learning rate and momentum, for a batch of 64 per worker."""

    lr: float
    momentum: float

    @property
    def arguments(self) -> tuple[str, ...]:
        """Options of raydl and of the peer."""
        return "--lr", str(self.lr), "--momentum", str(self.momentum)

    def __str__(self) -> str:
        return f"{self.lr:g} with momentum {self.momentum:g}"


RATES = tuple(Rate(lr, momentum) for momentum in (0.0, 0.9) for lr in (0.02, 0.05, 0.1, 0.2, 0.4))
"""Candidates, for every case that is tuned."""
_QUICK_RATE = Rate(0.2, 0.0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings that all cases share."""

    accuracy: float
    samples: int
    scored_every: int

    @property
    def arguments(self) -> tuple[str, ...]:
        """Options of both sides."""
        length = ("--samples", str(self.samples), "--stop-at-accuracy", str(self.accuracy))
        return "--model", "lenet", "--batch-size", "64", *length


FULL = Plan(accuracy=0.99, samples=300_000, scored_every=15_000)
QUICK = Plan(accuracy=0.97, samples=60_000, scored_every=6_000)


@dataclass(frozen=True, kw_only=True)
class Reached:
    """When a run reached the accuracy."""

    seconds: float
    """Wall-clock time from the first step; the whole time if the accuracy was not reached."""
    training_s: float
    """The same without the peer's evaluations, which interrupt its training."""
    samples: int
    best: float
    """The best accuracy."""
    is_reached: bool
    has_crashed: bool = False
    """Whether the run failed for another reason than its time."""


def reached_by_raydl(run: Trained, *, accuracy: float) -> Reached:
    """Return when the center reached an accuracy."""
    scores = run.result["evaluations"]
    best = max(score["accuracy"] for score in scores)
    hit = next((s for s in scores if s["accuracy"] >= accuracy), None)
    end = {"seconds": run.result["seconds"], "samples": run.result["samples"]}
    at = end if hit is None else hit
    return Reached(
        seconds=at["seconds"], training_s=at["seconds"], samples=at["samples"], best=best,
        is_reached=hit is not None,
    )  # fmt: skip


def reached_by_peer(run: Trained, *, accuracy: float) -> Reached:
    """Return when the weights reached an accuracy, including the evaluations before."""
    scores = run.result["evaluations"]
    best = max(score for _, _, score in scores)
    hit = next((i for i, s in enumerate(scores) if s[2] >= accuracy), len(scores) - 1)
    seconds, samples, score = scores[hit]
    # After an evaluation, wall-clock time minus training time is the time of all evaluations.
    paused_s = run.result["scored_s"][hit - 1] - scores[hit - 1][0] if hit else 0.0
    return Reached(
        seconds=seconds + paused_s, training_s=seconds, samples=samples, best=best,
        is_reached=score >= accuracy,
    )  # fmt: skip


def rates_of(method: str) -> tuple[Rate, ...]:
    """Return the candidates of a method.

    A momentum form is tried only with momentum: without it, it is another method.
    """
    return tuple(rate for rate in RATES if rate.momentum or not METHODS[method].local_step.momentum)


def best_rate(name: str, train: Callable[[Rate], Reached], rates: Sequence[Rate]) -> Rate:
    """Return the rate with which a case reaches the accuracy with the fewest samples.

    Args:
        name: name of the case.
        train: trains it, and raises ``RunError`` if the run fails or times out.
        rates: candidates.
    """

    def cost(rate: Rate) -> tuple[float, float]:
        try:
            reached = train(rate)
        except RunError as error:
            print(f"  {name} at {rate}: {error}", flush=True)
            return math.inf, 0.0
        after = f"reached after {reached.samples:,} samples"
        outcome = after if reached.is_reached else f"not reached, best {reached.best:.2%}"
        print(f"  {name} at {rate}: {outcome}", flush=True)
        return (reached.samples if reached.is_reached else math.inf), -reached.best

    return min(rates, key=cost)


def train_peer(
    place: Workplace, data: str, plan: Plan, rate: Rate, *, peer: str = DDP, seed: int = 0
) -> Reached:
    """Train a peer, by torchrun unless another one is named.

    Raises:
        RunError: if the run fails or times out.
    """
    program = {DDP: place.ddp, RAY_TRAIN: place.ray_train}[peer]
    run = program(*_peer_arguments(data, plan, rate, seed=seed), num_workers=NUM_WORKERS)
    return reached_by_peer(run, accuracy=plan.accuracy)


def train_raydl(
    place: Workplace, data: str, plan: Plan, arguments: Sequence[str], *, seed: int = 0
) -> Reached:
    """Train raydl with some options.

    Raises:
        RunError: if the run fails or times out.
    """
    scores = ("--evaluation.every-samples", str(plan.scored_every))
    common = ("--data", data, *plan.arguments, *scores, "--workers", str(NUM_WORKERS))
    return reached_by_raydl(
        place.train(*common, *arguments, "--seed", str(seed)), accuracy=plan.accuracy
    )


def tuned_arguments(place: Workplace, data: str, plan: Plan, method: str) -> tuple[str, ...]:
    """Return the options of a method at its best learning rate and momentum."""

    def train(rate: Rate) -> Reached:
        return train_raydl(place, data, plan, ("--method", method, *rate.arguments))

    return ("--method", method, *best_rate(method, train, rates_of(method)).arguments)


def _peer_arguments(data: str, plan: Plan, rate: Rate, *, seed: int) -> tuple[str, ...]:
    scores = ("--evaluate-every", str(plan.scored_every))
    return "--data", data, *plan.arguments, *scores, *rate.arguments, "--seed", str(seed)


def cases_of(
    place: Workplace,
    data: str,
    plan: Plan,
    rate: Rate,
    methods: Mapping[str, Sequence[str]],
    peers: Sequence[str],
) -> dict[str, Callable[[], Reached]]:
    """Return functions that run a case with the next seed at each call, by name.

    Args:
        place: workplace of the runs.
        data: path of the data set.
        plan: settings that all cases share.
        rate: learning rate of the peers.
        methods: options of each case of raydl, by name.
        peers: names of the peers to run.
    """

    def raydl(name: str, seeds: Callable[[], int]) -> Reached:
        try:
            return train_raydl(place, data, plan, methods[name], seed=seeds())
        except RunError as error:
            if name == OURS and not isinstance(error, TimeOutError):
                raise  # all others are compared with it
            return failed(name, error)

    def other(peer: str, seeds: Callable[[], int]) -> Reached:
        try:
            return train_peer(place, data, plan, rate, peer=peer, seed=seeds())
        except RunError as error:
            return failed(peer, error)

    ours = {name: partial(raydl, name, itertools.count().__next__) for name in methods}
    return {**ours, **{peer: partial(other, peer, itertools.count().__next__) for peer in peers}}


def failed(method: str, error: RunError) -> Reached:
    """Return the outcome of a method whose run failed or took too long."""
    has_crashed = not isinstance(error, TimeOutError)
    outcome = "has crashed" if has_crashed else f"counts as not reached after {BOUND_S:.0f} s"
    print(f"  {method} {outcome}: {error}", flush=True)
    return Reached(
        seconds=BOUND_S, training_s=BOUND_S, samples=0, best=0.0, is_reached=False,
        has_crashed=has_crashed,
    )  # fmt: skip


def without_crashes(
    report: Report, cases: Mapping[str, Sequence[Reached]]
) -> dict[str, Sequence[Reached]]:
    """Return the cases whose runs have not crashed; name the others in the report."""
    crashed = [name for name, runs in cases.items() if any(run.has_crashed for run in runs)]
    if crashed:
        report.add_text(f"Crashed, and therefore without figures: {', '.join(crashed)}.")
    return {name: runs for name, runs in cases.items() if name not in crashed}


def add_results(report: Report, cases: Mapping[str, Sequence[Reached]]) -> None:
    """Add the table and the figures to a report."""
    report.add_table(
        ("case", "seconds", "without a peer's scores", "samples", "reached", "best score"),
        [(name, *_row(runs)) for name, runs in cases.items()],
    )
    cases = without_crashes(report, cases)
    if not all(run.is_reached for run in cases[OURS]):
        report.add_text(f"{OURS} did not reach the accuracy with each seed: no figure is met.")
    for name, runs in cases.items():
        report.add_figures(seconds_of("time_to_accuracy", name, _seconds(runs)))
        if name != OURS:
            value = _over(runs, cases[OURS])
            figure = f"time_to_accuracy.{_in_figures(name)}_over_{OURS}"
            report.add_figures(Figure(name=figure, value=value, target=_target_of(name)))
    _add_peers_over_tuned(report, cases)
    _add_first_of_families(report, cases)


def _target_of(case: str) -> float | None:
    """Return the target for a case's time over that of sync-easgd with its defaults."""
    if case.endswith(TUNED):
        return None
    return {**dict.fromkeys(PEERS, OVER_PEER), TIED: TIE, ALSO: None}.get(case, 1.0)


def _add_peers_over_tuned(report: Report, cases: Mapping[str, Sequence[Reached]]) -> None:
    """Add the peers' time over that of sync-easgd, both tuned."""
    for peer in PEERS if OURS_TUNED in cases else ():
        if peer in cases:
            value = _over(cases[peer], cases[OURS_TUNED])
            figure = f"time_to_accuracy.{_in_figures(peer)}_over_{_in_figures(OURS_TUNED)}"
            report.add_figures(Figure(name=figure, value=value, target=OVER_PEER))


def _add_first_of_families(report: Report, cases: Mapping[str, Sequence[Reached]]) -> None:
    """Add the time of the first method outside the EASGD and DiLoCo families over the first inside.

    A method is first by its median time; methods that did not reach the accuracy do not count.
    """
    reached = {
        name: _seconds(runs)
        for name, runs in cases.items()
        if name not in (*PEERS, ALSO) and all(run.is_reached for run in runs)
    }
    in_order = sorted(reached, key=lambda name: statistics.median(reached[name]))
    inside = next((name for name in in_order if FAMILIES.search(name)), None)
    outside = next((name for name in in_order if not FAMILIES.search(name)), None)
    if outside:
        report.add_text(
            f"The first of the EASGD and DiLoCo families: {inside}; of others: {outside}"
        )
        value = ratios(reached[outside], reached[inside]) if inside else _MISSED
        report.add_figures(
            Figure(name="time_to_accuracy.others_over_families", value=value, target=1.0)
        )


def _over(runs: Sequence[Reached], ours: Sequence[Reached]) -> Spread:
    """Return the ratio of the times; 0, which meets no target, if ours did not reach the end."""
    if not all(run.is_reached for run in ours):
        return _MISSED
    return ratios(_seconds(runs), _seconds(ours))


def _seconds(runs: Sequence[Reached]) -> list[float]:
    return [run.seconds for run in runs]


def seconds_of(benchmark: str, case: str, seconds: Sequence[float]) -> Figure:
    """Return the figure of the seconds to the accuracy."""
    name = f"{benchmark}.{_in_figures(case)}.seconds"
    return Figure(name=name, value=Spread.of(seconds), is_better="less")


def _in_figures(case: str) -> str:
    """Return the name of a case as names of figures have it."""
    return case.lower().replace(" ", "-")


def _row(runs: Sequence[Reached]) -> tuple[str, ...]:
    return (
        Spread.of(_seconds(runs)).text(".1f"),
        Spread.of([run.training_s for run in runs]).text(".1f"),
        Spread.of([run.samples for run in runs]).text(",.0f"),
        f"{sum(run.is_reached for run in runs)} of {len(runs)}",
        f"{max(run.best for run in runs):.2%}",
    )


def _parser() -> argparse.ArgumentParser:
    return options_of(
        __doc__,
        data={"default": "../shared/data/mnist", "help": "data set; by default MNIST"},
        accuracy={"type": float, "help": "accuracy to reach, 0..1"},
        samples={"type": int, "help": "most samples of a run; the learning rate ends at 0 there"},
        scored_every={"type": int, "help": "samples between two evaluations"},
        methods={"help": "methods of raydl besides sync-easgd, with commas; default: all"},
        tuned={"help": "methods to tune as the peers are, with commas; default: those measured"},
        also={"default": "", "help": "further settings to measure, as one argument"},
    )


def main() -> None:
    """Measure and report."""
    parser = _parser()
    options = parser.parse_args()
    others = options.methods.split(",") if options.methods else METHODS
    names = (OURS,) if options.quick else (OURS, *(m for m in others if m != OURS))
    tuned = [] if options.quick else [name for name in names if name not in SAME_WITH_MOMENTUM]
    if options.tuned is not None:
        tuned = list(filter(None, options.tuned.split(",")))
    if unknown := [name for name in tuned if name not in METHODS]:
        parser.error(f"--tuned: {', '.join(unknown)}: no such method (raydl methods lists them)")
    defaults = QUICK if options.quick else FULL
    plan = Plan(
        accuracy=options.accuracy or defaults.accuracy,
        samples=options.samples or defaults.samples,
        scored_every=options.scored_every or defaults.scored_every,
    )
    methods: dict[str, tuple[str, ...]] = {name: ("--method", name) for name in names}
    if options.also:
        methods[ALSO] = (*methods[OURS], *shlex.split(options.also))
    peers = (RAY_TRAIN,) if options.quick else PEERS
    report = Report.of_command("time_to_accuracy", options)
    with workplace() as place:
        data = place.arrays(options.data)
        train = partial(train_peer, place, data, plan)
        rate = _QUICK_RATE if options.quick else best_rate(DDP, train, RATES)
        chosen = {name: tuned_arguments(place, data, plan, name) for name in tuned}
        methods |= {f"{name}{TUNED}": arguments for name, arguments in chosen.items()}
        if chosen:
            rows = [(f"{name}{TUNED}", " ".join(arguments)) for name, arguments in chosen.items()]
            report.add_table(("case", "options"), rows)
        cases = cases_of(place, data, plan, rate, methods, peers)
        results = interleaved(cases, repeats=options.repeats or (1 if options.quick else 3))
    report.add_text(
        f"{plan.accuracy:.1%} on the test set, evaluated every {plan.scored_every:,} samples of at "
        f"most {plan.samples:,}; {' and '.join(peers)} at a learning rate of {rate}."
    )
    add_results(report, results)
    report.close(options.out)


if __name__ == "__main__":
    main()
