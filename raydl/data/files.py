"""Files on any PyArrow file system, with errors that name them."""

from __future__ import annotations

import fnmatch
import posixpath
import zlib
from dataclasses import dataclass

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
        """Return the files below."""
        path = posixpath.join(self.path, child)
        return Place(self.filesystem, path, below(self.name, child))

    @property
    def basename(self) -> str:
        """The last part of the path."""
        return posixpath.basename(self.path.rstrip("/"))

    def is_file(self) -> bool:
        """Whether a file is there."""
        return bool(self._info().type == fs.FileType.File)

    def is_dir(self) -> bool:
        """Whether a folder is there."""
        return bool(self._info().type == fs.FileType.Directory)

    def _info(self) -> fs.FileInfo:
        try:
            return self.filesystem.get_file_info(self.path)
        except OSError as error:
            raise DataError(self.name, f"can not be reached: {in_words(error)}") from error

    def children(self, pattern: str = "*") -> list[Place]:
        """Return the entries directly below a folder, by name; hidden files are left out."""
        try:
            infos = self.filesystem.get_file_info(fs.FileSelector(self.path))
        except OSError as error:
            raise DataError(self.name, f"can not be listed: {in_words(error)}") from error
        names = sorted(posixpath.basename(info.path) for info in infos)
        return [self / n for n in names if fnmatch.fnmatch(n, pattern) and not n.startswith(".")]

    def read(self) -> bytes:
        """Return the whole file, unpacked if its name ends in .gz.

        Raises:
            DataError: it can not be read, or is cut off.
        """
        try:
            with self.filesystem.open_input_stream(self.path, compression=None) as stream:
                data: bytes = stream.read()
        except OSError as error:
            raise DataError(self.name, f"can not be read: {in_words(error)}") from error
        return self._unpack(data) if self.path.endswith(".gz") else data

    def _unpack(self, data: bytes) -> bytes:
        unpacker = zlib.decompressobj(wbits=31)
        try:
            unpacked = unpacker.decompress(data) + unpacker.flush()
        except zlib.error as error:
            raise DataError(self.name, f"is not a whole gzip file: {error}") from error
        if not unpacker.eof:
            raise DataError(self.name, "is a gzip file that was cut off")
        return unpacked


def find(source: str) -> Place:
    """Return the place that a path or URI names; it need not exist.

    Raises:
        DataError: no file system serves that URI.
    """
    if "://" not in source:
        return Place(fs.LocalFileSystem(), source, source)
    try:
        filesystem, path = open_filesystem(source)
    except (OSError, ValueError) as error:
        raise DataError(source, f"can not be opened: {in_words(error)}") from error
    return Place(filesystem, path, source)


def glob(source: str) -> list[Place]:
    """Return the files that a path or URI with wildcards in its last part names."""
    folder, pattern = parent_and_name(source)
    place = find(folder or ".")
    return place.children(pattern) if place.is_dir() else []
