"""Samples of tokens in memory, without a file."""

import numpy as np

from raydl.data.files import find
from raydl.data.part import Part, Streamed
from raydl.data.tokens import TokenFile, Tokens


def token_samples(tokens, context, vocabulary):
    """Return the samples of an array of tokens."""
    tokens = np.asarray(tokens)
    file = TokenFile(find("memory"), tokens.dtype, 0, len(tokens), tokens)
    piece = Tokens([file], 0, len(tokens), context=context, vocabulary=vocabulary)
    part = Part((piece,), {"tokens": "tokens"}, piece.schema)
    return Streamed(part, shuffle_samples=4096, num_threads=1)
