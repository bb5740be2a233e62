"""Every sample of an epoch is completed once."""

import copy
import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raydl.collective.sync_strategy import TrainedPositions
from raydl.data.ledger import Ledger, num_done_by, share_round, split_evenly


def positions_in(state):
    """Return the free positions by (open epoch, number of completed positions)."""
    return {
        (epoch, num_done): [p for start, stop in spans for p in range(start, stop)]
        for epoch, num_done, spans in state["open"]
    }


def test_claims_run_along_the_epoch_and_stop_at_its_end():
    ledger = Ledger(10)
    assert ledger.claim("w0", 6) == (0, [(0, 6)])
    assert ledger.claim("w1", 6) == (0, [(6, 10)])
    assert ledger.claim("w0", 1) == (1, [(0, 1)])  # without waiting for the last samples
    ledger.complete("w1")
    assert ledger.epoch == 0
    ledger.complete("w0")
    assert ledger.epoch == 1


def test_claims_of_a_lost_worker_become_free():
    ledger = Ledger(10)
    ledger.claim("w0", 4)
    ledger.claim("w1", 4)
    assert ledger.give_back("w0") == 4
    assert ledger.complete("w1") == 4
    assert ledger.claim("w2", 10) == (0, [(0, 4), (8, 10)])
    ledger.complete("w2")
    assert (ledger.epoch, ledger.num_done_ever) == (1, 10)


def test_a_full_round_gives_each_worker_a_full_share():
    share = share_round(10_000, max_steps=[10] * 3, batch_size=64)
    assert (share.num_steps, share.counts) == ((10, 10, 10), (640, 640, 640))


def test_a_full_round_gives_a_slow_worker_the_samples_of_its_steps():
    share = share_round(10_000, max_steps=[10, 3], batch_size=64)
    assert (share.num_steps, share.counts) == ((10, 3), (640, 192))


def test_the_last_round_splits_the_remaining_samples_by_the_steps():
    share = share_round(260, max_steps=[10, 3], batch_size=20)
    assert (share.num_steps, share.counts) == ((10, 3), (200, 60))
    share = share_round(130, max_steps=[10, 3], batch_size=20)
    assert (share.num_steps, share.counts) == ((5, 2), (100, 30))


def test_the_last_round_splits_the_remaining_samples_evenly():
    share = share_round(131, max_steps=[10, 10], batch_size=64)
    assert (share.num_steps, share.counts) == ((2, 2), (66, 65))
    assert share_round(1, max_steps=[10, 10], batch_size=64).counts == (1, 0)
    share = share_round(129, max_steps=[10, 10], batch_size=64)
    assert (share.num_steps, share.counts) == ((2, 2), (65, 64)), "all take the steps of the first"


@pytest.mark.parametrize("num_workers", [1, 3])
def test_without_samples_a_round_is_an_exchange_around_one_empty_step(num_workers):
    share = share_round(0, max_steps=[10] * num_workers, batch_size=64)
    assert (share.num_steps, share.counts) == ((1,) * num_workers, (0,) * num_workers)


@pytest.mark.parametrize(("remaining", "num_steps"), [(119, 2), (120, 2), (121, 2), (59, 1)])
def test_a_round_has_the_fewest_steps_that_hold_its_samples(remaining, num_steps):
    share = share_round(remaining, max_steps=[2, 2], batch_size=30)
    assert share.num_steps == (num_steps, num_steps)
    assert sum(share.counts) == min(remaining, 120)


def test_an_even_split_has_parts_that_differ_by_one_at_most():
    assert split_evenly(7, 3) == [3, 2, 2]
    assert split_evenly(0, 2) == [0, 0]


def test_a_saved_ledger_counts_claims_as_free():
    ledger = Ledger(8)
    ledger.claim("w0", 3)
    ledger.complete("w0")
    ledger.claim("w1", 2)
    again = Ledger.from_state_dict(ledger.state_dict())
    assert again.num_done_ever == 3
    assert again.claim("w0", 100) == (0, [(3, 5), (5, 8)])


def busy_ledger():
    """Return a ledger with two epochs open: w0 and w1 have claims, w1 of both epochs."""
    ledger = Ledger(10)
    ledger.claim("w0", 2)
    ledger.complete("w0")
    ledger.claim("w0", 3)
    ledger.claim("w1", 5)
    ledger.claim("w1", 4)
    return ledger


