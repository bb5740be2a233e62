"""Commands for the folders of runs: ``raydl list``, ``status``, ``logs``, ``stop``, and so on."""

from __future__ import annotations

import dataclasses
import json
import select
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import tyro

from raydl.cli.options import Flag, RunArgument, parse, print_lines, print_table
from raydl.config.run import RUNS
from raydl.text.formatting import clock_text, escape_controls, loss_text
from raydl.text.redaction import redact, redact_values

if TYPE_CHECKING:
    from raydl.errors import UntrustedCodeError
    from raydl.run.control_channel import RunStatus

_ANSWER_S = 120.0
"""Longest wait for the user's answer, in seconds."""


@dataclasses.dataclass(frozen=True)
class _EvaluateOptions:
    run: RunArgument
    """Folder of the run, a path or URI, or its name in runs."""
    data: str | None = None
    """Score on the test part of these data instead of the run's."""
    best: Flag = False
    """Score the best center (checkpoint.keep_best) instead of the newest."""
    trust: Flag = False
    """Import the custom model or task that the run's config.json names, without asking."""


def score(arguments: Sequence[str]) -> int:
    """Score the newest checkpoint of a run on its test set."""
    options = parse(_EvaluateOptions, arguments, prog="raydl evaluate", description=score.__doc__)
    from raydl.run.evaluate import score_run

    trust = options.trust or ask_for_trust
    metrics = score_run(options.run, data=options.data, best=options.best, trust=trust, note=_note)
    print(json.dumps(metrics, indent=2))
    return 0


def _note(sentence: str) -> None:
    """Print a sentence beside the figures, which another program may read."""
    print(escape_controls(redact(sentence)), file=sys.stderr)


def ask_for_trust(error: UntrustedCodeError) -> bool:
    """Ask on a terminal whether code that a run names may run; return no without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    print_lines(
        f"{error.source} names code that is not raydl's: {error.listed()}",
        "to score the run, this command imports the code and runs it as you",
    )
    print("run it? [y/N] ", end="", flush=True)
    if not select.select([sys.stdin], [], [], _ANSWER_S)[0]:
        print(f"no answer in {_ANSWER_S:.0f} s")
        return False
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@dataclasses.dataclass(frozen=True)
class _CheckOptions:
    run: RunArgument
    """Folder of the run, a path or URI, or its name in runs."""


def check(arguments: Sequence[str]) -> int:
    """Verify the checksums of the files that a run has kept."""
    options = parse(_CheckOptions, arguments, prog="raydl check", description=check.__doc__)
    from raydl.run.check import check_run

    damage = check_run(options.run)
    print_lines(*damage or ["all files of the run match their checksums"])
    return 1 if damage else 0


@dataclasses.dataclass(frozen=True)
class _StatusOptions:
    run: RunArgument
    """Folder of the run, a path or URI, or its name in runs."""
    json: Flag = False
    """Print the whole status as JSON."""


def status(arguments: Sequence[str]) -> int:
    """Show the state of a run, from any machine that can read its folder."""
    options = parse(_StatusOptions, arguments, prog="raydl status", description=status.__doc__)
    from raydl.run.control_channel import read_status
    from raydl.run.status import to_dict

    run_status = read_status(options.run)
    if options.json:
        print(json.dumps(redact_values(to_dict(run_status)), indent=2))
    else:
        _print_status(run_status)
    return 0


def _print_status(status: RunStatus) -> None:
    at = status.progress
    center = _center(status)
    stale = f"{status.stale_sentence()}\nlast state: " if status.is_stale else ""
    workers = "requested:" if status.is_final else f"{status.num_workers} of"
    print_lines(
        f"{stale}{status.state}",
        f"epoch {at.epoch:.1f}, {at.num_samples:,} samples in {clock_text(at.seconds)}, "
        f"center {center if center.startswith('loss') else f'accuracy {center}'}",
        f"generation {at.generation}, round {at.round:,}, workers {workers} {status.wanted}",
    )
    if status.checkpoint_at is not None and not status.is_final:
        age_s = max(0.0, status.told_at + status.silent_s - status.checkpoint_at)
        print(f"newest checkpoint {clock_text(age_s)} ago")
    if status.workers:
        print()
        rows = [
            (
                w.worker_id, w.state, clock_text(w.since_s), w.node, f"{w.round:,}",
                f"{w.local_step:,}", f"{w.step_s * 1e3:,.1f} ms", clock_text(w.waited_s),
            )
            for w in status.workers
        ]  # fmt: skip
        head = ("worker", "state", "for", "node", "round", "step", "a step", "waited")
        print_table(head, rows, numbers=("for", "round", "step", "a step", "waited"))
    if status.events:
        print_lines("", *status.events)


@dataclasses.dataclass(frozen=True)
class _RemoveOptions:
    run: RunArgument
    """Folder of the run, a path or URI, or its name in runs."""
    worker: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WORKER")]
    """Id of the worker, as in the output of raydl status: w2, for example."""
    timeout_s: float = 30.0
    """Longest wait for the driver's answer, in seconds."""


