"""States of workers on their way to files, and from them: a checkpoint's, or for a replacement.

A worker that sees the run's storage writes and reads its own file. One that does not, since the
storage is a disk of another machine, say, or it has no credentials, hands its state to the driver
piece by piece, and gets it so; then one worker after the other, so that the driver never holds
more than two pieces.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
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
"""A worker that has written nothing for so long is asked for its state instead, in seconds."""
ANSWER_S = 60.0
"""The longest wait for a piece of a state, in seconds."""
_LOOK_EVERY_S = 1.0
_HANDOVERS = "handovers"


class RayState:
    """A state that a worker holds for a checkpoint; see ``raydl.checkpoint.store.DistantState``.

    Args:
        worker: its actor.
        worker_id: its id.
        round: the round that it holds.
        blind: workers that do not see the storage, which it adds itself to.
        on_loss: is told, in whichever thread, why the state will not come; None: nobody is.
    """

    def __init__(
        self,
        worker: ActorHandle,
        worker_id: str,
        round: int,
        *,
        blind: set[str],
        on_loss: Callable[[str], None] | None = None,
    ) -> None:
        self.worker = worker
        self.worker_id = worker_id
        self.round = round
        self._blind = blind
        self._on_loss = on_loss

    def begin_write(self, storage: Storage, name: str, token: str) -> RayStateWrite:
        """Let the worker write, if it sees the storage."""
        ref, address = None, storage.address
        if address is not None and self.worker_id not in self._blind:
            ref = self.worker.write_held.remote(self.round, address, name, token)
        return RayStateWrite(self, storage, name, ref)

    def release(self) -> None:
        """Let the worker hold the state no more."""
        self.worker.release.remote(self.round)

    def note_blind(self) -> None:
        """Note that the worker can not write by itself."""
        self._blind.add(self.worker_id)

    def lost(self, error: RayError) -> StateLostError:
        """Tell that the state will not come; return the error that says so."""
        lost = StateLostError(self.worker_id, in_few_words(error))
        if self._on_loss is not None:
            self._on_loss(str(lost))
        return lost


class RayStateWrite:
    """A worker's state on its way to its file.

    Args:
        state: what is written.
        storage: the run's folder.
        name: of the file in it.
        ref: the call with which the worker writes; None: it can not.
    """

    def __init__(self, state: RayState, storage: Storage, name: str, ref: Any) -> None:
        self._state = state
        self._storage = storage
        self._name = name
        self._ref = ref

    def wait(self) -> Sum:
        """Return the file that was written, by the worker or through this process."""
        try:
            written = self._written_there()
            if written is not None:
                return written
            return self._storage.write_pieces(self._name, self._pieces())
        except RayError as error:
            raise self._state.lost(error) from error

    def _written_there(self) -> Sum | None:
        """Wait for the worker as long as it gets on; None: it can not write, or not now."""
        if self._ref is None:
            return None
        worker, num_before, heard_at = self._state.worker, -1, time.monotonic()
        what = f"to write {self._name}, by {self._state.worker_id} itself"
        with self._storage.waiting(what) as hear:
            while not ray.wait([self._ref], timeout=_LOOK_EVERY_S)[0]:
                num_bytes = ray.get(worker.num_written.remote(), timeout=ANSWER_S)
                if num_bytes != num_before:
                    num_before, heard_at = num_bytes, time.monotonic()
                    hear()
                elif time.monotonic() - heard_at > SILENCE_S:
                    worker.stop_writing.remote()
                    return None
            return self._answer()

    def _answer(self) -> Sum | None:
        try:
            written: Sum | None = ray.get(self._ref)
        except RayTaskError as error:
            if isinstance(error.cause, OSError):  # this process is refused as well, or is not
                return None
            raise
        if written is None:
            self._state.note_blind()
        return written

    def _pieces(self) -> Iterator[np.ndarray]:
        """Yield the worker's state in pieces; the next piece is on its way while one is written."""
        worker, round = self._state.worker, self._state.round
        num_bytes = ray.get(worker.num_held.remote(round), timeout=ANSWER_S)
        coming = worker.read_held.remote(round, 0, PIECE_BYTES)
        for start in range(PIECE_BYTES, num_bytes + PIECE_BYTES, PIECE_BYTES):
            piece: np.ndarray = ray.get(coming, timeout=ANSWER_S)
            if start < num_bytes:
                coming = worker.read_held.remote(round, start, PIECE_BYTES)
            yield piece

    def cancel(self, until: float) -> None:
        """Let the worker write no more."""
        if self._ref is not None:
            self._state.worker.stop_writing.remote()
            ray.wait([self._ref], timeout=max(0.0, until - time.monotonic()))


