"""Every method over Ray: the scenario of ``test_methods.py`` with real actors."""

import dataclasses
import os
import uuid

import numpy as np
import pytest
import ray
import torch
from ensembles import SHAPE, Ensemble, linear, tiny_images
from message_jobs import wait_for
from processes import resident_bytes

from raydl.collective.ray_collective import GroupAddress
from raydl.config import (
    ExchangeConfig,
    MethodConfig,
    OptimizerConfig,
    ParamGroup,
    TrainConfig,
    TrainingConfig,
)
from raydl.core.job import Job
from raydl.core.membership import Membership
from raydl.core.reports import Outcome
from raydl.data import Normalizer
from raydl.methods import METHODS, resolve
from raydl.ray_backend.actors import CenterActor, ShardActor, WorkerActor
from raydl.tasks import Classification

NUM_WORKERS = 2
IMAGES = tiny_images(31)

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def actors(cluster):
    """Return one center and two workers; each method sets them up anew."""
    center = CenterActor.options(max_concurrency=8).remote()
    workers = [WorkerActor.options(num_cpus=0).remote() for _ in range(NUM_WORKERS)]
    yield center, workers
    for actor in (center, *workers):
        ray.kill(actor)


def ray_config(method, **exchange):
    return TrainConfig(
        method=MethodConfig(name=method, period=4),
        training=TrainingConfig(epochs=4, batch_size=3),
        optimizer=OptimizerConfig(lr=0.05, lr_schedule="constant", warmup=0.0),
        exchange=ExchangeConfig(timeout_s=20.0, **exchange),
    )


def train(actors, config, generation=1):
    """Train to the end; return the last snapshot of the center."""
    center, workers = actors
    first = Ensemble(config, num_workers=0, images=IMAGES).first
    job = Job(
        config, resolve(config), Classification(linear), SHAPE, IMAGES.order(config.training.seed)
    )
    others = [
        ShardActor.options(max_concurrency=4).remote(job, first, i)
        for i in range(1, config.exchange.center_shards)
    ]
    ray.get(center.start_center.remote(job, first, others), timeout=120)
    normalizer = Normalizer.of(IMAGES)
    shards = [center, *others]
    ray.get(
        [w.setup.remote(job, f"w{i}", IMAGES, normalizer, {}) for i, w in enumerate(workers)],
        timeout=120,
    )
    membership = Membership(generation, tuple(f"w{i}" for i in range(NUM_WORKERS)))
    if not job.method.is_sync:
        ray.get(center.form.remote(membership), timeout=60)
    address = GroupAddress(uuid.uuid4().hex, generation, "cpu", 20.0)
    runs = [w.run.remote(membership, address, first, shards, (), goes_on=False) for w in workers]
    ends = ray.get(runs, timeout=120)
    assert [end.outcome for end in ends] == [Outcome.FINISHED] * NUM_WORKERS
    last = max(end.round for end in ends)
    wait_for(  # workers do not wait until the snapshot has arrived
        lambda: last in ray.get(center.poll.remote(), timeout=60).rounds
    )
    return ray.get(center.newest.remote(), timeout=60)


def check_center(config, snapshot):
    ensemble = Ensemble(config, num_workers=NUM_WORKERS, images=IMAGES)
    batch = ensemble.batches.batch(np.arange(31))

    def loss(weights):
        ensemble.flat.weights.copy_(torch.tensor(weights))
        return ensemble.job.task.loss(ensemble.flat.model, batch).item()

    assert snapshot.progress.num_samples == 4 * 31
    assert snapshot.is_kept
    assert loss(snapshot.weights) < loss(ensemble.first.weights)


@pytest.mark.parametrize(
    "method",
    [
        "original-easgd", "async-easgd", "hogwild-easgd", "async-msgd", "hogwild-sgd",
        "async-diloco", "sync-easgd", "sync-sgd", "diloco", "sparse-loco", "scaffold", "des-loc",
        "demo", "cgad",
    ],
)  # fmt: skip
def test_methods_of_every_kind_train_among_actors_and_counts_every_sample(actors, method):
    config = ray_config(method)
    snapshot = train(actors, config)
    check_center(config, snapshot)
    if METHODS[method].strategy in ("sync", "round_robin"):
        # Order and sums are the same as among threads, and with two workers so are the bits.
        threads = Ensemble(config, num_workers=NUM_WORKERS, images=IMAGES).join()
        threads.run()
        assert np.array_equal(snapshot.weights, threads.center().weights)


@pytest.mark.parametrize("method", ["sync-easgd", "diloco"])
def test_every_sample_counts_when_actors_share_the_steps_by_speed(actors, method):
    config = ray_config(method)
    by_speed = dataclasses.replace(config.method, steps_by_speed=True)
    config = dataclasses.replace(config, method=by_speed)
    check_center(config, train(actors, config))


@pytest.mark.parametrize(
    ("method", "exchange"),
    [
        ("async-measgd", {"center_shards": 3, "fragments": 2, "delay": 1}),
        ("hogwild-msgd", {"center_shards": 2}),
        ("diloco", {"fragments": 2, "delay": 1, "compression": "int8"}),
        ("async-sgd", {"compression": "bf16", "center_shards": 2}),
        ("sync-easgd", {"allreduce": "auto"}),
        ("sync-sgd", {"allreduce": "recursive-doubling"}),
        ("sync-easgd", {"packed": False, "resident": False, "overlap": False}),
    ],
)
def test_settings_of_the_exchange_apply_among_actors(actors, method, exchange):
    config = ray_config(method, **exchange)
    check_center(config, train(actors, config))


def test_a_parameter_group_with_scale_0_does_not_change_among_actors(actors):
    config = ray_config("sync-sgd")
    frozen = (ParamGroup(pattern="1.bias", lr_scale=0.0),)
    optimizer = dataclasses.replace(config.optimizer, param_groups=frozen)
    config = dataclasses.replace(config, optimizer=optimizer)
    snapshot = train(actors, config)
    check_center(config, snapshot)
    first = Ensemble(config, num_workers=0, images=IMAGES).first
    assert np.array_equal(snapshot.weights[-3:], first.weights[-3:])
    assert not np.array_equal(snapshot.weights[:-3], first.weights[:-3])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sync-easgd", "hogwild-sgd"])
def test_ten_thousand_exchanges_do_not_grow_any_process(actors, method):
    center, workers = actors

    def exchanges(count):
        config = ray_config(method)
        config = dataclasses.replace(
            config,
            method=dataclasses.replace(config.method, period=1),
            training=TrainingConfig(steps=count // NUM_WORKERS, batch_size=1),
        )
        train(actors, config)
        return [resident_bytes(ray.get(a.__ray_call__.remote(pid_of))) for a in (center, *workers)]

    before = exchanges(1000)
    after = exchanges(10_000)
    for first, last in zip(before, after, strict=True):
        assert last - first < 20_000_000


def pid_of(actor):
    return os.getpid()
