"""Tar files of WebDataset: the samples, the index, and files that are not whole."""

import io
import os
import pickle
import tarfile

import numpy as np
import pytest
from ensembles import rows_trained
from layouts import write_tar
from PIL import Image
from torch import nn

from raydl.config import InputConfig
from raydl.data import load
from raydl.data.files import find
from raydl.data.tar import Tar
from raydl.errors import DataError
from raydl.tasks import Classification


def encoded(number, form="PNG"):
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(file, form)
    return file.getvalue()


def samples(numbers, num_classes=3):
    for number in numbers:
        key = f"{number:06}"
        yield f"{key}.cls", str(number % num_classes).encode()
        yield f"{key}.png", encoded(number)


def linear(image_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(image_shape)), num_classes))


def opened(path, **settings):
    return Tar(find(str(path)), InputConfig(**settings))


@pytest.fixture
def tar(tmp_path):
    write_tar(tmp_path / "a.tar", samples(range(20)))
    return tmp_path / "a.tar"


def test_the_samples_of_a_tar_file_are_read_in_any_order(tar):
    piece = opened(tar)
    assert piece.num_rows == 20
    assert list(piece.schema) == ["label", "image"]
    found = piece.read(np.array([17, 3, 17]), ["image", "label"])
    assert found["label"] == [2, 0, 2]
    assert found["image"] == [encoded(17), encoded(3), encoded(17)]


@pytest.mark.parametrize("stream", ["always", "never"])
def test_a_folder_of_shards_is_an_image_set_with_train_and_test_by_name(tmp_path, stream):
    write_tar(tmp_path / "set-train-000000.tar", samples(range(12)))
    write_tar(tmp_path / "set-train-000001.tar", samples(range(12, 20)))
    write_tar(tmp_path / "set-val-000000.tar", samples(range(100, 106)))
    data = load(str(tmp_path), input=InputConfig(stream=stream))
    images, labels = data.train.fetch(np.arange(20))
    assert images[:, 0, 0, 0].tolist() == list(range(20))
    assert labels.tolist() == [number % 3 for number in range(20)]
    assert data.test.fetch(np.arange(6))[0][:, 0, 0, 0].tolist() == list(range(100, 106))
    assert data.train.shape.class_names == ("0", "1", "2")


def test_images_of_several_formats_are_one_column_and_other_files_have_theirs(tmp_path):
    files = [
        ("./a.b/x.y/0.jpg", encoded(0, "JPEG")), ("./a.b/x.y/0.CLS", b" 1\n"),
        ("./a.b/x.y/0.json", b"{}"),
        ("./a.b/x.y/1.json", b"{}"), ("./a.b/x.y/1.png", encoded(1)), ("./a.b/x.y/1.cls", b"0"),
        ("README", b"no sample"), ("./a.b/._0.jpg", b"of macOS"),
    ]  # fmt: skip
    write_tar(tmp_path / "a.tar", files)
    piece = opened(tmp_path / "a.tar")
    assert list(piece.schema) == ["image", "label", "json"]
    found = piece.read(np.array([1, 0]), ["image", "label", "json"])
    assert found["image"] == [encoded(1), encoded(0, "JPEG")]
    assert (found["label"], found["json"]) == ([0, 1], ["{}", "{}"])
    assert piece.where(1) == f"{tmp_path}/a.tar, sample ./a.b/x.y/1"


def test_a_label_that_is_no_number_is_a_bad_sample_with_its_key(tmp_path):
    files = list(samples(range(20)))
    files[6] = ("000003.cls", b"three")
    write_tar(tmp_path / "a.tar", files)
    data = load(str(tmp_path), input=InputConfig(on_bad_sample="skip"))
    rows = np.arange(data.train.num_samples)
    _, kept, problems = data.train.fetch_readable(rows)
    assert len(kept) == len(rows) - 1
    assert "a.tar, sample 000003" in problems[0]
    assert "not a number" in problems[0]


