"""A worker's state outside its process: written to a file and read from it.

A state is a nested value with tensors in it. Its file is safetensors, with the outline of the
nesting in the metadata. States do not pass through the memory of the driver.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from raydl.config.typed import typed
from raydl.core import tensor_files
from raydl.core.tensor_files import TensorFile, view_of
from raydl.errors import CheckpointError, ConfigError, in_one_line, reading_error
from raydl.storage import Storage, Sum, Summing, below, in_words, parse_json

_TENSOR = "tensor"


class StateWrite(Protocol):
    """A write of a worker's state to its file, in progress."""

    def wait(self) -> Sum:
        """Wait until the file is complete and return its size and checksum.

        Raises:
            StateLostError: if the process with the state was lost or does not answer.
            OSError: if the storage failed.
        """
        ...

    def cancel(self, until: float) -> None:
        """Stop writing; return when no more is written, or at the deadline.

        Args:
            until: deadline, by ``time.monotonic()``.
        """
        ...


class DistantState(Protocol):
    """A worker's state in another process, which can write it."""

    def begin_write(self, storage: Storage, name: str, token: str) -> StateWrite:
        """Begin to write the state to a file; do not wait.

        Args:
            storage: the run's folder.
            name: name of the file in it.
            token: name of a file beside it, by which another machine recognizes the storage.
        """
        ...

    def release(self) -> None:
        """Release the state: it is written, or will not be."""
        ...


@contextmanager
def reported_as_damage(path: str) -> Iterator[None]:
    """Turn errors about a value in a file into a CheckpointError.

    For what only its owner can check, such as the state of an optimizer.

    Args:
        path: the file, for the message.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as e:
        raise reading_error(
            path, f"holds a state that cannot be loaded: {in_one_line(e)}", e
        ) from e


SavedPlace = tuple[str, str, Sum]
"""Address of the storage, name of the file, its size and checksum."""


@dataclass(frozen=True)
class SavedState:
    """A worker's state in a file, of a checkpoint or for its replacement."""

    storage: Storage
    name: str
    """Name of the file."""
    written: Sum

    @property
    def place(self) -> SavedPlace | None:
        """Place from which another process can read it, or None if no other process can."""
        address = self.storage.address
        return None if address is None else (address, self.name, self.written)

    @property
    def path(self) -> str:
        """Path of the file."""
        return below(self.storage.root, self.name)

    def load(self) -> dict[str, Any]:
        """Read the state; each tensor has its own memory.

        Raises:
            CheckpointError: if it cannot be read or is damaged.
        """
        sums = Summing(self.storage.read_pieces(self.name))
        try:
            tensors, metadata = tensor_files.read(sums.pieces(), self.written.num_bytes)
            state = _state_of(tensors, metadata)
        except OSError as error:
            raise CheckpointError(self.path, f"cannot be read: {in_words(error)}") from error
        except ValueError as error:
            raise CheckpointError(self.path, f"is damaged: {error}") from error
        if sums.sum != self.written:
            raise CheckpointError(self.path, "is damaged: its checksum does not match")
        return state


def check_state(setting: str, state: dict[str, Any]) -> None:
    """Raise a ConfigError for a setting whose state checkpoints cannot hold."""
    try:
        _outline(state, {}, "")
    except CheckpointError as error:
        raise ConfigError(
            setting,
            f"cannot be kept in checkpoints: they {error.problem} ({error.path.strip('/')}); use "
            f"numbers, strings, tensors, and lists and dicts of them",
        ) from error


def pack(state: dict[str, Any]) -> TensorFile:
    """Return a nested state as a safetensors file, with all but the tensors in its metadata.

    The tensors are not copied, and must not change until the file is written.

    Raises:
        CheckpointError: if it has a value of a type that cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    outline = _outline(state, tensors, "")
    return TensorFile(tensors, {"outline": json.dumps(outline)})


def _outline(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return a value for JSON; add each tensor to ``tensors`` by number.

    Paths are not unique: {0: …, "0": …}, or {"a/b": …, "a": {"b": …}}.
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
                raise CheckpointError(path, f"cannot hold a key of type {type(key).__name__}")
        # A list of pairs, since JSON converts a key 0 to "0".
        return {"dict": [[k, _outline(v, tensors, f"{path}/{k}")] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_outline(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(path, f"cannot hold a value of type {type(value).__name__}")


def unpack(data: bytearray) -> dict[str, Any]:
    """Return the state of a file from ``pack``; its tensors share the memory of ``data``.

    Raises:
        ValueError: it is damaged.
    """
    tensors, metadata = tensor_files.parse(data)
    return _state_of(tensors, metadata or {})


def _state_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        outline = parse_json(metadata.get("outline", ""), dict[str, Any])
        state: dict[str, Any] = typed(dict, _restored(outline, tensors))
        return state
    except ValueError as error:
        raise ValueError(f"it is damaged: {error}") from error


def _restored(outline: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that ``_outline`` described.

    Raises:
        ValueError: ``_outline`` makes no such value.
    """
    if not isinstance(outline, dict):
        return outline
    kind, content = next(iter(outline.items()), ("", None))
    if kind == _TENSOR and isinstance(content, str) and content in tensors:
        return tensors[content]
    if kind == "dict":
        pairs = typed(list[tuple[Any, Any]], content, "an outline")
        if any(isinstance(key, (list, dict)) for key, _ in pairs):
            raise ValueError("its outline has a key that is a list or an object")
        return {key: _restored(value, tensors) for key, value in pairs}
    if kind not in ("list", "tuple"):
        raise ValueError(f"its outline has an unknown {str(kind)[:20]!r}")
    values = [_restored(value, tensors) for value in typed(list[Any], content, "an outline")]
    return values if kind == "list" else tuple(values)
