"""Time parts of a worker on the host and on a device with a queue."""

import threading

import pytest
import torch

from raydl.metrics import PartsPerWorker, TimeParts
from raydl.metrics import time_parts as module


class Device:
    """A device with a queue and a simulated clock, like a CUDA stream and its events."""

    def __init__(self):
        self.now = 0.0
        """The host's clock."""
        self.busy_until = 0.0
        self.num_marks = 0

    def queue(self, seconds):
        """Let the device compute; the host continues at once."""
        self.busy_until = max(self.busy_until, self.now) + seconds

    def host(self, seconds):
        self.now += seconds

    def wait(self):
        """Let the host wait for the end of the queue."""
        self.now = max(self.now, self.busy_until)

    def mark(self):
        self.num_marks += 1
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.at = device, None

    def record(self):
        self.at = max(self.device.now, self.device.busy_until)

    def query(self):
        return self.at <= self.device.now

    def elapsed_time(self, later):
        assert self.query()
        assert later.query()
        return (later.at - self.at) * 1000


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def parts(device):
    return TimeParts(device.mark)


def period(device, parts, *, steps, exchange_s):
    """Take local steps, which the host queues in no time, and then an exchange."""
    for _ in range(steps):
        with parts.measure("data_io"):
            device.host(0.001)
        with parts.measure("forward_backward"):
            device.queue(0.1)
        with parts.measure("replica_update"):
            device.queue(0.02)
    began = device.now
    with parts.measure("device_device_parameters"):
        device.wait()  # the host waits for the sum, which arrives after the computation
        device.now = max(device.now, began + exchange_s)
    with parts.measure("center_update"):
        device.queue(0.01)


def test_the_computation_of_a_period_does_not_count_as_communication(device, parts):
    period(device, parts, steps=10, exchange_s=0.0)
    device.wait()
    seconds = parts.as_dict()
    assert seconds["forward_backward"] == pytest.approx(1.0)
    assert seconds["replica_update"] == pytest.approx(0.2)
    assert seconds["center_update"] == pytest.approx(0.01)
    assert seconds["device_device_parameters"] == pytest.approx(0.0)
    # The device waits only for the first batch: the others are read while it computes.
    assert seconds["data_io"] == pytest.approx(0.001)


def test_only_the_exposed_part_of_an_exchange_is_communication(device, parts):
    period(device, parts, steps=2, exchange_s=0.5)
    device.wait()
    seconds = parts.as_dict()
    # The host waited from 2 ms to 502 ms; the device was done at 241 ms.
    assert seconds["device_device_parameters"] == pytest.approx(0.502 - 0.241)
    assert sum(seconds.values()) == pytest.approx(device.now), "the parts are all of the time"


def test_no_thread_waits_for_a_mark(device, parts):
    with parts.measure("forward_backward"):
        device.queue(1.0)
    assert parts.as_dict()["forward_backward"] == 0.0
    assert device.now == 0.0
    device.host(1.0)
    assert parts.as_dict()["forward_backward"] == pytest.approx(1.0)
    assert parts.as_dict()["forward_backward"] == pytest.approx(1.0), "counted once"


def test_marks_are_reused(device, parts):
    for _ in range(100):
        period(device, parts, steps=3, exchange_s=0.0)
        device.wait()
        parts.as_dict()
    assert device.num_marks <= 2 * (3 * 3 + 2)