def test_long_names_are_read_and_told(tmp_path):
    key = "folder/" * 20 + "0"
    write_tar(tmp_path / "a.tar", [(f"{key}.png", encoded(0)), (f"{key}.cls", b"0")])
    assert opened(tmp_path / "a.tar").where(0).endswith(f", sample {key}")


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_every_sample_of_some_shards_is_trained_on_once_in_an_epoch(tmp_path, method):
    for number, shard in enumerate((range(7), range(7, 19), range(19, 29))):
        write_tar(tmp_path / f"{number:06}.tar", samples(shard))
    train = load(str(tmp_path), input=InputConfig(stream="always", shuffle_samples=8)).train
    seen = rows_trained(train, method, task=Classification(linear))
    assert seen == [(epoch, row) for epoch in (0, 1) for row in range(train.num_samples)]


# the index


def test_the_index_is_made_once_and_again_if_size_or_time_of_the_tar_file_differ(tar, tmp_path):
    kept = str(tmp_path / "kept")
    assert opened(tar, index_dir=kept).num_rows == 20
    before = tar.stat()
    tar.write_bytes(bytes(before.st_size))
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert opened(tar, index_dir=kept).num_rows == 20, "not read again"
    write_tar(tar, samples(range(12)))
    assert opened(tar, index_dir=kept).num_rows == 12
    (index,) = (tmp_path / "kept").iterdir()
    index.write_bytes(index.read_bytes()[:100])
    assert opened(tar, index_dir=kept).num_rows == 12, "a damaged index is made anew"


def test_a_worker_receives_the_index_and_no_open_file(tar):
    piece = opened(tar)
    piece.read(np.arange(3), ["label"])
    again = pickle.loads(pickle.dumps(piece))
    assert again.read(np.array([4]), ["label"]) == {"label": [1]}


# files that are not whole


@pytest.mark.parametrize("num_members", [2, 5, 20])
@pytest.mark.parametrize("within", [0, 600])
def test_a_tar_file_that_is_cut_off_is_refused_also_between_members(tar, num_members, within):
    with tarfile.open(tar) as whole:
        end = whole.getmembers()[num_members].offset
    tar.write_bytes(tar.read_bytes()[: end + within])
    with pytest.raises(DataError, match=r"a.tar: is not a whole tar file"):
        opened(tar)


def test_a_tar_file_may_end_right_after_the_mark_of_its_end(tar):
    with tarfile.open(tar) as whole:
        last = whole.getmembers()[-1]
    end = last.offset_data + -(-last.size // 512) * 512
    tar.write_bytes(tar.read_bytes()[: end + 1024])
    assert opened(tar).num_rows == 20
    tar.write_bytes(tar.read_bytes()[: end + 512])
    with pytest.raises(DataError, match="cut off, without the mark at its end"):
        opened(tar)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: data + data, "or holds a second tar file from there"),
        (lambda data: data[:1024] + b"x" * 512 + data[1536:], "is damaged at byte 1,024"),
        (lambda data: b"\x1f\x8b" + data, "is compressed, so no sample can be read alone"),
        (lambda data: b"x" * 2000, "is not a whole tar file"),
        (lambda data: b"", "is not a whole tar file"),
        (lambda data: bytes(10240), "holds no samples"),
    ],
)
def test_a_file_that_is_no_tar_file_alone_is_refused_in_one_sentence(tar, damage, sentence):
    tar.write_bytes(damage(tar.read_bytes()))
    with pytest.raises(DataError, match=sentence):
        opened(tar)


def test_a_sample_with_other_files_than_the_first_is_named(tmp_path):
    files = list(samples(range(4)))
    write_tar(tmp_path / "a.tar", [*files[:3], *files[4:]])
    with pytest.raises(
        DataError, match="sample 000001 has label, but the first one label, image; all must have"
    ):
        opened(tmp_path / "a.tar")
    write_tar(tmp_path / "b.tar", [*files[:2], files[1], *files[2:]])
    with pytest.raises(DataError, match="sample 000000 has label, png, png"):
        opened(tmp_path / "b.tar")
