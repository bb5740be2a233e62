"""Training data: pictures read once, kept as uint8, normalised per batch.

``load`` is the one entry; everything on storage goes through PyArrow's file systems,
so that local paths, ``s3://`` and ``gs://`` are one code.
"""

from raydl.data.datasets import load
from raydl.data.images import ImageSet, channel_statistics
from raydl.data.loader import Batches, Normalizer, preparation_for
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
]
