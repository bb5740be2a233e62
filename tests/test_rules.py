"""The equations, worked by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydl.rules import (
    DelayedOuter,
    Elastic,
    MeanGradient,
    Tally,
    elastic_center_,
    elastic_difference,
    lr_factor,
    moving_rate,
    moving_rate_limit,
)


def exchange(rule: Elastic, replicas: list[torch.Tensor], center: torch.Tensor) -> None:
    """Do one exchange of all replicas with the center, without local steps."""
    p = len(replicas)
    tally = Tally(num_workers=p, num_messages=p, num_samples=p)
    total = torch.stack(replicas).sum(0)
    pulls = [rule.pull(x, center, tally, out=torch.empty_like(x)) for x in replicas]
    for x, pull in zip(replicas, pulls, strict=True):
        x.sub_(pull)
    rule.update_center_(center, total, tally, None)


def test_two_replicas_and_the_center_by_hand():
    replicas, center = [torch.tensor([4.0]), torch.tensor([0.0])], torch.tensor([1.0])
    exchange(Elastic(beta=0.5), replicas, center)  # alpha = 1/4
    assert [x.item() for x in replicas] == [3.25, 0.25]
    assert center.item() == 1.5


def test_one_message_alone_moves_the_center_by_its_own_difference():
    center = torch.tensor([1.0, 2.0])
    elastic_center_(center, torch.tensor([3.0, 2.0]), num_messages=1, moving_rate=0.25)
    assert center.tolist() == [1.5, 2.0]


@given(
    st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=8),
    st.floats(-10, 10, width=32),
    st.floats(0.01, 1.0),
)
def test_what_the_replicas_lose_the_center_gains(values, center_value, beta):
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


@pytest.mark.parametrize("num_workers", [1, 2, 4, 8])
@pytest.mark.parametrize(("share_of_limit", "is_stable"), [(0.98, True), (1.05, False)])
def test_the_stability_limit_separates_convergence_from_divergence(
    num_workers, share_of_limit, is_stable
):
    """On h/2 x^2 with replicas apart: below the limit all shrink, above they grow."""
    lr, curvature = 0.5, 0.8
    alpha = share_of_limit * moving_rate_limit(num_workers, lr_curvature=lr * curvature)
    rule = Elastic(beta=alpha * num_workers)
    tally = Tally(num_workers, num_workers, num_workers)
    replicas = [torch.full((1,), 1.0 + 0.1 * i, dtype=torch.float64) for i in range(num_workers)]
    center = torch.tensor([-1.0], dtype=torch.float64)
    for _ in range(800):
        total = torch.stack(replicas).sum(0)
        for x in replicas:
            pull = rule.pull(x, center, tally, out=torch.empty_like(x))
            x.sub_(lr * curvature * x).sub_(pull)
        rule.update_center_(center, total, tally, None)
    size = abs(center.item())
    assert (size < 1e-3) if is_stable else (size > 1.0 or not torch.isfinite(center).all())


def test_every_beta_that_the_settings_take_is_stable_at_flat_curvature():
    for p in range(1, 65):
        assert moving_rate(1.0, p) <= moving_rate_limit(p)


def test_the_mean_gradient_steps_the_optimizer_at_the_center():
    center = torch.tensor([1.0])
    optimizer = torch.optim.SGD([center], lr=0.5)
    tally = Tally(num_workers=2, num_messages=2, num_samples=4)
    MeanGradient().update_center_(center, torch.tensor([8.0]), tally, optimizer)
    assert center.item() == 0.0  # 1 - 0.5 * 8/4


def test_a_gradient_of_no_sample_leaves_the_center_and_its_optimizer_as_they_are():
    center = torch.tensor([1.0])
    optimizer = torch.optim.SGD([center], lr=0.5, momentum=0.9, weight_decay=0.1)
    tally = Tally(num_workers=2, num_messages=2, num_samples=0)
    MeanGradient().update_center_(center, torch.tensor([0.0]), tally, optimizer)
    assert center.item() == 1.0
    assert not optimizer.state


@pytest.mark.parametrize(
    ("schedule", "middle", "end"), [("cosine", 0.5, 0), ("linear", 0.5, 0), ("constant", 1, 1)]
)
def test_the_learning_rate_takes_its_course(schedule, middle, end):
    factors = [lr_factor(schedule, share) for share in (0.0, 0.5, 1.0)]
    assert factors == pytest.approx([1.0, middle, end])


def test_the_learning_rate_rises_during_the_warm_up_then_takes_its_course():
    factors = [lr_factor("linear", share, warmup=0.2) for share in (0.0, 0.1, 0.2, 0.6, 1.0)]
    assert factors == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0])


def test_a_delayed_momentum_is_the_mean_of_what_arrived_though_fewer_workers_train_by_then():
    """Worked by hand: four times progress 1, of which the last arrives when p fell from 4 to 2.

    m <- (1 + 1 + 1 + 1) / 4 = 1 ; c <- 0 - (1/4 + 1/4 + 1/4 + 1/2) - 0.5 * 1 = -1.75
    """
    center = torch.zeros(1)
    rule = DelayedOuter(1.0, momentum=0.5)
    optimizer = rule.make_center_optimizer([center])
    for num_workers in (4, 4, 4, 2):
        rule.update_center_(center, torch.ones(1), Tally(num_workers, 1, 1.0), optimizer)
    assert optimizer.state[center]["momentum_buffer"].item() == 1.0
    assert center.item() == -1.75
