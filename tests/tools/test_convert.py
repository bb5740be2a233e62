"""Conversion to Parquet keeps pictures unchanged and is atomic; ``info`` describes data sources."""

import dataclasses
import gzip
import io
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_files import make_pictures as pictures
from image_files import png_of as png
from image_files import write_idx as idx
from image_files import write_parquet
from image_sets import made
from PIL import Image
from s3_server import s3_server, use_test_credentials

from raydl import cli
from raydl.config import InputConfig
from raydl.data import load
from raydl.data.atomic_folder import UNFINISHED
from raydl.errors import ConfigError, DataError
from raydl.storage import Storage, open_filesystem
from raydl.tools.convert import ConvertConfig, convert, file_plan, regrouped
from raydl.tools.data_info import bytes_text, inspect


def rows(count, num_classes=3):
    return np.arange(count) % num_classes


def make_idx(folder):
    for part, count in (("train", 30), ("t10k", 7)):
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pictures(count))))
        labels = idx(rows(count).astype(np.uint8))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


def make_cifar(folder):
    for name, count in (("data_batch_1", 20), ("data_batch_2", 9), ("test_batch", 5)):
        cells = pictures(count, (3073,), seed=count)
        cells[:, 0] = rows(count, 10)
        (folder / f"{name}.bin").write_bytes(cells.tobytes())
    (folder / "batches.meta.txt").write_text("\n".join("abcdefghij"))


def make_folders(folder, parts=("",), ending="png"):
    for seed, part in enumerate(parts):
        for number, name in enumerate(("cat", "dog", "eel")):
            place = folder / part / name
            place.mkdir(parents=True)
            for k, cell in enumerate(pictures(8, (5, 6, 3), seed=10 * seed + number)):
                Image.fromarray(cell).save(place / f"{k}.{ending}")


def make_hub(folder):
    write_parquet(folder / "train-0.parquet", pictures(25), rows(25), ["x", "y", "z"])
    write_parquet(folder / "train-1.parquet", pictures(8, seed=1), rows(8), ["x", "y", "z"])
    write_parquet(folder / "validation-0.parquet", pictures(6, seed=2), rows(6), ["x", "y", "z"])


def make_other_names(folder):
    """Like some sets of the hub: other column names, plain bytes as pictures, no class names."""
    cells = pa.array([png(p) for p in pictures(24)], pa.large_binary())
    table = pa.table({"img": cells, "fine_label": pa.array(rows(24), pa.int32()), "more": rows(24)})
    pq.write_table(table, folder / "a.parquet", row_group_size=10)


def make_npz(folder):
    np.savez(folder / "set.npz", images=pictures(40, (5, 6, 3)), labels=rows(40))
    return "set.npz"


