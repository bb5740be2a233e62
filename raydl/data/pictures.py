"""Encoded pictures (PNG, JPEG, …) into one uint8 array."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
from PIL import Image, UnidentifiedImageError

from raydl.errors import DataError

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
