"""Layouts that are read whole: IDX (of MNIST), CIFAR-10's binary files, NumPy's .npz."""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from typing import IO

import numpy as np

from raydl.config import InputConfig
from raydl.data.files import Place
from raydl.data.listing import Listing, Parts
from raydl.data.pieces import Columns, Piece, reading
from raydl.data.schema import Feature, as_classes, schema_of_arrays
from raydl.data.values import channels_first
from raydl.errors import DataError

_IDX_NAMES = ("{part}-images-idx3-ubyte", "{part}-images.idx3-ubyte")
_CIFAR_ROW = 1 + 3 * 32 * 32
_NPZ_NAMES = (
    (("x_train", "y_train"), ("x_test", "y_test")),
    (("images", "labels"),),
)
"""Names of the arrays of (images, labels) of train and test."""


class ImageArrays(Piece):
    """Decoded images in memory, with their labels.

    Args:
        name: the file, for messages.
        images: uint8, shape [N, C, H, W].
        labels: integers, shape [N].
        class_names: names of the classes; (): unknown.

    Raises:
        DataError: if there are no images, or more or fewer labels.
    """

    def __init__(
        self, name: str, images: np.ndarray, labels: np.ndarray, class_names: Sequence[str] = ()
    ) -> None:
        if len(images) != len(labels):
            raise DataError(name, f"has {len(images)} images but {len(labels)} labels")
        self.name, self.num_rows = name, len(images)
        self._arrays = {"image": images, "label": labels}
        label = schema_of_arrays({"label": labels})["label"]
        self.schema = {
            "image": Feature("image", "uint8", images.shape[1:]),
            "label": as_classes(label, class_names) if class_names else label,
        }

    def read(self, rows: np.ndarray, names: Sequence[str]) -> Columns:
        """Return some of the images or labels."""
        return {name: self._arrays[name][rows] for name in names}

    def where(self, row: int) -> str:
        """Return the file and the row, for messages."""
        return f"{self.name}, row {row}"


def find_idx(found: Listing) -> Parts | None:
    """Return (images, labels) of each part of MNIST's own files, plain or .gz, or None.

    Raises:
        DataError: if a part lacks, or one of its files.
    """
    for name in _IDX_NAMES:
        train, test = (_idx_pair(found, name.format(part=part)) for part in ("train", "t10k"))
        if train and test:
            return {"train": train, "test": test}
        if train:
            raise DataError(found.name, "has IDX files for training (train-*) but no t10k-* files")
    return None


def _idx_pair(found: Listing, images_name: str) -> list[str]:
    for ending in ("", ".gz"):
        images = images_name + ending
        if images in found.files:
            labels = images.replace("images", "labels").replace("idx3", "idx1")
            if labels not in found.files:
                raise DataError((found.root / labels).name, "is missing beside its images")
            return [images, labels]
    return []


def open_idx(found: Listing, parts: Parts, input: InputConfig) -> Mapping[str, list[Piece]]:
    """Return the images of each pair of IDX files.

    Raises:
        DataError: if one is no IDX file of bytes or is truncated, or if the two do not match.
    """
    opened: dict[str, list[Piece]] = {}
    for part, paths in parts.items():
        images, labels = found.places(paths)
        pixels = _idx_array(images, num_dims=3)[:, None]
        opened[part] = [ImageArrays(images.name, pixels, _idx_array(labels, num_dims=1))]
    return opened


def _idx_array(file: Place, *, num_dims: int) -> np.ndarray:
    data = file.read()
    header_bytes = 4 + 4 * num_dims
    magic = bytes((0, 0, 8, num_dims))
    if data[:4] != magic:
        raise DataError(
            file.name,
            f"must begin with {magic.hex()} (IDX, unsigned bytes, {num_dims} dimensions), "
            f"got {data[:4].hex() or 'nothing'}",
        )
    if len(data) < header_bytes:
        raise DataError(file.name, f"is truncated in its header, after {len(data)} bytes")
    shape = struct.unpack(f">{num_dims}I", data[4:header_bytes])
    expected = math.prod(shape)
    if len(data) - header_bytes != expected:
        raise DataError(
            file.name,
            f"must hold {expected} bytes after its header ({' x '.join(map(str, shape))}), "
            f"got {len(data) - header_bytes}",
        )
    return np.frombuffer(data, np.uint8, offset=header_bytes).reshape(shape)


