"""The operations of ``ray.util.collective`` on a raydl group, with ranks in threads."""

import threading
import time
import types

import numpy as np
import pytest
import torch
from members import Ranks
from ray.util import collective
from ray.util.collective import types as ray_types
from ray.util.collective.types import ReduceOp

from raydl.collective.process_group import dist
from raydl.collective.ray_collective import BACKEND, RayGroup, register
from raydl.collective.user_tensors import REDUCED
from raydl.errors import ConfigError, ExchangeError, ExchangeTimeoutError

SOON_S = 10.0
BOUND_S = 60.0
KINDS = {"torch": torch.tensor, "numpy": np.array}


@pytest.fixture
def ranks(monkeypatch):
    made = []

    def make(num_workers, **more):
        made.append(Ranks(num_workers, monkeypatch, is_user_group=True, **more))
        return made[-1].form_all()

    yield make
    for each in made:
        each.close()


@pytest.fixture(params=KINDS)
def make_tensor(request):
    return KINDS[request.param]


def total(name, rank):
    tensor = torch.tensor([rank + 1.0])
    collective.allreduce(tensor, name)
    return tensor.item()


def error_of(waiting):
    with pytest.raises(ExchangeError) as caught:
        waiting.result(timeout=BOUND_S)
    return caught.value


# results, worked by hand: rank r has r + 2

BY_OP = [("SUM", 9), ("PRODUCT", 24), ("MIN", 2), ("MAX", 4)]


@pytest.mark.parametrize(("op", "expected"), BY_OP)
def test_allreduce_gives_all_members_the_reduced_tensor(ranks, make_tensor, op, expected):
    def reduced(name, rank):
        tensor = make_tensor([[rank + 2, 1], [1, rank + 2]])
        collective.allreduce(tensor, name, ReduceOp[op])
        return tensor.tolist()

    ones = {"SUM": 3}.get(op, 1)
    assert ranks(3).by_ray(reduced) == [[[expected, ones], [ones, expected]]] * 3


@pytest.mark.parametrize(("op", "expected"), BY_OP)
def test_reduce_gives_the_root_the_reduced_tensor_and_leaves_the_others_unchanged(
    ranks, make_tensor, op, expected
):
    def reduced(name, rank):
        tensor = make_tensor([rank + 2.0])
        collective.reduce(tensor, 1, name, ReduceOp[op])
        return tensor.tolist()

    assert ranks(3).by_ray(reduced) == [[2.0], [expected], [4.0]]


def test_broadcast_gives_all_members_the_tensor_of_the_root(ranks, make_tensor):
    def sent(name, rank):
        tensor = make_tensor([rank + 2.0, 5.0])
        collective.broadcast(tensor, 2, name)
        return tensor.tolist()

    assert ranks(3).by_ray(sent) == [[4.0, 5.0]] * 3


def test_allgather_gives_all_members_the_tensors_of_all_by_rank(ranks, make_tensor):
    def collected(name, rank):
        out = [make_tensor([0.0, 0.0]) for _ in range(3)]
        collective.allgather(out, make_tensor([rank + 2.0, 1.0]), name)
        return [each.tolist() for each in out]

    assert ranks(3).by_ray(collected) == [[[2.0, 1.0], [3.0, 1.0], [4.0, 1.0]]] * 3


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("SUM", [9, 39, 69]),
        ("PRODUCT", [24, 2145, 12144]),
        ("MIN", [2, 11, 22]),
        ("MAX", [4, 15, 24]),
    ],
)
def test_reducescatter_gives_each_member_its_element_of_the_reduced_list(
    ranks, make_tensor, op, expected
):
    lists = [[2, 11, 22], [3, 13, 23], [4, 15, 24]]

    def scattered(name, rank):
        given = [make_tensor([value]) for value in lists[rank]]
        mine = make_tensor([0])
        collective.reducescatter(mine, given, name, ReduceOp[op])
        assert [each.tolist() for each in given] == [[value] for value in lists[rank]]
        return mine.item()

    assert ranks(3).by_ray(scattered) == expected


def test_a_member_receives_the_tensor_that_another_sends(ranks, make_tensor):
    def passed_on(name, rank):
        tensor = make_tensor([[rank + 2.0, 7.0]])
        if rank == 0:
            collective.send(tensor, 2, name)
        if rank == 2:
            collective.recv(tensor, 0, name)
        return tensor.tolist()

    assert ranks(3).by_ray(passed_on) == [[[2.0, 7.0]], [[3.0, 7.0]], [[2.0, 7.0]]]


