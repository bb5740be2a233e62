"""The messages of a replica and their effect, with an exchange whose center does not move."""

import copy

import numpy as np
import pytest
import torch
from ensembles import SHAPE, linear, tiny_images
from torch.nn import functional

from raydl.config import OptimizerConfig, TrainingConfig
from raydl.core.center import Mirror
from raydl.core.exchange import Arrival, Header, StepPlan, toward_center
from raydl.core.flat import FlatModel
from raydl.core.optimizers import make_optimizer
from raydl.core.replica import Replica
from raydl.core.rules import Now, State, Travelled
from raydl.data import Batches, Normalizer
from raydl.errors import NonFiniteError
from raydl.methods.data_parallel import MeanGradient
from raydl.methods.des_loc import DESLOC
from raydl.methods.easgd import Elastic
from raydl.methods.outer import Outer
from raydl.metrics import TimeParts
from raydl.tasks import Classification

BETA = 0.5
IMAGES = tiny_images(40)
BATCHES = Batches(IMAGES, Normalizer.of(IMAGES))
SIZE = FlatModel(Classification(linear).build_model(SHAPE)).weights.numel()


class Still:
    """Exchanges with the center of a single worker, which does not move.

    Args:
        span: span of the parameters.
        seen: maps the weights to the weights after a codec.
    """

    def __init__(self, span=slice(0, SIZE), *, seen=None):
        self.span, self.seen = span, seen
        self.center = Mirror(torch.zeros(span.stop - span.start), torch.zeros(0))
        self.sent, self.headers, self.weights = [], [], []

    def begin(self, message, buffers, header, distrust=0.0):
        [values] = message.lanes.values()
        self.sent.append(toward_center(values, self.center.weights, distrust).clone())
        self.headers.append(header)
        self.weights.append(message.weight)

    def wait(self):
        return Arrival(Now(1), seen=self.seen(self.sent[-1]) if self.seen else None)

    def commit(self):
        pass


def small_replica(rule, *, lr=1e-30, has_dynamic_weights=False, training=None, optimizer="sgd"):
    torch.manual_seed(3)
    task = Classification(linear)
    return Replica(
        FlatModel(task.build_model(SHAPE)),
        task,
        rule=rule,
        make_optimizer=make_optimizer(OptimizerConfig(name=optimizer, lr=lr, clip_grad_norm=None)),
        time_parts=TimeParts(),
        training=training or TrainingConfig(batch_size=8),
        has_dynamic_weights=has_dynamic_weights,
        who=lambda: ("w3", 17),
    )


def both(*exchanges, **more):
    return StepPlan(begin=exchanges, join=exchanges, **more)


def batch_of(num_samples=8):
    return BATCHES.batch(np.arange(num_samples))


# the numbers of a message


@pytest.mark.parametrize("rule", [Elastic(BETA), MeanGradient(), Outer()])
def test_each_step_counts_once(rule):
    replica = small_replica(rule, lr=0.1)
    for _ in range(3):
        replica.step(batch_of())
    replica.step(batch_of(), both(Still()))
    assert replica.num_steps == 4


class Noting(Elastic):
    """Notes what the replica has done since each message."""

    def __init__(self):
        super().__init__(BETA)
        self.since = []

    def compose(self, replica, center, state, out):
        self.since.append(replica.since)
        return super().compose(replica, center, state, out)


def test_votes_are_sent_with_the_last_message_only_and_each_knows_what_was_done_before_it():
    first, second = Still(slice(0, 30)), Still(slice(30, SIZE))
    replica = small_replica(rule := Noting(), lr=0.5)
    replica.step(batch_of(8), both(first, second, header=Header(stop=1.0, loss_sum=2.0)))
    replica.step(batch_of(4))
    replica.step(batch_of(4), both(first, second, header=Header(stop=1.0, loss_sum=3.0)))
    assert [h.stop for h in first.headers] == [0.0, 0.0]
    assert [(h.stop, h.loss_sum) for h in second.headers] == [(1.0, 2.0), (1.0, 3.0)]
    # weights leave before the gradient of their step
    assert rule.since == [Travelled()] * 2 + [Travelled(12.0, 2, 1.0)] * 2


@pytest.mark.parametrize(
    ("rule", "what"), [(Elastic(BETA), "weights"), (MeanGradient(), "gradient")]
)
def test_non_finite_values_are_not_sent_and_are_named(rule, what):
    replica, exchange = small_replica(rule), Still()
    tensor = replica.flat.weights if what == "weights" else replica.flat.gradients
    tensor[5] = float("nan")
    with pytest.raises(
        NonFiniteError, match=rf"w3.*values in its {what} are NaN, infinite or beyond"
    ):
        replica.begin(both(exchange))
    assert exchange.sent == []


def test_a_gradient_is_the_sum_over_all_samples_and_weighs_their_number():
    replica, exchange = small_replica(MeanGradient()), Still()
    model = copy.deepcopy(replica.flat.model)
    for batch in (batch_of(4), batch_of(8)):
        functional.cross_entropy(model(batch[0]), batch[1], reduction="sum").backward()
    replica.step(batch_of(4))
    replica.step(batch_of(8), both(exchange))
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(exchange.sent[0], expected)
    assert exchange.weights == [12]


# the effect of an exchange


