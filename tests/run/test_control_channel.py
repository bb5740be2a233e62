"""A run's control channel: what is told, asked and answered through the run's folder."""

import json
import os
import shutil
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from clocks import halt_the_clock
from snapshots import with_progress

from raydl.core.progress import Progress
from raydl.errors import ConfigError, DataError, RaydlError
from raydl.run import control_channel as run_session
from raydl.run.control_channel import (
    ControlChannel,
    RunStatus,
    WorkerStatus,
    read_status,
    request_removal,
)
from raydl.storage import Storage

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
    monkeypatch.setattr(run_session, "POLL_S", 0.002)
    monkeypatch.setattr(run_session, "LOOK_AGAIN_S", 0.02)
    monkeypatch.setattr(run_session, "BEAT_S", 60.0)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class BrokenStorage(Storage):
    """A folder that is out of reach while ``is_broken``, and may be slow."""

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
    raise AssertionError("it did not come true within 30 s")


def told(folder):
    """Return the status that is there, or None."""
    try:
        return read_status(str(folder))
    except DataError:
        return None


def ask(folder, request_id, *, driver, worker_id="w1"):
    """Leave a request as request_removal does."""
    request = json.dumps({"driver": driver, "remove": worker_id}).encode()
    Storage(str(folder)).write_bytes(f"requests/{request_id}/request.json", request)


def answer_to(folder, request_id):
    path = folder / "answers" / request_id / "answer.json"
    return json.loads(path.read_text()) if path.exists() else None


def age(folder, seconds):
    """Make the status that is there older."""
    values = json.loads((folder / "status.json").read_text())
    values["told_at"] -= seconds
    Storage(str(folder)).write_bytes("status.json", json.dumps(values).encode())


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def session(tmp_path, clock):
    session = ControlChannel(Storage(str(tmp_path)), clock=clock)
    yield session
    session.close(replace(TRAINING, state="stopped"))


@contextmanager
def driver(session, clock, *, says="{} leaves after this round", ok=True):
    """A driver's loop in a thread: a second passes with every step."""
    is_over = threading.Event()
    removed = []

    def loop():
        while not is_over.wait(0.001):
            clock.now += 1
            session.tell(TRAINING)
            for request in session.pop_requests():
                removed.append(request.worker_id)
                session.answer(request, says.format(request.worker_id), ok=ok)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield removed
    finally:
        is_over.set()
        thread.join()


# telling


def test_what_is_told_is_read_as_it_was(tmp_path, session):
    session.tell(TRAINING)
    seen = wait_for(lambda: told(tmp_path))
    assert replace(seen, told_at=0.0, driver="") == TRAINING
    assert time.time() - seen.told_at < 5
    assert seen.driver == session.driver
    assert not seen.is_stale
    assert not seen.is_final


def test_a_run_is_read_by_its_uri_too(tmp_path, session):
    session.tell(TRAINING)
    wait_for(lambda: told(tmp_path))
    assert read_status(f"file://{tmp_path}/").workers == WORKERS


def test_the_status_is_written_once_a_second_and_asked_for_no_more_often(tmp_path, session, clock):
    asked = []

    def status():
        asked.append(clock.now)
        return with_progress(TRAINING, round=len(asked))

    for tenth in range(35):
        clock.now = tenth / 10
        session.tell(status)
    assert asked == [0.0, 1.0, 2.0, 3.0]
    wait_for(lambda: (seen := told(tmp_path)) and seen.progress.round == 4)


def test_news_that_must_be_told_at_once_are(tmp_path, session):
    session.tell(TRAINING)
    session.tell(with_progress(TRAINING, generation=4), at_once=True)
    wait_for(lambda: (seen := told(tmp_path)) and seen.progress.generation == 4)


def test_a_half_written_status_is_never_seen(tmp_path, session, clock):
    session.tell(TRAINING)
    wait_for(lambda: told(tmp_path))
    many = replace(TRAINING, events=("something happened",) * 2000)
    for _ in range(100):
        session.tell(many, at_once=True)
        assert read_status(str(tmp_path)).progress.num_samples == 1440  # or it would raise


def test_a_status_of_a_newer_raydl_is_read_as_far_as_it_is_known(tmp_path, session):
    session.tell(TRAINING)
    wait_for(lambda: told(tmp_path))
    values = json.loads((tmp_path / "status.json").read_text())
    values["mood"] = values["workers"][0]["mood"] = "good"
    (tmp_path / "status.json").write_text(json.dumps(values))
    assert read_status(str(tmp_path)).workers == WORKERS


