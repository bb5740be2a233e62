"""Checks that two versions of raydl train the same bits, for changes that must not change them.

Command:   python -m benchmarks.bits before.json            (records the bits of this version)
           python -m benchmarks.bits before.json --check    (compares; --only NAME ... for some)

The record contains the SHA-256 of the trained weights of all runs whose bits do not depend on
timing: each synchronous method with three workers, each form of their exchanges, resumed runs, a
run whose workers are killed at given rounds, and the methods with messages with one worker or with
workers that take turns. For runs whose order of exchanges depends on timing the record contains the
number of counted samples. Bits depend on the machine and on torch: compare on one machine and in
one environment.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runs import Workplace, workplace
from raydl.core.methods import METHODS

_COMMON = (
    "--run.progress", "plain", "--batch-size", "32", "--checkpoint.every-s", "None",
    "--cpus-per-worker", "0.4",  # four workers on two cores
)  # fmt: skip
_THREE = ("--workers", "3", "--period", "4", "--epochs", "6", "--deterministic")
_ALONE = ("--workers", "1", "--period", "4", "--epochs", "6")
_FORMS = {
    "groups": ("--workers", "4", "--group-size", "2"),
    "ring": ("--allreduce", "ring"),
    "recursive-doubling": ("--allreduce", "recursive-doubling"),
    "bf16": ("--compression", "bf16"),
    "int8": ("--compression", "int8"),
    "topk": ("--compression", "topk:0.05"),
    "unpacked": ("--exchange.no-packed",),
    "delayed fragments": ("--method", "local-sgd", "--fragments", "2", "--exchange-delay", "1"),
    "no overlap": ("--exchange.overlap", "False"),
    "dynamic weights": ("--dynamic-weights",),
    "adamw": ("--optimizer", "adamw", "--optimizer.weight-decay", "0.1"),
    "accumulated": ("--training.microbatches", "2", "--training.label-smoothing", "0.1"),
    "augmented": ("--augment", "crop,cutout"),
    "steps of the rate": ("--lr-schedule", "step", "--optimizer.gamma", "0.5"),
    "another seed": ("--seed", "7"),
}
_KILLS = (
    {"fault": "kill", "target": "rank 0", "at": "round 10"},
    {"fault": "kill", "target": "w1", "at": "round 16"},
)


@dataclass(frozen=True)
class Case:
    """A run whose outcome is compared."""

    name: str
    options: tuple[str, ...]
    faults: tuple[dict[str, str], ...] = ()
    resume_options: tuple[str, ...] = ()
    """Options of a second start, which resumes the run; empty: there is none."""
    has_bits: bool = True
    """Whether the weights are the same each time; else only the samples are compared."""

    def run(self, place: Workplace) -> str:
        """Return the outcome."""
        options = (*_COMMON, *self.options)
        if self.faults:
            plan = place.folder / f"{self.name}.yaml"
            plan.write_text(json.dumps({"faults": self.faults}))  # JSON is YAML, too
            options += ("--fault-plan", str(plan))
        trained = place.train(*options)
        if self.resume_options:
            options += (*self.resume_options, "--resume")
            trained = place.train(*options, run_dir=trained.folder)
        assert trained.folder is not None
        if not self.has_bits:
            return f"{trained.result['samples']} samples"
        weights = (trained.folder / "center.safetensors").read_bytes()
        return hashlib.sha256(weights).hexdigest()


def cases() -> Iterator[Case]:
    """Yield all runs."""
    for name, method in METHODS.items():
        if method.strategy in ("sync", "round_robin"):
            yield Case(name, ("--method", name, *_THREE))
        else:
            yield Case(f"{name}, alone", ("--method", name, *_ALONE))
            yield Case(f"{name}, three", ("--method", name, *_THREE[:-1]), has_bits=False)
    for name, options in _FORMS.items():
        yield Case(name, (*_THREE, *options))
    yield Case("center in shards", ("--method", "async-measgd", *_ALONE, "--center-shards", "3"))
    start, longer = (*_THREE, "--lr-schedule", "constant"), ("--epochs", "9")
    yield Case("resumed", start, resume_options=longer)
    yield Case("resumed with fewer", start, resume_options=(*longer, "--workers", "2"))
    yield Case("killed", _THREE, faults=_KILLS)
    yield Case(
        "killed by messages", ("--method", "async-easgd", *_THREE[:-1]), _KILLS[:1], has_bits=False
    )


def record(chosen: Iterable[Case]) -> dict[str, str]:
    """Run the cases and return the outcome of each."""
    outcomes = {}
    with workplace() as place:
        for case in chosen:
            outcomes[case.name] = case.run(place)
            print(f"{case.name:24} {outcomes[case.name][:16]}", flush=True)
    return outcomes


def main(arguments: list[str] | None = None) -> int:
    """Record or compare, and return 1 if an outcome differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="the record, a JSON file")
    parser.add_argument("--check", action="store_true", help="compare with the record")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these runs")
    options = parser.parse_args(arguments)
    now = record(case for case in cases() if not options.only or case.name in options.only)
    if not options.check:
        before = json.loads(options.path.read_text()) if options.path.exists() else {}
        options.path.write_text(json.dumps({**before, **now}, indent=1))
        return 0
    before = json.loads(options.path.read_text())
    differing = [name for name, outcome in now.items() if before.get(name) != outcome]
    print(f"{len(now) - len(differing)} of {len(now)} are as recorded")
    for name in differing:
        print(f"differs: {name}: {before.get(name, 'not recorded')}, now {now[name]}")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
