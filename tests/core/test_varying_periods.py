"""Periods that follow the learning rate."""

import dataclasses

import numpy as np
import pytest
from ensembles import Ensemble, tiny_images
from interruptions import assert_same_bits_after_an_interruption
from scenarios import scenario_config

from raydl.config import ExchangeConfig, MethodConfig, TrainConfig
from raydl.core.reports import Outcome
from raydl.core.rules import Moment
from raydl.errors import ConfigError
from raydl.methods import resolve
from raydl.methods.custom_rule import try_rule
from raydl.methods.local_sgd import QSR, LocalSGD, PostLocalSGD


class ByMessages(LocalSGD):
    """A rule of a user's, by messages."""

    strategy = "async"

    def period_at(self, moment):
        return 3


@pytest.mark.parametrize(
    ("lr", "period"), [(1.0, 4), (0.5, 4), (0.4, 6), (0.1, 100), (1e-9, 1000), (0.0, 1000)]
)
def test_qsr_by_hand(lr, period):
    """max(4, floor((1/eta)^2)): 1 and 4 give 4, 6.25 gives 6."""
    assert QSR(growth=1.0).period_at(Moment(4, lr=lr, peak_lr=1.0)) == period


def test_a_round_of_qsr_has_a_limit_of_the_users():
    moment = Moment(4, lr=0.1, peak_lr=1.0)
    assert QSR(growth=1.0, longest=30).period_at(moment) == 30
    assert QSR(growth=1.0, longest=2).period_at(moment) == 4
    assert QSR(growth=0).period_at(Moment(4, lr=0.0, peak_lr=1.0)) == 4


def test_during_the_warm_up_qsr_has_the_period_of_the_peak():
    moment = Moment(4, lr=1e-3, peak_lr=0.1, is_warming_up=True)
    assert QSR(growth=1.0).period_at(moment) == 100


def test_post_local_sgd_averages_every_step_until_the_first_cut():
    periods = [
        PostLocalSGD().period_at(Moment(16, lr=lr, peak_lr=1.0, is_warming_up=warm))
        for lr, warm in ((0.2, True), (1.0, False), (0.1, False))
    ]
    assert periods == [1, 1, 16]


def trained(method, *, fragments=1, delay=0, group_size=1, options="", period=4, **optimizer):
    """Train 24 steps of each of two workers with a cut of the rate at half; return the ensemble."""
    exchange = ExchangeConfig(timeout_s=20.0, fragments=fragments, delay=delay)
    config = scenario_config(method, steps=24, period=period, lr=0.1, exchange=exchange)
    config = dataclasses.replace(
        config,
        method=dataclasses.replace(config.method, options=options, group_size=group_size),
        optimizer=dataclasses.replace(
            config.optimizer, lr_schedule="step", milestones="0.5", gamma=0.5, **optimizer
        ),
    )
    ensemble = Ensemble(config, num_workers=2, images=tiny_images(600)).join()
    assert ensemble.run() == [Outcome.FINISHED] * 2
    return ensemble


def rounds_of(ensemble):
    return ensemble.newest.progress.round


@pytest.mark.parametrize("fragments", [1, 3])
def test_the_rounds_of_a_run_follow_the_rate(fragments):
    # 12 rounds of one step, then 3 of 4
    assert rounds_of(trained("post-local-sgd", fragments=fragments)) == 15
    # (0.2/0.1)^2 = 4: 3 rounds of 4 steps; (0.2/0.05)^2 = 16: one of 12
    assert rounds_of(trained("qsr", fragments=fragments, options="growth=0.2")) == 4
    assert rounds_of(trained("local-sgd", fragments=fragments)) == 6


def test_a_delay_and_groups_change_nothing_of_the_rounds():
    assert rounds_of(trained("post-local-sgd", fragments=2, delay=1)) == 15
    assert rounds_of(trained("qsr", delay=3, options="growth=0.2")) == 4
    ensemble = trained("post-local-sgd", group_size=2)
    assert rounds_of(ensemble) == 15
    assert ensemble.newest.progress.num_samples == 24 * 2 * 3


class Broken(LocalSGD):
    """A rule of a user's whose period is not one."""

    def __init__(self, lr=1.0, *, momentum=0.0, answer=2.5):
        super().__init__(lr, momentum=momentum)
        self.answer = answer

    def period_at(self, moment):
        return self.answer


@pytest.mark.parametrize("answer", [2.5, float("nan"), 0, -1, None, True, "4"])
def test_a_period_that_is_no_whole_number_is_refused_before_the_run(answer):
    with pytest.raises(ConfigError) as caught:
        try_rule(Broken(answer=answer), 8)
    assert str(caught.value).startswith(
        f"method.name Broken.period_at() must return a whole number of at least 1, got {answer!r}"
    )


class Inverse(LocalSGD):
    """A rule of a user's that needs a rate."""

    def period_at(self, moment):
        return max(1, int(0.1 / moment.lr))


def test_a_period_that_needs_a_rate_is_fine_where_the_rate_is_never_zero():
    try_rule(Inverse(), 8, is_rate_ever_zero=False)
    with pytest.raises(ZeroDivisionError):
        try_rule(Inverse(), 8)


def test_a_period_of_numpy_is_a_whole_number():
    try_rule(Broken(answer=np.int64(3)), 8)


def test_every_sample_counts_once_however_long_the_rounds_are():
    ensemble = trained("qsr", options="growth=0.2")
    assert ensemble.newest.progress.num_samples == 24 * 2 * 3
    assert [worker.local_step for worker in ensemble.workers] == [24, 24]


@pytest.mark.parametrize("method", ["qsr", "post-local-sgd"])
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path, method):
    config = scenario_config(method, epochs=6, lr=0.05, period=2)
    config = dataclasses.replace(
        config,
        method=dataclasses.replace(config.method, options="growth=0.05" * (method == "qsr")),
        optimizer=dataclasses.replace(config.optimizer, lr_schedule="cosine", warmup=0.2),
    )
    assert_same_bits_after_an_interruption(config, tmp_path)


@pytest.mark.parametrize(
    ("method", "settings", "sentence"),
    [
        ("qsr", {"period": "auto"}, "method.period cannot be auto for qsr, whose period varies"),
        ("qsr", {"steps_by_speed": True}, "method.steps_by_speed has no meaning for qsr, whose"),
        (
            "test_varying_periods:ByMessages",
            {},
            "method.strategy must be sync for test_varying_periods:ByMessages, whose period var",
        ),
    ],
)
def test_settings_that_fix_the_period_are_refused(method, settings, sentence):
    with pytest.raises(ConfigError) as caught:
        resolve(TrainConfig(method=MethodConfig(name=method, **settings)))
    assert str(caught.value).startswith(sentence)
