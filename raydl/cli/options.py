"""Parses the options of all commands and prints their tables.

tyro makes the options of ``train`` from the fields of ``raydl.config.TrainConfig``. A field with a
flag in its metadata gets that short name; the others keep their dotted names.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import tyro
from rich.console import Console
from rich.table import Table

from raydl.cli.config_file import Option, with_files
from raydl.config import AUTO, ParamGroup, TrainConfig
from raydl.errors import ConfigError
from raydl.text.formatting import escape_controls
from raydl.text.redaction import redact

_PARSING = threading.Lock()
"""CPython 3.11 counts the recursion of ``ast.parse`` for all threads together, and may raise."""

_Options = TypeVar("_Options")
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""A switch without a ``--no-`` form."""
RunArgument = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
"""The folder or name of a run as first argument."""
_MIN_SIMILARITY = 0.6
"""Least similarity of an unknown option to one that the message suggests, from 0 to 1."""
_KINDS: dict[Any, tuple[str, str, Callable[[str], Any]]] = {
    int: ("INT", "a whole number", int),
    float: ("FLOAT", "a number", float),
    str: ("STR", "a text", str),
    bool: (
        "{True,False}",
        "True or False",
        lambda word: {"true": True, "false": False}[word.lower()],
    ),
    "period": ("INT|auto", "a whole number or auto", lambda w: AUTO if w == AUTO else int(w)),
    "workers": ("N|MIN:MAX", "N or MIN:MAX", lambda word: _parse_workers(word)),
}
"""By kind of a value: its placeholder in the help, its name in a sentence, its parser."""
_KIND_OF_SETTING = {"method.period": "period", "scaling.num_workers": "workers"}
_PARAM_GROUP = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="PATTERN:NAME=VALUE,...",
    instance_from_str=lambda words: ParamGroup.parse(words[0]),
    is_instance=lambda value: isinstance(value, ParamGroup),
    str_from_instance=lambda group: [str(group)],
)
"""tyro's parser of one parameter group; the option is repeated for several."""


def parse_train(arguments: Sequence[str]) -> TrainConfig:
    """Return the settings from the options of ``train``, also of files (``--config FILE``).

    Raises:
        ConfigError: if an option is unknown, or a value is not of its type or out of range.
        SystemExit: if a value is missing, or after ``--help``.
    """
    description = (
        "Train a model on Ray with elastic workers. --config FILE takes any of these settings from "
        "a YAML file, or from the config.json of an earlier run; the command line wins."
    )
    words = train_words(arguments)
    return parse(TrainConfig, words, prog="raydl train", description=description)


def train_words(arguments: Sequence[str]) -> list[str]:
    """Return arguments of ``train`` with the options of files in place of ``--config FILE``.

    Raises:
        ConfigError: if a file cannot be read, or a setting in it does not exist.
    """
    return with_files(arguments, dict(_options(TrainConfig)))


def parse(
    cls: type[_Options],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str | None,
    hint: str = "",
) -> _Options:
    """Return the options of a command as an instance of a dataclass.

    Args:
        cls: the dataclass.
        arguments: arguments of the command.
        prog: the command, for help and messages.
        description: first line of the help.
        hint: end of the message on an unknown option; empty: the nearest options.

    Raises:
        ConfigError: if an option is unknown, or a value is not of its type or out of range.
        SystemExit: if a value is missing, or after ``--help``.
    """
    options, unknown = tyro.cli(
        _with_flags(cls),  # type: ignore[arg-type]  # mypy: not Hashable, which a class is
        args=list(arguments),
        prog=prog,
        description=description,
        return_unknown_args=True,
    )
    if unknown:
        flags = {name: option.flag for name, option in _options(cls)}
        raise ConfigError(prog, _unknown_word(unknown[0], flags, hint))
    return _instance_of(cls, options)


def _instance_of(cls: type[_Options], options: Any) -> _Options:
    """Return options of tyro's classes as an instance of the class that those were made from.

    Workers receive the options: a class made here would be pickled whole, and with it they would
    import tyro.
    """
    hints = get_type_hints(cls)
    values = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        value = values[field.name] = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            values[field.name] = _instance_of(hints[field.name], value)
    return cls(**values)


_NAMES_ELSEWHERE = {
    "learning-rate": "lr", "num-workers": "workers", "world-size": "workers", "nproc": "workers",
    "num-epochs": "epochs", "max-epochs": "epochs", "num-train-epochs": "epochs",
    "max-steps": "steps", "num-steps": "steps", "output-dir": "run-dir", "out": "run-dir",
    "per-device-train-batch-size": "batch-size", "dataset": "data", "arch": "model",
}  # fmt: skip
"""Options by their names in other programs, with raydl's flag."""


def _unknown_word(word: str, flags: Mapping[str, str], hint: str) -> str:
    """Return the problem with a word that is no option; ``flags`` by dotted name of the setting."""
    if not word.startswith("-"):
        return f"takes no argument {word!r}; an option begins with --"
    name = word.partition("=")[0]
    flag_of = {known: flag for setting, flag in flags.items() for known in (setting, flag)}
    bare = name.lstrip("-").replace("_", "-")
    bare = _NAMES_ELSEWHERE.get(bare, bare)
    near = [bare]
    if bare not in flag_of:
        near = difflib.get_close_matches(bare, flag_of, 2, _MIN_SIMILARITY)
    hints = dict.fromkeys(f"--{flag_of[known]}" for known in near)
    suggestion = f"did you mean {' or '.join(hints)}?" if hints else "--help lists them"
    return f"has no option {name}; {hint or suggestion}"