def test_a_ledger_saved_with_its_claims_continues_unchanged():
    ledger = busy_ledger()
    state = ledger.state_dict(with_claims=True)
    assert state == {
        "num_samples": 10,
        "epoch": 0,
        "num_changes": 5,
        "open": [[0, 2, []], [1, 0, [[4, 10]]]],
        "claimed": [["w0", 0, [2, 5]], ["w1", 0, [5, 10]], ["w1", 1, [0, 4]]],
        "reserved": [],
    }
    again = Ledger.from_state_dict(json.loads(json.dumps(state)))
    assert again.state_dict(with_claims=True) == state
    for each in (ledger, again):
        assert each.claimants == ("w0", "w1")
        assert (each.num_done_ever, each.num_claimed, each.num_free) == (2, 12, 6)
        assert (each.complete("w1"), each.epoch) == (9, 0)
        assert (each.complete("w0"), each.epoch) == (3, 1)
        assert each.claim("w2", 100) == (1, [(4, 10)])


def test_without_its_claims_a_restored_ledger_has_all_claimed_positions_free():
    again = Ledger.from_state_dict(busy_ledger().state_dict())
    assert again.claimants == ()
    assert (again.num_done_ever, again.num_claimed, again.num_free) == (2, 0, 8)
    assert again.claim("w7", 100) == (0, [(2, 5), (5, 10)])
    assert again.claim("w7", 100) == (1, [(0, 4), (4, 10)])


def test_a_saved_ledger_does_not_change_with_its_original():
    ledger = busy_ledger()
    states = [ledger.state_dict(with_claims=with_claims) for with_claims in (False, True)]
    before = copy.deepcopy(states)
    ledger.complete("w0")
    ledger.give_back("w1")
    ledger.claim("w2", 3)
    assert states == before


def test_release_frees_all_claims_that_are_not_kept():
    ledger = busy_ledger()
    assert ledger.release(keep=("w0", "w5")) == 9
    assert (ledger.claimants, ledger.num_claimed) == (("w0",), 3)
    assert ledger.claim("w2", 100) == (0, [(5, 10)])
    assert ledger.release() == 8
    assert (ledger.claimants, ledger.num_claimed, ledger.num_free) == ((), 0, 8)
    assert ledger.release() == 0


def test_a_worker_without_claims_is_no_claimant():
    ledger = Ledger(4)
    assert ledger.claim("w0", 0) == (0, [])
    assert ledger.claimants == ()
    assert ledger.complete("w0") == ledger.give_back("w9") == 0


def in_blocks():
    """Return a ledger of 4 blocks: w0 and w1 claim from one each and have one more ahead."""
    ledger = Ledger(40, cuts=lambda epoch: [10, 20, 30, 40])
    assert ledger.claim("w0", 4) == (0, [(0, 4)])
    assert ledger.claim("w1", 4) == (0, [(20, 24)])
    assert ledger.reserved_by("w0") == [(0, (4, 10)), (0, (10, 20))]
    assert ledger.reserved_by("w1") == [(0, (24, 30)), (0, (30, 40))]
    return ledger


def test_a_worker_claims_from_its_own_blocks_first():
    ledger = in_blocks()
    assert ledger.claim("w0", 9) == (0, [(4, 10), (10, 13)])
    assert ledger.num_free == 23


def test_a_worker_that_helps_claims_from_the_end_of_a_reservation():
    ledger = in_blocks()
    assert ledger.claim("w2", 3) == (0, [(17, 20)])
    assert ledger.reserved_by("w0") == [(0, (4, 10)), (0, (10, 17))]
    assert ledger.claim("w0", 8) == (0, [(4, 10), (10, 12)])


def test_reservations_of_a_lost_worker_without_claims_become_free():
    ledger = in_blocks()
    ledger.complete("w0")
    assert ledger.release(keep=("w1",)) == 0
    assert ledger.reserved_by("w0") == []
    assert ledger.reserved_by("w1") == [(0, (24, 30)), (0, (30, 40))]
    assert ledger.claim("w2", 6) == (0, [(4, 10)])


def test_claims_can_be_freed_while_members_keep_their_reservations():
    ledger = in_blocks()
    assert ledger.release(members=("w1",)) == 8
    assert (ledger.reserved_by("w0"), ledger.claimants) == ([], ())
    assert ledger.claim("w1", 7) == (0, [(24, 30), (30, 31)])


def test_a_saved_ledger_keeps_the_reservations():
    ledger = in_blocks()
    again = Ledger.from_state_dict(ledger.state_dict(), cuts=lambda epoch: [10, 20, 30, 40])
    assert again.claimants == ()
    assert again.reserved_by("w1") == [(0, (24, 30)), (0, (30, 40))]
    assert again.claim("w0", 7) == (0, [(4, 10), (10, 11)])


