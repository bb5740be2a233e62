"""The control channel of a run: its status and requests to it, as files in its folder.

    runs/NAME/
        status.json                the status of the run, written about once a second
        requests/ID/request.json   a request of a user
        answers/ID/answer.json     the driver's answer

So ``raydl status``, ``remove`` and ``stop`` work wherever the run's folder can be read, on a shared
disk or an object store, without joining the Ray cluster. The driver has a ``ControlChannel``; its
users call ``read_status``, ``request_removal`` and ``request_stop``.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from raydl.errors import ConfigError, DataError, RaydlError, SupersededError
from raydl.run.folder import NO_RUN, open_run
from raydl.run.status import RunStatus, WorkerStatus, read_file, to_json
from raydl.storage import SilenceMonitor, Storage, below, in_words
from raydl.storage.local_files import is_no_file_of_ours

__all__ = [
    "ControlChannel", "Request", "RunStatus", "WorkerStatus", "read_status", "request_removal",
    "request_stop", "statuses_in",
]  # fmt: skip

EVERY_S = 1.0
"""Seconds between two writes of the status, and between two polls for requests."""
BEAT_S = 3.0
"""Seconds after which a driver without a new status writes the last one again, as a heartbeat."""
STALE_S = 10.0
"""Age in seconds beyond which a status may be that of a lost driver."""
LOOK_AGAIN_S = 3.0
"""Seconds for which a reader polls such a status for a change: two clocks may differ."""
POLL_S = 0.1
"""Seconds between two polls of a process that waits."""
_MOST_LISTED = 8
_REQUEST = "requests/{}/request.json"
_ANSWER = "answers/{}/answer.json"
_REQUEST_BYTES = 4096
"""Largest request that is read."""


class _Addressed(TypedDict):
    driver: str


class _RequestFile(_Addressed, total=False):
    """The content of ``request.json``."""

    remove: str
    stop: bool


class _AnswerFile(TypedDict):
    """The content of ``answer.json``."""

    ok: bool
    sentence: str


@dataclass(frozen=True)
class Request:
    """A user's request to remove a worker, or to stop the run."""

    id: str
    worker_id: str | None
    """None: stop the run."""


# the driver


