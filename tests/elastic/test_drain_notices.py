"""A worker on a draining node trains on until its replacement is ready, or until its time is up."""

import time

import pytest
from controller_harness import BOTH, DIED, ControllerHarness, report

from raydl.core.reports import Outcome
from raydl.core.worker_group import Changed, Draining, Lost, Published, WorkerReady
from raydl.elastic.run_state import State
from raydl.ray_backend import cluster

LEAVES = {True: [("vote", "regroup")], False: [("dismiss", "w1")]}
"""The call by which w1 leaves, by whether the method is synchronous."""


@BOTH
def test_a_worker_leaves_once_its_replacement_is_ready(is_sync):
    harness = ControllerHarness(is_sync=is_sync).start()
    assert harness.step(Draining("w1", 120.0)) == [("request_worker", "w2")]
    assert harness.steps(3) == []
    assert harness.state is State.TRAINING
    assert harness.log_lines[-1] == (
        "w1 is on a draining node; it trains on until its replacement is ready, for 60 s at most"
    )
    assert harness.step(WorkerReady("w2", "node")) == LEAVES[is_sync]


@BOTH
def test_a_worker_leaves_after_half_of_the_time_without_a_replacement(is_sync):
    harness = ControllerHarness((1, 2), is_sync=is_sync).start()
    harness.step(Draining("w1", 120.0))
    harness.now += 59.0
    assert harness.step() == []
    harness.now += 2.0
    assert harness.step() == LEAVES[is_sync]


@BOTH
@pytest.mark.parametrize("left_s", [0.0, 12.0])
def test_a_worker_leaves_at_once_if_the_time_is_short_or_not_known(is_sync, left_s):
    harness = ControllerHarness((1, 2), is_sync=is_sync).start()
    harness.step(report("w1", 3, round_s=4.0))
    assert harness.step(Draining("w1", left_s)) == [("request_worker", "w2"), *LEAVES[is_sync]]


@BOTH
def test_a_hot_spare_on_another_node_replaces_it_at_once(is_sync):
    harness = ControllerHarness(2, spares=1, is_sync=is_sync)
    harness.step(WorkerReady("w0", "a"), WorkerReady("w1", "b"))
    if not is_sync:
        harness.step(Changed())
    harness.step(WorkerReady("w2", "c"))
    assert harness.step(Draining("w1", 120.0)) == [("request_worker", "w3"), *LEAVES[is_sync]]


@BOTH
def test_a_worker_that_is_lost_before_it_left_is_replaced_once(is_sync):
    harness = ControllerHarness(is_sync=is_sync).start()
    calls = harness.step(Draining("w1", 120.0)) + harness.step(Lost("w1", DIED))
    assert [call for call in calls if call[0] == "request_worker"] == [("request_worker", "w2")]


def test_two_workers_leave_one_by_one_as_their_replacements_are_ready():
    harness = ControllerHarness(3, name="diloco").start("w0", "w1", "w2")
    calls = harness.step(Draining("w1", 120.0), Draining("w2", 120.0))
    assert calls == [("request_worker", "w3"), ("request_worker", "w4")]
    assert harness.step(WorkerReady("w3", "node")) == [("vote", "regroup")]
    ended = harness.end(Outcome.REGROUP, 5, "w0", "w1", "w2")
    harness.step(*ended, Published((0, 5)))
    harness.steps(3)
    assert harness.worker_group.formed[-1].worker_ids == ("w0", "w2", "w3")


def test_a_drain_notice_has_the_seconds_until_the_deadline(monkeypatch):
    deadlines = {"a": int((time.time() + 90) * 1000), "b": 0, "c": 1}
    monkeypatch.setattr(cluster, "draining_nodes", lambda: deadlines)
    left = cluster.Notices().new({"w0": "a", "w1": "b", "w2": "c", "w3": "d"})
    assert left == {"w0": pytest.approx(90.0, abs=5.0), "w1": 0.0, "w2": 0.0}
