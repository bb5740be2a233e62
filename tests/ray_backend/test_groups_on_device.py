"""Groups of plain actors on a device: all operations, and a member that is killed."""

import os
import signal
import time

import pytest
import ray
import torch
from group_members import GroupMember
from one_gpu import own_host
from ray.util import collective
from ray.util.collective.types import ReduceOp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.cluster,
    pytest.mark.timeout(300),
]

BOUND_S = 120.0
SOON_S = 15.0


@ray.remote(num_cpus=0, max_concurrency=2)
class DeviceActor(GroupMember):
    """A member whose tensors are on the first GPU."""

    def form(self, members, member, generation, name, **more):
        super().form(members, member, generation, name, device="cuda", **more)
        self.size = len(members)

    def leave(self):
        collective.destroy_collective_group(self.name)

    def own(self):
        return torch.tensor([self.rank + 2.0], device="cuda")

    def sum(self):
        tensor = self.own()
        collective.allreduce(tensor, self.name)
        self.num_sums += 1
        return tensor.item()

    def all_operations(self):
        rank, size, name = self.rank, self.size, self.name
        found = {}
        for op in ReduceOp:
            tensor = self.own()
            collective.allreduce(tensor, name, op)
            found[f"allreduce {op.name}"] = tensor.item()
        tensor = self.own()
        collective.reduce(tensor, 1, name)
        found["reduce"] = tensor.item()
        tensor = self.own()
        collective.broadcast(tensor, 1, name)
        found["broadcast"] = tensor.item()
        out = [torch.zeros(1, device="cuda") for _ in range(size)]
        collective.allgather(out, self.own(), name)
        found["allgather"] = [each.item() for each in out]
        tensor = torch.zeros(1, device="cuda")
        parts = [torch.tensor([10.0 * r + rank], device="cuda") for r in range(size)]
        collective.reducescatter(tensor, parts, name)
        found["reducescatter"] = tensor.item()
        collective.barrier(name)
        tensor = self.own()
        if rank == 0:
            collective.send(tensor, size - 1, name)
        if rank == size - 1:
            collective.recv(tensor, 0, name)
        found["send and recv"] = tensor.item()
        return found


def get(refs):
    return ray.get(refs, timeout=BOUND_S)


def start(name):
    environment = {**own_host(name), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    return DeviceActor.options(runtime_env={"env_vars": environment}).remote()


@pytest.fixture(scope="module")
def actors(cluster):
    found = {name: start(name) for name in ("a", "b", "c")}
    yield found
    for actor in found.values():
        ray.kill(actor)


def form(actors, members, name, *, generation=1, **more):
    ids = tuple(members)
    get([actors[m].form.remote(ids, m, generation, name, **more) for m in members])


def call(actors, members, method):
    return get([getattr(actors[m], method).remote() for m in members])


def test_every_operation_gives_its_result_on_the_device(actors):
    form(actors, "abc", "operations")
    found = call(actors, "abc", "all_operations")
    call(actors, "abc", "leave")
    for rank, results in enumerate(found):
        assert results == {
            "allreduce SUM": 9.0,
            "allreduce PRODUCT": 24.0,
            "allreduce MIN": 2.0,
            "allreduce MAX": 4.0,
            "reduce": 9.0 if rank == 1 else rank + 2.0,
            "broadcast": 3.0,
            "allgather": [2.0, 3.0, 4.0],
            "reducescatter": 30.0 * rank + 3.0,
            "send and recv": 2.0 if rank == 2 else rank + 2.0,
        }


def test_the_others_name_a_killed_member_and_sum_in_the_next_generation(actors):
    form(actors, "abc", "killed", timeout_s=BOUND_S)
    refs = [actors[m].sum_until_it_fails.remote() for m in "abc"]
    pid = get(actors["c"].pid.remote())
    deadline = time.monotonic() + BOUND_S
    while min(call(actors, "abc", "state")) < 3:
        assert time.monotonic() < deadline
    os.kill(pid, signal.SIGKILL)
    killed_at = time.time()
    for error, at in get(refs[:2]):
        assert error.missing == ("c",)
        assert at - killed_at < SOON_S
    form(actors, "ab", "killed", generation=2)
    assert call(actors, "ab", "sum") == [5.0, 5.0]
    actors["c"] = start("c")
    form(actors, "abc", "killed", generation=3)
    assert call(actors, "abc", "sum") == [9.0] * 3
    call(actors, "abc", "leave")
