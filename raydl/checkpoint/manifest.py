"""The manifest of a checkpoint: its files with sizes and checksums, and its progress."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any, TypedDict

from raydl.config.typed import Count, Positive, Seconds, typed
from raydl.storage import parse_json

FORMAT = 2
"""Version of the manifest; since 2 it has a checksum of itself."""
CENTER, STATE = "center.safetensors", "state.safetensors"
_WORKER_ID = re.compile(r"\w[\w.-]{0,199}")
"""Ids that raydl gives, and that users may give to workers of their own loops."""


class _FileSum(TypedDict):
    bytes: Count
    crc32: Count


class Manifest(TypedDict):
    """The content of a ``manifest.json``, which also has its own checksum since format 2."""

    format: Positive
    round: Count
    generation: Count
    num_samples: Count
    seconds: Seconds
    workers: list[str]
    files: dict[str, _FileSum]


class _Format(TypedDict):
    format: Positive


class NewerFormatError(ValueError):
    """A newer version of raydl wrote the manifest, which may be whole."""


def file_of(worker_id: str) -> str:
    """Return the name of the file with a worker's state."""
    return f"worker-{worker_id}.safetensors"


def parse_manifest(data: bytes) -> Manifest:
    """Return the manifest in the contents of a ``manifest.json``.

    Raises:
        NewerFormatError: its format is newer than this version.
        ValueError: it is damaged.
    """
    manifest = parse_json(data, _Format)
    if manifest["format"] > FORMAT:
        raise NewerFormatError(
            f"has format {manifest['format']}, but this raydl reads up to {FORMAT}; update raydl"
        )
    return _checked(typed(Manifest, manifest))


def _checked(manifest: Manifest) -> Manifest:
    """Return a manifest if it names files of a checkpoint, and has its checksum.

    Raises:
        ValueError: it does not.
    """
    for worker_id in manifest["workers"]:
        if not _WORKER_ID.fullmatch(worker_id):
            raise ValueError(f"{worker_id[:100]!r} is not the id of a worker")
    # Other names could lead out of the folder.
    ours = {CENTER, STATE, *map(file_of, manifest["workers"])}
    for name in manifest["files"]:
        if name not in ours:
            raise ValueError(f"it lists {name[:100]!r}, which is not a file of a checkpoint")
    if manifest["format"] > 1 and manifest.get("crc32") != checksum_of(manifest):
        raise ValueError("its checksum does not match")
    return manifest


def checksum_of(manifest: Mapping[str, Any]) -> int:
    """Return the checksum of a manifest without its own entry."""
    content = {key: value for key, value in manifest.items() if key != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
