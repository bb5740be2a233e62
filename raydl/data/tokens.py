"""Sequences of tokens as samples: how they are cut, split, and checked against a vocabulary."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from raydl.config import InputConfig
from raydl.data import files
from raydl.data.files import Place
from raydl.data.kept import Arrays, kept
from raydl.data.pieces import Columns, Piece, reading
from raydl.data.schema import Feature
from raydl.errors import DataError

_TEST_SHARE = 10
"""The last 1/10 of the tokens is the test set, if the files name none."""
_CHUNK = 1 << 20
"""Tokens to check at a time."""


@dataclass
class TokenFile:
    """Tokens that lie one after another, in a local file or in memory."""

    place: Place
    dtype: np.dtype[Any]
    start: int
    """Bytes before the first token."""
    num_tokens: int
    memory: np.ndarray | None = None
    """The tokens, if they are in memory."""
    _mapped: np.ndarray | None = None

    def __getitem__(self, tokens: slice | np.ndarray) -> np.ndarray:
        """Return some of the tokens."""
        if self.memory is not None:
            return self.memory[tokens]
        if self._mapped is None:
            with reading(self.place.name, "cannot be read"):
                mapped = np.memmap(self.place.path, self.dtype, "r", self.start, self.num_tokens)
                self._mapped = mapped.view(np.ndarray)
        return self._mapped[tokens]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without what is mapped, which pickled would be the whole file."""
        return {**self.__dict__, "_mapped": None}

    def extremes(self) -> Arrays:
        """Return ``lowest`` and ``highest``: a token and its place, int64, shape [2]."""
        found: list[tuple[int, int]] = []
        for start in range(0, self.num_tokens, _CHUNK):
            part = self._part(start)
            found += [(int(part[n]), start + int(n)) for n in (part.argmin(), part.argmax())]
        value, place = max(found, key=lambda token: token[0])
        highest = np.array([min(value, np.iinfo(np.int64).max), place])
        return {"lowest": np.array(min(found)), "highest": highest}

    def _part(self, start: int) -> np.ndarray:
        """Return the next tokens to check, not by the map: it would count as memory in use."""
        if self.memory is not None:
            return self.memory[start : start + _CHUNK]
        count = min(_CHUNK, self.num_tokens - start)
        with reading(self.place.name, "cannot be read"):
            offset = self.start + start * self.dtype.itemsize
            return np.fromfile(self.place.path, self.dtype, count, offset=offset)