def test_a_barrier_holds_all_members_until_the_last_one(ranks):
    members, is_last_here = ranks(2), threading.Event()

    def met(name, rank):
        if rank == 1:
            is_last_here.set()
        collective.barrier(name)
        return is_last_here.is_set()

    first = members.begin(0, met, members.name(0), 0)
    assert not first.done()
    assert members.begin(1, met, members.name(1), 1).result(BOUND_S)
    assert first.result(BOUND_S)


def test_a_call_without_options_sums_at_the_first_rank(ranks):
    def operated(name, rank):
        group = collective.get_group_handle(name)
        tensors = [torch.tensor([rank + 2.0]) for _ in range(4)]
        group.allreduce([tensors[0]])
        group.reduce([tensors[1]])
        group.broadcast([tensors[2]])
        group.reducescatter([tensors[3]], [[torch.tensor([rank + 2.0])] * 2])
        group.barrier()
        return [tensor.item() for tensor in tensors]

    assert ranks(2).by_ray(operated) == [[5.0, 5.0, 2.0, 5.0], [5.0, 3.0, 2.0, 5.0]]


def test_ray_knows_rank_and_size_and_forgets_the_group(ranks):
    members = ranks(2)
    found = members.by_ray(
        lambda name, rank: (
            collective.get_rank(name),
            collective.get_collective_group_size(name),
        )
    )
    assert found == [(0, 2), (1, 2)]
    members.by_ray(lambda name, rank: collective.destroy_collective_group(name))
    assert members.by_ray(lambda name, rank: collective.get_rank(name)) == [-1, -1]


def test_a_group_of_one_reduces_alone(ranks):
    assert ranks(1).by_ray(total) == [1.0]


# arguments


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_every_listed_dtype_is_reduced(ranks, dtype):
    def reduced(name, rank):
        tensors = [torch.ones(3, dtype=dtype) for _ in range(3)]
        collective.allreduce(tensors[0], name)
        collective.reduce(tensors[1], 0, name, ReduceOp.MAX)
        collective.reducescatter(tensors[2], [torch.ones(3, dtype=dtype)] * 2, name)
        return [tensor.tolist() for tensor in tensors]

    two = torch.ones(3, dtype=dtype).add(torch.ones(3, dtype=dtype)).tolist()
    assert ranks(2).by_ray(reduced) == [[two, [1, 1, 1], two]] * 2


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int16, torch.complex64, torch.float8_e5m2], ids=str
)
def test_any_dtype_is_sent(ranks, dtype):
    values = torch.tensor([0.0, 1.0, 2.0]).to(dtype)

    def sent(name, rank):
        tensors = [values.clone() if rank == 0 else torch.zeros(3).to(dtype) for _ in range(2)]
        collective.broadcast(tensors[0], 0, name)
        (collective.recv if rank else collective.send)(tensors[1], 1 - rank, name)
        tensors += [torch.zeros(3).to(dtype) for _ in range(2)]
        collective.allgather(tensors[2:], values, name)
        return all(torch.equal(t.view(torch.uint8), values.view(torch.uint8)) for t in tensors)

    assert ranks(2).by_ray(sent) == [True, True]


SHAPES = {
    "a scalar": lambda: (torch.tensor(3.0), np.array(3.0)),
    "no element": lambda: (torch.empty(0, 4), np.empty((4, 0))),
    "a transposed one": lambda: (torch.ones(2, 3).T, np.ones((2, 3)).T),
    "every second row": lambda: (torch.ones(6, 2)[::2], np.ones((6, 2))[::-2]),
    "a parameter": lambda: (torch.nn.Parameter(torch.ones(3)), np.ones(3)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_of_any_layout_are_reduced_in_place(ranks, shape):
    def reduced(name, rank):
        found = []
        for tensor in SHAPES[shape]():
            expected = (2 * tensor).tolist()
            collective.allreduce(tensor, name)
            found.append(tensor.tolist() == expected)
        return found

    assert ranks(2).by_ray(reduced) == [[True, True]] * 2


LAYOUTS = {
    "every second element": lambda whole: whole.flatten()[::2],
    "a column": lambda whole: whole[:, 1],
    "a transposed one": lambda whole: whole.T,
    "a parameter": lambda whole: torch.nn.Parameter(whole[:, 1]),
    "conjugated": lambda whole: whole.to(torch.complex64).conj(),
    "negated": lambda whole: (1j * whole).conj().imag,  # a view that differs in a sign bit only
}
REPEATED = {"one element, repeated": lambda whole: whole[:1, :1].expand(2, 3)}


@pytest.mark.parametrize("layout", [*LAYOUTS, *REPEATED])
def test_torch_tensors_of_any_layout_are_sent(ranks, layout):
    def sent(name, rank):
        value = {**LAYOUTS, **REPEATED}[layout](torch.arange(12.0).reshape(4, 3) + 20 * rank)
        before, out = value.tolist(), [torch.zeros_like(value) for _ in range(2)]
        collective.allgather(out, value, name)
        copies = [torch.zeros_like(value) if rank else value for _ in range(2)]
        (collective.recv if rank else collective.send)(copies[0], 1 - rank, name)
        collective.broadcast(copies[1], 0, name)
        assert value.tolist() == before
        return before, [each.tolist() for each in (*out, *copies)]

    (first, at_first), (second, at_second) = ranks(2).by_ray(sent)
    assert at_first == at_second == [first, second, first, first]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_tensors_of_any_layout_are_filled(ranks, layout):
    def filled(name, rank):
        whole = [torch.arange(12.0).reshape(4, 3) + 20 * rank for _ in range(4)]
        target, *out, received = [LAYOUTS[layout](each) for each in whole]
        value = target.tolist()
        collective.broadcast(target, 1, name)
        collective.allgather(out, out[rank], name)
        (collective.send if rank else collective.recv)(received, 1 - rank, name)
        return value, target.tolist(), received.tolist(), [each.tolist() for each in out]

    (own, *first), (other, *second) = ranks(2).by_ray(filled)
    assert first == second == [other, other, [own, other]]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "conjugated"])
