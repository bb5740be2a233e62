"""Replicas of tiny models for tests without workers, and plain torch references."""

import copy

import numpy as np
import torch
from ensembles import SHAPE, tiny_images
from torch import nn
from torch.nn import functional

from raydl.config import (
    ExchangeConfig,
    MethodConfig,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.core.flat import FlatModel
from raydl.core.optimizers import OPTIMIZERS, make_optimizer
from raydl.core.replica import Replica
from raydl.data import Batches, Normalizer
from raydl.methods.easgd import Elastic
from raydl.metrics import TimeParts
from raydl.tasks import Classification

PLAIN = {"lr_schedule": "constant", "warmup": 0.0, "clip_grad_norm": None}


def deep(image_shape, num_classes):
    """Return a model with matrices, biases and a layer norm."""
    size = image_shape[1] * image_shape[2]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(size, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, num_classes)
    )


def matrices(image_shape, num_classes):
    size = image_shape[1] * image_shape[2]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(size, 8, bias=False), nn.Linear(8, num_classes, bias=False)
    )


class MuonAndAdamW:
    """Torch's Muon over some matrices, and its AdamW over the other parameters, side by side."""

    def __init__(self, hidden, others, *, lr, **muon):
        self.muon = torch.optim.Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw", **muon)
        self.adamw = torch.optim.AdamW(others, lr=lr, weight_decay=0.1)
        self.param_groups = self.muon.param_groups + self.adamw.param_groups

    def zero_grad(self):
        self.muon.zero_grad()
        self.adamw.zero_grad()

    def step(self):
        self.muon.step()
        self.adamw.step()


def plain_optimizer(name, model, **settings):
    """Return what torch's own optimizers do for a name; for muon the last matrix is the output."""
    parameters = list(model.parameters())
    if name != "muon":
        return OPTIMIZERS[name](parameters, **settings)
    hidden = [p for p in parameters if p.ndim == 2][:-1]
    others = [p for p in parameters if not any(p is matrix for matrix in hidden)]
    return MuonAndAdamW(hidden, others, **settings)


def replica_of(config, *, own=None, model=deep, rule=None, training=None):
    """Return a replica and a copy of its model."""
    torch.manual_seed(3)
    task = Classification(model)
    network = task.build_model(SHAPE)
    reference = copy.deepcopy(network)
    replica = Replica(
        FlatModel(network),
        task,
        rule=rule or Elastic(0.9),
        make_optimizer=make_optimizer(config, own, network),
        time_parts=TimeParts(),
        training=training or TrainingConfig(),
    )
    return replica, reference


def batches(num_steps, size=4):
    images = tiny_images(num_steps * size)
    data = Batches(images, Normalizer.of(images))
    return [data.batch(np.arange(i * size, (i + 1) * size)) for i in range(num_steps)]


def flattened(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def steps_of_both(replica, reference, optimizer, *, num_steps=6, max_norm=None):
    """Return the weights of a replica and of a plain model after the same steps."""
    for batch in batches(num_steps):
        replica.step(batch)
        optimizer.zero_grad()
        functional.cross_entropy(reference(batch[0]), batch[1]).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        optimizer.step()
    return replica.flat.weights, flattened(reference)


def replica_config(method, *, training=None, exchange=None, workers=2, group_size=1, **optimizer):
    return TrainConfig(
        method=MethodConfig(name=method, period=2, group_size=group_size),
        training=TrainingConfig(**{"epochs": 2, "batch_size": 3, **(training or {})}),
        optimizer=OptimizerConfig(**{**PLAIN, **optimizer}),
        exchange=exchange or ExchangeConfig(timeout_s=20.0),
        scaling=ScalingConfig(num_workers=workers),
    )
