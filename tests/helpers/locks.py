"""Storages without locks."""

from raydl.storage import Storage


class ObjectsWithoutLocks(Storage):
    """A folder without locks, like an object store."""

    local_path = None
