"""Every kind of input is read, and broken input is an error with its reason."""

import gzip
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from image_files import make_pictures as pictures
from image_files import png_of as png
from image_files import write_idx as idx
from image_files import write_parquet

from raydl.config import InputConfig
from raydl.data import Batches, ImageSet, Normalizer, channel_statistics, load
from raydl.errors import DataError, UnknownNameError
from raydl.tools.data_info import inspect


@pytest.fixture
def hub(tmp_path):
    """A folder in the hub's layout with 12 training and 4 test pictures."""
    write_parquet(tmp_path / "train-00000-of-00002.parquet", pictures(8), [0, 1] * 4, ["a", "b"])
    write_parquet(tmp_path / "train-00001-of-00002.parquet", pictures(4), [1] * 4, ["a", "b"])
    write_parquet(tmp_path / "test-00000-of-00001.parquet", pictures(4), [0] * 4, ["a", "b"])
    return tmp_path


def test_the_bundled_digits_are_complete():
    digits = load("digits")
    assert (digits.train.num_samples, digits.test.num_samples) == (1438, 359)
    assert digits.train.image_shape == (1, 8, 8)
    assert digits.train.num_classes == 10
    assert digits.train.images.max() == 255


@pytest.mark.processes
def test_pictures_are_read_without_pandas():
    code = "import raydl.data, sys; raydl.data.load('digits'); sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_folder_a_glob_and_a_uri_of_parquet_are_the_same(hub):
    sources = [str(hub), f"{hub}/*.parquet", hub.as_uri()]
    first, *others = [load(source) for source in sources]
    assert first.train.images.shape == (12, 1, 5, 6)
    assert np.array_equal(first.train.images[:8, 0], pictures(8))
    assert first.train.class_names == ("a", "b")
    for other in others:
        assert np.array_equal(first.train.images, other.train.images)
        assert np.array_equal(first.test.labels, other.test.labels)


@pytest.mark.parametrize("name", ["set*", "[v1]", "what?", "100%20", "x#y", "{a,b}"])
def test_a_folder_that_exists_is_read_whatever_its_name(hub, tmp_path, name):
    folder = tmp_path / "sets" / name
    shutil.copytree(hub, folder)
    (folder.parent / "set1").mkdir()
    for source in (folder, f"{folder}/*.parquet"):
        assert load(str(source)).train.num_samples == 12


@pytest.mark.parametrize("test_file", ["test-0", "test_0", "validation-0", "test"])
def test_files_of_a_test_set_are_not_trained_on_whatever_the_others_are_called(tmp_path, test_file):
    write_parquet(tmp_path / "part-0.parquet", pictures(8), [0, 1] * 4)
    write_parquet(tmp_path / "testament.parquet", pictures(2), [0, 1])
    write_parquet(tmp_path / f"{test_file}.parquet", pictures(4), [0] * 4)
    data = load(str(tmp_path))
    assert (data.train.num_samples, data.test.num_samples) == (10, 4)


def test_a_file_that_is_given_alone_is_the_training_set_whatever_its_name(tmp_path):
    write_parquet(tmp_path / "test-0.parquet", pictures(40), [0, 1] * 20)
    data = load(str(tmp_path / "test-0.parquet"))
    assert (data.train.num_samples, data.test.num_samples) == (36, 4)


def test_one_parquet_file_is_split_by_the_seed(hub):
    path = str(hub / "train-00000-of-00002.parquet")
    write_parquet(path, pictures(40), list(range(4)) * 10)
    first, again, other = load(path, seed=1), load(path, seed=1), load(path, seed=2)
    assert (first.train.num_samples, first.test.num_samples) == (36, 4)
    assert np.array_equal(first.test.images, again.test.images)
    assert not np.array_equal(first.test.images, other.test.images)


