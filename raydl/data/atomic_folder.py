"""Folders of files that are whole or not there, for ``raydl.tools.convert.convert``.

A folder that is new is written under a hidden name beside it and renamed. On object stores, which
have no renaming, and in an empty folder that is there already, a file named ``.unfinished`` lies
beside the others until all are written; who reads the folder refuses it till then.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace

from raydl.data.files import Place
from raydl.errors import DataError
from raydl.storage import Storage, below, in_words, parent_and_name

UNFINISHED = ".unfinished"
"""The file that says that others beside it are still to come."""

_NOTE = b"raydl data convert writes this folder, or was cut off while it did.\n"


def refuse_unfinished(file: Place) -> None:
    """Raise unless the folder of a file is written to its end.

    Raises:
        DataError: it is not.
    """
    folder, _ = parent_and_name(file.name)
    marker = posixpath.join(posixpath.dirname(file.path), UNFINISHED)
    if Place(file.filesystem, marker, file.name).is_file():
        raise DataError(
            folder,
            f"is not whole: {UNFINISHED} in it says that a conversion goes on or was cut off; "
            f"if none goes on, delete the folder and convert again",
        )


def whole_folder(target: Place) -> AbstractContextManager[Place]:
    """Return a context that gives a folder to write in; at its end it is ``target``, whole.

    After an error in it nothing of what was written is there.

    Raises:
        DataError: ``target`` is a file or not empty, or can not be written.
    """
    with wording(target, "reached"):
        is_there = _require_free(target)
    if is_there or Storage(target.path, filesystem=target.filesystem).is_object_store:
        return _marked(target)
    return _renamed(target)


@contextmanager
def wording(place: Place, what: str) -> Iterator[None]:
    """Make a DataError, "PLACE: can not be WHAT: …", of what a file system says."""
    try:
        yield
    except OSError as error:
        raise DataError(place.name, f"can not be {what}: {in_words(error)}") from error


def _require_free(target: Place) -> bool:
    """Return whether a folder is there, which must be empty."""
    if target.is_file():
        raise DataError(target.name, "is a file; name a folder that is new or empty")
    if not target.is_dir():
        return False
    names = Storage(target.path, filesystem=target.filesystem).list_dir("")
    if UNFINISHED in names:
        raise DataError(
            target.name,
            "holds what a conversion has written that goes on or was cut off; if none goes on, "
            "delete it",
        )
    if names:
        raise DataError(
            target.name, f"is not empty, it holds {names[0]}; name a folder that is new or empty"
        )
    return True


@contextmanager
def _renamed(target: Place) -> Iterator[Place]:
    path = target.path
    if target.filesystem.type_name == "local":
        path = os.path.abspath(path)
    parent, name = posixpath.split(path.rstrip("/"))
    storage, hidden = Storage(parent, filesystem=target.filesystem), f".{name}{UNFINISHED}"
    beside, _ = parent_and_name(target.name)
    aside = Place(target.filesystem, posixpath.join(parent, hidden), below(beside, hidden))
    with wording(target, "written"):
        if storage.exists(hidden):
            raise DataError(
                aside.name,
                "is of a conversion that goes on or was cut off; if none goes on, delete it",
            )
        target.filesystem.create_dir(aside.path, recursive=True)
    try:
        yield aside
        with wording(target, "written"):
            storage.move_dir(hidden, name)
    except BaseException:  # an interrupt too
        with suppress(OSError):  # the first error is the one to tell
            storage.delete_dir(hidden)
        raise


@contextmanager
def _marked(target: Place) -> Iterator[Place]:
    storage = Storage(target.path, filesystem=target.filesystem)
    marker = target / UNFINISHED
    try:
        with wording(target, "written"):
            storage.write_bytes(UNFINISHED, _NOTE)
        yield replace(target)
        with wording(target, "written"):
            target.filesystem.delete_file(marker.path)
    except BaseException:  # an interrupt too
        with suppress(OSError):  # the first error is the one to tell
            _empty(target)
        raise


def _empty(folder: Place) -> None:
    """Delete the files in a folder that was empty, the marker last."""
    names = Storage(folder.path, filesystem=folder.filesystem).list_dir("")
    for name in sorted(names, key=lambda name: name == UNFINISHED):
        folder.filesystem.delete_file((folder / name).path)
