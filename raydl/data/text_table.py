"""Tables in text files: CSV, TSV and JSON lines, read by PyArrow.

A file is cut into blocks of whole lines, which are the groups: so it is streamed like any other if
it is large. What may mean two things is refused, not guessed.
"""

from __future__ import annotations

import io
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json

from raydl.config import InputConfig
from raydl.data.files import Place
from raydl.data.pieces import Columns, GroupedFile, reading
from raydl.data.schema import schema_of
from raydl.errors import DataError

_BLOCK_BYTES = 1 << 18
_FEWEST_LINES = 256
"""Lines of a block, about, if they are long."""
_NO_VALUE = ("", "?")  # as an Arrow array it would import pandas, for all kinds of data
"""Texts that stand for no value; among numbers, PyArrow's ``NA``, ``NaN`` and others do, too."""
_NUMBER = r"^[-+.\d][-+.,\deE]*$"
_CODE = r"^\s*[-+]?0\d"
"""A number that would lose its zeros, as 01234 does."""
_CODE_IN_LINE = re.compile(rb"(?:^|[\n,\t])[\s\"]*[-+]?0\d")
_DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}


class TextTable(GroupedFile):
    """A table in a text file in UTF-8. Its names and types follow from the whole file.

    Args:
        place: the file.
        input: the columns to read, and what to do with a row that lacks a value in one of them.

    Raises:
        DataError: if it is in another encoding, cannot be parsed, or lacks a value.
    """

    word = "block"
    _start = 0
    """Place of the first row in the file."""

    def __init__(self, place: Place, input: InputConfig) -> None:
        self.place, self.name, self._drops = place, place.name, input.nulls == "drop"
        self._wanted = {*input.columns_named, input.target} if input.columns_named else None
        self._examples: dict[str, str] = {}
        with reading(self.name, "cannot be read"):
            self.arrow_schema = self._inferred()
            self._measure()
        self.schema = schema_of(self.arrow_schema)
        for name, text in self._examples.items():
            stored = f"{self.schema[name].stored} such as {text!r}"
            self.schema[name] = replace(self.schema[name], stored=stored)

    @abstractmethod
    def _parse(self, data: bytes, types: pa.Schema | None) -> pa.Table:
        """Return some lines as a table, of the columns in ``types``; None: infer all of them."""

    def _cut(self, data: bytes) -> int:
        """Return the end of the last whole row among some lines, or 0."""
        return data.rfind(b"\n") + 1

    def _blocks(self) -> Iterator[tuple[int, bytes]]:
        """Yield (place in the file, bytes) of blocks of whole rows."""
        with self.place.open() as stream:
            start, length, size = self._start, _BLOCK_BYTES, stream.size()
            while start < size:
                data = stream.read_at(length, start)
                end = len(data) if start + length >= size else self._cut(data)
                if data[:end].strip():
                    yield start, data[:end]
                start += end
                lines = _FEWEST_LINES * (data.find(b"\n") + 1)
                length = max(_BLOCK_BYTES, lines) if end else 2 * length

    def _inferred(self) -> pa.Schema:
        """Return the columns to read with the types that hold all their values."""
        types: dict[str, pa.DataType] = {}
        for start, data in self._blocks():
            _require_utf8(data, start, self.name)
            below = f", below byte {start:,}" if start > self._start else ""
            with reading(self.name + below, "cannot be read"):
                table = self._parse(data, None)
            self._refuse_codes(data, table.schema)
            for field in table.schema:
                types[field.name] = _wider(types.get(field.name, field.type), field.type)
                if pa.types.is_string(field.type) and field.name not in self._examples:
                    self._examples[field.name] = _example(table[field.name])
        return pa.schema(list(types.items()))

    def _is_wanted(self, name: str) -> bool:
        return self._wanted is None or name in self._wanted

    def _refuse_codes(self, data: bytes, types: pa.Schema) -> None:
        """Raise a DataError if a number would lose leading zeros."""

    def _measure(self) -> None:
        """Note (place, bytes) and the rows of each block."""
        self._spans, sizes, num_rows = list[tuple[int, int]](), [], 0
        for start, data in self._blocks():
            table = self._read(data)
            self._spans.append((start, len(data)))
            sizes.append(len(self._kept(table, num_rows)))
            num_rows += len(table)
        self._set_sizes(sizes)
        if left_out := num_rows - self.num_rows:
            self.note = f"{left_out:,} of {num_rows:,} rows of {self.name} lack a value: left out"

    def _read(self, data: bytes) -> pa.Table:
        """Return the columns to read, without blanks around texts, and nulls for no value."""
        types = pa.schema([field for field in self.arrow_schema if self._is_wanted(field.name)])
        table = self._parse(data, types)
        no_value, null = pa.array(_NO_VALUE), pa.scalar(None, pa.string())
        for number, field in enumerate(table.schema):
            if pa.types.is_string(field.type):
                texts = pc.utf8_trim_whitespace(table[field.name])
                known = pc.if_else(pc.is_in(texts, no_value), null, texts)
                table = table.set_column(number, field.name, known)
        return table

    def _kept(self, table: pa.Table, first_row: int) -> pa.Table:
        """Return the rows that have all values."""
        lacking = [name for name in table.column_names if table[name].null_count]
        if lacking and not self._drops:
            row = first_row + pc.index(table[lacking[0]].is_null(), True).as_py()
            raise DataError(
                self.name,
                f"column {lacking[0]!r} has no value in row {row:,}; add it, or leave such rows "
                f"out by --input.nulls drop",
            )
        for name in lacking:
            table = table.filter(table[name].is_valid())
        return table

    def read_group(self, number: int, names: Sequence[str]) -> Columns:
        """Return some columns of a block."""
        start, length = self._spans[self._numbers[number]]
        with reading(self.name, "cannot be read"), self.place.open() as stream:
            table = self._kept(self._read(stream.read_at(length, start)), int(self._starts[number]))
            if len(table) != self.groups[number]:
                raise DataError(self.name, "has changed since it was opened")
            return {name: table[name] for name in names}

    def group_bytes(self, names: Sequence[str]) -> list[int]:
        """Return the bytes of each block in the file, all columns included."""
        return [self._spans[number][1] for number in self._numbers]

    def where(self, row: int) -> str:
        """Return the file and the row, for messages."""
        return f"{self.name}, row {row}{' of those with all values' if self.note else ''}"


