"""The command line: ``raydl train``, ``status``, ``remove``, ``evaluate``, ``methods``, ``models``.

The options of ``train`` are the fields of :class:`raydl.config.TrainConfig`, by tyro. A field
with a flag in its metadata gets that short name; the others keep their dotted ones.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import tyro
from rich.console import Console
from rich.table import Table

from raydl.config import ScalingConfig, TrainConfig
from raydl.errors import ConfigError, RaydlError

if TYPE_CHECKING:
    from raydl.runs.desk import RunStatus

_STOPPED = {"SIGINT": 130, "SIGTERM": 143}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 done, 2 a mistake in what was asked for.

    Args:
        arguments: without the program's name; None: those of this process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = _COMMANDS.get(given[0]) if given else None
    if command is None:
        print(_usage(given))
        return 0 if given in ([], ["-h"], ["--help"]) else 2
    try:
        return command(given[1:])
    except RaydlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _STOPPED["SIGINT"]
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stderr.close()
        return 0


def train(arguments: Sequence[str]) -> int:
    """Train a model, with workers that come and go."""
    config = parse_train(arguments)
    # Imported here: --help and a wrong option should not wait for torch.
    from raydl.trainer import Trainer

    result = Trainer.from_config(config).fit()
    metrics = result.metrics
    if result.stopped_by:
        print(
            f"stopped by {result.stopped_by} after {metrics['samples']:,} samples\n"
            f"  go on:        the same command with --run-dir {result.path} --resume"
        )
        return _STOPPED.get(result.stopped_by, 1)
    print(
        f"center test accuracy {metrics['center_accuracy']:.2%}  "
        f"({metrics['samples']:,} samples in {metrics['seconds']:.1f} s)\n"
        f"  run:          {result.path}\n"
        f"  curves:       tensorboard --logdir {result.path}"
    )
    return 0


def parse_train(arguments: Sequence[str]) -> TrainConfig:
    """Return the settings that the options of ``train`` give.

    Raises:
        ConfigError: a value is out of range.
        SystemExit: an option is unknown or not of its type, or help was asked for.
    """
    config: TrainConfig = tyro.cli(
        _with_flags(TrainConfig),
        args=list(arguments),
        prog="raydl train",
        description="Train a model on Ray; workers come and go, the training goes on.",
    )
    return config


@dataclasses.dataclass(frozen=True)
class _EvaluateOptions:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's folder, a path or URI."""
    data: str | None = None
    """Score on the test part of other data."""


def score(arguments: Sequence[str]) -> int:
    """Score the newest checkpoint of a run on its test set."""
    options = tyro.cli(
        _EvaluateOptions, args=list(arguments), prog="raydl evaluate", description=score.__doc__
    )
    from raydl.trainer import score_run

    print(json.dumps(score_run(options.run, data=options.data), indent=2))
    return 0


@dataclasses.dataclass(frozen=True)
class _StatusOptions:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's folder, a path or URI."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print all that is known, as JSON."""


def status(arguments: Sequence[str]) -> int:
    """Show how a run stands, from any machine that sees its folder."""
    options = tyro.cli(
        _StatusOptions, args=list(arguments), prog="raydl status", description=status.__doc__
    )
    from raydl.runs.desk import read_status

    seen = read_status(options.run)
    if options.json:
        print(json.dumps(dataclasses.asdict(seen), indent=2))
    else:
        _print_status(seen)
    return 0


def _print_status(seen: RunStatus) -> None:
    accuracy = "-" if seen.center_accuracy is None else f"{seen.center_accuracy:.2%}"
    print(f"{seen.stale_sentence()}\nlast told: {seen.state}" if seen.is_stale else seen.state)
    print(
        f"epoch {seen.epoch:.1f}, {seen.num_samples:,} samples in {_duration(seen.seconds)}, "
        f"center accuracy {accuracy}\n"
        f"generation {seen.generation}, round {seen.round:,}, "
        f"workers {seen.num_workers} of {seen.wanted}"
    )
    if seen.workers:
        print()
        rows = [
            (
                w.worker_id, w.state, _duration(w.since_s), w.node, f"{w.round:,}",
                f"{w.local_step:,}", f"{w.step_s * 1e3:,.1f} ms", _duration(w.waited_s),
            )
            for w in seen.workers
        ]  # fmt: skip
        head = ("worker", "state", "for", "node", "round", "step", "a step", "waited")
        _print_table(head, rows, numbers=("for", "round", "step", "a step", "waited"))
    if seen.events:
        print("", *seen.events, sep="\n")


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