def find_cifar(found: Listing) -> Parts | None:
    """Return the binary batches of each part of CIFAR-10, or None.

    Raises:
        DataError: if the test batch is missing.
    """
    batches = [path for path in found.files if re.fullmatch(r"data_batch_.*\.bin", path)]
    if not batches:
        return None
    if "test_batch.bin" not in found.files:
        raise DataError(
            (found.root / "test_batch.bin").name, "is missing beside the training batches"
        )
    return {"train": batches, "test": ["test_batch.bin"], "": ["batches.meta.txt"]}


def open_cifar(found: Listing, parts: Parts, input: InputConfig) -> Mapping[str, list[Piece]]:
    """Return the images of CIFAR-10's batches; without names, classes are numbered.

    Raises:
        DataError: if a file is empty or truncated.
    """
    names = [str(number) for number in range(10)]
    if "batches.meta.txt" in found.files:
        names = (found.root / "batches.meta.txt").read().decode().split()
    return {
        part: [_cifar_batch(place, names) for place in found.places(paths)]
        for part, paths in parts.items()
        if part
    }


def _cifar_batch(file: Place, names: Sequence[str]) -> Piece:
    data = file.read()
    if not data or len(data) % _CIFAR_ROW:
        raise DataError(
            file.name,
            f"must hold whole rows of {_CIFAR_ROW} bytes (label and 3x32x32 pixels), "
            f"got {len(data)} bytes",
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, _CIFAR_ROW)
    return ImageArrays(file.name, rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0], names)


def open_npz(found: Listing, parts: Parts, input: InputConfig) -> Mapping[str, list[Piece]]:
    """Return the images of an .npz file: of x_train, y_train, x_test, y_test, or images, labels.

    Raises:
        DataError: if it cannot be opened, lacks arrays, or has arrays of wrong shape or type.
    """
    (file,) = found.places(parts["train"])
    data = file.read()
    if data.startswith(b"\x93NUMPY"):
        raise DataError(file.name, "is an .npy file, one array, in spite of its ending .npz")
    with reading(file.name, "is not a whole .npz file"):
        archive = zipfile.ZipFile(io.BytesIO(data))
        members = {
            entry.filename.removesuffix(".npy"): entry
            for entry in archive.infolist()
            if entry.filename.endswith(".npy")
        }
        names = next((n for n in _NPZ_NAMES if {x for pair in n for x in pair} <= set(members)), ())
        arrays = {x: _member(archive, members[x], x) for pair in names for x in pair}
    if not names:
        raise DataError(
            file.name,
            "must hold the arrays x_train, y_train, x_test and y_test, or images and labels, got "
            f"{', '.join(members) or 'none'}",
        )
    pairs = zip(("train", "test"), names, strict=False)
    return {part: [_npz_images(file, arrays, x, y)] for part, (x, y) in pairs}


def _member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str) -> np.ndarray:
    with archive.open(entry) as content:
        return read_array(content, entry.file_size, name=name)


def read_array(content: IO[bytes], num_bytes: int, *, name: str = "it") -> np.ndarray:
    """Return the array in NumPy's format; nothing is allocated for one that is not whole.

    Args:
        content: the file, at its beginning.
        num_bytes: its size.
        name: its name for the message.

    Raises:
        ValueError: it is damaged, has another size than its header says, or holds objects.
        OSError: it cannot be read.
        MemoryError: it is larger than the memory.
    """
    major, minor = np.lib.format.read_magic(content)
    if major > 2:  # for names of fields that are not Latin: no pixels, labels or tokens
        raise ValueError(f"{name} is in version {major}.{minor} of NumPy's format")
    read = (
        np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read(content)
    expected, found = math.prod(shape) * dtype.itemsize, num_bytes - content.tell()
    if min(shape, default=0) < 0 or (expected != found and not dtype.hasobject):
        raise ValueError(f"{name} must have {expected:,} bytes by its header, got {found:,}")
    content.seek(0)
    array: np.ndarray = np.lib.format.read_array(content, allow_pickle=False)
    return array


def _npz_images(file: Place, arrays: Mapping[str, np.ndarray], x: str, y: str) -> Piece:
    pixels, labels = arrays[x], arrays[y].reshape(-1)
    if pixels.dtype != np.uint8:
        raise DataError(file.name, f"{x} must be uint8 pixels (0 to 255), got {pixels.dtype}")
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(file.name, f"{y} must be integers, got {labels.dtype}")
    try:
        return ImageArrays(file.name, channels_first(pixels), labels)
    except ValueError as error:
        raise DataError(file.name, f"{x} {error}") from error
