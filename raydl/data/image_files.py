"""Files of images: in folders that are named by their class, or below that of a table's paths."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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
                each = map if self._root.is_local else pool.map
                places = (self._root / self._paths[row] for row in rows.tolist())
                found["image"] = list(each(Place.read_alone, places))
        return found

    def where(self, row: int) -> str:
        """Return the file, for messages."""
        return (self._root / self._paths[row]).name


def with_files(column: Any, folder: Place | None) -> Any:
    """Return a column of images with the files in place of the paths, to take one by one.

    Args:
        column: images as bytes, as paths, or as structs of both; or anything else.
        folder: the folder of the data; None: none has only a path.
    """
    if folder is None or not isinstance(column, (pa.Array, pa.ChunkedArray)):
        return column
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return _Files(None, column, folder)
    if not pa.types.is_struct(column.type) or column.type.get_field_index("path") < 0:
        return column
    encoded, paths = pc.struct_field(column, "bytes"), pc.struct_field(column, "path")
    return _Files(encoded, paths, folder) if encoded.null_count else column


class _Files:
    """Images of which some are paths; each file is read when it is taken."""

    def __init__(self, encoded: Any, paths: Any, folder: Place) -> None:
        self._encoded, self._paths, self._folder = encoded, paths, folder

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, row: int) -> Any:
        """Return an image as a file; None: there is neither; an exception: it cannot be read."""
        encoded = None if self._encoded is None else self._encoded[row].as_py()
        path = self._paths[row].as_py()
        if encoded is not None or path is None:
            return encoded
        is_local = self._folder.is_local
        root = os.path.abspath(self._folder.path) if is_local else self._folder.path
        inside = posixpath.relpath(posixpath.join(root, path), root)
        if inside.split("/")[0] == "..":
            return ValueError(f"its image is the file {path!r}, which is not in the data's folder")
        return (self._folder / inside).read_alone()
