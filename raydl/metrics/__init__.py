"""What is measured: SC17's eight time parts, and every curve with its sentence.

time_parts.py   a worker's seconds, by part
tags.py         the names of all curves, each with its sentence
memberships.py  who trained when, as a table
writer.py       where measurements go; several such places at once
stack_picture.py  the time parts, stacked, as a picture
ticks.py        round steps for the axes of pictures
tensorboard.py  event files, and the layout of TensorBoard's page *Custom Scalars*
"""

from raydl.metrics.memberships import MembershipTable
from raydl.metrics.tags import COMPARED, STACK, TAGS, Tag, tag_of, time_values
from raydl.metrics.tensorboard import TensorBoardWriter
from raydl.metrics.time_parts import TIME_PARTS, TimeParts, communication_share, mean_parts
from raydl.metrics.writer import Forgiving, MetricsWriter, Tee, config_as_markdown

__all__ = [
    "COMPARED",
    "STACK",
    "TAGS",
    "TIME_PARTS",
    "Forgiving",
    "MembershipTable",
    "MetricsWriter",
    "Tag",
    "Tee",
    "TensorBoardWriter",
    "TimeParts",
    "communication_share",
    "config_as_markdown",
    "mean_parts",
    "tag_of",
    "time_values",
]
