"""A run's folder on any PyArrow file system (local, s3://, gs://, …), and one that does not answer.

A file on a local disk is written aside, flushed and moved into place, so that a reader
sees all of it or nothing. An object store shows an object only when it is whole, so there
it is written in place.

A file system that hangs, a file server that went away or an S3 that takes connections and says
nothing, blocks its caller, and nothing ends such a call. So all calls while a run trains are
made in threads that can be left behind; see ``Storage.unanswered``. A store that does not
answer is given up within half a minute, and what it said becomes the rest of one sentence: see
``in_words``. Endpoints and credentials: docs/storage.md.
"""

from __future__ import annotations

import copy
import errno
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
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pyarrow import fs

from raydl.errors import ConfigError, StorageSilentError
from raydl.redaction import redact

_OBJECT_STORES = ("s3", "gcs", "abfs")
_ATTEMPTS = 5
"""How often S3 is asked before it is given up. PyArrow's own way can take over 100 s."""
_S3_BOUNDS = {"connect_timeout": 3.0, "request_timeout": 4.0}
"""How long S3 may take to connect, and to go on, in seconds, where the URI does not say."""
_CHUNK_BYTES = 4 << 20
"""Files that may be large pass through memory in pieces of this size."""
_SYNC_BYTES = 64 << 20
"""A file on a disk of this machine is flushed whenever so much of it was written."""
_NO_ANSWER = r"NETWORK_CONNECTION|REQUEST_TIMEOUT|[Tt]imed out|[Tt]imeout"
_NO_ANSWER_NUMBERS = (
    errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNREFUSED,
)  # fmt: skip
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
    try:
        filesystem, path = fs.FileSystem.from_uri(uri)
    except (OSError, ValueError) as error:
        # PyArrow quotes the URI: its own error must not be the cause in a traceback either.
        raise type(error)(redact(str(error))) from None
    if filesystem.type_name == "s3":
        # A URI can not say it: its options again, with fewer attempts.
        _, (options,) = filesystem.__reduce__()
        retries = fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS)
        # In the background PyArrow writes from a copy of all that is not sent yet.
        ours = {"retry_strategy": retries, "background_writes": False}
        for name, seconds in _S3_BOUNDS.items():
            if options.get(name, -1) <= 0:  # the URI does not say
                ours[name] = seconds
        filesystem = fs.S3FileSystem(**{**options, **ours})
    return filesystem, path


def in_words(error: Exception) -> str:
    """Return a file system's error as the rest of a sentence, with a remedy if one is known."""
    said = _ERRNO.sub("", " ".join(redact(str(error)).split()))
    said = _DETAIL.sub(lambda match: f": {match[1].lower()}", said)
    for pattern, advice in _ADVICE:
        match = re.search(pattern, said)
        if match:
            details = said.rpartition("Details: ")[2] if "Details: " in said else match[0]
            return f"{advice} ({details})"
    return said


def is_answer(error: BaseException) -> bool:
    """Whether an error is what a file system says, and not that nobody says anything."""
    if isinstance(error, OSError) and error.errno in _NO_ANSWER_NUMBERS:
        return False
    return re.search(_NO_ANSWER, str(error)) is None


def below(place: str, name: str) -> str:
    """Return the path or URI of what lies below another; the query of a URI stays last."""
    scheme, base, query = _split(place)
    return f"{scheme}{base.rstrip('/')}/{name}{query}" if base else f"{scheme}{name}{query}"


def parent_and_name(place: str) -> tuple[str, str]:
    """Return a path or URI taken apart again, as ``below`` would put it together."""
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
    """Size and checksum of a file, to compare it with what was written."""

    num_bytes: int
    crc32: int

    @classmethod
    def of(cls, pieces: Iterable[Any]) -> Sum:
        """Return that of contents that come in pieces."""
        sums = Summing(pieces)
        for _ in sums.pieces():
            pass
        return sums.sum


