"""Each fault fires once, on its target."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from plans import kill_fault as kill

from raydl.faults import Announced, Fault, Held, Injector, Partition, ProcessInflicts
from raydl.ray_backend import actors
from raydl.ray_backend.actors import WorkerActor

WAIT_S = 60.0


class Clock:
    """A clock that moves only when it sleeps."""

    def __init__(self):
        self.now = 0.0
        self.slept = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


class FaultRecorder:
    """Records the faults that are announced and inflicted."""

    def __init__(self):
        self.lines = []
        self.answer = Announced.FIRST

    def announce(self, fault):
        if self.answer is Announced.FIRST:
            self.lines.append(fault.sentence)
        return self.answer

    def kill(self):
        self.lines.append("kill")

    def stop(self, for_s):
        self.lines.append(f"stop {for_s}")

    def partition(self, for_s):
        self.lines.append(f"partition {for_s}")

    def drain(self, for_s):
        self.lines.append(f"drain {for_s}")

    def fired(self):
        return [int(line.split(":")[0].split()[1]) for line in self.lines if ":" in line]


class Process:
    """A worker's loop with an injector, a clock and a recorder."""

    def __init__(self, *faults, worker_id="w1", rank=1, num_workers=3):
        self.recorder, self.clock = FaultRecorder(), Clock()
        self.ranks = {"rank": rank, "num_workers": num_workers}
        self.worker_id = worker_id
        self.injector = Injector(
            faults,
            self.recorder,
            self.recorder.announce,
            clock=self.clock,
            sleep=self.clock.sleep,
        )

    def step(self, local_step=0, *, round=0, seconds=0.0, **more):
        self.injector.before_step(
            self.worker_id,
            **{**self.ranks, **more},
            local_step=local_step,
            round=round,
            seconds=seconds,
        )
        return self.recorder.fired()


# moments and targets


def test_a_fault_is_announced_and_then_inflicted():
    process = Process(Fault(0, "stop", "w1", "step", 4.0, for_s=8.0))
    process.step(4)
    assert process.recorder.lines == ["fault 1: stop w1 at step 4 for 8 s", "stop 8.0"]


def test_a_fault_waits_for_a_step_at_which_its_announcement_is_received():
    process = Process(kill(at=4.0))
    process.recorder.answer = Announced.LOST  # the center is being started again
    assert [process.step(step) for step in (4, 5)] == [[], []]
    process.recorder.answer = Announced.FIRST
    assert process.step(6, rank=0) == [1]
    assert process.recorder.lines[1:] == ["kill"]
    assert process.step(7) == [1]


def test_a_fault_that_has_fired_in_another_process_is_not_inflicted():
    """For example in the worker whose rank this one has taken over."""
    process = Process(kill(at=4.0))
    process.recorder.answer = Announced.AGAIN
    process.step(4)
    process.recorder.answer = Announced.FIRST
    process.step(5)
    assert process.recorder.lines == []


@pytest.mark.parametrize(
    ("kind", "line"), [("drain", "drain 8.0"), ("partition", "partition 8.0"), ("kill", "kill")]
)
def test_each_kind_of_fault_calls_the_method_of_its_name(kind, line):
    process = Process(Fault(0, kind, "w1", "round", 4.0, for_s=8.0))
    process.step(round=4)
    assert process.recorder.lines[1:] == [line]


def test_a_fault_at_a_step_fires_once_at_exactly_this_step():
    process = Process(kill(at=4.0))
    fired = [process.step(step) for step in (2, 3, 4, 4, 5)]
    assert fired == [[], [], [1], [1], [1]]
    assert Process(kill(at=4.0)).step(5) == []  # a replacement that starts at a later step


@pytest.mark.parametrize(
    ("rounds", "fires"),
    [
        ((3, 4, 5), True),
        ((3, 6), True),  # exchanges of other workers may complete several rounds at once
        ((4, 4), True),  # started in the round of the fault
        ((5, 6), False),  # started later: the fault is not for this process
        ((2, 3), False),
    ],
)
def test_a_fault_at_a_round_fires_when_the_round_is_reached_or_passed(rounds, fires):
    process = Process(kill(when="round", at=4.0))
    for step, round in enumerate(rounds):
        process.step(step, round=round)
    assert process.recorder.fired() == [1] * fires


