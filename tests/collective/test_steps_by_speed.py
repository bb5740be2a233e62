"""Slower workers take fewer local steps in a synchronous round."""

import threading
import time
from collections import defaultdict

import numpy as np
import pytest
from ensembles import Ensemble, tiny_images

from raydl.collective.steps_by_speed import EVERY, StepsBySpeed, steps_by_speed
from raydl.config import (
    ExchangeConfig,
    MethodConfig,
    OptimizerConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.core.reports import Outcome
from raydl.errors import ConfigError, ExchangeError
from raydl.methods import resolve
from raydl.metrics import TimeParts
from raydl.worker.in_process import LocalGroup
from raydl.worker.loop import Worker

NUM_SAMPLES, EPOCHS = 101, 2
STEP_S = (0.01, 0.03, 0.011)
"""Seconds per local step of each worker."""


@pytest.mark.parametrize(
    ("step_s", "steps"),
    [
        ((0.01, 0.01), (10, 10)),
        ((0.01, 0.03), (10, 3)),
        ((0.02, 0.01, 0.04), (5, 10, 2)),
        ((0.001, 1.0), (10, 1)),
        ((0.0, 0.03, 0.01), (10, 3, 10)),
        ((0.0, 0.0), (10, 10)),
    ],
)
def test_the_fastest_worker_takes_a_full_period_and_the_others_the_steps_that_fit_its_time(
    step_s, steps
):
    assert steps_by_speed(step_s, period=10) == steps


def test_all_ranks_change_the_steps_in_the_same_round_and_follow_a_changed_speed(pool):
    group = LocalGroup(2, timeout_s=30.0)

    def run(rank):
        speeds = StepsBySpeed(group.member(rank), rank, period=10, time_parts=TimeParts())
        steps = []
        for round in range(4 * EVERY):
            is_slow = rank == 1 and round <= 2 * EVERY
            speeds.update(0.0 if round == 0 else 0.04 if is_slow else 0.01, round=round)
            steps.append(speeds.steps)
        return steps

    first, second = pool.map(run, range(2))
    assert first == second
    assert first[0] == (10, 10), "no speed is known yet"
    assert first[1 : 3 * EVERY] == [(10, 2)] * (3 * EVERY - 1)
    assert first[3 * EVERY :] == [(10, 10)] * EVERY


def test_a_worker_that_rejoins_keeps_its_measured_speed(pool):
    group = LocalGroup(2, timeout_s=30.0)

    def first_steps(rank):
        speeds = StepsBySpeed(group.member(rank), rank, period=10, time_parts=TimeParts())
        speeds.update((0.01, 0.05)[rank], round=0)
        return speeds.steps

    assert list(pool.map(first_steps, range(2))) == [(10, 2)] * 2


def test_a_round_fails_if_a_worker_misses_the_comparison_of_speeds():
    group = LocalGroup(2, timeout_s=0.05)
    speeds = StepsBySpeed(group.member(0), 0, period=10, time_parts=TimeParts())
    with pytest.raises(ExchangeError):
        speeds.update(0.01, round=0)
    assert speeds.steps == (10, 10)


def speed_config(method, **exchange):
    return TrainConfig(
        method=MethodConfig(name=method, period=6, steps_by_speed=True),
        training=TrainingConfig(epochs=EPOCHS, batch_size=2),
        optimizer=OptimizerConfig(lr=0.05),
        exchange=ExchangeConfig(**exchange),
    )


@pytest.fixture
def trained(monkeypatch):
    """Return a function for the positions that workers with the speeds STEP_S train, by epoch."""
    real, lock = StepsBySpeed.update, threading.Lock()
    by_worker = defaultdict(lambda: defaultdict(list))

    def update(self, step_s, *, round):
        real(self, STEP_S[self._rank] if step_s else 0.0, round=round)

    def step(self, epoch, positions, plan, take=Worker._step):
        with lock:
            by_worker[self.worker_id][epoch].append(positions)
        return take(self, epoch, positions, plan)

    monkeypatch.setattr(StepsBySpeed, "update", update)
    monkeypatch.setattr(Worker, "_step", step)
    return by_worker


@pytest.mark.parametrize(
    ("method", "exchange"),
    [
        ("sync-easgd", {}),
        ("sync-easgd", {"fragments": 3, "delay": 1}),
        ("sync-easgd", {"compression": "int8"}),
        ("sync-measgd", {}),
        ("local-sgd", {}),
        ("diloco", {"fragments": 2}),
        ("sync-sgd", {}),
    ],
)
def test_a_slow_worker_takes_fewer_steps_every_sample_counts_once_and_centers_agree(
    trained, method, exchange
):
    run = Ensemble(speed_config(method, **exchange), num_workers=3, images=tiny_images(NUM_SAMPLES))
    assert run.join().run() == [Outcome.FINISHED] * 3
    steps = [worker.local_step for worker in run.workers]
    assert steps[1] < 0.5 * steps[0]
    assert 0.8 * steps[0] < steps[2] <= steps[0]
    for epoch in range(EPOCHS):
        positions = np.concatenate([np.concatenate(by[epoch]) for by in trained.values()])
        assert sorted(positions) == list(range(NUM_SAMPLES))
    centers = [worker.center() for worker in run.workers]
    for center in centers:
        assert center.progress.num_samples == EPOCHS * NUM_SAMPLES
        assert np.array_equal(center.weights, centers[0].weights)
        assert center.progress.local_step == centers[0].progress.local_step


def test_the_speeds_are_measured_without_the_waits(monkeypatch):
    """Otherwise the fast worker would count as slow too, since it waits for the slow one."""

    def step(self, epoch, positions, plan, take=Worker._step):
        time.sleep(0.06 if self.worker_id == "w1" else 0.003)
        return take(self, epoch, positions, plan)

    monkeypatch.setattr(Worker, "_step", step)
    run = Ensemble(speed_config("sync-easgd"), num_workers=2, images=tiny_images(NUM_SAMPLES))
    assert run.join().run(rounds=8) == [Outcome.GO_ON] * 2
    fast, slow = (worker.local_step for worker in run.workers)
    assert fast == 8 * 6
    assert slow < 0.6 * fast


def test_a_limit_of_steps_applies_to_the_fastest_worker(trained):
    limited = TrainConfig(
        method=MethodConfig(name="sync-easgd", period=6, steps_by_speed=True),
        training=TrainingConfig(epochs=None, steps=40, batch_size=2),
    )
    run = Ensemble(limited, num_workers=2, images=tiny_images(NUM_SAMPLES))
    assert run.join().run() == [Outcome.FINISHED] * 2
    assert run.workers[0].local_step == 40
    assert run.workers[1].local_step == 6 + 5 * 2 + 2


@pytest.mark.parametrize(
    ("method", "more", "sentence"),
    [
        ("async-easgd", {}, "is for sync methods, not for async-easgd"),
        ("sync-easgd", {"period": "auto"}, "cannot be set with method.period auto"),
        ("sync-sgd", {"period": 1}, "needs several local steps in a round"),
        ("sync-easgd", {"group_size": 2}, "cannot be set with method.group_size"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_with_one_sentence(method, more, sentence):
    with pytest.raises(ConfigError, match=sentence):
        resolve(TrainConfig(method=MethodConfig(name=method, steps_by_speed=True, **more)))


def test_a_deterministic_run_measures_no_speeds():
    settings = TrainConfig(
        method=MethodConfig(steps_by_speed=True), training=TrainingConfig(deterministic=True)
    )
    with pytest.raises(ConfigError, match="it depends on measured times"):
        resolve(settings)
