"""Runs on CUDA: the same steps and exchanges on a device."""

import dataclasses
import os
import re
from unittest import mock

import numpy as np
import pytest
import torch
from clusters import ClusterRun, actor_pids, start_cluster
from ensembles import SHAPE, Ensemble, linear, tiny_images

from raydl.config import (
    ExchangeConfig,
    MethodConfig,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.core.center import first_snapshot
from raydl.core.flat import FlatModel
from raydl.core.reports import Outcome
from raydl.methods import METHODS

pytestmark = pytest.mark.gpu

NUM_TRAIN = 1438


def gpu_config(method="sync-easgd", *, gpus=1.0, exchange=None, period=2, **training):
    training = {"epochs": 3, "batch_size": 4, **training}
    return TrainConfig(
        method=MethodConfig(name=method, period=period),
        training=TrainingConfig(**training),
        optimizer=OptimizerConfig(lr=0.1),
        scaling=ScalingConfig(num_workers=1, gpus_per_worker=gpus),
        exchange=exchange or ExchangeConfig(),
    )


def weights_after(config, *, num_workers=1, model=linear):
    ensemble = Ensemble(config, num_workers=num_workers, images=tiny_images(24), model=model)
    assert ensemble.join().run() == [Outcome.FINISHED] * num_workers
    return ensemble.center().weights


def on_cpu(config):
    return dataclasses.replace(
        config, scaling=dataclasses.replace(config.scaling, gpus_per_worker=0.0)
    )


# whole runs in this process; with a share of a GPU, exchanges are in host memory

SHARES = [1.0, 0.5]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_on_the_device_agrees_with_the_cpu(method, share):
    # Messages of several workers have no fixed order, sums have.
    num_workers = 2 if METHODS[method].strategy == "sync" else 1
    config = gpu_config(method, gpus=share)
    weights = [weights_after(c, num_workers=num_workers) for c in (on_cpu(config), config)]
    np.testing.assert_allclose(*weights, rtol=1e-3, atol=1e-4)


EXCHANGES = {
    "fragments": {"fragments": 2},
    "delay": {"fragments": 2, "delay": 1},
    "bf16": {"compression": "bf16"},
    "int8": {"compression": "int8"},
    "shards": {"center_shards": 2},
    "not packed": {"packed": False},
    "not overlapped": {"overlap": False},
    "not resident": {"resident": False},
}


BY_SUMS, BY_MESSAGES = ("sync-easgd", "diloco"), ("async-easgd", "async-diloco")
NOT_FOR = ("sync-easgd", "shards"), ("diloco", "shards"), ("diloco", "not overlapped")
FORMS = [
    *((m, name) for m in BY_SUMS for name in EXCHANGES if (m, name) not in NOT_FOR),
    *((m, name) for m in BY_MESSAGES for name in EXCHANGES if "not" not in name),
]


@pytest.mark.parametrize(("method", "name"), FORMS)
def test_every_form_of_exchange_on_the_device_agrees_with_the_cpu(method, name):
    is_sync = METHODS[method].strategy == "sync"
    config = gpu_config(method, exchange=ExchangeConfig(**EXCHANGES[name]), period=4)
    weights = [weights_after(c, num_workers=1 + is_sync) for c in (on_cpu(config), config)]
    np.testing.assert_allclose(*weights, rtol=1e-3, atol=1e-3 if name == "int8" else 1e-4)


def test_bf16_on_the_device_stays_near_float32():
    weights = [weights_after(gpu_config(precision=p)) for p in ("float32", "bf16")]
    np.testing.assert_allclose(*weights, rtol=0.05, atol=0.02)
    assert not np.array_equal(*weights)


def dropout(image_shape, num_classes):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(16, num_classes)
    )


@pytest.fixture
def kernels_restored(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)


def test_a_deterministic_run_gives_the_same_bits_on_the_device_twice(kernels_restored):
    config = gpu_config(gpus=0.5, deterministic=True)
    weights = [weights_after(config, num_workers=2) for _ in range(2)]
    assert np.array_equal(*weights)


@pytest.mark.parametrize("share", SHARES)
def test_a_run_on_the_device_that_is_stopped_resumes_to_the_same_bits(kernels_restored, share):
    config = gpu_config(gpus=share, deterministic=True)
    images = tiny_images(24)
    whole = Ensemble(config, num_workers=1, images=images, model=dropout).join()
    whole.run()
    first = Ensemble(config, num_workers=1, images=images, model=dropout).join()
    first.run(3)
    first.workers[0].vote(1, stop=1.0)
    assert first.run() == [Outcome.STOPPED]
    states = {w.worker_id: w.pop_kept(4) for w in first.workers}
    second = Ensemble(config, num_workers=1, images=images, model=dropout)
    second.join(first.newest, states).run()
    assert np.array_equal(second.newest.weights, whole.newest.weights)


