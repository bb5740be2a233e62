"""A run's folder on any PyArrow file system: local, s3://, gs://, …

A file on a local disk is written aside, flushed and moved into place, so that a reader
sees all of it or nothing. An object store shows an object only when it is whole, so there
it is written in place.

A store that does not answer is given up within half a minute, and what it said becomes the
rest of one sentence: see :func:`in_words`. Endpoints and credentials: docs/storage.md.
"""

from __future__ import annotations

import copy
import os
import posixpath
import re
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

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
        filesystem = fs.S3FileSystem(**{**options, "retry_strategy": retries})
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
                self._filesystem, self._path = open_filesystem(root)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    "run.storage_path", f"{root} can not be opened: {in_words(error)}"
                ) from error
        else:
            self._filesystem, self._path = fs.LocalFileSystem(), os.path.abspath(root)
        self._check: Callable[[], None] | None = None

    def guarded(self, check: Callable[[], None]) -> Storage:
        """Return this storage with a check just before everything that changes a file of it.

        Args:
            check: raises if nothing may be changed any more; what it raises is passed on.
        """
        guarded = copy.copy(self)
        guarded._check = check
        return guarded

    def _check_guard(self) -> None:
        if self._check is not None:
            self._check()

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
            self._filesystem.delete_file(self._at(name))
        except OSError as error:
            if self.local_path is not None:  # a full disk keeps what could not be filled
                for left in (name, f"{name}.tmp"):
                    with suppress(OSError):
                        os.unlink(self._at(left))
            problem = f"{self.root} can not be written: {in_words(error)}"
            raise ConfigError(setting, problem) from error

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file, replacing an older one at once and as a whole."""
        self._put(name, lambda stream: stream.write(data))

    def copy_in(self, local: str, name: str) -> None:
        """Write a file that lies on this machine, piece by piece; like :meth:`write_bytes` else."""
        with open(local, "rb") as source:
            self._put(name, lambda stream: shutil.copyfileobj(source, stream, _CHUNK_BYTES))

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
        self._check_guard()
        path = self._at(name)
        if self._filesystem.type_name not in _OBJECT_STORES:  # they have no folders, only names
            self._filesystem.create_dir(posixpath.dirname(path), recursive=True)
        if self.is_object_store:
            self._write(path, fill)
            return
        aside = f"{path}.tmp"
        self._write(aside, fill)
        self._flush_to_disk(aside)
        self._check_guard()  # to write it may have taken long
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

    def copy_file(self, name: str, new_name: str) -> None:
        """Copy a file of this storage, which no one writes over, to a name that is free.

        On a disk the copy is a second name of the same file, where the disk can do that. An object
        store copies by itself.

        Raises:
            OSError: it is not there, or can not be copied.
        """
        self._check_guard()
        source, target = self._at(name), self._at(new_name)
        if self._filesystem.type_name == "local":
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with suppress(OSError):  # no links here
                os.link(source, target)
                return
        elif self.is_object_store:
            with suppress(OSError):  # S3 copies no object above 5 GB
                self._filesystem.copy_file(source, target)
                return
        with self._filesystem.open_input_stream(source, compression=None) as stream:
            self._put(new_name, lambda out: shutil.copyfileobj(stream, out, _CHUNK_BYTES))

    def delete_file(self, name: str) -> None:
        """Delete a file.

        Raises:
            OSError: it is not there, or can not be deleted.
        """
        self._check_guard()
        self._filesystem.delete_file(self._at(name))

    def delete_dir(self, name: str) -> None:
        """Delete a folder with all in it, if it is there."""
        self._check_guard()
        if self.exists(name):
            self._filesystem.delete_dir(self._at(name))

    def move_dir(self, name: str, new_name: str) -> None:
        """Rename a folder at once. Not on object stores."""
        self._check_guard()
        self._filesystem.move(self._at(name), self._at(new_name))
        self._flush_to_disk(posixpath.dirname(self._at(new_name)))
