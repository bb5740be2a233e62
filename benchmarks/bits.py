"""Compares the bits that two versions of raydl train, for changes that must not change them.

Command:   python -m benchmarks.bits --against COMMIT
           ... --only NAME ...        (some runs; --list names all)
           ... --intended NAME ...    (runs that the change is meant to move)

Each run is made twice on this machine, in this environment: with raydl as of the commit, and as it
lies on the disk now. The run's line says at once whether the two agree, so a comparison that is
stopped half-way says what it has seen. A table of all runs that differ comes last. The exit status
is 1 if a run differs that is not intended to, or cannot be made with either version.

Compared is the SHA-256 of the trained weights, for all runs whose bits do not depend on timing:
each synchronous method with three workers, each form of their exchanges, resumed runs, a run whose
workers are killed at given rounds, and the methods with messages with one worker or with workers
that take turns. Of runs whose order of exchanges depends on timing, the number of counted samples
is compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import only_from_here
from benchmarks.measure import version
from benchmarks.programs import ROOT, RunError
from benchmarks.runs import Workplace, workplace
from raydl.methods import METHODS

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


FAILED = "cannot be made"
"""Outcome of a run that failed, for example of one with options that a version does not know."""
Outcomes = dict[str, tuple[str, str]]
"""By run: its outcome with the version before, and now."""
_GIT = ("git", "-C", str(ROOT))


def resolved(commit: str) -> str:
    """Return the full hash of a commit; exit if this checkout has none of that name."""
    found = subprocess.run(
        [*_GIT, "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}"],
        capture_output=True,
        text=True,
    )
    if found.returncode:
        sys.exit(f"--against must name a commit of this checkout, got {commit}")
    return found.stdout.strip()


def place_before(place: Workplace, commit: str) -> Workplace:
    """Return a place that runs raydl as of a commit, from a folder that ends with the place."""
    archive = subprocess.run([*_GIT, "archive", commit, "raydl"], check=True, capture_output=True)
    folder = place.folder / "before"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return _guarded(place, folder)


def place_now(place: Workplace) -> Workplace:
    """Return a place that runs raydl as it lies on the disk, whatever is edited meanwhile."""
    folder = place.folder / "now"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "raydl", folder / "raydl", ignore=ignored)
    return _guarded(place, folder)


def _guarded(place: Workplace, folder: Path) -> Workplace:
    """Return a place whose programs can import no other raydl than that of a folder."""
    shutil.copy(only_from_here.__file__, folder / "sitecustomize.py")
    return dataclasses.replace(place, root=folder)


def outcome_of(case: Case, place: Workplace) -> str:
    """Return the outcome of a run, or ``FAILED``, and check that its workers ran that version."""
    notes = place.root / only_from_here.NOTES
    notes.unlink(missing_ok=True)
    try:
        outcome = case.run(place)
    except RunError as error:
        print(f"{case.name}, {place.root.name}: {error}", file=sys.stderr)
        return FAILED
    # The driver imports raydl, and so does the process whose forks the workers are.
    processes = set(notes.read_text().split())
    assert len(processes) > 1, f"the workers of {case.name} did not import raydl of {place.root}"
    return outcome


def compare(
    chosen: Iterable[Case], before: Callable[[Case], str], now: Callable[[Case], str]
) -> Outcomes:
    """Make each run with both versions, print at once whether they agree, return the outcomes."""
    outcomes = {}
    for case in chosen:
        outcomes[case.name] = pair = before(case), now(case)
        word = "FAILED" if FAILED in pair else "same" if is_same(*pair) else "DIFFERS"
        print(f"{word:8}{case.name:24}{' '.join(shortened(o) for o in pair)}", flush=True)
    return outcomes


def is_same(before: str, now: str) -> bool:
    """Whether two outcomes agree; two runs that failed say nothing."""
    return before == now != FAILED


def shortened(outcome: str) -> str:
    """Return an outcome as a person compares it: the first digits of a hash."""
    return outcome[:12] if len(outcome) == 64 else outcome


def report(outcomes: Outcomes, *, names: tuple[str, str], intended: Sequence[str] = ()) -> str:
    """Return which runs differ, as a table, and which of them are meant to.

    Args:
        outcomes: of the runs that were made.
        names: of the version before and of the present one.
        intended: names of the runs that the change is meant to move.
    """
    differing = {name: pair for name, pair in outcomes.items() if not is_same(*pair)}
    lines = [f"{len(outcomes) - len(differing)} of {len(outcomes)} runs are the same"]
    if differing:
        lines += ["", f"| run | {names[0]} | {names[1]} | intended |", "|---|---|---|---|"]
    for name, pair in differing.items():
        cells = [name, *map(shortened, pair), "yes" if name in intended else "no"]
        lines.append(f"| {' | '.join(cells)} |")
    unmoved = [name for name in intended if name in outcomes and name not in differing]
    if unmoved:
        lines += ["", f"meant to differ, and the same: {', '.join(unmoved)}"]
    return "\n".join(lines)


def has_unintended(outcomes: Outcomes, intended: Sequence[str]) -> bool:
    """Whether a run differs that is not meant to, or could not be made."""
    return any(
        FAILED in pair or (not is_same(*pair) and name not in intended)
        for name, pair in outcomes.items()
    )


def main(arguments: list[str] | None = None) -> int:
    """Compare, and return 1 if a run differs that is not intended to."""
    by_name = {case.name: case for case in cases()}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--against", metavar="COMMIT", help="the version before")
    what.add_argument("--list", action="store_true", help="print the names of all runs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these runs")
    parser.add_argument("--intended", nargs="+", metavar="NAME", default=[],
                        help="runs that the change is meant to move")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(by_name))
        return 0
    for name in (*(options.only or ()), *options.intended):
        if name not in by_name:
            parser.error(f"there is no run {name!r}; --list prints the names")
    commit = resolved(options.against)
    with workplace() as place:
        before, now = place_before(place, commit), place_now(place)
        outcomes = compare(
            [by_name[name] for name in options.only or by_name],
            before=lambda case: outcome_of(case, before),
            now=lambda case: outcome_of(case, now),
        )
    names = f"commit {commit[:9]}", f"now ({version()})"
    print("\n" + report(outcomes, names=names, intended=options.intended))
    return int(has_unintended(outcomes, options.intended))


if __name__ == "__main__":
    sys.exit(main())
