"""Custom update rules: loaded, checked and tried before any actor starts.

Some mistakes in a rule would show late or never: a center that does not move, or state that a
resumed run lacks. So a copy of the rule takes a few steps on small tensors first.
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
from raydl.core.rules import (
    AheadRule,
    GradientRule,
    Letter,
    Mail,
    Message,
    Moment,
    Now,
    ReplicaSpan,
    Rule,
    State,
    Travelled,
)
from raydl.core.torch_import import without_compiler
from raydl.errors import ConfigError, UnknownNameError
from raydl.methods.options import arguments_of

_NUM_UPDATES = 16
"""Updates after which the center must have moved; a rule may collect some messages first."""
_SETTINGS: dict[str, type] = {
    "lanes": tuple,
    "numbers": tuple,
    "lane_rounds": Mapping,
    "keeps": tuple,
    "inner": tuple,
    "shared": tuple,
    "shared_numbers": tuple,
    "ahead": bool,
    "sums": bool,
    "takes_steps": bool,
    "strategy": str,
    "period": int,
    "fragments": int,
    "delay": int,
}
"""Attributes of a rule, and the type of each."""
_NAMES = ("lanes", "numbers", "keeps", "inner", "shared", "shared_numbers")
_NOW = Now(2)
_TRIAL_MOMENTS = (
    Moment(10, lr=0.0, peak_lr=0.1, is_warming_up=True),
    Moment(10, lr=0.1, peak_lr=0.1, num_workers=2),
    Moment(10, lr=1e-9, peak_lr=0.1),
    Moment(10, lr=0.0, peak_lr=0.1),
)
"""The rate rises from 0, is at its peak, and falls to 0."""
_SIMILARITY = 0.75
_CPU = torch.device("cpu")


def as_method(method: MethodConfig | Rule | str) -> tuple[MethodConfig, Rule | None]:
    """Return the settings for a user's ``method`` argument, and the rule if it is one.

    Raises:
        ConfigError: if it has any other type.
    """
    given: Any = method
    if isinstance(given, MethodConfig):
        return given, None
    if isinstance(given, str):
        return MethodConfig(name=given), None
    kind = type(given)
    if isinstance(given, Rule):
        return MethodConfig(name=f"{kind.__module__}:{kind.__qualname__}"), given
    if isinstance(given, type) and issubclass(given, Rule):
        raise ConfigError("method", f"is the class {given.__name__}; pass an instance of it")
    raise ConfigError("method", f"must be a name, a MethodConfig or a Rule, got a {kind.__name__}")


def named_rule(config: MethodConfig) -> Rule | None:
    """Return the rule that ``module:Class`` names, or None for the name of a built-in method.

    Raises:
        ConfigError: if it cannot be imported, is not a rule, or cannot be constructed.
    """
    if ":" not in config.name:
        return None
    found = kind_of(config.name)
    arguments = arguments_of(found, config)
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            "method.name",
            f"{config.name} cannot be constructed: {error}; give it by method.options, or pass an "
            f"instance in Python: Trainer(method=...)",
        ) from error
    return found(**arguments)


def kind_of(name: str) -> type[Rule]:
    """Return the class that ``module:Class`` names.

    Raises:
        ConfigError: if it cannot be imported, or is not a rule.
    """
    found = load_own("method.name", name)
    if not (isinstance(found, type) and issubclass(found, Rule)):
        raise ConfigError("method.name", f"{name} is no subclass of raydl.core.rules.Rule")
    return found


def check_rule(rule: Rule) -> None:
    """Check the attributes and the signatures of a custom rule.

    Raises:
        ConfigError: if an attribute is invalid or misspelled, or a method is missing or has
            another signature.
    """
    name = type(rule).__name__
    for key, value in _own_values(type(rule)):
        near = difflib.get_close_matches(key, _SETTINGS, n=1, cutoff=_SIMILARITY)
        is_known = key in _SETTINGS or key.startswith("_")
        if near and not is_known and isinstance(value, _SETTINGS[near[0]]):
            raise UnknownNameError(f"method.name {name}", key, _SETTINGS)
    _check_names(rule, name)
    strategy = rule.strategy
    if strategy not in STRATEGIES:
        raise UnknownNameError(f"method.name {name}.strategy", str(strategy), STRATEGIES)
    for key, least in (("period", 1), ("fragments", 1), ("delay", 0)):
        value = getattr(rule, key)
        if not isinstance(value, int) or value < least:
            problem = f"{name}.{key} must be a whole number of at least {least}, got {value!r}"
            raise ConfigError("method.name", problem)
    _check_methods(rule, name)


def try_rule(
    rule: Rule,
    num_parameters: int,
    *,
    device: torch.device = _CPU,
    is_rate_ever_zero: bool = True,
) -> None:
    """Try a custom rule on small tensors.

    Args:
        rule: a rule that ``check_rule`` accepted.
        num_parameters: parameters of an exchange; a rule may hold tensors of that size.
        device: device of the exchange.
        is_rate_ever_zero: whether the learning rate is 0 at the start or at the end of the run.

    Raises:
        ConfigError: if the center does not move in place, or the rule keeps state in itself.
        Exception: any exception of the rule's own code.
    """
    try:
        _try(rule, trial_values(6, device), _NUM_UPDATES, is_rate_ever_zero)
    except ConfigError:
        raise
    except Exception:  # perhaps it holds tensors of the exchange's size
        _try(rule, trial_values(num_parameters, device), 2, is_rate_ever_zero)


def _try(rule: Rule, values: Tensor, least_updates: int, is_rate_ever_zero: bool) -> None:
    name = type(rule).__name__
    try:
        tried = copy.deepcopy(rule)
    except Exception:  # it holds a value that cannot be copied: try the rule itself
        tried = rule
    before = _copied_attributes(tried)
    _try_compose(tried, name, values)
    _refuse_state(tried, before, name, "compose")
    _try_pull(tried, name, values)
    _refuse_state(tried, before, name, "pull")
    _try_updates(tried, name, values, least=least_updates)
    _refuse_state(tried, before, name, "merge_")
    if is_rate_ever_zero:
        _try_without_rate(tried, name, values)
    for moment in _TRIAL_MOMENTS:
        if moment.lr or is_rate_ever_zero:
            tried.checked_period(moment)
    _refuse_state(tried, before, name, "period_at")


def _class_attributes(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a user's classes, base classes first."""
    for cls in reversed(kind.__mro__[: kind.__mro__.index(Rule)]):
        if cls not in (AheadRule, GradientRule):
            yield from vars(cls).items()


