"""A worker that sends bad messages: what the center gets, and which methods survive it."""

import math

import numpy as np
import pytest
import torch
from ensembles import Ensemble
from histories import config

from raydl.errors import NonFiniteError
from raydl.faults import Announced, Fault, Injector

MESSAGE = torch.tensor([1.0, -2.0, 3.0])
METHODS = ["sync-easgd", "local-sgd", "sync-sgd", "async-easgd", "async-sgd"]


def injector_of(kind, *, clock=lambda: 0.0, for_s=None, at=0.0):
    fault = Fault(0, kind, "rank 1", "step", at, for_s=for_s)
    return Injector([fault], None, lambda fault: Announced.FIRST, clock=clock)


def step(injector, *, rank=1, local_step=0):
    injector.before_step(
        f"w{rank}", rank=rank, num_workers=2, local_step=local_step, round=0, seconds=0.0
    )


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("send_nan", [math.nan] * 3),
        ("send_zeros", [0.0] * 3),
        ("send_reversed", [-1.0, 2.0, -3.0]),
    ],
)
def test_a_message_is_replaced_and_not_changed(kind, sent):
    injector = injector_of(kind)
    assert injector.altered(MESSAGE) is MESSAGE, "not before the fault fires"
    step(injector)
    np.testing.assert_equal(injector.altered(MESSAGE).numpy(), np.array(sent, np.float32))
    assert MESSAGE.tolist() == [1.0, -2.0, 3.0]


def test_only_the_target_sends_bad_messages():
    injector = injector_of("send_zeros")
    step(injector, rank=0)
    step(injector, rank=1, local_step=1)
    assert injector.altered(MESSAGE) is MESSAGE


def test_a_worker_recovers_after_the_time_of_its_fault():
    now = [0.0]
    injector = injector_of("send_zeros", clock=lambda: now[0], for_s=5.0)
    step(injector)
    now[0] = 4.9
    assert injector.altered(MESSAGE).tolist() == [0.0] * 3
    now[0] = 5.0
    assert injector.altered(MESSAGE) is MESSAGE


def run_with(method, kind, *, period=1):
    """Return an ensemble of two workers of which the second one is bad."""
    run = Ensemble(config(method, period=period), num_workers=2).join()
    injector = injector_of(kind)
    step(injector)
    run.workers[1].replica.alter = injector.altered
    return run


@pytest.mark.parametrize("method", METHODS)
def test_nan_is_refused_by_the_worker_that_would_send_it(method):
    run = run_with(method, "send_nan", period=2)
    with pytest.raises(NonFiniteError, match=r"of worker w1: .* so nothing was sent"):
        run.workers[1].run_round()
    center = run.workers[0].center() if run.job.method.is_sync else run.center()
    assert np.isfinite(center.weights).all()


@pytest.mark.parametrize(
    ("kind", "factor"), [("send_zeros", 1 - 0.45), ("send_reversed", 1 - 0.45 - 0.45)]
)
def test_one_of_two_bad_workers_moves_an_elastic_center_by_its_half_of_beta(kind, factor):
    """Worked by hand: both replicas begin as c, so c <- c + 0.45 (c - c) + 0.45 (bad - c)."""
    run = run_with("sync-easgd", kind)
    before = run.center_weights().copy()
    run.run(1)
    np.testing.assert_allclose(run.center_weights(), factor * before, rtol=1e-5)


def test_gradients_of_two_workers_add_up_from_what_each_has_sent():
    """With zeros from one, the center moves by the share of the other; reversed, by minus its."""
    moved = {}
    for kind in ("", "send_zeros", "send_reversed"):
        optimizer = {"lr": 0.1, "clip_grad_norm": None, "warmup": 0.0}
        run = Ensemble(config("sync-sgd", period=1, optimizer=optimizer), num_workers=2).join()
        if kind:
            injector = injector_of(kind)
            step(injector)
            run.workers[1].replica.alter = injector.altered
        before = run.center_weights().copy()
        run.run(1)
        moved[kind] = run.center_weights() - before
    bad = moved[""] - moved["send_zeros"]
    np.testing.assert_allclose(moved["send_reversed"], moved["send_zeros"] - bad, atol=1e-6)
    assert np.abs(bad).max() > 1e-3
