"""A busy process is told from a dead one by its CPU time."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from controller_harness import ControllerHarness

from raydl.core.worker_group import Busy
from raydl.elastic.heartbeat import Heartbeats
from raydl.ray_backend.cluster import Place, kill_process
from raydl.ray_backend.liveness import Liveness, Times, start_of, times_of


def seen(cpu_s, state, at_s):
    """Return the times of a process with one thread."""
    return Times(cpu_s, state, state == "R", at_s)


def checked(*times, at=(1.0, 2.0)):
    """Return the liveness of a process that was checked twice."""
    liveness = Liveness()
    for now, seen in zip(at, times, strict=True):
        assert liveness.due(["w1"], now) == ["w1"]
        liveness.note("w1", seen, now)
    return liveness


def test_a_process_that_computes_is_busy():
    assert checked(seen(5.0, "R", 100.0), seen(5.9, "R", 101.0)).is_busy("w1", 2.0)
    assert checked(seen(5.0, "S", 100.0), seen(5.2, "S", 101.0)).is_busy("w1", 2.0)


def test_a_process_that_waits_for_a_core_at_every_check_is_busy():
    assert checked(seen(5.0, "R", 100.0), seen(5.01, "R", 101.0)).is_busy("w1", 2.0)
    assert not checked(seen(5.0, "S", 100.0), seen(5.01, "R", 101.0)).is_busy("w1", 2.0)
    assert not checked(seen(5.0, "R", 100.0), seen(5.01, "S", 101.0)).is_busy("w1", 2.0)


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (seen(5.0, "T", 100.0), seen(5.0, "T", 101.0), "; its process is stopped"),
        (seen(5.0, "S", 100.0), seen(5.01, "S", 101.0), "; its process uses no CPU: it waits"),
        (seen(5.0, "R", 100.0), None, "; its process has ended"),
        (seen(5.0, "R", 100.0), seen(5.0, "Z", 101.0), "; its process has ended"),
    ],
)
def test_a_process_that_does_not_compute_is_not_busy_and_the_reason_is_given(before, after, why):
    liveness = checked(before, after)
    assert not liveness.is_busy("w1", 2.0)
    assert liveness.why_silent("w1", 2.0).startswith(why)


def test_one_check_is_not_enough_and_an_old_check_does_not_count():
    liveness = Liveness()
    liveness.due(["w1"], 1.0)
    liveness.note("w1", seen(5.0, "R", 100.0), 1.0)
    assert not liveness.is_busy("w1", 1.0)
    assert liveness.why_silent("w1", 1.0) == ""  # it may be busy
    liveness = checked(seen(5.0, "R", 100.0), seen(5.9, "R", 101.0))
    assert not liveness.is_busy("w1", 8.0)
    assert liveness.why_silent("w1", 8.0) == "; its node does not answer either"


def test_a_process_is_checked_once_a_second_and_forgotten_once_it_answers():
    liveness = checked(seen(5.0, "R", 100.0), seen(5.9, "R", 101.0))
    assert liveness.due(["w1"], 2.5) == []
    assert liveness.due([], 2.6) == []
    assert liveness.due(["w1"], 2.7) == ["w1"]
    assert not liveness.is_busy("w1", 2.7)
    assert liveness.why_silent("w2", 2.7) == ""


def test_silent_processes_are_checked_before_their_lease_expires():
    now = 0.0
    heartbeats = Heartbeats(10.0, clock=lambda: now)
    heartbeats.expect_answer("w1")
    now = 2.0
    heartbeats.expect_answer("w2")
    now = 2.6
    assert heartbeats.silent(2.5) == ["w1"]


def test_proc_shows_whether_a_process_is_busy_or_stopped():
    code = "print(1, flush=True)\nwhile True: sum(range(1000))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline()
        first = times_of(process.pid)
        deadline = time.monotonic() + 30
        while times_of(process.pid).cpu_s - first.cpu_s < 0.2:
            assert time.monotonic() < deadline
        assert times_of(process.pid).state in "RS"
        os.kill(process.pid, signal.SIGSTOP)
        while times_of(process.pid).state != "T":
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert times_of(process.pid) is None


def test_proc_shows_that_a_process_waits_for_a_core_that_another_uses():
    with spinning() as waiting, spinning():
        first = times_of(waiting.pid)
        for _ in range(20):
            time.sleep(0.05)
            newest = times_of(waiting.pid)
            assert newest.is_runnable
        used_s, span_s = newest.cpu_s - first.cpu_s, newest.at_s - first.at_s
        assert used_s < 0.8 * span_s, "it has not waited"


SPIN = """
import os, threading

def spin():
    print(1, flush=True)
    while True:
        sum(range(1000))

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
thread = threading.Thread(target=spin)
thread.start()
thread.join()
"""


@contextlib.contextmanager
def spinning():
    """Yield a process whose second thread computes on the first core, while its first waits."""
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_a_stopped_process_of_this_node_is_killed():
    """A stopped process receives no call of Ray's, so no call can end it."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(process.pid, signal.SIGSTOP)
    place = Place("this node", process.pid, start_of(process.pid))
    kill_process(place, home="this node")
    assert process.wait(timeout=10) == -signal.SIGKILL
    kill_process(place, home="this node")  # it has ended: no error


@pytest.mark.parametrize("start", [-1, None], ids=["of another process", "not known"])
def test_a_process_that_has_the_id_of_an_ended_one_is_not_killed(start):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        own = start_of(process.pid)
        assert own > start_of(os.getpid()) > start_of(1) >= 0
        kill_process(Place("this node", process.pid, start and own + start), home="this node")
        time.sleep(0.2)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert start_of(process.pid) is None


def test_a_busy_process_is_logged_with_cause_and_setting():
    harness = ControllerHarness().start()
    harness.step(Busy("w1", 10.2))
    assert harness.log_lines[-1] == (
        "w1 has not answered for 10 s but is busy: a long call may hold the interpreter lock, or a "
        "large state is being sent; it counts as lost after 600 s (elastic.max_busy_s)"
    )


# on Ray

HOLD = """
import sys, time, itertools, collections, torch, raydl

def hold(seconds):
    # One call in C that does not release the interpreter lock: all other threads stand still.
    until = time.perf_counter() + seconds
    clock = iter(time.perf_counter, None)
    collections.deque(itertools.takewhile(until.__gt__, clock), maxlen=0)

class Model(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.linear = torch.nn.Linear(64, num_classes)
        self.calls = 0

    def forward(self, images):
        self.calls += self.training
        if self.training and self.calls == 30:
            hold(60.0)
        return self.linear(images.flatten(1))

def model(image_shape, num_classes):
    return Model(num_classes)

raydl.Trainer(
    raydl.Classification(model), "digits",
    method=raydl.MethodConfig(name="async-easgd", period=4),
    training=raydl.TrainingConfig(epochs=6),
    run=raydl.RunConfig(run_dir=sys.argv[1], progress="plain"),
).fit()
"""


@pytest.mark.slow
def test_at_the_default_lease_a_held_lock_of_a_minute_loses_no_worker(tmp_path):
    """``tests/elastic/test_worker_errors.py`` has the test with a shorter lease."""
    script = tmp_path / "own.py"
    script.write_text(HOLD)
    words = [sys.executable, script, tmp_path / "run"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "was lost" not in done.stdout