def test_flat_storage_lives_on_the_device():
    flat = FlatModel(linear(SHAPE.input_shape, SHAPE.num_classes).cuda())
    assert flat.weights.is_cuda
    assert flat.gradients.is_cuda
    state = flat.state_dict_of(flat.weights, flat.buffers)
    assert all(not tensor.is_cuda for tensor in state.values())
    assert first_snapshot(FlatModel(linear(SHAPE.input_shape, 3)), 4).weights.dtype == np.float32


# runs on Ray


@pytest.fixture(scope="module")
def gpu_cluster():
    """A cluster that knows of four GPUs, which are all the first one of this machine."""
    environment = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    with mock.patch.dict(os.environ, environment), start_cluster(4) as cluster:
        cluster.add_node(num_cpus=8, num_gpus=4)
        yield cluster


def options(method, *, workers, gpus, epochs):
    return (
        "--data", "digits", "--model", "one_gpu:lenet", "--method", method, "--epochs", str(epochs),
        "--workers", workers, "--gpus-per-worker", str(gpus), "--cpus-per-worker", "1",
        "--evaluation.every-epochs", "10",
    )  # fmt: skip


def check_end(run, *, epochs, faults=0):
    run.wait()
    assert len(run.result["faults_fired"]) == faults, run.output
    assert run.result["samples"] == epochs * NUM_TRAIN
    assert run.result["center_accuracy"] >= 0.97


ON_RAY = [
    ("sync-easgd", "1", 1.0),  # NCCL
    ("sync-easgd", "2", 1.0),
    ("diloco", "3", 1.0),
    ("sync-easgd", "2", 0.5),  # gloo
    ("async-easgd", "2", 0.5),  # messages
    ("hogwild-easgd", "2", 1.0),
]


@pytest.mark.cluster
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("method", "workers", "gpus"), ON_RAY)
def test_workers_with_a_gpu_or_a_share_of_one_learn(gpu_cluster, tmp_path, method, workers, gpus):
    words = options(method, workers=workers, gpus=gpus, epochs=40)
    with ClusterRun(gpu_cluster, tmp_path / "run", *words) as run:
        check_end(run, epochs=40)
        assert run.result["generations"] == 1, run.output


@pytest.mark.cluster
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("method", "gpus"), [("sync-easgd", 1.0), ("sync-easgd", 0.3), ("async-easgd", 0.3)]
)
def test_a_run_on_gpus_goes_on_after_workers_and_center_are_killed(
    gpu_cluster, tmp_path, method, gpus
):
    scale = 1 if method == "sync-easgd" else 3  # by messages each exchange is a round
    faults = [
        {"fault": "kill", "target": target, "at": f"round {scale * at}"}
        for target, at in (("rank 1", 20), ("center", 60), ("rank 0", 90))
    ]
    words = (*options(method, workers="2:3", gpus=gpus, epochs=100), "--period", "4")
    with ClusterRun(gpu_cluster, tmp_path / "run", *words, faults=faults) as run:
        check_end(run, epochs=100, faults=3)
        assert run.output.count("center was lost") == 1


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_a_halted_worker_on_a_gpu_is_left_out(gpu_cluster, tmp_path):
    faults = [{"fault": "stop", "target": "rank 1", "at": "round 60"}]
    words = options("sync-easgd", workers="2:3", gpus=1.0, epochs=9999)
    words = (*words, "--period", "4", "--exchange.timeout-s", "8")
    with ClusterRun(gpu_cluster, tmp_path / "run", *words, faults=faults) as run:
        run.until_logged("fault 1: stop")
        run.until(lambda: "generation 2: " in run.output)
        run.until_training(3)
        assert len(actor_pids(gpu_cluster, "WorkerActor")) >= 3


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_a_spare_with_a_gpu_replaces_a_killed_worker(gpu_cluster, tmp_path):
    faults = [{"fault": "kill", "target": "rank 1", "at": "round 60"}]
    words = options("sync-easgd", workers="2", gpus=1.0, epochs=100)
    words = (*words, "--period", "4", "--spares", "1")
    with ClusterRun(gpu_cluster, tmp_path / "run", *words, faults=faults) as run:
        check_end(run, epochs=100, faults=1)
        assert re.search(r"generation 2: w\d was lost, w2 joins", run.output), run.output