class ControlChannel:
    """Publishes the status of a run and receives requests; no call waits for a disk.

    A thread of its own reads and writes: to list a folder of an object store takes 100 ms, and of
    a file system that hangs forever. It retries failed writes; the training never sees them.

    Args:
        storage: the run's folder.
        clock: the time in seconds, from any origin.
    """

    def __init__(self, storage: Storage, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_failures = 0
        self.driver = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex[:8]}"
        self._storage, self._clock = storage, clock
        self._silence = SilenceMonitor(
            storage,
            "training continues; files of the run, raydl status and raydl remove wait until it "
            "answers",
        )
        self._reported_at = self._polled_at = float("-inf")
        # Shared with the thread, under this lock:
        self._changed = threading.Condition()
        self._is_awake = self._must_poll = False
        self._closes_by: float | None = None
        self._to_write: RunStatus | None = None
        self._answers: dict[str, _AnswerFile] = {}
        self._inbox: list[Request] = []
        self._problem: str | None = None
        # The thread's own:
        self._received: set[str] = set()
        self._answered: set[str] = set()
        # A daemon: a file system that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="control-channel", daemon=True)
        self._thread.start()

    def report(self, status: RunStatus | Callable[[], RunStatus], *, at_once: bool = False) -> None:
        """Write the status, if a second has passed since the last one or ``at_once``.

        Args:
            status: the status, or a function that returns it.
            at_once: write it in any case.
        """
        now = self._clock()
        if not at_once and now - self._reported_at < EVERY_S:
            return
        self._reported_at = now
        current = status() if callable(status) else status
        with self._changed:
            if self._closes_by is None:
                self._to_write = replace(current, told_at=time.time(), driver=self.driver)
                self._wake()

    def _wake(self) -> None:
        self._is_awake = True
        self._changed.notify()

    def pop_requests(self) -> list[Request]:
        """Return the requests since the last call; polls the folder once a second."""
        now = self._clock()
        with self._changed:
            if now - self._polled_at >= EVERY_S:
                self._polled_at = now
                self._must_poll = True
                self._wake()
            requests, self._inbox = self._inbox, []
        return requests

    def answer(self, request: Request, sentence: str, *, ok: bool) -> None:
        """Answer a request.

        Args:
            request: the request.
            sentence: what the driver does, or why it refuses.
            ok: whether the driver fulfills the request.
        """
        with self._changed:
            self._answers[request.id] = {"ok": ok, "sentence": sentence}
            self._wake()

    def pop_problem(self) -> str | None:
        """Return a sentence to log, once, if the folder fails or does not answer."""
        with self._changed:
            problem, self._problem = self._problem, None
        return problem or self._silence.pop_message()

    def close(self, status: RunStatus, *, timeout_s: float = 5.0) -> None:
        """Write the last status and refuse the open requests. A second call does nothing.

        Args:
            status: its state is finished, stopped or failed, with the reason.
            timeout_s: time-out for a folder that does not answer, in seconds.
        """
        with self._changed:
            if self._closes_by is None:
                self._closes_by = time.monotonic() + timeout_s
                self._to_write = replace(status, told_at=time.time(), driver=self.driver)
                self._wake()
        self._thread.join(timeout_s)

    # the thread

    def _work(self) -> None:
        newest: RunStatus | None = None
        self._try(self._storage.delete_dir, "answers")  # answers that nobody read
        while True:
            with self._changed:
                is_awake = self._changed.wait_for(lambda: self._is_awake, BEAT_S)
                status, self._to_write = self._to_write, None
                must_poll = self._must_poll
                self._is_awake = self._must_poll = False
                closes_by = self._closes_by
            if status and closes_by is not None:
                self._end(status, closes_by)
                return
            if status:  # not retried: the next one follows in a second
                newest = status
                self._try(self._write_status, status)
            elif newest and not is_awake:
                self._try(self._write_status, _repeated(newest))
            if must_poll:
                self._try(self._poll)
            self._write_answers()  # one that fails is retried after the next poll

    def _end(self, status: RunStatus, closes_by: float) -> None:
        while not self._try(self._write_status, status) and time.monotonic() < closes_by:
            time.sleep(POLL_S)
        self._try(self._poll)
        refusal: _AnswerFile = {"ok": False, "sentence": f"the run has ended ({status.state})"}
        for request_id in sorted(self._received - self._answered):
            self._answers.setdefault(request_id, refusal)
        self._write_answers()

    def _try(self, act: Callable[..., None], *arguments: Any) -> bool:
        """Call a function that uses the storage; return whether it needs no retry."""
        try:
            act(*arguments)
        except SupersededError:  # another driver has the channel; the run's loop checks this, too
            return True
        except Exception as error:  # no error of a file system may end this thread
            with self._changed:
                self.num_failures += 1
                if self.num_failures == 1:
                    self._problem = (
                        f"the run's folder {self._storage.root} failed: {error}; training "
                        f"continues, but raydl status and raydl remove do not work until it works "
                        f"again"
                    )
            return False
        return True

    def _write_status(self, status: RunStatus) -> None:
        self._storage.write_bytes("status.json", to_json(status))

    def _write_answers(self) -> None:
        with self._changed:
            answers = dict(self._answers)
        for request_id, answer in answers.items():
            self._try(self._write_answer, request_id, answer)

    def _write_answer(self, request_id: str, answer: _AnswerFile) -> None:
        # Before the answer: its reader deletes both, or times out and deletes the request now.
        with suppress(FileNotFoundError):
            self._storage.delete_dir(f"requests/{request_id}")
        # The reader may delete the answer's folder before that folder is flushed.
        with suppress(FileNotFoundError):
            self._storage.write_bytes(_ANSWER.format(request_id), json.dumps(answer).encode())
        self._answered.add(request_id)
        with self._changed:
            del self._answers[request_id]

    def _poll(self) -> None:
        """Receive new requests; refuse those to an earlier driver of this run."""
        for request_id in self._storage.list_dir("requests"):
            if request_id in self._received:
                continue
            try:
                name = _REQUEST.format(request_id)
                request = self._storage.read_json(name, _RequestFile, most=_REQUEST_BYTES)
                is_mine = request["driver"] == self.driver
                worker_id = None if request.get("stop") else request.get("remove", "")
            except FileNotFoundError:
                continue  # withdrawn, or not written yet: then the next poll finds it
            except ValueError:
                is_mine, worker_id = False, None
            except OSError as error:
                if not is_no_file_of_ours(error):
                    raise
                is_mine, worker_id = False, None
            self._received.add(request_id)
            with self._changed:
                if is_mine:
                    self._inbox.append(Request(request_id, worker_id))
                else:
                    sentence = "the run was restarted after this request; send it again"
                    self._answers[request_id] = {"ok": False, "sentence": sentence}


def _repeated(status: RunStatus) -> RunStatus:
    """Return the last status again: the driver lives, but is busy, for example starting Ray."""
    silent_s = time.time() - status.told_at
    since = f", no report for {silent_s:.0f} s" if silent_s > STALE_S else ""
    return replace(status, told_at=time.time(), state=f"{status.state}{since}")


# its users


def read_status(folder: str) -> RunStatus:
    """Return the status of a run.

    Args:
        folder: the run's folder, a path or URI.

    Raises:
        DataError: there is no run or no status yet, or it cannot be read.
    """
    storage = open_run(folder).storage
    status = _read(storage)
    age_s = time.time() - status.told_at
    if status.is_final or abs(age_s) <= STALE_S:
        return status
    until = time.monotonic() + LOOK_AGAIN_S
    while time.monotonic() < until:
        time.sleep(POLL_S)
        newer = _read(storage)
        if (newer.driver, newer.told_at) != (status.driver, status.told_at):
            return newer
    return replace(status, silent_s=max(age_s, LOOK_AGAIN_S))


