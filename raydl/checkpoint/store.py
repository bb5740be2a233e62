"""Checkpoints: whole or absent, for any number of workers, readable by plain PyTorch.

    checkpoints/round-00000120/
        center.safetensors        the center under the model's own names
        state.safetensors         the optimizer at the center, where there is one
        worker-w0.safetensors     all that worker w0 needs to go on with the same bits
        manifest.json             written last: what belongs here, with sizes and checksums

A folder without its manifest is no checkpoint. It is written under a hidden name and
renamed; on object stores, which have no renaming, the manifest alone makes it whole.

Nothing is ever written over: a round that is written again comes to lie beside the first as
round-00000120.1, and the first is deleted when the second is whole. So at any moment of a
write one that can be read is there.

Every start of a run has a number, its driver epoch (``raydl.run.driver_epoch``). From the
second on it is part of the names, round-00000120-e2, and a driver deletes what its own epoch and
earlier ones wrote, never what a later one did. What a later epoch wrote is newer, whatever the
rounds: an earlier driver that was halted and wakes up may complete a checkpoint, which then does
not count. Since it may as well delete the one that a later driver goes on from, that driver
copies it to a name of its own first.

States of workers do not pass through the memory of the driver: a worker
on another machine writes its file itself (``DistantState``), into the folder that it is told,
and reads it itself (``SavedState``).
"""

from __future__ import annotations

import json
import re
import time
import uuid
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raydl.core import tensor_files
from raydl.core.progress import Progress
from raydl.core.saved_state import DistantState, SavedState, StateWrite, pack, unpack
from raydl.core.tensor_files import TensorFile
from raydl.errors import CheckpointError, StateLostError
from raydl.redaction import redact
from raydl.storage import Storage, Sum, below, in_words