class Summing:
    """Takes the sum of contents while somebody else reads them.

    Args:
        pieces: the contents.
    """

    def __init__(self, pieces: Iterable[Any]) -> None:
        self._pieces = iter(pieces)
        self.sum = Sum(0, 0)
        """Of what has been read."""

    def pieces(self) -> Iterator[Any]:
        """Yield the rest of the file."""
        for piece in self._pieces:
            num_bytes, crc32 = self.sum
            self.sum = Sum(num_bytes + len(piece), zlib.crc32(piece, crc32))
            yield piece


@dataclass
class _Call:
    """A thread's call of a file system under way."""

    what: str
    heard_at: float
    """Time at which it began, or its last part was done."""


class Storage:
    """Named files below one root.

    Args:
        root: a local folder or a URI, which may carry credentials; need not exist yet.
        filesystem: the file system that ``root`` is a path on; None: found from ``root``.

    Raises:
        ConfigError: no file system serves that URI.
    """

    def __init__(self, root: str, *, filesystem: fs.FileSystem | None = None) -> None:
        self.root = root
        self._calls: dict[int, _Call] = {}
        self._asked_since: float | None = None
        self._last_what = ""
        self._is_given = filesystem is not None
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

    @property
    def address(self) -> str | None:
        """URI by which another process, in any folder or on any machine, may try to open it.

        None: it was given a file system that no path or URI says.
        """
        if self._is_given:
            return None
        return self.root if self.local_path is None else self.local_path

    # how long it has been silent

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """Note a call of this thread until the end of the ``with``, if it is not part of one."""
        thread, now = threading.get_ident(), time.monotonic()
        if thread in self._calls:
            yield
            return
        self._calls[thread] = _Call(what, now)
        if self._asked_since is None:
            self._asked_since = now
        try:
            yield
        except BaseException as error:
            self._end_call(thread, is_answer=is_answer(error))
            raise
        self._end_call(thread, is_answer=True)

    def _end_call(self, thread: int, *, is_answer: bool) -> None:
        self._last_what = self._calls.pop(thread).what
        if is_answer:
            self._note_answer()

    def _note_answer(self) -> None:
        """Note that the file system has answered somebody; others may wait yet."""
        self._asked_since = time.monotonic() if self._calls else None

    def _hear(self) -> None:
        """Note that the file system has done a part of what this thread calls for."""
        call = self._calls.get(threading.get_ident())
        if call is not None:
            call.heard_at = time.monotonic()
        self._note_answer()

    @contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[], None]]:
        """Note that this thread waits for the file system by another way than through this object.

        Yields a function to call when it gets on.
        """
        with self._calling(what):
            yield self._hear

    def silent_call(self, thread: int | None = None) -> tuple[float, str]:
        """Return (seconds, what was called) of the call that has had no answer for longest.

        Args:
            thread: whose call; None: of all.
        """
        calls = list(self._calls.items())
        waiting = [call for of, call in calls if thread is None or of == thread]
        oldest = min(waiting, key=lambda call: call.heard_at, default=None)
        return (0.0, "") if oldest is None else (time.monotonic() - oldest.heard_at, oldest.what)

    def dead_s(self) -> float:
        """Return how long no caller has had an answer; 0: one has, or nobody asks.

        That a server can not be reached, or took too long, is none.
        """
        since = self._asked_since
        return 0.0 if since is None else time.monotonic() - since

    def unanswered(self, thread: int | None = None) -> tuple[float, str]:
        """Return for how long a thread's call, or all calls there were, have had no answer.

        Args:
            thread: whose call; None: that which waits longest.

        Returns:
            Seconds, and what was called.
        """
        silent_s, what = self.silent_call(thread)
        return max(silent_s, self.dead_s()), what or self._last_what

    # files

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

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file, replacing an older one at once and as a whole."""
        self.write_pieces(name, [data])

    def write_pieces(self, name: str, pieces: Iterable[Any]) -> Sum:
        """Write a file as ``write_bytes`` does, from contents that come in pieces."""
        with self._calling(f"to write {name}"):
            sums = []

            def fill(stream: Any) -> None:
                sums.append(Sum.of(self._written(stream, pieces)))

            self._put(name, fill)
            return sums[0]

    def _written(self, stream: Any, pieces: Iterable[Any]) -> Iterator[Any]:
        """Write each piece, then hand it on."""
        for piece in pieces:
            stream.write(piece)
            self._hear()
            yield piece

    def copy_in(self, local: str, name: str) -> None:
        """Write a file that lies on this machine, piece by piece; like ``write_bytes`` else."""
        with open(local, "rb") as source:
            self.write_pieces(name, iter(lambda: source.read(_CHUNK_BYTES), b""))

    def copy_out(self, name: str, local: str) -> None:
        """Copy a file to this machine, piece by piece; it appears there as a whole.

        Raises:
            OSError: it is not there or can not be read, or ``local`` can not be written.
        """
        with self._calling(f"to read {name}"):
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
        if self._filesystem.type_name == "local":
            self._write_here(path, fill)
            return
        with self._filesystem.open_output_stream(path) as stream:
            fill(stream)

    def _write_here(self, path: str, fill: Callable[[Any], object]) -> None:
        try:
            with open(path, "wb", buffering=0) as file:
                fill(_Synced(file))
        except OSError as error:
            if error.errno is None or not error.strerror:
                raise
            said = error.strerror[0].lower() + error.strerror[1:]  # the rest of a sentence
            raise OSError(error.errno, said) from error

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
        with self._calling(f"to read {name}"):
            with self._filesystem.open_input_stream(self._at(name), compression=None) as stream:
                data: bytes = stream.read()
            return data

    def read_pieces(self, name: str) -> Iterator[bytes]:
        """Yield the contents of a file in order, in pieces.

        Raises:
            OSError: it is not there or can not be read.
        """
        with self._calling(f"to read {name}"):
            stream = self._filesystem.open_input_stream(self._at(name), compression=None)
        with stream:
            while piece := self._read_piece(stream, name):
                yield piece

    def _read_piece(self, stream: Any, name: str) -> bytes:
        with self._calling(f"to read {name}"):
            piece: bytes = stream.read(_CHUNK_BYTES)
        return piece

    def read_whole(self, name: str) -> bytearray:
        """Return a whole file as memory that may be changed, of which there is one copy.

        Raises:
            OSError: it is not there or can not be read.
        """
        with self._calling(f"to read {name}"):
            size = self._filesystem.get_file_info(self._at(name)).size
            data, filled = bytearray(size or 0), 0
            for piece in self.read_pieces(name):
                data[filled : filled + len(piece)] = piece
                filled += len(piece)
            del data[filled:]
            return data

    def delete_file(self, name: str) -> None:
        """Delete a file.

        Raises:
            OSError: it is not there, or can not be deleted.
        """
        self._check_guard()
        with self._calling(f"to delete {name}"):
            self._filesystem.delete_file(self._at(name))

    def exists(self, name: str) -> bool:
        """Whether a file or folder is there."""
        with self._calling(f"to look for {name}"):
            info = self._filesystem.get_file_info(self._at(name))
            return bool(info.type != fs.FileType.NotFound)

    def list_dir(self, name: str) -> list[str]:
        """Return the names directly below a folder, sorted; none if it is not there."""
        with self._calling(f"to list {name or 'the folder'}"):
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
        with self._calling(f"to copy {name}"):
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
            self.write_pieces(new_name, self.read_pieces(name))

    def delete_dir(self, name: str) -> None:
        """Delete a folder with all in it, if it is there."""
        self._check_guard()
        with self._calling(f"to delete {name}"):
            if self.exists(name):
                self._filesystem.delete_dir(self._at(name))

    def move_dir(self, name: str, new_name: str) -> None:
        """Rename a folder at once. Not on object stores."""
        self._check_guard()
        with self._calling(f"to rename {name}"):
            self._filesystem.move(self._at(name), self._at(new_name))
            self._flush_to_disk(posixpath.dirname(self._at(new_name)))


class _Synced:
    """A file that goes to disk while it is written: what is left for the end takes no minutes."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._num_bytes = 0

    def write(self, piece: Any) -> None:
        """Write a piece."""
        memory = memoryview(piece).cast("B")
        while memory:  # a disk may take a part of it
            written = self._file.write(memory)
            memory = memory[written:]
            self._num_bytes += written
        if self._num_bytes >= _SYNC_BYTES:
            os.fdatasync(self._file.fileno())
            self._num_bytes = 0


