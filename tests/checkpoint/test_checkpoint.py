"""A checkpoint is whole or absent, and plain PyTorch reads it."""

import errno
import json
import os
import re
import shutil
import zlib
from pathlib import Path

import crafted
import numpy as np
import pytest
import torch
from checkpoints import ObjectStore
from checkpoints import make_checkpoint as make
from checkpoints import same_state as same
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors

from raydl.checkpoint.manifest import checksum_of
from raydl.checkpoint.store import CheckpointStore
from raydl.core.saved_state import pack, unpack
from raydl.errors import CheckpointError, ConfigError, UnreadableCheckpointError
from raydl.storage import Storage


def unpacked(file):
    """Return the state in a packed file."""
    return unpack(bytearray().join(file.pieces()))


def test_a_checkpoint_is_read_to_the_bit(tmp_path):
    store = CheckpointStore(Storage(str(tmp_path)))
    assert store.write(make(12)) == "round-00000012"
    checkpoint, damage = store.read()
    assert damage == []
    assert same(vars(checkpoint), vars(make(12)))
    assert list(checkpoint.workers) == ["w0", "w1"]  # the order of the ranks


def test_plain_pytorch_loads_the_center_under_the_models_own_names(tmp_path):
    CheckpointStore(Storage(str(tmp_path))).write(make(1))
    state = load_file(tmp_path / "checkpoints/round-00000001/center.safetensors")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)

    model = Model()
    model.load_state_dict(state)
    assert model.linear.weight.eq(1.0).all()


def test_the_same_weights_give_the_same_file(tmp_path):
    for name in ("a", "b"):
        CheckpointStore(Storage(str(tmp_path / name))).write(make(1))
    path = "checkpoints/round-00000001/center.safetensors"
    assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    store = CheckpointStore(Storage(str(tmp_path)), keep=2)
    for round in (1, 2, 10):
        store.write(make(round))
    assert store.names() == ["round-00000002", "round-00000010"]


class FailingStorage(Storage):
    """A storage that fails from its n-th change on."""

    def __init__(self, root, *, after):
        super().__init__(root)
        self.left = after

    def _spend(self):
        if self.left == 0:
            raise OSError("no space left on device")
        self.left -= 1

    def write_pieces(self, name, pieces, **options):
        self._spend()
        return super().write_pieces(name, pieces, **options)

    def move_dir(self, name, new_name):
        self._spend()
        super().move_dir(name, new_name)


@pytest.mark.parametrize("after", range(6))
def test_a_crash_at_any_point_of_a_write_leaves_the_old_checkpoint_whole(tmp_path, after):
    root = str(tmp_path)
    CheckpointStore(Storage(root)).write(make(1))
    with pytest.raises(CheckpointError, match="could not be written: no space left"):
        CheckpointStore(FailingStorage(root, after=after)).write(make(2))
    checkpoint, _ = CheckpointStore(Storage(root)).read()
    assert checkpoint.progress.round == 1
    CheckpointStore(Storage(root)).write(make(2))  # the next write succeeds
    assert CheckpointStore(Storage(root)).names() == ["round-00000001", "round-00000002"]
    assert not list((tmp_path / "checkpoints").glob(".partial*"))


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_read(tmp_path):
    store = CheckpointStore(Storage(str(tmp_path)))
    store.write(make(1))
    store.write(make(2))
    path = tmp_path / "checkpoints/round-00000002/worker-w1.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    checkpoint, damage = store.read()
    assert checkpoint.progress.round == 1
    assert "round-00000002: worker-w1.safetensors is damaged" in damage[0]


def test_without_a_readable_checkpoint_the_error_gives_the_reason(tmp_path):
    store = CheckpointStore(Storage(str(tmp_path)))
    with pytest.raises(CheckpointError, match="there is none to resume from"):
        store.read()
    store.write(make(1))
    manifest = tmp_path / "checkpoints/round-00000001/manifest.json"
    values = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**values, "format": 99}))
    with pytest.raises(CheckpointError, match="has format 99, but this raydl reads up to 2"):
        store.read()


def test_the_error_for_a_state_that_can_not_be_written_names_it(tmp_path):
    with pytest.raises(CheckpointError, match="/a/b: cannot hold a value of type object"):
        pack({"a": {"b": object()}})


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(
    scalars | st.lists(st.floats(width=32), max_size=3).map(torch.tensor),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=5), values, max_size=4))
