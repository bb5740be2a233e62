"""Parameters, gradients and float buffers of a model as contiguous tensors.

All trainable parameters become views into one tensor, their gradients views into another, the
float buffers (batch-norm statistics) views into a third. Nothing else in raydl knows an offset.

What a model has beside these, its *non-trainable state*, stays where it is: frozen parameters,
integer buffers, buffers of another dtype than the weights, and masks. No exchange averages it;
``raydl.core.non_trainable.NonTrainableState`` makes it equal in all processes at the start.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raydl.core.non_trainable import (
    NonTrainable,
    NonTrainableState,
    can_be_kept,
    places_of,
    tensor_of,
)
from raydl.errors import ShapeError


class FlatModel:
    """A model whose trained state lives in three flat tensors.

    Args:
        model: changed in place: its parameters and float buffers become views.
        name: for messages.
        non_trainable: names of the non-trainable state, as the first model of the run has it;
            None: this model decides. Which buffers are averaged must be the same in all processes.

    Attributes:
        model: the module itself.
        weights: all trainable parameters, shape [num_parameters].
        gradients: their gradients, shape [num_parameters]; autograd adds into it.
        buffers: the float buffers that exchanges average, shape [num_buffers]: those of the state
            dict, of the dtype of the weights, with values that an exchange takes.
        non_trainable: everything else that the model has.

    Raises:
        ShapeError: no module, nothing to train, parameters of several dtypes or devices, or state
            that is no tensor.
    """

    def __init__(
        self, model: nn.Module, *, name: str = "", non_trainable: Collection[str] | None = None
    ) -> None:
        self._name = name or type(model).__name__
        self.model = model
        _check_module(model, self._name)
        self._parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
        first = _one_kind(list(self._parameters.values()), self._name)
        self._buffers = {
            k: b
            for k, b in _averaged_buffers(model, first.dtype)
            if (k not in non_trainable if non_trainable is not None else is_finite(b))
        }
        self.weights = _gather(list(self._parameters.values()), first)
        self.gradients = torch.zeros_like(self.weights)
        self.buffers = _gather(list(self._buffers.values()), first)
        self.num_reached: list[int] = []
        """By parameter, how often a backward pass has reached it; empty where nobody watches."""
        self._hooks: list[Any] = []
        self._bind()
        # Not by name: a parameter may be registered as a buffer elsewhere.
        flat = {id(tensor) for tensor in (*self._parameters.values(), *self._buffers.values())}
        self.non_trainable = NonTrainableState(
            self._name, {k: p for k, p in places_of(model).items() if id(p.get()) not in flat}
        )

    @property
    def num_parameters(self) -> int:
        """Trainable parameters."""
        return self.weights.numel()

    @property
    def layer_sizes(self) -> list[int]:
        """Elements of each parameter tensor, in the order of the flat weights."""
        return [p.numel() for p in self._parameters.values()]

    @property
    def num_buffers(self) -> int:
        """Elements of all averaged buffers."""
        return self.buffers.numel()

    def _bind(self) -> None:
        weights, buffers = self.named(self.weights, self.buffers)
        gradients, _ = self.named(self.gradients, self.buffers)
        self._views = [(p, weights[k]) for k, p in self._parameters.items()]
        for key, parameter in self._parameters.items():
            parameter.data = weights[key]
            parameter.grad = gradients[key]
        places = places_of(self.model)
        self._buffer_views = [(places[k], b, buffers[k]) for k, b in self._buffers.items()]
        for key, buffer in self._buffers.items():
            buffer.data = buffers[key]

    @staticmethod
    def check(model: nn.Module) -> None:
        """Raise a ShapeError if a model can not be made flat; it stays as it is."""
        _check_module(model, type(model).__name__)
        parameters = [p for p in model.parameters() if p.requires_grad]
        _one_kind(parameters, type(model).__name__)

    def release_gradients(self) -> None:
        """Leave the gradients to autograd, for a loop that zeroes them itself."""
        for handle in self._hooks:
            handle.remove()
        self._hooks, self.num_reached = [], []
        self.gradients = self.weights.new_empty(0)
        for parameter in self._parameters.values():
            parameter.grad = None

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters, in the order of the flat weights."""
        return list(self._parameters.values())

    def watch_gradients(self) -> None:
        """Note from now on which parameters a backward pass reaches."""
        self.num_reached = [0] * len(self._parameters)
        for number, parameter in enumerate(self._parameters.values()):
            bound = parameter.grad
            assert bound is not None
            watch: Any = parameter.register_post_accumulate_grad_hook
            self._hooks.append(watch(self._noting(number, bound)))

    def _noting(self, number: int, bound: Tensor) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            self.num_reached[number] += 1
            if parameter.grad is not bound:  # the model's own code set it to None
                assert parameter.grad is not None
                bound.copy_(parameter.grad)
                parameter.grad = bound

        return note

    def is_reached(self, since: Sequence[int]) -> bytearray:
        """Return, by parameter, 1 if a backward pass has reached it since ``num_reached``."""
        return bytearray(now > before for now, before in zip(self.num_reached, since, strict=True))

    def note_reached(self, is_reached: bytearray) -> None:
        """Note, by parameter, what the backward passes of others have reached."""
        self.num_reached = [
            count + reached for count, reached in zip(self.num_reached, is_reached, strict=True)
        ]

    def unreached(self, since: Sequence[int], span: slice | None = None) -> list[str]:
        """Return the names of the parameters that no backward pass has reached of late.

        Args:
            since: ``num_reached`` as it was then.
            span: those of which a part is in it alone, of the flat parameters; None: all.

        Where nobody watches there are none.
        """
        if not self.num_reached:
            return []
        span = span or slice(0, self.num_parameters)
        if all(now > before for now, before in zip(self.num_reached, since, strict=True)):
            return []
        return [
            name
            for name, now, before, (start, stop) in zip(
                self._parameters, self.num_reached, since, self._ends(), strict=True
            )
            if now == before and start < span.stop and span.start < stop
        ]

    def _ends(self) -> Iterator[tuple[int, int]]:
        """Return where each parameter begins and ends in the flat weights."""
        stops = list(itertools.accumulate(self.layer_sizes))
        return zip([0, *stops[:-1]], stops, strict=True)

    @contextlib.contextmanager
    def without_gradients_of(self, names: Collection[str]) -> Iterator[None]:
        """Let some parameters have no gradient for a while: torch's optimizers pass them over."""
        kept = [(self._parameters[name], self._parameters[name].grad) for name in names]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    def rebind(self) -> None:
        """Take over the values of parameters and buffers that the model replaced.

        ``self.mean = 0.9 * self.mean + x`` and ``p.data = p.data.clamp(-1, 1)`` make tensors of
        their own where the flat tensor had a view; without this no exchange would see them.

        Raises:
            ShapeError: a new one has another shape, dtype or device.
        """
        for parameter, view in self._views:
            if parameter.data_ptr() != view.data_ptr():
                self._take_over(view, parameter)
                parameter.data = view
        for place, buffer, view in self._buffer_views:
            now = place.get()
            if now is not buffer or buffer.data_ptr() != view.data_ptr():
                self._take_over(view, now)
                buffer.data = view
                place.set(buffer)

    def _take_over(self, view: Tensor, value: Tensor | None) -> None:
        is_alike = value is not None and (value.shape, value.dtype, value.device) == (
            view.shape,
            view.dtype,
            view.device,
        )
        if value is None or not is_alike:
            found = "nothing" if value is None else _kind(value)
            raise ShapeError(
                self._name,
                f"replaced a parameter or buffer of {_kind(view)} by {found}; while it trains, "
                f"each keeps its shape, dtype and device",
            )
        view.copy_(value.detach())

    def named(
        self, weights: Tensor, buffers: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return views of flat tensors under the model's own names: (parameters, buffers)."""
        return _views(weights, self._parameters), _views(buffers, self._buffers)

    def state_dict_of(
        self,
        weights: Tensor,
        buffers: Tensor,
        non_trainable: NonTrainable | None = None,
        *,
        copies: bool = True,
    ) -> dict[str, Tensor]:
        """Return the model's whole state dict with other values in it.

        Every tensor is a copy on the CPU, or without ``copies`` a view, to be written at once.
        Names that share one tensor in the model (tied weights) each get the same values.

        Args:
            weights: shape [num_parameters].
            buffers: shape [num_buffers].
            non_trainable: arrays of the non-trainable state, as ``NonTrainableState.changed``
                returns them; what is not among them is as the model has it.
        """
        self.rebind()
        parameter_views, buffer_views = self.named(weights, buffers)
        here = self.non_trainable.tensors()
        others = {key: tensor_of(a, here[key].dtype) for key, a in (non_trainable or {}).items()}
        by_identity = {
            id(tensor): values[key]
            for tensors, values in (
                (self._parameters, parameter_views),
                (self._buffers, buffer_views),
                (here, others),
            )
            for key, tensor in tensors.items()
            if key in values
        }
        state = self.model.state_dict(keep_vars=True)
        found = {key: by_identity.get(id(t), t).detach() for key, t in state.items()}
        return {key: t.cpu().clone() for key, t in found.items()} if copies else found

    def load_non_trainable(self, state: Mapping[str, Tensor], unsaved: NonTrainable) -> None:
        """Take over the non-trainable state of a checkpoint.

        Args:
            state: the model's state dict.
            unsaved: by name, what the state dict does not have.

        Raises:
            ShapeError: a name is missing or a shape differs.
        """
        saved = {
            k: t for k, t in self.non_trainable.tensors().items() if self.non_trainable.is_saved(k)
        }
        for key, tensor in saved.items():  # the shape of a buffer may have changed since
            _require_like(state, key, tensor if isinstance(tensor, nn.Parameter) else None)
        self.non_trainable.load({**unsaved, **{key: state[key] for key in saved}})

    def flatten(self, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (weights, buffers) as flat CPU tensors from a state dict of this model.

        Raises:
            ShapeError: a name is missing or a shape differs.
        """
        return _pick(state, self._parameters), _pick(state, self._buffers)


def is_finite(values: Tensor) -> bool:
    """Whether numbers are finite, and so far from infinity that sums of them are finite, too.

    By their L2 norm, the cheapest look at all of them: in float32 it is infinite from 1.8e19 on.
    """
    flat = values.reshape(-1)
    return math.isfinite(float(torch.dot(flat, flat)))


def _averaged_buffers(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the float buffers that a model saves; one that it does not save is no state of it."""
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    saved -= {id(parameter) for parameter in model.parameters()}  # registered twice
    for key, buffer in model.named_buffers():
        is_kept = id(buffer) in saved and can_be_kept(buffer)
        if is_kept and buffer.is_floating_point() and buffer.dtype == dtype:
            yield key, buffer


def _check_module(model: object, name: str) -> None:
    if not isinstance(model, nn.Module):
        found = f"what should build it returned a value of type {type(model).__name__}"
        raise ShapeError(name, f"must be a torch.nn.Module, {found}")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise ShapeError(
            name,
            "has lazy layers, whose parameters have no shape yet; build it with layers of a known "
            "size, or pass it a batch before it is returned",
        )
    for module in model.modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ShapeError(
                name,
                f"has {type(module).__name__} with extra state (get_extra_state), which no "
                f"checkpoint would hold; keep it in buffers",
            )
    for key, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            found = type(tensor).__name__
            raise ShapeError(name, f"has {key} in its state dict, a {found}; keep it in a buffer")
        if not can_be_kept(tensor):
            raise ShapeError(
                name,
                f"has {key}, {tensor.layout} of {tensor.dtype}, which no checkpoint would hold; "
                f"register it with persistent=False, or make it dense",
            )


def _one_kind(parameters: Sequence[Tensor], name: str) -> Tensor:
    if not parameters:
        raise ShapeError(name, "has no parameter that requires a gradient")
    kinds = {(p.dtype, p.device) for p in parameters}
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ShapeError(name, f"all parameters must share one dtype and device, found {found}")
    return parameters[0]


def _kind(tensor: Tensor) -> str:
    return f"shape {list(tensor.shape)}, {tensor.dtype} on {tensor.device}"


def _gather(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    parts = [t.detach().reshape(-1) for t in tensors]
    if not parts:
        return torch.empty(0, dtype=like.dtype, device=like.device)
    return torch.cat(parts)


def _views(flat: Tensor, shapes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    sizes = [t.numel() for t in shapes.values()]
    pieces = torch.split(flat, sizes) if sizes else ()
    return {k: piece.view(t.shape) for (k, t), piece in zip(shapes.items(), pieces, strict=True)}


def _pick(state: Mapping[str, Tensor], shapes: Mapping[str, Tensor]) -> Tensor:
    for key, tensor in shapes.items():
        _require_like(state, key, tensor)
    parts = [state[key].reshape(-1) for key in shapes]
    return torch.cat(parts) if parts else torch.empty(0)


def _require_like(state: Mapping[str, Tensor], key: str, tensor: Tensor | None) -> None:
    """Raise a ShapeError unless a saved state has a tensor, in the shape of one that is given."""
    if key not in state:
        raise ShapeError(key, "is missing from the saved state")
    if tensor is not None and state[key].shape != tensor.shape:
        raise ShapeError(key, f"has shape {list(tensor.shape)}, saved as {list(state[key].shape)}")
