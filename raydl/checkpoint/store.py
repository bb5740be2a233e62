"""Checkpoints: whole or absent, for any number of workers, readable by plain PyTorch.

    checkpoints/round-00000120/
        center.safetensors        the center under the model's own names
        state.safetensors         ledger, totals, and the optimizer at the center if there is one
        worker-w0.safetensors     the state with which worker w0 continues with the same bits
        manifest.json             written last: the files above, with sizes and checksums

A folder without a manifest is not a checkpoint. A checkpoint is written under a hidden name and
renamed; on an object store, which cannot rename, the manifest alone makes it whole.

No file is ever overwritten. If a round is written again, the new checkpoint has a name of its own,
round-00000120.1, and the first one is deleted when the second one is whole. So at any time during a
write there is a readable checkpoint.

Every start of a run has a number, its driver epoch (``raydl.run.driver_epoch``). From the second
start on it is part of the names: round-00000120-e2. A driver deletes checkpoints of its own epoch
and of earlier ones, never of a later one. A checkpoint of a later epoch is newer, whatever its
round: an earlier driver that was halted and resumes may still complete a checkpoint, which then
does not count. Such a driver may also delete the checkpoint that a later driver resumed from, so
the later driver first copies it to a name of its own.

The states of workers do not pass through the memory of the driver: a worker on another machine
writes its file into the folder itself (``DistantState``), and reads it itself (``SavedState``).
"""

from __future__ import annotations

import errno
import json
import re
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypedDict, TypeVar

import torch
from torch import Tensor

from raydl.checkpoint.manifest import (
    CENTER,
    FORMAT,
    STATE,
    Manifest,
    NewerFormatError,
    checksum_of,
    file_of,
    parse_manifest,
)
from raydl.config.typed import Count, typed
from raydl.core import tensor_files
from raydl.core.progress import Progress
from raydl.core.saved_state import DistantState, SavedState, StateWrite, pack, unpack
from raydl.core.tensor_files import TensorFile
from raydl.errors import CheckpointError, StateLostError, reading_error
from raydl.storage import JSON_BYTES, Storage, Sum, below, in_words
from raydl.storage.local_files import is_no_file_of_ours
from raydl.text.redaction import redact

TRAINED = "center.safetensors"
"""Name of a finished run's weights in its folder."""
_FOLDER = "checkpoints"
_PARTIAL = ".partial-"
_NAME = re.compile(r"round-(\d{1,18})(?:-e(\d{1,18}))?(?:\.(\d{1,18}))?")
_CANCEL_S = 10.0
"""Time-out for distant workers to stop writing, in seconds."""
_NUM_TRIES = 3
"""Number of attempts to read a file."""
_PAUSE_S = 1.0
"""Pause between two attempts, in seconds."""
_Content = TypeVar("_Content")