FORMAT = 2
"""From 2 on a manifest has a checksum of itself."""
TRAINED = "center.safetensors"
"""Name of a finished run's weights, in its folder."""
_FOLDER = "checkpoints"
_PARTIAL = ".partial-"
_NAME = re.compile(r"round-(\d+)(?:-e(\d+))?(?:\.(\d+))?")
_CANCEL_S = 10.0
"""The longest wait for distant workers to write no more, in seconds."""
_Kinds = dict[str, tuple[type, ...]]
_MANIFEST: _Kinds = {
    "round": (int,),
    "generation": (int,),
    "num_samples": (int,),
    "seconds": (int, float),
    "workers": (list,),
    "files": (dict,),
}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a run after a round."""

    progress: Progress
    seconds: float
    """Seconds of the run up to here, over all starts: with the waits for workers, which
    ``progress`` does not have."""
    center: dict[str, Tensor]
    """The model's state dict with the center's values."""
    state: dict[str, Any]
    """Ledger, optimizer at the center, totals: see ``raydl.checkpoint.writer.checkpoint_of``."""
    workers: Mapping[str, dict[str, Any] | DistantState | SavedState]
    """Each worker's own state, by id, in the order of the ranks: nested values, or where they are.

    What is read has ``SavedState``."""


class _DamagedError(CheckpointError):
    """It can not be read, an older one may do; a newer format is no damage."""


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        storage: the run's folder.
        keep: how many whole ones stay.
        driver_epoch: the number of this start among all of the run, where it writes.
    """

    def __init__(self, storage: Storage, *, keep: int = 2, driver_epoch: int = 1) -> None:
        self._storage = storage
        self._keep = keep
        self._epoch = driver_epoch
        self._damaged: set[str] = set()
        self.root = storage.root
        """Of the run's folder."""
        self._read_name = ""
        self._earlier: set[str] | None = None
        self._late: set[str] = set()

    def names(self) -> list[str]:
        """Return the whole checkpoints, oldest first, without those ``read`` found damaged.

        One of a later driver epoch is newer than one of an earlier, whatever their rounds.
        """
        return [name for name in self._finished() if name not in self._damaged]

    @property
    def newest_round(self) -> int:
        """The round of the newest whole checkpoint; -1: there is none."""
        names = self.names()
        return _age(names[-1]).round if names else -1

    @property
    def num_late(self) -> int:
        """Checkpoints that an earlier driver completed after this one had taken the run over."""
        return len(self._late)

    def without_manifest(self) -> list[str]:
        """Return the folders of checkpoints that have lost their manifests.

        On an object store the first checkpoint of a run is such a one until it is whole.
        """
        names = [n for n in self._ours() if _NAME.fullmatch(n) and not self._has_manifest(n)]
        is_first = self._storage.is_object_store and len(names) == 1
        return [] if is_first else sorted(names, key=_age)

    def _finished(self) -> list[str]:
        """Return those with a manifest, oldest first."""
        names = [n for n in self._ours() if _NAME.fullmatch(n)]
        return sorted(filter(self._has_manifest, names), key=_age)

    def _ours(self) -> list[str]:
        """Return the folders that a store made, whole or not; others are left alone."""
        names = self._storage.list_dir(_FOLDER)
        return [n for n in names if _NAME.fullmatch(n) or n.startswith(_PARTIAL)]

    def _has_manifest(self, name: str) -> bool:
        return self._storage.exists(_manifest_path(name))

    def write(self, checkpoint: Checkpoint) -> str:
        """Write a checkpoint, drop old ones, and return its name.

        An old one that can not be deleted is a RuntimeWarning and is tried again after the
        next write: the new one is whole, a run must not fail for want of tidiness.

        Raises:
            CheckpointError: the storage refused; earlier checkpoints are as they were.
            StateLostError: a worker has gone that was writing its own state.
        """
        try:
            self._clear_unfinished()  # their space may be what the new one needs
            name = self._fresh_name(checkpoint.progress.round)
            self._write(name, checkpoint)
        except StateLostError:
            with suppress(OSError):
                self._clear_unfinished()
            raise
        except OSError as error:
            with suppress(OSError):  # the first error is the one to tell
                self._clear_unfinished()
            path = self._path(f"round-{checkpoint.progress.round:08d}")
            raise CheckpointError(path, f"could not be written: {in_words(error)}") from error
        self._damaged.discard(name)  # a damaged one that was deleted may have had that name
        self._prune(name)
        return name

    def take_over(self, checkpoint: Checkpoint) -> dict[str, SavedState]:
        """Copy the checkpoint that ``read`` returned to a name of this driver's epoch.

        Before anything counts on it: the driver that wrote it may be halted and wake up, and
        deletes then what it takes for old. It knows no name of this epoch.

        Returns:
            Where the states of its workers are now, in the order of the ranks.

        Raises:
            CheckpointError: it could not be copied; all others are as they were.
        """
        source = self._read_name
        assert source, "read comes first"
        try:
            self._earlier = {n for n in self._finished() if _age(n).epoch < self._epoch}
            self._clear_unfinished()
            manifest = {**self._manifest(source), "driver_epoch": self._epoch, "copy_of": source}
            name = self._fresh_name(manifest["round"])
            aside = self._aside(name)
            for file_name in manifest["files"]:
                self._storage.copy_file(
                    f"{_FOLDER}/{source}/{file_name}", f"{_FOLDER}/{aside}/{file_name}"
                )
            self._complete(aside, name, manifest)
        except (OSError, _DamagedError) as error:
            problem = f"could not be copied for this driver: {in_words(error)}"
            raise CheckpointError(self._path(source), problem) from error
        self._read_name = name
        self._prune(name)
        return {w: self._moved(state, name) for w, state in checkpoint.workers.items()}

    def _moved(self, state: Any, name: str) -> SavedState:
        """Return the place of a worker's state in another folder."""
        assert isinstance(state, SavedState), "read returns no other"
        file_name = state.name.rpartition("/")[2]
        return SavedState(self._storage, f"{_FOLDER}/{name}/{file_name}", state.written)

    def _fresh_name(self, round: int) -> str:
        name = f"round-{round:08d}" + (f"-e{self._epoch}" if self._epoch > 1 else "")
        ages = [_age(n) for n in self._ours() if _NAME.fullmatch(n)]
        versions = [a.version for a in ages if (a.epoch, a.round) == (self._epoch, round)]
        version = 1 + max(versions, default=-1)
        return name + (f".{version}" if version else "")

    def _aside(self, name: str) -> str:
        """Return the folder that a checkpoint is written to before it is whole."""
        return name if self._storage.is_object_store else f"{_PARTIAL}{name}"

    def _complete(self, aside: str, name: str, manifest: dict[str, Any]) -> None:
        """Make a checkpoint whole whose files are there: write its manifest, last."""
        told = {key: value for key, value in manifest.items() if key != "crc32"}
        content = {**told, "crc32": _checksum(told)}
        self._storage.write_bytes(_manifest_path(aside), json.dumps(content, indent=1).encode())
        if aside != name:
            self._storage.move_dir(f"{_FOLDER}/{aside}", f"{_FOLDER}/{name}")

    def _write(self, name: str, checkpoint: Checkpoint) -> None:
        aside = self._aside(name)
        sums = self._write_files(f"{_FOLDER}/{aside}", checkpoint)
        manifest = {
            "format": FORMAT,
            "driver_epoch": self._epoch,
            "round": checkpoint.progress.round,
            "generation": checkpoint.progress.generation,
            "num_samples": checkpoint.progress.num_samples,
            "seconds": checkpoint.seconds,
            "workers": list(checkpoint.workers),
            "files": {n: {"bytes": s.num_bytes, "crc32": s.crc32} for n, s in sums.items()},
        }
        self._complete(aside, name, manifest)

    def _write_files(self, folder: str, checkpoint: Checkpoint) -> dict[str, Sum]:
        """Write all but the manifest; distant workers write while this process does."""

        def put(name: str, file: TensorFile) -> Sum:
            return self._storage.write_pieces(f"{folder}/{name}", file.pieces())

        here, distant = _by_place(checkpoint.workers)
        with self._distant_writes(folder, distant) as writes:
            sums = {"center.safetensors": put("center.safetensors", TensorFile(checkpoint.center))}
            sums["state.safetensors"] = put(
                "state.safetensors",
                pack({"progress": vars(checkpoint.progress), **checkpoint.state}),
            )
            sums |= {name: put(name, pack(state)) for name, state in here.items()}
            sums |= {name: write.wait() for name, write in writes.items()}
        return sums

    @contextmanager
    def _distant_writes(
        self, folder: str, states: Mapping[str, DistantState]
    ) -> Iterator[dict[str, StateWrite]]:
        """Let distant states be written; if anything fails, nobody writes any more afterwards."""
        if not states:
            yield {}
            return
        token = f"{folder}/token-{uuid.uuid4().hex}"
        self._storage.write_bytes(token, b"")
        writes: dict[str, StateWrite] = {}
        try:
            for name, state in states.items():
                writes[name] = state.begin_write(self._storage, f"{folder}/{name}", token)
            yield writes
        except BaseException:
            until = time.monotonic() + _CANCEL_S
            for write in writes.values():
                write.cancel(until)
            raise
        self._storage.delete_file(token)

    def _clear_unfinished(self) -> None:
        """Delete what a crash or a full disk left, as far as the storage lets us."""
        finished = self._finished()
        self._delete(name for name in self._deletable() if name not in finished)

    def _deletable(self) -> list[str]:
        """Return the folders, whole or not, that no later driver than this one wrote."""
        return [n for n in self._ours() if _epoch_of(n) <= self._epoch]

    def _prune(self, written: str) -> None:
        """Delete all but the ``keep`` newest, of which ``written`` is always one.

        It was written whole a moment ago, and nothing was deleted before: so at least one
        that can be read stays, whatever became of the others. One that ``read`` found
        damaged counts for nothing, nor does one whose round was written again.
        """
        try:
            names = self.names()
            self._note_late(names)
            newest = {_age(written).round: written}
            for name in reversed(names):
                newest.setdefault(_age(name).round, name)
            kept = list(newest.values())[: self._keep]
            problems = self._delete(name for name in self._deletable() if name not in kept)
        except OSError as error:
            problems = [f"the others could not be listed: {error}"]
        if problems:
            sentence = f"checkpoint {self._path(written)} was written, but old ones stay: "
            sentence += f"{'; '.join(problems)}; the next write tries again"
            warnings.warn(redact(sentence), RuntimeWarning, stacklevel=3)

    def _note_late(self, names: list[str]) -> None:
        """Note checkpoints of earlier drivers that were not there when this one took over."""
        if self._earlier is not None:
            late = {n for n in names if _age(n).epoch < self._epoch} - self._earlier
            self._late |= late

    def _delete(self, names: Iterable[str]) -> list[str]:
        """Delete folders and return a sentence for each that could not be."""
        problems = []
        for name in names:
            assert _epoch_of(name) <= self._epoch, f"{name} is of a later driver"
            try:
                self._storage.delete_dir(f"{_FOLDER}/{name}")
            except OSError as error:
                problems.append(f"{name} could not be deleted: {error}")
        return problems

    def read(self) -> tuple[Checkpoint, list[str]]:
        """Return the newest whole checkpoint, and a sentence for each damaged newer one.

        The damaged ones are remembered: the next write deletes them.

        Raises:
            CheckpointError: there is none, all are damaged, or the newest is of a newer format.
        """
        damage: list[str] = []
        for name in reversed(self._finished()):
            try:
                checkpoint = self._read(name)
            except _DamagedError as error:
                self._damaged.add(name)
                damage.append(str(error))
            else:
                self._damaged.discard(name)  # the storage was out of reach the last time
                self._read_name = name
                return checkpoint, damage
        where = below(self._storage.root, _FOLDER)
        raise CheckpointError(where, "; ".join(damage) or "there is none to go on from")

    def _read(self, name: str) -> Checkpoint:
        manifest = self._manifest(name)
        workers = {
            worker_id: self._saved_state(name, f"worker-{worker_id}.safetensors", manifest)
            for worker_id in manifest["workers"]
        }
        state = unpack(self._file(name, "state.safetensors", manifest))
        return Checkpoint(
            # Earlier ones have theirs among the rest of the state, or no seconds at all.
            progress=Progress.from_dict({**manifest, **state, **state.pop("progress", {})}),
            seconds=manifest["seconds"],
            center=self._center(name, manifest),
            state=state,
            workers=workers,
        )

    def read_center(self) -> tuple[dict[str, Tensor], int]:
        """Return the newest center under the model's own names, and its round.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        names = self.names()
        if not names:
            where = below(self._storage.root, _FOLDER)
            raise CheckpointError(where, "there is none to read")
        manifest = self._manifest(names[-1])
        return self._center(names[-1], manifest), manifest["round"]

    def _center(self, name: str, manifest: dict[str, Any]) -> dict[str, Tensor]:
        tensors, _ = tensor_files.parse(self._file(name, "center.safetensors", manifest))
        return tensors

    def _saved_state(self, name: str, file_name: str, manifest: dict[str, Any]) -> SavedState:
        """Return the place of a worker's state, which is read to see whether it is whole."""
        path, expected = f"{_FOLDER}/{name}/{file_name}", _sum_in(manifest, file_name)
        if expected is None:
            raise self._lacks(name, file_name)
        try:
            found = Sum.of(self._storage.read_pieces(path))
        except OSError as error:
            raise self._unreadable(name, file_name, error) from error
        if found != expected:
            raise self._differs(name, file_name, found, expected)
        return SavedState(self._storage, path, expected)

    def has_trained(self, round: int) -> bool:
        """Whether the center of a finished run, as it was after a round, is in the run's folder.

        It is that of the newest checkpoint, to the bit: an earlier driver that was halted may have
        written another one of that round.
        """
        try:
            trained, of_round = self._trained()
            center, newest = self.read_center()
        except (OSError, ValueError, CheckpointError):
            return False
        return of_round in (None, round) and newest == round and _are_same(trained, center)

    def _trained(self) -> tuple[dict[str, Tensor], int | None]:
        """Return the trained weights, and their round; None: an earlier file, without the round."""
        tensors, values = tensor_files.load(self._storage.read_whole(TRAINED))
        if values.keys() - {"round"}:
            raise ValueError(f"it is damaged: it says {', '.join(values)}")
        return tensors, values.get("round")

    def find_damage(self) -> list[str]:
        """Read all that is kept; return a sentence for each file that is not as it was written."""
        found = []
        for name in self._finished():
            try:
                self._read(name)
            except CheckpointError as error:
                found.append(str(error))
        where = below(self._storage.root, _FOLDER)
        found += [f"checkpoint {below(where, n)}: has no manifest" for n in self.without_manifest()]
        if self._storage.exists(TRAINED):
            try:
                self._refuse_late_center(*self._trained())
            except (OSError, ValueError) as error:
                found.append(f"{below(self._storage.root, TRAINED)}: {error}")
        return found

    def _refuse_late_center(self, trained: dict[str, Tensor], of_round: int | None) -> None:
        """Raise a ValueError if what was trained is another center of the newest round."""
        try:
            center, newest = self.read_center()
        except CheckpointError:
            return  # which is told by itself
        if of_round == newest and not _are_same(trained, center):
            raise ValueError(
                f"it is another center than that of the newest checkpoint, of round {newest}: an "
                f"earlier driver may have written it late; the same command with --resume writes "
                f"it anew"
            )

    def write_trained(self, center: dict[str, Tensor], round: int) -> None:
        """Write the center of a finished run into the run's folder, as ``center.safetensors``.

        Raises:
            CheckpointError: the storage refused.
        """
        try:
            # No driver epoch in it: a run that was resumed ends with the same bits.
            file = tensor_files.seal(center, {"round": round})
            self._storage.write_pieces(TRAINED, file.pieces())
        except OSError as error:
            path = below(self._storage.root, TRAINED)
            raise CheckpointError(path, f"could not be written: {in_words(error)}") from error

    def _manifest(self, name: str) -> dict[str, Any]:
        try:
            manifest = json.loads(self._storage.read_bytes(_manifest_path(name)))
            _require(manifest, {"format": (int,)})
            if manifest["format"] < 1:
                raise ValueError(f"there is no format {manifest['format']}")
            if manifest["format"] <= FORMAT:
                return _checked(manifest)
        except (OSError, ValueError) as error:
            raise _DamagedError(self._path(name), f"its manifest is damaged: {error}") from error
        raise CheckpointError(
            self._path(name),
            f"has format {manifest['format']}, this raydl reads up to {FORMAT}; update raydl",
        )

    def _file(self, name: str, file_name: str, manifest: dict[str, Any]) -> bytearray:
        """Return a file of a checkpoint, checked against its manifest."""
        expected = _sum_in(manifest, file_name)
        if expected is None:
            raise self._lacks(name, file_name)
        try:
            data = self._storage.read_whole(f"{_FOLDER}/{name}/{file_name}")
        except OSError as error:
            raise self._unreadable(name, file_name, error) from error
        found = Sum.of(_slices(data))
        if found != expected:
            raise self._differs(name, file_name, found, expected)
        return data

    def _lacks(self, name: str, file_name: str) -> _DamagedError:
        return _DamagedError(self._path(name), f"{file_name} is missing in its manifest")

    def _unreadable(self, name: str, file_name: str, error: OSError) -> _DamagedError:
        return _DamagedError(self._path(name), f"{file_name} can not be read: {error}")

    def _differs(self, name: str, file_name: str, found: Sum, expected: Sum) -> _DamagedError:
        return _DamagedError(
            self._path(name),
            f"{file_name} is damaged: {found.num_bytes} bytes, written were {expected.num_bytes}",
        )

    def _path(self, name: str) -> str:
        return below(self._storage.root, f"{_FOLDER}/{name}")


