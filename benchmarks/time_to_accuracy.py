"""How soon two workers have a network of 99.0% on MNIST: each method of raydl, and Ray Train.

Command:   python -m benchmarks.time_to_accuracy    (--quick: 97%, two cases, one seed)

LeNet, batch 64, two workers of one thread, by the defaults of ``raydl train``; a repeat is a seed.
The learning rate of all rises for a twentieth of five epochs and falls along a cosine to 0 at their
end, and none may train longer. The test set is scored every 15,000 samples, and the first score
that reaches the accuracy ends the run.

The time is that of the wall clock, from the first step to the moment when the weights that were
scored were there. Scores before are paid for by both sides alike: raydl's evaluator takes CPU from
the workers while they train, the peer's two ranks stop and score a half each. Whether the last
score is good shows later on both sides; that costs neither. raydl leaves a score out where its
evaluator is still at the one before: then its accuracy is seen later than it could be. Its clock
begins when its workers have met, just before their first step, and so does the peer's. The table
has the peer's time without any of its scores, too.

The peer is DistributedDataParallel in Ray Train's TorchTrainer. Its learning rate and momentum are
the best of a few, found at the beginning with the first seed (by torchrun, which computes the
same): those that need the fewest samples; the quick form takes one of them. raydl's are not looked
for; ``--also`` measures sync-easgd with further settings beside the defaults.

What does not reach the accuracy in five epochs, or takes too long, counts with the time that it
was given: ratios to it are at least so large. The full form takes about half an hour on
two cores. Each method should need longer than sync-easgd, but hogwild-easgd, which may tie.
"""

from __future__ import annotations

import argparse
import itertools
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.measure import Figure, Report, Spread, interleaved, options_of, ratios
from benchmarks.programs import RunError
from benchmarks.runs import BOUND_S, Trained, Workplace, workplace
from raydl.core.methods import METHODS

NUM_WORKERS = 2
OURS, ALSO, PEER, TIED = "sync-easgd", "also", "Ray Train", "hogwild-easgd"
OVER_PEER = 1.3
TIE = 0.95
"""What TIED may be sooner by and still not be sooner: runs of one seed differ by as much."""


@dataclass(frozen=True)
class Rate:
    """A learning rate of the peer, at its batch of 64 for each worker."""

    lr: float
    momentum: float

    @property
    def words(self) -> tuple[str, ...]:
        """As options of a peer."""
        return "--lr", str(self.lr), "--momentum", str(self.momentum)

    def __str__(self) -> str:
        return f"{self.lr:g} with momentum {self.momentum:g}"


RATES = (Rate(0.1, 0.0), Rate(0.2, 0.0), Rate(0.4, 0.0), Rate(0.02, 0.9), Rate(0.05, 0.9))
"""What is tried: some multiples of what one worker would take, with and without momentum."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all cases have in common."""

    accuracy: float
    samples: int
    scored_every: int

    @property
    def words(self) -> tuple[str, ...]:
        """As options of both sides."""
        length = ("--samples", str(self.samples), "--stop-at-accuracy", str(self.accuracy))
        return "--model", "lenet", "--batch-size", "64", *length


FULL = Plan(accuracy=0.99, samples=300_000, scored_every=15_000)
QUICK = Plan(accuracy=0.97, samples=60_000, scored_every=6_000)


@dataclass(frozen=True, kw_only=True)
class Reached:
    """When a run came to the accuracy."""

    seconds: float
    """On the wall clock from the first step; of a run that did not, all that it was given."""
    training_s: float
    """The same without scores, where they are no part of the training; else as ``seconds``."""
    samples: int
    best: float
    """The best score."""
    is_reached: bool


def reached_by_raydl(run: Trained, *, accuracy: float) -> Reached:
    """Return when a center was there that reaches an accuracy."""
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
    """Return when weights were there that reach an accuracy, after all scores before them."""
    scores = run.result["evaluations"]
    best = max(score for _, _, score in scores)
    hit = next((i for i, s in enumerate(scores) if s[2] >= accuracy), len(scores) - 1)
    seconds, samples, score = scores[hit]
    # After a score the wall clock is ahead of the training by all scores so far.
    paused_s = run.result["scored_s"][hit - 1] - scores[hit - 1][0] if hit else 0.0
    return Reached(
        seconds=seconds + paused_s, training_s=seconds, samples=samples, best=best,
        is_reached=score >= accuracy,
    )  # fmt: skip


def best_rate(place: Workplace, data: str, plan: Plan, rates: Sequence[Rate]) -> Rate:
    """Return the rate that takes the peer to the accuracy with the fewest samples."""

    def cost(rate: Rate) -> tuple[float, float]:
        try:
            run = place.ddp(*_peer_words(data, plan, rate, seed=0), num_workers=NUM_WORKERS)
        except RunError as error:
            print(f"  the peer at {rate}: {error}", flush=True)
            return math.inf, 0.0
        found = reached_by_peer(run, accuracy=plan.accuracy)
        told = f"after {found.samples:,}" if found.is_reached else f"best {found.best:.2%} of all"
        print(f"  the peer at {rate}: {told} samples", flush=True)
        return (found.samples if found.is_reached else math.inf), -found.best

    return min(rates, key=cost)


