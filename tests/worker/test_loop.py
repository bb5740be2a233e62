"""The worker's loop: the same bits for a seed and after a resume, and decisions by vote."""

import dataclasses
import math
import os

import numpy as np
import pytest
import torch
from ensembles import Ensemble, tiny_images

from raydl.config import MethodConfig, OptimizerConfig, TrainConfig, TrainingConfig
from raydl.data import ImageSet
from raydl.errors import ConfigError, InfrastructureError, NonFiniteLossError
from raydl.worker.loop import Outcome, use_deterministic_kernels

METHODS = ["sync-easgd", "sync-measgd", "sync-sgd", "sync-msgd"]


class WithBuffer(torch.nn.Module):
    """A linear model that keeps a running mean of its inputs, as batch norm does."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.linear = torch.nn.Linear(16, num_classes)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, images):
        flat = images.flatten(1)
        if self.training:
            self.mean.mul_(0.9).add_(flat.mean(0).detach(), alpha=0.1)
        return self.linear(flat - self.mean)


def dropout(image_shape, num_classes):
    """A model whose steps draw random numbers."""
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(16, num_classes)
    )


def loop_config(method, *, lr=0.1, **training):
    training.setdefault("batch_size", 3)
    return TrainConfig(
        method=MethodConfig(name=method, period=2),
        training=TrainingConfig(**training),
        optimizer=OptimizerConfig(lr=lr),
    )


def weights_after(config, num_workers=2, model=WithBuffer):
    ensemble = Ensemble(config, num_workers=num_workers, images=tiny_images(25), model=model)
    ensemble.join().run()
    return ensemble.newest.weights


@pytest.mark.parametrize("method", METHODS)
def test_equal_seeds_give_equal_bits_and_different_seeds_do_not(method):
    first = weights_after(loop_config(method, epochs=2, seed=5))
    assert np.array_equal(first, weights_after(loop_config(method, epochs=2, seed=5)))
    assert not np.array_equal(first, weights_after(loop_config(method, epochs=2, seed=6)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_run_stopped_after_any_round_resumes_to_the_same_bits(method, num_workers):
    config = loop_config(method, epochs=2)
    images = tiny_images(25)
    # One generator serves all threads of this process, so only one worker can draw from it.
    model = dropout if num_workers == 1 else WithBuffer
    whole = Ensemble(config, num_workers=num_workers, images=images, model=model)
    whole.join().run()
    num_rounds = whole.newest.progress.round
    for stop_after in range(1, num_rounds):
        first = Ensemble(config, num_workers=num_workers, images=images, model=model).join()
        if stop_after > 1:
            first.run(stop_after - 1)
        first.workers[-1].vote(1, stop=1.0)
        assert first.run() == [Outcome.STOPPED] * num_workers
        snapshot = first.newest
        assert snapshot.progress.round == stop_after
        states = {w.worker_id: w.pop_kept(stop_after) for w in first.workers}

        second = Ensemble(config, num_workers=num_workers, images=images, model=model)
        second.join(snapshot, states).run()
        assert np.array_equal(second.newest.weights, whole.newest.weights)
        assert np.array_equal(second.newest.buffers, whole.newest.buffers)
        assert second.newest.progress.round == num_rounds


@pytest.mark.parametrize(
    ("cuda", "error", "problem"),
    [
        (
            None,
            ConfigError,
            r"gpus_per_worker requests a GPU.*w0 has no CUDA; install a CUDA build",
        ),
        ("13.0", InfrastructureError, "machine of w0 failed: torch finds no GPU"),
    ],
)
def test_a_worker_without_its_gpu_stops_the_run_only_if_torch_cannot_use_one(
    monkeypatch, cuda, error, problem
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    config = loop_config("sync-easgd", epochs=1)
    scaling = dataclasses.replace(config.scaling, gpus_per_worker=0.5)
    config = dataclasses.replace(config, scaling=scaling)
    with pytest.raises(error, match=problem):
        Ensemble(config, num_workers=1)


def test_every_sample_of_an_epoch_is_read_once_by_one_worker():
    seen = []

    class RecordingImages(ImageSet):
        def fetch(self, rows):
            seen.extend(rows.tolist())
            return super().fetch(rows)

    images = RecordingImages(**vars(tiny_images(25)))
    Ensemble(loop_config("sync-easgd", epochs=1), num_workers=3, images=images).join().run()
    assert sorted(seen) == list(range(25))


def test_all_ranks_stop_after_the_same_round_by_one_vote():
    ensemble = Ensemble(loop_config("sync-easgd", epochs=50), num_workers=3).join()
    ensemble.workers[1].vote(1, stop=1.0)
    assert ensemble.run() == [Outcome.STOPPED] * 3
    assert len({w.round for w in ensemble.workers}) == 1


def test_a_checkpoint_vote_keeps_the_state_of_one_round_on_all_ranks_and_training_continues():
    ensemble = Ensemble(loop_config("sync-easgd", epochs=50), num_workers=2).join()
    ensemble.workers[0].vote(1, checkpoint=1.0)
    assert ensemble.run(3) == [Outcome.GO_ON] * 2
    assert [w.report().kept for w in ensemble.workers] == [(1,), (1,)]
    assert 1 in ensemble.published


def test_a_vote_of_the_last_generation_is_ignored():
    ensemble = Ensemble(loop_config("sync-easgd", epochs=50), num_workers=2)
    for worker in ensemble.workers:
        worker.vote(0, regroup=1.0)
    assert ensemble.join().run(2) == [Outcome.GO_ON] * 2


def test_a_vote_that_arrives_before_the_request_to_join_still_counts():
    ensemble = Ensemble(loop_config("sync-easgd", epochs=50), num_workers=2)
    ensemble.workers[1].vote(1, stop=1.0)
    assert ensemble.join().run(2) == [Outcome.STOPPED] * 2


def test_a_limit_of_steps_ends_the_run():
    ensemble = Ensemble(loop_config("sync-easgd", steps=5), num_workers=2).join()
    assert ensemble.run() == [Outcome.FINISHED] * 2
    assert [w.local_step for w in ensemble.workers] == [5, 5]
    assert ensemble.newest.progress.round == 3  # two rounds of two steps and one of one step


def test_records_add_up_to_the_samples_of_the_run():
    ensemble = Ensemble(loop_config("sync-easgd", epochs=2), num_workers=2).join()
    ensemble.run()
    records = ensemble.workers[0].report().records
    assert records[-1].progress.num_samples == 48
    assert records[-1].progress.epoch == 2.0
    assert all(r.num_workers == 2 for r in records)


def test_a_nan_loss_names_worker_and_step():
    ensemble = Ensemble(loop_config("sync-easgd", epochs=5), num_workers=1).join()
    ensemble.run(1)
    ensemble.workers[0].replica.flat.weights.fill_(float("nan"))
    with pytest.raises(NonFiniteLossError, match="nan at local step 2 of worker w0; lower"):
        ensemble.run()


def test_a_nan_loss_in_the_step_of_an_exchange_leaves_the_round_settled(monkeypatch):
    """The exchange sent the weights before that step, and has moved the center."""
    ensemble = Ensemble(loop_config("sync-easgd", epochs=5), num_workers=1).join()
    ensemble.run(1)
    (worker,) = ensemble.workers
    replica, losses = worker.replica, iter([1.0, math.nan])
    gradient = replica._own_gradient
    monkeypatch.setattr(replica, "_own_gradient", lambda batch: gradient(batch) * next(losses))
    with pytest.raises(NonFiniteLossError, match="nan at local step 3 of worker w0"):
        ensemble.run(1)
    center = worker.center()
    assert (center.progress.round, center.progress.num_samples) == (2, 12)
    assert torch.equal(replica.flat.weights, torch.tensor(center.weights))


def test_states_that_a_worker_keeps_for_checkpoints_do_not_pile_up():
    """A vote that a change of the members voids leads to no collection."""
    ensemble = Ensemble(loop_config("sync-easgd", epochs=50), num_workers=1).join()
    (worker,) = ensemble.workers
    for _ in range(6):
        worker.vote(1, checkpoint=1.0)
        ensemble.run(1)
    assert list(worker._kept) == [4, 5, 6]


def test_more_workers_than_samples_still_complete_the_epoch():
    images = tiny_images(2)
    few = ImageSet(images.images, images.labels, images.class_names)
    ensemble = Ensemble(loop_config("sync-easgd", epochs=3), num_workers=3, images=few).join()
    assert ensemble.run() == [Outcome.FINISHED] * 3
    assert ensemble.newest.progress.num_samples == 6


def test_kernels_whose_results_vary_are_refused(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        use_deterministic_kernels()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
