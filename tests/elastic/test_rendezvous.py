"""The rendezvous forms generations of workers that arrive, leave and die on their own."""

import dataclasses
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
from user_loops import Threads, equal_states, run_all, user_loop_config

from raydl.config import MethodConfig
from raydl.core.membership import Membership
from raydl.elastic.rendezvous import NO_COPY, Invitation, Rendezvous, Signal
from raydl.elastic.rendezvous_client import RendezvousClient, _Participation
from raydl.errors import AttachError, ExchangeError
from raydl.methods import METHODS

LEASE_S, TIMEOUT_S = 10.0, 100.0


class RendezvousHarness:
    """A rendezvous with a clock that the test sets."""

    def __init__(self, num_workers, *, in_rounds=True):
        self.now = 0.0
        self.rendezvous = Rendezvous(
            "run",
            num_workers=num_workers,
            in_rounds=in_rounds,
            lease_s=LEASE_S,
            timeout_s=TIMEOUT_S,
            clock=lambda: self.now,
        )

    def poll(self, worker_id, generation=0, age=(0, 0)):
        return self.rendezvous.poll_invitation(worker_id, generation=generation, age=age)

    def poll_all(self, *worker_ids, generation=0, age=(0, 0)):
        """Poll twice for each worker; return the members that each was last invited with."""
        for _ in range(2):
            invitations = [self.poll(w, generation, age) for w in worker_ids]
        return [i and i.membership.worker_ids for i in invitations]

    def advance(self, seconds, **members):
        """Advance the clock while the given members send heartbeats of their generations."""
        for _ in range(round(seconds)):
            self.now += 1.0
            for worker_id, generation in members.items():
                self.rendezvous.heartbeat(worker_id, generation)

    def heartbeat(self, worker_id, generation):
        return self.rendezvous.heartbeat(worker_id, generation)


def test_the_first_generation_forms_when_the_minimum_of_workers_has_arrived():
    harness = RendezvousHarness((2, 4))
    assert harness.poll_all("w0") == [None]
    assert harness.poll_all("w1", "w0") == [("w0", "w1")] * 2
    assert harness.heartbeat("w0", 1) is Signal.GO_ON


def test_ranks_follow_the_ids_whichever_worker_arrives_first():
    harness = RendezvousHarness((3, 3))
    assert harness.poll_all("w10", "w2", "w1") == [("w1", "w2", "w10")] * 3


def test_a_time_out_gives_the_number_of_workers_and_what_to_change():
    harness = RendezvousHarness((4, 4))
    harness.poll("w0")
    for second in range(1, 100):
        harness.now = float(second)
        assert harness.poll("w0") is harness.poll("w1") is None
    harness.now = TIMEOUT_S
    with pytest.raises(
        AttachError, match=r"waited for 100 s: 2 of 4 workers arrived; start the oth"
    ):
        harness.poll("w0")


def test_a_worker_that_arrives_late_causes_a_regroup_and_becomes_a_member():
    harness = RendezvousHarness((1, 2))
    harness.poll_all("w0")
    assert harness.poll("w1") is None
    assert harness.heartbeat("w0", 1) is Signal.REGROUP
    invitation = harness.poll("w0", 1, (5, 9))
    assert invitation.membership.worker_ids == ("w0", "w1")
    assert (invitation.source, invitation.age) == ("w0", (5, 9))
    assert harness.poll("w1") == invitation


def test_no_member_regroups_for_a_newcomer_beyond_the_maximum():
    harness = RendezvousHarness((1, 1))
    harness.poll_all("w0")
    assert harness.poll("w1") is None
    assert harness.heartbeat("w0", 1) is Signal.GO_ON
    for _ in range(19):
        harness.advance(5, w0=1)
        assert harness.poll("w1") is None
    harness.advance(5, w0=1)
    with pytest.raises(AttachError, match="for a place: 1 workers are attached"):
        harness.poll("w1")


