"""The memory of driver and center does not grow in 12 simulated hours of replacements."""

import contextlib
import gc
import io
import types

import numpy as np
import pytest
from controller_harness import ControllerHarness
from coordinators import request
from ensembles import Ensemble
from message_jobs import message_job

from benchmarks.scale import CountingWriter, Driver, simulated_clock
from raydl.checkpoint.totals import StartTotals, StartTotalsHistory
from raydl.core.exchange import Header
from raydl.core.membership import Membership
from raydl.core.worker_group import Changed, Draining, HandedIn
from raydl.metrics.worker_curves import MOST, WorkerCurves
from raydl.parameter_server.protocol import Completion, MessageId
from raydl.ray_backend import cluster

HOURS, POLL_S = 12, 20.0
_SKIPPED_TYPES = (type, types.ModuleType, types.FunctionType, types.CodeType, types.FrameType)


def num_reachable(root, *excluded):
    """Return how many objects are reachable from an object, without those of ``excluded``."""
    seen = {id(other) for other in excluded}
    todo, count = [root], 0
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, _SKIPPED_TYPES):
            continue
        seen.add(id(thing))
        count += 1
        todo += gc.get_referents(thing)
    return count


class PeakCounts:
    """The largest counts early and late in 12 hours."""

    def __init__(self):
        self.early = self.late = 0

    def note(self, hour, count):
        if 3 <= hour <= 5:
            self.early = max(self.early, count())
        elif 10 <= hour <= 12:
            self.late = max(self.late, count())

    def is_flat(self):
        assert self.early > 100, "the count is not of an empty object"
        return self.late <= 1.05 * self.early


@pytest.fixture(params=[True, False], ids=["rounds", "messages"])
def churn(request):
    """Return (peak counts of the driver, the names of curves, the workers lost) of 12 hours."""
    writer, peaks = CountingWriter(), PeakCounts()

    def count():  # without containers that fill up to a fixed bound in some hours
        recorder = driver.recorder
        return num_reachable(
            driver, driver.worker_group, writer, recorder._history, recorder._stack
        )

    with contextlib.redirect_stdout(io.StringIO()):
        driver = Driver(
            is_sync=request.param, num_workers=8, writer=writer, poll_s=POLL_S,
            replaced_every_s=30.0,
        )  # fmt: skip
        with simulated_clock(driver):
            driver.begin()
            for poll in range(int(HOURS * 3600 / POLL_S)):
                driver.step()
                if poll % 20 == 0:
                    peaks.note(poll * POLL_S / 3600, count)
    return peaks, writer.names, driver.worker_group.num_lost


def test_in_12_hours_of_replacements_the_driver_does_not_grow_and_curves_stay_few(churn):
    peaks, names, num_lost = churn
    assert num_lost > 700
    assert peaks.is_flat(), f"{peaks.early} objects became {peaks.late}"
    by_worker = {name for name in names if name.startswith("worker_")}
    assert len(by_worker) <= 2 * 2 * MOST
    assert {"worker_step_s/place0", "worker_waited_s/place0"} <= by_worker
    assert any(name.startswith("worker_step_s/w") for name in by_worker)


def test_in_12_hours_of_replacements_the_center_does_not_grow():
    ensemble = Ensemble(message_job("async-easgd", epochs=10**6), num_workers=0)
    members = [f"w{i}" for i in range(4)]
    ensemble._open_center(ensemble.first, Membership(1, tuple(members)))
    service, peaks = ensemble.service, PeakCounts()
    entered, sequences = dict.fromkeys(members, 1), dict.fromkeys(members, 0)
    size = ensemble.flat.num_parameters
    for worker_id in members:
        service.enter(MessageId(worker_id, 1, 0), 0)
    num_changes = HOURS * 120
    for number in range(num_changes):
        for worker_id in members:
            sequences[worker_id] += 1
            at = sequences[worker_id]
            completion = Completion(Header(step_s=0.1), 2 * at, 6 * at, 0.1, 80)
            message = request(
                worker_id, at, np.zeros(size), generation=entered[worker_id],
                completion=completion,
            )  # fmt: skip
            assert not service.exchange(message).refusal
        lost, newcomer, generation = members.pop(0), f"w{4 + number}", number + 2
        del entered[lost], sequences[lost]
        members.append(newcomer)
        entered[newcomer], sequences[newcomer] = generation, 0
        service.change(Membership(generation, tuple(members)), [])
        service.enter(MessageId(newcomer, generation, 0), 0)
        service.coordinator.pop_due()
        service.coordinator.pop_records()
        if number % 20 == 0:
            peaks.note(HOURS * number / num_changes, lambda: num_reachable(service))
    assert peaks.is_flat(), f"{peaks.early} objects became {peaks.late}"


