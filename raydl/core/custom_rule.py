"""Rules of a user's own: found, checked, and tried before anything starts.

What a rule does wrong would be seen late, or never: a center that does not move, state that a
resumed run does not have. So a copy of it takes a few steps over small tensors first.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from raydl.config import MethodConfig
from raydl.config.custom_code import load_own
from raydl.config.learning import STRATEGIES
from raydl.core.rules import Rule, Sends, Tally
from raydl.errors import ConfigError, UnknownNameError

_FEW = 6
_NUM_UPDATES = 16
"""A rule may let arrivals gather before the center moves; but not so many."""
_SETTINGS = {"sends": Sends, "steps_replica": bool, "strategy": str, "period": int}
"""Attributes of a rule, and the type of each."""
_ALIKE = 0.75
_MISSING = object()
_CPU = torch.device("cpu")


def as_method(method: MethodConfig | Rule | str) -> tuple[MethodConfig, Rule | None]:
    """Return the settings that a user's ``method`` stands for, and the rule if it is one.

    Raises:
        ConfigError: it is of another kind.
    """
    given: Any = method
    if isinstance(given, MethodConfig):
        return given, None
    if isinstance(given, str):
        return MethodConfig(name=given), None
    if isinstance(given, Rule):
        return MethodConfig(name=_name_of(given)), given
    if isinstance(given, type) and issubclass(given, Rule):
        raise ConfigError("method", f"is the class {given.__name__}; give an instance of it")
    raise ConfigError(
        "method", f"must be a name, a MethodConfig or a Rule, got a {type(given).__name__}"
    )


def named_rule(config: MethodConfig) -> Rule | None:
    """Return the rule that ``module:Class`` names, or None for a name of the table.

    Raises:
        ConfigError: it can not be imported, is no rule, or can not be made.
    """
    if ":" not in config.name:
        return None
    found = load_own("method.name", config.name)
    if not (isinstance(found, type) and issubclass(found, Rule)):
        raise ConfigError("method.name", f"{config.name} is no subclass of raydl.core.rules.Rule")
    # A class with a from_config of its own makes itself.
    if inspect.getattr_static(found, "from_config") is inspect.getattr_static(Rule, "from_config"):
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise ConfigError(
                "method.name",
                f"{config.name} can not be made: {error}; give its arguments defaults, define "
                f"from_config(config), or give an instance in Python: Trainer(method=...)",
            ) from error
    return found.from_config(config)


def _name_of(rule: Rule) -> str:
    return f"{type(rule).__module__}:{type(rule).__qualname__}"


def check_rule(rule: Rule) -> None:
    """Check what a rule of a user's own says of itself.

    Raises:
        ConfigError: a setting of it is wrong or misspelt, or a method is missing or takes something
            else.
    """
    name = type(rule).__name__
    _check_settings(rule, name)
    _check_methods(rule, name)


def try_rule(rule: Rule, num_parameters: int, *, device: torch.device = _CPU) -> None:
    """Try a rule of a user's own on small tensors.

    Args:
        rule: which was checked.
        num_parameters: that an exchange has; a rule may hold tensors of that size.
        device: of the exchange.

    Raises:
        ConfigError: the center is not moved in place, or the rule keeps state in itself.
        Exception: what the rule's own code raised.
    """
    try:
        _try(rule, _values(_FEW, device), least_updates=_NUM_UPDATES)
    except ConfigError:
        raise
    except Exception:
        _try(rule, _values(num_parameters, device), least_updates=2)


def _try(rule: Rule, values: Tensor, *, least_updates: int) -> None:
    name = type(rule).__name__
    try:
        tried = copy.deepcopy(rule)
    except Exception:  # of its contents; its own changes are seen all the same
        tried = rule
    before = dict(_remembered(tried))
    _try_pull(tried, name, values)
    _refuse_state(tried, before, name, "pull")
    _try_updates(tried, name, values, least=least_updates)
    _refuse_state(tried, before, name, "update_center_")


def _check_settings(rule: Rule, name: str) -> None:
    for key, value in _own_values(type(rule)):
        near = difflib.get_close_matches(key, _SETTINGS, n=1, cutoff=_ALIKE)
        is_own = key in _SETTINGS or key.startswith("_")
        if near and not is_own and isinstance(value, _SETTINGS[near[0]]):
            raise UnknownNameError(f"method.name {name}", key, _SETTINGS)
    sends, strategy, period = (getattr(rule, key) for key in ("sends", "strategy", "period"))
    if not isinstance(sends, Sends):
        problem = f"{name}.sends must be one of raydl.core.rules.Sends, got {sends!r}"
        raise ConfigError("method.name", problem)
    if strategy not in STRATEGIES:
        raise UnknownNameError(f"method.name {name}.strategy", str(strategy), STRATEGIES)
    if not isinstance(period, int) or period < 1:
        problem = f"{name}.period must be a whole number from 1 on, got {period!r}"
        raise ConfigError("method.name", problem)


def _own_values(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield what a user's classes define beside functions, the base classes first."""
    for cls in reversed(kind.__mro__[: kind.__mro__.index(Rule)]):
        for key, value in vars(cls).items():
            if not key.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
                yield key, value


