"""The kinds of sources: how each is recognized, and how its pieces are opened."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from raydl.config import InputConfig
from raydl.data import files
from raydl.data.arrays import ImageArrays, find_cifar, find_idx, open_cifar, open_idx, open_npz
from raydl.data.atomic_folder import refuse_unfinished
from raydl.data.files import Place
from raydl.data.image_files import find_image_files, open_image_files
from raydl.data.listing import Listing, Parts, list_folder, parts_by_name
from raydl.data.parquet import ParquetFile
from raydl.data.pieces import Piece
from raydl.data.saved_dataset import find_saved, open_saved
from raydl.data.tar import Tar
from raydl.data.text_table import CsvFile, JsonLines
from raydl.data.token_files import (
    TEXT_ENDINGS,
    TOKEN_ENDINGS,
    find_tokens,
    open_text,
    open_tokens,
)
from raydl.errors import DataError, UnknownNameError
from raydl.storage import parent_and_name

_BUNDLED = ("digits", "synthetic")

Find = Callable[[Listing], "Parts | None"]
Open = Callable[[Listing, Parts, InputConfig], Mapping[str, Sequence[Piece]]]


@dataclass(frozen=True)
class Kind:
    """One kind of source."""

    name: str
    title: str
    """In words, for ``raydl data info``."""
    endings: tuple[str, ...]
    """Endings of a file of this kind that is given alone; () if only folders are of it."""
    open: Open
    """Returns the pieces of the files of each part."""
    find: Find | None = None
    """Returns the files of each part of a folder, below ``""`` those that are read beside them, or
    None if the folder is not of this kind. None: the files with the endings, by their names."""

    def parts(self, found: Listing) -> Parts | None:
        """Return the files of each part of a listing, or None if it is not of this kind."""
        if self.find is not None and not found.is_explicit:
            return self.find(found)
        paths = _nearest(found, found.ending_in(self.endings)) if self.endings else []
        return parts_by_name(found, paths) if paths else None


def _nearest(found: Listing, paths: list[str]) -> list[str]:
    """Return the files of the folder itself; else those of its folder ``data``; else all."""
    for is_near in (lambda path: "/" not in path, lambda path: re.fullmatch("data/[^/]*", path)):
        near = [path for path in paths if is_near(path)]
        if near:
            left = sorted(set(paths) - set(near))
            found.left_out |= dict.fromkeys(left, "in folders below the others")
            return near
    return paths


def each(make: Callable[[Place, InputConfig], Piece]) -> Open:
    """Return the function that opens the files of each part one by one."""
    return lambda found, parts, input: found.each(parts, lambda place: make(place, input))


KINDS = (
    Kind("parquet", "Parquet", (".parquet",), each(ParquetFile)),
    Kind("saved", "saved by datasets.save_to_disk", (), open_saved, find_saved),
    Kind("idx", "IDX", (), open_idx, find_idx),
    Kind("cifar", "CIFAR's binary files", (), open_cifar, find_cifar),
    Kind("npz", "NumPy's .npz", (".npz",), open_npz, lambda found: None),
    Kind("folders", "a folder per class", (), open_image_files, find_image_files),
    Kind("tar", "tar files of WebDataset", (".tar", ".tar.gz", ".tgz"), each(Tar)),
    Kind("tokens", "token files", TOKEN_ENDINGS, open_tokens, find_tokens),
    Kind("csv", "CSV or TSV", (".csv", ".tsv"), each(CsvFile)),
    Kind("json", "JSON lines", (".jsonl", ".ndjson"), each(JsonLines)),
)
"""In the order in which they are tried."""


@dataclass(frozen=True)
class Source:
    """A source that was found, and not read."""

    name: str
    """What the user named, for messages."""
    kind: str
    """That of ``KINDS``; text; or synthetic."""
    pieces: Mapping[str, Sequence[Piece]]
    """Pieces of train and, if there is one, of test."""
    problems: tuple[DataError, ...] = ()
    """What refuses a run."""
    notes: tuple[str, ...] = ()
    """Sentences about what is not read, for the log of a run."""


def open_source(source: str, *, input: InputConfig, seed: int = 0) -> Source:
    """Return a source that ``raydl.data.load`` accepts, with its pieces.

    Raises:
        DataError: if it is missing, cannot be reached, lacks a part, holds no data, or is an
            incomplete conversion.
        UnknownNameError: if a bare word is neither a path nor a bundled set.
    """
    if source.split(":")[0] == "synthetic":
        return Source(source, "synthetic", _synthetic(source, seed=seed))
    if source.startswith("text:") or source.endswith(TEXT_ENDINGS):
        source = source.removeprefix("text:")
        return Source(source, "text", open_text(source, input))
    is_bundled = source == "digits" and not Path(source).exists()
    found = _listing(str(Path(__file__).parent / "digits") if is_bundled else source)
    for kind in KINDS:
        if (parts := kind.parts(found)) is not None:
            break
    else:
        raise _unknown(found)
    refuse_unfinished(found.root / next((path for paths in parts.values() for path in paths), ""))
    found.keep(parts)
    pieces = kind.open(found, parts, input)
    notes = [piece.note for some in pieces.values() for piece in some]
    notes += [] if is_bundled else [found.note()]
    if source == "digits" and not is_bundled:
        notes.append("digits is the folder ./digits, not the bundled set of that name")
    return Source(
        found.name,
        kind.name,
        {part: [piece for piece in some if piece.num_rows] for part, some in pieces.items()},
        tuple(DataError(found.name, problem) for problem in found.problems),
        tuple(filter(None, notes)),
    )


def _listing(source: str) -> Listing:
    """Return the files that a path, a URI or a glob names."""
    place, *others = files.matching(source)
    if not others and place.is_dir():
        return list_folder(place)
    if others or place.is_file():
        parent, _ = parent_and_name(source)
        folder = replace(files.find(parent or "."), name=parent)
        names = [named.basename for named in (place, *others)]
        return Listing(folder, source, names, is_explicit=True)
    if re.fullmatch(r"[\w-]+", source):
        setting = "data names no file or folder, and the list of bundled data"
        raise UnknownNameError(setting, source, _BUNDLED)
    raise DataError(source, "there is no such file or folder")


def _unknown(found: Listing) -> DataError:
    """Return the error for files of no known kind."""
    endings = sorted({ending for kind in KINDS for ending in kind.endings})
    if found.is_explicit:
        return DataError(
            found.name,
            f"a single file must be {', '.join(endings)}, or for a text .txt, .md or "
            f"text:PATH; otherwise give the folder",
        )
    found.keep({})
    if found.problems:
        return DataError(found.name, found.problems[0])
    seen = f" ({found.note()})" if found.left_out else ""
    return DataError(
        found.name,
        f"holds no data set: train-*.parquet, files of datasets.save_to_disk, IDX files, "
        f"data_batch_*.bin, tar files, token files, CSV, JSON lines, or folders of images named by "
        f"class{seen}",
    )


def _synthetic(source: str, *, seed: int) -> dict[str, list[Piece]]:
    """Return learnable images: one random prototype per class, plus noise."""
    match = re.fullmatch(r"synthetic(?::(\d+)(?:x(\d+)x(\d+)x(\d+)(?:x(\d+))?)?)?", source)
    numbers = [int(g) if g else None for g in match.groups()] if match else [0]
    if 0 in numbers:
        raise DataError(source, "must be written synthetic or synthetic:N[xCxHxW[xCLASSES]]")
    defaults = (2048, 1, 28, 28, 10)
    count, channels, height, width, num_classes = (
        d if n is None else n for n, d in zip(numbers, defaults, strict=True)
    )
    random = np.random.default_rng(seed)
    prototypes = random.integers(0, 256, (num_classes, channels, height, width))

    def part(size: int) -> list[Piece]:
        labels = random.integers(0, num_classes, size)
        images = np.empty((size, channels, height, width), np.uint8)
        for row, label in enumerate(labels):
            noise = random.normal(0, 64, prototypes.shape[1:])
            images[row] = np.clip(prototypes[label] + noise, 0, 255)
        return [ImageArrays(source, images, labels, [str(k) for k in range(num_classes)])]

    return {"train": part(count), "test": part(max(1, count // 4))}
