"""The equations, worked by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mails import NO_BUFFERS, center_of, mail

from raydl.config import OptimizerConfig
from raydl.core import rules as blocks
from raydl.core.lr_schedules import lr_factor
from raydl.core.rules import Now, State
from raydl.methods.data_parallel import MeanGradient
from raydl.methods.diloco import AsyncDiLoCo
from raydl.methods.easgd import (
    Elastic,
    elastic_center_,
    elastic_difference,
    moving_rate,
    moving_rate_limit_in_turn,
)
from raydl.methods.outer import Outer


def exchange(rule: Elastic, replicas: list[torch.Tensor], center: torch.Tensor) -> None:
    """Do one exchange of all replicas with the center, without local steps."""
    p = len(replicas)
    now = Now(p)
    total = torch.stack(replicas).sum(0)
    pulls = [rule.pull(x, center, now, out=torch.empty_like(x)) for x in replicas]
    for x, pull in zip(replicas, pulls, strict=True):
        x.sub_(pull)
    rule.merge_(center, mail(rule, total, count=p), State(), now)


def test_two_replicas_and_the_center_by_hand():
    replicas, center = [torch.tensor([4.0]), torch.tensor([0.0])], torch.tensor([1.0])
    exchange(Elastic(beta=0.5), replicas, center)  # alpha = 1/4
    assert [x.item() for x in replicas] == [3.25, 0.25]
    assert center.item() == 1.5


def test_a_single_message_moves_the_center_by_its_own_difference():
    center = torch.tensor([1.0, 2.0])
    elastic_center_(center, torch.tensor([3.0, 2.0]), num_messages=1, moving_rate=0.25)
    assert center.tolist() == [1.5, 2.0]


@given(
    st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=8),
    st.floats(-10, 10, width=32),
    st.floats(0.01, 1.0),
)
def test_an_exchange_conserves_the_sum_of_replicas_and_center(values, center_value, beta):
    replicas = [torch.tensor([v], dtype=torch.float64) for v in values]
    center = torch.tensor([center_value], dtype=torch.float64)
    before = sum(x.item() for x in replicas) + center.item()
    exchange(Elastic(beta), replicas, center)
    after = sum(x.item() for x in replicas) + center.item()
    assert after == pytest.approx(before, abs=1e-9)


def test_a_moving_rate_of_zero_changes_nothing_and_of_one_swaps_p1_with_the_center():
    x, c = torch.tensor([4.0]), torch.tensor([1.0])
    assert elastic_difference(x, c, moving_rate=0.0).item() == 0.0
    replicas, center = [x], c
    exchange(Elastic(beta=1.0), replicas, center)
    assert (replicas[0].item(), center.item()) == (1.0, 4.0)


def test_the_moving_rate_is_beta_over_p():
    assert moving_rate(0.9, 3) == pytest.approx(0.3)


def test_the_moving_rate_stays_within_its_limit_when_fewer_workers_are_left_than_beta():
    assert moving_rate(2.0, 1) == moving_rate_limit_in_turn()


def limit_at_once(num_workers, lr_curvature=0.0):
    """Return the largest stable alpha if all workers exchange at once; see docs/algorithms.md."""
    p = num_workers
    return (4 - 2 * lr_curvature) / (2 * (1 + p) - p * lr_curvature)


@pytest.mark.parametrize("num_workers", [1, 2, 4, 8])
@pytest.mark.parametrize(("share_of_limit", "is_stable"), [(0.98, True), (1.05, False)])
def test_the_stability_limit_separates_convergence_from_divergence(
    num_workers, share_of_limit, is_stable
):
    """Train h/2 x^2 from different replicas: below the limit all values shrink, above they grow."""
    lr, curvature = 0.5, 0.8
    alpha = share_of_limit * limit_at_once(num_workers, lr * curvature)
    rule = Elastic(beta=alpha * num_workers)
    now = Now(num_workers)
    replicas = [torch.full((1,), 1.0 + 0.1 * i, dtype=torch.float64) for i in range(num_workers)]
    center = torch.tensor([-1.0], dtype=torch.float64)
    for _ in range(800):
        total = torch.stack(replicas).sum(0)
        for x in replicas:
            pull = rule.pull(x, center, now, out=torch.empty_like(x))
            x.sub_(lr * curvature * x).sub_(pull)
        rule.merge_(center, mail(rule, total, count=num_workers), State(), now)
    size = abs(center.item())
    assert (size < 1e-3) if is_stable else (size > 1.0 or not torch.isfinite(center).all())


def test_every_valid_beta_is_stable_at_flat_curvature():
    for p in range(1, 65):
        assert moving_rate(1.0, p) <= limit_at_once(p)


def test_the_optimizer_at_the_center_steps_along_the_mean_gradient():
    rule = MeanGradient()
    center = center_of(rule, torch.tensor([1.0]))
    center.apply_(mail(rule, torch.tensor([8.0]), count=2, weight=4), NO_BUFFERS, Now(2))
    assert center.weights.item() == 0.0  # 1 - 0.5 * 8/4


def test_a_gradient_of_no_samples_changes_neither_center_nor_optimizer():
    rule, optimizer = MeanGradient(), OptimizerConfig(lr=0.5, momentum=0.9, weight_decay=0.1)
    center = center_of(rule, torch.tensor([1.0]), optimizer)
    center.apply_(mail(rule, torch.tensor([0.0]), count=2, weight=0), NO_BUFFERS, Now(2))
    assert center.weights.item() == 1.0
    assert not any(center.optimizer_state()["state"].values())


@pytest.mark.parametrize(
    ("schedule", "middle", "end"), [("cosine", 0.5, 0), ("linear", 0.5, 0), ("constant", 1, 1)]
)
def test_the_learning_rate_follows_its_schedule(schedule, middle, end):
    factors = [lr_factor(schedule, share) for share in (0.0, 0.5, 1.0)]
    assert factors == pytest.approx([1.0, middle, end])


def test_the_learning_rate_rises_during_the_warm_up_then_follows_its_schedule():
    factors = [lr_factor("linear", share, warmup=0.2) for share in (0.0, 0.1, 0.2, 0.6, 1.0)]
    assert factors == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0])


def test_warm_up_stable_decay_is_constant_until_its_last_part():
    shares = (0.0, 0.05, 0.1, 0.5, 0.75, 0.875, 1.0)
    factors = [lr_factor("wsd", share, warmup=0.1, decay=0.25) for share in shares]
    assert factors == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0])


def test_a_delayed_momentum_is_the_mean_of_all_messages_after_p_has_decreased():
    """Worked by hand: progress 1 four times; p falls from 4 to 2 before the last.

    m <- (1 + 1 + 1 + 1) / 4 = 1 ; c <- 0 - (1/4 + 1/4 + 1/4 + 1/2) - 0.5 * 1 = -1.75
    """
    rule = AsyncDiLoCo(1.0, momentum=0.5)
    center = center_of(rule, torch.zeros(1))
    for num_workers in (4, 4, 4, 2):
        center.apply_(mail(rule, torch.ones(1)), NO_BUFFERS, Now(num_workers))
    assert center.state["momentum_buffer"].item() == 1.0
    assert center.weights.item() == -1.75


def test_a_delayed_momentum_counts_each_message_once():
    """Worked by hand, p = 2: progress 1 four times, then progress 3 twice.

    m <- 1 ; c <- -1/2 - 1/2 - 0.5*1 = -1.5
    m <- 0.5*1 + 1 = 1.5 ; c <- -1.5 - 1 - 0.5*1.5 = -3.25
    m <- 0.5*1.5 + 3 = 3.75 ; c <- -3.25 - 3 - 0.5*3.75 = -8.125
    """
    rule = AsyncDiLoCo(1.0, momentum=0.5)
    center = center_of(rule, torch.zeros(1))
    seen = []
    for progress in (1.0, 1.0, 3.0):
        for _ in range(2):
            center.apply_(mail(rule, torch.tensor([progress])), NO_BUFFERS, Now(2))
        seen.append(center.weights.item())
    assert seen == [-1.5, -3.25, -8.125]


@pytest.mark.parametrize(("lr_curvature", "limit"), [(0.0, 1.0), (1.0, 2 / 3), (1.5, 0.4)])
def test_the_stability_limit_of_exchanges_of_one_worker_at_a_time(lr_curvature, limit):
    """(4 - 2*eta*h) / (4 - eta*h)."""
    assert moving_rate_limit_in_turn(lr_curvature=lr_curvature) == pytest.approx(limit)


class Halved(Elastic):
    """A custom rule that pulls half as strongly."""

    def pull(self, replica, center, now, *, out):
        return super().pull(replica, center, now, out=out).mul_(0.5)


@pytest.mark.parametrize(("rule", "pulled"), [(Elastic(0.5), 1.0), (Halved(0.5), 0.5)])
def test_a_subclass_of_elastic_keeps_its_own_pull_in_every_method(rule, pulled):
    now = Now(1)
    replica, center, out = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0]), torch.empty(2)
    assert rule.pull(replica, center, now, out=out) is out
    assert out.tolist() == [pulled, 0.0]
    assert rule.measured_pull(replica, center, now, out=out.zero_()) == 4.0
    assert out.tolist() == [pulled, 0.0]
    assert rule.exchange_(replica, center, now, out=out.zero_()) == 4.0
    assert out.tolist() == [pulled, 0.0]


def test_the_distance_to_the_center_is_that_of_all_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 2)
    now = Now(1)
    replica, center = torch.tensor([1.0, 2.0, 3.0, 0.0, 4.0]), torch.zeros(5)
    out = torch.empty(5)
    assert Elastic(0.5).measured_pull(replica, center, now, out=out) == pytest.approx(30.0)
    assert Elastic(0.5).exchange_(replica, center, now, out=out) == pytest.approx(30.0)
    assert center.tolist() == [0.5, 1.0, 1.5, 0.0, 2.0]


def test_with_default_settings_the_center_of_an_outer_rule_becomes_the_mean():
    rule = Outer()
    center = center_of(rule, torch.tensor([4.0]))
    center.apply_(mail(rule, torch.tensor([2.0]), count=2), NO_BUFFERS, Now(2))  # 4 - 3, 4 - 3
    assert center.weights.item() == 3.0
