"""What is known of each worker, by a clock that the test turns."""

import pytest

from raydl.core.membership import Membership
from raydl.core.reports import WorkerReport
from raydl.elastic.worker_registry import Phase, WorkerRegistry

LATE = "is late and left out"


class Floor:
    """A workforce with a lease of 10 s, whose workers' first steps may take 60 s."""

    def __init__(self, *worker_ids, training=True):
        self.now = 1000.0
        self.force = WorkerRegistry(lease_s=10.0, first_step_s=60.0, clock=lambda: self.now)
        self.generation = 0
        for worker_id in worker_ids:
            self.force.add(worker_id)
            self.force.note_ready(worker_id, "node")
        if training and worker_ids:
            self.form(*worker_ids)

    def form(self, *worker_ids):
        self.generation += 1
        self.force.formed(Membership(self.generation, worker_ids))

    def report(self, worker_id, *, local_step=0, round=0, step_s=0.1, waiting_s=0.0, **more):
        self.force.note_report(
            WorkerReport(
                worker_id,
                round,
                (),
                (),
                {},
                local_step=local_step,
                step_s=step_s,
                waiting_s=waiting_s,
                **{"generation": self.generation, **more},
            )
        )

    def waiting_s(self, *worker_ids):
        return self.force.waiting_s(worker_ids, generation=self.generation)

    def stay_in_step(self, worker_id, seconds, **report):
        """Let a worker answer twice a second that it is where it was."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            self.report(worker_id, **report)

    def leave_out_and_return(self, worker_id):
        """Leave a worker out; return for how long it stays out, to a quarter of a second."""
        self.force.leave_out((worker_id,))
        self.force.left_loop(worker_id)
        since = self.now
        while worker_id not in self.candidates().ready:
            assert self.candidates().absent == (worker_id,)
            self.now += 0.25
        return self.now - since

    def candidates(self):
        return self.force.candidates(0.0)

    def phase(self, worker_id):
        return self.force[worker_id].phase


# phases


def test_workers_are_counted_by_where_they_stand():
    floor = Floor("w0", "w1", "w2", "w3")
    floor.force.add("w4")
    floor.force.leave_out(("w3",))
    floor.force.left_loop("w2")
    assert floor.force.counts() == {"training": 2, "ready": 1, "starting": 1, "left out": 1}
    assert Floor().force.counts() == {}


def test_a_worker_starts_is_ready_trains_and_stands_by():
    floor = Floor()
    floor.force.add("w0")
    assert floor.phase("w0") is Phase.STARTING
    assert floor.candidates().ready == ()
    floor.force.note_ready("w0", "node-a")
    assert (floor.phase("w0"), floor.force["w0"].node) == (Phase.READY, "node-a")
    assert floor.candidates().ready == ("w0",)
    floor.form("w0")
    assert (floor.phase("w0"), floor.force["w0"].in_loop) == (Phase.TRAINING, True)
    assert floor.candidates().ready == ("w0",), "who trains may go on to"
    floor.force.left_loop("w0")
    floor.force.stand_by("w0")
    assert (floor.phase("w0"), floor.force["w0"].in_loop) == (Phase.READY, False)
    assert floor.force["w0"].has_trained


def test_a_phase_keeps_its_beginning_while_a_worker_trains_on():
    floor = Floor("w0", training=False)
    floor.now = 1003.0
    floor.form("w0")
    floor.now = 1007.0
    floor.form("w0")
    assert floor.force["w0"].since == 1003.0


def test_workers_are_listed_in_the_order_of_their_requests():
    floor = Floor("w2", "w0", "w1")
    assert [entry.worker_id for entry in floor.force.entries()] == ["w2", "w0", "w1"]
    assert floor.candidates().ready == ("w2", "w0", "w1")
    assert floor.force.in_phase(Phase.TRAINING) == ["w2", "w0", "w1"]
    assert floor.candidates().waited_s == 0.0


def test_all_workers_but_the_leaving_ones_count_as_requested():
    floor = Floor("w0", "w1", "w2")
    floor.force.add("w3")
    floor.force.leave_out(("w1",))
    assert floor.force.num_coming() == 4
    floor.force.note_leaving("w0", "is on a draining node")
    assert floor.force.num_coming() == 3
    floor.force.remove("w2", "was lost")
    assert floor.force.num_coming() == 2


def test_workers_that_reserve_no_cpu_are_counted_apart():
    floor = Floor()
    floor.force.add("w7", reserves_cpu=False)
    before = floor.force.num_coming()
    assert floor.force.num_coming(reserves_cpu=False) == 1
    floor.force.note_leaving("w7", "was removed")
    assert floor.force.num_coming(reserves_cpu=False) == 0
    assert floor.force.num_coming() == before


def test_a_leaving_worker_is_no_candidate_and_its_cause_is_known():
    floor = Floor("w0", "w1")
    floor.force.note_leaving("w1", "is on a draining node")
    assert floor.phase("w1") is Phase.LEAVING
    assert (floor.candidates().ready, floor.candidates().absent) == (("w0",), ())
    assert floor.candidates().causes == {"w1": "is on a draining node"}


def test_only_a_training_worker_can_stand_by():
    floor = Floor("w0", "w1")
    floor.force.note_leaving("w0", "was removed")
    floor.force.leave_out(("w1",))
    for worker_id in ("w0", "w1"):
        floor.force.stand_by(worker_id)
    assert (floor.phase("w0"), floor.phase("w1")) == (Phase.LEAVING, Phase.LEFT_OUT)


def test_why_a_worker_went_is_remembered_until_the_next_membership_has_formed():
    floor = Floor("w0", "w1", "w2")
    floor.force.remove("w1", "was lost")
    floor.force.remove("w2", "is on a draining node")
    assert "w1" not in floor.force
    assert floor.candidates().causes == {"w1": "was lost", "w2": "is on a draining node"}
    floor.form("w0")
    assert floor.candidates().causes == {}
    floor.force.remove("w9", "was lost")  # of whom nothing is known
    assert floor.candidates().causes == {}


# ids


def test_an_id_is_never_used_again():
    floor = Floor("w0", "w1")
    assert floor.force.new_id() == "w2"
    floor.force.add("w2")
    floor.force.remove("w2", "was lost")
    floor.force.remove("w0", "was lost")
    assert floor.force.new_id() == "w3"


def test_new_ids_are_above_the_ids_of_a_checkpoint():
    floor = Floor("w7", "w3")
    assert floor.force.new_id() == "w8"


# left out


def test_a_worker_left_out_is_absent_and_no_candidate():
    floor = Floor("w0", "w1")
    floor.force.leave_out(("w1",))
    candidates = floor.candidates()
    assert (candidates.ready, candidates.absent) == (("w0",), ("w1",))
    assert candidates.causes == {"w1": LATE}


def test_a_worker_that_was_left_out_does_not_rejoin_before_it_has_left_its_loop():
    floor = Floor("w0", "w1")
    floor.force.leave_out(("w1",))
    floor.now += 300.0
    assert floor.candidates().absent == ("w1",)
    floor.force.left_loop("w1")
    assert (floor.candidates().ready, floor.candidates().absent) == (("w0", "w1"), ())


def test_each_time_it_stays_out_twice_as_long_and_a_minute_at_most():
    floor = Floor("w0", "w1")
    stays = []
    for _ in range(9):
        stays.append(floor.leave_out_and_return("w1"))
        floor.form("w0", "w1")
        assert floor.candidates().causes == {}
    assert stays == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_one_late_worker_does_not_lengthen_the_stay_of_another():
    floor = Floor("w0", "w1", "w2")
    for _ in range(3):
        floor.leave_out_and_return("w1")
        floor.form("w0", "w1", "w2")
    assert floor.leave_out_and_return("w2") == 1


def test_a_worker_that_is_lost_while_it_is_out_is_not_absent_any_more():
    floor = Floor("w0", "w1")
    floor.force.leave_out(("w1",))
    floor.force.remove("w1", "was lost")
    candidates = floor.candidates()
    assert (candidates.ready, candidates.absent) == (("w0",), ())
    assert candidates.causes == {"w1": "was lost"}


# stuck


def test_a_worker_is_stuck_beyond_its_lease_where_steps_are_short():
    floor = Floor("w0")
    floor.report("w0", local_step=5, step_s=0.1)
    floor.stay_in_step("w0", 10.0, local_step=5, step_s=0.1)
    assert floor.force.stuck() == []
    floor.stay_in_step("w0", 0.5, local_step=5, step_s=0.1)
    assert floor.force.stuck() == [("w0", 10.5)]


def test_a_worker_is_stuck_beyond_twenty_usual_steps_where_they_are_long():
    floor = Floor("w0")
    floor.report("w0", local_step=5, step_s=3.0)
    floor.stay_in_step("w0", 60.0, local_step=5, step_s=3.0)
    assert floor.force.stuck() == []
    floor.stay_in_step("w0", 0.5, local_step=5, step_s=3.0)
    assert floor.force.stuck() == [("w0", 60.5)]


def test_the_first_step_may_take_longer():
    floor = Floor("w0")
    floor.report("w0", step_s=0.0)
    floor.stay_in_step("w0", 60.0, step_s=0.0)
    assert floor.force.stuck() == []
    floor.stay_in_step("w0", 0.5, step_s=0.0)
    assert floor.force.stuck() == [("w0", 60.5)]


def test_a_worker_that_waits_for_its_group_to_form_is_not_stuck():
    """Another member may be late: its snapshot is slow to arrive, or it was stopped meanwhile."""
    floor = Floor("w0", "w1")
    floor.report("w0", local_step=5, round=1)
    floor.force.left_loop("w0")
    floor.form("w0", "w1")
    last = {"local_step": 6, "round": 2}  # of the generation before; the report arrives late
    floor.stay_in_step("w0", 60.0, **last, generation=1)
    assert floor.force.stuck() == []
    floor.stay_in_step("w0", 10.0, **last)  # the group has formed
    assert floor.force.stuck() == []
    floor.stay_in_step("w0", 1.0, **last)
    assert floor.force.stuck() == [("w0", 10.5)]


def test_a_worker_that_never_enters_its_generation_is_stuck():
    """The group's own time-out of 60 s should have ended the wait."""
    floor = Floor("w0", "w1")
    floor.report("w0", local_step=5)
    floor.force.left_loop("w0")
    floor.form("w0", "w1")
    floor.stay_in_step("w0", 70.0, local_step=5, generation=1)
    assert floor.force.stuck() == []
    floor.stay_in_step("w0", 0.5, local_step=5, generation=1)
    assert floor.force.stuck() == [("w0", 70.5)]


