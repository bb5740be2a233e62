"""Metrics: the eight time parts of SC17, and all curves, each with a description.

time_parts.py         seconds of a worker, by part
tags.py               names and descriptions of all curves
memberships.py        table of the memberships of a run
writer.py             protocol of metrics writers; several writers at once; retries
background_writer.py  a writer in a separate thread, with a bounded queue
thinning.py           fewer points the older a run is
speed.py              samples per second, from the newest records
worker_curves.py      the workers that have their own curves, and the names of the curves
charts.py             all charts, by matplotlib
tensorboard.py        event files, and the layout of TensorBoard's page *Custom Scalars*
trackers.py           MLflow, Weights & Biases and JSON lines, as further writers
"""

from raydl.metrics.background_writer import BackgroundWriter
from raydl.metrics.memberships import MembershipTable
from raydl.metrics.speed import RecentSpeed
from raydl.metrics.tags import COMPARED, STACK, TAGS, Tag, tag_of, time_values
from raydl.metrics.tensorboard import TensorBoardWriter
from raydl.metrics.thinning import StackHistory, Thinned
from raydl.metrics.time_parts import TIME_PARTS, PartsPerWorker, TimeParts, communication_share
from raydl.metrics.worker_curves import WorkerCurves, spread_of
from raydl.metrics.writer import MetricsWriter, RetryingWriter, Tee

__all__ = [
    "COMPARED",
    "STACK",
    "TAGS",
    "TIME_PARTS",
    "BackgroundWriter",
    "MembershipTable",
    "MetricsWriter",
    "PartsPerWorker",
    "RecentSpeed",
    "RetryingWriter",
    "StackHistory",
    "Tag",
    "Tee",
    "TensorBoardWriter",
    "Thinned",
    "TimeParts",
    "WorkerCurves",
    "communication_share",
    "spread_of",
    "tag_of",
    "time_values",
]
