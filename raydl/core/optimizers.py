"""The inner optimizer on flat storage: any of torch.optim by name, or the user's own.

The tensors that an optimizer holds depend on what its step depends on:

- Elementwise optimizers (SGD, the Adam family, …) hold one flat tensor, for the whole model or for
  a span of the center. With parameter groups, or if only matrices decay, they hold views of it,
  one for each run of consecutive parameters with the same settings.
- All others (Adafactor, Muon, any unknown one) depend on the shape of a parameter. They hold the
  model's own parameters, which are views of the flat tensor, as their gradients are. ``muon`` is
  ``raydl.core.muon.Muon``, with a part for the parameters that are no hidden matrices.

A parameter that the loss of a step does not reach has no gradient, and torch skips it and its
state. A flat tensor cannot skip a part. So at the first such step an elementwise optimizer is
replaced by one over the model's own parameters with the same state (``split_by_parameter``).

A pre-step hook of torch assigns slices of the flat gradient to the views. Another clips the
gradient over all groups together: one exploding batch would otherwise throw off a replica, and
then the center.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from raydl.config import OptimizerConfig, ParamGroup
from raydl.config.custom_code import load_own
from raydl.core.flat import FlatModel
from raydl.core.lr_schedules import check_lr_schedule
from raydl.core.muon import Muon, hidden_matrices
from raydl.core.non_trainable import plain
from raydl.core.rules import LocalStep
from raydl.core.sharing import memory_of, trained_parameters
from raydl.core.torch_import import without_compiler
from raydl.errors import ConfigError, UnknownNameError

OwnOptimizer = Callable[[list[Tensor]], Optimizer]
"""A user's function from parameters to an optimizer over them, such as ``torch.optim.AdamW``."""

_GROUPS = "optimizer.param_groups"
_REFUSED = {
    "lbfgs": "it evaluates the loss several times per step",
    "sparseadam": "it needs sparse gradients, and replicas have dense ones",
}
OPTIMIZERS: dict[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    if name.lower() not in _REFUSED
}
"""The supported optimizers of torch.optim, by name in lower case."""
_HAS_MUON = "muon" in OPTIMIZERS  # from torch 2.9 on
if _HAS_MUON:
    OPTIMIZERS["muon"] = Muon

ELEMENTWISE = frozenset(
    {
        "adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop",
        "rprop", "sgd",
    }
)  # fmt: skip
"""Optimizers that ignore the shape of a parameter, so that they work on any slice of it."""

_GroupKey = tuple[int, bool, bool]
"""What parameters with the same settings share: the number of their setting in
``optimizer.param_groups``, from 1, or 0 without one; whether they are exempt from the decay;
whether they are in the part of ``muon`` that is AdamW's."""
_BY_FIELD = ("lr", "momentum", "nesterov", "weight_decay")
"""Arguments of optimizers that are fields of ``raydl.config.OptimizerConfig``."""
_FOR_NAMED = (
    "momentum", "nesterov", "weight_decay", "options", "decay_only_matrices", "param_groups",
)  # fmt: skip
"""Settings that only optimizers by name take."""
_OF_ALL = {"momentum": "momentum", "nesterov": "nesterov", "initial_accumulator_value": "options"}
"""Arguments that are the same for all parameters, and the setting for each."""


def make_optimizer(
    config: OptimizerConfig,
    own: OwnOptimizer | None = None,
    model: FlatModel | nn.Module | None = None,
) -> Callable[[list[Tensor]], Optimizer]:
    """Return a function that builds the configured optimizer over one flat tensor.

    Each step reads the gradient from the ``grad`` of the flat tensor. Given several tensors, the
    model's own parameters, the function builds the optimizer over these.

    Args:
        config: settings of the optimizer.
        own: the user's function, which replaces the named optimizer.
        model: model whose parameters are views of the flat tensor when the function is called; a
            module must have them in the order of the flat tensor. Needed by optimizers that are not
            elementwise, with parameter groups, and if only matrices decay. The function may be
            given the first of its parameters only, or the first part of the flat tensor.
    """

    def build(tensors: list[Tensor]) -> Optimizer:
        has_groups = config.decay_only_matrices or config.param_groups
        if is_elementwise(config, own) and not has_groups:
            optimizer = _over([("", tensor) for tensor in tensors], config, own)
        elif is_elementwise(config, own) and len(tensors) == 1:
            optimizer = _over_runs(tensors[0], _parameters_in(tensors, model), config)
        else:
            hidden = _hidden_in(model) if name_of(config) == "muon" else None
            optimizer = _over(_parameters_in(tensors, model), config, own, hidden)
        if config.clip_grad_norm is not None:
            optimizer.register_step_pre_hook(_clipper(config.clip_grad_norm))
        return optimizer

    return build


