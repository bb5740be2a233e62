"""Labelled images in memory: decoded from PNG or JPEG, from folders named by class, and checked."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from raydl.data.files import Place
from raydl.data.samples import Batch, Dataset, DataShape, InMemory
from raydl.errors import DataError

_CHUNK = 4096


@dataclass(frozen=True)
class ImageSet(InMemory):
    """Pictures and their classes.

    Attributes:
        images: uint8, shape [N, C, H, W]. May be read-only memory shared by processes.
        labels: int64, shape [N], each in 0..num_classes-1.
        class_names: one name per class.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]

    @property
    def num_samples(self) -> int:
        """Pictures in the set."""
        return len(self.images)

    @property
    def num_classes(self) -> int:
        """Classes, whether or not each has a picture."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    @property
    def shape(self) -> DataShape:
        """The shape that a model is built for."""
        return DataShape(self.image_shape, self.num_classes, self.class_names)

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return (uint8 pictures [B, C, H, W], int64 labels [B]) of these rows."""
        # Fancy indexing copies just these rows, so torch never sees read-only memory.
        return torch.from_numpy(self.images[rows]), torch.from_numpy(self.labels[rows])


def checked_set(
    images: np.ndarray,
    labels: np.ndarray,
    *,
    source: str,
    class_names: Sequence[str] | None = None,
) -> ImageSet:
    """Return an image set, or say what is wrong with it.

    Args:
        images: uint8, shape [N, C, H, W].
        labels: integers, shape [N].
        source: the file or folder, for messages.
        class_names: names of the classes; None: as many as the largest label needs.

    Raises:
        DataError: no pictures, as many labels as not, or a label out of range.
    """
    if len(images) == 0:
        raise DataError(source, "holds no pictures")
    if len(images) != len(labels):
        raise DataError(source, f"has {len(images)} pictures but {len(labels)} labels")
    names = tuple(class_names or ()) or tuple(str(k) for k in range(int(labels.max()) + 1))
    wrong = np.flatnonzero((labels < 0) | (labels >= len(names)))
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            source,
            f"row {row} has label {int(labels[row])}; labels must be 0 to {len(names) - 1} "
            f"({len(names)} classes)",
        )
    return ImageSet(images, labels.astype(np.int64), names)


def checked_pair(train: ImageSet, test: ImageSet, *, source: str) -> Dataset:
    """Return both sets as one dataset.

    Raises:
        DataError: the two do not agree in picture size or classes.
    """
    if train.image_shape != test.image_shape:
        raise DataError(
            source,
            f"training pictures are {_size(train)} (channels x height x width) but test "
            f"pictures are {_size(test)}",
        )
    names = max(train.class_names, test.class_names, key=len)
    for part in (train, test):
        if part.class_names != names[: part.num_classes]:
            raise DataError(source, "the training set and the test set name different classes")
    return Dataset(
        ImageSet(train.images, train.labels, names),
        ImageSet(test.images, test.labels, names),
        source,
    )


def split_off_test(images: ImageSet, *, seed: int, source: str) -> Dataset:
    """Return a seeded 90/10 split of a set that comes without a test part.

    Raises:
        DataError: fewer than 10 pictures.
    """
    if images.num_samples < 10:
        raise DataError(
            source, f"has no test part and only {images.num_samples} pictures: too few to split"
        )
    order = np.random.default_rng(seed).permutation(images.num_samples)
    num_test = images.num_samples // 10
    test, train = np.sort(order[:num_test]), np.sort(order[num_test:])
    return Dataset(
        ImageSet(images.images[train], images.labels[train], images.class_names),
        ImageSet(images.images[test], images.labels[test], images.class_names),
        source,
    )


def channel_statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (mean, standard deviation) per channel on the scale 0..1, float32, shape [C].

    A channel of one constant value gets the deviation 1. The set is read in chunks; no
    floating-point copy of the whole is made.

    Args:
        images: uint8, shape [N, C, H, W].
    """
    num_channels = images.shape[1]
    counts = np.zeros((num_channels, 256), np.int64)
    for start in range(0, len(images), _CHUNK):
        chunk = images[start : start + _CHUNK]
        for channel in range(num_channels):
            counts[channel] += np.bincount(chunk[:, channel].ravel(), minlength=256)
    values = np.arange(256) / 255.0
    share = counts / counts.sum(1, keepdims=True)
    mean = share @ values
    variance = share @ values**2 - mean**2
    std = np.sqrt(np.maximum(variance, 0.0))
    std[std < 1e-6] = 1.0
    return mean.astype(np.float32), std.astype(np.float32)


def _size(images: ImageSet) -> str:
    return "x".join(str(side) for side in images.image_shape)


_THREADS_FROM = 128 * 128
"""Pixels of a picture from which several threads are faster: with smaller ones they mostly wait
for one another's turn in the interpreter."""
_STRETCH = 256
"""Pictures that a thread takes at a time."""


