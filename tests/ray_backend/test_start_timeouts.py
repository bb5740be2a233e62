"""A placed process must answer within its time-out; one that waits for resources need not."""

import os
import signal
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray
from clusters import BOUND_S
from processes import stopped_processes

from raydl.config import ElasticConfig, ScalingConfig, TrainConfig
from raydl.core.reports import Outcome
from raydl.core.worker_group import Lost, Refused, RunEnded
from raydl.elastic.heartbeat import Heartbeats
from raydl.ray_backend import fork_server
from raydl.ray_backend.cluster import Notices, Place, node_here
from raydl.ray_backend.liveness import Liveness
from raydl.ray_backend.pending_calls import PendingCalls
from raydl.ray_backend.start_timeouts import StartTimeouts
from raydl.ray_backend.worker_group import RayWorkerGroup


class StartTimeoutsHarness:
    """Start time-outs of 60 s, checked every second by a clock that the test sets."""

    def __init__(self, *names):
        self.now, self.placed = 0.0, set()
        self.starts = StartTimeouts(60.0, clock=lambda: self.now)
        for name in names:
            self.starts.begin(name)

    def check(self, until):
        """Check until a time; return when each process was given up and how long it had waited."""
        found = {}
        while self.now < until:
            self.now += 1.0
            for process, waited_s in self.starts.expired(self.placed.__contains__):
                found.setdefault(process, (self.now, waited_s))
        return found


def test_a_process_without_resources_never_times_out():
    assert StartTimeoutsHarness("w0").check(until=10_000.0) == {}


def test_a_placed_process_that_does_not_answer_times_out():
    harness = StartTimeoutsHarness("w0", "w1")
    harness.check(until=100.0)
    harness.placed.add("w1")
    assert harness.check(until=300.0) == {"w1": (170.0, 65.0)}  # seen at 105, then every 5 s


def test_a_process_that_has_answered_or_ended_is_not_given_up():
    harness = StartTimeoutsHarness("w0", "w1")
    harness.placed |= {"w0", "w1"}
    harness.check(until=30.0)
    harness.starts.end("w0")
    harness.starts.end("unknown")
    assert set(harness.check(until=300.0)) == {"w1"}


def test_a_process_is_checked_every_five_seconds():
    harness, checks = StartTimeoutsHarness("w0"), []
    for _ in range(20):
        harness.now += 1.0
        harness.starts.expired(lambda process: checks.append((process, harness.now)))
    assert checks == [("w0", 5.0), ("w0", 10.0), ("w0", 15.0), ("w0", 20.0)]


