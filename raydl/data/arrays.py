"""Layouts that are read whole: IDX (of MNIST), CIFAR's binary files, NumPy's .npz."""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np

from raydl.config import InputConfig
from raydl.data.files import Place
from raydl.data.listing import Listing, Parts
from raydl.data.pieces import Columns, Piece, reading
from raydl.data.schema import Feature, as_classes, schema_of_arrays
from raydl.data.values import channels_first
from raydl.errors import DataError

_IDX_NAMES = ("{part}-images-idx3-ubyte", "{part}-images.idx3-ubyte")
_PIXELS = 3 * 32 * 32
_CIFAR_10 = (("batches.meta.txt", 10),)
_CIFAR_100 = (("coarse_label_names.txt", 20), ("fine_label_names.txt", 100))
"""The file with the names of the classes, and their number, of each label before the pixels."""
_NPZ_NAMES = (
    (("x_train", "y_train"), ("x_test", "y_test")),
    (("train_images", "train_labels"), ("test_images", "test_labels")),
    (("images", "labels"),),
)
"""Names of the arrays of (images, labels) of train and test: Keras's, MedMNIST's, of one set."""


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

    is_in_memory = True

    def __init__(
        self, name: str, images: np.ndarray, labels: np.ndarray, class_names: Sequence[str] = ()
    ) -> None:
        if len(images) != len(labels):
            raise DataError(name, f"has {len(images)} images but {len(labels)} labels")
        self.name, self.num_rows = name, len(images)
        self._arrays = {"image": images}
        self.schema = {"image": Feature("image", "uint8", images.shape[1:])}
        self.add_labels("label", labels, class_names)

    def add_labels(self, name: str, labels: np.ndarray, class_names: Sequence[str]) -> None:
        """Add a column of labels, integers, shape [N]."""
        self._arrays[name] = labels
        label = schema_of_arrays({name: labels})[name]
        label = as_classes(label, class_names) if class_names else label
        self.schema = {**self.schema, name: label}

    def read(self, rows: np.ndarray, names: Sequence[str]) -> Columns:
        """Return some of the images or labels."""
        return {name: self._arrays[name][rows] for name in names}


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
    """Return the binary files of each part of CIFAR-10 or CIFAR-100, or None.

    Raises:
        DataError: if the test batch is missing.
    """
    if _is_cifar_100(found):
        return {"train": ["train.bin"], "test": ["test.bin"], "": [file for file, _ in _CIFAR_100]}
    batches = [path for path in found.files if re.fullmatch(r"data_batch_.*\.bin", path)]
    if not batches:
        return None
    if "test_batch.bin" not in found.files:
        raise DataError(
            (found.root / "test_batch.bin").name, "is missing beside the training batches"
        )
    return {"train": batches, "test": ["test_batch.bin"], "": [file for file, _ in _CIFAR_10]}


def _is_cifar_100(found: Listing) -> bool:
    """Whether there are its two files, which may also hold tokens, and its names or whole rows."""
    if not {"train.bin", "test.bin"} <= set(found.files):
        return False
    sizes = [place.info().size for place in found.places(["train.bin", "test.bin"])]
    has_rows = all(size and size % (len(_CIFAR_100) + _PIXELS) == 0 for size in sizes)
    return has_rows or _CIFAR_100[-1][0] in found.files


def open_cifar(found: Listing, parts: Parts, input: InputConfig) -> Mapping[str, list[Piece]]:
    """Return the images of CIFAR-10 or CIFAR-100; without names, classes are numbered.

    The labels of CIFAR-100 are the fine ones; the column ``coarse_label`` has the others.

    Raises:
        DataError: if a file is empty or truncated.
    """
    names = []
    for file, count in _CIFAR_100 if parts["train"] == ["train.bin"] else _CIFAR_10:
        is_there = file in found.files
        numbers = [str(number) for number in range(count)]
        names.append((found.root / file).read().decode().split() if is_there else numbers)
    return found.each(parts, lambda place: _cifar_file(place, names))


def _cifar_file(file: Place, names: Sequence[Sequence[str]]) -> Piece:
    data, num_labels = file.read(), len(names)
    if not data or len(data) % (num_labels + _PIXELS):
        what = "label and" if num_labels == 1 else "two labels and"
        raise DataError(
            file.name,
            f"must hold whole rows of {num_labels + _PIXELS} bytes ({what} 3x32x32 pixels), "
            f"got {len(data)} bytes",
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, num_labels + _PIXELS)
    images = rows[:, num_labels:].reshape(-1, 3, 32, 32)
    piece = ImageArrays(file.name, images, rows[:, num_labels - 1], names[-1])
    if num_labels > 1:
        piece.add_labels("coarse_label", rows[:, 0], names[0])
    return piece


def open_npz(found: Listing, parts: Parts, input: InputConfig) -> Mapping[str, list[Piece]]:
    """Return the images of an .npz file, by the names of its arrays.

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
    if "val_images" in members:  # of MedMNIST
        found.left_out["val_images"] = "of a second test set"
    if not names:
        raise DataError(
            file.name,
            "must hold the arrays x_train, y_train, x_test and y_test, those of MedMNIST "
            "(train_images and so on), or images and labels, got "
            f"{', '.join(members) or 'none'}",
        )
    pairs = zip(("train", "test"), names, strict=False)
    return {part: [_npz_images(file, arrays, x, y)] for part, (x, y) in pairs}


def _member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str) -> np.ndarray:
    """Return an array of an archive; nothing is allocated for one that is not whole."""
    with archive.open(entry) as content:
        read_header(content, entry.file_size, name=name)
        content.seek(0)
        array: np.ndarray = np.lib.format.read_array(content, allow_pickle=False)
    return array


def read_header(
    content: IO[bytes], num_bytes: int, *, name: str = "it"
) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Return (shape, type, bytes before the first value) of an array in NumPy's format.

    Raises:
        ValueError: it is damaged, or has another size than its header says.
    """
    major, minor = np.lib.format.read_magic(content)
    if major > 2:  # for names of fields that are not Latin: no pixels, labels or tokens
        raise ValueError(f"{name} is in version {major}.{minor} of NumPy's format")
    read = (
        np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    )
    try:
        shape, _, dtype = read(content)
    except ValueError:
        raise
    except Exception as error:  # NumPy tokenizes headers that it cannot parse
        raise ValueError(f"{name} has no header of NumPy's format: {error}") from error
    expected, found = math.prod(shape) * dtype.itemsize, num_bytes - content.tell()
    if min(shape, default=0) < 0 or (expected != found and not dtype.hasobject):
        raise ValueError(f"{name} must have {expected:,} bytes by its header, got {found:,}")
    return shape, dtype, content.tell()


def _npz_images(file: Place, arrays: Mapping[str, np.ndarray], x: str, y: str) -> Piece:
    pixels, labels = arrays[x], arrays[y]
    if labels.ndim == 2 and labels.shape[1] > 1:
        raise DataError(file.name, f"{y} has {labels.shape[1]} labels for an image; keep one")
    labels = labels.reshape(-1)
    if pixels.dtype != np.uint8:
        raise DataError(file.name, f"{x} must be uint8 pixels (0 to 255), got {pixels.dtype}")
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(file.name, f"{y} must be integers, got {labels.dtype}")
    try:
        return ImageArrays(file.name, channels_first(pixels), labels)
    except ValueError as error:
        raise DataError(file.name, f"{x} {error}") from error