def _own_values(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the class attributes that are not functions."""
    for key, value in _class_attributes(kind):
        if not key.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
            yield key, value


def _check_names(rule: Rule, name: str) -> None:
    """Raise a ConfigError for names and switches of another type."""
    for key in _NAMES:
        names: Any = getattr(rule, key)
        if not (isinstance(names, tuple) and all(isinstance(n, str) for n in names)):
            problem = f"{name}.{key} must be a tuple of names, got {names!r}"
            raise ConfigError("method.name", problem)
    for key in ("ahead", "takes_steps", "sums"):
        if not isinstance(getattr(rule, key), bool):
            problem = f"{name}.{key} must be True or False, got {getattr(rule, key)!r}"
            raise ConfigError("method.name", problem)
    if rule.ahead and not rule.sums:
        raise ConfigError(
            "method.name", f"{name}.sums must be True for weights that are sent ahead"
        )
    is_simple = rule.ahead or not rule.takes_steps
    if not rule.lanes or (is_simple and len(rule.lanes) != 1):
        wanted = "one name, since it sends its weights or gradients" if is_simple else "names"
        raise ConfigError("method.name", f"{name}.lanes must have {wanted}, got {rule.lanes!r}")
    if rule.inner and is_simple:
        problem = f"{name}.inner must be empty, since it sends its weights or gradients"
        raise ConfigError("method.name", problem)
    _check_lane_rounds(rule, name)
    if rule.ahead and not rule.takes_steps:
        raise ConfigError(
            "method.name",
            f"{name} cannot have ahead = True and takes_steps = False: a gradient is known only "
            f"after the step",
        )


def _check_lane_rounds(rule: Rule, name: str) -> None:
    """Raise a ConfigError unless each lane travels in every so many rounds, and one in each."""
    every: Any = rule.lane_rounds
    is_valid = isinstance(every, Mapping) and all(
        lane in rule.lanes and isinstance(n, int) and n >= 1 for lane, n in every.items()
    )
    if not is_valid or not any(every.get(lane, 1) == 1 for lane in rule.lanes):
        raise ConfigError(
            "method.name",
            f"{name}.lane_rounds must have a whole number of rounds for some of the lanes "
            f"{[*rule.lanes]}, and leave at least one lane in each round, got {every!r}",
        )
    if every and not rule.sums:
        problem = f"{name}.sums must be True, since some lanes travel in some rounds only"
        raise ConfigError("method.name", problem)


def _check_methods(rule: Rule, name: str) -> None:
    """Raise a ConfigError if a required method is missing or has another signature."""
    needed: dict[str, Callable[..., Any]] = {"merge_": rule.merge_}
    if rule.ahead and type(rule).measured_pull is Rule.measured_pull:
        needed["pull"] = rule.pull
    if rule.lanes != Rule.lanes:
        needed["compose"] = rule.compose
    for method, bound in needed.items():
        base = getattr(Rule, method)
        if getattr(type(rule), method) is base:
            functions = [key for key, value in _class_attributes(type(rule)) if callable(value)]
            near = difflib.get_close_matches(method, functions, n=1, cutoff=_SIMILARITY)
            hint = f"; rename {near[0]}()?" if near else ""
            problem = f"{name} has no {method}(){hint} (docs/algorithms.md)"
            raise ConfigError("method.name", problem)
        wanted = inspect.signature(base)
        arguments: list[Any] = [
            None for p in wanted.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
        ][1:]
        keywords = {p.name: None for p in wanted.parameters.values() if p.kind is p.KEYWORD_ONLY}
        try:
            inspect.signature(bound).bind(*arguments, **keywords)
        except TypeError as error:
            problem = f"{name}.{method}() must take {wanted}: {error}"
            raise ConfigError("method.name", problem) from error


def _trial_state(rule: Rule, like: Tensor) -> State:
    """Return what a rule keeps beside a center, as at the start of a run."""
    vectors = {name: torch.zeros_like(like) for name in rule.shared}
    return State(vectors, dict.fromkeys(rule.shared_numbers, 0.0))


def _trial_state_of_worker(rule: Rule, like: Tensor) -> State:
    """Return what a worker has of it; with messages it is at the center only."""
    return _trial_state(rule, like) if rule.strategy == "sync" else State()


def _trial_replica(rule: Rule, values: Tensor, since: Travelled, *, lr: float) -> ReplicaSpan:
    """Return a replica with these weights, after some steps."""
    kept = {name: torch.zeros_like(values) for name in rule.keeps}
    inner = {name: values.abs() for name in rule.inner}
    return ReplicaSpan(values.clone(), values.roll(1), since, lr, kept, inner=inner)


def _try_compose(rule: Rule, name: str, values: Tensor) -> None:
    """Compose a message twice: both are equal, fit the lanes, and change nothing."""
    messages = []
    rounds = (-1, -1, 0) if rule.lane_rounds else (-1, -1)  # all lanes twice, then those of round 0
    for lanes in map(rule.lanes_at, rounds):
        replica = _trial_replica(rule, values, Travelled(8.0, 2, 0.2), lr=0.1)
        state = _trial_state_of_worker(rule, values)
        center, given = values.flip(0), copy.deepcopy(state)
        out = {lane: torch.full_like(values, torch.nan) for lane in lanes}
        message: Any = rule.compose(replica, center, state, out)
        _check_message(rule, name, message, values, lanes)
        if not (
            torch.equal(replica.x, values)
            and torch.equal(replica.gradient, values.roll(1))
            and torch.equal(center, values.flip(0))
            and _is_same(state, given)
            and not any(bool(vector.any()) for vector in replica.vectors.values())
            and all(torch.equal(vector, values.abs()) for vector in replica.inner.values())
        ):
            raise ConfigError(
                "method.name",
                f"{name}.compose() must not change replica, center or state, since the exchange "
                f"may fail; write into out",
            )
        messages.append(copy.deepcopy(message))
    if not _is_same(*messages[:2]):
        problem = f"{name}.compose() must return the same message for the same replica"
        raise ConfigError("method.name", problem)


def _check_message(
    rule: Rule, name: str, message: Any, values: Tensor, lanes: tuple[str, ...]
) -> None:
    """Raise a ConfigError if a message does not fit what its rule declares."""
    if not isinstance(message, Message):
        problem = f"{name}.compose() must return a raydl.core.rules.Message, got {message!r}"
        raise ConfigError("method.name", problem)
    if message.lanes.keys() != set(lanes):
        problem = f"{name}.compose() must return lanes {[*lanes]}, got {[*message.lanes]}"
        if rule.lane_rounds:
            problem += "; those that travel now are in out"
        raise ConfigError("method.name", problem)
    for lane, vector in message.lanes.items():
        _refuse_other_shape(f"{name}.compose() must return {lane} as", vector, values)
    if message.numbers.keys() != set(rule.numbers):
        problem = (
            f"{name}.compose() must return numbers {[*rule.numbers]}, got {[*message.numbers]}"
        )
        raise ConfigError("method.name", problem)
    if not 0 <= message.weight < float("inf"):
        problem = f"{name}.compose() must return a weight of at least 0, got {message.weight}"
        raise ConfigError("method.name", problem)


def _refuse_other_shape(what: str, given: Any, wanted: Tensor) -> None:
    is_tensor = isinstance(given, Tensor)
    if is_tensor and (given.shape, given.dtype) == (wanted.shape, wanted.dtype):
        return
    found = f"{given.dtype} of shape {list(given.shape)}" if is_tensor else repr(given)
    problem = f"{what} {wanted.dtype} of shape {list(wanted.shape)}, got {found}"
    raise ConfigError("method.name", problem)


def _try_pull(rule: Rule, name: str, values: Tensor) -> None:
    if not rule.ahead or type(rule).measured_pull is not Rule.measured_pull:
        return
    replica, center = values.clone(), values.flip(0)
    pull: Any = rule.pull(replica, center, _NOW, out=torch.empty_like(center))
    _refuse_other_shape(f"{name}.pull() must return what the replica subtracts,", pull, center)
    if not (torch.equal(replica, values) and torch.equal(center, values.flip(0))):
        raise ConfigError(
            "method.name", f"{name}.pull() must not change replica or center; write into out"
        )


def _try_updates(rule: Rule, name: str, values: Tensor, *, least: int) -> None:
    """Update a center with messages of two workers, ``least`` times or more until it moves."""
    center = values * 1e-12  # so small that an update of any size is visible
    before = center.clone()
    handle = center.detach()  # as at a real center, the rule gets an alias of the memory
    state = _trial_state(rule, center)
    if not rule.takes_steps:
        state.step_along_ = _sgd_at(center)
    count = 2 if rule.strategy == "sync" else 1
    for number in range(_NUM_UPDATES):
        sums = {lane: values.roll(number + i) for i, lane in enumerate(rule.lanes_at(number))}
        weight = float(count) if rule.takes_steps else 8.0
        numbers = dict.fromkeys(rule.numbers, weight)
        letters = [Letter({k: v / count for k, v in sums.items()}, weight / count)] * count
        mail = Mail(sums, count, weight, numbers, None if rule.sums else letters)
        rule.merge_(handle, mail, state, _NOW)
        if number + 1 >= least and not torch.equal(center, before):
            return
    raise ConfigError(
        "method.name",
        f"{name}.merge_() did not move the center in {_NUM_UPDATES} trial updates; update it in "
        f"place, for example with center.add_(...): center = ... only makes a new tensor",
    )


def _try_without_rate(rule: Rule, name: str, values: Tensor) -> None:
    """Exchange after a step at the learning rate 0, with which a warm-up begins."""
    replica = _trial_replica(rule, values, Travelled(8.0, 1, 0.0), lr=0.0)
    center, state = values.clone(), _trial_state(rule, values)
    if not rule.takes_steps:
        state.step_along_ = _sgd_at(center)
    out = {lane: torch.zeros_like(values) for lane in rule.lanes}
    message = rule.compose(replica, center.clone(), _trial_state_of_worker(rule, values), out)
    count = 2 if rule.strategy == "sync" else 1
    weight = count * message.weight
    if not weight:  # then a center is not updated
        return
    sums = {lane: vector * weight for lane, vector in message.lanes.items()}
    numbers = {key: number * weight for key, number in message.numbers.items()}
    letters = None if rule.sums else [Letter(message.lanes, message.weight)] * count
    rule.merge_(center.detach(), Mail(sums, count, weight, numbers, letters), state, _NOW)
    if not bool(torch.isfinite(center).all()):
        raise ConfigError(
            "method.name",
            f"{name}.merge_() made the center NaN or infinite after a step at the learning rate 0, "
            f"with which a warm-up begins; leave the center as it is then",
        )


def _sgd_at(center: Tensor) -> Callable[[Tensor], None]:
    """Return a function that steps plain SGD at a center."""
    handle = center.detach()
    optimizer: Optimizer = without_compiler(SGD)([handle], lr=0.1)

    def step_along_(gradient: Tensor) -> None:
        handle.grad = gradient
        optimizer.step()

    return step_along_


def trial_values(size: int, device: torch.device = _CPU) -> Tensor:
    """Return positive and negative numbers, always the same, shape [size]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, generator=generator).to(device)