def _parameters_of(model: FlatModel | nn.Module | None) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) of the trained parameters, in the order of the flat tensor."""
    assert model is not None, "an optimizer that depends on layers needs the model"
    if isinstance(model, FlatModel):
        return model.named_parameters()
    return list(trained_parameters(model).items())


def _hidden_in(model: FlatModel | nn.Module | None) -> frozenset[Hashable]:
    """Return the memory of the hidden matrices of a model."""
    assert model is not None, "an optimizer that depends on layers needs the model"
    return hidden_matrices(model.model if isinstance(model, FlatModel) else model)


def _parameters_in(
    tensors: Sequence[Tensor], model: FlatModel | nn.Module | None
) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) of the parameters that some tensors hold.

    Args:
        tensors: the flat tensor or its first part, or the first of the parameters themselves.
        model: the model.
    """
    named = _parameters_of(model)
    size = sum(tensor.numel() for tensor in tensors)
    ends = itertools.accumulate(parameter.numel() for _, parameter in named)
    return [pair for pair, end in zip(named, ends, strict=True) if end <= size]


def _over(
    tensors: Sequence[tuple[str, Tensor]],
    config: OptimizerConfig,
    own: OwnOptimizer | None,
    hidden: frozenset[Hashable] | None = None,
) -> Optimizer:
    """Return the optimizer over (name, tensor) that have their gradients when it steps.

    Args:
        tensors: names and tensors.
        config: settings of the optimizer.
        own: the user's function, or None.
        hidden: the memory of the hidden matrices, for ``muon``.
    """
    if own is None:
        keys = [_group_key_of(name, t, config, hidden) for name, t in tensors]
        return _named([(t, key) for (_, t), key in zip(tensors, keys, strict=True)], config)
    made: Any = own([t for _, t in tensors])
    if not isinstance(made, Optimizer) or "lr" not in made.param_groups[0]:
        raise ConfigError(
            "optimizer.name",
            f"{config.name} must return a torch.optim.Optimizer with an lr, got a "
            f"{type(made).__name__}",
        )
    optimizer: Optimizer = made
    highest = _highest_lr(optimizer)
    for group in optimizer.param_groups:  # the ratios of the groups' rates stay the same
        group["lr_share"] = float(group["lr"]) / highest if highest else 1.0
    return optimizer


def _named(tensors: list[tuple[Tensor, _GroupKey]], config: OptimizerConfig) -> Optimizer:
    """Return torch's optimizer over tensors, given as (tensor, its group)."""
    kind = without_compiler(OPTIMIZERS[name_of(config)])
    return kind(_groups(tensors, config), **_settings(config))


def _highest_lr(optimizer: Optimizer) -> float:
    return max(float(group["lr"]) for group in optimizer.param_groups)


def _over_runs(
    flat: Tensor, parameters: Sequence[tuple[str, Tensor]], config: OptimizerConfig
) -> Optimizer:
    """Return the optimizer over views of the flat tensor, one per run of a group's parameters."""
    views, slices, start = [], [], 0
    keyed = [(_group_key_of(name, p, config), p) for name, p in parameters]
    for key, run in itertools.groupby(keyed, key=operator.itemgetter(0)):
        stop = start + sum(p.numel() for _, p in run)
        views.append((flat[start:stop], key))
        slices.append(slice(start, stop))
        start = stop
    assert start == flat.numel(), "the flat tensor must hold the whole model"
    optimizer = _named(views, config)

    def set_gradients(*_: Any) -> None:
        assert flat.grad is not None
        for (view, _key), span in zip(views, slices, strict=True):
            view.grad = flat.grad[span]

    optimizer.register_step_pre_hook(set_gradients)
    return optimizer


