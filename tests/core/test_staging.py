"""Parameters are copied between a device and host memory if the center is elsewhere."""

import numpy as np
import pytest
import torch

from raydl.core.exchange import Staging
from raydl.data.samples import to_device

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def test_parameters_in_host_memory_are_not_copied():
    weights = torch.arange(4.0)
    sent = Staging().fetch(weights[1:3])
    weights[1] = 9
    assert sent.tolist() == [9, 2]


def test_received_parameters_are_copied_back_at_every_exchange(device):
    staging, weights = Staging(), torch.zeros(5, device=device)
    for step in range(3):
        sent = staging.fetch(weights + step)
        answer = np.array(sent) * 2
        answer.flags.writeable = False  # like arrays from Ray
        staging.put_(weights, answer)
        assert weights.tolist() == answer.tolist()
    assert weights.tolist() == [8.0] * 5


def test_batches_as_tuples_and_dicts_are_copied_to_the_device(device):
    for batch in ((torch.ones(3), torch.arange(3)), {"x": torch.ones(3), "y": torch.arange(3)}):
        moved = to_device(batch, device)
        tensors = list(moved.values() if isinstance(moved, dict) else moved)
        assert all(tensor.device.type == device.type for tensor in tensors)
        assert [tensor.tolist() for tensor in tensors] == [[1, 1, 1], [0, 1, 2]]
