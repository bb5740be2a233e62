"""The state of the generation that trains: its members, outcome and checkpoints."""

import pytest

from raydl.core.membership import Membership
from raydl.core.reports import Outcome, WorkerReport
from raydl.core.worker_group import Reported, RunEnded
from raydl.elastic.center_policy import keep_checkpoints
from raydl.elastic.decide import new_state
from raydl.elastic.facts import Change, Collect, Form, LeaveOut, Start, Vote, apply
from raydl.elastic.limits import Limits

THREE = ("w0", "w1", "w2")


class GenerationOf:
    """The newest generation of a state, and what happens to it."""

    def __init__(self, *worker_ids, number=3):
        self.state = new_state(Limits(max_workers=3), 0.0)
        for worker_id in (*THREE, "w3", "w4"):
            self.note(Start(worker_id))
        self.note(Form(Membership(number, worker_ids or THREE), 10, "they start"))

    def __getattr__(self, name):
        return getattr(self.state.run, name)

    def note(self, fact):
        apply(self.state, fact, 0.0)

    def lose(self, worker_id):
        self.note(LeaveOut((worker_id,)))

    def change(self, membership):
        self.note(Change(membership, "one joins"))

    def entered_with(self, worker_id):
        return self.state.workers[worker_id].generation

    def note_vote(self):
        at_round = max((r.round for r in self.reports.values()), default=0)
        self.note(Vote(self.number, {"checkpoint": 1.0}, at_round=at_round))

    def collected(self):
        """Return the round that would be collected for a checkpoint, or None."""
        self.state.votes["checkpoint"] = 1.0
        self.state.center.rounds = tuple(range(10, 20))
        actions = keep_checkpoints(self.state, Limits(), 0.0)
        return next((a.round for a in actions if isinstance(a, Collect)), None)


def generation_of(*worker_ids, number=3):
    return GenerationOf(*worker_ids, number=number)


def add_end(run, worker_id, outcome, round=20):
    run.note(RunEnded(worker_id, outcome, round, run.entered_with(worker_id)))


def add_report(run, worker_id, round, *kept):
    run.note(Reported(WorkerReport(worker_id, round, (), tuple(kept), {})))


# members


def test_members_are_at_work_until_they_have_ended_and_present_until_they_are_lost():
    run = generation_of()
    add_end(run, "w1", Outcome.REGROUP)
    assert (run.present, run.at_work) == (THREE, ("w0", "w2"))
    run.lose("w2")
    assert (run.present, run.at_work) == (("w0", "w1"), ("w0",))
    run.lose("w1")
    assert (run.present, run.at_work) == (("w0",), ("w0",))
    assert run.ended == {}


def test_a_generation_is_idle_once_each_member_has_ended_or_was_lost():
    run = generation_of()
    assert not run.is_idle
    add_end(run, "w1", Outcome.REGROUP)
    run.lose("w1")
    run.lose("w1")
    add_end(run, "w2", Outcome.REGROUP)
    assert (run.is_idle, run.at_work) == (False, ("w0",))
    run.lose("w0")
    assert (run.is_idle, run.at_work) == (True, ())
    run.change(Membership(2, ("w0", "w2")))
    assert (run.is_idle, run.at_work) == (False, ("w0",))


@pytest.mark.parametrize("order", [("w0", "w1"), ("w1", "w0")])
def test_a_run_is_finished_although_the_loss_of_one_member_was_nan_in_the_last_step(order):
    run = generation_of("w0", "w1")
    outcomes = {"w0": Outcome.BROKEN, "w1": Outcome.FINISHED}
    for worker_id in order:
        add_end(run, worker_id, outcomes[worker_id])
    assert run.outcome is Outcome.FINISHED


def test_a_generation_is_broken_when_an_exchange_did_not_complete():
    run = generation_of()
    add_end(run, "w0", Outcome.REGROUP)
    assert not run.is_broken
    add_end(run, "w1", Outcome.BROKEN)
    assert run.is_broken
    run.lose("w1")
    assert not run.is_broken


