"""Safetensors files that carry a checksum of all that they hold: names, tensors, and a few values.

Plain PyTorch loads them. The checksum lies in the metadata of safetensors, with the values.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

_KEY = "raydl"
_CHECKSUM = "crc32"


def dump(tensors: dict[str, Tensor], values: dict[str, Any]) -> bytes:
    """Return the contents of a file.

    Args:
        tensors: contiguous, none sharing memory.
        values: what JSON can hold.
    """
    sealed = {**values, _CHECKSUM: _checksum(tensors, values)}
    # One key alone: safetensors writes several in any order.
    return save_tensors(tensors, metadata={_KEY: json.dumps(sealed)})


def load(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, values) of a file; of one that has no checksum, as earlier ones, as it is.

    Raises:
        ValueError: it is damaged.
    """
    try:
        tensors = load_tensors(data)
        metadata = header_of(data).get("__metadata__")
        if metadata is None:
            return tensors, {}
        values = json.loads(metadata[_KEY])
        checksum = values.pop(_CHECKSUM, None)
    except (SafetensorError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"it is damaged: {error}") from error
    if checksum is not None and checksum != _checksum(tensors, values):
        raise ValueError("it is damaged: its checksum is another")
    return tensors, values


def header_of(data: bytes) -> dict[str, Any]:
    """Return the header of a safetensors file.

    Raises:
        ValueError: it is damaged.
    """
    header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header


def _checksum(tensors: dict[str, Tensor], values: dict[str, Any]) -> int:
    return zlib.crc32(
        json.dumps(values, sort_keys=True).encode(), zlib.crc32(save_tensors(tensors))
    )
