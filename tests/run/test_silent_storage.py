"""A storage that hangs is logged and awaited for a limited time; the trained weights are kept."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from controller_harness import ControllerHarness, collected, report, scored
from pyarrow import fs
from recorders import MemoryWriter as Writer
from recorders import collected_round, flat_model
from s3_server import s3_client
from safetensors.torch import load_file

import raydl
from raydl import storage as silence
from raydl.checkpoint import writer as checkpoint_writer
from raydl.checkpoint.best import BestCenter
from raydl.checkpoint.store import CheckpointStore
from raydl.checkpoint.totals import Totals
from raydl.checkpoint.writer import CheckpointWriter
from raydl.core.worker_group import GaveUp, Published
from raydl.elastic.run_state import State
from raydl.errors import WORTH_RETRYING, StorageSilentError
from raydl.metrics import BackgroundWriter, background_writer
from raydl.storage import SilenceMonitor, Storage, is_answer, within

BOUND_S = 20


class FreezingFileSystem:
    """A file system that does not answer while it is frozen, as if its server were lost."""

    type_name = "freezing"

    def __init__(self):
        self.thawed = threading.Event()
        self.thawed.set()

    def __getattr__(self, name):
        def call(*arguments, **options):
            assert self.thawed.wait(60)
            return getattr(fs.LocalFileSystem(), name)(*arguments, **options)

        return call


@pytest.fixture
def freezing():
    """A file system that a test freezes; at the end it is thawed, so that the threads end."""
    filesystem = FreezingFileSystem()
    yield filesystem
    filesystem.thawed.set()


@pytest.fixture
def short_timeouts(monkeypatch):
    """Shorten the time-outs: log a silence after 0.3 s, give up after 1 s."""
    monkeypatch.setattr(silence, "_given_up", [])
    for module, name, seconds in (
        (silence, "LOG_AFTER_S", 0.3), (silence, "_GRACE_S", 0.1), (silence, "_RELEASE_S", 0.5),
        (checkpoint_writer, "GIVE_UP_S", 1.0),
        (background_writer, "LOG_AFTER_S", 0.3), (background_writer, "GIVE_UP_S", 1.0),
        (background_writer, "_FLUSH_S", 0.5),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)


def until(holds):
    deadline = time.monotonic() + BOUND_S
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


# logged silences


def test_a_storage_that_does_not_answer_is_logged_once_and_so_is_its_answer(
    tmp_path, freezing, short_timeouts
):
    storage = Storage(str(tmp_path), filesystem=freezing)
    monitor = SilenceMonitor(storage, "training continues")
    storage.write_bytes("a", b"1")
    assert monitor.pop_message() is None
    freezing.thawed.clear()
    thread = threading.Thread(target=storage.write_bytes, args=("b", b"2"), daemon=True)
    thread.start()
    assert re.fullmatch(
        rf"the storage {tmp_path} has not answered for \d s \(to write b\); training continues",
        until(monitor.pop_message),
    )
    assert monitor.pop_message() is None
    freezing.thawed.set()
    assert re.fullmatch(
        rf"the storage {tmp_path} answers again, after \d s", until(monitor.pop_message)
    )
    thread.join(BOUND_S)
    assert (storage.unanswered()[0], monitor.pop_message()) == (0.0, None)


UNREACHED = OSError("AWS Error NETWORK_CONNECTION during PutObject operation: curlCode: 28")


class UnwritableStorage(Storage):
    """A storage whose writes raise ``error``."""

    error = UNREACHED

    def _write_new(self, name, pieces):
        raise self.error


def test_a_server_that_can_not_be_reached_is_as_silent_as_one_that_hangs(tmp_path):
    storage = UnwritableStorage(str(tmp_path))
    for _ in range(2):
        with pytest.raises(OSError, match="NETWORK"):
            storage.write_bytes("a", b"")
        time.sleep(0.05)
    assert storage.dead_s() >= 0.1
    assert storage.unanswered()[1] == "to write a"
    storage.error = OSError(28, "No space left on device")  # an answer of the storage
    with pytest.raises(OSError, match="No space"):
        storage.write_bytes("a", b"")
    assert storage.dead_s() == 0.0


@pytest.mark.parametrize(
    ("error", "is_an_answer"),
    [
        (FileNotFoundError("gone"), True),
        (PermissionError(13, "permission denied"), True),
        (TimeoutError(110, "Connection timed out"), False),
        (OSError(112, "Host is down"), False),
        (UNREACHED, False),
    ],
)
def test_only_an_error_of_the_network_is_no_answer_of_the_storage(error, is_an_answer):
    assert is_answer(error) is is_an_answer


# time-outs


def test_a_call_goes_on_as_long_as_the_storage_answers(tmp_path, freezing, short_timeouts):
    storage, logged = Storage(str(tmp_path), filesystem=freezing), []
    assert within(storage, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(storage, lambda: {}["a"])
    freezing.thawed.clear()
    problem = r"has not answered for \d s \(to look for x\); check its server"
    with pytest.raises(StorageSilentError, match=problem):
        within(storage, lambda: storage.exists("x"), log=logged.append, limit_s=3.0)
    [line] = logged
    assert re.fullmatch(
        rf"the storage {tmp_path} has not answered for \d s \(to look for x\); giving up after 3 s",
        line,
    )
    assert silence.is_anything_given_up()
    began = time.monotonic()
    with pytest.raises(StorageSilentError):  # the storage was given up: no second wait
        within(storage, lambda: storage.exists("y"), log=logged.append, limit_s=3.0)
    assert time.monotonic() - began < 2.5
    assert len(logged) == 1


def test_a_long_call_that_makes_progress_is_not_given_up(tmp_path, short_timeouts):
    storage = Storage(str(tmp_path))

    def slow():
        for _ in range(15):
            time.sleep(0.1)
            yield b"piece"

    assert within(storage, lambda: storage.write_pieces("a", slow()), limit_s=1.2).num_bytes == 75


def writer_on(storage, flat, **more):
    store = CheckpointStore(storage)
    best = BestCenter(storage, flat)
    return CheckpointWriter(
        store, flat, best, after=lambda: None, unanswered=storage.unanswered, **more
    )


@pytest.mark.parametrize("is_last", [True, False])
def test_the_wait_for_a_dead_storage_is_bounded_and_the_center_is_saved_elsewhere(
    tmp_path, freezing, short_timeouts, is_last
):
    flat, fallback_dir = flat_model(), tmp_path / "fallback_dir"
    fallback_dir.mkdir()
    writer = writer_on(
        Storage(str(tmp_path / "run"), filesystem=freezing), flat, fallback_dir=fallback_dir
    )
    freezing.thawed.clear()
    checkpoint = dataclasses.replace(collected_round(7), is_last=is_last)
    writer.checkpoint(checkpoint, seconds=1.0, totals=Totals())
    began = time.monotonic()
    with pytest.raises(StorageSilentError) as error:
        writer.close()
    assert time.monotonic() - began < 5
    assert re.search(r" has not answered for \d s \(to ", str(error.value))
    assert str(error.value).endswith(f"the newest center is in {fallback_dir}/center.safetensors")
    center = load_file(fallback_dir / "center.safetensors")
    assert center.keys() == flat.model.state_dict().keys()


def test_without_a_fallback_folder_the_center_goes_to_a_temporary_folder(
    tmp_path, freezing, short_timeouts
):
    writer = writer_on(Storage(str(tmp_path / "run"), filesystem=freezing), flat_model())
    freezing.thawed.clear()
    writer.checkpoint(collected_round(7), seconds=1.0, totals=Totals())
    with pytest.raises(StorageSilentError) as error:
        writer.close()
    place = Path(str(error.value).rpartition(" is in ")[2])
    assert load_file(place)
    place.unlink()
    place.parent.rmdir()


def test_a_storage_that_accepts_the_last_files_leaves_the_fallback_folder_empty(
    tmp_path, short_timeouts
):
    fallback_dir = tmp_path / "fallback_dir"
    fallback_dir.mkdir()
    writer = writer_on(Storage(str(tmp_path / "run")), flat_model(), fallback_dir=fallback_dir)
    checkpoint = dataclasses.replace(collected_round(7), is_last=True)
    writer.checkpoint(checkpoint, seconds=1.0, totals=Totals())
    writer.close()
    assert list(fallback_dir.iterdir()) == []


def test_the_end_of_a_run_does_not_wait_for_files_that_are_given_up():
    harness = ControllerHarness().start()
    harness.step(*harness.end("finished", 9, "w0", "w1"), Published((0, 9)))
    harness.recorder.is_writing = True
    harness.step(report("w0", 9), report("w1", 9), collected(9, "w0", "w1"), scored(9))
    assert harness.state is State.FINISHING
    harness.recorder.is_given_up = True
    harness.step()
    assert harness.state is State.DONE


# measurements


def background_writer_of(writer, messages):
    return BackgroundWriter(lambda log: writer, "the curves in x", messages.append)


class Gated(Writer):
    """A writer that waits at a gate before it writes scalars."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def scalars(self, values, *, num_samples, unix_s=None):
        self.gate.wait(60)
        super().scalars(values, num_samples=num_samples, unix_s=unix_s)


