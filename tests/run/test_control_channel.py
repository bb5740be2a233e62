"""A run's control channel: status, requests and answers, through the run's folder."""

import json
import shutil
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import crafted
import pytest
from clocks import halt_the_clock
from snapshots import with_progress

from raydl.core.progress import Progress
from raydl.errors import ConfigError, DataError, RaydlError
from raydl.run import control_channel
from raydl.run.control_channel import (
    ControlChannel,
    RunStatus,
    WorkerStatus,
    read_status,
    request_removal,
)
from raydl.storage import Storage
from raydl.storage.local_files import LocalFiles

WORKERS = (
    WorkerStatus("w0", "training", "a", 90, 9, 0.01, 1.5, 30.0),
    WorkerStatus("w1", "left out", "b", 80, 8, 0.04, 0.0, 2.0),
)
TRAINING = RunStatus(
    "training",
    Progress(round=9, generation=3, epoch=1.5, num_samples=1440, seconds=31.0),
    1,
    "1:2",
    0.97,
    WORKERS,
    ("generation 3: w1 is left out",),
)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(control_channel, "POLL_S", 0.002)
    monkeypatch.setattr(control_channel, "LOOK_AGAIN_S", 0.02)
    monkeypatch.setattr(control_channel, "BEAT_S", 60.0)


class ManualClock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class BrokenStorage(Storage):
    """A storage that fails while ``is_broken``, and waits at its gate, if it has one."""

    is_broken = False
    gate = None

    def _pass(self):
        if self.gate:
            self.gate.wait(60)
        if self.is_broken:
            raise OSError("no route to host")

    def write_bytes(self, name, data):
        self._pass()
        super().write_bytes(name, data)

    def list_dir(self, name):
        self._pass()
        return super().list_dir(name)

    def delete_dir(self, name):
        self._pass()
        super().delete_dir(name)


def wait_for(condition):
    """Wait until a condition holds and return what it returned."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        found = condition()
        if found:
            return found
        time.sleep(0.001)
    raise AssertionError("the condition did not hold within 30 s")


def status_in(folder):
    """Return the status in the folder, or None."""
    try:
        return read_status(str(folder))
    except DataError:
        return None


def write_request(folder, request_id, *, driver, worker_id="w1"):
    """Write a request, as ``request_removal`` does."""
    request = json.dumps({"driver": driver, "remove": worker_id}).encode()
    Storage(str(folder)).write_bytes(f"requests/{request_id}/request.json", request)


def answer_to(folder, request_id):
    path = folder / "answers" / request_id / "answer.json"
    return json.loads(path.read_text()) if path.exists() else None


def age(folder, seconds):
    """Make the status in a folder older by some seconds."""
    values = json.loads((folder / "status.json").read_text())
    values["told_at"] -= seconds
    Storage(str(folder)).write_bytes("status.json", json.dumps(values).encode())


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def channel(tmp_path, clock):
    channel = ControlChannel(Storage(str(tmp_path)), clock=clock)
    yield channel
    channel.close(replace(TRAINING, state="stopped"))


@contextmanager
def driver(channel, clock, *, answer="{} leaves after this round", ok=True):
    """Run a driver's loop in a thread, with a second of the clock between two steps."""
    is_over = threading.Event()
    removed = []

    def loop():
        while not is_over.wait(0.001):
            clock.now += 1
            channel.report(TRAINING)
            for request in channel.pop_requests():
                removed.append(request.worker_id)
                channel.answer(request, answer.format(request.worker_id), ok=ok)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield removed
    finally:
        is_over.set()
        thread.join()


# the status


def test_a_status_is_read_as_it_was_reported(tmp_path, channel):
    channel.report(TRAINING)
    seen = wait_for(lambda: status_in(tmp_path))
    assert replace(seen, told_at=0.0, driver="") == TRAINING
    assert time.time() - seen.told_at < 5
    assert seen.driver == channel.driver
    assert not seen.is_stale
    assert not seen.is_final


def test_a_run_is_read_by_its_uri_too(tmp_path, channel):
    channel.report(TRAINING)
    wait_for(lambda: status_in(tmp_path))
    assert read_status(f"file://{tmp_path}/").workers == WORKERS


def test_the_status_is_made_and_written_once_a_second(tmp_path, channel, clock):
    made_at = []

    def status():
        made_at.append(clock.now)
        return with_progress(TRAINING, round=len(made_at))

    for tenth in range(35):
        clock.now = tenth / 10
        channel.report(status)
    assert made_at == [0.0, 1.0, 2.0, 3.0]
    wait_for(lambda: (seen := status_in(tmp_path)) and seen.progress.round == 4)


