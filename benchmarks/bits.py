"""Whether two versions of raydl train the same bits: for changes that should change nothing.

Command:   python -m benchmarks.bits before.json            (records what this version trains)
           python -m benchmarks.bits before.json --check    (compares; --only NAME ... for some)

A record holds the SHA-256 of the trained weights of runs whose bits do not depend on time: every
synchronous method with three workers, their exchanges in each form, a resumed run, one whose
workers are killed at stated rounds, and the methods with messages with one worker, or with workers
that take turns. Of those whose workers meet by chance it holds the samples that were counted.
Bits depend on the machine and on torch: compare on one machine, in one environment.
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
    {"fault": "kill", "target": "w1", "at": "round 25"},
)


@dataclass(frozen=True)
class Case:
    """A run, and what of it is compared."""

    name: str
    words: tuple[str, ...]
    faults: tuple[dict[str, str], ...] = ()
    then: tuple[str, ...] = ()
    """Options of a second start, which resumes it; none: there is only one."""
    has_bits: bool = True
    """Whether the same weights come of it each time."""

    def run(self, place: Workplace) -> str:
        """Return what came of it."""
        words = (*_COMMON, *self.words)
        if self.faults:
            plan = place.folder / f"{self.name}.yaml"
            plan.write_text(json.dumps({"faults": self.faults}))  # JSON is YAML, too
            words += ("--fault-plan", str(plan))
        trained = place.train(*words)
        if self.then:
            trained = place.train(*words, *self.then, "--resume", run_dir=trained.folder)
        assert trained.folder is not None
        if not self.has_bits:
            return f"{trained.result['samples']} samples"
        weights = (trained.folder / "center.safetensors").read_bytes()
        return hashlib.sha256(weights).hexdigest()


def cases() -> Iterator[Case]:
    """Yield all runs."""
    for name, method in METHODS.items():
        chosen = ("--method", name)
        if method.strategy == "sync":
            yield Case(name, (*chosen, *_THREE))
            continue
        if method.strategy == "round_robin":
            yield Case(name, (*chosen, *_THREE))
        else:
            yield Case(f"{name}, alone", (*chosen, *_ALONE))
            yield Case(f"{name}, three", (*chosen, *_THREE[:-1]), has_bits=False)
    for name, words in _FORMS.items():
        yield Case(name, (*_THREE, *words))
    yield Case("center in shards", ("--method", "async-measgd", *_ALONE, "--center-shards", "3"))
    constant = ("--lr-schedule", "constant")
    yield Case("resumed", (*_THREE, *constant), then=("--epochs", "9"))
    yield Case("resumed with fewer", (*_THREE, *constant), then=("--epochs", "9", "--workers", "2"))
    yield Case("killed", _THREE, faults=_KILLS)
    yield Case(
        "killed by messages", ("--method", "async-easgd", *_THREE[:-1]), _KILLS[:1], (), False
    )


def record(chosen: Iterable[Case]) -> dict[str, str]:
    """Run all, and return what came of each."""
    found = {}
    with workplace() as place:
        for case in chosen:
            found[case.name] = case.run(place)
            print(f"{case.name:24} {found[case.name][:16]}", flush=True)
    return found


def main(words: list[str] | None = None) -> int:
    """Record or compare; return 1 where something differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="the record, a JSON file")
    parser.add_argument("--check", action="store_true", help="compare with the record")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these runs alone")
    options = parser.parse_args(words)
    found = record(case for case in cases() if not options.only or case.name in options.only)
    if not options.check:
        before = json.loads(options.path.read_text()) if options.path.exists() else {}
        options.path.write_text(json.dumps({**before, **found}, indent=1))
        return 0
    before = json.loads(options.path.read_text())
    differing = [name for name, bits in found.items() if before.get(name) != bits]
    print(f"{len(found) - len(differing)} of {len(found)} are as recorded")
    for name in differing:
        print(f"differs: {name}: {before.get(name, 'not recorded')}, now {found[name]}")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
