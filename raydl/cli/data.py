"""``raydl data info`` describes a data set, ``raydl data convert`` makes Parquet of it."""

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

from raydl.cli.options import list_commands, parse, print_table, say
from raydl.redaction import redact_values
from raydl.text import clock_text, seconds_text

if TYPE_CHECKING:
    from raydl.tools.data_info import PartInfo, SourceInfo

_PLAIN_EVERY_S = 5.0
_LISTED = 20
"""Classes that are listed one by one."""


@dataclasses.dataclass(frozen=True)
class _InfoOptions:
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """A path, a URI, or the name of a bundled set, as for --data."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print all that is known, as JSON."""


@dataclasses.dataclass(frozen=True)
class _ConvertOptions:
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """A path, a URI, or the name of a bundled set, as for --data, but no text."""
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """A folder that is new or empty, a path or URI."""
    rows_per_group: int = 1000
    """Rows of a row group, which is what a worker reads at a time of a streamed set."""
    rows_per_file: int = 50_000
    """Rows of a file, but for the last one."""
    shuffle: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write pictures in a random order; of class folders and arrays, not of Parquet."""
    seed: int = 0
    """Of that order, and of synthetic data."""


def data_command(arguments: Sequence[str]) -> int:
    """Describe a data set (info), or convert it to Parquet (convert)."""
    given = arguments[0] if arguments else "--help"
    if given in _COMMANDS:
        return _COMMANDS[given](arguments[1:])
    print(_usage(given))
    return 0 if given in ("-h", "--help") else 2


def _usage(given: str) -> str:
    return list_commands("usage: raydl data COMMAND [OPTIONS]", _COMMANDS, given, below="data ")


def info(arguments: Sequence[str]) -> int:
    """Describe a data set; of large ones little is read."""
    options = parse(_InfoOptions, arguments, prog="raydl data info", description=info.__doc__)
    from raydl.tools.data_info import inspect

    found = inspect(options.source)
    if options.json:
        print(json.dumps(redact_values(dataclasses.asdict(found)), indent=2))
    else:
        _print_info(found)
    return 0


def convert(arguments: Sequence[str]) -> int:
    """Make Parquet in the layout of the Hugging Face hub of pictures or of a table."""
    options = parse(
        _ConvertOptions, arguments, prog="raydl data convert", description=convert.__doc__
    )
    from raydl.tools.convert import ConvertConfig
    from raydl.tools.convert import convert as convert_data
    from raydl.tools.data_info import bytes_text

    words = dataclasses.asdict(options)
    source, target = words.pop("source"), words.pop("target")
    start = time.monotonic()
    with _progress() as show:
        written = convert_data(source, target, ConvertConfig(**words), on_rows=show)
    for part in written:
        say(
            f"{part.name}: {part.num_rows:,} rows in {_counted(part.num_groups, 'row group')}, "
            f"{_counted(part.num_files, 'file')}, {bytes_text(part.num_bytes)}"
        )
    say(f"wrote {target} in {seconds_text(time.monotonic() - start)}; use: --data {target}")
    return 0


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Give what shows (part, rows done, rows): a bar on a terminal, else a line now and then."""
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
    """Prints how far a conversion is, where nothing can be drawn over."""

    def __init__(self) -> None:
        self._start = self._shown_at = time.monotonic()

    def __call__(self, part: str, num_done: int, num_rows: int) -> None:
        now = time.monotonic()
        if now - self._shown_at < _PLAIN_EVERY_S:
            return
        self._shown_at = now
        elapsed = clock_text(now - self._start, is_short=True)
        print(f"[{elapsed}] {part}: {num_done:,} of {num_rows:,} rows", flush=True)


def _print_info(info: SourceInfo) -> None:
    from raydl.tools.data_info import bytes_text

    say(f"{info.source}: {info.holds} ({_kind(info)})")
    if info.holds == "text":
        print(f"{info.num_tokens:,} tokens, a vocabulary of {info.vocabulary:,}")
    if info.picture_shape:
        _, height, width = info.picture_shape
        size = f"{height}x{width} {info.mode} (height x width)"
        say(f"pictures of {size}, going by the first one; {len(info.class_names)} classes")
    print()
    _print_parts(info.parts, unit="tokens" if info.holds == "text" else "rows")
    if not info.has_test and info.holds != "text":
        print("no test part: a run splits a tenth off, by its seed")
    if info.columns:
        print()
        rows = [(c.name, c.type, _shape(c.shape)) for c in info.columns]
        print_table(("column", "type", "shape of a row"), rows)
    if info.class_names:
        print()
        _print_classes(info)
    how = "is streamed" if info.is_streamed else "is read at the start and kept in memory"
    print(f"\n{bytes_text(info.decoded_bytes)} decoded; it {how}")
    for warning in info.warnings:
        say(f"warning: {warning}")


def _kind(info: SourceInfo) -> str:
    words = {"folders": "a folder per class", "idx": "IDX", "cifar": "CIFAR-10's binary files"}
    return words.get(info.kind, info.kind)


def _shape(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "no numbers"
    return "x".join(map(str, shape)) or "a number"


def _print_parts(parts: Sequence[PartInfo], *, unit: str) -> None:
    head = ("part", unit, "files", "row groups", "rows of each", "bytes of each")
    rows = [_part_row(part) for part in parts]
    width = max(map(len, rows))
    print_table(head[:width], rows, numbers=head[1:])


def _part_row(part: PartInfo) -> list[str]:
    from raydl.tools.data_info import bytes_text

    row = [part.name, f"{part.num_rows:,}"]
    if part.files:
        row.append(f"{len(part.files):,}")
    if part.group_rows:
        row.append(f"{len(part.group_rows):,}")
        row.append(_span(part.group_rows, lambda rows: f"{rows:,}"))
        row.append(_span(part.group_bytes, bytes_text))
    return row


def _span(numbers: Sequence[int], text: Callable[[int], str]) -> str:
    """Return the least and the greatest as ``8 to 10``, or as one where they read the same."""
    return " to ".join(dict.fromkeys(map(text, (min(numbers), max(numbers)))))


def _print_classes(info: SourceInfo) -> None:
    counts = [part.class_counts for part in info.parts]
    rows = [
        (str(number), name, *(f"{part[number]:,}" for part in counts))
        for number, name in enumerate(info.class_names[:_LISTED])
    ]
    names = tuple(part.name for part in info.parts)
    print_table(("label", "class", *names), rows, numbers=("label", *names))
    if len(info.class_names) > _LISTED:
        print(f"and {len(info.class_names) - _LISTED:,} more: --json lists all")


_COMMANDS = {"info": info, "convert": convert}
