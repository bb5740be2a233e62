"""The lock of a run's folder: one driver at a time, each start with a number of its own.

On a disk the driver holds a lock on ``driver.lock``, which the system takes back when the
process ends, however it ends. Where there are no locks, on an object store, it claims:

    runs/NAME/drivers/ID/driver.json     who, since when, and a number that rises

The number is written anew every few seconds. A claim that stands still is one that a dead
driver left behind. Every driver writes its claim before it looks for others, so of two that
start at once at least one sees the other; the first by name stays.

Neither holds back a driver that is halted, loses its lock or claim to another, and wakes up. So
each start takes a driver epoch besides: see ``raydl.run.driver_epoch``.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from raydl.errors import ConfigError, SupersededError
from raydl.redaction import redact
from raydl.run.driver_epoch import DriverEpoch
from raydl.storage import Storage, in_words

BEAT_S = 2.0
"""Seconds between two writes of a claim."""
STALE_S = 10.0
"""A claim that stands still for so long is of a driver that is gone."""
POLL_S = 0.25
"""Seconds between two looks at the claims of others."""
LOCK_POLL_S = 3.0
"""Seconds between two tries of a lock that is waited for."""
_LOCK = "driver.lock"
_CLAIMS = "drivers"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def held(
    storage: Storage, setting: str, *, check: Callable[[], None] = lambda: None
) -> Iterator[DriverEpoch]:
    """Hold a run's folder, which is there, until the end of the ``with``; yield the driver epoch.

    A thread looks every few seconds whether that is still the newest.

    Args:
        storage: the run's folder.
        setting: what named it, for the error.
        check: looks at the folder once it is held; if it raises, no epoch is taken, and the run
            that is there stays in the hands that it was in.

    Raises:
        ConfigError: another driver holds it; it says which, since when, and what to do.
    """
    with storage.waiting("to lock it"):
        lock = None if storage.local_path is None else _lock(storage, setting)
    if lock is not None:
        try:
            check()
            epoch = _take_epoch(storage, setting)
            _say_who(storage, setting, lock, epoch)
            with _watched(epoch):
                yield epoch
        finally:
            os.close(lock)  # the file stays: to delete it would let two hold two files
        return
    claim = _Claim(storage)
    try:
        try:
            claim.claim_folder(setting)
        except OSError as error:
            problem = f"{storage.root} can not be claimed: {in_words(error)}"
            raise ConfigError(setting, problem) from error
        check()
        claim.epoch = epoch = _take_epoch(storage, setting)
        with _watched(epoch):
            yield epoch
    finally:
        claim.release()


def _take_epoch(storage: Storage, setting: str) -> DriverEpoch:
    """Take the next driver epoch of a folder that is held.

    Raises:
        ConfigError: another driver took one at the same time, or the folder can not be written.
    """
    try:
        epoch = DriverEpoch.claim_next(storage, _me())
    except OSError as error:
        problem = f"{storage.root} can not be written: {in_words(error)}"
        raise ConfigError(setting, problem) from error
    if epoch is None:
        raise _in_use(storage, setting, b"")
    return epoch


@contextmanager
def _watched(epoch: DriverEpoch) -> Iterator[None]:
    """Look now and then whether an epoch is still the newest; the epoch itself remembers."""
    ended = threading.Event()

    def watch() -> None:
        while not (ended.wait(BEAT_S) or epoch.is_over):
            with suppress(OSError, SupersededError):
                epoch.check()

    # A daemon: a store that hangs must not keep the process from ending.
    threading.Thread(target=watch, name="driver-epoch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _lock(storage: Storage, setting: str) -> int | None:
    """Return the descriptor that holds the lock; None where the file system has no locks."""
    assert storage.local_path is not None
    path = Path(storage.local_path) / _LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(setting, f"{path} can not be opened: {in_words(error)}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise _in_use(storage, setting, path.read_bytes()) from None
        if error.errno in _NO_LOCKS:
            return None
        raise ConfigError(setting, f"{path} can not be locked: {in_words(error)}") from error
    try:
        _say_who(storage, setting, descriptor)
    except ConfigError:
        os.close(descriptor)
        raise
    return descriptor


def _say_who(
    storage: Storage, setting: str, descriptor: int, epoch: DriverEpoch | None = None
) -> None:
    """Write into the lock file who holds it.

    Raises:
        ConfigError: it can not be written.
    """
    holder = _me() if epoch is None else {**_me(), "driver_epoch": epoch.number}
    try:
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, json.dumps(holder).encode())
    except OSError as error:
        path = Path(storage.local_path or "") / _LOCK
        raise ConfigError(setting, f"{path} can not be written: {in_words(error)}") from error


def wait_until_free(
    storage: Storage,
    *,
    wait_s: float,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait while another driver, or what a file server still takes for one, holds the lock.

    Returns after ``wait_s`` seconds at the latest: ``held`` then says who holds it. Makes
    nothing, and waits for no claim on an object store, since ``held`` does that.
    """
    if storage.local_path is None:
        return
    path, until = Path(storage.local_path) / _LOCK, clock() + wait_s
    is_told = False
    while _is_locked(path) and clock() < until:
        if not is_told:
            place = redact(storage.root)
            say(f"{place} is still in use; waiting up to {wait_s:.0f} s for its driver to go")
            is_told = True
        sleep(LOCK_POLL_S)