@pytest.fixture
def gated():
    writer = Gated()
    yield writer
    writer.gate.set()


def test_measurements_are_written_in_order_with_their_times(gated):
    curves = background_writer_of(gated, [])
    for number in range(50):
        curves.scalars({"train/loss": float(number)}, num_samples=number)
    curves.close()
    assert [point[0] for point in gated.points] == list(range(50))


def test_a_text_has_the_time_of_its_call_although_it_is_written_later(gated):
    curves, times = background_writer_of(gated, []), []
    gated.text = lambda name, markdown, *, num_samples, unix_s: times.append(unix_s)
    gated.gate.clear()
    curves.scalars({"train/loss": 1.0}, num_samples=0)  # the disk is slow
    before = time.time()
    curves.text("membership", "x", num_samples=0)
    after = time.time()
    time.sleep(0.05)
    gated.gate.set()
    curves.close()
    assert before <= times[0] <= after


def test_a_disk_that_hangs_stops_no_caller_and_is_logged_with_the_lost_points(
    gated, short_timeouts, monkeypatch
):
    monkeypatch.setattr(background_writer, "MAX_WAITING", 10)
    messages = []
    curves = background_writer_of(gated, messages)
    gated.gate.clear()
    began = time.monotonic()
    for number in range(30):
        curves.scalars({"train/loss": 1.0}, num_samples=number)
    assert time.monotonic() - began < BOUND_S / 2, "no caller waits for the disk"

    def write_another():
        curves.text("events", "x", num_samples=99)
        return messages

    until(write_another)
    assert re.match(r"the curves in x have not been written for \d s: their disk", messages[0])
    gated.gate.set()
    until(lambda: write_another()[1:])
    assert re.search(r"are written again, after \d s; [1-9]\d+ points were dropped", messages[1])
    curves.close()
    assert len(gated.points) <= 12