def test_a_step_may_take_longer_while_processes_start_that_read_its_samples():
    floor = Floor("w0")
    floor.report("w0", local_step=5, step_s=0.1, is_starting=True)
    floor.stay_in_step("w0", 60.0, local_step=5, step_s=0.1, is_starting=True)
    assert floor.force.stuck() == []
    floor.stay_in_step("w0", 0.5, local_step=5, step_s=0.1)
    assert floor.force.stuck() == [("w0", 60.5)]


@pytest.mark.parametrize(
    "news",
    [
        {"local_step": 6},
        {"local_step": 5, "round": 1},
        {"local_step": 5, "waiting_s": 0.1},  # the others are late, or stuck
    ],
)
def test_a_worker_that_makes_progress_or_waits_is_not_stuck(news):
    floor = Floor("w0")
    floor.report("w0", local_step=5)
    floor.stay_in_step("w0", 9.0, local_step=5)
    floor.report("w0", **news)
    floor.stay_in_step("w0", 10.0, **news)
    assert floor.force.stuck() == []


def test_a_worker_that_computes_is_not_stuck_until_its_longest_time_is_over():
    floor = Floor("w0")
    floor.report("w0", local_step=5, cpu_s=1.0, sent_s=0.0)
    for second in range(1, 602):
        floor.now += 1.0
        floor.report("w0", local_step=5, cpu_s=1.0 + 0.1 * second, sent_s=float(second))
        assert floor.force.stuck() == ([("w0", 601.0)] if second > 600 else [])