def _read(storage: Storage) -> RunStatus:
    try:
        # Listed first: NFS caches attributes of a name until its folder is opened.
        names = storage.list_dir("")
        if "status.json" in names:
            return read_file(storage)
    except (OSError, ValueError) as error:
        raise DataError(storage.root, f"its status cannot be read: {in_words(error)}") from error
    raise DataError(
        storage.root,
        "the run has no status yet; try again a few seconds after its driver has started"
        if "config.json" in names
        else NO_RUN,
    )


def request_removal(folder: str, worker_id: str, *, timeout_s: float = 30.0) -> str:
    """Request the removal of a worker, and return the answer of the driver.

    Args:
        folder: the run's folder, a path or URI.
        worker_id: the worker, as ``read_status`` names it.
        timeout_s: time-out for the answer, in seconds.

    Raises:
        RaydlError: there is no such run or worker, the folder cannot be read or written, the
            run has ended, or its driver is silent, did not answer, or refused.
    """
    status = _status_of_live(folder, "no worker is left")
    names = [w.worker_id for w in status.workers]
    if worker_id not in names:
        more = len(names) - _MOST_LISTED
        rest = f" and {more} more: see raydl status" if more > 0 else ""
        known = f"{', '.join(names[:_MOST_LISTED])}{rest}" if names else "none yet"
        raise ConfigError(folder, f"has no worker {worker_id!r}; it has {known}")
    return _ask(folder, {"driver": status.driver, "remove": worker_id}, timeout_s)


def request_stop(folder: str, *, timeout_s: float = 30.0) -> str:
    """Request the end of a run, with a checkpoint, and return the answer of the driver.

    Args:
        folder: the run's folder, a path or URI.
        timeout_s: time-out for the answer, in seconds.

    Raises:
        RaydlError: there is no such run, the folder cannot be read or written, the run has ended,
            or its driver is silent or did not answer.
    """
    status = _status_of_live(folder, "there is nothing to stop")
    return _ask(folder, {"driver": status.driver, "stop": True}, timeout_s)


def _status_of_live(folder: str, nothing: str) -> RunStatus:
    """Return the status of a run whose driver is alive.

    Args:
        folder: the run's folder, a path or URI.
        nothing: end of the sentence about a run that has ended.

    Raises:
        RaydlError: the run has ended, or its driver is silent.
    """
    status = read_status(folder)
    if status.is_final:
        raise RaydlError(f"the run in {folder} has ended ({status.state}): {nothing}")
    if status.is_stale:
        raise RaydlError(status.stale_sentence())
    return status


def statuses_in(folder: str) -> list[tuple[str, RunStatus | None]]:
    """Return (name, status) of each run directly below a folder, by name, without a wait.

    The status is None if it cannot be read. One whose driver was silent for long is marked so, by
    the clocks of both machines.

    Raises:
        DataError: the folder cannot be read.
    """
    storage = Storage(folder)
    try:
        names = sorted(
            name for name in storage.list_dir("") if storage.exists(f"{name}/config.json")
        )
    except OSError as error:
        raise DataError(folder, f"it cannot be listed: {in_words(error)}") from error
    return [(name, _status_now(below(folder, name))) for name in names]


def _status_now(folder: str) -> RunStatus | None:
    try:
        status = _read(Storage(folder))
    except DataError:
        return None
    age_s = time.time() - status.told_at
    is_silent = not status.is_final and age_s > STALE_S
    return replace(status, silent_s=age_s if is_silent else 0.0)


def _ask(folder: str, request: _RequestFile, timeout_s: float) -> str:
    try:
        answer = _send(open_run(folder).storage, request, timeout_s)
    except OSError as error:
        raise DataError(folder, f"the request cannot be written: {in_words(error)}") from error
    except ValueError as error:
        raise DataError(folder, f"the driver's answer is damaged: {error}") from error
    if answer is None:
        raise RaydlError(
            f"the driver did not answer within {timeout_s:g} s: it may be busy; see raydl "
            f"status {folder} before you try again"
        )
    if not answer["ok"]:
        raise RaydlError(answer["sentence"])
    return answer["sentence"]


def _send(storage: Storage, request: _RequestFile, timeout_s: float) -> _AnswerFile | None:
    """Write a request and return its answer, or None; delete the files of both."""
    request_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
    until = time.monotonic() + timeout_s
    answer: _AnswerFile | None = None
    try:
        # The driver may delete the request's folder before that folder is flushed.
        with suppress(FileNotFoundError):
            storage.write_bytes(_REQUEST.format(request_id), json.dumps(request).encode())
        while answer is None and time.monotonic() < until:
            time.sleep(POLL_S)
            # The answer's folder may exist before the answer.
            with suppress(FileNotFoundError):
                if request_id in storage.list_dir("answers"):
                    answer = storage.read_json(_ANSWER.format(request_id), _AnswerFile)
    finally:
        for name in ("requests", "answers"):
            with suppress(OSError):
                storage.delete_dir(f"{name}/{request_id}")
    return answer
