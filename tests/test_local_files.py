"""Nothing in a run's folder makes raydl read, write or delete a file outside it."""

import os

import crafted
import pytest

from raydl.storage import Storage
from raydl.storage.local_files import LocalFiles

SECRET = b"private\n" * 20


@pytest.fixture
def outside(tmp_path):
    """A private file, and a folder with another one, beside the run's folder."""
    (tmp_path / "elsewhere").mkdir()
    for path in (tmp_path / "secret", tmp_path / "elsewhere" / "file"):
        path.write_bytes(SECRET)
        path.chmod(0o600)
    yield tmp_path
    for path in (tmp_path / "secret", tmp_path / "elsewhere" / "file"):
        assert path.read_bytes() == SECRET, "a file outside has changed"
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_nlink == 1


@pytest.fixture
def run(outside):
    """The folder of a run in which somebody planted a link to a file and one to a folder."""
    folder = outside / "run"
    folder.mkdir()
    (folder / "link").symlink_to(outside / "secret")
    (folder / "folder").symlink_to(outside / "elsewhere")
    return folder


LINKED = ["link", "folder/file"]


@pytest.mark.parametrize("name", LINKED)
def test_a_link_is_not_read(run, name):
    storage = Storage(str(run))
    for read in (storage.read_bytes, storage.read_whole, lambda n: list(storage.read_pieces(n))):
        with pytest.raises(OSError, match="is a symbolic link, which is not followed"):
            read(name)


@pytest.mark.parametrize("name", LINKED)
def test_a_link_is_not_copied(run, name, tmp_path):
    storage = Storage(str(run))
    with pytest.raises(OSError, match="is a symbolic link"):
        storage.copy_file(name, "copy")
    with pytest.raises(OSError, match="is a symbolic link"):
        storage.copy_out(name, str(tmp_path / "copy"))
    assert not (run / "copy").exists()
    assert not (tmp_path / "copy").exists()


def test_a_written_file_takes_the_place_of_a_link(run):
    Storage(str(run)).write_bytes("link", b"ours")
    assert (run / "link").read_bytes() == b"ours"
    assert not (run / "link").is_symlink()


def test_nothing_is_written_below_a_linked_folder(run):
    with pytest.raises(OSError, match="folder is a symbolic link"):
        Storage(str(run)).write_bytes("folder/new", b"ours")


def test_deleting_a_linked_folder_deletes_the_link(run):
    Storage(str(run)).delete_dir("folder")
    assert not (run / "folder").is_symlink()


def test_links_inside_a_deleted_folder_are_not_followed(run, outside):
    (run / "checkpoint" / "inner").mkdir(parents=True)
    (run / "checkpoint" / "inner" / "link").symlink_to(outside / "elsewhere")
    Storage(str(run)).delete_dir("checkpoint")
    assert not (run / "checkpoint").exists()


def test_folders_that_are_nested_by_thousands_are_not_deleted_and_do_not_hold_up(run):
    problem = pytest.raises(OSError, match="deep holds more than 64 folders, one in the other")
    with crafted.folders_in_each_other(run / "deep", 1500), problem:
        Storage(str(run)).delete_dir("deep")


def test_a_local_file_of_curves_that_is_a_link_is_not_published(run, tmp_path):
    with pytest.raises(OSError, match="is a symbolic link"):
        Storage(str(tmp_path / "kept")).copy_in(str(run / "link"), "curves")


def test_lines_are_not_appended_to_a_link(run):
    with pytest.raises(OSError, match="is a symbolic link"):
        LocalFiles(str(run)).append("link")


def test_a_file_that_is_locked_is_not_opened_through_a_link(run):
    with pytest.raises(OSError, match="is a symbolic link"):
        LocalFiles(str(run)).open_or_create("link")


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "/etc/passwd", ".", "a//b", ""])
def test_a_name_that_leads_out_of_the_folder_is_refused(run, name):
    storage = Storage(str(run))
    for act in (storage.read_bytes, storage.delete_file, lambda n: storage.write_bytes(n, b"")):
        with pytest.raises(OSError, match="name of a file"):
            act(name)


def test_the_folder_itself_may_be_reached_through_links(run, tmp_path):
    (tmp_path / "alias").symlink_to(run)
    storage = Storage(str(tmp_path / "alias"))
    storage.write_bytes("checkpoints/round/file", b"ours")
    assert storage.read_bytes("checkpoints/round/file") == b"ours"
    assert storage.list_dir("checkpoints") == ["round"]


def test_a_pipe_or_a_device_is_refused_without_a_wait(run):
    os.mkfifo(run / "pipe")
    with pytest.raises(OSError, match="pipe is not a regular file"):
        Storage(str(run)).read_bytes("pipe")


def test_a_file_of_json_that_is_too_large_is_not_read(run):
    with (run / "status.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse: it takes no space
    with pytest.raises(OSError, match="has 1,099,511,627,776 bytes, and at most 16,777,216 are"):
        Storage(str(run)).read_json("status.json", dict)


def test_deep_json_is_damaged_json(run):
    (run / "status.json").write_text("[" * 300_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        Storage(str(run)).read_json("status.json", dict)


def test_each_write_has_a_temporary_file_of_its_own(run):
    """A driver that was halted in the middle of a write does not damage its successor's file."""
    storage = Storage(str(run))

    def halted():
        yield b"old" * 1000
        storage.write_bytes("best", b"new")  # the successor, meanwhile
        yield b"old" * 1000
        raise TimeoutError("superseded")

    with pytest.raises(TimeoutError, match="superseded"):
        storage.write_pieces("best", halted())
    assert storage.read_bytes("best") == b"new"
    assert storage.list_dir("") == ["best", "folder", "link"], "an unfinished file stays"