def test_any_nested_state_survives_packing(state):
    assert same(unpacked(pack(state)), state)


def test_tensors_that_share_memory_are_kept_apart():
    base = torch.arange(6.0)
    state = {"a": base[:3], "b": base[:3], "c": base.view(2, 3).t(), "n": np.ones(2)}
    again = unpacked(pack(state))
    assert same(again, {**state, "c": state["c"].contiguous(), "n": torch.ones(2).double()})


def test_a_uri_and_a_path_are_the_same_place(tmp_path):
    CheckpointStore(Storage(tmp_path.as_uri())).write(make(3))
    assert CheckpointStore(Storage(str(tmp_path))).names() == ["round-00000003"]


def test_checkpoints_work_on_any_arrow_file_system(tmp_path):
    filesystem = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    store = CheckpointStore(Storage("run", filesystem=filesystem))
    store.write(make(3))
    assert store.read()[0].progress.round == 3


def test_checkpoints_on_an_object_store_need_no_renaming(tmp_path):
    store = CheckpointStore(ObjectStore(str(tmp_path)))
    store.write(make(3))
    center, round = store.read_center()
    assert round == 3
    data = (tmp_path / "checkpoints/round-00000003/center.safetensors").read_bytes()
    assert same(center, load_tensors(data))


def test_a_storage_that_can_not_be_written_is_an_error_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run.storage_path: .* cannot be written"):
        Storage(str(tmp_path / "file" / "below")).probe("run.storage_path")
    with pytest.raises(ConfigError, match=r"nosuch://x cannot be opened"):
        Storage("nosuch://x")


def test_two_tensors_whose_paths_read_the_same_are_kept_apart():
    one, two = torch.ones(2), torch.zeros(3)
    for state in ({0: one, "0": two}, {"a/b": one, "a": {"b": two}}, {"": one, "x": {"": two}}):
        assert same(unpacked(pack(state)), state)


def test_a_file_with_paths_for_keys_as_older_raydl_wrote_is_read():
    outline = {"dict": [["a", {"dict": [["b", {"tensor": "/a/b"}]]}], ["n", 3]]}
    data = save_tensors({"/a/b": torch.ones(2)}, metadata={"outline": json.dumps(outline)})
    assert same(unpack(bytearray(data)), {"a": {"b": torch.ones(2)}, "n": 3})


def test_a_key_of_an_unsupported_type_is_refused_at_once():
    with pytest.raises(CheckpointError, match="/a: cannot hold a key of type tuple"):
        pack({"a": {(1, 2): 3}})


class Killed(BaseException):
    """Simulates the end of the process: no handler of errors catches it."""


class KilledStorage(Storage):
    """A storage whose process is killed at its n-th change; folders are deleted file by file."""

    def __init__(self, root, *, after, is_object_store, manifest_goes_first):
        super().__init__(root)
        self.left = after
        self._is_object_store = is_object_store
        self._manifest_goes_first = manifest_goes_first

    @property
    def is_object_store(self):
        return self._is_object_store

    def _spend(self):
        if self.left == 0:
            raise Killed  # also at each later change
        self.left -= 1

    def write_pieces(self, name, pieces, **options):
        self._spend()
        return super().write_pieces(name, pieces, **options)

    def move_dir(self, name, new_name):
        assert not self.is_object_store, "object stores cannot rename folders"
        self._spend()
        super().move_dir(name, new_name)

    def delete_dir(self, name):
        files = self.list_dir(name)
        files.sort(key=lambda f: (f == "manifest.json") != self._manifest_goes_first)
        for file_name in files:
            self._spend()
            (Path(self.root) / name / file_name).unlink()
        self._spend()
        super().delete_dir(name)


@pytest.mark.parametrize("manifest_goes_first", [False, True])
@pytest.mark.parametrize("is_object_store", [False, True])
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("before", [(5,), (3, 5)])
@pytest.mark.parametrize("round", [5, 7])
def test_a_process_killed_at_any_change_leaves_the_old_or_the_new_checkpoint(
    tmp_path, round, before, keep, is_object_store, manifest_goes_first
):
    def store_of(root, after):
        kind = {"is_object_store": is_object_store, "manifest_goes_first": manifest_goes_first}
        return CheckpointStore(KilledStorage(root, after=after, **kind), keep=keep)

    for after in range(100):
        root = str(tmp_path / str(after))
        for old in before:
            store_of(root, -1).write(make(old, value=1.0))
        try:
            store_of(root, after).write(make(round, value=2.0))
            break
        except Killed:
            pass
        store = store_of(root, -1)
        checkpoint, _ = store.read()
        old, new = make(before[-1], value=1.0), make(round, value=2.0)
        assert same(vars(checkpoint), vars(old)) or same(vars(checkpoint), vars(new))
        assert store.names()
        store.write(make(9))  # the next write succeeds and deletes leftovers
        assert store.read()[0].progress.round == 9
        assert sorted(store.names()) == sorted(os.listdir(tmp_path / str(after) / "checkpoints"))
        assert len(store.names()) <= keep
    assert 5 <= after < 99


