"""Sources as people have them are read whole, or the sentence says what is missing."""

import gzip
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_files import make_pictures, png_of, write_idx, write_parquet

import raydl
from raydl.config import InputConfig
from raydl.data import load
from raydl.errors import ConfigError, DataError
from raydl.tools.data_info import inspect


def write_images(folder, names, count=10, *, shape=(5, 6), ending="png", part=""):
    for name in names:
        (folder / part / name).mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(make_pictures(count, shape)):
            (folder / part / name / f"{number}.{ending}").write_bytes(png_of(image))


def test_the_module_of_data_is_there_after_import_raydl():
    assert raydl.data.load is load


def test_a_gzip_file_of_several_members_is_read_whole(tmp_path):
    parts = [b"first member. " * 2000, b"second member! " * 800]
    (tmp_path / "crawl.txt.gz").write_bytes(b"".join(map(gzip.compress, parts)))
    data = load(f"text:{tmp_path}/crawl.txt.gz")
    assert len(data.train.tokens) + len(data.test.tokens) == sum(map(len, parts))
    for part in ("train", "t10k"):
        raw = write_idx(make_pictures(12))
        packed = gzip.compress(raw[:100]) + gzip.compress(raw[100:])
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(packed)
        labels = write_idx(np.arange(12, dtype=np.uint8) % 2)
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    assert np.array_equal(load(str(tmp_path)).train.images[:, 0], make_pictures(12))


def test_a_folder_of_the_users_is_read_instead_of_the_bundled_set(tmp_path, monkeypatch):
    write_images(tmp_path / "digits", ("even", "odd"))
    monkeypatch.chdir(tmp_path)
    data = load("digits")
    assert data.train.class_names == ("even", "odd")
    assert data.notes == ("digits is the folder ./digits, not the bundled set of that name",)


def test_what_is_not_read_is_a_sentence_of_a_run_and_of_info(tmp_path):
    write_images(tmp_path, ("cats", "dogs"))
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/cats.json").write_text("{}")
    data = load(str(tmp_path))
    assert data.train.class_names == ("cats", "dogs")
    assert data.notes == (f"files of {tmp_path} that are not read: 1 ending in .json",)
    assert inspect(str(tmp_path)).warnings == data.notes


def test_a_class_may_have_no_test_images_and_images_may_be_tif(tmp_path):
    write_images(tmp_path, "abc", part="train", ending="tif")
    write_images(tmp_path, "bc", part="val")
    data = load(str(tmp_path))
    assert data.test.class_names == ("a", "b", "c")
    assert (data.train.num_samples, set(data.test.labels.tolist())) == (30, {1, 2})


def test_images_of_two_modes_are_said_and_can_be_decided(tmp_path):
    write_images(tmp_path, "ab", shape=(5, 6, 3))
    (tmp_path / "a/0.png").write_bytes(png_of(make_pictures(1)[0]))
    data = load(str(tmp_path))
    assert data.train.image_shape == (1, 5, 6)
    assert "decides for all, but 19 of the first 20 are in color" in data.notes[0]
    assert inspect(str(tmp_path)).warnings == data.notes
    data = load(str(tmp_path), input=InputConfig(mode="RGB"))
    assert (data.train.image_shape, data.notes) == ((3, 5, 6), ())


def test_images_of_many_sizes_are_read_at_one(tmp_path):
    write_images(tmp_path, "a")
    write_images(tmp_path, "b", shape=(9, 7))
    with pytest.raises(DataError, match="the first one is 1x5x6; give all one size by --input"):
        load(str(tmp_path))
    for stream in ("never", "always"):
        data = load(str(tmp_path), input=InputConfig(image_size=4, stream=stream))
        assert data.train.fetch(np.arange(18))[0].shape == (18, 1, 4, 4)


@pytest.mark.parametrize("stream", ["never", "always"])
@pytest.mark.parametrize("labels", [[10**12, 5], np.array([2**63 + 1, 3], np.uint64)])
def test_labels_that_are_ids_are_refused_with_their_number(tmp_path, stream, labels):
    images = [{"bytes": png_of(image), "path": None} for image in make_pictures(2)]
    for part in ("train", "test"):
        pq.write_table(pa.table({"image": images, "label": labels}), tmp_path / f"{part}.parquet")
    with pytest.raises(DataError, match="holds ids, not classes: 2 different values"):
        load(str(tmp_path), input=InputConfig(stream=stream))


def test_the_time_grows_with_the_columns_and_not_with_their_square(tmp_path):
    times = []
    for count in (500, 4000):
        table = pa.table({f"gene_{n}": [float(n)] * 4 for n in range(count)})
        folder = tmp_path / str(count)
        folder.mkdir()
        for name in ("train-0", "train-1", "test-0"):
            pq.write_table(table, folder / f"{name}.parquet")
        start = time.process_time()
        load(str(folder))
        times.append(time.process_time() - start)
    assert times[1] < 24 * times[0]  # its square would be 64 times


def test_a_store_that_cannot_be_reached_is_one_sentence(monkeypatch):
    def fail(uri):
        raise RuntimeError("Name or service not known")

    monkeypatch.setattr("raydl.data.files.open_filesystem", fail)
    with pytest.raises(DataError, match=r"hf://datasets/x/y: cannot be opened: .*not known"):
        load("hf://datasets/x/y")


def test_an_npz_says_what_it_really_is(tmp_path):
    images, labels = make_pictures(30), np.arange(30) % 3
    path = tmp_path / "x.npz"
    np.savez(path, images=images, labels=labels, names=np.array(["a", "b"], object))
    assert load(str(path)).train.num_samples == 27  # what is not used is not read
    np.savez_compressed(path, images=images, labels=labels)
    damaged = bytearray(path.read_bytes())
    damaged[60] ^= 0x55
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"is not a whole \.npz file"):
        load(str(path))
    with open(path, "wb") as file:
        np.save(file, images)
    with pytest.raises(DataError, match=r"is an \.npy file, one array"):
        load(str(path))


def test_a_part_named_by_a_word_of_the_hub_is_no_training_set(tmp_path):
    write_parquet(tmp_path / "mnist_train.parquet", make_pictures(12), [0, 1] * 6)
    write_parquet(tmp_path / "mnist_test.parquet", make_pictures(4), [0, 1] * 2)
    data = load(str(tmp_path))
    assert (data.train.num_samples, data.test.num_samples) == (12, 4)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"span": "5"}, "input.span must be two numbers LOW,HIGH"),
        ({"span": "9,3"}, "input.span must be two numbers LOW,HIGH"),
        ({"image_size": 0}, "input.image_size must be 1 or more"),
    ],
)
def test_settings_of_images_are_checked(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        InputConfig(**settings)
