"""Binary layouts: IDX (of MNIST), CIFAR-10 and NumPy's .npz."""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Sequence
from typing import IO

import numpy as np

from raydl.data.files import Place
from raydl.data.images import ImageSet, checked_pair, checked_set, split_off_test
from raydl.data.samples import Dataset
from raydl.errors import DataError

_CIFAR_ROW = 1 + 3 * 32 * 32


def read_idx(images: Place, labels: Place) -> ImageSet:
    """Return a set from a pair of IDX files, plain or .gz.

    Raises:
        DataError: if one is no IDX file of bytes or is truncated, or if the two do not match.
    """
    pixels = _idx_array(images, num_dims=3)
    return checked_set(pixels[:, None], _idx_array(labels, num_dims=1), source=images.name)


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
    expected = int(np.prod(shape))
    if len(data) - header_bytes != expected:
        raise DataError(
            file.name,
            f"must hold {expected} bytes after its header ({' x '.join(map(str, shape))}), "
            f"got {len(data) - header_bytes}",
        )
    return np.frombuffer(data, np.uint8, offset=header_bytes).reshape(shape)


def read_cifar(files: Sequence[Place], names: Place | None) -> ImageSet:
    """Return a set from CIFAR-10's binary batches; without names, classes are numbered.

    Raises:
        DataError: if a file is empty or truncated.
    """
    batches = [file.read() for file in files]
    for file, data in zip(files, batches, strict=True):
        if not data or len(data) % _CIFAR_ROW:
            raise DataError(
                file.name,
                f"must hold whole rows of {_CIFAR_ROW} bytes (label and 3x32x32 pixels), "
                f"got {len(data)} bytes",
            )
    rows = np.frombuffer(b"".join(batches), np.uint8).reshape(-1, _CIFAR_ROW)
    class_names = [str(k) for k in range(10)]
    if names is not None and names.is_file():
        class_names = names.read().decode().split()
    images = np.ascontiguousarray(rows[:, 1:]).reshape(-1, 3, 32, 32)
    return checked_set(
        images, rows[:, 0].astype(np.int64), source=files[0].name, class_names=class_names
    )


def read_npz(file: Place, *, seed: int) -> Dataset:
    """Return the sets of an .npz file; split it 90/10 if it has no test part.

    Raises:
        DataError: if it cannot be opened, lacks arrays, or has arrays of wrong shape or type.
    """
    train, test = npz_parts(file)
    if test is None:
        return split_off_test(train, seed=seed, source=file.name)
    return checked_pair(train, test, source=file.name)


def npz_parts(file: Place) -> tuple[ImageSet, ImageSet | None]:
    """Return (training set, test set or None) of an .npz file, without a split.

    Its arrays are x_train, y_train, x_test and y_test, or images and labels without a test set.

    Raises:
        DataError: if it cannot be opened, lacks arrays, or has arrays of wrong shape or type.
    """
    try:
        arrays = _npz_arrays(file.read())
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(file.name, f"is not a whole .npz file: {error}") from error
    except MemoryError as error:
        raise DataError(file.name, f"does not fit into memory: {error}") from error
    if {"x_train", "y_train", "x_test", "y_test"} <= set(arrays):
        train = _npz_set(file, arrays, "x_train", "y_train")
        return train, _npz_set(file, arrays, "x_test", "y_test")
    if {"images", "labels"} <= set(arrays):
        return _npz_set(file, arrays, "images", "labels"), None
    raise DataError(
        file.name,
        "must hold the arrays x_train, y_train, x_test and y_test, or images and labels, got "
        f"{', '.join(arrays) or 'none'}",
    )


def _npz_arrays(data: bytes) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file by name."""
    arrays = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in archive.infolist():
            key, is_array = member.filename.removesuffix(".npy"), member.filename.endswith(".npy")
            if is_array:
                with archive.open(member) as content:
                    arrays[key] = read_array(content, member.file_size, name=key)
    return arrays


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


def _npz_set(file: Place, arrays: dict[str, np.ndarray], x: str, y: str) -> ImageSet:
    pixels, labels = arrays[x], arrays[y].reshape(-1)
    if pixels.dtype != np.uint8:
        raise DataError(file.name, f"{x} must be uint8 pixels (0 to 255), got {pixels.dtype}")
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(file.name, f"{y} must be integers, got {labels.dtype}")
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif pixels.ndim == 4 and pixels.shape[3] in (1, 3):
        pixels = np.ascontiguousarray(np.moveaxis(pixels, 3, 1))
    elif not (pixels.ndim == 4 and pixels.shape[1] in (1, 3)):
        raise DataError(
            file.name,
            f"{x} must have shape [N, H, W], [N, H, W, C] or [N, C, H, W], got "
            f"{list(pixels.shape)}",
        )
    return checked_set(pixels, labels, source=file.name)