def test_threads_that_only_wait_are_no_computing():
    floor = Floor("w0")
    floor.report("w0", local_step=5, cpu_s=1.0, sent_s=0.0)
    for second in range(1, 12):
        floor.now += 1.0
        floor.report("w0", local_step=5, cpu_s=1.0 + 0.02 * second, sent_s=float(second))
    assert floor.force.stuck() == [("w0", 11.0)]


def test_of_a_silent_worker_its_lease_decides():
    """A stopped process does not answer; nor does one on the other side of a partition."""
    floor = Floor("w0")
    floor.report("w0", local_step=5)
    floor.now += 300.0
    assert floor.force.stuck() == []
    floor.report("w0", local_step=6)  # it was elsewhere, and has gone on
    assert floor.force.stuck() == []


def test_a_worker_outside_its_loop_is_not_stuck():
    floor = Floor("w0")
    floor.report("w0", local_step=5)
    floor.force.left_loop("w0")
    floor.stay_in_step("w0", 300.0, local_step=5)
    assert floor.force.stuck() == []
    floor.form("w0")
    floor.stay_in_step("w0", 10.0, local_step=5)
    assert floor.force.stuck() == [], "what it did before it came back does not count"


def test_a_worker_left_out_may_be_stuck_too():
    floor = Floor("w0", "w1")
    floor.report("w1", local_step=5)
    floor.force.leave_out(("w1",))
    floor.stay_in_step("w1", 10.5, local_step=5)
    assert floor.force.stuck() == [("w1", 10.5)]


