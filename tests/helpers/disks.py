"""Small and full disks in memory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(path: Path, *, kib: int) -> Iterator[Path]:
    """Mount a small disk in memory, or skip the test if that is not permitted."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        # Lazily, since a failed writer may still have a file open.
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path, *, leave: int = 0) -> None:
    """Fill a disk with a file \"filled\" until ``leave`` bytes are free."""
    with (disk / "filled").open("wb", buffering=0) as file:
        with pytest.raises(OSError, match="No space left on device"):  # noqa: PT012
            while True:
                file.write(bytes(4096))
        if leave:
            file.truncate(max(0, file.tell() - leave))