def test_a_round_written_again_replaces_the_first(tmp_path):
    store = CheckpointStore(Storage(str(tmp_path)), keep=2)
    for round, value in ((1, 1.0), (2, 1.0), (2, 2.0), (2, 3.0)):
        store.write(make(round, value=value))
    checkpoint, damage = store.read()
    assert same(vars(checkpoint), vars(make(2, value=3.0)))
    assert damage == []
    assert [int(name[6:14]) for name in store.names()] == [1, 2]


def test_rounds_and_their_versions_are_ordered_as_numbers(tmp_path):
    store = CheckpointStore(Storage(str(tmp_path)), keep=2)
    for round in (99_999_999, 100_000_000):
        store.write(make(round))
    assert store.read()[0].progress.round == 100_000_000
    for value in range(12):  # names end in .2 and .10
        store.write(make(100_000_000, value=float(value)))
    assert store.read()[0].center["linear.weight"].eq(11).all()


def test_no_attempt_gets_the_name_of_one_that_failed(tmp_path, monkeypatch):
    """Its writes may still be under way, and replace those of the next one."""
    store, folders = CheckpointStore(Storage(str(tmp_path))), []
    write_files = store._write_files

    def fail_once(folder, checkpoint):
        folders.append(folder)
        if len(folders) == 1:
            raise OSError("the network is down")
        return write_files(folder, checkpoint)

    monkeypatch.setattr(store, "_write_files", fail_once)
    with pytest.raises(CheckpointError, match="the network is down"):
        store.write(make(7))
    store.write(make(7))
    assert len(set(folders)) == 2
    assert store.read()[0].progress.round == 7


def test_a_check_reports_no_checkpoint_that_the_run_has_deleted_meanwhile(tmp_path, monkeypatch):
    store = CheckpointStore(Storage(str(tmp_path)), keep=2)
    for round in (1, 2):
        store.write(make(round))
    checker = CheckpointStore(Storage(str(tmp_path)))
    read = checker._read

    def read_late(name):
        if name.endswith("1"):
            store.write(make(3))  # deletes it
        return read(name)

    monkeypatch.setattr(checker, "_read", read_late)
    assert checker.find_damage() == []


def cut(root, name, file_name="worker-w1.safetensors"):
    path = Path(root) / "checkpoints" / name / file_name
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("round", [15, 20, 25])
def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(tmp_path, keep, round):
    storage = Storage(str(tmp_path))
    for old in (5, 10, 20):
        CheckpointStore(storage, keep=3).write(make(old))
    cut(tmp_path, "round-00000020")
    store = CheckpointStore(storage, keep=keep)
    assert store.read()[0].progress.round == 10
    store.write(make(round))
    assert len(store.names()) == keep
    again = CheckpointStore(storage)
    checkpoint, damage = again.read()
    assert (checkpoint.progress.round, damage) == (round, [])
    if keep == 2:
        cut(tmp_path, again.names()[-1])
        assert again.read()[0].progress.round == 10


def test_a_damaged_round_that_is_written_again_counts_as_whole(tmp_path):
    storage = Storage(str(tmp_path))
    for old in (10, 20):
        CheckpointStore(storage).write(make(old))
    cut(tmp_path, "round-00000020")
    store = CheckpointStore(storage, keep=2)
    store.read()
    for round in (15, 20):  # writing 15 deletes the damaged 20, so that its name is free
        store.write(make(round))
    assert store.names() == ["round-00000015", "round-00000020"]
    store.write(make(25))
    assert store.names() == ["round-00000020", "round-00000025"]