def rendezvous_of_three(min_workers):
    """Return a rendezvous whose generation 2 has three members."""
    harness = RendezvousHarness((min_workers, 3))
    harness.poll_all("w0", "w1")
    harness.poll("w2")
    harness.poll_all("w0", "w1", generation=1)
    assert harness.rendezvous.membership.worker_ids == ("w0", "w1", "w2")
    return harness


def test_a_lost_member_ends_the_generation_and_the_others_form_the_next_one():
    harness = rendezvous_of_three(2)
    harness.advance(LEASE_S - 1, w1=2, w2=2)
    assert harness.heartbeat("w1", 2) is Signal.GO_ON
    harness.advance(1, w1=2, w2=2)
    assert harness.heartbeat("w1", 2) is Signal.OVER
    assert harness.poll_all("w1", "w2", generation=2) == [("w1", "w2")] * 2


def test_a_member_whose_process_has_ended_is_lost_without_a_wait_for_its_lease():
    harness = rendezvous_of_three(2)
    assert harness.poll_all("w1", "w2", generation=2) == [None, None]
    harness.rendezvous.lose(["w0", "of another run"])
    assert harness.poll_all("w1", "w2", generation=2) == [("w1", "w2")] * 2
    assert harness.rendezvous.may_have_ended() == []
    harness.rendezvous.lose(["w0"])  # again
    assert harness.heartbeat("w1", 3) is Signal.GO_ON


def test_a_process_may_have_ended_if_a_heartbeat_is_late_or_others_wait_for_it():
    harness = rendezvous_of_three(2)
    assert harness.rendezvous.may_have_ended() == []
    harness.now += 0.5
    assert harness.rendezvous.may_have_ended() == []
    harness.now += 0.15
    assert harness.rendezvous.may_have_ended() == ["w0", "w1", "w2"]
    for worker_id in ("w0", "w1", "w2"):
        harness.heartbeat(worker_id, 2)
    harness.poll("w1", 2)  # its exchange has failed
    assert sorted(harness.rendezvous.may_have_ended()) == ["w0", "w2"]


def test_a_waiting_worker_whose_process_has_ended_is_not_invited():
    harness = RendezvousHarness((2, 2))
    harness.poll("w0")
    harness.rendezvous.lose(["w0"])
    assert harness.poll_all("w1") == [None]
    assert harness.poll_all("w1", "w2") == [("w1", "w2")] * 2


def test_by_messages_a_member_whose_process_has_ended_leaves_the_others_in_their_generations():
    harness = message_rendezvous((3, 3))
    harness.poll_all("w0", "w1", "w2")
    harness.rendezvous.note_center()
    harness.rendezvous.lose(["w1"])
    assert harness.rendezvous.membership.worker_ids == ("w0", "w2")
    assert harness.heartbeat("w0", 1) is Signal.GO_ON


def test_survivors_wait_for_the_others_no_longer_than_a_lease():
    harness = rendezvous_of_three(2)
    assert harness.poll_all("w0", "w1", generation=2) == [None, None]
    assert harness.heartbeat("w2", 2) is Signal.REGROUP  # it may complete the round soon
    harness.advance(2, w2=2)
    assert harness.heartbeat("w2", 2) is Signal.OVER
    for _ in range(7):
        harness.advance(1, w2=2)
        assert harness.poll_all("w0", "w1", generation=2) == [None, None]
    harness.advance(1, w2=2)
    assert harness.poll_all("w0", "w1", generation=2) == [("w0", "w1")] * 2
    assert harness.heartbeat("w2", 2) is Signal.OVER
    assert harness.poll_all("w2", generation=2) == [None]
    assert harness.heartbeat("w0", 3) is Signal.REGROUP  # it is a newcomer now


def test_the_furthest_copy_is_the_source_unless_its_worker_was_left_out():
    harness = RendezvousHarness((2, 3))
    harness.poll_all("w0", "w1")
    harness.poll("w0", 1, (4, 8))
    assert harness.poll("w1", 1, (5, 10)).source == "w1"
    harness.poll("late", 1, (9, 9))
    harness.poll("w0", 2, (6, 12))
    invitation = harness.poll("w1", 2, (6, 12))
    assert invitation.membership.worker_ids == ("w0", "w1", "late")
    assert invitation.source == "w0"


