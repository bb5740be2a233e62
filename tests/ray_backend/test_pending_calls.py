"""The cause of a failed actor call in a few words, from the long messages of Ray."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)

from raydl.config import TrainConfig
from raydl.core.progress import Progress
from raydl.core.reports import Outcome
from raydl.core.worker_group import RunEnded
from raydl.elastic.heartbeat import Heartbeats
from raydl.errors import NonFiniteCenterError
from raydl.ray_backend.cluster import Place
from raydl.ray_backend.pending_calls import Call, PendingCalls, in_few_words
from raydl.ray_backend.start_timeouts import StartTimeouts
from raydl.ray_backend.worker_group import RayWorkerGroup, _Backup, _on_report

PROCESS = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
    "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file."
)
NODE = "The actor died because its node has died. Node Id: 17\n\tthe actor's node was terminated"


def died(message):
    """Return Ray's error of a dead actor with a message of the cluster."""
    context = ActorDiedErrorContext(
        error_message=message, class_name="WorkerActor", pid=17, actor_id=b"a" * 16
    )
    return ActorDiedError(context)


@pytest.mark.parametrize(
    ("message", "words"),
    [(PROCESS, "its process was killed, or crashed"), (NODE, "its node was lost")],
)
def test_a_dead_actor_is_reported_with_its_known_cause(message, words):
    assert str(died(message)).startswith("The actor died unexpectedly before finishing this task")
    assert in_few_words(died(message)) == words


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RayActorError(), "The actor experienced an error before finishing this task."),
        (OutOfMemoryError("the node was out of memory\nand more"), "the node was out of memory"),
        (ValueError("\n one\ntwo"), "one"),
        (ConnectionError(), "ConnectionError"),
    ],
)
def test_another_error_is_reported_by_its_first_line(error, words):
    assert in_few_words(error) == words


class GroupWithoutProcesses(RayWorkerGroup):
    """A worker group whose center has no process."""

    def __init__(self):
        self._calls, self._heartbeats = PendingCalls(), Heartbeats(10.0)
        self._shards, self._places, self._found = [], {}, {}
        self._starts, self._setups = StartTimeouts(600.0), StartTimeouts(600.0)
        self._workers = {"w0": Mock()}
        self._collected, self._held = {}, (-1, ())
        self._newest_generation, self._rebuilt_in = 1, 0
        self._job = SimpleNamespace(config=TrainConfig())
        self._backup = _Backup(is_needed=True)
        self.started_with = []

    def _start_center(self, snapshot, optimizer=None):
        self._calls.expect("opened", "center", list)
        self.started_with.append(optimizer)

    def hand_over_checkpoint(self, snapshot):
        self._collected = {"center": None}
        (collected,) = self._on_center(None, snapshot)
        assert collected.snapshot is snapshot


def center_of(round):
    return Mock(progress=Progress(round=round), optimizer=f"of {round}")


@pytest.fixture
def worker_group(monkeypatch):
    """A worker group at its start; references are the objects themselves."""
    monkeypatch.setattr("raydl.ray_backend.worker_group.ray.put", lambda value: value)
    worker_group = GroupWithoutProcesses()
    worker_group.start_center(center_of(7))
    return worker_group


def test_a_center_that_is_lost_before_its_first_backup_keeps_the_optimizer_it_began_with(
    worker_group,
):
    assert worker_group.rebuild_center("w0") == "its optimizer is as it was after 7 exchanges"
    assert worker_group.started_with[-1] == "of 7"


def test_the_optimizer_of_a_newer_checkpoint_is_kept_and_that_of_an_older_one_is_not(worker_group):
    worker_group.hand_over_checkpoint(center_of(20))
    worker_group.rebuild_center("w0")
    worker_group._backup.keep("of 30", 30, 0.0, now=0.0)
    worker_group.hand_over_checkpoint(center_of(25))
    worker_group.rebuild_center("w0")
    assert worker_group.started_with[-2:] == ["of 20", "of 30"]


def diverged(worker_id):
    return RunEnded(worker_id, Outcome.BROKEN, 3, 1, error=NonFiniteCenterError(31))


@pytest.mark.parametrize("noticed_by", ["center", "worker"])
def test_a_diverged_center_restarts_with_the_optimizer_of_the_newest_checkpoint(
    worker_group, noticed_by
):
    worker_group.hand_over_checkpoint(center_of(20))
    worker_group._backup.keep("of 30", 30, 0.0, now=0.0)
    if noticed_by == "center":
        worker_group._calls.expect("checkpoint", "center", list)
        error = RayTaskError("run", "traceback", NonFiniteCenterError(31))
        assert worker_group._on_task_error(error, worker_group._calls.pop_call("checkpoint"))
    else:
        assert worker_group._on_run_ended(diverged("w0"))
    worker_group._backup.keep("of 31", 31, 0.0, now=0.0)  # it was already in transit
    worker_group.rebuild_center("w0")
    worker_group._on_run_ended(diverged("w1"))  # w1 notices late, in the same generation
    worker_group._backup.keep("of 40", 40, 0.0, now=0.0)
    worker_group.rebuild_center("w0")
    assert worker_group.started_with[-2:] == ["of 20", "of 40"]


def test_a_center_restarted_from_a_checkpoint_gets_no_later_optimizer_state(worker_group):
    worker_group.hand_over_checkpoint(center_of(20))
    worker_group._backup.keep("of 30", 30, 0.0, now=0.0)
    worker_group.rebuild_center(None)
    worker_group.rebuild_center("w0")
    assert worker_group.started_with[-1] == "of 20"


