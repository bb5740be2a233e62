"""The best center of a run is written to the storage and read again."""

import errno

import numpy as np
import pytest
from accuracies import accuracy_of as accuracy
from ensembles import SHAPE, Ensemble, linear
from recorders import FakeStore as Store
from recorders import make_recorder as recorder_of

from raydl.checkpoint.best import FILE, BestCenter, read_best
from raydl.config import CheckpointConfig, TrainConfig
from raydl.core.flat import FlatModel
from raydl.errors import CheckpointError, UnreadableCheckpointError
from raydl.storage import Storage
from raydl.worker.evaluator import Evaluator


def flat_model():
    return FlatModel(linear(SHAPE.input_shape, SHAPE.num_classes))


def center_at(value, round, flat):
    weights = np.full(flat.weights.numel(), float(round), np.float32)
    return accuracy(value, round, weights=weights, buffers=np.empty(0, np.float32))


def offer(best, flat, *scores):
    for round, value in enumerate(scores, 1):
        if best.note_center(center_at(value, round, flat)):
            best.write()


def test_the_best_center_is_kept_even_if_it_is_not_the_last(tmp_path):
    storage, flat = Storage(str(tmp_path)), flat_model()
    offer(BestCenter(storage, flat), flat, 0.3, 0.9, 0.5, 0.9)
    center, kept = read_best(storage)
    at = kept.progress
    assert (at.round, at.num_samples, kept.metrics) == (2, 20, {"accuracy": 0.9})
    assert {key: tensor.shape for key, tensor in center.items()} == {
        key: tensor.shape for key, tensor in flat.model.state_dict().items()
    }
    assert all((tensor == 2.0).all() for tensor in center.values())


def test_a_new_start_knows_the_best_center_of_earlier_ones(tmp_path):
    storage, flat = Storage(str(tmp_path)), flat_model()
    offer(BestCenter(storage, flat), flat, 0.8)
    again = BestCenter(storage, flat)
    assert again.load_earlier() == []
    offer(again, flat, 0.7, 0.1)
    assert read_best(storage)[1].metrics == {"accuracy": 0.8}
    offer(again, flat, 0.7, 0.85)
    assert read_best(storage)[1].metrics == {"accuracy": 0.85}


class FullStorage(Storage):
    """A storage whose next ``num_refusals`` writes fail."""

    num_refusals = 0

    def write_pieces(self, name, pieces, **options):
        if self.num_refusals:
            self.num_refusals -= 1
            raise OSError("no space left on device")
        return super().write_pieces(name, pieces, **options)


def test_a_best_center_that_could_not_be_written_is_written_later(tmp_path):
    storage, flat = FullStorage(str(tmp_path)), flat_model()
    best = BestCenter(storage, flat)
    offer(best, flat, 0.5)
    storage.num_refusals = 1
    with pytest.raises(CheckpointError, match=r"best.safetensors: could not be written: no space"):
        offer(best, flat, 0.9)
    assert read_best(storage)[1].metrics == {"accuracy": 0.5}
    assert best.note_center(accuracy(0.2)), (
        "the best center is still to be written after a worse one, which has no weights"
    )
    best.write()
    assert read_best(storage)[1].metrics == best.kept.metrics == {"accuracy": 0.9}
    assert not best.note_center(accuracy(0.2))


def test_a_best_center_that_could_not_be_written_is_retried_at_the_end_of_the_run(tmp_path):
    storage, flat = FullStorage(str(tmp_path)), flat_model()
    recorder, _ = recorder_of(Store(), best=BestCenter(storage, flat))
    storage.num_refusals = 1
    recorder.evaluated(center_at(0.9, 1, flat))
    recorder.checkpoints.wait()
    assert not storage.exists(FILE)
    recorder.close()
    assert read_best(storage)[1].metrics == {"accuracy": 0.9}


def test_a_damaged_best_center_is_reported_and_replaced_by_the_next_one(tmp_path):
    storage, flat = Storage(str(tmp_path)), flat_model()
    storage.write_bytes(FILE, b"half of it")
    best = BestCenter(storage, flat)
    (sentence,) = best.load_earlier()
    assert "best.safetensors: cannot be read" in sentence
    offer(best, flat, 0.1)
    assert read_best(storage)[1].metrics == {"accuracy": 0.1}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ESTALE, "Stale file handle"), UnreadableCheckpointError),
        (OSError("google::cloud::Status(UNAVAILABLE: try later)"), UnreadableCheckpointError),
        (PermissionError(errno.EACCES, "Permission denied"), CheckpointError),
    ],
)
def test_a_best_center_that_the_storage_fails_to_read_is_not_replaced(
    tmp_path, monkeypatch, error, kind
):
    storage, flat = Storage(str(tmp_path)), flat_model()
    storage.write_bytes(FILE, b"it may be whole")

    def fail(path):
        raise error

    monkeypatch.setattr(storage, "read_pieces", fail)
    with pytest.raises(CheckpointError, match=r"best.safetensors: cannot be read: ") as raised:
        BestCenter(storage, flat).load_earlier()
    assert type(raised.value) is kind


@pytest.mark.parametrize("keep_best", [True, False])
def test_the_evaluator_sends_only_the_best_center_so_far(keep_best):
    config = TrainConfig(checkpoint=CheckpointConfig(keep_best=keep_best))
    ensemble = Ensemble(config, num_workers=1)
    evaluator = Evaluator(ensemble.job, ensemble.batches)
    first, second = (evaluator.evaluate(ensemble.first) for _ in range(2))
    assert (first.weights is not None) == keep_best
    assert second.weights is None, "no better"