def test_workers_without_a_copy_start_from_the_center_at_the_rendezvous():
    harness = RendezvousHarness((1, 1))
    harness.poll_all("w0")
    harness.rendezvous.note_center()
    harness.advance(LEASE_S)
    invitation = harness.poll("w1")
    assert (invitation.source, invitation.age) == (None, NO_COPY)


@pytest.mark.parametrize(
    ("kept", "loaded", "source"),
    [
        ((0, 0), (0, 0), None),  # a new model replaces no center
        ((0, 0), (50, 9), "w3"),
        ((50, 8), (50, 9), "w3"),
        ((50, 9), (50, 9), None),
        ((60, 2), (50, 9), None),
    ],
)
def test_after_all_are_lost_the_furthest_of_loaded_and_kept_centers_is_the_source(
    kept, loaded, source
):
    harness = RendezvousHarness((2, 2))
    harness.poll_all("w0", "w1")
    harness.rendezvous.note_center(kept)
    harness.advance(LEASE_S)
    harness.poll("w2", age=(0, 0))
    invitation = harness.poll("w3", age=loaded)
    assert (invitation.source, invitation.age) == (source, loaded if source else NO_COPY)


def test_a_run_whose_workers_were_lost_before_a_center_was_kept_begins_anew():
    harness = RendezvousHarness((2, 2))
    harness.poll_all("w0", "w1")
    harness.advance(LEASE_S)
    harness.poll("w2")
    invitation = harness.poll("w3")
    assert (invitation.source, invitation.age) == ("w2", (0, 0))


def test_a_loaded_center_does_not_replace_the_center_of_members():
    harness = RendezvousHarness((1, 2))
    harness.poll_all("w0")
    harness.rendezvous.note_center()
    harness.poll("w1", age=(50, 9))
    assert harness.poll("w0", 1, (5, 9)).source == "w0"


def test_a_worker_that_left_for_good_needs_no_replacement():
    harness = RendezvousHarness((3, 3))
    harness.poll_all("w0", "w1", "w2")
    assert not harness.rendezvous.is_last("w0", 1)
    harness.rendezvous.leave_rendezvous("w0", 1)
    assert harness.heartbeat("w1", 1) is Signal.OVER
    assert harness.poll_all("w1", "w2", generation=1) == [("w1", "w2")] * 2
    assert not harness.rendezvous.is_last("w1", 2)
    harness.rendezvous.leave_rendezvous("w1", 2)
    assert harness.rendezvous.is_last("w2", 2)
    harness.rendezvous.leave_rendezvous("w2", 2)
    assert harness.poll_all("w3", "w4") == [None, None]  # the run begins anew and needs three


def test_workers_that_wait_when_the_last_member_leaves_begin_anew():
    harness = RendezvousHarness((2, 2))
    harness.poll_all("w0", "w1")
    harness.rendezvous.leave_rendezvous("w0", 1)
    harness.poll_all("w1", generation=1)
    assert harness.poll("w2") is None
    assert harness.rendezvous.is_last("w1", 2)
    harness.rendezvous.leave_rendezvous("w1", 2)
    assert harness.poll_all("w2") == [None]
    assert harness.poll_all("w3", "w2") == [("w2", "w3")] * 2


def test_a_worker_that_was_left_out_trains_alone_when_the_others_have_left():
    harness = rendezvous_of_three(2)
    for seconds in (LEASE_S - 1, 1):
        assert harness.poll_all("w0", "w1", generation=2) == [None, None]
        harness.advance(seconds, w2=2)
    assert harness.poll_all("w0", "w1", generation=2) == [("w0", "w1")] * 2
    assert harness.poll_all("w2", generation=2) == [None]
    harness.rendezvous.leave_rendezvous("w0", 3)
    harness.rendezvous.leave_rendezvous("w1", 3)
    assert harness.poll_all("w2", generation=2) == [("w2",)]


