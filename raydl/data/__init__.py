"""Data sets, the ledger of samples, and the loader.

``load`` opens a data set. Images are kept as uint8 and normalized per batch. All files are read
through PyArrow's file systems: local paths, ``s3://`` and ``gs://`` alike.
"""

from raydl.data.datasets import load
from raydl.data.in_memory import ImageSet, channel_statistics
from raydl.data.loader import Batches, Normalizer, preparation_for, statistics_of
from raydl.data.order import Order
from raydl.data.samples import Batch, Dataset, DataShape, Prepare, Samples

__all__ = [
    "Batch",
    "Batches",
    "DataShape",
    "Dataset",
    "ImageSet",
    "Normalizer",
    "Order",
    "Prepare",
    "Samples",
    "channel_statistics",
    "load",
    "preparation_for",
    "statistics_of",
]
