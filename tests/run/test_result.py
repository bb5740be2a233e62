"""The result of a run is read from its folder, with the weights of its newest checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import raydl
from raydl.errors import CheckpointError, DataError
from raydl.run.result import RunCheckpoint


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return raydl.Trainer(
        "mlp",
        "synthetic:64",
        scaling=raydl.ScalingConfig(num_workers=0),
        training=raydl.TrainingConfig(epochs=2, batch_size=8),
        run=raydl.RunConfig(run_dir=str(tmp_path_factory.mktemp("run") / "run"), progress="none"),
    ).fit()


def test_a_result_is_read_again_from_its_path(result):
    again = raydl.Result.from_path(result.path)
    assert again == result
    assert again.metrics["samples"] == 128


def test_a_checkpoint_gives_the_weights_of_the_center(result):
    state = result.checkpoint.to_state_dict()
    trained = load_file(f"{result.path}/center.safetensors")
    assert state.keys() == trained.keys()
    assert all(torch.equal(state[name], trained[name]) for name in trained)
    assert load_file(f"{result.checkpoint.path}/center.safetensors").keys() == trained.keys()


def test_the_result_of_an_earlier_start_is_not_that_of_a_run_that_was_resumed(result, tmp_path):
    run = Path(shutil.copytree(result.path, tmp_path / "run"))
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "driver_epoch": 2}))
    with pytest.raises(DataError, match=r"resumed after result\.json was written"):
        raydl.Result.from_path(str(run))


def test_a_missing_run_result_or_checkpoint_is_an_error(result, tmp_path):
    with pytest.raises(DataError, match="no run is there"):
        raydl.Result.from_path(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"the run has no result\.json: it has not ended"):
        raydl.Result.from_path(str(tmp_path))
    with pytest.raises(CheckpointError, match="there is no round-9999"):
        RunCheckpoint(result.path, "round-9999").to_state_dict()