def test_the_number_of_waiting_pictures_is_bounded(gated):
    curves = background_writer_of(gated, [])
    gated.gate.clear()
    curves.scalars({"train/loss": 1.0}, num_samples=0)
    for number in range(100):
        curves.image("time/stacked", None, num_samples=number)
    gated.gate.set()
    curves.close()
    assert len(gated.images) <= background_writer.MAX_IMAGES + 1


def test_the_end_of_the_curves_is_bounded_and_lost_points_are_logged(gated, short_timeouts):
    messages = []
    curves = background_writer_of(gated, messages)
    gated.gate.clear()
    for number in range(5):
        curves.scalars({"train/loss": 1.0}, num_samples=number)
    began = time.monotonic()
    curves.flush()
    curves.close()
    assert time.monotonic() - began < 5
    assert messages[-1].startswith("the curves in x could not be written to their end")
    assert messages[-1].endswith("points are lost")
    assert silence.is_anything_given_up()


def test_a_tracker_that_is_only_slow_delays_the_end_no_longer(gated, short_timeouts, monkeypatch):
    monkeypatch.setattr(gated.gate, "wait", lambda timeout: time.sleep(0.1))
    messages = []
    curves = background_writer_of(gated, messages)
    for number in range(100):
        curves.scalars({"train/loss": 1.0}, num_samples=number)
    began = time.monotonic()
    curves.close()
    assert time.monotonic() - began < 5
    assert re.search(r"did not take them within 1 s; \d+ points are lost", messages[-1])
    assert len(gated.points) >= 5


def test_an_error_of_the_writer_is_raised_when_it_is_closed(gated):
    class Wrong(Writer):
        def text(self, name, markdown, *, num_samples, unix_s=None):
            raise LookupError("no such text")

    curves = background_writer_of(Wrong(), [])
    curves.text("a", "b", num_samples=1)
    with pytest.raises(LookupError):
        curves.close()


# the evaluator


def test_each_of_many_scores_that_are_given_up_in_a_row_is_logged_with_its_number():
    harness = ControllerHarness().start()
    for _ in range(12):
        harness.step(GaveUp("evaluation", "its process was killed, or crashed"))
    lines = [line for line in harness.log_lines if "evaluation was abandoned" in line]
    assert len(lines) == 12
    assert lines[0] == "an evaluation was abandoned: its process was killed, or crashed"
    assert lines[-1].startswith("an evaluation was abandoned, 12 in a row: its process was")
    for _ in range(100):
        harness.step(GaveUp("evaluation", "its process was killed, or crashed"))
    assert len([line for line in harness.log_lines if "evaluation was abandoned" in line]) < 35


# whole runs


