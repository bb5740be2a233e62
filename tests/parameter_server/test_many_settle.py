"""The cost of a completion does not depend on the number of workers."""

import gc
import pickle
import random
import sys
from collections import Counter

import pytest
from coordinators import enter, make_coordinator, settle

from raydl.core.membership import Membership
from raydl.core.reports import Outcome
from raydl.data.ledger import Ledger, num_done_by
from raydl.parameter_server.coordinator import COPIES
from raydl.parameter_server.protocol import MessageId

FEW, MANY = 32, 256
METHODS = pytest.mark.parametrize("method", ["async-easgd", "async-diloco", "async-sgd"])


class ManyWorkers:
    """Workers that complete rounds one after another, in a new order each time."""

    def __init__(self, num_workers, method="async-easgd", *, cuts=None):
        self.workers = tuple(f"w{i}" for i in range(num_workers))
        num_samples = 1000 * num_workers
        ledger = Ledger(num_samples, cuts=cuts) if cuts else Ledger(num_samples)
        self.coordinator = make_coordinator(method, workers=self.workers, ledger=ledger, epochs=99)
        self.local_steps, self.newest = Counter(), {}
        self.random = random.Random(0)
        for worker_id in self.workers:
            enter(self.coordinator, worker_id)

    def complete_rounds(self):
        """Let each worker complete a round; yield (worker, its assignment)."""
        for worker_id in self.random.sample(self.workers, len(self.workers)):
            yield worker_id, self.settle(worker_id)

    def settle(self, worker_id):
        self.local_steps[worker_id] += 2
        return settle(
            self.coordinator, worker_id, local_step=self.local_steps[worker_id],
            step_s=self.random.uniform(0.1, 0.2),
        )  # fmt: skip


def lines_of(act):
    """Return how many lines of Python a call runs, without finalizers of other objects."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


BLOCKS = [*range(64, 2**20, 64)]


@METHODS
@pytest.mark.parametrize("cuts", [None, lambda epoch: BLOCKS], ids=["one by one", "in blocks"])
def test_a_completion_runs_as_many_lines_of_code_with_many_workers_as_with_few(method, cuts):
    def lines(num_workers):
        group = ManyWorkers(num_workers, method, cuts=cuts)
        list(group.complete_rounds())
        return lines_of(lambda: list(group.complete_rounds())) / num_workers

    few, many = lines(FEW), lines(MANY)
    assert many < 1.5 * few, f"{few:.0f} lines with {FEW} workers, {many:.0f} with {MANY}"


def test_assignments_are_no_larger_with_more_workers():
    def mean_bytes(num_workers):
        group = ManyWorkers(num_workers)
        list(group.complete_rounds())
        sizes = [len(pickle.dumps(assignment)) for _, assignment in group.complete_rounds()]
        return sum(sizes) / len(sizes)

    few, many = mean_bytes(FEW), mean_bytes(MANY)
    assert many < 1.5 * few, f"{few:.0f} bytes with {FEW} workers, {many:.0f} with {MANY}"


def test_the_coordinators_state_per_worker_is_as_large_with_many_workers_as_with_few():
    """Assignments are kept, since a message may arrive twice."""

    def mean_bytes(num_workers):
        group = ManyWorkers(num_workers)
        list(group.complete_rounds())
        members = group.coordinator._members
        return sum(len(pickle.dumps(members[w].answered)) for w in members) / num_workers

    assert mean_bytes(MANY) < 1.5 * mean_bytes(FEW)


@pytest.mark.parametrize("num_workers", [1, 2, 16, 31])
def test_up_to_31_workers_receive_the_ledger_with_every_assignment(num_workers):
    group = ManyWorkers(num_workers)
    for _, assignment in group.complete_rounds():
        assert num_done_by(assignment.ledger) == assignment.num_done


@pytest.mark.parametrize("num_workers", [32, 100, MANY, 512])
def test_the_newest_assigned_ledger_is_at_most_one_exchange_per_16_workers_old(num_workers):
    group = ManyWorkers(num_workers)
    list(group.complete_rounds())
    versions = {}
    for worker_id, assignment in group.complete_rounds():
        if assignment.ledger is not None:
            versions[worker_id] = assignment.version
        newest = max(versions.values(), default=group.coordinator.version - num_workers // COPIES)
        assert group.coordinator.version - newest <= num_workers // COPIES
    assert len(versions) <= COPIES + 1


def test_an_assigned_ledger_has_all_positions_that_are_not_done_as_free():
    group = ManyWorkers(MANY)
    for _, assignment in group.complete_rounds():
        if assignment.ledger is not None:
            ledger = Ledger.from_state_dict(assignment.ledger)
            assert ledger.num_done_ever == assignment.num_done
            assert ledger.num_free == ledger.num_samples - assignment.num_done


@pytest.mark.parametrize(
    ("vote", "outcome"), [("regroup", Outcome.REGROUP), ("stop", Outcome.STOPPED)]
)
def test_every_worker_that_leaves_receives_the_current_ledger(vote, outcome):
    group = ManyWorkers(MANY)
    group.coordinator.vote(1, **{vote: 1.0})
    for _, assignment in group.complete_rounds():
        assert assignment.outcome is outcome
        assert num_done_by(assignment.ledger) == assignment.num_done


def test_a_dismissed_worker_receives_the_ledger():
    group = ManyWorkers(MANY)
    group.coordinator.dismiss("w7")
    assignment = group.settle("w7")
    assert (assignment.outcome, assignment.ledger is None) == (Outcome.LEFT, False)


def test_ranks_are_those_of_the_newest_membership():
    group = ManyWorkers(3)
    group.coordinator.change(Membership(2, ("w1", "w9", "w2")))
    group.coordinator.enter(MessageId("w9", 2, 0), 0)
    assignment = {w: group.settle(w).rank for w in ("w1", "w2")}
    assert assignment == {"w1": 0, "w2": 2}
