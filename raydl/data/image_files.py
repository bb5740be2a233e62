"""Files of images in folders that are named by their class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from pyarrow import fs

from raydl.config import InputConfig
from raydl.data.files import Place
from raydl.data.listing import Listing, Parts, class_of, image_parts
from raydl.data.pieces import Columns, Piece
from raydl.data.schema import Feature

_THREADS = 8
"""Threads that read images from a store: they overlap its latency."""
IMAGE_ENDINGS = (
    ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm", ".tif", ".tiff",
)  # fmt: skip
"""Endings of files that are images, in lower case."""


def find_image_files(found: Listing) -> Parts | None:
    """Return the images of each part, in class folders; None if there are none."""
    images = found.ending_in(IMAGE_ENDINGS)
    return image_parts(found, images) if any("/" in path for path in images) else None


def open_image_files(found: Listing, parts: Parts, input: InputConfig) -> Mapping[str, list[Piece]]:
    """Return the images of each part, under the classes of the training s"""
    names = set(map(class_of, parts["train"]))
    return {
        part: [ImageFiles(found.root, paths, sorted(names | set(map(class_of, paths))))]
        for part, paths in parts.items()
        if paths
    }


class ImageFiles(Piece):
    """Image files below a folder.

    Args:
        root: the folder.
        paths: paths of the files below it.
        class_names: names of all classes.
    """

    def __init__(self, root: Place, paths: Sequence[str], class_names: Sequence[str]) -> None:
        self.name, self._root = root.name, root
        self._is_local = isinstance(root.filesystem, fs.LocalFileSystem)
        self._paths, self.num_rows = list(paths), len(paths)
        number = {name: n for n, name in enumerate(class_names)}
        self._labels = np.array([number[class_of(path)] for path in paths], np.int64)
        self.schema = {
            "image": Feature("image", "uint8", (None, None, None)),
            "label": Feature("class", "int64", names=tuple(class_names)),
        }

    def read(self, rows: np.ndarray, names: Sequence[str]) -> Columns:
        """Return the encoded images and the labels of some files."""
        found: dict[str, Any] = {"label": self._labels[rows]}
        if "image" in names:
            with ThreadPoolExecutor(_THREADS) as pool:
                each = map if self._is_local else pool.map
                found["image"] = list(each(self._bytes, rows.tolist()))
        return found

    def _bytes(self, row: int) -> bytes | Exception:
        try:
            return (self._root / self._paths[row]).read()
        except Exception as error:  # this file alone
            return error

    def where(self, row: int) -> str:
        """Return the file, for messages."""
        return (self._root / self._paths[row]).name
