"""Commands on the folder of a run: ``raydl evaluate``, ``check``, ``status``, ``remove``."""

from __future__ import annotations

import dataclasses
import json
import select
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import tyro

from raydl.cli.options import parse, print_table, say
from raydl.redaction import redact_values
from raydl.text import clock_text

if TYPE_CHECKING:
    from raydl.errors import UntrustedCodeError
    from raydl.run.control_channel import RunStatus

_ANSWER_S = 120.0
"""The longest wait for a person's answer, in seconds."""


@dataclasses.dataclass(frozen=True)
class _EvaluateOptions:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's folder, a path or URI."""
    data: str | None = None
    """Score on the test part of other data."""
    best: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Score the best center instead, that of checkpoint.keep_best."""
    trust: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Run the model or task of your own that the folder's config.json names, without asking."""


def score(arguments: Sequence[str]) -> int:
    """Score the newest checkpoint of a run on its test set."""
    options = parse(_EvaluateOptions, arguments, prog="raydl evaluate", description=score.__doc__)
    from raydl.run.evaluate import score_run

    trust = options.trust or ask_for_trust
    metrics = score_run(options.run, data=options.data, best=options.best, trust=trust)
    print(json.dumps(metrics, indent=2))
    return 0


def ask_for_trust(error: UntrustedCodeError) -> bool:
    """Ask at a terminal whether code that a folder names may run; elsewhere the answer is no."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    say(
        f"{error.source} names code that is not raydl's: {error.listed()}",
        "to score the run it is imported and run here, as you",
    )
    print("run it? [y/N] ", end="", flush=True)
    if not select.select([sys.stdin], [], [], _ANSWER_S)[0]:
        print(f"no answer in {_ANSWER_S:.0f} s")
        return False
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@dataclasses.dataclass(frozen=True)
class _CheckOptions:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's folder, a path or URI."""


def check(arguments: Sequence[str]) -> int:
    """Check what a run has kept against its checksums."""
    options = parse(_CheckOptions, arguments, prog="raydl check", description=check.__doc__)
    from raydl.run.check import check_run

    damage = check_run(options.run)
    say(*damage or ["all that the run has kept is as it was written"])
    return 1 if damage else 0


@dataclasses.dataclass(frozen=True)
class _StatusOptions:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's folder, a path or URI."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print all that is known, as JSON."""


def status(arguments: Sequence[str]) -> int:
    """Show how a run stands, from any machine that sees its folder."""
    options = parse(_StatusOptions, arguments, prog="raydl status", description=status.__doc__)
    from raydl.run.control_channel import read_status
    from raydl.run.status import to_dict

    seen = read_status(options.run)
    if options.json:
        print(json.dumps(redact_values(to_dict(seen)), indent=2))
    else:
        _print_status(seen)
    return 0


def _print_status(seen: RunStatus) -> None:
    at, accuracy = (
        seen.progress,
        "-" if seen.center_accuracy is None else f"{seen.center_accuracy:.2%}",
    )
    say(f"{seen.stale_sentence()}\nlast told: {seen.state}" if seen.is_stale else seen.state)
    say(
        f"epoch {at.epoch:.1f}, {at.num_samples:,} samples in {clock_text(at.seconds)}, "
        f"center accuracy {accuracy}\n"
        f"generation {at.generation}, round {at.round:,}, "
        f"workers {_workers(seen)}"
    )
    if seen.checkpoint_at is not None and not seen.is_final:
        age_s = max(0.0, seen.told_at + seen.silent_s - seen.checkpoint_at)
        print(f"newest checkpoint {clock_text(age_s)} ago")
    if seen.workers:
        print()
        rows = [
            (
                w.worker_id, w.state, clock_text(w.since_s), w.node, f"{w.round:,}",
                f"{w.local_step:,}", f"{w.step_s * 1e3:,.1f} ms", clock_text(w.waited_s),
            )
            for w in seen.workers
        ]  # fmt: skip
        head = ("worker", "state", "for", "node", "round", "step", "a step", "waited")
        print_table(head, rows, numbers=("for", "round", "step", "a step", "waited"))
    if seen.events:
        say("", *seen.events)


def _workers(seen: RunStatus) -> str:
    """Return ``3 of 2:4``; of a run that has ended, only what was asked for."""
    return f"asked for: {seen.wanted}" if seen.is_final else f"{seen.num_workers} of {seen.wanted}"


@dataclasses.dataclass(frozen=True)
class _RemoveOptions:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's folder, a path or URI."""
    worker: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WORKER")]
    """Whom, as raydl status names it: w2, say."""
    timeout_s: float = 30.0
    """How long to wait for the run's answer, in seconds."""


def remove(arguments: Sequence[str]) -> int:
    """Take one worker out of a run by name; with MIN:MAX workers the others train on."""
    options = parse(_RemoveOptions, arguments, prog="raydl remove", description=remove.__doc__)
    from raydl.run.control_channel import request_removal

    say(request_removal(options.run, options.worker, timeout_s=options.timeout_s))
    return 0
