"""Checkpoints on their way to the run's folder, in a thread of their own."""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from raydl.checkpoint.best import BestCenter
from raydl.checkpoint.store import TRAINED, Checkpoint, CheckpointStore
from raydl.checkpoint.totals import Totals
from raydl.core.autotune import ExchangeTuning
from raydl.core.center import Snapshot
from raydl.core.flat import FlatModel
from raydl.core.tensor_files import view_of
from raydl.core.worker_group import Collected, Evaluated
from raydl.data.ledger import Ledger
from raydl.errors import CheckpointError, StateLostError, StorageSilentError
from raydl.storage import GIVE_UP_S, Storage, give_up

_NOTHING = Totals()
_ADVICE = "once it can be, the same command with --resume ends the run"
_LATER = "once it answers, the same command with --resume goes on from the newest checkpoint"
_LOOK_EVERY_S = 0.05
_REFUGE_S = 30.0
"""The longest that what was trained is written to another disk, in seconds."""
_RETRY_S = 60.0
"""For how long the last files of a run are tried to be written."""
_AGAIN_S = 1.0


def checkpoint_of(
    collected: Collected,
    flat: FlatModel,
    *,
    seconds: float,
    totals: Totals = _NOTHING,
    order: str = "",
    ended: tuple[str, str] = ("", ""),
) -> Checkpoint:
    """Return the files to write for a collected round.

    Args:
        collected: the states of a round.
        flat: names the weights.
        seconds: training time up to it, over all starts.
        totals: what all starts did up to it.
        order: name of the order of the samples, which the ledger's positions are in.
        ended: by what the run was ended with this round, and why; empty: it goes on.
    """
    snapshot = collected.snapshot
    weights, buffers = view_of(snapshot.weights), view_of(snapshot.buffers)
    return Checkpoint(
        progress=snapshot.progress,
        seconds=seconds,
        center=flat.state_dict_of(weights, buffers, snapshot.non_trainable, copies=False),
        state={
            "optimizer": snapshot.optimizer,
            "num_cuts": snapshot.num_cuts,
            "cadence": vars(snapshot.tuning) if snapshot.tuning else None,
            # Who goes on from here has not trained on what was claimed.
            "ledger": Ledger.from_state_dict(snapshot.ledger).state_dict(),
            "totals": totals.to_state(),
            "order": order,
            "untrained": flat.non_trainable.unsaved(),
            "ended": ended,
        },
        workers=collected.workers,
    )


def snapshot_of(checkpoint: Checkpoint, flat: FlatModel) -> Snapshot:
    """Return the snapshot that a checkpoint was made of.

    Raises:
        ShapeError: the checkpoint is of another model.
    """
    weights, buffers = flat.flatten(checkpoint.center)
    return Snapshot(
        progress=checkpoint.progress,
        is_kept=True,
        weights=weights.numpy(),
        buffers=np.asarray(buffers),
        optimizer=checkpoint.state["optimizer"],
        ledger=checkpoint.state["ledger"],
        num_cuts=checkpoint.state.get("num_cuts", 0),  # earlier ones have none
        tuning=ExchangeTuning(**tuning) if (tuning := checkpoint.state.get("cadence")) else None,
    )


