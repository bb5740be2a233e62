"""Local tar files as WebDataset writes them, by an index of the files in them.

    000001.jpg, 000001.cls, 000001.json, 000002.jpg, …

Files in a row whose names are equal up to the first dot are one sample. By the index, samples have
numbers: they are shuffled as a whole and counted exactly, unlike those of a tar file that is read
as a stream.
"""

from __future__ import annotations

import re
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import IO

import numpy as np

from raydl.config import InputConfig
from raydl.data.files import Place
from raydl.data.image_files import IMAGE_ENDINGS
from raydl.data.kept import Arrays, kept
from raydl.data.pieces import Columns, Piece, reading
from raydl.data.schema import Feature
from raydl.errors import DataError

_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
"""Key of the sample and ending, of the name of a file."""
_END_BYTES, _MOST_PADDING = 1024, 1 << 20
"""Zeros that mark the end, and most bytes from there to the end of the file."""
_GZIP = b"\x1f\x8b"
_ENDINGS = tuple(ending[1:] for ending in IMAGE_ENDINGS)


class Tar(Piece):
    """A tar file.

    Its columns are ``image``, the file with the ending of an image; ``label``, the number in the
    file ``.cls``; and each other file of a sample by its ending. Several images of a sample have
    their endings as names, too.

    Args:
        place: the file.
        input: settings of the input.

    Raises:
        DataError: if it is in a store, is not whole, or its samples have different files.
    """

    groups = ()

    def __init__(self, place: Place, input: InputConfig) -> None:
        self.name, self._place = place.name, place
        if not place.is_local:
            raise DataError(
                self.name, "is in a store, but its samples are read one by one; copy it to a disk"
            )
        index = kept(place, "samples", lambda: _index(place), folder=input.index_dir)
        self._starts, self._at = index["starts"], index["at"]
        self._names, self.num_rows = index["names"].tolist(), len(index["starts"])
        self.schema = {name: _feature(name) for name in self._names}

    def read(self, rows: np.ndarray, names: Sequence[str]) -> Columns:
        """Return some of the files of some samples."""
        found: dict[str, list[bytes | str | int | Exception]] = {}
        with reading(self.name, "cannot be read"), self._place.open() as file:
            for name in names:
                places = self._at[rows, self._names.index(name)].tolist()
                contents = (file.read_at(size, start) for start, size in places)
                found[name] = [_value(self.schema[name], content) for content in contents]
        return found

    def where(self, row: int) -> str:
        """Return the file and the key of a sample, for messages."""
        key = str(row)
        with suppress(Exception), open(self._place.path, "rb") as file:
            file.seek(int(self._starts[row]))
            with tarfile.open(fileobj=file, mode="r:") as tar:
                key = next(_files(tar))[0]
        return f"{self.name}, sample {key}"


def _feature(name: str) -> Feature:
    if name == "image" or name.endswith(_ENDINGS):
        return Feature("image", "uint8", (None, None, None))
    return Feature("number", "int64") if name == "label" else Feature("text", "text")


def _value(feature: Feature, content: bytes) -> bytes | str | int | Exception:
    """Return the value of a file; an exception if it does not hold what it should."""
    try:
        if feature.kind == "image":
            return content
        return int(content) if feature.kind == "number" else content.decode()
    except ValueError:
        what = "a number" if feature.kind == "number" else "a text in UTF-8"
        return ValueError(f"the label is not {what}, got {content[:20]!r}")


def _index(place: Place) -> Arrays:
    """Return where the files of each sample lie.

    Returns:
        ``names``, the columns; ``starts``, the byte at which each sample begins, shape
        [num_samples]; ``at``, the first byte and the size of each file, shape [num_samples,
        num_columns, 2].

    Raises:
        DataError: if the tar file is not whole, or its samples have different files.
    """
    starts, at, columns, problem = array("q"), array("q"), list[str](), ""
    with reading(place.name, "is not a whole tar file"), open(place.path, "rb") as file:
        if file.read(2) == _GZIP:
            raise DataError(place.name, "is compressed, so no sample can be read alone; unpack it")
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for key, names, members in _samples(tar):
                columns, sample = columns or names, dict(zip(names, members, strict=True))
                if len(sample) == len(names) and sample.keys() == set(columns):
                    starts.append(members[0].offset)
                    for column in columns:
                        at.extend((sample[column].offset_data, sample[column].size))
                else:
                    problem = problem or (
                        f"sample {key} has {', '.join(names)}, but the first one "
                        f"{', '.join(columns)}; all must have the same files, in a row"
                    )
        _check_end(file, tar.offset, place.name)
    if problem or not starts:
        nothing = "holds no samples: files named KEY.jpg, KEY.cls and so on"
        raise DataError(place.name, problem or nothing)
    shape = (len(starts), len(columns), 2)
    return {
        "names": np.array(columns),
        "starts": np.frombuffer(starts, np.int64),
        "at": np.frombuffer(at, np.int64).reshape(shape),
    }


def _samples(tar: tarfile.TarFile) -> Iterator[tuple[str, list[str], list[tarfile.TarInfo]]]:
    """Yield the key, the columns and the files of each sample."""
    for key, files in groupby(_files(tar), itemgetter(0)):
        found = [(ending, member) for _, ending, member in files]
        yield key, _columns([ending for ending, _ in found]), [member for _, member in found]


def _files(tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yield the key, the ending and the place of each file of a sample."""
    for member in iter(tar.next, None):
        tar.members = []  # type: ignore[attr-defined]  # which would hold all of them
        named = _NAME.fullmatch(member.name)
        if named and member.isfile():
            yield named[1], named[2].lower(), member


def _columns(endings: Sequence[str]) -> list[str]:
    """Return the column of each file of a sample."""
    names = {"cls": "label"}
    images = [ending for ending in endings if ending.endswith(_ENDINGS)]
    if len(images) == 1:
        names[images[0]] = "image"
    return [names.get(ending, ending) for ending in endings]


def _check_end(file: IO[bytes], end: int, name: str) -> None:
    """Raise DataError unless a file ends as tar files do: a reader would take it for whole."""
    file.seek(end)
    rest = file.read(_MOST_PADDING + 1)
    if len(rest) < _END_BYTES and not any(rest):
        raise DataError(name, "is not a whole tar file: it is cut off, without the mark at its end")
    if len(rest) > _MOST_PADDING or any(rest):
        raise DataError(name, f"is damaged at byte {end:,}, or holds a second tar file from there")
