"""The driver epoch: only the newest start of a run may change its files.

    runs/NAME/driver-epochs/00000003-5f0c9a1e.json    the third start: its process and time

When a start holds the run's folder, it takes the next number, its driver epoch, with a record
that is never deleted or overwritten. A driver may be halted for so long that another one takes
over the run. When it resumes, it finds the other's record before it changes a file, and ends.

This needs no conditional writes, only that a list shows all earlier writes, as on disks, S3, GCS
and Azure. Each start first writes its record and then lists all: if two take one number, the
second to list sees the other's record and withdraws.

Another start may still take an epoch between a check and the write after it. So files that may be
written then have the epoch in their names (``raydl.checkpoint.store``) or in their contents.
"""

from __future__ import annotations

import errno
import json
import re
import uuid
from contextlib import suppress
from typing import TypedDict

from raydl.errors import SupersededError
from raydl.storage import Storage

FOLDER = "driver-epochs"
_NAME = re.compile(r"(\d{8,18})-[0-9a-f]{8}\.json")
_IN_CHECKPOINT = re.compile(r"-e(\d{1,18})\b")
"""The driver epoch in the name of a checkpoint; see ``raydl.checkpoint.store``."""
HOLDER_BYTES = 4096
"""Largest record of a driver that is read."""


class Holder(TypedDict):
    """A driver's record of itself, in a lock and in the file of its epoch."""

    driver: str
    since: str


def describe(holder: Holder) -> str:
    """Return the driver and its time: ``process 12 on a since 2026-11-28 10:00:00``."""
    return f"{holder['driver']} since {holder['since']}"


class DriverEpoch:
    """The number of this start of a run, and whether it is still the newest.

    Args:
        storage: the run's folder, without a guard.
        number: the number, counted from 1.
        name: name of the record of this start.
    """

    def __init__(self, storage: Storage, number: int, name: str) -> None:
        self.number = number
        self._storage = storage
        self._name = name
        self._over: SupersededError | None = None

    @classmethod
    def take_next(cls, storage: Storage, holder: Holder) -> DriverEpoch | None:
        """Take the next epoch of a run; return None if another driver did at the same time.

        Args:
            storage: the run's folder, which this driver holds.
            holder: describes this process.

        Raises:
            OSError: the storage failed, or a record has a number that no run reaches.
        """
        number = 1 + max(_numbers(storage).values(), default=_unrecorded(storage))
        name = f"{number:08d}-{uuid.uuid4().hex[:8]}.json"
        if not _NAME.fullmatch(name):  # its successor would not find it
            problem = (
                f"{FOLDER} or checkpoints has a start of number {number - 1}, which no run has"
            )
            raise OSError(errno.EINVAL, problem)
        record = {**holder, "driver_epoch": number}
        storage.write_bytes(f"{FOLDER}/{name}", json.dumps(record).encode())
        # A higher number is possible: that driver listed after this one wrote its record.
        if any(other >= number for n, other in _numbers(storage).items() if n != name):
            with suppress(OSError):
                storage.delete_file(f"{FOLDER}/{name}")
            return None
        return cls(storage, number, name)

    @property
    def is_over(self) -> bool:
        """Whether ``check`` has found a newer epoch."""
        return self._over is not None

    def raise_if_over(self) -> None:
        """Raise the error of an earlier ``check``, without reading files.

        Raises:
            SupersededError: a newer driver has the run.
        """
        if self._over is not None:
            raise self._over

    def check(self) -> None:
        """Check that this is still the newest epoch.

        Raises:
            SupersededError: there is a newer one.
            OSError: the storage failed.
        """
        self.raise_if_over()
        newer = {name: n for name, n in _numbers(self._storage).items() if n > self.number}
        if newer:
            name = max(newer, key=lambda name: newer[name])
            holder = ""
            with suppress(OSError, ValueError):
                record = self._storage.read_json(f"{FOLDER}/{name}", Holder, most=HOLDER_BYTES)
                holder = describe(record)
            self._over = SupersededError(self._storage.root, self.number, newer[name], holder)
            raise self._over


def _numbers(storage: Storage) -> dict[str, int]:
    """Return the number of each record, by its name."""
    matches = ((name, _NAME.fullmatch(name)) for name in storage.list_dir(FOLDER))
    return {name: int(match[1]) for name, match in matches if match}


def _unrecorded(storage: Storage) -> int:
    """Return the newest epoch of a run without records, or 0 if the run is new.

    An earlier version made no records, and a copy of a run may lack them.
    """
    if not storage.exists("config.json"):
        return 0
    matches = (_IN_CHECKPOINT.search(name) for name in storage.list_dir("checkpoints"))
    return max((int(match[1]) for match in matches if match), default=1)
