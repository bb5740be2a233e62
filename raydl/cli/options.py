"""Options and tables, as all commands read and print them.

The options of ``train`` are the fields of :class:`raydl.config.TrainConfig`, by tyro. A field
with a flag in its metadata gets that short name; the others keep their dotted ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, get_type_hints

import tyro
from rich.console import Console
from rich.table import Table

from raydl.config import ScalingConfig, TrainConfig
from raydl.errors import ConfigError

STOPPED = {"SIGINT": 130, "SIGTERM": 143}
"""Exit status by the signal that stopped a command."""


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


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()
) -> None:
    """Print rows under a head; the columns of ``numbers`` are set flush right."""
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