def test_the_resumed_checkpoint_stays_until_a_newer_one_is_whole(tmp_path):
    root = str(tmp_path)
    for old in (1, 2):
        CheckpointStore(Storage(root)).write(make(old))
    cut(root, "round-00000002")
    for after in range(6):
        store = CheckpointStore(FailingStorage(root, after=after), keep=1)
        assert store.read()[0].progress.round == 1
        with pytest.raises(CheckpointError, match="could not be written"):
            store.write(make(2))
        assert CheckpointStore(Storage(root)).read()[0].progress.round == 1


def test_the_center_is_not_read_from_a_checkpoint_found_damaged(tmp_path):
    store = CheckpointStore(Storage(str(tmp_path)))
    for round in (1, 2):
        store.write(make(round))
    cut(tmp_path, "round-00000002", "center.safetensors")
    store.read()
    assert store.read_center()[1] == 1


class Unreadable(Storage):
    """A storage whose first reads of one file fail."""

    def __init__(self, root, name, error, *, times):
        super().__init__(root)
        self.name, self.error, self.times = name, error, times

    def _fail(self, name):
        if name.endswith(self.name) and self.times:
            self.times -= 1
            raise self.error

    def read_bytes(self, name, **options):
        self._fail(name)
        return super().read_bytes(name, **options)

    def read_pieces(self, name):
        self._fail(name)
        yield from super().read_pieces(name)


STALE = OSError(errno.ESTALE, "stale file handle")
BUSY = OSError("When reading: AWS Error SLOW_DOWN during GetObject operation: reduce the rate")
FILES = ["manifest.json", "center.safetensors", "state.safetensors", "worker-w1.safetensors"]


def store_with_unreadable_file(root, name, error, *, times):
    """Return a store of two checkpoints, with an unreadable file in the newest, and its pauses."""
    for round in (1, 2):
        CheckpointStore(Storage(str(root))).write(make(round))
    storage = Unreadable(str(root), f"round-00000002/{name}", error, times=times)
    pauses = []
    return CheckpointStore(storage, keep=1, driver_epoch=2, sleep=pauses.append), pauses


@pytest.mark.parametrize("error", [STALE, BUSY])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_temporarily_cannot_be_read_is_read_again(tmp_path, name, error):
    store, pauses = store_with_unreadable_file(tmp_path, name, error, times=2)
    checkpoint, damage = store.read()
    assert (checkpoint.progress.round, damage) == (2, [])
    assert len(pauses) == 2


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_that_cannot_be_read_ends_the_resume_and_is_not_skipped(tmp_path, name):
    """It may be intact: a run that resumed from an older one would delete its progress."""
    store, _ = store_with_unreadable_file(tmp_path, name, STALE, times=-1)
    with pytest.raises(UnreadableCheckpointError, match=f"{name} cannot be read: stale") as caught:
        store.read()
    assert caught.value.exit_status == 75
    assert store.names() == ["round-00000001", "round-00000002"]
    assert store.find_damage() == [str(caught.value)]
    checkpoint, damage = CheckpointStore(Storage(str(tmp_path))).read()
    assert (checkpoint.progress.round, damage) == (2, [])


def test_a_file_without_read_permission_is_not_worth_a_retry(tmp_path):
    denied = PermissionError(errno.EACCES, "permission denied")
    store, _ = store_with_unreadable_file(tmp_path, "state.safetensors", denied, times=-1)
    with pytest.raises(CheckpointError, match="cannot be read: permission denied") as caught:
        store.read()
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("name", FILES[1:])
def test_with_a_missing_file_the_previous_checkpoint_is_read(tmp_path, name):
    store, pauses = store_with_unreadable_file(tmp_path, "none", STALE, times=0)
    (tmp_path / "checkpoints/round-00000002" / name).unlink()
    checkpoint, damage = store.read()
    assert checkpoint.progress.round == 1
    assert damage[0].endswith(f"round-00000002: {name} is missing")
    assert not pauses


class Undeletable(Storage):
    """A storage that fails to delete the folder ``refused``."""

    refused = "round-00000001"

    def delete_dir(self, name):
        if name.endswith(self.refused) and self.exists(name):
            raise OSError("permission denied")
        super().delete_dir(name)