class CheckpointWriter:
    """Writes checkpoints and the best center one after the other; nobody waits for it.

    Args:
        store: where checkpoints go.
        flat: names the weights.
        best: where the best center goes.
        order: name of the order of the samples.
        after: called when a checkpoint was written; an ``OSError`` of it is a failure to be told.
        unanswered: see ``raydl.storage.Storage.unanswered``.
        refuge: a folder on another disk, for the newest center if the storage does not take it;
            None: one of the system's temporary folders.
    """

    def __init__(
        self,
        store: CheckpointStore,
        flat: FlatModel,
        best: BestCenter,
        *,
        order: str = "",
        after: Callable[[], None],
        unanswered: Callable[[int | None], tuple[float, str]] = lambda thread: (0.0, ""),
        refuge: Path | None = None,
    ) -> None:
        self._unanswered = unanswered
        self._refuge = refuge
        self._unwritten: Collected | None = None
        self._is_best_due = False
        self._store = store
        self._flat = flat
        self._best = best
        self._order = order
        self._after = after
        self._work = _Work("checkpoint")
        self._writing: list[Future[None]] = []
        self._troubles: deque[str] = deque()
        self.written_at: float | None = None
        """When the newest checkpoint was whole, by the monotonic clock; None: there is none yet."""
        self.has_failed = False
        """Whether the newest one could not be written, or is being written."""
        self._trained_round = -1
        self._finishing: list[Future[None]] = []
        self._is_aborted = threading.Event()

    def checkpoint(
        self,
        collected: Collected,
        *,
        seconds: float,
        totals: Totals,
        ended: tuple[str, str] = ("", ""),
    ) -> None:
        """Write a checkpoint.

        Args:
            collected: the states of a round.
            seconds: training time up to it, over all starts.
            totals: what all starts did up to it.
            ended: see ``checkpoint_of``.
        """
        self._unwritten = collected
        write = self._work.submit(self._write, collected, seconds, totals, ended)
        self._writing.append(write)

    def _write(
        self, collected: Collected, seconds: float, totals: Totals, ended: tuple[str, str]
    ) -> None:
        checkpoint = checkpoint_of(
            collected, self._flat, seconds=seconds, totals=totals, order=self._order, ended=ended
        )
        self.has_failed = True
        try:
            if collected.is_last:
                self._write_last(checkpoint)
            else:
                self._store.write(checkpoint)
        finally:
            for state in collected.workers.values():
                if not isinstance(state, dict):
                    state.release()
        if self._unwritten is collected:
            self._unwritten = None
        self.has_failed, self.written_at = False, time.monotonic()
        try:
            self._after()
        except OSError as error:  # the checkpoint itself is whole
            self._troubles.append(f"{error}; they come with the next checkpoint")

    def _write_last(self, checkpoint: Checkpoint) -> None:
        """Write what a run is for, then its last checkpoint, which takes more room.

        Raises:
            CheckpointError: one of them could not be written for a minute.
        """
        try:
            self._write_trained(checkpoint.center, checkpoint.progress.round)
        finally:
            self._retry(lambda: self._store.write(checkpoint))

    def _write_trained(self, center: dict[str, Tensor], round: int) -> None:
        self._retry(lambda: self._store.write_trained(center, round))
        self._trained_round = round

    def finish(self) -> None:
        """Write what was trained, if the last checkpoint came before it was known to be that."""
        self._finishing.append(self._work.submit(self._write_trained_of_newest))

    def _write_trained_of_newest(self) -> None:
        if self._store.newest_round > self._trained_round:
            self._write_trained(*self._store.read_center())

    def _retry(self, write: Callable[[], object]) -> None:
        """Write; if that fails, again and again for a minute: somebody may make room."""
        until, is_first = time.monotonic() + _RETRY_S, True
        while True:
            try:
                write()
                return
            except StateLostError:
                raise
            except CheckpointError as error:
                if time.monotonic() > until or self._is_aborted.is_set():
                    raise CheckpointError(error.path, f"{error.problem}; {_ADVICE}") from error
                if is_first:
                    self._troubles.append(f"{error}; it is tried again for {_RETRY_S:.0f} s")
                is_first = False
            self._is_aborted.wait(_AGAIN_S)

    def abort(self) -> None:
        """Retry nothing any more: somebody wants an end at once."""
        self._is_aborted.set()

    def score(self, evaluated: Evaluated) -> None:
        """Write the center that was scored if it came along and is the best."""
        if self._best.note_center(evaluated) and not self._is_best_due:
            self._is_best_due = True
            self._work.submit(self._write_best)

    def _write_best(self) -> None:
        self._is_best_due = False  # one that comes from here on is another one
        try:
            self._best.write()
        except CheckpointError as error:
            self._troubles.append(f"{error}; it is tried again after the next evaluation")

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written: the next one waits for it."""
        return any(not future.done() for future in self._writing)

    @property
    def num_late(self) -> int:
        """Checkpoints that an earlier driver completed after this one had taken the run over."""
        return self._store.num_late

    def pop_failures(self) -> list[str]:
        """Return, once, what could not be written; the next time it may go through.

        Of checkpoints the newest is not among them: see ``close``.
        """
        said = []
        while self._troubles:
            said.append(self._troubles.popleft())
        for future in [f for f in self._writing[:-1] if f.done()]:
            self._writing.remove(future)
            error = future.exception()
            if error is not None and not isinstance(error, StateLostError):  # which was told
                said.append(f"{error}; training goes on, the next one may go through")
        return said

    @property
    def is_given_up(self) -> bool:
        """Whether the storage has been silent for so long that nothing waits for it."""
        return self._unanswered(self._work.thread)[0] > GIVE_UP_S

    def wait(self) -> None:
        """Wait until all is written, for as long as the storage answers. Nothing comes after that.

        Raises:
            StorageSilentError: it did not answer for too long.
        """
        self._work.close()
        while not self._work.wait(_LOOK_EVERY_S):
            if self.is_given_up:
                give_up(self._store.root)
                seconds, what = self._unanswered(self._work.thread)
                raise StorageSilentError(self._store.root, seconds, what, _LATER)

    def close(self) -> None:
        """Finish what is being written; the newest center goes to another disk if it has to.

        Raises:
            CheckpointError: the last checkpoint could not be written.
            StorageSilentError: the storage did not answer for too long.
        """
        try:
            self.wait()
            for future in [*self._writing[-1:], *self._finishing]:
                future.result()
        except StorageSilentError as error:
            saved = self._save_elsewhere()
            then = f"{error.then}{saved}"
            raise StorageSilentError(error.root, error.seconds, error.what, then) from None
        except CheckpointError as error:
            saved = self._save_elsewhere()
            raise CheckpointError(error.path, f"{error.problem}{saved}") from error
        except BaseException:  # Ctrl-C
            self.abort()
            if not self._work.wait(0):
                give_up(self._store.root)
            raise

    def _save_elsewhere(self) -> str:
        """Write the newest center, if the storage has it not, to a disk of this machine.

        Returns:
            The end of a sentence, with the file; empty: there is nothing to save, or it can not be
            written there either.
        """
        last = self._unwritten
        if last is None or self._trained_round >= last.snapshot.progress.round:
            return ""
        center = checkpoint_of(last, self._flat, seconds=0.0).center
        saved: list[Path] = []

        def save() -> None:
            with suppress(OSError, CheckpointError):
                folder = self._refuge or Path(tempfile.mkdtemp(prefix="raydl-"))
                store = CheckpointStore(Storage(str(folder)))
                store.write_trained(center, last.snapshot.progress.round)
                saved.append(folder / TRAINED)

        thread = threading.Thread(target=save, name="refuge", daemon=True)
        thread.start()
        thread.join(_REFUGE_S)  # that disk may hang as well
        return f"; the newest center is in {saved[0]}" if saved else ""


class _Work:
    """Calls that a thread makes one after the other, which may be left behind with the thread.

    A pool of the standard library would not do: the end of the process waits for its threads.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None]
        self._calls = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., None], *arguments: Any) -> Future[None]:
        """Let something be called after all that was submitted before."""
        if self._is_closed:
            raise RuntimeError("nothing can be written after the end")
        future: Future[None] = Future()
        self._calls.put((future, partial(call, *arguments)))
        return future

    @property
    def thread(self) -> int | None:
        """The thread's number."""
        return self._thread.ident

    def close(self) -> None:
        """Take nothing more."""
        if not self._is_closed:
            self._is_closed = True
            self._calls.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of all, after ``close``; return whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (next_call := self._calls.get()) is not None:
            future, call = next_call
            try:
                call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del next_call, future, call  # with the states that a checkpoint is made of
