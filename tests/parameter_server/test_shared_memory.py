"""A center in shared memory that processes of its node write: no lost updates, bounded waits."""

import contextlib
import dataclasses
import gc
import os
import signal
import time

import numpy as np
import pytest
import torch
from ensembles import Ensemble, tiny_images
from mails import NO_BUFFERS, message
from mapped_cells import FakeCenterClient, open_exchange, open_shard
from message_jobs import message_job as job
from message_jobs import wait_for

from raydl.config import ExchangeConfig, ScalingConfig
from raydl.core.exchange import Header
from raydl.core.membership import Membership
from raydl.core.reports import Outcome
from raydl.core.rules import BLOCK, AheadRule, Now
from raydl.errors import ExchangeError, ExchangeTimeoutError
from raydl.methods import resolve
from raydl.methods.easgd import Elastic
from raydl.parameter_server.protocol import (
    NOTHING,
    CellAddress,
    MessageId,
    Request,
)
from raydl.parameter_server.shared_memory import MappedCell, MappedExchange, can_be_shared
from raydl.worker.in_process import HERE


def weights(values):
    """Return a message with weights."""
    return message(Elastic(0.5), values)


def move(exchange, replica):
    """Exchange once, and move the replica."""
    exchange.begin(weights(replica), NO_BUFFERS, Header())
    arrival = exchange.wait()
    replica.sub_(arrival.pull)
    exchange.commit()
    return arrival


def center_values(shard):
    return shard.state().weights[0]


# the arithmetic


def test_one_exchange_moves_both_by_a_quarter_of_their_distance():
    shard, client = open_shard(2), FakeCenterClient()
    exchange = open_exchange(shard, client=client)
    replica = torch.tensor([4.0, 8.0])  # alpha 1/4
    exchange.begin(weights(replica), NO_BUFFERS, Header())
    assert center_values(shard).tolist() == [1, 2]  # immediately
    assert replica.tolist() == [4, 8]  # the replica moves only with its local step
    arrival = exchange.wait()
    assert arrival.pull.tolist() == [1, 2]
    assert arrival.distance_squared == pytest.approx(80)
    assert arrival.now == Now(2)
    [settled] = client.settled
    assert (settled.span, settled.weights.size) == ((0, 0), 0)


def test_a_vector_of_many_blocks_moves_like_one_of_a_few_blocks():
    size = 2 * BLOCK + 5
    shard, replica = open_shard(size), torch.randn(size)
    center = torch.zeros(size)
    expected = center + (replica - center) / 4
    exchange = open_exchange(shard)
    before = float(torch.dot(replica, replica))
    arrival = move(exchange, replica)
    assert torch.allclose(torch.tensor(center_values(shard)), expected)
    assert arrival.distance_squared == pytest.approx(before, rel=1e-4)


class DoublePull(Elastic):
    """Pulls the replica twice as hard as the center."""

    def pull(self, replica, center, now, *, out):
        return super().pull(replica, center, now, out=out).mul_(2)


def test_a_rule_that_derives_from_elastic_averaging_keeps_its_own_arithmetic():
    shard, rule = open_shard(2, rule=DoublePull(0.5)), DoublePull(0.5)
    exchange = open_exchange(shard, rule=rule)
    exchange.begin(weights(torch.tensor([4.0, 8.0])), NO_BUFFERS, Header())
    assert exchange.wait().pull.tolist() == [2, 4]
    assert center_values(shard).tolist() == [1, 2]


@pytest.mark.parametrize("method", ["async-easgd", "hogwild-easgd"])
def test_a_worker_trains_the_same_through_memory_as_by_messages(method):
    ends = []
    for has_neighbours in (False, True):
        run = Ensemble(
            job(method), num_workers=1, images=tiny_images(48), has_neighbours=has_neighbours
        ).join()
        kind = type(run.workers[0].runner.strategy.exchanges[0])
        assert (kind is MappedExchange) == has_neighbours
        assert run.run() == [Outcome.FINISHED]
        ends.append((run.center().weights, run.workers[0].replica.flat.weights.clone()))
    (center, replica), (mapped_center, mapped_replica) = ends
    assert np.allclose(center, mapped_center, atol=1e-6)
    assert torch.allclose(replica, mapped_replica, atol=1e-6)


