"""The same samples by every road: the same bits, order, class names and errors.

A kind of source gets a row in ``FILES``, or in ``ALL`` if it holds decoded images.
"""

import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from image_files import make_pictures, png_of

from raydl.config import InputConfig
from raydl.data import load
from raydl.data.schema import hub_metadata
from raydl.errors import DataError
from raydl.tools.convert import convert

NAMES = ("cat", "dog", "owl")
COUNT = 24
PIXELS = make_pictures(COUNT, (8, 8, 3))
LABELS = np.repeat(np.arange(3), COUNT // 3)  # class folders are read class by class
IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def table(images, labels=LABELS, names=NAMES):
    """Return images in the layout of the hub; labels without names if there are none."""
    cells = [{"bytes": image, "path": None} for image in images]
    features = {"image": {"_type": "Image"}}
    if names:
        features["label"] = {"_type": "ClassLabel", "names": list(names)}
    columns = {"image": pa.array(cells, IMAGE), "label": list(labels)}
    return pa.table(columns).replace_schema_metadata(hub_metadata(features))


def parquet(folder, images):
    pq.write_table(table(images), folder / "train.parquet", row_group_size=7)
    pq.write_table(table(images), folder / "test.parquet")


def several_files(folder, images):
    whole = table(images)
    for number, (start, stop) in enumerate(((0, 9), (9, COUNT))):
        part = whole.slice(start, stop - start)
        pq.write_table(part, folder / f"train-{number:05}-of-00002.parquet", row_group_size=4)
    pq.write_table(whole, folder / "validation.parquet")


def texts(folder, images):
    named = table(images, [NAMES[label] for label in LABELS], names=None)
    for part in ("train", "test"):
        pq.write_table(named, folder / f"{part}.parquet", row_group_size=7)


def saved(folder, images):
    whole = table(images)
    for part in ("train", "test"):
        (folder / part).mkdir()
        name = "data-00000-of-00001.arrow"
        with pa.ipc.new_stream(folder / part / name, whole.schema) as stream:
            stream.write_table(whole, max_chunksize=7)
        state = {"_data_files": [{"filename": name}]}
        (folder / part / "state.json").write_text(json.dumps(state))
        (folder / part / "dataset_info.json").write_text("{}")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))


def folders(folder, images):
    for part in ("train", "test"):
        for number, (image, label) in enumerate(zip(images, LABELS, strict=True)):
            place = folder / part / NAMES[label] / f"{number:03}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(image)


def arrays(folder, images):
    y = LABELS.astype(np.uint8)
    np.savez(folder / "set.npz", x_train=PIXELS, y_train=y, x_test=PIXELS, y_test=y)


FILES = {
    "parquet": parquet, "several files": several_files, "labels as texts": texts, "saved": saved,
    "class folders": folders,
}  # fmt: skip
"""Roads of encoded images."""
ALL = {**FILES, "npz": arrays}


def made(road, folder, images=None):
    """Write the set for a road, and return its source."""
    ALL[road](folder, [png_of(pixels) for pixels in PIXELS] if images is None else images)
    return str(folder / "set.npz") if road == "npz" else str(folder)


@pytest.mark.parametrize("stream", ["never", "always"])
@pytest.mark.parametrize("road", ALL)
def test_every_road_gives_the_same_samples(tmp_path, road, stream):
    data = load(made(road, tmp_path), input=InputConfig(stream=stream, shuffle_samples=10))
    rows = np.random.default_rng(0).permutation(COUNT)[:17]
    for part in (data.train, data.test, pickle.loads(pickle.dumps(data.train))):
        images, labels = part.fetch(rows)
        assert np.array_equal(images, np.moveaxis(PIXELS[rows], 3, 1))
        assert np.array_equal(labels, LABELS[rows])
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert part.shape.class_names == (NAMES if road in FILES else ("0", "1", "2"))
    assert data.train.is_streamed == (stream == "always" and road in FILES)


@pytest.mark.parametrize("stream", ["never", "always"])
@pytest.mark.parametrize("road", ALL)
def test_an_epoch_has_each_sample_once_in_an_order_of_its_mode(tmp_path, road, stream):
    data = load(made(road, tmp_path), input=InputConfig(stream=stream, shuffle_samples=10))
    order = data.train.order(5)
    epochs = [order.rows(epoch, np.arange(COUNT)).tolist() for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(COUNT))
    is_in_blocks = stream == "always" and road in ("parquet", "several files", "labels as texts",
                                                   "saved")  # fmt: skip
    assert order.name.startswith("streamed" if is_in_blocks else "in memory")
    if not is_in_blocks:
        random = np.random.default_rng([5, 0])
        assert epochs[0] == random.permutation(COUNT).tolist()


