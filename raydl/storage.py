"""A run's folder on any PyArrow file system: local, s3://, gs://, …

A file on a local disk is written aside, flushed and moved into place, so that a reader
sees all of it or nothing. An object store shows an object only when it is whole, so there
it is written in place.

A store that does not answer is given up within half a minute, and what it said becomes the
rest of one sentence: see :func:`in_words`. Endpoints and credentials: docs/storage.md.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from pyarrow import fs

from raydl.errors import ConfigError

_OBJECT_STORES = ("s3", "gcs", "abfs")
_ATTEMPTS = 5
"""How often S3 is asked before it is given up. PyArrow's own way can take over 100 s."""
_CHUNK_BYTES = 4 << 20
"""Files that may be large pass through memory in pieces of this size."""
_ERRNO = re.compile(r"^\[Errno \d+\] ")
"""The number of an error, which says nothing that its words do not."""
_DETAIL = re.compile(r"[.,;:]? Detail: \[errno \d+\] (\w)")
"""How PyArrow says what the system said."""
_ADVICE = (
    (
        r"NO_SUCH_BUCKET|Bucket '.*' not found",
        "the bucket does not exist; create it, or correct the name",
    ),
    (
        r"INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|ACCESS_DENIED|INVALID_CLIENT_TOKEN_ID"
        r"|EXPIRED_TOKEN|TOKEN_REFRESH_REQUIRED",
        "the store refuses these credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        "or AWS_PROFILE, to some that may read and write this bucket",
    ),
    (
        r"NETWORK_CONNECTION",
        "the store does not answer; check AWS_ENDPOINT_URL, or endpoint_override in the URI, "
        "and the network",
    ),
)


def open_filesystem(uri: str) -> tuple[fs.FileSystem, str]:
    """Return the file system that serves a URI, and the path on it.

    Raises:
        OSError, ValueError: none does, or its options are wrong.
    """
    filesystem, path = fs.FileSystem.from_uri(uri)
    if filesystem.type_name == "s3":
        # What a URI can not say: its options again, with fewer attempts.
        _, (options,) = filesystem.__reduce__()
        retries = fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS)
        # In the background PyArrow writes from a copy of all that is not sent yet.
        ours = {"retry_strategy": retries, "background_writes": False}
        filesystem = fs.S3FileSystem(**{**options, **ours})
    return filesystem, path


def in_words(error: Exception) -> str:
    """Return what a file system said as the rest of a sentence, with what to do if it is known."""
    said = _ERRNO.sub("", " ".join(str(error).split()))
    said = _DETAIL.sub(lambda match: f": {match[1].lower()}", said)
    for pattern, advice in _ADVICE:
        match = re.search(pattern, said)
        if match:
            details = said.rpartition("Details: ")[2] if "Details: " in said else match[0]
            return f"{advice} ({details})"
    return said


def below(place: str, name: str) -> str:
    """Return the path or URI of what lies below another; the query of a URI stays last."""
    scheme, base, query = _split(place)
    return f"{scheme}{base.rstrip('/')}/{name}{query}" if base else f"{scheme}{name}{query}"


def parent_and_name(place: str) -> tuple[str, str]:
    """Return a path or URI taken apart again, as :func:`below` would put it together."""
    scheme, base, query = _split(place)
    parent, slash, name = base.rstrip("/").rpartition("/")
    return f"{scheme}{parent or slash}{query}", name


def _split(place: str) -> tuple[str, str, str]:
    """Return (scheme with ``://``, path, query with ``?``); only a URI has the outer two."""
    if "://" not in place:
        return "", place, ""
    scheme, colon, rest = place.partition("://")
    base, mark, query = rest.partition("?")
    return scheme + colon, base, mark + query


class Sum(NamedTuple):
    """What tells whether a file is as it was written."""

    num_bytes: int
    crc32: int

    @classmethod
    def of(cls, pieces: Iterable[Any]) -> Sum:
        """Return that of contents that come in pieces."""
        num_bytes = crc32 = 0
        for piece in pieces:
            num_bytes, crc32 = num_bytes + len(piece), zlib.crc32(piece, crc32)
        return cls(num_bytes, crc32)