def test_a_run_whose_storage_dies_trains_to_its_end_and_leaves_its_center(
    tmp_path, monkeypatch, short_timeouts
):
    thawed, write = threading.Event(), Storage._write_new
    thawed.set()

    def freeze(storage, name, pieces):
        if "/kept/" in storage.root:
            thawed.wait(60)
        return write(storage, name, pieces)

    monkeypatch.setattr(Storage, "_write_new", freeze)
    monkeypatch.setattr(within, "__kwdefaults__", {**within.__kwdefaults__, "limit_s": 1.0})

    class Freezes(raydl.Callback):
        def __init__(self):
            self.num_scores = 0

        def evaluated(self, evaluated):
            self.num_scores += 1
            if self.num_scores == 2:
                thawed.clear()

        def ended(self, figures):
            raise AssertionError("the result could not be written")

    began, freezes = time.monotonic(), Freezes()
    run = raydl.RunConfig(run_dir=str(tmp_path / "run"), storage_path=str(tmp_path / "kept"))
    trainer = raydl.Trainer(
        "mlp", "digits", training=raydl.TrainingConfig(epochs=4),
        scaling=raydl.ScalingConfig(num_workers=0), run=run, callbacks=[freezes],
        checkpoint=raydl.CheckpointConfig(every_epochs=1),
    )  # fmt: skip
    try:
        with pytest.raises(StorageSilentError) as error:
            trainer.fit()
    finally:
        thawed.set()
    assert freezes.num_scores >= 4, "the training went on to its end"
    assert f"the newest center is in {tmp_path}/run/center.safetensors" in str(error.value)
    assert load_file(tmp_path / "run/center.safetensors")
    assert time.monotonic() - began < 60


def test_a_run_does_not_begin_on_a_storage_that_does_not_answer(
    tmp_path, monkeypatch, short_timeouts
):
    thawed = threading.Event()
    monkeypatch.setattr(Storage, "_write_new", lambda *arguments: thawed.wait(60))
    monkeypatch.setattr(within, "__kwdefaults__", {**within.__kwdefaults__, "limit_s": 1.0})
    run = raydl.RunConfig(run_dir=str(tmp_path / "run"))
    scaling = raydl.ScalingConfig(num_workers=2)
    began = time.monotonic()
    try:
        with pytest.raises(StorageSilentError, match="check its server, its mount and the net"):
            raydl.Trainer("mlp", "digits", scaling=scaling, run=run).fit()
    finally:
        thawed.set()
    assert time.monotonic() - began < BOUND_S


_SERVER = """
import time
from s3_server import s3_server
with s3_server() as url:
    print(url, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def stoppable_server():
    """A server that speaks S3's protocol, in a process that can be stopped: (process, URL)."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    url = process.stdout.readline().strip()
    with s3_client(url) as client:
        client.create_bucket(Bucket="kept")
    yield process, url
    process.kill()
    process.wait(10)
    process.stdout.close()


@pytest.mark.slow
def test_a_driver_whose_s3_stops_logs_it_and_ends_within_a_minute_of_its_training(
    stoppable_server, tmp_path
):
    process, url = stoppable_server
    environment = {
        **os.environ, "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "OMP_NUM_THREADS": "1",
        "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REGION": "us-east-1",
    }  # fmt: skip
    command = [
        sys.executable, "-u", "-m", "raydl", "train", "--model", "mlp", "--workers", "0",
        "--seconds", "40", "--checkpoint.every-s", "2", "--evaluation.every-epochs", "100",
        "--run-dir", str(tmp_path / "run"), "--storage-path", "s3://kept/runs",
        "--run.progress", "plain",
    ]  # fmt: skip
    log = tmp_path / "log.txt"
    with log.open("w") as out:
        driver = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 90
        with s3_client(url) as client:
            while not any(
                found["Key"].endswith("manifest.json")
                for found in client.list_objects_v2(Bucket="kept").get("Contents", [])
            ):
                assert time.monotonic() < deadline, log.read_text()
                assert driver.poll() is None, log.read_text()
                time.sleep(0.2)
        process.send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        while "has not answered for" not in log.read_text():
            assert time.monotonic() - stopped_at < 14, log.read_text()
            time.sleep(0.1)
        assert driver.wait(160) == WORTH_RETRYING
        ended_after_s = time.monotonic() - stopped_at
    finally:
        driver.kill()
        driver.wait(10)
        process.send_signal(signal.SIGCONT)
    output = log.read_text()
    assert f"the newest center is in {tmp_path}/run/center.safetensors" in output
    assert load_file(tmp_path / "run/center.safetensors")
    assert ended_after_s < 40 + 60, output
