"""Folders of datasets.save_to_disk are read as the library reads them."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from image_files import make_pictures as pictures
from image_files import png_of
from pyarrow import fs

from raydl import cli
from raydl.config import InputConfig
from raydl.data import load
from raydl.data.datasets import load_each
from raydl.data.files import Place
from raydl.data.saved_dataset import ArrowFile, HubRows, is_stored
from raydl.errors import DataError
from raydl.tools.convert import convert
from raydl.tools.data_info import inspect

ALWAYS, NEVER = (InputConfig(stream=stream, shuffle_samples=8) for stream in ("always", "never"))
BOTH = pytest.mark.parametrize("input", [ALWAYS, NEVER], ids=["streamed", "in memory"])
IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
CLASS = {"names": ["no", "yes"], "_type": "ClassLabel"}


def save(folder, columns, features=(), *, rows_per_batch=4, num_files=1, **state):
    """Write a table as save_to_disk does."""
    folder.mkdir(parents=True)
    hub = json.dumps({"info": {"features": dict(features)}})
    table = pa.table(columns).replace_schema_metadata({"huggingface": hub})
    names = [f"data-{n:05}-of-{num_files:05}.arrow" for n in range(num_files)]
    for number, name in enumerate(names):
        start, stop = (table.num_rows * n // num_files for n in (number, number + 1))
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table.slice(start, stop - start), max_chunksize=rows_per_batch)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, **state}))
    (folder / "dataset_info.json").write_text("{}")
    return str(folder)


def picture_columns(count, *labels, name="image"):
    cells = [{"bytes": png_of(p), "path": None} for p in pictures(count)]
    numbers = pa.array([n % 2 for n in range(count)], pa.int64())
    return {name: pa.array(cells, IMAGE), **dict.fromkeys(labels or ["label"], numbers)}


def save_pictures(folder, count=20, **options):
    features = {"image": {"_type": "Image"}, "label": CLASS}
    return save(folder, picture_columns(count), features, **options)


def save_splits(folder, *names):
    folder.mkdir()
    for number, name in enumerate(names):
        save_pictures(folder / name, 12 - 4 * number)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": names}))
    return str(folder)


@BOTH
def test_pictures_are_read_in_their_order_with_their_classes(tmp_path, input):
    data = load(save_splits(tmp_path / "set", "train", "test"), input=input)
    assert data.train.is_streamed == (input is ALWAYS)
    assert (data.train.num_samples, data.test.num_samples) == (12, 8)
    images, labels = data.train.fetch(np.arange(12))
    assert np.array_equal(images[:, 0], pictures(12))
    assert labels.tolist() == [0, 1] * 6
    assert data.train.shape.class_names == ("no", "yes")


def test_each_position_of_an_epoch_is_another_row(tmp_path):
    source = save(tmp_path / "set", {"y": list(range(50))}, num_files=3)
    data = load(source, input=ALWAYS)
    order = data.train.order(seed=0)
    rows = order.rows(1, np.arange(order.num_samples))
    seen = [*data.train.fetch(rows)["y"].tolist(), *data.test.fetch(np.arange(4))["y"].tolist()]
    assert sorted(seen) == list(range(50))
    again = pickle.loads(pickle.dumps(data.train))  # as in a worker
    assert torch.equal(again.fetch(rows)["y"], data.train.fetch(rows)["y"])


def test_without_a_test_split_validation_is_the_test_set_or_a_tenth(tmp_path):
    data = load(save_splits(tmp_path / "two", "train", "validation"))
    assert (data.train.num_samples, data.test.num_samples) == (12, 8)
    data = load(save_splits(tmp_path / "three", "train", "validation", "test"))
    assert data.test.num_samples == 4
    for source in (save_splits(tmp_path / "one", "train"), str(tmp_path / "two" / "train")):
        data = load(source)
        assert (data.train.num_samples, data.test.num_samples) == (11, 1)


def test_a_table_has_a_column_per_feature_and_arrays_keep_their_shape(tmp_path):
    tokens = pa.array([[n, n + 1] for n in range(20)], pa.list_(pa.int32()))
    grid = pa.array([[[0.0, 1.0], [2.0, n]] for n in range(20)], pa.list_(pa.list_(pa.float64())))
    columns = {"input_ids": tokens, "grid": grid, "label": [0, 1] * 10, "text": ["a"] * 20}
    source = save(tmp_path / "set", columns, {"label": CLASS})
    with pytest.raises(DataError, match=r"'text' must hold numbers, .*or the columns to read in"):
        load(source)
    data = load(source, input=InputConfig(columns="input_ids,grid,label"))
    assert data.train.shape.columns == {"input_ids": (2,), "grid": (2, 2), "label": ()}
    batch = data.train.fetch(np.arange(3))
    assert (batch["input_ids"].dtype, batch["grid"].dtype) == (torch.int64, torch.float32)


@BOTH
def test_a_table_keeps_labels_that_stand_for_no_class(tmp_path, input):
    columns = {"x": [1.0] * 20, "label": pa.array([0, 1, -1, -100] * 5, pa.int64())}
    data = load(save(tmp_path / "set", columns, {"label": CLASS}), input=input)
    labels = data.train.fetch(np.arange(data.train.num_samples))["label"]
    assert set(labels.tolist()) == {0, 1, -1, -100}


def test_the_columns_of_the_sets_format_are_read(tmp_path):
    columns = {"x": [1.0] * 20, "text": ["a"] * 20}
    formatted = {"_format_type": "torch", "_format_columns": ["x"]}
    source = save(tmp_path / "one", columns, **formatted)
    assert load(source).train.shape.columns == {"x": ()}
    source = save(tmp_path / "all", columns, _output_all_columns=True, **formatted)
    with pytest.raises(DataError, match="'text' must hold numbers"):
        load(source)


def test_columns_of_any_name_are_found_by_their_features_or_named(tmp_path):
    features = {"photo": {"_type": "Image"}, "animal": CLASS}
    source = save(tmp_path / "a", picture_columns(20, "animal", name="photo"), features)
    assert load(source).train.class_names == ("no", "yes")
    features |= {"color": CLASS}
    columns = picture_columns(20, "animal", "color", "digit", name="photo")
    source = save(tmp_path / "b", columns, features)
    for label, names in (("color", ("no", "yes")), ("digit", ("0", "1"))):
        data = load(source, input=InputConfig(columns=f"photo,{label}"))
        assert data.train.class_names == names


def two_pictures():
    return {**picture_columns(20), "mask": picture_columns(20)["image"]}


@pytest.mark.parametrize(
    ("columns", "features", "wanted", "sentence"),
    [
        (picture_columns(20, "digit"), {}, "",
         r"no column of labels for the images in 'image', got image, digit; name both"),
        (picture_columns(20, "fine", "coarse"), {"fine": CLASS, "coarse": CLASS}, "",
         r"several columns of labels for the images in 'image', got fine, coarse; name both"),
        (two_pictures(), {"mask": {"_type": "Image"}}, "",
         r"several columns of images, image, mask; name one, and the labels, in input\.columns"),
        (picture_columns(20), {}, "image,digit", "must have a column digit, got image, label"),
        ({"image": [1] * 9, "label": [0] * 9}, {}, "", "must hold encoded images, got int64"),
        ({"image": ["x"] * 9, "label": [0] * 9}, {}, "", "set/x: cannot be read"),
        ({"x": []}, {}, "", "holds no rows"),
    ],
)  # fmt: skip
def test_ambiguous_columns_are_reported_in_one_sentence(
    tmp_path, columns, features, wanted, sentence
):
    source = save(tmp_path / "set", columns, {"image": {"_type": "Image"}, **features})
    with pytest.raises(DataError, match=sentence) as error:
        load(source, input=InputConfig(columns=wanted))
    assert "\n" not in str(error.value)


def damage(folder, what):
    file = next(folder.glob("*.arrow"))
    if what == "truncated":
        file.write_bytes(file.read_bytes()[:-500])
    elif what == "no state":
        (folder / "state.json").unlink()
    elif what == "no information":
        (folder / "dataset_info.json").unlink()
    elif what == "no file":
        file.unlink()
    else:
        (folder / "state.json").write_text(what)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("truncated", r"data-00000-of-00001\.arrow: is not a whole Arrow file"),
        ("no state", r"set: has no state\.json: save_to_disk did not finish; save again"),
        ("no information", r"has no dataset_info\.json: save_to_disk did not finish"),
        ("no file", r"data-00000-of-00001\.arrow: is not a whole Arrow file"),
        ("{", r"state\.json: is no JSON"),
        ("[]", r"state\.json: must hold a JSON object, got a list"),
        ("{}", "holds no rows"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_sentence(tmp_path, what, sentence):
    source = save_pictures(tmp_path / "set")
    damage(tmp_path / "set", what)
    with pytest.raises(DataError, match=sentence) as error:
        load(source)
    assert "\n" not in str(error.value)


def test_the_error_for_splits_without_train_lists_them(tmp_path):
    source = save_splits(tmp_path / "set", "test", "dev")
    with pytest.raises(DataError, match="must have a split train, got test, dev; give the folder"):
        load(source)


def test_a_set_on_another_file_system_is_read_alike(tmp_path):
    save_pictures(tmp_path / "set", num_files=2)
    base = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    for number in (0, 1):
        name = f"set/data-{number:05}-of-00002.arrow"
        here = ArrowFile(Place(fs.LocalFileSystem(), str(tmp_path / name), name))
        there = ArrowFile(Place(base, name, name))
        assert there.starts == here.starts
        names = ["image", "label"]
        for group in range(3):
            ours, theirs = (file.read_group(group, names) for file in (here, there))
            assert all(ours[name].equals(theirs[name]) for name in names)
        assert there.where(5) == f"{name}, record batch 1, row 1"


def test_a_saved_set_is_described_and_converted_to_the_same_pictures(tmp_path):
    source = save_splits(tmp_path / "set", "train", "test")
    info = inspect(source)
    assert (info.kind, info.holds, info.has_test) == ("saved", "images", True)
    assert info.parts[0].group_rows == (4, 4, 4)
    convert(source, str(tmp_path / "out"))
    ours, theirs = load(source), load(str(tmp_path / "out"))
    assert np.array_equal(ours.train.images, theirs.train.images)
    assert np.array_equal(ours.test.labels, theirs.test.labels)
    assert ours.train.class_names == theirs.train.class_names


def test_the_command_trains_on_a_saved_set(tmp_path):
    source = save_splits(tmp_path / "set", "train", "test")
    arguments = ["train", "--data", source, "--model", "mlp", "--workers", "0", "--epochs", "3"]
    arguments += ["--batch-size", "4", "--run-dir", str(tmp_path / "run"), "--run.progress", "none"]
    assert cli.main(arguments) == 0
    assert json.loads((tmp_path / "run/result.json").read_text())["samples"] == 3 * 12


REAL = """
import sys
import numpy as np
import PIL.Image
from datasets import Array2D, ClassLabel, Dataset, Features, Image, Value

