"""Messages that meet at a center, for tests of rules."""

import torch

from raydl.config import OptimizerConfig
from raydl.core.center import Center
from raydl.core.optimizers import make_optimizer
from raydl.core.rules import Mail, Message

PLAIN_SGD = OptimizerConfig(
    lr=0.5, momentum=0.0, lr_schedule="constant", warmup=0.0, clip_grad_norm=None
)


def mail(rule, total, *, count=1, weight=None, **numbers):
    """Return messages of a rule that sum to ``total``; by default each weighs 1."""
    return Mail(rule.lanes_of(total), count, float(count if weight is None else weight), numbers)


def message(rule, values, *, weight=1.0, **numbers):
    """Return one message with these values."""
    return Message(rule.lanes_of(values), weight, numbers)


def center_of(rule, values, optimizer=PLAIN_SGD):
    """Return a center with a rule."""
    make = make_optimizer(optimizer)
    return Center(values, torch.zeros(0), rule=rule, make_optimizer=make)


NO_BUFFERS = torch.zeros(0)