@pytest.mark.parametrize("stream", ["never", "always"])
@pytest.mark.parametrize("road", FILES)
def test_a_damaged_image_is_the_same_sentence_on_every_road(tmp_path, road, stream):
    images = [png_of(pixels) for pixels in PIXELS]
    images[13] = images[13][:60]
    source = made(road, tmp_path, images)
    with pytest.raises(DataError) as caught:
        load(source, input=InputConfig(stream=stream)).train.fetch(np.arange(COUNT))
    assert caught.value.problem == "the image does not decode: OSError: image file is truncated"
    assert caught.value.source.endswith(("row 6", "row 4", "row 0", "dog/013.png"))


@pytest.mark.parametrize("road", FILES)
def test_a_damaged_image_is_skipped_and_told_on_every_road(tmp_path, road):
    images = [png_of(pixels) for pixels in PIXELS]
    images[13] = images[13][:60]
    data = load(made(road, tmp_path, images), input=InputConfig(on_bad_sample="skip"))
    batch, rows, problems = data.train.fetch_readable(np.arange(COUNT))
    assert 13 not in rows
    assert (len(batch[0]), len(rows), len(problems)) == (COUNT - 1, COUNT - 1, 1)


def damaged(data, random):
    """Return a file that is cut short, or in which some bytes are others."""
    made = bytearray(data)
    if random.integers(3) == 0:
        return bytes(made[: random.integers(len(made))])
    for _ in range(random.integers(1, 8)):
        made[random.integers(len(made))] = random.integers(256)
    return bytes(made)


@pytest.mark.parametrize(
    ("road", "name"),
    [("parquet", "train.parquet"), ("saved", "train/data-00000-of-00001.arrow"),
     ("npz", "set.npz")],
)  # fmt: skip
def test_a_damaged_file_is_read_or_refused_in_one_sentence(tmp_path, road, name):
    source, file, random = made(road, tmp_path), tmp_path / name, np.random.default_rng(0)
    whole = file.read_bytes()
    for number in range(16):
        file.write_bytes(damaged(whole, random))
        stream = ("never", "always")[number % 2]
        try:
            load(source, input=InputConfig(stream=stream)).train.fetch(np.arange(3))
        except DataError as error:
            refused = str(error)
        else:
            refused = ""
        assert "\n" not in refused


@pytest.mark.parametrize("road", ALL)
def test_a_converted_set_is_read_as_the_set(tmp_path, road):
    (tmp_path / "in").mkdir()
    convert(made(road, tmp_path / "in"), str(tmp_path / "out"))
    images, labels = load(str(tmp_path / "out")).train.fetch(np.arange(COUNT))
    assert np.array_equal(images, np.moveaxis(PIXELS, 3, 1))
    assert np.array_equal(labels, LABELS)


@pytest.mark.parametrize("stream", ["never", "always"])
@pytest.mark.parametrize("road", FILES)
def test_classes_are_mapped_by_name_to_those_of_a_run(tmp_path, road, stream):
    (tmp_path / "run").mkdir()
    other = ("owl", "cat", "dog")
    run = table([png_of(p) for p in PIXELS], [other.index(NAMES[n]) for n in LABELS], other)
    for part in ("train", "test"):
        pq.write_table(run, tmp_path / "run" / f"{part}.parquet")
    like = load(str(tmp_path / "run")).schema
    (tmp_path / "set").mkdir()
    source = made(road, tmp_path / "set")
    data = load(source, input=InputConfig(stream=stream), like=like)
    assert data.train.shape.class_names == other
    labels = data.test.fetch(np.arange(COUNT))[1]
    assert [other[label] for label in labels] == [NAMES[label] for label in LABELS]


def test_data_that_are_not_those_of_a_run_are_refused(tmp_path):
    images = [png_of(pixels) for pixels in PIXELS]
    for name, made_so in (
        ("run", table(images)),
        ("numbers", table(images, names=None)),
        ("others", table(images, names=("cat", "dog", "cow"))),
        ("small", table([png_of(pixels[:4, :4]) for pixels in PIXELS])),
        ("rows", pa.table({"x": [1.0, 2.0]})),
    ):
        (tmp_path / name).mkdir()
        for part in ("train", "test"):
            pq.write_table(made_so, tmp_path / name / f"{part}.parquet")
    like = load(str(tmp_path / "run")).schema
    for name, sentence in (
        ("numbers", "'label' holds int64, but elsewhere the classes cat, dog, owl"),
        ("others", "'label' has the class 'cow', but elsewhere the classes cat, dog, owl"),
        ("small", "'image' holds images of 3x4x4, but elsewhere images of 3x8x8"),
        ("rows", "must have a column image, got x"),
    ):
        with pytest.raises(DataError, match=sentence):
            load(str(tmp_path / name), like=like)


@pytest.mark.parametrize("stream", ["never", "always"])
@pytest.mark.parametrize("files", [("train-0", "train-1", "test"), ("train", "test")])
def test_another_order_of_names_within_a_source_is_refused(tmp_path, stream, files):
    images = [png_of(pixels) for pixels in PIXELS]
    for number, name in enumerate(files):
        names = NAMES if number != 1 else NAMES[::-1]
        pq.write_table(table(images, names=names), tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match="names its classes owl, dog, cat, but elsewhere cat, dog"):
        load(str(tmp_path), input=InputConfig(stream=stream))
