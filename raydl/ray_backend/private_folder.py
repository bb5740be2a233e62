"""The folder in which a cluster of the run's own keeps its sockets, logs and spilled objects.

Ray makes its folders writable for everybody, and their usual place is the same for all users of a
machine. A user who may rename Ray's socket can put one of his own in its place, and the next worker
process connects to him. So the folder lies in one that only this user may enter.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from raydl.errors import ConfigError

_SYSTEM = Path("/tmp")
_BELOW = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""Ray's longest name of a socket below the folder, with the time and a process id."""
_LONGEST = (103 if sys.platform == "darwin" else 107) - len(_BELOW)
"""The longest path of the folder, in bytes: the kernel limits the path of a Unix socket."""
_PLAIN = re.compile(r"[\w./+@~-]+", re.ASCII)
"""A path that Ray can write into the commands of its processes; a space would divide it."""


def make_private_folder(environment: Mapping[str, str]) -> Path:
    """Return a folder for a cluster of this user, below one that no other user may enter.

    It lies in ``RAY_TMPDIR`` or ``TMPDIR``; in ``/tmp`` without them, or if ``TMPDIR`` cannot be
    used. If its path is too long for sockets or has special characters, the returned path is a link
    to it. All clusters of this user share the folder; Ray gives each one a session in it.

    Raises:
        ConfigError: if ``RAY_TMPDIR`` cannot be used, or nothing can be written.
    """
    parent = _parent(environment)
    try:
        folder = _private(parent) / "ray"
        folder.mkdir(exist_ok=True)
        path = os.fsencode(folder)
        if len(path) <= _LONGEST and _PLAIN.fullmatch(str(folder)):
            return folder
        link = _private(_SYSTEM) / hashlib.sha256(path).hexdigest()[:8]
        with suppress(FileExistsError):  # of an earlier cluster: only this user makes links there
            link.symlink_to(folder)
        return link
    except OSError as error:
        problem = f"must name a folder for the files of a Ray cluster, which needs one: {error}"
        raise ConfigError("TMPDIR", problem) from error


def _parent(environment: Mapping[str, str]) -> Path:
    """Return the folder for temporary files, by the variables that Ray itself reads."""
    given = environment.get("RAY_TMPDIR")
    if given:
        problem = _problem(Path(given))
        if problem:
            raise ConfigError(
                "RAY_TMPDIR", f"must name a folder in which only you may write: {given} {problem}"
            )
        return Path(given).absolute()
    parent = Path(environment.get("TMPDIR") or _SYSTEM)
    return _SYSTEM if _problem(parent) else parent.absolute()


def _problem(parent: Path) -> str:
    """Return why the files of a cluster cannot lie in a folder; empty if they can."""
    if not os.path.isdir(parent):
        return "is no folder"
    if not os.access(parent, os.W_OK | os.X_OK):
        return "is not writable for this user"
    real = parent.resolve()
    for folder in (real, *real.parents):
        if _others_may_rename_in(folder.stat()):
            return f"is open to other users, who may rename what is in {folder}"
    return ""


def _others_may_rename_in(status: os.stat_result) -> bool:
    """Whether users other than this one and root may rename files that are not theirs."""
    may_write = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return status.st_uid not in (0, os.getuid()) or (
        may_write and not status.st_mode & stat.S_ISVTX
    )


def _private(parent: Path) -> Path:
    """Return this user's folder in a parent; a new one if another user has taken its name."""
    folder = parent / f"raydl-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if is_ours and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return folder
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=parent))
