"""All-reduce by point-to-point messages, compared with that of torch on real gloo groups."""

import dataclasses
import math
import queue
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from raydl.collective import allreduce
from raydl.collective.allreduce import (
    ALGORITHMS,
    LIBRARY,
    AdaptiveAllreduce,
    AllreduceProfiler,
    ProcessGroupLink,
    Reducer,
    measure_network,
)
from raydl.core.cost_model import COSTS, Network, choose, predict_s

SIZES = (1, 2, 3, 7, 1001, 65537)
FLAT = Network(1e-4, 1e-9, 1e-4, 1e-9)
FAST_INSIDE = Network(1e-3, 1e-8, 1e-6, 1e-11)
LAYOUTS = {
    1: ["a"],
    2: ["a", "a"],
    3: ["a", "b", "a"],
    4: ["a", "b", "b", "b"],
    5: ["a", "a", "b", "c", "c"],
    6: ["c", "a", "b", "a", "b", "a"],
    7: ["a", "b", "b", "b", "b", "b", "a"],
}


def run_ranks(num_workers, act, *, wait_s=60.0):
    """Return act(rank) of each rank, run in its own thread; an exception counts as the result."""
    results = [TimeoutError("the rank hangs")] * num_workers

    def run(rank):
        try:
            results[rank] = act(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(num_workers)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + wait_s
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
    return results


def without_errors(results):
    """Return the results, after a check that none is an exception."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def make_groups(num_workers, *, timeout_s=30.0):
    """Return the gloo group of each rank of one new ring of processes, here threads."""
    store = dist.HashStore()

    def make(rank):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupGloo(store, rank, num_workers, options)

    return without_errors(run_ranks(num_workers, make))


@pytest.fixture(scope="module")
def groups():
    """Return a function from a size to its gloo groups, which are made once."""
    made = {}

    def groups_of(num_workers):
        if num_workers not in made:
            made[num_workers] = make_groups(num_workers)
        return made[num_workers]

    return groups_of


class RecordingLink:
    """A link that records the messages it sends and the memory it fills, and that can fail.

    Args:
        link: the link it is instead of.
        dies_after: messages sent after which it fails.
    """

    def __init__(self, link, *, dies_after=math.inf):
        self.rank, self.num_workers = link.rank, link.num_workers
        self.link, self.dies_after = link, dies_after
        self.sent, self.filled = [], set()

    def send(self, tensor, to):
        if len(self.sent) >= self.dies_after:
            raise RuntimeError("the wire is cut")
        self.sent.append(tensor.nbytes)
        return self.link.send(tensor, to)

    def receive(self, tensor, source):
        self.filled.add(tensor.untyped_storage().data_ptr())
        return self.link.receive(tensor, source)


class QueueHandle:
    def __init__(self, wait):
        self.wait = wait


class QueueLink:
    """A link in memory: a message is a copy in the queue between two ranks."""

    def __init__(self, queues, rank, num_workers):
        self.rank, self.num_workers, self.queues = rank, num_workers, queues

    def send(self, tensor, to):
        self.queues[self.rank, to].put(tensor.clone())
        return QueueHandle(lambda: None)

    def receive(self, tensor, source):
        return QueueHandle(
            lambda: tensor.copy_(self.queues[source, self.rank].get(timeout=30)),
        )


def queue_links(num_workers):
    ranks = range(num_workers)
    queues = {(a, b): queue.SimpleQueue() for a in ranks for b in ranks}
    return [QueueLink(queues, rank, num_workers) for rank in ranks]


def total(links, algorithm, tensors, *, nodes, network=FLAT):
    """Return each rank's tensor after the all-reduce."""

    def act(rank):
        tensor = tensors[rank].clone()
        reducer = Reducer(links[rank], nodes, network)
        reducer.allreduce(tensor, algorithm)
        return tensor

    return without_errors(run_ranks(len(links), act))


def random_tensors(num_workers, size, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for _ in range(num_workers)]


def bits(tensor):
    return tensor.view(torch.int32)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_rank_ends_with_the_same_bits_and_with_torchs_own_sum(groups, algorithm, num_workers):
    def act(rank):
        group, found = groups(num_workers)[rank], []
        link = ProcessGroupLink(group, rank, num_workers, tag=3)
        reducer = Reducer(link, LAYOUTS[num_workers], FLAT)
        for size in SIZES:
            mine = random_tensors(num_workers, size)[rank]
            reference = mine.clone()
            group.allreduce([reference]).wait()
            reducer.allreduce(mine, algorithm)
            found.append((mine, reference))
        return found

    groups(num_workers)  # made once here, before the threads use them
    first, *others = without_errors(run_ranks(num_workers, act))
    for index, (mine, reference) in enumerate(first):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)
        for other in others:
            assert torch.equal(bits(other[index][0]), bits(mine))


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_whole_numbers_are_summed_exactly(algorithm):
    for num_workers in range(1, 8):
        for size in (1, 2, 5, 100):
            tensors = [torch.arange(size) * 10.0 + rank for rank in range(num_workers)]
            expected = torch.stack(tensors).sum(0)
            links = queue_links(num_workers)
            for tensor in total(links, algorithm, tensors, nodes=LAYOUTS[num_workers]):
                assert torch.equal(tensor, expected)


