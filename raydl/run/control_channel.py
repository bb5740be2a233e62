"""The control channel of a run, by files in its folder: its status, and requests to it.

    runs/NAME/
        status.json                how the run stands, written about once a second
        requests/ID/request.json   what a person asks for
        answers/ID/answer.json     what the driver says to that

So ``raydl status`` and ``raydl remove`` work wherever the run's folder can be seen, on a
shared disk or an object store, without joining the Ray cluster. The driver holds a
``ControlChannel``; a person's side is ``read_status`` and ``request_removal``.
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
from typing import Any

from raydl.errors import ConfigError, DataError, RaydlError, SupersededError
from raydl.run.folder import NO_RUN, open_run
from raydl.run.status import RunStatus, WorkerStatus, from_json, to_json
from raydl.storage import SilenceTeller, Storage, in_words

__all__ = [
    "ControlChannel",
    "Request",
    "RunStatus",
    "WorkerStatus",
    "read_status",
    "request_removal",
]

EVERY_S = 1.0
"""Seconds between two writes of the status, and between two looks for requests."""
BEAT_S = 3.0
"""The longest that a living driver writes nothing: what it told last, if there is no news."""
STALE_S = 10.0
"""A status older than this makes one doubt that its driver lives."""
LOOK_AGAIN_S = 3.0
"""How long such a status is watched before it counts as stale: two clocks may differ."""
POLL_S = 0.1
"""Seconds between two looks of a process that waits for something."""
_LISTED = 8
_REQUEST = "requests/{}/request.json"
_ANSWER = "answers/{}/answer.json"


@dataclass(frozen=True)
class Request:
    """A person asks for a worker to be taken out."""

    id: str
    worker_id: str


# the driver's side


class ControlChannel:
    """Tells how a run stands and takes what people ask of it; no call waits for a disk.

    A thread of its own does the reading and writing: a listing of an object store takes
    100 ms, and one of a file system that hangs takes forever. What fails there is tried
    again; the training never sees it.

    Args:
        storage: the run's folder.
        clock: seconds, rising: what the rates are measured by.
    """

    def __init__(self, storage: Storage, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_failures = 0
        self.driver = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex[:8]}"
        self._storage, self._clock = storage, clock
        self._silence = SilenceTeller(
            storage,
            "training goes on; files of the run, raydl status and raydl remove wait until it does",
        )
        self._told_at = self._looked_at = float("-inf")
        # Shared with the thread, under this lock:
        self._changed = threading.Condition()
        self._is_awake = self._shall_look = False
        self._closes_by: float | None = None
        self._to_write: RunStatus | None = None
        self._to_answer: dict[str, dict[str, Any]] = {}
        self._inbox: list[Request] = []
        self._trouble: str | None = None
        # The thread's own:
        self._taken: set[str] = set()
        self._answered: set[str] = set()
        # A daemon: a file system that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="control-channel", daemon=True)
        self._thread.start()

    def tell(self, status: RunStatus | Callable[[], RunStatus], *, at_once: bool = False) -> None:
        """Write the status, if a second has passed or ``at_once``; a function is called then."""
        now = self._clock()
        if not at_once and now - self._told_at < EVERY_S:
            return
        self._told_at = now
        told = status() if callable(status) else status
        with self._changed:
            if self._closes_by is None:
                self._to_write = replace(told, told_at=time.time(), driver=self.driver)
                self._wake()

    def _wake(self) -> None:
        self._is_awake = True
        self._changed.notify()

    def pop_requests(self) -> list[Request]:
        """Return the requests since the last call; looks again once a second."""
        now = self._clock()
        with self._changed:
            if now - self._looked_at >= EVERY_S:
                self._looked_at = now
                self._shall_look = True
                self._wake()
            taken, self._inbox = self._inbox, []
        return taken

    def answer(self, request: Request, sentence: str, *, ok: bool) -> None:
        """Answer a request: done or under way, or why not."""
        with self._changed:
            self._to_answer[request.id] = {"ok": ok, "sentence": sentence}
            self._wake()

    def take_trouble(self) -> str | None:
        """Return a sentence for the run's log, once: that the folder failed, or falls silent."""
        with self._changed:
            trouble, self._trouble = self._trouble, None
        return trouble or self._silence.news()

    def close(self, status: RunStatus, *, timeout_s: float = 5.0) -> None:
        """Write the last status and turn down what was still asked for. Again: does nothing.

        Args:
            status: its state says how the run ended: finished, stopped, or failed: and why.
            timeout_s: the longest wait, in seconds, for a folder that does not answer.
        """
        with self._changed:
            if self._closes_by is None:
                self._closes_by = time.monotonic() + timeout_s
                self._to_write = replace(status, told_at=time.time(), driver=self.driver)
                self._wake()
        self._thread.join(timeout_s)

    # the thread

    def _work(self) -> None:
        told: RunStatus | None = None
        self._try(self._storage.delete_dir, "answers")  # that nobody came back for
        while True:
            with self._changed:
                is_awake = self._changed.wait_for(lambda: self._is_awake, BEAT_S)
                status, self._to_write = self._to_write, None
                shall_look = self._shall_look
                self._is_awake = self._shall_look = False
                closes_by = self._closes_by
            if status and closes_by is not None:
                self._end(status, closes_by)
                return
            if status:  # one that fails is not kept: the next comes in a second
                told = status
                self._try(self._write_status, status)
            elif told and not is_awake:
                self._try(self._write_status, _without_news(told))
            if shall_look:
                self._try(self._look)
            self._try(self._write_answers)  # those that fail wait for the next look

    def _end(self, status: RunStatus, closes_by: float) -> None:
        while not self._try(self._write_status, status) and time.monotonic() < closes_by:
            time.sleep(POLL_S)
        self._try(self._look)
        no = {"ok": False, "sentence": f"the run has ended ({status.state})"}
        for request_id in self._taken - self._answered:
            self._to_answer.setdefault(request_id, no)
        self._try(self._write_answers)

    def _try(self, act: Callable[..., None], *arguments: Any) -> bool:
        """Do something on the storage; return whether it worked, or is another driver's to do."""
        try:
            act(*arguments)
        except (
            SupersededError
        ):  # the control channel is another driver's; the run's loop hears of it, too
            return True
        except Exception as error:  # whatever a file system raises must not end this thread
            with self._changed:
                self.num_failures += 1
                if self.num_failures == 1:
                    self._trouble = (
                        f"the run's folder {self._storage.root} failed: {error}; training goes on, "
                        f"but raydl status and raydl remove do not work until it is back"
                    )
            return False
        return True

    def _write_status(self, status: RunStatus) -> None:
        self._storage.write_bytes("status.json", to_json(status))

    def _write_answers(self) -> None:
        with self._changed:
            answers = dict(self._to_answer)
        for request_id, answer in answers.items():
            # First, for the reader of the answer deletes both; or gave up and deletes this now.
            with suppress(FileNotFoundError):
                self._storage.delete_dir(f"requests/{request_id}")
            # It may be read, and its folder deleted, before that folder is flushed.
            with suppress(FileNotFoundError):
                self._storage.write_bytes(_ANSWER.format(request_id), json.dumps(answer).encode())
            self._answered.add(request_id)
            with self._changed:
                del self._to_answer[request_id]

    def _look(self) -> None:
        for request_id in self._storage.list_dir("requests"):
            if request_id not in self._taken:
                self._take(request_id)

    def _take(self, request_id: str) -> None:
        """Take a new request; turn down one that was made to an earlier driver of this run."""
        try:
            asked = json.loads(self._storage.read_bytes(_REQUEST.format(request_id)))
            is_mine, worker_id = asked["driver"] == self.driver, str(asked["remove"])
        except FileNotFoundError:
            return  # withdrawn, or its folder is there before it: the next look sees
        except (ValueError, KeyError, TypeError):
            is_mine, worker_id = False, ""
        self._taken.add(request_id)
        with self._changed:
            if is_mine:
                self._inbox.append(Request(request_id, worker_id))
            else:
                sentence = "the run was started anew since this was asked; ask again"
                self._to_answer[request_id] = {"ok": False, "sentence": sentence}