# waiting


def test_waiting_times_are_those_of_the_newest_reports():
    floor = Floor("w0", "w1", "w2")
    floor.report("w0", waiting_s=2.0)
    floor.report("w1")
    assert floor.waiting_s("w0", "w1", "w2") == {"w0": 2.0, "w1": 0.0, "w2": 0.0}
    floor.report("w0", local_step=1)
    assert floor.waiting_s("w0") == {"w0": 0.0}


def test_a_silent_worker_counts_as_not_waiting():
    """It was stopped in an exchange: what it said last is not what it does now."""
    floor = Floor("w0", "w1")
    floor.report("w0", waiting_s=2.0)
    floor.report("w1", waiting_s=2.0)
    floor.now += 0.9
    assert floor.waiting_s("w0", "w1") == {"w0": 2.0, "w1": 2.0}
    floor.report("w1", waiting_s=2.9)
    floor.now += 0.2
    assert floor.waiting_s("w0", "w1") == {"w0": 0.0, "w1": 2.9}


def test_a_wait_in_the_generation_before_is_none_in_this_one():
    """Else who answers first in a generation seems late: it is at work, and the other waits."""
    floor = Floor("w0", "w1", "w2")
    floor.report("w0", waiting_s=2.0)  # for w2, which is left out
    floor.report("w1", waiting_s=2.0)
    floor.form("w0", "w1")
    assert floor.waiting_s("w0", "w1") == {"w0": 0.0, "w1": 0.0}
    floor.report("w1", round=1)
    assert floor.waiting_s("w0", "w1") == {"w0": 0.0, "w1": 0.0}
    floor.report("w0", round=1, waiting_s=0.3)
    assert floor.waiting_s("w0", "w1") == {"w0": 0.3, "w1": 0.0}


def test_the_answer_of_a_worker_that_has_gone_is_of_no_consequence():
    floor = Floor("w0")
    floor.report("w9", waiting_s=2.0)
    assert "w9" not in floor.force