def test_colour_pictures_come_channels_first(tmp_path):
    write_parquet(tmp_path / "train-0.parquet", pictures(4, (5, 6, 3)), [0, 1, 0, 1])
    write_parquet(tmp_path / "test-0.parquet", pictures(2, (5, 6, 3)), [0, 1])
    images = load(str(tmp_path)).train.images
    assert images.shape == (4, 3, 5, 6)
    assert np.array_equal(images[0].transpose(1, 2, 0), pictures(4, (5, 6, 3))[0])


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files_are_read_plain_and_compressed(tmp_path, ending):
    pack = gzip.compress if ending else bytes
    for part, count in (("train", 6), ("t10k", 2)):
        labels = np.arange(count, dtype=np.uint8) % 2
        (tmp_path / f"{part}-images-idx3-ubyte{ending}").write_bytes(pack(idx(pictures(count))))
        (tmp_path / f"{part}-labels-idx1-ubyte{ending}").write_bytes(pack(idx(labels)))
    data = load(str(tmp_path))
    assert np.array_equal(data.train.images[:, 0], pictures(6))
    assert data.test.labels.tolist() == [0, 1]


def test_cifar_binary_batches_are_read(tmp_path):
    rows = pictures(4, (3073,))
    rows[:, 0] = [3, 1, 9, 0]
    (tmp_path / "data_batch_1.bin").write_bytes(rows[:2].tobytes())
    (tmp_path / "data_batch_2.bin").write_bytes(rows[2:].tobytes())
    (tmp_path / "test_batch.bin").write_bytes(rows[:1].tobytes())
    (tmp_path / "batches.meta.txt").write_text("\n".join("abcdefghij"))
    data = load(str(tmp_path))
    assert data.train.labels.tolist() == [3, 1, 9, 0]
    assert data.train.images.shape == (4, 3, 32, 32)
    assert data.train.class_names[9] == "j"


def test_npz_arrays_are_read_in_either_channel_order(tmp_path):
    colour = pictures(4, (5, 6, 3))
    y = np.array([0, 1, 0, 1])
    np.savez(tmp_path / "a.npz", x_train=colour, y_train=y, x_test=colour[:2], y_test=y[:2])
    assert load(str(tmp_path / "a.npz")).train.image_shape == (3, 5, 6)
    np.savez(tmp_path / "b.npz", images=pictures(20), labels=np.arange(20) % 2)
    assert load(str(tmp_path / "b.npz")).test.num_samples == 2


def test_a_folder_of_class_folders_is_read(tmp_path):
    for part in ("train", "test"):
        for number, name in enumerate(("cat", "dog")):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for k in range(3):
                (folder / f"{k}.png").write_bytes(png(pictures(1, seed=number)[0]))
    data = load(str(tmp_path))
    assert data.train.class_names == ("cat", "dog")
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_synthetic_data_has_the_requested_seed_and_size():
    data = load("synthetic:40x3x8x9x5", seed=1)
    assert data.train.images.shape == (40, 3, 8, 9)
    assert data.train.num_classes == 5
    assert np.array_equal(data.train.images, load("synthetic:40x3x8x9x5", seed=1).train.images)


def test_mnist_from_the_shared_folder(root):
    source = root.parent / "shared/data/mnist"
    if not source.is_dir():
        pytest.skip("needs the MNIST Parquet files beside the checkout, in ../shared/data/mnist")
    data = load(str(source), input=InputConfig(stream="always"))
    assert (data.train.num_samples, data.test.num_samples) == (60_000, 10_000)
    assert data.train.shape.input_shape == (1, 28, 28)
    images, labels = data.train.fetch(np.arange(60))
    assert (images.shape, images.dtype) == ((60, 1, 28, 28), torch.uint8)
    assert sorted(set(labels.tolist())) == list(range(10))


def test_normalised_pictures_have_mean_0_and_deviation_1():
    images = ImageSet(pictures(50)[:, None], np.zeros(50, np.int64), ("0",))
    batch, labels = Batches(images, Normalizer.of(images)).batch(np.arange(50))
    assert batch.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert abs(batch.mean().item()) < 1e-5
    assert abs(batch.std(correction=0).item() - 1) < 1e-5