def test_an_urgent_status_is_written_at_once(tmp_path, channel):
    channel.report(TRAINING)
    channel.report(with_progress(TRAINING, generation=4), at_once=True)
    wait_for(lambda: (seen := status_in(tmp_path)) and seen.progress.generation == 4)


def test_a_half_written_status_is_never_seen(tmp_path, channel, clock):
    channel.report(TRAINING)
    wait_for(lambda: status_in(tmp_path))
    many = replace(TRAINING, events=("something happened",) * 2000)
    for _ in range(100):
        channel.report(many, at_once=True)
        assert read_status(str(tmp_path)).progress.num_samples == 1440  # or it would raise


def test_unknown_fields_in_the_status_of_a_newer_raydl_are_ignored(tmp_path, channel):
    channel.report(TRAINING)
    wait_for(lambda: status_in(tmp_path))
    values = json.loads((tmp_path / "status.json").read_text())
    values["mood"] = values["workers"][0]["mood"] = "good"
    (tmp_path / "status.json").write_text(json.dumps(values))
    assert read_status(str(tmp_path)).workers == WORKERS


def test_a_busy_driver_keeps_writing_its_status(tmp_path, monkeypatch):
    monkeypatch.setattr(control_channel, "BEAT_S", 0.01)
    monkeypatch.setattr(control_channel, "STALE_S", 0.2)
    channel = ControlChannel(Storage(str(tmp_path)))
    channel.report(replace(TRAINING, state="starting"))
    first = wait_for(lambda: status_in(tmp_path))
    wait_for(lambda: "starting, no report for " in status_in(tmp_path).state)
    assert status_in(tmp_path).told_at > first.told_at
    assert status_in(tmp_path).workers == WORKERS
    monkeypatch.setattr(
        control_channel, "STALE_S", 60.0
    )  # else the status "training" lasts only 0.2 s
    channel.report(TRAINING, at_once=True)
    wait_for(lambda: status_in(tmp_path).state == "training")
    channel.close(replace(TRAINING, state="finished"))
    time.sleep(0.05)
    assert status_in(tmp_path).state == "finished"


# reading the status


def test_a_folder_without_a_run_is_reported_in_one_sentence(tmp_path):
    with pytest.raises(DataError, match="no run is there; give the folder that raydl train") as e:
        read_status(str(tmp_path / "nothing"))
    assert str(e.value).startswith(f"{tmp_path}/nothing: ")


def test_a_run_without_a_status_is_reported(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="the run has no status yet; try again a few seconds"):
        read_status(str(tmp_path))


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"workers": [{}], "events": []}'])
def test_a_damaged_status_is_an_error(tmp_path, damage):
    (tmp_path / "status.json").write_text(damage)
    with pytest.raises(DataError, match="its status cannot be read"):
        read_status(str(tmp_path))


def test_a_killed_driver_leaves_a_status_that_is_stale(tmp_path, channel, monkeypatch):
    halt_the_clock(monkeypatch)
    channel.report(TRAINING)
    wait_for(lambda: status_in(tmp_path))
    age(tmp_path, 37)
    seen = read_status(str(tmp_path))
    assert seen.is_stale
    sentence = seen.stale_sentence()
    assert "has not reported for 37 s: it may be lost; the same command with --resume" in sentence
    assert channel.driver.split(",")[0] in sentence  # which process, and where


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_machine_with_a_wrong_clock_does_not_report_a_live_driver_as_lost(
    tmp_path, channel, seconds, monkeypatch
):
    monkeypatch.setattr(control_channel, "LOOK_AGAIN_S", 30.0)
    channel.report(TRAINING)
    wait_for(lambda: status_in(tmp_path))
    age(tmp_path, seconds)
    threading.Timer(0.02, channel.report, [TRAINING], {"at_once": True}).start()
    assert not read_status(str(tmp_path)).is_stale


def test_a_clock_that_is_behind_does_not_make_a_dead_driver_live(tmp_path, channel):
    channel.report(TRAINING)
    wait_for(lambda: status_in(tmp_path))
    age(tmp_path, -3600)
    assert read_status(str(tmp_path)).is_stale


