"""Files of images in folders that are named by their class."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from pyarrow import fs

from raydl.config import InputConfig
from raydl.data.files import Place
from raydl.data.listing import Listing, Parts, class_of, image_parts
from raydl.data.pieces import Columns, Piece, reading
from raydl.data.schema import Feature

_THREADS = 8
"""Threads that read images from a store: they overlap its latency."""
IMAGE_ENDINGS = (
    ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm", ".tif", ".tiff",
)  # fmt: skip
"""Endings of files that are images, in lower case."""
_TINY_IMAGENET = "val/val_annotations.txt"
"""The list in which Tiny ImageNet names the class of each image in ``val/images``."""


def find_image_files(found: Listing) -> Parts | None:
    """Return the images of each part, in class folders; None if there are none."""
    images = found.ending_in(IMAGE_ENDINGS)
    if not any("/" in path for path in images):
        return None
    listed = [_TINY_IMAGENET] if _TINY_IMAGENET in found.files else []
    return {**image_parts(found, images, _class_of(found)), "": listed}


def _class_of(found: Listing) -> Callable[[str], str]:
    """Return the function that gives the class of an image."""
    if _TINY_IMAGENET not in found.files:
        return class_of
    place = found.root / _TINY_IMAGENET
    with reading(place.name, "is not a list of images with their classes, separated by tabs"):
        lines = [line.split("\t") for line in place.read().decode().splitlines()]
        listed = {f"val/images/{line[0]}": line[1] for line in lines}
    return lambda path: listed.get(path) or class_of(path)


def open_image_files(found: Listing, parts: Parts, input: InputConfig) -> Mapping[str, list[Piece]]:
    """Return the images of each part, under the classes of the training set and new ones."""
    class_of = _class_of(found)
    trained = set(map(class_of, parts["train"]))
    return {
        part: [ImageFiles(found.root, paths, class_of, trained)]
        for part, paths in parts.items()
        if part and paths
    }


class ImageFiles(Piece):
    """Image files below a folder.

    Args:
        root: the folder.
        paths: paths of the files below it.
        class_of: returns the class of a file.
        trained: classes of the training set.
    """

    def __init__(
        self,
        root: Place,
        paths: Sequence[str],
        class_of: Callable[[str], str],
        trained: Collection[str],
    ) -> None:
        self.name, self._root = root.name, root
        self._is_local = isinstance(root.filesystem, fs.LocalFileSystem)
        self._paths, self.num_rows = list(paths), len(paths)
        classes = list(map(class_of, paths))
        class_names = sorted({*trained, *classes})
        number = {name: n for n, name in enumerate(class_names)}
        self._labels = np.array([number[name] for name in classes], np.int64)
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
