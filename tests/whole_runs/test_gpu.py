"""Runs on CUDA: the same steps and exchanges on a device."""

import dataclasses

import numpy as np
import pytest
import torch
from ensembles import SHAPE, Ensemble, linear, tiny_images

from raydl.config import (
    MethodConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.core.center import first_snapshot
from raydl.core.flat import FlatModel
from raydl.run.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def gpu_config(**scaling):
    return TrainConfig(
        method=MethodConfig(name="sync-easgd", period=2),
        training=TrainingConfig(epochs=3, batch_size=4),
        optimizer=OptimizerConfig(lr=0.1),
        scaling=ScalingConfig(num_workers=1, **scaling),
    )


@pytest.mark.parametrize("share", [1.0, 0.5])  # the center on the device, or in host memory
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_run_on_the_device_agrees_with_the_cpu(num_workers, share):
    weights = []
    for gpus in (0.0, share):
        ensemble = Ensemble(
            gpu_config(gpus_per_worker=gpus), num_workers=num_workers, images=tiny_images(24)
        )
        ensemble.join().run()
        weights.append(ensemble.newest.weights)
    np.testing.assert_allclose(*weights, rtol=1e-3, atol=1e-4)


def test_a_deterministic_run_gives_the_same_bits_on_the_device_twice():
    config = gpu_config(gpus_per_worker=0.5)
    training = dataclasses.replace(config.training, deterministic=True)
    config, weights = dataclasses.replace(config, training=training), []
    try:
        for _ in range(2):
            ensemble = Ensemble(config, num_workers=2, images=tiny_images(24))
            ensemble.join().run()
            weights.append(ensemble.newest.weights)
    finally:
        torch.use_deterministic_algorithms(False)
    assert np.array_equal(*weights)


def test_flat_storage_lives_on_the_device():
    flat = FlatModel(linear(SHAPE.input_shape, SHAPE.num_classes).cuda())
    assert flat.weights.is_cuda
    assert flat.gradients.is_cuda
    state = flat.state_dict_of(flat.weights, flat.buffers)
    assert all(not tensor.is_cuda for tensor in state.values())
    assert first_snapshot(FlatModel(linear(SHAPE.input_shape, 3)), 4).weights.dtype == np.float32


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("method", "scaling"),
    [
        ("sync-easgd", {"num_workers": 1, "gpus_per_worker": 1}),  # NCCL
        ("sync-easgd", {"num_workers": 2, "gpus_per_worker": 0.5}),  # gloo
        ("async-easgd", {"num_workers": 2, "gpus_per_worker": 0.5}),  # messages
    ],
)
def test_workers_with_a_gpu_or_a_share_of_one_learn(tmp_path, method, scaling):
    result = Trainer(
        "lenet",
        "digits",
        method=method,
        training=TrainingConfig(epochs=30),
        scaling=ScalingConfig(**scaling),
        run=RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    ).fit()
    assert result.metrics["center_accuracy"] >= 0.97