TELL_S = 8.0
"""After so long without an answer a line says so, in seconds."""
GIVE_UP_S = 45.0
"""After so long without an answer nothing waits for it any more, in seconds."""
_GRACE_S = 1.0
"""Time-out of a call to a storage that was given up before, in seconds."""
_LOOK_EVERY_S = 0.05
_RELEASE_S = 5.0
_Result = TypeVar("_Result")
_given_up: list[str] = []


class SilenceTeller:
    """Says once that a storage does not answer, and once that it does again.

    Args:
        storage: whose calls, of all threads, are looked at.
        meanwhile: what happens until it does: the end of the sentence.
    """

    def __init__(self, storage: Storage, meanwhile: str) -> None:
        self._storage = storage
        self._meanwhile = meanwhile
        self._since: float | None = None

    def news(self) -> str | None:
        """Return the sentence to print now, if any."""
        silent_s, what = self._storage.unanswered()
        if self._since is None and silent_s >= TELL_S:
            self._since = time.monotonic() - silent_s
            return (
                f"the storage {self._storage.root} has not answered for {silent_s:.0f} s ({what}); "
                f"{self._meanwhile}"
            )
        if self._since is not None and silent_s < TELL_S:
            for_s, self._since = time.monotonic() - self._since, None
            return f"the storage {self._storage.root} answers again, after {for_s:.0f} s"
        return None


