"""NCCL among processes: sums on the device, and members that are lost, late, or leave."""

import itertools

import pytest
import torch
from nccl_members import HOST, START_S, Member

from raydl.collective.process_group import dist

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SOON_S = 10.0
LONG_S = 60.0
"""A time-out that no test reaches."""


class Members:
    """Member processes, which the tests of this module share; lost ones are replaced."""

    def __init__(self):
        self.all = []
        self.store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.generations = itertools.count(1)

    def start(self, size):
        """Return processes that use the device and are in no group."""
        self.all = [m for m in self.all if m.process.is_alive()]
        new = [Member() for _ in range(size - len(self.all))]
        for member in new:
            member.begin("use_device")
        for member in new:
            member.result(START_S)
        self.all += new
        return self.all[:size]

    def begin_to_connect(self, members, *, size=None, timeout_s=LONG_S, here=(), is_beside=False):
        """Let processes connect; the ranks ``here`` say that they will, and do not."""
        generation = next(self.generations)
        for rank in here:
            dist.PrefixStore(str(generation), self.store).set(f"nccl/{rank}", b"here")
        for rank, member in enumerate(members):
            rest = (self.store.port, generation, rank, size or len(members), timeout_s)
            member.begin(*(["beside"] if is_beside else []), "connect", *rest)

    def connect(self, size, **more):
        members = self.start(size)
        self.begin_to_connect(members, **more)
        assert all(isinstance(m.result(LONG_S), float) for m in members)
        return members


def each(members, call, *arguments, within_s=LONG_S):
    for member in members:
        member.begin(call, *arguments)
    return [member.result(within_s) for member in members]


@pytest.fixture(scope="module")
def shared():
    members = Members()
    yield members
    for member in members.all:
        member.kill()


@pytest.fixture
def members(shared):
    yield shared
    for member in shared.all:
        if member.process.is_alive():
            member.begin("leave")
            try:
                member.result(SOON_S)
            except (TimeoutError, EOFError):
                member.kill()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_members_sum_and_gather_on_the_device(members, size):
    found = members.connect(size)
    expected = [size * (size + 1) / 2, 10.0 * size]
    assert [value for value, _ in each(found, "total")] == [expected] * size
    ranks = [[float(rank)] for rank in range(size)]
    assert each(found, "gathered") == [ranks] * size


def test_after_a_member_is_killed_the_others_fail_soon_and_sum_in_a_new_group(members):
    found = members.connect(3)
    each(found, "total")
    for member in found[:2]:
        member.begin("total")
    found[2].kill()
    for member in found[:2]:
        value, seconds = member.result(LONG_S)
        assert isinstance(value, str)
        assert seconds < SOON_S
    each(found[:2], "leave")
    again = members.connect(2)
    assert again == found[:2]
    assert [value for value, _ in each(again, "total")] == [[3.0, 20.0]] * 2


def test_a_member_that_leaves_fails_the_sums_of_the_others_at_once(members):
    found = members.connect(3)
    each(found, "total")
    for member in found[:2]:
        member.begin("total")
    assert found[2].call("leave") < 1.0
    for member in found[:2]:
        value, seconds = member.result(LONG_S)
        assert isinstance(value, str)
        assert seconds < SOON_S


def test_a_sum_without_a_late_member_ends_at_its_time_out(members):
    found = members.connect(2, timeout_s=3.0)
    each(found, "total")
    value, seconds = found[0].call("total", within_s=LONG_S)
    assert "before timing out" in value
    assert 2.5 < seconds < SOON_S


def test_another_thread_can_end_a_wait_by_cutting_the_connections(members):
    found = members.connect(2)
    each(found, "total")
    found[0].begin("beside", "total")
    assert found[0].call("cut", within_s=LONG_S) < SOON_S
    value, seconds = found[0].result(SOON_S)
    assert value != [3.0, 20.0]
    assert seconds < SOON_S


@pytest.mark.parametrize("is_here", [False, True], ids=["late", "lost while NCCL connects"])
def test_without_a_member_the_others_give_up_and_connect_in_a_new_group(members, is_here):
    found = members.start(2)
    members.begin_to_connect(found, size=3, timeout_s=3.0, here=[2] if is_here else [])
    for member in found:
        assert "Error: " in member.result(SOON_S)
    each(found, "leave")
    assert members.connect(2) == found
    assert [value for value, _ in each(found, "total")] == [[3.0, 20.0]] * 2


def test_a_member_can_leave_while_nccl_waits_for_another_one(members):
    (member,) = members.start(1)
    members.begin_to_connect([member], size=2, here=[1], is_beside=True)
    with pytest.raises(TimeoutError):
        member.result(2.0)
    member.begin("leave")
    answers = [member.result(SOON_S), member.result(SOON_S)]
    assert any("left while it formed" in str(answer) for answer in answers)
    assert members.connect(2)[0] == member
    assert [value for value, _ in each(members.all[:2], "total")] == [[3.0, 20.0]] * 2


def test_groups_that_were_left_free_their_memory_on_the_device(members):
    free = []
    for _ in range(4):
        found = members.connect(2)
        each(found, "total")
        each(found, "leave")
        free.append(found[0].call("free_memory"))
    assert free[-1] >= free[1] - 16 * 2**20