def test_a_lost_worker_needs_a_replacement():
    harness = RendezvousHarness((2, 2))
    harness.poll_all("w0", "w1")
    harness.advance(LEASE_S, w0=1)
    assert harness.poll_all("w0", generation=1) == [None]
    assert harness.poll_all("w2", "w0") == [("w0", "w2")] * 2


def test_the_rendezvous_does_not_wait_for_a_waiting_worker_that_dies():
    harness = RendezvousHarness((2, 2))
    harness.poll("w0")
    harness.now = LEASE_S
    assert harness.poll_all("w1") == [None]


def test_ids_are_never_used_again():
    rendezvous = RendezvousHarness((1, 1)).rendezvous
    assert [rendezvous.new_worker_id(wish) for wish in (None, "w1", "w1", None)][:2] == ["w0", "w1"]
    names = [rendezvous.new_worker_id(wish) for wish in ("a", "a", None, None, "w1")]
    assert names[0] == "a"
    assert len({*names, "w0", "w1"}) == 7


def test_the_rendezvous_is_not_unused_while_a_new_worker_is_about_to_poll():
    harness = RendezvousHarness((1, 1))
    harness.now = 59.0
    assert harness.rendezvous.unused_s() == 59
    harness.rendezvous.new_worker_id()
    assert harness.rendezvous.unused_s() == 0


# by messages


def message_rendezvous(num_workers):
    return RendezvousHarness(num_workers, in_rounds=False)


def test_by_messages_the_others_stay_in_their_generations():
    harness = message_rendezvous((2, 3))
    harness.poll_all("w0", "w1")
    harness.rendezvous.note_center()
    invitation = harness.poll("w2")
    assert invitation.generation == 2
    assert invitation.membership.worker_ids == ("w0", "w1", "w2")
    assert harness.heartbeat("w0", 1) is Signal.GO_ON
    harness.rendezvous.leave_rendezvous("w0", 1)
    assert harness.rendezvous.membership.worker_ids == ("w1", "w2")
    assert [m.generation for m in harness.rendezvous.pop_changes()] == [1, 2, 3]


def test_by_messages_a_member_that_polls_again_leaves_and_enters_anew():
    harness = message_rendezvous((2, 2))
    harness.poll_all("w0", "w1")
    harness.rendezvous.note_center()
    invitation = harness.poll("w0", 1)
    assert invitation.generation == 3
    assert [m.worker_ids for m in harness.rendezvous.pop_changes()] == [
        ("w0", "w1"), ("w1",), ("w1", "w0")
    ]  # fmt: skip


def test_by_messages_a_silent_member_is_removed_and_its_next_heartbeat_returns_over():
    harness = message_rendezvous((1, 2))
    harness.poll_all("w0")
    harness.rendezvous.note_center()
    harness.poll_all("w1")
    harness.advance(LEASE_S, w1=2)
    assert harness.rendezvous.membership.worker_ids == ("w1",)
    assert harness.heartbeat("w0", 1) is Signal.OVER


def test_by_messages_the_run_begins_again_if_its_first_worker_dies_at_the_start():
    harness = message_rendezvous((2, 3))
    harness.poll_all("w0", "w1")
    harness.advance(LEASE_S, w1=1)
    assert harness.heartbeat("w1", 1) is Signal.OVER
    assert harness.poll("w2") is None
    invitation = harness.poll("w1", 1)
    assert invitation.membership.worker_ids == ("w1", "w2")
    assert invitation.source == "w1"


# the end of the training


def test_a_member_that_has_ended_ends_the_generation_and_the_next_one_has_ended():
    harness = RendezvousHarness((2, 3))
    harness.poll_all("w0", "w1")
    harness.rendezvous.note_center((3, 3))
    assert harness.heartbeat("w1", 1) is Signal.GO_ON
    harness.rendezvous.leave_rendezvous("w0", 1, has_ended=True)
    assert harness.heartbeat("w1", 1) is Signal.REGROUP, "it may complete its round"
    harness.advance(2, w1=1)
    assert harness.heartbeat("w1", 1) is Signal.OVER
    invitation = harness.poll("w1", 1, (2, 2))
    assert invitation.has_ended
    assert invitation.source is None, "it ends with the center of the one that has ended"


