"""Coordinators, shards, and the messages of workers."""

import numpy as np
import pytest
import torch
from scenarios import ALL

from raydl.config import (
    ExchangeConfig,
    InputConfig,
    MethodConfig,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.core.codecs import parse_codec
from raydl.core.exchange import Header
from raydl.core.membership import Membership
from raydl.core.optimizers import make_optimizer
from raydl.core.rules import Rule
from raydl.data.ledger import Ledger
from raydl.methods import resolve
from raydl.parameter_server.coordinator import Coordinator
from raydl.parameter_server.protocol import Completion, MessageId, Request
from raydl.parameter_server.shard import Shard


class Add(Rule):
    """c <- c + message: lost updates are visible."""

    def merge_(self, center, mail, state, now):
        center.add_(mail.total("progress"))


def make_shard(rule, size, *, is_locked=True, spans=None, coordinator=None, codec="none"):
    shard = Shard(
        spans or [(0, size)],
        torch.zeros(size),
        torch.zeros(0),
        rule=rule,
        make_optimizer=make_optimizer(OptimizerConfig()),
        is_locked=is_locked,
        codec=parse_codec(codec),
        coordinator=coordinator,
    )
    shard.begin_generation(Membership(0, ("w0", "w1")))
    return shard


def request(worker_id, sequence, values, *, generation=0, span=None, completion=None):
    values = np.asarray(values)
    if values.dtype != np.uint8:  # uint8 values come from a codec
        values = values.astype(np.float32)
    return Request(
        message_id=MessageId(worker_id, generation, sequence),
        span=span or (0, values.size),
        weights=values,
        buffers=np.empty(0, np.float32),
        num_workers=2,
        lr=0.1,
        completion=completion,
    )


def values_of(shard):
    return np.concatenate(shard.state().weights)


def make_coordinator(
    method="async-easgd",
    *,
    num_samples=100,
    period=2,
    timeout_s=30.0,
    now=None,
    workers=("w0", "w1"),
    ledger=None,
    non_trainable=None,
    skew=None,
    **training,
):
    training = training or {"epochs": 2}
    config = TrainConfig(
        method=MethodConfig(name=method, period=period),
        training=TrainingConfig(batch_size=5, **training),
        exchange=ExchangeConfig(timeout_s=timeout_s),
        input=InputConfig(skew=skew),
        scaling=ScalingConfig(num_workers=len(workers)) if skew else ScalingConfig(),
    )
    clock = (lambda: now[0]) if now else (lambda: 0.0)
    ledger = ledger or Ledger(num_samples)
    coordinator = Coordinator(
        config, resolve(config), ledger, non_trainable=non_trainable or {}, clock=clock
    )
    coordinator.begin_generation(Membership(1, workers))
    return coordinator


def enter(coordinator, worker_id, *, generation=1):
    return coordinator.enter(MessageId(worker_id, generation, 0), 0)


def settle(coordinator, worker_id, *, local_step=2, generation=1, num_trained=ALL, **header):
    completion = Completion(Header(**header), local_step, num_trained, 0.1, 80)
    return coordinator.settle(
        request(worker_id, 1, [], generation=generation, completion=completion)
    )


def change(coordinator, generation, *worker_ids):
    coordinator.change(Membership(generation, worker_ids))


def completing_request(worker_id, sequence, values, **message_id):
    completion = Completion(Header(), 2, ALL, 0.1, 80)
    message_id.setdefault("generation", 1)
    return request(worker_id, sequence, values, completion=completion, **message_id)


def start_blocking_call(pool, call, *args):
    """Start a call in a thread, and return its future once it blocks."""
    future = pool.submit(call, *args)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.05)
    return future