@pytest.mark.parametrize(
    "nodes",
    [[0] * 5, [0, 1, 2, 3, 4], [0, 0, 0, 0, 1], [1, 0, 1, 0, 1], ["b", "a", "a", "c", "b"]],
    ids=str,
)
def test_two_levels_fit_any_layout_of_nodes(nodes):
    tensors = random_tensors(len(nodes), 1001)
    first, *others = total(queue_links(len(nodes)), "two-level", tensors, nodes=nodes)
    torch.testing.assert_close(first, torch.stack(tensors).sum(0), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(bits(other), bits(first)) for other in others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
def test_other_types_of_numbers_are_summed(dtype):
    tensors = [torch.arange(6).to(dtype) for _ in range(3)]
    for algorithm in ALGORITHMS:
        for tensor in total(queue_links(3), algorithm, tensors, nodes=[0, 0, 1]):
            assert torch.equal(tensor, 3 * torch.arange(6).to(dtype))


def test_an_empty_tensor_stays_empty(groups):
    for algorithm in ALGORITHMS:
        links = [ProcessGroupLink(group, rank, 3) for rank, group in enumerate(groups(3))]
        tensors = total(links, algorithm, [torch.empty(0)] * 3, nodes=[0, 0, 1])
        assert [tensor.numel() for tensor in tensors] == [0, 0, 0]


def test_a_ring_sends_the_number_of_bytes_in_the_formula():
    links = [RecordingLink(link) for link in queue_links(4)]
    total(links, "ring", random_tensors(4, 100), nodes=range(4))
    for link in links:
        assert link.sent == [100] * 6  # 2(p-1) messages of S/p = 400/4 bytes


def test_a_ring_sends_no_empty_message():
    links = [RecordingLink(link) for link in queue_links(4)]
    total(links, "ring", random_tensors(4, 1), nodes=range(4))
    assert sorted(len(link.sent) for link in links) == [1, 1, 2, 2]  # one number, 2(p-1) times
    assert all(size == 4 for link in links for size in link.sent)


@pytest.mark.parametrize(
    ("num_workers", "messages"),
    [(1, [0]), (2, [1, 1]), (4, [2] * 4), (3, [2, 1, 1]), (5, [3, 2, 2, 2, 1])],
)
def test_doubling_sends_whole_tensors_and_folds_the_extra_ranks(num_workers, messages):
    links = [RecordingLink(link) for link in queue_links(num_workers)]
    tensors = random_tensors(num_workers, 10)
    total(links, "recursive-doubling", tensors, nodes=range(num_workers))
    assert [link.sent for link in links] == [[40] * count for count in messages]


def test_only_leaders_send_to_other_nodes():
    links = [RecordingLink(link) for link in queue_links(4)]
    total(links, "two-level", random_tensors(4, 10), nodes=["a", "a", "b", "b"])
    assert [len(link.sent) for link in links] == [2, 1, 2, 1]


def test_a_second_call_uses_the_memory_of_the_first(groups):
    num_workers, nodes = 3, [0, 0, 1]

    def act(rank):
        link = RecordingLink(ProcessGroupLink(groups(num_workers)[rank], rank, num_workers))
        reducer, tensor = Reducer(link, nodes, FLAT), torch.ones(1001)
        for _ in range(3):
            for algorithm in ALGORITHMS:
                reducer.allreduce(tensor, algorithm)
        return tensor, link.filled

    groups(num_workers)
    for tensor, filled in without_errors(run_ranks(num_workers, act)):
        assert torch.equal(tensor, torch.full((1001,), 3.0**9))
        assert len(filled - {tensor.data_ptr()}) == 1  # the scratch memory, allocated once


def test_every_algorithm_has_a_cost():
    assert list(ALGORITHMS) == list(COSTS)


def test_the_formulas_by_hand():
    network = Network(2.0, 0.5, 1.0, 0.25)
    apart, together = [0, 1, 2, 3], [0, 0, 0, 0]
    assert predict_s("ring", 8, apart, network) == 6 * (2 + 2 * 0.5)  # 2(p-1)(a + S/p b)
    assert predict_s("ring", 8, together, network) == 6 * (1 + 2 * 0.25)
    assert predict_s("recursive-doubling", 8, apart, network) == 2 * (2 + 8 * 0.5)
    assert predict_s("recursive-doubling", 8, together, network) == 2 * (1 + 8 * 0.25)
    # Three ranks on the largest node: a tree of depth 2, up and down; two leaders, one round.
    assert predict_s("two-level", 8, [0, 0, 0, 1], network) == 4 * (1 + 8 * 0.25) + (2 + 8 * 0.5)
    for name in ALGORITHMS:
        assert predict_s(name, 8, [0], network) == 0.0


@pytest.mark.parametrize(
    ("num_workers", "rounds"), [(2, 1), (3, 3), (4, 2), (5, 4), (6, 4), (7, 4), (8, 3), (9, 5)]
)
def test_doubling_takes_one_fold_step_more_than_the_logarithm(num_workers, rounds):
    only_latency = Network(1.0, 0.0, 1.0, 0.0)
    assert predict_s("recursive-doubling", 8, range(num_workers), only_latency) == rounds
    is_power_of_two = math.log2(num_workers).is_integer()
    assert rounds == math.ceil(math.log2(num_workers)) + (not is_power_of_two)


# Of R rounds among p: S* = a (2(p-1) - R) / (b (R - 2(p-1)/p)), here with a/b = 1e5 bytes.
@pytest.mark.parametrize(("num_workers", "bytes_1e5"), [(3, 0.6), (4, 8), (8, 8.8), (16, 208 / 17)])
def test_doubling_is_chosen_below_the_crossover_and_the_ring_above(num_workers, bytes_1e5):
    crossover, nodes = 1e5 * bytes_1e5, range(num_workers)
    assert choose(0.99 * crossover, nodes, FLAT)[0] == "recursive-doubling"
    assert choose(1.01 * crossover, nodes, FLAT)[0] == "ring"
    ring, doubling = (predict_s(n, crossover, nodes, FLAT) for n in ("ring", "recursive-doubling"))
    assert ring == pytest.approx(doubling)


def test_among_two_doubling_is_chosen_for_any_size():
    assert choose(1e12, [0, 1], FLAT)[0] == "recursive-doubling"


def test_two_levels_are_chosen_where_the_inside_of_a_node_is_much_faster():
    nodes = [0] * 8 + [1] * 8
    for num_bytes in (1_000, 100_000_000):
        name, seconds = choose(num_bytes, nodes, FAST_INSIDE)
        assert name == "two-level"
        assert seconds == predict_s(name, num_bytes, nodes, FAST_INSIDE)
    assert choose(1_000, range(16), FAST_INSIDE)[0] == "recursive-doubling"
    assert choose(1_000, [0] * 16, FAST_INSIDE)[0] == "recursive-doubling"


@pytest.mark.parametrize(
    "nodes", [["a"], ["a", "a"], ["a", "b"], ["a", "a", "b", "c", "b"], [0] * 4], ids=str
)
def test_all_ranks_measure_the_same_network(groups, nodes):
    p = len(nodes)
    group = groups(p)

    def act(rank):
        return measure_network(ProcessGroupLink(group[rank], rank, p), nodes)

    start = time.monotonic()
    networks = without_errors(run_ranks(p, act))
    assert time.monotonic() - start < 5.0  # some 50 ms; the machine may be busy
    assert networks == [networks[0]] * p
    for seconds in dataclasses.astuple(networks[0]):
        assert seconds > 0.0 if p > 1 else seconds == 0.0


def test_the_slowest_connection_sets_the_measured_figures():
    class Slow(QueueLink):
        def send(self, tensor, to):
            is_across = self.rank // 2 != to // 2
            time.sleep(2e-3 if is_across else 0.0)
            return super().send(tensor, to)

    links = [Slow(link.queues, link.rank, 4) for link in queue_links(4)]
    nodes = [0, 0, 1, 1]
    network = without_errors(run_ranks(4, lambda rank: measure_network(links[rank], nodes)))[0]
    assert network.latency_s > 1.9e-3
    assert network.latency_s > 2 * network.local_latency_s


# the choice of the fastest


NAMES = ("ring", "two-level", LIBRARY)


def profiled(num_workers, times):
    """Return each rank's profiler and the algorithms of its sums, up to the choice.

    Args:
        num_workers: number of ranks.
        times: function from (rank, algorithm, index of its try) to the seconds of a sum.
    """
    links = queue_links(num_workers)

    def act(rank):
        profiler, used = AllreduceProfiler(NAMES), []
        while not profiler.chosen:
            algorithm = profiler.next_algorithm()
            profiler.add(algorithm, times(rank, algorithm, used.count(algorithm)))
            used.append(algorithm)
            profiler.agree(links[rank])
        return profiler, used

    return without_errors(run_ranks(num_workers, act))


MEDIANS = {"ring": 1.15, "two-level": 1.0, LIBRARY: 1.1}


def test_all_ranks_keep_the_algorithm_with_the_least_median_time_of_five():
    def times(rank, algorithm, index):
        is_disturbed = algorithm == "two-level" and index in (1, 3)
        return MEDIANS[algorithm] + (0.1 if is_disturbed else 0.0)

    for profiler, used in profiled(3, times):
        assert profiler.chosen == profiler.next_algorithm() == "two-level"
        assert profiler.tried == MEDIANS
        assert used == list(NAMES) * 5


def test_waits_for_late_ranks_do_not_count_in_the_choice():
    def times(rank, algorithm, index):
        is_late = index % 3 == rank  # the others wait for it
        return MEDIANS[algorithm] + (0.0 if is_late else 5.0 * (algorithm == "two-level"))

    assert [profiler.tried for profiler, _ in profiled(3, times)] == [MEDIANS] * 3


@pytest.mark.parametrize(
    ("slower", "tries"), [(3.1, (1, 1, 1)), (2.9, (2, 2, 2)), (1.4, (3, 3, 3)), (1.25, (4, 4, 4))]
)
def test_slow_algorithms_are_dropped_the_sooner_the_slower_they_are(slower, tries):
    seconds = {"ring": slower, "two-level": 1.0, LIBRARY: slower}
    [(profiler, used)] = profiled(1, lambda rank, algorithm, index: seconds[algorithm])
    assert tuple(used.count(name) for name in NAMES) == tries
    assert profiler.chosen == "two-level"
    assert profiler.tried == seconds


def test_only_algorithms_that_are_left_are_tried_again():
    seconds = {"ring": 4.0, "two-level": 1.0, LIBRARY: 1.4}
    [(_, used)] = profiled(1, lambda rank, algorithm, index: seconds[algorithm])
    assert used == [*NAMES, "two-level", LIBRARY, "two-level", LIBRARY]


def test_before_the_choice_nothing_is_reported():
    profiler = AllreduceProfiler(["ring", LIBRARY])
    profiler.add("ring", 1.0)
    assert profiler.measured_s is None


def test_a_single_algorithm_is_chosen_without_a_message():
    profiler = AllreduceProfiler(["ring"])
    profiler.add("ring", 2.0)
    profiler.agree(None)
    assert (profiler.chosen, profiler.tried, profiler.measured_s) == ("ring", {}, 2.0)


def adapted(links, nodes, *, sizes=(7,), library=None, num_sums=20):
    """Return each rank's report and last sum after sums of ones of each size by ``auto``."""

    def act(rank):
        adaptive = AdaptiveAllreduce(links[rank], nodes, "auto", library=library and library(rank))
        try:
            for size in sizes:
                for _ in range(num_sums):
                    tensor = torch.ones(size)
                    adaptive.start(tensor).wait(timedelta(seconds=30))
            return adaptive.report(), tensor
        finally:
            adaptive.close()

    return without_errors(run_ranks(len(nodes), act))


class SlowLink(QueueLink):
    """A link on which each message takes 2 ms, or what is told."""

    delay_s = 2e-3

    def send(self, tensor, to):
        time.sleep(self.delay_s)
        return super().send(tensor, to)


@pytest.mark.parametrize("is_library_slow", [False, True])
def test_torchs_own_all_reduce_is_kept_where_it_is_the_fastest(groups, is_library_slow):
    links = [SlowLink(link.queues, link.rank, 3) for link in queue_links(3)]
    for link in links:
        link.delay_s = 2e-3 if is_library_slow else 0.03  # also on a busy machine
    made = groups(3)

    def library(rank):
        def allreduce(tensor):
            time.sleep(0.05 if is_library_slow else 0.0)
            return ProcessGroupLink(made[rank], rank, 3).allreduce(tensor)

        return allreduce

    for report, tensor in adapted(links, [0, 1, 2], library=library):
        assert torch.equal(tensor, torch.full((7,), 3.0))
        assert (report.algorithm == LIBRARY) != is_library_slow
        assert (report.predicted_s is None) != is_library_slow
        assert report.measured_s < 0.05


def test_a_choice_is_made_for_each_size_of_message(monkeypatch):
    monkeypatch.setattr(allreduce, "measure_network", lambda link, nodes: FLAT)
    nodes = [0] * 4 + [1] * 4
    (small, _), *_ = adapted(queue_links(8), nodes, sizes=[1])
    (large, _), *_ = adapted(queue_links(8), nodes, sizes=[1, 200_000])
    assert (small.num_bytes, large.num_bytes) == (4, 800_000)
    assert "ring" not in small.tried  # its 14 messages take 4.7 times as long as 3
    assert "ring" in large.tried


@pytest.mark.parametrize(
    ("nodes", "has_two_levels"), [([0, 1, 2], False), ([0, 0, 0], True), ([0, 0, 1], True)], ids=str
)
def test_two_levels_are_not_tried_among_ranks_on_a_node_each(nodes, has_two_levels):
    report, _ = adapted(queue_links(3), nodes)[0]
    assert ("two-level" in report.tried) == has_two_levels


def test_a_named_algorithm_is_used_from_the_first_sum_and_reported():
    links = queue_links(2)

    def act(rank):
        adaptive = AdaptiveAllreduce(links[rank], [0, 1], "ring", generation=3)
        assert adaptive.report() is None
        adaptive.start(torch.ones(5)).wait()
        adaptive.close()
        return adaptive.report()

    for report in without_errors(run_ranks(2, act)):
        assert (report.generation, report.algorithm, report.num_bytes) == (3, "ring", 20)
        assert report.predicted_s > 0.0
        assert report.tried == {}


# failures


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a_rank_that_dies_ends_the_sum_of_all_in_bounded_time(algorithm):
    num_workers, nodes = 4, [0, 0, 1, 1]
    groups = make_groups(num_workers, timeout_s=1.5)

    def act(rank):
        dies_after = 1 if rank == 2 else math.inf
        link = ProcessGroupLink(groups[rank], rank, num_workers)
        reducer = Reducer(RecordingLink(link, dies_after=dies_after), nodes, FLAT)
        for _ in range(2):
            reducer.allreduce(torch.ones(1001), algorithm)

    results = run_ranks(num_workers, act, wait_s=30.0)
    assert [type(result) for result in results] == [RuntimeError] * num_workers
    assert str(results[2]) == "the wire is cut"


def test_a_rank_that_never_joins_ends_the_measurement():
    groups = make_groups(3, timeout_s=1.5)

    def act(rank):
        if rank == 1:
            return None
        return measure_network(ProcessGroupLink(groups[rank], rank, 3), [0, 0, 0])

    first, _, last = run_ranks(3, act, wait_s=30.0)
    assert isinstance(first, RuntimeError)
    assert isinstance(last, RuntimeError)
