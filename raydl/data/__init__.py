"""Training data: pictures read once, kept as uint8, normalised per batch.

:func:`load` is the one entry; everything on storage goes through PyArrow's file systems,
so that local paths, ``s3://`` and ``gs://`` are one code.
"""

from raydl.data.batches import Batches, Normalizer
from raydl.data.images import Dataset, ImageSet, channel_statistics
from raydl.data.sources import load

__all__ = ["Batches", "Dataset", "ImageSet", "Normalizer", "channel_statistics", "load"]