def remove(arguments: Sequence[str]) -> int:
    """Remove one worker from a run; with MIN:MAX workers the others train on."""
    options = parse(_RemoveOptions, arguments, prog="raydl remove", description=remove.__doc__)
    from raydl.run.control_channel import request_removal

    print_lines(request_removal(options.run, options.worker, timeout_s=options.timeout_s))
    return 0


@dataclasses.dataclass(frozen=True)
class _StopOptions:
    run: RunArgument
    """Folder of the run, a path or URI, or its name in runs."""
    timeout_s: float = 30.0
    """Longest wait for the driver's answer, in seconds."""


def stop(arguments: Sequence[str]) -> int:
    """Stop a run after its round, with a checkpoint, from any machine that can write its folder."""
    options = parse(_StopOptions, arguments, prog="raydl stop", description=stop.__doc__)
    from raydl.run.control_channel import request_stop

    print_lines(request_stop(options.run, timeout_s=options.timeout_s))
    return 0


@dataclasses.dataclass(frozen=True)
class _ListOptions:
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")] = RUNS
    """Folder with runs, a path or URI."""


def list_runs(arguments: Sequence[str]) -> int:
    """List the runs below a folder and their states."""
    options = parse(_ListOptions, arguments, prog="raydl list", description=list_runs.__doc__)
    from raydl.run.control_channel import statuses_in

    statuses = statuses_in(options.folder)
    if not statuses:
        print_lines(f"no run is in {options.folder}")
        return 0
    head = ("run", "state", "workers", "epoch", "samples", "time", "center")
    print_table(head, [_row(name, s) for name, s in statuses], numbers=head[2:])
    return 0


def _row(name: str, status: RunStatus | None) -> tuple[str, ...]:
    if status is None:
        return name, "unknown: it has no status", "", "", "", "", ""
    silent = f"; silent for {clock_text(status.silent_s)}" if status.is_stale else ""
    at = status.progress
    return (
        name, f"{status.state}{silent}", "" if status.is_final else str(status.num_workers),
        f"{at.epoch:.1f}", f"{at.num_samples:,}", clock_text(at.seconds),
        _center(status),
    )  # fmt: skip


def _center(status: RunStatus) -> str:
    """Return the center's accuracy, or its loss if the task measures no accuracy."""
    if status.center_accuracy is None and status.center_loss is not None:
        return f"loss {loss_text(status.center_loss)}"
    return "-" if status.center_accuracy is None else f"{status.center_accuracy:.2%}"


@dataclasses.dataclass(frozen=True)
class _LogsOptions:
    run: RunArgument
    """Folder of the run, a path or URI, or its name in runs."""
    follow: Flag = False
    """Print further events until the run has ended."""


_FOLLOW_S = 2.0
"""Seconds between two looks at a run that is followed."""


def logs(arguments: Sequence[str]) -> int:
    """Print the events of a run: workers that come and go, checkpoints, faults, warnings."""
    options = parse(_LogsOptions, arguments, prog="raydl logs", description=logs.__doc__)
    from raydl.run.control_channel import read_status
    from raydl.tools.report.facts import read_run

    printed = 0
    while True:
        # Before the events: those of the end are written by then.
        status = read_status(options.run) if options.follow else None
        events = read_run(options.run).history.events
        for event in events[printed:]:
            at = f"[{clock_text(event.seconds)}] {event.samples:,} samples: "
            print_lines(f"{at}{event.sentence}")
        sys.stdout.flush()
        printed = max(printed, len(events))  # files that cannot be read for once have none
        if status is None or status.is_final:
            return 0
        if status.is_stale:
            print_lines(status.stale_sentence())
            return 0
        time.sleep(_FOLLOW_S)
