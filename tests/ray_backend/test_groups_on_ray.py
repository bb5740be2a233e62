"""Groups of plain actors through ``ray.util.collective``: members die, stop and join."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import ray
import torch
from group_members import GroupMember
from ray.util import collective
from ray.util.collective.types import ReduceOp

from raydl.errors import ConfigError, ExchangeError, ExchangeTimeoutError

pytestmark = pytest.mark.cluster

BOUND_S = 120.0
SOON_S = 15.0


@ray.remote(num_cpus=0, max_concurrency=2)
class GroupActor(GroupMember):
    """A member whose tensors are in host memory."""

    def form_by_gloo(self, name):
        collective.init_collective_group(1, 0, "gloo", name)

    def sum(self):
        tensor = np.full(1000, self.rank + 2.0)
        collective.allreduce(tensor, self.name)
        self.num_sums += 1
        return float(tensor[0]), float(tensor[-1])

    def all_operations(self):
        rank, name = self.rank, self.name
        found = {}
        for op in ReduceOp:
            tensor = torch.tensor([rank + 2.0])
            collective.allreduce(tensor, name, op)
            found[f"allreduce {op.name}"] = tensor.item()
        tensor = torch.tensor([rank + 2.0])
        collective.reduce(tensor, 2, name)
        found["reduce"] = tensor.item()
        tensor = torch.tensor([rank + 2.0])
        collective.broadcast(tensor, 1, name)
        found["broadcast"] = tensor.item()
        out = [np.zeros(1) for _ in range(3)]
        collective.allgather(out, np.array([rank + 2.0]), name)
        found["allgather"] = [each.item() for each in out]
        tensor = np.zeros(1)
        collective.reducescatter(tensor, [np.array([10.0 * r + rank]) for r in range(3)], name)
        found["reducescatter"] = tensor.item()
        collective.barrier(name)
        tensor = torch.tensor([rank + 2.0])
        if rank == 0:
            collective.send(tensor, 2, name)
        if rank == 2:
            collective.recv(tensor, 0, name)
        found["send and recv"] = tensor.item()
        found["rank and size"] = (
            collective.get_rank(name),
            collective.get_collective_group_size(name),
        )
        collective.destroy_collective_group(name)
        return found


def get(refs):
    return ray.get(refs, timeout=BOUND_S)


class MemberActors:
    """The actors of this module by id; actors that were not killed are used again."""

    def __init__(self):
        self.by_id, self.pids = {}, {}

    def start_missing(self, members):
        """Start the members that do not exist yet, and wait until they answer."""
        new = [member for member in members if member not in self.by_id]
        self.by_id |= {member: GroupActor.remote() for member in new}
        pids = get([self.by_id[member].pid.remote() for member in new])
        self.pids |= dict(zip(new, pids, strict=True))

    def signal(self, member, number):
        os.kill(self.pids[member], number)
        if number == signal.SIGKILL:
            del self.by_id[member]
        return time.time()

    def close(self):
        for actor in self.by_id.values():
            ray.kill(actor)


class Group:
    """The group of one test."""

    def __init__(self, name, actors):
        self.name, self.actors = name, actors

    def begin(self, members, method, *arguments):
        return [getattr(self.actors.by_id[m], method).remote(*arguments) for m in members]

    def begin_to_form(self, members, generation, *, among=None, **more):
        self.actors.start_missing(members)
        ids = tuple(among or members)
        return [
            self.actors.by_id[m].form.remote(ids, m, generation, self.name, **more) for m in members
        ]

    def form(self, members, generation, **more):
        get(self.begin_to_form(members, generation, **more))

    def sums(self, members):
        return get(self.begin(members, "sum"))

    def begin_to_sum(self, members):
        """Let members sum repeatedly; return once each has completed a few sums."""
        refs = self.begin(members, "sum_until_it_fails")
        deadline = time.monotonic() + BOUND_S
        while min(get(self.begin(members, "state"))) < 3:
            assert time.monotonic() < deadline
        return refs


@pytest.fixture(scope="module")
def actors(cluster):
    actors = MemberActors()
    yield actors
    actors.close()


@pytest.fixture
def group(actors, request):
    return Group(request.node.name, actors)


def test_all_operations_among_three_actors(group):
    group.form("abc", 0)
    assert group.sums("abc") == [(9.0, 9.0)] * 3
    for rank, found in enumerate(get(group.begin("abc", "all_operations"))):
        assert found == {
            "allreduce SUM": 9.0,
            "allreduce PRODUCT": 24.0,
            "allreduce MIN": 2.0,
            "allreduce MAX": 4.0,
            "reduce": [2.0, 3.0, 9.0][rank],
            "broadcast": 3.0,
            "allgather": [2.0, 3.0, 4.0],
            "reducescatter": 30.0 * rank + 3.0,
            "send and recv": [2.0, 3.0, 2.0][rank],
            "rank and size": (rank, 3),
        }


def test_the_survivors_of_a_kill_name_the_lost_member_sum_again_and_admit_a_newcomer(group):
    group.form("abc", 0)
    refs = group.begin_to_sum("abc")
    killed_at = group.actors.signal("c", signal.SIGKILL)
    for error, when in get(refs[:2]):
        assert type(error) is ExchangeError
        assert (error.group, error.generation, error.missing) == (group.name, 0, ("c",))
        assert when - killed_at < SOON_S
    group.form("ab", 1)
    assert group.sums("ab") == [(5.0, 5.0)] * 2
    group.form("abd", 2)
    assert group.sums("abd") == [(9.0, 9.0)] * 3


def test_the_loss_of_a_member_is_noticed_although_a_peer_computes(group):
    """The waiting member waits for the peer and has no open message with the lost member."""
    group.form("abc", 0)
    refs = group.begin("a", "sum_until_it_fails")
    group.actors.signal("c", signal.SIGKILL)
    [(error, _)] = get(refs)
    assert error.missing == ("c",)
    [(error, _)] = get(group.begin("b", "sum_until_it_fails"))
    assert error.missing == ("c",)


def test_a_member_that_is_stopped_is_named_after_the_time_out(group):
    group.form("abc", 0, timeout_s=6.0)
    refs = group.begin_to_sum("abc")
    stopped_at = group.actors.signal("c", signal.SIGSTOP)
    for error, when in get(refs[:2]):
        assert isinstance(error, ExchangeTimeoutError)
        assert error.missing == ("c",)
        assert 4.0 < when - stopped_at < 6.0 + SOON_S
    group.form("ab", 1)
    assert group.sums("ab") == [(5.0, 5.0)] * 2
    group.actors.signal("c", signal.SIGCONT)
    [(error, _)] = get(refs[2:])  # the stopped member learns that it was left out
    assert isinstance(error, ExchangeError)
    group.form("abc", 2)
    assert group.sums("abc") == [(9.0, 9.0)] * 3


def test_a_member_that_is_missing_when_a_group_forms_is_named(group):
    for ref in group.begin_to_form("ab", 0, among="abc", start_timeout_s=1.0):
        with pytest.raises(ExchangeTimeoutError) as caught:
            get(ref)
        assert caught.value.missing == ("c",)
        assert "raise start_timeout_s of raydl.init_collective_group" in str(caught.value)
    group.form("ab", 1)
    assert group.sums("ab") == [(5.0, 5.0)] * 2


def test_a_generation_can_be_formed_only_once(group):
    group.form("ab", 3)
    for ref in group.begin_to_form("ab", 3):
        with pytest.raises(ConfigError, match="generation must be above 3"):
            get(ref)
    with pytest.raises(ExchangeError, match="generation 3 has begun"):
        get(group.begin_to_form("a", 2))


def test_a_group_outlives_the_actor_in_which_its_members_meet(group):
    group.form("ab", 0)
    job_id = ray.get_runtime_context().get_job_id()
    ray.kill(ray.get_actor(f"raydl.collective {job_id}", namespace="raydl"))
    assert group.sums("ab") == [(5.0, 5.0)] * 2
    group.form("ab", 1)
    assert group.sums("ab") == [(5.0, 5.0)] * 2


def test_a_group_name_of_another_back_end_is_not_taken_over(group):
    group.actors.start_missing("g")
    get(group.begin("g", "form_by_gloo", group.name))
    with pytest.raises(ConfigError, match="is a group of another back end in this"):
        get(group.begin_to_form("g", 0))


OTHER_JOB = """
import ray
from test_groups_on_ray import MemberActors, Group
ray.init(address="auto")
group = Group({name!r}, MemberActors())
group.form("xyz", 0)
print("sums", group.sums("xyz"))
"""


def test_groups_with_the_same_name_in_two_jobs_are_separate(group, four_cpus):
    group.form("ab", 5)
    script = OTHER_JOB.format(name=group.name)
    other = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=BOUND_S,
        env={**os.environ, "RAY_ADDRESS": four_cpus.address, "RAY_AUTH_MODE": "token"},
    )
    assert f"sums {[(9.0, 9.0)] * 3}" in other.stdout, other.stderr
    assert group.sums("ab") == [(5.0, 5.0)] * 2
