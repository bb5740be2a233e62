"""The lower of two levels: workers of one node compute one gradient together.

SC17 parts a chip into groups of cores whose copies of the weights stay identical by summing
gradients; here a group of workers is one replica in several processes. Only groups exchange
with the center.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raydl.exchange.sync import Group


class GradientGroup:
    """The workers that share one replica, as one of them sees them.

    Args:
        group: connects them.
        num_parameters: elements of a gradient.
        num_tensors: parameters that they are of.
        dtype: of the gradients.
        device: where the group sums; the gradients may be elsewhere.
    """

    def __init__(
        self,
        group: Group,
        num_parameters: int,
        num_tensors: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group = group
        sizes = [num_parameters, num_tensors, 1]
        self._message = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self._gradients, self._is_reached, self._samples = torch.split(self._message, sizes)
        self._step = 0

    def mean_(
        self, gradients: Tensor, num_samples: int, is_reached: bytearray
    ) -> tuple[int, bytearray]:
        """Replace mean gradients by that of the joined batch; return its samples.

        Args:
            gradients: of the mean loss over ``num_samples`` samples, shape [num_parameters].
            num_samples: of this worker's batch; may be 0.
            is_reached: by parameter, whether it has a gradient.

        Returns:
            The samples of all, and which parameters have a gradient of anyone.

        Raises:
            ExchangeError: a worker of the group went away or took too long; the gradients
                are as they were.
        """
        self._gradients.copy_(gradients).mul_(num_samples)
        self._is_reached.copy_(torch.frombuffer(is_reached, dtype=torch.uint8))
        self._samples[0] = num_samples
        self._group.start_allreduce(self._message, round=self._step).wait()
        self._step += 1
        total = int(self._samples[0])
        gradients.copy_(self._gradients)
        if total:
            gradients.div_(total)
        return total, bytearray((self._is_reached > 0).tolist())

    def bytes_of_first(self, data: bytes, *, is_first: bool) -> bytes:
        """Return the bytes that the group's first worker gives; the others' count for nothing.

        Raises:
            ExchangeError: it went away or took too long.
        """
        device = self._message.device
        size = torch.tensor([len(data) if is_first else 0], device=device)
        self._group.start_allreduce(size, round=self._step).wait()
        content = torch.zeros(int(size), dtype=torch.uint8, device=device)
        if is_first:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._group.start_allreduce(content, round=self._step).wait()
        return content.cpu().numpy().tobytes()

    def copy_first_(self, tensors: list[Tensor], *, is_first: bool) -> list[bool]:
        """Replace tensors by those of the group's first worker; return which were others.

        Raises:
            ExchangeError: it went away or took too long; the tensors are as they were.
        """
        copies = [t.to(self._message.device, copy=True) for t in tensors]
        for copy in copies:
            if not is_first:
                copy.zero_()
            self._group.start_allreduce(copy, round=self._step).wait()
        pairs = [(t, copy.to(t.device)) for t, copy in zip(tensors, copies, strict=True)]
        were_others = [not torch.equal(tensor, copy) for tensor, copy in pairs]
        for tensor, copy in pairs:
            tensor.copy_(copy)
        return were_others
