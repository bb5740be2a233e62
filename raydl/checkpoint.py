"""Checkpoints: whole or absent, for any number of workers, readable by plain PyTorch.

    checkpoints/round-00000120/
        center.safetensors        the center under the model's own names
        state.safetensors         the optimizer at the center, where there is one
        worker-w0.safetensors     all that worker w0 needs to go on with the same bits
        manifest.json             written last: what belongs here, with sizes and checksums

A folder without its manifest is no checkpoint. It is written under a hidden name and
renamed; on object stores, which have no renaming, the manifest alone makes it whole.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from raydl.errors import CheckpointError
from raydl.storage import Storage

FORMAT = 1
_FOLDER = "checkpoints"
_PARTIAL = ".partial-"
_TENSOR = "tensor"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a run after a round."""

    round: int
    generation: int
    num_samples: int
    """Samples seen by all workers."""
    seconds: float
    """Training time up to here, over all starts."""
    center: dict[str, Tensor]
    """The model's state dict with the center's values."""
    state: dict[str, Any]
    """Version, counters, ledger, and the optimizer at the center."""
    workers: dict[str, dict[str, Any]]
    """Each worker's own state, by id, in the order of the ranks."""


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        storage: the run's folder.
        keep: how many whole ones stay.
    """

    def __init__(self, storage: Storage, *, keep: int = 2) -> None:
        self._storage = storage
        self._keep = keep

    def names(self) -> list[str]:
        """Return the whole checkpoints, oldest first."""
        return [
            name
            for name in self._storage.list_dir(_FOLDER)
            if name.startswith("round-") and self._storage.exists(_manifest_path(name))
        ]

    def write(self, checkpoint: Checkpoint) -> str:
        """Write a checkpoint, drop old ones, and return its name.

        Raises:
            CheckpointError: the storage refused; earlier checkpoints are as they were.
        """
        name = f"round-{checkpoint.round:08d}"
        try:
            self._write(name, checkpoint)
        except OSError as error:
            raise CheckpointError(self._path(name), f"could not be written: {error}") from error
        self._prune()
        return name

    def _write(self, name: str, checkpoint: Checkpoint) -> None:
        files = {"center.safetensors": save_tensors(_owned(checkpoint.center))}
        files["state.safetensors"] = _pack(checkpoint.state)
        for worker_id, state in checkpoint.workers.items():
            files[f"worker-{worker_id}.safetensors"] = _pack(state)
        manifest = {
            "format": FORMAT,
            "round": checkpoint.round,
            "generation": checkpoint.generation,
            "num_samples": checkpoint.num_samples,
            "seconds": checkpoint.seconds,
            "workers": list(checkpoint.workers),
            "files": {n: {"bytes": len(d), "crc32": zlib.crc32(d)} for n, d in files.items()},
        }
        aside = name if self._storage.is_object_store else f"{_PARTIAL}{name}"
        self._storage.delete_dir(f"{_FOLDER}/{aside}")
        for file_name, data in files.items():
            self._storage.write_bytes(f"{_FOLDER}/{aside}/{file_name}", data)
        if aside != name:
            self._storage.delete_dir(f"{_FOLDER}/{name}")
            self._storage.move_dir(f"{_FOLDER}/{aside}", f"{_FOLDER}/{name}")
        self._storage.write_bytes(_manifest_path(name), json.dumps(manifest, indent=1).encode())

    def _prune(self) -> None:
        stale = self.names()[: -self._keep]
        stale += [n for n in self._storage.list_dir(_FOLDER) if n.startswith(_PARTIAL)]
        for name in stale:
            self._storage.delete_dir(f"{_FOLDER}/{name}")

    def read(self) -> tuple[Checkpoint, list[str]]:
        """Return the newest whole checkpoint, and a sentence for each damaged newer one.

        Raises:
            CheckpointError: there is none, or all are damaged.
        """
        damage: list[str] = []
        for name in reversed(self.names()):
            try:
                return self._read(name), damage
            except CheckpointError as error:
                damage.append(str(error))
        where = f"{self._storage.root}/{_FOLDER}"
        raise CheckpointError(where, "; ".join(damage) or "there is none to go on from")

    def _read(self, name: str) -> Checkpoint:
        manifest = self._manifest(name)
        workers = {
            worker_id: _unpack(self._file(name, f"worker-{worker_id}.safetensors", manifest))
            for worker_id in manifest["workers"]
        }
        return Checkpoint(
            round=manifest["round"],
            generation=manifest["generation"],
            num_samples=manifest["num_samples"],
            seconds=manifest["seconds"],
            center=load_tensors(self._file(name, "center.safetensors", manifest)),
            state=_unpack(self._file(name, "state.safetensors", manifest)),
            workers=workers,
        )

    def read_center(self) -> tuple[dict[str, Tensor], int]:
        """Return the newest center under the model's own names, and its round.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        names = self.names()
        if not names:
            where = f"{self._storage.root}/{_FOLDER}"
            raise CheckpointError(where, "there is none to read")
        manifest = self._manifest(names[-1])
        data = self._file(names[-1], "center.safetensors", manifest)
        return load_tensors(data), manifest["round"]

    def _manifest(self, name: str) -> dict[str, Any]:
        try:
            manifest: dict[str, Any] = json.loads(self._storage.read_bytes(_manifest_path(name)))
            if manifest["format"] > FORMAT:
                raise CheckpointError(
                    self._path(name),
                    f"has format {manifest['format']}, this raydl reads up to {FORMAT}; update it",
                )
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(self._path(name), f"its manifest is damaged: {error}") from error
        return manifest

    def _file(self, name: str, file_name: str, manifest: dict[str, Any]) -> bytes:
        """Return a file of a checkpoint, checked against its manifest."""
        try:
            data = self._storage.read_bytes(f"{_FOLDER}/{name}/{file_name}")
            expected = manifest["files"][file_name]
        except (OSError, KeyError) as error:
            raise CheckpointError(self._path(name), f"{file_name} is missing") from error
        if len(data) != expected["bytes"] or zlib.crc32(data) != expected["crc32"]:
            raise CheckpointError(
                self._path(name),
                f"{file_name} is damaged: {len(data)} bytes, written were {expected['bytes']}",
            )
        return data

    def _path(self, name: str) -> str:
        return f"{self._storage.root}/{_FOLDER}/{name}"


