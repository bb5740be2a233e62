"""Files on any PyArrow file system, with errors that name the file."""

from __future__ import annotations

import fnmatch
import posixpath
import zlib
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import fs

from raydl.errors import DataError
from raydl.storage import below, in_words, open_filesystem, parent_and_name


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

    def info(self) -> fs.FileInfo:
        """Return its kind, its size and the time of its last change.

        Raises:
            DataError: if its file system cannot be reached.
        """
        try:
            return self.filesystem.get_file_info(self.path)
        except Exception as error:  # of a file system in Python, as that of hf://, any error
            raise DataError(self.name, f"cannot be reached: {in_words(error)}") from error

    def children(self, pattern: str = "*") -> list[Place]:
        """Return the entries directly below a folder, sorted by name, without hidden files."""
        try:
            infos = self.filesystem.get_file_info(fs.FileSelector(self.path))
        except OSError as error:
            raise DataError(self.name, f"cannot be listed: {in_words(error)}") from error
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
        try:
            with self.filesystem.open_input_stream(self.path, compression=None) as stream:
                data: bytes = stream.read()
        except OSError as error:
            raise DataError(self.name, f"cannot be read: {in_words(error)}") from error
        if not self.path.endswith(".gz"):
            return data
        return _unzipped(data, self.name)


def _unzipped(data: bytes, name: str) -> bytes:
    """Return the content of a gzip file, which may have several members."""
    parts = []
    while data.strip(b"\0"):  # some tools fill up the last block
        gzip = zlib.decompressobj(wbits=31)
        try:
            parts.append(gzip.decompress(data) + gzip.flush())
        except zlib.error as error:
            raise DataError(name, f"is not a whole gzip file: {error}") from error
        if not gzip.eof:
            raise DataError(name, "is a truncated gzip file")
        data = gzip.unused_data
    return b"".join(parts)


def find(source: str) -> Place:
    """Return the place of a path or URI; it need not exist.

    Raises:
        DataError: if no file system serves the URI.
    """
    if "://" not in source:
        return Place(fs.LocalFileSystem(), source, source)
    try:
        filesystem, path = open_filesystem(source)
    except Exception as error:  # of a file system in Python, as that of hf://, any error
        raise DataError(source, f"cannot be opened: {in_words(error)}") from error
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