@dataclasses.dataclass(frozen=True)
class _RemoveOptions:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's folder, a path or URI."""
    worker: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WORKER")]
    """Whom, as raydl status names it: w2, say."""
    timeout_s: float = 30.0
    """How long to wait for the run's answer, in seconds."""


def remove(arguments: Sequence[str]) -> int:
    """Take one worker out of a run by name; the others train on."""
    options = tyro.cli(
        _RemoveOptions, args=list(arguments), prog="raydl remove", description=remove.__doc__
    )
    from raydl.runs.desk import request_removal

    print(request_removal(options.run, options.worker, timeout_s=options.timeout_s))
    return 0


def list_methods(arguments: Sequence[str]) -> int:
    """List the training methods."""
    from raydl.methods import METHODS

    rows = [
        (r.name, r.schedule, str(r.period), f"{r.lr:g}", f"{r.momentum:g}", r.sentence)
        for r in METHODS.values()
    ]
    _print_table(("method", "schedule", "period", "lr", "momentum", "what it does"), rows)
    print("\nequations and sources: docs/algorithms.md; your own: --method module:Class")
    return 0


def list_models(arguments: Sequence[str]) -> int:
    """List the models."""
    from raydl.models import MODELS

    rows = [(name, inspect.getdoc(model) or "") for name, model in MODELS.items()]
    _print_table(("model", "what it is"), [(n, doc.split("\n\n")[0]) for n, doc in rows])
    return 0


def _print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()
) -> None:
    table = Table(box=None, pad_edge=False)
    for name in head:
        table.add_column(name, overflow="fold", justify="right" if name in numbers else "left")
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)


def _workers(text: str) -> int | tuple[int, int]:
    """Return N, or (MIN, MAX) from MIN:MAX."""
    try:
        low, _, high = text.partition(":")
        return (int(low), int(high)) if high else int(low)
    except ValueError:
        raise ConfigError("scaling.num_workers", f"must be N or MIN:MAX, got {text}") from None


_WORKERS = tyro.constructors.PrimitiveConstructorSpec[Any](
    nargs=1,
    metavar="N|MIN:MAX",
    instance_from_str=lambda words: _workers(words[0]),
    is_instance=lambda value: isinstance(value, (int, tuple)),
    str_from_instance=lambda value: [ScalingConfig(num_workers=value).wanted()],
)


def _with_flags(cls: type[Any]) -> type[Any]:
    """Return a subclass of a config class whose fields carry their short flags for tyro."""
    hints = get_type_hints(cls)
    fields = []
    for field in dataclasses.fields(cls):
        hint: Any = hints[field.name]
        default: Any = dataclasses.field(default=field.default)
        if dataclasses.is_dataclass(hint):
            hint = _with_flags(hints[field.name])
            default = dataclasses.field(default=hint())
        elif field.default_factory is not dataclasses.MISSING:
            default = dataclasses.field(default_factory=field.default_factory)
        if field.name == "num_workers":
            hint = Annotated[hint, _WORKERS]
        if "flag" in field.metadata:
            name = field.metadata["flag"]
            hint = Annotated[hint, tyro.conf.arg(name=name, prefix_name=False)]
        fields.append((field.name, hint, default))
    return dataclasses.make_dataclass(
        cls.__name__,
        fields,
        bases=(cls,),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": cls.__doc__},
    )


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "status": status,
    "remove": remove,
    "evaluate": score,
    "methods": list_methods,
    "models": list_models,
}


def _usage(given: list[str]) -> str:
    lines = ["usage: raydl COMMAND [OPTIONS]     (raydl COMMAND --help for its options)", ""]
    lines += [f"  {name:10} {command.__doc__}" for name, command in _COMMANDS.items()]
    if given and not given[0].startswith("-"):
        near = difflib.get_close_matches(given[0], _COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        lines.insert(0, f"error: there is no command {given[0]!r}{hint}\n")
    return "\n".join(lines)