def test_a_driver_that_is_long_at_something_still_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(run_session, "BEAT_S", 0.01)
    monkeypatch.setattr(run_session, "STALE_S", 0.2)
    session = ControlChannel(Storage(str(tmp_path)))
    session.tell(replace(TRAINING, state="starting"))
    first = wait_for(lambda: told(tmp_path))
    wait_for(lambda: "starting, no news for " in told(tmp_path).state)
    assert told(tmp_path).told_at > first.told_at
    assert told(tmp_path).workers == WORKERS
    monkeypatch.setattr(run_session, "STALE_S", 60.0)  # else "training" stands there for 0.2 s only
    session.tell(TRAINING, at_once=True)
    wait_for(lambda: told(tmp_path).state == "training")
    session.close(replace(TRAINING, state="finished"))
    time.sleep(0.05)
    assert told(tmp_path).state == "finished"


# reading


def test_no_run_is_told_in_one_sentence(tmp_path):
    with pytest.raises(DataError, match="no run is there; give the folder that raydl train") as e:
        read_status(str(tmp_path / "nothing"))
    assert str(e.value).startswith(f"{tmp_path}/nothing: ")


def test_a_run_that_has_told_nothing_yet_says_so(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="the run has told nothing yet; ask again a few seconds"):
        read_status(str(tmp_path))


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"workers": [{}], "events": []}'])
def test_a_damaged_status_is_told_and_not_guessed(tmp_path, damage):
    (tmp_path / "status.json").write_text(damage)
    with pytest.raises(DataError, match="its status can not be read"):
        read_status(str(tmp_path))


def test_a_killed_driver_leaves_a_status_that_is_stale(tmp_path, session, monkeypatch):
    halt_the_clock(monkeypatch)
    session.tell(TRAINING)
    wait_for(lambda: told(tmp_path))
    age(tmp_path, 37)
    seen = read_status(str(tmp_path))
    assert seen.is_stale
    sentence = seen.stale_sentence()
    assert "has told nothing for 37 s: it may be gone; the same command with --resume" in sentence
    assert session.driver.split(",")[0] in sentence  # which process, and where


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_machine_whose_clock_is_wrong_does_not_take_a_live_driver_for_gone(
    tmp_path, session, seconds, monkeypatch
):
    monkeypatch.setattr(run_session, "LOOK_AGAIN_S", 30.0)
    session.tell(TRAINING)
    wait_for(lambda: told(tmp_path))
    age(tmp_path, seconds)
    threading.Timer(0.02, session.tell, [TRAINING], {"at_once": True}).start()
    assert not read_status(str(tmp_path)).is_stale


def test_a_clock_that_is_behind_does_not_make_a_dead_driver_live(tmp_path, session):
    session.tell(TRAINING)
    wait_for(lambda: told(tmp_path))
    age(tmp_path, -3600)
    assert read_status(str(tmp_path)).is_stale


def test_a_finished_run_never_becomes_stale(tmp_path, clock):
    session = ControlChannel(Storage(str(tmp_path)), clock=clock)
    session.tell(TRAINING)
    session.close(replace(TRAINING, state="finished"))
    session.close(replace(TRAINING, state="failed: of something later"))
    age(tmp_path, 1e6)
    seen = read_status(str(tmp_path))
    assert (seen.state, seen.is_final, seen.is_stale) == ("finished", True, False)


def test_a_resumed_run_takes_the_place_of_the_one_that_was_killed(tmp_path, session):
    session.tell(TRAINING)
    wait_for(lambda: told(tmp_path))
    age(tmp_path, 37)
    second = ControlChannel(Storage(str(tmp_path)))
    second.tell(replace(TRAINING, state="waiting for workers"))
    wait_for(lambda: told(tmp_path).state == "waiting for workers")
    assert told(tmp_path).driver == second.driver != session.driver
    second.close(replace(TRAINING, state="finished"))


# asking


def test_a_removal_is_asked_answered_and_leaves_no_file_behind(tmp_path, session, clock):
    with driver(session, clock) as removed:
        wait_for(lambda: told(tmp_path))
        sentence = request_removal(str(tmp_path), "w1", timeout_s=30)
    assert sentence == "w1 leaves after this round"
    assert removed == ["w1"]
    assert list((tmp_path / "requests").iterdir()) == []
    assert list((tmp_path / "answers").iterdir()) == []
    assert session.num_failures == 0


def test_what_the_driver_refuses_is_an_error_in_its_words(tmp_path, session, clock):
    with driver(session, clock, says="{} is the last worker", ok=False):
        wait_for(lambda: told(tmp_path))
        with pytest.raises(RaydlError, match=r"^w1 is the last worker$"):
            request_removal(str(tmp_path), "w1", timeout_s=30)


