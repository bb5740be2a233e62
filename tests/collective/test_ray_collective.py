"""Waits for operations of a group, with fake operations of torch."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from raydl.collective.ray_collective import CollectiveGroup, CollectiveWork, GroupAddress
from raydl.errors import ExchangeError, ExchangeTimeoutError


class DoneWork:
    """An operation that reports completion, as a complete one or one aborted by NCCL does."""

    def is_completed(self):
        return True

    def wait(self, within=None):
        pass


class QueuedWork:
    """An operation on a device that completes after some polls."""

    def __init__(self, num_polls):
        self.num_polls = num_polls

    def is_completed(self):
        self.num_polls -= 1
        return self.num_polls <= 0

    def wait(self):
        if not self.is_completed():
            raise RuntimeError("timed out")


def group_on(device, *, is_abandoned=False, timeout_s=1.0):
    group = CollectiveGroup.__new__(CollectiveGroup)  # the constructor would connect to others
    group.address = GroupAddress("run", 7, device, timeout_s)
    group.adaptive, group._abandoned, group._diagnosis = None, threading.Event(), None
    group.torch = SimpleNamespace(
        start_allreduce=lambda tensor: DoneWork(), start_allgather=lambda tensor, out: DoneWork()
    )
    if is_abandoned:
        group._abandoned.set()
    return group


def test_an_abandoned_sum_on_a_device_does_not_count_as_a_sum():
    work = CollectiveWork(group_on("cuda", is_abandoned=True), DoneWork(), 3)
    with pytest.raises(ExchangeError, match="abandoned"):
        work.wait()


@pytest.mark.parametrize(("device", "is_abandoned"), [("cuda", False), ("cpu", True)])
def test_a_complete_sum_is_accepted(device, is_abandoned):
    """In host memory a cut sum fails, so a complete sum is valid."""
    CollectiveWork(group_on(device, is_abandoned=is_abandoned), DoneWork(), 3).wait()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_abandoned_group_starts_no_further_sum(device):
    """Sums that complete quickly never wait long enough to notice that the group is abandoned."""
    group = group_on(device, is_abandoned=True)
    with pytest.raises(ExchangeError, match="abandoned"):
        group.start_allreduce(torch.ones(1), round=3)
    with pytest.raises(ExchangeError, match="abandoned"):
        group.start_allgather(torch.ones(1), torch.ones(2, 1), round=3)


def test_a_sum_on_a_device_is_polled_often():
    began = time.monotonic()
    CollectiveWork(group_on("cuda", timeout_s=60.0), QueuedWork(1000), 3).wait()
    assert time.monotonic() - began < 5.0


def test_a_thread_that_waits_for_a_device_returns_soon_after_the_group_is_abandoned():
    group = group_on("cuda", timeout_s=60.0)
    threading.Timer(0.2, group._abandoned.set).start()
    began = time.monotonic()
    with pytest.raises(ExchangeError, match="abandoned"):
        CollectiveWork(group, QueuedWork(10**9), 3).wait()
    assert time.monotonic() - began < 5.0


def test_a_wait_for_a_device_is_bounded(monkeypatch):
    group = group_on("cuda", timeout_s=0.2)
    monkeypatch.setattr(group, "_late_workers", lambda round: ["w1"])
    with pytest.raises(ExchangeTimeoutError, match="w1"):
        CollectiveWork(group, QueuedWork(10**9), 3).wait()