def test_after_the_end_one_worker_is_invited_alone():
    harness = RendezvousHarness((2, 3))
    harness.poll_all("w0", "w1")
    harness.rendezvous.note_center((3, 3))
    for worker_id in ("w0", "w1"):
        harness.rendezvous.leave_rendezvous(worker_id, 1, has_ended=True)
    assert harness.poll("w2").has_ended


def test_a_worker_outside_the_generation_does_not_end_it():
    harness = RendezvousHarness((1, 3))
    harness.poll_all("w0", "w1")
    harness.advance(LEASE_S, w0=1)  # w1 is suspended
    assert harness.poll("w0", 1).membership.worker_ids == ("w0",)
    harness.rendezvous.leave_rendezvous("w1", 1, has_ended=True)
    assert harness.heartbeat("w0", 2) is Signal.GO_ON


def test_by_messages_the_members_hear_of_the_end():
    harness = RendezvousHarness((2, 3), in_rounds=False)
    harness.poll_all("w0", "w1")
    harness.rendezvous.note_center()
    harness.rendezvous.leave_rendezvous("w0", 1, has_ended=True)
    assert harness.heartbeat("w1", 1) is Signal.ENDED


def test_the_rendezvous_is_not_unused_while_a_worker_that_has_ended_reads_the_center():
    harness = RendezvousHarness((1, 3))
    harness.poll_all("w0")
    harness.rendezvous.leave_rendezvous("w0", 1, has_ended=True)
    harness.advance(100, w0=1)
    assert harness.rendezvous.unused_s() == 0.0
    harness.rendezvous.leave_rendezvous("w0", 1)
    harness.advance(100, w0=1)
    assert harness.rendezvous.unused_s() == 100.0


# user loops in threads


class Loops:
    """User loops of a small model in threads, until ``stop``."""

    def __init__(self, name, num_workers, *, period=2, lease_s=10.0, **exchange):
        method = MethodConfig(name=name, period=period)
        config = user_loop_config(method, num_workers, lease_s=lease_s, **exchange)
        self.threads = Threads(config)
        self.stopped = threading.Event()
        self.dead = set()
        self.seen = {}
        self.centers = {}
        self.pool = ThreadPoolExecutor(8)
        self.futures = []

    def start(self, worker_id):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        elastic = self.threads.attach(model, optimizer, worker_id)
        inputs = torch.full((2, 4), 1.0 + int(worker_id.lstrip("w")) / 10)  # others in each worker

        def loop():
            with elastic:
                before = elastic.generation, elastic.state_dict()["center"]["round"]
                while not self.stopped.wait(0.003):  # leave the core to other threads
                    if worker_id in self.dead:
                        return die(elastic)
                    optimizer.zero_grad()
                    model(inputs).square().mean().backward()
                    elastic.step()
                    self.seen[worker_id] = elastic.num_workers, elastic.local_step
                    center = elastic.state_dict()["center"]
                    which = elastic.generation, center["round"]
                    if which != before:  # a round has just ended
                        same = self.centers.setdefault(which, set())
                        same.add(tuple(center["weights"].tolist()))
                    before = which
                return elastic.center_state_dict()

        self.futures.append(self.pool.submit(loop))

    def wait_for_steps(self, worker_ids, num_workers):
        """Wait until workers have taken ten more steps in a generation of ``num_workers``."""
        steps = {w: self.seen.get(w, (0, 0))[1] + 10 for w in worker_ids}
        deadline = time.monotonic() + 20
        while not all(
            self.seen.get(w, (0, 0))[0] == num_workers and self.seen[w][1] >= steps[w]
            for w in worker_ids
        ):
            for future in self.futures:
                if future.done():
                    future.result()
            assert time.monotonic() < deadline, self.seen
            self.stopped.wait(0.01)

    def stop(self):
        self.stopped.set()
        results = [future.result(timeout=20) for future in self.futures]
        self.pool.shutdown()
        return results


