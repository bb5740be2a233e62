"""Transfers of worker states to files and from them, for checkpoints and for handovers.

A worker that sees the run's storage writes and reads its own file. A worker may not see it: the
storage may be a disk of another machine, or the worker may lack credentials. Then the driver passes
the state on piece by piece, one worker at a time, so that it never holds more than two pieces.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from raydl.core.saved_state import SavedState
from raydl.errors import CheckpointError, RaydlError, StateLostError
from raydl.ray_backend.pending_calls import in_few_words
from raydl.storage import Storage, Sum

PIECE_BYTES = 16 << 20
"""Size of a piece that passes through the driver, in bytes."""
SILENCE_S = 20.0
"""Seconds without progress of a worker's write after which the driver fetches the state instead."""
ANSWER_S = 60.0
"""The longest wait for a piece of a state, in seconds."""
_CHECK_EVERY_S = 1.0
_HANDOVERS = "handovers"


@dataclass(eq=False)
class RayState:
    """A state that a worker holds for a checkpoint; see ``raydl.core.saved_state.DistantState``."""

    worker: ActorHandle
    worker_id: str
    round: int
    """The round of the state."""
    without_storage: set[str]
    """Workers that do not see the storage; ``RayStateWrite`` adds to it."""

    def begin_write(self, storage: Storage, name: str, token: str) -> RayStateWrite:
        """Begin the write, by the worker itself if it may see the storage."""
        ref, address = None, storage.address
        if address is not None and self.worker_id not in self.without_storage:
            ref = self.worker.write_held.remote(self.round, address, name, token)
        return RayStateWrite(self, storage, name, ref)

    def release(self) -> None:
        """Let the worker release the state."""
        self.worker.release.remote(self.round)


@dataclass(eq=False)
class RayStateWrite:
    """The write of a worker's state to its file."""

    state: RayState
    storage: Storage
    """The run's folder."""
    name: str
    """Name of the file in it."""
    ref: Any
    """The call in which the worker writes; None: it does not see the storage."""

    def wait(self) -> Sum:
        """Wait for the write by the worker, or write through this process; return the file's sum.

        Raises:
            StateLostError: if the worker was lost.
        """
        try:
            written = self._written_by_worker()
            if written is not None:
                return written
            return self.storage.write_pieces(self.name, self._pieces(), in_place=True)
        except RayError as error:
            raise StateLostError(self.state.worker_id, in_few_words(error)) from error

    def _written_by_worker(self) -> Sum | None:
        """Wait while the worker makes progress; return None if it cannot write, or not now."""
        if self.ref is None:
            return None
        worker, num_before, received_at = self.state.worker, -1, time.monotonic()
        what = f"to write {self.name}, by {self.state.worker_id} itself"
        with self.storage.waiting(what) as note_answer:
            while not ray.wait([self.ref], timeout=_CHECK_EVERY_S)[0]:
                num_bytes = ray.get(worker.num_written.remote(), timeout=ANSWER_S)
                if num_bytes != num_before:
                    num_before, received_at = num_bytes, time.monotonic()
                    note_answer()
                elif time.monotonic() - received_at > SILENCE_S:
                    self._stop_worker()
                    return None
            try:
                written: Sum | None = ray.get(self.ref)
            except RayTaskError as error:
                if isinstance(error.cause, OSError):  # this process may succeed, or fails as well
                    return None
                raise
        if written is None:
            self.state.without_storage.add(self.state.worker_id)
        return written

    def _stop_worker(self) -> None:
        """End the worker's write, which makes no progress; this process may write afterwards.

        Raises:
            OSError: the write has not ended; it might still replace what this process writes.
        """
        worker_id = self.state.worker_id
        self.state.without_storage.add(worker_id)  # of the next checkpoints
        self.cancel(time.monotonic() + SILENCE_S)
        if not ray.wait([self.ref], timeout=0)[0]:
            raise OSError(f"{worker_id} has not ended its write of {self.name}")

    def _pieces(self) -> Iterator[np.ndarray]:
        """Yield the worker's state in pieces; the next one is fetched while one is written."""
        worker, round = self.state.worker, self.state.round
        num_bytes = ray.get(worker.num_held.remote(round), timeout=ANSWER_S)
        coming = worker.read_held.remote(round, 0, PIECE_BYTES)
        for start in range(PIECE_BYTES, num_bytes + PIECE_BYTES, PIECE_BYTES):
            piece: np.ndarray = ray.get(coming, timeout=ANSWER_S)
            if start < num_bytes:
                coming = worker.read_held.remote(round, start, PIECE_BYTES)
            yield piece

    def cancel(self, until: float) -> None:
        """Stop the worker's write, and wait for its end until then (monotonic seconds)."""
        if self.ref is not None:
            self.state.worker.stop_writing.remote()
            ray.wait([self.ref], timeout=max(0.0, until - time.monotonic()))


