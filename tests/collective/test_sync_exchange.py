"""One scenario for every transport of the synchronous exchange."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch
from mails import NO_BUFFERS, message
from processes import steady_growth
from stores import StoreActor

from raydl.collective.ray_collective import CollectiveGroup, GroupAddress
from raydl.collective.sync_exchange import GatheredExchange, SyncExchange, gather_bytes
from raydl.config import OptimizerConfig
from raydl.core.center import Center
from raydl.core.codecs import parse_codec
from raydl.core.compression import ErrorFeedback
from raydl.core.exchange import Header
from raydl.core.optimizers import make_optimizer
from raydl.errors import ExchangeError, ExchangeTimeoutError
from raydl.methods.data_parallel import MeanGradient
from raydl.methods.easgd import Elastic
from raydl.worker.in_process import LocalGroup

BETA = 0.5


def weights_of(values):
    """Return a message with weights."""
    return message(Elastic(BETA), values)


def make_exchange(group, size):
    return SyncExchange(
        group,
        Center(
            torch.ones(size),
            torch.zeros(2),
            rule=Elastic(BETA),
            make_optimizer=make_optimizer(OptimizerConfig()),
        ),
        span=slice(0, size),
        round=0,
    )


def take_rounds(group, rank, *, size, num_rounds):
    """Exchange a few rounds; return this rank's results of the last one."""
    exchange = make_exchange(group, size)
    for round in range(num_rounds):
        weights = torch.full((size,), float(rank + round))
        header = Header(stop=rank)
        exchange.begin(weights_of(weights), torch.tensor([rank, 1.0]), header)
        arrival = exchange.wait()
        now, sums = arrival.now, arrival.sums
        exchange.commit()
    return exchange.center.weights, exchange.center.buffers, now, sums, exchange.round


def check_rounds(results, *, size, num_rounds):
    """Check the results of all ranks against the equations."""
    p = len(results)
    center, alpha = torch.ones(size), BETA / p
    for round in range(num_rounds):
        total = torch.full((size,), float(sum(range(p)) + p * round))
        center += alpha * (total - p * center)
    for weights, buffers, now, sums, round in results:
        torch.testing.assert_close(weights, center)
        assert torch.equal(weights, results[0][0])  # the same bits on every rank
        torch.testing.assert_close(buffers, torch.tensor([(p - 1) / 2, 1.0]))
        assert (now.num_workers, sums.weight) == (p, p)
        assert sums.stop == sum(range(p))
        assert round == num_rounds


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 4, 1001])
def test_threads_exchange(num_workers, size):
    group = LocalGroup(num_workers, timeout_s=20.0)
    results = [None] * num_workers

    def run(rank):
        results[rank] = take_rounds(group.member(rank), rank, size=size, num_rounds=4)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    check_rounds(results, size=size, num_rounds=4)


def test_bytes_are_gathered_whole_also_if_float32_cannot_count_them():
    group, sent = LocalGroup(2, timeout_s=20.0), [b"\x07" * (2**24 + 1), b"\x08"]

    def gather(rank):
        device = torch.device("cpu")
        return gather_bytes(group.member(rank), rank, sent[rank], round=0, device=device)

    with ThreadPoolExecutor(2) as threads:
        assert all(gathered == sent for gathered in threads.map(gather, range(2)))


def test_a_rank_that_times_out_is_named_and_nothing_changes():
    exchange = make_exchange(LocalGroup(2, timeout_s=0.05, generation=4).member(0), 3)
    exchange.begin(weights_of(torch.zeros(3)), torch.zeros(2), Header())
    with pytest.raises(ExchangeTimeoutError, match=r"generation 4.*waiting for rank 1;"):
        exchange.wait()
    assert exchange.center.weights.tolist() == [1, 1, 1]
    assert exchange.round == 0


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_thousands_of_rounds_leave_memory_flat(codec):
    group = LocalGroup(1, timeout_s=5.0).member(0)
    exchange = make_exchange(group, 8_000)
    if codec != "none":
        exchange = GatheredExchange(
            group,
            exchange.center,
            span=exchange.span,
            round=0,
            feedback=ErrorFeedback(parse_codec(codec)),
        )
    weights, buffers = torch.ones(8_000), torch.zeros(2)

    def rounds(count):
        for _ in range(count):
            exchange.begin(weights_of(weights), buffers, Header())
            exchange.wait()
            exchange.commit()

    rounds(200)
    assert steady_growth(rounds, 500) < 800_000  # 25 vectors


