"""The same samples by every road: the same bits, order, class names and errors.

A kind of source gets a row in ``FILES`` of ``image_sets``, or in ``ALL`` if its images are decoded.
"""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from image_files import png_of
from image_sets import ALL, COUNT, ENCODED, FILES, LABELS, NAMES, PIXELS, made, table

from raydl.config import InputConfig
from raydl.data import load
from raydl.errors import DataError
from raydl.tools.convert import convert


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
    assert data.train.is_streamed == (stream == "always" and road in ENCODED)


@pytest.mark.parametrize("stream", ["never", "always"])
@pytest.mark.parametrize("road", ALL)
def test_an_epoch_has_each_sample_once_in_an_order_of_its_mode(tmp_path, road, stream):
    data = load(made(road, tmp_path), input=InputConfig(stream=stream, shuffle_samples=10))
    order = data.train.order(5)
    epochs = [order.rows(epoch, np.arange(COUNT)).tolist() for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(COUNT))
    is_in_blocks = stream == "always" and road in ("parquet", "several files", "labels as texts",
                                                   "saved", "paths")  # fmt: skip
    assert order.name.startswith("streamed" if is_in_blocks else "in memory")
    if not is_in_blocks:
        random = np.random.default_rng([5, 0])
        assert epochs[0] == random.permutation(COUNT).tolist()


@pytest.mark.parametrize("stream", ["never", "always"])
@pytest.mark.parametrize("road", ENCODED)
def test_a_damaged_image_is_the_same_sentence_on_every_road(tmp_path, road, stream):
    images = [png_of(pixels) for pixels in PIXELS]
    images[13] = images[13][:60]
    source = made(road, tmp_path, images)
    with pytest.raises(DataError) as caught:
        load(source, input=InputConfig(stream=stream)).train.fetch(np.arange(COUNT))
    assert caught.value.problem == "the image does not decode: OSError: image file is truncated"
    assert caught.value.source.endswith(("row 6", "row 4", "row 0", "dog/013.png", "sample 013"))


@pytest.mark.parametrize("road", ENCODED)
def test_a_damaged_image_is_skipped_and_told_on_every_road(tmp_path, road):
    images = [png_of(pixels) for pixels in PIXELS]
    images[13] = images[13][:60]
    data = load(made(road, tmp_path, images), input=InputConfig(on_bad_sample="skip"))
    batch, rows, problems = data.train.fetch_readable(np.arange(COUNT))
    assert 13 not in rows
    assert (len(batch[0]), len(rows), len(problems)) == (COUNT - 1, COUNT - 1, 1)


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
