"""Workers write and read their own files, and no process holds a copy of all states."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from checkpoints import ObjectStore
from checkpoints import make_checkpoint as make
from checkpoints import same_state as same
from controller_harness import DIED, ControllerHarness, collected, report
from ensembles import Ensemble, tiny_images
from pyarrow import fs
from recorders import collected_round, flat_model
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

import raydl
from raydl.checkpoint.best import BestCenter
from raydl.checkpoint.store import Checkpoint, CheckpointStore
from raydl.checkpoint.totals import Totals
from raydl.checkpoint.writer import CheckpointWriter
from raydl.config import CheckpointConfig, MethodConfig, TrainConfig, TrainingConfig
from raydl.core import tensor_files
from raydl.core.saved_state import SavedState, pack, unpack
from raydl.core.tensor_files import TensorFile, view_of
from raydl.core.worker_group import (
    Collected,
    Draining,
    HandedIn,
    Lost,
    Published,
    StatesLost,
    WorkerReady,
)
from raydl.elastic.run_state import State
from raydl.errors import CheckpointError, StateLostError
from raydl.storage import Storage, Sum

# bytes of files


def test_a_file_written_in_pieces_is_the_one_that_safetensors_writes():
    tensors = {}
    for place, dtype in enumerate(tensor_files._CODES.values()):
        for shape in ((3,), (2, 5), (), (0, 4)):
            tensors[f'{shape} "ü"{place}\n'] = torch.ones(shape).to(dtype)
    metadata = {"outline": '{"a": "\u0001"}'}
    file = TensorFile(tensors, metadata)
    data = b"".join(file.pieces())
    assert data == save_tensors(tensors, metadata=metadata)
    assert len(data) == file.num_bytes
    assert file.read(5, 700) == data[5:705]
    assert file.read(0, 10**9) == data
    assert tensor_files.parse(bytearray(data))[0].keys() == load_tensors(data).keys()


@pytest.mark.parametrize("piece", [1, 7, 64, 10**6])
def test_a_file_that_is_read_in_pieces_is_the_one_that_was_written(piece):
    tensors = {
        f"{place}{number}": torch.ones(shape).to(dtype)
        for place, dtype in enumerate(tensor_files._CODES.values())
        for number, shape in enumerate([(3,), (2, 5), (), (0, 4)])
    }
    file = TensorFile(tensors, {"a": "b"})
    data = b"".join(file.pieces())
    pieces = (data[start : start + piece] for start in range(0, len(data), piece))
    found, metadata = tensor_files.read(pieces, file.num_bytes)
    assert metadata == {"a": "b"}
    assert {k: (t.shape, t.dtype) for k, t in found.items()} == {
        k: (t.shape, t.dtype) for k, t in tensors.items()
    }
    assert b"".join(TensorFile(found, metadata).pieces()) == data
    alone = [t.untyped_storage().nbytes() == t.nbytes for t in found.values()]
    assert all(alone), "each in memory of its own"


@pytest.mark.parametrize("cut", [4, 40, 200, -3])
def test_a_file_that_was_cut_is_damaged(cut):
    data = b"".join(TensorFile({"a": torch.ones(30), "b": torch.zeros(2, 2)}).pieces())
    with pytest.raises(ValueError, match="it is damaged"):
        tensor_files.parse(bytearray(data[:cut]))
    with pytest.raises(ValueError, match="it is damaged"):
        tensor_files.read(iter([data[:cut]]), len(data))
    with pytest.raises(ValueError, match="it is damaged"):
        tensor_files.read(iter([data, b"more"]), len(data) + 4)


def test_a_tensor_on_read_only_memory_is_no_copy_and_causes_no_warning():
    array = np.arange(6.0).reshape(2, 3)
    array.flags.writeable = False
    tensor = view_of(array)
    assert tensor.data_ptr() == array.ctypes.data
    assert tensor.tolist() == array.tolist()
    assert view_of(np.array(3)).item() == 3
    assert view_of(np.empty((0, 2))).shape == (0, 2)


_PEAK = """
import json, sys, torch, numpy as np
from pathlib import Path
from raydl.checkpoint.store import Checkpoint, CheckpointStore
from raydl.core.progress import Progress
from raydl.storage import Storage, Sum
from raydl.core.tensor_files import view_of

