"""Files on any PyArrow file system (local, s3://, gs://, …), and calls that get no answer.

A file on a disk is written under a temporary name of its own, flushed and moved into place, so that
a reader sees all of it or nothing. An object store shows an object once its upload is complete, but
PyArrow also completes an upload that failed, with the parts so far. So a small file is uploaded in
one request, and a large one under a temporary name, which the store then copies. Below a local
folder no symbolic link is followed: see ``raydl.storage.local_files``.

A file server that is lost, or an S3 server that accepts connections and never replies, blocks the
caller, and such a call cannot be ended. So while a run trains, all calls are made in threads that
the process can abandon; see ``Storage.unanswered``. ``in_words`` makes the rest of one sentence of
a file system's error. Endpoints and credentials: docs/storage.md.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import posixpath
import re
import shutil
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from pyarrow import fs

from raydl.config.typed import typed
from raydl.errors import ConfigError, StorageSilentError
from raydl.storage.local_files import LocalFiles
from raydl.text.redaction import redact

_OBJECT_STORES = ("s3", "gcs", "abfs")
_S3_ATTEMPTS = 5
"""Attempts per S3 request. With PyArrow's own retry strategy one can take over 100 s."""
_S3_TIMEOUTS = {"connect_timeout": 3.0, "request_timeout": 4.0}
"""Time-outs of S3 in seconds, unless the URI has its own."""
_CHUNK_BYTES = 4 << 20
"""Size of the pieces in which large files are read and written."""
_ONE_REQUEST_BYTES = 4 << 20
"""Largest upload in one request: PyArrow sends no part of an S3 object below 5 MiB."""
_COPIED_BYTES = 5 << 30
"""Largest object that S3 copies by itself."""
_NO_COPIES = r"(?i)not.?implemented|method.?not.?allowed"
"""Answers of stores that cannot copy."""
JSON_BYTES = 16 << 20
"""Largest JSON file that is read: the status of ten thousand workers has 2 MB. In memory its value
may take thirty times as much."""
_MOST_NESTED = 200
"""Deepest nesting of a JSON text: functions that call themselves for each level can take it."""
_UPLOAD = ".upload-"
_SYNC_BYTES = 64 << 20
"""A local file is flushed each time that this many bytes were written."""
_NO_ANSWER = r"NETWORK_CONNECTION|REQUEST_TIMEOUT|[Tt]imed out|[Tt]imeout"
_NO_ANSWER_NUMBERS = (
    errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNREFUSED,
)  # fmt: skip
_ERRNO = re.compile(r"^\[Errno \d+\] ")
"""Number of an error; its text says the same."""
_DETAIL = re.compile(r"[.,;:]? Detail: \[errno \d+\] (\w)")
"""PyArrow's quotation of the system's error."""
_ADVICE = (
    (
        r"NO_SUCH_BUCKET|Bucket '.*' not found",
        "the bucket does not exist; create it, or correct the name",
    ),
    (
        r"INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|ACCESS_DENIED|INVALID_CLIENT_TOKEN_ID"
        r"|EXPIRED_TOKEN|TOKEN_REFRESH_REQUIRED",
        "the store refuses these credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        "or AWS_PROFILE, to ones that may read and write this bucket",
    ),
    (
        r"NETWORK_CONNECTION",
        "the store does not answer; check AWS_ENDPOINT_URL, or endpoint_override in the URI, "
        "and the network",
    ),
)


_Parsed = TypeVar("_Parsed")