def test_torch_tensors_of_any_layout_are_reduced(ranks, layout):
    def reduced(name, rank):
        whole = [torch.arange(12.0).reshape(4, 3) for _ in range(4)]
        given, *totals = [LAYOUTS[layout](each) for each in whole]
        before = given.tolist()
        collective.allreduce(totals[0], name)
        collective.reduce(totals[1], 0, name)
        collective.reducescatter(totals[2], [given] * 2, name)
        assert given.tolist() == before
        return (2 * given).tolist(), given.tolist(), [total.tolist() for total in totals]

    (twice, once, first), (_, _, second) = ranks(2).by_ray(reduced)
    assert (first, second) == ([twice, twice, twice], [twice, once, twice])


def read_only():
    array = np.ones(3)
    array.flags.writeable = False
    return array


def test_read_only_arrays_are_sent(ranks):
    """Arrays from Ray's object store are read-only."""

    def sent(name, rank):
        tensor = read_only() if rank == 0 else np.zeros(3)
        collective.broadcast(tensor, 0, name)
        out = [np.zeros(3), np.zeros(3)]
        collective.allgather(out, read_only(), name)
        return tensor.tolist(), [each.tolist() for each in out]

    assert ranks(2).by_ray(sent) == [([1.0] * 3, [[1.0] * 3] * 2)] * 2


def reduce_at_home(tensor, name):
    collective.reduce(tensor, 0, name)


def scatter(tensor, name):
    collective.reducescatter(tensor, [np.ones(3)], name)


REFUSED = {
    "not one of these": (
        "must have one of the dtypes .*, got torch.int16",
        torch.ones(3, dtype=torch.int16),
    ),
    "of complex numbers": (
        "must have one of the dtypes .*, got torch.complex64",
        torch.ones(3, dtype=torch.complex64),
    ),
    "read-only": ("read-only array.*pass a copy", read_only()),
    "text": ("array of numbers, got <U1", np.array(["a"])),
    "sparse": ("dense tensor.*got torch.sparse_coo", torch.ones(3).to_sparse()),
    "elsewhere": ("is on meta, and the group on cpu", torch.empty(3, device="meta")),
}


@pytest.mark.parametrize("act", [collective.allreduce, reduce_at_home, scatter])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_that_cannot_be_reduced_is_refused_before_anything_is_sent(ranks, kind, act):
    problem, tensor = REFUSED[kind]
    members = ranks(1)

    def refused(name, rank):
        with pytest.raises(ConfigError, match=problem):
            act(tensor, name)
        return total(name, rank)

    assert members.by_ray(refused) == [1.0]


@pytest.mark.parametrize(
    "other", [np.ones(2), np.ones((1, 3)), np.ones(3, np.float32)], ids=["size", "shape", "dtype"]
)
def test_lists_of_tensors_that_differ_are_refused(ranks, other):
    """gloo ends a process that receives more than it expects."""

    def refused(name, rank):
        with pytest.raises(
            ConfigError, match=r"tensor_list must have tensors like the other argument"
        ):
            collective.allgather([other], np.ones(3), name)
        with pytest.raises(
            ConfigError, match=r"tensor_list must have tensors like the other argument"
        ):
            collective.reducescatter(np.ones(3), [other], name)
        return total(name, rank)

    assert ranks(1).by_ray(refused) == [1.0]


