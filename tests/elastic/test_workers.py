"""The workers that the control knows: phases, ids, left-out, stuck and waiting workers."""

import pytest

from raydl.config import ElasticConfig
from raydl.core.membership import Membership
from raydl.core.reports import Outcome, WorkerReport
from raydl.core.worker_group import Lost, Reported, RunEnded, WorkerReady
from raydl.elastic.center_policy import furthest_copy
from raydl.elastic.decide import new_state
from raydl.elastic.facts import Change, Drop, End, Form, LeaveOut, Release, Start, apply
from raydl.elastic.failure_policy import end_stuck
from raydl.elastic.limits import Limits
from raydl.elastic.membership_policy import candidates_of, waiting_s
from raydl.elastic.scaling_policy import fill
from raydl.elastic.state import Copy, Phase

LATE = "is late and left out"


class StateHarness:
    """A state with steps of up to 10 s and first steps of up to 60 s, by a clock of the test."""

    def __init__(self, *worker_ids, training=True, max_step_s=10.0):
        self.now = 1000.0
        self.limits = Limits(elastic=ElasticConfig(lease_s=10.0, max_step_s=max_step_s))
        self.state = new_state(self.limits, self.now)
        self.generation = 0
        for worker_id in worker_ids:
            self.add(worker_id)
            self.note(WorkerReady(worker_id, "node"))
        if training and worker_ids:
            self.form(*worker_ids)

    def note(self, fact):
        apply(self.state, fact, self.now)

    def add(self, worker_id, **more):
        self.note(Start(worker_id, **more))

    def form(self, *worker_ids):
        self.generation += 1
        self.note(Form(Membership(self.generation, worker_ids), 0, "they start"))

    def change(self, *worker_ids):
        self.generation += 1
        self.note(Change(Membership(self.generation, worker_ids), "one joins"))

    def left_loop(self, worker_id, round=-1):
        worker = self.state.workers[worker_id]
        self.note(RunEnded(worker_id, Outcome.REGROUP, round, worker.generation))

    def lose(self, worker_id):
        self.note(Lost(worker_id, "it died"))

    def report(self, worker_id, *, local_step=0, round=0, step_s=0.1, waiting_s=0.0, **more):
        report = WorkerReport(
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
        self.note(Reported(report))

    def waiting_s(self, *worker_ids):
        workers = self.state.workers
        return {w: waiting_s(self.state, workers[w], self.now) for w in worker_ids}

    def stay_in_step(self, worker_id, seconds, **report):
        """Report the same progress of a worker twice a second."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            self.report(worker_id, **report)

    def stuck(self):
        """Return the workers that are ended since they are stuck, and for how many seconds."""
        actions = [*end_stuck(self.state, self.limits, self.now)]
        ended = [a.worker_id for a in actions if isinstance(a, End)]
        return [(w, self.now - self.state.workers[w].moved_at) for w in ended]

    def leave_out_and_return(self, worker_id):
        """Leave a worker out; return how long it stays out, to a quarter of a second."""
        self.note(LeaveOut((worker_id,)))
        self.left_loop(worker_id)
        since = self.now
        while worker_id not in self.candidates().ready:
            assert self.candidates().absent == (worker_id,)
            self.now += 0.25
        return self.now - since

    def candidates(self):
        return candidates_of(self.state, self.limits, self.now, waited_s=0.0)

    def phase(self, worker_id):
        return self.state.workers[worker_id].phase

    def next_id(self):
        """Return the id of the next worker that is requested."""
        self.state.max_workers = 1 + self.state.num_staying[False]
        return next(fill(self.state)).worker_id


# phases


def test_workers_are_counted_by_phase():
    harness = StateHarness("w0", "w1", "w2", "w3")
    harness.add("w4")
    harness.note(LeaveOut(("w3",)))
    harness.left_loop("w2")
    assert harness.state.counts() == {"training": 2, "ready": 1, "starting": 1, "left out": 1}
    assert StateHarness().state.counts() == {}


def test_a_worker_starts_is_ready_trains_and_stands_by():
    harness = StateHarness()
    harness.add("w0")
    assert harness.phase("w0") is Phase.STARTING
    assert harness.candidates().ready == ()
    harness.note(WorkerReady("w0", "node-a"))
    assert (harness.phase("w0"), harness.state.workers["w0"].node) == (Phase.READY, "node-a")
    assert harness.candidates().ready == ("w0",)
    harness.form("w0")
    assert (harness.phase("w0"), harness.state.workers["w0"].in_loop) == (Phase.TRAINING, True)
    assert harness.candidates().ready == ("w0",), "a training worker is a candidate too"
    harness.left_loop("w0")
    harness.note(Drop("w0"))
    assert (harness.phase("w0"), harness.state.workers["w0"].in_loop) == (Phase.READY, False)
    assert harness.state.workers["w0"].has_trained


def test_a_phase_keeps_its_beginning_while_a_worker_trains_on():
    harness = StateHarness("w0", training=False)
    harness.now = 1003.0
    harness.form("w0")
    harness.now = 1007.0
    harness.form("w0")
    assert harness.state.workers["w0"].since == 1003.0


def test_a_member_that_has_left_its_loop_stays_out_of_it_while_others_join():
    harness = StateHarness("w0", "w1")
    harness.left_loop("w0", 9)
    harness.add("w2")
    harness.note(WorkerReady("w2", "node"))
    harness.change("w0", "w1", "w2")
    assert [w.in_loop for w in harness.state.workers.values()] == [False, True, True]
    assert furthest_copy(harness.state) == Copy("w0", round=9)
    harness.stay_in_step("w0", 200.0)
    assert "w0" not in dict(harness.stuck())


def test_workers_are_listed_in_the_order_of_their_requests():
    harness = StateHarness("w2", "w0", "w1", training=False)
    assert [*harness.state.workers] == ["w2", "w0", "w1"]
    assert harness.candidates().ready == ("w2", "w0", "w1")
    assert [w.worker_id for w in harness.state.in_phase(Phase.READY)] == ["w2", "w0", "w1"]
    assert harness.candidates().waited_s == 0.0


def test_all_workers_but_the_leaving_ones_count_as_requested():
    harness = StateHarness("w0", "w1", "w2")
    harness.add("w3")
    harness.note(LeaveOut(("w1",)))
    assert harness.state.num_staying[False] == 4
    harness.note(Release("w0", "is on a draining node"))
    assert harness.state.num_staying[False] == 3
    harness.lose("w2")
    assert harness.state.num_staying[False] == 2


def test_workers_that_reserve_no_cpu_are_counted_apart():
    harness = StateHarness()
    harness.add("w7", is_spare=True)
    before = harness.state.num_staying[False]
    assert harness.state.num_staying[True] == 1
    harness.note(Release("w7", "was removed"))
    assert harness.state.num_staying[True] == 0
    assert harness.state.num_staying[False] == before


def test_a_leaving_worker_is_not_a_candidate_and_its_cause_is_known():
    harness = StateHarness("w0", "w1")
    harness.note(Release("w1", "is on a draining node"))
    assert harness.phase("w1") is Phase.LEAVING
    assert (harness.candidates().ready, harness.candidates().absent) == (("w0",), ())
    assert harness.candidates().causes == {"w1": "is on a draining node"}


def test_only_a_training_worker_can_stand_by():
    harness = StateHarness("w0", "w1")
    harness.note(Release("w0", "was removed"))
    harness.note(LeaveOut(("w1",)))
    for worker_id in ("w0", "w1"):
        harness.note(Drop(worker_id))
    assert (harness.phase("w0"), harness.phase("w1")) == (Phase.LEAVING, Phase.LEFT_OUT)


def test_the_cause_of_a_departure_is_kept_until_the_next_membership_has_formed():
    harness = StateHarness("w0", "w1", "w2")
    harness.lose("w1")
    harness.note(End("w2", "is on a draining node"))
    assert "w1" not in harness.state.workers
    assert harness.candidates().causes == {"w1": "was lost", "w2": "is on a draining node"}
    harness.form("w0")
    assert harness.candidates().causes == {}


# ids


def test_an_id_is_never_used_again():
    harness = StateHarness("w0", "w1")
    assert harness.next_id() == "w2"
    harness.add("w2")
    harness.lose("w2")
    harness.lose("w0")
    assert harness.next_id() == "w3"


def test_new_ids_are_above_the_ids_of_a_checkpoint():
    harness = StateHarness("w7", "w3")
    assert harness.next_id() == "w8"


# left out


def test_a_worker_left_out_is_absent_and_no_candidate():
    harness = StateHarness("w0", "w1")
    harness.note(LeaveOut(("w1",)))
    candidates = harness.candidates()
    assert (candidates.ready, candidates.absent) == (("w0",), ("w1",))
    assert candidates.causes == {"w1": LATE}


def test_a_worker_that_was_left_out_does_not_rejoin_before_it_has_left_its_loop():
    harness = StateHarness("w0", "w1")
    harness.note(LeaveOut(("w1",)))
    harness.now += 300.0
    assert harness.candidates().absent == ("w1",)
    harness.left_loop("w1")
    assert (harness.candidates().ready, harness.candidates().absent) == (("w0", "w1"), ())


def test_a_worker_left_out_again_stays_out_twice_as_long_up_to_a_minute():
    harness = StateHarness("w0", "w1")
    stays = []
    for _ in range(9):
        stays.append(harness.leave_out_and_return("w1"))
        harness.form("w0", "w1")
        assert harness.candidates().causes == {}
    assert stays == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_one_late_worker_does_not_lengthen_the_stay_of_another():
    harness = StateHarness("w0", "w1", "w2")
    for _ in range(3):
        harness.leave_out_and_return("w1")
        harness.form("w0", "w1", "w2")
    assert harness.leave_out_and_return("w2") == 1


def test_a_worker_that_is_lost_while_left_out_is_not_absent_any_more():
    harness = StateHarness("w0", "w1")
    harness.note(LeaveOut(("w1",)))
    harness.lose("w1")
    candidates = harness.candidates()
    assert (candidates.ready, candidates.absent) == (("w0",), ())
    assert candidates.causes == {"w1": "was lost"}


# stuck


def test_a_step_that_waits_for_a_read_is_not_bounded_by_the_lease_of_a_worker_that_answers():
    harness = StateHarness("w0", max_step_s=300.0)
    harness.report("w0", local_step=5)
    harness.stay_in_step("w0", 300.0, local_step=5)  # it uses no CPU
    assert harness.stuck() == []
    harness.stay_in_step("w0", 0.5, local_step=5)
    assert harness.stuck() == [("w0", 300.5)]


def test_a_longest_step_beyond_the_time_of_a_busy_worker_holds_too():
    harness = StateHarness("w0", max_step_s=3600.0)
    harness.report("w0", local_step=5)
    harness.stay_in_step("w0", 3600.0, local_step=5)
    assert harness.stuck() == []


def test_a_worker_is_stuck_beyond_the_longest_step_where_steps_are_short():
    harness = StateHarness("w0")
    harness.report("w0", local_step=5, step_s=0.1)
    harness.stay_in_step("w0", 10.0, local_step=5, step_s=0.1)
    assert harness.stuck() == []
    harness.stay_in_step("w0", 0.5, local_step=5, step_s=0.1)
    assert harness.stuck() == [("w0", 10.5)]


def test_a_worker_is_stuck_beyond_twenty_usual_steps_where_they_are_long():
    harness = StateHarness("w0")
    harness.report("w0", local_step=5, step_s=3.0)
    harness.stay_in_step("w0", 60.0, local_step=5, step_s=3.0)
    assert harness.stuck() == []
    harness.stay_in_step("w0", 0.5, local_step=5, step_s=3.0)
    assert harness.stuck() == [("w0", 60.5)]


def test_the_first_step_may_take_longer():
    harness = StateHarness("w0")
    harness.report("w0", step_s=0.0)
    harness.stay_in_step("w0", 60.0, step_s=0.0)
    assert harness.stuck() == []
    harness.stay_in_step("w0", 0.5, step_s=0.0)
    assert harness.stuck() == [("w0", 60.5)]


def test_a_worker_that_waits_for_its_group_to_form_is_not_stuck():
    """Another member may be late: its snapshot arrives slowly, or its process was stopped."""
    harness = StateHarness("w0", "w1")
    harness.report("w0", local_step=5, round=1)
    harness.left_loop("w0")
    harness.form("w0", "w1")
    last = {"local_step": 6, "round": 2}  # a late report of the last generation
    harness.stay_in_step("w0", 60.0, **last, generation=1)
    assert harness.stuck() == []
    harness.stay_in_step("w0", 10.0, **last)  # the group has formed
    assert harness.stuck() == []
    harness.stay_in_step("w0", 1.0, **last)
    assert harness.stuck() == [("w0", 10.5)]


def test_a_worker_that_never_enters_its_generation_is_stuck():
    """The group's own time-out of 60 s should have ended the wait."""
    harness = StateHarness("w0", "w1")
    harness.report("w0", local_step=5)
    harness.left_loop("w0")
    harness.form("w0", "w1")
    harness.stay_in_step("w0", 70.0, local_step=5, generation=1)
    assert harness.stuck() == []
    harness.stay_in_step("w0", 0.5, local_step=5, generation=1)
    assert harness.stuck() == [("w0", 70.5)]


def test_a_step_may_take_longer_while_processes_start_that_read_its_samples():
    harness = StateHarness("w0")
    harness.report("w0", local_step=5, step_s=0.1, is_starting=True)
    harness.stay_in_step("w0", 60.0, local_step=5, step_s=0.1, is_starting=True)
    assert harness.stuck() == []
    harness.stay_in_step("w0", 0.5, local_step=5, step_s=0.1)
    assert harness.stuck() == [("w0", 60.5)]


@pytest.mark.parametrize(
    "news",
    [
        {"local_step": 6},
        {"local_step": 5, "round": 1},
        {"local_step": 5, "waiting_s": 0.1},  # the others are late, or stuck
        {"local_step": 5, "num_scored": 128},
    ],
)
def test_a_worker_that_makes_progress_or_waits_is_not_stuck(news):
    harness = StateHarness("w0")
    harness.report("w0", local_step=5)
    harness.stay_in_step("w0", 9.0, local_step=5)
    harness.report("w0", **news)
    harness.stay_in_step("w0", 10.0, **news)
    assert harness.stuck() == []


def test_a_worker_that_computes_is_not_stuck_until_its_longest_time_is_over():
    harness = StateHarness("w0")
    harness.report("w0", local_step=5, cpu_s=1.0, sent_s=0.0)
    for second in range(1, 602):
        harness.now += 1.0
        harness.report("w0", local_step=5, cpu_s=1.0 + 0.1 * second, sent_s=float(second))
        assert harness.stuck() == ([("w0", 601.0)] if second > 600 else [])


def test_threads_that_only_wait_do_not_count_as_computing():
    harness = StateHarness("w0")
    harness.report("w0", local_step=5, cpu_s=1.0, sent_s=0.0)
    for second in range(1, 12):
        harness.now += 1.0
        harness.report("w0", local_step=5, cpu_s=1.0 + 0.02 * second, sent_s=float(second))
    assert harness.stuck() == [("w0", 11.0)]


def test_a_silent_worker_is_judged_by_its_lease_alone():
    """A stopped process does not answer; nor does one on the other side of a partition."""
    harness = StateHarness("w0")
    harness.report("w0", local_step=5)
    harness.now += 300.0
    assert harness.stuck() == []
    harness.report("w0", local_step=6)  # it is reachable again and has made progress
    assert harness.stuck() == []


def test_a_worker_outside_its_loop_is_not_stuck():
    harness = StateHarness("w0")
    harness.report("w0", local_step=5)
    harness.left_loop("w0")
    harness.stay_in_step("w0", 300.0, local_step=5)
    assert harness.stuck() == []
    harness.form("w0")
    harness.stay_in_step("w0", 10.0, local_step=5)
    assert harness.stuck() == [], "time before its return does not count"


def test_a_worker_left_out_may_be_stuck_too():
    harness = StateHarness("w0", "w1")
    harness.report("w1", local_step=5)
    harness.note(LeaveOut(("w1",)))
    harness.stay_in_step("w1", 10.5, local_step=5)
    assert harness.stuck() == [("w1", 10.5)]


# waiting


def test_waiting_times_come_from_the_newest_reports():
    harness = StateHarness("w0", "w1", "w2")
    harness.report("w0", waiting_s=2.0)
    harness.report("w1")
    assert harness.waiting_s("w0", "w1", "w2") == {"w0": 2.0, "w1": 0.0, "w2": 0.0}
    harness.report("w0", local_step=1)
    assert harness.waiting_s("w0") == {"w0": 0.0}


def test_a_silent_worker_counts_as_not_waiting():
    """The process was stopped in an exchange, so its last report is out of date."""
    harness = StateHarness("w0", "w1")
    harness.report("w0", waiting_s=2.0)
    harness.report("w1", waiting_s=2.0)
    harness.now += 0.9
    assert harness.waiting_s("w0", "w1") == {"w0": 2.0, "w1": 2.0}
    harness.report("w1", waiting_s=2.9)
    harness.now += 0.2
    assert harness.waiting_s("w0", "w1") == {"w0": 0.0, "w1": 2.9}


def test_a_wait_in_the_last_generation_does_not_count_in_this_one():
    """Otherwise the first worker to report would seem late, and the other would seem to wait."""
    harness = StateHarness("w0", "w1", "w2")
    harness.report("w0", waiting_s=2.0)  # for w2, which is left out
    harness.report("w1", waiting_s=2.0)
    harness.form("w0", "w1")
    assert harness.waiting_s("w0", "w1") == {"w0": 0.0, "w1": 0.0}
    harness.report("w1", round=1)
    assert harness.waiting_s("w0", "w1") == {"w0": 0.0, "w1": 0.0}
    harness.report("w0", round=1, waiting_s=0.3)
    assert harness.waiting_s("w0", "w1") == {"w0": 0.3, "w1": 0.0}


def test_a_report_of_a_removed_worker_has_no_effect():
    harness = StateHarness("w0")
    harness.report("w9", waiting_s=2.0)
    assert "w9" not in harness.state.workers


def test_a_wait_for_others_that_still_score_does_not_make_them_late():
    harness = StateHarness("w0", "w1")
    harness.report("w0", waiting_s=9.0, num_scored=5_000)
    harness.report("w1", num_scored=128)
    assert harness.waiting_s("w0", "w1") == {"w0": 0.0, "w1": 0.0}
    harness.report("w0", waiting_s=9.0)
    assert harness.waiting_s("w0", "w1") == {"w0": 9.0, "w1": 0.0}
