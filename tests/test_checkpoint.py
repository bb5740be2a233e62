"""A checkpoint is whole or absent, and plain PyTorch reads it."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file

from raydl.checkpoint import Checkpoint, CheckpointStore, _pack, _unpack
from raydl.errors import CheckpointError, ConfigError
from raydl.storage import Storage


def make(round, value=1.0):
    optimizer = torch.optim.SGD([torch.ones(3)], lr=0.1, momentum=0.9).state_dict()
    return Checkpoint(
        round=round,
        generation=2,
        num_samples=10 * round,
        seconds=1.5,
        center={"linear.weight": torch.full((2, 3), value), "linear.bias": torch.zeros(2)},
        state={"epoch": 1, "ledger": {"free": [[0, 3]]}, "optimizer": optimizer},
        workers={"w0": {"weights": torch.arange(8.0)}, "w1": {"weights": torch.ones(8)}},
    )


def same(a, b):
    """Whether nested values are equal to the bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def test_what_was_written_is_read_to_the_bit(tmp_path):
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


def test_only_the_newest_are_kept(tmp_path):
    store = CheckpointStore(Storage(str(tmp_path)), keep=2)
    for round in (1, 2, 10):
        store.write(make(round))
    assert store.names() == ["round-00000002", "round-00000010"]


class Failing(Storage):
    """A storage that breaks at its n-th change."""

    def __init__(self, root, *, after):
        super().__init__(root)
        self.left = after

    def _spend(self):
        if self.left == 0:
            raise OSError("no space left on device")
        self.left -= 1

    def write_bytes(self, name, data):
        self._spend()
        super().write_bytes(name, data)

    def move_dir(self, name, new_name):
        self._spend()
        super().move_dir(name, new_name)


@pytest.mark.parametrize("after", range(6))
def test_a_crash_at_any_point_of_a_write_leaves_the_old_checkpoint_whole(tmp_path, after):
    root = str(tmp_path)
    CheckpointStore(Storage(root)).write(make(1))
    with pytest.raises(CheckpointError, match="could not be written: no space left"):
        CheckpointStore(Failing(root, after=after)).write(make(2))
    checkpoint, _ = CheckpointStore(Storage(root)).read()
    assert checkpoint.round == 1
    CheckpointStore(Storage(root)).write(make(2))  # and the next one goes through
    assert CheckpointStore(Storage(root)).names() == ["round-00000001", "round-00000002"]
    assert not list((tmp_path / "checkpoints").glob(".partial*"))


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_read(tmp_path):
    store = CheckpointStore(Storage(str(tmp_path)))
    store.write(make(1))
    store.write(make(2))
    path = tmp_path / "checkpoints/round-00000002/worker-w1.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    checkpoint, damage = store.read()
    assert checkpoint.round == 1
    assert "round-00000002: worker-w1.safetensors is damaged" in damage[0]


def test_no_checkpoint_and_only_damaged_ones_are_said_in_one_sentence(tmp_path):
    store = CheckpointStore(Storage(str(tmp_path)))
    with pytest.raises(CheckpointError, match="there is none to go on from"):
        store.read()
    store.write(make(1))
    manifest = tmp_path / "checkpoints/round-00000001/manifest.json"
    values = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**values, "format": 99}))
    with pytest.raises(CheckpointError, match="has format 99, this raydl reads up to 1"):
        store.read()


def test_a_state_that_can_not_be_kept_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="/a/b: can not hold a object"):
        _pack({"a": {"b": object()}})


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
    assert same(_unpack(_pack(state)), state)


def test_tensors_that_share_memory_are_kept_apart():
    base = torch.arange(6.0)
    state = {"a": base[:3], "b": base[:3], "c": base.view(2, 3).t(), "n": np.ones(2)}
    again = _unpack(_pack(state))
    assert same(again, {**state, "c": state["c"].contiguous(), "n": torch.ones(2).double()})


def test_a_uri_and_a_path_are_the_same_place(tmp_path):
    CheckpointStore(Storage(tmp_path.as_uri())).write(make(3))
    assert CheckpointStore(Storage(str(tmp_path))).names() == ["round-00000003"]


def test_checkpoints_work_on_any_arrow_file_system(tmp_path):
    filesystem = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    store = CheckpointStore(Storage("run", filesystem=filesystem))
    store.write(make(3))
    assert store.read()[0].round == 3


class ObjectStore(Storage):
    """A storage without renaming of folders, as S3 is."""

    is_object_store = True

    def move_dir(self, name, new_name):
        raise AssertionError("object stores can not rename folders")


def test_an_object_store_needs_no_renaming(tmp_path):
    store = CheckpointStore(ObjectStore(str(tmp_path)))
    store.write(make(3))
    center, round = store.read_center()
    assert round == 3
    data = (tmp_path / "checkpoints/round-00000003/center.safetensors").read_bytes()
    assert same(center, load_tensors(data))


def test_a_place_that_can_not_be_written_is_told_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run.storage_path .* can not be written"):
        Storage(str(tmp_path / "file" / "below")).probe("run.storage_path")
    with pytest.raises(ConfigError, match=r"nosuch://x can not be opened"):
        Storage("nosuch://x")
