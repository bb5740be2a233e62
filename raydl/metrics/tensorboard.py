"""TensorBoard: event files, and the layout of the curves."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from raydl.metrics.tags import STACK, STACK_GROUND, STACK_GROUP, tag_of
from raydl.storage import parent_and_name
from raydl.text.redaction import redact

LINES: dict[str, dict[str, list[str]]] = {
    "Accuracy and loss": {
        "accuracy of the center": ["center/accuracy"],
        "loss of the center": ["center/loss"],
        "loss of the workers": ["train/loss"],
    },
    "Throughput and workers": {
        "samples per second": ["throughput/samples_per_s"],
        "workers that train": ["workers/count"],
    },
    "Time in eight parts": {
        **{f"seconds per worker: {part.replace('_', ' ')}": [f"time/{part}"] for part in STACK},
        "share of communication": ["exchange/communication_share"],
    },
    "Exchange": {
        "seconds of waiting for one": ["exchange/seconds"],
        "seconds of the all-reduce": ["exchange/allreduce_s"],
        "seconds of the all-reduce, predicted": ["exchange/allreduce_predicted_s"],
        "bytes of a worker in a round": ["exchange/bytes"],
    },
    "Staleness": {
        "exchanges of others between two of a worker": ["exchange/staleness"],
        "distance from replicas to the center": ["center/distance"],
    },
    "Speed of each worker": {
        "seconds of a local step": ["worker_step_s/.*"],
        "seconds of waiting in a round": ["worker_waited_s/.*"],
        "seconds of a local step: least, median and most of all": ["workers/step_s_.*"],
        "seconds of waiting: least, median and most of all": ["workers/waited_s_.*"],
    },
}
"""The page *Custom Scalars* from top to bottom: category, chart, patterns of its curves.

TensorBoard gives all curves of a run one color. So each has a chart of its own, except those of the
workers, and those that never cross.
"""

_FIRST_COUNT = 100_000
STACKED = ("Time in eight parts", "seconds per worker, stacked: one band for each part")
"""Category and title of the stacked chart."""


def viewing_command(folder: str) -> str:
    """Return the command that shows one run, as ``NAME/.``.

    With the folder alone as ``--logdir``, TensorBoard would name the run ``.``.

    Args:
        folder: the run's folder, a path or URI.
    """
    name = parent_and_name(folder)[1]
    if "," in folder or not re.fullmatch(r"[\w.-]*\w[\w.-]*", name):
        return f"tensorboard --logdir {shlex.quote(folder)}"  # the list of runs has no quotes
    return f"tensorboard --logdir_spec {shlex.quote(f'{name}:{folder}')}"


def make_layout() -> Any:
    """Return the page *Custom Scalars* as TensorBoard's message ``Layout``."""
    from tensorboard.plugins.custom_scalar import layout_pb2

    content = layout_pb2.MarginChartContent
    edges = [STACK_GROUND, *(f"{STACK_GROUP}/{part}" for part in STACK)]
    bands = [
        content.Series(value=upper, lower=lower, upper=upper) for lower, upper in pairwise(edges)
    ]
    categories = []
    for category, titles in LINES.items():
        charts = [
            layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=patterns))
            for title, patterns in titles.items()
        ]
        if category == STACKED[0]:
            charts.append(layout_pb2.Chart(title=STACKED[1], margin=content(series=bands)))
        categories.append(layout_pb2.Category(title=category, chart=charts))
    return layout_pb2.Layout(category=categories)


class TensorBoardWriter:
    """Event files for TensorBoard.

    Args:
        log_dir: local folder of the event files.
        purge_after: in a resumed run, the samples at its checkpoint: later points of the
            interrupted run are hidden, and the curves continue there. None or 0: the run begins,
            and points of an earlier attempt in the folder are hidden.
        goes_on: whether this start has written a file before; then no points are hidden.
    """

    def __init__(
        self, log_dir: str, *, purge_after: int | None = None, goes_on: bool = False
    ) -> None:
        # Imported here: the import takes a second, and workers do not need it.
        from torch.utils.tensorboard import SummaryWriter

        _require_space(log_dir)
        _count_in_six_digits()
        # TensorBoard ignores the first purge mark in a folder. The first start writes one, too, so
        # that the mark of a resumed start is not the first.
        purge_step = purge_after + 1 if purge_after else 0
        self._writer = SummaryWriter(log_dir, purge_step=None if goes_on else purge_step)
        # The thread that writes must not print a traceback: the next call raises its error.
        with contextlib.suppress(AttributeError):  # in another version of TensorBoard
            thread = self._writer._get_file_writer().event_writer._async_writer._worker
            thread._invoke_excepthook = lambda thread: None
        self._write_layout()

    def _write_layout(self) -> None:
        """Write the layout; torch's own call supports only one band per chart."""
        from tensorboard.compat.proto import summary_pb2, tensor_pb2
        from tensorboard.plugins.custom_scalar import metadata

        summary = summary_pb2.Summary()
        summary.value.add(
            tag=metadata.CONFIG_SUMMARY_TAG,
            metadata=metadata.create_summary_metadata(),
            tensor=tensor_pb2.TensorProto(
                dtype="DT_STRING", string_val=[make_layout().SerializeToString()]
            ),
        )
        self._writer._get_file_writer().add_summary(summary)

    def go_back(self, *, num_samples: int) -> None:
        """Hide all points from a sample on.

        It writes the purge mark of a resumed start into the middle of the file: one start has one
        file.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        mark = Event(step=num_samples, session_log=SessionLog(status=SessionLog.START))
        self._writer._get_file_writer().add_event(mark)

    def scalars(
        self, values: Mapping[str, float], *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write one point for each tag."""
        for name, value in values.items():
            tag_of(name)  # fails for a name without a description
            self._writer.add_scalar(name, value, num_samples, walltime=unix_s)

    def text(
        self, name: str, markdown: str, *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write a text in Markdown, without credentials of URIs."""
        self._writer.add_text(name, redact(markdown), num_samples, walltime=unix_s)

    def image(self, name: str, pixels: np.ndarray, *, num_samples: int) -> None:
        """Write an image, uint8, shape [H, W, 3]."""
        self._writer.add_image(name, pixels, num_samples, dataformats="HWC")

    def flush(self) -> None:
        """Make written points visible to readers."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def _count_in_six_digits() -> None:
    """Let names of event files sort by age, also those of one second.

    They end in a counter of the process, and are read in the order of their names as text: 10 would
    come before 9.
    """
    from tensorboard.summary.writer import event_file_writer

    with contextlib.suppress(AttributeError):  # in another version of TensorBoard
        counter = event_file_writer._global_uid
        if counter.get() < _FIRST_COUNT:
            event_file_writer._global_uid = type(counter)(_FIRST_COUNT)


def _require_space(folder: str) -> None:
    """Raise an OSError if the disk is full: TensorBoard's own writer would leave an empty file."""
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 14))  # the first bytes of an event file need as much
        file.flush()
