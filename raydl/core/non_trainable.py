"""The non-trainable state of a model: what is neither trained nor averaged.

Frozen parameters, integer buffers, buffers of another dtype than the weights, and masks. No
exchange averages it; it is made equal in all processes at the start, and kept in checkpoints.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raydl.errors import ShapeError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element, the integers that its bits can be read as."""
NonTrainable = Mapping[str, np.ndarray]
"""Values of the non-trainable state, or of a part of it, by the model's own names."""
_NOT_KEPT = {torch.complex128, torch.complex32}
_BLOCK = 1 << 24
"""Elements of which a checksum is taken at a time."""


class Place:
    """Slot of a parameter or buffer in its module: a model may put another tensor there."""

    def __init__(self, tensors: dict[str, Any], key: str, *, is_saved: bool) -> None:
        self._tensors = tensors
        self._key = key
        self.is_saved = is_saved
        """Whether the state dict has it."""

    def get(self) -> Tensor | None:
        """Return what is there now."""
        tensor: Tensor | None = self._tensors.get(self._key)
        return tensor

    def set(self, tensor: Tensor) -> None:
        """Put a tensor there."""
        self._tensors[self._key] = tensor


class NonTrainableState:
    """Tensors of a model that are neither trained nor averaged.

    Every process begins with that of the run's first model, as torch's DDP makes all ranks equal
    when it is constructed. From then on each replica keeps its own: frozen parameters are never
    sent, and of buffers that can not be averaged (a counter of batches) the center has those of
    one worker.

    Values travel as NumPy arrays under the model's own names; a dtype that NumPy lacks, bfloat16
    say, as integers of its size.

    Args:
        name: of the model, for messages.
        places: of each tensor, by name.
    """

    def __init__(self, name: str, places: Mapping[str, Place]) -> None:
        self._name = name
        self._places = dict(places)
        self._prints: dict[str, Any] = {}
        self._base: dict[str, np.ndarray] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return tuple(self._places)

    def is_saved(self, name: str) -> bool:
        """Whether the model's state dict has it."""
        return self._places[name].is_saved

    def unsaved(self) -> dict[str, np.ndarray]:
        """Return copies of what the state dict does not have."""
        return {k: _array_of(t) for k, t in self.tensors().items() if not self.is_saved(k)}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors themselves."""
        found = {name: place.get() for name, place in self._places.items()}
        return {name: t for name, t in found.items() if t is not None and can_be_kept(t)}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return copies of all of it."""
        return {name: _array_of(tensor) for name, tensor in self.tensors().items()}

    def load(self, arrays: Mapping[str, Any]) -> None:
        """Take over values; tensors that are not named stay as they are.

        Args:
            arrays: arrays, or tensors, by name.

        Raises:
            ShapeError: the model has no such tensor, or one of another shape or dtype.
        """
        for name, values in arrays.items():
            if name not in self._places:
                raise ShapeError(
                    self._name,
                    f"has no {name}, which the run's first model has; build all models alike",
                )
            tensor = self._places[name].get()
            if tensor is not None:  # else a cache that the model has dropped
                self._load(name, tensor, values)

    def load_first(self, arrays: NonTrainable) -> None:
        """Take over all of the run's first model, and mark it.

        Raises:
            ShapeError: this is another model.
        """
        others = [k for k in self.tensors() if self.is_saved(k) and k not in arrays]
        if others:
            raise ShapeError(
                self._name,
                f"has {others[0]}, which the run's first model does not have; build all models "
                f"alike",
            )
        self.load(arrays)
        self.mark()

    def _load(self, name: str, tensor: Tensor, values: Any) -> None:
        if isinstance(tensor, nn.Parameter) and tuple(values.shape) != tuple(tensor.shape):
            raise ShapeError(
                self._name,
                f"has {name} of shape {list(tensor.shape)}, the run's first model of "
                f"{list(values.shape)}; build all models alike",
            )
        try:
            found = tensor_of(values, tensor.dtype)
        except RuntimeError as error:  # other bytes an element
            if not self.is_saved(name):  # a cache, which may be of any kind
                self._places[name].set(torch.as_tensor(values).to(tensor.device, copy=True))
                return
            raise ShapeError(
                self._name,
                f"has {name} of {tensor.dtype}, the run's first model of {values.dtype}; build "
                f"all models alike",
            ) from error
        with torch.no_grad():
            if found.shape == tensor.shape and not _shares_elements(tensor):
                tensor.copy_(found)
            else:  # a buffer that grows, or one that was expanded
                tensor.data = found.to(tensor.device)

    # what has changed

    def mark(self) -> None:
        """Remember the state as it is now; what has changed is what differs from it."""
        self._prints, self._base = {}, {}
        for name, tensor in self.tensors().items():
            if isinstance(tensor, nn.Parameter):
                self._prints[name] = _fingerprint(tensor)
            else:
                self._base[name] = _array_of(tensor)

    def changed(self) -> dict[str, np.ndarray]:
        """Return copies of what differs from the marked state, as far as the state dict has it.

        Frozen parameters among them are those that the model moves by itself, a teacher's say.
        """
        return {**self._changed_parameters(), **self.changed_buffers()}

    def changed_buffers(self) -> dict[str, np.ndarray]:
        """Return copies of the buffers of the state dict that differ from the marked state."""
        now = {k: _array_of(t) for k, t in self.buffers().items() if self.is_saved(k)}
        return {k: a for k, a in now.items() if k in self._base and _differs(a, self._base[k])}

    def own(self) -> dict[str, np.ndarray]:
        """Return copies of what a replica needs to go on: all buffers, and changed parameters.

        Not only the changed buffers: one that counts in a ring comes back to where it began.
        """
        buffers = {name: _array_of(tensor) for name, tensor in self.buffers().items()}
        return {**self._changed_parameters(), **buffers}

    def marked(self, name: str) -> np.ndarray | None:
        """Return a buffer as it was marked; None: there was none."""
        return self._base.get(name)

    def moved_parameters(self) -> tuple[str, ...]:
        """Return the names of frozen parameters that differ from the marked state."""
        if not self._prints:
            return ()
        tensors = self.tensors()
        return tuple(k for k, before in self._prints.items() if _fingerprint(tensors[k]) != before)

    def _changed_parameters(self) -> dict[str, np.ndarray]:
        tensors = self.tensors()
        return {name: _array_of(tensors[name]) for name in self.moved_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers among the tensors."""
        return {k: t for k, t in self.tensors().items() if not isinstance(t, nn.Parameter)}


class BufferNews:
    """Changes of an non-trainable state's buffers that a receiver does not have yet.

    They are compared where they are, and the device is waited for once.

    Args:
        non_trainable: whose marked state is known.
    """

    def __init__(self, non_trainable: NonTrainableState) -> None:
        self._non_trainable = non_trainable
        self._told: dict[str, Tensor] = {}

    def pop_changes(self) -> dict[str, np.ndarray]:
        """Return copies of the buffers of the state dict that differ from what was told of them."""
        state = self._non_trainable
        now = {k: t.detach() for k, t in state.buffers().items() if state.is_saved(k)}
        is_news = _are_true([_differs_from(t, self._told_of(k, t)) for k, t in now.items()])
        news = {k: t for (k, t), is_new in zip(now.items(), is_news, strict=True) if is_new}
        self._told.update({k: t.clone() for k, t in news.items()})
        return {k: _array_of(t) for k, t in news.items()}

    def _told_of(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return what is known of a buffer, on its device."""
        marked = self._non_trainable.marked(name)
        if name not in self._told and marked is not None:
            with contextlib.suppress(RuntimeError):  # it has another dtype by now
                self._told[name] = tensor_of(marked, tensor.dtype).to(tensor.device)
        return self._told.get(name)


def places_of(model: nn.Module) -> dict[str, Place]:
    """Return where each parameter and buffer is, by name; one that has two names, by the first."""
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    found: dict[str, Place] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is None or id(tensor) in seen or not can_be_kept(tensor):
                    continue
                seen.add(id(tensor))
                name = f"{prefix}.{key}" if prefix else key
                found[name] = Place(tensors, key, is_saved=id(tensor) in saved)
    return found


def can_be_kept(tensor: Tensor) -> bool:
    """Whether arrays and checkpoints can hold a tensor: sparse ones, say, they can not."""
    return tensor.layout == torch.strided and tensor.dtype not in _NOT_KEPT


def as_tensors(arrays: NonTrainable) -> dict[str, Tensor]:
    """Return copies of the arrays as tensors, by name."""
    return {name: torch.tensor(array) for name, array in arrays.items()}


def tensor_of(values: Any, dtype: torch.dtype) -> Tensor:
    """Return an array of ``_array_of``, or a tensor, as a tensor of a dtype.

    Raises:
        RuntimeError: its elements have another size.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    if tensor.dtype == dtype:
        return tensor
    if tensor.dtype not in _INTEGERS.values() or tensor.element_size() != dtype.itemsize:
        raise RuntimeError(f"{tensor.dtype} is no form of {dtype}")
    return tensor.view(dtype)


def _array_of(tensor: Tensor) -> np.ndarray:
    """Return a copy as an array; a dtype that NumPy lacks as integers of its size."""
    tensor = tensor.detach().resolve_conj().resolve_neg().to("cpu", copy=True).contiguous()
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(_INTEGERS[tensor.element_size()]).numpy()


def _shares_elements(tensor: Tensor) -> bool:
    """Whether several elements are one in memory, as ``expand`` makes them: none can be written."""
    return any(
        size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _differs_from(tensor: Tensor, other: Tensor | None) -> Tensor:
    """Return, on the device of a tensor, whether it differs from another one in shape or a bit."""
    if other is None or _kind(tensor) != _kind(other):
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return (_bits(tensor) != _bits(other)).any()


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _are_true(flags: list[Tensor]) -> list[bool]:
    """Return flags of a device as values of the host, all at once."""
    found: list[bool] = (
        torch.stack([f.to(flags[0].device) for f in flags]).tolist() if flags else []
    )
    return found


def _bits(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as integers, in one row."""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    return flat.view(_INTEGERS[tensor.element_size()])


def _differs(array: np.ndarray, other: np.ndarray | None) -> bool:
    """Whether two arrays differ in shape or in any bit."""
    if other is None or array.shape != other.shape:
        return True
    return not np.array_equal(array.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))


def _fingerprint(tensor: Tensor) -> tuple[Any, ...]:
    """Return what tells whether a frozen parameter was moved: its shape, a checksum of its bits."""
    bits = _bits(tensor.detach())
    checksum = _crc32(bits) if bits.device.type == "cpu" else _weighted_sum(bits)
    return tuple(tensor.shape), checksum


def _crc32(bits: Tensor) -> int:
    crc = 0
    for block in torch.split(bits, _BLOCK):
        crc = zlib.crc32(block.numpy().data, crc)
    return crc


def _weighted_sum(bits: Tensor) -> int:
    """Return a checksum that a device takes by itself: each element counts by its place."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, block in enumerate(torch.split(bits, _BLOCK)):
        places = torch.arange(block.numel(), device=bits.device).add_(number * _BLOCK)
        total += (2 * places + 1).mul_(block).sum()
    return int(total)