def test_statistics_by_hand_and_of_a_constant_channel():
    images = np.zeros((2, 2, 1, 1), np.uint8)
    images[1, 0] = 255
    mean, std = channel_statistics(images)
    assert mean.tolist() == [0.5, 0.0]
    assert std.tolist() == [0.5, 1.0]


def test_read_only_memory_makes_batches_without_a_copy_of_the_whole():
    images = ImageSet(pictures(9)[:, None], np.zeros(9, np.int64), ("0",))
    images.images.setflags(write=False)
    images.labels.setflags(write=False)
    batches = Batches(images, Normalizer.of(images))
    assert batches.batch(np.array([8, 0]))[0].shape == (2, 1, 5, 6)
    assert batches.batch(np.empty(0, np.int64))[0].shape == (0, 1, 5, 6)


def broken(tmp_path, case):
    """Write one kind of broken input and return its source."""
    path = tmp_path / "train-0.parquet"
    good = pictures(12)
    if case == "missing":
        return "no/such/folder"
    if case == "empty folder":
        return str(tmp_path)
    if case == "truncated parquet":
        write_parquet(path, good, [0] * 12)
        path.write_bytes(path.read_bytes()[:200])
    elif case == "empty parquet":
        write_parquet(path, [], [])
    elif case == "no label column":
        pq.write_table(pa.table({"image": [b"x"], "class": [1]}), path)
    elif case == "null label":
        write_parquet(path, good[:3], [0, None, 1])
    elif case == "negative label":
        write_parquet(path, good, [0] * 5 + [-1] + [0] * 6)
    elif case == "label beyond the names":
        write_parquet(path, good, [0] * 11 + [7], ["a", "b"])
    elif case == "broken picture":
        write_parquet(path, [png(good[0]), png(good[1])[:60], *map(png, good[2:])], [0] * 12)
    elif case == "no picture":
        write_parquet(path, [b"not a picture"] * 12, [0] * 12)
    elif case == "two sizes":
        write_parquet(path, [*good[:11], pictures(1, (7, 7))[0]], [0] * 12)
    elif case == "test of another size":
        write_parquet(path, good, [0] * 12)
        write_parquet(tmp_path / "test-0.parquet", pictures(2, (7, 7)), [0, 0])
    elif case == "too few to split":
        write_parquet(path, good[:5], [0] * 5)
    elif case.startswith("idx"):
        images = idx(good)
        images = {
            "idx cut off": images[:-7],
            "idx magic": b"\0\0\x0d\3" + images[4:],
            "idx labels": images,
            "idx without test": images,
        }[case]
        labels = np.zeros(11 if case == "idx labels" else 12, np.uint8)
        for part in ("train",) if case == "idx without test" else ("train", "t10k"):
            (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(images)
            (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    elif case == "gzip cut off":
        for part in ("train", "t10k"):
            packed = gzip.compress(idx(good))
            (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(packed[:-30])
            (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(packed)
    elif case == "cifar cut off":
        (tmp_path / "data_batch_1.bin").write_bytes(bytes(3072))
        (tmp_path / "test_batch.bin").write_bytes(bytes(3073))
    elif case == "npz of floats":
        np.savez(tmp_path / "x.npz", images=good / 255.0, labels=np.zeros(12, int))
        return str(tmp_path / "x.npz")
    elif case == "npz without arrays":
        np.savez(tmp_path / "x.npz", a=good)
        return str(tmp_path / "x.npz")
    elif case == "npz broken":
        (tmp_path / "x.npz").write_bytes(b"nothing")
        return str(tmp_path / "x.npz")
    elif case == "unknown file":
        (tmp_path / "x.xls").write_text("1,2")
        return str(tmp_path / "x.xls")
    elif case == "glob without match":
        return f"{tmp_path}/*.parquet"
    elif case == "synthetic misspelt":
        return "synthetic:10xx"
    else:
        raise AssertionError(case)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("missing", "there is no such file or folder"),
        ("empty folder", r"holds no data set: train-\*.parquet"),
        ("truncated parquet", "is not a whole Parquet file"),
        ("empty parquet", "holds no rows"),
        ("no label column", "has no column of labels for the images in 'image', got image, class"),
        ("null label", "row group 0, row 1: column 'label' is null"),
        ("negative label", "row 5: column 'label' is -1; labels must be 0 to 0"),
        ("label beyond the names", "row 11: column 'label' is 7; labels must be 0 to 1"),
        ("broken picture", "row group 0, row 1: the image does not decode"),
        ("no picture", "row group 0, row 0: it is not an image that Pillow knows"),
        ("two sizes", "row 11: the image is 1x7x7, but the first one is 1x5x6; give all one"),
        ("test of another size", "test-0.* holds images of 1x7x7, but elsewhere images of 1x5x6"),
        ("too few to split", "only 5 images: too few to split"),
        ("idx cut off", "must hold 360 bytes after its header .* got 353"),
        ("idx magic", "must begin with 00000803 .* got 00000d03"),
        ("idx labels", "has 12 images but 11 labels"),
        ("idx without test", "has IDX files for training .* no t10k"),
        ("gzip cut off", "is a truncated gzip file"),
        ("cifar cut off", "must hold whole rows of 3073 bytes .* got 3072"),
        ("npz of floats", "images must be uint8 pixels .* got float64"),
        ("npz without arrays", "must hold the arrays x_train, .* got a"),
        ("npz broken", "is not a whole .npz file"),
        ("unknown file", "a single file must be .bin, .csv, .jsonl"),
        ("glob without match", "no file matches"),
        ("synthetic misspelt", "must be written synthetic or synthetic:N"),
    ],
)
def test_broken_input_is_reported_in_one_sentence(tmp_path, case, sentence):
    with pytest.raises(DataError, match=sentence) as caught:
        load(broken(tmp_path, case))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "label", "sentence"),
    [
        (b"not a picture", 0, "it is not an image that Pillow knows"),
        (png(pictures(1, (7, 7))[0]), 0, "the image is 1x7x7, but the first"),
        (png(pictures(1)[0]), None, "column 'label' is null"),
        (png(pictures(1)[0]), -1, "column 'label' is -1"),
    ],
)
def test_a_bad_sample_is_located_in_its_own_file(tmp_path, bad, label, sentence):
    good = [*map(png, pictures(4))]
    write_parquet(tmp_path / "train-0.parquet", good, [0] * 4)
    write_parquet(tmp_path / "train-1.parquet", [*good[:2], bad, good[3]], [0, 0, label, 0])
    with pytest.raises(DataError, match=rf"train-1\.parquet, row group 0, row 2: {sentence}"):
        load(str(tmp_path))