def _without_news(told: RunStatus) -> RunStatus:
    """Return the status of a driver that lives, but is busy for long: it may start Ray, say."""
    silent_s = time.time() - told.told_at
    since = f", no news for {silent_s:.0f} s" if silent_s > STALE_S else ""
    return replace(told, told_at=time.time(), state=f"{told.state}{since}")


# a person's side


def read_status(folder: str) -> RunStatus:
    """Return how a run stands.

    Args:
        folder: the run's folder, a path or URI.

    Raises:
        DataError: no run is there, it has told nothing yet, or it can not be read.
    """
    storage = open_run(folder).storage
    status = _read(storage)
    age_s = time.time() - status.told_at
    if status.is_final or abs(age_s) <= STALE_S:
        return status
    until = time.monotonic() + LOOK_AGAIN_S
    while time.monotonic() < until:
        time.sleep(POLL_S)
        again = _read(storage)
        if (again.driver, again.told_at) != (status.driver, status.told_at):
            return again
    return replace(status, silent_s=max(age_s, LOOK_AGAIN_S))


def _read(storage: Storage) -> RunStatus:
    try:
        # Listed first: NFS believes what it knows of a name until its folder is opened.
        names = storage.list_dir("")
        if "status.json" in names:
            return from_json(storage.read_bytes("status.json"))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(storage.root, f"its status can not be read: {in_words(error)}") from error
    raise DataError(
        storage.root,
        "the run has told nothing yet; ask again a few seconds after its driver has started"
        if "config.json" in names
        else NO_RUN,
    )