def _is_locked(path: Path) -> bool:
    """Whether somebody holds a lock file; one that is not there, or tells nothing, is free."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def _me() -> dict[str, Any]:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"driver": f"process {os.getpid()} on {socket.gethostname()}", "since": since}


def _in_use(storage: Storage, setting: str, data: bytes) -> ConfigError:
    try:
        holder = json.loads(data)
        who = f"{holder['driver']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        who = "another driver"  # it is about to write who it is
    return ConfigError(
        setting,
        f"{storage.root} is in use by {who}; name another folder, or stop that run first, "
        f"which goes on where it was with --resume",
    )


class _Claim:
    """This driver's claim on a folder of an object store, kept alive by a thread.

    Args:
        storage: the run's folder.
    """

    def __init__(self, storage: Storage) -> None:
        message_id = f"{time.time_ns():020d}"
        self._storage, self._name = storage, f"{message_id}-{uuid.uuid4().hex[:8]}"
        self._me = _me()
        self._beat = 0
        self.epoch: DriverEpoch | None = None
        """Of this driver, once it has one."""
        self._ended = threading.Event()
        # A daemon: a store that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._keep, name="run-claim", daemon=True)

    def claim_folder(self, setting: str) -> None:
        """Claim the folder, if no living driver does.

        Raises:
            ConfigError: one does.
        """
        for name in self._unchanged_claims(setting):
            self._storage.delete_dir(f"{_CLAIMS}/{name}")
        self._write()
        self._thread.start()
        until = time.monotonic() + STALE_S
        while others := self._others():
            if min(others) < self._name or time.monotonic() > until:
                raise _in_use(self._storage, setting, self._read(min(others)))
            time.sleep(POLL_S)  # who came second sees this claim, and goes

    def release(self, *, timeout_s: float = 5.0) -> None:
        """Give the folder back; a store that does not answer is waited for ``timeout_s``."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _keep(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                if self.epoch is not None:
                    self.epoch.check()  # a claim that another driver has deleted stays so
                self._write()
            except SupersededError:
                return  # a driver that was taken for dead has nothing left to give back
            except OSError:  # the next beat tries again
                pass
        with suppress(OSError):
            self._storage.delete_dir(f"{_CLAIMS}/{self._name}")

    def _write(self) -> None:
        self._beat += 1
        number = {"driver_epoch": self.epoch.number} if self.epoch else {}
        data = json.dumps({**self._me, **number, "beat": self._beat}).encode()
        self._storage.write_bytes(f"{_CLAIMS}/{self._name}/driver.json", data)

    def _unchanged_claims(self, setting: str) -> list[str]:
        """Return the claims there are, once they have been seen to stand still."""
        first = {name: self._read(name) for name in self._others()}
        # Counted, not timed: who was halted meanwhile has seen nothing.
        for _ in range(math.ceil(STALE_S / POLL_S)):
            if not first:
                break
            time.sleep(POLL_S)
            for name, data in first.items():
                if self._read(name) not in (b"", data):
                    # Read once more: it may have been written anew, and longer, just then.
                    raise _in_use(self._storage, setting, self._read(name))
            others = self._others()
            first = {name: data for name, data in first.items() if name in others}
        return list(first)

    def _others(self) -> list[str]:
        return [name for name in self._storage.list_dir(_CLAIMS) if name != self._name]

    def _read(self, name: str) -> bytes:
        """Return a claim; empty if it was given back meanwhile."""
        try:
            return self._storage.read_bytes(f"{_CLAIMS}/{name}/driver.json")
        except FileNotFoundError:
            return b""
