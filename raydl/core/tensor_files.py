"""Safetensors files, written and read piece by piece, without a copy in memory.

``TensorFile`` yields the bytes of ``safetensors.torch.save`` directly from the memory of the
tensors. ``seal`` adds a checksum of names, tensors and some values to the metadata, for files
without a manifest. Plain PyTorch loads both.
"""

from __future__ import annotations

import ctypes
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from raydl.config.typed import Count, typed
from raydl.storage import Storage, parse_json

PIECE_BYTES = 4 << 20
"""Size of the pieces in which files are read and written."""
_KEY = "raydl"
_CHECKSUM = "crc32"
_MAX_HEADER_BYTES = 32 << 20
"""Longest header that is read; that of 100,000 tensors has 12 MB."""
_CODES = {
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64,
    "F32": torch.float32, "U32": torch.uint32, "I32": torch.int32, "BF16": torch.bfloat16,
    "F16": torch.float16, "U16": torch.uint16, "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Codes of dtypes in a header, in the order in which safetensors stores their tensors."""
_CODE_OF = {dtype: code for code, dtype in _CODES.items()}
_ORDER_OF = {dtype: order for order, dtype in enumerate(_CODES.values())}


class _Entry(TypedDict):
    """The place of a tensor in a file, in its header."""

    dtype: str
    shape: list[Count]
    data_offsets: tuple[Count, Count]


class TensorFile:
    """Contents of a safetensors file. Each tensor is read together with its pieces, not before.

    Args:
        tensors: tensors by name, on any device. They may share memory, and must not change until
            the file is written.
        metadata: at most one string by name, since safetensors writes several in any order.

    Raises:
        ValueError: if the format does not support a dtype.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype not in _CODE_OF:
                raise ValueError(f"{name} has {tensor.dtype}, which safetensors does not support")
        names = sorted(tensors, key=lambda name: (_ORDER_OF[tensors[name].dtype], name))
        header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
        self._parts: list[bytes | Tensor] = [tensors[name] for name in names]
        sizes = [tensors[name].nbytes for name in names]
        ends = np.cumsum(sizes, dtype=np.int64).tolist()
        for name, size, end in zip(names, sizes, ends, strict=True):
            header[name] = {
                "dtype": _CODE_OF[tensors[name].dtype],
                "shape": list(tensors[name].shape),
                "data_offsets": [end - size, end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._parts.insert(0, len(text).to_bytes(8, "little") + text)
        self._sizes = [8 + len(text), *sizes]
        self.num_bytes = sum(self._sizes)
        """Size of the whole file."""

    def pieces(self) -> Iterator[memoryview]:
        """Yield the contents in order, in pieces of up to ``PIECE_BYTES``."""
        for part in self._parts:
            memory = _memory_of(part)
            for start in range(0, len(memory), PIECE_BYTES):
                yield memory[start : start + PIECE_BYTES]

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return a copy of a range of the contents, shorter or empty at the end."""
        parts, stop = [], start + num_bytes
        for part, size in zip(self._parts, self._sizes, strict=True):
            if start < size and stop > 0:
                parts.append(bytes(_memory_of(part)[max(start, 0) : stop]))
            start, stop = start - size, stop - size
        return b"".join(parts)


def _memory_of(part: bytes | Tensor) -> memoryview:
    if isinstance(part, bytes):
        return memoryview(part)
    if not part.numel():
        return memoryview(b"")
    flat = part.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def view_of(array: np.ndarray) -> Tensor:
    """Return a tensor on the memory of an array; do not write to it if the array is read-only.

    ``torch.from_numpy`` warns about read-only arrays, such as those in Ray's shared memory.
    """
    if array.flags.writeable or not array.nbytes or not array.flags.c_contiguous:
        return torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    memory.array = array  # type: ignore[attr-defined]  # keeps it alive with the tensor
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return torch.frombuffer(memory, dtype=dtype).reshape(array.shape)


def parse(data: bytearray) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    """Return (tensors, metadata) of a file; the tensors share the memory of ``data``.

    Raises:
        ValueError: if it is damaged.
    """
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        if not 8 < start <= min(len(data), _MAX_HEADER_BYTES):
            raise ValueError("its header is longer than the file")
        entries, metadata = _parse_header(bytes(data[8:start]))
        tensors = {name: _tensor_in(data, start, entry) for name, entry in entries.items()}
    except (RuntimeError, ValueError) as error:  # torch's are RuntimeErrors
        raise ValueError(f"it is damaged: {error}") from error
    if start + sum(tensor.nbytes for tensor in tensors.values()) != len(data):
        raise ValueError("it is damaged: its length does not match")
    return tensors, metadata


def read(pieces: Iterator[bytes], num_bytes: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (tensors, metadata) of a file in pieces; each tensor has its own memory.

    So unused tensors of a large file are freed, and there is no second copy of it.

    Args:
        pieces: contents in order.
        num_bytes: size of the file.

    Raises:
        ValueError: if it is damaged.
    """
    source = _Pieces(pieces)
    size = int.from_bytes(bytes(source.read_bytes(8)), "little")
    if not 0 < size <= min(num_bytes - 8, _MAX_HEADER_BYTES):
        raise ValueError("it is damaged: its header is longer than the file")
    try:
        entries, metadata = _parse_header(bytes(source.read_bytes(size)))
        tensors, at = {}, 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            if begin != at or end < begin or 8 + size + end > num_bytes:
                raise ValueError(f"{name} has wrong offsets")
            tensors[name] = _tensor_in(source.read_bytes(end - begin), -begin, entry)
            at = end
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"it is damaged: {error}") from error
    if len(source.read_bytes(1)):
        raise ValueError("it is damaged: its length does not match")
    return tensors, metadata or {}


def _parse_header(text: bytes) -> tuple[dict[str, _Entry], dict[str, str] | None]:
    """Return the tensors' places by name, and the metadata, from a header."""
    header = parse_json(text, dict[str, Any])
    metadata = header.pop("__metadata__", None)
    entries = typed(dict[str, _Entry], header, "its header")
    return entries, None if metadata is None else typed(dict[str, str], metadata, "its metadata")


class _Pieces:
    """Reads ranges of any size from contents in pieces."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def read_bytes(self, num_bytes: int) -> np.ndarray:
        """Return the next bytes, fewer at the end."""
        data = torch.empty(num_bytes, dtype=torch.uint8).numpy()
        filled = 0
        while filled < num_bytes:
            if not self._rest:
                self._rest = memoryview(next(self._pieces, b""))
                if not self._rest:
                    break
            part = self._rest[: num_bytes - filled]
            data[filled : filled + len(part)] = part
            self._rest, filled = self._rest[len(part) :], filled + len(part)
        return data[:filled]


def _tensor_in(data: bytearray | np.ndarray, start: int, entry: _Entry) -> Tensor:
    dtype, shape = _CODES.get(entry["dtype"]), entry["shape"]
    if dtype is None:
        raise ValueError(f"there is no dtype {entry['dtype'][:10]!r}")
    begin, end = entry["data_offsets"]
    count = math.prod(shape)
    if not (0 <= begin <= end <= len(data) - start and end - begin == count * dtype.itemsize):
        raise ValueError(f"the offsets {begin} and {end} do not fit a tensor of {count} numbers")
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start + begin).reshape(shape)


def seal(tensors: Mapping[str, Tensor], values: dict[str, Any]) -> TensorFile:
    """Return a file with a checksum of its contents.

    Args:
        tensors: tensors by name.
        values: values that JSON can hold.
    """
    sealed = {**values, _CHECKSUM: _checksum(tensors, values)}
    return TensorFile(tensors, {_KEY: json.dumps(sealed)})


def load(storage: Storage, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, values) of a file that ``seal`` made.

    Files of older versions have no checksum and are not verified.

    Args:
        storage: where it is.
        name: its name.

    Raises:
        OSError: if it is absent or cannot be read.
        ValueError: if it is damaged.
    """
    tensors, metadata = read(storage.read_pieces(name), storage.num_bytes(name))
    if not metadata:
        return tensors, {}
    try:
        values = parse_json(metadata.get(_KEY, ""), dict[str, Any])
    except ValueError as error:
        raise ValueError(f"it is damaged: {error}") from error
    checksum = values.pop(_CHECKSUM, None)
    if checksum is not None and checksum != _checksum(tensors, values):
        raise ValueError("it is damaged: its checksum does not match")
    return tensors, values


def _checksum(tensors: Mapping[str, Tensor], values: dict[str, Any]) -> int:
    """Return the CRC-32 of the file without metadata, followed by the values as JSON."""
    checksum = 0
    for piece in TensorFile(tensors).pieces():
        checksum = zlib.crc32(piece, checksum)
    return zlib.crc32(json.dumps(values, sort_keys=True).encode(), checksum)