def die(elastic):
    """Stop heartbeats and close the transport, as the end of a killed process does."""
    elastic._rendezvous._ended.set()
    elastic._rendezvous._close_transport()


@pytest.mark.parametrize(
    ("name", "exchange"),
    [
        ("sync-easgd", {}),
        ("sync-easgd", {"fragments": 2}),
        ("local-sgd", {"fragments": 2}),
        ("sync-easgd", {"compression": "int8"}),
        ("async-easgd", {}),
        ("async-easgd", {"compression": "int8"}),
        ("hogwild-easgd", {}),
        ("original-easgd", {}),
    ],
)
def test_workers_join_leave_and_die_and_the_others_train_on(name, exchange):
    loops = Loops(name, (2, 3), lease_s=0.8, **exchange)
    loops.start("w0")
    loops.start("w1")
    loops.wait_for_steps(["w0", "w1"], 2)
    loops.start("w2")
    loops.wait_for_steps(["w0", "w1", "w2"], 3)
    loops.dead.add("w0")
    loops.wait_for_steps(["w1", "w2"], 2)
    loops.start("w3")
    loops.wait_for_steps(["w1", "w2", "w3"], 3)
    for center in loops.stop()[1:]:
        assert torch.isfinite(center["weight"]).all()
    if METHODS[name].strategy == "sync":  # every rank has the same center after the same round
        assert max(len(same) for same in loops.centers.values()) == 1


def test_a_newcomer_starts_at_the_center_and_at_its_step():
    loops = Loops("sync-easgd", (1, 2), period=1)
    loops.start("w0")
    loops.wait_for_steps(["w0"], 1)
    model = torch.nn.Linear(4, 1)
    with loops.threads.attach(model, torch.optim.SGD(model.parameters(), lr=0.0)) as elastic:
        assert elastic.local_step >= 10
        assert torch.equal(model.weight, elastic.center_state_dict()["weight"])
        assert elastic.num_workers == 2
        assert elastic.generation == 2
    loops.stop()


def test_the_next_worker_starts_from_the_center_of_the_last_one():
    loops = Loops("sync-easgd", 1, period=1)
    loops.start("w0")
    loops.wait_for_steps(["w0"], 1)
    (center,) = loops.stop()
    model = torch.nn.Linear(4, 1)
    with loops.threads.attach(model, torch.optim.SGD(model.parameters(), lr=0.0)):
        assert torch.equal(model.weight, center["weight"])


