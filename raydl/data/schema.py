"""What a source holds: named features, and the differences between two descriptions of data.

The vocabulary is Arrow's types and the features in the metadata of the Hugging Face hub. Every kind
of source has such a schema, so two of them are compared in one place: the files of a part, the
training set with the test set, a run with its resume and with the data that it is scored on.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from raydl.config.typed import typed
from raydl.errors import DataError

IMAGE_NAMES = ("image", "img")
"""Names of a column of encoded images that the metadata do not describe."""
LABEL_NAMES = ("label", "labels", "fine_label")
"""Names of a column of classes, first the one that is taken if there are several."""
_MOST_NAMED = 8
"""Classes to name in a message."""
_DTYPES = {"f": "float32", "i": "int64", "u": "int64", "b": "bool"}


@dataclass(frozen=True)
class Feature:
    """One named value of each sample."""

    kind: str
    """image, class, number, vector, text or tokens."""
    dtype: str
    """Type in a batch: uint8, int64, float32 or bool; text if a batch cannot hold it."""
    shape: tuple[int | None, ...] = ()
    """Shape of one sample, [C, H, W] of an image; None where only the samples tell."""
    names: tuple[str, ...] = ()
    """Names of the classes by number; () if the file has none."""
    vocabulary: int = 0
    """Different tokens; 0: unknown."""
    stored: str = field(default="", compare=False)
    """Type in the file, in Arrow's words."""

    @property
    def num_values(self) -> int:
        """Classes, or tokens of the vocabulary; 0: any value is valid."""
        return len(self.names) or self.vocabulary

    def __str__(self) -> str:
        if self.kind in ("image", "text"):
            return f"{self.kind}s"
        if self.kind == "tokens":
            context = (self.shape[0] or 0) - 1
            return f"{context} tokens and the next one, of {self.vocabulary}"
        if self.kind == "class":
            return f"the classes {_listed(self.names)}" if self.names else "classes without names"
        if None in self.shape and len(self.shape) > 1:
            return f"{self.dtype} tensors of {len(self.shape)} dimensions"
        if None in self.shape:
            return f"lists of {self.dtype}"
        return f"vectors of {size_text(self.shape)} {self.dtype}" if self.shape else self.dtype


Schema = Mapping[str, Feature]
"""Features by name, in the order of the columns."""


@dataclass(frozen=True)
class Difference:
    """Why a sample of one schema is not a sample of another."""

    name: str
    problem: str
    """The rest of a sentence about the second source."""
    numbering: tuple[int, ...] | None = None
    """If both name the same classes in another order: the first schema's number of each class of
    the second."""