# curves


def test_small_runs_have_a_curve_for_each_id_and_replacements_their_own():
    curves = WorkerCurves()
    assert curves.follow(["w0", "w1", "w2"]) == {}
    assert curves.follow(["w0", "w2", "w3"]) == {}
    assert [curves.name_of(w) for w in ("w0", "w2", "w3")] == ["w0", "w2", "w3"]


def test_later_workers_take_places_that_are_free_and_keep_them():
    curves = WorkerCurves()
    assert curves.follow(["w62", "w64", "w65"]) == {"w64": "place0", "w65": "place1"}
    assert curves.follow(["w62", "w65", "w66"]) == {"w66": "place0"}
    assert curves.follow(["w65", "w66", "w67"]) == {"w67": "place2"}
    assert [curves.name_of(w) for w in ("w62", "w65", "w66")] == ["w62", "place1", "place0"]


def test_of_hundreds_of_workers_64_have_curves_at_a_time():
    curves = WorkerCurves()
    workers = [f"w{i}" for i in range(256)]
    assert curves.follow(workers) == {}
    assert sum(bool(curves.name_of(w)) for w in workers) == MOST
    workers[3] = "w256"
    assert curves.follow(workers) == {"w256": "place0"}
    assert sum(bool(curves.name_of(w)) for w in workers) == MOST


def test_a_long_run_without_checkpoints_remembers_its_beginning_and_its_newest_records():
    def at(round):
        return StartTotals(round=round, seconds=float(round), time_parts={})

    history = StartTotalsHistory(at(0))
    for round in range(1, 50_000):
        history.add(at(round))
    assert len(history._entries) <= 1024
    assert [history.up_to(r).round for r in (49_999, 49_800, 49_600)] == [49_999, 49_800, 49_600]
    assert history.up_to(1).round == 0


# replicas of workers that leave


def test_replicas_are_kept_only_for_newcomers():
    harness = ControllerHarness((1, 4), is_sync=False).start("w0", "w1", "w2", "w3")
    for worker_id in ("w0", "w1"):  # fewer are wanted: they are not replaced
        harness.controller.remove(worker_id)
        calls = harness.step(*harness.end("left", 5, worker_id, generation=1), Changed())
        assert ("end", worker_id) in calls
        assert ("hand_in", worker_id) not in calls
    harness.step(Draining("w2"), Changed())  # its replacement takes its state, once ready
    ended = harness.end("left", 6, "w2", generation=1)
    assert ("hand_in", "w2") in harness.step(*ended, Changed())
    harness.step(HandedIn("w2", {"replica": "w2"}))
    assert [*harness.controller.run_state.replicas] == ["w2"]
    harness.controller.remove("w4")  # the replacement that would have taken it
    assert ("forget", {"replica": "w2"}) in harness.step()
    assert ("forget", {"replica": "w3"}) in harness.step(HandedIn("w3", {"replica": "w3"}))


def test_a_reported_drain_notice_is_forgotten_with_its_worker(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(cluster.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(cluster, "draining_nodes", lambda: {"node": 0})
    notices = cluster.Notices()
    for number in range(1000):
        now[0] += 2.0
        assert notices.new({f"w{number}": "node"}) == {f"w{number}": 0.0}
    assert len(notices._reported) == 1