@ray.remote(num_cpus=0)
class Peer:
    """One rank in its own process."""

    def pid(self):
        return os.getpid()

    def join(self, address, num_workers, rank, store):
        torch.set_num_threads(1)
        self.rank = rank
        ids = tuple(f"w{r}" for r in range(num_workers))
        self.group = CollectiveGroup(address, ids, rank, center=store)

    def rounds(self, size, num_rounds):
        return take_rounds(self.group, self.rank, size=size, num_rounds=num_rounds)

    def fail(self, size, at=0.0):
        """Exchange once, at a Unix time; return the error, the time it took, and any change."""
        exchange = make_exchange(self.group, size)
        time.sleep(max(0.0, at - time.time()))
        start = time.monotonic()
        exchange.begin(weights_of(torch.zeros(size)), torch.zeros(2), Header())
        try:
            exchange.wait()
        except ExchangeError as error:
            changed = bool((exchange.center.weights != 1).any())
            return error, time.monotonic() - start, changed
        return None, 0.0, False


class Peers:
    """Peers that form one group after another; peers that were not killed are used again."""

    def __init__(self):
        self.store, self.alive, self.generation = StoreActor.remote(), [], 0

    def form(self, num_workers, *, timeout_s=20.0):
        """Return that many peers, in a new group."""
        self.alive += [Peer.remote() for _ in range(num_workers - len(self.alive))]
        members, self.generation = self.alive[:num_workers], self.generation + 1
        # All have started before they connect: the time-out does not include starting.
        ray.get([m.pid.remote() for m in members], timeout=120)
        address = GroupAddress(f"test{id(self)}", self.generation, "cpu", timeout_s)
        refs = [m.join.remote(address, num_workers, r, self.store) for r, m in enumerate(members)]
        ray.get(refs, timeout=60)
        return members

    def kill(self, peer):
        self.alive.remove(peer)
        os.kill(ray.get(peer.pid.remote(), timeout=30), 9)


@pytest.fixture(scope="module")
def peers(cluster):
    peers = Peers()
    yield peers
    for actor in (peers.store, *peers.alive):
        ray.kill(actor)


@pytest.mark.cluster
@pytest.mark.parametrize(("num_workers", "size"), [(2, 1001), (3, 5), (1, 7)])
def test_actors_exchange_in_groups_of_any_size_one_after_another(peers, num_workers, size):
    """The same processes form a group of two, then of three, then of one: no size is fixed."""
    results = ray.get([p.rounds.remote(size, 4) for p in peers.form(num_workers)], timeout=60)
    check_rounds(results, size=size, num_rounds=4)


@pytest.mark.cluster
def test_an_actor_that_is_missing_is_named_within_the_time_out(peers):
    members = peers.form(3, timeout_s=6.0)
    at = time.time() + 5.0  # both start at once, since a peer that times out closes its connections
    refs = [members[rank].fail.remote(100, at) for rank in (0, 2)]
    for error, waited_s, changed in ray.get(refs, timeout=60):
        assert isinstance(error, ExchangeTimeoutError)
        assert error.missing == ("w1",)
        assert 4.5 < waited_s < 14.0
        assert not changed


@pytest.mark.cluster
def test_a_killed_actor_fails_the_exchange_of_its_peers_at_once(peers):
    left, lost = peers.form(2, timeout_s=30.0)
    ref = left.fail.remote(100)
    peers.kill(lost)
    error, waited_s, changed = ray.get(ref, timeout=60)
    assert type(error) is ExchangeError
    assert waited_s < 10.0
    assert not changed


@pytest.mark.cluster
def test_forming_a_group_fails_at_once_when_the_center_is_lost(peers):
    store, (peer,) = StoreActor.remote(), peers.form(1)
    ray.get([store.wait_for_keys.remote("run", 1, [], 0.0), peer.pid.remote()], timeout=120)
    ray.kill(store)
    began = time.monotonic()
    with pytest.raises(ExchangeError, match="the center did not answer"):
        ray.get(peer.join.remote(GroupAddress("run", 1, "cpu", 60.0), 2, 0, store), timeout=60)
    assert time.monotonic() - began < 20.0


# what compressed gradients leave out


