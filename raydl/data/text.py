"""Texts as token sequences: a sample is a slice of the tokens, and its slice of next tokens."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import torch

from raydl.data import files
from raydl.data.arrays import read_array
from raydl.data.files import Place
from raydl.data.samples import Batch, Dataset, DataShape, InMemory
from raydl.data.schema import Feature, Schema, compare
from raydl.errors import DataError

TEXT_ENDINGS = (".txt", ".md", ".npy")
"""Endings of text files; other text files are given as ``text:PATH``."""

NUM_BYTES = 256
"""Vocabulary of a text file: its bytes are its tokens."""

_TEST_SHARE = 10
"""The last 1/10 of the tokens is the test set."""


@dataclass(frozen=True)
class TokenSet(InMemory):
    """A text, cut into samples of equal length that do not overlap.

    Attributes:
        tokens: integers in 0..vocabulary-1, shape [num_tokens]; may be read-only memory that
            processes share.
        context: tokens in one sample.
        vocabulary: number of different tokens, whether or not each occurs.
    """

    tokens: np.ndarray
    context: int
    vocabulary: int

    @property
    def num_samples(self) -> int:
        """Whole samples; the last one also needs the token after it, as next token."""
        return (len(self.tokens) - 1) // self.context

    @property
    def shape(self) -> DataShape:
        """The shape to build a model for."""
        return DataShape((self.context,), self.vocabulary)

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return (tokens, next tokens) of these rows, both int64, shape [B, context]."""
        positions = rows[:, None] * self.context + np.arange(self.context + 1)
        tokens = torch.from_numpy(self.tokens[positions].astype(np.int64))
        return tokens[:, :-1], tokens[:, 1:]


def load_text(source: str, *, context: int, like: Schema | None = None) -> Dataset:
    """Return the text at a path or URI.

    The last tenth is the test set; no training sample reaches into it.

    Args:
        source: a .npy file of tokens, or a text file; with wildcards in the last part, all text
            files that match, concatenated in the order of their names.
        context: tokens in one sample.
        like: what a sample must be, for a model that was trained on such samples.

    Raises:
        DataError: if it is missing, empty, too short, not UTF-8, or holds no tokens.
    """
    places = files.glob(source) if "*" in source else [files.find(source)]
    if not places:
        raise DataError(source, "no file matches")
    if len(places) == 1 and places[0].path.endswith(".npy"):
        tokens, vocabulary = _tokens_of(places[0])
    else:
        joined = b"".join(_bytes_of(place) for place in places)
        tokens, vocabulary = np.frombuffer(joined, np.uint8), NUM_BYTES
    if not len(tokens):
        raise DataError(source, "is empty: a text needs tokens")
    num_test, fewest = len(tokens) // _TEST_SHARE, context + 1
    if num_test < fewest:
        raise DataError(
            source,
            f"is too short: the last tenth of its {len(tokens):,} tokens is the test set, and "
            f"{num_test:,} tokens are less than one sample of input.context {context} and its next "
            f"token; give {_TEST_SHARE * fewest:,} tokens or lower input.context",
        )
    cut = len(tokens) - num_test
    train, test = (TokenSet(part, context, vocabulary) for part in (tokens[:cut], tokens[cut:]))
    schema = {"tokens": Feature("tokens", "int64", (context,), vocabulary=vocabulary)}
    for difference in compare(like or {}, schema):
        raise DataError(source, difference.problem)
    return Dataset(train, test, source, schema)


def _bytes_of(file: Place) -> bytes:
    """Return the bytes of a text file, after a check that they are UTF-8."""
    data = file.read()
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            file.name, f"is not a text in UTF-8: {error.reason} at byte {error.start:,}"
        ) from error
    return data


def _tokens_of(file: Place) -> tuple[np.ndarray, int]:
    """Return (tokens, vocabulary) of a .npy file; the vocabulary is the largest token plus 1."""
    try:
        data = file.read()
        if data[:2] == b"PK":
            raise DataError(file.name, "must hold integers, the tokens of a text, got an archive")
        tokens = read_array(io.BytesIO(data), len(data))
    except (ValueError, OSError, EOFError, MemoryError) as error:
        raise DataError(file.name, f"is not a whole .npy file: {error}") from error
    if not np.issubdtype(tokens.dtype, np.integer):
        problem = f"must hold integers, the tokens of a text, got {tokens.dtype}"
        raise DataError(file.name, problem)
    if tokens.ndim != 1:
        raise DataError(
            file.name, f"must hold tokens of shape [num_tokens], got {list(tokens.shape)}"
        )
    negative = np.flatnonzero(tokens < 0)
    if len(negative):
        at = int(negative[0])
        raise DataError(file.name, f"token {at:,} is {tokens[at]}; tokens must be 0 or more")
    return tokens, int(tokens.max()) + 1 if len(tokens) else 0