def make_npz_parts(folder):
    x, y = pictures(20), rows(20)
    np.savez(folder / "set.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4] % 2)
    return "set.npz"


MAKERS = {
    "idx": make_idx,
    "cifar": make_cifar,
    "class folders": make_folders,
    "class folders with a test part": lambda f: make_folders(f, ("train", "test"), "jpg"),
    "class folders of training alone": lambda f: make_folders(f, ("train",)),
    "hub": make_hub,
    "parquet with other names": make_other_names,
    "npz": make_npz,
    "npz with a test part": make_npz_parts,
}
SMALL = ConvertConfig(rows_per_group=4, rows_per_file=10)


@pytest.fixture
def source(tmp_path):
    """Return a function that creates a source of a kind and returns its path."""

    def make(kind):
        folder = tmp_path / "source"
        folder.mkdir()
        return str(folder / (MAKERS[kind](folder) or ""))

    return make


def assert_same(ours, theirs):
    for part in ("train", "test"):
        a, b = getattr(ours, part), getattr(theirs, part)
        assert np.array_equal(a.images, b.images)
        assert np.array_equal(a.labels, b.labels)
        assert a.class_names == b.class_names


def groups_of(folder):
    """Return {file: rows of its row groups}."""
    found = {}
    for path in sorted(folder.iterdir()):
        footer = pq.read_metadata(path)
        found[path.name] = [footer.row_group(g).num_rows for g in range(footer.num_row_groups)]
    return found


# the same data


@pytest.mark.parametrize("kind", MAKERS)
def test_a_converted_source_loads_bit_for_bit_like_the_source(source, tmp_path, kind):
    path, out = source(kind), tmp_path / "out"
    convert(path, str(out), SMALL)
    for seed in (0, 5):  # a source without a test part is split alike, for any seed
        assert_same(load(path, seed=seed), load(str(out), seed=seed))


@pytest.mark.parametrize("name", ["digits", "synthetic:24x3x4x5x3"])
def test_bundled_sets_are_converted_by_name(tmp_path, name):
    convert(name, str(tmp_path / "out"), ConvertConfig(seed=3))
    assert_same(load(name, seed=3), load(str(tmp_path / "out")))


def test_encoded_pictures_are_copied_and_not_decoded(source, tmp_path):
    path, out = source("class folders"), tmp_path / "out"
    (tmp_path / "source/dog/3.png").write_bytes(b"not looked at")
    convert(path, str(out))
    table = pq.read_table(out / "train-00000-of-00001.parquet")
    assert table["image"][11].as_py() == {"bytes": b"not looked at", "path": "3.png"}
    again = tmp_path / "again"
    convert(str(out), str(again))
    assert pq.read_table(again / "train-00000-of-00001.parquet").equals(table)


def test_files_have_the_names_columns_and_class_names_of_the_hub(source, tmp_path):
    out = tmp_path / "out"
    written = convert(source("idx"), str(out), SMALL)
    assert groups_of(out) == {
        "test-00000-of-00001.parquet": [4, 3],
        "train-00000-of-00003.parquet": [4, 4, 2],
        "train-00001-of-00003.parquet": [4, 4, 2],
        "train-00002-of-00003.parquet": [4, 4, 2],
    }
    assert [(w.name, w.num_rows, w.num_files, w.num_groups) for w in written] == [
        ("train", 30, 3, 9),
        ("test", 7, 1, 2),
    ]
    assert sum(w.num_bytes for w in written) == sum(p.stat().st_size for p in out.iterdir())
    schema = pq.read_schema(out / "test-00000-of-00001.parquet")
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    assert schema.equals(pa.schema({"image": image, "label": pa.int64()}))
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert features == {
        "image": {"_type": "Image"},
        "label": {"names": ["0", "1", "2"], "_type": "ClassLabel"},
    }


def test_a_table_is_copied_with_its_types_in_smaller_row_groups(tmp_path):
    table = pa.table(
        {"x": pa.array(np.arange(36.0).reshape(12, 3).tolist(), pa.list_(pa.float32(), 3)),
         "y": pa.array(range(12), pa.int16())},
        metadata={"made": "by hand"},
    )  # fmt: skip
    pq.write_table(table, tmp_path / "table.parquet")
    convert(str(tmp_path / "table.parquet"), str(tmp_path / "out"), SMALL)
    assert list(groups_of(tmp_path / "out").values()) == [[4, 4, 2], [2]]
    again = pa.concat_tables(pq.read_table(p) for p in sorted((tmp_path / "out").iterdir()))
    assert again.equals(table)
    assert again.schema.metadata == table.schema.metadata


def test_rows_are_shuffled_by_the_seed_on_request(source, tmp_path):
    path = source("class folders")
    labels = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        convert(path, str(tmp_path / name), ConvertConfig(shuffle=True, seed=seed))
        table = pq.read_table(tmp_path / name / "train-00000-of-00001.parquet")
        labels[name] = table["label"].to_pylist()
    assert labels["a"] == labels["b"] != labels["c"]
    assert sorted(labels["a"]) == [0] * 8 + [1] * 8 + [2] * 8
    pixels = np.stack(
        [np.asarray(Image.open(io.BytesIO(b["bytes"]))) for b in table["image"].to_pylist()]
    )
    first = labels["c"].index(1)
    assert pixels[first].tolist() in pictures(8, (5, 6, 3), seed=1).tolist()


def test_the_plan_has_every_row_once_and_no_group_beyond_its_size():
    config = ConvertConfig(rows_per_group=3, rows_per_file=7)
    assert file_plan(16, config) == [[3, 3, 1], [3, 3, 1], [2]]
    assert file_plan(2, ConvertConfig(rows_per_group=5, rows_per_file=1)) == [[1], [1]]
    tables = [pa.table({"x": part}) for part in ([0, 1, 2, 3, 4], [5], [6, 7])]
    found = [t["x"].to_pylist() for t in regrouped(tables, [1, 2, 4, 1])]
    assert found == [[0], [1, 2], [3, 4, 5, 6], [7]]


def test_one_large_row_group_is_never_in_memory_as_a_whole(tmp_path):
    cells = [{"bytes": bytes([k % 256]) * 8192, "path": None} for k in range(4000)]
    table = pa.table({"image": cells, "label": rows(4000)})
    path, size = tmp_path / "one.parquet", table.nbytes
    pq.write_table(table, path, compression="none", use_dictionary=False)
    del table, cells
    before, held = pa.total_allocated_bytes(), []
    convert(
        str(path),
        str(tmp_path / "out"),
        ConvertConfig(rows_per_group=100),
        on_rows=lambda *_: held.append(pa.total_allocated_bytes() - before),
    )
    assert len(held) == 41
    assert 0 < max(held) < size / 2


# atomicity


@pytest.mark.parametrize("target_exists", [False, True])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_conversion_leaves_no_files(source, tmp_path, target_exists, error):
    path, out = source("idx"), tmp_path / "new/out"
    if target_exists:
        out.mkdir(parents=True)

    def fail(part, num_done, num_rows):
        if (part, num_done) == ("test", 4):
            raise error

    expected = DataError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        convert(path, str(out), SMALL, on_rows=fail)
    assert [*out.parent.iterdir()] == ([out] if target_exists else [])
    assert not target_exists or [*out.iterdir()] == []
    convert(path, str(out), SMALL)
    assert_same(load(path), load(str(out)))


@pytest.mark.parametrize("target_exists", [False, True])
def test_the_remains_of_a_killed_conversion_are_not_loaded(source, tmp_path, target_exists):
    path, out, kept = source("idx"), tmp_path / "out", tmp_path / "kept"
    if target_exists:
        out.mkdir()
    seen = []

    def check_remains(part, num_done, num_rows):
        """Check the files that would remain if the process were killed now."""
        hidden = tmp_path / f".out{UNFINISHED}"
        place = out if target_exists else hidden
        assert out.exists() == target_exists
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(place, kept)
        if target_exists:
            with pytest.raises(DataError, match=r"is incomplete|holds no data set"):
                load(str(kept))
        seen.append(num_done)
        with pytest.raises(DataError, match="or was interrupted; if none is running, delete it"):
            convert(path, str(out))

    convert(path, str(out), SMALL, on_rows=check_remains)
    assert len(seen) == 13
    if target_exists:
        with pytest.raises(DataError, match=r"kept: is incomplete: its \.unfinished shows"):
            load(f"{kept}/*.parquet")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept", "out", "source"]
    assert len([*out.iterdir()]) == 4


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """The URI of an empty bucket on a local server."""
    use_test_credentials(monkeypatch, tmp_path)
    with s3_server() as url:
        place = url.removeprefix("http://")
        query = f"?scheme=http&endpoint_override={place}&allow_bucket_creation=true"
        open_filesystem(f"s3://sets{query}")[0].create_dir("sets")
        yield f"s3://sets/{{}}{query}"


def test_a_conversion_to_an_object_store_is_atomic(bucket, tmp_path):
    uri = bucket.format("new/digits")
    storage = Storage(uri)

    def interrupt(part, num_done, num_rows):
        if (part, num_done) == ("test", 359):
            assert storage.list_dir("") == [UNFINISHED, "train-00000-of-00001.parquet"]
            with pytest.raises(DataError, match=r"new/digits\?.*: is incomplete: its .unfinished"):
                load(uri)
            with pytest.raises(DataError, match="if none is running, delete it"):
                convert("digits", uri)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert("digits", uri, on_rows=interrupt)
    assert storage.list_dir("") == []
    convert("digits", uri)
    assert_same(load("digits"), load(uri))
    names = ["test-00000-of-00001.parquet", "train-00000-of-00001.parquet"]
    assert storage.list_dir("") == names
    with pytest.raises(DataError, match="is not empty, it holds test-00000"):
        convert("digits", uri)
    convert(uri, str(tmp_path / "back"), SMALL)
    assert_same(load("digits"), load(str(tmp_path / "back")))
    found = inspect(uri)
    assert [part.num_rows for part in found.parts] == [1438, 359]
    missing = bucket.format("x").replace("s3://sets", "s3://nowhere").replace("true", "false")
    with pytest.raises(DataError, match="cannot be written: the bucket does not exist"):
        convert("digits", missing)


def broken(tmp_path, case):
    """Return a source and a target, one of which is invalid."""
    out, path = tmp_path / "out", tmp_path / "in.parquet"
    if case == "target not empty":
        out.mkdir()
        (out / "mine.txt").write_text("keep")
    elif case == "target is a file":
        out.write_text("keep")
    elif case == "parent is a file":
        (tmp_path / "file").write_text("keep")
        return "digits", str(tmp_path / "file/out")
    elif case == "no such source":
        return str(tmp_path / "none"), str(out)
    elif case == "misspelt source":
        return "digit", str(out)
    elif case == "text":
        (tmp_path / "a.txt").write_text("words " * 400)
        return str(tmp_path / "a.txt"), str(out)
    elif case == "empty folder":
        (tmp_path / "in").mkdir()
        return str(tmp_path / "in"), str(out)
    elif case == "null picture":
        image = [{"bytes": b"x"}] * 7 + [None]
        pq.write_table(pa.table({"image": image, "label": rows(8)}), path)
        return str(path), str(out)
    elif case == "label of no class":
        write_parquet(path, pictures(8), [0, 1, 0, 1, 0, 1, 0, 5], ["a", "b"])
        return str(path), str(out)
    elif case == "cut off":
        write_parquet(path, pictures(8), rows(8))
        path.write_bytes(path.read_bytes()[:-9])
        return str(path), str(out)
    elif case == "cut inside":
        write_parquet(path, pictures(200), rows(200))
        data = path.read_bytes()
        path.write_bytes(data[:40] + bytes(2000) + data[2040:])
        return str(path), str(out)
    elif case == "other columns":
        (tmp_path / "in").mkdir()
        pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "in/a.parquet")
        pq.write_table(pa.table({"x": ["a", "b"]}), tmp_path / "in/b.parquet")
        return str(tmp_path / "in"), str(out)
    elif case == "other classes":
        make_folders(tmp_path / "in", ("train", "test"))
        (tmp_path / "in/test/cat").rename(tmp_path / "in/test/cow")
        return str(tmp_path / "in"), str(out)
    return "digits", str(out)