FLOATS, NUM_WORKERS, WORKER_BYTES = 16 << 20, 16, 500_000_000

def peak():
    (line,) = [l for l in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in l]
    return int(line.split()[1]) << 10

class Sparse:
    '''A worker with a sparse file, which no process writes.'''
    def begin_write(self, storage, name, token):
        path = Path(storage.local_path) / name
        with path.open("wb") as file:
            file.truncate(WORKER_BYTES)
        return self
    def wait(self):
        return Sum(WORKER_BYTES, 0)

center = np.ones(FLOATS, np.float32)
center.flags.writeable = False
store = CheckpointStore(Storage(sys.argv[1]))
def write(center, workers, round):
    store.write(Checkpoint(
        progress=Progress(round=round), seconds=1.0, center={"w": center}, state={},
        workers=workers))
write(torch.ones(4), {}, 1)  # the memory that PyArrow and torch allocate once
before = peak()
write(view_of(center), {f"w{i}": Sparse() for i in range(NUM_WORKERS)}, 2)
print(json.dumps((peak() - before) / center.nbytes))
"""


@pytest.mark.processes
def test_writing_the_states_of_sixteen_workers_takes_less_memory_than_a_replica(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path)],
        env=environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert json.loads(done.stdout) < 0.5, "of the center, beside the center itself"
    names = os.listdir(tmp_path / "checkpoints/round-00000002")
    assert len([name for name in names if name.startswith("worker-")]) == 16
    assert not [name for name in names if name.startswith("token")]


# the store and remote states


class RemoteState:
    """A state in another process, simulated by the test."""

    def __init__(self, state, *, problem=None):
        self.state, self.problem = state, problem
        self.is_cancelled = self.is_released = False

    def begin_write(self, storage, name, token):
        assert storage.exists(token), "by which a worker detects that it sees the same folder"
        self.storage, self.name = storage, name
        return self

    def wait(self):
        if self.problem:
            raise self.problem
        return self.storage.write_pieces(self.name, pack(self.state).pieces())

    def cancel(self, until):
        self.is_cancelled = True

    def release(self):
        self.is_released = True


def with_workers(round, **workers):
    return Checkpoint(**{**vars(make(round)), "workers": workers})


@pytest.mark.parametrize("kind", [Storage, ObjectStore])
def test_files_that_workers_have_written_are_read_like_the_others(tmp_path, kind):
    store = CheckpointStore(kind(str(tmp_path)))
    states = make(3).workers
    store.write(with_workers(3, w0=RemoteState(states["w0"]), w1=states["w1"]))
    checkpoint, damage = store.read()
    assert damage == []
    assert same(vars(checkpoint), vars(make(3)))
    assert CheckpointStore(kind(str(tmp_path))).find_damage() == []


LOSSES = [StateLostError("w1", "its process was killed"), OSError("no space left on device")]


@pytest.mark.parametrize("problem", LOSSES, ids=["a worker is lost", "the disk is full"])
@pytest.mark.parametrize("kind", [Storage, ObjectStore])
def test_a_worker_that_can_not_write_fails_the_checkpoint_and_leaves_no_file(
    tmp_path, kind, problem
):
    store = CheckpointStore(kind(str(tmp_path)))
    store.write(make(1))
    others = [RemoteState({"a": 1}), RemoteState({"a": 1})]
    workers = {"w0": others[0], "w1": RemoteState({}, problem=problem), "w2": others[1]}
    with pytest.raises(CheckpointError, match=r"killed|could not be written: no space left"):
        store.write(with_workers(2, **workers))
    assert all(other.is_cancelled for other in others)
    assert os.listdir(tmp_path / "checkpoints") == ["round-00000001"]
    assert store.read()[0].progress.round == 1


@pytest.mark.parametrize("is_last", [False, True])
def test_a_loss_is_reported_after_the_others_have_released_their_states(tmp_path, is_last):
    """Otherwise states of a new attempt at the same round could be released with the failed one."""
    storage, flat, reported = Storage(str(tmp_path)), flat_model(), []
    best = BestCenter(storage, flat)
    writer = CheckpointWriter(CheckpointStore(storage), flat, best, after=lambda: None)
    lost = RemoteState({}, problem=StateLostError("w1", "its process was killed"))
    states = {"w0": RemoteState({"a": 1}), "w1": lost, "w2": RemoteState({"a": 1})}

    def on_loss(reason):
        reported.append((reason, [state.is_released for state in states.values()]))

    attempt = Collected(collected_round(7).snapshot, states, is_last=is_last, on_loss=on_loss)
    writer.checkpoint(attempt, seconds=1.0, totals=Totals())
    writer.wait()
    assert reported == [(str(lost.problem), [True, True, True])]


def test_a_saved_state_is_read_from_any_working_folder_and_detects_damage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore(Storage("run"))
    store.write(make(1))
    address, name, written = store.read()[0].workers["w0"].place
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    saved = SavedState(Storage(address), name, written)
    assert same(saved.load(), make(1).workers["w0"])
    path = tmp_path / "run/checkpoints/round-00000001/worker-w0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"w0.safetensors: is damaged: its checksum does not"):
        saved.load()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"w0.safetensors: cannot be read"):
        saved.load()


def test_states_share_the_memory_of_the_file_they_were_read_from():
    data = bytearray(b"".join(pack({"a": torch.zeros(5), "n": 3}).pieces()))
    state = unpack(data)
    data[-4:] = np.float32(7).tobytes()
    assert state["a"].tolist() == [0, 0, 0, 0, 7]


# the worker


def trained_worker(*, rounds):
    config = TrainConfig(
        method=MethodConfig(name="sync-easgd", period=1),
        training=TrainingConfig(epochs=50, batch_size=4),
    )
    ensemble = Ensemble(config, num_workers=1, images=tiny_images(16)).join()
    ensemble.run(rounds=rounds)
    return ensemble, ensemble.workers[0]


def test_a_state_that_a_worker_holds_does_not_change_while_it_trains():
    ensemble, worker = trained_worker(rounds=2)
    worker.hold_kept(2)
    before = b"".join(worker.held(2).pieces())
    ensemble.run(rounds=2)
    assert b"".join(worker.held(2).pieces()) == before
    assert unpack(bytearray(before))["round"] == 2


def test_a_worker_holds_states_of_two_rounds_at_most_and_no_released_ones():
    _, worker = trained_worker(rounds=1)
    for round in (5, 6, 7):
        worker.hold_kept(round)
    with pytest.raises(StateLostError, match="its state of round 5 is no longer held"):
        worker.held(5)
    worker.release(6)
    with pytest.raises(StateLostError):
        worker.held(6)
    assert worker.held(7).num_bytes > 0


# the controller


def test_a_checkpoint_whose_states_are_lost_is_logged_and_the_next_one_is_due_at_once():
    harness = ControllerHarness(every_s=10.0).start()
    harness.now += 11.0
    assert ("vote", "checkpoint") in harness.step()
    kept = (report("w0", 7, kept=(7,)), report("w1", 7, kept=(7,)))
    assert ("collect", 7, ("w0", "w1")) in harness.step(*kept, Published((0, 7)))
    harness.step(collected(7, "w0", "w1"))
    harness.now += 1.0
    assert ("vote", "checkpoint") in harness.step(StatesLost(7, "the state of w1 was not written"))
    assert "a checkpoint was abandoned: the state of w1 was not written" in harness.log_lines


def test_a_last_round_whose_states_are_lost_is_collected_again_from_the_remaining_workers():
    harness = ControllerHarness().start()
    harness.step(*harness.end("finished", 9, "w0", "w1"), Published((0, 9)))
    assert ("collect", 9, ("w0", "w1")) in harness.step()
    harness.step(collected(9, "w0", "w1"))
    calls = harness.step(Lost("w1", DIED), StatesLost(9, "the state of w1 was not written"))
    assert ("collect", 9, ("w0",)) in calls


def test_a_worker_that_leaves_stays_until_its_state_is_written():
    harness = ControllerHarness().start().after(Draining("w0"), Draining("w1"))
    harness.step(*harness.end("regroup", 7, "w0", "w1"), Published((0, 7)))
    harness.step(HandedIn("w0", {}), HandedIn("w1", {}))
    harness.recorder.is_writing = True
    assert harness.step(collected(7, "w0", "w1")) == []
    harness.recorder.is_writing = False
    assert harness.step() == [("end", "w0"), ("end", "w1")]


def test_a_worker_requested_with_a_state_of_a_checkpoint_receives_its_place():
    harness = ControllerHarness(
        own_states={"w4": {"a": 1}, "w2": {"b": 2}, "w7": {}}, first_round=3
    )
    assert harness.worker_group.requested_states == {"w4": {"a": 1}, "w2": {"b": 2}}
    harness.step(WorkerReady("w4", "node"), WorkerReady("w2", "node"))
    assert harness.state is State.TRAINING
    assert harness.worker_group.own_states == {"w4": {"a": 1}, "w2": {"b": 2}}


# whole runs


def fit(folder, *, steps, resume=False):
    return raydl.Trainer(
        "mlp",
        "digits",
        method="sync-easgd",
        training=TrainingConfig(steps=steps),
        scaling=raydl.ScalingConfig(num_workers=2),
        checkpoint=CheckpointConfig(every_epochs=1),
        run=raydl.RunConfig(run_dir=str(folder), progress="none", resume=resume),
    ).fit()


@pytest.fixture
def pieces_of_driver(monkeypatch):
    """The names of workers' files that the driver writes itself."""
    write, names = Storage.write_pieces, []

    def write_and_note(storage, name, pieces, **options):
        names.extend([name] if "worker-" in name else [])
        return write(storage, name, pieces, **options)

    monkeypatch.setattr(Storage, "write_pieces", write_and_note)
    return names