def test_old_checkpoints_that_can_not_be_deleted_cause_a_warning_and_the_write_counts(tmp_path):
    storage = Undeletable(str(tmp_path))
    store = CheckpointStore(storage, keep=1)
    storage.refused = "none"
    store.write(make(1))
    storage.refused = "round-00000001"
    problem = r"round-00000002 was written, but old ones stay: round-00000001 could not be del"
    with pytest.warns(RuntimeWarning, match=problem):
        assert store.write(make(2)) == "round-00000002"
    with pytest.warns(RuntimeWarning, match="permission denied; the next write tries again"):
        store.write(make(3))
    assert store.read()[0].progress.round == 3
    assert store.names() == ["round-00000003"]
    assert storage.list_dir("checkpoints") == [".partial-round-00000001", "round-00000003"]
    storage.refused = "none"
    store.write(make(4))
    assert storage.list_dir("checkpoints") == ["round-00000004"]


def test_a_folder_that_can_not_be_listed_after_the_write_causes_a_warning(tmp_path):
    class Unlisted(Storage):
        def list_dir(self, name):
            if self.exists("checkpoints/round-00000001"):
                raise OSError("timed out")
            return super().list_dir(name)

    with pytest.warns(RuntimeWarning, match="could not be listed: timed out"):
        CheckpointStore(Unlisted(str(tmp_path))).write(make(1))
    assert CheckpointStore(Storage(str(tmp_path))).read()[0].progress.round == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: [m], "it must be an object, got a list"),
        (lambda m: 7, "it must be an object, got 7"),
        (lambda m: {k: v for k, v in m.items() if k != "format"}, "format is missing"),
        (lambda m: {**m, "format": "1"}, "format must be a whole number, got '1'"),
        (lambda m: {k: v for k, v in m.items() if k != "workers"}, "workers is missing"),
        (lambda m: {k: v for k, v in m.items() if k != "files"}, "files is missing"),
        (lambda m: {**m, "files": [*m["files"]]}, "files must be an object, got a list"),
        (
            lambda m: {**m, "files": {"center.safetensors": 3}},
            "files.center.safetensors must be an object, got 3",
        ),
        (
            lambda m: {**m, "files": {"center.safetensors": {"bytes": "3", "crc32": 1}}},
            "bytes must be a whole number, got '3'",
        ),
        (lambda m: {**m, "workers": [["w0"]]}, "workers[0] must be a text, got a list"),
        (lambda m: {**m, "workers": None}, "workers must be a list, got None"),
        (lambda m: {**m, "round": "2"}, "round must be a whole number, got '2'"),
        (lambda m: {**m, "generation": None}, "generation must be a whole number, got None"),
        (lambda m: {**m, "num_samples": True}, "num_samples must be a whole number, got True"),
        (lambda m: {**m, "seconds": "long"}, "seconds must be a number, got 'long'"),
        (lambda m: {**m, "num_samples": m["num_samples"] + 1}, "its checksum does not match"),
        (lambda m: {**m, "format": 0}, "format must be from 1 to"),
    ],
)
def test_with_a_malformed_manifest_the_previous_checkpoint_is_read(tmp_path, change, problem):
    store = CheckpointStore(Storage(str(tmp_path)))
    for round in (1, 2):
        store.write(make(round))
    manifest = tmp_path / "checkpoints/round-00000002/manifest.json"
    manifest.write_text(json.dumps(change(json.loads(manifest.read_text()))))
    with pytest.raises(CheckpointError, match=f"its manifest is damaged: .*{re.escape(problem)}"):
        store.read_center()
    checkpoint, damage = store.read()
    assert checkpoint.progress.round == 1
    assert "round-00000002: its manifest is damaged: " in damage[0]
    assert problem in damage[0]


def test_with_a_file_missing_in_the_manifest_the_previous_checkpoint_is_read(tmp_path):
    store = CheckpointStore(Storage(str(tmp_path)))
    for round in (1, 2):
        store.write(make(round))
    manifest = tmp_path / "checkpoints/round-00000002/manifest.json"
    # A manifest of the first format, which has no checksum of itself.
    values = {**json.loads(manifest.read_text()), "format": 1, "files": {}}
    manifest.write_text(json.dumps(values))
    checkpoint, damage = store.read()
    assert checkpoint.progress.round == 1
    assert "safetensors is missing in its manifest" in damage[0]


def test_a_checkpoint_of_a_newer_format_is_refused_and_not_skipped(tmp_path):
    store = CheckpointStore(Storage(str(tmp_path)))
    for round in (1, 2):
        store.write(make(round))
    manifest = tmp_path / "checkpoints/round-00000002/manifest.json"
    manifest.write_text('{"format": 3, "all": "else", "may": "differ"}')
    for read in (store.read, store.read_center):
        with pytest.raises(CheckpointError, match=r"has format 3, .* up to 2; update raydl"):
            read()
    assert store.names() == ["round-00000001", "round-00000002"]


