"""Checks the files of a run against their checksums."""

from __future__ import annotations

from raydl.checkpoint.best import FILE, read_best
from raydl.checkpoint.store import CheckpointStore
from raydl.errors import CheckpointError
from raydl.run.folder import open_run
from raydl.text.redaction import redact


def check_run(path: str) -> list[str]:
    """Read all checkpoints of a run, its best center and its trained weights.

    Args:
        path: the run's folder, a path or URI.

    Returns:
        A sentence for each damaged file.

    Raises:
        DataError: there is no run.
    """
    folder = open_run(path)
    folder.read_config()  # raises the DataError
    storage = folder.storage
    damage = CheckpointStore(storage).find_damage()
    if storage.exists(FILE):
        try:
            read_best(storage)
        except CheckpointError as error:
            damage.append(str(error))
    return [redact(sentence) for sentence in damage]