@given(
    remaining=st.integers(0, 3000),
    max_steps=st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(any),
    batch_size=st.integers(1, 40),
)
def test_a_share_holds_its_samples_in_its_steps(remaining, max_steps, batch_size):
    share = share_round(remaining, max_steps=max_steps, batch_size=batch_size)
    assert sum(share.counts) == min(remaining, batch_size * sum(max_steps))
    for steps, count, most in zip(share.num_steps, share.counts, max_steps, strict=True):
        assert min(most, 1) <= steps <= most
        assert count <= steps * batch_size


@given(
    num_samples=st.integers(1, 300),
    max_steps=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    batch_size=st.integers(1, 40),
    losses=st.lists(st.integers(0, 4), max_size=5),
)
def test_an_epoch_completes_every_position_once(num_samples, max_steps, batch_size, losses):
    """If a round loses a worker, later rounds complete its share."""
    ledger, seen = Ledger(num_samples), []
    lost = list(losses)
    while ledger.epoch == 0:
        share = share_round(ledger.num_free, max_steps=max_steps, batch_size=batch_size)
        loser = lost.pop() if lost else None
        for worker, count in enumerate(share.counts):
            _, spans = ledger.claim(f"w{worker}", count)
            if worker == loser:
                ledger.give_back(f"w{worker}")
                continue
            seen += [position for start, stop in spans for position in range(start, stop)]
            ledger.complete(f"w{worker}")
    assert sorted(seen) == list(range(num_samples))


WORKERS = ["w0", "w1", "w2", "w3"]


class WorkersComeAndGo(RuleBasedStateMachine):
    """Any order of claims, exchanges, losses, saves and restores.

    The test keeps its own record of each position: the number of times that it was completed,
    and the worker that has claimed it.
    """

    workers = st.sampled_from(WORKERS)

    def cuts(self, epoch):
        if not self.has_blocks:
            return None
        random = np.random.default_rng([self.seed, epoch])
        inner = np.flatnonzero(random.random(self.num_samples - 1) < random.random()) + 1
        return [*inner.tolist(), self.num_samples]

    @initialize(num_samples=st.integers(1, 24), has_blocks=st.booleans(), seed=st.integers(0, 99))
    def begin(self, num_samples, has_blocks, seed):
        self.num_samples, self.has_blocks, self.seed = num_samples, has_blocks, seed
        self.ledger = Ledger(num_samples, cuts=self.cuts)
        self.held = {}
        self.num_completed = {}

    @rule(worker=workers, count=st.integers(0, 15))
    def claim(self, worker, count):
        num_free = self.ledger.num_free
        epoch, spans = self.ledger.claim(worker, count)
        positions = [(epoch, i) for start, stop in spans for i in range(start, stop)]
        assert len(positions) == min(count, num_free)
        for position in positions:
            assert position not in self.held, "never claimed by two at a time"
            assert position not in self.num_completed, "never claimed when it is done"
            self.held[position] = worker

    @rule(worker=workers)
    def complete(self, worker):
        mine = [position for position, worker_id in self.held.items() if worker_id == worker]
        assert self.ledger.complete(worker) == len(mine)
        for position in mine:
            del self.held[position]
            self.num_completed[position] = self.num_completed.get(position, 0) + 1

    @rule(worker=workers, keep=st.integers(0, 8))
    def give_back(self, worker, keep):
        mine = [position for position, worker_id in self.held.items() if worker_id == worker]
        reserved = self.ledger.reserved_by(worker)
        assert self.ledger.give_back(worker, keep=keep) == len(mine[keep:])
        self._forget(mine[keep:])
        kept = [(e, i) for e, span in self.ledger.claims_of(worker) for i in range(*span)]
        assert kept == mine[:keep], "its first claims"
        assert self.ledger.reserved_by(worker) == reserved

    @rule(keep=st.sets(workers), members=st.none() | st.sets(workers))
    def regroup(self, keep, members=None):
        released = [position for position, worker_id in self.held.items() if worker_id not in keep]
        before = {worker: self.ledger.reserved_by(worker) for worker in WORKERS}
        assert self.ledger.release(keep=keep, members=members) == len(released)
        self._forget(released)
        remaining = keep if members is None else members
        for worker, reserved in before.items():
            assert self.ledger.reserved_by(worker) == (reserved if worker in remaining else [])

    @rule()
    def compact_state_is_equivalent_in_fewer_spans(self):
        compact = json.loads(json.dumps(self.ledger.compact_state()))
        saved = Ledger.from_state_dict(self.ledger.state_dict(), cuts=self.cuts).state_dict()
        again = Ledger.from_state_dict(compact, cuts=self.cuts).state_dict()
        assert positions_in(again) == positions_in(saved)
        assert {**again, "open": []} == {**saved, "open": []}
        for _, _, spans in compact["open"]:
            assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(spans))

    @rule(with_claims=st.booleans())
    def save_and_restore(self, with_claims):
        state = self.ledger.state_dict(with_claims=with_claims)
        before = {worker: self.ledger.reserved_by(worker) for worker in WORKERS}
        self.ledger = Ledger.from_state_dict(json.loads(json.dumps(state)), cuts=self.cuts)
        assert self.ledger.state_dict(with_claims=with_claims) == state
        assert {worker: self.ledger.reserved_by(worker) for worker in WORKERS} == before
        if not with_claims:
            self._forget(list(self.held))

    def _forget(self, positions):
        for position in positions:
            del self.held[position]

    @invariant()
    def every_position_is_free_or_claimed_or_done(self):
        ledger, n = self.ledger, self.ledger.num_samples
        state = ledger.state_dict(with_claims=True)
        num_free = sum(stop - start for _, _, free in state["open"] for start, stop in free)
        assert ledger.num_done_ever == len(self.num_completed)
        assert ledger.num_claimed == len(self.held)
        assert set(ledger.claimants) == set(self.held.values())
        num_free += sum(stop - start for _, _, (start, stop) in state["reserved"])
        num_epochs = ledger.epoch + len(state["open"])
        assert ledger.num_done_ever + ledger.num_claimed + num_free == num_epochs * n
        assert 1 <= ledger.num_free <= n

    @invariant()
    def a_position_is_done_once_and_an_epoch_when_all_are(self):
        assert set(self.num_completed.values()) <= {1}
        n, epoch = self.ledger.num_samples, 0
        while all((epoch, i) in self.num_completed for i in range(n)):
            epoch += 1
        assert self.ledger.epoch == epoch

    def teardown(self):
        """A single worker completes the epoch, whatever happened before."""
        if not hasattr(self, "ledger"):
            return
        self.regroup(set())
        epoch = self.ledger.epoch
        while self.ledger.epoch == epoch:
            self.claim("w9", 5)
            self.complete("w9")
        self.a_position_is_done_once_and_an_epoch_when_all_are()