def _check_methods(rule: Rule, name: str) -> None:
    """Raise a ConfigError if a method that is asked for is missing, or takes something else."""
    needed: dict[str, Callable[..., Any]] = {"update_center_": rule.update_center_}
    if rule.sends is Sends.WEIGHTS and type(rule).measured_pull is Rule.measured_pull:
        needed["pull"] = rule.pull
    for method, bound in needed.items():
        theirs, base = getattr(type(rule), method), getattr(Rule, method)
        if theirs is base:
            near = difflib.get_close_matches(method, _functions(type(rule)), n=1, cutoff=_ALIKE)
            hint = f"; is {near[0]}() meant?" if near else ""
            raise ConfigError(
                "method.name",
                f"{name} sends {rule.sends.value} and has no {method}(){hint} (docs/algorithms.md)",
            )
        wanted = inspect.signature(base)
        arguments: list[Any] = [
            None for p in wanted.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
        ][1:]
        keywords = {p.name: None for p in wanted.parameters.values() if p.kind is p.KEYWORD_ONLY}
        try:
            inspect.signature(bound).bind(*arguments, **keywords)
        except TypeError as error:
            raise ConfigError(
                "method.name",
                f"{name}.{method}() must take {wanted}: {error}",
            ) from error


def _functions(kind: type) -> list[str]:
    return [
        key
        for cls in kind.__mro__[: kind.__mro__.index(Rule)]
        for key, value in vars(cls).items()
        if callable(value)
    ]


def _try_pull(rule: Rule, name: str, values: Tensor) -> None:
    if rule.sends is not Sends.WEIGHTS or type(rule).measured_pull is not Rule.measured_pull:
        return
    replica, center = values.clone(), values.flip(0)
    pull: Any = rule.pull(replica, center, Tally(2, 1, 8.0), out=torch.empty_like(center))
    if not isinstance(pull, Tensor) or (pull.shape, pull.dtype) != (center.shape, center.dtype):
        is_tensor = isinstance(pull, Tensor)
        found = f"{pull.dtype} of shape {list(pull.shape)}" if is_tensor else repr(pull)
        raise ConfigError(
            "method.name",
            f"{name}.pull() must return what the replica subtracts, {center.dtype} of its shape "
            f"{list(center.shape)}; it returned {found}",
        )
    if not (torch.equal(replica, values) and torch.equal(center, values.flip(0))):
        raise ConfigError(
            "method.name",
            f"{name}.pull() must leave replica and center as they are, and write into out",
        )


def _try_updates(rule: Rule, name: str, values: Tensor, *, least: int) -> None:
    """Let messages of two workers move a center; so many at least, and more until it has moved."""
    center = values * 1e-12  # so small that a step of any size shows
    before = center.clone()
    # As at a real center: the rule gets another name of the memory.
    handle = center.detach()
    optimizer: Optimizer | None = rule.make_center_optimizer([handle])
    if not rule.steps_replica:
        optimizer = SGD([handle], lr=0.1)
    num_messages = 2 if rule.strategy == "sync" else 1
    for number in range(_NUM_UPDATES):
        total = values.roll(number)
        rule.update_center_(handle, total, Tally(2, num_messages, 8.0), optimizer)
        if number + 1 >= least and not torch.equal(center, before):
            return
    raise ConfigError(
        "method.name",
        f"{name}.update_center_() did not move the center in {_NUM_UPDATES} updates on trial; "
        f"move it in place, as center.add_(...) does: center = ... makes a tensor that nobody "
        f"sees",
    )


def _values(size: int, device: torch.device) -> Tensor:
    """Return numbers of either sign, always the same, shape [size]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, generator=generator).to(device)


# state


def _attributes(rule: Rule) -> Iterator[tuple[str, Any]]:
    """Yield what a rule and its user's classes hold beside functions."""
    yield from _own_values(type(rule))
    for key, value in vars(rule).items():
        # A cached property would be computed again.
        if not isinstance(getattr(type(rule), key, None), functools.cached_property):
            yield key, value


def _remembered(rule: Rule) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a rule as they are now, for a comparison later."""
    for key, value in _attributes(rule):
        copied = _copied(value)
        # Of what is not even equal to its own copy nobody can tell whether it was changed.
        yield key, copied if _is_same(copied, value) else value


def _refuse_state(rule: Rule, before: Mapping[str, Any], name: str, method: str) -> None:
    now = dict(_attributes(rule))
    changed = [k for k, v in now.items() if not _is_same(before.get(k, _MISSING), v)]
    changed += [key for key in before if key not in now]
    if changed:
        raise ConfigError(
            "method.name",
            f"{name}.{method}() changed the rule's attribute {changed[0]}: a resumed run and "
            f"workers that join later would not have it, and spans of the parameters would share "
            f"it; keep state in the optimizer that make_center_optimizer() returns "
            f"(docs/algorithms.md)",
        )


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # a lock, say: by identity then
        return value


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values hold the same, as far as that can be seen."""
    try:
        return one is other or (type(one) is type(other) and _holds_same(one, other))
    except Exception:  # it holds itself, or can not be compared
        return True


def _holds_same(one: Any, other: Any) -> bool:
    """Whether two values of one type hold the same; NaN is the same as NaN."""
    if isinstance(one, (Tensor, np.ndarray)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        is_same: Any = (one == other) | ((one != one) & (other != other))
        return bool(is_same.all())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, Optimizer):
        return _is_same(one.state_dict(), other.state_dict())
    if not hasattr(one, "__dict__"):
        return bool(one == other or (one != one and other != other))
    return _is_same(vars(one), vars(other))