def open_filesystem(uri: str) -> tuple[fs.FileSystem, str]:
    """Return the file system that serves a URI, and the path on it.

    Raises:
        OSError, ValueError: no file system serves the URI, or its options are wrong.
    """
    try:
        filesystem, path = fs.FileSystem.from_uri(uri)
    except (OSError, ValueError) as error:
        # PyArrow quotes the URI: its own error must not be the cause in a traceback either.
        raise type(error)(redact(str(error))) from None
    if filesystem.type_name == "s3":
        # A URI has no parameter for the number of attempts: build the file system again.
        _, (options,) = filesystem.__reduce__()
        retries = fs.AwsStandardS3RetryStrategy(max_attempts=_S3_ATTEMPTS)
        # Background writes would keep a copy of all bytes that are not sent yet.
        ours = {"retry_strategy": retries, "background_writes": False}
        unset = {name: s for name, s in _S3_TIMEOUTS.items() if options.get(name, -1) <= 0}
        filesystem = fs.S3FileSystem(**{**options, **ours, **unset})
    return filesystem, path


def in_words(error: Exception) -> str:
    """Return a file system's error as the rest of a sentence, with a remedy if one is known."""
    text = _ERRNO.sub("", " ".join(redact(str(error)).split()))
    text = _DETAIL.sub(lambda match: f": {match[1].lower()}", text)
    for pattern, advice in _ADVICE:
        if match := re.search(pattern, text):
            details = text.rpartition("Details: ")[2] if "Details: " in text else match[0]
            return f"{advice} ({details})"
    return text


def is_answer(error: BaseException) -> bool:
    """Whether an error is an answer of the file system, rather than the lack of one."""
    if isinstance(error, OSError) and error.errno in _NO_ANSWER_NUMBERS:
        return False
    return re.search(_NO_ANSWER, str(error)) is None


def below(place: str, name: str) -> str:
    """Return the path or URI of a name below a folder; the query of a URI stays last."""
    scheme, base, query = _split(place)
    return f"{scheme}{base.rstrip('/')}/{name}{query}" if base else f"{scheme}{name}{query}"


def parent_and_name(place: str) -> tuple[str, str]:
    """Return (folder, name) of a path or URI: the inverse of ``below``."""
    scheme, base, query = _split(place)
    parent, slash, name = base.rstrip("/").rpartition("/")
    return f"{scheme}{parent or slash}{query}", name


def _split(place: str) -> tuple[str, str, str]:
    """Return (scheme with ``://``, path, query with ``?``); a path has only the second."""
    if "://" not in place:
        return "", place, ""
    scheme, colon, rest = place.partition("://")
    base, mark, query = rest.partition("?")
    return scheme + colon, base, mark + query


def parse_json(text: str | bytes, kind: type[_Parsed]) -> _Parsed:
    """Return the value of a JSON text, which anybody may have written.

    Args:
        text: the text.
        kind: what it must contain; see ``raydl.config.typed``.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or contains something else.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if _is_nested_deeper(value, _MOST_NESTED):
        raise ValueError("it is nested too deeply")
    return typed(kind, value)


def _is_nested_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        containers = [inner for inner in level if isinstance(inner, (dict, list))]
        if not containers:
            return False
        level = [
            element
            for inner in containers
            for element in (inner.values() if isinstance(inner, dict) else inner)
        ]
    return True


class Sum(NamedTuple):
    """Size and checksum of a file."""

    num_bytes: int
    crc32: int

    @classmethod
    def of(cls, pieces: Iterable[Any]) -> Sum:
        """Return size and checksum of contents in pieces."""
        sums = Summing(pieces)
        for _ in sums.pieces():
            pass
        return sums.sum


class Summing:
    """Computes size and checksum of contents while a caller reads them.

    Args:
        pieces: the contents.
    """

    def __init__(self, pieces: Iterable[Any]) -> None:
        self._pieces = iter(pieces)
        self.sum = Sum(0, 0)
        """Size and checksum of the pieces that were read."""

    def pieces(self) -> Iterator[Any]:
        """Yield the rest of the contents."""
        for piece in self._pieces:
            num_bytes, crc32 = self.sum
            self.sum = Sum(num_bytes + len(piece), zlib.crc32(piece, crc32))
            yield piece


@dataclass
class _Call:
    """A thread's call of a file system that has not returned."""

    what: str
    progress_at: float
    """When the call began, or last made progress, by the monotonic clock."""


