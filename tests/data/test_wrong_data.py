"""Invalid data are refused in one sentence that says where they are."""

import io
import pickle
import struct
import zipfile
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ensembles import tiny_images
from PIL import Image

from raydl.config import InputConfig
from raydl.data import Batches, Normalizer, load
from raydl.data.datasets import describe
from raydl.data.files import find
from raydl.data.parquet import ParquetFile, _footers
from raydl.data.pieces import Piece
from raydl.data.samples import part_of
from raydl.data.schema import schema_of
from raydl.data.sources import Source
from raydl.errors import DataError
from raydl.run.preflight import first_samples
from raydl.tools.convert import convert
from raydl.tools.data_info import inspect

ALWAYS, NEVER = InputConfig(stream="always", shuffle_samples=8), InputConfig(stream="never")
BOTH = pytest.mark.parametrize("input", [ALWAYS, NEVER], ids=["streamed", "in memory"])


def write(folder, **parts):
    for name, table in parts.items():
        pq.write_table(pa.table(table), folder / f"{name.replace('_', '-')}.parquet")
    return str(folder)


def pictures(count):
    return np.random.default_rng(0).integers(0, 256, (count, 4, 4), dtype=np.uint8)


def encoded(picture):
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


class TablesInMemory(Piece):
    """Row groups that are given tables in memory."""

    name = "tables"

    def __init__(self, *tables):
        self.tables = tables
        self.groups = [len(table) for table in tables]
        self.num_rows, self.schema = sum(self.groups), schema_of(tables[0].schema)

    def read_group(self, number, names):
        return {name: self.tables[number][name] for name in names}

    def where(self, row):
        return f"row {row}"


def streamed(train, test=None):
    """Return the dataset of two pieces, streamed."""
    source = Source("tables", "parquet", {"train": [train], "test": [test or train]})
    return describe(source, input=ALWAYS).dataset(seed=0, input=ALWAYS)


@BOTH
def test_files_with_columns_of_different_types_are_refused(tmp_path, input):
    source = write(tmp_path, train_0={"y": [1, 2]}, train_1={"y": [0.5]}, test_0={"y": [1]})
    with pytest.raises(DataError, match=r"train-1.*'y' holds float32, but elsewhere int64"):
        load(source, input=input)


def test_files_of_different_types_are_converted_to_one_where_nothing_is_lost(tmp_path):
    (tmp_path / "in").mkdir()
    narrow = {"y": pa.array([3], pa.int32())}
    source = write(tmp_path / "in", train_0={"y": [1, 2]}, train_1=narrow, test_0={"y": [1]})
    assert load(source, input=NEVER).train.columns["y"].tolist() == [1, 2, 3]
    convert(source, str(tmp_path / "out"))
    assert load(str(tmp_path / "out"), input=NEVER).train.columns["y"].tolist() == [1, 2, 3]


def test_row_groups_of_other_types_than_the_first_are_refused():
    groups = TablesInMemory(pa.table({"y": [1, 2]}), pa.table({"y": [0.5, 0.7]}))
    data = streamed(groups, TablesInMemory(groups.tables[0]))
    data.train.fetch(np.arange(2))
    with pytest.raises(DataError, match=r"row 2: column 'y' is 0\.5, which int64 does not hold"):
        data.train.fetch(np.arange(4))


@BOTH
@pytest.mark.parametrize(
    "column",
    [
        pa.array([[1, 2], [3, 4], [None, 6]], pa.list_(pa.int64())),
        pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, None]], pa.list_(pa.float64(), 2)),
        pa.array([[[1], [2]], [[3], [4]], [[5], None]], pa.list_(pa.list_(pa.int64()))),
    ],
    ids=["integers", "fixed size", "lists of lists"],
)
def test_a_null_within_a_list_is_named_by_its_row(tmp_path, input, column):
    source = write(tmp_path, train_0={"z": column}, test_0={"z": column[:2]})
    with pytest.raises(DataError, match="row 2: column 'z' holds a null"):
        load(source, input=input).train.fetch(np.arange(3))


def picture_table(labels, name="image"):
    cells = [{"bytes": encoded(p), "path": None} for p in pictures(len(labels))]
    return {name: cells, "label": labels}


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ([0.0, 1.0] * 4, "column 'label' must hold integers or texts, got double"),
        (pa.array([None] * 8, pa.int64()), "must hold labels of 0 or more, got none"),
    ],
)
def test_wrong_labels_are_refused_in_one_sentence(tmp_path, labels, sentence):
    table = picture_table(labels)
    with pytest.raises(DataError, match=sentence):
        load(write(tmp_path, train_0=table, test_0=table), input=ALWAYS)


def test_info_and_a_run_refuse_labels_that_are_no_integers_alike(tmp_path):
    table = picture_table([0.0, 1.0] * 4)
    source = write(tmp_path, train_0=table, test_0=table)
    errors = []
    for read in (load, inspect):
        with pytest.raises(
            DataError, match="column 'label' must hold integers or texts, got "
        ) as caught:
            read(source)
        errors.append(caught.value.problem)
    assert errors[0] == errors[1]