@pytest.mark.cluster
def test_workers_that_see_the_folder_write_their_files_and_others_send_them(
    cluster, tmp_path, monkeypatch, pieces_of_driver
):
    """A run resumed from either ends with the same bits."""
    seen, unseen = tmp_path / "seen", tmp_path / "unseen"
    fit(seen, steps=40)
    shutil.copytree(seen, unseen)
    fit(seen, steps=60, resume=True)
    assert pieces_of_driver == []
    # The workers get the address of another folder, as if on another machine.
    monkeypatch.setattr(Storage, "address", str(tmp_path / "elsewhere"))
    monkeypatch.setattr("raydl.ray_backend.state_transfer.PIECE_BYTES", 10_000)
    fit(unseen, steps=60, resume=True)
    assert len(pieces_of_driver) >= 2
    assert not (tmp_path / "elsewhere").exists()
    one, other = (CheckpointStore(Storage(str(folder))).read()[0] for folder in (seen, unseen))
    assert {w: s.written for w, s in one.workers.items()} == {
        w: s.written for w, s in other.workers.items()
    }
    weights = [(folder / "center.safetensors").read_bytes() for folder in (seen, unseen)]
    assert weights[0] == weights[1]


def test_a_storage_with_a_file_system_of_its_own_has_no_address(tmp_path):
    assert Storage(str(tmp_path), filesystem=fs.LocalFileSystem()).address is None
    assert Storage("a").address == os.path.abspath("a")
    assert Storage(tmp_path.as_uri()).address == str(tmp_path)


def test_the_checksum_of_a_file_is_that_of_its_pieces(tmp_path):
    storage = Storage(str(tmp_path))
    written = storage.write_pieces(
        "a/b", [b"12", memoryview(b"345"), np.frombuffer(b"6", np.uint8)]
    )
    assert storage.read_bytes("a/b") == b"123456"
    assert written == Sum.of([b"123456"]) == Sum.of(storage.read_pieces("a/b"))
    assert storage.read_whole("a/b") == bytearray(b"123456")
