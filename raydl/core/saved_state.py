"""A worker's state outside its process: on its way to a file, in one, and read again.

A state is nested values with tensors in them; as a file it is safetensors, with the outline of
the values in its metadata. States do not pass through the memory of the driver.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from raydl.core import tensor_files
from raydl.core.tensor_files import TensorFile, view_of
from raydl.errors import CheckpointError, ConfigError
from raydl.storage import Storage, Sum, Summing, below, in_words

_TENSOR = "tensor"


class StateWrite(Protocol):
    """A worker's state on its way to its file."""

    def wait(self) -> Sum:
        """Return the file that was written, once it is whole.

        Raises:
            StateLostError: the process that had the state has gone, or does not answer.
            OSError: the storage refused.
        """
        ...

    def cancel(self, until: float) -> None:
        """Write no more of it; return when nothing more will be written, or at ``until``.

        Args:
            until: by ``time.monotonic()``.
        """
        ...


class DistantState(Protocol):
    """A worker's state in another process, which can write it."""

    def begin_write(self, storage: Storage, name: str, token: str) -> StateWrite:
        """Let the state be written to a file of a storage, and return at once.

        Args:
            storage: the run's folder.
            name: of the file in it.
            token: a file beside it, for another machine to see whether its storage is this one.
        """
        ...

    def release(self) -> None:
        """Hold the state no more: it is written, or will not be."""
        ...


SavedPlace = tuple[str, str, Sum]
"""Of a ``SavedState``: the storage's address, the name of the file, its checksum."""


@dataclass(frozen=True)
class SavedState:
    """A worker's state in a file, of a checkpoint or for the one that comes in its place."""

    storage: Storage
    name: str
    """Of the file."""
    written: Sum

    @property
    def place(self) -> SavedPlace | None:
        """Path by which another process may open it; None: it cannot."""
        address = self.storage.address
        return None if address is None else (address, self.name, self.written)

    @property
    def path(self) -> str:
        """Path of the file."""
        return below(self.storage.root, self.name)

    def load(self) -> dict[str, Any]:
        """Read the state; each of its tensors has its own memory.

        Raises:
            CheckpointError: it can not be read here, or is damaged.
        """
        sums = Summing(self.storage.read_pieces(self.name))
        try:
            tensors, metadata = tensor_files.read(sums.pieces(), self.written.num_bytes)
        except OSError as error:
            raise CheckpointError(self.path, f"can not be read: {in_words(error)}") from error
        except ValueError as error:
            raise CheckpointError(self.path, f"is damaged: {error}") from error
        if sums.sum != self.written:
            raise CheckpointError(self.path, "is damaged: its checksum is another")
        return _state_of(tensors, metadata)


def check_state(setting: str, state: dict[str, Any]) -> None:
    """Raise a ConfigError for a setting whose nested values a checkpoint can not hold."""
    try:
        _outline(state, {}, "")
    except CheckpointError as error:
        raise ConfigError(
            setting,
            f"has in its {error.path.strip('/')} what no checkpoint keeps: it {error.problem}; "
            f"numbers, texts, tensors, lists and dicts of them will do",
        ) from error


def pack(state: dict[str, Any]) -> TensorFile:
    """Return nested values as one safetensors file: tensors inside, the rest as metadata.

    The tensors are not copied: they should stay as they are until the file is written.

    Raises:
        CheckpointError: something in it can not be held.
    """
    tensors: dict[str, Tensor] = {}
    outline = _outline(state, tensors, "")
    return TensorFile(tensors, {"outline": json.dumps(outline)})


def _outline(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return a value as JSON can hold it; each tensor goes into ``tensors`` by its number.

    Not by its path, which two may share: {0: …, "0": …}, or {"a/b": …, "a": {"b": …}}.
    """
    if isinstance(value, np.ndarray):
        value = view_of(value)
    if isinstance(value, Tensor):
        key = str(len(tensors))
        tensors[key] = value.detach()
        return {_TENSOR: key}
    if isinstance(value, dict):
        for key in value:
            if not (key is None or isinstance(key, (bool, int, float, str))):
                raise CheckpointError(path, f"can not hold a key of type {type(key).__name__}")
        # A list of pairs, since JSON would turn a key 0 into "0".
        return {"dict": [[k, _outline(v, tensors, f"{path}/{k}")] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_outline(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(path, f"can not hold a {type(value).__name__}")


def unpack(data: bytearray) -> dict[str, Any]:
    """Return the state that ``pack`` was given; its tensors lie in ``data``."""
    tensors, metadata = tensor_files.parse(data)
    return _state_of(tensors, metadata or {})


def _state_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    state: dict[str, Any] = _filled(json.loads(metadata["outline"]), tensors)
    return state


def _filled(outline: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(outline, dict):
        return outline
    ((kind, content),) = outline.items()
    if kind == _TENSOR:
        return tensors[content]
    if kind == "dict":
        return {key: _filled(value, tensors) for key, value in content}
    values = [_filled(value, tensors) for value in content]
    return values if kind == "list" else tuple(values)