def test_the_score_of_a_lost_center_is_dropped(worker_group):
    worker_group._calls.expect("score", "evaluator", list, task="evaluation")
    worker_group._calls.expect("state", "w0", list, task="state of w0")
    worker_group.rebuild_center(None)
    assert worker_group._calls.pop_call("score") is None
    assert worker_group._calls.pop_call("state") is not None
    assert worker_group._calls.pop_call("opened").who == "center"


@pytest.mark.parametrize(
    "lose", [lambda g: g._lose("center", "died"), lambda g: g.rebuild_center(None)]
)
def test_a_checkpoint_is_dropped_if_the_center_is_lost_before_all_workers_have_answered(
    worker_group, lose, monkeypatch
):
    """The next center may continue from an earlier round."""
    monkeypatch.setattr("raydl.ray_backend.worker_group.ray.kill", Mock())
    worker, center = worker_group._workers["w0"], Mock()
    worker_group._shards = [center]
    worker_group._on_center_started(Place("node", 3))
    worker_group.collect(20, ("w0",))
    answer = worker_group._calls.pop_call(center.get_to_write.remote.return_value)
    assert answer.handle(center_of(20)) == []
    lose(worker_group)
    assert worker_group._calls.pop_call(worker.hold_kept.remote.return_value) is None
    worker.release.remote.assert_called_once_with(20)


# leases


@pytest.fixture
def poll(worker_group, monkeypatch):
    """Return a function that polls a worker each second and returns when its lease expired."""
    now = [0.0]
    worker_group._heartbeats = Heartbeats(10.0, clock=lambda: now[0])

    def poll(get, *, for_s):
        monkeypatch.setattr("raydl.ray_backend.worker_group.ray.get", get)
        over = []
        for _ in range(for_s):
            worker_group._heartbeats.expect_answer("w0")
            now[0] += 1.0
            worker_group._on_answer("answer", Call("w0", _on_report))
            over += [now[0]] if worker_group._heartbeats.expired() else []
        return over

    return poll


def test_a_connection_that_fails_at_every_poll_does_not_renew_the_lease(poll):
    unavailable = Mock(side_effect=ActorUnavailableError("no route to the host", b"a" * 16))
    assert poll(unavailable, for_s=10) == []
    assert poll(unavailable, for_s=1) == [11.0]


def test_a_poll_that_succeeds_after_failed_ones_renews_the_lease(poll):
    unavailable = Mock(side_effect=ActorUnavailableError("no route to the host", b"a" * 16))
    poll(unavailable, for_s=9)
    assert poll(Mock(), for_s=1) == []
    assert poll(unavailable, for_s=10) == []


def test_an_error_that_a_process_raises_renews_its_lease(poll):
    raised = Mock(side_effect=RayTaskError("report", "a traceback", ValueError("a mistake")))
    assert poll(raised, for_s=30) == []


# several answers in one poll


class FakeWait:
    """Ray's wait with a simulated clock: a reference is (time of its answer, name)."""

    def __init__(self):
        self.now = 0.0

    def wait(self, refs, *, num_returns, timeout, fetch_local=True):
        enough = sorted(at for at, _ in refs)[num_returns - 1]
        self.now = max(self.now, min(self.now + timeout, enough))
        ready = [ref for ref in refs if ref[0] <= self.now]
        return ready[:num_returns], []


@pytest.fixture
def arrivals(monkeypatch):
    arrivals = FakeWait()
    monkeypatch.setattr("raydl.ray_backend.pending_calls.ray", arrivals)
    return arrivals


def calls_of(*refs, loops=()):
    calls = PendingCalls()
    for at, name in refs:
        calls.expect((at, name), name, list, can_wait=True)
    for at, name in loops:
        calls.expect((at, name), name, list, generation=1)
    return calls


def test_answers_that_arrive_one_after_another_are_handled_in_few_polls(arrivals):
    answers = [(0.001 * n, f"w{n}") for n in range(256)]
    calls, polls = calls_of(*answers, loops=[(1e6, f"w{n}") for n in range(256)]), []
    while len([ref for ready in polls for ref in ready]) < 256:
        polls.append(calls.wait(0.25))
        for ref in polls[-1]:
            calls.pop_call(ref)
    assert len(polls) <= 5
    assert arrivals.now < 0.5


def test_the_end_of_a_loop_is_reported_at_once_while_other_answers_are_gathered(arrivals):
    answers = [(0.001 * n, f"w{n}") for n in range(256)]
    calls = calls_of(*answers, loops=[(0.0425, "w7"), *((1e6, f"w{n}") for n in range(256))])
    assert (0.0425, "w7") in calls.wait(0.25)
    assert arrivals.now == 0.0425


def test_two_workers_answers_wait_for_a_millisecond(arrivals):
    calls = calls_of((0.0, "w0"), (0.2, "w1"), loops=[(1e6, "w0"), (1e6, "w1")])
    assert calls.wait(0.25) == [(0.0, "w0")]
    assert arrivals.now <= 0.001


def test_a_driver_without_pending_calls_pauses_between_its_polls(arrivals, monkeypatch):
    """This is so at the end of a run, when threads evaluate and write."""
    pauses = []
    monkeypatch.setattr("raydl.ray_backend.pending_calls.time.sleep", pauses.append)
    assert PendingCalls().wait(0.25) == []
    assert PendingCalls().wait(0.0) == []
    assert 0.0 < pauses[0] <= 0.25
    assert pauses[1] == 0.0
