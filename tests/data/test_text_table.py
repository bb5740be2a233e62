"""Tables in text files: what is read, and what is refused because it may mean two things."""

import json
import pickle

import numpy as np
import pyarrow as pa
import pytest

from raydl.config import InputConfig
from raydl.data import files
from raydl.data.text_table import CsvFile, JsonLines
from raydl.errors import DataError

IRIS = """sepal,petal,species
5.1,1.4,setosa
7.0,4.7,versicolor
6.3,6,virginica
"""


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens a table from its text."""

    def open(text, name="table.csv", **input):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        make = JsonLines if name.endswith("jsonl") else CsvFile
        return make(files.find(str(path)), InputConfig(**input))

    return open


def rows_of(piece):
    """Return all rows by column."""
    groups = [piece.read_group(n, list(piece.schema)) for n in range(len(piece.groups))]
    return {
        name: [value for group in groups for value in pa.chunked_array(group[name]).to_pylist()]
        for name in piece.schema
    }


def test_the_same_table_is_read_from_csv_tsv_and_json_lines(opened):
    lines = [dict(zip(("sepal", "petal", "species"), values, strict=True)) for values in [
        (5.1, 1.4, "setosa"), (7.0, 4.7, "versicolor"), (6.3, 6, "virginica")]]  # fmt: skip
    pieces = [
        opened(IRIS),
        opened(IRIS.replace("\n", "\r\n"), "dos.csv"),
        opened("\ufeff" + IRIS, "mark.csv"),
        opened(IRIS.replace(",", "\t"), "table.tsv"),
        opened(IRIS.replace(",", " , "), "blanks.CSV"),
        opened("\n".join(map(json.dumps, lines)), "table.jsonl"),
    ]
    for piece in pieces:
        assert [(f.kind, f.dtype) for f in piece.schema.values()] == [
            ("number", "float32"), ("number", "float32"), ("text", "text")]  # fmt: skip
        assert rows_of(piece)["sepal"] == [5.1, 7.0, 6.3]
        assert rows_of(piece)["species"] == ["setosa", "versicolor", "virginica"]


def test_types_follow_from_the_whole_file_not_from_its_beginning(opened):
    numbers = [str(n) for n in range(100_000)]
    later = opened("a,b\n" + "".join(f"{n},1\n" for n in [*numbers, "0.5"]))
    assert len(later.groups) > 1
    assert later.schema["a"].dtype == "float32"
    assert rows_of(later)["a"] == [*range(100_000), 0.5]
    text = opened("a,b\n" + "".join(f"{n},1\n" for n in [*numbers, "many"]))
    assert text.schema["a"].stored == "string such as 'many'"
    assert rows_of(text)["a"][-2:] == ["99999", "many"]


def test_a_file_is_cut_between_rows_also_where_values_have_line_breaks(opened):
    values = [("word\n" * (n % 50)) + '"quoted", ' + str(n) for n in range(20_000)]
    quoted = [value.replace('"', '""') for value in values]
    piece = opened("a,b\n" + "".join(f'"{value}",{n}\n' for n, value in enumerate(quoted)))
    assert len(piece.groups) > 5
    assert sum(piece.groups) == piece.num_rows == 20_000
    assert rows_of(piece)["a"] == values
    assert rows_of(piece)["b"] == list(range(20_000))


def test_a_quote_within_a_value_changes_nothing(opened):
    piece = opened("a,b\n" + "".join(f'5" pipe {n},{n}\n' for n in range(60_000)))
    assert piece.num_rows == 60_000
    assert rows_of(piece)["b"] == list(range(60_000))


def test_a_wide_table_has_hundreds_of_rows_in_a_block(opened):
    names = [f"column{n}" for n in range(2000)]
    piece = opened("\n".join([",".join(names), *[",".join(["1.5"] * 2000)] * 600]))
    assert piece.num_rows == 600
    assert max(piece.groups) > 200


def test_a_piece_is_small_when_it_travels_and_reads_the_same(opened):
    piece = opened("a,b\n" + "1,2\n" * 100_000)
    data = pickle.dumps(piece)
    assert len(data) < 5000
    assert rows_of(pickle.loads(data)) == rows_of(piece)


def test_a_file_that_has_changed_since_it_was_opened_is_refused(opened):
    piece = opened("a,b\n1,2\n3,4\n")
    opened("a,b\n11,12\n")
    with pytest.raises(DataError, match=r"table\.csv: has changed since it was opened"):
        piece.read_group(0, ["a"])


@pytest.mark.parametrize("mark", ["", "?", " ?", "NA", "nan"])
def test_a_row_that_lacks_a_number_is_refused_or_left_out_as_the_user_says(opened, mark):
    text = f"a,b\n1,2\n3,{mark}\n5,6\n"
    with pytest.raises(DataError, match=r"column 'b' has no value in row 1; .*nulls drop"):
        opened(text)
    piece = opened(text, nulls="drop")
    assert rows_of(piece) == {"a": [1, 5], "b": [2, 6]}
    assert piece.note.startswith("1 of 3 rows of ")
    assert "of those with all values" in piece.where(1)


def test_a_text_may_be_lacking_too_but_na_is_a_text(opened):
    text = "a,b\n1,yes\n3,\n5,?\n7,NA\n"
    with pytest.raises(DataError, match="column 'b' has no value in row 1"):
        opened(text)
    assert rows_of(opened(text, nulls="drop"))["b"] == ["yes", "NA"]


def test_a_key_that_is_missing_in_a_line_of_json_is_a_null(opened):
    with pytest.raises(DataError, match="column 'b' has no value in row 1"):
        opened('{"a": 1, "b": 2}\n{"a": 3}\n', "table.jsonl")


def test_columns_that_are_not_read_may_lack_values(opened):
    piece = opened("a,b,c\n1,,4\n2,01,5\n", columns="a", target="c")
    assert piece.num_rows == 2
    assert piece.read_group(0, ["c"])["c"].to_pylist() == [4, 5]


REFUSED = {
    "one line": ("1,2", r"begin with a line that names its columns"),
    "no names": ("5.1,3.5,setosa\n4.9,3.0,setosa\n", r"begin with a line that names its columns"),
    "semicolons": ("a;b\n5,1;3,5\n", r"separate its columns by commas, got semicolons .* a;b"),
    "tabs": ("a\tb\n1\t2\n", r"by commas, got tabs"),
    "latin-1": ("a,b\n1,caf\xe9\n".encode("latin1"), r"not in UTF-8 at byte 9, near .*caf"),
    "latin-1 names": ("caf\xe9,b\n1,2\n".encode("latin1"), r"not in UTF-8 at byte 3"),
    "utf-16": ("a,b\n1,2\n".encode("utf-16"), r"not in UTF-8 at byte 0"),
    "codes": ("zip,b\n12345,1\n01234,2\n", r"column 'zip' holds 01234, a code"),
    "an index": (",a,b\n0,1,2\n", r"no name for column 0"),
    "twice a name": ("a,b,a\n1,2,3\n", r"several columns 'a'"),
    "ragged": ("a,b\n1,2\n1,2,3\n", r"Expected 2 columns, got 3"),
    "empty": ("", r"cannot be read: .*[Ee]mpty"),
}


@pytest.mark.parametrize(("text", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_may_mean_two_things_is_refused_in_one_sentence(opened, text, problem):
    with pytest.raises(DataError, match=problem) as raised:
        opened(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ['{"a": 1}\n{"a": "x"}\n', '{"a": 1}\n{"a":', '[{"a": 1}]'])
def test_json_that_is_not_one_object_per_line_is_refused_in_one_sentence(opened, text):
    with pytest.raises(DataError, match=r"table\.jsonl: cannot be read: .*JSON") as raised:
        opened(text, "table.jsonl")
    assert "\n" not in str(raised.value)


def test_numbers_in_order_may_be_names_as_pandas_writes_them(opened):
    assert list(opened("0,1,2,label\n5,6,7,x\n").schema) == ["0", "1", "2", "label"]


def test_lists_in_json_are_vectors(opened):
    piece = opened('{"a": [1, 2]}\n{"a": [3, 4.5]}\n', "table.jsonl")
    assert piece.schema["a"].kind == "vector"
    assert rows_of(piece)["a"] == [[1, 2], [3, 4.5]]


def test_time_and_memory_grow_with_the_rows_and_no_faster(opened):
    small, large = (opened("a,b\n" + "1.5,2\n" * n) for n in (50_000, 400_000))
    assert max(large.groups) <= 1.1 * max(small.groups)
    assert np.sum(large.groups) == 400_000


@pytest.mark.parametrize("name", ["table.csv", "table.tsv", "table.jsonl"])
def test_a_damaged_file_is_read_or_refused_in_one_sentence(opened, name):
    random = np.random.default_rng(0)
    rows = [{"a": n / 8, "b": n, "c": f"word{n}"} for n in range(30)]
    text = "\n".join(map(json.dumps, rows))
    if name != "table.jsonl":
        comma = "," if name == "table.csv" else "\t"
        text = "\n".join([comma.join("abc"), *(comma.join(map(str, r.values())) for r in rows)])
    problems = []
    for _ in range(100):
        data = bytearray(text.encode())
        for place in random.integers(0, len(data), 2):
            data[place] = random.integers(0, 256)
        try:
            rows_of(opened(bytes(data[: random.integers(1, len(data))]), name))
        except DataError as error:
            problems.append(str(error))
    assert problems
    assert not any("\n" in problem for problem in problems)
