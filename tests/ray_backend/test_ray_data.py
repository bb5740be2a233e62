"""A ``ray.data.Dataset`` as training data: each row once, by blocks, up to a trained model."""

import numpy as np
import pytest
import ray.data
import torch
from torch.nn import functional

import raydl
from raydl.config import InputConfig, OptimizerConfig, RunConfig, ScalingConfig, TrainingConfig
from raydl.data.datasets import load_each
from raydl.errors import DataError
from raydl.ray_backend.ray_data import RayBlocks

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),  # warnings of Ray Data itself
]


class LineFit:
    """A custom task over the columns of a table: y from x by least squares."""

    name = "line"

    def build_model(self, shape):
        return torch.nn.Linear(shape.columns["x"][0], 1)

    def loss(self, model, batch):
        return functional.mse_loss(model(batch["x"])[:, 0], batch["y"])

    def metrics(self, model, batch):
        return {"loss": functional.mse_loss(model(batch["x"])[:, 0], batch["y"], reduction="sum")}


def table(count):
    x = np.random.default_rng(0).normal(size=(count, 3))
    rows = [{"x": row.tolist(), "y": float(row.sum()), "n": n} for n, row in enumerate(x)]
    return ray.data.from_items(rows, override_num_blocks=6)


def loaded(data):
    return load_each(data, RayBlocks, seed=0, input=InputConfig(stream="always"), task="auto")


def test_blocks_are_row_groups_and_every_row_is_in_one(cluster):
    data = loaded(table(60))
    assert (data.train.num_samples, data.test.num_samples) == (50, 10)
    rows = [part.fetch(np.arange(part.num_samples))["n"] for part in (data.train, data.test)]
    assert sorted(torch.cat(rows).tolist()) == list(range(60))
    assert len(data.train.order(0).cuts(0)) <= 5


def test_pictures_may_be_tensors(cluster):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 4, 4, 3), dtype=np.uint8)
    rows = [{"image": p, "label": n % 4} for n, p in enumerate(pixels)]
    data = ray.data.from_items(rows, override_num_blocks=4)
    found = loaded({"train": data, "test": data}).train
    assert (found.shape.input_shape, found.shape.num_classes) == ((3, 4, 4), 4)
    pictures, labels = found.fetch(np.arange(20))
    assert np.array_equal(pictures.numpy().transpose(0, 2, 3, 1), pixels)
    assert labels.tolist() == [n % 4 for n in range(20)]


def test_pictures_may_have_their_channels_first_as_from_torchvision(cluster):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3, 8, 10), dtype=np.uint8)
    rows = [{"image": p, "label": n % 2} for n, p in enumerate(pixels)]
    data = ray.data.from_items(rows, override_num_blocks=4)
    found = loaded({"train": data, "test": data}).train
    assert found.shape.input_shape == (3, 8, 10)
    assert np.array_equal(found.fetch(np.arange(20))[0].numpy(), pixels)


def test_an_empty_dataset_is_reported_in_one_sentence(cluster):
    empty = table(20).limit(0)
    with pytest.raises(DataError, match=r"ray.data.Dataset: holds no rows"):
        loaded(empty)


def test_a_custom_task_learns_from_a_ray_dataset(cluster, tmp_path):
    result = raydl.Trainer(
        LineFit(),
        table(600),
        training=TrainingConfig(epochs=10, batch_size=10),
        optimizer=OptimizerConfig(lr=0.1),
        scaling=ScalingConfig(num_workers=2),
        run=RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    ).fit()
    assert result.metrics["samples"] == 10 * 500
    assert result.metrics["center_loss"] < 0.01
    assert result.metrics["center_accuracy"] is None
