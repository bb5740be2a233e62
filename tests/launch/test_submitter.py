"""A submitted job is followed to its end, and resubmitted if its driver is lost."""

import pytest

from raydl.cli import submitting
from raydl.errors import RaydlError
from raydl.launch.submission import Plan, Submitter
from raydl.ray_backend.job_end import SILENT, UNKNOWN, Fate, JobState, judge

PLAN = Plan("digits", "/runs/digits", "--epochs 2 --run-dir /runs/digits")
DONE = JobState("SUCCEEDED", 0)
RUNNING = JobState("RUNNING")
KILLED = JobState("FAILED", -9)


# a job's fate, from its state


@pytest.mark.parametrize(
    ("state", "fate", "status"),
    [
        (DONE, Fate.DONE, 0),
        (JobState("STOPPED"), Fate.STOPPED, 143),
        (JobState("FAILED", 143), Fate.STOPPED, 143),
        (JobState("FAILED", -15), Fate.STOPPED, 143),
        (JobState("FAILED", 15), Fate.STOPPED, 143),
        (JobState("FAILED", 130), Fate.STOPPED, 130),
        (JobState("FAILED", 2), Fate.FAILED, 2),
        (JobState("FAILED", 1), Fate.FAILED, 1),
        (JobState("FAILED", 75), Fate.LOST, 75),
        (KILLED, Fate.LOST, 75),
        (JobState("FAILED", 137), Fate.LOST, 75),
        (JobState("FAILED", -11), Fate.LOST, 75),
        (JobState("FAILED", None, "JOB_SUPERVISOR_ACTOR_DIED"), Fate.LOST, 75),
        (JobState("FAILED", None, "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE"), Fate.LOST, 75),
        (JobState(UNKNOWN), Fate.LOST, 75),
        (JobState("FAILED", None, "RUNTIME_ENV_SETUP_FAILURE", "no tyro"), Fate.FAILED, 1),
    ],
)
def test_only_a_driver_that_was_killed_is_lost(state, fate, status):
    assert judge(state)[:2] == (fate, status)


def test_the_signal_that_killed_a_driver_is_named():
    assert (
        judge(KILLED)[2] == judge(JobState("FAILED", 137))[2] == "the driver was killed (SIGKILL)"
    )
    assert "no tyro" in judge(JobState("FAILED", None, "RUNTIME_ENV_SETUP_FAILURE", "no tyro"))[2]


def test_a_driver_that_could_not_be_placed_is_lost_with_the_reason_that_ray_gives():
    state = JobState("FAILED", None, "JOB_SUPERVISOR_ACTOR_START_TIMEOUT", "not within\n900 s")
    assert judge(state)[2].endswith("(JOB_SUPERVISOR_ACTOR_START_TIMEOUT: not within 900 s)")


# following and resubmitting


class FakeJobs:
    """A cluster whose job takes the given states; each look adds a line to its log."""

    def __init__(self, *states, refusals=0, why=""):
        self.states = iter(states)
        self.refusals = refusals
        self.why = why
        self.commands = []
        self.num_looks = 0

    def submit(self, job_id, command):
        if self.refusals:
            self.refusals -= 1
            return self.why
        self.commands.append(command)
        self.num_looks = 0
        return None

    def look(self, job_id):
        self.num_looks += 1
        return next(self.states)

    def log(self, job_id):
        return "".join(f"line {i}\n" for i in range(self.num_looks))


class SubmitterHarness:
    """A submitter whose output is kept and whose clock moves only when it sleeps."""

    def __init__(self, jobs, **settings):
        self.messages, self.written, self.now = [], [], 0.0
        self.submitter = Submitter(
            jobs,
            PLAN,
            say=self.messages.append,
            write=self.written.append,
            clock=lambda: self.now,
            sleep=self.sleep,
            **settings,
        )

    def sleep(self, seconds):
        self.now += seconds


def test_the_log_is_written_once_and_to_its_end():
    harness = SubmitterHarness(FakeJobs(RUNNING, RUNNING, DONE))
    assert harness.submitter.run() == 0
    assert "".join(harness.written) == "line 0\nline 1\nline 2\n"
    assert harness.messages[-1].endswith(": done")


def test_a_lost_driver_is_resubmitted_and_each_loss_is_one_line():
    jobs = FakeJobs(RUNNING, KILLED, JobState(UNKNOWN), RUNNING, DONE)
    harness = SubmitterHarness(jobs, retries=3)
    assert harness.submitter.run() == 0
    assert [c.split()[3] for c in jobs.commands] == [
        "raydl",
        "raydl.cli.resume_job",
        "raydl.cli.resume_job",
    ]
    assert sum("resubmitting it" in line for line in harness.messages) == 2
    assert "the driver was killed (SIGKILL)" in harness.messages[1]
    assert "retries left: 2" in harness.messages[1]


def test_retries_are_bounded_and_the_last_message_says_how_to_resume():
    jobs = FakeJobs(KILLED, KILLED, KILLED)
    harness = SubmitterHarness(jobs, retries=1)
    assert harness.submitter.run() == 75
    assert len(jobs.commands) == 2
    assert "to resume: the same command with --run-name digits and --resume" in harness.messages[-1]


@pytest.mark.parametrize("status", [2, 1, 143])
def test_a_mistake_a_failure_and_a_stop_are_not_retried(status):
    jobs = FakeJobs(JobState("FAILED", status))
    assert SubmitterHarness(jobs, retries=5).submitter.run() == status
    assert len(jobs.commands) == 1


