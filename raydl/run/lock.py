"""The lock of a run's folder: one driver at a time, each start with a number of its own.

On a disk the driver holds a lock on ``driver.lock``, which the system releases when the process
ends. Where there are no such locks, as on an object store, it writes a lock object:

    runs/NAME/drivers/ID/driver.json     process, time, and a rising number, the heartbeat

The driver writes its lock object again every few seconds. One that does not change is that of a
dead driver. Every driver writes its own before it lists those of others, so of two that start
together at least one sees the other; the first by name keeps the folder.

Both can fail for a driver that is halted: another one gets its lock, and then it resumes. So each
start also takes a driver epoch: see ``raydl.run.driver_epoch``.
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

from raydl.errors import ConfigError, SupersededError
from raydl.run.driver_epoch import HOLDER_BYTES, DriverEpoch, Holder, describe
from raydl.storage import Storage, in_words, parse_json
from raydl.storage.local_files import LocalFiles
from raydl.text.redaction import redact

BEAT_S = 2.0
"""Seconds between two writes of a lock object."""
STALE_S = 10.0
"""Seconds without a change after which a lock object is that of a lost driver."""
POLL_S = 0.25
"""Seconds between two reads of the lock objects of others."""
LOCK_POLL_S = 3.0
"""Seconds between two attempts to get a lock."""
LOCK = "driver.lock"
_LOCK_OBJECTS = "drivers"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def held(
    storage: Storage, setting: str, *, check: Callable[[], None] = lambda: None
) -> Iterator[DriverEpoch]:
    """Hold an existing folder of a run until the end of the ``with``; yield the driver epoch.

    A thread checks every few seconds that this epoch is still the newest.

    Args:
        storage: the run's folder.
        setting: the dotted name of the setting that names the folder, for the error.
        check: inspects the folder once it is held; if it raises an error, no epoch is taken, so
            the run in the folder stays with its driver.

    Raises:
        ConfigError: another driver holds the folder, or it cannot be written.
    """
    with storage.waiting("to lock it"):
        lock = None if storage.local_path is None else _lock(storage, setting)
    if lock is not None:
        try:
            check()
            epoch = _take_epoch(storage, setting)
            _write_holder(storage, setting, lock, epoch)
            with _watched(epoch):
                yield epoch
        finally:
            os.close(lock)  # the file stays: after its deletion two drivers could lock two files
        return
    lock_object = _LockObject(storage)
    try:
        lock_object.acquire(setting)
        check()
        lock_object.epoch = epoch = _take_epoch(storage, setting)
        with _watched(epoch):
            yield epoch
    finally:
        lock_object.release()


def _take_epoch(storage: Storage, setting: str) -> DriverEpoch:
    """Take the next driver epoch of a folder that is held.

    Raises:
        ConfigError: another driver took one at the same time, or the folder cannot be written.
    """
    try:
        epoch = DriverEpoch.take_next(storage, _this_process())
    except OSError as error:
        problem = f": {storage.root} cannot be written: {in_words(error)}"
        raise ConfigError(setting, problem) from error
    if epoch is None:
        raise _in_use(storage, setting, b"")
    return epoch


@contextmanager
def _watched(epoch: DriverEpoch) -> Iterator[None]:
    """Check every few seconds that an epoch is the newest; the epoch keeps the error."""
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
    """Return the descriptor that holds the lock, or None if the file system has no locks."""
    assert storage.local_path is not None
    files, path = LocalFiles(storage.local_path), Path(storage.local_path) / LOCK
    try:
        descriptor = files.open_or_create(LOCK)
    except OSError as error:
        raise ConfigError(setting, f": {path} cannot be opened: {in_words(error)}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, HOLDER_BYTES, 0)
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise _in_use(storage, setting, holder) from None
        if error.errno in _NO_LOCKS:
            return None
        raise ConfigError(setting, f": {path} cannot be locked: {in_words(error)}") from error
    try:
        _write_holder(storage, setting, descriptor)
    except ConfigError:
        os.close(descriptor)
        raise
    return descriptor


def _write_holder(
    storage: Storage, setting: str, descriptor: int, epoch: DriverEpoch | None = None
) -> None:
    """Write this process into the lock file.

    Raises:
        ConfigError: the file cannot be written.
    """
    number = {} if epoch is None else {"driver_epoch": epoch.number}
    holder = {**_this_process(), **number}
    try:
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, json.dumps(holder).encode())
    except OSError as error:
        path = Path(storage.local_path or "") / LOCK
        raise ConfigError(setting, f": {path} cannot be written: {in_words(error)}") from error


def wait_until_free(
    storage: Storage,
    *,
    wait_s: float,
    log: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait while the lock is held by another driver, or by a dead one on a file server.

    Returns after ``wait_s`` seconds at the latest; ``held`` then reports the holder. Creates no
    file, and ignores lock objects, since ``held`` waits for those.
    """
    if storage.local_path is None:
        return
    until = clock() + wait_s
    is_logged = False
    while is_locked(storage.local_path) and clock() < until:
        if not is_logged:
            place = redact(storage.root)
            log(f"{place} is still in use; waiting up to {wait_s:.0f} s for its driver to end")
            is_logged = True
        sleep(LOCK_POLL_S)