def decode_all(encoded: Iterable[bytes], *, count: int, source: str) -> np.ndarray:
    """Return uint8 pictures, shape [count, C, H, W]: C = 1 for grey, 3 for colour.

    The first picture decides on grey or colour, and on the size of all.

    Raises:
        DataError: a picture does not decode, or has another size; the row is named.
    """
    iterator = iter(encoded)
    first = next(iterator)
    mode = mode_of(first, 0, source=source)
    picture = decode_one(first, 0, mode=mode, source=source)
    images = np.empty((count, *picture.shape), np.uint8)
    images[0] = picture

    def put(stretch: list[tuple[int, bytes]]) -> None:
        for row, data in stretch:
            picture = decode_one(data, row, mode=mode, source=source)
            if picture.shape != images.shape[1:]:
                raise DataError(
                    source,
                    f"the picture in row {row} is {_size_of(picture)}, the first one "
                    f"{_size_of(images[0])} (height x width); all must be of one size",
                )
            images[row] = picture

    rows = zip(range(1, count), iterator, strict=False)
    stretches = iter(lambda: list(islice(rows, _STRETCH)), [])
    num_threads = os.cpu_count() if pays_threads(picture.shape) else 1
    with ThreadPoolExecutor(num_threads) as pool:
        # list() brings the first error of any thread here.
        list(pool.map(put, stretches))
    return images


def pays_threads(shape: tuple[int, ...]) -> bool:
    """Whether several threads decode pictures of a shape, [C, H, W], sooner than one does."""
    return math.prod(shape[1:]) >= _THREADS_FROM


def mode_of(data: bytes, row: int, *, source: str) -> str:
    """Return Pillow's mode to decode a set like this picture in: L (grey) or RGB.

    Raises:
        DataError: it is no picture.
    """
    with _open(data, row, source=source) as image:
        return "L" if image.mode in ("1", "L", "I", "I;16", "LA") else "RGB"


def decode_one(data: bytes, row: int, *, mode: str, source: str) -> np.ndarray:
    """Return one picture, uint8, shape [C, H, W].

    Raises:
        DataError: it does not decode.
    """
    try:
        with _open(data, row, source=source) as image:
            # To convert into its own mode is a copy: a quarter of the time of a small picture.
            pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(source, f"the picture in row {row} does not decode: {error}") from error
    return pixels[None] if mode == "L" else np.moveaxis(pixels, 2, 0)


def _open(data: bytes, row: int, *, source: str) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data))
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(source, f"row {row} is not a picture that Pillow knows") from error
    except Image.DecompressionBombError as error:  # what a few kB claim may not fit into memory
        raise DataError(source, f"the picture in row {row} is too large: {error}") from error


def _size_of(picture: np.ndarray) -> str:
    return f"{picture.shape[1]}x{picture.shape[2]}"


_PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm")
_LAYOUTS = "train-*.parquet, IDX files, data_batch_*.bin, or folders of pictures named by class"


def read_class_folders(folder: Place) -> ImageSet:
    """Return all pictures of a folder of class folders, decoded.

    Raises:
        DataError: there are none, one does not decode, or they differ in size.
    """
    pictures, labels, names = labelled_files(folder)
    images = decode_all(
        (picture.read() for picture in pictures), count=len(pictures), source=folder.name
    )
    return checked_set(images, labels, source=folder.name, class_names=names)


def labelled_files(folder: Place) -> tuple[list[Place], np.ndarray, list[str]]:
    """Return FOLDER/CLASS/*.png and the like, their labels, and the classes, numbered by name.

    Raises:
        DataError: there are none.
    """
    classes = [child for child in folder.children() if child.is_dir()]
    pictures = [
        (picture, number)
        for number, child in enumerate(classes)
        for picture in child.children()
        if picture.basename.lower().endswith(_PICTURE_ENDINGS)
    ]
    if not pictures:
        raise DataError(folder.name, f"holds nothing that is known here: {_LAYOUTS}")
    labels = np.array([number for _, number in pictures])
    return [picture for picture, _ in pictures], labels, [child.basename for child in classes]