class CsvFile(TextTable):
    """A CSV or TSV file, whose first line names the columns.

    Args:
        place: the file.
        input: see ``TextTable``.

    Raises:
        DataError: also if it has no such line, separates its columns otherwise, or has numbers with
            leading zeros.
    """

    def __init__(self, place: Place, input: InputConfig) -> None:
        delimiter = "\t" if place.path.lower().endswith(".tsv") else ","
        self._options = pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        with reading(place.name, "cannot be read"):
            with place.open() as stream:
                head = _first_line(stream, place.name)
            line = pa.BufferReader(head.rstrip(b"\r\n") + b"\n")
            table = pa.csv.read_csv(line, parse_options=self._options)
        self._start, self._names = len(head), [name.strip() for name in table.column_names]
        if problem := _problem_of(self._names, head.decode(), delimiter):
            raise DataError(place.name, problem)
        super().__init__(place, input)

    def _parse(self, data: bytes, types: pa.Schema | None) -> pa.Table:
        convert = pa.csv.ConvertOptions(
            null_values=[*pa.csv.ConvertOptions().null_values, " ", "?", " ?"],
            column_types=types,
            include_columns=None if types is None else types.names,
        )
        read = pa.csv.ReadOptions(
            use_threads=False, block_size=len(data) + 1, column_names=self._names
        )
        return pa.csv.read_csv(pa.BufferReader(data), read, self._options, convert)

    def _cut(self, data: bytes) -> int:
        end = super()._cut(data)
        while data.count(b'"', 0, end) % 2:  # within a quoted value
            end = data.rfind(b"\n", 0, data.rfind(b'"', 0, end)) + 1
        return end

    def _refuse_codes(self, data: bytes, types: pa.Schema) -> None:
        numbers = [
            field.with_type(pa.string())
            for field in types
            if pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
            if self._is_wanted(field.name)
        ]
        if not numbers or not _CODE_IN_LINE.search(data):
            return
        table = self._parse(data, pa.schema(numbers))
        for name in table.column_names:
            codes = table[name].filter(pc.match_substring_regex(table[name], _CODE))
            if len(codes):
                raise DataError(
                    self.name,
                    f"column {name!r} holds {codes[0]}, a code rather than a number: write it as a "
                    f"text (x{codes[0]}), or name the other columns in --input.columns",
                )


class JsonLines(TextTable):
    """A file with a JSON object in each line; a key that is missing in some is a null there."""

    def _parse(self, data: bytes, types: pa.Schema | None) -> pa.Table:
        others = "infer" if types is None else "ignore"
        return pa.json.read_json(
            pa.BufferReader(data),
            pa.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
            pa.json.ParseOptions(explicit_schema=types, unexpected_field_behavior=others),
        )


def _first_line(stream: pa.NativeFile, name: str) -> bytes:
    """Return the first line, with the breaks that are quoted."""
    lines = io.BufferedReader(stream)
    line = more = lines.readline()
    while more and line.count(b'"') % 2:
        line += (more := lines.readline())
    _require_utf8(line, 0, name)
    return line


def _require_utf8(data: bytes, start: int, name: str) -> None:
    """Raise a DataError if bytes from a place in a file on are not UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        near = data[max(0, error.start - 20) : error.start + 20].decode(errors="replace").strip()
        raise DataError(
            name,
            f"is not in UTF-8 at byte {start + error.start:,}, near {near!r}; save it in UTF-8, as "
            f"by iconv -f latin1 -t utf-8",
        ) from error


def _problem_of(names: Sequence[str], head: str, delimiter: str) -> str:
    """Return why a first line does not name the columns, or ""."""
    usual = f"must separate its columns by {_DELIMITERS[delimiter]}"
    for other, words in _DELIMITERS.items():
        if len(names) == 1 and other in head:
            return f"{usual}, got {words} in its first line: {head.strip()}"
    if "" in names:
        return (
            f"has no name for column {names.index('')} in its first line; name it, or write the "
            f"file without an index"
        )
    if len(set(names)) < len(names):
        return f"has several columns {Counter(names).most_common(1)[0][0]!r}; rename them"
    numbers = [name for name in names if re.match(_NUMBER, name)]
    if numbers and numbers != [str(number) for number in range(len(numbers))]:
        return (
            f"must begin with a line that names its columns, got {head.strip()[:80]}; write one "
            f"above it, with names that are not numbers"
        )
    return ""


def _wider(first: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the type that holds the values of both, a text if there is no other."""
    if first.equals(other):
        return first
    schemas = [pa.schema([("", type)]) for type in (first, other)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return pa.string()


def _example(texts: pa.ChunkedArray) -> str:
    """Return a value that is not a number, of a column with some, or the first one."""
    others = texts.filter(pc.invert(pc.match_substring_regex(texts, _NUMBER)))
    return str((others if len(others) else texts)[0])
