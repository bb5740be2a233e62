"""The non-trainable state of a model: tensors that are neither trained nor averaged.

These are frozen parameters, and all buffers except running statistics. Exchanges do not average
them. All processes start with equal ones, and checkpoints hold them.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from raydl.errors import ShapeError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by bytes per element, to view other dtypes as bits."""
NonTrainable = Mapping[str, np.ndarray]
"""Values of the non-trainable state, or of a part of it, by the names in the model."""
_NOT_KEPT = {torch.complex128, torch.complex32}
_COMPILED = "_orig_mod"
_WITHOUT = re.compile(rf"(?<![^.]){_COMPILED}\.")
_BLOCK = 1 << 24
"""Elements per step of a checksum."""


def plain(name: str) -> str:
    """Return the name of a tensor without ``_orig_mod``, which ``torch.compile`` inserts."""
    return name if _COMPILED not in name else _WITHOUT.sub("", name)


class Place:
    """Slot of a parameter or buffer in its module; a model may assign another tensor to it."""

    def __init__(self, tensors: dict[str, Any], key: str, *, is_saved: bool) -> None:
        self._tensors = tensors
        self._key = key
        self.is_saved = is_saved
        """Whether the state dict contains it."""

    def get(self) -> Tensor | None:
        """Return the present tensor."""
        tensor: Tensor | None = self._tensors.get(self._key)
        return tensor

    def set(self, tensor: Tensor) -> None:
        """Assign a tensor."""
        self._tensors[self._key] = tensor


class NonTrainableState:
    """Tensors of a model that are neither trained nor averaged.

    Every process starts with the state of the run's first model, as all ranks of torch's DDP do.
    From then on each replica keeps its own: frozen parameters are never sent, and the center has
    the buffers (a queue, a batch counter) of the worker of rank 0.

    Values are sent as NumPy arrays by the names in the model. A dtype that NumPy lacks, such as
    bfloat16, is sent as integers of the same size.

    Args:
        name: name of the model, for error messages.
        places: slot of each tensor, by name.
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
        """Whether the model's state dict contains a tensor."""
        return self._places[name].is_saved

    def unsaved(self) -> dict[str, np.ndarray]:
        """Return copies of the tensors that are not in the state dict."""
        return {k: _array_of(t) for k, t in self.tensors().items() if not self.is_saved(k)}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors themselves, by name."""
        tensors = {name: place.get() for name, place in self._places.items()}
        return {name: t for name, t in tensors.items() if t is not None and can_be_kept(t)}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return copies of all tensors."""
        return {name: _array_of(tensor) for name, tensor in self.tensors().items()}

    def load(self, arrays: Mapping[str, Any]) -> None:
        """Load values; tensors that are not named keep their values.

        Args:
            arrays: arrays or tensors, by name.

        Raises:
            ShapeError: if the model lacks a tensor, or has it with another shape or dtype.
        """
        for key, values in arrays.items():
            name = plain(key)  # earlier versions saved the names of a compiled model
            if name not in self._places:
                self._refuse(f"has no {name}, but the run's first model has it")
            tensor = self._places[name].get()
            if tensor is not None:  # else a cache that the model has dropped
                self._load(name, tensor, values)

    def load_first(self, arrays: NonTrainable) -> None:
        """Load the state of the run's first model and mark it.

        Raises:
            ShapeError: if this model differs from the first one.
        """
        others = [k for k in self.tensors() if self.is_saved(k) and k not in arrays]
        if others:
            self._refuse(f"has {others[0]}, but the run's first model lacks it")
        self.load(arrays)
        self.mark()

    def _load(self, name: str, tensor: Tensor, values: Any) -> None:
        if isinstance(tensor, nn.Parameter) and tuple(values.shape) != tuple(tensor.shape):
            self._refuse(
                f"has {name} of shape {list(tensor.shape)}, but the run's first model has shape "
                f"{list(values.shape)}"
            )
        try:
            loaded = tensor_of(values, tensor.dtype)
        except RuntimeError:  # elements of another size
            if self.is_saved(name):
                self._refuse(
                    f"has {name} of {tensor.dtype}, but the run's first model has {values.dtype}"
                )
            # A cache may be of any kind.
            self._places[name].set(torch.as_tensor(values).to(tensor.device, copy=True))
            return
        with torch.no_grad():
            if loaded.shape == tensor.shape and not shares_elements(tensor):
                tensor.copy_(loaded)
            else:  # a buffer that grows, or an expanded one
                tensor.data = loaded.to(tensor.device)

    def _refuse(self, problem: str) -> NoReturn:
        raise ShapeError(self._name, f"{problem}; build the same model in all processes")

    # changes since the start

    def mark(self) -> None:
        """Remember the present state, to find later changes."""
        self._prints, self._base = {}, {}
        for name, tensor in self.tensors().items():
            if isinstance(tensor, nn.Parameter):
                self._prints[name] = _fingerprint(tensor)
            else:
                self._base[name] = _array_of(tensor)

    def changed(self) -> dict[str, np.ndarray]:
        """Return copies of the tensors in the state dict that differ from the marked state.

        They include frozen parameters that the model itself updates, such as those of a teacher.
        """
        return {**self._changed_parameters(), **self.changed_buffers()}

    def changed_buffers(self) -> dict[str, np.ndarray]:
        """Return copies of the buffers of the state dict that differ from the marked state."""
        now = {k: _array_of(t) for k, t in self.buffers().items() if self.is_saved(k)}
        return {k: a for k, a in now.items() if k in self._base and _differs(a, self._base[k])}

    def own(self) -> dict[str, np.ndarray]:
        """Return copies of the state that a resumed replica needs: all buffers, changed parameters.

        Changed buffers alone are not enough: a cyclic counter returns to its marked value.
        """
        buffers = {name: _array_of(tensor) for name, tensor in self.buffers().items()}
        return {**self._changed_parameters(), **buffers}

    def marked(self, name: str) -> np.ndarray | None:
        """Return the marked value of a buffer, or None if it did not exist."""
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