# outcomes


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        ([], Outcome.REGROUP),  # all were lost
        ([("finished", 20), ("finished", 20)], Outcome.FINISHED),
        ([("stopped", 20), ("stopped", 20)], Outcome.STOPPED),
        ([("regroup", 20), ("regroup", 20)], Outcome.REGROUP),
        ([("broken", 20), ("broken", 20)], Outcome.BROKEN),
        # a vote to regroup counts before the end of the run
        ([("finished", 21), ("regroup", 20)], Outcome.REGROUP),
        ([("regroup", 20), ("stopped", 21)], Outcome.REGROUP),
        ([("broken", 19), ("regroup", 20)], Outcome.REGROUP),
        # the last round ends the run also for members that missed it
        ([("broken", 19), ("finished", 20)], Outcome.FINISHED),
        ([("finished", 20), ("broken", 19)], Outcome.FINISHED),
        ([("stopped", 20), ("broken", 19)], Outcome.STOPPED),
        ([("broken", -1), ("finished", 0)], Outcome.FINISHED),
        # a member that is behind does not decide
        ([("finished", 19), ("broken", 20)], Outcome.BROKEN),
    ],
)
def test_the_outcome_of_a_generation_when_all_members_have_ended(ends, outcome):
    run = generation_of()
    for worker_id, (what, round) in zip(THREE, ends, strict=False):
        add_end(run, worker_id, Outcome(what), round)
    assert run.outcome is outcome


def test_the_newest_end_is_that_of_the_furthest_present_member():
    run = generation_of()
    assert run.newest_end is None
    add_end(run, "w0", Outcome.BROKEN, 19)
    add_end(run, "w1", Outcome.BROKEN, 20)
    add_end(run, "w2", Outcome.BROKEN, 20)
    assert run.newest_end.round == 20
    run.lose("w1")
    assert run.newest_end.worker_id == "w2"
    run.lose("w2")
    assert run.newest_end.worker_id == "w0"


def test_the_end_of_a_lost_member_does_not_affect_the_outcome():
    run = generation_of()
    add_end(run, "w0", Outcome.FINISHED)
    add_end(run, "w1", Outcome.REGROUP)
    run.lose("w1")
    assert run.outcome is Outcome.FINISHED


# checkpoints


def test_a_round_is_kept_everywhere_when_all_present_members_keep_it():
    run = generation_of()
    add_report(run, "w0", 15, 12, 14)
    add_report(run, "w1", 15, 14)
    assert run.collected() is None, "nothing is known of w2"
    add_report(run, "w2", 15, 13)
    assert run.collected() is None
    add_report(run, "w2", 15, 13, 14)
    assert run.collected() == 14


def test_a_lost_member_does_not_hold_up_a_checkpoint():
    run = generation_of()
    add_report(run, "w0", 15, 14)
    add_report(run, "w1", 15, 14)
    run.lose("w2")
    assert run.collected() == 14
    run.lose("w0")
    run.lose("w1")
    assert run.collected() is None


def test_states_of_an_older_vote_do_not_count():
    run = generation_of("w0", "w1")
    add_report(run, "w0", 15, 14)
    add_report(run, "w1", 16, 14)
    run.note_vote()
    assert run.voted_at_round == 16
    assert run.collected() is None
    add_report(run, "w0", 18, 14, 16, 17)
    add_report(run, "w1", 18, 14, 16, 17)
    assert run.collected() == 17


def test_a_vote_before_any_report_is_of_round_0():
    run = generation_of()
    run.note_vote()
    assert run.voted_at_round == 0


def test_the_reports_are_final_once_each_reaches_its_members_end():
    run = generation_of("w0", "w1")
    assert run.has_final_reports()
    add_end(run, "w0", Outcome.FINISHED, 20)
    assert not run.has_final_reports()
    add_report(run, "w0", 19)
    assert not run.has_final_reports()
    add_report(run, "w0", 20)
    assert run.has_final_reports()
    add_end(run, "w1", Outcome.BROKEN, -1)
    run.lose("w1")
    assert run.has_final_reports(), "a lost member has no end to report"


# members that join one by one


def test_members_keep_the_generation_that_they_entered_with():
    run = generation_of(number=3)
    assert [run.entered_with(w) for w in THREE] == [3, 3, 3]
    run.change(Membership(4, ("w0", "w2", "w3")))
    assert [run.entered_with(w) for w in ("w0", "w2", "w3")] == [3, 3, 4]
    run.change(Membership(5, ("w2", "w3", "w4")))
    assert [run.entered_with(w) for w in ("w2", "w3", "w4")] == [3, 4, 5]


def test_a_member_that_left_and_rejoins_enters_a_new_generation():
    run = generation_of(number=3)
    run.change(Membership(4, ("w0", "w1")))
    run.change(Membership(5, THREE))
    assert [run.entered_with(w) for w in THREE] == [3, 3, 5]


def test_a_change_drops_lost_members_and_keeps_the_ends_of_the_others():
    run = generation_of(number=3)
    run.lose("w1")
    add_end(run, "w0", Outcome.FINISHED)
    run.change(Membership(4, ("w0", "w2", "w3")))
    assert run.lost == set()
    assert (run.present, run.at_work) == (("w0", "w2", "w3"), ("w2", "w3"))
    assert run.outcome is Outcome.FINISHED
