"""A plan of faults is checked as a whole; each fault fires once, on whom it is meant for."""

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from raydl.errors import ConfigError
from raydl.faults import Fault, FaultPlan, Injector, Partition, ProcessInflicts
from raydl.faults.plan import KINDS

WAIT_S = 60.0


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now = 0.0
        self.slept = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


class Diary:
    """Writes down what would have been inflicted, and what was announced."""

    def __init__(self):
        self.lines = []
        self.is_heard = True

    def announce(self, fault):
        if self.is_heard:
            self.lines.append(fault.sentence)
        return self.is_heard

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
    """An injector with a clock and a diary, and a worker's loop in short."""

    def __init__(self, *faults, fired=(), worker_id="w1", rank=1, num_workers=3):
        self.diary, self.clock = Diary(), Clock()
        self.who = {"rank": rank, "num_workers": num_workers}
        self.worker_id = worker_id
        self.injector = Injector(
            faults,
            self.diary,
            self.diary.announce,
            fired,
            clock=self.clock,
            sleep=self.clock.sleep,
        )

    def step(self, local_step=0, *, round=0, seconds=0.0, **who):
        self.injector.before_step(
            self.worker_id,
            **{**self.who, **who},
            local_step=local_step,
            round=round,
            seconds=seconds,
        )
        return self.diary.fired()


@pytest.fixture
def read(tmp_path):
    def read(text):
        path = tmp_path / "plan.yaml"
        path.write_text(text)
        return FaultPlan.read(str(path))

    return read


def kill(target="w1", when="step", at=4.0, *, number=0, draw=0):
    return Fault(number, "kill", target, when, at, draw=draw)


# the plan


def test_a_plan_is_read_as_it_is_written(read):
    plan = read(
        """
        faults:
          - {fault: kill, target: w1, at: step 40}
          - {fault: stop, target: rank  0, at: round 90, for_s: 8}
          - {fault: slow, target: w02, at: second 12.5, by_s: 0.5}
          - {fault: kill, target: shard 1, at: second 3}
          - {fault: stop, target: shard 0, at: round 0}
        """
    )
    assert plan.faults == (
        Fault(0, "kill", "w1", "step", 40.0),
        Fault(1, "stop", "rank 0", "round", 90.0, for_s=8.0),
        Fault(2, "slow", "w2", "second", 12.5, by_s=0.5),
        Fault(3, "kill", "shard 1", "second", 3.0),
        Fault(4, "stop", "center", "round", 0.0),
    )
    assert plan.for_workers == plan.faults[:3]
    assert plan.for_center == plan.faults[3:]


def test_a_fault_is_told_in_one_sentence():
    stop = Fault(1, "stop", "rank 0", "round", 90.0, for_s=8.0)
    assert stop.sentence == "fault 2: stop rank 0 at round 90 for 8 s"
    slow = Fault(2, "slow", "any", "second", 12.5, for_s=10.0, by_s=0.5)
    assert slow.sentence == "fault 3: slow any at second 12.5 by 0.5 s for 10 s"
    assert kill(at=12345678.0).sentence == "fault 1: kill w1 at step 12345678"


def test_a_plan_travels_between_processes(read):
    plan = read("faults: [{fault: kill, target: any, at: step 40}]")
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_the_seed_draws_who_any_is(read):
    def drawn(text):
        return [fault.draw for fault in read(text).faults]

    any_kill = "{fault: kill, target: any, at: step 1}"
    w1_kill = "{fault: kill, target: w1, at: step 1}"
    both = drawn(f"{{seed: 7, faults: [{any_kill}, {any_kill}]}}")
    assert both == drawn(f"{{seed: 7, faults: [{any_kill}, {any_kill}]}}")
    assert both != drawn(f"{{seed: 8, faults: [{any_kill}, {any_kill}]}}")
    assert drawn(f"{{seed: 7, faults: [{w1_kill}, {any_kill}]}}") == [0, both[1]]
    assert drawn(f"faults: [{any_kill}]") == drawn(f"{{seed: 0, faults: [{any_kill}]}}")


def wrong(fields, sentence):
    """Return a plan whose second fault is wrong, and what is said of it."""
    plan = f"faults: [{{fault: kill, target: w0, at: step 1}}, {fields}]"
    return pytest.param(plan, f"fault 2: {sentence}", id=sentence)