@pytest.mark.parametrize("after", range(6))
def test_a_partial_checkpoint_on_a_full_disk_is_deleted_at_once(tmp_path, after):
    store = CheckpointStore(FailingStorage(str(tmp_path), after=after))
    with pytest.raises(CheckpointError, match="no space left"):
        store.write(make(1))
    assert not list(tmp_path.glob("checkpoints/*"))


def test_files_of_a_crashed_write_are_deleted_before_the_next_write(tmp_path):
    left = tmp_path / "checkpoints/.partial-round-00000009"
    left.mkdir(parents=True)
    (left / "center.safetensors").write_bytes(b"much")

    class Small(Storage):
        def write_pieces(self, name, pieces, **options):
            if left.exists():
                raise OSError("no space left on device")
            return super().write_pieces(name, pieces, **options)

    CheckpointStore(Small(str(tmp_path))).write(make(10))
    assert CheckpointStore(Storage(str(tmp_path))).names() == ["round-00000010"]


def test_a_folder_that_a_user_made_is_neither_read_nor_deleted(tmp_path):
    store = CheckpointStore(Storage(str(tmp_path)), keep=1)
    store.write(make(1))
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "round-00000001", folder / "round-00000001-best")
    store.write(make(2))
    assert store.names() == ["round-00000002"]
    assert (folder / "round-00000001-best/manifest.json").exists()


def test_a_checkpoint_of_the_first_format_is_read(tmp_path):
    store = CheckpointStore(Storage(str(tmp_path)))
    store.write(make(1))
    manifest = tmp_path / "checkpoints/round-00000001/manifest.json"
    values = json.loads(manifest.read_text())
    del values["crc32"]
    manifest.write_text(json.dumps({**values, "format": 1}))
    assert store.read()[0].progress.round == 1


def without_manifests(root, *rounds):
    for round in rounds:
        CheckpointStore(Storage(str(root))).write(make(round))
    found = sorted((root / "checkpoints").glob("round-*"))
    for folder in found:
        (folder / "manifest.json").unlink()
    return found


@pytest.mark.parametrize(
    ("kind", "rounds", "number"),
    [(Storage, [3], 1), (Storage, [9, 10], 2), (ObjectStore, [3], 0), (ObjectStore, [9, 10], 2)],
)
def test_folders_that_lost_their_manifests_are_found_oldest_first(tmp_path, kind, rounds, number):
    """On an object store a single such folder may be the first checkpoint, still being written."""
    without_manifests(tmp_path, *rounds)
    found = CheckpointStore(kind(str(tmp_path))).without_manifest()
    assert len(found) == number
    assert [int(name.split("-")[1]) for name in found] == rounds[: len(found)]


def test_all_damage_is_reported_with_its_path(tmp_path):
    store = CheckpointStore(Storage(str(tmp_path)))
    for round in (1, 2):
        store.write(make(round))
    first, second = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    cut(tmp_path, first)
    (tmp_path / "checkpoints" / second / "manifest.json").unlink()
    (tmp_path / "center.safetensors").write_bytes(b"no weights")
    damaged, lost, center = store.find_damage()
    assert f"checkpoints/{first}" in damaged
    assert "worker-w1.safetensors" in damaged
    assert f"checkpoints/{second}: has no manifest" in lost
    assert f"{tmp_path}/center.safetensors: " in center


def test_the_store_of_an_untrained_run_has_no_trained_center(tmp_path):
    store = CheckpointStore(Storage(str(tmp_path)))
    store.write(make(4))
    assert not store.has_trained(4)


