"""The decision function as a model: its facts, its state, and any order of events."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace

import pytest
from controller_harness import scored, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from late_mail import late
from simulations import run
from test_controller_simulated import SimulatedRounds
from test_controller_simulated_messages import SimulatedMessages

from raydl.config import CheckpointConfig, ElasticConfig
from raydl.core.reports import Outcome, WorkerReport
from raydl.core.worker_group import (
    Changed,
    Collected,
    Draining,
    Failed,
    GaveUp,
    HandedIn,
    Lost,
    Published,
    Reported,
    RunEnded,
    StatesLost,
    TookOver,
    WorkerReady,
)
from raydl.elastic import controller as loop
from raydl.elastic import facts
from raydl.elastic.decide import begin, decide, new_state
from raydl.elastic.facts import apply
from raydl.elastic.limits import Limits
from raydl.elastic.run_state import State
from raydl.elastic.state import Phase
from raydl.errors import InfrastructureError

KINDS = [(SimulatedRounds, 400), (SimulatedMessages, 1500)]
BOTH_KINDS = pytest.mark.parametrize(("kind", "last_round"), KINDS, ids=["rounds", "messages"])

# simulated runs


@BOTH_KINDS
@pytest.mark.parametrize("seed", range(8))
def test_a_run_whose_events_are_late_reordered_and_repeated_is_trained_to_its_end(
    kind, last_round, seed
):
    group, controller = run(late(kind), seed, last_round=last_round)
    assert group.num_faults > 10
    assert controller.outcome is Outcome.FINISHED


@BOTH_KINDS
@pytest.mark.parametrize("seed", range(5))
def test_a_run_with_late_events_that_is_stopped_among_faults_ends(kind, last_round, seed):
    stop_at = random.Random(seed).uniform(0.0, 40.0)
    run(late(kind), seed, last_round=last_round, stop_at=stop_at)


@pytest.fixture
def recorded(monkeypatch):
    """Return the facts of the next run with their times, and its state at the beginning."""
    history = []

    def recording(state, event, now, limits):
        history.append((now, copy.deepcopy(state)) if not history else ())
        found = decide(state, event, now, limits)
        history.extend((now, fact) for fact in found)
        return found

    monkeypatch.setattr(loop, "decide", recording)
    return history


@BOTH_KINDS
@pytest.mark.parametrize("seed", range(3))
def test_the_state_is_the_fold_of_the_facts(kind, last_round, seed, recorded):
    _, controller = run(late(kind), seed, last_round=last_round)
    (_, state), *history = recorded
    for at, fact in filter(None, history):
        apply(state, fact, at)
    assert state == controller.run_state


@BOTH_KINDS
def test_the_same_events_at_the_same_times_give_the_same_calls(kind, last_round):
    first, second = (run(late(kind), 3, last_round=last_round)[0] for _ in range(2))
    assert first.memberships == second.memberships
    assert (first.now, first.handed_over) == (second.now, second.handed_over)


# any events at all

WORKERS = st.integers(0, 6).map("w{}".format)
ROUNDS = st.integers(-1, 12)
REASON = "it was killed"


def reported(worker_id, round, generation, waiting_s, kept):
    report = WorkerReport(
        worker_id, round, (), kept, {}, generation=generation, waiting_s=waiting_s, residual=0.5
    )
    return Reported(report)


def published(rounds, is_complete, num_changes, process):
    return Published(
        tuple(rounds), is_complete=is_complete, num_changes=num_changes, process=process
    )


EVENTS = st.one_of(
    st.builds(WorkerReady, WORKERS, st.sampled_from(["a", "b"])),
    st.builds(Draining, WORKERS, st.sampled_from([0.0, 30.0])),
    st.builds(reported, WORKERS, ROUNDS, st.integers(0, 4), st.sampled_from([0.0, 9.0]),
              st.lists(ROUNDS, max_size=2).map(tuple)),
    st.builds(RunEnded, WORKERS, st.sampled_from([*Outcome]), ROUNDS, st.integers(0, 4),
              num_changes=st.integers(0, 2), copy_generation=st.integers(0, 3)),
    st.builds(Lost, WORKERS | st.sampled_from(["center", "shard 1", "evaluator"]), st.just(REASON)),
    st.builds(Failed, WORKERS | st.just("evaluator"),
              st.sampled_from([InfrastructureError("w", "no memory"), ValueError("a mistake")])),
    st.builds(published, st.lists(ROUNDS, max_size=3), st.booleans(), st.integers(0, 2),
              st.sampled_from(["", "a", "b"])),
    st.just(Changed()),
    st.builds(HandedIn, WORKERS, st.just({})),
    st.builds(TookOver, WORKERS),
    st.builds(GaveUp, st.sampled_from(["checkpoint", "evaluation", "publication"]),
              st.just(REASON)),
    st.builds(GaveUp, st.sampled_from(["hand in", "hand over", "saved state"]), st.just(REASON),
              WORKERS),
    st.builds(Collected, ROUNDS.map(snapshot), st.just({})),
    st.builds(StatesLost, ROUNDS, st.just(REASON)),
    st.builds(scored, ROUNDS),
    st.builds(facts.Remove, WORKERS),
    st.builds(facts.Stop, st.just("SIGTERM")),
    st.builds(facts.Ended, st.just("patience"), st.just("no better score")),
    st.builds(facts.Unfrozen, st.just(("head",))),
    st.builds(facts.Cut, st.integers(1, 3)),
    st.builds(facts.Trained, st.integers(0, 12)),
    st.builds(facts.Writing, st.booleans(), st.booleans()),
)  # fmt: skip
TICK = st.just(facts.Tick())
STEPS = st.lists(st.tuples(st.sampled_from([0.0, 0.25, 3.0, 70.0]), EVENTS | TICK), max_size=60)
LIMITS = st.builds(
    Limits,
    is_sync=st.booleans(),
    min_workers=st.integers(1, 2),
    max_workers=st.integers(2, 4),
    spares=st.integers(0, 2),
    spares_share=st.booleans(),
    start_s=st.just(300.0),
    elastic=st.builds(
        ElasticConfig,
        max_restarts=st.sampled_from([2, 100]),
        on_worker_error=st.sampled_from(["auto", "stop", "replace"]),
    ),
    checkpoint=st.just(CheckpointConfig(every_s=5.0)),
    may_leave_out=st.booleans(),
)


def check(state, limits, found):
    """Check what holds after every event, whatever the order of events."""
    counted = {worker_id: w for worker_id, w in state.workers.items() if w.is_staying}
    for is_spare in (False, True):
        num_staying = sum(w.is_spare == is_spare for w in counted.values())
        assert state.num_staying[is_spare] == num_staying
    assert all(math.isfinite(until) for until in state.waits.values()), "every wait has an end"
    assert state.budgets.losses <= limits.elastic.max_restarts or state.failed
    heirs = [w.replica for w in state.workers.values() if w.is_handed_over]
    assert len(set(heirs)) == len(heirs), "a replica has one heir"
    numbers = [
        fact.membership.generation for fact in found if isinstance(fact, (facts.Form, facts.Change))
    ]
    assert numbers == list(range(state.generation - len(numbers) + 1, state.generation + 1))
    if state.run is not None and state.failed is None:
        check_members(state)


def check_members(state):
    run = state.run
    assert run.ended.keys() <= set(run.membership.worker_ids)
    assert not run.ended.keys() & run.lost
    for worker_id in run.present:
        in_loop = state.workers[worker_id].in_loop
        assert in_loop != (worker_id in run.ended), "it is in its loop, or has left it"
    inside = {w.worker_id for w in state.workers.values() if w.in_loop}
    for worker_id in inside - set(run.membership.worker_ids):
        assert state.workers[worker_id].phase is not Phase.READY, "it could enter two loops"


def entered_twice(state, found):
    """Return the workers that are asked to enter a loop although they are in one."""
    return [
        worker_id
        for fact in found
        if isinstance(fact, facts.Form)
        for worker_id in fact.membership.worker_ids
        if state.workers[worker_id].in_loop
    ]


@settings(max_examples=150)
@given(LIMITS, STEPS)
def test_no_order_of_events_breaks_what_always_holds_and_each_run_ends(limits, steps):
    now = 100.0
    state = new_state(limits, now)
    begin(state, limits, now)
    for wait_s, event in steps:
        now += wait_s
        before = copy.deepcopy(state)
        found = decide(state, event, now, limits)
        assert not entered_twice(before, found)
        check(state, limits, found)
    assert ends(state, limits, now), f"{state.stage}, it waits for {state.waits}"


def ends(state, limits, now):
    """Whether the run ends if from now on each process is silent, and so is lost."""
    for _ in range(3000):
        if state.stage is State.DONE:
            return True
        now += 5.0
        silent = [w.worker_id for w in state.workers.values() if w.in_loop]
        for name in (*silent, *(["center"] if state.center.rounds else [])):
            decide(state, Lost(name, "it did not answer"), now, limits)
        check(state, limits, decide(state, facts.Tick(), now, limits))
    return False


# what is late, or comes twice


def started(*, is_sync=True, num_workers=2):
    """Return the state of a run whose workers train, and its limits."""
    limits = Limits(is_sync=is_sync, min_workers=1, max_workers=num_workers)
    state = new_state(limits, 0.0)
    begin(state, limits, 0.0)
    for number in range(num_workers):
        decide(state, WorkerReady(f"w{number}", "node"), 0.0, limits)
    decide(state, Published((0,), process="a", sent_s=2.0), 0.0, limits)
    decide(state, facts.Tick(), 0.0, limits)
    assert state.stage is State.TRAINING
    return state, limits


@pytest.mark.parametrize(
    "event",
    [
        WorkerReady("w0", "node"),
        WorkerReady("w9", "node"),
        RunEnded("w0", Outcome.BROKEN, 4, generation=0),
        RunEnded("w9", Outcome.BROKEN, 4, generation=1),
        Lost("w9", REASON),
        Failed("w9", ValueError("of a worker that has ended")),
        Published((0, 4), process="a", sent_s=1.0),
        Changed(),
        TookOver("w0"),
        GaveUp("hand over", REASON, "w0"),
        GaveUp("hand in", REASON, "w0"),
        Collected(snapshot(4), {}),
        facts.Remove("w9"),
    ],
    ids=repr,
)
def test_an_event_that_is_no_news_changes_nothing(event):
    state, limits = started()
    before = copy.deepcopy(state)
    assert decide(state, event, 1.0, limits) == []
    assert state == before


@pytest.mark.parametrize(
    "event",
    [
        RunEnded("w0", Outcome.REGROUP, 4, generation=1),
        Lost("w0", REASON),
        facts.Stop("SIGTERM"),
        facts.Unfrozen(("head",)),
        facts.Cut(1),
        facts.Trained(9),
    ],
    ids=repr,
)
def test_an_event_that_comes_twice_counts_once(event):
    state, limits = started()
    assert decide(state, event, 1.0, limits)[0] is event
    before = copy.deepcopy(state)
    assert decide(state, event, 1.0, limits) == []
    assert state == before


def test_an_answer_of_a_center_that_was_lost_is_refused_and_that_of_the_new_one_is_not():
    state, limits = started(is_sync=False)
    decide(state, Changed(), 1.0, limits)
    decide(state, Lost("center", REASON), 1.0, limits)
    answer = Published((0, 7), process="a", sent_s=3.0)
    assert decide(state, answer, 1.0, limits) == []
    decide(state, facts.Tick(), 1.0, limits)
    for worker_id in ("w0", "w1"):
        decide(state, RunEnded(worker_id, Outcome.BROKEN, 5, 1, "a reset"), 1.0, limits)
    found = decide(state, facts.Tick(), 1.0, limits)
    assert any(isinstance(fact, facts.Rebuild) for fact in found)
    assert decide(state, answer, 1.0, limits) == []
    assert decide(state, replace(answer, process="b"), 1.0, limits)
    assert state.center.rounds == (0, 7)


def test_a_replica_that_arrives_after_its_leaver_was_lost_is_deleted_once():
    state, limits = started()
    decide(state, Lost("w1", REASON), 1.0, limits)
    assert decide(state, HandedIn("w1", {}), 1.0, limits) == [facts.Forget("w1")]
    assert decide(state, HandedIn("w1", {}), 1.0, limits) == []


def test_a_membership_that_the_center_does_not_confirm_ends_the_run_with_a_sentence():
    state, limits = started(is_sync=False)
    longest_s = limits.elastic.max_busy_s
    assert decide(state, facts.Tick(), longest_s - 1.0, limits) == [facts.Tick()]
    *_, fail = decide(state, facts.Tick(), longest_s + 1.0, limits)
    assert fail.kind == "stalled"
    assert fail.why.startswith("the center did not confirm generation 1 in time; the same")


def test_nothing_follows_the_end():
    state, limits = started()
    apply(state, facts.Fail("stalled", "center", REASON), 1.0)
    assert decide(state, facts.Tick(), 2.0, limits) == []
    assert decide(state, Lost("w0", REASON), 2.0, limits) == []
