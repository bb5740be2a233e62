"""Labelled pictures in memory: decoding, checks, and folders named by class."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterable, Sequence
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
        images: uint8, shape [N, C, H, W]; may be read-only memory that processes share.
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
        """Number of classes, whether or not each has a picture."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(Channels, height, width)."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    @property
    def shape(self) -> DataShape:
        """The shape to build a model for."""
        return DataShape(self.image_shape, self.num_classes, self.class_names)

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return (uint8 pictures [B, C, H, W], int64 labels [B]) of these rows."""
        # Fancy indexing copies these rows, so torch never gets read-only memory.
        return torch.from_numpy(self.images[rows]), torch.from_numpy(self.labels[rows])


def checked_set(
    images: np.ndarray,
    labels: np.ndarray,
    *,
    source: str,
    class_names: Sequence[str] | None = None,
    locate: Locate | None = None,
) -> ImageSet:
    """Return an image set after checks.

    Args:
        images: uint8, shape [N, C, H, W].
        labels: integers, shape [N].
        source: the file or folder, for messages.
        class_names: names of the classes; None: numbers from 0 to the largest label.
        locate: locates a row in the files; None: it is a row of ``source``.

    Raises:
        DataError: if there are no pictures, more or fewer labels, or a label out of range.
    """
    if len(images) == 0:
        raise DataError(source, "holds no pictures")
    if len(images) != len(labels):
        raise DataError(source, f"has {len(images)} pictures but {len(labels)} labels")
    names = tuple(class_names or ()) or tuple(str(k) for k in range(int(labels.max()) + 1))
    wrong = np.flatnonzero((labels < 0) | (labels >= len(names)))
    if len(wrong):
        label = int(labels[wrong[0]])
        place, row = locate(int(wrong[0])) if locate else (source, int(wrong[0]))
        raise DataError(
            place,
            f"row {row} has label {label}; labels must be 0 to {len(names) - 1} "
            f"({len(names)} classes)",
        )
    return ImageSet(images, labels.astype(np.int64), names)


def checked_pair(train: ImageSet, test: ImageSet, *, source: str) -> Dataset:
    """Return both sets as one dataset.

    Raises:
        DataError: if their picture sizes or classes differ.
    """
    if train.image_shape != test.image_shape:
        raise DataError(
            source,
            f"training pictures are {'x'.join(map(str, train.image_shape))} (channels x height x "
            f"width) but test pictures are {'x'.join(map(str, test.image_shape))}",
        )
    names = tuple(shared_class_names([train.class_names, test.class_names], source=source))
    return Dataset(
        ImageSet(train.images, train.labels, names),
        ImageSet(test.images, test.labels, names),
        source,
    )


def split_off_test(images: ImageSet, *, seed: int, source: str) -> Dataset:
    """Return a seeded 90/10 split of a set without a test part.

    Raises:
        DataError: if it has fewer than 10 pictures.
    """
    if images.num_samples < 10:
        raise DataError(
            source, f"has no test part and only {images.num_samples} pictures: too few to split"
        )
    order = np.random.default_rng(seed).permutation(images.num_samples)
    num_test = images.num_samples // 10
    train, test = (
        ImageSet(images.images[rows], images.labels[rows], images.class_names)
        for rows in (np.sort(order[num_test:]), np.sort(order[:num_test]))
    )
    return Dataset(train, test, source)


def channel_statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (mean, standard deviation) per channel on the scale 0..1, float32, shape [C].

    A constant channel gets the standard deviation 1. The set is read in chunks, without a
    floating-point copy of the whole.

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


def shared_class_names(names: Sequence[Sequence[str]], *, source: str) -> Sequence[str]:
    """Return the class names of a training and a test set; each has the first ones, or all.

    Raises:
        DataError: if they name different classes.
    """
    longest = max(names, key=len)
    if any(list(part) != list(longest[: len(part)]) for part in names):
        raise DataError(source, "the training set and the test set name different classes")
    return longest


_MIN_PIXELS = 128 * 128
"""Pixels of a picture from which several threads decode faster than one. With smaller pictures,
threads mostly wait for the interpreter lock."""
_THREAD_PICTURES = 256
"""Pictures that a thread decodes per task."""


Locate = Callable[[int], tuple[str, int | None]]
"""Returns (the file for messages, the row in it) of a row of a set; None: the file is the row."""


def decode_all(encoded: Iterable[bytes], *, count: int, locate: Locate) -> np.ndarray:
    """Return uint8 pictures, shape [count, C, H, W]: C = 1 for grayscale, 3 for color.

    The first picture sets the channels and the size of all.

    Args:
        encoded: the pictures.
        count: their number.
        locate: locates the row of a picture in the files.

    Raises:
        DataError: with file and row, if a picture does not decode or has another size.
    """
    iterator = iter(encoded)
    first = next(iterator)
    source, row = locate(0)
    mode = mode_of(first, row, source=source)
    picture = decode_one(first, row, mode=mode, source=source)
    images = np.empty((count, *picture.shape), np.uint8)
    images[0] = picture

    def decode_rows(rows: list[tuple[int, bytes]]) -> None:
        for index, data in rows:
            source, row = locate(index)
            picture = decode_one(data, row, mode=mode, source=source)
            if picture.shape != images.shape[1:]:
                size, first_size = ("x".join(map(str, p.shape[1:])) for p in (picture, images[0]))
                raise DataError(
                    source,
                    f"{_picture_in(row)} is {size}, but the first one is {first_size} "
                    f"(height x width); all must have one size",
                )
            images[index] = picture

    rows = zip(range(1, count), iterator, strict=False)
    tasks = iter(lambda: list(islice(rows, _THREAD_PICTURES)), [])
    num_threads = os.cpu_count() if decodes_in_threads(picture.shape) else 1
    with ThreadPoolExecutor(num_threads) as pool:
        # list() raises the first error of any thread.
        list(pool.map(decode_rows, tasks))
    return images


def decodes_in_threads(shape: tuple[int, ...]) -> bool:
    """Whether several threads decode pictures of a shape, [C, H, W], faster than one thread."""
    return math.prod(shape[1:]) >= _MIN_PIXELS


def mode_of(data: bytes, row: int | None, *, source: str) -> str:
    """Return Pillow's mode to decode a set with this picture in: L (grayscale) or RGB.

    Raises:
        DataError: if it is no picture.
    """
    with _open(data, row, source=source) as image:
        return "L" if image.mode in ("1", "L", "I", "I;16", "LA") else "RGB"


def decode_one(data: bytes, row: int | None, *, mode: str, source: str) -> np.ndarray:
    """Return one picture, uint8, shape [C, H, W].

    Raises:
        DataError: if it does not decode.
    """
    try:
        with _open(data, row, source=source) as image:
            # A conversion to its own mode is a copy: a quarter of the time of a small picture.
            pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(source, f"{_picture_in(row)} does not decode: {error}") from error
    return pixels[None] if mode == "L" else np.moveaxis(pixels, 2, 0)


def _open(data: bytes, row: int | None, *, source: str) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data))
    except (UnidentifiedImageError, OSError) as error:
        subject = "it" if row is None else f"row {row}"
        raise DataError(source, f"{subject} is not a picture that Pillow knows") from error
    except Image.DecompressionBombError as error:  # a few kB may claim more than the memory holds
        raise DataError(source, f"{_picture_in(row)} is too large: {error}") from error


def _picture_in(row: int | None) -> str:
    return "the picture" if row is None else f"the picture in row {row}"


_PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm")


def read_class_folders(folder: Place) -> ImageSet:
    """Return all pictures of a folder of class folders, decoded.

    Raises:
        DataError: if there are none, one does not decode, or their sizes differ.
    """
    pictures, labels, names = labelled_files(folder)
    images = decode_all(
        (picture.read() for picture in pictures),
        count=len(pictures),
        locate=lambda index: (pictures[index].name, None),
    )
    return checked_set(images, labels, source=folder.name, class_names=names)


def labelled_files(folder: Place) -> tuple[list[Place], np.ndarray, list[str]]:
    """Return (picture files, labels [N], class names) of FOLDER/CLASS/*.png and the like.

    The label of a class is its position in the sorted names.

    Raises:
        DataError: if there are no pictures.
    """
    classes = [child for child in folder.children() if child.is_dir()]
    pictures = [
        (picture, number)
        for number, child in enumerate(classes)
        for picture in child.children()
        if picture.basename.lower().endswith(_PICTURE_ENDINGS)
    ]
    if not pictures:
        raise DataError(
            folder.name,
            "holds no data set: train-*.parquet, files of datasets.save_to_disk, IDX files, "
            "data_batch_*.bin, or folders of pictures named by class",
        )
    labels = np.array([number for _, number in pictures])
    return [picture for picture, _ in pictures], labels, [child.basename for child in classes]
