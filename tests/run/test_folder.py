"""A run's folder and its copies in the storage of the run."""

import subprocess
import tracemalloc

import pytest

from raydl import cli
from raydl.config import RunConfig, TrainConfig
from raydl.errors import ConfigError
from raydl.run.folder import RunFolder, _commit
from raydl.storage import Storage


def make_run_folder(tmp_path, name="run"):
    """Return the folder of a run with a storage path, with a local folder of its own."""
    run = RunConfig(run_dir=str(tmp_path / name / "run"), storage_path=str(tmp_path / "kept"))
    folder = RunFolder(TrainConfig(run=run))
    folder.path.mkdir(parents=True)
    return folder


def test_a_new_run_does_not_continue_the_curves_of_another_one_on_this_machine(tmp_path):
    folder = make_run_folder(tmp_path)
    (folder.path / "metrics.jsonl").write_text("of another storage path\n")
    sentence = "run on this machine holds the curves of another run"
    with pytest.raises(ConfigError, match=sentence), folder.held(resume=False):
        pass
    assert not folder.storage.exists("config.json")


@pytest.mark.parametrize("place", ["raydl/run", ".venv/lib/raydl/run"])
def test_the_recorded_commit_is_that_of_raydls_own_checkout(tmp_path, monkeypatch, place):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *command], check=True, capture_output=True, timeout=60)
    (tmp_path / place).mkdir(parents=True)
    monkeypatch.setattr("raydl.run.folder.__file__", str(tmp_path / place / "folder.py"))
    head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True, timeout=60).strip()
    assert _commit() == (head if place == "raydl/run" else None)


def test_event_files_that_have_not_grown_are_not_copied_again(tmp_path, monkeypatch):
    folder = make_run_folder(tmp_path)
    old, new = (folder.path / f"events.out.tfevents.{n}" for n in (1, 2))
    old.write_bytes(b"an earlier start")
    new.write_bytes(b"this one")
    folder.publish_events()
    copied = []
    copy = folder.storage.copy_in
    monkeypatch.setattr(
        folder.storage, "copy_in", lambda local, name: (copied.append(name), copy(local, name))
    )
    new.write_bytes(b"this one, grown")
    folder.publish_events()
    assert copied == [new.name]
    assert folder.storage.read_bytes(new.name) == b"this one, grown"
    assert folder.storage.read_bytes(old.name) == b"an earlier start"


def test_a_large_event_file_is_copied_both_ways_without_being_held_in_memory(tmp_path):
    here, there = make_run_folder(tmp_path, "here"), make_run_folder(tmp_path, "there")
    event_file = here.path / "events.out.tfevents.1"
    with here.held(resume=False):
        here.write_config(TrainConfig())
    with open(event_file, "wb") as stream:
        for number in range(64):
            stream.write(bytes([number]) * (1 << 20))
    tracemalloc.start()
    here.publish_events()
    there.load_earlier(TrainConfig())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 16 << 20
    assert (there.path / event_file.name).read_bytes() == event_file.read_bytes()
    assert here.storage.read_bytes(event_file.name) == event_file.read_bytes()
    assert [path.name for path in there.path.iterdir()] == [event_file.name]


def test_a_run_resumed_elsewhere_fetches_all_event_files_and_copies_none_back(
    tmp_path, monkeypatch
):
    here, there = make_run_folder(tmp_path, "here"), make_run_folder(tmp_path, "there")
    with here.held(resume=False):
        here.write_config(TrainConfig())
    for number in (1, 2):
        (here.path / f"events.out.tfevents.{number}").write_bytes(b"a start")
    here.publish_events()
    (there.path / "events.out.tfevents.1").write_bytes(
        b"a start"
    )  # as far as it was fetched before
    there.load_earlier(TrainConfig())
    assert sorted(path.name for path in there.path.iterdir()) == [
        "events.out.tfevents.1",
        "events.out.tfevents.2",
    ]
    sent = []
    monkeypatch.setattr(there.storage, "copy_in", lambda local, name: sent.append(name))
    there.publish_events()
    assert "events.out.tfevents.2" not in sent


def test_the_longer_file_of_a_tracker_is_the_newer_one_by_its_size_alone(tmp_path, monkeypatch):
    here, there = make_run_folder(tmp_path, "here"), make_run_folder(tmp_path, "there")
    with here.held(resume=False):
        here.write_config(TrainConfig())
    (here.path / "metrics.jsonl").write_bytes(b"one line\ntwo lines\n")
    (here.path / "tracker-mlflow.json").write_bytes(b"{}")
    here.publish_events()
    (there.path / "metrics.jsonl").write_bytes(b"one line\n")
    (there.path / "tracker-mlflow.json").write_bytes(b"{longer}")
    read = []
    read_bytes = there.storage.read_bytes
    monkeypatch.setattr(
        there.storage,
        "read_bytes",
        lambda name, **limit: (read.append(name), read_bytes(name, **limit))[1],
    )
    there.load_earlier(TrainConfig())
    assert read == ["config.json"]
    assert (there.path / "metrics.jsonl").read_bytes() == b"one line\ntwo lines\n"
    assert (there.path / "tracker-mlflow.json").read_bytes() == b"{longer}"


def fail_to_copy(self, local, name):
    raise OSError(28, "No space left on device")


def test_a_failed_copy_is_an_error_with_its_reason(tmp_path, monkeypatch):
    folder = make_run_folder(tmp_path)
    (folder.path / "events.out.tfevents.1").write_bytes(b"a start")
    monkeypatch.setattr(Storage, "copy_in", fail_to_copy)
    with pytest.raises(OSError, match=r"^the curves in .*run could not be copied: .*No space"):
        folder.publish_events()


def test_a_run_whose_curves_can_not_be_copied_has_all_its_other_files(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(Storage, "copy_in", fail_to_copy)
    where = ["--run-dir", str(tmp_path / "run"), "--storage-path", str(tmp_path / "kept")]
    what = ["--workers", "0", "--model", "mlp", "--data", "synthetic:96", "--epochs", "2"]
    assert cli.main(["train", *what, *where, "--run.progress", "plain"]) == 0
    output = capsys.readouterr().out
    assert output.count("could not be copied") >= 1
    assert "; all other files of the run are complete" in output
    kept = tmp_path / "kept/run"
    assert (kept / "center.safetensors").exists()
    assert (kept / "result.json").exists()
    assert '"finished"' in (kept / "status.json").read_text()
    assert list((tmp_path / "run").glob("events.out.tfevents*")), "they are still here"