def test_two_threads_may_read_at_once(device, parts):
    for _ in range(200):
        with parts.measure("forward_backward"):
            device.queue(0.01)
    device.wait()
    threads = [threading.Thread(target=parts.as_dict) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert parts.as_dict()["forward_backward"] == pytest.approx(2.0)


def test_a_part_that_raises_is_counted(device, parts):
    def fail():
        device.host(0.5)
        raise KeyError

    with pytest.raises(KeyError), parts.measure("data_io"):
        fail()
    assert parts.as_dict()["data_io"] == pytest.approx(0.5)
    assert parts.since("data_io") == 0.0


@pytest.mark.parametrize(("name", "index"), [("cuda:1", 1), ("cuda", 3)])
def test_marks_are_in_the_queue_of_the_workers_device(monkeypatch, device, name, index):
    """A worker may compute on a GPU that is not the current one of its process."""
    streams = []

    class StreamEvent(Event):
        def __init__(self, *, enable_timing):
            super().__init__(device)
            assert enable_timing

        def record(self, stream):
            streams.append(stream)
            super().record()

    monkeypatch.setattr(torch.cuda, "Event", StreamEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: f"stream of {of}")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    parts = TimeParts.on(torch.device(name))
    with parts.measure("forward_backward"):
        device.queue(3)
    device.wait()
    assert parts.as_dict()["forward_backward"] == 3
    assert streams == [f"stream of {index}"] * 2


def test_on_the_host_a_part_is_wall_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    parts = TimeParts.on(torch.device("cpu"))
    with parts.measure("forward_backward"):
        now[0] = 2.0
        assert parts.since("forward_backward") == 2.0
        assert parts.since("data_io") == 0.0
    assert parts.as_dict()["forward_backward"] == 2.0


@pytest.mark.gpu
def test_on_a_gpu_queued_kernels_count_as_computation_and_not_as_waiting():
    device = torch.device("cuda")
    parts = TimeParts.on(device)
    matrix = torch.randn(4096, 4096, device=device)
    matrix @ matrix
    torch.cuda.synchronize()
    for _ in range(20):
        with parts.measure("forward_backward"):
            for _ in range(10):
                matrix @ matrix
    with parts.measure("device_device_parameters"):
        torch.cuda.synchronize()
    torch.cuda.synchronize()
    seconds = parts.as_dict()
    assert seconds["forward_backward"] > 10 * seconds["device_device_parameters"]


def seconds_of(**parts):
    return {**TimeParts().as_dict(), **parts}


def test_the_seconds_per_worker_are_the_mean_while_the_workers_stay():
    parts = PartsPerWorker()
    parts.add({"w0": seconds_of(data_io=2.0), "w1": seconds_of(data_io=4.0)}, num_workers=2)
    assert parts.seconds == seconds_of(data_io=3.0)
    parts.add({"w0": seconds_of(data_io=4.0), "w1": seconds_of(data_io=8.0)}, num_workers=2)
    assert parts.seconds == seconds_of(data_io=6.0)


def test_the_seconds_per_worker_never_fall_when_workers_leave_join_and_return():
    parts = PartsPerWorker()
    parts.add({"w0": seconds_of(data_io=10.0), "w1": seconds_of(data_io=30.0)}, num_workers=2)
    assert parts.seconds["data_io"] == 20.0
    parts.add({"w0": seconds_of(data_io=10.0)}, num_workers=1)  # w1 has left
    assert parts.seconds["data_io"] == 20.0
    newcomer = {"w0": seconds_of(data_io=11.0), "w2": seconds_of(data_io=1.0)}
    parts.add(newcomer, num_workers=2)
    assert parts.seconds["data_io"] == 21.0
    parts.add({"w1": seconds_of(data_io=32.0)}, num_workers=2)  # it was left out, and is back
    assert parts.seconds["data_io"] == 22.0


def test_the_first_worker_that_reports_a_generation_counts_for_its_share():
    parts = PartsPerWorker()
    parts.add({"w0": seconds_of(data_io=2.0)}, num_workers=2)
    parts.add({"w0": seconds_of(data_io=2.0), "w1": seconds_of(data_io=2.0)}, num_workers=2)
    assert parts.seconds["data_io"] == 2.0


def test_only_the_gradient_ends_the_idle_time_of_a_worker(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    parts = TimeParts()
    with parts.measure("forward_backward"):
        now[0] = 3.0
        assert parts.idle_s() == 0.0
    with parts.measure("device_device_parameters"):
        now[0] = 8.0
        assert parts.idle_s() == 5.0
    with parts.measure("data_io"):
        now[0] = 9.0
    assert parts.idle_s() == 6.0
