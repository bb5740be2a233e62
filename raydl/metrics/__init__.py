"""Metrics: SC17's eight time parts, and every curve with its sentence.

time_parts.py   a worker's seconds, by part
tags.py         the names of all curves, each with its sentence
memberships.py  who trained when, as a table
writer.py       where measurements go; several such places at once
queued.py       what waits for a disk, and how much of it
thinning.py     fewer points the older a run is
speed.py        samples per second, of the newest records
worker_curves.py  which workers have curves of their own, under which names
charts.py       all charts, by matplotlib
tensorboard.py  event files, and the layout of TensorBoard's page *Custom Scalars*
"""

from raydl.metrics.background_writer import BackgroundWriter
from raydl.metrics.memberships import MembershipTable
from raydl.metrics.speed import RecentSpeed
from raydl.metrics.tags import COMPARED, STACK, TAGS, Tag, tag_of, time_values
from raydl.metrics.tensorboard import TensorBoardWriter
from raydl.metrics.thinning import StackHistory, Thinned
from raydl.metrics.time_parts import TIME_PARTS, TimeParts, communication_share, mean_parts
from raydl.metrics.worker_curves import WorkerCurves, spread_of
from raydl.metrics.writer import Forgiving, MetricsWriter, Tee

__all__ = [
    "COMPARED",
    "STACK",
    "TAGS",
    "TIME_PARTS",
    "BackgroundWriter",
    "Forgiving",
    "MembershipTable",
    "MetricsWriter",
    "RecentSpeed",
    "StackHistory",
    "Tag",
    "Tee",
    "TensorBoardWriter",
    "Thinned",
    "TimeParts",
    "WorkerCurves",
    "communication_share",
    "mean_parts",
    "spread_of",
    "tag_of",
    "time_values",
]