def test_an_elastic_pull_is_beta_times_the_distance_and_can_be_undone():
    replica, exchange = small_replica(Elastic(BETA)), Still()
    before = replica.flat.weights.clone()
    replica.keep()
    replica.step(batch_of(), both(exchange))
    torch.testing.assert_close(replica.flat.weights, (1 - BETA) * before)
    assert replica.distance_squared == pytest.approx(float(before.square().sum()), rel=1e-5)
    replica.undo_()
    torch.testing.assert_close(replica.flat.weights, before)
    replica.undo_()
    torch.testing.assert_close(replica.flat.weights, before)


def test_the_samples_of_an_exchange_that_is_undone_are_reported_again():
    replica, exchange = small_replica(rule := Noting()), Still()
    replica.step(batch_of())
    replica.keep()
    replica.step(batch_of(), both(exchange))
    replica.undo_()
    replica.step(batch_of(), both(exchange))
    first, again = rule.since
    assert 0 < first.samples == again.samples / 2
    assert 0 < first.steps == again.steps / 2


def test_the_distance_is_that_of_the_weights_before_the_codec():
    replica, exchange = small_replica(Elastic(BETA)), Still(seen=lambda weights: 0 * weights)
    before = replica.flat.weights.clone()
    replica.step(batch_of(), both(exchange))
    assert torch.equal(replica.flat.weights, before)
    assert replica.distance_squared == pytest.approx(float(before.square().sum()), rel=1e-5)


@pytest.mark.parametrize("rule", [MeanGradient(), Outer()])
def test_a_replica_that_copies_the_center_can_undo_that(rule):
    replica, exchange = small_replica(rule, lr=0.1), Still()
    before = replica.flat.weights.clone()
    replica.keep()
    replica.step(batch_of(), both(exchange))
    assert torch.equal(replica.flat.weights, torch.zeros(SIZE))
    replica.undo_()
    moved = torch.dist(before, replica.flat.weights).item()
    assert (moved == 0.0) if not rule.takes_steps else (0 < moved < 1)


class StillWithMoments(Still):
    """The mean of the moments of all workers is 0."""

    def __init__(self):
        super().__init__()
        zeros = {lane: torch.zeros(SIZE) for lane in ("first", "second")}
        self.center = Mirror(torch.zeros(SIZE), torch.zeros(0), State(zeros))

    def begin(self, message, buffers, header, distrust=0.0):
        self.sent.append(message.lanes)


def test_what_was_averaged_of_the_optimizers_state_is_not_undone():
    """Local steps change it before the undo: v_old - mean(v) would be added to what is left."""
    replica, exchange = (
        small_replica(DESLOC(first=1, second=1), optimizer="adamw"),
        StillWithMoments(),
    )
    replica.step(batch_of())
    state = replica.state_dict()["optimizer"]["state"][0]
    assert bool(state["exp_avg_sq"].any())
    before = replica.flat.weights.clone()
    replica.keep()
    replica.step(batch_of(), both(exchange))
    assert set(exchange.sent[0]) == {"progress", "first", "second"}
    replica.undo_()
    state = replica.state_dict()["optimizer"]["state"][0]
    assert not state["exp_avg"].any()
    assert not state["exp_avg_sq"].any()
    torch.testing.assert_close(replica.flat.weights, before)


def test_progress_that_takes_effect_later_keeps_the_steps_in_between():
    replica, exchange = small_replica(Outer(), lr=0.1), Still()
    replica.step(batch_of(), StepPlan(begin=(exchange,)))
    sent = replica.flat.weights.clone()
    torch.testing.assert_close(exchange.sent[0], -sent)
    exchange.center.weights.fill_(2.0)
    replica.step(batch_of(), StepPlan(join=(exchange,)))
    plain = small_replica(Outer(), lr=0.1)
    plain.step(batch_of())
    plain.step(batch_of())
    torch.testing.assert_close(replica.flat.weights, plain.flat.weights - sent + 2.0)


# dynamic weights


def test_a_replica_that_is_suddenly_far_is_pulled_strongly_and_moves_the_center_little():
    replica, exchange = small_replica(Elastic(BETA), has_dynamic_weights=True), Still()
    usual = torch.linspace(-1, 1, SIZE)

    def exchange_from(weights):
        replica.flat.weights.copy_(weights)
        replica.step(batch_of(), both(exchange))
        return exchange.sent[-1] - weights, replica.flat.weights.clone()

    for _ in range(4):
        moved, after = exchange_from(usual)
        assert torch.count_nonzero(moved) == 0
        torch.testing.assert_close(after, (1 - BETA) * usual)
    distrust = 0.5  # halfway between log 2 and log 8 above the usual distance
    moved, after = exchange_from(4 * usual)
    torch.testing.assert_close(moved, -distrust * 4 * usual)
    torch.testing.assert_close(after, (1 - BETA * (1 - distrust) - distrust) * 4 * usual)


# the gradient of a step


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_a_batch_in_parts_has_the_loss_and_the_gradient_of_the_whole(microbatches):
    training = TrainingConfig(batch_size=8, microbatches=microbatches)
    replica = small_replica(MeanGradient(), training=training)
    reference = copy.deepcopy(replica.flat.model)
    inputs, labels = batch_of()
    loss, _ = replica.step((inputs, labels))
    expected = functional.cross_entropy(reference(inputs), labels)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in reference.parameters()])
    torch.testing.assert_close(replica.flat.gradients, 8 * gradient)
