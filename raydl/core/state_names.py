"""The keys of a model's state dict, and the parameters and buffers that they name.

Hooks of a model may rename the keys, and ``torch.compile`` inserts ``_orig_mod`` into them. So keys
are matched with tensors by identity, which ``state_dict(keep_vars=True)`` preserves. Files have the
*plain* keys, those without ``_orig_mod``, which the model loads as it was before it was compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from raydl.core.non_trainable import Place, places_of, plain
from raydl.errors import ShapeError

_Value = TypeVar("_Value")
_EXACT = 251
"""Whole numbers below this are exact in every dtype of two bytes."""
_RULE = (
    "checkpoints need a state dict whose keys name the parameters and buffers themselves; let "
    "hooks only rename keys, and undo it in load_state_dict, or remove them"
)


def plain_items(items: Iterable[tuple[str, _Value]]) -> Iterator[tuple[str, _Value]]:
    """Yield (name, value) with plain names."""
    return ((plain(name), value) for name, value in items)


def state_of(model: nn.Module, name: str) -> Mapping[str, Any]:
    """Return a model's state dict with the tensors themselves.

    Raises:
        ShapeError: if the model's own ``state_dict`` returns none.
    """
    try:
        state: Any = model.state_dict(keep_vars=True)
    except TypeError as error:
        problem = f"does not accept state_dict(keep_vars=True): {error}; {_RULE}"
        raise ShapeError(name, problem) from error
    if not isinstance(state, Mapping):
        raise ShapeError(name, f"returns a {type(state).__name__} as its state dict; {_RULE}")
    return state


def names_by_key(
    state: Mapping[str, Tensor], places: Mapping[str, Place], name: str
) -> dict[str, str]:
    """Return the name in the model of each tensor of a state dict, by its plain key.

    Keys of tied weights have the same name. A key of any other tensor is left out.

    Args:
        state: the state dict with the tensors themselves.
        places: slots of parameters and buffers, by name.
        name: name of the model, for error messages.

    Raises:
        ShapeError: if two keys differ only in ``_orig_mod``.
    """
    names = {id(place.get()): key for key, place in places.items()}
    found: dict[str, str] = {}
    for key, tensor in state.items():
        if id(tensor) not in names:
            continue
        of_key = found.setdefault(plain(key), names[id(tensor)])
        if of_key != names[id(tensor)]:
            raise ShapeError(name, f"has two tensors called {plain(key)} without _orig_mod")
    return found


def own_keys(model: nn.Module, state: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return a saved state under the model's own keys, for its ``load_state_dict``."""
    own = {plain(key): key for key in model.state_dict()}
    return {own.get(plain(key), key): value for key, value in state.items()}


def check_trained(model: nn.Module) -> None:
    """Raise a ShapeError if the state dict lacks a trained parameter or has a copy of it."""
    name = type(model).__name__
    held = {id(tensor) for tensor in state_of(model, name).values()}
    for key, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            raise ShapeError(name, f"has no {key} in its state dict, or a copy of it; {_RULE}")


def check_round_trip(model: nn.Module, name: str) -> None:
    """Raise a ShapeError unless a model's state dict, once loaded, restores every tensor.

    The check loads values by which the tensors differ, into other memory than the model's own.

    Args:
        model: the model; it has its own tensors and values again afterwards.
        name: name of the model, for error messages.
    """
    state = state_of(model, name)
    places = places_of(model)
    names = names_by_key(state, places, name)
    _check_keys(model, name, state, names, places)
    numbers = {key: number for number, key in enumerate(places, 1)}
    trial = {key: _trial_values(t, numbers[names[plain(key)]]) for key, t in state.items()}
    by_name = {names[plain(key)]: values for key, values in trial.items()}
    tensors = {key: place.get() for key, place in places.items()}
    memory = {key: tensor.data for key, tensor in tensors.items() if tensor is not None}
    try:
        for key, data in memory.items():
            tensors[key].data = torch.zeros_like(data)  # type: ignore[union-attr]
        with torch.random.fork_rng(devices=()):
            model.load_state_dict(trial)
        lost = [k for k, values in by_name.items() if not _are_equal(places[k].get(), values)]
    except Exception as error:  # any error of the user's hooks
        problem = " ".join(str(error).split())
        raise ShapeError(name, f"cannot load its own state dict: {problem}; {_RULE}") from error
    finally:
        for key, data in memory.items():
            tensors[key].data = data  # type: ignore[union-attr]
            places[key].set(tensors[key])  # type: ignore[arg-type]
    if lost:
        raise ShapeError(name, f"does not get {lost[0]} back from its own state dict; {_RULE}")


def _check_keys(
    model: nn.Module,
    name: str,
    state: Mapping[str, Tensor],
    names: Mapping[str, str],
    places: Mapping[str, Place],
) -> None:
    """Raise a ShapeError unless the keys name all persistent tensors of a model and no others."""
    for key in state:
        if plain(key) not in names:
            raise ShapeError(
                name,
                f"has {key} in its state dict, which is none of its parameters and buffers but "
                f"made from one; {_RULE}",
            )
    named = set(names.values())
    passing = {
        id(module._buffers.get(key))
        for module in model.modules()
        for key in module._non_persistent_buffers_set
    }
    for key, place in places.items():
        if key not in named and id(place.get()) not in passing:
            raise ShapeError(name, f"has no {key} in its state dict; {_RULE}")


def _trial_values(tensor: Tensor, number: int) -> Tensor:
    """Return values, none of them zero, by which tensors of different numbers differ.

    Those of a dtype of one byte may be alike.
    """
    shape, dtype = tensor.shape, tensor.dtype
    is_wide = dtype.itemsize > 2
    kind = torch.float32 if is_wide and dtype.is_floating_point else torch.int64
    values = torch.arange(number, number + tensor.numel(), dtype=kind, device=tensor.device)
    if not is_wide:
        values = values.remainder_(_EXACT if dtype.itemsize > 1 else 15).add_(1)
    return values.reshape(shape).to(dtype)


def _are_equal(tensor: Tensor | None, values: Tensor) -> bool:
    """Whether a tensor has the shape, the dtype and the bits of some values."""
    if tensor is None or (tensor.shape, tensor.dtype) != (values.shape, values.dtype):
        return False
    bits, expected = (t.detach().reshape(-1).view(torch.uint8) for t in (tensor, values))
    return torch.equal(bits, expected)
