"""The registry of workers: phases, ids, left-out, stuck and waiting workers."""

import pytest

from raydl.core.membership import Membership
from raydl.core.reports import WorkerReport
from raydl.elastic.worker_registry import Copy, Phase, WorkerRegistry

LATE = "is late and left out"


class RegistryHarness:
    """A registry with steps of up to 10 s and first steps of up to 60 s, by a clock of the test."""

    def __init__(self, *worker_ids, training=True, max_step_s=10.0):
        self.now = 1000.0
        self.registry = WorkerRegistry(
            lease_s=10.0, max_step_s=max_step_s, first_step_s=60.0, clock=lambda: self.now
        )
        self.generation = 0
        for worker_id in worker_ids:
            self.registry.add(worker_id)
            self.registry.note_ready(worker_id, "node")
        if training and worker_ids:
            self.form(*worker_ids)

    def form(self, *worker_ids):
        self.change(*worker_ids, entering=worker_ids)

    def change(self, *worker_ids, entering):
        self.generation += 1
        self.registry.formed(Membership(self.generation, worker_ids), entering=entering)

    def report(self, worker_id, *, local_step=0, round=0, step_s=0.1, waiting_s=0.0, **more):
        self.registry.note_report(
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
        return self.registry.waiting_s(worker_ids, generation=self.generation)

    def stay_in_step(self, worker_id, seconds, **report):
        """Report the same progress of a worker twice a second."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            self.report(worker_id, **report)

    def leave_out_and_return(self, worker_id):
        """Leave a worker out; return how long it stays out, to a quarter of a second."""
        self.registry.leave_out((worker_id,))
        self.registry.left_loop(worker_id)
        since = self.now
        while worker_id not in self.candidates().ready:
            assert self.candidates().absent == (worker_id,)
            self.now += 0.25
        return self.now - since

    def candidates(self):
        return self.registry.candidates(0.0)

    def phase(self, worker_id):
        return self.registry[worker_id].phase


# phases


def test_workers_are_counted_by_phase():
    harness = RegistryHarness("w0", "w1", "w2", "w3")
    harness.registry.add("w4")
    harness.registry.leave_out(("w3",))
    harness.registry.left_loop("w2")
    assert harness.registry.counts() == {"training": 2, "ready": 1, "starting": 1, "left out": 1}
    assert RegistryHarness().registry.counts() == {}


def test_a_worker_starts_is_ready_trains_and_stands_by():
    harness = RegistryHarness()
    harness.registry.add("w0")
    assert harness.phase("w0") is Phase.STARTING
    assert harness.candidates().ready == ()
    harness.registry.note_ready("w0", "node-a")
    assert (harness.phase("w0"), harness.registry["w0"].node) == (Phase.READY, "node-a")
    assert harness.candidates().ready == ("w0",)
    harness.form("w0")
    assert (harness.phase("w0"), harness.registry["w0"].in_loop) == (Phase.TRAINING, True)
    assert harness.candidates().ready == ("w0",), "a training worker is a candidate too"
    harness.registry.left_loop("w0")
    harness.registry.stand_by("w0")
    assert (harness.phase("w0"), harness.registry["w0"].in_loop) == (Phase.READY, False)
    assert harness.registry["w0"].has_trained


def test_a_phase_keeps_its_beginning_while_a_worker_trains_on():
    harness = RegistryHarness("w0", training=False)
    harness.now = 1003.0
    harness.form("w0")
    harness.now = 1007.0
    harness.form("w0")
    assert harness.registry["w0"].since == 1003.0


def test_a_member_that_has_left_its_loop_stays_out_of_it_while_others_join():
    harness = RegistryHarness("w0", "w1")
    harness.registry.left_loop("w0", Copy("w0", round=9))
    harness.registry.add("w2")
    harness.registry.note_ready("w2", "node")
    harness.change("w0", "w1", "w2", entering=("w2",))
    assert [e.in_loop for e in harness.registry.entries()] == [False, True, True]
    assert harness.registry.newest_copy(since=0) == Copy("w0", round=9)
    harness.stay_in_step("w0", 200.0)
    assert "w0" not in dict(harness.registry.stuck())


def test_workers_are_listed_in_the_order_of_their_requests():
    harness = RegistryHarness("w2", "w0", "w1")
    assert [entry.worker_id for entry in harness.registry.entries()] == ["w2", "w0", "w1"]
    assert harness.candidates().ready == ("w2", "w0", "w1")
    assert harness.registry.in_phase(Phase.TRAINING) == ["w2", "w0", "w1"]
    assert harness.candidates().waited_s == 0.0


def test_all_workers_but_the_leaving_ones_count_as_requested():
    harness = RegistryHarness("w0", "w1", "w2")
    harness.registry.add("w3")
    harness.registry.leave_out(("w1",))
    assert harness.registry.num_coming() == 4
    harness.registry.note_leaving("w0", "is on a draining node")
    assert harness.registry.num_coming() == 3
    harness.registry.remove("w2", "was lost")
    assert harness.registry.num_coming() == 2


def test_workers_that_reserve_no_cpu_are_counted_apart():
    harness = RegistryHarness()
    harness.registry.add("w7", reserves_cpu=False)
    before = harness.registry.num_coming()
    assert harness.registry.num_coming(reserves_cpu=False) == 1
    harness.registry.note_leaving("w7", "was removed")
    assert harness.registry.num_coming(reserves_cpu=False) == 0
    assert harness.registry.num_coming() == before


def test_a_leaving_worker_is_not_a_candidate_and_its_cause_is_known():
    harness = RegistryHarness("w0", "w1")
    harness.registry.note_leaving("w1", "is on a draining node")
    assert harness.phase("w1") is Phase.LEAVING
    assert (harness.candidates().ready, harness.candidates().absent) == (("w0",), ())
    assert harness.candidates().causes == {"w1": "is on a draining node"}


def test_only_a_training_worker_can_stand_by():
    harness = RegistryHarness("w0", "w1")
    harness.registry.note_leaving("w0", "was removed")
    harness.registry.leave_out(("w1",))
    for worker_id in ("w0", "w1"):
        harness.registry.stand_by(worker_id)
    assert (harness.phase("w0"), harness.phase("w1")) == (Phase.LEAVING, Phase.LEFT_OUT)


def test_the_cause_of_a_departure_is_kept_until_the_next_membership_has_formed():
    harness = RegistryHarness("w0", "w1", "w2")
    harness.registry.remove("w1", "was lost")
    harness.registry.remove("w2", "is on a draining node")
    assert "w1" not in harness.registry
    assert harness.candidates().causes == {"w1": "was lost", "w2": "is on a draining node"}
    harness.form("w0")
    assert harness.candidates().causes == {}
    harness.registry.remove("w9", "was lost")  # an unknown worker
    assert harness.candidates().causes == {}


# ids


def test_an_id_is_never_used_again():
    harness = RegistryHarness("w0", "w1")
    assert harness.registry.new_id() == "w2"
    harness.registry.add("w2")
    harness.registry.remove("w2", "was lost")
    harness.registry.remove("w0", "was lost")
    assert harness.registry.new_id() == "w3"


def test_new_ids_are_above_the_ids_of_a_checkpoint():
    harness = RegistryHarness("w7", "w3")
    assert harness.registry.new_id() == "w8"


# left out


def test_a_worker_left_out_is_absent_and_no_candidate():
    harness = RegistryHarness("w0", "w1")
    harness.registry.leave_out(("w1",))
    candidates = harness.candidates()
    assert (candidates.ready, candidates.absent) == (("w0",), ("w1",))
    assert candidates.causes == {"w1": LATE}


def test_a_worker_that_was_left_out_does_not_rejoin_before_it_has_left_its_loop():
    harness = RegistryHarness("w0", "w1")
    harness.registry.leave_out(("w1",))
    harness.now += 300.0
    assert harness.candidates().absent == ("w1",)
    harness.registry.left_loop("w1")
    assert (harness.candidates().ready, harness.candidates().absent) == (("w0", "w1"), ())


def test_a_worker_left_out_again_stays_out_twice_as_long_up_to_a_minute():
    harness = RegistryHarness("w0", "w1")
    stays = []
    for _ in range(9):
        stays.append(harness.leave_out_and_return("w1"))
        harness.form("w0", "w1")
        assert harness.candidates().causes == {}
    assert stays == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_one_late_worker_does_not_lengthen_the_stay_of_another():
    harness = RegistryHarness("w0", "w1", "w2")
    for _ in range(3):
        harness.leave_out_and_return("w1")
        harness.form("w0", "w1", "w2")
    assert harness.leave_out_and_return("w2") == 1


def test_a_worker_that_is_lost_while_left_out_is_not_absent_any_more():
    harness = RegistryHarness("w0", "w1")
    harness.registry.leave_out(("w1",))
    harness.registry.remove("w1", "was lost")
    candidates = harness.candidates()
    assert (candidates.ready, candidates.absent) == (("w0",), ())
    assert candidates.causes == {"w1": "was lost"}


# stuck


def test_a_step_that_waits_for_a_read_is_not_bounded_by_the_lease_of_a_worker_that_answers():
    harness = RegistryHarness("w0", max_step_s=300.0)
    harness.report("w0", local_step=5)
    harness.stay_in_step("w0", 300.0, local_step=5)  # it uses no CPU
    assert harness.registry.stuck() == []
    harness.stay_in_step("w0", 0.5, local_step=5)
    assert harness.registry.stuck() == [("w0", 300.5)]


def test_a_longest_step_beyond_the_time_of_a_busy_worker_holds_too():
    harness = RegistryHarness("w0", max_step_s=3600.0)
    harness.report("w0", local_step=5)
    harness.stay_in_step("w0", 3600.0, local_step=5)
    assert harness.registry.stuck() == []


def test_a_worker_is_stuck_beyond_the_longest_step_where_steps_are_short():
    harness = RegistryHarness("w0")
    harness.report("w0", local_step=5, step_s=0.1)
    harness.stay_in_step("w0", 10.0, local_step=5, step_s=0.1)
    assert harness.registry.stuck() == []
    harness.stay_in_step("w0", 0.5, local_step=5, step_s=0.1)
    assert harness.registry.stuck() == [("w0", 10.5)]


def test_a_worker_is_stuck_beyond_twenty_usual_steps_where_they_are_long():
    harness = RegistryHarness("w0")
    harness.report("w0", local_step=5, step_s=3.0)
    harness.stay_in_step("w0", 60.0, local_step=5, step_s=3.0)
    assert harness.registry.stuck() == []
    harness.stay_in_step("w0", 0.5, local_step=5, step_s=3.0)
    assert harness.registry.stuck() == [("w0", 60.5)]


def test_the_first_step_may_take_longer():
    harness = RegistryHarness("w0")
    harness.report("w0", step_s=0.0)
    harness.stay_in_step("w0", 60.0, step_s=0.0)
    assert harness.registry.stuck() == []
    harness.stay_in_step("w0", 0.5, step_s=0.0)
    assert harness.registry.stuck() == [("w0", 60.5)]


def test_a_worker_that_waits_for_its_group_to_form_is_not_stuck():
    """Another member may be late: its snapshot arrives slowly, or its process was stopped."""
    harness = RegistryHarness("w0", "w1")
    harness.report("w0", local_step=5, round=1)
    harness.registry.left_loop("w0")
    harness.form("w0", "w1")
    last = {"local_step": 6, "round": 2}  # a late report of the last generation
    harness.stay_in_step("w0", 60.0, **last, generation=1)
    assert harness.registry.stuck() == []
    harness.stay_in_step("w0", 10.0, **last)  # the group has formed
    assert harness.registry.stuck() == []
    harness.stay_in_step("w0", 1.0, **last)
    assert harness.registry.stuck() == [("w0", 10.5)]


def test_a_worker_that_never_enters_its_generation_is_stuck():
    """The group's own time-out of 60 s should have ended the wait."""
    harness = RegistryHarness("w0", "w1")
    harness.report("w0", local_step=5)
    harness.registry.left_loop("w0")
    harness.form("w0", "w1")
    harness.stay_in_step("w0", 70.0, local_step=5, generation=1)
    assert harness.registry.stuck() == []
    harness.stay_in_step("w0", 0.5, local_step=5, generation=1)
    assert harness.registry.stuck() == [("w0", 70.5)]


def test_a_step_may_take_longer_while_processes_start_that_read_its_samples():
    harness = RegistryHarness("w0")
    harness.report("w0", local_step=5, step_s=0.1, is_starting=True)
    harness.stay_in_step("w0", 60.0, local_step=5, step_s=0.1, is_starting=True)
    assert harness.registry.stuck() == []
    harness.stay_in_step("w0", 0.5, local_step=5, step_s=0.1)
    assert harness.registry.stuck() == [("w0", 60.5)]


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
    harness = RegistryHarness("w0")
    harness.report("w0", local_step=5)
    harness.stay_in_step("w0", 9.0, local_step=5)
    harness.report("w0", **news)
    harness.stay_in_step("w0", 10.0, **news)
    assert harness.registry.stuck() == []


def test_a_worker_that_computes_is_not_stuck_until_its_longest_time_is_over():
    harness = RegistryHarness("w0")
    harness.report("w0", local_step=5, cpu_s=1.0, sent_s=0.0)
    for second in range(1, 602):
        harness.now += 1.0
        harness.report("w0", local_step=5, cpu_s=1.0 + 0.1 * second, sent_s=float(second))
        assert harness.registry.stuck() == ([("w0", 601.0)] if second > 600 else [])


def test_threads_that_only_wait_do_not_count_as_computing():
    harness = RegistryHarness("w0")
    harness.report("w0", local_step=5, cpu_s=1.0, sent_s=0.0)
    for second in range(1, 12):
        harness.now += 1.0
        harness.report("w0", local_step=5, cpu_s=1.0 + 0.02 * second, sent_s=float(second))
    assert harness.registry.stuck() == [("w0", 11.0)]


def test_a_silent_worker_is_judged_by_its_lease_alone():
    """A stopped process does not answer; nor does one on the other side of a partition."""
    harness = RegistryHarness("w0")
    harness.report("w0", local_step=5)
    harness.now += 300.0
    assert harness.registry.stuck() == []
    harness.report("w0", local_step=6)  # it is reachable again and has made progress
    assert harness.registry.stuck() == []


def test_a_worker_outside_its_loop_is_not_stuck():
    harness = RegistryHarness("w0")
    harness.report("w0", local_step=5)
    harness.registry.left_loop("w0")
    harness.stay_in_step("w0", 300.0, local_step=5)
    assert harness.registry.stuck() == []
    harness.form("w0")
    harness.stay_in_step("w0", 10.0, local_step=5)
    assert harness.registry.stuck() == [], "time before its return does not count"


def test_a_worker_left_out_may_be_stuck_too():
    harness = RegistryHarness("w0", "w1")
    harness.report("w1", local_step=5)
    harness.registry.leave_out(("w1",))
    harness.stay_in_step("w1", 10.5, local_step=5)
    assert harness.registry.stuck() == [("w1", 10.5)]


# waiting


def test_waiting_times_come_from_the_newest_reports():
    harness = RegistryHarness("w0", "w1", "w2")
    harness.report("w0", waiting_s=2.0)
    harness.report("w1")
    assert harness.waiting_s("w0", "w1", "w2") == {"w0": 2.0, "w1": 0.0, "w2": 0.0}
    harness.report("w0", local_step=1)
    assert harness.waiting_s("w0") == {"w0": 0.0}


def test_a_silent_worker_counts_as_not_waiting():
    """The process was stopped in an exchange, so its last report is out of date."""
    harness = RegistryHarness("w0", "w1")
    harness.report("w0", waiting_s=2.0)
    harness.report("w1", waiting_s=2.0)
    harness.now += 0.9
    assert harness.waiting_s("w0", "w1") == {"w0": 2.0, "w1": 2.0}
    harness.report("w1", waiting_s=2.9)
    harness.now += 0.2
    assert harness.waiting_s("w0", "w1") == {"w0": 0.0, "w1": 2.9}


def test_a_wait_in_the_last_generation_does_not_count_in_this_one():
    """Otherwise the first worker to report would seem late, and the other would seem to wait."""
    harness = RegistryHarness("w0", "w1", "w2")
    harness.report("w0", waiting_s=2.0)  # for w2, which is left out
    harness.report("w1", waiting_s=2.0)
    harness.form("w0", "w1")
    assert harness.waiting_s("w0", "w1") == {"w0": 0.0, "w1": 0.0}
    harness.report("w1", round=1)
    assert harness.waiting_s("w0", "w1") == {"w0": 0.0, "w1": 0.0}
    harness.report("w0", round=1, waiting_s=0.3)
    assert harness.waiting_s("w0", "w1") == {"w0": 0.3, "w1": 0.0}


def test_a_report_of_a_removed_worker_has_no_effect():
    harness = RegistryHarness("w0")
    harness.report("w9", waiting_s=2.0)
    assert "w9" not in harness.registry


def test_a_wait_for_others_that_still_score_does_not_make_them_late():
    harness = RegistryHarness("w0", "w1")
    harness.report("w0", waiting_s=9.0, num_scored=5_000)
    harness.report("w1", num_scored=128)
    assert harness.waiting_s("w0", "w1") == {"w0": 0.0, "w1": 0.0}
    harness.report("w0", waiting_s=9.0)
    assert harness.waiting_s("w0", "w1") == {"w0": 9.0, "w1": 0.0}