_one_at_a_time = threading.Lock()


class Handovers:
    """States handed from leaving workers to their replacements: files in the run's storage.

    Where leaver and newcomer see the storage, as with checkpoints, nothing passes through the
    driver. A file is there until it is forgotten; those of an earlier start go when a run begins.

    Args:
        storage: the run's folder.
        run_id: begins the names of this start's files.
    """

    def __init__(self, storage: Storage, run_id: str) -> None:
        self._storage = storage
        self._run_id = run_id

    def keep(self, state: RayState, then: Callable[[SavedState | Exception], None]) -> None:
        """Write what a worker holds, in a thread.

        Args:
            state: what it holds.
            then: is told in that thread where it is, or why it is not.
        """
        # A name of its own: a file that was given up may be written yet.
        name = f"{_HANDOVERS}/{self._run_id}-{state.worker_id}-{uuid.uuid4().hex[:8]}.safetensors"

        def work() -> None:
            try:
                then(SavedState(self._storage, name, self._keep(state, name)))
            except (OSError, RaydlError, RayError) as error:
                self._delete(name)
                then(error)

        _begin(work)

    def _keep(self, state: RayState, name: str) -> Sum:
        token = f"{name}.token"
        self._storage.write_bytes(token, b"")
        try:
            return state.begin_write(self._storage, name, token).wait()
        finally:
            self._delete(token)

    def forget(self, saved: SavedState) -> None:
        """Delete a file, in a thread."""
        _begin(lambda: self._delete(saved.name))

    def clear(self, *, all: bool = False) -> threading.Thread:
        """Delete what earlier starts have left, in a thread; with ``all`` that of this one, too."""

        def work() -> None:
            with suppress(OSError, RaydlError):
                for name in self._storage.list_dir(_HANDOVERS):
                    if all or not name.startswith(self._run_id):
                        self._delete(f"{_HANDOVERS}/{name}")
                if all:
                    self._storage.delete_dir(_HANDOVERS)

        return _begin(work)

    def _delete(self, name: str) -> None:
        with suppress(OSError, RaydlError):  # it was not there, or a later driver has the run
            self._storage.delete_file(name)


def _begin(work: Callable[[], None]) -> threading.Thread:
    """Start a thread that may be left behind."""
    thread = threading.Thread(target=work, name="state-of-worker", daemon=True)
    thread.start()
    return thread


def feed(worker: ActorHandle, saved: SavedState, then: Callable[[Exception | None], None]) -> None:
    """Hand a worker that can not read it its state from a file, in a thread.

    Args:
        worker: its actor.
        saved: where the state is.
        then: is told in that thread that the worker has it, or why it has not.
    """

    def work() -> None:
        problem: Exception | None = None
        try:
            with _one_at_a_time:
                _feed(worker, saved)
        except OSError as error:
            problem = CheckpointError(saved.path, f"can not be read: {error}")
        except (RayError, CheckpointError) as error:
            problem = error
        then(problem)

    _begin(work)


def _feed(worker: ActorHandle, saved: SavedState) -> None:
    for piece in _joined(saved.storage.read_pieces(saved.name), PIECE_BYTES):
        array = np.frombuffer(piece, np.uint8)  # which Ray hands over without another copy
        ray.get(worker.feed_state.remote(array, saved.written), timeout=ANSWER_S)
    if not ray.get(worker.has_own_state.remote(), timeout=ANSWER_S):
        raise CheckpointError(saved.path, "is damaged: its checksum is another")


def _joined(pieces: Iterator[bytes], num_bytes: int) -> Iterator[bytes]:
    """Yield the same contents in pieces of ``num_bytes`` or a little more."""
    gathered: list[bytes] = []
    for piece in pieces:
        gathered.append(piece)
        if sum(map(len, gathered)) >= num_bytes:
            yield b"".join(gathered)
            gathered = []
    if gathered:
        yield b"".join(gathered)
