"""The step of a replica compared with plain torch.optim and with sums by hand."""

import copy

import numpy as np
import pytest
import torch
from ensembles import SHAPE, linear, tiny_images
from torch.nn import functional

from raydl.config import MethodConfig, OptimizerConfig, TrainConfig, TrainingConfig
from raydl.core.center import Mirror
from raydl.core.exchange import StepPlan
from raydl.core.flat import FlatModel
from raydl.core.optimizers import make_optimizer
from raydl.core.replica import Replica
from raydl.data import Batches, Normalizer
from raydl.errors import ExchangeError
from raydl.methods.data_parallel import MeanGradient
from raydl.methods.easgd import Elastic
from raydl.methods.outer import Outer
from raydl.metrics import TimeParts
from raydl.tasks import Classification


def image_batches(images):
    return Batches(images, Normalizer.of(images))


def make_replica(rule, config, *, time_parts=None):
    torch.manual_seed(3)
    task = Classification(linear)
    model = task.build_model(SHAPE)
    reference = copy.deepcopy(model)
    replica = Replica(
        FlatModel(model),
        task,
        rule=rule,
        make_optimizer=make_optimizer(config),
        time_parts=time_parts or TimeParts(),
    )
    return replica, reference


class Recorded(TimeParts):
    """Time parts that also list what was measured."""

    def __init__(self):
        super().__init__()
        self.measured = []

    def measure(self, part):
        self.measured.append(part)
        return super().measure(part)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Elastic(0.9), ["forward_backward", "replica_update"]),
        (MeanGradient(), ["forward_backward"]),
    ],
)
def test_a_step_without_an_exchange_measures_no_part_of_one(rule, expected):
    """On a GPU each measurement costs the host time."""
    parts = Recorded()
    replica, _ = make_replica(rule, OptimizerConfig(lr=0.1), time_parts=parts)
    replica.step(image_batches(tiny_images(4)).batch(np.arange(4)))
    assert parts.measured == expected


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_ten_steps_without_exchange_equal_torch_optim_bit_for_bit(momentum):
    config = OptimizerConfig(lr=0.1, momentum=momentum, weight_decay=0.01, clip_grad_norm=None)
    replica, reference = make_replica(Elastic(0.9), config)
    optimizer = torch.optim.SGD(
        reference.parameters(), lr=0.1, momentum=momentum, weight_decay=0.01
    )
    data = image_batches(tiny_images(40))
    for step in range(10):
        batch = data.batch(np.arange(4 * step, 4 * step + 4))
        replica.step(batch)
        optimizer.zero_grad()
        functional.cross_entropy(reference(batch[0]), batch[1]).backward()
        optimizer.step()
    expected = torch.cat([p.reshape(-1) for p in reference.parameters()])
    assert torch.equal(replica.flat.weights, expected.detach())


def test_a_gradient_is_clipped_to_the_limit():
    config = OptimizerConfig(lr=1.0, momentum=0.0, clip_grad_norm=0.001)
    replica, _ = make_replica(Elastic(0.9), config)
    before = replica.flat.weights.clone()
    replica.step(image_batches(tiny_images()).batch(np.arange(8)))
    assert torch.dist(before, replica.flat.weights).item() == pytest.approx(0.001, rel=1e-2)


def test_a_replica_that_starts_over_has_a_new_optimizer():
    """The first step of a new Adam has the length of its rate."""
    torch.manual_seed(0)
    optimizer = OptimizerConfig(name="adam", lr=0.1, clip_grad_norm=None)
    replica, _ = make_replica(Elastic(0.9), optimizer)
    fresh, _ = make_replica(Elastic(0.9), optimizer)
    data = image_batches(tiny_images(40))
    center, buffers = fresh.flat.weights.clone(), fresh.flat.buffers.clone()
    for step in range(5):
        replica.step(data.batch(np.arange(8 * step, 8 * step + 8)))
    assert not torch.equal(replica.flat.weights, center)
    replica.start_over(center, buffers)
    for one in (replica, fresh):
        one.step(data.batch(np.arange(8)))
    assert torch.equal(replica.flat.weights, fresh.flat.weights)


def test_steps_along_given_gradients_count_one_sample_each():
    replica, _ = make_replica(Elastic(0.9), OptimizerConfig(lr=0.1))
    seen = []
    for num_steps in (1, 3, 2):
        for _ in range(num_steps):
            for parameter in replica.flat.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            replica.step_with_given_gradients()
        seen.append(replica.state_dict()["travelled"][:2])
    assert seen == [(1, 1), (4, 4), (6, 6)]


def test_a_step_without_samples_takes_no_gradient_step():
    replica, _ = make_replica(Elastic(0.9), OptimizerConfig(lr=0.1, momentum=0.9))
    before = replica.flat.weights.clone()
    loss, _ = replica.step(image_batches(tiny_images()).batch(np.empty(0, np.int64)))
    assert torch.equal(replica.flat.weights, before)
    assert loss == 0


