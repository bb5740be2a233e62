"""Recorders that write to fakes, and their records and evaluations."""

import dataclasses
import time

import numpy as np
from ensembles import SHAPE, linear, tiny_images

from raydl.checkpoint.best import BestCenter
from raydl.checkpoint.totals import Totals
from raydl.config import TrainConfig, TrainingConfig
from raydl.core.center import first_snapshot
from raydl.core.flat import FlatModel
from raydl.core.progress import Progress
from raydl.core.reports import Record, WorkerReport
from raydl.core.scores import Evaluated
from raydl.core.worker_group import Collected
from raydl.data.loader import LeftOut
from raydl.errors import CheckpointError
from raydl.metrics import TAGS, TimeParts, tag_of
from raydl.run.recorder import RunRecorder
from raydl.storage import Storage
from raydl.worker.examples import Examples

NOTHING = Totals()


class MemoryWriter:
    """A writer and progress display that keep all calls in memory."""

    def __init__(self):
        self.points, self.sentences, self.views = [], [], []
        self.texts, self.images = [], []

    def scalars(self, values, *, num_samples, unix_s=None):
        assert {tag_of(name).name for name in values} <= set(TAGS)
        self.points.append((num_samples, dict(values)))

    def text(self, name, markdown, *, num_samples, unix_s=None):
        self.texts.append((name, num_samples, markdown))

    def image(self, name, pixels, *, num_samples):
        self.images.append((name, num_samples))

    def go_back(self, *, num_samples):
        self.points = [point for point in self.points if point[0] < num_samples]

    def flush(self):
        pass

    def close(self):
        pass

    def event(self, sentence):
        self.sentences.append(sentence)

    def update(self, view):
        self.views.append(view)


class FakeStore:
    """A checkpoint store that fails at given rounds."""

    def __init__(self, *bad):
        self.bad, self.written = bad, []

    def write(self, checkpoint):
        if checkpoint.progress.round in self.bad:
            raise CheckpointError("runs/x", "could not be written: disk full")
        self.written.append(checkpoint.progress.round)


def flat_model():
    return FlatModel(linear(SHAPE.input_shape, SHAPE.num_classes))


def make_recorder(
    store, *, writer=None, after_checkpoint=lambda: None, before=NOTHING, best=None, config=None
):
    memory, flat = MemoryWriter(), flat_model()
    recorder = RunRecorder(
        config or TrainConfig(training=TrainingConfig(epochs=2)),
        num_train=10,
        start=first_snapshot(flat, 10),
        seconds_before=5.0,
        before=before,
        writer=writer or memory,
        progress=memory,
        store=store,
        best=best or BestCenter(Storage("runs/x"), flat),
        flat=flat,
        examples=Examples(tiny_images()),
        after_checkpoint=after_checkpoint,
    )
    return recorder, memory


def collected_round(round):
    snapshot = dataclasses.replace(first_snapshot(flat_model(), 10), progress=Progress(round=round))
    return Collected(snapshot, {"w0": {"x": np.ones(2)}})


def record_at(num_samples, *, num_workers=1, loss=0.7):
    return Record(
        progress=Progress(
            round=2, generation=1, epoch=0.5, num_samples=num_samples, local_step=2, seconds=1.0
        ),
        num_workers=num_workers,
        lr=0.1,
        loss=loss,
        distance=0.2,
        exchange_s=0.01,
        exchange_bytes=40,
        staleness=0.0,
        period=10.0,
        at_s=time.monotonic(),
    )


def report_of(
    worker_id,
    *,
    local_step,
    step_s=0.25,
    round_s=1.0,
    parts=None,
    allreduce=None,
    choice=None,
    left_out=0,
):
    return WorkerReport(
        worker_id,
        round=local_step,
        records=(),
        kept=(),
        time_parts=parts or TimeParts().as_dict(),
        local_step=local_step,
        step_s=step_s,
        waited_s=0.5,
        round_s=round_s,
        allreduce=allreduce,
        choice=choice,
        left_out=LeftOut(left_out, "train-0.parquet, row group 3: row 2 holds no picture"),
    )


def score_at(num_samples, predicted):
    return Evaluated(
        Progress(round=1, num_samples=num_samples, seconds=1.0),
        {"accuracy": 0.9, "loss": 0.3},
        predicted,
    )


def parts(**seconds):
    return {**TimeParts().as_dict(), **seconds}