class Storage:
    """Named files below one root.

    Args:
        root: a local folder, or a URI that may hold credentials; need not exist yet.
        filesystem: the file system of the path ``root``; None to derive it from ``root``.

    Raises:
        ConfigError: no file system serves that URI.
    """

    def __init__(self, root: str, *, filesystem: fs.FileSystem | None = None) -> None:
        self.root = root
        self._check: Callable[[], None] | None = None
        self._calls: dict[int, _Call] = {}
        self._unanswered_since: float | None = None
        self._last_what = ""
        self._is_given = filesystem is not None
        if filesystem is not None:
            self._filesystem, self._path = filesystem, root
        elif "://" in root:
            try:
                self._filesystem, self._path = open_filesystem(root)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    "run.storage_path", f": {root} cannot be opened: {in_words(error)}"
                ) from error
        else:
            self._filesystem, self._path = fs.LocalFileSystem(), os.path.abspath(root)
        is_local = self._filesystem.type_name == "local"
        self._local = LocalFiles(self._path) if is_local else None

    def guarded(self, check: Callable[[], None]) -> Storage:
        """Return this storage with a check just before each change of a file.

        Args:
            check: raises an error if files must not be changed any longer.
        """
        guarded = copy.copy(self)
        guarded._check = check
        return guarded

    def _check_guard(self) -> None:
        if self._check is not None:
            self._check()

    @property
    def is_object_store(self) -> bool:
        """Whether a file appears only when it is whole, and folders cannot be renamed."""
        return self._filesystem.type_name in _OBJECT_STORES

    @property
    def local_path(self) -> str | None:
        """The folder on a disk that this machine has mounted, or None on another file system."""
        return self._path if self._local is not None else None

    @property
    def address(self) -> str | None:
        """Path or URI by which a process in any folder, on any machine, may open the storage.

        None if the constructor was given a file system, which no path or URI names.
        """
        return None if self._is_given else self.local_path or self.root

    # calls without an answer

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """Note a call of this thread until the end of the ``with``; ignore a nested call."""
        thread, now = threading.get_ident(), time.monotonic()
        if thread in self._calls:
            yield
            return
        self._calls[thread] = _Call(what, now)
        if self._unanswered_since is None:
            self._unanswered_since = now
        is_answered = True
        try:
            yield
        except BaseException as error:
            is_answered = is_answer(error)
            raise
        finally:
            self._last_what = self._calls.pop(thread).what
            if is_answered:
                self._note_answer()

    def _note_answer(self) -> None:
        """Note that the file system has answered a thread; others may still wait."""
        self._unanswered_since = time.monotonic() if self._calls else None

    def _note_progress(self) -> None:
        """Note that this thread's call has made progress."""
        call = self._calls.get(threading.get_ident())
        if call is not None:
            call.progress_at = time.monotonic()
        self._note_answer()

    @contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[], None]]:
        """Note a call of this thread that does not use this object.

        Args:
            what: the call: ``to lock it``.

        Yields a function to call whenever the call has made progress.
        """
        with self._calling(what):
            yield self._note_progress

    def dead_s(self) -> float:
        """Return the seconds for which no thread has had an answer; 0 if none waits.

        An error because the server was unreachable, or took too long, is no answer.
        """
        since = self._unanswered_since
        return 0.0 if since is None else time.monotonic() - since

    def unanswered(self, thread: int | None = None) -> tuple[float, str]:
        """Return for how long a thread's call, or the whole file system, has given no answer.

        Args:
            thread: the thread; None for the one that has waited longest.

        Returns:
            Seconds, and the call.
        """
        calls = list(self._calls.items())  # other threads change the dict
        waiting = [call for caller, call in calls if thread in (None, caller)]
        oldest = min(waiting, key=lambda call: call.progress_at, default=None)
        if oldest is None:
            return self.dead_s(), self._last_what
        return max(time.monotonic() - oldest.progress_at, self.dead_s()), oldest.what

    # files

    def _path_of(self, name: str) -> str:
        return posixpath.join(self._path, name)

    def probe(self, setting: str) -> None:
        """Write and delete a small file.

        Args:
            setting: the dotted name of the setting that names the storage, for the error.

        Raises:
            ConfigError: the storage cannot be written.
        """
        name = f".probe-{uuid.uuid4().hex[:8]}"  # another driver may probe at the same time
        try:
            self.write_bytes(name, b"")
            self.delete_file(name)
        except OSError as error:
            problem = f": {self.root} cannot be written: {in_words(error)}"
            raise ConfigError(setting, problem) from error

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file; readers see the older one until the new one is whole."""
        self.write_pieces(name, [data])

    def write_pieces(self, name: str, pieces: Iterable[Any], *, in_place: bool = False) -> Sum:
        """Write a file as ``write_bytes`` does, from contents in pieces.

        Args:
            name: name of the file.
            pieces: the contents.
            in_place: upload an object under its own name at once. A failed write may leave a part
                of it, so this is for names that no reader knows yet.
        """
        with self._calling(f"to write {name}"):
            self._check_guard()
            if self.is_object_store:
                path = self._path_of(name)
                return self._write(path, pieces) if in_place else self._upload(path, pieces)
            # Each write has a temporary file of its own: a driver that was halted in the middle of
            # one must not write into the file of its successor.
            temporary = posixpath.join(posixpath.dirname(name), f"{_UPLOAD}{uuid.uuid4().hex}")
            try:
                written = self._write_new(temporary, pieces)
                self._check_guard()  # writing may have taken long
                self._move(temporary, name)
            except BaseException:
                with suppress(OSError):
                    self._delete(temporary)
                raise
            return written

    def _write_new(self, name: str, pieces: Iterable[Any]) -> Sum:
        """Write a file that does not exist yet, and its folders."""
        if self._local is None:
            return self._write(self._path_of(name), pieces)
        with _in_lower_case(), self._local.create(name) as file:
            written = self._write_to(_FlushedFile(file), pieces)
            os.fsync(file.fileno())
        return written

    def _move(self, name: str, new_name: str) -> None:
        """Move a file or a folder, in one step."""
        if self._local is None:
            self._filesystem.move(self._path_of(name), self._path_of(new_name))
        else:
            self._local.rename(name, new_name)
            self._local.flush(posixpath.dirname(new_name))

    def _delete(self, name: str) -> None:
        if self._local is None:
            self._filesystem.delete_file(self._path_of(name))
        else:
            self._local.delete(name)

    def _upload(self, path: str, pieces: Iterable[Any]) -> Sum:
        """Write an object; if this fails, the earlier one stays, unless it is above 5 GB on S3."""
        coming, start = iter(pieces), bytearray()
        # PyArrow empties an object of Azure when it is opened.
        most = _ONE_REQUEST_BYTES if self._filesystem.type_name != "abfs" else -1
        while len(start) <= most:
            piece = next(coming, None)
            if piece is None:
                return self._write(path, [start])
            start += memoryview(piece).cast("B")
        temporary = posixpath.join(posixpath.dirname(path), f"{_UPLOAD}{uuid.uuid4().hex}")
        try:
            written = self._write(temporary, chain([start], coming))
            self._check_guard()  # writing may have taken long
            self._copy_object(temporary, path, num_bytes=written.num_bytes)
        finally:
            with suppress(OSError):
                self._filesystem.delete_file(temporary)
        return written

    def delete_uploads(self) -> None:
        """Delete the unfinished files that a process which was killed has left in this folder."""
        for name in self.list_dir(""):
            if name.startswith(_UPLOAD):
                with suppress(FileNotFoundError):  # its process lives, and has just copied it
                    self.delete_file(name)

    def _copy_object(self, source: str, target: str, *, num_bytes: int) -> None:
        """Copy an object within the store, or through this process if the store cannot."""
        try:
            self._filesystem.copy_file(source, target)
        except (OSError, NotImplementedError) as error:
            if num_bytes <= _COPIED_BYTES and not re.search(_NO_COPIES, str(error)):
                raise
            self._check_guard()
            with self._filesystem.open_input_stream(source, compression=None) as stream:
                self._write(target, iter(lambda: stream.read(_CHUNK_BYTES), b""))

    def _write(self, path: str, pieces: Iterable[Any]) -> Sum:
        if self._filesystem.type_name not in _OBJECT_STORES:  # they have no folders, only names
            self._filesystem.create_dir(posixpath.dirname(path), recursive=True)
        with self._filesystem.open_output_stream(path) as stream:
            return self._write_to(stream, pieces)

    def _write_to(self, stream: Any, pieces: Iterable[Any]) -> Sum:
        sums = Summing(pieces)
        for piece in sums.pieces():
            stream.write(piece)
            self._note_progress()
        return sums.sum

    def copy_in(self, local: str, name: str) -> None:
        """Write a copy of a local file, piece by piece, as ``write_bytes`` does."""
        folder, last = os.path.split(os.path.abspath(local))
        with LocalFiles(folder).open(last) as source:
            self.write_pieces(name, iter(lambda: source.read(_CHUNK_BYTES), b""))

    def copy_out(self, name: str, local: str) -> None:
        """Copy a file to a local path, piece by piece; it appears there only when it is whole.

        Raises:
            OSError: the file is absent or cannot be read, or ``local`` cannot be written.
        """
        with self._calling(f"to read {name}"):
            folder, last = os.path.split(os.path.abspath(local))
            target, temporary = LocalFiles(folder), f"{_UPLOAD}{uuid.uuid4().hex}"
            try:
                with self._open(name) as stream, target.create(temporary) as copy:
                    shutil.copyfileobj(stream, copy, _CHUNK_BYTES)
                target.rename(temporary, last)
            except BaseException:
                with suppress(OSError):
                    target.delete(temporary)
                raise

    def _open(self, name: str) -> Any:
        """Return a file, opened for reading; the caller closes it."""
        if self._local is None:
            return self._filesystem.open_input_stream(self._path_of(name), compression=None)
        return self._local.open(name)

    def read_bytes(self, name: str, *, most: int | None = None) -> bytes:
        """Return a whole file.

        Args:
            name: name of the file.
            most: the largest size that is read, in bytes; None: any.

        Raises:
            OSError: the file is absent, cannot be read, or is too large.
        """
        with self._calling(f"to read {name}"):
            if most is None:
                return b"".join(self.read_pieces(name))
            data = bytearray()
            for piece in self.read_pieces(name):  # it may grow meanwhile
                data += piece
                if len(data) > most:
                    size = max(self.num_bytes(name), len(data))
                    problem = f"{name} has {size:,} bytes, and at most {most:,} are read"
                    raise OSError(errno.EFBIG, problem)
            return bytes(data)

    def read_json(self, name: str, kind: type[_Parsed], *, most: int = JSON_BYTES) -> _Parsed:
        """Return the value in a JSON file.

        Args:
            name: name of the file.
            kind: what it must contain; see ``raydl.config.typed``.
            most: the largest size that is read, in bytes.

        Raises:
            OSError: the file is absent, cannot be read, or is too large.
            ValueError: it is not JSON, or contains something else.
        """
        return parse_json(self.read_bytes(name, most=most), kind)

    def read_pieces(self, name: str) -> Iterator[bytes]:
        """Yield the contents of a file in order, in pieces.

        Raises:
            OSError: the file is absent or cannot be read.
        """
        what = f"to read {name}"
        with self._calling(what):
            stream = self._open(name)
        with stream:
            while True:
                with self._calling(what):
                    piece = stream.read(_CHUNK_BYTES)
                if not piece:
                    return
                yield piece

    def read_whole(self, name: str) -> bytearray:
        """Return a whole file as writable memory, without a second copy.

        Raises:
            OSError: the file is absent or cannot be read.
        """
        with self._calling(f"to read {name}"):
            data, filled = bytearray(self.num_bytes(name)), 0
            for piece in self.read_pieces(name):
                data[filled : filled + len(piece)] = piece
                filled += len(piece)
            del data[filled:]
            return data

    def delete_file(self, name: str) -> None:
        """Delete a file.

        Raises:
            OSError: the file is absent, or cannot be deleted.
        """
        self._check_guard()
        with self._calling(f"to delete {name}"):
            self._delete(name)

    def exists(self, name: str) -> bool:
        """Whether a file or folder exists, or a link, which is not followed."""
        with self._calling(f"to look for {name}"):
            if self._local is not None:
                return self._local.status(name) is not None
            info = self._filesystem.get_file_info(self._path_of(name))
            return bool(info.type != fs.FileType.NotFound)

    def num_bytes(self, name: str) -> int:
        """Return the size of a file without reading it; an absent file has 0 bytes."""
        with self._calling(f"to look for {name}"):
            if self._local is not None:
                status = self._local.status(name)
                return 0 if status is None else status.st_size
            return self._filesystem.get_file_info(self._path_of(name)).size or 0

    def list_dir(self, name: str) -> list[str]:
        """Return the names directly below a folder, sorted; an absent folder has none."""
        with self._calling(f"to list {name or 'the folder'}"):
            if self._local is not None:
                return self._local.names(name)
            selector = fs.FileSelector(self._path_of(name), allow_not_found=True)
            try:
                infos = self._filesystem.get_file_info(selector)
            except FileNotFoundError:  # PyArrow's, if the folder appears meanwhile
                return []
            return sorted(posixpath.basename(info.path) for info in infos)

    def copy_file(self, name: str, new_name: str) -> None:
        """Copy a file that no process overwrites to a free name.

        On a disk with hard links the copy is a link. An object store copies by itself.

        Raises:
            OSError: the file is absent, or cannot be copied.
        """
        self._check_guard()
        with self._calling(f"to copy {name}"):
            if self._local is not None:
                with self._local.open(name):  # it must be a regular file
                    pass
                with suppress(OSError):  # a disk without hard links
                    return self._local.link(name, new_name)
            elif self.is_object_store:
                source, target = self._path_of(name), self._path_of(new_name)
                num_bytes = self._filesystem.get_file_info(source).size or 0
                return self._copy_object(source, target, num_bytes=num_bytes)
            self.write_pieces(new_name, self.read_pieces(name))

    def delete_dir(self, name: str) -> None:
        """Delete a folder with its contents, if it exists."""
        self._check_guard()
        with self._calling(f"to delete {name}"):
            if self._local is not None:
                self._local.delete_folder(name)
            elif self.exists(name):
                self._filesystem.delete_dir(self._path_of(name))

    def move_dir(self, name: str, new_name: str) -> None:
        """Rename a folder atomically. An object store cannot do this."""
        self._check_guard()
        with self._calling(f"to rename {name}"):
            self._move(name, new_name)


@contextmanager
def _in_lower_case() -> Iterator[None]:
    """Begin the text of the system's errors in lower case: it is the rest of a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno is None or not error.strerror:
            raise
        problem = error.strerror[0].lower() + error.strerror[1:]
        raise OSError(error.errno, problem) from error