folder = sys.argv[1]
random = np.random.default_rng(0)
pictures = [PIL.Image.fromarray(random.integers(0, 256, (5, 6), np.uint8)) for _ in range(40)]
labels = [n % 2 for n in range(40)]
features = Features({"image": Image(), "label": ClassLabel(names=["no", "yes"])})
data = Dataset.from_dict({"image": pictures, "label": labels}, features=features)
data.shuffle(seed=1).train_test_split(0.25, seed=0).save_to_disk(f"{folder}/pictures")
features = Features({"grid": Array2D((2, 3), "float32"), "y": Value("int32"), "t": Value("string")})
rows = {"grid": random.random((40, 2, 3)), "y": range(40), "t": ["a"] * 40}
table = Dataset.from_dict(rows, features=features).with_format("torch", columns=["grid", "y"])
table.save_to_disk(f"{folder}/table", num_shards=3)
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Folders that the library wrote in another process, since it registers types with Arrow."""
    folder = tmp_path_factory.mktemp("real")
    subprocess.run([sys.executable, "-c", REAL, str(folder)], check=True, capture_output=True)
    return folder


def read_both(real):
    """Return (parts of the pictures, rows of the table) for each way in which raydl reads them."""
    found = []
    for input in (ALWAYS, NEVER):
        data = load(str(real / "pictures"), input=input)
        parts = {
            name: part.fetch(np.arange(part.num_samples))
            for name, part in (("train", data.train), ("test", data.test))
        }
        data = load(str(real / "table"), input=input)
        rows = [part.fetch(np.arange(part.num_samples)) for part in (data.train, data.test)]
        found.append((parts, rows))
    return found


@pytest.mark.processes  # its import takes seconds
def test_folders_of_the_library_are_read_as_the_library_reads_them(real):
    before = read_both(real)
    import datasets

    saved = datasets.load_from_disk(str(real / "pictures")).with_format("torch")
    table = datasets.load_from_disk(str(real / "table"))
    by_y = {int(row["y"]): row["grid"] for row in table}
    for parts, rows in (*before, *read_both(real)):  # also in a process that imports the library
        for name, (images, labels) in parts.items():
            assert torch.equal(images, saved[name]["image"][:])
            assert torch.equal(labels, saved[name]["label"][:])
        assert sorted(torch.cat([part["y"] for part in rows]).tolist()) == list(range(40))
        for part in rows:
            for y, grid in zip(part["y"].tolist(), part["grid"], strict=True):
                assert torch.equal(grid, by_y[y])


@pytest.fixture
def in_python():
    """The same rows as data sets of the library: images, and a table."""
    import datasets

    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    cells = [{"bytes": png_of(p), "path": None} for p in pictures(40)]
    images = {"image": cells, "label": [n % 2 for n in range(40)]}
    table = {"x": [[n / 3, 2.0 * n] for n in range(40)], "y": range(40), "z": [True] * 40}
    return (
        datasets.Dataset.from_dict(images, features=features),
        datasets.Dataset.from_dict(table).cast_column("y", datasets.Value("int16")),
    )


def rows_of(data):
    """Return the types and values of all samples of train and test, as lists."""
    batches = [part.fetch(np.arange(part.num_samples)) for part in (data.train, data.test)]
    named = [batch.items() if isinstance(batch, dict) else enumerate(batch) for batch in batches]
    return [(name, values.dtype, values.tolist()) for pairs in named for name, values in pairs]


@pytest.mark.processes  # its import takes seconds
def test_a_dataset_in_python_is_read_as_its_saved_folder(tmp_path, in_python):
    import datasets

    for number, whole in enumerate(in_python):
        data = whole.shuffle(seed=1).select(range(30))
        data.save_to_disk(str(tmp_path / f"{number}"))
        ours = load_each(data, HubRows, seed=3, input=NEVER, task="auto")
        theirs = load(str(tmp_path / f"{number}"), seed=3)
        assert ours.schema == theirs.schema
        assert rows_of(ours) == rows_of(theirs)
        both = {"train": data, "test": whole.select(range(30, 40))}
        datasets.DatasetDict(both).save_to_disk(str(tmp_path / f"both {number}"))
        for input in (ALWAYS, NEVER):
            ours = load_each(both, HubRows, seed=3, input=input, task="auto")
            assert rows_of(ours) == rows_of(load(str(tmp_path / f"both {number}"), input=input))


@pytest.mark.processes  # its import takes seconds
def test_a_dataset_in_python_with_a_format_gives_what_its_format_says(in_python):
    images, table = in_python
    assert all(map(is_stored, (images, table)))
    assert not is_stored(images.with_format("torch"))
    assert not is_stored(table.with_transform(lambda rows: rows))
    assert not is_stored([1, 2])


@pytest.mark.processes  # its import takes seconds
def test_a_dataset_in_python_is_refused_as_its_saved_folder_would_be(in_python):
    images, table = in_python
    settings = {"seed": 0, "input": NEVER, "task": "auto"}
    with pytest.raises(DataError, match="must be named train and test, got a, b"):
        load_each({"a": images, "b": images}, HubRows, **settings)
    with pytest.raises(DataError, match=r"column 'text' must hold numbers, got string; .*columns"):
        load_each(table.add_column("text", ["a"] * 40), HubRows, **settings)
    with pytest.raises(DataError, match="must have a column image, got x, y, z"):
        load_each({"train": images, "test": table}, HubRows, **settings)