class BrokenExchange:
    """Accepts a message, then fails."""

    span = slice(0, 51)

    def __init__(self):
        self.center = Mirror(torch.zeros(51), torch.zeros(0))

    def begin(self, message, buffers, header, distrust=0.0):
        pass

    def wait(self):
        raise ExchangeError(7, 2, "connection reset")

    def commit(self):
        raise AssertionError("a failed exchange is not committed")


@pytest.mark.parametrize("rule", [Elastic(0.9), MeanGradient(), Outer()])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_failed_exchange_leaves_every_tensor_as_a_step_without_it_does(rule, overlap):
    batch = image_batches(tiny_images()).batch(np.arange(4))
    states = []
    for step_plans in (True, False):
        replica, _ = make_replica(rule, OptimizerConfig(lr=0.1, momentum=0.9))
        replica.step(batch)
        replica.flat.gradients.zero_()
        broken = (BrokenExchange(),)
        if step_plans:
            with pytest.raises(ExchangeError):
                replica.step(batch, StepPlan(begin=broken, join=broken, overlap=overlap))
        elif rule.takes_steps:  # otherwise the step only computed its gradient
            replica.step(batch)
        states.append(replica.state_dict())
    for key in ("weights", "buffers", "gradients"):
        assert torch.equal(states[0][key], states[1][key]), key
    assert str(states[0]["optimizer"]) == str(states[1]["optimizer"])


def sgd_config(method, **training):
    return TrainConfig(
        method=MethodConfig(name=method, period=training.pop("period", None)),
        training=TrainingConfig(**training),
        optimizer=OptimizerConfig(lr=0.1, lr_schedule="constant", warmup=0.0, clip_grad_norm=None),
    )


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("method", ["sync-sgd", "sync-msgd"])
def test_sync_sgd_at_period_1_is_plain_sgd_on_the_joined_batch(ensemble, method, num_workers):
    images = tiny_images(25)  # the last round is uneven
    settings = sgd_config(method, period=1, epochs=2, batch_size=4)
    workers = ensemble(settings, num_workers=num_workers, images=images)
    reference = linear(SHAPE.input_shape, SHAPE.num_classes)
    reference.load_state_dict(
        workers.flat.state_dict_of(workers.flat.weights, workers.flat.buffers)
    )
    momentum = 0.9 if method == "sync-msgd" else 0.0
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=momentum)
    workers.join().run()

    data, joined = image_batches(images), 4 * num_workers
    for epoch in range(2):
        order = np.random.default_rng([0, epoch]).permutation(25)
        for start in range(0, 25, joined):
            inputs, labels = data.batch(order[start : start + joined])
            optimizer.zero_grad()
            functional.cross_entropy(reference(inputs), labels).backward()
            optimizer.step()
    expected = torch.cat([p.detach().reshape(-1) for p in reference.parameters()])
    for worker in workers.workers:
        torch.testing.assert_close(worker.replica.flat.weights, expected, rtol=1e-4, atol=1e-5)


def test_sync_sgd_replicas_stay_identical_to_the_bit(ensemble):
    workers = ensemble(sgd_config("sync-sgd", steps=7, batch_size=4), num_workers=3).join()
    workers.run()
    first, *others = [w.replica.flat.weights for w in workers.workers]
    assert all(torch.equal(first, other) for other in others)


def test_one_elastic_round_of_two_workers_is_equations_1_and_2(ensemble):
    """The pull uses the weights and the center of the start of the exchanging step."""
    settings = sgd_config("sync-easgd", period=2, steps=2, batch_size=4)
    images = tiny_images(16)
    workers = ensemble(settings, num_workers=2, images=images)
    start = workers.flat.weights.clone()
    workers.join().run()

    data, order = image_batches(images), np.random.default_rng([0, 0]).permutation(16)
    center, expected, at_exchange = start.clone(), [], []
    for rank in range(2):
        rows = order[8 * rank : 8 * rank + 8]
        x = start.clone()
        for step in range(2):
            if step == 1:
                at_exchange.append(x.clone())
            model = linear(SHAPE.input_shape, SHAPE.num_classes)
            torch.nn.utils.vector_to_parameters(x, model.parameters())
            inputs, labels = data.batch(rows[4 * step : 4 * step + 4])
            functional.cross_entropy(model(inputs), labels).backward()
            gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            pull = 0.45 * (x - center) if step == 1 else 0.0
            x = x - 0.1 * gradient - pull
        expected.append(x)
    center = center + 0.45 * (at_exchange[0] + at_exchange[1] - 2 * center)
    for worker, x in zip(workers.workers, expected, strict=True):
        torch.testing.assert_close(worker.replica.flat.weights, x)
    torch.testing.assert_close(torch.tensor(workers.newest.weights), center)
