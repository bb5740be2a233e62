"""The inner optimizer: any of torch.optim by name, or one of the user's own, on flat storage.

What an optimizer holds depends on what it looks at:

- Elementwise ones (SGD, the Adam family, …) hold the flat tensor itself, one for the whole
  model or for a span of the center. With a weight decay for matrices alone they hold views of
  it, one for each run of neighbouring layers of a kind.
- All others (Adafactor, Muon, whatever is not known) look at the shape of a parameter. They
  hold the model's own parameters, which are views of the flat tensor, as their gradients are.

A parameter that a step's loss did not reach has no gradient, and torch then leaves it and its
state alone. A flat tensor can not: with the first such step the elementwise ones change over to
the model's own parameters, and take their state along (``split_by_parameter``).

A hook of torch's own runs before every step: it hands the gradient of the flat tensor down to
the views, and shortens one that is too long, over all groups together. One exploding batch
would else throw a replica out, and the center after it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from raydl.config import OptimizerConfig
from raydl.config.custom_code import load_own
from raydl.core.rules import lr_factor
from raydl.errors import ConfigError, UnknownNameError

OwnOptimizer = Callable[[list[Tensor]], Optimizer]
"""The user's own: from parameters to an optimizer over them, ``torch.optim.AdamW`` for example."""

_REFUSED = {
    "lbfgs": "it asks for the loss several times in a step",
    "sparseadam": "it takes sparse gradients only, and those of a replica are dense",
}
OPTIMIZERS: dict[str, type[Optimizer]] = {
    name.lower(): found
    for name, found in sorted(vars(torch.optim).items())
    if isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer
    if name.lower() not in _REFUSED
}
"""Every optimizer of torch.optim that can be named, in lower case."""

ELEMENTWISE = frozenset(
    {
        "adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop",
        "rprop", "sgd",
    }
)  # fmt: skip
"""Optimizers that ignore a parameter's shape, and so are the same on any slice of it."""

_BY_FIELD = ("lr", "momentum", "nesterov", "weight_decay")
"""Settings that have a field of their own in ``raydl.config.OptimizerConfig``."""


def make_optimizer(
    config: OptimizerConfig, own: OwnOptimizer | None = None, model: nn.Module | None = None
) -> Callable[[list[Tensor]], Optimizer]:
    """Return a function that builds the configured optimizer over one flat tensor.

    The gradient is read off the flat tensor's ``grad`` at each step. Given several tensors, the
    model's own parameters, the function builds it over these.

    Args:
        config: the settings.
        own: the user's own, instead of the named.
        model: whose parameters the flat tensor holds, in their order; they are views of it by
            the time the function is called. Needed for what looks at layers: an optimizer that
            is not elementwise, a weight decay for matrices alone.
    """

    def build(tensors: list[Tensor]) -> Optimizer:
        if not is_elementwise(config, own):
            optimizer = _over(_parameters_of(model), config, own)
        elif config.decay_only_matrices and len(tensors) == 1:
            optimizer = _over_runs(tensors[0], _parameters_of(model), config)
        else:
            optimizer = _over(tensors, config, own)
        if config.clip_grad_norm is not None:
            optimizer.register_step_pre_hook(_shorten(config.clip_grad_norm))
        return optimizer

    return build


def _parameters_of(model: nn.Module | None) -> list[Tensor]:
    assert model is not None, "an optimizer that looks at layers needs the model"
    return [p for p in model.parameters() if p.requires_grad]


def _over(tensors: list[Tensor], config: OptimizerConfig, own: OwnOptimizer | None) -> Optimizer:
    """Return the optimizer over tensors whose gradients are in place when it steps."""
    if own is None:
        groups = _groups([(t, t.ndim > 1) for t in tensors], config)
        return OPTIMIZERS[config.name](groups, **_settings(config))
    made: Any = own(tensors)
    if not isinstance(made, Optimizer) or "lr" not in made.param_groups[0]:
        raise ConfigError(
            "optimizer.name",
            f"{config.name} must return a torch.optim.Optimizer with an lr, it returned a "
            f"{type(made).__name__}",
        )
    optimizer: Optimizer = made
    highest = _highest_lr(optimizer)
    for group in optimizer.param_groups:  # groups keep their rates relative to each other
        group["lr_share"] = float(group["lr"]) / highest if highest else 1.0
    return optimizer