class _FlushedFile:
    """A local file that is flushed while it is written, so that its last flush is short."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._num_bytes = 0

    def write(self, piece: Any) -> None:
        """Write a piece."""
        memory = memoryview(piece).cast("B")
        while memory:  # a disk may accept only a part
            written = self._file.write(memory)
            memory = memory[written:]
            self._num_bytes += written
        if self._num_bytes >= _SYNC_BYTES:
            os.fdatasync(self._file.fileno())
            self._num_bytes = 0


LOG_AFTER_S = 8.0
"""Seconds without an answer after which a message is logged."""
GIVE_UP_S = 45.0
"""Seconds without an answer after which nothing waits for the storage any longer."""
_GRACE_S = 1.0
"""Shortest time-out of a call, in seconds: a storage may have been silent before the call."""
_POLL_S = 0.05
_RELEASE_S = 5.0
"""Time-out for releasing a folder, in seconds."""
_Result = TypeVar("_Result")
_given_up: list[str] = []


class SilenceMonitor:
    """Reports once that a storage does not answer, and once that it answers again.

    Args:
        storage: the storage; calls of all threads count.
        meanwhile: the end of the message: what happens until the storage answers.
    """

    def __init__(self, storage: Storage, meanwhile: str) -> None:
        self._storage = storage
        self._meanwhile = meanwhile
        self._since: float | None = None

    def pop_message(self) -> str | None:
        """Return the message to log now, or None."""
        silent_s, what = self._storage.unanswered()
        if self._since is None and silent_s >= LOG_AFTER_S:
            self._since = time.monotonic() - silent_s
            return (
                f"the storage {self._storage.root} has not answered for {silent_s:.0f} s ({what}); "
                f"{self._meanwhile}"
            )
        if self._since is not None and silent_s < LOG_AFTER_S:
            for_s, self._since = time.monotonic() - self._since, None
            return f"the storage {self._storage.root} answers again, after {for_s:.0f} s"
        return None


def log_to_stderr(sentence: str) -> None:
    """Print a sentence, without credentials, while there is no log."""
    print(redact(sentence), file=sys.stderr, flush=True)


def within(
    storage: Storage,
    act: Callable[[], _Result],
    *,
    log: Callable[[str], None] = log_to_stderr,
    limit_s: float = GIVE_UP_S,
) -> _Result:
    """Call a function that needs a storage, in a thread, as long as the storage answers.

    Args:
        storage: the storage.
        act: the function; its thread is abandoned if the storage does not answer.
        log: receives a message if the storage has not answered for some seconds.
        limit_s: seconds without an answer after which the call is given up. Silence before the
            call counts, but the call has a second in any case.

    Raises:
        StorageSilentError: the storage did not answer for ``limit_s``.
        Exception: the error of ``act``.
    """
    future: Future[_Result] = Future()

    def work() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=work, name="storage", daemon=True)
    monitor = SilenceMonitor(storage, f"giving up after {limit_s:.0f} s")
    began_at = time.monotonic()
    thread.start()
    try:
        while not wait([future], _POLL_S).done:
            message = monitor.pop_message()
            if message and storage.root not in _given_up:
                log(message)
            silent_s, what = storage.unanswered(thread.ident)
            if silent_s > limit_s and time.monotonic() - began_at > _GRACE_S:
                raise StorageSilentError(storage.root, silent_s, what)
    except BaseException:  # Ctrl-C, too
        give_up(storage.root)
        raise
    return future.result()


@contextmanager
def entered_within(storage: Storage, context: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter and leave a context that needs a storage, both by ``within``."""
    within(storage, context.__enter__)
    try:
        yield
    finally:
        with suppress(StorageSilentError):  # the end of this process then releases the folder
            within(
                storage,
                lambda: context.__exit__(None, None, None),
                limit_s=_RELEASE_S,
                log=lambda _: None,
            )


def give_up(name: str) -> None:
    """Note that a thread which may never return was abandoned."""
    if name not in _given_up:
        _given_up.append(name)


def is_anything_given_up() -> bool:
    """Whether a thread of this process was abandoned: an orderly exit may wait for it forever."""
    return bool(_given_up)
