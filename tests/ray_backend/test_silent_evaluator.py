"""An evaluation may take any time as long as it makes progress."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from raydl.config import ElasticConfig
from raydl.core.worker_group import GaveUp, Scoring
from raydl.elastic.heartbeat import Heartbeats
from raydl.ray_backend import worker_group
from raydl.ray_backend.cluster import Place
from raydl.ray_backend.liveness import Liveness
from raydl.ray_backend.pending_calls import PendingCalls
from raydl.ray_backend.start_timeouts import StartTimeouts
from raydl.ray_backend.worker_group import RayWorkerGroup

PLACE = Place("home", 17, start=5)


class OneEvaluator(RayWorkerGroup):
    """A worker group that only evaluates, with a clock that the test sets."""

    def __init__(self):
        self.now = 1000.0
        self._calls = PendingCalls()
        self._starts = self._setups = StartTimeouts(600.0)
        self._heartbeats, self._places, self._found = Heartbeats(10.0), {}, {}
        self._shards, self._workers, self._home = [Mock()], {}, "home"
        self._liveness, self._reported_busy, self._polled_at = Liveness(), set(), 1e9
        self._events, self._from_threads = [], []
        self._job = SimpleNamespace(config=SimpleNamespace(elastic=ElasticConfig()))
        self._test = self._prepare = self._non_trainable = self._runtime_env = None
        self._evaluator, self._num_scored, self._scored_at = None, 0, 0.0
        self._options = dict

    @property
    def tasks(self):
        return [call.task for call in self._calls]

    def after(self, seconds, *, num_scored=None):
        """Advance the clock, with or without a progress report; return the events."""
        self.now += seconds
        events = [] if num_scored is None else self._on_progress(num_scored)
        return self.poll(0.0) + events


@pytest.fixture
def group(monkeypatch):
    group, killed = OneEvaluator(), []
    monkeypatch.setattr(worker_group, "time", SimpleNamespace(monotonic=lambda: group.now))
    monkeypatch.setattr(worker_group, "place_of", lambda actor: PLACE)
    monkeypatch.setattr(worker_group, "start_of", lambda pid: PLACE.start)
    monkeypatch.setattr(worker_group, "kill_process", lambda place, home: killed.append(place))
    monkeypatch.setattr(worker_group.ray, "kill", killed.append)
    monkeypatch.setattr(worker_group.ray, "wait", lambda refs, **options: ([], refs))
    actor = Mock()
    actor.options.return_value.remote.side_effect = lambda *arguments: Mock()
    monkeypatch.setattr(worker_group, "EvaluatorActor", actor)
    group.killed = killed
    group.evaluate(7)
    return group


def test_an_evaluator_that_scores_nothing_for_five_minutes_is_ended_and_another_one_starts(group):
    hung = group._evaluator
    assert group.after(299.0) == []
    given_up = GaveUp("evaluation", "the evaluator has scored nothing for 300 s")
    assert group.after(2.0) == [given_up]
    assert group.killed == [PLACE, hung], "a stopped process receives no call"
    assert group.tasks == []
    group.evaluate(8)
    assert group._evaluator is not hung
    assert group.after(299.0) == []


def test_an_evaluation_that_makes_progress_may_take_any_time(group):
    for number in range(1, 20):
        assert group.after(290.0, num_scored=10 * number) == [Scoring(10 * number)]
    assert group.after(290.0, num_scored=190) == [Scoring(190)]
    assert group.after(20.0) != []


def test_an_evaluator_without_work_is_not_silent(group):
    group._calls.forget(lambda call: call.task == "evaluation")
    assert group.after(1e6) == []
    group.evaluate(8)
    assert group.after(1.0) == []