def test_a_finished_run_never_becomes_stale(tmp_path, clock):
    channel = ControlChannel(Storage(str(tmp_path)), clock=clock)
    channel.report(TRAINING)
    channel.close(replace(TRAINING, state="finished"))
    channel.close(replace(TRAINING, state="failed: of something later"))
    age(tmp_path, 1e6)
    seen = read_status(str(tmp_path))
    assert (seen.state, seen.is_final, seen.is_stale) == ("finished", True, False)


def test_a_resumed_run_replaces_the_status_of_the_killed_one(tmp_path, channel):
    channel.report(TRAINING)
    wait_for(lambda: status_in(tmp_path))
    age(tmp_path, 37)
    second = ControlChannel(Storage(str(tmp_path)))
    second.report(replace(TRAINING, state="waiting for workers"))
    wait_for(lambda: status_in(tmp_path).state == "waiting for workers")
    assert status_in(tmp_path).driver == second.driver != channel.driver
    second.close(replace(TRAINING, state="finished"))


# requests


def test_a_removal_is_requested_and_answered_and_leaves_no_file(tmp_path, channel, clock):
    with driver(channel, clock) as removed:
        wait_for(lambda: status_in(tmp_path))
        sentence = request_removal(str(tmp_path), "w1", timeout_s=30)
    assert sentence == "w1 leaves after this round"
    assert removed == ["w1"]
    assert list((tmp_path / "requests").iterdir()) == []
    assert list((tmp_path / "answers").iterdir()) == []
    assert channel.num_failures == 0


def test_a_refusal_of_the_driver_is_an_error_with_its_sentence(tmp_path, channel, clock):
    with driver(channel, clock, answer="{} is the last worker", ok=False):
        wait_for(lambda: status_in(tmp_path))
        with pytest.raises(RaydlError, match=r"^w1 is the last worker$"):
            request_removal(str(tmp_path), "w1", timeout_s=30)


def test_each_of_many_requests_gets_its_own_answer(tmp_path, channel, clock):
    answers = {}

    def remove(worker_id):
        answers[worker_id] = request_removal(str(tmp_path), worker_id, timeout_s=30)

    with driver(channel, clock) as removed:
        wait_for(lambda: status_in(tmp_path))
        threads = [threading.Thread(target=remove, args=(w,)) for w in ("w0", "w1")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {w: f"{w} leaves after this round" for w in ("w0", "w1")}
    assert sorted(removed) == ["w0", "w1"]
    assert channel.num_failures == 0


def test_a_request_that_is_answered_at_once_is_no_failure(tmp_path, channel, clock, monkeypatch):
    def flush_once_taken(self, name, flush=LocalFiles.flush):
        if name.startswith("requests/"):
            wait_for(lambda: not (tmp_path / name).exists())  # the driver has answered
        flush(self, name)

    monkeypatch.setattr(LocalFiles, "flush", flush_once_taken)
    with driver(channel, clock):
        wait_for(lambda: status_in(tmp_path))
        assert request_removal(str(tmp_path), "w1", timeout_s=30) == "w1 leaves after this round"


def test_a_request_for_an_unknown_worker_lists_the_workers(tmp_path, channel):
    channel.report(TRAINING)
    wait_for(lambda: status_in(tmp_path))
    with pytest.raises(ConfigError) as caught:
        request_removal(str(tmp_path), "w7")
    assert str(caught.value) == f"{tmp_path} has no worker 'w7'; it has w0, w1"
    assert not (tmp_path / "requests").exists()


def test_a_long_list_of_workers_is_cut(tmp_path, channel):
    many = tuple(replace(WORKERS[0], worker_id=f"w{i}") for i in range(20))
    channel.report(replace(TRAINING, workers=many))
    wait_for(lambda: status_in(tmp_path))
    with pytest.raises(ConfigError, match=r"it has w0, .*w7 and 12 more: see raydl status"):
        request_removal(str(tmp_path), "w77")


def test_a_request_without_an_answer_is_withdrawn_and_reported(tmp_path, channel):
    channel.report(TRAINING)
    wait_for(lambda: status_in(tmp_path))
    with pytest.raises(
        RaydlError, match=r"did not answer within 0\.02 s: it may be busy; see raydl"
    ):
        request_removal(str(tmp_path), "w1", timeout_s=0.02)
    assert list((tmp_path / "requests").iterdir()) == []


def test_a_silent_driver_gets_no_request(tmp_path, channel, monkeypatch):
    halt_the_clock(monkeypatch)
    channel.report(TRAINING)
    wait_for(lambda: status_in(tmp_path))
    age(tmp_path, 37)
    with pytest.raises(RaydlError, match="has not reported for 37 s: it may be lost"):
        request_removal(str(tmp_path), "w1")


def test_a_run_that_ended_gets_no_request(tmp_path):
    channel = ControlChannel(Storage(str(tmp_path)))
    channel.close(replace(TRAINING, state="failed: w1 was lost"))
    with pytest.raises(RaydlError, match=r"has ended \(failed: w1 was lost\)"):
        request_removal(str(tmp_path), "w1")


def test_a_request_is_received_once_it_is_whole(tmp_path, channel, clock):
    (tmp_path / "requests" / "r1").mkdir(parents=True)
    with driver(channel, clock) as removed:
        assert wait_for(lambda: clock.now > 5)
        assert removed == []
        write_request(tmp_path, "r1", driver=channel.driver)
        wait_for(lambda: removed == ["w1"])


def test_requests_are_polled_once_a_second_and_received_once(tmp_path, channel, clock):
    write_request(tmp_path, "r1", driver=channel.driver)
    wait_for(lambda: _pass(clock) and [r.id for r in channel.pop_requests()] == ["r1"])
    for _ in range(20):
        clock.now += 1
        assert channel.pop_requests() == []
        time.sleep(0.001)


def _pass(clock):
    clock.now += 1
    return True


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "hole"])
def test_what_is_no_request_is_refused_and_does_not_hide_the_others(tmp_path, clock, kind):
    (tmp_path / "run" / "requests" / "r1").mkdir(parents=True)
    put = crafted.of_kinds(tmp_path / "outside")[kind]
    put(tmp_path / "run" / "requests" / "r1" / "request.json")
    channel = ControlChannel(Storage(str(tmp_path / "run")), clock=clock)
    write_request(tmp_path / "run", "r2", driver=channel.driver)
    with driver(channel, clock) as removed:
        assert wait_for(lambda: answer_to(tmp_path / "run", "r1"))["ok"] is False
        assert wait_for(lambda: answer_to(tmp_path / "run", "r2"))["ok"] is True
    assert removed == ["w1"]