test_workers_come_and_go_and_every_position_is_completed_once = WorkersComeAndGo.TestCase


def test_only_a_workers_claims_beyond_its_trained_samples_are_given_back():
    ledger = Ledger(20)
    ledger.claim("w0", 8)
    ledger.claim("w1", 6)
    assert ledger.give_back("w0", keep=5) == 3
    assert (ledger.num_claimed, ledger.num_free) == (11, 9)
    assert ledger.claim("w2", 4) == (0, [(5, 8), (14, 15)])


def test_completed_samples_are_counted_in_claim_order():
    ledger, trained = Ledger(20), TrainedPositions()
    epoch, _ = ledger.claim("w0", 6)
    claims = ledger.claims_of("w0")
    assert trained.num_claimed(claims) == 0
    trained.add(epoch, np.arange(0, 4))
    assert trained.num_claimed(claims) == 4
    trained.add(epoch, np.arange(4, 8))
    assert (trained.num_claimed(claims), len(trained)) == (6, 8)
    trained.keep_first(0)
    trained.add(epoch, np.arange(10, 12))
    assert trained.num_claimed(claims) == 0


def test_each_change_of_claims_counts_once():
    ledger = Ledger(20)
    assert ledger.state_dict()["num_changes"] == 0
    ledger.claim("w0", 4)
    ledger.claim("w1", 4)
    ledger.complete("w0")
    ledger.give_back("w1")
    ledger.give_back("w1")
    assert ledger.num_changes == 5
    assert Ledger.from_state_dict(ledger.state_dict()).num_changes == 5
    without = {k: v for k, v in ledger.state_dict().items() if k != "num_changes"}
    assert Ledger.from_state_dict(without).num_changes == 0


def test_completed_positions_of_all_open_epochs_count():
    ledger = Ledger(10)
    for worker_id, count in (("w0", 4), ("w1", 6), ("w2", 3)):
        ledger.claim(worker_id, count)
    ledger.complete("w1")
    ledger.complete("w2")
    assert len(ledger.state_dict()["open"]) == 2
    assert num_done_by(ledger.state_dict()) == 9
    ledger.complete("w0")
    assert num_done_by(ledger.state_dict()) == 13