@ray.remote(num_cpus=0)
class HaltedWorker:
    """A worker whose process stops before it receives a call."""

    def __init__(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def ping(self):
        pass

    def setup(self, *arguments):
        pass


class OneWorker(RayWorkerGroup):
    """A worker group without a center that starts requested workers as in a run."""

    def __init__(self, patience_s):
        self._job = SimpleNamespace(config=TrainConfig(
            scaling=ScalingConfig(num_workers=1), elastic=ElasticConfig(max_busy_s=patience_s)
        ))  # fmt: skip
        self._home, self._polled_at = node_here(), time.monotonic() + 1e6
        self._calls, self._heartbeats, self._liveness = PendingCalls(), Heartbeats(10.0), Liveness()
        self._starts, self._setups = StartTimeouts(patience_s), StartTimeouts(600.0)
        self._notices = Notices()
        self._avoided, self._reported_busy = set(), set()
        self._workers, self._spares, self._places, self._found = {}, {}, {}, {}
        self._events, self._from_threads, self._evaluator = [], [], None
        self._train = self._prepare = self._non_trainable = None
        self._runtime_env = fork_server.runtime_env()


@pytest.mark.cluster
def test_a_worker_that_halts_as_it_starts_is_lost_and_leaves_no_process(
    four_cpus, cluster, monkeypatch
):
    monkeypatch.setattr("raydl.ray_backend.worker_group.WorkerActor", HaltedWorker)
    worker_group = OneWorker(patience_s=1.0)
    worker_group.request_worker("w0")
    deadline, events = time.monotonic() + BOUND_S, []
    while not events:
        assert time.monotonic() < deadline
        events = worker_group.poll(0.25)
    (lost,) = events
    assert lost.name == "w0"
    assert lost.reason.startswith("its process has not answered since it started, ")
    assert lost.reason.endswith(" s ago (elastic.max_busy_s)")
    assert isinstance(lost, Lost)
    while stopped_processes(four_cpus.head_node.get_session_dir_path()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


class StartingShards(RayWorkerGroup):
    """A center of three shards, of which none has answered yet."""

    def __init__(self):
        self._calls, self._heartbeats = PendingCalls(), Heartbeats(10.0)
        self._starts, self._setups = StartTimeouts(600.0), StartTimeouts(600.0)
        self._places, self._found, self._workers, self._home = {}, {}, {}, "node"
        self._shards, self._events = [Mock(), Mock(), Mock()], []
        self._notices = SimpleNamespace(new=lambda homes: {})
        self._is_center_up, self._evaluator = False, None
        self._backup = SimpleNamespace(is_due=lambda now: False)
        for index in (1, 2):
            self._starts.begin(f"shard {index}")

    def poll_again(self):
        self._polled_at = -1e9
        self._calls.forget(lambda _: True)
        self._poll_processes()

    @property
    def leased(self):
        return self._heartbeats.silent(-1.0)


def test_the_lease_of_a_shard_begins_with_its_first_answer():
    """The start of a shard takes longer than a lease on a crowded machine."""
    group = StartingShards()
    group.poll_again()
    assert group.leased == []
    group._on_ping((2, Place("node", 4), Refused("process", 0)))
    group.poll_again()
    assert group.leased == ["shard 2"]


def test_a_lost_shard_is_not_polled_until_the_center_is_started_again():
    """Each poll would fail at once and report a further loss."""
    group = StartingShards()
    for index in (1, 2):
        group._on_ping((index, Place("node", index), Refused("process", 0)))
    assert group._lose("shard 1", "its node was lost") == [Lost("shard 1", "its node was lost")]
    group.poll_again()
    assert [shard.ping.remote.called for shard in group._shards[1:]] == [False, True]


@pytest.mark.parametrize("answer", ["the center has started", "a worker's loop has ended"])
def test_the_center_is_polled_as_soon_as_the_controller_waits_for_it(answer):
    """A new center has the round to continue from; of a lost one, a worker may report first."""
    group = StartingShards()
    group._rebuilt_in, group._polled_at = 0, time.monotonic()
    if answer == "the center has started":
        group._poll_processes()
        group._on_center_started(Place("node", 4))
    else:
        group._is_center_up = True
        group._poll_processes()
        group._on_run_ended(RunEnded("w0", Outcome.BROKEN, 7, 1, "a reset"))
    assert not group._shards[0].poll.remote.called
    group._poll_processes()
    assert group._shards[0].poll.remote.called


def test_a_shard_whose_process_never_answers_is_given_up(monkeypatch):
    group, now = StartingShards(), [0.0]
    group._starts = StartTimeouts(60.0, clock=lambda: now[0])
    group._starts.begin("shard 1")
    monkeypatch.setattr("raydl.ray_backend.worker_group.place_of", lambda actor: Place("node", 3))
    given_up = []
    while now[0] < 100.0:
        now[0] += 5.0
        given_up += group._starts.expired(group._is_placed)
    assert given_up[0] == ("shard 1", 65.0)


NODE = "0" * 56


class StartingGroup(RayWorkerGroup):
    """A worker group whose processes are placed at once, with a clock that the test sets."""

    def __init__(self):
        self.now, self.killed = 0.0, []
        self._job = SimpleNamespace(config=TrainConfig())
        self._home, self._runtime_env, self._threads = NODE, None, 1
        self._calls, self._heartbeats, self._liveness = Mock(), Heartbeats(10.0), Liveness()
        self._calls.wait.return_value = []
        self._starts = StartTimeouts(60.0, clock=lambda: self.now)
        self._setups = StartTimeouts(600.0, clock=lambda: self.now)
        self._workers, self._spares, self._places, self._shards = {}, {}, {}, []
        self._found = {}
        self._events, self._from_threads, self._reported_busy = [], [], set()
        self._held, self._evaluator = (-1, ()), None
        self._train = self._prepare = self._non_trainable = None

    def _poll_processes(self):
        pass

    def polls(self, *, until):
        """Poll every second until a time; return the losses."""
        lost = []
        while self.now < until:
            self.now += 1.0
            lost += self.poll(0.25)
        return lost


@pytest.fixture
def starting(monkeypatch):
    group, where = StartingGroup(), "raydl.ray_backend.worker_group"
    for name in ("WorkerActor", "CenterActor", "ray.kill"):
        monkeypatch.setattr(f"{where}.{name}", Mock())
    monkeypatch.setattr(f"{where}.place_of", lambda actor: Place("node", 3))
    monkeypatch.setattr(f"{where}.request_start", Mock())
    monkeypatch.setattr(f"{where}.kill_process", lambda place, home: group.killed.append(place))
    return group


def test_a_worker_whose_setup_never_ends_is_lost(starting):
    """The worker waits for a GPU driver or a file system, and answers polls meanwhile."""
    starting._start_worker("w0", {})
    starting.polls(until=50.0)
    starting._on_alive("w0", Place("node", 3))
    assert starting.polls(until=650.0) == []
    why = "its setup has not ended for 605 s (scaling.start_timeout_s)"
    assert starting.polls(until=660.0) == [Lost("w0", why)]
    assert starting.killed == [Place("node", 3)]


def test_a_process_on_another_node_is_killed_as_the_one_that_ray_had_placed_there(starting):
    """Its id may be that of another process by then, so its node is asked when it started."""
    starting._start_worker("w0", {})
    starting.polls(until=10.0)
    (asked,) = [c for c in starting._calls.expect.call_args_list if "start" in c.kwargs.values()]
    asked.args[2](77)
    assert [loss.name for loss in starting.polls(until=70.0)] == ["w0"]
    assert starting.killed == [Place("node", 3, start=77)]


def test_a_worker_that_was_set_up_has_no_time_limit_for_its_setup(starting):
    starting._start_worker("w0", {})
    starting._on_set_up("w0", None, (Place("node", 3), False))
    starting._on_alive("w0", Place("node", 3))
    assert starting.polls(until=2000.0) == []


def test_a_center_that_never_starts_is_lost(starting):
    starting._start_center(None)
    assert starting.polls(until=60.0) == []
    (lost,) = starting.polls(until=70.0)
    assert (lost.name, lost.reason.partition(",")[0]) == (
        "center",
        "its process has not answered since it started",
    )
    starting._start_center(None)
    starting._on_center_started(Place("node", 3))
    starting._is_center_up = False  # no further poll
    assert starting.polls(until=1000.0) == []


def test_a_center_that_never_starts_is_lost_with_another_version_of_ray(starting, monkeypatch):
    """That one does not tell where processes are."""
    monkeypatch.setattr(ray, "__version__", "2.61.0")
    monkeypatch.setattr("raydl.ray_backend.worker_group.place_of", lambda actor: None)
    starting._start_center(None)
    starting._start_worker("w0", {})  # it may wait for resources
    assert [lost.name for lost in starting.polls(until=70.0)] == ["center"]
    assert starting.killed == []


@pytest.mark.parametrize(("owed_s", "killed"), [(0.0, []), (2.0, []), (3.0, [Place("node", 3)])])
def test_only_a_process_that_was_long_silent_is_killed_by_its_id(starting, owed_s, killed):
    """Ray reports such a kill as a crash; being late at the end of a run is not one."""
    starting._start_worker("w0", {})
    starting._on_set_up("w0", None, (Place("node", 3), False))
    starting._heartbeats = Heartbeats(10.0, clock=lambda: starting.now)
    starting._heartbeats.expect_answer("w0")
    starting.now += owed_s
    starting.end("w0")
    assert starting.killed == killed
