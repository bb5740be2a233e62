"""The same table, and the same tokens, by every road: the same bits, order, classes and errors."""

import csv
import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from layouts import write_megatron, write_saved

from raydl.config import InputConfig
from raydl.data import load
from raydl.errors import DataError

COUNT = 30
ROWS = {
    "x": [n / 7 for n in range(COUNT)],
    "n": [3 * n - 20 for n in range(COUNT)],
    "kind": ["pear", "apple", "fig"] * (COUNT // 3),
}
KINDS = ("apple", "fig", "pear")
PARTS = ("train", "test")


def write_parquet(folder, rows):
    for part in PARTS:
        pq.write_table(pa.table(rows), folder / f"{part}.parquet", row_group_size=7)


def write_separated(folder, rows, delimiter, ending):
    for part in PARTS:
        with (folder / f"{part}{ending}").open("w", newline="") as file:
            writer = csv.writer(file, delimiter=delimiter)
            writer.writerow(rows)
            writer.writerows(zip(*rows.values(), strict=True))


def write_json_lines(folder, rows):
    lines = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    for part in PARTS:
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


TABLES = {
    "parquet": write_parquet,
    "saved": lambda folder, rows: write_saved(folder, pa.table(rows), PARTS, rows_per_batch=7),
    "csv": lambda folder, rows: write_separated(folder, rows, ",", ".csv"),
    "tsv": lambda folder, rows: write_separated(folder, rows, "\t", ".tsv"),
    "json lines": write_json_lines,
}
every_table = pytest.mark.parametrize("road", TABLES)
both_modes = pytest.mark.parametrize("stream", ["never", "always"])


def opened(road, folder, rows=ROWS, **settings):
    TABLES[road](folder, rows)
    return load(str(folder), input=InputConfig(target="kind", shuffle_samples=10, **settings))


@both_modes
@every_table
def test_every_road_gives_the_same_rows(tmp_path, road, stream):
    data = opened(road, tmp_path, stream=stream)
    rows = np.random.default_rng(0).permutation(COUNT)[:17]
    for part in (data.train, data.test, pickle.loads(pickle.dumps(data.train))):
        batch = {name: values.numpy() for name, values in part.fetch(rows).items()}
        assert list(batch) == ["x", "n", "kind"]
        for name, dtype in (("x", np.float32), ("n", np.int64)):
            assert batch[name].dtype == dtype
            assert batch[name].tolist() == np.array(ROWS[name], dtype)[rows].tolist()
        assert [KINDS[number] for number in batch["kind"]] == [ROWS["kind"][row] for row in rows]
        assert part.shape.class_names == KINDS
    assert data.train.is_streamed == (stream == "always")


@both_modes
@every_table
def test_an_epoch_has_each_row_once_and_in_memory_in_the_same_order(tmp_path, road, stream):
    order = opened(road, tmp_path, stream=stream).train.order(5)
    rows = order.rows(1, np.arange(COUNT)).tolist()
    assert sorted(rows) == list(range(COUNT))
    if stream == "never":
        assert rows == np.random.default_rng([5, 1]).permutation(COUNT).tolist()


@every_table
def test_a_missing_value_is_told_with_its_column_and_row(tmp_path, road):
    rows = {**ROWS, "n": [None if row == 13 else value for row, value in enumerate(ROWS["n"])]}
    with pytest.raises(DataError, match="column 'n'") as caught:
        opened(road, tmp_path, rows).train.fetch(np.arange(COUNT))
    places = ("row 13", "row group 1, row 6", "record batch 1, row 6")
    assert any(place in str(caught.value) for place in places)


@every_table
def test_a_missing_column_is_told_with_the_others(tmp_path, road):
    rows = {name: ROWS[name] for name in ("x", "n")}
    with pytest.raises(DataError, match=r"must have a column kind, got x, n$"):
        opened(road, tmp_path, rows)


def test_a_misspelt_column_is_told_with_the_nearest(tmp_path):
    rows = {**{f"x{n}": ROWS["x"] for n in range(200)}, "kinds": ROWS["kind"]}
    with pytest.raises(
        DataError, match=r"must have a column kind \(did you mean kinds\?\), got x0,"
    ):
        opened("parquet", tmp_path, rows)


@every_table
def test_a_text_among_the_inputs_is_refused_by_its_name(tmp_path, road):
    rows = {**ROWS, "note": ["good"] * COUNT}
    with pytest.raises(DataError, match="column 'note' must hold numbers, got string"):
        opened(road, tmp_path, rows)


TOKENS = np.arange(200) * 7 % 251
PIECES = (TOKENS[:90], TOKENS[90:])


def write_llm_c(folder):
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(TOKENS)
    (folder / "train.bin").write_bytes(header.tobytes() + TOKENS.astype(np.uint16).tobytes())


def write_several(folder):
    for number, piece in enumerate(PIECES):
        np.save(folder / f"part-{number}.npy", piece.astype(np.int32))


SEQUENCES = {
    "nanogpt": lambda folder: TOKENS.astype(np.uint16).tofile(folder / "train.bin"),
    "llm.c": write_llm_c,
    "megatron": lambda folder: write_megatron(folder / "all", PIECES),
    "npy": lambda folder: np.save(folder / "tokens.npy", TOKENS),
    "several npy": write_several,
}


@both_modes
@pytest.mark.parametrize("road", SEQUENCES)
def test_every_road_gives_the_same_tokens(tmp_path, road, stream):
    SEQUENCES[road](tmp_path)
    data = load(str(tmp_path), input=InputConfig(context=8, stream=stream, vocabulary="251"))
    wanted = [TOKENS[start : start + 9] for start in range(0, 180 - 8, 8)]
    for part in (data.train, pickle.loads(pickle.dumps(data.train))):
        rows = np.random.default_rng(0).permutation(part.num_samples)
        inputs, following = (values.numpy() for values in part.fetch(rows))
        assert inputs.tolist() == [wanted[row][:-1].tolist() for row in rows]
        assert following.tolist() == [wanted[row][1:].tolist() for row in rows]
        assert (part.shape.input_shape, part.shape.num_classes) == ((8,), 251)
    assert data.train.num_samples == len(wanted)
    assert data.test.num_samples == 2
    order = data.train.order(5).rows(1, np.arange(len(wanted)))
    assert order.tolist() == np.random.default_rng([5, 1]).permutation(len(wanted)).tolist()
