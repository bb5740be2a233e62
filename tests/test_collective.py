"""A group of Ray actors, without actors: what a wait makes of what torch says."""

import threading

import pytest

from raydl.errors import ExchangeError
from raydl.exchange.collective import CollectiveGroup, CollectiveWork, GroupAddress


class Done:
    """An operation that says it is complete: cut by NCCL's abort, or indeed."""

    def wait(self, within=None):
        pass


def group_on(device, *, is_abandoned):
    group = CollectiveGroup.__new__(CollectiveGroup)  # a real one meets others
    group.address = GroupAddress("localhost", 1, "run", 7, device, 1.0)
    group._abandoned = threading.Event()
    if is_abandoned:
        group._abandoned.set()
    return group


def test_a_sum_on_a_device_that_was_abandoned_is_not_taken_for_a_sum():
    work = CollectiveWork(group_on("cuda", is_abandoned=True), Done(), 3)
    with pytest.raises(ExchangeError, match="abandoned"):
        work.wait()


@pytest.mark.parametrize(("device", "is_abandoned"), [("cuda", False), ("cpu", True)])
def test_a_sum_that_is_whole_is_taken(device, is_abandoned):
    """In host memory it fails where it is cut; one that has come before that is whole."""
    CollectiveWork(group_on(device, is_abandoned=is_abandoned), Done(), 3).wait()