def tell_on_stderr(sentence: str) -> None:
    """Say something where there is no log yet, or none any more."""
    print(redact(sentence), file=sys.stderr, flush=True)


def within(
    storage: Storage,
    act: Callable[[], _Result],
    *,
    tell: Callable[[str], None] = tell_on_stderr,
    limit_s: float = GIVE_UP_S,
) -> _Result:
    """Do something that needs a storage, in a thread, for as long as the storage answers.

    Args:
        storage: which.
        act: what is done; left behind if the storage falls silent.
        tell: takes a sentence if it is silent for some seconds.
        limit_s: the longest silence, in seconds; of one that was given up before, a second.

    Raises:
        StorageSilentError: it did not answer for so long.
        Exception: what ``act`` raises.
    """
    result: list[_Result] = []
    problem: list[BaseException] = []
    ended = threading.Event()

    def work() -> None:
        try:
            result.append(act())
        except BaseException as error:
            problem.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=work, name="storage", daemon=True)
    teller = SilenceTeller(storage, f"it is given up after {limit_s:.0f} s")
    began_at = time.monotonic()
    thread.start()
    try:
        while not ended.wait(_LOOK_EVERY_S):
            sentence = teller.news()
            if sentence and storage.root not in _given_up:
                tell(sentence)
            silent_s, what = storage.unanswered(thread.ident)
            if silent_s > limit_s and time.monotonic() - began_at > _GRACE_S:
                raise StorageSilentError(storage.root, silent_s, what)
    except BaseException:  # Ctrl-C, too
        give_up(storage.root)
        raise
    if problem:
        raise problem[0]
    return result[0]


@contextmanager
def entered_within(storage: Storage, context: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter and leave a context that needs a storage, each as ``within`` does."""
    within(storage, context.__enter__)
    try:
        yield
    finally:
        with suppress(StorageSilentError):  # then the end of this process gives the folder back
            within(
                storage,
                lambda: context.__exit__(None, None, None),
                limit_s=_RELEASE_S,
                tell=lambda _: None,
            )


def give_up(name: str) -> None:
    """Note that a thread was left behind which may never come back."""
    if name not in _given_up:
        _given_up.append(name)


def is_anything_given_up() -> bool:
    """Whether a thread of this process was left behind: an orderly exit may wait for it."""
    return bool(_given_up)
