"""Writes a folder of files completely or not at all, for ``raydl.tools.convert.convert``.

A new folder is written under a hidden name beside it and then renamed. Object stores cannot rename.
There, and in an empty folder that exists already, a file named ``.unfinished`` lies beside the
others until all are written; readers refuse the folder until then.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from raydl.data.files import Place, wording
from raydl.errors import DataError
from raydl.storage import Storage, below, parent_and_name

UNFINISHED = ".unfinished"
"""Name of the file that marks an incomplete folder."""

_NOTE = b"raydl data convert is writing this folder, or was interrupted while it did.\n"


def refuse_unfinished(file: Place) -> None:
    """Refuse a file whose folder is not complete.

    Raises:
        DataError: if the folder holds the marker.
    """
    folder = file.parent
    if (folder / UNFINISHED).is_file():
        raise DataError(
            folder.name,
            f"is incomplete: its {UNFINISHED} shows that a conversion is running or was "
            f"interrupted; if none is running, delete the folder and convert again",
        )


def whole_folder(target: Place) -> AbstractContextManager[Place]:
    """Return a context that yields a folder to write in and completes it as ``target``.

    After an error in the context, it deletes all files that were written.

    Raises:
        DataError: if ``target`` is a file, is not empty or cannot be written.
    """
    with wording(target.name, "reached"):
        exists = _require_free(target)
    if exists or Storage(target.path, filesystem=target.filesystem).is_object_store:
        return _marked(target)
    return _renamed(target)


def _require_free(target: Place) -> bool:
    """Return whether the folder exists; refuse a file and a folder that is not empty."""
    if target.is_file():
        raise DataError(target.name, "is a file; give a new or empty folder")
    if not target.is_dir():
        return False
    names = Storage(target.path, filesystem=target.filesystem).list_dir("")
    if UNFINISHED in names:
        raise DataError(
            target.name,
            "holds files of a conversion that is running or was interrupted; if none is running, "
            "delete it",
        )
    if names:
        raise DataError(
            target.name, f"is not empty, it holds {names[0]}; give a new or empty folder"
        )
    return True


@contextmanager
def _renamed(target: Place) -> Iterator[Place]:
    path = target.path
    if target.filesystem.type_name == "local":
        path = os.path.abspath(path)
    parent, name = posixpath.split(path.rstrip("/"))
    storage, hidden = Storage(parent, filesystem=target.filesystem), f".{name}{UNFINISHED}"
    parent_name, _ = parent_and_name(target.name)
    folder = Place(target.filesystem, posixpath.join(parent, hidden), below(parent_name, hidden))
    with wording(target.name, "written"):
        if storage.exists(hidden):
            raise DataError(
                folder.name,
                "belongs to a conversion that is running or was interrupted; if none is running, "
                "delete it",
            )
        target.filesystem.create_dir(folder.path, recursive=True)
    try:
        yield folder
        with wording(target.name, "written"):
            storage.move_dir(hidden, name)
    except BaseException:  # also after an interrupt
        with suppress(OSError):  # report the first error
            storage.delete_dir(hidden)
        raise


@contextmanager
def _marked(target: Place) -> Iterator[Place]:
    storage = Storage(target.path, filesystem=target.filesystem)
    try:
        with wording(target.name, "written"):
            storage.write_bytes(UNFINISHED, _NOTE)
        yield target
        with wording(target.name, "written"):
            storage.delete_file(UNFINISHED)
    except BaseException:  # also after an interrupt
        with suppress(OSError):  # report the first error
            # The marker is deleted last.
            for name in sorted(storage.list_dir(""), key=lambda name: name == UNFINISHED):
                storage.delete_file(name)
        raise