class Storage:
    """Named files below one root. Processes of other machines may be sent one.

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
                self._filesystem, self._path = open_filesystem(root)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    "run.storage_path", f"{root} can not be opened: {in_words(error)}"
                ) from error
        else:
            self._filesystem, self._path = fs.LocalFileSystem(), os.path.abspath(root)

    @property
    def is_object_store(self) -> bool:
        """Whether files appear whole, and folders can not be renamed."""
        return self._filesystem.type_name in _OBJECT_STORES

    @property
    def local_path(self) -> str | None:
        """The folder on this machine's disks, shared ones too; None: it is elsewhere."""
        return self._path if self._filesystem.type_name == "local" else None

    def _at(self, name: str) -> str:
        return posixpath.join(self._path, name)

    def probe(self, setting: str) -> None:
        """Write and delete a small file.

        Raises:
            ConfigError: the place can not be written; ``setting`` is named.
        """
        name = f".probe-{uuid.uuid4().hex[:8]}"  # another driver may look at the same time
        try:
            self.write_bytes(name, b"")
            self.delete_file(name)
        except OSError as error:
            if self.local_path is not None:  # a full disk keeps what could not be filled
                for left in (name, f"{name}.tmp"):
                    with suppress(OSError):
                        os.unlink(self._at(left))
            problem = f"{self.root} can not be written: {in_words(error)}"
            raise ConfigError(setting, problem) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _same_storage, (self.root, self._filesystem, self._path)

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file, replacing an older one at once and as a whole."""
        self.write_pieces(name, [data])

    def write_pieces(self, name: str, pieces: Iterable[Any]) -> Sum:
        """Write a file as :meth:`write_bytes` does, from contents that come in pieces."""
        sums = []

        def fill(stream: Any) -> None:
            sums.append(Sum.of(_written(stream, pieces)))

        self._put(name, fill)
        return sums[0]

    def copy_in(self, local: str, name: str) -> None:
        """Write a file that lies on this machine, piece by piece; like :meth:`write_bytes` else."""
        with open(local, "rb") as source:
            self.write_pieces(name, iter(lambda: source.read(_CHUNK_BYTES), b""))

    def copy_out(self, name: str, local: str) -> None:
        """Copy a file to this machine, piece by piece; it appears there as a whole.

        Raises:
            OSError: it is not there or can not be read, or ``local`` can not be written.
        """
        aside = os.path.join(os.path.dirname(local), f".{os.path.basename(local)}.tmp")
        with (
            self._filesystem.open_input_stream(self._at(name), compression=None) as stream,
            open(aside, "wb") as target,
        ):
            shutil.copyfileobj(stream, target, _CHUNK_BYTES)
        os.replace(aside, local)

    def _put(self, name: str, fill: Callable[[Any], object]) -> None:
        path = self._at(name)
        if self._filesystem.type_name not in _OBJECT_STORES:  # they have no folders, only names
            self._filesystem.create_dir(posixpath.dirname(path), recursive=True)
        if self.is_object_store:
            self._write(path, fill)
            return
        aside = f"{path}.tmp"
        self._write(aside, fill)
        self._flush_to_disk(aside)
        self._filesystem.move(aside, path)
        self._flush_to_disk(posixpath.dirname(path))

    def _write(self, path: str, fill: Callable[[Any], object]) -> None:
        with self._filesystem.open_output_stream(path) as stream:
            fill(stream)

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

    def read_pieces(self, name: str) -> Iterator[bytes]:
        """Yield the contents of a file in order, in pieces.

        Raises:
            OSError: it is not there or can not be read.
        """
        with self._filesystem.open_input_stream(self._at(name), compression=None) as stream:
            while piece := stream.read(_CHUNK_BYTES):
                yield piece

    def read_whole(self, name: str) -> bytearray:
        """Return a whole file as memory that may be changed, of which there is one copy.

        Raises:
            OSError: it is not there or can not be read.
        """
        size = self._filesystem.get_file_info(self._at(name)).size
        data, filled = bytearray(size or 0), 0
        for piece in self.read_pieces(name):
            data[filled : filled + len(piece)] = piece
            filled += len(piece)
        del data[filled:]
        return data

    def delete_file(self, name: str) -> None:
        """Delete a file that is there."""
        self._filesystem.delete_file(self._at(name))

    def exists(self, name: str) -> bool:
        """Whether a file or folder is there."""
        info = self._filesystem.get_file_info(self._at(name))
        return bool(info.type != fs.FileType.NotFound)

    def list_dir(self, name: str) -> list[str]:
        """Return the names directly below a folder, sorted; none if it is not there."""
        selector = fs.FileSelector(self._at(name), allow_not_found=True)
        try:
            infos = self._filesystem.get_file_info(selector)
        except FileNotFoundError:  # PyArrow's, if the folder is made while it looks
            return []
        return sorted(posixpath.basename(info.path) for info in infos)

    def delete_dir(self, name: str) -> None:
        """Delete a folder with all in it, if it is there."""
        if self.exists(name):
            self._filesystem.delete_dir(self._at(name))

    def move_dir(self, name: str, new_name: str) -> None:
        """Rename a folder at once. Not on object stores."""
        self._filesystem.move(self._at(name), self._at(new_name))
        self._flush_to_disk(posixpath.dirname(self._at(new_name)))


def _same_storage(root: str, filesystem: fs.FileSystem, path: str) -> Storage:
    """Return a storage as it was in another process, whatever folder this one works in."""
    storage = Storage(path, filesystem=filesystem)
    storage.root = root
    return storage


def _written(stream: Any, pieces: Iterable[Any]) -> Iterator[Any]:
    """Write each piece, then hand it on."""
    for piece in pieces:
        stream.write(piece)
        yield piece
