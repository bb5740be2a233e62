"""A run's folder on any PyArrow file system: local, s3://, gs://, …

A file on a local disk is written aside, flushed and moved into place, so that a reader
sees all of it or nothing. An object store shows an object only when it is whole, so there
it is written in place.
"""

from __future__ import annotations

import os
import posixpath

from pyarrow import fs

from raydl.errors import ConfigError

_OBJECT_STORES = ("s3", "gcs", "abfs")


class Storage:
    """Named files below one root.

    Args:
        root: a local folder or a URI; need not exist yet.
        filesystem: the file system that ``root`` is a path on; None: found from ``root``.

    Raises:
        ConfigError: no file system serves that URI.
    """

    def __init__(self, root: str, *, filesystem: fs.FileSystem | None = None) -> None:
        self.root = root
        if filesystem is not None:
            self._filesystem, self._path = filesystem, root
        elif "://" in root:
            try:
                self._filesystem, self._path = fs.FileSystem.from_uri(root)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    "run.storage_path", f"{root} can not be opened: {error}"
                ) from error
        else:
            self._filesystem, self._path = fs.LocalFileSystem(), os.path.abspath(root)

    @property
    def is_object_store(self) -> bool:
        """Whether files appear whole, and folders can not be renamed."""
        return self._filesystem.type_name in _OBJECT_STORES

    def _at(self, name: str) -> str:
        return posixpath.join(self._path, name)

    def probe(self, setting: str) -> None:
        """Write and delete a small file.

        Raises:
            ConfigError: the place can not be written; ``setting`` is named.
        """
        try:
            self.write_bytes(".probe", b"")
            self._filesystem.delete_file(self._at(".probe"))
        except OSError as error:
            raise ConfigError(setting, f"{self.root} can not be written: {error}") from error

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file, replacing an older one at once and as a whole."""
        path = self._at(name)
        self._filesystem.create_dir(posixpath.dirname(path), recursive=True)
        if self.is_object_store:
            self._write(path, data)
            return
        aside = f"{path}.tmp"
        self._write(aside, data)
        self._flush_to_disk(aside)
        self._filesystem.move(aside, path)
        self._flush_to_disk(posixpath.dirname(path))

    def _write(self, path: str, data: bytes) -> None:
        with self._filesystem.open_output_stream(path) as stream:
            stream.write(data)

    def _flush_to_disk(self, path: str) -> None:
        """Make a local file or folder survive a power failure; PyArrow does not."""
        if self._filesystem.type_name != "local":
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read_bytes(self, name: str) -> bytes:
        """Return a whole file.

        Raises:
            OSError: it is not there or can not be read.
        """
        with self._filesystem.open_input_stream(self._at(name), compression=None) as stream:
            data: bytes = stream.read()
        return data

    def exists(self, name: str) -> bool:
        """Whether a file or folder is there."""
        info = self._filesystem.get_file_info(self._at(name))
        return bool(info.type != fs.FileType.NotFound)

    def list_dir(self, name: str) -> list[str]:
        """Return the names directly below a folder, sorted; none if it is not there."""
        selector = fs.FileSelector(self._at(name), allow_not_found=True)
        infos = self._filesystem.get_file_info(selector)
        return sorted(posixpath.basename(info.path) for info in infos)

    def delete_dir(self, name: str) -> None:
        """Delete a folder with all in it, if it is there."""
        if self.exists(name):
            self._filesystem.delete_dir(self._at(name))

    def move_dir(self, name: str, new_name: str) -> None:
        """Rename a folder at once. Not on object stores."""
        self._filesystem.move(self._at(name), self._at(new_name))
        self._flush_to_disk(posixpath.dirname(self._at(new_name)))
