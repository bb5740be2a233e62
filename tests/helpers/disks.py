"""Disks that are full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(path: Path, *, kib: int) -> Iterator[Path]:
    """Mount a small disk, in memory; the test is skipped where that is not permitted."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        # Lazily: a writer that failed may hold a file of it.
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path, *, leave: int = 0) -> None:
    """Write into a disk, into a file \"filled\", until nothing or so many bytes are left."""
    with (disk / "filled").open("wb", buffering=0) as file:
        with pytest.raises(OSError, match="No space left on device"):  # noqa: PT012
            while True:
                file.write(bytes(4096))
        if leave:
            file.truncate(max(0, file.tell() - leave))
