"""A run resumes only with its samples in the order of its start."""

import dataclasses
import errno
import json

import numpy as np
import pytest
import torch
from snapshots import with_progress

from raydl.checkpoint.store import CheckpointStore
from raydl.checkpoint.writer import checkpoint_of
from raydl.config import RunConfig, TrainConfig
from raydl.core.center import first_snapshot
from raydl.core.flat import FlatModel
from raydl.core.worker_group import Collected
from raydl.data.order import InBlocks, Shuffled
from raydl.data.schema import Feature, to_json
from raydl.errors import ConfigError, UnreadableCheckpointError
from raydl.run.folder import RunFolder
from raydl.run.resume import Start

BEGAN = InBlocks([5, 5, 5, 5, 3], 0, block_samples=8)


def begin_and_resume(tmp_path, order, *, is_old=False, data="digits"):
    """Begin a run with the order BEGAN, write a checkpoint, and resume it with another order."""
    config = TrainConfig(data=data, run=RunConfig(run_dir=str(tmp_path / "run")))
    flat = FlatModel(torch.nn.Linear(2, 1))
    folder = RunFolder(config)
    with folder.held(resume=False):
        start = Start.from_folder(folder, config, flat, order=BEGAN)
        folder.write_config(config)
        snapshot = with_progress(first_snapshot(flat, 23), round=1, num_samples=5)
        collected = Collected(snapshot, {})
        checkpoint = checkpoint_of(collected, flat, seconds=1.0, order=BEGAN.name)
        if is_old:
            del checkpoint.state["order"]
        CheckpointStore(start.folder.storage).write(checkpoint)
    return resume_with(config, flat, order)


def resume_with(config, flat, order, schema=None):
    again = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True))
    folder = RunFolder(again)
    with folder.held(resume=True):
        return Start.from_folder(folder, again, flat, order=order, schema=schema)


@pytest.mark.parametrize(
    "order",
    [
        Shuffled(23, 0),
        InBlocks([5, 5, 5, 5, 3], 0, block_samples=9),
        InBlocks([5, 5, 5, 3, 5], 0, block_samples=8),
    ],
)
def test_a_run_does_not_resume_with_its_samples_in_another_order(tmp_path, order):
    with pytest.raises(ConfigError, match="trained on twice; keep the settings of input"):
        begin_and_resume(tmp_path, order)


def test_a_run_resumes_with_its_samples_in_the_same_order(tmp_path):
    same = InBlocks(np.array([5, 5, 5, 5, 3]), 0, block_samples=8)
    assert begin_and_resume(tmp_path, same).snapshot.progress.round == 1


def test_a_run_does_not_resume_with_another_number_of_samples(tmp_path):
    with pytest.raises(ConfigError, match="has 24 training samples, but the run began with 23"):
        begin_and_resume(tmp_path, Shuffled(24, 0))


@pytest.mark.parametrize(("ending", "is_told"), [("tif", True), ("TIFF", True), ("png", False)])
def test_tif_files_that_an_earlier_version_left_out_are_told_with_what_to_do(
    tmp_path, ending, is_told
):
    for path in ("cat/0.png", "cat/1.png", f"dog/0.{ending}", f"dog/1.{ending}"):
        (tmp_path / "set" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / path).touch()
    with pytest.raises(ConfigError, match="has 24 training samples, but the run") as caught:
        begin_and_resume(tmp_path, Shuffled(24, 0), data=str(tmp_path / "set"))
    told = "2 images end in .tif or .tiff, which earlier versions did not read: move them out of"
    assert (told in str(caught.value)) == is_told


def test_another_number_of_samples_is_told_also_if_the_data_are_no_path(tmp_path):
    with pytest.raises(ConfigError, match="has 24 training samples, but the run began with 23"):
        begin_and_resume(tmp_path, Shuffled(24, 0), data="ray.data.Dataset")


LABELS = {"image": Feature("image", "uint8", (1, 4, 4)),
          "label": Feature("class", "int64", names=("cat", "dog"))}  # fmt: skip


def resume_data(tmp_path, before, now):
    """Begin a run with data of one schema, and resume it with those of another."""
    begin_and_resume(tmp_path, BEGAN)
    path = tmp_path / "run/config.json"
    content = json.loads(path.read_text())
    content["schema"] = before
    path.write_text(json.dumps({k: v for k, v in content.items() if (k, v) != ("schema", None)}))
    config, flat = RunFolder(with_folder(tmp_path)).read_config(), FlatModel(torch.nn.Linear(2, 1))
    return resume_with(config, flat, BEGAN, schema=now)


def with_folder(tmp_path):
    return TrainConfig(data="digits", run=RunConfig(run_dir=str(tmp_path / "run")))


@pytest.mark.parametrize(
    ("now", "sentence"),
    [
        ({**LABELS, "label": Feature("class", "int64", names=("dog", "cat"))},
         "began with: column 'label' names its classes dog, cat, but elsewhere cat, dog"),
        ({**LABELS, "label": Feature("class", "int64", names=("cat", "dog", "owl"))},
         "column 'label' has the class 'owl'"),
        ({**LABELS, "image": Feature("image", "uint8", (3, 4, 4))}, "images of 3x4x4"),
    ],
)  # fmt: skip
def test_a_run_does_not_resume_with_samples_of_another_kind(tmp_path, now, sentence):
    assert resume_data(tmp_path, to_json(LABELS), LABELS).snapshot.progress.round == 1
    config, flat = RunFolder(with_folder(tmp_path)).read_config(), FlatModel(torch.nn.Linear(2, 1))
    with pytest.raises(ConfigError, match=f"data is not what the run .*{sentence}"):
        resume_with(config, flat, BEGAN, schema=now)


def test_a_run_of_an_earlier_version_resumes_and_says_that_its_data_are_not_compared(tmp_path):
    sentences = resume_data(tmp_path, None, LABELS).sentences
    assert any("did not note what its data hold" in sentence for sentence in sentences)


def test_a_checkpoint_without_the_name_of_its_order_can_be_resumed(tmp_path):
    assert begin_and_resume(tmp_path, BEGAN, is_old=True).snapshot.progress.round == 1


def test_a_storage_that_fails_while_checkpoints_are_listed_is_an_error_with_its_reason(
    tmp_path, monkeypatch
):
    start = begin_and_resume(tmp_path, BEGAN)

    def fail(self):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(CheckpointStore, "names", fail)
    config, flat = start.folder.read_config(), FlatModel(torch.nn.Linear(2, 1))
    with pytest.raises(UnreadableCheckpointError, match="/checkpoints: cannot be read: "):
        resume_with(config, flat, BEGAN)