def _highest_lr(optimizer: Optimizer) -> float:
    return max(float(group["lr"]) for group in optimizer.param_groups)


def _over_runs(flat: Tensor, parameters: list[Tensor], config: OptimizerConfig) -> Optimizer:
    """Return the optimizer over views of the flat tensor, one for each run of layers of a kind."""
    views, slices, start = [], [], 0
    for is_matrix, layers in itertools.groupby(parameters, key=lambda p: p.ndim > 1):
        stop = start + sum(p.numel() for p in layers)
        views.append((flat[start:stop], is_matrix))
        slices.append(slice(start, stop))
        start = stop
    assert start == flat.numel(), "the flat tensor holds the whole model"
    optimizer = OPTIMIZERS[config.name](_groups(views, config), **_settings(config))

    def hand_down(*_: Any) -> None:
        assert flat.grad is not None
        for (view, _is_matrix), part in zip(views, slices, strict=True):
            view.grad = flat.grad[part]

    optimizer.register_step_pre_hook(hand_down)
    return optimizer


def _groups(tensors: list[tuple[Tensor, bool]], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return the parameter groups of (tensor, whether it is of matrices)."""
    if not config.decay_only_matrices:
        return [{"params": [t for t, _ in tensors]}]
    decayed = [t for t, is_matrix in tensors if is_matrix]
    others = [t for t, is_matrix in tensors if not is_matrix]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _shorten(max_norm: float) -> Callable[..., None]:
    """Return a hook that shortens the gradient of all groups together to ``max_norm``."""

    def shorten(optimizer: Optimizer, *_: Any) -> None:
        parameters = parameters_of(optimizer)
        if len(parameters) > 1 or parameters[0].is_cuda:
            nn.utils.clip_grad_norm_(parameters, max_norm)
            return
        # The same of one tensor, without another pass over a gradient that is short enough: on a
        # GPU to look at the length would be to wait for it.
        gradient = parameters[0].grad
        if gradient is not None:
            share = max_norm / (torch.linalg.vector_norm(gradient) + 1e-6)
            if share < 1:
                gradient.mul_(share)

    return shorten


def is_by_parameter(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Whether an optimizer holds a model's own parameters, rather than a flat tensor of them."""
    own = {id(parameter) for parameter in parameters}
    return all(id(tensor) in own for tensor in parameters_of(optimizer))


def split_by_parameter(
    optimizer: Optimizer, make: Callable[[list[Tensor]], Optimizer], parameters: list[Tensor]
) -> Optimizer:
    """Return an optimizer over the parameters that goes on as one over the flat tensor would.

    Args:
        optimizer: elementwise, over the flat tensor that the parameters are views of, or over
            views of it.
        make: builds it.
        parameters: of the model, in the order of the flat tensor.
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
    """Return a value of an optimizer's state for each of the parameters in a tensor."""
    if not isinstance(value, Tensor):
        return [value] * len(parameters)
    if value.shape != tensor.shape:  # a count of steps
        return [value.clone() for _ in parameters]
    parts = torch.split(value, [p.numel() for p in parameters])
    return [part.view(p.shape).clone() for part, p in zip(parts, parameters, strict=True)]


def leaves_what_has_no_gradient(config: OptimizerConfig, own: OwnOptimizer | None = None) -> bool:
    """Whether a step along a zero gradient changes nothing: plain SGD, with no decay."""
    is_plain = config.name == "sgd" and own is None
    return is_plain and not config.momentum and not config.weight_decay


def no_gradient_text(names: Sequence[str]) -> str:
    """Return why a model can not be trained by a method whose optimizer is at the center."""
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"the loss did not reach the parameter {names[0]}{others}, which an optimizer at the "
        f"center would decay or move all the same; take a method with local steps (local-sgd), "
        f"an optimizer without momentum and weight decay, or let all parameters take part in the "
        f"loss"
    )


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return all tensors that an optimizer moves, in the order of its groups."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def is_elementwise(config: OptimizerConfig, own: OwnOptimizer | None = None) -> bool:
    """Whether the optimizer looks at no parameter's shape; of one's own it is rarely known."""
    if own is None:
        return config.name in ELEMENTWISE
    return _unwrapped(own) in [OPTIMIZERS[name] for name in ELEMENTWISE]


