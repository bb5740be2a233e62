"""A process that a node holds must answer some time; one that waits for room need not."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import ray
from clusters import BOUND_S
from processes import stopped_processes

from raydl.config import ElasticConfig, ScalingConfig
from raydl.core.worker_group import Lost
from raydl.elastic.heartbeat import Heartbeats
from raydl.ray_backend import cluster
from raydl.ray_backend.calls import Calls
from raydl.ray_backend.cluster import Notices, node_here
from raydl.ray_backend.liveness import Liveness
from raydl.ray_backend.starts import Starts
from raydl.ray_backend.worker_group import RayWorkerGroup


class Watch:
    """Looks every second at processes that start, with a patience of 60 s."""

    def __init__(self, *names):
        self.now, self.there = 0.0, set()
        self.starts = Starts(60.0, clock=lambda: self.now)
        for name in names:
            self.starts.begin(name)

    def look_on(self, until):
        """Look until then; return who was ever given up, with the moment."""
        found = {}
        while self.now < until:
            self.now += 1.0
            for who, waited_s in self.starts.look(self.there.__contains__):
                found.setdefault(who, (self.now, waited_s))
        return found


def test_a_process_without_room_is_waited_for_as_long_as_it_takes():
    assert Watch("w0").look_on(until=10_000.0) == {}


def test_a_process_that_is_there_and_does_not_answer_is_given_up_after_its_time():
    watch = Watch("w0", "w1")
    watch.look_on(until=100.0)
    watch.there.add("w1")
    assert watch.look_on(until=300.0) == {"w1": (170.0, 65.0)}  # seen at 105, then every 5 s


def test_a_process_that_has_answered_or_ended_is_not_given_up():
    watch = Watch("w0", "w1")
    watch.there |= {"w0", "w1"}
    watch.look_on(until=30.0)
    watch.starts.end("w0")
    watch.starts.end("unknown")
    assert set(watch.look_on(until=300.0)) == {"w1"}


def test_a_process_is_looked_at_every_five_seconds():
    watch, looks = Watch("w0"), []
    for _ in range(20):
        watch.now += 1.0
        watch.starts.look(lambda who: looks.append((who, watch.now)))
    assert looks == [("w0", 5.0), ("w0", 10.0), ("w0", 15.0), ("w0", 20.0)]


@ray.remote(num_cpus=0)
class Halted:
    """A worker whose process stops before it hears a call."""

    def __init__(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def ping(self):
        pass

    def setup(self, *arguments):
        pass


class OneWorker(RayWorkerGroup):
    """A worker group that has no center, and takes up what is asked for as it does in a run."""

    def __init__(self, patience_s, home):
        self._job = SimpleNamespace(config=SimpleNamespace(
            scaling=ScalingConfig(num_workers=1), elastic=ElasticConfig(max_busy_s=patience_s)
        ))  # fmt: skip
        self._home, self._asked_at = home, time.monotonic() + 1e6
        self._calls, self._heartbeats, self._liveness = Calls(), Heartbeats(10.0), Liveness()
        self._starts, self._notices = Starts(patience_s), Notices()
        self._avoided, self._told_busy = set(), set()
        self._workers, self._places, self._events, self._late = {}, {}, [], []
        self._train = self._prepare = self._untrained = self._evaluator = None
        self._shards, self._is_open = [], False


@pytest.mark.cluster
def test_a_worker_that_halts_as_it_starts_is_lost_and_leaves_no_process(cluster, monkeypatch):
    monkeypatch.setattr("raydl.ray_backend.worker_group.WorkerActor", Halted)
    before, worker_group = stopped_processes(), OneWorker(1.0, node_here())
    worker_group.request_worker("w0")
    deadline, events = time.monotonic() + BOUND_S, []
    while not events:
        assert time.monotonic() < deadline
        events = worker_group.poll(0.25)
    (lost,) = events
    assert lost.name == "w0"
    assert lost.reason.startswith("its process has not answered since it began, ")
    assert lost.reason.endswith(" s ago (elastic.max_busy_s)")
    assert isinstance(lost, Lost)
    while stopped_processes() - before:
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Starting:
    """A shard whose process imports what it needs, and has answered no call yet."""

    def __init__(self):
        self.ping = SimpleNamespace(remote=object)


def test_a_shard_has_no_lease_to_keep_before_it_has_answered_once(monkeypatch):
    monkeypatch.setattr(cluster, "draining_nodes", list)
    worker_group = OneWorker(60.0, "here")
    worker_group._shards = [None, Starting()]

    def owed_after_a_question():
        worker_group._asked_at = 0.0
        worker_group._ask_for_news()
        return worker_group._heartbeats.silent(-1.0)

    assert owed_after_a_question() == []
    (call,) = worker_group._calls
    call.handle((1, ("here", 17), None))
    worker_group._calls.forget(lambda _: True)
    assert owed_after_a_question() == ["shard 1"]