class Gathering:
    """Ranks in threads that send gradients of batches of any size, all gradients being given."""

    def __init__(self, num_workers, size):
        self.num_workers, self.size = num_workers, size
        self.centers = [
            Center(
                torch.zeros(size),
                torch.zeros(0),
                rule=MeanGradient(),
                make_optimizer=lambda tensors: torch.optim.SGD(tensors, lr=1.0),
            )
            for _ in range(num_workers)
        ]
        self.feedback = [ErrorFeedback(parse_codec("none")) for _ in range(num_workers)]
        self.computed = torch.zeros(size)
        self.moves = []

    def round(self, num_samples, gradients, codec):
        """Exchange mean gradients, shape [size] each, of ``num_samples`` samples each."""
        group = LocalGroup(self.num_workers, timeout_s=20.0)

        def run(rank):
            before, self.feedback[rank] = self.feedback[rank], ErrorFeedback(parse_codec(codec))
            self.feedback[rank].load_state_dict(before.state_dict())
            kind = SyncExchange if codec == "none" else GatheredExchange
            exchange = kind(
                group.member(rank),
                self.centers[rank],
                span=slice(0, self.size),
                round=0,
                feedback=self.feedback[rank],
            )
            total = gradients[rank] * num_samples[rank]
            weight = float(num_samples[rank])
            sent = message(MeanGradient(), total, weight=weight)
            exchange.begin(sent, NO_BUFFERS, Header())
            exchange.wait()
            exchange.commit()

        before = self.centers[0].weights.clone()
        with ThreadPoolExecutor(self.num_workers) as pool:
            list(pool.map(run, range(self.num_workers)))
        self.moves.append(float((before - self.centers[0].weights).abs().max()))
        for n, gradient in zip(num_samples, gradients, strict=True):
            self.computed += gradient * n / max(1, sum(num_samples))

    def moved_and_left_out(self):
        """Return what has moved the center, and what the next messages add to it at equal parts."""
        left_out = [f.residual for f in self.feedback if len(f.residual)]
        return sum(left_out, torch.zeros(self.size)) / self.num_workers - self.centers[0].weights


def test_a_small_batch_does_not_move_the_center_by_the_residual_of_full_batches():
    run = Gathering(2, 100)
    for n in [64] * 5 + [1] + [64] * 3:
        run.round([n, n], [torch.ones(100)] * 2, "topk:0.1")
    assert run.moves == pytest.approx([1, 2, 3, 4, 5, 6, 7, 8, 9])


SAMPLES = {
    "full": [(64, 64)] * 11,
    "a small batch of both": [(64, 64)] * 5 + [(1, 1)] + [(64, 64)] * 5,
    "a small batch of one": [(64, 64)] * 5 + [(1, 64), (64, 3)] + [(64, 64)] * 5,
    "a round without samples": [(64, 64)] * 5 + [(0, 0)] + [(64, 64)] * 5,
    "a rank without samples": [(64, 64)] * 5 + [(0, 64), (5, 0)] + [(64, 64)] * 5,
    "never the same": [(1, 9), (7, 2), (0, 3), (4, 4), (64, 1), (2, 5)] * 2,
}


@pytest.mark.parametrize("codec", ["bf16", "int8", "topk:0.1"])
@pytest.mark.parametrize("samples", SAMPLES.values(), ids=SAMPLES)
def test_what_moved_the_center_and_what_is_left_out_is_what_was_computed(samples, codec):
    run, random = Gathering(2, 100), torch.Generator().manual_seed(3)
    for num_samples in samples:
        run.round(num_samples, torch.randn(2, 100, generator=random), codec)
    torch.testing.assert_close(run.moved_and_left_out(), run.computed, atol=1e-4, rtol=1e-4)


def test_a_round_without_samples_keeps_the_residual_that_it_sends():
    run = Gathering(2, 100)
    run.round([64, 64], [torch.arange(100.0)] * 2, "topk:0.1")
    left_out = run.feedback[0].residual.clone()
    run.round([0, 0], [torch.zeros(100)] * 2, "topk:0.1")
    assert run.moves[1] == 0
    assert torch.equal(run.feedback[0].residual, left_out)


@pytest.mark.parametrize("samples", SAMPLES.values(), ids=SAMPLES)
def test_no_residual_is_lost_when_the_codec_changes(samples):
    run, random = Gathering(2, 100), torch.Generator().manual_seed(3)
    codecs = ["topk:0.1", "int8", "none", "topk:0.02", "none", "none"] * 2
    for num_samples, codec in zip(samples, codecs, strict=False):
        run.round(num_samples, torch.randn(2, 100, generator=random), codec)
    torch.testing.assert_close(run.moved_and_left_out(), run.computed, atol=1e-4, rtol=1e-4)


def test_a_message_without_codec_contains_the_whole_residual():
    run = Gathering(2, 100)
    for codec in ("topk:0.1", "topk:0.1", "none"):
        run.round([64, 64], [torch.ones(100)] * 2, codec)
    assert [float(f.residual.abs().sum()) for f in run.feedback] == [0, 0]
    torch.testing.assert_close(run.centers[0].weights, torch.full((100,), -3.0))
