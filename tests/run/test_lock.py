"""One driver at a time writes to a run's folder."""

import errno
import itertools
import json
import os
import subprocess
import sys
import threading
import time

import pyarrow.fs as fs
import pytest
from locks import ObjectsWithoutLocks as Objects

from raydl import cli
from raydl.errors import ConfigError
from raydl.run import lock as hold
from raydl.storage import Storage

HOLDER = """
import sys
from raydl.run.lock import held
from raydl.storage import Storage
with held(Storage(sys.argv[1]), "run.run_dir"):
    print("held", flush=True)
    sys.stdin.read()
"""
TRAIN = [
    "train", "--data", "synthetic:64", "--model", "mlp", "--workers", "0",
    "--batch-size", "8", "--epochs", "1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    monkeypatch.setattr(hold, "BEAT_S", 0.05)
    monkeypatch.setattr(hold, "POLL_S", 0.02)


@pytest.fixture
def other_driver(tmp_path):
    """Another process that holds a folder until it ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate(timeout=10)


def acquire_and_release(storage):
    with hold.held(storage, "run.run_dir"):
        pass


@pytest.mark.parametrize("kind", [Storage, Objects])
def test_a_folder_is_held_by_one_driver_and_released(tmp_path, kind):
    with hold.held(kind(str(tmp_path)), "run.run_dir"), pytest.raises(ConfigError) as caught:
        acquire_and_release(kind(str(tmp_path)))
    sentence = str(caught.value)
    assert sentence.startswith(f"run.run_dir: {tmp_path} is in use by process ")
    assert " since 20" in sentence
    assert sentence.endswith("name another folder, or stop that run first: --resume continues it")
    acquire_and_release(kind(str(tmp_path)))


@pytest.mark.parametrize("kind", [Storage, Objects])
def test_an_error_of_the_run_releases_the_folder(tmp_path, kind):
    with pytest.raises(ZeroDivisionError), hold.held(kind(str(tmp_path)), "run.run_dir"):
        raise ZeroDivisionError
    acquire_and_release(kind(str(tmp_path)))


def test_the_folder_of_a_killed_driver_is_free_at_once(tmp_path, other_driver):
    with pytest.raises(ConfigError, match=f"in use by process {other_driver.pid} on "):
        acquire_and_release(Storage(str(tmp_path)))
    other_driver.kill()
    other_driver.wait(timeout=10)
    acquire_and_release(Storage(str(tmp_path)))


def test_a_lock_that_is_released_late_is_awaited_and_logged_once(tmp_path, other_driver):
    messages, waits = [], []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            other_driver.kill()
            other_driver.wait(timeout=10)

    storage = Storage(str(tmp_path))
    hold.wait_until_free(
        storage, wait_s=180.0, log=messages.append, clock=lambda: sum(waits), sleep=sleep
    )
    assert messages == [f"{tmp_path} is still in use; waiting up to 180 s for its driver to end"]
    assert len(waits) == 2
    acquire_and_release(storage)


def test_the_wait_for_a_lock_that_is_not_released_is_bounded(tmp_path, other_driver):
    waits = []
    hold.wait_until_free(
        Storage(str(tmp_path)),
        wait_s=10.0,
        log=lambda sentence: None,
        clock=lambda: sum(waits),
        sleep=waits.append,
    )
    assert 10 <= sum(waits) < 20


def test_waiting_for_a_folder_does_not_create_it(tmp_path):
    hold.wait_until_free(Storage(str(tmp_path / "none")), wait_s=10.0)
    hold.wait_until_free(Objects(str(tmp_path)), wait_s=10.0)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_and_leaves_no_descriptor_open(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    num_open = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(hold.os, "write", full)
        with pytest.raises(ConfigError, match=r"driver\.lock cannot be written: .*No space left"):
            acquire_and_release(Storage(str(tmp_path)))
    assert len(os.listdir("/proc/self/fd")) == num_open
    acquire_and_release(Storage(str(tmp_path)))


def test_a_probe_that_finds_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)  # the file is there by then
    with pytest.raises(ConfigError, match=r"cannot be written: no space left"):
        Storage(str(tmp_path)).probe("run.run_dir")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [Storage, Objects])
def test_of_many_drivers_that_start_together_only_one_holds_the_folder(tmp_path, kind):
    start, end = threading.Barrier(4), threading.Event()
    outcomes = []

    def try_to_hold():
        start.wait(timeout=10)
        try:
            with hold.held(kind(str(tmp_path)), "run.run_dir"):
                outcomes.append("held")
                end.wait(timeout=30)
        except ConfigError:
            outcomes.append("refused")

    threads = [threading.Thread(target=try_to_hold) for _ in range(4)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20
    while len(outcomes) < 4 and time.monotonic() < until:
        time.sleep(0.02)
    end.set()
    for thread in threads:
        thread.join(timeout=10)
    assert sorted(outcomes) == ["held", "refused", "refused", "refused"]


def test_a_lock_object_without_heartbeats_is_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(hold, "STALE_S", 1.0)
    dead = tmp_path / "drivers/0000-dead"
    dead.mkdir(parents=True)
    record = {"driver": "process 1 on gone", "since": "2026-01-01 00:00:00", "beat": 7}
    (dead / "driver.json").write_text(json.dumps(record))
    with hold.held(Objects(str(tmp_path)), "run.run_dir"):
        assert not dead.exists()
        assert len(list((tmp_path / "drivers").iterdir())) == 1
    assert list((tmp_path / "drivers").iterdir()) == []


def test_a_driver_that_was_halted_while_it_polled_considers_no_driver_lost(tmp_path, monkeypatch):
    hours = itertools.count(step=3600.0)  # one between any two readings of the clock
    storage = Objects(str(tmp_path))
    with hold.held(storage, "run.run_dir"), monkeypatch.context() as patch:
        patch.setattr(hold.time, "monotonic", lambda: next(hours))
        with pytest.raises(ConfigError, match="is in use by process"):
            acquire_and_release(storage)


def test_a_holder_without_a_record_still_holds(tmp_path, other_driver):
    (tmp_path / "driver.lock").write_text("")
    with pytest.raises(ConfigError, match="in use by another driver; name another"):
        acquire_and_release(Storage(str(tmp_path)))


@pytest.mark.parametrize("options", [[], ["--resume"]])
def test_a_second_run_in_the_folder_of_a_live_one_is_refused(tmp_path, capsys, options):
    folder = str(tmp_path / "run")
    assert cli.main([*TRAIN, "--run-dir", folder]) == 0
    capsys.readouterr()
    with hold.held(Storage(folder), "run.run_dir"):
        assert cli.main([*TRAIN, "--epochs", "2", "--run-dir", folder, *options]) == 2
    assert f"error: run.run_dir: {folder} is in use by process" in capsys.readouterr().err
    status = 0 if options else 2  # without --resume there is a run, whose driver has ended
    assert cli.main([*TRAIN, "--epochs", "2", "--run-dir", folder, *options]) == status


def test_resume_does_not_create_a_mistyped_folder(tmp_path, capsys):
    assert cli.main([*TRAIN, "--run-dir", str(tmp_path / "typo"), "--resume"]) == 2
    assert "no run is there" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


def test_a_storage_that_can_not_be_written_is_an_error_before_any_start(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    options = ["--run-dir", str(tmp_path / "r"), "--storage-path", str(tmp_path / "file")]
    assert cli.main([*TRAIN, *options]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"error: run.storage_path: {tmp_path}/file/r cannot be written: ")
    assert error.endswith(": not a directory"), "without an error number, and with its reason once"
    assert "\n" not in error


def test_the_query_of_a_uri_stays_at_its_end():
    from raydl.storage import below, parent_and_name

    place = below("s3://b/runs/?region=eu", "a")
    assert place == "s3://b/runs/a?region=eu"
    assert parent_and_name(place) == ("s3://b/runs?region=eu", "a")
    assert parent_and_name("runs/a/") == ("runs", "a")


@pytest.mark.parametrize(
    ("place", "parts"),
    [
        ("/data", ("/", "data")),
        ("data", ("", "data")),
        ("/a/data", ("/a", "data")),
        ("file:///data", ("file:///", "data")),
        ("file:///a/data", ("file:///a", "data")),
        ("s3://bucket", ("s3://", "bucket")),
        ("s3://bucket/a?region=eu", ("s3://bucket?region=eu", "a")),
    ],
)
def test_a_place_that_is_split_can_be_joined_again(place, parts):
    from raydl.storage import below, parent_and_name

    assert parent_and_name(place) == parts
    assert below(*parts) == place


def test_two_probes_at_once_do_not_disturb_each_other(tmp_path):
    class Slow(Storage):
        def write_bytes(self, name, data):
            super().write_bytes(name, data)
            if len(list(tmp_path.glob(".probe*"))) == 1:
                Storage(str(tmp_path)).probe("run.run_dir")

    Slow(str(tmp_path), filesystem=fs.LocalFileSystem()).probe("run.run_dir")
    assert list(tmp_path.iterdir()) == []