def test_a_cluster_that_does_not_answer_for_some_time_is_awaited():
    silent = [JobState(SILENT)] * 20
    harness = SubmitterHarness(FakeJobs(RUNNING, *silent, DONE, refusals=7), wait_s=30.0)
    assert harness.submitter.run() == 0
    assert sum("does not answer" in line for line in harness.messages) == 2


@pytest.mark.parametrize(
    "jobs",
    [FakeJobs(refusals=10**6), FakeJobs(RUNNING, *[JobState(SILENT)] * 100)],
    ids=["at submission", "while it follows"],
)
def test_a_cluster_that_stays_silent_is_given_up_in_bounded_time(jobs):
    harness = SubmitterHarness(jobs, wait_s=30.0)
    sentence = r"did not answer for 30 s; raise --wait-s, or continue"
    with pytest.raises(RaydlError, match=sentence) as caught:
        harness.submitter.run()
    assert 30 < harness.now < 40
    assert caught.value.exit_status == 75


def test_the_error_of_a_silent_cluster_names_the_command_to_continue_with():
    harness = SubmitterHarness(FakeJobs(refusals=10**6), wait_s=1.0)
    with pytest.raises(RaydlError, match=r"once it is back: the same command$"):
        harness.submitter.run()
    harness = SubmitterHarness(FakeJobs(*[JobState(SILENT)] * 9), wait_s=1.0)
    with pytest.raises(RaydlError, match=r"once it is back: raydl submit --follow digits-\w{6}$"):
        harness.submitter.run()


NOT_READY = JobState(SILENT, message="no agent")


@pytest.mark.parametrize(
    "jobs",
    [FakeJobs(refusals=10**6, why="no agent"), FakeJobs(RUNNING, *[NOT_READY] * 100)],
    ids=["at submission", "while it follows"],
)
def test_a_cluster_that_answers_and_is_not_ready_is_given_up_with_its_own_reason(jobs):
    harness = SubmitterHarness(jobs, wait_s=30.0)
    with pytest.raises(RaydlError, match=r"was not ready for 30 s: no agent; .* once it is ready"):
        harness.submitter.run()
    assert harness.messages[-1] == "the cluster is not ready: no agent; waiting up to 30 s"


def test_the_error_has_the_last_of_all_reasons():
    harness = SubmitterHarness(
        FakeJobs(RUNNING, *[JobState(SILENT)] * 9, *[NOT_READY] * 99), wait_s=30.0
    )
    with pytest.raises(RaydlError, match="was not ready for 30 s: no agent"):
        harness.submitter.run()
    assert harness.messages[-1] == "the cluster does not answer; waiting up to 30 s"


def test_the_id_of_a_job_is_plain_ascii():
    harness = SubmitterHarness(FakeJobs(DONE))
    harness.submitter.plan = Plan("zählen", "/runs/zählen", "")
    harness.submitter.run()
    assert harness.messages[0].startswith("z.hlen-")


def test_following_only_ends_like_the_job_and_refuses_an_unknown_job():
    assert SubmitterHarness(FakeJobs(RUNNING, KILLED)).submitter.follow_only("x") == 75
    with pytest.raises(RaydlError, match="the cluster has no job x"):
        SubmitterHarness(FakeJobs(JobState(UNKNOWN))).submitter.follow_only("x")


def test_a_long_log_is_polled_less_often():
    jobs = FakeJobs(RUNNING, DONE)
    jobs.log = lambda job_id: "x" * 8_000_000
    harness = SubmitterHarness(jobs)
    harness.submitter.run()
    assert harness.now == 8.0


def test_ctrl_c_ends_the_following_and_not_the_job(capsys):
    class Interrupting(FakeJobs):
        def look(self, job_id):
            raise KeyboardInterrupt

    jobs = Interrupting()
    options = submitting._SubmitOptions(address="http://head:8265", retries=2)
    submitter = Submitter(jobs, PLAN, retries=2)
    assert submitting._watch(options, submitter) == 130
    out = capsys.readouterr().out
    assert "the job continues, but a lost driver is no longer resubmitted" in out
    assert f"raydl submit --address http://head:8265 --follow {submitter.job_id}" in out
    assert f"ray job stop --address http://head:8265 {submitter.job_id}" in out


def test_ctrl_c_between_two_jobs_does_not_report_a_running_job():
    submitter = Submitter(FakeJobs(KILLED), PLAN, retries=2, say=lambda text: None)

    def interrupt(seconds):
        raise KeyboardInterrupt

    submitter.sleep, submitter.write = interrupt, lambda text: None
    with pytest.raises(KeyboardInterrupt):
        submitter.run()
    assert (submitter.job_id, submitter.sending) == ("", "")


def test_ctrl_c_while_a_job_is_submitted_says_that_the_cluster_may_have_it(capsys):
    class Interrupting(FakeJobs):
        def submit(self, job_id, command):
            raise KeyboardInterrupt

    submitter = Submitter(Interrupting(), PLAN)
    options = submitting._SubmitOptions(address="h:8265")
    assert submitting._watch(options, submitter, ray="RAY_AUTH_MODE=token ray") == 130
    out = capsys.readouterr().out
    assert f"the cluster may have {submitter.sending} already: see RAY_AUTH_MODE=token ray" in out
    assert "RAY_AUTH_MODE=token ray job stop --address http://h:8265 digits-" in out
    assert "continues" not in out


def test_a_printed_command_is_quoted():
    options = submitting._SubmitOptions(address="http://h:8265/a b")
    assert submitting._hints("x y", options, "ray").endswith("'http://h:8265/a b' 'x y'")
    assert Plan("a", "a", "", python="my python").command().startswith("exec 'my python' -m")