def request_removal(folder: str, worker_id: str, *, timeout_s: float = 30.0) -> str:
    """Ask a run to take a worker out, and return what its driver says to that.

    Args:
        folder: the run's folder, a path or URI.
        worker_id: whom, as ``read_status`` names it.
        timeout_s: how long to wait for the answer, in seconds.

    Raises:
        RaydlError: there is no such run or worker, the folder can not be read or written, the
            run has ended, or its driver is silent, did not answer, or said no.
    """
    status = read_status(folder)
    if status.is_final:
        raise RaydlError(f"the run in {folder} has ended ({status.state}): no worker is left")
    if status.is_stale:
        raise RaydlError(status.stale_sentence())
    names = [w.worker_id for w in status.workers]
    if worker_id not in names:
        raise ConfigError(folder, f"has no worker {worker_id!r}; {_listed(names)}")
    asked = {"driver": status.driver, "remove": worker_id}
    try:
        answer = _ask(open_run(folder).storage, asked, timeout_s)
    except OSError as error:
        raise DataError(folder, f"its driver can not be asked: {in_words(error)}") from error
    if answer is None:
        raise RaydlError(
            f"the driver did not answer within {timeout_s:g} s: it may be busy; see raydl "
            f"status {folder} before you ask again"
        )
    if not answer["ok"]:
        raise RaydlError(answer["sentence"])
    return str(answer["sentence"])


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED
    rest = f" and {more} more: see raydl status" if more > 0 else ""
    return f"it has {', '.join(names[:_LISTED])}{rest}" if names else "it has none yet"


def _ask(storage: Storage, asked: dict[str, str], timeout_s: float) -> dict[str, Any] | None:
    """Leave a request and return its answer, or None. In any case leave nothing behind."""
    request_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
    until = time.monotonic() + timeout_s
    answer: dict[str, Any] | None = None
    try:
        # It may be taken, and its folder deleted, before that folder is flushed.
        with suppress(FileNotFoundError):
            storage.write_bytes(_REQUEST.format(request_id), json.dumps(asked).encode())
        while answer is None and time.monotonic() < until:
            time.sleep(POLL_S)
            # An answer's folder may be there before the answer.
            with suppress(FileNotFoundError):
                if request_id in storage.list_dir("answers"):
                    answer = json.loads(storage.read_bytes(_ANSWER.format(request_id)))
    finally:
        for name in ("requests", "answers"):
            with suppress(OSError):
                storage.delete_dir(f"{name}/{request_id}")
    return answer
