"""The arguments of a method's class, from the settings of a run."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raydl.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from raydl.config import MethodConfig
    from raydl.core.rules import Rule

_SETTING = "method.options"
OWN_SETTINGS = {"beta": "beta", "lr": "outer_lr", "momentum": "outer_momentum"}
"""Arguments that many methods have, and the settings of ``MethodConfig`` by which they are given.
All others are given by ``method.options``."""


def defaults_of(kind: type[Rule]) -> dict[str, Any]:
    """Return the arguments of a method's class with their defaults; ``...``: it has none.

    The default None stands for the attribute of that name, which subclasses set. Momentum at the
    center that is the optimizer's (``has_momentum_at_center``) is left out.
    """
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    defaults = {p.name: ... if p.default is p.empty else p.default for p in named}
    if kind.has_momentum_at_center:
        defaults.pop("momentum", None)
    return {n: getattr(kind, n, None) if v is None else v for n, v in defaults.items()}


def arguments_of(kind: type[Rule], config: MethodConfig) -> dict[str, Any]:
    """Return the arguments that the user has set.

    Args:
        kind: the class of the method.
        config: names the method, and has the values.

    Raises:
        ConfigError: if the class has no such argument.
    """
    known = defaults_of(kind)
    arguments = {}
    for name, setting in OWN_SETTINGS.items():
        value = getattr(config, setting)
        if value is None:
            continue
        if name not in known:
            raise ConfigError(f"method.{setting}", f"has no meaning for {config.name}")
        arguments[name] = value
    given = config.parsed_options
    _check_options(config.name, given, [name for name in known if name not in OWN_SETTINGS])
    return arguments | given


def _check_options(method: str, given: dict[str, Any], known: list[str]) -> None:
    """Raise a ConfigError for an option that a method does not have."""
    for option in given:
        if option in known:
            continue
        if option in OWN_SETTINGS:
            problem = f"must not have {option}: set method.{OWN_SETTINGS[option]}"
            raise ConfigError(_SETTING, problem)
        if not known:
            problem = f"must be empty for {method}, which has none, got {option}"
            raise ConfigError(_SETTING, problem)
        if difflib.get_close_matches(option, known, n=1):
            raise UnknownNameError(_SETTING, option, known)
        problem = f"has no {option} for {method}; there are {', '.join(known)}"
        raise ConfigError(_SETTING, problem)


def between(name: str, value: Any, low: float, high: float) -> float:
    """Return an option that is a number from ``low`` to ``high``.

    Raises:
        ConfigError: if it is not.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        problem = f"must have {name} from {low:g} to {high:g}, got {value!r}"
        raise ConfigError(_SETTING, problem)
    return float(value)


def at_least(name: str, value: Any, least: int) -> int:
    """Return an option that is a whole number of at least ``least``.

    Raises:
        ConfigError: if it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        problem = f"must have {name} as a whole number of at least {least}, got {value!r}"
        raise ConfigError(_SETTING, problem)
    return value


def one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return an option that is one of some words.

    Raises:
        ConfigError: if it is not.
    """
    if value not in choices:
        problem = (
            f"must have {name} as {' or '.join(repr(word) for word in choices)}, got {value!r}"
        )
        raise ConfigError(_SETTING, problem)
    return str(value)
