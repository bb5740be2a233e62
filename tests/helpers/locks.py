"""Stores without locks."""

from raydl.storage import Storage


class ObjectsWithoutLocks(Storage):
    """A folder that has no locks, as an object store has none."""

    local_path = None