# state


def _attributes(rule: Rule) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a rule and of its user's classes that are not functions."""
    yield from _own_values(type(rule))
    for key, value in vars(rule).items():
        # A cached property can be computed again.
        if not isinstance(getattr(type(rule), key, None), functools.cached_property):
            yield key, value


def _copied_attributes(rule: Rule) -> dict[str, Any]:
    """Return copies of a rule's attributes, for a later comparison."""
    copies = {}
    for key, value in _attributes(rule):
        try:
            copied = copy.deepcopy(value)
        except Exception:  # a lock, for example: compared by identity
            copied = value
        # A value that does not equal its own copy is compared by identity, too.
        copies[key] = copied if _is_same(copied, value) else value
    return copies


def _refuse_state(rule: Rule, before: Mapping[str, Any], name: str, method: str) -> None:
    now = dict(_attributes(rule))
    changed = [k for k, v in now.items() if k not in before or not _is_same(before[k], v)]
    changed += [key for key in before if key not in now]
    if changed:
        raise ConfigError(
            "method.name",
            f"{name}.{method}() changed the rule's attribute {changed[0]}: a resumed run and "
            f"workers that join later would not have it, and spans of the parameters would share "
            f"it; name what it keeps in shared or shared_numbers (docs/algorithms.md)",
        )


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal, as far as they can be compared."""
    try:
        return one is other or (type(one) is type(other) and _has_same_content(one, other))
    except Exception:  # it contains itself, or cannot be compared
        return True


def _has_same_content(one: Any, other: Any) -> bool:
    """Whether two values of one type are equal; NaN equals NaN."""
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