class CupyArray:
    """A fake array of CuPy, for Ray's type check."""


def as_with_cupy(monkeypatch):
    monkeypatch.setattr(ray_types, "cupy_available", lambda: True)
    fake = types.SimpleNamespace(ndarray=CupyArray)
    monkeypatch.setattr(ray_types, "cp", fake, raising=False)


def test_arrays_of_cupy_are_refused(ranks, monkeypatch):
    as_with_cupy(monkeypatch)

    def refused(name, rank):
        with pytest.raises(ConfigError, match=r"dense tensor or array of numbers, got .*CupyArray"):
            collective.allreduce(CupyArray(), name)

    ranks(1).by_ray(refused)


def test_several_devices_of_one_member_are_refused(ranks, monkeypatch):
    as_with_cupy(monkeypatch)
    two = [np.ones(3), np.ones(3)]

    def refused(name, rank):
        for act in (
            lambda: collective.allreduce_multigpu(two, name),
            lambda: collective.reduce_multigpu(two, 0, 0, name),
            lambda: collective.broadcast_multigpu(two, 0, 0, name),
            lambda: collective.allgather_multigpu([two, two], two, name),
            lambda: collective.reducescatter_multigpu(two, [two, two], name),
        ):
            with pytest.raises(ConfigError, match=r"one device per member.*one actor per GPU"):
                act()
        peer = 1 - rank
        for act in (
            lambda: collective.send_multigpu(two[0], peer, 1, name),
            lambda: collective.send_multigpu(two[0], peer, 0, name, n_elements=2),
            lambda: collective.recv_multigpu(two[0], peer, 1, name),
        ):
            with pytest.raises(ConfigError, match="one device per member"):
                act()
        return total(name, rank)

    assert ranks(2).by_ray(refused) == [3.0, 3.0]


def test_the_error_for_a_group_made_by_ray_alone_says_how_to_connect_it(monkeypatch, ranks):
    ranks(1)  # this replaces Ray in this process
    collective.init_collective_group(1, 0, BACKEND, "bare")
    with pytest.raises(ConfigError, match=r"'bare' is not connected.*raydl\.init_collective_group"):
        collective.allreduce(torch.ones(1), "bare")
    collective.destroy_collective_group("bare")


def test_the_back_end_is_registered_once_and_is_available_with_torchs_groups():
    register()
    register()
    assert collective.is_backend_available(BACKEND) is dist.is_available()
    assert RayGroup.backend() == BACKEND


@pytest.mark.gpu
def test_tensors_on_a_device_stay_on_it(ranks):
    def operated(name, rank):
        tensors = [torch.tensor([2.0, 5.0], device="cuda") for _ in range(6)]
        collective.allreduce(tensors[0], name)
        collective.reduce(tensors[1], 0, name, ReduceOp.MAX)
        collective.broadcast(tensors[2], 0, name)
        collective.allgather([tensors[3]], tensors[2], name)
        collective.reducescatter(tensors[4], [tensors[2]], name)
        collective.barrier(name)
        with pytest.raises(ConfigError, match="is on cpu, and the group on cuda"):
            collective.allreduce(np.ones(2), name)
        return [(tensor.device.type, tensor.tolist()) for tensor in tensors]

    assert ranks(1, device="cuda").by_ray(operated) == [[("cuda", [2.0, 5.0])] * 6]


# the state after a failure


class OverwritingGroup:
    """A process group whose operations overwrite all memory that they may write, and fail."""

    def allreduce(self, tensors, options):
        return self._spoil(tensors)

    def reduce(self, tensors, options):
        return self._spoil(tensors)

    def broadcast(self, tensors, options):
        return self._spoil(tensors if options.rootRank else [])

    def allgather(self, lists, tensors):
        return self._spoil(lists[0])

    def reduce_scatter(self, tensors, lists, options):
        return self._spoil(tensors)

    def recv(self, tensors, source, tag):
        return self._spoil(tensors)

    def _spoil(self, tensors):
        for tensor in tensors:
            tensor.fill_(77)
        return self

    def is_completed(self):
        return True

    def wait(self, within=None):
        raise RuntimeError("the wire broke\nat line 3")


FAILING = {
    "allreduce": lambda t, name: collective.allreduce(t[0], name),
    "reduce": lambda t, name: collective.reduce(t[0], 0, name),
    "broadcast": lambda t, name: collective.broadcast(t[0], 1, name),
    "allgather": lambda t, name: collective.allgather(t[1:], t[0], name),
    "reducescatter": lambda t, name: collective.reducescatter(t[0], t[1:], name),
    "recv": lambda t, name: collective.recv(t[0], 1, name),
}


