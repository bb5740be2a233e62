"""Turns the contents of a file into typed values; anybody may have written the file.

JSON holds any value under any key. A class states what a file contains: a dataclass, or a TypedDict
where the rest of the program wants a dict. ``typed`` compares the contents with the annotations, so
that the rest of the program need not. ``Count`` and ``Seconds`` are annotations with bounds.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)  # fmt: skip

_T = TypeVar("_T")
_LARGEST = 2**63 - 1
"""Largest whole number: counts are 64-bit integers elsewhere."""
_MOST_SHOWN = 40
"""Most characters of a wrong value in a message."""


@dataclass(frozen=True)
class Within:
    """Bounds of a number, in the annotation of a field."""

    least: float
    most: float

    def check(self, name: str, value: Any) -> None:
        """Raise a ValueError unless a number is within the bounds; None is not compared."""
        if value is not None and not self.least <= value <= self.most:
            raise ValueError(
                f"{name} must be from {self.least} to {self.most}, got {_shown(value)}"
            )


@dataclass(frozen=True)
class Keys:
    """Keys that a dict must have, in the annotation of a field."""

    names: tuple[str, ...]

    def check(self, name: str, value: Any) -> None:
        """Raise a ValueError unless a dict has all keys."""
        if lacking := sorted({*self.names} - value.keys()):
            raise ValueError(f"{name}.{lacking[0]} is missing")


Count: TypeAlias = Annotated[int, Within(0, _LARGEST)]
"""A whole number from 0 on."""
Positive: TypeAlias = Annotated[int, Within(1, _LARGEST)]
"""A whole number from 1 on."""
Amount: TypeAlias = Annotated[float, Within(0, _LARGEST)]
"""A finite number from 0 on."""
Seconds: TypeAlias = Annotated[float, Within(0, 10**12)]
"""A duration or a Unix time: every function of time can print it."""

_hints_of = functools.cache(functools.partial(get_type_hints, include_extras=True))


def typed(kind: type[_T], value: Any, name: str = "it") -> _T:
    """Return a value as a type, if it is one; keys that the type does not name are of newer files.

    Args:
        kind: a dataclass, which is built; a TypedDict, a dict with such keys; or the annotation of
            a field: a union, a list, a tuple, a dict or a class.
        value: the value. A list is accepted where the type is a tuple.
        name: its name for the message.

    Returns:
        The value. Of a dict that is no dataclass, all keys are kept.

    Raises:
        ValueError: it is not of the type; the message is the rest of a sentence.
    """
    return cast(_T, _typed(kind, value, name))


def _typed(kind: Any, value: Any, name: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        checked = _typed(arguments[0], value, name)
        for bounds in arguments[1:]:
            bounds.check(name, checked)
        return checked
    if origin in (Union, types.UnionType):
        return _one_of(arguments, value, name)
    if origin is not None:
        return _container(origin, arguments, value, name)
    if dataclasses.is_dataclass(kind) and not isinstance(value, cast(type, kind)):
        return cast(type, kind)(**_fields(kind, value, name, required=_required_of(kind)))
    if is_typeddict(kind):
        own = _fields(kind, value, name, required=kind.__required_keys__)
        return {**value, **own}
    if not _is_a(kind, value):
        raise _wrong(kind, value, name)
    return value


def _one_of(kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    """Return a value as the first type of a union that it fits."""
    if value is None and type(None) in kinds:
        return None
    errors = []
    for kind in kinds:
        try:
            return _typed(kind, value, name)
        except ValueError as error:
            errors.append(error)
    possible = [e for k, e in zip(kinds, errors, strict=True) if k is not type(None)]
    raise possible[0] if len(possible) == 1 else _wrong(kinds, value, name)


def _container(origin: Any, arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    """Return a dict, a list or a tuple with typed elements."""
    if issubclass(origin, Mapping):
        key_kind, value_kind = arguments
        if not isinstance(value, Mapping):
            raise _wrong(dict, value, name)
        return {
            _typed(key_kind, key, f"a key of {name}"): _typed(value_kind, v, _below(name, key))
            for key, v in value.items()
        }
    if not isinstance(value, (list, tuple)):
        raise _wrong(origin, value, name)
    is_fixed = origin is tuple and arguments[-1:] != (...,)
    kinds = arguments if is_fixed else arguments[:1] * len(value)
    if len(kinds) != len(value):
        raise ValueError(f"{name} must have {len(kinds)} elements, got {len(value)}")
    return origin(
        _typed(kind, v, f"{name}[{i}]")
        for i, (kind, v) in enumerate(zip(kinds, value, strict=True))
    )


def _fields(kind: Any, value: Any, name: str, *, required: frozenset[str]) -> dict[str, Any]:
    """Return the typed values of the keys that a class names."""
    if not isinstance(value, Mapping):
        raise _wrong(dict, value, name)
    if lacking := sorted(required - value.keys()):
        raise ValueError(f"{_below(name, lacking[0])} is missing")
    hints: dict[str, Any] = _hints_of(kind)
    return {
        key: _typed(hint, value[key], _below(name, key))
        for key, hint in hints.items()
        if key in value
    }


def _required_of(kind: Any) -> frozenset[str]:
    missing = dataclasses.MISSING
    fields = dataclasses.fields(kind)
    return frozenset(
        f.name for f in fields if f.default is missing and f.default_factory is missing
    )


def _below(name: str, key: object) -> str:
    """Return the dotted name of a value in a dict, whose keys may be huge."""
    short = str(key)[:_MOST_SHOWN]
    return short if name == "it" else f"{name}.{short}"


def _is_a(kind: Any, value: Any) -> bool:
    """Whether a value is of a class; a bool is no number here, and a whole number is a float."""
    if kind in (int, float):
        if isinstance(value, bool):
            return False
        if isinstance(value, numbers.Integral):  # as a float it must not overflow
            return kind is int or abs(int(value)) <= _LARGEST
        return kind is float and isinstance(value, float)
    return isinstance(value, kind)


_WORDS: dict[Any, str] = {
    int: "a whole number", float: "a number", str: "a text", bool: "true or false",
    dict: "an object", list: "a list", tuple: "a list", type(None): "null",
}  # fmt: skip


def _wrong(kind: Any, value: Any, name: str) -> ValueError:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    plain = [k if get_origin(k) is None else get_origin(k) for k in kinds]
    words = [_WORDS.get(k, getattr(k, "__name__", str(k))) for k in plain]
    return ValueError(f"{name} must be {' or '.join(words)}, got {_shown(value)}")


def _shown(value: Any) -> str:
    """Return the start of a value's text, which may be huge."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _LARGEST:
        return f"one of {value.bit_length()} bits"
    if not (value is None or isinstance(value, (bool, int, float, str))):
        return f"a value of type {type(value).__name__}"
    text = repr(value[: _MOST_SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