def is_locked(folder: str) -> bool:
    """Whether a process holds the lock file of a local folder.

    One that is absent, or cannot be locked, is free.
    """
    files = LocalFiles(folder)
    try:
        descriptor = files.open_or_create(LOCK) if files.status(LOCK) else None
    except OSError:
        descriptor = None
    if descriptor is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def _this_process() -> Holder:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"driver": f"process {os.getpid()} on {socket.gethostname()}", "since": since}


def _in_use(storage: Storage, setting: str, data: bytes) -> ConfigError:
    """Return the error for a folder in use; ``data`` is the content of a lock file or object."""
    try:
        holder = describe(parse_json(data, Holder))
    except ValueError:
        holder = "another driver"  # which has not written its record yet
    return ConfigError(
        setting,
        f": {storage.root} is in use by {holder}; name another folder, or stop that run first: "
        f"--resume continues it",
    )


class _LockObject:
    """This driver's lock on a folder of an object store; a thread writes its heartbeats.

    Args:
        storage: the run's folder.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
        self._process = _this_process()
        self._beat = 0
        self.epoch: DriverEpoch | None = None
        """The epoch of this driver, once it has one."""
        self._ended = threading.Event()
        # A daemon: a store that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._keep, name="run-lock", daemon=True)

    def acquire(self, setting: str) -> None:
        """Lock the folder, unless a living driver has locked it.

        Raises:
            ConfigError: one has, or the folder cannot be read or written.
        """
        try:
            for name in self._stale_locks(setting):
                self._storage.delete_dir(f"{_LOCK_OBJECTS}/{name}")
            self._write()
            self._thread.start()
            until = time.monotonic() + STALE_S
            while others := self._others():
                if min(others) < self._name or time.monotonic() > until:
                    raise _in_use(self._storage, setting, self._read(min(others)))
                time.sleep(POLL_S)  # a later driver sees this lock and ends
        except OSError as error:
            problem = f": {self._storage.root} cannot be locked: {in_words(error)}"
            raise ConfigError(setting, problem) from error

    def release(self, *, timeout_s: float = 5.0) -> None:
        """Release the folder; wait ``timeout_s`` for a store that does not answer."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _keep(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                if self.epoch is not None:
                    self.epoch.check()  # do not restore a lock that another driver has deleted
                self._write()
            except SupersededError:
                return  # another driver has the folder: there is nothing to release
            except OSError:  # the next heartbeat tries again
                pass
        with suppress(OSError):
            self._storage.delete_dir(f"{_LOCK_OBJECTS}/{self._name}")

    def _write(self) -> None:
        self._beat += 1
        number = {"driver_epoch": self.epoch.number} if self.epoch else {}
        data = json.dumps({**self._process, **number, "beat": self._beat}).encode()
        self._storage.write_bytes(f"{_LOCK_OBJECTS}/{self._name}/driver.json", data)

    def _stale_locks(self, setting: str) -> list[str]:
        """Return the lock objects of others after reading them long enough without a change.

        Raises:
            ConfigError: one has changed.
        """
        first = {name: self._read(name) for name in self._others()}
        # Counted, not timed: a process that was halted meanwhile has read nothing.
        for _ in range(math.ceil(STALE_S / POLL_S)):
            if not first:
                break
            time.sleep(POLL_S)
            for name, data in first.items():
                if self._read(name) not in (b"", data):
                    # Read again: it may have been longer, and half written.
                    raise _in_use(self._storage, setting, self._read(name))
            others = self._others()
            first = {name: data for name, data in first.items() if name in others}
        return list(first)

    def _others(self) -> list[str]:
        return [name for name in self._storage.list_dir(_LOCK_OBJECTS) if name != self._name]

    def _read(self, name: str) -> bytes:
        """Return the content of a lock object, empty if it was released meanwhile."""
        try:
            path = f"{_LOCK_OBJECTS}/{name}/driver.json"
            return self._storage.read_bytes(path, most=HOLDER_BYTES)
        except FileNotFoundError:
            return b""
