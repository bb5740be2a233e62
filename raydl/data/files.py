"""Files on any PyArrow file system, with errors that name the file."""

from __future__ import annotations

import fnmatch
import gzip
import posixpath
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import fs

from raydl.errors import DataError
from raydl.storage import below, in_words, open_filesystem, parent_and_name

_ANY = Exception
"""What a file system in Python may raise, as that of hf://."""


@dataclass(frozen=True)
class Place:
    """A file or folder on a file system."""

    filesystem: fs.FileSystem
    path: str
    name: str
    """The path as the user wrote it, for messages."""

    def __truediv__(self, child: str) -> Place:
        """Return the place of a child."""
        path = posixpath.join(self.path, child)
        return Place(self.filesystem, path, below(self.name, child))

    @property
    def parent(self) -> Place:
        """The folder that has it."""
        name = parent_and_name(self.name)[0] or "."
        return Place(self.filesystem, posixpath.dirname(self.path) or ".", name)

    @property
    def basename(self) -> str:
        """Last part of the path."""
        return posixpath.basename(self.path.rstrip("/"))

    def is_file(self) -> bool:
        """Whether the file exists."""
        return bool(self.info().type == fs.FileType.File)

    def is_dir(self) -> bool:
        """Whether the folder exists."""
        return bool(self.info().type == fs.FileType.Directory)

    @property
    def is_local(self) -> bool:
        """Whether it lies in a folder of this machine, and not in a store."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def info(self) -> fs.FileInfo:
        """Return its kind, its size and the time of its last change.

        Raises:
            DataError: if its file system cannot be reached.
        """
        with wording(self.name, "reached", _ANY):
            return self.filesystem.get_file_info(self.path)

    def children(self, pattern: str = "*") -> list[Place]:
        """Return the entries directly below a folder, sorted by name, without hidden files."""
        with wording(self.name, "listed"):
            infos = self.filesystem.get_file_info(fs.FileSelector(self.path))
        names = sorted(posixpath.basename(info.path) for info in infos)
        return [self / n for n in names if fnmatch.fnmatch(n, pattern) and not n.startswith(".")]

    def open(self) -> pa.NativeFile:
        """Open the file to read it at any place; the caller closes it."""
        return self.filesystem.open_input_file(self.path)

    def read(self) -> bytes:
        """Return the whole file, decompressed if its name ends in .gz.

        Raises:
            DataError: if it cannot be read or is truncated.
        """
        opened = self.filesystem.open_input_stream
        with wording(self.name, "read"), opened(self.path, compression=None) as stream:
            data: bytes = stream.read()
        return _unzipped(data, self.name) if self.path.endswith(".gz") else data

    def read_alone(self) -> bytes | Exception:
        """Return the whole file, or why this file alone cannot be read."""
        try:
            return self.read()
        except Exception as error:
            return error


@contextmanager
def wording(name: str, what: str, errors: type[Exception] = OSError) -> Iterator[None]:
    """Turn the error of a file system into a DataError, "NAME: cannot be WHAT: …"."""
    try:
        yield
    except errors as error:
        raise DataError(name, f"cannot be {what}: {in_words(error)}") from error


def _unzipped(data: bytes, name: str) -> bytes:
    """Return the content of a gzip file, which may have several members."""
    try:
        return gzip.decompress(data)
    except EOFError as error:
        raise DataError(name, "is a truncated gzip file") from error
    except (OSError, zlib.error) as error:
        raise DataError(name, f"is not a whole gzip file: {error}") from error


def find(source: str) -> Place:
    """Return the place of a path or URI; it need not exist.

    Raises:
        DataError: if no file system serves the URI.
    """
    if "://" not in source:
        return Place(fs.LocalFileSystem(), source, source)
    with wording(source, "opened", _ANY):
        filesystem, path = open_filesystem(source)
    return Place(filesystem, path, source)


def matching(source: str) -> list[Place]:
    """Return the place of a path or URI, or those that match it, if it has wildcards (``*``).

    Only the last part may have them. A path that exists is meant as it is, whatever its name.

    Raises:
        DataError: if no file system serves the URI, or nothing matches the wildcards.
    """
    place = find(source)
    if "*" not in source or place.is_dir() or place.is_file():
        return [place]
    folder, pattern = parent_and_name(source)
    parent = find(folder or ".")
    places = parent.children(pattern) if parent.is_dir() else []
    if not places:
        raise DataError(source, "no file matches")
    return places