def test_a_fault_at_a_second_fires_when_it_has_passed():
    process = Process(kill(when="second", at=4.0))
    assert [process.step(seconds=s) for s in (0.1, 3.99, 4.2, 9.0)] == [[], [], [1], [1]]
    assert Process(kill(when="second", at=4.0)).step(seconds=4.2) == []


def test_faults_due_at_once_fire_in_the_order_of_the_plan():
    second = Fault(1, "stop", "w1", "step", 4.0)
    assert Process(second, kill("rank 1", "round", 2.0)).step(4, round=2) == [1, 2]


def test_a_fault_hits_only_its_target():
    faults = [
        kill("w0", number=0),
        kill("w1", number=1),
        kill("rank 2", number=2),
        kill("rank 1", number=3),
        kill("any", number=4, draw=7),  # 7 % 3 == 1
        kill("any", number=5, draw=8),
        kill("center", "round", 0.0, number=6),
    ]
    assert Process(*faults).step(4) == [2, 4, 5]
    assert Process(*faults).step(4, num_workers=2) == [2, 4, 5]  # 7 % 2 == 1
    assert Process(*faults).step(4, num_workers=5) == [2, 4]


def test_a_worker_that_takes_over_a_rank_does_not_get_its_fault():
    process = Process(kill("rank 0", "round", 4.0), kill("rank 0", "round", 6.0, number=1))
    process.step(round=4)  # rank 0 is another worker, which is killed
    assert process.step(round=4, rank=0) == []
    assert process.step(round=6, rank=0) == [2]


def test_a_fault_that_fired_elsewhere_is_skipped():
    process = Process(kill("rank 1", "round", 4.0))
    process.step(round=3)
    process.injector.skip([0])
    assert process.step(round=4) == []


def test_slow_faults_last_their_time_and_add_up():
    slow = Fault(0, "slow", "w1", "step", 1.0, for_s=1.0, by_s=0.5)
    process = Process(slow, Fault(1, "slow", "w1", "step", 2.0, by_s=0.25))
    for step in range(6):
        process.step(step)
    # 0.5 until one second has passed, 0.25 from step 2 on.
    assert process.clock.slept == [0.5, 0.75, 0.25, 0.25, 0.25]


# a partition


def test_a_partition_holds_back_calls_until_it_is_over():
    clock = Clock()
    partition = Partition(clock=clock, sleep=clock.sleep)
    partition.hold()
    partition.cut(5.0)
    partition.hold()
    assert clock.slept == [5.0]


def test_a_longer_partition_is_not_ended_by_a_shorter_one():
    clock = Clock()
    partition = Partition(clock=clock, sleep=clock.sleep)
    partition.cut(5.0)
    partition.cut(1.0)
    partition.hold()
    assert clock.now == 5.0


def test_a_partition_that_is_cut_again_holds_the_waiting_calls():
    clock = Clock()

    def sleep(seconds):
        if not clock.slept:
            partition.cut(8.0)
        clock.sleep(seconds)

    partition = Partition(clock=clock, sleep=sleep)
    partition.cut(5.0)
    partition.hold()
    assert clock.now == 8.0