def rewritten(root, change):
    """Change the manifest of the newest checkpoint, as anybody can who can write the folder."""
    path = sorted(Path(root).glob("checkpoints/*/manifest.json"))[-1]
    manifest = json.loads(path.read_text())
    del manifest["crc32"]
    change(manifest)
    manifest["crc32"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: m["files"].update({"../../key": {"bytes": 1, "crc32": 1}}), "'../../key'"),
        (lambda m: m["files"].update({"notes": {"bytes": 1, "crc32": 1}}), "'notes', which is not"),
        (lambda m: m["workers"].append("../w9"), "'../w9' is not the id of a worker"),
        (lambda m: m.update(round=-1), "round must be from 0 to"),
        (lambda m: m.update(num_samples=10**30), "num_samples must be from 0 to"),
        (lambda m: m.update(seconds=float("inf")), "seconds must be from 0 to"),
        (lambda m: m["files"]["state.safetensors"].update(bytes=-1), "bytes must be from 0 to"),
    ],
)
def test_a_manifest_with_names_or_numbers_that_are_not_raydls_is_damaged(tmp_path, change, problem):
    key = tmp_path / "key"
    key.write_text("private")
    key.chmod(0o600)
    root = tmp_path / "run"
    for round in (1, 2):
        CheckpointStore(Storage(str(root))).write(make(round))
    rewritten(root, change)
    store = CheckpointStore(Storage(str(root)), driver_epoch=2)
    checkpoint, damage = store.read()
    assert checkpoint.progress.round == 1
    assert problem in damage[0]
    store.take_over(checkpoint)
    assert (key.read_text(), key.stat().st_mode & 0o777) == ("private", 0o600)


def test_a_checkpoint_in_a_linked_folder_is_not_read(tmp_path):
    root = tmp_path / "run"
    CheckpointStore(Storage(str(root))).write(make(1))
    (folder,) = (root / "checkpoints").iterdir()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError):
        CheckpointStore(Storage(str(root))).read()


@pytest.mark.parametrize("name", ["center.safetensors", "worker-w1.safetensors"])
def test_a_file_that_is_larger_than_its_manifest_says_is_not_read(tmp_path, name):
    for round in (1, 2):
        CheckpointStore(Storage(str(tmp_path))).write(make(round))
    with (tmp_path / "checkpoints/round-00000002" / name).open("r+b") as file:
        file.truncate(1 << 40)  # sparse: it takes no space
    checkpoint, damage = CheckpointStore(Storage(str(tmp_path))).read()
    assert checkpoint.progress.round == 1
    assert "has 1099511627776 bytes, but" in damage[0]


def test_a_checkpoint_that_has_lost_its_manifest_is_said_and_never_deleted(tmp_path):
    storage = Storage(str(tmp_path))
    for round in (1, 2):
        CheckpointStore(storage).write(make(round))
    lost = tmp_path / "checkpoints" / "round-00000002"
    (lost / "manifest.json").unlink()
    center = (lost / "center.safetensors").read_bytes()
    store = CheckpointStore(storage, keep=1, driver_epoch=2)
    checkpoint, said = store.read()
    assert checkpoint.progress.round == 1
    assert said == [
        f"checkpoint {lost} has lost its manifest.json and cannot be resumed from; it stays: "
        f"center.safetensors in it may be whole"
    ]
    store.take_over(checkpoint)
    for round in (3, 4):
        store.write(make(round))
    assert (lost / "center.safetensors").read_bytes() == center
    assert store.names() == ["round-00000004-e2"]


def test_the_rest_of_a_write_in_which_folders_are_nested_by_thousands_stops_no_write(tmp_path):
    store = CheckpointStore(Storage(str(tmp_path)))
    rest = tmp_path / "checkpoints/.partial-round-00000001"
    warning = pytest.warns(RuntimeWarning, match="more than 64 folders, one in the other")
    with crafted.folders_in_each_other(rest, 1500), warning:
        assert store.write(make(2)) == "round-00000002"
    assert store.names() == ["round-00000002"]


def test_a_folder_with_a_version_that_no_run_reaches_ends_the_write_with_a_sentence(tmp_path):
    (tmp_path / f"checkpoints/round-00000002.{10**18 - 1}").mkdir(parents=True)
    store = CheckpointStore(Storage(str(tmp_path)))
    with pytest.raises(CheckpointError, match=f"{10**18} would have a number that no run reaches"):
        store.write(make(2))
    assert store.write(make(3)) == "round-00000003"


def test_a_checkpoint_of_a_round_that_no_run_reaches_is_not_taken_over(tmp_path):
    CheckpointStore(Storage(str(tmp_path))).write(make(1))
    path = tmp_path / "checkpoints/round-00000001/manifest.json"
    manifest = {**json.loads(path.read_text()), "round": 2**62}
    path.write_text(json.dumps({**manifest, "crc32": checksum_of(manifest)}))
    store = CheckpointStore(Storage(str(tmp_path)), driver_epoch=2)
    checkpoint, _ = store.read()
    with pytest.raises(CheckpointError, match="would have a number that no run reaches"):
        store.take_over(checkpoint)