SENTENCES = {
    "target not empty": r"out: is not empty, it holds mine\.txt; give a new or empty",
    "target is a file": "out: is a file; give a new or empty folder",
    "parent is a file": "out: cannot be (written|reached): ",
    "no such source": "none: there is no such file or folder",
    "misspelt source": "did you mean digits",
    "text": r"a\.txt: is a text; only images and tables can be converted to Parquet",
    "empty folder": "in: holds no data set",
    "null picture": r"in\.parquet, row group 0, row 7: it holds no image",
    "label of no class": r"parquet, row group 0, row 7: column .label. is 5; labels must be 0 to 1",
    "cut off": r"in\.parquet: is not a whole Parquet file",
    "cut inside": r"in\.parquet(, row group 0)?: cannot be read: ",
    "other columns": r"b\.parquet: column 'x' holds texts, but elsewhere int64",
    "other classes": "column 'label' has the class 'cow', but elsewhere the classes cat, dog, eel",
}


@pytest.mark.parametrize("case", SENTENCES)
def test_a_conversion_that_is_refused_gives_one_sentence_and_changes_nothing(
    tmp_path, capsys, case
):
    source, target = broken(tmp_path, case)
    before = sorted(tmp_path.rglob("*"))
    config = ConvertConfig(rows_per_group=3)
    with pytest.raises((DataError, ConfigError), match=SENTENCES[case]) as caught:
        convert(source, target, config)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_info_tells_all_that_a_run_refuses(tmp_path):
    source, _ = broken(tmp_path, "other classes")
    warning, *_ = inspect(source).warnings
    assert warning.startswith("a run refuses it: ")
    assert SENTENCES["other classes"] in warning
    write_parquet(tmp_path / "train-00000-of-00002.parquet", pictures(8), rows(8), ["x", "y", "z"])
    write_parquet(tmp_path / "test-0.parquet", pictures(8), rows(8), ["z", "y", "x"])
    first, second, *_ = inspect(str(tmp_path)).warnings
    assert first.endswith("train-00001-of-00002.parquet is missing; fetch it, or rename the others")
    assert second.endswith("names its classes z, y, x, but elsewhere x, y, z")