class State(TypedDict, total=False):
    """The values in ``state.safetensors``; those of earlier versions lack some."""

    progress: dict[str, Any]
    ledger: dict[str, Any]
    optimizer: dict[str, Any]
    num_cuts: Count
    cadence: dict[str, Any] | None
    totals: dict[str, Any]
    order: str
    untrained: dict[str, Any]
    unfrozen: list[str]
    num_parameters: Count
    ended: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a run after a round."""

    progress: Progress
    seconds: float
    """Seconds of the run so far, over all starts, including the waits for workers; the seconds of
    ``progress`` do not include them."""
    center: dict[str, Tensor]
    """The model's state dict with the center's values."""
    state: dict[str, Any]
    """Ledger, optimizer at the center, totals: see ``raydl.checkpoint.writer.checkpoint_of``."""
    workers: Mapping[str, dict[str, Any] | DistantState | SavedState]
    """The state of each worker by id, in the order of the ranks: nested values, or their place.

    ``CheckpointStore.read`` returns ``SavedState``."""


class _DamagedError(CheckpointError):
    """A checkpoint is damaged, so an older one may be read.

    A newer format is no damage, nor is an error of the storage while it is read.
    """


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        storage: the run's folder.
        keep: number of whole checkpoints to keep.
        driver_epoch: the number of this start of the run.
        sleep: waits between two attempts to read a file.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        keep: int = 2,
        driver_epoch: int = 1,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._storage = storage
        self._keep = keep
        self._epoch = driver_epoch
        self._sleep = sleep
        self._damaged: set[str] = set()
        self._used: set[str] = set()
        self.root = storage.root
        """Path or URI of the run's folder."""
        self._read_name = ""
        self._earlier: set[str] | None = None
        self._late: set[str] = set()

    def names(self) -> list[str]:
        """Return the whole checkpoints, oldest first, without those that ``read`` found damaged.

        A checkpoint of a later driver epoch is newer than one of an earlier, whatever the rounds.

        Raises:
            CheckpointError: they cannot be listed.
        """
        try:
            return self._undamaged()
        except OSError as error:
            path, problem = below(self.root, _FOLDER), f"cannot be read: {in_words(error)}"
            raise reading_error(path, problem, error) from error

    def _undamaged(self) -> list[str]:
        return [name for name in self._whole() if name not in self._damaged]

    @property
    def newest_round(self) -> int:
        """The round of the newest whole checkpoint, or -1 if there is none."""
        names = self.names()
        return _age(names[-1]).round if names else -1

    @property
    def num_late(self) -> int:
        """Number of checkpoints that an earlier driver completed after this one took over."""
        return len(self._late)

    def without_manifest(self) -> list[str]:
        """Return the folders of checkpoints that have lost their manifests, oldest first.

        On an object store a single one may be a checkpoint that is not complete yet: return none.
        """
        names = [n for n in self._named() if not self._has_manifest(n)]
        is_incomplete = self._storage.is_object_store and len(names) == 1
        return [] if is_incomplete else names

    def _whole(self) -> list[str]:
        """Return the checkpoints with a manifest, oldest first."""
        return [n for n in self._named() if self._has_manifest(n)]

    def _named(self) -> list[str]:
        """Return the folders with the name of a checkpoint, whole or not, oldest first."""
        return sorted(filter(_NAME.fullmatch, self._storage.list_dir(_FOLDER)), key=_age)

    def _has_manifest(self, name: str) -> bool:
        return self._storage.exists(_manifest_path(name))

    def write(self, checkpoint: Checkpoint) -> str:
        """Write a checkpoint, delete old ones, and return its name.

        If an old one cannot be deleted, this issues a RuntimeWarning, and the next write tries
        again: the new checkpoint is whole, so the run goes on.

        Raises:
            CheckpointError: the storage failed; earlier checkpoints are unchanged.
            StateLostError: a worker was lost while it wrote its own state.
        """
        try:
            self._delete_unfinished()  # the new one may need their space
            name = self._free_name(checkpoint.progress.round)
            self._write(name, checkpoint)
        except (OSError, StateLostError) as error:
            with suppress(OSError):  # report the first error
                self._delete_unfinished()
            if isinstance(error, StateLostError):
                raise
            path = self._path(f"round-{checkpoint.progress.round:08d}")
            raise CheckpointError(path, f"could not be written: {in_words(error)}") from error
        self._damaged.discard(name)  # a deleted, damaged one may have had this name
        self._prune(name)
        return name

    def take_over(self, checkpoint: Checkpoint) -> dict[str, SavedState]:
        """Copy the checkpoint that ``read`` returned to a name of this driver's epoch.

        The driver that wrote it may be halted; if it resumes, it deletes what it considers old.
        It deletes no name of this epoch.

        Returns:
            The copied states of the workers, in the order of the ranks.

        Raises:
            CheckpointError: it could not be copied; all checkpoints are unchanged.
        """
        source = self._read_name
        assert source, "read comes first"
        try:
            self._earlier = {n for n in self._whole() if _age(n).epoch < self._epoch}
            self._delete_unfinished()
            manifest: dict[str, Any] = {**self._manifest(source)}
            manifest |= {"driver_epoch": self._epoch, "copy_of": source}
            manifest.pop("crc32", None)
            name = self._free_name(manifest["round"])
            for file_name in manifest["files"]:
                self._storage.copy_file(
                    _file_path(source, file_name),
                    _file_path(self._temporary(name), file_name),
                )
            self._complete(name, manifest)
        except (OSError, _DamagedError) as error:
            problem = f"could not be copied for this driver: {in_words(error)}"
            raise CheckpointError(self._path(source), problem) from error
        self._read_name = name
        self._prune(name)
        copies = {}
        for worker_id, state in checkpoint.workers.items():
            assert isinstance(state, SavedState), "read returns no other"
            path = f"{_FOLDER}/{name}/{state.name.rpartition('/')[2]}"
            copies[worker_id] = SavedState(self._storage, path, state.written)
        return copies

    def _free_name(self, round: int) -> str:
        """Return a name that no attempt of this process had: its writes may still be under way.

        Raises:
            OSError: it would have a number that is too large for a name.
        """
        name = f"round-{round:08d}" + (f"-e{self._epoch}" if self._epoch > 1 else "")
        ages = map(_age, {*self._named(), *self._used})
        versions = [a.version for a in ages if (a.epoch, a.round) == (self._epoch, round)]
        version = 1 + max(versions, default=-1)
        free = name + (f".{version}" if version else "")
        if not _NAME.fullmatch(free):  # somebody made up a round, or a folder with such a name
            raise OSError(errno.EINVAL, f"{free} would have a number that no run reaches")
        self._used.add(free)
        return free

    def _temporary(self, name: str) -> str:
        """Return the folder in which a checkpoint lies until it is whole."""
        return name if self._storage.is_object_store else f"{_PARTIAL}{name}"

    def _complete(self, name: str, manifest: dict[str, Any]) -> None:
        """Make a checkpoint whole, the files of which are written: write its manifest, last."""
        temporary = self._temporary(name)
        content = {**manifest, "crc32": checksum_of(manifest)}
        self._storage.write_bytes(_manifest_path(temporary), json.dumps(content, indent=1).encode())
        if temporary != name:
            self._storage.move_dir(f"{_FOLDER}/{temporary}", f"{_FOLDER}/{name}")

    def _write(self, name: str, checkpoint: Checkpoint) -> None:
        sums = self._write_files(f"{_FOLDER}/{self._temporary(name)}", checkpoint)
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
        self._complete(name, manifest)

    def _write_files(self, folder: str, checkpoint: Checkpoint) -> dict[str, Sum]:
        """Write all files but the manifest; distant workers write in parallel."""
        local: dict[str, dict[str, Any]] = {}
        distant: dict[str, DistantState] = {}
        for worker_id, state in checkpoint.workers.items():
            assert not isinstance(state, SavedState), "a state that was read is not written again"
            if isinstance(state, dict):
                local[file_of(worker_id)] = state
            else:
                distant[file_of(worker_id)] = state

        def put(name: str, file: TensorFile) -> Sum:
            path = f"{folder}/{name}"  # new; the manifest makes it known
            return self._storage.write_pieces(path, file.pieces(), in_place=True)

        with self._distant_writes(folder, distant) as writes:
            sums = {CENTER: put(CENTER, TensorFile(checkpoint.center))}
            sums[STATE] = put(
                STATE,
                pack({"progress": vars(checkpoint.progress), **checkpoint.state}),
            )
            sums |= {name: put(name, pack(state)) for name, state in local.items()}
            sums |= {name: write.wait() for name, write in writes.items()}
        return sums

    @contextmanager
    def _distant_writes(
        self, folder: str, states: Mapping[str, DistantState]
    ) -> Iterator[dict[str, StateWrite]]:
        """Start the writes of distant states; if anything fails, end them before returning."""
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

    def _delete_unfinished(self) -> None:
        """Delete the rest of writes that a crash or a full disk ended, if the storage permits."""
        whole = self._whole()
        self._delete(name for name in self._deletable() if name not in whole)

    def _deletable(self) -> list[str]:
        """Return the folders of checkpoints, whole or not, that no later driver wrote.

        On a disk a checkpoint has its name only while it is whole. One without a manifest has lost
        it, and stays: its center may be all that is left.
        """
        names = self._storage.list_dir(_FOLDER)  # folders with other names stay
        ours = [n for n in names if _NAME.fullmatch(n) or n.startswith(_PARTIAL)]
        lost = [] if self._storage.is_object_store else self.without_manifest()
        return [n for n in ours if _epoch_of(n) <= self._epoch and n not in lost]

    def _prune(self, written: str) -> None:
        """Delete all checkpoints but the ``keep`` newest, one of which is always ``written``.

        That one is known to be whole, and nothing was deleted before it was: so one readable
        checkpoint remains in any case. A damaged one is not counted, nor one whose round was
        written again.
        """
        try:
            names = self._undamaged()
            if self._earlier is not None:  # this driver has taken over the run
                self._late |= {n for n in names if _age(n).epoch < self._epoch} - self._earlier
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

    def _delete(self, names: Iterable[str]) -> list[str]:
        """Delete folders, and return a sentence for each that could not be deleted."""
        problems = []
        for name in names:
            assert _epoch_of(name) <= self._epoch, f"{name} is of a later driver"
            try:
                self._delete_folder(name)
            except OSError as error:
                problems.append(f"{name} could not be deleted: {error}")
        return problems

    def _delete_folder(self, name: str) -> None:
        """Delete a folder; on a disk a checkpoint first gets the name of one that is not whole."""
        if not self._storage.is_object_store and not name.startswith(_PARTIAL):
            partial_name = f"{_PARTIAL}{name}"
            self._storage.delete_dir(f"{_FOLDER}/{partial_name}")
            self._storage.move_dir(f"{_FOLDER}/{name}", f"{_FOLDER}/{partial_name}")
            name = partial_name
        self._storage.delete_dir(f"{_FOLDER}/{name}")

    def read(self) -> tuple[Checkpoint, list[str]]:
        """Return the newest whole checkpoint, and a sentence for each newer, damaged one.

        The next write deletes the damaged ones. One that cannot be read may be whole, so no older
        one is returned in its place.

        Raises:
            UnreadableCheckpointError: the machine or the storage failed while it was read.
            CheckpointError: there is none, all are damaged, or the newest that is not damaged
                cannot be read or is of a newer format.
        """
        damage: list[str] = []
        for name in reversed(self._whole()):
            try:
                checkpoint = self._read(name)
            except _DamagedError as error:
                self._damaged.add(name)
                damage.append(str(error))
            else:
                self._damaged.discard(name)  # its files may have been restored
                self._read_name = name
                return checkpoint, [*self._lost_after(name), *damage]
        raise CheckpointError(
            below(self.root, _FOLDER), "; ".join(damage) or "there is none to resume from"
        )

    def _lost_after(self, name: str) -> list[str]:
        """Return a sentence for each checkpoint newer than one that has lost its manifest."""
        return [
            f"checkpoint {self._path(lost)} has lost its manifest.json and cannot be resumed from; "
            f"it stays: {CENTER} in it may be whole"
            for lost in self.without_manifest()
            if _age(lost) > _age(name)
        ]

    def _read(self, name: str) -> Checkpoint:
        manifest = self._manifest(name)
        workers = {
            worker_id: self._verified(name, file_of(worker_id), manifest)
            for worker_id in manifest["workers"]
        }
        state = self._parsed(name, STATE, manifest, _state_in)
        center, _ = self._parsed(name, CENTER, manifest, tensor_files.parse)
        try:
            # Files of earlier versions have the progress in the state itself, or no seconds.
            progress = Progress.from_dict({**manifest, **state, **state.pop("progress", {})})
        except ValueError as error:
            raise _DamagedError(self._path(name), f"{STATE}: {error}") from error
        return Checkpoint(
            progress=progress,
            seconds=manifest["seconds"],
            center=center,
            state=state,
            workers=workers,
        )

    def read_center(self, name: str | None = None) -> tuple[dict[str, Tensor], int]:
        """Return a center under the model's own names, and its round.

        Args:
            name: name of the checkpoint; None: the newest.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        names = self.names()
        if not names or (name is not None and name not in names):
            raise CheckpointError(below(self.root, _FOLDER), f"there is no {name or 'checkpoint'}")
        name = name or names[-1]
        manifest = self._manifest(name)
        center, _ = self._parsed(name, CENTER, manifest, tensor_files.parse)
        return center, manifest["round"]

    def _parsed(
        self,
        name: str,
        file_name: str,
        manifest: Manifest,
        parse: Callable[[bytearray], _Content],
    ) -> _Content:
        """Return what a function makes of a file that matches its manifest."""
        expected = self._entry(name, file_name, manifest)
        read = partial(self._if_expected, expected=expected, read=self._storage.read_whole)
        try:
            data = self._read_file(name, file_name, read)
        except MemoryError as error:
            problem = f"{file_name} has {expected.num_bytes:,} bytes, more than fit into memory"
            raise reading_error(self._path(name), problem, error) from error
        found = Sum.of([data]) if isinstance(data, bytearray) else data
        self._compare(name, file_name, found, expected)
        assert isinstance(data, bytearray), "another size is damage"
        try:
            return parse(data)
        except ValueError as error:
            raise _DamagedError(self._path(name), f"{file_name}: {error}") from error

    def _if_expected(
        self, path: str, expected: Sum, read: Callable[[str], _Content]
    ) -> _Content | Sum:
        """Return what a function reads, or the size of a file that is larger than expected.

        Such a file is damaged, and may be huge.
        """
        num_bytes = self._storage.num_bytes(path)
        return Sum(num_bytes, 0) if num_bytes > expected.num_bytes else read(path)

    def _verified(self, name: str, file_name: str, manifest: Manifest) -> SavedState:
        """Read a file in pieces, compare it with the manifest, and return its place."""
        expected = self._entry(name, file_name, manifest)

        def summed(path: str) -> Sum:
            return Sum.of(self._storage.read_pieces(path))

        read = partial(self._if_expected, expected=expected, read=summed)
        self._compare(name, file_name, self._read_file(name, file_name, read), expected)
        return SavedState(self._storage, _file_path(name, file_name), expected)

    def _entry(self, name: str, file_name: str, manifest: Manifest) -> Sum:
        """Return the size and the checksum of a file in the manifest."""
        entry = manifest["files"].get(file_name)
        if entry is None:
            raise _DamagedError(self._path(name), f"{file_name} is missing in its manifest")
        return Sum(entry["bytes"], entry["crc32"])

    def _read_file(self, name: str, file_name: str, read: Callable[[str], _Content]) -> _Content:
        """Return what a function reads from a file's path; after an error, try again.

        Raises:
            _DamagedError: the file is missing, or something else has its name.
            UnreadableCheckpointError: the machine or the storage failed each time.
            CheckpointError: the file cannot be read for another reason, such as its permissions.
        """
        tries = 1
        while True:
            try:
                return read(_file_path(name, file_name))
            except FileNotFoundError as error:
                raise _DamagedError(self._path(name), f"{file_name} is missing") from error
            except OSError as error:
                if is_no_file_of_ours(error):
                    raise _DamagedError(self._path(name), in_words(error)) from error
                if tries == _NUM_TRIES:
                    raise self._reading_error(name, file_name, error) from error
            tries += 1
            self._sleep(_PAUSE_S)

    def _reading_error(self, name: str, file_name: str, error: OSError) -> CheckpointError:
        problem = (
            f"{file_name} cannot be read: {in_words(error)}; the checkpoint may be whole, so "
            f"nothing is deleted: try again, or move its folder away to use the one before it"
        )
        return reading_error(self._path(name), problem, error)

    def _compare(self, name: str, file_name: str, found: Sum, expected: Sum) -> None:
        if found != expected:
            raise _DamagedError(
                self._path(name),
                f"{file_name} is damaged: it has {found.num_bytes} bytes, but "
                f"{expected.num_bytes} were written",
            )

    def has_trained(self, round: int) -> bool:
        """Whether the run's folder holds the trained weights of a run that finished at a round.

        They must have the same bits as the newest checkpoint: an earlier, halted driver may have
        written other weights of that round.
        """
        try:
            trained, of_round = self._trained()
            center, newest = self.read_center()
        except (OSError, ValueError, CheckpointError):
            return False
        return of_round in (None, round) and newest == round and _are_same(trained, center)

    def _trained(self) -> tuple[dict[str, Tensor], int | None]:
        """Return the trained weights and their round, or None in a file of an earlier version."""
        tensors, values = tensor_files.load(self._storage, TRAINED)
        if unknown := values.keys() - {"round"}:
            raise ValueError(f"it is damaged: it has an unknown {min(unknown)}")
        return tensors, values.get("round")

    def find_damage(self) -> list[str]:
        """Read all files of all checkpoints, and return a sentence for each damaged one.

        Raises:
            CheckpointError: the checkpoints cannot be listed.
        """
        errors = {}
        for name in self.names():
            try:
                self._read(name)
            except CheckpointError as error:
                errors[name] = str(error)
        missing = self.without_manifest()
        if errors or missing:
            self._sleep(_PAUSE_S)  # a run that trains may be deleting them
            missing = sorted({*missing} & {*self.without_manifest()}, key=_age)
        damage = [error for name, error in errors.items() if self._has_manifest(name)]
        damage += [f"checkpoint {self._path(name)}: has no manifest" for name in missing]
        if self._storage.exists(TRAINED):
            try:
                self._refuse_late_center(*self._trained())
            except (OSError, ValueError) as error:
                damage.append(f"{below(self.root, TRAINED)}: {error}")
        return damage

    def _refuse_late_center(self, trained: dict[str, Tensor], of_round: int | None) -> None:
        """Raise a ValueError if the trained weights are another center of the newest round."""
        try:
            center, newest = self.read_center()
        except CheckpointError:
            return  # find_damage reports it
        if of_round == newest and not _are_same(trained, center):
            raise ValueError(
                f"it differs from the center of the newest checkpoint, of round {newest}: an "
                f"earlier driver may have written it late; the same command with --resume writes "
                f"it again"
            )

    def write_trained(self, center: dict[str, Tensor], round: int) -> None:
        """Write the center of a finished run into the run's folder, as ``center.safetensors``.

        Raises:
            CheckpointError: the storage failed.
        """
        try:
            # Without the driver epoch: a run that was resumed ends with the same bits.
            file = tensor_files.seal(center, {"round": round})
            self._storage.write_pieces(TRAINED, file.pieces())
        except OSError as error:
            path = below(self.root, TRAINED)
            raise CheckpointError(path, f"could not be written: {in_words(error)}") from error

    def _manifest(self, name: str) -> Manifest:
        read = partial(self._storage.read_bytes, most=JSON_BYTES)
        data = self._read_file(name, "manifest.json", read)
        try:
            return parse_manifest(data)
        except NewerFormatError as error:
            raise CheckpointError(self._path(name), str(error)) from None
        except ValueError as error:
            raise _DamagedError(self._path(name), f"its manifest is damaged: {error}") from error

    def _path(self, name: str) -> str:
        return below(self.root, f"{_FOLDER}/{name}")


def _file_path(name: str, file_name: str) -> str:
    """Return the path of a checkpoint's file in the run's folder."""
    return f"{_FOLDER}/{name}/{file_name}"


def _manifest_path(name: str) -> str:
    return _file_path(name, "manifest.json")


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
    """Return the driver epoch of the folder of a checkpoint, whole or not."""
    match = _NAME.fullmatch(folder.removeprefix(_PARTIAL))
    return int(match[2] or 1) if match else 1


def _state_in(data: bytearray) -> dict[str, Any]:
    """Return the state in a ``state.safetensors``.

    Raises:
        ValueError: it is damaged.
    """
    return {**typed(State, unpack(data))}


def _are_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
