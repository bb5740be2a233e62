"""Parameters on their way between a device and a center that lies elsewhere."""

import numpy as np
import pytest
import torch

from raydl.core.exchange import Staging
from raydl.data.samples import to_device

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


def test_what_lies_in_host_memory_is_handed_over_without_a_copy():
    weights = torch.arange(4.0)
    sent = Staging().fetch(weights[1:3])
    weights[1] = 9
    assert sent.tolist() == [9, 2]


def test_parameters_come_back_as_they_were_sent_time_after_time(device):
    staging, weights = Staging(), torch.zeros(5, device=device)
    for step in range(3):
        sent = staging.fetch(weights + step)
        answer = np.array(sent) * 2
        answer.flags.writeable = False  # as what Ray brings
        staging.put_(weights, answer)
        assert weights.tolist() == answer.tolist()
    assert weights.tolist() == [8.0] * 5


def test_a_batch_of_either_kind_arrives_on_the_device(device):
    for batch in ((torch.ones(3), torch.arange(3)), {"x": torch.ones(3), "y": torch.arange(3)}):
        moved = to_device(batch, device)
        tensors = list(moved.values() if isinstance(moved, dict) else moved)
        assert all(tensor.device.type == device.type for tensor in tensors)
        assert [tensor.tolist() for tensor in tensors] == [[1, 1, 1], [0, 1, 2]]