_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Handovers:
    """Replicas handed from leavers to their replacements, as files in the run's storage.

    If both see the storage, as for checkpoints, nothing passes through the driver. A file remains
    until it is forgotten. Files of earlier starts are deleted when the run starts.
    """

    storage: Storage
    """The run's folder."""
    run_id: str
    """Prefix of the file names of this start."""

    def keep(self, state: RayState, then: Callable[[SavedState | Exception], None]) -> None:
        """Write a state that a worker holds, in a thread.

        Args:
            state: the held state.
            then: called in that thread with the written file, or with the error.
        """
        # A unique name: a write that was given up may still be under way.
        name = f"{_HANDOVERS}/{self.run_id}-{state.worker_id}-{uuid.uuid4().hex[:8]}.safetensors"

        def work() -> None:
            try:
                then(SavedState(self.storage, name, self._write(state, name)))
            except (OSError, RaydlError, RayError) as error:
                self._delete(name)
                then(error)

        _begin(work)

    def _write(self, state: RayState, name: str) -> Sum:
        token = f"{name}.token"
        self.storage.write_bytes(token, b"")
        try:
            return state.begin_write(self.storage, name, token).wait()
        finally:
            self._delete(token)

    def forget(self, saved: SavedState) -> None:
        """Delete a file, in a thread."""
        _begin(lambda: self._delete(saved.name))

    def clear(self, *, all: bool = False) -> threading.Thread:
        """Delete the files of earlier starts, in a thread; with ``all`` those of this one, too."""

        def work() -> None:
            with suppress(OSError, RaydlError):
                for name in self.storage.list_dir(_HANDOVERS):
                    if all or not name.startswith(self.run_id):
                        self._delete(f"{_HANDOVERS}/{name}")
                if all:
                    self.storage.delete_dir(_HANDOVERS)

        return _begin(work)

    def _delete(self, name: str) -> None:
        with suppress(OSError, RaydlError):  # no such file, or a later driver owns the run
            self.storage.delete_file(name)


def _begin(work: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread: the end of the process does not wait for it."""
    thread = threading.Thread(target=work, name="state-of-worker", daemon=True)
    thread.start()
    return thread


def feed(worker: ActorHandle, saved: SavedState, then: Callable[[Exception | None], None]) -> None:
    """Send a state from a file to a worker that cannot read the file, in a thread.

    Args:
        worker: its actor.
        saved: the file.
        then: called in that thread with None once the worker has the state, or with the error.
    """

    def work() -> None:
        problem: Exception | None = None
        try:
            with _one_at_a_time:
                _feed(worker, saved)
        except OSError as error:
            problem = CheckpointError(saved.path, f"cannot be read: {error}")
        except (RayError, CheckpointError) as error:
            problem = error
        then(problem)

    _begin(work)


def _feed(worker: ActorHandle, saved: SavedState) -> None:
    start = 0
    for piece in _joined(saved.storage.read_pieces(saved.name), PIECE_BYTES):
        array = np.frombuffer(piece, np.uint8)  # Ray sends arrays without another copy
        ray.get(worker.feed_state.remote(start, array, saved.written), timeout=ANSWER_S)
        start += len(piece)
    if not ray.get(worker.has_own_state.remote(), timeout=ANSWER_S):
        raise CheckpointError(saved.path, "is damaged: its checksum differs")


def _joined(pieces: Iterator[bytes], num_bytes: int) -> Iterator[bytes]:
    """Yield the same bytes in pieces of ``num_bytes`` or a little more."""
    gathered: list[bytes] = []
    for piece in pieces:
        gathered.append(piece)
        if sum(map(len, gathered)) >= num_bytes:
            yield b"".join(gathered)
            gathered = []
    if gathered:
        yield b"".join(gathered)