class Tokens(Piece):
    """A sequence of tokens, cut into samples that do not overlap.

    A sample is ``context`` tokens and the one after them; the remainder at the end is not used.

    Args:
        sequence: the files, one after another.
        start: first token of the piece in the sequence.
        stop: the token after its last one.
        context: tokens of a sample.
        vocabulary: number of different tokens.
    """

    groups = ()

    def __init__(
        self, sequence: Sequence[TokenFile], start: int, stop: int, *, context: int, vocabulary: int
    ) -> None:
        self._files, self.start, self._context = tuple(sequence), start, context
        self._starts = [0, *accumulate(file.num_tokens for file in sequence)]
        self.name, stored = sequence[0].place.name, str(sequence[0].dtype)
        self.is_in_memory = sequence[0].memory is not None
        self.num_tokens = stop - start
        self.num_rows = (self.num_tokens - 1) // context
        self.schema = {
            "tokens": Feature(
                "tokens", "int64", (context + 1,), vocabulary=vocabulary, stored=stored
            )
        }

    @property
    def file_names(self) -> tuple[str, ...]:
        """The files of the sequence."""
        return tuple(file.place.name for file in self._files)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tokens, as they are stored."""
        return self.num_tokens * self._files[0].dtype.itemsize

    def read(self, rows: np.ndarray, names: Sequence[str]) -> Columns:
        """Return the ``tokens`` of some samples, int64, shape [num_rows, context + 1]."""
        positions = self.start + rows[:, None] * self._context + np.arange(self._context + 1)
        if len(self._files) == 1:  # several times as fast
            return {"tokens": self._files[0][positions].astype(np.int64)}
        numbers = np.searchsorted(self._starts, positions, side="right") - 1
        found = np.empty_like(positions)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            found[here] = self._files[number][positions[here] - self._starts[number]]
        return {"tokens": found}

    def where(self, row: int) -> str:
        """Return the file and the first token of a sample, for messages."""
        token = self.start + row * self._context
        number = bisect_right(self._starts, token) - 1
        return f"{self._files[number].place.name}, token {token - self._starts[number]:,}"


def pieces_of(
    sequences: Mapping[str, Sequence[TokenFile]],
    *,
    source: str,
    input: InputConfig,
    least_vocabulary: int = 0,
) -> dict[str, list[Piece]]:
    """Return the tokens of each part; without a test set the last tenth of them is one.

    Args:
        sequences: files of each part, one after another.
        source: what the user named, for messages.
        input: settings of the input.
        least_vocabulary: number of different tokens, if the user names none and none is larger.

    Raises:
        DataError: if a part is too short for a sample, or has a token that is outside of the
            vocabulary.
    """
    spans = {part: (some, 0, _length(some)) for part, some in sequences.items()}
    note, advice = "", "lower"
    if len(spans) == 1:
        train, whole = sequences["train"], _length(sequences["train"])
        cut = whole - whole // _TEST_SHARE
        spans = {"train": (train, 0, cut), "test": (train, cut, whole)}
        note = f"the last tenth of its {whole:,} tokens is the test set, and "
        advice = f"give {_TEST_SHARE * (input.context + 1):,} tokens or lower"
    for part, (some, start, stop) in reversed(spans.items()):
        if not _length(some):
            raise DataError(source, "is empty: a text needs tokens")
        if stop - start <= input.context:
            whose = "" if note else f" of {some[0].place.name} ({part})"
            raise DataError(
                source,
                f"is too short: {note}{stop - start:,} tokens{whose} are less than one sample of "
                f"input.context {input.context} and its next token; {advice} input.context",
            )
    every = [file for some in sequences.values() for file in some]
    vocabulary = _vocabulary(every, input, least_vocabulary)
    return {
        part: [Tokens(some, start, stop, context=input.context, vocabulary=vocabulary)]
        for part, (some, start, stop) in spans.items()
    }


def _length(sequence: Sequence[TokenFile]) -> int:
    return sum(file.num_tokens for file in sequence)


def _vocabulary(sequence: Sequence[TokenFile], input: InputConfig, least: int) -> int:
    """Return the number of different tokens, after a check that each token is one of them."""
    named, largest = _named_vocabulary(input.vocabulary), least - 1
    for file in sequence:
        what = f"extremes of {file.dtype.str} from byte {file.start}"
        found = kept(file.place, what, file.extremes, folder=input.index_dir)
        (low, low_at), (high, high_at) = found["lowest"].tolist(), found["highest"].tolist()
        if low < 0:
            problem = f"token {low_at:,} is {low}; tokens must be 0 or more"
            raise DataError(file.place.name, problem)
        if named and high >= named:
            raise DataError(
                file.place.name,
                f"token {high_at:,} is {high}; tokens must be 0 to {named - 1:,}, by "
                f"input.vocabulary {input.vocabulary}",
            )
        largest = max(largest, high)
    return named or largest + 1


def _named_vocabulary(name: str) -> int:
    """Return the number of tokens that a user gives, or of a tokenizer's folder; 0: none."""
    if not name or name.isdecimal():
        return int(name or 0)
    for place in (files.find(name) / file for file in ("tokenizer.json", "vocab.json")):
        if place.is_file():
            with reading(place.name, "is not the vocabulary of a tokenizer"):
                return 1 + max(_numbers(json.loads(place.read())))
    raise DataError(
        name,
        "has no tokenizer.json or vocab.json; input.vocabulary must be the number of different "
        "tokens, or the folder of a tokenizer",
    )


def _numbers(content: dict[str, Any]) -> Iterator[int]:
    """Yield the numbers of the tokens of tokenizer.json, or of vocab.json."""
    vocabulary = content
    if "added_tokens" in content:
        vocabulary = content["model"]["vocab"]
        yield from (token["id"] for token in content["added_tokens"])
    yield from vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
