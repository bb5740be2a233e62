"""Settings for a method on a tiny model, a task worked by hand, and the loss of a center."""

import numpy as np
import torch

from raydl.config import (
    ExchangeConfig,
    MethodConfig,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)

ALL = 2**40
"""Completed positions of a worker: all that it has claimed."""


class Slope:
    """One weight with the constant gradient 1."""

    name = "slope"

    def build_model(self, shape):
        return torch.nn.Linear(1, 1, bias=False)

    def loss(self, model, batch):
        return model.weight.sum() * 1.0


def scenario_config(method, *, exchange=None, period=2, lr=0.1, workers=2, **training):
    training.setdefault("batch_size", 3)
    return TrainConfig(
        method=MethodConfig(name=method, period=period),
        training=TrainingConfig(**training),
        optimizer=OptimizerConfig(lr=lr, lr_schedule="constant", warmup=0.0, clip_grad_norm=None),
        exchange=exchange or ExchangeConfig(timeout_s=20.0),
        scaling=ScalingConfig(num_workers=workers),
    )


class FourSlopes(Slope):
    """Four weights with a constant gradient, so that it is known what a worker has computed."""

    gradient = torch.tensor([8.0, 4.0, 2.0, 1.0])

    def build_model(self, shape):
        return torch.nn.Linear(1, 4, bias=False)

    def loss(self, model, batch):
        return (model.weight.view(-1) * self.gradient).sum()


def loss_of(ensemble, weights, images):
    with torch.no_grad():
        ensemble.flat.weights.copy_(torch.tensor(weights))
        batch = ensemble.batches.batch(np.arange(images.num_samples))
        return float(ensemble.job.task.loss(ensemble.flat.model, batch))


def spans_of(assignment):
    """Return the spans that a worker claims by an assignment."""
    return [span for claim in assignment.claims for span in claim.spans]


def steps_of(assignment):
    """Return the local steps that an assignment gives a worker."""
    return sum(claim.num_steps for claim in assignment.claims)
