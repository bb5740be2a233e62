"""The one decoder of images, and the one conversion of stored values to those of a batch.

Both give the problem of each sample that cannot be used, so that it can be skipped and named.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image, ImageOps, UnidentifiedImageError

from raydl.data.schema import Feature, dtype_of, is_list, size_text
from raydl.errors import in_one_line

Bad = dict[int, "str | Exception"]
"""What is wrong with a sample, by its place: the rest of a sentence, or what was raised for it."""
_GREY = ("1", "L", "LA", "La")
_ORIENTATION = 0x112
_EXIF = {"exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp"}
"""Keys under which Pillow keeps what may say how an image is turned."""
_MIN_PIXELS = 128 * 128
"""Pixels of an image from which several threads decode faster than one. With smaller images,
threads mostly wait for the interpreter lock."""


def decodes_in_threads(shape: tuple[int, ...]) -> bool:
    """Whether several threads decode images of a shape, [C, H, W], faster than one thread."""
    return math.prod(shape[1:]) >= _MIN_PIXELS


@dataclass(frozen=True)
class Decoder:
    """Turns a stored image into pixels, uint8, shape [C, H, W]: C = 1 for grayscale, 3 for color.

    An image is turned upright, as its EXIF data say.
    """

    mode: str = ""
    """L (grayscale) or RGB; "": that of the image."""
    size: int | None = None
    """Height and width: the image is cut to a square around its center, and resized."""
    span: tuple[float, float] | None = None
    """Values that become 0 and 255, of an image with more than 8 bits; None: it is refused."""

    def decode(self, image: Any) -> np.ndarray:
        """Return the pixels of an image.

        Args:
            image: a file as bytes, or pixels, uint8, [H, W], [H, W, C] or [C, H, W].

        Raises:
            ValueError: it is no image, or one that is refused; the rest of a sentence.
        """
        if not isinstance(image, bytes):
            return self._of_pixels(image)
        try:
            with Image.open(io.BytesIO(image)) as opened:
                opened.load()
                return self._pixels(_upright(opened))
        except (_RefusedError, MemoryError):
            raise
        except UnidentifiedImageError as error:
            raise ValueError("it is not an image that Pillow knows") from error
        except Exception as error:  # decoders raise errors of any type at a damaged file
            raise ValueError(f"the image does not decode: {in_one_line(error)}") from error

    def _of_pixels(self, image: Any) -> np.ndarray:
        if image is None:
            raise ValueError("it holds no image")
        pixels = np.asarray(image)
        if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
            found = f"{pixels.dtype} of shape {list(pixels.shape)}"
            raise ValueError(f"must hold decoded images as uint8, from 0 to 255, got {found}")
        pixels = np.asarray(channels_first(pixels[None])[0])
        if not self.size and self.mode in ("", _mode_of_shape(pixels.shape)):
            return pixels
        return self._pixels(image_of(pixels))

    def _pixels(self, image: Image.Image) -> np.ndarray:
        if _is_wide(image):
            image = self._narrowed(image)
        mode = self.mode or ("L" if image.mode in _GREY else "RGB")
        # A conversion to its own mode is a copy: a quarter of the time of a small image.
        image = image if image.mode == mode else image.convert(mode)
        if self.size:
            image = ImageOps.fit(image, (self.size, self.size), Image.Resampling.BILINEAR)
        pixels = np.asarray(image)
        return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)

    def _narrowed(self, image: Image.Image) -> Image.Image:
        """Return an image of 8 bits, by the span."""
        values = np.asarray(image).astype(np.float64)
        low, high = values.min(), values.max()
        if self.span is None:
            raise _RefusedError(
                f"the image has values from {low:g} to {high:g} (mode {image.mode}), not 0 to 255; "
                f"say which become black and white by --input.span LOW,HIGH"
            )
        black, white = self.span
        if low < black or high > white:
            raise _RefusedError(
                f"the image has values from {low:g} to {high:g}, beyond input.span "
                f"{black:g},{white:g}"
            )
        return Image.fromarray(np.rint((values - black) / (white - black) * 255).astype(np.uint8))


class _RefusedError(ValueError):
    """An image that decodes, but must not be used as it is."""


def _is_wide(image: Image.Image) -> bool:
    """Whether an image has more than 8 bits."""
    return image.mode in ("I", "F") or image.mode.startswith("I;")


def _upright(image: Image.Image) -> Image.Image:
    # Making the EXIF data takes a tenth of the time of a small image, and most have none.
    if not (_EXIF & image.info.keys() or image.format == "TIFF"):
        return image
    try:
        is_turned = image.getexif().get(_ORIENTATION, 1) != 1
        return ImageOps.exif_transpose(image) if is_turned else image
    except Exception:  # its EXIF data are damaged, its pixels are whole
        return image


def _mode_of_shape(shape: tuple[int, ...]) -> str:
    return "L" if shape[0] == 1 else "RGB"


def mode_of(image: Any) -> str:
    """Return the mode of an image by its header alone: L or RGB, or "" if it has none."""
    try:
        if not isinstance(image, bytes):
            return _mode_of_shape(channels_first(np.asarray(image)[None])[0].shape)
        with Image.open(io.BytesIO(image)) as opened:
            return "L" if opened.mode in _GREY or _is_wide(opened) else "RGB"
    except Exception:  # the decoder says what is wrong with it
        return ""


def image_of(pixels: np.ndarray) -> Image.Image:
    """Return an image of Pillow from pixels, uint8, shape [C, H, W]."""
    return Image.fromarray(pixels[0] if len(pixels) == 1 else np.moveaxis(pixels, 0, 2))


def channels_first(images: np.ndarray) -> np.ndarray:
    """Return images as [N, C, H, W], from [N, H, W], [N, H, W, C] or [N, C, H, W].

    Raises:
        ValueError: they have neither 1 nor 3 channels; the rest of a sentence.
    """
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[3] in (1, 3):
        return np.ascontiguousarray(np.moveaxis(images, 3, 1))
    if images.ndim == 4 and images.shape[1] in (1, 3):
        return images
    raise ValueError(
        f"must have shape [N, H, W], [N, H, W, C] or [N, C, H, W], got {list(images.shape)}"
    )


def images_of(column: Any) -> Any:
    """Return the images of a column, to take one by one: encoded, or decoded.

    Raises:
        ValueError: it holds no images; the rest of a sentence.
    """
    if not isinstance(column, (pa.Array, pa.ChunkedArray)):
        return column
    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = pc.struct_field(column, "bytes")
    values = _whole(column)
    if isinstance(values.type, pa.BaseExtensionType):
        return _tensors(values)
    if not (pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)):
        raise ValueError(f"must hold encoded images, got {values.type}")
    return values


def image_at(images: Any, row: int) -> Any:
    """Return one of the ``images_of`` a column: bytes, pixels, None, or an exception."""
    value = images[row]
    return value.as_py() if isinstance(value, pa.Scalar) else value


def convert(column: Any, feature: Feature) -> tuple[np.ndarray, Bad]:
    """Return stored values in the type of a batch, shape [N, ...], and what is wrong with which.

    Args:
        column: an Arrow array, an array, or a list of samples.
        feature: what all of them are; where its shape is not known, the first sample decides.

    Raises:
        ValueError: the column as a whole holds something else; the rest of a sentence.
    """
    bad: Bad = {}
    if isinstance(column, (pa.Array, pa.ChunkedArray)):
        values = _whole(column)
        bad.update(dict.fromkeys(_nulls(values), "is null"))
        if feature.kind == "class" and (texts := _texts(values)) is not None:
            return _numbered(texts, feature, bad), bad
        array = _of_arrow(values, feature, bad)
    else:
        array = _stacked(column, bad)
        if feature.kind == "class" and array.dtype.kind in "UO":
            texts = pa.array([None if t is None else str(t) for t in array.tolist()], pa.string())
            return _numbered(texts, feature, bad), bad
    fitted = _fitted(array, feature, bad)
    if feature.num_values:
        wrong = (fitted < 0) | (fitted >= feature.num_values)
        for row in _rows_with(wrong):
            what = f"is {np.ravel(fitted[row])[0]}; labels must be 0 to {feature.num_values - 1}"
            bad.setdefault(row, what)
    return fitted, bad


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _nulls(values: pa.Array) -> list[int]:
    rows: list[int] = pc.indices_nonzero(values.is_null()).to_pylist() if values.null_count else []
    return rows


def _rows_with(wrong: np.ndarray) -> list[int]:
    """Return the samples with an entry that is set, of an array with the samples first."""
    if not wrong.any():  # a quarter of the time, and nearly always
        return []
    rows: list[int] = np.flatnonzero(wrong.reshape(len(wrong), -1).any(1)).tolist()
    return rows


def array_of(values: pa.Array) -> np.ndarray:
    """Return numbers without nulls as an array that may not be written.

    Of integers and floats without ``to_numpy``, which would import pandas, where it is installed:
    0.2 s in each process.
    """
    if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
        return np.from_dlpack(values)
    array: np.ndarray = values.to_numpy(zero_copy_only=False)
    return array


def _texts(values: pa.Array) -> pa.Array | None:
    """Return values that are texts as strings, or None."""
    type = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    is_text = pa.types.is_string(type) or pa.types.is_large_string(type)
    return values.cast(pa.string()) if is_text else None


def _numbered(texts: pa.Array, feature: Feature, bad: Bad) -> np.ndarray:
    """Return the number of each class by its name."""
    found = pc.index_in(texts, pa.array(feature.names, pa.string())).fill_null(-1)
    numbers: np.ndarray = array_of(found).astype(np.int64)
    for row in np.flatnonzero(numbers < 0).tolist():
        bad.setdefault(row, f"is {texts[row].as_py()!r}, which is none of the classes")
    return numbers


def _of_arrow(values: pa.Array, feature: Feature, bad: Bad) -> np.ndarray:
    """Return numbers, lists or tensors as an array; 0 for a sample that is bad."""
    shape = feature.shape
    if isinstance(values.type, pa.BaseExtensionType):
        if not is_list(values.type.storage_type):  # tensors of several shapes
            return _stacked(_tensors(values), bad)
        values = values.storage
    if is_list(values.type):
        _find_uneven(values, bad)
    if not bad:
        return _flat(values, shape)
    keep = np.setdiff1d(np.arange(len(values)), list(bad))
    good = _flat(values.take(pa.array(keep)), shape)
    array = np.zeros((len(values), *good.shape[1:]), good.dtype)
    array[keep] = good
    return array


def _flat(values: pa.Array, shape: tuple[int | None, ...]) -> np.ndarray:
    """Return lists of equal lengths, without nulls, as one array."""
    sizes = [len(values)]
    while is_list(values.type):
        inner = values.flatten()
        sizes.append(len(inner) // max(1, len(values)))
        values = inner
    if dtype_of(values.type) == "text":
        raise ValueError(
            f"must hold numbers, got {values.type}; name the columns to read in input.columns"
        )
    known = [n for n in shape if n is not None]
    if len(known) == len(shape) and sizes[0] and math.prod(sizes[1:]) == math.prod(known):
        sizes[1:] = known  # tensors are stored as flat lists
    return array_of(values).reshape(sizes)


def _find_uneven(values: pa.Array, bad: Bad) -> None:
    """Note the samples whose lists have other lengths than the first, or hold nulls."""
    rows = np.arange(len(values))
    while is_list(values.type):
        lengths = array_of(pc.list_value_length(values).fill_null(-1))
        usual = next((int(n) for n in lengths if n >= 0), 0)
        for place in np.flatnonzero((lengths != usual) & (lengths >= 0)).tolist():
            bad.setdefault(int(rows[place]), f"has {lengths[place]} values, but others {usual}")
        rows, values = np.repeat(rows, np.maximum(lengths, 0)), values.flatten()
        for place in _nulls(values):
            bad.setdefault(int(rows[place]), "holds a null")


def _tensors(values: pa.Array) -> np.ndarray:
    """Return tensors of Arrow or Ray: one array, or one of objects if their shapes differ."""
    if hasattr(values, "to_numpy_ndarray"):
        array: np.ndarray = values.to_numpy_ndarray()
    else:
        array = values.to_numpy(zero_copy_only=False)
    return array


def _stacked(samples: Any, bad: Bad) -> np.ndarray:
    """Return samples as one array; those of another shape than the first are bad."""
    if isinstance(samples, np.ndarray) and samples.dtype != object:
        return samples
    arrays: list[np.ndarray | None] = []
    for row, sample in enumerate(samples):
        arrays.append(None)
        if sample is None or isinstance(sample, Exception):
            bad[row] = "is None" if sample is None else sample
        else:
            arrays[row] = np.asarray(sample)
    usual = next((a for a in arrays if a is not None), np.zeros(()))
    for row, array in enumerate(arrays):
        if array is not None and array.shape != usual.shape:
            bad[row] = f"is {size_text(array.shape)}, but the first one is {size_text(usual.shape)}"
    zeros = np.zeros_like(usual)
    return np.stack([zeros if row in bad or a is None else a for row, a in enumerate(arrays)])


def _fitted(values: np.ndarray, feature: Feature, bad: Bad) -> np.ndarray:
    """Return numbers in the type of a batch; a value that would become another one is bad."""
    if np.can_cast(values.dtype, feature.dtype):
        return values.astype(feature.dtype, copy=False)
    if values.dtype.kind not in "iufb":
        raise ValueError(f"must hold numbers, got {values.dtype}; leave the column out")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(feature.dtype)
    if values.dtype.kind == "f" and cast.dtype.kind == "f":
        wrong = np.isinf(cast) & ~np.isinf(values)
    elif values.dtype.kind == "u":
        wrong = cast < 0
    else:
        wrong = np.zeros(len(values), bool) if cast.dtype.kind == "f" else cast != values
    for row in _rows_with(wrong):
        bad.setdefault(row, f"is {np.ravel(values[row])[0]}, which {feature.dtype} does not hold")
    return cast
