"""``raydl data info`` describes a data set; ``raydl data convert`` converts it to Parquet."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from raydl.cli.options import Flag, list_commands, parse, print_lines, print_table
from raydl.text.formatting import clock_text, seconds_text
from raydl.text.redaction import redact_values

if TYPE_CHECKING:
    from raydl.tools.data_info import PartInfo, SourceInfo

_PLAIN_EVERY_S = 5.0
_MAX_LISTED = 20
"""Most classes that ``info`` lists."""


@dataclasses.dataclass(frozen=True)
class _InfoOptions:
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """A path, a URI or the name of a bundled set, as for --data."""
    json: Flag = False
    """Print the whole description as JSON."""


@dataclasses.dataclass(frozen=True)
class _ConvertOptions:
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """A path, a URI or the name of a bundled set, as for --data; no text."""
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """A new or empty folder, a path or URI."""
    rows_per_group: int = 1000
    """Rows of a row group; a worker reads a streamed set by row groups."""
    rows_per_file: int = 50_000
    """Rows of each file but the last."""
    shuffle: Flag = False
    """Write images of class folders and arrays in random order (not of Parquet or saved sets)."""
    seed: int = 0
    """Seed of the random order and of synthetic data."""


def data_command(arguments: Sequence[str]) -> int:
    """Describe a data set (info) or convert it to Parquet (convert)."""
    given = arguments[0] if arguments else "--help"
    if given in _COMMANDS:
        return _COMMANDS[given](arguments[1:])
    usage = "usage: raydl data COMMAND [OPTIONS]"
    print(list_commands(usage, _COMMANDS, given, below="data "))
    return 0 if given in ("-h", "--help") else 2


def info(arguments: Sequence[str]) -> int:
    """Describe a data set, reading little of a large one."""
    options = parse(_InfoOptions, arguments, prog="raydl data info", description=info.__doc__)
    from raydl.tools.data_info import inspect

    description = inspect(options.source)
    if options.json:
        print(json.dumps(redact_values(dataclasses.asdict(description)), indent=2))
    else:
        _print_info(description)
    return 0


def convert(arguments: Sequence[str]) -> int:
    """Convert images or a table to Parquet in the layout of the Hugging Face hub."""
    options = parse(
        _ConvertOptions, arguments, prog="raydl data convert", description=convert.__doc__
    )
    from raydl.tools.convert import ConvertConfig
    from raydl.tools.convert import convert as convert_data
    from raydl.tools.data_info import bytes_text

    settings = dataclasses.asdict(options)
    source, target = settings.pop("source"), settings.pop("target")
    start = time.monotonic()
    with _progress() as show:
        written = convert_data(source, target, ConvertConfig(**settings), on_rows=show)
    for part in written:
        print_lines(
            f"{part.name}: {part.num_rows:,} rows in {_counted(part.num_groups, 'row group')}, "
            f"{_counted(part.num_files, 'file')}, {bytes_text(part.num_bytes)}"
        )
    print_lines(f"wrote {target} in {seconds_text(time.monotonic() - start)}; use: --data {target}")
    return 0


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows (part, rows done, rows), on a terminal as a bar, else as text."""
    if not sys.stdout.isatty():
        yield _PlainLines()
        return
    columns = (
        TextColumn("{task.description:5}"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console()) as progress:
        tasks = dict[str, object]()

        def show(part: str, num_done: int, num_rows: int) -> None:
            if part not in tasks:
                tasks[part] = progress.add_task(part, total=num_rows)
            progress.update(tasks[part], completed=num_done)  # type: ignore[arg-type]

        yield show


class _PlainLines:
    """Prints the progress of a conversion as a line every 5 s, for output that is no terminal."""

    def __init__(self) -> None:
        self._start = self._printed_at = time.monotonic()

    def __call__(self, part: str, num_done: int, num_rows: int) -> None:
        now = time.monotonic()
        if now - self._printed_at < _PLAIN_EVERY_S:
            return
        self._printed_at = now
        elapsed = clock_text(now - self._start, is_short=True)
        print(f"[{elapsed}] {part}: {num_done:,} of {num_rows:,} rows", flush=True)


def _print_info(info: SourceInfo) -> None:
    from raydl.data.sources import KINDS
    from raydl.tools.data_info import bytes_text

    kinds = {kind.name: kind.title for kind in KINDS}
    title, is_text = kinds.get(info.kind, info.kind), info.holds == "text"
    print_lines(f"{info.source}: {title}" if is_text else f"{info.source}: {info.holds} ({title})")
    if is_text:
        by = ", by the largest token" if info.kind == "tokens" else ""
        print(f"{info.num_tokens:,} tokens, a vocabulary of {info.vocabulary:,}{by}")
    if info.image_shape:
        _, height, width = info.image_shape
        size = f"{height}x{width} {info.mode} (height x width)"
        print_lines(f"images of {size}, by the first one; {len(info.class_names)} classes")
    print()
    _print_parts(info.parts, unit="tokens" if is_text else "rows")
    if not info.has_test:
        of_text, others = "the last tenth is the test set", "a run splits off a tenth, by its seed"
        print(f"no test part: {of_text if is_text else others}")
    if info.columns:
        print()
        rows = [(c.name, c.type, _shape(c.shape)) for c in info.columns]
        print_table(("column", "type", "shape of a row"), rows)
    if info.class_names:
        print()
        _print_classes(info)
    how = "streams it" if info.is_streamed else "reads it at the start and keeps it in memory"
    what = "of tokens" if is_text else "decoded"
    print(f"\n{bytes_text(info.decoded_bytes)} {what}; a run {how}")
    for warning in info.warnings:
        print_lines(f"warning: {warning}")


def _shape(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "no numbers"
    return "x".join(map(str, shape)) or "a number"


def _print_parts(parts: Sequence[PartInfo], *, unit: str) -> None:
    from raydl.tools.data_info import bytes_text

    head = ("part", unit, "files", "row groups", "rows of each", "bytes of each")
    rows = [[part.name, f"{part.num_rows:,}"] for part in parts]
    for row, part in zip(rows, parts, strict=True):
        if part.files:
            row.append(f"{len(part.files):,}")
        if part.group_rows:
            row.append(f"{len(part.group_rows):,}")
            row.append(_span(part.group_rows, "{:,}".format))
            row.append(_span(part.group_bytes, bytes_text))
    print_table(head[: max(map(len, rows))], rows, numbers=head[1:])


def _span(numbers: Sequence[int], text: Callable[[int], str]) -> str:
    """Return minimum and maximum as ``8 to 10``, or one of them if their texts are equal."""
    return " to ".join(dict.fromkeys(map(text, (min(numbers), max(numbers)))))


def _print_classes(info: SourceInfo) -> None:
    counts = [part.class_counts for part in info.parts]
    rows = [
        (str(number), name, *(f"{part[number]:,}" for part in counts))
        for number, name in enumerate(info.class_names[:_MAX_LISTED])
    ]
    names = tuple(part.name for part in info.parts)
    print_table(("label", "class", *names), rows, numbers=("label", *names))
    if len(info.class_names) > _MAX_LISTED:
        print(f"and {len(info.class_names) - _MAX_LISTED:,} more: --json lists all")


_COMMANDS = {"info": info, "convert": convert}
