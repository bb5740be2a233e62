"""``raydl check`` finds every flipped bit in the files of a run."""

import random

import pytest
from ensembles import linear
from safetensors.torch import load_file, save_file

import raydl
from raydl import cli
from raydl.run.check import check_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a small run with all kinds of files."""
    folder = tmp_path_factory.mktemp("runs") / "kept"
    raydl.Trainer(
        raydl.Classification(linear),
        training=raydl.TrainingConfig(epochs=2),
        scaling=raydl.ScalingConfig(num_workers=0),
        checkpoint=raydl.CheckpointConfig(every_epochs=1, keep_best=True),
        run=raydl.RunConfig(run_dir=str(folder), progress="none"),
    ).fit()
    return folder


def kept_files(folder):
    files = [p for p in folder.glob("checkpoints/**/*") if p.is_file()]
    return [*files, folder / "center.safetensors", folder / "best.safetensors"]


def test_an_undamaged_run_is_reported_as_such(run, capsys):
    assert check_run(str(run)) == []
    assert cli.main(["check", str(run)]) == 0
    assert capsys.readouterr().out == "all files of the run match their checksums\n"


def test_a_folder_without_a_run_is_an_error(tmp_path, capsys):
    assert cli.main(["check", str(tmp_path / "elsewhere")]) == 2
    assert "no run is there" in capsys.readouterr().err


def test_each_of_a_hundred_flipped_bits_is_found(run, monkeypatch):
    monkeypatch.setattr("raydl.checkpoint.store._PAUSE_S", 0.0)  # for a run that trains
    draw = random.Random(0)
    files = kept_files(run)
    assert {path.name for path in files} >= {
        "manifest.json", "center.safetensors", "state.safetensors", "worker-w0.safetensors",
        "best.safetensors",
    }  # fmt: skip
    for _ in range(100):
        path = draw.choice(files)
        data = path.read_bytes()
        # Half of them in the first bytes, where names, shapes and checksums are.
        end = draw.choice([min(len(data), 400), len(data)])
        at, bit = draw.randrange(end), draw.randrange(8)
        try:
            path.write_bytes(data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :])
            assert check_run(str(run)), f"bit {bit} of byte {at} of {path}"
        finally:
            path.write_bytes(data)


def test_a_damaged_file_is_named_and_the_exit_status_is_1(run, capsys):
    path = run / "center.safetensors"
    data = path.read_bytes()
    try:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert cli.main(["check", str(run)]) == 1
        message = f"{path}: it is damaged: its checksum does not match\n"
        assert capsys.readouterr().out == message
    finally:
        path.write_bytes(data)


def test_weights_of_an_earlier_version_without_a_checksum_are_no_damage(run):
    path = run / "center.safetensors"
    data = path.read_bytes()
    try:
        save_file(load_file(path), path)
        assert check_run(str(run)) == []
    finally:
        path.write_bytes(data)