def test_a_request_that_cannot_be_deleted_does_not_hold_up_the_answers_to_others(tmp_path, clock):
    with crafted.folders_in_each_other(tmp_path / "requests" / "r1", 100):
        (tmp_path / "requests" / "r1" / "request.json").write_text("no request")
        channel = ControlChannel(Storage(str(tmp_path)), clock=clock)
        with driver(channel, clock):
            wait_for(lambda: channel.num_failures)  # to answer r1, which is tried again and again
            write_request(tmp_path, "r2", driver=channel.driver)
            assert wait_for(lambda: answer_to(tmp_path, "r2"))["ok"] is True
        channel.close(replace(TRAINING, state="finished"))


def test_requests_to_an_earlier_driver_are_refused(tmp_path, clock):
    write_request(tmp_path, "r1", driver="process 1 on a, 00000000")
    Storage(str(tmp_path)).write_bytes("requests/r2/request.json", b"[]")
    (tmp_path / "answers" / "old").mkdir(parents=True)
    channel = ControlChannel(Storage(str(tmp_path)), clock=clock)
    with driver(channel, clock) as removed:
        for request_id in ("r1", "r2"):
            answer = wait_for(lambda name=request_id: answer_to(tmp_path, name))
            assert answer["ok"] is False
            assert "the run was restarted after this request" in answer["sentence"]
        wait_for(lambda: not list((tmp_path / "requests").iterdir()))
    assert removed == []
    assert not (tmp_path / "answers" / "old").exists()
    channel.close(replace(TRAINING, state="finished"))


def test_the_end_of_the_run_answers_all_open_requests(tmp_path, clock):
    channel = ControlChannel(Storage(str(tmp_path)), clock=clock)
    write_request(tmp_path, "r1", driver=channel.driver)
    wait_for(lambda: _pass(clock) and channel.pop_requests())  # received, not answered
    write_request(tmp_path, "r2", driver=channel.driver)  # not even received
    channel.close(replace(TRAINING, state="finished"))
    for request_id in ("r1", "r2"):
        no = {"ok": False, "sentence": "the run has ended (finished)"}
        assert answer_to(tmp_path, request_id) == no
    assert list((tmp_path / "requests").iterdir()) == []


# storage failures