def test_the_center_can_be_fetched_again_if_its_answer_was_lost():
    loops = Loops("async-easgd", (1, 2), period=1)
    loops.start("w0")
    loops.wait_for_steps(["w0"], 1)
    server = loops.threads.server
    worker_id = server.register("w1", server._terms)
    deadline = time.monotonic() + 20
    while (invitation := server.poll_invitation(worker_id, 0, NO_COPY)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first = server.fetch(worker_id, invitation)
    assert first is not None
    assert server.fetch(worker_id, invitation) is first
    server.forget_start(worker_id)
    assert server._starts == {}
    server.leave_rendezvous(worker_id, invitation.generation, False)
    loops.stop()


def test_a_worker_whose_answer_was_lost_registers_again_under_the_same_id():
    loops = Loops("sync-easgd", (1, 3), period=1)
    loops.start("w0")
    loops.wait_for_steps(["w0"], 1)
    server = loops.threads.server
    first = server.register("w1", server._terms, "token 1")
    assert server.register("w1", server._terms, "token 1") == first == "w1"
    assert server.register("w1", server._terms, "token 2") != first
    loops.stop()


@pytest.mark.parametrize("name", ["sync-easgd", "async-easgd", "original-easgd"])
def test_the_others_train_on_at_once_when_a_process_has_ended(name):
    loops = Loops(name, (1, 3), period=1, lease_s=1000.0)
    for worker_id in ("w0", "w1"):
        loops.start(worker_id)
    loops.wait_for_steps(["w0", "w1"], 2)
    server = loops.threads.server
    loops.dead.add("w1")
    deadline = time.monotonic() + 20
    while loops.seen["w0"][0] != 1:
        server.lose_ended(lambda actor_id, _: actor_id == "w1")
        assert time.monotonic() < deadline
        time.sleep(0.05)
    loops.wait_for_steps(["w0"], 1)
    loops.stop()


@pytest.mark.parametrize(("missed", "is_fetched"), [(0, False), (1, True)])
def test_a_worker_that_missed_a_generation_fetches_the_center_though_its_copy_is_as_old(
    missed, is_fetched
):
    """The others may have trained other samples up to the same age of the ledger."""
    age, membership = (100, 7), Membership(6 + missed, ("w0", "w1"))
    server = Mock()
    server.poll_invitation.return_value = Invitation(membership, "w1", age)
    client = RendezvousClient(
        "run",
        lambda preferred: (server, "w0"),
        lambda *arguments: Mock(),
        lease_s=60.0,
        in_rounds=True,
    )
    client._server, client.worker_id, client._has_entered = server, "w0", True
    client._current = _Participation(generation=5)
    entry = client.enter(age, own=Mock(), own_non_trainable=Mock())
    assert (entry.snapshot is not None) is is_fetched
    assert server.fetch.called is is_fetched


def test_a_copy_from_before_a_missed_generation_stays_stale_if_the_next_group_does_not_form():
    age, server, connected = (100, 7), Mock(), []

    def connect(worker_id, membership, abandoned):
        connected.append(membership.generation)
        if len(connected) == 1:
            raise ExchangeError(0, membership.generation, "w1 was lost")
        return Mock()

    server.poll_invitation.side_effect = [
        Invitation(Membership(generation, ("w0", "w1")), "w1", age) for generation in (7, 8)
    ]
    client = RendezvousClient(
        "run", lambda preferred: (server, "w0"), connect, lease_s=60.0, in_rounds=True
    )
    client._server, client.worker_id, client._has_entered = server, "w0", True
    client._current = _Participation(generation=5)
    with pytest.raises(ExchangeError):
        client.enter(age, own=Mock(), own_non_trainable=Mock())
    assert client.enter(age, own=Mock(), own_non_trainable=Mock()).snapshot is not None
    assert server.poll_invitation.call_args.args[2] == NO_COPY, "it is no source for others"


def fail_to_connect(worker_id, membership, abandoned):
    raise ExchangeError(0, membership.generation, "the others were not reached")


def attached(threads, worker_id, seed):
    """Return (handle, model) of a worker, with a frozen layer that all workers share."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Linear(1, 1))
    model[1].requires_grad_(False)
    return threads.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), worker_id), model


def train_steps(elastic, model, count):
    for _ in range(count):
        elastic.zero_grad()
        model(torch.rand(2, 4)).square().mean().backward()
        elastic.step()


def with_a_kept_center():
    """Return (threads, center), where the last worker has trained, left and kept its center."""
    threads = Threads(user_loop_config(MethodConfig(name="sync-easgd", period=1), 1))
    last, model = attached(threads, "w0", 0)
    with last:
        train_steps(last, model, 5)
        return threads, last.center_state_dict()


def center_of_a_new_worker(threads):
    new, _ = attached(threads, "w2", 2)
    with new:
        return new.center_state_dict()


def test_workers_restarted_from_a_state_continue_it_although_an_older_center_is_kept():
    method = MethodConfig(name="sync-easgd", period=1)
    elastic, model = attached(Threads(user_loop_config(method, 1)), "w0", 0)
    with elastic:
        train_steps(elastic, model, 8)
        state, center = elastic.state_dict(), elastic.center_state_dict()
    threads = Threads(user_loop_config(method, 2, lease_s=0.8))

    def train_and_die(worker_id, seed):
        elastic, _ = attached(threads, worker_id, seed)
        elastic.join()
        die(elastic)

    def restart(worker_id, seed):
        elastic, _ = attached(threads, worker_id, seed)
        if worker_id == "w1":  # w0 follows it
            elastic.load_state_dict(state)
        with elastic:
            assert elastic.local_step == 8
            return elastic.center_state_dict()

    run_all([lambda: train_and_die("w0", 1), lambda: train_and_die("w1", 2)])
    for found in run_all([lambda: restart("w0", 3), lambda: restart("w1", 4)]):
        assert equal_states(found, center)


def test_a_waiting_worker_starts_from_the_center_of_the_last_one():
    threads = Threads(user_loop_config(MethodConfig(name="sync-easgd", period=100), (1, 2)))
    last, model = attached(threads, "w0", 0)
    last.join()
    train_steps(last, model, 101)
    put = threads.server.put
    threads.server.put = lambda *copy: (time.sleep(0.2), put(*copy))  # w1 polls meanwhile
    with ThreadPoolExecutor(1) as pool:
        new, _ = attached(threads, "w1", 1)
        waiting = pool.submit(new.join)
        while last._rendezvous.signal is not Signal.REGROUP:
            time.sleep(0.01)
        center = last.center_state_dict()
        last.detach()
        waiting.result(timeout=20)
    assert equal_states(new.center_state_dict(), center)
    new.detach()


def test_a_worker_that_never_entered_does_not_change_the_kept_center():
    threads, center = with_a_kept_center()
    failing, _ = attached(threads, "w1", 1)
    failing._rendezvous._make_transport = fail_to_connect
    with pytest.raises(ExchangeError):
        failing.join()
    failing.detach()
    assert equal_states(center_of_a_new_worker(threads), center)


def test_a_worker_whose_start_fails_does_not_change_the_kept_center(monkeypatch):
    threads, center = with_a_kept_center()
    failing, _ = attached(threads, "w1", 1)

    def out_of_memory(snapshot):
        raise MemoryError

    monkeypatch.setattr(failing, "_start_replica", out_of_memory)
    with pytest.raises(MemoryError):
        failing.join()
    failing.detach()
    assert equal_states(center_of_a_new_worker(threads), center)


def test_the_next_worker_starts_from_the_center_of_a_last_one_whose_lease_expired():
    threads = Threads(user_loop_config(MethodConfig(name="sync-easgd", period=1), 1, lease_s=0.2))
    last, model = attached(threads, "w0", 0)
    last.join()
    train_steps(last, model, 5)
    heartbeat, threads.server.heartbeat = threads.server.heartbeat, lambda *of: Signal.GO_ON
    time.sleep(0.5)
    threads.server.unused_s()
    assert not threads.server._rendezvous._entered
    threads.server.heartbeat = heartbeat
    center = last.center_state_dict()
    last.detach()
    assert equal_states(center_of_a_new_worker(threads), center)


def test_a_worker_that_waited_in_vain_for_a_replacement_leaves_its_center():
    config = user_loop_config(MethodConfig(name="sync-easgd", period=1), 2, lease_s=0.8)
    scaling = dataclasses.replace(config.scaling, start_timeout_s=2.0)
    threads = Threads(dataclasses.replace(config, scaling=scaling))

    def train_and_die():
        elastic, model = attached(threads, "w1", 1)
        train_steps(elastic, model, 5)
        die(elastic)

    def wait_for_replacement():
        elastic, model = attached(threads, "w0", 0)
        with pytest.raises(AttachError, match="1 of 2 workers arrived"), elastic:
            train_steps(elastic, model, 50)
        return elastic.center_state_dict()

    def start_next(worker_id):
        elastic, _ = attached(threads, worker_id, 2)
        with elastic:
            return elastic.center_state_dict()

    center, _ = run_all([wait_for_replacement, train_and_die])
    for found in run_all([lambda: start_next("w2"), lambda: start_next("w3")]):
        assert equal_states(found, center)


def test_a_loop_that_forgot_to_detach_does_not_block_others():
    threads = Threads(user_loop_config(MethodConfig(name="sync-easgd"), 1, lease_s=0.8))
    model = torch.nn.Linear(4, 1)
    forgotten = threads.attach(model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert forgotten.rank == 0
    del forgotten
    gc.collect()
    with threads.attach(model, torch.optim.SGD(model.parameters(), lr=0.0)) as elastic:
        assert elastic.num_workers == 1