def test_a_picture_file_that_does_not_decode_is_named(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for index, picture in enumerate(pictures(6)):
            (tmp_path / name / f"{index}.png").write_bytes(png(picture))
    (tmp_path / "dog" / "3.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"dog/3\.png: it is not an image"):
        load(str(tmp_path))


@pytest.mark.parametrize("case", ["missing", "idx without test", "glob without match"])
def test_a_run_and_info_report_missing_data_alike(tmp_path, case):
    source = broken(tmp_path, case)
    with pytest.raises(DataError) as loaded:
        load(source)
    with pytest.raises(DataError) as inspected:
        inspect(source)
    assert str(loaded.value) == str(inspected.value)


def test_the_bundled_digits_can_be_streamed():
    assert load("digits", input=InputConfig(stream="always")).train.is_streamed
    assert not load("digits").train.is_streamed


def test_a_misspelt_bundled_set_lists_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean digits"):
        load("digts")


def test_a_scheme_without_a_file_system_is_reported():
    with pytest.raises(DataError, match="nosuch://bucket: cannot be opened"):
        load("nosuch://bucket")


def test_the_bundled_digits_can_be_regenerated(tmp_path):
    pytest.importorskip("sklearn", reason="the maker of the bundled digits needs scikit-learn")
    from raydl.data import digits
    from raydl.data.digits.make import main

    main(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        bundled = pq.read_table(Path(digits.__file__).parent / path.name)
        assert pq.read_table(path).equals(bundled)
