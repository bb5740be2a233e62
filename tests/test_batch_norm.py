"""The center of a net with batch normalisation has statistics that it can be scored with."""

import numpy as np
import pytest
import torch
from conftest import Ensemble
from torch import nn

from raydl.config import MethodConfig, OptimizerConfig, TrainConfig, TrainingConfig
from raydl.data import Batches, Normalizer, load
from raydl.flat import FlatModel
from raydl.task import Classification, evaluate


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
    """Return the test metrics of the center after some epochs, and of it without its buffers."""
    config = TrainConfig(
        method=MethodConfig(name=method, period=period),
        training=TrainingConfig(epochs=12, batch_size=16),
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
def test_the_center_scores_as_that_of_a_single_worker_does(method, period):
    data = load("synthetic:384x1x12x12x4", seed=1)
    (alone, _), (together, without) = (center_scores(data, method, period, p) for p in (1, 3))
    assert alone["accuracy"] > 0.9
    assert together["accuracy"] == pytest.approx(alone["accuracy"], abs=0.06)
    assert without["loss"] > together["loss"] + 0.1, "the statistics would not have mattered"