@pytest.mark.parametrize("act", FAILING)
def test_an_operation_that_fails_in_the_middle_changes_no_tensor(ranks, make_tensor, act):
    members = ranks(2)
    group = members.groups[0]
    kept, group.torch.process_group = group.torch.process_group, OverwritingGroup()
    tensors = [make_tensor([1.0, 2.0]) for _ in range(3)]
    members.lost = [1]
    error = error_of(members.begin(0, FAILING[act], tensors, members.name(0)))
    assert error.missing == ("w1",)
    assert [tensor.tolist() for tensor in tensors] == [[1.0, 2.0]] * 3
    group.torch.process_group = kept


# failures


def test_a_member_whose_process_has_ended_is_named_at_once(ranks):
    members = ranks(3, timeout_s=BOUND_S)
    waits = [members.begin(r, total, members.name(r), r) for r in (0, 1)]
    members.lost = [2]
    members.groups[2].torch.abort()  # its connections end, and it writes no status
    for waiting in waits:
        error = error_of(waiting)
        assert type(error) is ExchangeError
        assert (error.group, error.generation, error.round) == ("ring", 7, 1)
        assert error.missing == ("w2",)
        assert str(error) == (
            "operation 1 of group 'ring' (generation 7) failed: lost members ['w2']; "
            "form the group again, under a later generation"
        )


def test_a_member_that_is_busy_computing_does_not_count_as_lost(ranks):
    members = ranks(3, timeout_s=BOUND_S)
    waiting = members.begin(0, total, members.name(0), 0)
    members.lost = [2]
    members.groups[2].torch.abort()
    assert error_of(waiting).missing == ("w2",)
    error = error_of(members.begin(1, total, members.name(1), 1))
    assert error.missing == ("w2",)


def test_all_members_name_the_member_that_timed_out(ranks):
    members = ranks(3, timeout_s=1.0)
    began = time.monotonic()
    for waiting in [members.begin(r, total, members.name(r), r) for r in (0, 2)]:
        error = error_of(waiting)
        assert isinstance(error, ExchangeTimeoutError)
        assert error.missing == ("w1",)
        assert str(error) == (
            "operation 1 of group 'ring' (generation 7) failed: timed out after 1.0 s waiting for "
            "members w1; raise timeout_s of raydl.init_collective_group if they were only slow"
        )
    assert time.monotonic() - began < SOON_S


def test_a_message_waits_for_and_names_its_peer_only(ranks):
    members = ranks(3, timeout_s=1.0)
    receive = lambda: collective.recv(torch.ones(2), 1, members.name(0))  # noqa: E731
    error = error_of(members.begin(0, receive))
    assert isinstance(error, ExchangeTimeoutError)
    assert error.missing == ("w1",)


def test_a_member_that_leaves_fails_the_operations_of_the_others_at_once(ranks):
    members = ranks(3, timeout_s=BOUND_S)
    waits = [members.begin(r, total, members.name(r), r) for r in (0, 1)]
    began = time.monotonic()
    members.begin(2, collective.destroy_collective_group, members.name(2)).result(SOON_S)
    for waiting in waits:
        error = error_of(waiting)
        assert "members ['w2'] left" in error.problem
        assert error.missing == ()
    assert time.monotonic() - began < SOON_S


def test_a_group_with_a_failed_operation_starts_no_further_one(ranks):
    members = ranks(2, timeout_s=1.0)
    error_of(members.begin(0, total, members.name(0), 0))
    began = time.monotonic()
    error = error_of(members.begin(0, total, members.name(0), 0))
    assert time.monotonic() - began < 1.0
    assert error.missing == ("w1",)
    assert "operation 1 failed before; form the group again" in str(error)


def test_an_operation_whose_group_is_destroyed_by_another_thread_fails(ranks):
    members = ranks(2, timeout_s=BOUND_S)
    waiting = members.begin(0, total, members.name(0), 0)
    members.center.server.wait_for_keys(
        "run", 7, ["never"], 0.2
    )  # by then the operation waits for the other member
    collective.destroy_collective_group(members.name(0))
    error_of(waiting)


def test_a_member_that_does_not_connect_is_named_as_the_group_forms(monkeypatch):
    members = Ranks(2, monkeypatch, timeout_s=1.0, is_user_group=True)
    error = error_of(members.form(0))
    assert isinstance(error, ExchangeTimeoutError)
    assert error.missing == ("w1",)
    assert str(error).startswith(
        "forming group 'ring' (generation 7) failed: timed out after 1.0 s"
    )
    assert not members.is_known(0)
    members.close()
