"""A file is written completely or not at all, even in a power failure."""

import os
import stat
import subprocess
import sys

import pytest

from raydl.storage import Storage


@pytest.fixture
def calls(monkeypatch):
    """The calls of fsync, in order, which determine the files after a power failure."""
    sequence = []

    def fsync(descriptor, fsync=os.fsync):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        sequence.append("sync folder" if is_folder else "sync file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return sequence


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_flushed_before_it_is_renamed_and_its_folder_afterwards(
    tmp_path, monkeypatch, calls
):
    storage = Storage(str(tmp_path))
    flush = storage._flush_to_disk
    seen = []

    def flush_and_record(path):
        flush(path)
        seen.append((calls[-1], names(tmp_path)))

    monkeypatch.setattr(storage, "_flush_to_disk", flush_and_record)
    storage.write_bytes("weights", b"abc")
    assert seen == [("sync file", ["weights.tmp"]), ("sync folder", ["weights"])]
    assert (tmp_path / "weights").read_bytes() == b"abc"


def test_a_failed_write_leaves_the_earlier_file(tmp_path):
    storage = Storage(str(tmp_path))
    storage.write_bytes("weights", b"before")

    def pieces():
        yield b"af"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="no space left on device"):
        storage.write_pieces("weights", pieces())
    assert (tmp_path / "weights").read_bytes() == b"before"


def test_a_program_that_is_killed_during_a_write_leaves_the_earlier_file(tmp_path):
    Storage(str(tmp_path)).write_bytes("weights", b"before")
    program = """
import os, signal, sys
from raydl.storage import Storage
def pieces():
    yield b"af"
    os.kill(os.getpid(), signal.SIGKILL)
Storage(sys.argv[1]).write_pieces("weights", pieces())
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False)
    assert ended.returncode == -9
    assert (tmp_path / "weights").read_bytes() == b"before"
