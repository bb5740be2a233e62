"""Every file of a source is read, left out for a reason, or a problem; parts follow the hub."""

import os

import pytest
from pyarrow import fs

from raydl.data.files import Place, find
from raydl.data.listing import class_of, image_parts, list_folder, parts_by_name


def folder(tmp_path, *paths):
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    return list_folder(find(str(tmp_path)))


def test_every_file_is_read_or_left_out_for_a_reason(tmp_path):
    found = folder(tmp_path, "train-0.parquet", "more/x.json", ".cache/y", "__MACOSX/z", "README")
    found.keep(parts_by_name(found, found.ending_in([".parquet"])))
    assert found.left_out == {
        ".cache": "hidden",
        "__MACOSX": "hidden",
        "README": "without an ending",
        "more/x.json": "ending in .json",
    }
    assert found.note() == (
        f"files of {tmp_path} that are not read: 1 without an ending; 1 ending in .json"
    )


def test_a_store_is_listed_as_a_disk_is(tmp_path):
    here = folder(tmp_path, "b/1.png", "b/0.png", "a/2.png", "a-b/3.png", ".x/y", "c.txt")
    base = fs.SubTreeFileSystem(str(tmp_path.parent), fs.LocalFileSystem())
    there = list_folder(Place(base, tmp_path.name, "there"))
    assert there.files == here.files == ["a/2.png", "a-b/3.png", "b/0.png", "b/1.png", "c.txt"]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("mnist_train", "mnist_test"), ("X-train", "X-test"), ("Train", "Test"),
        ("training", "testing"), ("train", "val"), ("train", "valid"), ("train", "dev"),
        ("train", "eval"), ("default/train-0", "default/test-0"), ("train/0000", "test/0000"),
        ("data/train-0", "data/validation-0"),
    ],
)  # fmt: skip
def test_files_belong_to_parts_as_on_the_hub(tmp_path, train, test):
    found = folder(tmp_path, f"{train}.parquet", f"{test}.parquet")
    parts = parts_by_name(found, found.files)
    assert parts == {"train": [f"{train}.parquet"], "test": [f"{test}.parquet"]}
    assert not found.problems


def test_validation_is_left_out_beside_a_test_set_and_files_of_no_part_beside_others(tmp_path):
    found = folder(tmp_path, "train.x", "test.x", "val.x", "notes.x")
    assert parts_by_name(found, found.files) == {"train": ["train.x"], "test": ["test.x"]}
    assert found.left_out == {"val.x": "of a second test set", "notes.x": "of no part"}


def test_a_test_set_alone_trains_nothing_unless_it_is_named(tmp_path):
    found = folder(tmp_path, "test-0.parquet")
    parts_by_name(found, found.files)
    assert found.problems == ["holds a test set and nothing to train on; give its files by name"]
    found = folder(tmp_path)
    found.is_explicit = True
    assert parts_by_name(found, found.files) == {"train": ["test-0.parquet"]}
    assert not found.problems


def test_missing_shards_mixed_sets_and_ambiguous_names_are_problems(tmp_path):
    found = folder(tmp_path, "train-00000-of-00003.x", "train-00002-of-00003.x")
    parts_by_name(found, found.files)
    assert found.problems == ["train-00001-of-00003.x is missing; fetch it, or rename the others"]
    found = folder(tmp_path / "two", "en/train-0.x", "fr/train-0.x")
    parts_by_name(found, found.files)
    assert found.problems == ["holds several sets, en, fr; give the folder of one"]
    found = folder(tmp_path / "both", "train_test.x")
    parts_by_name(found, found.files)
    assert "names several parts" in found.problems[0]


def test_links_to_missing_files_and_names_that_are_not_utf_8_are_problems(tmp_path):
    os.symlink(tmp_path / "nowhere", tmp_path / "a.png")
    (tmp_path / "loop").mkdir()
    os.symlink(tmp_path, tmp_path / "loop/again")
    with open(os.fsencode(tmp_path) + b"/caf\xe9.png", "wb"):
        pass
    assert list_folder(find(str(tmp_path))).problems == [
        "a.png is a link to a missing file; fetch it, or remove it",
        "caf\ufffd.png has a name that is not UTF-8; rename it",
    ]


def test_class_folders_may_be_nested_and_a_class_may_be_called_train(tmp_path):
    found = folder(tmp_path / "a", "train/cat/images/1.png", "val/cat/2.png", "3.png")
    assert image_parts(found, found.files) == {
        "train": ["train/cat/images/1.png"], "test": ["val/cat/2.png"],
    }  # fmt: skip
    assert found.left_out == {"3.png": "beside the class folders"}
    assert [class_of(path) for path in found.files[1:]] == ["cat", "cat"]
    found = folder(tmp_path / "b", "car/1.png", "train/2.png", "plane/3.png")
    assert image_parts(found, found.files) == {"train": found.files}
    assert [class_of(path) for path in found.files] == ["car", "plane", "train"]