class BufferChanges:
    """Changes of the non-trainable buffers that the receiver does not have yet.

    Buffers are compared on their device, with one synchronization.

    Args:
        non_trainable: a marked state; the receiver has the marked values.
    """

    def __init__(self, non_trainable: NonTrainableState) -> None:
        self._non_trainable = non_trainable
        self._sent: dict[str, Tensor] = {}
        self.has_begun = False
        """Whether changes were returned; if not, the next ones are all since the mark."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the buffers in the state dict."""
        return tuple(self._saved())

    def _saved(self) -> dict[str, Tensor]:
        state = self._non_trainable
        return {k: t.detach() for k, t in state.buffers().items() if state.is_saved(k)}

    def forget(self) -> None:
        """Forget what was returned: the receiver has other values, or the marked ones."""
        self._sent, self.has_begun = {}, False

    def pop_changes(self) -> dict[str, np.ndarray]:
        """Return copies of the buffers in the state dict that changed since they were returned."""
        now, self.has_begun = self._saved(), True
        flags = [_differs_from(t, self._last_sent(k, t)) for k, t in now.items()]
        is_new = torch.stack([f.to(flags[0].device) for f in flags]).tolist() if flags else []
        changes = {k: t for (k, t), new in zip(now.items(), is_new, strict=True) if new}
        self._sent.update({k: t.clone() for k, t in changes.items()})
        return {k: _array_of(t) for k, t in changes.items()}

    def _last_sent(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return the receiver's values of a buffer, on the buffer's device."""
        marked = self._non_trainable.marked(name)
        if name not in self._sent and marked is not None:
            with contextlib.suppress(RuntimeError):  # its dtype has changed
                self._sent[name] = tensor_of(marked, tensor.dtype).to(tensor.device)
        return self._sent.get(name)


def slots_of(model: nn.Module) -> Iterator[tuple[str, Place, Tensor]]:
    """Yield (plain name, slot, tensor) of all parameters and buffers, under all their names."""
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    name = plain(f"{prefix}.{key}" if prefix else key)
                    yield name, Place(tensors, key, is_saved=id(tensor) in saved), tensor


def places_of(model: nn.Module) -> dict[str, Place]:
    """Return the slot of each parameter and buffer by its plain name; of several, by the first."""
    places: dict[str, Place] = {}
    visited: set[int] = set()
    for name, place, tensor in slots_of(model):
        if id(tensor) not in visited and can_be_kept(tensor):
            visited.add(id(tensor))
            places[name] = place
    return places


def can_be_kept(tensor: Tensor) -> bool:
    """Whether arrays and checkpoints can hold a tensor; they cannot hold sparse ones."""
    return tensor.layout == torch.strided and tensor.dtype not in _NOT_KEPT


def tensor_of(values: Any, dtype: torch.dtype) -> Tensor:
    """Return a tensor of a dtype from a tensor or an array, which may hold its bits as integers.

    Raises:
        RuntimeError: if its elements have another size.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    if tensor.dtype == dtype:
        return tensor
    if tensor.dtype not in _INTEGERS.values() or tensor.element_size() != dtype.itemsize:
        raise RuntimeError(f"{tensor.dtype} does not hold the bits of {dtype}")
    return tensor.view(dtype)


def _array_of(tensor: Tensor) -> np.ndarray:
    """Return a copy as an array; a dtype that NumPy lacks, as integers of the same size."""
    tensor = tensor.detach().resolve_conj().resolve_neg().to("cpu", copy=True).contiguous()
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(_INTEGERS[tensor.element_size()]).numpy()


def shares_elements(tensor: Tensor) -> bool:
    """Whether elements share memory, as after ``expand``, so that they cannot be written."""
    return any(
        size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _differs_from(tensor: Tensor, other: Tensor | None) -> Tensor:
    """Return, on its device, whether a tensor differs from another in shape or any bit."""
    if other is None or _kind(tensor) != _kind(other):
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return (_bits(tensor) != _bits(other)).any()


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _bits(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as a flat vector of integers."""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    return flat.view(_INTEGERS[tensor.element_size()])


def _differs(array: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays differ in shape or any bit."""
    is_same = np.array_equal(array.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))
    return array.shape != other.shape or not is_same


def _fingerprint(tensor: Tensor) -> tuple[Any, ...]:
    """Return the shape of a parameter and a checksum of its bits, to detect changes."""
    bits = _bits(tensor.detach())
    checksum = _crc32(bits) if bits.device.type == "cpu" else _weighted_sum(bits)
    return tuple(tensor.shape), checksum


def _crc32(bits: Tensor) -> int:
    crc = 0
    for block in torch.split(bits, _BLOCK):
        crc = zlib.crc32(block.numpy().data, crc)
    return crc


def _weighted_sum(bits: Tensor) -> int:
    """Return a checksum computed on the device: a sum of the elements, weighted by position."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, block in enumerate(torch.split(bits, _BLOCK)):
        places = torch.arange(block.numel(), device=bits.device).add_(number * _BLOCK)
        total += (2 * places + 1).mul_(block).sum()
    return int(total)