def test_fragments_that_take_effect_later_use_memory_too():
    in_parts = ExchangeConfig(fragments=2, delay=1)
    config = dataclasses.replace(job("async-easgd", period=4), exchange=in_parts)
    ends = []
    for has_neighbours in (False, True):
        run = Ensemble(
            config, num_workers=1, images=tiny_images(48), has_neighbours=has_neighbours
        ).join()
        run.run()
        ends.append(run.center().weights)
    assert np.allclose(*ends, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "is_shared"),
    [
        ({}, True),
        ({"exchange": ExchangeConfig(compression="bf16")}, False),
        ({"scaling": ScalingConfig(use_gpu=True)}, False),
        ({"method": "async-sgd"}, False),  # an optimizer steps at the center
        ({"method": "original-easgd"}, False),  # workers exchange in turns
        ({"method": "sync-easgd"}, False),
    ],
)
def test_memory_is_shared_only_if_messages_carry_nothing_but_plain_weights(change, is_shared):
    method, others = change.get("method", "async-easgd"), {**change}
    others.pop("method", None)
    config = dataclasses.replace(job(method), **others)
    assert can_be_shared(config, resolve(config)) == is_shared


class AtTheCenter(Elastic):
    shared = ("momentum",)


def test_a_center_with_state_beside_it_shares_no_memory():
    config = job("async-easgd")
    method = resolve(config)
    assert not can_be_shared(config, dataclasses.replace(method, rule=AtTheCenter(0.9)))


# members


def test_a_removed_worker_moves_nothing():
    shard = open_shard(2)
    exchange = open_exchange(shard, "w1")
    shard.change(Membership(2, ("w0",)))
    with pytest.raises(ExchangeError, match="the center refused w1: it is no longer a member"):
        exchange.begin(weights(torch.ones(2)), NO_BUFFERS, Header())
    assert center_values(shard).tolist() == [0, 0]
    assert shard.shared_cells("w1", HERE) == {}


def test_a_newcomer_in_the_slot_of_a_lost_worker_does_not_count_as_that_worker():
    shard = open_shard(2)
    before = open_exchange(shard, "w1")
    shard.change(Membership(2, ("w0",)))
    shard.change(Membership(3, ("w0", "w2")))
    with pytest.raises(
        ExchangeError, match="entered generation 3, but the message is of generation 1"
    ):
        before.begin(weights(torch.ones(2)), NO_BUFFERS, Header())
    stays = open_exchange(shard, "w0")
    move(stays, torch.tensor([4.0, 8.0]))
    assert center_values(shard).tolist() == [1, 2]


def test_a_worker_that_enters_again_does_not_count_as_its_former_self():
    shard = open_shard(2)
    before = open_exchange(shard, "w1")
    shard.change(Membership(2, ("w0",)))
    shard.change(Membership(3, ("w0", "w1")))
    with pytest.raises(ExchangeError, match="entered generation 3"):
        before.begin(weights(torch.ones(2)), NO_BUFFERS, Header())


def test_workers_without_a_slot_send_messages():
    workers = tuple(f"w{i}" for i in range(600))
    shard = open_shard(2, workers=workers)
    cells = [shard.shared_cells(worker_id, HERE) for worker_id in workers]
    slots = [address.slot for found in cells for address in found.values()]
    assert 500 < len(slots) < 600
    assert len(set(slots)) == len(slots)


def test_a_worker_on_another_node_sends_messages():
    shard = open_shard(2)
    assert shard.shared_cells("w0", HERE)
    assert shard.shared_cells("w0", "another node") == {}


def test_a_refused_completion_raises():
    exchange = open_exchange(
        open_shard(2), client=FakeCenterClient(refusal="the center refused w0")
    )
    exchange.begin(weights(torch.ones(2)), NO_BUFFERS, Header())
    with pytest.raises(ExchangeError, match="the center refused w0"):
        exchange.wait()


@pytest.mark.parametrize("path", ["/proc/1/fd/999", "/proc/{pid}/fd/999", "/proc/self/exe"])
def test_memory_that_cannot_be_opened_is_not_mapped(path):
    address = CellAddress(path.format(pid=os.getpid()), 1, 2)
    assert MappedCell.open_address(address, 2, is_locked=True, timeout_s=1.0) is None


def test_memory_of_another_center_is_not_written():
    shard = open_shard(2)
    [address] = shard.shared_cells("w0", HERE).values()
    other = CellAddress(address.path, address.token + 1, address.slot)
    assert MappedCell.open_address(other, 2, is_locked=True, timeout_s=1.0) is None
    assert MappedCell.open_address(address, 3, is_locked=True, timeout_s=1.0) is None


