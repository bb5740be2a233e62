"""The driver epoch: of all starts of a run, only the newest may change its files.

    runs/NAME/driver-epochs/00000003-5f0c9a1e.json    the third start: which process, since when

Every start takes the next number, its driver epoch, once it holds the run's folder, and writes a
record that nobody deletes or writes over. A driver that was halted for so long that another one
took the run over finds the other's record when it wakes up, before it changes a file, and ends.

No store needs conditional writes for this; it must list what was written before, as disks, S3,
GCS and Azure do. Each start writes its record and then looks: of two that took one number the
second to look sees the other, and gives up.

Between such a look and the write that follows lies a moment. What is written by then has a name
that holds the epoch (``raydl.checkpoint.store``), or says in its content of which epoch it is.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from raydl.errors import SupersededError
from raydl.storage import Storage

FOLDER = "driver-epochs"
_NAME = re.compile(r"(\d{8,})-[0-9a-f]{8}\.json")
_OF_CHECKPOINT = re.compile(r"-e(\d+)")
"""Part of a checkpoint's name that gives the driver epoch; see ``raydl.checkpoint.store``."""


class DriverEpoch:
    """The number of this start among all starts of a run, and whether it is still the newest.

    Args:
        storage: the run's folder, as anybody may write to it.
        number: counted from 1.
        name: of this start's record.
    """

    def __init__(self, storage: Storage, number: int, name: str) -> None:
        self.number = number
        self._storage = storage
        self._name = name
        self._over: SupersededError | None = None

    @classmethod
    def claim_next(cls, storage: Storage, holder: Mapping[str, Any]) -> DriverEpoch | None:
        """Take the next epoch of a run; None: another driver took one at the same time.

        Args:
            storage: the run's folder, which this driver holds.
            holder: names this process.

        Raises:
            OSError: the storage does not answer.
        """
        number = 1 + max(_numbers(storage).values(), default=_earlier(storage))
        name = f"{number:08d}-{uuid.uuid4().hex[:8]}.json"
        record = {**holder, "driver_epoch": number}
        storage.write_bytes(f"{FOLDER}/{name}", json.dumps(record).encode())
        # A higher number is one of a driver that looked before this one had written, too.
        if any(other >= number for n, other in _numbers(storage).items() if n != name):
            with suppress(OSError):
                storage.delete_file(f"{FOLDER}/{name}")
            return None
        return cls(storage, number, name)

    @property
    def is_over(self) -> bool:
        """Whether ``check`` has found a newer one."""
        return self._over is not None

    def raise_if_over(self) -> None:
        """Raise the error that ``check`` has found; reads nothing.

        Raises:
            SupersededError: a newer driver has the run.
        """
        if self._over is not None:
            raise self._over

    def check(self) -> None:
        """Look whether this is still the newest epoch.

        Raises:
            SupersededError: it is not.
            OSError: the storage does not answer.
        """
        self.raise_if_over()
        newer = {name: n for name, n in _numbers(self._storage).items() if n > self.number}
        if newer:
            name = max(newer, key=lambda name: newer[name])
            who = _holder(self._storage, name)
            self._over = SupersededError(self._storage.root, self.number, newer[name], who)
            raise self._over


def _numbers(storage: Storage) -> dict[str, int]:
    """Return the number of each record, by its name."""
    found = ((name, _NAME.fullmatch(name)) for name in storage.list_dir(FOLDER))
    return {name: int(match[1]) for name, match in found if match}


def _earlier(storage: Storage) -> int:
    """Return the newest epoch of a run that has no records; 0: it is new.

    Its first starts were of a raydl that made none, or they did not come along with a copy.
    """
    if not storage.exists("config.json"):
        return 0
    found = (_OF_CHECKPOINT.search(name) for name in storage.list_dir("checkpoints"))
    return max((int(match[1]) for match in found if match), default=1)


def _holder(storage: Storage, name: str) -> str:
    """Return the process that made a record, and since when; empty: it does not say."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(storage.read_bytes(f"{FOLDER}/{name}"))
        return f"{record['driver']} since {record['since']}"
    return ""