def _peer_words(data: str, plan: Plan, rate: Rate, *, seed: int) -> tuple[str, ...]:
    scores = ("--evaluate-every", str(plan.scored_every))
    return "--data", data, *plan.words, *scores, *rate.words, "--seed", str(seed)


def cases_of(
    place: Workplace, data: str, plan: Plan, rate: Rate, methods: Mapping[str, Sequence[str]]
) -> dict[str, Callable[[], Reached]]:
    """Return what takes the time of each case; its next call takes the next seed.

    Args:
        place: where they run.
        data: a folder.
        plan: what they have in common.
        rate: the peer's.
        methods: the words of each case of raydl, by name.
    """

    def raydl(name: str, seeds: Callable[[], int]) -> Reached:
        scores = ("--evaluation.every-samples", str(plan.scored_every))
        words = (*methods[name], "--workers", str(NUM_WORKERS), "--seed", str(seeds()))
        try:
            run = place.train("--data", data, *plan.words, *scores, *words)
        except RunError as error:
            return _failed(name, error)
        return reached_by_raydl(run, accuracy=plan.accuracy)

    def ray_train(seeds: Callable[[], int]) -> Reached:
        words = _peer_words(data, plan, rate, seed=seeds())
        try:
            run = place.ray_train(*words, num_workers=NUM_WORKERS)
        except RunError as error:
            return _failed(PEER, error)
        return reached_by_peer(run, accuracy=plan.accuracy)

    ours = {name: partial(raydl, name, _seeds()) for name in methods}
    return {**ours, PEER: partial(ray_train, _seeds())}


def _seeds() -> Callable[[], int]:
    return itertools.count().__next__


def _failed(method: str, error: RunError) -> Reached:
    """Return what counts for a method that came to no end; for ours there is no result."""
    if method == OURS:
        raise error
    print(f"  {method} counts as not there after {BOUND_S:.0f} s: {error}", flush=True)
    return Reached(seconds=BOUND_S, training_s=BOUND_S, samples=0, best=0.0, is_reached=False)


def tell(report: Report, cases: Mapping[str, Sequence[Reached]]) -> None:
    """Add the table and the figures to a report."""
    report.add_table(
        ("case", "seconds", "without the peer's scores", "samples", "reached", "best score"),
        [(name, *_row(found)) for name, found in cases.items()],
    )
    ours = [found.seconds for found in cases[OURS]]
    has_missed = not all(found.is_reached for found in cases[OURS])
    if has_missed:
        report.add_text(f"{OURS} did not reach the accuracy with each seed: no figure is met.")
    for name, found in cases.items():
        if name == OURS:
            continue
        target = {PEER: OVER_PEER, TIED: TIE, ALSO: None}.get(name, 1.0)
        value = ratios([one.seconds for one in found], ours)
        figure = f"time_to_accuracy.{name.lower().replace(' ', '-')}_over_{OURS}"
        report.add_figures(
            Figure(name=figure, value=Spread(0.0, 0.0, 0.0) if has_missed else value, target=target)
        )


def _row(found: Sequence[Reached]) -> tuple[str, ...]:
    num_reached = sum(one.is_reached for one in found)
    return (
        Spread.of([one.seconds for one in found]).text(".1f"),
        Spread.of([one.training_s for one in found]).text(".1f"),
        Spread.of([one.samples for one in found]).text(",.0f"),
        f"{num_reached} of {len(found)}",
        f"{max(one.best for one in found):.2%}",
    )


def _parser() -> argparse.ArgumentParser:
    return options_of(
        __doc__,
        data={"default": "../shared/data/mnist", "help": "the set; --accuracy is for MNIST"},
        accuracy={"type": float, "help": "to reach, 0..1"},
        samples={"type": int, "help": "that all may train on, and at whose end the rate is 0"},
        scored_every={"type": int, "help": "samples from one score to the next"},
        methods={"help": "of raydl by comma, besides sync-easgd; default: all"},
        also={"default": "", "help": "settings to measure as well, as one word"},
    )


def _plan(options: argparse.Namespace) -> Plan:
    usual = QUICK if options.quick else FULL
    return Plan(
        accuracy=options.accuracy or usual.accuracy,
        samples=options.samples or usual.samples,
        scored_every=options.scored_every or usual.scored_every,
    )


def main() -> None:
    """Measure, and tell."""
    options = _parser().parse_args()
    plan = _plan(options)
    others = options.methods.split(",") if options.methods else METHODS
    names = (OURS,) if options.quick else (OURS, *(m for m in others if m != OURS))
    methods: dict[str, tuple[str, ...]] = {name: ("--method", name) for name in names}
    if options.also:
        methods[ALSO] = (*methods[OURS], *shlex.split(options.also))
    report = Report.of_command("time_to_accuracy", options)
    with workplace() as place:
        data = place.arrays(options.data)
        rate = RATES[1] if options.quick else best_rate(place, data, plan, RATES)
        cases = cases_of(place, data, plan, rate, methods)
        found = interleaved(cases, repeats=options.repeats or (1 if options.quick else 3))
    report.add_text(
        f"{plan.accuracy:.1%} of the test set, scored every {plan.scored_every:,} samples of at "
        f"most {plan.samples:,}; {PEER} at a learning rate of {rate}."
    )
    tell(report, found)
    report.close(options.out)


if __name__ == "__main__":
    main()