MOMENTS = "at must be step N, round N (whole numbers from 0) or second S (above 0)"
TARGETS = "target must be w1, rank 0, any, center or shard 1"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must be a mapping of seed and faults, got nothing in PATH"),
        ("[1]", "must be a mapping of seed and faults, got [1] in PATH"),
        ("faults: []", "faults must be a list of at least one fault, got []"),
        ("seed: 1", "faults must be a list of at least one fault, got nothing"),
        ("{seed: -1, faults: [1]}", "seed must be a whole number from 0, got -1"),
        ("{seed: 1.5, faults: [1]}", "seed must be a whole number from 0, got 1.5"),
        ("{sede: 1, faults: [1], a: 2}", "has no key sede, a; known: seed, faults"),
        ("faults: [kill]", "fault 1: must be a mapping of fault, target, at, for_s, by_s, got "
         "'kill'"),
        ("faults: [{", "is no YAML: PATH, line 1: expected the node content, but found '<stream "
         "end>'"),
        ("seed: 2024-13-41", "is no YAML: PATH: month must be in 1..12"),
        ("faults:\n- fault: kill\n  at: step 4\n  fault: stop", "has fault 2 times in the mapping "
         "of line 2; each fault begins with a dash of its own"),
        wrong("{fault: kill, target: w1, at: step 4, until: 5, on: 6}",
              "has no key until, True; known: fault, target, at, for_s, by_s"),
        wrong("{fault: kil, target: w1, at: step 4}",
              "fault must be kill, stop, slow, drain or partition, got 'kil'"),
        wrong("{target: w1, at: step 4}",
              "fault must be kill, stop, slow, drain or partition, got nothing"),
        wrong("{fault: kill, target: 1, at: step 4}", f"{TARGETS}, got 1"),
        wrong("{fault: kill, target: worker 1, at: step 4}", f"{TARGETS}, got 'worker 1'"),
        wrong("{fault: kill, at: step 4}", f"{TARGETS}, got nothing"),
        wrong("{fault: kill, target: w1, at: 4}", f"{MOMENTS}, got 4"),
        wrong("{fault: kill, target: w1}", f"{MOMENTS}, got nothing"),
        wrong("{fault: kill, target: w1, at: step 4.5}", f"{MOMENTS}, got 'step 4.5'"),
        wrong("{fault: kill, target: w1, at: step -4}", f"{MOMENTS}, got 'step -4'"),
        wrong("{fault: kill, target: w1, at: second 0}", f"{MOMENTS}, got 'second 0'"),
        wrong("{fault: kill, target: w1, at: second nan}", f"{MOMENTS}, got 'second nan'"),
        wrong("{fault: stop, target: w1, at: step 4, for_s: 0}",
              "for_s must be in (0, 86400] seconds, got 0"),
        wrong("{fault: stop, target: w1, at: step 4, for_s: .inf}",
              "for_s must be in (0, 86400] seconds, got inf"),
        wrong("{fault: stop, target: w1, at: step 4, for_s: yes}",
              "for_s must be in (0, 86400] seconds, got True"),
        wrong("{fault: slow, target: w1, at: step 4}",
              "by_s must be in (0, 86400] seconds, got nothing"),
        wrong("{fault: drain, target: w1, at: step 4}",
              "for_s must be in (0, 86400] seconds, got nothing"),
        wrong("{fault: partition, target: w1, at: step 4, for_s: 8s}",
              "for_s must be in (0, 86400] seconds, got '8s'"),
        wrong("{fault: kill, target: w1, at: step 4, for_s: 8}",
              "for_s is only for stop, slow, drain or partition; kill has none, got 8"),
        wrong("{fault: stop, target: w1, at: step 4, by_s: 8}",
              "by_s is only for slow; stop has none, got 8"),
        wrong("{fault: slow, target: center, at: round 4}",
              "fault must be kill or stop where the target is center, got 'slow'"),
        wrong("{fault: kill, target: shard 1, at: step 4}",
              "at must be round N or second S where the target is shard 1, which takes no steps, "
              "got 'step 4'"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_plan_is_one_sentence(read, tmp_path, text, problem):
    with pytest.raises(ConfigError) as caught:
        read(text)
    path = str(tmp_path / "plan.yaml")
    assert str(caught.value) == f"run.fault_plan {problem}".replace("PATH", path)


def test_a_plan_that_can_not_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"can not read .*none.yaml: No such file"):
        FaultPlan.read(str(tmp_path / "none.yaml"))
    (tmp_path / "latin.yaml").write_bytes(b"seed: \xe4")
    with pytest.raises(ConfigError, match=r"is no YAML: .*latin.yaml: 'utf-8' codec"):
        FaultPlan.read(str(tmp_path / "latin.yaml"))


