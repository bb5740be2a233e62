"""A round that is not whole takes only its share of the outer momentum."""

import dataclasses

import numpy as np
import pytest
import torch
from ensembles import Ensemble, tiny_images
from histories import History, config
from mails import NO_BUFFERS, center_of, mail, message
from mapped_cells import ASSIGNMENT, open_exchange, open_shard
from scenarios import Slope, scenario_config

from raydl.collective.steps_by_speed import StepsBySpeed
from raydl.collective.sync_strategy import share_of_round
from raydl.config import ExchangeConfig
from raydl.core.exchange import Header
from raydl.core.reports import Outcome
from raydl.core.rules import Now
from raydl.methods.data_parallel import MeanGradient
from raydl.methods.diloco import AsyncDiLoCo, DiLoCo
from raydl.methods.easgd import Elastic
from raydl.methods.outer import Outer

NESTEROV = DiLoCo(0.7, momentum=0.9)
PLAIN = Outer(0.7, momentum=0.9)
DELAYED = AsyncDiLoCo(0.7, momentum=0.9)


# the rules


class CenterOfOne:
    """A center of one parameter, moved by one rule."""

    def __init__(self, rule):
        self.center = center_of(rule, torch.zeros(1, dtype=torch.float64))

    def move(self, progress, *, share=1.0, times=1, num_workers=1):
        """Apply messages; return how far they moved the center."""
        before = self.center.weights.item()
        for _ in range(times):
            total = torch.tensor([progress], dtype=torch.float64)
            self.center.apply_(mail(self.center.rule, total), NO_BUFFERS, Now(num_workers, share))
        return before - self.center.weights.item()

    @property
    def momentum(self):
        return self.center.state["momentum_buffer"].item()


@pytest.mark.parametrize(("rule", "moved"), [(PLAIN, 0.7 * 2.9), (NESTEROV, 0.7 * (2 + 0.9 * 2.9))])
def test_a_share_of_a_round_takes_its_share_of_the_momentum(rule, moved):
    """Worked by hand: m = 4, D = 2, s = 1/4: q = 0.9*1 + 2 = 2.9; m <- 2.9 + 3 = 5.9."""
    center = CenterOfOne(rule)
    center.move(4.0)
    assert center.move(2.0, share=0.25) == pytest.approx(moved)
    assert center.momentum == pytest.approx(5.9)


@pytest.mark.parametrize("num_rounds", [5, 50])
@pytest.mark.parametrize("rule", [PLAIN, NESTEROV, DELAYED])
def test_a_round_in_ten_parts_moves_the_center_about_as_one_whole_round_does(rule, num_rounds):
    whole, parts = CenterOfOne(rule), CenterOfOne(rule)
    for center in (whole, parts):
        center.move(10.0, times=num_rounds)
    expected = whole.move(10.0)
    assert parts.move(1.0, share=0.1, times=10) == pytest.approx(expected, rel=0.06)
    assert parts.momentum == pytest.approx(whole.momentum, rel=0.01)
    # and so does the next whole round
    assert parts.move(10.0) == pytest.approx(whole.move(10.0), rel=0.01)


@pytest.mark.parametrize("rule", [PLAIN, NESTEROV])
def test_each_part_of_a_round_moves_the_center_in_proportion(rule):
    whole, part = CenterOfOne(rule), CenterOfOne(rule)
    for center in (whole, part):
        center.move(10.0, times=20)
    assert part.move(1.0, share=0.1) == pytest.approx(0.1 * whole.move(10.0))


def test_a_delayed_momentum_is_due_after_p_whole_messages():
    """Worked by hand, p = 2, messages of half a round: three move by D/2, the fourth by m, too."""
    center = CenterOfOne(AsyncDiLoCo(1.0, momentum=0.5))
    moves = [center.move(1.0, share=0.5, num_workers=2) for _ in range(4)]
    assert moves == [0.5, 0.5, 0.5, 0.5 + 0.5 * 2.0]  # 4 in 2 whole messages: m = 2
    assert center.momentum == 2.0


def test_a_share_without_any_step_moves_nothing():
    center = CenterOfOne(NESTEROV)
    center.move(4.0)
    assert center.move(0.0, share=0.0) == 0.0
    assert center.momentum == 4.0


@pytest.mark.parametrize("rule", [Outer(), Outer(0.3), Elastic(0.5), MeanGradient()])
def test_without_outer_momentum_the_share_changes_no_bit(rule):
    start, total = torch.randn(50), torch.randn(50)
    moved = []
    for share in (1.0, 0.3):
        center = center_of(rule, start.clone())
        center.apply_(mail(rule, total.clone(), count=3, weight=7), NO_BUFFERS, Now(3, share))
        moved.append(center.weights)
    assert torch.equal(*moved)


# the share


@pytest.mark.parametrize(
    ("trained", "whole", "group_size", "share"),
    [
        ([10, 10], [10, 10], 1, 1.0),
        ([1, 0, 0, 0], [2, 2, 2, 2], 1, 0.125),
        ([10, 3], [10, 3], 1, 1.0),  # by speed
        ([5, 3], [10, 3], 1, 8 / 13),
        ([13, 10], [10, 10], 1, 1.0),  # with steps of a round whose exchange failed
        ([1, 0, 0, 0], [2, 2, 2, 2], 2, 0.25),  # one of two replicas took one of two steps
        ([0, 0], [2, 2], 1, 0.0),
    ],
)
def test_the_share_of_a_round_is_that_of_its_local_steps(trained, whole, group_size, share):
    assert share_of_round(trained, whole, group_size=group_size) == share


