"""The center of a model with batch normalization has statistics for its evaluation."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from ensembles import Ensemble, tiny_images
from torch import nn

from raydl.config import MethodConfig, OptimizerConfig, TrainConfig, TrainingConfig
from raydl.core.flat import FlatModel
from raydl.core.membership import Membership
from raydl.data import Batches, Normalizer, load
from raydl.errors import ExchangeError
from raydl.tasks import Classification, evaluate
from raydl.worker.in_process import LocalGroup


def normed(input_shape, num_classes):
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, num_classes),
    )


def center_scores(data, method, period, num_workers):
    """Return the test metrics of the center after some epochs, with and without its buffers."""
    config = TrainConfig(
        method=MethodConfig(name=method, period=period),
        training=TrainingConfig(epochs=8, batch_size=16),
        optimizer=OptimizerConfig(lr=0.05),
    )
    ensemble = Ensemble(config, num_workers=num_workers, images=data.train, model=normed)
    ensemble.join().run()
    center, task = ensemble.center(), Classification(normed)
    model = normed(data.train.image_shape, data.train.num_classes)
    fresh = FlatModel(model).buffers.clone()
    test = Batches(data.test, Normalizer.of(data.train))
    scores = []
    for buffers in (torch.tensor(center.buffers), fresh):
        flat = FlatModel(model)
        flat.weights.copy_(torch.tensor(center.weights))
        flat.buffers.copy_(buffers)
        scores.append(
            evaluate(
                task,
                model,
                lambda start, stop: test.batch(np.arange(start, stop)),
                num_samples=test.num_samples,
                batch_size=100,
            )
        )
    return scores


@pytest.mark.parametrize(
    ("method", "period"),
    [("sync-easgd", 4), ("sync-sgd", 1), ("async-easgd", 4), ("local-sgd", 4)],
)
def test_the_center_scores_like_the_center_of_a_single_worker(method, period):
    data = load("synthetic:384x1x12x12x4", seed=1)
    (alone, _), (together, without) = (center_scores(data, method, period, p) for p in (1, 3))
    assert alone["accuracy"] > 0.9
    assert together["accuracy"] == pytest.approx(alone["accuracy"], abs=0.06)
    assert without["loss"] > together["loss"] + 0.1, "the statistics do not affect the loss"


def partners_after_a_broken_round():
    """Return two workers that share a replica, regrouped after an unfinished round."""
    config = TrainConfig(
        method=MethodConfig(name="sync-easgd", period=3, group_size=2),
        training=TrainingConfig(epochs=1, batch_size=4),
        optimizer=OptimizerConfig(lr=0.1),
    )
    ensemble = Ensemble(config, num_workers=2, images=tiny_images(48), model=normed).join()
    for worker in ensemble.workers:
        worker.runner.strategy.exchanges[0].wait = fail_round
    with pytest.raises(ExchangeError):
        ensemble.run(1)
    before = [worker.replica.flat.buffers.clone() for worker in ensemble.workers]
    snapshot = ensemble.workers[0].center()
    groups = [LocalGroup(2, timeout_s=30.0, generation=2) for _ in range(2)]

    def join(rank):
        connections = [group.member(rank) for group in groups]
        ensemble.workers[rank].join(
            Membership(2, ("w0", "w1")), connections[0], snapshot, None, connections[1]
        )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(join, range(2)))
    return ensemble, before


def fail_round():
    raise ExchangeError(0, 1, "reset")


def test_partners_with_different_statistics_train_no_sample_again():
    """24 of 48 samples are trained when the round fails; they are not trained again."""
    ensemble, _ = partners_after_a_broken_round()
    seen = []
    for worker in ensemble.workers:
        batch = worker._feed.batch

        def note(epoch, positions, batch=batch):
            seen.extend(int(p) for p in positions)
            return batch(epoch, positions)

        worker._feed.batch = note
    ensemble.run()
    assert len(set(seen)) == len(seen) == 24


def test_partners_continue_with_the_statistics_of_the_first():
    ensemble, before = partners_after_a_broken_round()
    assert not torch.equal(*before)
    for worker in ensemble.workers:
        assert torch.equal(worker.replica.flat.buffers, before[0])
