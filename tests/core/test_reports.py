"""Reports of a worker: the losses of its local steps."""

import pytest
import torch

from raydl.core.reports import Losses
from raydl.errors import NonFiniteLossError


def test_losses_of_any_dtype_and_of_steps_without_samples_are_weighted_by_samples():
    losses = Losses()
    losses.add(1, 4, torch.tensor(0.5))
    losses.add(2, 2, torch.tensor(2.0, dtype=torch.float64))
    losses.add(3, 0, torch.zeros(()))
    losses.add(4, 2, torch.tensor(3.0, dtype=torch.bfloat16))
    assert losses.pop_state("w0") == {"loss_sum": 12.0, "loss_samples": 8}
    assert losses.pop_state("w0") == {"loss_sum": 0.0, "loss_samples": 0.0}


def test_the_first_loss_that_is_not_finite_is_named_with_its_step():
    losses = Losses()
    for step, value in enumerate([1.0, float("inf"), float("nan")]):
        losses.add(step, 4, torch.tensor(value))
    with pytest.raises(NonFiniteLossError) as caught:
        losses.read("w3")
    assert caught.value.args[:2] == ("w3", 1)