@BOTH
def test_files_that_name_the_pictures_differently_are_refused(tmp_path, input):
    one, other = picture_table([0, 1]), picture_table([0, 1], name="img")
    source = write(tmp_path, train_0=one, train_1=other, test_0=one)
    with pytest.raises(DataError, match=r"train-1.*image \(did you mean img\?\), got img, label"):
        load(source, input=input)


def test_a_class_only_in_the_test_set_is_counted(tmp_path):
    source = write(tmp_path, train_0=picture_table([0, 1]), test_0=picture_table([0, 2]))
    data = load(source, input=ALWAYS)
    assert (data.train.shape.num_classes, data.test.shape.num_classes) == (3, 3)


def test_mean_and_deviation_are_of_many_pictures_even_if_row_groups_are_small(tmp_path):
    table = pa.table(picture_table([0] * 3000))
    pq.write_table(table, tmp_path / "train-0.parquet", row_group_size=10)
    write(tmp_path, test_0=picture_table([0, 0]))
    rows = load(str(tmp_path), input=ALWAYS).train.statistics_rows()
    assert 2048 <= len(rows) == len(set(rows.tolist())) <= 3000
    assert rows.min() < 100
    assert rows.max() > 2900


def test_a_table_is_streamed_when_its_rows_take_more_memory_than_allowed(tmp_path):
    table = {"x": np.zeros(10_000, np.int64), "y": [0.0] * 10_000}
    source = write(tmp_path, train_0=table, test_0=table)
    for limit, is_streamed in ((10_000 * 12, False), (10_000 * 12 - 1, True)):
        found = load(source, input=InputConfig(max_memory_bytes=limit))
        assert found.train.is_streamed == is_streamed
        info = inspect(source, input=InputConfig(max_memory_bytes=limit))
        assert (info.is_streamed, info.decoded_bytes) == (is_streamed, 20_000 * 12)


def test_a_footer_is_read_once_and_few_are_cached(tmp_path, monkeypatch):
    for number in range(20):
        write(tmp_path, **{f"train_{number:02}": {"y": [number, number]}})
    files = [find(str(path)) for path in sorted(tmp_path.iterdir())]
    pieces, read = [ParquetFile(file) for file in files], []
    monkeypatch.setattr(
        "raydl.data.parquet.pq.read_metadata",
        lambda stream, real=pq.read_metadata: read.append(1) or real(stream),
    )
    for _ in range(3):
        assert pieces[0].read_group(0, ["y"])["y"].to_pylist() == [0, 0]
    assert len(read) == 1
    assert [p.read_group(0, ["y"])["y"][0].as_py() for p in pieces] == list(range(20))
    assert len(_footers) <= 16
    again = pickle.loads(pickle.dumps(pieces[3]))
    read.clear()
    assert again.read_group(0, ["y"])["y"].to_pylist() == [3, 3]
    assert len(read) == 1


def tensors(dtype):
    values = np.zeros((4, 2, 2, 3), dtype)
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    return TablesInMemory(pa.table({"image": column, "label": [0, 1, 0, 1]}))


def test_decoded_pictures_must_be_uint8():
    for dtype in (np.float32, np.int64):
        with pytest.raises(DataError, match="must hold decoded images as uint8"):
            streamed(tensors(dtype))
    fine = streamed(tensors(np.uint8))
    assert fine.train.shape.input_shape == (3, 2, 2)


class Lacking(Batches):
    """Batches whose first few samples cannot be read."""

    num_bad = 0

    def batch(self, rows):
        return part_of(super().batch(rows), 0, int((rows >= self.num_bad).sum()))


def test_a_model_is_checked_with_two_readable_samples():
    """Batch norm needs two samples, and the first ones may be unreadable."""
    images = tiny_images(40)
    batches = Lacking(images, Normalizer.of(images))
    for batches.num_bad in (0, 1, 31, 38):
        assert [len(tensor) for tensor in first_samples(batches, 2)] == [2, 2]
    batches.num_bad = 39
    with pytest.raises(DataError, match="has fewer than 2 readable samples"):
        first_samples(batches, 2)


def test_a_picture_that_claims_more_pixels_than_pillow_opens_is_refused(tmp_path):
    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    claims = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    image = [{"bytes": claims, "path": None}]
    source = write(
        tmp_path, train={"image": image, "label": [0]}, test={"image": image, "label": [0]}
    )
    with pytest.raises(DataError, match=r"row 0: the image does not decode: .*900000000 pixels"):
        load(source)


# arrays whose headers promise more than there is


def npz_promising(path, shape, descr="|u1"):
    """Write an .npz file whose headers promise arrays that it does not hold."""
    header = io.BytesIO()
    values = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, values)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            archive.writestr(f"{name}.npy", header.getvalue() + bytes(1000))
    return str(path)


@pytest.mark.parametrize("shape", [(51_020_408, 28, 28), (2**62, 4), (-5, 28), (10, 10)])
def test_an_npz_with_another_size_than_its_header_is_refused_before_memory_is_allocated(
    tmp_path, shape
):
    source = npz_promising(tmp_path / "set.npz", shape)
    with pytest.raises(DataError, match=r"is not a whole .npz file: .*x_train must have .* bytes"):
        load(source, seed=0)
