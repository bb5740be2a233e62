"""Writes checkpoints to the run's folder in a thread of its own."""

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
from raydl.config.typed import typed
from raydl.core.autotune import ExchangeTuning
from raydl.core.center import Snapshot
from raydl.core.flat import FlatModel
from raydl.core.scores import Evaluated
from raydl.core.tensor_files import view_of
from raydl.core.worker_group import Collected
from raydl.data.ledger import Ledger
from raydl.errors import CheckpointError, StateLostError, StorageSilentError
from raydl.storage import GIVE_UP_S, Storage, give_up

_NO_TOTALS = Totals()
_POLL_S = 0.05
_FALLBACK_S = 30.0
"""Time-out for writing the trained weights to another disk, in seconds."""
_RETRY_S = 60.0
"""Seconds for which the writes of a run's last files are retried."""
_RETRY_EVERY_S = 1.0


def checkpoint_of(
    collected: Collected,
    flat: FlatModel,
    *,
    seconds: float,
    totals: Totals = _NO_TOTALS,
    order: str = "",
    ended: tuple[str, str] = ("", ""),
) -> Checkpoint:
    """Return the checkpoint of a collected round.

    Args:
        collected: the states of the round.
        flat: names the weights.
        seconds: training time up to the round, over all starts.
        totals: totals of all starts up to the round.
        order: name of the order of the samples, to which the ledger's positions refer.
        ended: the callback that ended the run in this round, and its reason; empty if the run
            goes on.
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
            # Without claims: a worker that resumes has not trained the claimed samples.
            "ledger": Ledger.from_state_dict(snapshot.ledger).state_dict(),
            "totals": totals.to_state(),
            "order": order,
            "untrained": flat.non_trainable.unsaved(),
            "unfrozen": [*flat.unfrozen, *collected.unfrozen],
            "num_parameters": len(snapshot.weights),
            "ended": ended,
        },
        workers=collected.workers,
    )


def snapshot_of(checkpoint: Checkpoint, flat: FlatModel) -> Snapshot:
    """Return the snapshot from which a checkpoint was made.

    Raises:
        ShapeError: the checkpoint is of another model.
        ValueError: its state is damaged.
    """
    weights, buffers = flat.flatten(checkpoint.center)
    cadence = checkpoint.state.get("cadence")
    return Snapshot(
        progress=checkpoint.progress,
        is_kept=True,
        weights=weights.numpy(),
        buffers=np.asarray(buffers),
        optimizer=checkpoint.state["optimizer"],
        ledger=checkpoint.state["ledger"],
        num_cuts=checkpoint.state.get("num_cuts", 0),  # absent in earlier versions
        tuning=typed(ExchangeTuning, cadence, "cadence") if cadence else None,
    )


class CheckpointWriter:
    """Writes checkpoints and the best center, one after the other, in a thread.

    Args:
        store: the run's checkpoints.
        flat: names the weights.
        best: the run's best center.
        order: name of the order of the samples.
        after: called after each checkpoint; its ``OSError`` is reported as a failure.
        unanswered: see ``raydl.storage.Storage.unanswered``.
        fallback_dir: a folder on another disk for the newest center if the storage fails; None: a
            temporary folder of the system.
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
        fallback_dir: Path | None = None,
    ) -> None:
        self._unanswered = unanswered
        self._fallback_dir = fallback_dir
        self._unwritten: Collected | None = None
        self._is_best_due = False
        self._store = store
        self._flat = flat
        self._best = best
        self._order = order
        self._after = after
        self._thread = _CallThread("checkpoint")
        self._writes: list[Future[None]] = []
        self._failures: deque[str] = deque()
        self.written_at: float | None = None
        """When the newest checkpoint became whole, by the monotonic clock, or None."""
        self.has_failed = False
        """Whether the newest checkpoint could not be written, or is being written."""
        self._trained_round = -1
        self._retry_trained_s = _RETRY_S  # 0 once they have failed for that long
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
        """Write a checkpoint in the thread; arguments as for ``checkpoint_of``."""
        self._unwritten = collected
        write = self._thread.submit(self._write, collected, seconds, totals, ended)
        self._writes.append(write)

    def _write(
        self, collected: Collected, seconds: float, totals: Totals, ended: tuple[str, str]
    ) -> None:
        checkpoint = checkpoint_of(
            collected, self._flat, seconds=seconds, totals=totals, order=self._order, ended=ended
        )
        self.has_failed = True
        try:
            self._write_and_release(collected, checkpoint)
        except StateLostError as error:
            # After the release, which would otherwise drop the states that a new attempt holds.
            if collected.on_loss is not None:
                collected.on_loss(str(error))
            raise
        if self._unwritten is collected:
            self._unwritten = None
        self.has_failed, self.written_at = False, time.monotonic()
        try:
            self._after()
        except OSError as error:  # the checkpoint itself is whole
            self._failures.append(f"{error}; retrying with the next checkpoint")

    def _write_and_release(self, collected: Collected, checkpoint: Checkpoint) -> None:
        try:
            if collected.is_last:
                self._write_last(checkpoint)
            else:
                self._store.write(checkpoint)
        finally:
            for state in collected.workers.values():
                if not isinstance(state, dict):
                    state.release()

    def _write_last(self, checkpoint: Checkpoint) -> None:
        """Write the trained weights first, then the last checkpoint, which needs more space.

        Raises:
            CheckpointError: one of them could not be written for a minute.
        """
        try:
            self._write_trained(checkpoint.center, checkpoint.progress.round)
        finally:
            self._retry(lambda: self._store.write(checkpoint), retry_s=_RETRY_S)

    def _write_trained(self, center: dict[str, Tensor], round: int) -> None:
        retry_s, self._retry_trained_s = self._retry_trained_s, 0.0
        self._retry(lambda: self._store.write_trained(center, round), retry_s=retry_s)
        self._trained_round, self._retry_trained_s = round, _RETRY_S

    def finish(self) -> None:
        """Write the trained weights, unless they came with the last checkpoint."""

        def write() -> None:
            if self._store.newest_round > self._trained_round:
                self._write_trained(*self._store.read_center())

        self._finishing.append(self._thread.submit(write))

    def _retry(self, write: Callable[[], object], *, retry_s: float) -> None:
        """Write; retry failures for a time, in which a person may free disk space."""
        until, is_first = time.monotonic() + retry_s, True
        while True:
            try:
                write()
                return
            except StateLostError:
                raise
            except CheckpointError as error:
                if time.monotonic() >= until or self._is_aborted.is_set():
                    raise CheckpointError(
                        error.path,
                        f"{error.problem}; once it can be written, the same command with --resume "
                        f"completes the run",
                    ) from error
                if is_first:
                    self._failures.append(f"{error}; retrying for {retry_s:.0f} s")
                is_first = False
            self._is_aborted.wait(_RETRY_EVERY_S)

    def abort(self) -> None:
        """Stop all retries: the run must end at once."""
        self._is_aborted.set()

    def score(self, evaluated: Evaluated) -> None:
        """Write the scored center if its weights came along and it is the best one."""
        if self._best.note_center(evaluated) and not self._is_best_due:
            self._is_best_due = True
            self._thread.submit(self._write_best)

    def _write_best(self) -> None:
        self._is_best_due = False  # before the write: a better center may arrive meanwhile
        try:
            self._best.write()
        except CheckpointError as error:
            self._failures.append(f"{error}; retrying after the next evaluation")

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written; the next one waits for it."""
        return any(not future.done() for future in self._writes)

    @property
    def num_late(self) -> int:
        """Number of checkpoints that an earlier driver completed after this one took over."""
        return self._store.num_late

    def pop_failures(self) -> list[str]:
        """Return a sentence for each write that failed since the last call.

        A failure of the newest checkpoint is not included; ``close`` raises it.
        """
        failures = []
        while self._failures:
            failures.append(self._failures.popleft())
        for future in [f for f in self._writes[:-1] if f.done()]:
            self._writes.remove(future)
            error = future.exception()
            if error is not None and not isinstance(error, StateLostError):  # logged before
                failures.append(f"{error}; training continues; the next one may succeed")
        return failures

    @property
    def is_given_up(self) -> bool:
        """Whether the storage has been silent too long to wait for it."""
        return self._unanswered(self._thread.ident)[0] > GIVE_UP_S

    def wait(self) -> None:
        """Wait until all writes are done, as long as the storage answers; accept no more.

        Raises:
            StorageSilentError: the storage did not answer for too long.
        """
        self._thread.close()
        while not self._thread.wait(_POLL_S):
            if self.is_given_up:
                give_up(self._store.root)
                seconds, what = self._unanswered(self._thread.ident)
                then = "once it answers, --resume continues from the newest checkpoint"
                raise StorageSilentError(self._store.root, seconds, what, then)

    def close(self) -> None:
        """Complete all writes; if the storage fails, write the newest center to another disk.

        Raises:
            CheckpointError: the last checkpoint could not be written.
            StorageSilentError: the storage did not answer for too long.
        """
        try:
            self.wait()
            for future in [*self._writes[-1:], *self._finishing]:
                future.result()
        except StorageSilentError as error:
            then = f"{error.then}{self._save_elsewhere()}"
            raise StorageSilentError(error.root, error.seconds, error.what, then) from None
        except CheckpointError as error:
            problem = f"{error.problem}{self._save_elsewhere()}"
            raise CheckpointError(error.path, problem) from error
        except BaseException:  # Ctrl-C
            self.abort()
            if not self._thread.wait(0):
                give_up(self._store.root)
            raise

    def _save_elsewhere(self) -> str:
        """Write the newest center to a disk of this machine, unless the storage has it.

        Returns:
            The end of a sentence with the file, or an empty text if nothing was written.
        """
        last = self._unwritten
        if last is None or self._trained_round >= last.snapshot.progress.round:
            return ""
        center = checkpoint_of(last, self._flat, seconds=0.0).center
        saved: list[Path] = []

        def save() -> None:
            with suppress(OSError, CheckpointError):
                folder = self._fallback_dir or Path(tempfile.mkdtemp(prefix="raydl-"))
                store = CheckpointStore(Storage(str(folder)))
                store.write_trained(center, last.snapshot.progress.round)
                saved.append(folder / TRAINED)

        thread = threading.Thread(target=save, name="fallback", daemon=True)
        thread.start()
        thread.join(_FALLBACK_S)  # this disk may hang as well
        return f"; the newest center is in {saved[0]}" if saved else ""


class _CallThread:
    """A daemon thread that makes calls one after the other.

    The process can abandon it; a pool of the standard library would keep the process from ending.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None]
        self._calls = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., None], *arguments: Any) -> Future[None]:
        """Make a call after all earlier ones."""
        if self._is_closed:
            raise RuntimeError("nothing can be written after the end")
        future: Future[None] = Future()
        self._calls.put((future, partial(call, *arguments)))
        return future

    @property
    def ident(self) -> int | None:
        """The number of the thread."""
        return self._thread.ident

    def close(self) -> None:
        """Accept no more calls."""
        if not self._is_closed:
            self._is_closed = True
            self._calls.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all calls are done, after ``close``; return whether they are."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (next_call := self._calls.get()) is not None:
            future, call = next_call
            try:
                call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del next_call, future, call  # they hold the states of a checkpoint
