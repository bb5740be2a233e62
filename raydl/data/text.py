"""Texts: their bytes are tokens, read at the start."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from raydl.config import InputConfig
from raydl.data import files
from raydl.data.files import Place
from raydl.data.pieces import Piece
from raydl.data.tokens import TokenFile, pieces_of
from raydl.errors import DataError

TEXT_ENDINGS = (".txt", ".md")
"""Endings of text files; other text files are given as ``text:PATH``."""

NUM_BYTES = 256
"""Vocabulary of a text file: its bytes are its tokens."""


def open_text(source: str, input: InputConfig) -> Mapping[str, list[Piece]]:
    """Return the text at a path or URI as pieces of train and test.

    Args:
        source: a text file; with wildcards in the last part, all text files that match, one after
            another in the order of their names.
        input: settings of the input.

    Raises:
        DataError: if it is missing, empty, too short, or not UTF-8.
    """
    sequence = [_text_file(place) for place in files.matching(source)]
    return pieces_of({"train": sequence}, source=source, input=input, least_vocabulary=NUM_BYTES)


def _text_file(place: Place) -> TokenFile:
    """Return the bytes of a text file, after a check that they are a text in UTF-8."""
    data = place.read()
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            place.name, f"is not a text in UTF-8: {error.reason} at byte {error.start:,}"
        ) from error
    if b"\0" in data:
        raise DataError(
            place.name,
            f"is not a text in UTF-8: byte {data.index(0):,} is 0, as in UTF-16 (convert it) or in "
            f"a file of tokens (which must end in .bin)",
        )
    tokens = np.frombuffer(data, np.uint8)
    return TokenFile(place, tokens.dtype, 0, len(tokens), tokens)
