"""Groups of many members form with few connections, and handle a loss like small ones."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from raydl.collective.key_store import StoreServer
from raydl.collective.process_group import TorchGroup, is_done

MANY = 34
"""A number of members above that of a full mesh."""
LOOK = timedelta(seconds=0.1)


class ServedStore(dist.Store):
    """A Python store, as in a run, which gloo calls from its own threads."""

    def __init__(self, timeout_s):
        super().__init__()
        self.server, self.timeout_s = StoreServer(), timeout_s

    def set(self, key, value):
        self.server.set_key("run", 1, key, value)

    def get(self, key):
        return self.multi_get([key])[0]

    def multi_get(self, keys):
        self.wait(keys)
        found = self.server.wait_for_keys("run", 1, keys, 0.0)
        return [found[key] for key in keys]

    def check(self, keys):
        return self.server.wait_for_keys("run", 1, keys, 0.0).keys() >= set(keys)

    def wait(self, keys, timeout=None):
        timeout_s = self.timeout_s if timeout is None else timeout.total_seconds()
        if not self.server.wait_for_keys("run", 1, keys, timeout_s).keys() >= set(keys):
            raise RuntimeError("the other members did not come")


class LargeGroup:
    """Many members in threads of this process."""

    def __init__(self, num_workers=MANY, *, timeout_s=20.0):
        self.threads_before = set(threading.enumerate())
        self.store = ServedStore(timeout_s)
        self.groups = [
            TorchGroup(rank, num_workers, device="cpu", timeout_s=timeout_s)
            for rank in range(num_workers)
        ]
        self.pool = ThreadPoolExecutor(num_workers)

    def each(self, act, groups=None):
        """Call a function for all members at the same time; return the result or error of each."""

        def acted(group):
            try:
                return act(group)
            except RuntimeError as error:
                return error

        return list(self.pool.map(acted, groups or self.groups))

    def connect(self, groups=None, **more):
        return self.each(lambda g: g.connect(self.store, host="127.0.0.1", **more), groups)

    def abort(self):
        """Leave all groups, and join torch's threads before the process ends."""
        self.each(lambda g: g.abort())
        self.pool.shutdown()
        for thread in set(threading.enumerate()) - self.threads_before:
            thread.join(5.0)


@pytest.fixture
def large():
    made = []

    def make(**more):
        made.append(LargeGroup(**more))
        return made[-1]

    yield make
    for group in made:
        group.abort()


def open_sockets():
    """Return the inodes of this process's connected TCP sockets; it has both ends of each."""
    ours = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            ours.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # closed meanwhile
            continue
    lines = Path("/proc/self/net/tcp").read_text().splitlines()
    rows = [line.split() for line in lines[1:]]
    return {row[9] for row in rows if row[3] == "01" and f"socket:[{row[9]}]" in ours}


def num_connections_since(before):
    """Return the number of connections made since; those of earlier tests may close meanwhile."""
    return len(open_sockets() - before) // 2


def total(group):
    tensor = torch.ones(100_000)
    work = group.start_allreduce(tensor)
    while not is_done(work, LOOK):
        pass
    work.wait()
    return tensor.unique().tolist()


def gathered(group):
    out = [torch.empty(3) for _ in range(MANY)]
    group.start_allgather(torch.full((3,), float(group._rank)), out).wait()
    return [int(values[0]) for values in out]


def test_each_member_of_a_large_group_connects_with_two_others(large):
    before, members = open_sockets(), large()
    assert members.connect() == [None] * MANY
    assert num_connections_since(before) == MANY
    assert members.each(total) == [[float(MANY)]] * MANY
    assert members.each(gathered) == [list(range(MANY))] * MANY
    assert num_connections_since(before) == MANY, "no other connection was needed"


def test_members_that_send_to_each_other_connect_with_all(large):
    before, members = open_sockets(), large()
    assert members.connect(has_pairs=True) == [None] * MANY
    assert num_connections_since(before) == MANY * (MANY - 1) // 2


def test_when_one_member_of_many_leaves_the_sums_of_all_others_fail(large):
    members = large(timeout_s=60.0)
    members.connect()
    members.groups[5].abort()

    def sum_then_leave(group):
        try:
            return total(group)
        finally:
            group.abort()

    began = time.monotonic()
    others = [g for g in members.groups if g is not members.groups[5]]
    found = members.each(sum_then_leave, others)
    assert all(isinstance(result, RuntimeError) for result in found)
    assert time.monotonic() - began < 30.0, (
        "the sums fail with their connections, not with the time-out"
    )


@pytest.mark.processes
def test_forming_a_large_group_without_a_member_times_out(large):
    members = large(timeout_s=4.0)
    began = time.monotonic()
    found = members.connect(members.groups[1:])
    assert all(isinstance(result, RuntimeError) for result in found)
    assert time.monotonic() - began < 18.0, "gloo alone waits five times as long for a connection"


def test_a_member_that_leaves_a_large_group_as_it_forms_returns_at_once(large):
    members = large(timeout_s=60.0)
    threading.Timer(0.3, lambda: members.each(lambda g: g.abort(), members.groups[1:3])).start()
    began = time.monotonic()
    found = members.connect(members.groups[1:3])
    assert [str(error) for error in found] == ["the group was left while it formed"] * 2
    assert time.monotonic() - began < 20.0