def _unwrapped(own: OwnOptimizer) -> OwnOptimizer:
    while isinstance(own, functools.partial):
        own = own.func
    return own


def _takes(config: OptimizerConfig) -> dict[str, inspect.Parameter]:
    """Return what the constructor of a named optimizer takes, but for the parameters."""
    arguments = dict(inspect.signature(OPTIMIZERS[config.name]).parameters)
    del arguments["params"]
    return arguments


def _settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return the arguments of a named optimizer; what is unset is its own default."""
    takes = _takes(config)
    fields = {name: getattr(config, name) for name in _BY_FIELD if name in takes}
    given = {name: value for name, value in fields.items() if value is not None}
    return {**given, "lr": config.lr or 0.0, **config.parsed_options}


def lr_at(config: OptimizerConfig, share_done: float, *, num_cuts: int = 0) -> float:
    """Return the learning rate at a share of the run, 0..1.

    Args:
        config: the settings, their ``lr`` filled in.
        share_done: of the run's samples, by all workers.
        num_cuts: how often the center was found to stand still, for the schedule ``plateau``.
    """
    assert config.lr is not None
    factor = lr_factor(
        config.lr_schedule,
        share_done,
        warmup=config.warmup,
        milestones=config.milestone_shares,
        gamma=config.gamma,
    )
    return float(config.lr * factor * config.gamma**num_cuts)


# before any actor starts


def as_config(
    optimizer: OptimizerConfig | OwnOptimizer | str | None,
    make_optimizer: OwnOptimizer | None = None,
) -> tuple[OptimizerConfig, OwnOptimizer | None]:
    """Return the settings that a user's optimizer stands for, and the function that builds it.

    Args:
        optimizer: a name, settings, or a function of parameters.
        make_optimizer: a function of parameters, where ``optimizer`` has the settings.

    Raises:
        ConfigError: one of them is of another kind, or they contradict each other.
    """
    if isinstance(optimizer, str):
        optimizer = OptimizerConfig(name=optimizer)
    if optimizer is None or isinstance(optimizer, OptimizerConfig):
        return _with_own(optimizer or OptimizerConfig(), make_optimizer)
    if not callable(optimizer):
        raise ConfigError(
            "optimizer",
            f"must be a name, an OptimizerConfig or a function of parameters, "
            f"got a {type(optimizer).__name__}",
        )
    if make_optimizer is not None:
        raise ConfigError(
            "make_optimizer", "and a function as optimizer exclude each other; give one"
        )
    return _with_own(OptimizerConfig(), optimizer)


def _with_own(config: OptimizerConfig, own: Any) -> tuple[OptimizerConfig, OwnOptimizer | None]:
    if own is None:
        return config, None
    if not callable(own):
        kind = type(own).__name__
        raise ConfigError("make_optimizer", f"must be a function of parameters, got a {kind}")
    if config.name != OptimizerConfig().name:
        raise ConfigError(
            "make_optimizer",
            f"and optimizer.name {config.name} exclude each other; leave the name out",
        )
    return dataclasses.replace(config, name=_name_of(own)), own


def _name_of(own: OwnOptimizer) -> str:
    """Return how a record of a run names a function; a command can find most by that again."""
    if isinstance(own, functools.partial):
        return f"functools:partial({getattr(own.func, '__name__', '…')})"
    kind = own if hasattr(own, "__qualname__") else type(own)
    return f"{kind.__module__}:{kind.__qualname__}"


def own_of(config: OptimizerConfig) -> OwnOptimizer | None:
    """Return what ``module:function`` names, or None for a name of torch.optim.

    Raises:
        ConfigError: it can not be imported, or is no function.
        UnknownNameError: torch.optim has no such optimizer.
    """
    if ":" in config.name:
        found = load_own("optimizer.name", config.name)
        if not callable(found):
            raise ConfigError("optimizer.name", f"{config.name} is no function of parameters")
        return found  # type: ignore[no-any-return]
    if config.name in _REFUSED:
        raise ConfigError(
            "optimizer.name", f"can not be {config.name}: {_REFUSED[config.name]}; take adamw"
        )
    if config.name not in OPTIMIZERS:
        raise UnknownNameError("optimizer.name", config.name, OPTIMIZERS)
    return None


def default_lr(config: OptimizerConfig, own: OwnOptimizer | None) -> float:
    """Return the learning rate that an optimizer has by itself, the highest of its groups.

    Raises:
        ConfigError: one of the user's own does not tell it without the model.
    """
    if own is None:
        return float(_takes(config)["lr"].default)
    try:
        return _highest_lr(_over(_sample(), config, own))
    except ConfigError:
        raise
    except Exception as error:  # whatever a function may do that counts on a whole model
        raise ConfigError(
            "optimizer.lr",
            f"must be set for {config.name}, which does not take a single parameter on trial "
            f"({type(error).__name__}: {error}); give it as --lr, or in Python as "
            f"optimizer=OptimizerConfig(lr=...) beside make_optimizer=...",
        ) from error


def check_optimizer(config: OptimizerConfig, own: OwnOptimizer | None) -> None:
    """Raise a ConfigError if the optimizer does not take its settings."""
    if own is not None:
        _check_own(config)
        _check_warmup(config, own)
        return
    takes = _takes(config)
    for name in ("momentum", "nesterov", "weight_decay"):
        if getattr(config, name) and name not in takes:
            raise ConfigError(
                f"optimizer.{name}",
                f"has no meaning for {config.name}, got {getattr(config, name)}; unset it, "
                f"or take a method without it",
            )
    for name in config.parsed_options:
        if name in _BY_FIELD:
            raise ConfigError("optimizer.options", f"can not hold {name}: set optimizer.{name}")
        if name not in takes:
            choices = [known for known in takes if known not in _BY_FIELD]
            raise UnknownNameError(f"optimizer.options of {config.name}", name, choices)
    if config.decay_only_matrices and "weight_decay" not in takes:
        raise ConfigError(
            "optimizer.decay_only_matrices", f"has no meaning for {config.name}: it has no decay"
        )
    _check_warmup(config, own)
    if config.options:
        _try_step(config)


def _check_warmup(config: OptimizerConfig, own: OwnOptimizer | None) -> None:
    is_rprop = config.name == "rprop" if own is None else _unwrapped(own) is torch.optim.Rprop
    if is_rprop and config.warmup > 0:
        raise ConfigError(
            "optimizer.warmup",
            f"must be 0 for rprop, which takes its step sizes from the rate of the first step, "
            f"got {config.warmup}",
        )


def _check_own(config: OptimizerConfig) -> None:
    for name in ("momentum", "nesterov", "weight_decay", "options", "decay_only_matrices"):
        if getattr(config, name):
            raise ConfigError(
                f"optimizer.{name}",
                f"is for an optimizer by name, {config.name} is your own: set it there, and "
                f"take a method without it",
            )


def _sample() -> list[Tensor]:
    """Return a parameter with a gradient, to try an optimizer on."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.ones(2, 2)
    return [parameter]


def _try_step(config: OptimizerConfig) -> None:
    """Take a step over a sample: what the constructor or the step refuses is told now."""
    try:
        _over(_sample(), config, None).step()
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(
            "optimizer.options", f"{config.options!r} is not taken by {config.name}: {error}"
        ) from error


def check_for_model(
    config: OptimizerConfig, own: OwnOptimizer | None, model: nn.Module, flat: Tensor
) -> dict[str, Any]:
    """Return what a checkpoint would hold of the optimizer over this model; often nothing yet.

    Raises:
        ConfigError: it does not take the parameters.
    """
    if is_elementwise(config, own):  # those take all; torch's first optimizer loads for seconds
        return {}
    try:
        optimizer = make_optimizer(config, own, model)([flat])
    except ValueError as error:
        raise ConfigError("optimizer.name", f"{config.name}: {error}") from error
    if isinstance(optimizer, LBFGS):
        raise ConfigError("optimizer", f"can not be LBFGS: {_REFUSED['lbfgs']}; take adamw")
    return optimizer.state_dict()