def test_a_target_that_the_run_can_not_have_is_refused():
    FaultPlan((kill("rank 2"), kill("shard 1", "round"))).check(max_workers=3, num_shards=2)
    with pytest.raises(ConfigError, match=r"fault 1: target must be a rank below 2, .*'rank 2'"):
        FaultPlan((kill("rank 2"),)).check(max_workers=2, num_shards=2)
    with pytest.raises(ConfigError, match=r"fault 1: target must be a shard below 1, .*'shard 1'"):
        FaultPlan((kill("shard 1", "round"),)).check(max_workers=2, num_shards=1)
    with pytest.raises(ConfigError, match="needs workers in processes of their own"):
        FaultPlan((kill(),)).check(max_workers=0, num_shards=1)


def test_the_plan_of_the_docs_has_every_fault_and_its_tables_are_right(root, read):
    text = (root / "docs/faults.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, flags=re.M | re.S)
    assert {fault.kind for fault in read(block).faults} == set(KINDS)
    words = {None: "-", False: "may", True: "must"}
    rows = re.findall(r"^\| `(\w+)` \| (-|may|must) \| (-|may|must) \|", text, flags=re.M)
    assert rows == [
        (kind, words[takes.get("for_s")], words[takes.get("by_s")]) for kind, takes in KINDS.items()
    ]


# when, and on whom


def test_a_fault_is_announced_and_then_inflicted():
    process = Process(Fault(0, "stop", "w1", "step", 4.0, for_s=8.0))
    process.step(4)
    assert process.diary.lines == ["fault 1: stop w1 at step 4 for 8 s", "stop 8.0"]


def test_a_fault_of_which_nobody_hears_waits_for_a_step_at_which_somebody_does():
    process = Process(kill(at=4.0))
    process.diary.is_heard = False  # the center is being started again
    assert [process.step(step) for step in (4, 5)] == [[], []]
    process.diary.is_heard = True
    assert process.step(6, rank=0) == [1]
    assert process.diary.lines[1:] == ["kill"]
    assert process.step(7) == [1]


@pytest.mark.parametrize(
    ("kind", "line"), [("drain", "drain 8.0"), ("partition", "partition 8.0"), ("kill", "kill")]
)
def test_each_fault_is_inflicted_by_its_name(kind, line):
    process = Process(Fault(0, kind, "w1", "round", 4.0, for_s=8.0))
    process.step(round=4)
    assert process.diary.lines[1:] == [line]


def test_a_step_is_met_exactly_and_once():
    process = Process(kill(at=4.0))
    fired = [process.step(step) for step in (2, 3, 4, 4, 5)]
    assert fired == [[], [], [1], [1], [1]]
    assert Process(kill(at=4.0)).step(5) == []  # a replacement that starts further on


@pytest.mark.parametrize(
    ("rounds", "fires"),
    [
        ((3, 4, 5), True),
        ((3, 6), True),  # exchanges of others may pass by in one go
        ((4, 4), True),  # started in the very round
        ((5, 6), False),  # started later: that moment was not its own
        ((2, 3), False),
    ],
)
def test_a_round_is_met_or_crossed(rounds, fires):
    process = Process(kill(when="round", at=4.0))
    for step, round in enumerate(rounds):
        process.step(step, round=round)
    assert process.diary.fired() == [1] * fires


def test_a_second_is_crossed():
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


def test_the_center_fires_its_own_by_the_same_rules():
    faults = [kill("center", "round", 4.0), kill("shard 1", "second", 2.0, number=1), kill("any")]
    center = Process(*faults, worker_id="center", rank=-1)
    assert [center.step(-1, round=r, seconds=r) for r in (0, 6)] == [[], [1]]
    shard = Process(*faults, worker_id="shard 1", rank=-1)
    assert [shard.step(-1, round=r, seconds=r) for r in (0, 6)] == [[], [2]]


def test_a_fault_that_fired_before_this_process_never_fires_again():
    assert Process(kill(), kill("rank 1", number=1), fired=[0]).step(4) == [2]


def test_a_worker_that_takes_over_a_rank_does_not_take_its_fault():
    process = Process(kill("rank 0", "round", 4.0), kill("rank 0", "round", 6.0, number=1))
    process.step(round=4)  # rank 0 is another one, and is killed
    assert process.step(round=4, rank=0) == []
    assert process.step(round=6, rank=0) == [2]


def test_a_fault_that_fired_elsewhere_is_skipped():
    process = Process(kill("rank 1", "round", 4.0))
    process.step(round=3)
    process.injector.skip([0])
    assert process.step(round=4) == []


def test_slowness_lasts_its_time_and_adds_up():
    slow = Fault(0, "slow", "w1", "step", 1.0, for_s=1.0, by_s=0.5)
    process = Process(slow, Fault(1, "slow", "w1", "step", 2.0, by_s=0.25))
    for step in range(6):
        process.step(step)
    # 0.5 until one second has passed, 0.25 from step 2 on.
    assert process.clock.slept == [0.5, 0.75, 0.25, 0.25, 0.25]


# a partition


def test_a_partition_holds_what_comes_until_it_is_over():
    clock = Clock()
    partition = Partition(clock=clock, sleep=clock.sleep)
    partition.hold()
    assert not partition.is_cut
    partition.cut(5.0)
    assert partition.is_cut
    partition.hold()
    assert (clock.slept, partition.is_cut) == ([5.0], False)


def test_a_longer_partition_is_not_ended_by_a_shorter_one():
    clock = Clock()
    partition = Partition(clock=clock, sleep=clock.sleep)
    partition.cut(5.0)
    partition.cut(1.0)
    partition.hold()
    assert clock.now == 5.0


def test_a_partition_that_is_cut_anew_holds_those_who_wait():
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


def test_a_notice_is_passed_on():
    told = []
    ProcessInflicts(Partition(), drain=told.append).drain(30.0)
    assert told == [30.0]


# a process

WORKER = """
import sys, threading, time
from raydl.faults import Fault, Injector, Partition, ProcessInflicts

kind, for_s = sys.argv[1], float(sys.argv[2]) or None
fault = Fault(0, kind, "w0", "step", 3.0, for_s=for_s)
inflict = ProcessInflicts(Partition(), print)

def announce(fault):
    print(fault.sentence, flush=True)
    return True

injector = Injector([fault], inflict, announce)

def loop():
    for step in range(5):
        injector.before_step(
            "w0", rank=0, num_workers=1, local_step=step, round=0, seconds=0.0
        )
        print("step", step, flush=True)

thread = threading.Thread(target=loop)  # as the loop of an actor is not in the main thread
thread.start()
thread.join()
"""
STEPS = [f"step {i}" for i in range(5)]


@pytest.fixture
def start():
    """Start a worker's loop with one fault before step 3; end what is left of it."""
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
    """Return once the kernel says that the process was stopped."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(process.pid, os.WUNTRACED | os.WNOHANG)
        if pid:
            assert os.WIFSTOPPED(status)
            return
        time.sleep(0.005)
    raise AssertionError("it was not stopped")


def test_a_killed_process_has_announced_it_and_says_nothing_more(start):
    process = start("kill")
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGKILL
    assert output.splitlines() == [*STEPS[:3], "fault 1: kill w0 at step 3"]


@pytest.mark.parametrize("for_s", [0.3, 0.001])
def test_a_stopped_process_goes_on_by_itself(start, for_s):
    process = start("stop", for_s)
    if for_s > 0.1:  # else it may be over before we look
        until_stopped(process)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert output.splitlines()[4:] == STEPS[3:]


def test_a_process_stopped_for_good_waits_for_somebody(start):
    process = start("stop")
    until_stopped(process)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert output.splitlines() == [*STEPS[:3], "fault 1: stop w0 at step 3", *STEPS[3:]]