def test_a_folder_that_fails_does_not_stop_training_and_is_logged_once(tmp_path, clock):
    storage = BrokenStorage(str(tmp_path))
    storage.is_broken = True
    channel = ControlChannel(storage, clock=clock)
    with driver(channel, clock):
        wait_for(lambda: channel.num_failures > 5)
        sentence = wait_for(channel.pop_problem)
        assert sentence == (
            f"the run's folder {tmp_path} failed: no route to host; training continues, "
            f"but raydl status and raydl remove do not work until it works again"
        )
        assert channel.pop_problem() is None
        storage.is_broken = False
        wait_for(lambda: status_in(tmp_path))
        assert request_removal(str(tmp_path), "w0", timeout_s=30) == "w0 leaves after this round"
    channel.close(replace(TRAINING, state="finished"))


def test_an_answer_that_could_not_be_written_is_written_later(tmp_path, clock):
    storage = BrokenStorage(str(tmp_path))
    channel = ControlChannel(storage, clock=clock)
    write_request(tmp_path, "r1", driver=channel.driver)
    (request,) = wait_for(lambda: _pass(clock) and channel.pop_requests())
    storage.is_broken = True
    channel.answer(request, "w1 leaves", ok=True)
    wait_for(lambda: channel.num_failures)
    storage.is_broken = False
    wait_for(lambda: _pass(clock) and channel.pop_requests() == [] and answer_to(tmp_path, "r1"))
    assert answer_to(tmp_path, "r1") == {"ok": True, "sentence": "w1 leaves"}
    channel.close(replace(TRAINING, state="finished"))


def test_a_folder_that_is_created_while_it_is_listed_is_no_failure(tmp_path):
    listed_enough = threading.Event()

    def make_and_remove():
        while not listed_enough.is_set():
            (tmp_path / "requests").mkdir()
            (tmp_path / "requests").rmdir()

    thread = threading.Thread(target=make_and_remove)
    thread.start()
    try:
        for _ in range(5000):  # PyArrow alone raises in one of thirty
            assert Storage(str(tmp_path)).list_dir("requests") == []
    finally:
        listed_enough.set()
        thread.join()


def test_an_answer_that_is_read_at_once_is_no_failure_and_not_written_again(
    tmp_path, clock, monkeypatch
):
    def flush_once_read(self, name, flush=LocalFiles.flush):
        if name == "answers/r1":
            shutil.rmtree(tmp_path / name)
        flush(self, name)

    monkeypatch.setattr(LocalFiles, "flush", flush_once_read)
    channel = ControlChannel(Storage(str(tmp_path)), clock=clock)
    write_request(tmp_path, "r1", driver=channel.driver)
    (request,) = wait_for(lambda: _pass(clock) and channel.pop_requests())
    channel.answer(request, "w1 leaves", ok=True)
    channel.close(replace(TRAINING, state="finished"))
    assert channel.num_failures == 0
    assert list((tmp_path / "answers").iterdir()) == []


def test_the_last_status_is_retried(tmp_path, clock):
    storage = BrokenStorage(str(tmp_path))
    storage.is_broken = True
    channel = ControlChannel(storage, clock=clock)
    threading.Timer(0.02, setattr, [storage, "is_broken", False]).start()
    channel.close(replace(TRAINING, state="finished"))
    assert read_status(str(tmp_path)).state == "finished"


def test_no_call_waits_for_a_folder_that_hangs(tmp_path, clock):
    storage = BrokenStorage(str(tmp_path))
    storage.gate = threading.Event()
    channel = ControlChannel(storage, clock=clock)
    start = time.monotonic()
    for _ in range(1000):
        clock.now += 1
        channel.report(TRAINING)
        assert channel.pop_requests() == []
    channel.close(replace(TRAINING, state="stopped"), timeout_s=0.02)
    assert time.monotonic() - start < 2
    assert not (tmp_path / "status.json").exists()
    storage.gate.set()  # the storage answers again: the thread ends by itself
    wait_for(lambda: (seen := status_in(tmp_path)) and seen.state == "stopped")


def test_a_request_to_a_folder_that_can_not_be_written_is_an_error(tmp_path, channel):
    channel.report(TRAINING)
    wait_for(lambda: status_in(tmp_path))
    (tmp_path / "requests").write_text("in the way")
    with pytest.raises(DataError, match="the request cannot be written: "):
        request_removal(str(tmp_path), "w1", timeout_s=1)
    (tmp_path / "requests").unlink()