def test_many_who_ask_at_once_each_get_their_own_answer(tmp_path, session, clock):
    answers = {}

    def person(worker_id):
        answers[worker_id] = request_removal(str(tmp_path), worker_id, timeout_s=30)

    with driver(session, clock) as removed:
        wait_for(lambda: told(tmp_path))
        people = [threading.Thread(target=person, args=(w,)) for w in ("w0", "w1")]
        for thread in people:
            thread.start()
        for thread in people:
            thread.join()
    assert answers == {w: f"{w} leaves after this round" for w in ("w0", "w1")}
    assert sorted(removed) == ["w0", "w1"]
    assert session.num_failures == 0


def test_a_request_that_is_taken_at_once_is_no_failure(tmp_path, session, clock, monkeypatch):
    def flush_once_taken(self, path, flush=Storage._flush_to_disk):
        if "/requests/" in path and not path.endswith(".tmp"):
            wait_for(lambda: not os.path.exists(path))  # the driver has answered
        flush(self, path)

    monkeypatch.setattr(Storage, "_flush_to_disk", flush_once_taken)
    with driver(session, clock):
        wait_for(lambda: told(tmp_path))
        assert request_removal(str(tmp_path), "w1", timeout_s=30) == "w1 leaves after this round"


def test_an_unknown_worker_is_not_asked_for_and_the_workers_are_listed(tmp_path, session):
    session.tell(TRAINING)
    wait_for(lambda: told(tmp_path))
    with pytest.raises(ConfigError) as caught:
        request_removal(str(tmp_path), "w7")
    assert str(caught.value) == f"{tmp_path} has no worker 'w7'; it has w0, w1"
    assert not (tmp_path / "requests").exists()


def test_a_long_list_of_workers_is_cut(tmp_path, session):
    many = tuple(replace(WORKERS[0], worker_id=f"w{i}") for i in range(20))
    session.tell(replace(TRAINING, workers=many))
    wait_for(lambda: told(tmp_path))
    with pytest.raises(ConfigError, match=r"it has w0, .*w7 and 12 more: see raydl status"):
        request_removal(str(tmp_path), "w77")


def test_a_driver_that_does_not_answer_is_told_and_the_request_withdrawn(tmp_path, session):
    session.tell(TRAINING)
    wait_for(lambda: told(tmp_path))
    with pytest.raises(
        RaydlError, match=r"did not answer within 0\.02 s: it may be busy; see raydl"
    ):
        request_removal(str(tmp_path), "w1", timeout_s=0.02)
    assert list((tmp_path / "requests").iterdir()) == []


def test_a_silent_driver_is_not_asked(tmp_path, session, monkeypatch):
    halt_the_clock(monkeypatch)
    session.tell(TRAINING)
    wait_for(lambda: told(tmp_path))
    age(tmp_path, 37)
    with pytest.raises(RaydlError, match="has told nothing for 37 s: it may be gone"):
        request_removal(str(tmp_path), "w1")


def test_a_run_that_ended_is_not_asked(tmp_path):
    session = ControlChannel(Storage(str(tmp_path)))
    session.close(replace(TRAINING, state="failed: w1 was lost"))
    with pytest.raises(RaydlError, match=r"has ended \(failed: w1 was lost\)"):
        request_removal(str(tmp_path), "w1")


def test_a_request_still_being_written_is_taken_once_it_is_whole(tmp_path, session, clock):
    (tmp_path / "requests" / "r1").mkdir(parents=True)
    with driver(session, clock) as removed:
        assert wait_for(lambda: clock.now > 5)
        assert removed == []
        ask(tmp_path, "r1", driver=session.driver)
        wait_for(lambda: removed == ["w1"])


def test_a_request_is_looked_for_once_a_second_and_taken_once(tmp_path, session, clock):
    ask(tmp_path, "r1", driver=session.driver)
    wait_for(lambda: _pass(clock) and [r.id for r in session.pop_requests()] == ["r1"])
    for _ in range(20):
        clock.now += 1
        assert session.pop_requests() == []
        time.sleep(0.001)


def _pass(clock):
    clock.now += 1
    return True


def test_requests_to_an_earlier_driver_are_turned_down(tmp_path, clock):
    ask(tmp_path, "r1", driver="process 1 on a, 00000000")
    Storage(str(tmp_path)).write_bytes("requests/r2/request.json", b"[]")
    (tmp_path / "answers" / "old").mkdir(parents=True)
    session = ControlChannel(Storage(str(tmp_path)), clock=clock)
    with driver(session, clock) as removed:
        for request_id in ("r1", "r2"):
            answer = wait_for(lambda name=request_id: answer_to(tmp_path, name))
            assert answer["ok"] is False
            assert "the run was started anew since this was asked" in answer["sentence"]
        wait_for(lambda: not list((tmp_path / "requests").iterdir()))
    assert removed == []
    assert not (tmp_path / "answers" / "old").exists()
    session.close(replace(TRAINING, state="finished"))