@pytest.fixture
def shares(monkeypatch):
    """Return the shares of the messages that move a center, in order."""
    seen, real = [], {rule: rule.merge_ for rule in (Outer, AsyncDiLoCo)}

    def watched(rule):
        def update(self, center, mail, state, now):
            seen.append(now.share_of_round)
            real[rule](self, center, mail, state, now)

        return update

    for rule in real:
        monkeypatch.setattr(rule, "merge_", watched(rule))
    return seen


def run(
    method, *, start=None, workers=2, fragments=1, compression="none", batch_size=3, **settings
):
    """Run a job on a constant slope to its end; return the ensemble."""
    exchange = ExchangeConfig(timeout_s=20.0, fragments=fragments, compression=compression)
    config = scenario_config(
        method, lr=1.0, workers=workers, exchange=exchange, batch_size=batch_size, **settings
    )
    ensemble = Ensemble(config, num_workers=workers, images=tiny_images(600))
    ensemble.use_task(Slope())
    first = dataclasses.replace(ensemble.first, weights=np.zeros(1, np.float32))
    ensemble.join(start or first).run()
    return ensemble


def center_after(method, **settings):
    return float(run(method, **settings).center().weights[0])


@pytest.mark.parametrize(
    "method", ["diloco", "async-diloco", "async-msgd", "hogwild-msgd", "local-sgd"]
)
def test_one_more_step_of_ten_moves_the_center_about_a_tenth_of_a_whole_round(method):
    workers = 2 if method in ("diloco", "local-sgd") else 1  # the order of messages is the same
    before, part, whole = (
        center_after(method, steps=steps, period=10, workers=workers) for steps in (60, 61, 70)
    )
    share = (before - part) / (before - whole)
    assert share == pytest.approx(0.1, rel=0.001) if method != "async-diloco" else 0 < share < 0.1


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_one_last_sample_among_four_workers_is_an_eighth_of_a_round(shares, compression):
    def after(samples):
        return center_after("diloco", samples=samples, workers=4, compression=compression)

    before, part, whole = after(120), after(121), after(144)
    assert set(shares) == {1.0, 0.125}
    assert (before - part) / (before - whole) == pytest.approx(1 / 8, rel=0.02)


@pytest.mark.parametrize("method", ["diloco", "async-msgd"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_rounds_that_span_epochs_are_whole(shares, method, fragments):
    """Epochs of 20 steps, periods of 7."""
    config = scenario_config(
        method, steps=20 * 7, period=7, exchange=ExchangeConfig(timeout_s=20.0, fragments=fragments)
    )
    Ensemble(config, num_workers=2, images=tiny_images(120)).join().run()
    assert set(shares) == {1.0}
    assert len(shares) == 20 * 2 * fragments


def test_rounds_with_steps_by_speed_are_whole(shares, monkeypatch):
    real = StepsBySpeed.update

    def update(self, step_s, *, round):
        real(self, [0.01, 0.03][self._rank], round=round)

    monkeypatch.setattr(StepsBySpeed, "update", update)
    config = scenario_config("diloco", steps=27, period=6)
    config = dataclasses.replace(
        config, method=dataclasses.replace(config.method, steps_by_speed=True)
    )
    ensemble = Ensemble(config, num_workers=2, images=tiny_images(600)).join()
    ensemble.run()
    assert [worker.local_step for worker in ensemble.workers] == [27, 4 * 2 + 2]
    assert shares[:-2] == [1.0] * 8
    assert shares[-2:] == [5 / 8] * 2  # 3 of 6 steps, and 2 of 2


def test_the_steps_of_a_failed_exchange_count_in_the_round_that_sends_them(shares):
    """The last round has 2 of 4 steps, and the 4 that were not exchanged when w2 was lost."""
    history = History(
        config("diloco", period=4, epochs=None, samples=48), images=tiny_images(600), task=Slope()
    )
    history.train("w0", "w1", "w2", rounds=1)
    assert history.train("w0", "w1", "w2", lost={"w2": (0, 3)}).outcomes["w0"] is Outcome.BROKEN
    history.end("w0", "w1")
    assert shares == [1.0] * (3 + 2)


def test_a_run_that_is_extended_goes_on_after_its_partial_round():
    """21 steps, then 9 more, go about as far as 30 steps."""
    early = run("diloco", steps=21, period=10)
    later = center_after("diloco", steps=30, period=9, start=early.newest)
    assert later == pytest.approx(center_after("diloco", steps=30, period=10), rel=0.08)


def test_a_worker_that_moves_the_center_itself_knows_the_share():
    shard = open_shard(4)
    exchange = open_exchange(shard)
    exchange._session.set_assignment(dataclasses.replace(ASSIGNMENT, share_of_round=0.25))
    exchange.begin(message(Outer(), torch.ones(4)), NO_BUFFERS, Header())
    assert exchange.wait().now == Now(2, 0.25)
