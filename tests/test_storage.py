"""A file is written completely or not at all, even in a power failure."""

import os
import stat
import subprocess
import sys

import pytest
from s3_server import s3_client, s3_server, use_test_credentials

from raydl.storage import Storage


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The calls of fsync with the files at that time, which survive a power failure."""
    sequence = []

    def fsync(descriptor, fsync=os.fsync):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        sequence.append(("folder" if is_folder else "file", names(tmp_path)))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return sequence


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_flushed_before_it_is_renamed_and_its_folder_afterwards(tmp_path, calls):
    Storage(str(tmp_path)).write_bytes("weights", b"abc")
    (first, [temporary]), second = calls
    assert first == "file"
    assert temporary.startswith(".upload-")
    assert second == ("folder", ["weights"])
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


MIB = b"x" * 2**20


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """A storage in an S3 server of this process, which holds the object ``weights``."""
    use_test_credentials(monkeypatch, tmp_path)
    with s3_server() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with s3_client(url) as client:
            client.create_bucket(Bucket="bucket")
        storage = Storage(f"s3://bucket/{tmp_path.name}")  # the server keeps all buckets
        storage.write_bytes("weights", b"before")
        yield storage


@pytest.mark.parametrize("num_mib", [1, 12])
def test_a_failed_write_leaves_the_earlier_object(bucket, num_mib):
    """PyArrow completes the upload of a stream that is closed by an exception."""

    def pieces():
        yield from [MIB] * num_mib
        raise OSError("the network is down")

    with pytest.raises(OSError, match="the network is down"):
        bucket.write_pieces("weights", pieces())
    assert bucket.read_bytes("weights") == b"before"
    assert bucket.list_dir("") == ["weights"]


@pytest.mark.parametrize("num_mib", [0, 1, 4, 12])
def test_an_object_of_any_size_is_written_as_it_is(bucket, num_mib):
    written = bucket.write_pieces("weights", [MIB] * num_mib + [b"end"])
    assert bucket.read_bytes("weights") == MIB * num_mib + b"end"
    assert written.num_bytes == num_mib * 2**20 + 3
    assert bucket.list_dir("") == ["weights"]


class WithoutCopies:
    """A file system whose copies fail with an error."""

    def __init__(self, filesystem, error):
        self.filesystem, self.error = filesystem, error

    def copy_file(self, source, target):
        raise OSError(self.error)

    def __getattr__(self, name):
        return getattr(self.filesystem, name)


def test_an_object_that_the_store_cannot_copy_is_copied_through_this_process(bucket, monkeypatch):
    filesystem = WithoutCopies(
        bucket._filesystem, "AWS Error NOT_IMPLEMENTED during CopyObject operation"
    )
    monkeypatch.setattr(bucket, "_filesystem", filesystem)
    bucket.write_pieces("weights", [MIB] * 6)
    bucket.copy_file("weights", "copy")
    assert bucket.read_bytes("weights") == bucket.read_bytes("copy") == MIB * 6


def test_uploads_that_a_killed_process_has_left_are_deleted(bucket):
    for name in (".upload-1", ".upload-2"):
        bucket.write_bytes(name, b"half")
    bucket.delete_uploads()
    assert bucket.list_dir("") == ["weights"]


def test_a_failed_copy_of_an_upload_leaves_the_earlier_object(bucket, monkeypatch):
    filesystem = WithoutCopies(
        bucket._filesystem, "AWS Error NETWORK_CONNECTION during CopyObject operation"
    )
    monkeypatch.setattr(bucket, "_filesystem", filesystem)
    with pytest.raises(OSError, match="NETWORK_CONNECTION"):
        bucket.write_pieces("weights", [MIB] * 6)
    assert bucket.read_bytes("weights") == b"before"
    assert bucket.list_dir("") == ["weights"]


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