def test_the_end_of_the_run_answers_who_still_waits(tmp_path, clock):
    session = ControlChannel(Storage(str(tmp_path)), clock=clock)
    ask(tmp_path, "r1", driver=session.driver)
    wait_for(lambda: _pass(clock) and session.pop_requests())  # taken, not answered
    ask(tmp_path, "r2", driver=session.driver)  # not even taken
    session.close(replace(TRAINING, state="finished"))
    for request_id in ("r1", "r2"):
        no = {"ok": False, "sentence": "the run has ended (finished)"}
        assert answer_to(tmp_path, request_id) == no
    assert list((tmp_path / "requests").iterdir()) == []


# a folder that fails


def test_a_folder_that_fails_does_not_reach_training_and_is_told_once(tmp_path, clock):
    storage = BrokenStorage(str(tmp_path))
    storage.is_broken = True
    session = ControlChannel(storage, clock=clock)
    with driver(session, clock):
        wait_for(lambda: session.num_failures > 5)
        sentence = wait_for(session.take_trouble)
        assert sentence == (
            f"the run's folder {tmp_path} failed: no route to host; training goes on, "
            f"but raydl status and raydl remove do not work until it is back"
        )
        assert session.take_trouble() is None
        storage.is_broken = False
        wait_for(lambda: told(tmp_path))
        assert request_removal(str(tmp_path), "w0", timeout_s=30) == "w0 leaves after this round"
    session.close(replace(TRAINING, state="finished"))


def test_an_answer_that_could_not_be_written_is_written_later(tmp_path, clock):
    storage = BrokenStorage(str(tmp_path))
    session = ControlChannel(storage, clock=clock)
    ask(tmp_path, "r1", driver=session.driver)
    (request,) = wait_for(lambda: _pass(clock) and session.pop_requests())
    storage.is_broken = True
    session.answer(request, "w1 leaves", ok=True)
    wait_for(lambda: session.num_failures)
    storage.is_broken = False
    wait_for(lambda: _pass(clock) and session.pop_requests() == [] and answer_to(tmp_path, "r1"))
    assert answer_to(tmp_path, "r1") == {"ok": True, "sentence": "w1 leaves"}
    session.close(replace(TRAINING, state="finished"))


def test_a_folder_that_is_made_while_it_is_listed_is_no_failure(tmp_path):
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


class ReadAtOnce(Storage):
    """A folder where an answer is read, and its folder deleted, as soon as it lies there."""

    def _flush_to_disk(self, path):
        if path.endswith("answers/r1"):
            shutil.rmtree(path)
        super()._flush_to_disk(path)


def test_an_answer_that_is_read_at_once_is_no_failure_and_not_written_again(tmp_path, clock):
    session = ControlChannel(ReadAtOnce(str(tmp_path)), clock=clock)
    ask(tmp_path, "r1", driver=session.driver)
    (request,) = wait_for(lambda: _pass(clock) and session.pop_requests())
    session.answer(request, "w1 leaves", ok=True)
    session.close(replace(TRAINING, state="finished"))
    assert session.num_failures == 0
    assert list((tmp_path / "answers").iterdir()) == []


def test_the_last_status_is_tried_again(tmp_path, clock):
    storage = BrokenStorage(str(tmp_path))
    storage.is_broken = True
    session = ControlChannel(storage, clock=clock)
    threading.Timer(0.02, setattr, [storage, "is_broken", False]).start()
    session.close(replace(TRAINING, state="finished"))
    assert read_status(str(tmp_path)).state == "finished"


def test_no_call_waits_for_a_folder_that_hangs(tmp_path, clock):
    storage = BrokenStorage(str(tmp_path))
    storage.gate = threading.Event()
    session = ControlChannel(storage, clock=clock)
    start = time.monotonic()
    for _ in range(1000):
        clock.now += 1
        session.tell(TRAINING)
        assert session.pop_requests() == []
    session.close(replace(TRAINING, state="stopped"), timeout_s=0.02)
    assert time.monotonic() - start < 2
    assert not (tmp_path / "status.json").exists()
    storage.gate.set()  # it is back: the thread ends by itself
    wait_for(lambda: (seen := told(tmp_path)) and seen.state == "stopped")


def test_a_folder_that_can_not_be_written_is_told_to_who_asks(tmp_path, session):
    session.tell(TRAINING)
    wait_for(lambda: told(tmp_path))
    (tmp_path / "requests").write_text("in the way")
    with pytest.raises(DataError, match="its driver can not be asked: "):
        request_removal(str(tmp_path), "w1", timeout_s=1)
    (tmp_path / "requests").unlink()
