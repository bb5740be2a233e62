"""Options and tables, as all commands read and print them.

The options of ``train`` are the fields of ``raydl.config.TrainConfig``, by tyro. A field
with a flag in its metadata gets that short name; the others keep their dotted ones.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, cast, get_args, get_type_hints

import tyro
from rich.console import Console
from rich.table import Table

from raydl.config import AUTO, ScalingConfig, TrainConfig
from raydl.errors import ConfigError
from raydl.redaction import redact
from raydl.text import escape_controls

_Options = TypeVar("_Options")
_ALIKE = 0.6
"""So alike, from 0 to 1, are two options of which one may be meant for the other."""
_KINDS: dict[Any, tuple[str, str, Callable[[str], Any]]] = {
    int: ("INT", "a whole number", int),
    float: ("FLOAT", "a number", float),
    str: ("STR", "a text", str),
    bool: (
        "{True,False}",
        "True or False",
        lambda word: {"true": True, "false": False}[word.lower()],
    ),
    AUTO: ("INT|auto", "a whole number or auto", lambda word: AUTO if word == AUTO else int(word)),
}
"""By type, or by the word that may stand in place of a number: how it is shown, how it is named in
a sentence, how a word becomes one."""
STOPPED = {"SIGINT": 130, "SIGTERM": 143}
"""Exit status by the signal that stopped a command."""


def parse_train(arguments: Sequence[str]) -> TrainConfig:
    """Return the settings that the options of ``train`` give.

    Raises:
        ConfigError: an option is unknown, or a value not of its type or out of range.
        SystemExit: a value is missing, or help was asked for.
    """
    description = "Train a model on Ray; workers come and go, the training goes on."
    return parse(TrainConfig, arguments, prog="raydl train", description=description)


def parse(
    cls: type[_Options], arguments: Sequence[str], *, prog: str, description: str | None
) -> _Options:
    """Return the options of a command, an instance of a dataclass; the errors are one sentence.

    Raises:
        ConfigError: an option is unknown, or a value not of its type or out of range.
        SystemExit: a value is missing, or help was asked for.
    """
    options, unknown = tyro.cli(
        _with_flags(cls),  # type: ignore[arg-type]  # mypy: not Hashable, which a class is
        args=list(arguments),
        prog=prog,
        description=description,
        return_unknown_args=True,
    )
    if unknown:
        raise ConfigError(prog, _what_is_unknown(unknown[0], dict(_flags(cls))))
    return cast(_Options, options)


def _what_is_unknown(word: str, flags: Mapping[str, str]) -> str:
    """Return the rest of a sentence on a word that is no option; ``flags`` by name of setting."""
    if not word.startswith("-"):
        return f"does not know what {word!r} is for; an option begins with --"
    name = word.partition("=")[0]
    meant = {known: flag for setting, flag in flags.items() for known in (setting, flag)}
    asked = name.lstrip("-").replace("_", "-")
    near = [asked] if asked in meant else difflib.get_close_matches(asked, meant, 2, _ALIKE)
    hints = dict.fromkeys(f"--{meant[known]}" for known in near)
    hint = f"did you mean {' or '.join(hints)}?" if hints else "--help lists them"
    return f"has no option {name}; {hint}"


def list_commands(
    usage: str, commands: Mapping[str, Callable[..., int]], given: str, *, below: str = ""
) -> str:
    """Return the commands with their sentences; above them, that there is none of this name.

    Args:
        usage: how they are called.
        commands: by name.
        given: what was asked for; options, as ``--help``, are no name.
        below: the command that they belong to, and a blank.
    """
    lines = [usage, "", *(f"  {name:10} {command.__doc__}" for name, command in commands.items())]
    if not given.startswith("-"):
        near = difflib.get_close_matches(given, commands, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        lines.insert(0, f"error: there is no command {below}{given!r}{hint}\n")
    return "\n".join(lines)


def say(*lines: str) -> None:
    """Print lines of which parts may come from files, or be URIs.

    A terminal obeys none of it, and credentials of URIs are left out.
    """
    print(_shown("\n".join(lines)))


def _shown(text: str) -> str:
    return escape_controls(redact(text))


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()
) -> None:
    """Print rows under a head; the columns of ``numbers`` are set flush right."""
    table = Table(box=None, pad_edge=False)
    for name in head:
        table.add_column(name, overflow="fold", justify="right" if name in numbers else "left")
    for row in rows:
        table.add_row(*(_shown(cell).replace("\n", "\\n") for cell in row))
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


def _value(
    setting: str, kind: Any, *, is_required: bool
) -> tyro.constructors.PrimitiveConstructorSpec[Any]:
    """Return how a word becomes a value of a kind, or None unless one is required."""
    metavar, what, read = _KINDS[kind]

    def take(words: list[str]) -> Any:
        if words[0] == "None" and not is_required:
            return None
        try:
            return read(words[0])
        except (ValueError, KeyError):
            raise ConfigError(setting, f"must be {what}, got {words[0]}") from None

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=take,
        is_instance=lambda value: value is None or isinstance(value, (int, float, str)),
        str_from_instance=lambda value: [str(value)],
    )


@functools.cache
def _with_flags(cls: type[Any], prefix: str = "") -> type[Any]:
    """Return a subclass of a config class whose fields carry their short flags for tyro."""
    hints = get_type_hints(cls, include_extras=True)
    sentences = _sentences(cls)
    fields = []
    for field in dataclasses.fields(cls):
        hint: Any = hints[field.name]
        default: Any = dataclasses.field(default=field.default)
        if dataclasses.is_dataclass(hint):
            hint = _with_flags(hints[field.name], f"{field.name}.")
            default = dataclasses.field(default=hint())
        elif field.default_factory is not dataclasses.MISSING:
            default = dataclasses.field(default_factory=field.default_factory)
        about: dict[str, Any] = {"help": sentences.get(field.name)}
        if field.default is None:
            about["help_behavior_hint"] = ""  # what happens then is in the sentence
        if "flag" in field.metadata:
            about |= {"name": field.metadata["flag"], "prefix_name": False}
        hint = Annotated[_typed(hint, f"{prefix}{field.name}"), tyro.conf.arg(**about)]
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
    """Return a type with how its words are read, where tyro's own way says too much or little."""
    if setting == "method.period":
        return Annotated[hint, _value(setting, AUTO, is_required=False)]
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    if setting == "scaling.num_workers":
        return Annotated[hint, _WORKERS]
    if len(kinds) == 1 and kinds[0] in _KINDS and hint not in (str, bool):
        is_required = hint is kinds[0]
        return Annotated[hint, _value(setting, kinds[0], is_required=is_required)]
    return hint


def _sentences(cls: type[Any]) -> dict[str, str]:
    """Return the docstring of each field of a class, in one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _flags(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name of the setting, its option without the --) for all fields."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name = f"{prefix}{field.name}".replace("_", "-")
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _flags(hints[field.name], f"{name}.")
        else:
            yield name, field.metadata.get("flag", name)
