"""Whatever a file of a run holds, each command ends with a sentence, and soon."""

import contextlib
import os
import resource
import shutil
import signal
from pathlib import Path

import crafted
import pytest

from raydl import cli
from raydl.checkpoint import store
from raydl.errors import RaydlError
from raydl.run import control_channel
from raydl.run.result import Result

TRAIN = [
    "train", "--workers", "0", "--run.progress", "none", "--model", "mlp", "--data", "synthetic:32",
    "--batch-size", "16",
    "--checkpoint.every-epochs", "1", "--checkpoint.keep-best", "--tracker", "jsonl",
]  # fmt: skip
PRIVATE = b"private\n" * 20
MOST_MIB = 700
"""Most memory that all commands together may take: most of it is for 16 MiB of JSON."""
MOST_S = 120
"""Longest time of one command, on a machine with much other work."""
READERS = {
    "config.json": ("status", "logs", "check", "evaluate", "train"),
    "status.json": ("status", "list", "report"),
    "result.json": ("report", "train"),
    "events": ("logs", "report"),
    "metrics.jsonl": ("train",),
    "tracker-jsonl.json": ("train",),
    "driver.lock": ("train",),
    "driver-epochs": ("train",),
    "best.safetensors": ("check", "train"),
    "center.safetensors": ("check", "train"),
    "checkpoints/manifest.json": ("report", "check", "evaluate", "train"),
    "checkpoints/center.safetensors": ("check", "evaluate", "train"),
    "checkpoints/state.safetensors": ("check", "train"),
    "checkpoints/worker-w0.safetensors": ("check", "train"),
}
"""The files that a run writes, of several the newest, and the commands that read each."""
ALL = ("status", "list", "logs", "report", "check", "evaluate", "train")
FILES = [*READERS]
KINDS = [*crafted.of_kinds(Path())]
EACH = 4
"""The fast tests try each kind on every fourth file, and the slow ones on all."""


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The folder of a run of two epochs."""
    folder = tmp_path_factory.mktemp("runs") / "good"
    assert cli.main([*TRAIN, "--epochs", "2", "--run-dir", str(folder)]) == 0
    written = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert all(place(folder, name).relative_to(folder) in written for name in FILES)
    return folder


@pytest.fixture
def folder(good, tmp_path, monkeypatch):
    """A copy of the run, in a folder beside a private file, which must not change."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store, "_PAUSE_S", 0.0)
    monkeypatch.setattr(control_channel, "LOOK_AGAIN_S", 0.0)
    outside = tmp_path / "outside"
    outside.write_bytes(PRIVATE)
    outside.chmod(0o600)
    yield shutil.copytree(good, tmp_path / "runs" / "run")
    assert outside.read_bytes() == PRIVATE
    status = outside.stat()
    assert (status.st_mode & 0o777, status.st_nlink) == (0o600, 1)
    assert sorted(os.listdir(tmp_path)) == ["outside", "runs"]


def place(folder, name):
    """Return the path of a file of a run, the newest of several."""
    if name == "events":
        return max(folder.glob("events*"))
    if name == "driver-epochs":
        return max((folder / name).iterdir())
    if name.startswith("checkpoints/"):
        return max((folder / "checkpoints").iterdir()) / Path(name).name
    return folder / name


@contextlib.contextmanager
def limited(what):
    """Raise an error after a time; check that the memory of this process has not grown much."""

    def stop(*_):
        raise AssertionError(f"{what} has not ended within {MOST_S} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    earlier = signal.signal(signal.SIGALRM, stop)
    signal.alarm(MOST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    assert grown < MOST_MIB, f"{what} took {grown} MiB more"


def use(folder, capsys, what, names=ALL):
    """Use a run by some commands, and check that each ends with a sentence."""
    run = str(folder)
    words = {"list": ["list", str(folder.parent)]}
    words["train"] = [*TRAIN, "--epochs", "3", "--run-dir", run, "--resume"]
    capsys.readouterr()
    for command in [words.get(name, [name, run]) for name in names]:
        with limited(f"{command[0]} with {what}"):
            status = cli.main(command)
        said = "".join(capsys.readouterr())
        assert "Traceback" not in said, f"{command[0]} with {what}: {said[-3000:]}"
        assert status in (0, 1, 2, 75), f"{command[0]} with {what}: exit {status}"
        assert status == 0 or said.strip(), f"{command[0]} with {what} says nothing"
        assert "\x1b]0" not in said, f"{command[0]} with {what} obeys escapes"
    with limited(f"Result with {what}"), contextlib.suppress(RaydlError):
        Result.from_path(run)


def again(good, folder):
    """Put the good run in the place of one that a command has changed."""
    shutil.rmtree(folder)
    shutil.copytree(good, folder)


def use_with_another_kind(good, folder, capsys, kind, name, commands):
    """Use a run in which something else has the name of a file."""
    path = place(folder, name)
    path.unlink()
    crafted.of_kinds(folder.parents[1] / "outside")[kind](path)
    use(folder, capsys, f"{name}: {kind}", commands)
    again(good, folder)


def use_with_changes(good, folder, capsys, name, seed, commands):
    """Use a run in which some values of a file are changed."""
    crafted.change(place(folder, name), seed)
    use(folder, capsys, f"{name}, seed {seed}", commands)
    again(good, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_of_the_run_ends_with_a_sentence(good, folder, capsys, kind):
    for name in FILES[KINDS.index(kind) % EACH :: EACH]:
        use_with_another_kind(good, folder, capsys, kind, name, READERS[name])


@pytest.mark.parametrize("kind", ["garbage", "link"])
def test_what_is_no_folder_of_the_run_ends_with_a_sentence(good, folder, capsys, kind):
    put = crafted.of_kinds(folder.parents[1])[kind]
    for name in ("checkpoints", "driver-epochs", "requests", "answers"):
        path = folder / name
        shutil.rmtree(path, ignore_errors=True)
        put(path)
        use(folder, capsys, f"{name}: {kind}", ("check", "evaluate", "train"))
        again(good, folder)


@pytest.mark.parametrize("name", FILES)
def test_wrong_values_end_with_a_sentence(good, folder, capsys, name):
    for seed in range(3):
        use_with_changes(good, folder, capsys, name, seed, READERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_of_the_run_ends_each_command_with_a_sentence(good, folder, capsys, kind):
    for name in FILES:
        use_with_another_kind(good, folder, capsys, kind, name, ALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_many_wrong_values_end_each_command_with_a_sentence(good, folder, capsys, name):
    for seed in range(3, 40):
        use_with_changes(good, folder, capsys, name, seed, ALL)
