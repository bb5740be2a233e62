"""Parameters, gradients and float buffers of a model as contiguous tensors.

All trainable parameters become views into one tensor, their gradients views into another,
the float buffers (batch-norm statistics) views into a third. Nothing else in raydl knows
an offset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from raydl.errors import ShapeError


class FlatModel:
    """A model whose state lives in three flat tensors.

    Attributes:
        model: the module itself, changed in place to views.
        weights: all trainable parameters, shape [num_parameters].
        gradients: their gradients, shape [num_parameters]; autograd adds into it.
        buffers: all float buffers of the state dict, shape [num_buffers], same dtype as the
            weights.

    Raises:
        ShapeError: no module, nothing to train, or parameters of several dtypes or devices.
    """

    def __init__(self, model: nn.Module, *, name: str = "") -> None:
        name = name or type(model).__name__
        self.model = model
        _check_module(model, name)
        self._parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
        first = _one_kind(list(self._parameters.values()), name)
        # A buffer that the model does not save, a mask say, is no state of it.
        saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
        self._buffers = {
            k: b
            for k, b in model.named_buffers()
            if b.is_floating_point() and b.dtype == first.dtype and id(b) in saved
        }
        self.weights = _gather(list(self._parameters.values()), first)
        self.gradients = torch.zeros_like(self.weights)
        self.buffers = _gather(list(self._buffers.values()), first)
        self._bind()

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
        """Elements of all float buffers."""
        return self.buffers.numel()

    def _bind(self) -> None:
        weights, buffers = self.named(self.weights, self.buffers)
        gradients, _ = self.named(self.gradients, self.buffers)
        for key, parameter in self._parameters.items():
            parameter.data = weights[key]
            parameter.grad = gradients[key]
        for key, buffer in self._buffers.items():
            buffer.data = buffers[key]

    @staticmethod
    def check(model: nn.Module) -> None:
        """Raise a ShapeError if a model can not be made flat; it stays as it is."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        _one_kind(parameters, type(model).__name__)

    def release_gradients(self) -> None:
        """Leave the gradients to autograd, for a loop that zeroes them itself."""
        self.gradients = self.weights.new_empty(0)
        for parameter in self._parameters.values():
            parameter.grad = None

    def is_bound(self) -> bool:
        """Whether the model's parameters are still views of the flat weights."""
        first = next(iter(self._parameters.values()))
        return first.data_ptr() == self.weights.data_ptr()

    def named(
        self, weights: Tensor, buffers: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return views of flat tensors under the model's own names: (parameters, buffers)."""
        return _views(weights, self._parameters), _views(buffers, self._buffers)

    def state_dict_of(self, weights: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        """Return the model's whole state dict with other weights and buffers in it.

        Every tensor is a copy on the CPU. Names that share one tensor in the model (tied
        weights) each get the same values; what is not trained is taken from the model.

        Args:
            weights: shape [num_parameters].
            buffers: shape [num_buffers].
        """
        parameter_views, buffer_views = self.named(weights, buffers)
        by_identity = {
            id(tensor): view
            for tensors, views in (
                (self._parameters, parameter_views),
                (self._buffers, buffer_views),
            )
            for tensor, view in zip(tensors.values(), views.values(), strict=True)
        }
        state = self.model.state_dict(keep_vars=True)
        return {
            key: by_identity.get(id(tensor), tensor).detach().cpu().clone()
            for key, tensor in state.items()
        }

    def flatten(self, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (weights, buffers) as flat CPU tensors from a state dict of this model.

        Raises:
            ShapeError: a name is missing or a shape differs.
        """
        return _pick(state, self._parameters), _pick(state, self._buffers)


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


def _one_kind(parameters: Sequence[Tensor], name: str) -> Tensor:
    if not parameters:
        raise ShapeError(name, "has no parameter that requires a gradient")
    kinds = {(p.dtype, p.device) for p in parameters}
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ShapeError(name, f"all parameters must share one dtype and device, found {found}")
    return parameters[0]


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
        if key not in state:
            raise ShapeError(key, "is missing from the saved state")
        if state[key].shape != tensor.shape:
            raise ShapeError(
                key, f"has shape {list(tensor.shape)}, saved as {list(state[key].shape)}"
            )
    parts = [state[key].reshape(-1) for key in shapes]
    return torch.cat(parts) if parts else torch.empty(0)
