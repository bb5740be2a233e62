"""Settings of a method's own: the arguments of its class, given as ``method.options``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raydl.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from raydl.core.rules import Rule

_SETTING = "method.options"
_SET_ELSEWHERE = {
    "beta": "method.beta (--beta)",
    "lr": "method.outer_lr",
    "momentum": "method.outer_momentum",
}
"""Arguments with a setting of their own, of a class whose ``from_config`` reads it."""


def reads_settings(kind: type[Rule]) -> bool:
    """Whether a class constructs itself from the settings, rather than from its options alone."""
    from raydl.core.rules import Rule

    own = inspect.getattr_static(kind, "from_config")
    return own is not inspect.getattr_static(Rule, "from_config")


def options_of(kind: type[Rule]) -> dict[str, Any]:
    """Return the options of a method with their defaults, by name; ``...``: it has none."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    others = (*_SET_ELSEWHERE, "nesterov") if reads_settings(kind) else ()
    own = (p for p in named if p.name not in others)
    return {p.name: ... if p.default is p.empty else p.default for p in own}


def check_options(kind: type[Rule], name: str, given: dict[str, Any]) -> None:
    """Check the names of options.

    Raises:
        ConfigError: if the method has no such option.
    """
    known = options_of(kind)
    for option in given:
        if option in _SET_ELSEWHERE and option not in known:
            problem = f"must not have {option}: set {_SET_ELSEWHERE[option]}"
            raise ConfigError(_SETTING, problem)
        if option in known:
            continue
        if not known:
            problem = f"must be empty for {name}, which has none, got {option}"
            raise ConfigError(_SETTING, problem)
        if difflib.get_close_matches(option, known, n=1):
            raise UnknownNameError(_SETTING, option, known)
        problem = f"has no {option} for {name}; there are {', '.join(known)}"
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
