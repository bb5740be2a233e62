"""Files below one local folder; symbolic links inside it are never followed.

Other people may be able to write a run's folder. A link that they plant there must not make raydl
read, overwrite or delete a file elsewhere. So each name is opened folder by folder, relative to the
folder before it, and a link among them is an error. The path of the folder itself is its owner's
choice, and may contain links.

Only regular files are read: to open a pipe or a device could wait for ever.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_IS_LINK = (errno.ELOOP, errno.EMLINK)
"""Errors of a system that does not follow a link; the second is FreeBSD's."""
_MOST_FOLDERS = 64
"""Deepest nesting of a name; raydl's own have four parts. Names that other people have nested by
thousands would take a function that calls itself, or opens one folder after the other, too far."""
_IS_IRREGULAR = (errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP, errno.EISDIR)
"""Errors at the opening of a socket, a device without a driver, a pipe or a folder."""


class LocalFiles:
    """The files below a folder, by names with ``/`` between folders.

    All methods raise an OSError if the system refuses, and if a part of a name is a symbolic link
    or is not a plain name.

    Args:
        root: path of the folder; it need not exist yet.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def open(self, name: str) -> IO[bytes]:
        """Return a regular file, opened for reading."""
        # Without O_NONBLOCK a pipe would wait for a writer.
        return os.fdopen(self._open(name, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)

    def append(self, name: str) -> IO[bytes]:
        """Return a regular file, opened for appending; it is created if it is absent."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
        return os.fdopen(self._open(name, flags), "ab", buffering=0)

    def open_or_create(self, name: str) -> int:
        """Return a descriptor of a regular file, for reading and writing."""
        return self._open(name, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)

    def create(self, name: str) -> IO[bytes]:
        """Return a new file, opened for writing; its folders are created.

        Raises:
            FileExistsError: something has that name.
        """
        self.make_folder(posixpath.dirname(name))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        return os.fdopen(self._open(name, flags), "wb", buffering=0)

    def _open(self, name: str, flags: int) -> int:
        with self._folder_of(name) as (folder, last), _said_with(name):
            descriptor = os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _irregular(name)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def make_folder(self, name: str) -> None:
        """Create a folder and those above it; nothing happens if it exists."""
        os.makedirs(self.root, exist_ok=True)
        made = ""
        for part in _parts(name):
            made = posixpath.join(made, part)
            with self._folder_of(made) as (folder, last), suppress(FileExistsError):
                os.mkdir(last, dir_fd=folder)

    def rename(self, name: str, new_name: str) -> None:
        """Rename a file or a folder; a file replaces what has the new name, also a link."""
        with self._folder_of(name) as (source, last), self._folder_of(new_name) as (target, new):
            os.rename(last, new, src_dir_fd=source, dst_dir_fd=target)

    def link(self, name: str, new_name: str) -> None:
        """Give a file a second name; the folders of the new name are created."""
        self.make_folder(posixpath.dirname(new_name))
        with self._folder_of(name) as (source, last), self._folder_of(new_name) as (target, new):
            os.link(last, new, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)

    def delete(self, name: str) -> None:
        """Delete a file, or a link itself."""
        with self._folder_of(name) as (folder, last):
            os.unlink(last, dir_fd=folder)

    def delete_folder(self, name: str) -> None:
        """Delete a folder with its contents, or a file; of a link, only the link."""
        status = self.status(name)
        if status is None:
            return
        if not stat.S_ISDIR(status.st_mode):
            return self.delete(name)
        for inner in self.names(name):
            self.delete_folder(f"{name}/{inner}")
        with self._folder_of(name) as (folder, last):
            os.rmdir(last, dir_fd=folder)

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of a file, a folder or a link itself; None if it is absent.

        What lies behind a link is absent.
        """
        try:
            with self._folder_of(name) as (folder, last):
                return os.stat(last, dir_fd=folder, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None
            raise

    def names(self, name: str) -> list[str]:
        """Return the names directly below a folder, sorted; an absent folder has none."""
        try:
            with self._opened(name) as folder:
                return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def flush(self, name: str) -> None:
        """Make the entries of a folder survive a power failure."""
        with self._opened(name) as folder:
            os.fsync(folder)

    @contextmanager
    def _folder_of(self, name: str) -> Iterator[tuple[int, str]]:
        """Open the folder of a name; yield its descriptor and the last part of the name."""
        parts = _parts(name)
        if not parts:
            raise OSError(errno.EINVAL, "the name of a file is empty")
        with self._opened("/".join(parts[:-1])) as folder:
            yield folder, parts[-1]

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """Open a folder; yield its descriptor."""
        folder = os.open(self.root, _FOLDER_FLAGS)
        try:
            for part in _parts(name):
                with _said_with(part):
                    inner = _open_folder(part, folder)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)


def _open_folder(name: str, above: int) -> int:
    """Return a descriptor of a folder in another one."""
    try:
        return os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=above)
    except NotADirectoryError:
        # Linux says this of a link, too.
        if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
        raise


def _parts(name: str) -> list[str]:
    """Return the parts of a name.

    Raises:
        OSError: the name leads out of the folder, or is nested too deeply.
    """
    parts = name.split("/") if name else []
    if len(parts) > _MOST_FOLDERS:
        problem = f"{parts[0]} holds more than {_MOST_FOLDERS} folders, one in the other"
        raise OSError(errno.EINVAL, problem)
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise OSError(errno.EINVAL, f"{name!r} is not the name of a file in this folder")
    return parts


@contextmanager
def _said_with(name: str) -> Iterator[None]:
    """Name the file in the errors of the system; say of a link that it is not followed."""
    try:
        yield
    except OSError as error:
        if error.errno in _IS_LINK:
            problem = f"{name} is a symbolic link, which is not followed inside this folder"
            raise OSError(errno.ELOOP, problem) from None
        if error.errno in _IS_IRREGULAR:
            raise _irregular(name) from None
        raise


def _irregular(name: str) -> OSError:
    return OSError(errno.EINVAL, f"{name} is not a regular file")


def is_no_file_of_ours(error: OSError) -> bool:
    """Whether a name holds something that raydl does not write, so that no further try helps."""
    return error.errno in (errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.ENOTDIR)