def list_commands(
    usage: str, commands: Mapping[str, Callable[..., int]], given: str, *, below: str = ""
) -> str:
    """Return a list of the commands; above it, an error if ``given`` is none of them.

    Args:
        usage: the first line.
        commands: functions by name; their docstrings are listed.
        given: first word of the user; a word with a dash, as ``--help``, is not an error.
        below: name of the parent command, followed by a blank.
    """
    lines = [usage, "", *(f"  {name:12} {command.__doc__}" for name, command in commands.items())]
    if not given.startswith("-"):
        near = difflib.get_close_matches(given, commands, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        lines.insert(0, f"error: there is no command {below}{given!r}{hint}\n")
    return "\n".join(lines)


def print_lines(*lines: str) -> None:
    """Print lines that may hold text of files or URIs.

    Control characters are escaped, and credentials of URIs are removed.
    """
    print(_printable("\n".join(lines)))


def _printable(text: str) -> str:
    return escape_controls(redact(text))


_UNLIMITED = 10_000
"""Columns of a table that is not printed to a terminal."""


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()
) -> None:
    """Print rows under a head; the columns in ``numbers`` are right-aligned."""
    table = Table(box=None, pad_edge=False)
    for name in head:
        table.add_column(name, overflow="fold", justify="right" if name in numbers else "left")
    for row in rows:
        table.add_row(*(_printable(cell).replace("\n", "\\n") for cell in row))
    # Not for a person at a terminal, the lines are read by a program: names stay whole.
    width = None if sys.stdout.isatty() else _UNLIMITED
    Console(markup=False, width=width).print(table)


def _parse_workers(text: str) -> int | tuple[int, int]:
    """Return N, or (MIN, MAX) from MIN:MAX."""
    low, colon, high = text.partition(":")
    return (int(low), int(high)) if colon else int(low)


def _value(
    setting: str, kind: Any, *, is_required: bool
) -> tyro.constructors.PrimitiveConstructorSpec[Any]:
    """Return tyro's parser of a value; it accepts the word None unless a value is required."""
    metavar, kind_name, parse_word = _KINDS[kind]

    def parse_value(words: list[str]) -> Any:
        if words[0] == "None" and not is_required:
            return None
        try:
            return parse_word(words[0])
        except (ValueError, KeyError):
            raise ConfigError(setting, f"must be {kind_name}, got {words[0]}") from None

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=parse_value,
        is_instance=lambda value: value is None or isinstance(value, (int, float, str)),
        str_from_instance=lambda value: [str(value)],
    )


@functools.cache
def _with_flags(cls: type[Any], prefix: str = "") -> type[Any]:
    """Return a subclass of a config class with the help texts and short flags for tyro."""
    hints = get_type_hints(cls, include_extras=True)
    help_texts = _help_texts(cls)
    fields = []
    for field in dataclasses.fields(cls):
        hint: Any = hints[field.name]
        default: Any = dataclasses.field(default=field.default)
        if dataclasses.is_dataclass(hint):
            hint = _with_flags(hints[field.name], f"{field.name}.")
            default = dataclasses.field(default=hint())
        elif field.default_factory is not dataclasses.MISSING:
            default = dataclasses.field(default_factory=field.default_factory)
        argument: dict[str, Any] = {"help": help_texts.get(field.name)}
        if field.default is None:
            argument["help_behavior_hint"] = ""  # the help text names the default
        if "flag" in field.metadata:
            argument |= {"name": field.metadata["flag"], "prefix_name": False}
        hint = Annotated[_typed(hint, f"{prefix}{field.name}"), tyro.conf.arg(**argument)]
        fields.append((field.name, hint, default))
    return dataclasses.make_dataclass(
        cls.__name__,
        fields,
        bases=(cls,),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": cls.__doc__},
    )


def _typed(hint: Any, setting: str) -> Any:
    """Return a type annotated with our parser where tyro's help or messages are unclear."""
    if hint == tuple[ParamGroup, ...]:
        group = Annotated[ParamGroup, _PARAM_GROUP]
        return Annotated[tuple[group, ...], tyro.conf.UseAppendAction]
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    kind = _KIND_OF_SETTING.get(setting, kinds[0] if len(kinds) == 1 else None)
    if kind not in _KINDS or hint in (str, bool):
        return hint
    return Annotated[hint, _value(setting, kind, is_required=type(None) not in get_args(hint))]


def _help_texts(cls: type[Any]) -> dict[str, str]:
    """Return the docstring of each field of a class as one line."""
    with _PARSING:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def flags_of_train() -> list[str]:
    """Return the options of ``train``, without the --."""
    return [option.flag for _, option in _options(TrainConfig)]


def _options(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, Option]]:
    """Yield (dotted name of the setting, with dashes; its option) of each field."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name = f"{prefix}{field.name}".replace("_", "-")
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _options(hints[field.name], f"{name}.")
        else:
            flag, hint = field.metadata.get("flag", name), hints[field.name]
            is_repeated = hint == tuple[ParamGroup, ...]
            yield name, Option(flag, is_switch=hint is bool, is_repeated=is_repeated)
