"""NCCL among processes: sums on the device, and members that are lost, late, or leave."""

import itertools
import time

import pytest
from nccl_members import HOST, START_S, Member

from raydl.collective.process_group import dist

pytestmark = [pytest.mark.gpu, pytest.mark.processes, pytest.mark.timeout(180)]

SOON_S = 10.0
LONG_S = 60.0
"""A time-out that no test reaches."""
LARGE = 4_000_000
"""A number of values that NCCL sums by another algorithm than two."""


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
        each(new, "use_device", within_s=START_S)
        self.all += new
        return self.all[:size]

    def begin_to_connect(self, members, *, size=None, timeout_s=LONG_S, here=()):
        """Let processes connect; the ranks ``here`` announce themselves, and never connect."""
        generation = next(self.generations)
        for rank in here:
            dist.PrefixStore(str(generation), self.store).set(f"nccl/{rank}", b"here")
        for rank, member in enumerate(members):
            rest = (self.store.port, generation, rank, size or len(members), timeout_s)
            member.begin("connect", *rest)

    def connect(self, size, **more):
        members = self.start(size)
        self.begin_to_connect(members, **more)
        for member in members:
            member.result("connect", LONG_S)
        return members


def each(members, call, *arguments, within_s=LONG_S):
    for member in members:
        member.begin(call, *arguments)
    return [member.result(call, within_s) for member in members]


def totals(members, size=2):
    return [value for value, _ in each(members, "total", size)]


def check_failed_soon(members):
    for member in members:
        value, seconds = member.result("total", LONG_S)
        assert isinstance(value, str)
        assert seconds < SOON_S


@pytest.fixture(scope="module")
def shared():
    members = Members()
    yield members
    for member in members.all:
        member.kill()


@pytest.fixture
def members(shared):
    yield shared
    each([member for member in shared.all if member.process.is_alive()], "leave")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_members_sum_and_gather_on_the_device(members, size):
    found = members.connect(size)
    expected = [size * (size + 1) / 2] * 2
    assert totals(found) == totals(found, LARGE) == [expected] * size
    ranks = [[float(rank)] for rank in range(size)]
    assert each(found, "gathered") == [ranks] * size


@pytest.mark.parametrize("size", [2, LARGE])
def test_after_a_member_is_killed_the_others_fail_soon_and_sum_in_a_new_group(members, size):
    found = members.connect(3)
    totals(found)
    for member in found[:2]:
        member.begin("total", size)
    found[2].kill()
    check_failed_soon(found[:2])
    each(found[:2], "leave")
    assert members.connect(2) == found[:2]
    assert totals(found[:2], size) == [[3.0, 3.0]] * 2


def test_a_member_that_leaves_fails_the_sums_of_the_others_at_once(members):
    found = members.connect(3)
    totals(found)
    for member in found[:2]:
        member.begin("total")
    assert found[2].call("leave") < 1.0
    check_failed_soon(found[:2])


def test_a_sum_without_a_late_member_ends_at_its_time_out(members):
    found = members.connect(2, timeout_s=3.0)
    totals(found)
    value, seconds = found[0].call("total")
    assert "before timing out" in value
    assert 2.5 < seconds < SOON_S


def test_another_thread_can_end_a_wait_by_cutting_the_connections(members):
    found = members.connect(2)
    totals(found)
    found[0].begin("total")
    assert found[0].call("cut") < SOON_S
    _, seconds = found[0].result("total", SOON_S)  # a sum that was cut may look complete
    assert seconds < SOON_S


@pytest.mark.parametrize("is_here", [False, True], ids=["late", "lost while NCCL connects"])
def test_without_a_member_the_others_give_up_and_connect_in_a_new_group(members, is_here):
    found = members.start(2)
    began = time.monotonic()
    members.begin_to_connect(found, size=3, timeout_s=3.0, here=[2] if is_here else [])
    problem = "not all members joined within 3 s" if is_here else "timeout"
    for member in found:
        with pytest.raises(RuntimeError, match=f"(?i){problem}"):
            member.result("connect", SOON_S)
    assert time.monotonic() - began > 2.5
    each(found, "leave")
    assert members.connect(2) == found
    assert totals(found) == [[3.0, 3.0]] * 2


def test_a_member_can_leave_while_nccl_waits_for_another_one(members):
    (member,) = members.start(1)
    members.begin_to_connect([member], size=2, here=[1])
    with pytest.raises(TimeoutError):
        member.result("connect", 2.0)
    member.call("leave", within_s=SOON_S)
    with pytest.raises(RuntimeError, match="left while it formed"):
        member.result("connect", SOON_S)
    assert members.connect(2)[0] == member
    assert totals(members.all[:2]) == [[3.0, 3.0]] * 2


def test_groups_that_were_left_free_their_memory_on_the_device(members):
    def free_after_a_group():
        found = members.connect(2)
        totals(found, LARGE)
        each(found, "leave")
        return found[0].call("free_memory")

    free = [free_after_a_group() for _ in range(2)]
    for _ in range(3):
        least = free[-1] - 16 * 2**20
        deadline = time.monotonic() + SOON_S  # another thread frees the memory
        now = free_after_a_group()
        while now < least and time.monotonic() < deadline:
            now = members.all[0].call("free_memory")
        assert now >= least