# processes


@contextlib.contextmanager
def child(action):
    """Run an action in its own process; end it with SIGKILL."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class StallingRule(AheadRule):
    """Moves the first half, then stops."""

    def exchange_(self, replica, center, now, *, out):
        half = len(center) // 2
        center[:half].add_(replica[:half])
        time.sleep(60)


def stall(shard):
    """Move half of the center, and stop with the lock held."""
    open_exchange(shard, "w1", rule=StallingRule()).begin(
        weights(torch.ones(2 * BLOCK)), NO_BUFFERS, Header()
    )


def has_stalled(shard):
    """Return whether all of the first half has moved; its first value moves earlier."""
    return bool((shard._cells[0, 2 * BLOCK].center.weights[:BLOCK] == 1).all())


def test_a_worker_killed_in_the_middle_of_an_update_does_not_block_others():
    shard = open_shard(2 * BLOCK)
    with child(lambda: stall(shard)):
        wait_for(lambda: has_stalled(shard))
    replica = torch.ones(2 * BLOCK)
    move(open_exchange(shard), replica)
    values = center_values(shard)
    assert set(values[:BLOCK].tolist()) == {1.0}  # the first half has moved to the replica
    assert set(values[BLOCK:].tolist()) == {0.25}


def test_the_wait_for_a_worker_that_stopped_in_the_middle_of_an_update_ends():
    shard = open_shard(2 * BLOCK, timeout_s=0.3)
    with child(lambda: stall(shard)) as pid:
        wait_for(lambda: has_stalled(shard))
        os.kill(pid, signal.SIGSTOP)
        own = open_exchange(shard, timeout_s=0.3)
        with pytest.raises(ExchangeTimeoutError, match=f"process {pid}, which holds the center"):
            own.begin(weights(torch.ones(2 * BLOCK)), NO_BUFFERS, Header())
        message = Request(
            MessageId("w0", 1, 0), (0, 2 * BLOCK), np.ones(2 * BLOCK, np.float32), NOTHING,
            2, 0.1,
        )  # fmt: skip
        with pytest.raises(ExchangeTimeoutError, match=f"process {pid}"):
            shard.exchange(message)
        assert center_values(shard)[0] == 1  # the shard can still be copied
        shard.change(Membership(2, ("w0",)))  # and workers join and leave


def exchange_repeatedly(shard, worker_id, count, path):
    torch.manual_seed(int(worker_id[1:]))
    replica = torch.randn(BLOCK + 3)
    np.save(f"{path}-{worker_id}-before.npy", replica.numpy())
    exchange = open_exchange(shard, worker_id, timeout_s=60.0)
    for _ in range(count):
        move(exchange, replica)
    np.save(f"{path}-{worker_id}-after.npy", replica.numpy())


def test_no_update_is_lost_between_memory_and_messages(tmp_path):
    workers, path = ("w0", "w1"), str(tmp_path / "x")
    shard = open_shard(BLOCK + 3, timeout_s=60.0, workers=(*workers, "w2"))
    replica = np.full(BLOCK + 3, 3.0, np.float32)
    with contextlib.ExitStack() as stack:
        pids = [
            stack.enter_context(child(lambda w=w: exchange_repeatedly(shard, w, 300, path)))
            for w in workers
        ]
        for number in range(100):  # like a worker of another node
            request = Request(
                MessageId("w2", 1, number), (0, replica.size), replica, NOTHING, 2, 0.1
            )
            replica = replica - (replica - shard.exchange(request).weights) / 4
        assert {os.waitpid(pid, 0)[1] for pid in pids} == {0}
    before = sum(np.load(f"{path}-{w}-before.npy").astype(np.float64) for w in workers) + 3.0
    after = sum(np.load(f"{path}-{w}-after.npy").astype(np.float64) for w in workers)
    # Each exchange conserves the sum of replicas and center.
    assert np.abs(after + replica + center_values(shard) - before).max() < 1e-3


def test_memory_does_not_outlive_the_processes_that_map_it():
    gc.collect()  # memory of other tests
    before = open_files()
    shard = open_shard(4)
    exchange = open_exchange(shard)
    assert open_files() > before
    del shard, exchange
    assert open_files() == before


def open_files():
    return len([name for name in os.listdir("/proc/self/fd") if _is_center(name)])


def _is_center(name):
    try:
        return "raydl-center" in os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return False
