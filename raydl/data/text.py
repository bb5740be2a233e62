"""Texts as a row of tokens: a sample is a stretch of them, and the same stretch one further."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import torch

from raydl.data import files
from raydl.data.files import Place
from raydl.data.samples import Batch, Dataset, DataShape, InMemory
from raydl.errors import DataError

TEXT_ENDINGS = (".txt", ".md", ".npy")
"""Files that are texts by their names; others are named ``text:PATH``."""

NUM_BYTES = 256
"""The vocabulary of a text file: its bytes are its tokens."""

_TEST_SHARE = 10
"""One in so many tokens, the last ones, is of the test set."""


@dataclass(frozen=True)
class TokenSet(InMemory):
    """A text cut into samples of equal length, which do not overlap.

    Attributes:
        tokens: integers in 0..vocabulary-1, shape [num_tokens]. May be read-only memory shared
            by processes.
        context: tokens in one sample.
        vocabulary: different tokens, whether or not each occurs.
    """

    tokens: np.ndarray
    context: int
    vocabulary: int

    @property
    def num_samples(self) -> int:
        """Whole samples; each needs one token more than it has, the last one to be told."""
        return (len(self.tokens) - 1) // self.context

    @property
    def shape(self) -> DataShape:
        """The shape that a model is built for."""
        return DataShape((self.context,), self.vocabulary)

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return (tokens, next tokens) of these rows, both int64, shape [B, context]."""
        positions = rows[:, None] * self.context + np.arange(self.context + 1)
        tokens = torch.from_numpy(self.tokens[positions].astype(np.int64))
        return tokens[:, :-1], tokens[:, 1:]


def load_text(source: str, *, context: int) -> Dataset:
    """Return the text that a path or URI names; its last tenth is the test set.

    Args:
        source: a .npy file of tokens, or a text of any other name; with wildcards in its last
            part all texts that match, one after another by name.
        context: tokens in one sample.

    Raises:
        DataError: missing, empty, too short, not UTF-8, or no tokens.
    """
    found = files.glob(source) if "*" in source else [files.find(source)]
    if not found:
        raise DataError(source, "no file matches")
    if len(found) == 1 and found[0].path.endswith(".npy"):
        tokens, vocabulary = _tokens_of(found[0])
    else:
        joined = b"".join(_bytes_of(place) for place in found)
        tokens, vocabulary = np.frombuffer(joined, np.uint8), NUM_BYTES
    return _split(tokens, vocabulary, context=context, source=source)


def _bytes_of(file: Place) -> bytes:
    """Return a text's bytes, which are its tokens."""
    data = file.read()
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            file.name, f"is not a text in utf-8: {error.reason} at byte {error.start:,}"
        ) from error
    return data


def _tokens_of(file: Place) -> tuple[np.ndarray, int]:
    """Return the tokens of a .npy file, and how many different ones its greatest calls for."""
    try:
        tokens = np.load(io.BytesIO(file.read()), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(file.name, f"is not a whole .npy file: {error}") from error
    if not isinstance(tokens, np.ndarray) or not np.issubdtype(tokens.dtype, np.integer):
        kind = tokens.dtype if isinstance(tokens, np.ndarray) else "an archive"
        raise DataError(file.name, f"must hold integers, the tokens of a text, it is {kind}")
    if tokens.ndim != 1:
        raise DataError(
            file.name, f"must hold tokens of shape [num_tokens], it has {list(tokens.shape)}"
        )
    negative = np.flatnonzero(tokens < 0)
    if len(negative):
        at = int(negative[0])
        raise DataError(file.name, f"token {at:,} is {tokens[at]}; tokens must be 0 or more")
    return tokens, int(tokens.max()) + 1 if len(tokens) else 0


def _split(tokens: np.ndarray, vocabulary: int, *, context: int, source: str) -> Dataset:
    """Return a text with its last tenth as the test set: the model has not read on from there."""
    if not len(tokens):
        raise DataError(source, "is empty: a text needs tokens")
    num_test, fewest = len(tokens) // _TEST_SHARE, context + 1
    if num_test < fewest:
        raise DataError(
            source,
            f"is too short: of its {len(tokens):,} tokens the last tenth is the test set, and "
            f"{num_test:,} tokens make no sample of input.context {context} and the token after "
            f"it; give {_TEST_SHARE * fewest:,} tokens or lower input.context",
        )
    cut = len(tokens) - num_test
    train, test = (TokenSet(part, context, vocabulary) for part in (tokens[:cut], tokens[cut:]))
    return Dataset(train, test, source)