def hub_metadata(features: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a schema with these features by column."""
    return {"huggingface": json.dumps({"info": {"features": features}})}


def schema_of(schema: pa.Schema) -> dict[str, Feature]:
    """Return the features of an Arrow schema, also by the metadata of the Hugging Face hub."""
    metadata = (schema.metadata or {}).get(b"huggingface") or b"{}"
    hub = json.loads(metadata).get("info", {}).get("features") or {}
    return {f.name: _feature(f.name, f.type, hub.get(f.name) or {}) for f in schema}


def _feature(name: str, type: pa.DataType, hub: Mapping[str, Any]) -> Feature:
    stored = str(type)
    if hub.get("_type") == "Image" or _is_image(name, type):
        return Feature("image", "uint8", (None, None, None), stored=stored)
    if hub.get("names") is not None and pa.types.is_integer(type):
        return Feature("class", "int64", names=tuple(map(str, hub["names"])), stored=stored)
    shape, type = _shape_and_type(type)
    return _plain(dtype_of(type), shape, stored)


def _plain(dtype: str, shape: tuple[int | None, ...], stored: str) -> Feature:
    kind = "text" if dtype == "text" else "vector" if shape else "number"
    return Feature(kind, dtype, shape, stored=stored)


def _is_image(name: str, type: pa.DataType) -> bool:
    """Whether a column without metadata holds images: of that name, or files as structs."""
    if pa.types.is_struct(type):
        return bool(type.get_field_index("bytes") >= 0)
    # Encoded, or a path.
    is_file = type in (pa.binary(), pa.large_binary(), pa.string(), pa.large_string())
    return name in IMAGE_NAMES and (is_file or isinstance(type, pa.BaseExtensionType))


def _shape_and_type(type: pa.DataType) -> tuple[tuple[int | None, ...], pa.DataType]:
    """Return (shape of one value, type of its elements)."""
    shape: tuple[int | None, ...] = ()
    is_tensor = isinstance(type, pa.BaseExtensionType)  # of Arrow, of Ray, or of datasets
    if is_tensor:
        shape, type = tuple(getattr(type, "shape", None) or ()), type.storage_type
    while is_list(type):
        shape += () if is_tensor else (getattr(type, "list_size", None),)
        type = type.value_type
    return shape, type


def is_list(type: pa.DataType) -> bool:
    """Whether the values of a type are lists."""
    is_any = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_it(type) for is_it in is_any)


def dtype_of(type: pa.DataType) -> str:
    """Return the type in a batch of the values of a type that is no list; text if it has none."""
    if pa.types.is_boolean(type):
        return "bool"
    if pa.types.is_integer(type):
        return "int64"
    return "float32" if pa.types.is_floating(type) else "text"


def schema_of_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Feature]:
    """Return the features of arrays whose first dimension is the samples."""
    return {
        name: _plain(_DTYPES.get(array.dtype.kind, "text"), array.shape[1:], str(array.dtype))
        for name, array in arrays.items()
    }


def compare(first: Schema, other: Schema) -> list[Difference]:
    """Return why samples of the second schema are not samples of the first, one per feature.

    A difference that has a ``numbering`` can be bridged: both name the same classes. Features that
    only the second has do not count, nor do classes that it lacks.
    """
    found = []
    for name, feature in first.items():
        if name not in other:
            found.append(Difference(name, _missing(name, other)))
        elif difference := _difference(name, feature, other[name]):
            found.append(difference)
    return found


def _missing(name: str, schema: Schema) -> str:
    """Return the sentence about a column that is not there."""
    near = difflib.get_close_matches(name, schema, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"must have a column {name}{hint}, got {', '.join(schema)}"


def _difference(name: str, a: Feature, b: Feature) -> Difference | None:
    if a.kind == "class" and (b.kind == "text" or _numbers_alone(a, b)):
        return None  # texts are looked up among the names
    if a.kind == "class" and b.kind == "class":
        return _of_names(name, a.names, b.names)
    fits = len(a.shape) == len(b.shape) and all(
        None in pair or pair[0] == pair[1] for pair in zip(a.shape, b.shape, strict=True)
    )
    if (a.kind, a.dtype) == (b.kind, b.dtype) and fits and b.vocabulary <= a.vocabulary:
        return None
    return Difference(name, f"column {name!r} holds {_beside(b, a)}, but elsewhere {_beside(a, b)}")


def _beside(feature: Feature, other: Feature) -> str:
    """Return a feature in words that tell it from another one."""
    if feature.kind == other.kind == "image":
        return f"images of {size_text(feature.shape)}"
    return str(feature)


def size_text(shape: Sequence[int | None]) -> str:
    """Return the text of a shape: ``3x32x32``; of (): ``a number``."""
    return "x".join("?" if n is None else str(n) for n in shape) or "a number"


def _numbers_alone(a: Feature, b: Feature) -> bool:
    """Whether classes that are named by their numbers meet numbers, or others named so."""
    return _is_numbered(a.names) and b.dtype in ("int64", "bool") and _is_numbered(b.names)


def _is_numbered(names: Sequence[str]) -> bool:
    return list(names) == [str(number) for number in range(len(names))]


def _of_names(name: str, a: tuple[str, ...], b: tuple[str, ...]) -> Difference | None:
    if b == a[: len(b)]:
        return None
    new = sorted(set(b) - set(a))
    if new:
        problem = (
            f"column {name!r} has the class {new[0]!r}, but elsewhere the classes {_listed(a)}"
        )
        return Difference(name, problem)
    number = {text: n for n, text in enumerate(a)}
    return Difference(
        name,
        f"column {name!r} names its classes {_listed(b)}, but elsewhere {_listed(a)}",
        tuple(number[text] for text in b),
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def columns_of(
    schema: Schema, wanted: Sequence[str] = (), *, source: str, target: str = ""
) -> dict[str, str]:
    """Return the stored name of each column of a batch: of image and label, or of a table's own.

    Args:
        schema: the stored features.
        wanted: columns that the user names, which are used and no others; (): all that there are.
        source: the file, for messages.
        target: column to predict that the user names.

    Raises:
        DataError: if a column is missing, or it is not clear which holds the images or the classes.
    """
    for name in (*wanted, *([target] if target else [])):
        if name not in schema:
            raise DataError(source, _missing(name, schema))
    names = list(wanted or schema)
    images = [name for name in names if schema[name].kind == "image"]
    if not images:
        return {name: name for name in dict.fromkeys([*names, *filter(None, [target])])}
    if len(images) > 1:
        raise DataError(
            source,
            f"has several columns of images, {', '.join(images)}; name one, and the labels, in "
            f"input.columns",
        )
    others = [name for name in names if name != images[0]]
    labels = [target] if target else _labels_among(schema, others, is_named=bool(wanted))
    if len(labels) != 1:
        what = "several columns" if labels else "no column"
        raise DataError(
            source,
            f"has {what} of labels for the images in {images[0]!r}, got "
            f"{', '.join(labels or schema)}; name both columns in input.columns",
        )
    return {"image": images[0], "label": labels[0]}


def _labels_among(schema: Schema, names: Sequence[str], *, is_named: bool) -> list[str]:
    """Return the columns that may hold the classes of images, one if it is clear which."""
    if is_named and len(names) == 1:
        return list(names)
    usual = [name for name in LABEL_NAMES if name in names]
    classes = [name for name in names if schema[name].kind == "class"]
    if len(classes) == 1 or not usual:
        return classes
    return usual[:1]


def as_classes(feature: Feature, names: Sequence[str]) -> Feature:
    """Return the feature of a column whose values are numbers of these classes, or their names."""
    return replace(feature, kind="class", dtype="int64", shape=(), names=tuple(names))


def to_json(schema: Schema) -> dict[str, dict[str, Any]]:
    """Return a schema as values of JSON, for the folder of a run."""
    return {name: asdict(feature) for name, feature in schema.items()}


def from_json(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Feature]:
    """Return the schema that ``to_json`` has written.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return typed(dict[str, Feature], values)
    except ValueError as error:
        raise ValueError(f"its schema of the data is damaged: {error}") from error
