"""The state of a worker that leaves goes to its replacement through a file, not the driver."""

import os
import threading

import pytest
import torch
from clusters import ClusterRun, actor_pids
from ensembles import Ensemble, tiny_images
from programs import run_program

from raydl.checkpoint.store import CheckpointStore
from raydl.config import MethodConfig, OptimizerConfig, TrainConfig, TrainingConfig
from raydl.core.saved_state import SavedState, pack, unpack
from raydl.errors import StateLostError
from raydl.ray_backend.state_transfer import Handovers
from raydl.storage import Storage
from raydl.worker.loop import LAST

# the file


class FakeLeaver:
    """A leaver in another process, played by the test."""

    worker_id = "w1"

    def __init__(self, state, *, problem=None):
        self.state, self.problem = state, problem

    def begin_write(self, storage, name, token):
        assert storage.exists(token), "the token by which another machine recognizes a shared disk"
        self.storage, self.name = storage, name
        return self

    def wait(self):
        if self.problem:
            self.storage.write_bytes(self.name, b"a part of it")
            raise self.problem
        return self.storage.write_pieces(self.name, pack(self.state).pieces())


def hand_in(handovers, leaver):
    """Hand in the state of a leaver; return the reported result."""
    results, is_reported = [], threading.Event()
    handovers.keep(leaver, lambda result: (results.append(result), is_reported.set()))
    assert is_reported.wait(20)
    return results[0]


def files_in(folder):
    return sorted(os.listdir(folder / "handovers"))


def test_the_file_of_a_leaver_exists_until_it_is_forgotten(tmp_path):
    handovers = Handovers(Storage(str(tmp_path)), "a1")
    saved = hand_in(handovers, FakeLeaver({"weights": torch.arange(5.0)}))
    assert isinstance(saved, SavedState)
    assert saved.load()["weights"].tolist() == [0, 1, 2, 3, 4]
    assert [f"handovers/{name}" for name in files_in(tmp_path)] == [saved.name], (
        "the token is deleted"
    )
    handovers.forget(saved)
    handovers.clear(all=True).join(20)
    assert not (tmp_path / "handovers").exists()


LOSSES = [StateLostError("w1", "its process was killed"), OSError("no space left on device")]


@pytest.mark.parametrize("problem", LOSSES, ids=["the leaver is lost", "the disk is full"])
def test_a_failed_write_is_reported_and_leaves_no_file(tmp_path, problem):
    assert (
        hand_in(Handovers(Storage(str(tmp_path)), "a1"), FakeLeaver({}, problem=problem)) is problem
    )
    assert files_in(tmp_path) == []


def test_a_start_deletes_the_files_of_earlier_starts_but_not_its_own(tmp_path):
    storage = Storage(str(tmp_path))
    left = hand_in(Handovers(storage, "a1"), FakeLeaver({}))
    now = Handovers(storage, "b2")
    saved = hand_in(now, FakeLeaver({}))
    now.clear().join(20)
    assert [f"handovers/{name}" for name in files_in(tmp_path)] == [saved.name] != [left.name]


# the worker


def workers_of(rounds):
    config = TrainConfig(
        method=MethodConfig(name="sync-easgd", period=2),
        training=TrainingConfig(epochs=50, batch_size=4),
        optimizer=OptimizerConfig(momentum=0.9),
    )
    ensemble = Ensemble(config, num_workers=1, images=tiny_images(16)).join()
    ensemble.run(rounds=rounds)
    return ensemble.workers[0]


def test_a_leaver_keeps_its_replica_without_a_copy():
    worker = workers_of(rounds=3)
    worker.hold_last()
    held = b"".join(worker.held(LAST).pieces())
    assert held == b"".join(pack(worker.pop_kept(3)).pieces()), (
        "the held bytes are the whole replica"
    )
    worker.replica.flat.weights.add_(1.0)
    replica = unpack(bytearray(b"".join(worker.held(LAST).pieces())))["replica"]
    assert torch.equal(replica["weights"], worker.replica.flat.weights), (
        "the replica itself, not a copy"
    )


def test_the_replica_of_a_leaver_outlives_later_checkpoints():
    worker = workers_of(rounds=1)
    worker.hold_last()
    for round in (5, 6, 7):
        worker.hold_kept(round)
    assert worker.held(LAST).num_bytes > 0
    with pytest.raises(StateLostError):
        worker.held(5)


# on Ray

_OTHER_FOLDER = """
import sys
from raydl.ray_backend import state_transfer
from raydl.storage import Storage
from raydl.cli import main

# Workers see another folder, like the disk of another machine, so the driver transfers the state.
Storage.address, state_transfer.PIECE_BYTES = sys.argv.pop(1), 10_000
sys.exit(main())
"""


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("method", "is_blind"),
    [("sync-easgd", False), ("async-easgd", True)],
    ids=["rounds, seen", "messages, unseen"],
)
def test_a_replacement_continues_with_the_replica_of_the_leaver(
    four_cpus, tmp_path, method, is_blind
):
    options = ["--model", "origins:model", "--epochs", "99999", "--period", "4", "--workers", "2"]
    program = ["-c", _OTHER_FOLDER, str(tmp_path / "elsewhere")] if is_blind else ["-m", "raydl"]
    options += ["--method", method]
    with ClusterRun(four_cpus, tmp_path / "run", *options, program=program) as run:
        run.until_training(2)
        before = set(actor_pids(four_cpus, "WorkerActor"))
        run_program(["-m", "raydl", "remove", str(run.path), "w1"], timeout=60).check_returncode()
        run.until_logged("w2 joins")
        run.until_training(2)
        run.until(lambda: before - set(actor_pids(four_cpus, "WorkerActor")))
        (leaver,) = before - set(actor_pids(four_cpus, "WorkerActor"))
        run.process.terminate()
        assert run.process.wait(timeout=100) == 143, run.output
    assert "starts from the center" not in run.output
    assert "was lost" not in run.output
    assert not (run.path / "handovers").exists()
    assert not (tmp_path / "elsewhere").exists()
    states = CheckpointStore(Storage(str(run.path))).read()[0].workers
    assert int(states["w2"].load()["replica"]["untrained"]["process"]) == leaver