def test_settings_out_of_range_are_refused(capsys):
    for options in (["--rows-per-group", "0"], ["--rows-per-file", "0"], ["--seed", "-1"]):
        assert cli.main(["data", "convert", "digits", "out", *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {options[0][2:].replace('-', '_')} must be ")
    with pytest.raises(DataError, match="is copied in its own order; omit --shuffle"):
        convert("digits", "out", ConvertConfig(shuffle=True))


# info


def test_info_counts_the_classes_and_row_groups_of_pictures(source):
    path = source("hub")
    found = inspect(path)
    assert (found.kind, found.holds, found.has_test) == ("parquet", "images", True)
    assert (found.image_shape, found.mode) == ((1, 5, 6), "grey")
    assert found.class_names == ("x", "y", "z")
    train, test = found.parts
    assert (train.name, train.num_rows, train.group_rows) == ("train", 33, (25, 8))
    assert train.class_counts == (12, 11, 10)
    assert test.class_counts == (2, 2, 2)
    assert len(train.group_bytes) == 2
    assert found.decoded_bytes == 39 * 30
    assert not found.is_streamed
    assert inspect(path, input=InputConfig(max_memory_bytes=989)).is_streamed
    assert not inspect(path, input=InputConfig(max_memory_bytes=990)).is_streamed
    assert not load(path, input=InputConfig(max_memory_bytes=990)).train.is_streamed
    assert found.warnings == ()


@pytest.mark.parametrize("kind", MAKERS)
def test_info_agrees_with_the_loaded_data(source, kind):
    path = source(kind)
    found, data = inspect(path), load(path)
    assert found.image_shape == data.train.shape.input_shape
    assert found.class_names == data.train.class_names
    sizes = [data.train.num_samples, data.test.num_samples]
    assert [p.num_rows for p in found.parts] == (sizes if found.has_test else [sum(sizes)])
    labels = np.concatenate([data.train.labels, data.test.labels])
    counts = np.sum([p.class_counts for p in found.parts], axis=0)
    assert counts.tolist() == np.bincount(labels, minlength=len(found.class_names)).tolist()
    assert not found.is_streamed


def test_info_decodes_only_one_picture(tmp_path):
    cells = [pictures(1)[0]] + [b"not looked at"] * 19
    write_parquet(tmp_path / "train-0.parquet", cells, rows(20))
    assert inspect(str(tmp_path)).parts[0].class_counts == (7, 7, 6)


def test_info_warns_of_large_row_groups(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", pictures(60), rows(60))
    few = InputConfig(shuffle_samples=50)
    (warning,) = inspect(str(tmp_path), input=few).warnings
    assert warning.startswith("train has one row group of all its 60 rows (")
    assert warning.endswith(" raydl data convert SRC DST makes smaller ones")
    convert(str(tmp_path), str(tmp_path / "out"), ConvertConfig(rows_per_group=20))
    assert inspect(str(tmp_path / "out"), input=few).warnings == ()
    monkeypatch.setattr("raydl.tools.data_info._LARGE_GROUP_BYTES", 1000)
    (warning,) = inspect(str(tmp_path / "out"), input=few).warnings
    assert warning.startswith("train has row groups of up to ")


def test_info_warns_of_rows_that_are_sorted_by_class(source, tmp_path):
    path = source("class folders")
    for is_shuffled in (False, True):
        out = str(tmp_path / str(is_shuffled))
        convert(path, out, ConvertConfig(rows_per_group=8, shuffle=is_shuffled))
        warnings = inspect(out).warnings
        assert len(warnings) == (not is_shuffled)
    assert "a row group holds 1.0 of 3 classes" in inspect(str(tmp_path / "False")).warnings[0]


def test_info_warns_of_labels_without_a_class_and_of_large_sets_that_can_not_be_streamed(tmp_path):
    write_parquet(tmp_path / "a.parquet", pictures(4), [0, None, 1, 7], ["a", "b"])
    found = inspect(str(tmp_path))
    assert found.parts[0].num_unlabelled == 2
    sentence = "train has 2 rows whose label is missing or belongs to no class"
    assert found.warnings[0].startswith(sentence)
    (warning,) = inspect("synthetic:64", input=InputConfig(max_memory_bytes=999)).warnings
    assert warning == (
        "takes 61.2 KiB decoded, more than input.max_memory_bytes, and arrays cannot be streamed; "
        "convert it with raydl data convert SRC DST"
    )


def test_info_lists_the_columns_of_a_table_and_counts_the_tokens_of_a_text(tmp_path, capsys):
    table = pa.table({"x": [[1.0, 2.0], [3.0, 4.0]], "y": [1, 2], "note": ["a", "b"]})
    pq.write_table(table, tmp_path / "t.parquet")
    found = inspect(str(tmp_path / "t.parquet"))
    assert (found.holds, found.parts[0].num_rows) == ("table", 2)
    assert [(c.name, c.type, c.shape) for c in found.columns] == [
        ("x", "list<element: double>", (2,)),
        ("y", "int64", ()),
        ("note", "string", None),
    ]
    assert found.warnings[0].endswith(
        "column 'note' must hold numbers, got string; name the column to predict by --target, or "
        "the columns to read in input.columns"
    )
    np.save(tmp_path / "t.npy", np.arange(50, dtype=np.uint16))
    found = inspect(str(tmp_path / "t.npy"))
    assert (found.holds, found.num_tokens, found.vocabulary) == ("text", 50, 50)
    assert found.decoded_bytes == 100
    assert cli.main(["data", "info", str(tmp_path / "t.parquet")]) == 0
    out = capsys.readouterr().out
    assert "no test part: a run splits off a tenth, by its seed" in out
    assert "no numbers" in out


def test_info_reads_little_of_a_large_row_group(tmp_path):
    cells = [png(pictures(1, (64, 64), seed=k)[0]) for k in range(2000)]
    path = tmp_path / "train-0.parquet"
    write_parquet(path, cells, rows(2000))
    data = path.read_bytes()
    assert len(data) > 8e6
    path.write_bytes(data[:6_000_000] + bytes(1_000_000) + data[7_000_000:])
    found = inspect(str(path))
    assert (found.parts[0].num_rows, found.image_shape) == (2000, (1, 64, 64))
    with pytest.raises(DataError):
        load(str(path))


# the commands


def test_the_commands_convert_and_describe_in_plain_lines(tmp_path, capsys):
    out = str(tmp_path / "out")
    assert cli.main(["data", "convert", "digits", out, "--rows-per-group", "500"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("train: 1,438 rows in 3 row groups, 1 file, ")
    assert lines[-1].startswith(f"wrote {out} in ")
    assert lines[-1].endswith(f"use: --data {out}")
    assert cli.main(["data", "info", out]) == 0
    text = capsys.readouterr().out
    for phrase in (
        "images of 8x8 grey",
        "10 classes",
        "438 to 500",
        "112.3 KiB decoded; a run reads it at the start",
    ):
        assert phrase in text
    assert cli.main(["data", "info", out, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parts"][0]["group_rows"] == [500, 500, 438]
    assert cli.main(["data", "convert", "digits", out]) == 2
    assert capsys.readouterr().err.startswith(f"error: {out}: is not empty, it holds test-")


def test_slow_conversions_print_their_progress(capsys, monkeypatch):
    from raydl.cli import data

    times = iter([0.0, 2.0, 6.0, 7.0])
    monkeypatch.setattr(data.time, "monotonic", lambda: next(times))
    lines = data._PlainLines()
    for done in (0, 1000, 2000):
        lines("train", done, 60000)
    assert capsys.readouterr().out == "[0:06] train: 1,000 of 60,000 rows\n"


def test_the_commands_of_data_are_listed_and_the_nearest_one_is_suggested(capsys):
    assert cli.main(["data"]) == 0
    assert "convert" in capsys.readouterr().out
    assert cli.main(["data", "inf"]) == 2
    assert "did you mean info?" in capsys.readouterr().out


def test_the_commands_of_the_page_are_valid(root, monkeypatch):
    text = (root / "docs/data_in_detail.md").read_text()
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    commands = [words[2:] for words in lines if words[:2] == ["raydl", "data"]]
    assert {words[0] for words in commands} == {"info", "convert"}
    calls, info = [], inspect("digits")
    monkeypatch.setattr(
        "raydl.tools.data_info.inspect", lambda *arguments: calls.append(arguments) or info
    )
    monkeypatch.setattr(
        "raydl.tools.convert.convert", lambda *arguments, **_: calls.append(arguments) or []
    )
    for words in commands:
        assert cli.main(["data", *words]) == 0
    assert calls[0] == ("digits",)
    assert calls[-1][2] == ConvertConfig(rows_per_group=500, shuffle=True)


def test_the_options_of_convert_have_the_defaults_of_the_settings():
    from raydl.cli.data import _ConvertOptions

    options = dataclasses.asdict(_ConvertOptions("a", "b"))
    settings = dataclasses.asdict(ConvertConfig())
    assert {name: options[name] for name in options if name not in ("source", "target")} == settings


def test_sizes_have_binary_units():
    sizes = (0, 999, 1000, 1 << 20, 2_500_000_000, 5e15)
    texts = ["0 bytes", "999 bytes", "1.0 KiB", "1.0 MiB", "2.3 GiB", "4,547.5 TiB"]
    assert [bytes_text(size) for size in sizes] == texts


def described(source, capsys):
    """Return the lines of ``raydl data info`` without runs of blanks."""
    assert cli.main(["data", "info", str(source)]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_token_files_are_described_by_their_tokens_and_bytes(tmp_path, capsys):
    tokens = np.arange(5000, dtype=np.uint16) % 300
    (tmp_path / "set").mkdir()
    tokens[:4000].tofile(tmp_path / "set/train.bin")
    tokens[4000:].tofile(tmp_path / "set/val.bin")
    lines = described(tmp_path / "set", capsys)
    assert lines == [
        f"{tmp_path}/set: token files",
        "5,000 tokens, a vocabulary of 300, by the largest token",
        "",
        "part tokens files",
        "train 4,000 1",
        "test 1,000 1",
        "",
        "9.8 KiB of tokens; a run streams it",
    ]
    tokens.tofile(tmp_path / "alone.bin")
    lines = described(tmp_path / "alone.bin", capsys)
    assert lines[4:7] == [
        "train 4,500 1", "test 500 1", "no test part: the last tenth is the test set",
    ]  # fmt: skip


def test_a_text_is_described_by_its_bytes(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("hello world\n" * 200)
    lines = described(tmp_path / "notes.txt", capsys)
    assert lines[:2] == [f"{tmp_path}/notes.txt: text", "2,400 tokens, a vocabulary of 256"]
    assert lines[-1] == "2.3 KiB of tokens; a run reads it at the start and keeps it in memory"


def test_tar_files_are_described_by_their_images_classes_and_files(tmp_path, capsys):
    source = made("tar", tmp_path)
    (tmp_path / "README.md").touch()
    assert described(source, capsys) == [
        f"{tmp_path}: images (tar files of WebDataset)",
        "images of 8x8 RGB (height x width), by the first one; 3 classes",
        "",
        "part rows files",
        "train 24 1",
        "test 24 1",
        "",
        "label class train test",
        *(f"{n} {n} 8 8" for n in range(3)),
        "",
        "9.0 KiB decoded; a run reads it at the start and keeps it in memory",
        f"warning: files of {tmp_path} that are not read: 1 ending in .md",
    ]
