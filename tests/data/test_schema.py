"""Two descriptions of data are compared in one place, and every difference is told."""

import pyarrow as pa
import pytest

from raydl.data.schema import (
    Feature,
    columns_of,
    compare,
    from_json,
    hub_metadata,
    schema_of,
    to_json,
)
from raydl.errors import DataError

IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def described(columns, **names):
    """Return the schema of columns, of which some have class names."""
    features = {name: {"_type": "ClassLabel", "names": list(text)} for name, text in names.items()}
    return schema_of(pa.schema(columns, metadata=hub_metadata(features)))


@pytest.mark.parametrize(
    ("type", "kind", "dtype", "shape"),
    [
        (pa.int16(), "number", "int64", ()),
        (pa.float64(), "number", "float32", ()),
        (pa.bool_(), "number", "bool", ()),
        (pa.string(), "text", "text", ()),
        (pa.list_(pa.float32(), 3), "vector", "float32", (3,)),
        (pa.list_(pa.list_(pa.int8())), "vector", "int64", (None, None)),
        (pa.fixed_shape_tensor(pa.int8(), [2, 3]), "vector", "int64", (2, 3)),
        (IMAGE, "image", "uint8", (None, None, None)),
    ],
)
def test_a_stored_type_is_a_feature_of_one_kind(type, kind, dtype, shape):
    assert described({"x": type})["x"] == Feature(kind, dtype, shape)


def test_bytes_are_images_only_under_the_name_of_a_column_of_images():
    found = described({"img": pa.binary(), "hash": pa.binary()})
    assert (found["img"].kind, found["hash"].kind) == ("image", "text")


def test_all_differences_are_told_and_not_only_the_first():
    first = described({"x": pa.int64(), "y": pa.list_(pa.float32(), 3), "z": pa.int64()})
    other = described({"x": pa.float64(), "y": pa.list_(pa.float32(), 4), "more": pa.int64()})
    assert [difference.problem for difference in compare(first, other)] == [
        "column 'x' holds float32, but elsewhere int64",
        "column 'y' holds vectors of 4 float32, but elsewhere vectors of 3 float32",
        "must have a column z, got x, y, more",
    ]


def test_columns_of_types_that_are_one_type_in_a_batch_agree():
    assert not compare(described({"x": pa.int64()}), described({"x": pa.int8(), "y": pa.string()}))


def test_the_same_classes_in_another_order_can_be_mapped_by_name():
    first = described({"label": pa.int64()}, label=("cat", "dog", "owl"))
    other = described({"label": pa.int32()}, label=("owl", "cat"))
    (difference,) = compare(first, other)
    assert difference.numbering == (2, 0)
    (difference,) = compare(other, first)
    assert difference.numbering is None
    assert "has the class 'dog', but elsewhere the classes owl, cat" in difference.problem


def test_classes_that_the_second_set_lacks_are_no_difference():
    first = described({"label": pa.int64()}, label=("cat", "dog", "owl"))
    assert not compare(first, described({"label": pa.int64()}, label=("cat", "dog")))


def test_numbers_are_not_taken_for_classes_that_have_names():
    named = described({"label": pa.int64()}, label=("cat", "dog"))
    (difference,) = compare(named, described({"label": pa.int64()}))
    assert difference.problem.endswith("holds int64, but elsewhere the classes cat, dog")
    numbered = described({"label": pa.int64()}, label=("0", "1"))
    assert not compare(numbered, described({"label": pa.int64()}))


def test_a_schema_is_kept_as_json():
    schema = described({"image": IMAGE, "label": pa.int64()}, label=("cat", "dog"))
    assert from_json(to_json(schema)) == schema
    for damaged in ({"x": {}}, {"x": 3}, {"x": {**to_json(schema)["label"], "names": 3}}):
        with pytest.raises(ValueError, match="its schema of the data is damaged"):
            from_json(damaged)


def test_the_columns_that_a_user_names_are_used():
    columns = {"img": IMAGE, "fine_label": pa.int64(), "coarse_label": pa.int64()}
    schema = described(columns)
    assert columns_of(schema, source="s") == {"image": "img", "label": "fine_label"}
    named = columns_of(schema, ("img", "coarse_label"), source="s")
    assert named == {"image": "img", "label": "coarse_label"}
    assert columns_of(schema, ("coarse_label",), source="s") == {"coarse_label": "coarse_label"}


@pytest.mark.parametrize(
    ("columns", "wanted", "sentence"),
    [
        ({"a": pa.int64()}, ("b",), "s: must have a column b, got a"),
        ({"image": IMAGE, "digit": pa.int64()}, (), "has no column of labels for the images in"),
        ({"image": IMAGE, "mask": IMAGE}, (), "has several columns of images, image, mask; name"),
        ({"image": IMAGE}, (), "has no column of labels for the images in 'image', got image"),
    ],
)
def test_columns_that_are_not_clear_are_refused(columns, wanted, sentence):
    with pytest.raises(DataError, match=sentence):
        columns_of(described(columns), wanted, source="s")


def test_of_several_columns_of_classes_one_must_be_named_unless_it_has_a_usual_name():
    schema = described({"image": IMAGE, "a": pa.int64(), "b": pa.int64()}, a="xy", b="xy")
    with pytest.raises(DataError, match=r"several columns of labels .*, got a, b; name both"):
        columns_of(schema, source="s")