def _manifest_path(name: str) -> str:
    return f"{_FOLDER}/{name}/manifest.json"


class _Age(NamedTuple):
    """Sort key of checkpoints, the oldest first."""

    epoch: int
    round: int
    version: int


def _age(name: str) -> _Age:
    """Return (1, 12, 0) for round-00000012 and (3, 12, 1) for round-00000012-e3.1."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return _Age(int(match[2] or 1), int(match[1]), int(match[3] or 0))


def _epoch_of(folder: str) -> int:
    """Return the driver epoch of a folder that a store made, whole or not."""
    match = _NAME.fullmatch(folder.removeprefix(_PARTIAL))
    return int(match[2] or 1) if match else 1


def _checked(manifest: Any) -> dict[str, Any]:
    """Return a manifest if all in it is of the kind that was written.

    Raises:
        ValueError: which value is not.
    """
    checked = _require(manifest, _MANIFEST)
    for expected in checked["files"].values():
        _require(expected, {"bytes": (int,), "crc32": (int,)})
    for worker_id in checked["workers"]:
        _require({"a worker's id": worker_id}, {"a worker's id": (str,)})
    told = {key: value for key, value in checked.items() if key != "crc32"}
    if checked["format"] > 1 and checked.get("crc32") != _checksum(told):
        raise ValueError("its checksum is another")
    return checked


def _checksum(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _require(values: Any, kinds: _Kinds) -> dict[str, Any]:
    """Return ``values`` if it is a dict with all keys of ``kinds``, each of one of its types.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(values, dict):
        raise ValueError(f"a {type(values).__name__} stands where a table should")
    for key, allowed in kinds.items():
        if key not in values:
            raise ValueError(f"{key} is missing")
        if type(values[key]) not in allowed:  # not isinstance: a bool is no number here
            wanted, got = allowed[-1].__name__, type(values[key]).__name__
            raise ValueError(f"{key} must be of type {wanted}, got {got}")
    return values


def _by_place(
    workers: Mapping[str, dict[str, Any] | DistantState | SavedState],
) -> tuple[dict[str, dict[str, Any]], dict[str, DistantState]]:
    """Return the states of workers by the name of their file: (here, in other processes)."""
    here, distant = {}, {}
    for worker_id, state in workers.items():
        name = f"worker-{worker_id}.safetensors"
        assert not isinstance(state, SavedState), "what was read is not written again"
        if isinstance(state, dict):
            here[name] = state
        else:
            distant[name] = state
    return here, distant


def _sum_in(manifest: dict[str, Any], file_name: str) -> Sum | None:
    expected = manifest["files"].get(file_name)
    return None if expected is None else Sum(expected["bytes"], expected["crc32"])


def _slices(data: bytearray) -> Iterator[memoryview]:
    memory = memoryview(data)
    for start in range(0, len(data), tensor_files.PIECE_BYTES):
        yield memory[start : start + tensor_files.PIECE_BYTES]


def _are_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