def test_a_partition_holds_every_thread():
    partition = Partition()
    ProcessInflicts(partition, drain=print).partition(0.2)
    start, waited = time.monotonic(), []

    def pass_gate():
        partition.hold()
        waited.append(time.monotonic() - start)

    threads = [threading.Thread(target=pass_gate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=WAIT_S)
    assert len(waited) == 4
    assert min(waited) > 0.1


def partition_cut_for(for_s):
    """Return (a partition that is cut, its clock)."""
    clock = Clock()
    partition = Partition(clock=clock, sleep=clock.sleep)
    partition.cut(for_s)
    return partition, clock


def test_a_partition_holds_a_call_to_a_process_and_its_answer():
    partition, clock = partition_cut_for(5.0)
    with partition.both_ways():
        assert clock.now == 5.0
        partition.cut(3.0)
    assert clock.now == 8.0
    partition.cut(2.0)
    with pytest.raises(ZeroDivisionError), partition.both_ways():
        raise ZeroDivisionError  # an error is also an answer
    assert clock.now == 10.0


def test_calls_of_a_transport_and_their_later_results_are_held_back():
    class PendingResponse:
        def wait(self):
            return clock.now

    clock = Clock()
    partition = Partition(clock=clock, sleep=clock.sleep)
    transport = Held(SimpleNamespace(request=PendingResponse, size=3), partition.hold)
    assert transport.size == 3
    delivery = transport.request()
    partition.cut(5.0)
    assert delivery.wait() == 5.0
    partition.cut(1.0)
    transport.request()
    assert clock.now == 6.0


@pytest.mark.parametrize(
    "call",
    ["publish", "center", "hold_last", "report", "vote", "abandon", "load_state", "write_held"],
)
def test_a_worker_that_is_cut_off_delays_its_snapshots_and_answers(call, monkeypatch):
    partition, clock = partition_cut_for(5.0)
    actor = object.__new__(WorkerActor.__ray_metadata__.modified_class)
    reached = []

    def reach(*args, **kwargs):
        reached.append(clock.now)

    worker = SimpleNamespace(center=reach, hold_last=reach, report=reach, vote=reach)
    worker.held = lambda round: SimpleNamespace(num_bytes=0)
    center = SimpleNamespace(put=SimpleNamespace(remote=reach))
    actor._partition, actor._worker, actor._shards = partition, worker, [center]
    actor._lock, actor._abandoned = threading.Lock(), SimpleNamespace(set=reach)
    actor._abandoned_up_to, actor._generation = 0, 1
    monkeypatch.setattr(actors, "Storage", reach)
    monkeypatch.setattr(actors, "_load_saved", reach)
    monkeypatch.setattr(actors, "give_way", lambda: None)
    {
        "publish": lambda: actor._publish(None),
        "center": lambda: actor.center(),
        "hold_last": lambda: actor.hold_last(),
        "report": lambda: actor.report(),
        "vote": lambda: actor.vote(1, {"stop": 1.0}),
        "abandon": lambda: actor.abandon(1),
        "load_state": lambda: actor.load_state(("place", "name", None)),
        "write_held": lambda: actor.write_held(1, "place", "name", "token"),
    }[call]()
    assert reached == [5.0]


def test_a_drain_fault_calls_drain_with_its_notice():
    notices = []
    ProcessInflicts(Partition(), drain=notices.append).drain(30.0)
    assert notices == [30.0]


# a process

WORKER = """
import sys, threading, time
from raydl.faults import Announced, Fault, Injector, Partition, ProcessInflicts

kind, for_s = sys.argv[1], float(sys.argv[2]) or None
fault = Fault(0, kind, "w0", "step", 3.0, for_s=for_s)
inflict = ProcessInflicts(Partition(), print)

def announce(fault):
    print(fault.sentence, flush=True)
    return Announced.FIRST

injector = Injector([fault], inflict, announce)

def loop():
    for step in range(5):
        injector.before_step(
            "w0", rank=0, num_workers=1, local_step=step, round=0, seconds=0.0
        )
        print("step", step, flush=True)

thread = threading.Thread(target=loop)  # like the loop of an actor, not in the main thread
thread.start()
thread.join()
"""
STEPS = [f"step {i}" for i in range(5)]


@pytest.fixture
def start():
    """Start a worker's loop with one fault before step 3; the process is killed afterwards."""
    started = []

    def start(kind, for_s=0.0):
        command = [sys.executable, "-c", WORKER, kind, str(for_s)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=WAIT_S)


def until_stopped(process):
    """Wait until the process is stopped, according to the kernel."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(process.pid, os.WUNTRACED | os.WNOHANG)
        if pid:
            assert os.WIFSTOPPED(status)
            return
        time.sleep(0.005)
    raise AssertionError("it was not stopped")


def test_a_killed_process_has_announced_its_fault_and_reports_nothing_more(start):
    process = start("kill")
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGKILL
    assert output.splitlines() == [*STEPS[:3], "fault 1: kill w0 at step 3"]


@pytest.mark.parametrize("for_s", [3.0, 0.001])
def test_a_stopped_process_continues_by_itself(start, for_s):
    process = start("stop", for_s)
    if for_s > 0.1:  # a shorter stop may be over before it is observed
        until_stopped(process)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert output.splitlines()[4:] == STEPS[3:]


def test_a_process_stopped_for_good_waits_for_a_signal(start):
    process = start("stop")
    until_stopped(process)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert output.splitlines() == [*STEPS[:3], "fault 1: stop w0 at step 3", *STEPS[3:]]
