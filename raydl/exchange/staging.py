"""Host memory through which a device's parameters travel to a center that lies elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def host_like(tensor: Tensor) -> Tensor:
    """Return new host memory for a tensor's values; pinned for a CUDA tensor.

    The device copies to and from pinned memory by itself; of other memory the host would first
    make a pinned copy, and wait for it.
    """
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


class Staging:
    """Takes the parameters of one span off their device and puts what comes back on it.

    Parameters in host memory are handed over as they are, without a copy. For others the memory
    is made once, at the first use.
    """

    def __init__(self) -> None:
        self._sent: Tensor | None = None
        self._received: Tensor | None = None
        self._is_taken: Any = None
        """A CUDA event: the device has what was received last."""

    def fetch(self, values: Tensor) -> np.ndarray:
        """Return values as an array in host memory; the next call may overwrite it.

        It waits until the device has computed them, and for nothing that is asked of it later.
        """
        if not values.is_cuda:
            return np.asarray(values.numpy())
        if self._sent is None:
            self._sent = host_like(values)
        self._sent.copy_(values)
        return np.asarray(self._sent.numpy())

    def put_(self, target: Tensor, values: np.ndarray) -> None:
        """Copy an array into a tensor; on a device without waiting for what it computes now."""
        if not target.is_cuda:
            np.copyto(target.numpy(), values)  # torch itself takes no read-only arrays, Ray's
            return
        if self._received is None:
            self._received = host_like(target)
            self._is_taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._is_taken.synchronize()  # before the first recording it is over
        np.copyto(self._received.numpy(), values)
        target.copy_(self._received, non_blocking=True)
        self._is_taken.record()
