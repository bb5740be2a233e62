"""Precision, microbatches and label smoothing."""

import pytest
import torch
from ensembles import SHAPE, Ensemble, linear
from replicas import batches, deep, replica_config, replica_of
from torch import nn
from torch.nn import functional

from raydl.config import OptimizerConfig, TrainConfig, TrainingConfig
from raydl.data.samples import DataShape
from raydl.methods.data_parallel import MeanGradient
from raydl.methods.easgd import Elastic
from raydl.tasks import Classification, LanguageModel, task_for, task_on
from raydl.worker.evaluator import Evaluator


@pytest.mark.parametrize("rule", [Elastic(0.9), MeanGradient()])
@pytest.mark.parametrize("num_parts", [2, 3, 8])
def test_a_batch_in_parts_has_the_gradient_of_the_whole(rule, num_parts):
    (batch,) = batches(1, size=8)
    results = []
    for microbatches in (1, num_parts):
        training = TrainingConfig(batch_size=8, microbatches=microbatches)
        replica, _ = replica_of(OptimizerConfig(lr=0.1), rule=rule, training=training)
        loss, _ = replica.step(batch)
        results.append((loss, replica.flat.weights, replica.flat.gradients))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_batch_with_fewer_samples_than_parts_still_makes_a_step():
    training = TrainingConfig(batch_size=8, microbatches=8)
    replica, _ = replica_of(OptimizerConfig(lr=0.1), training=training)
    before = replica.flat.weights.clone()
    replica.step(batches(1, size=3)[0])
    assert not torch.equal(before, replica.flat.weights)


@pytest.mark.parametrize(
    ("num_samples", "sizes"), [(64, [16] * 4), (5, [5]), (17, [9, 8]), (33, [11] * 3), (1, [1])]
)
def test_the_last_batch_of_an_epoch_has_fewer_parts_not_smaller_ones(num_samples, sizes):
    seen = []

    class Seen(nn.Module):
        def forward(self, inputs):
            seen.append(len(inputs))
            return inputs

    training = TrainingConfig(batch_size=64, microbatches=4)
    model = lambda *shape: nn.Sequential(Seen(), deep(*shape))  # noqa: E731
    replica, _ = replica_of(OptimizerConfig(lr=0.1), model=model, training=training)
    replica.step(batches(1, size=num_samples)[0])
    assert seen == sizes


def test_bf16_takes_steps_with_falling_loss_and_keeps_its_weights_in_float32():
    training = TrainingConfig(precision="bf16")
    replica, _ = replica_of(OptimizerConfig(lr=0.2), training=training)
    (batch,) = batches(1, size=32)
    losses = [float(replica.step(batch)[0]) for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]
    assert replica.flat.weights.dtype == torch.float32
    exact, _ = replica_of(OptimizerConfig(lr=0.2))
    first = float(exact.step(batch)[0])
    assert losses[0] != first
    assert losses[0] == pytest.approx(first, rel=0.05)


def test_the_center_is_scored_in_the_precision_of_the_run():
    losses = []
    for precision in ("float32", "bf16"):
        config = replica_config("sync-easgd", training={"precision": precision})
        ensemble = Ensemble(config, num_workers=1)
        evaluated = Evaluator(ensemble.job, ensemble.batches).evaluate(ensemble.first)
        losses.append(evaluated.metrics["loss"])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_smoothing_is_in_the_loss_and_not_in_the_metrics():
    model, (batch,) = linear(SHAPE.input_shape, 3), batches(1)
    plain, smooth = Classification(linear), Classification(linear, label_smoothing=0.2)
    expected = functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.2)
    assert torch.equal(smooth.loss(model, batch), expected)
    assert not torch.equal(smooth.loss(model, batch), plain.loss(model, batch))
    assert smooth.metrics(model, batch)["loss"] == plain.metrics(model, batch)["loss"]
    named = task_for("mlp", SHAPE, label_smoothing=0.2)
    assert torch.equal(named.loss(model, batch), expected)


def test_a_language_model_is_smoothed_in_its_loss_only():
    texts = DataShape((4,), 7)
    tokens = torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(2))
    batch = tokens[:, :-1], tokens[:, 1:]
    model = nn.Embedding(7, 7)
    plain, smooth = (
        task_for(model_of(model), texts),
        LanguageModel(model_of(model), label_smoothing=0.2),
    )
    expected = functional.cross_entropy(
        model(batch[0]).flatten(0, 1), batch[1].flatten(), label_smoothing=0.2
    )
    assert torch.equal(smooth.loss(model, batch), expected)
    assert smooth.loss(model, batch) != plain.loss(model, batch)
    assert smooth.metrics(model, batch)["loss"] == plain.metrics(model, batch)["loss"]
    named = task_for(model_of(model), texts, label_smoothing=0.2)
    assert torch.equal(named.loss(model, batch), expected)


def model_of(model):
    return lambda input_shape, num_classes: model


def test_the_smoothing_that_is_set_reaches_the_task_of_a_run():
    model, (batch,) = linear(SHAPE.input_shape, 3), batches(1)
    config = TrainConfig(model="mlp", training=TrainingConfig(label_smoothing=0.2))
    expected = functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.2)
    assert torch.equal(task_on(None, SHAPE, config).loss(model, batch), expected)
