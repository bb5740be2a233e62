"""Random numbers of a task start from the seed, and checkpoints keep the generators."""

import random

import numpy as np
import pytest
import torch
from ensembles import linear, tiny_images
from histories import History, assert_same, config

import raydl
from raydl.checkpoint.store import CheckpointStore
from raydl.checkpoint.writer import checkpoint_of, snapshot_of
from raydl.core.worker_group import Collected
from raydl.data.generators import (
    callers_generators_kept,
    generators_state,
    load_generators,
    seed_everything,
    seed_generators,
)
from raydl.run.evaluate import score_run
from raydl.storage import Storage
from raydl.tasks import Classification, build_model

CPU = torch.device("cpu")


def draws():
    return [torch.rand(1).item(), np.random.rand(), random.random(), np.random.standard_normal()]


class Noisy(Classification):
    """A task that draws from Python's and NumPy's global generators, and from torch's."""

    def __init__(self):
        super().__init__(linear)

    def loss(self, model, batch):
        return super().loss(model, batch) * (1 + sum(draws()[:3]))


def test_a_worker_draws_the_same_numbers_again_and_another_worker_draws_others():
    seed_generators(7, "w1")
    first = draws()
    seed_generators(7, "w2")
    assert not set(first) & set(draws())
    seed_generators(7, "w1")
    assert draws() == first


def test_generators_continue_from_their_state():
    seed_generators(7, "w1")
    draws()  # NumPy now has a cached normal number
    state = generators_state(CPU)
    first = draws()
    load_generators(state, CPU)
    assert draws() == first


def test_a_state_with_torchs_generator_only_is_loaded_too():
    state = {"cpu": torch.get_rng_state(), "cuda": None}
    expected = torch.rand(1)
    load_generators(state, CPU)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), np.random.rand, random.random])
def test_every_process_builds_the_same_model(draw):
    def factory(shape, num_classes):
        model = torch.nn.Linear(1, 1)
        model.drawn = float(draw())
        return model

    shape = tiny_images().shape
    one, two, other = (build_model(Classification(factory), shape, seed=s) for s in (3, 3, 4))
    assert one.drawn == two.drawn != other.drawn


def test_the_seed_of_torch_is_that_of_the_run():
    seed_everything(5)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn)


def test_a_run_and_its_score_do_not_change_the_callers_generators(tmp_path):
    path = str(tmp_path / "run")
    trainer = raydl.Trainer(
        "mlp",
        training=raydl.TrainingConfig(steps=2),
        scaling=raydl.ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir=path, progress="none"),
    )
    seed_everything(5)
    expected = draws()
    for act in (trainer.fit, lambda: score_run(path)):
        seed_everything(5)
        act()
        assert draws() == expected


def test_the_seed_of_a_gpu_that_has_not_started_stays_that_of_the_caller(monkeypatch):
    """Before CUDA starts torch remembers the newest seed for it."""
    seeds = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(5)
    with callers_generators_kept():
        seed_everything(1)
    assert seeds[-1] == 5


def test_a_resumed_run_draws_the_same_numbers_as_an_uninterrupted_one(tmp_path):
    case = config("sync-easgd", epochs=4)
    whole = History(case, task=Noisy())
    whole.train("w0", rounds=3)
    store = CheckpointStore(Storage(str(tmp_path)))
    states = {"w0": whole.workers["w0"].pop_kept(3)}
    store.write(checkpoint_of(Collected(whole.snapshot, states), whole.flat, seconds=1.0))
    whole.end("w0")

    checkpoint, _ = store.read()
    cut = History(case, task=Noisy())
    cut.snapshot = snapshot_of(checkpoint, cut.flat)
    cut.train("w0", rounds=0, states=checkpoint.workers)
    cut.end("w0")
    assert_same(cut.bits(), whole.bits())