def _group_key_of(
    name: str,
    parameter: Tensor,
    config: OptimizerConfig,
    hidden: frozenset[Hashable] | None = None,
) -> _GroupKey:
    """Return the key of the group to which a parameter belongs."""
    number = _group_number(name, config.param_groups)
    has_decay = number > 0 and config.param_groups[number - 1].weight_decay is not None
    is_exempt = config.decay_only_matrices and parameter.ndim <= 1 and not has_decay
    return number, is_exempt, hidden is not None and memory_of(parameter) not in hidden


def _group_number(name: str, groups: Sequence[ParamGroup]) -> int:
    """Return the number, from 1, of the first group whose pattern matches a name; 0: none."""
    matching = (n for n, group in enumerate(groups, 1) if fnmatchcase(name, plain(group.pattern)))
    return next(matching, 0)


def _groups(
    tensors: list[tuple[Tensor, _GroupKey]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return the parameter groups of torch, in the order of their keys."""
    return [
        {"params": [t for t, own in tensors if own == key], **_settings_of(key, config)}
        for key in sorted({key for _, key in tensors})
    ]


def _settings_of(key: _GroupKey, config: OptimizerConfig) -> dict[str, Any]:
    """Return the settings in which a group differs from the whole model.

    ``lr_share`` is the factor that ``raydl.core.center.set_lr`` multiplies the rate with.
    """
    number, is_exempt, by_adamw = key
    settings: dict[str, Any] = {"weight_decay": 0.0} if is_exempt else {}
    settings |= {"by_adamw": True} if by_adamw else {}
    if number:
        group = config.param_groups[number - 1]
        settings |= {**group.parsed_options, "lr_share": group.lr_scale}
        settings["lr"] = (config.lr or 0.0) * group.lr_scale
        if group.weight_decay is not None:
            settings["weight_decay"] = group.weight_decay
    return settings


def _clipper(max_norm: float) -> Callable[..., None]:
    """Return a hook that clips the gradient of all groups together to an L2 norm."""

    def clip(optimizer: Optimizer, *_: Any) -> None:
        parameters = parameters_of(optimizer)
        if len(parameters) > 1 or parameters[0].is_cuda:
            nn.utils.clip_grad_norm_(parameters, max_norm)
            return
        # The same for one tensor, without a second pass over a gradient that is short enough. Not
        # on a GPU, where the comparison would wait for the device.
        gradient = parameters[0].grad
        if gradient is not None:
            scale = max_norm / (torch.linalg.vector_norm(gradient) + 1e-6)
            if scale < 1:
                gradient.mul_(scale)

    return clip


def is_by_parameter(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Whether an optimizer holds a model's own parameters, not a flat tensor of them."""
    ids = {id(parameter) for parameter in parameters}
    return all(id(tensor) in ids for tensor in parameters_of(optimizer))


def split_by_parameter(
    optimizer: Optimizer, make: Callable[[list[Tensor]], Optimizer], parameters: list[Tensor]
) -> Optimizer:
    """Return an optimizer over the parameters with the state of one over the flat tensor.

    Args:
        optimizer: elementwise optimizer over the flat tensor or over views of it.
        make: builds the optimizer.
        parameters: views of the flat tensor, in its order.
    """
    if is_by_parameter(optimizer, parameters):
        return optimizer
    split = make(parameters)
    for group, before in zip(split.param_groups, optimizer.param_groups, strict=True):
        group.update({key: value for key, value in before.items() if key != "params"})
    for tensor in parameters_of(optimizer):
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        inside = [p for p in parameters if start <= p.data_ptr() < stop]
        for key, value in optimizer.state.get(tensor, {}).items():
            for parameter, piece in zip(inside, _pieces(value, tensor, inside), strict=True):
                split.state[parameter][key] = piece
    return split


def _pieces(value: Any, tensor: Tensor, parameters: list[Tensor]) -> list[Any]:
    """Return the part of an optimizer's state value for each of the parameters in a tensor."""
    if not isinstance(value, Tensor):
        return [value] * len(parameters)
    if value.shape != tensor.shape:  # a step count
        return [value.clone() for _ in parameters]
    parts = torch.split(value, [p.numel() for p in parameters])
    return [part.view(p.shape).clone() for part, p in zip(parts, parameters, strict=True)]


def ignores_zero_gradients(config: OptimizerConfig, own: OwnOptimizer | None = None) -> bool:
    """Whether a zero gradient changes nothing: plain SGD without momentum and weight decay."""
    is_plain = name_of(config) == "sgd" and own is None
    decays = [config.weight_decay, *(group.weight_decay for group in config.param_groups)]
    return is_plain and not config.momentum and not any(decays)


def no_gradient_text(names: Sequence[str]) -> str:
    """Return why a method with the optimizer at the center cannot train a model."""
    others, them = (f" and {len(names) - 1} more", "them") if len(names) > 1 else ("", "it")
    return (
        f"the loss gives no gradient to the parameter {names[0]}{others}, but an optimizer at the "
        f"center would update {them} anyway; choose a method with local steps (local-sgd), an "
        f"optimizer without momentum and weight decay, or make the loss depend on all parameters"
    )


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return all tensors that an optimizer updates, in the order of its groups."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def is_elementwise(config: OptimizerConfig, own: OwnOptimizer | None = None) -> bool:
    """Whether the optimizer ignores the shape of parameters; a user's function rarely counts."""
    if own is None:
        return name_of(config) in ELEMENTWISE
    return _unwrapped(own) in [OPTIMIZERS[name] for name in ELEMENTWISE]


def vectors_in_state(config: OptimizerConfig, own: OwnOptimizer | None = None) -> frozenset[str]:
    """Return the names in the state of an optimizer of what has a value for each parameter.

    Empty for a named one that is not elementwise: it may have other names for other parameters.
    """
    if own is None and not is_elementwise(config):
        return frozenset()
    sample = _sample()
    optimizer = _over(sample, config, own)
    optimizer.step()
    [(_, tensor)] = sample
    state = optimizer.state[tensor].items()
    return frozenset(name for name, v in state if isinstance(v, Tensor) and v.shape == tensor.shape)


def _unwrapped(own: OwnOptimizer) -> OwnOptimizer:
    while isinstance(own, functools.partial):
        own = own.func
    return own


def name_of(config: OptimizerConfig) -> str:
    """Return the name of the optimizer: that of most methods, if no method has filled it in."""
    return config.name or LocalStep.optimizer


def _takes(config: OptimizerConfig) -> dict[str, inspect.Parameter]:
    """Return the arguments of a named optimizer except the parameters."""
    arguments = dict(inspect.signature(OPTIMIZERS[name_of(config)]).parameters)
    del arguments["params"]
    return arguments


def _settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return the settings as arguments of a named optimizer, without those that are not set."""
    takes = _takes(config)
    fields = {name: getattr(config, name) for name in _BY_FIELD if name in takes}
    given = {name: value for name, value in fields.items() if value is not None}
    return {**given, "lr": config.lr or 0.0, **config.parsed_options}


def as_config(
    optimizer: OptimizerConfig | OwnOptimizer | str | None,
    make_optimizer: OwnOptimizer | None = None,
) -> tuple[OptimizerConfig, OwnOptimizer | None]:
    """Return the settings for a user's optimizer arguments, and the function that builds it.

    Args:
        optimizer: a name, settings, or a function of parameters.
        make_optimizer: a function of parameters, if ``optimizer`` has the settings.

    Raises:
        ConfigError: if one of them has another type, or they contradict each other.
    """
    own: Any = make_optimizer
    if isinstance(optimizer, str):
        config = OptimizerConfig(name=optimizer)
    elif optimizer is None or isinstance(optimizer, OptimizerConfig):
        config = optimizer or OptimizerConfig()
    elif not callable(optimizer):
        raise ConfigError(
            "optimizer",
            f"must be a name, an OptimizerConfig or a function of parameters, "
            f"got a {type(optimizer).__name__}",
        )
    elif own is not None:
        problem = "and a function as optimizer exclude each other; give one"
        raise ConfigError("make_optimizer", problem)
    else:
        config, own = OptimizerConfig(), optimizer
    if own is None:
        return config, None
    if not callable(own):
        kind = type(own).__name__
        raise ConfigError("make_optimizer", f"must be a function of parameters, got a {kind}")
    if name_of(config) != LocalStep.optimizer:
        problem = f"and optimizer.name {config.name} exclude each other; leave the name out"
        raise ConfigError("make_optimizer", problem)
    return dataclasses.replace(config, name=_name_of(own)), own


def _name_of(own: OwnOptimizer) -> str:
    """Return the name of a function in the records of a run: ``module:name``, if it has one."""
    if isinstance(own, functools.partial):
        return f"functools:partial({getattr(own.func, '__name__', '…')})"
    kind = own if hasattr(own, "__qualname__") else type(own)
    return f"{kind.__module__}:{kind.__qualname__}"


def named_optimizer(config: OptimizerConfig) -> OwnOptimizer | None:
    """Return the function that ``module:function`` names, or None for a name of torch.optim.

    Raises:
        ConfigError: if it cannot be imported or is not a function.
        UnknownNameError: if torch.optim has no optimizer of that name.
    """
    name = name_of(config)
    if ":" in name:
        own = load_own("optimizer.name", name)
        if not callable(own):
            raise ConfigError("optimizer.name", f"{name} is no function of parameters")
        return own  # type: ignore[no-any-return]
    if name in _REFUSED:
        raise ConfigError("optimizer.name", f"cannot be {name}: {_REFUSED[name]}; choose adamw")
    if name == "muon" and not _HAS_MUON:
        problem = f"cannot be muon with torch {torch.__version__}: it came with 2.9; choose adamw"
        raise ConfigError("optimizer.name", problem)
    if name not in OPTIMIZERS:
        raise UnknownNameError("optimizer.name", name, OPTIMIZERS)
    return None


def default_lr(config: OptimizerConfig, own: OwnOptimizer | None) -> float:
    """Return the default learning rate of an optimizer, the highest of its groups.

    Raises:
        ConfigError: if a user's function does not work without the whole model.
    """
    if own is None:
        return float(_takes(config)["lr"].default)
    try:
        return _highest_lr(_over(_sample(), config, own))
    except ConfigError:
        raise
    except Exception as error:  # any error of a function that expects a whole model
        raise ConfigError(
            "optimizer.lr",
            f"must be set for {config.name}, which cannot be tried on a single parameter "
            f"({type(error).__name__}: {error}); set --lr, or in Python pass "
            f"optimizer=OptimizerConfig(lr=...) with make_optimizer=...",
        ) from error


def check_optimizer(config: OptimizerConfig, own: OwnOptimizer | None) -> None:
    """Raise a ConfigError if the optimizer does not accept its settings."""
    check_lr_schedule(config)
    if own is None:
        _check_named(config)
        is_rprop = name_of(config) == "rprop"
    else:
        for name in _FOR_NAMED:
            if getattr(config, name):
                raise ConfigError(
                    f"optimizer.{name}",
                    f"is for optimizers by name; {config.name} is your own function: set it there, "
                    f"and choose a method without it",
                )
        is_rprop = _unwrapped(own) is torch.optim.Rprop
    if is_rprop and config.warmup > 0:
        raise ConfigError(
            "optimizer.warmup",
            f"must be 0 for rprop, which takes its step sizes from the rate of the first step, "
            f"got {config.warmup}",
        )
    if own is None and config.options:
        _try_options("optimizer.options", config)
    for group in config.param_groups:
        _check_group(group, config)


def _try_options(setting: str, config: OptimizerConfig) -> None:
    """Raise a ConfigError unless a named optimizer steps with its options."""
    kind = without_compiler(OPTIMIZERS[name_of(config)])
    _require_tuples(setting, config)
    try:
        kind([parameter for _, parameter in _sample()], **_settings(config)).step()
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        problem = f"{config.options!r} is not accepted by {config.name}: {error}"
        raise ConfigError(setting, problem) from error


def _require_tuples(setting: str, config: OptimizerConfig) -> None:
    """Raise a ConfigError if an option that has several numbers is given one."""
    takes = _takes(config)
    for name, value in config.parsed_options.items():
        default = takes[name].default if name in takes else None
        if isinstance(default, tuple) and not isinstance(value, (tuple, list)):
            problem = f"must have {name} as {len(default)} values, as in {name}={default}"
            raise ConfigError(setting, f"{problem}, got {name}={value!r}")


def _check_group(group: ParamGroup, config: OptimizerConfig) -> None:
    """Raise a ConfigError if a named optimizer does not accept the settings of a group."""
    takes, options, where = _takes(config), group.parsed_options, f"in {str(group)!r}"
    if group.weight_decay is not None and "weight_decay" not in takes:
        problem = f"has no meaning for {config.name}: it has no weight decay"
        raise ConfigError(f"weight_decay of {_GROUPS}", problem)
    for name in options:
        if name == "lr":
            raise ConfigError(_GROUPS, f"must not have lr {where}: set lr_scale, its factor")
        if name in _OF_ALL:
            problem = f"must not have {name} {where}: it is the same for all parameters; set "
            raise ConfigError(_GROUPS, f"{problem}optimizer.{_OF_ALL[name]}")
        if name not in takes:
            choices = ["lr_scale", *(n for n in takes if n != "lr" and n not in _OF_ALL)]
            raise UnknownNameError(f"{_GROUPS} of {config.name}", name, choices)
    if options:
        whole = {**config.parsed_options, **options}
        text = ",".join(f"{name}={value!r}" for name, value in whole.items())
        _try_options(_GROUPS, dataclasses.replace(config, options=text, param_groups=()))


def _check_named(config: OptimizerConfig) -> None:
    takes = _takes(config)
    for name in ("momentum", "nesterov", "weight_decay"):
        if getattr(config, name) and name not in takes:
            raise ConfigError(
                f"optimizer.{name}",
                f"has no meaning for {config.name}, got {getattr(config, name)}; unset it, "
                f"or choose a method without it",
            )
    for name in config.parsed_options:
        if name in _BY_FIELD:
            raise ConfigError("optimizer.options", f"must not have {name}: set optimizer.{name}")
        if name not in takes:
            choices = [known for known in takes if known not in _BY_FIELD]
            raise UnknownNameError(f"optimizer.options of {config.name}", name, choices)
    if config.decay_only_matrices and "weight_decay" not in takes:
        problem = f"has no meaning for {config.name}: it has no weight decay"
        raise ConfigError("optimizer.decay_only_matrices", problem)


def _sample() -> list[tuple[str, Tensor]]:
    """Return a parameter without a name and with a gradient, to try an optimizer on."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.ones(2, 2)
    return [("", parameter)]


def _check_patterns(
    groups: Sequence[ParamGroup], names: Sequence[str], frozen: Sequence[str]
) -> None:
    """Raise a ConfigError if a pattern matches no name of a parameter, or none that is left.

    It may match frozen parameters only, which the model may unfreeze later.
    """
    used = {_group_number(name, groups) for name in (*names, *frozen)}
    for number, group in enumerate(groups, 1):
        if number in used:
            continue
        if any(fnmatchcase(name, plain(group.pattern)) for name in names):
            problem = "matches only parameters that an earlier pattern matches; put it first"
        else:
            others = f" and {len(names) - 2} more" if len(names) > 2 else ""
            problem = f"matches no trained parameter; they are {', '.join(names[:2])}{others}"
        raise ConfigError(_GROUPS, f"has the pattern {group.pattern!r}, which {problem}")


def check_for_model(
    config: OptimizerConfig, own: OwnOptimizer | None, model: nn.Module, flat: Tensor
) -> dict[str, Any]:
    """Return the initial state of the optimizer over a model, as a checkpoint would hold it.

    For elementwise optimizers, which accept all models, it is empty and nothing is built.

    Raises:
        ConfigError: if the optimizer does not accept the parameters, or the pattern of a group
            matches none.
    """
    names = [name for name, _ in _parameters_of(model)]
    others = [plain(name) for name, p in model.named_parameters() if not p.requires_grad]
    _check_patterns(config.param_groups, names, others)
    if is_elementwise(config, own):
        return {}
    try:
        optimizer = make_optimizer(config, own, model)([flat])
    except ValueError as error:
        raise ConfigError("optimizer.name", f"{config.name}: {error}") from error
    if isinstance(optimizer, LBFGS):
        raise ConfigError("optimizer", f"cannot be LBFGS: {_REFUSED['lbfgs']}; choose adamw")
    return optimizer.state_dict()