def _manifest_path(name: str) -> str:
    return f"{_FOLDER}/{name}/manifest.json"


def _owned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors that share no memory, as safetensors wants them."""
    return {key: tensor.detach().contiguous().clone() for key, tensor in tensors.items()}


def _pack(state: dict[str, Any]) -> bytes:
    """Return nested values as one safetensors file: tensors inside, the rest as metadata."""
    tensors: dict[str, Tensor] = {}
    outline = _outline(state, tensors, "")
    return save_tensors(tensors, metadata={"outline": json.dumps(outline)})


def _outline(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return what JSON can hold of a value; each tensor goes into ``tensors`` by its path."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().contiguous().clone()
        return {_TENSOR: path}
    if isinstance(value, dict):
        # A list of pairs, since JSON would turn a key 0 into "0".
        return {"dict": [[k, _outline(v, tensors, f"{path}/{k}")] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_outline(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(path, f"can not hold a {type(value).__name__}")


def _unpack(data: bytes) -> dict[str, Any]:
    """Return what :func:`_pack` was given."""
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    outline = json.loads(header["__metadata__"]["outline"])
    state: dict[str, Any] = _filled(outline, load_tensors(data))
    return state


def _filled(outline: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(outline, dict):
        return outline
    ((kind, content),) = outline.items()
    if kind == _TENSOR:
        return tensors[content]
    if kind == "dict":
        return {key: _filled(value, tensors) for key, value in content}
    values = [_filled(value, tensors) for value in content]
    return values if kind == "list" else tuple(values)
