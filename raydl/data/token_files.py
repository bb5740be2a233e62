"""Token files, and texts, whose bytes are tokens.

Token files are nanoGPT's and llm.c's .bin, Megatron's .bin with its .idx, and NumPy's .npy. Local
ones are mapped, not read: a set may be larger than the memory, and a worker receives the names of
the files. Those in a store, and texts, are read at the start.
"""

from __future__ import annotations

import codecs
import io
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from raydl.config import InputConfig
from raydl.data import files
from raydl.data.arrays import read_header
from raydl.data.files import Place
from raydl.data.listing import Listing, Parts, parts_by_name
from raydl.data.pieces import Piece, reading
from raydl.data.tokens import TokenFile, pieces_of
from raydl.errors import DataError

TOKEN_ENDINGS = (".bin", ".npy")
TEXT_ENDINGS = (".txt", ".md")
"""Endings of text files; other text files are given as ``text:PATH``."""
NUM_BYTES = 256
"""Vocabulary of a text: its bytes are its tokens."""
_HEAD = 8192
"""Bytes at the start of a file that tell what it is."""
_LLM_C, _LLM_C_BYTES = {20240520: "<u2", 20240801: "<u4"}, 1024
"""Types of tokens by the first number of a file of llm.c, and the bytes of its header."""
_MEGATRON, _MEGATRON_BYTES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}, 34
"""Types of tokens by their number in an .idx, and the bytes of its header."""

_Layout = tuple[np.dtype[Any], int, int | None]
"""(Type of the tokens, bytes before the first one, their number if the file says it)."""


def find_tokens(found: Listing) -> Parts | None:
    """Return the token files of each part, by their names, or None if there are none."""
    paths = found.ending_in(TOKEN_ENDINGS)
    return {**parts_by_name(found, paths), "": found.ending_in([".idx"])} if paths else None


def open_tokens(found: Listing, parts: Parts, input: InputConfig) -> Mapping[str, list[Piece]]:
    """Return the tokens of each part; the files of a part are one sequence.

    Raises:
        DataError: if a file is not whole, holds something else, or as in ``pieces_of``.
    """
    in_memory = input.stream == "never"
    sequences = found.each(parts, lambda place: _token_file(place, in_memory=in_memory))
    return pieces_of(sequences, source=found.name, input=input)


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


def _token_file(place: Place, *, in_memory: bool) -> TokenFile:
    if in_memory or not place.is_local:
        data = place.read()
        file = _described(place, data[:_HEAD], len(data))
        file.memory = np.frombuffer(data, file.dtype, file.num_tokens, file.start)
        return file
    with reading(place.name, "cannot be read"), open(place.path, "rb") as stream:
        return _described(place, stream.read(_HEAD), stream.seek(0, io.SEEK_END))


def _described(place: Place, head: bytes, size: int) -> TokenFile:
    """Return the tokens of a file by its first bytes and its size.

    Raises:
        DataError: if it is not whole, or holds something else.
    """
    index = Place(place.filesystem, place.path[:-4] + ".idx", place.name[:-4] + ".idx")
    if head.startswith(b"PK"):
        raise DataError(place.name, "must hold integers, the tokens of a text, got an archive")
    if place.path.lower().endswith(".npy"):
        dtype, start, count = _of_npy(place, head, size)
    elif index.is_file():
        dtype, start, count = _of_megatron(index)
    else:
        dtype, start, count = _of_bin(place, head)
    found, rest = divmod(size - start, dtype.itemsize)
    if rest:
        raise DataError(place.name, f"has {size:,} bytes: it ends within a token of {dtype}")
    if count not in (None, found):
        raise DataError(place.name, f"must hold {count:,} tokens by its index, got {found:,}")
    return TokenFile(place, dtype, start, found)


def _of_npy(place: Place, head: bytes, size: int) -> _Layout:
    try:
        shape, dtype, start = read_header(io.BytesIO(head), size)
    except ValueError as error:
        raise DataError(place.name, f"is not a whole .npy file: {error}") from error
    if dtype.kind not in "iu":
        raise DataError(place.name, f"must hold integers, the tokens of a text, got {dtype}")
    if len(shape) != 1:
        problem = f"must hold tokens of shape [num_tokens], got {list(shape)}"
        raise DataError(place.name, problem)
    return dtype, start, None


def _of_megatron(index: Place) -> _Layout:
    data = index.read()
    if data[:9] != b"MMIDIDX\0\0":
        raise DataError(index.name, "is not an index of Megatron: it must begin with MMIDIDX")
    _, code, num_sequences, num_documents = struct.unpack("<QBQQ", data[9:34].ljust(25, b"\0"))
    fewest = _MEGATRON_BYTES + 12 * num_sequences + 8 * num_documents
    if len(data) < fewest:
        raise DataError(index.name, f"is cut off: it has {len(data):,} of {fewest:,} bytes")
    if code not in _MEGATRON:
        raise DataError(index.name, f"tells of numbers of type {code}, which are not tokens")
    lengths = np.frombuffer(data, "<i4", num_sequences, _MEGATRON_BYTES)
    return np.dtype(_MEGATRON[code]), 0, int(lengths.sum(dtype=np.int64))


def _of_bin(place: Place, head: bytes) -> _Layout:
    """Return the layout of a file of llm.c, or of nanoGPT, which has only the tokens: uint16."""
    numbers = np.frombuffer(head[: len(head) // 4 * 4], "<i4")
    if len(head) >= _LLM_C_BYTES and int(numbers[0]) in _LLM_C:
        return np.dtype(_LLM_C[int(numbers[0])]), _LLM_C_BYTES, int(numbers[2])
    if _is_text(head):
        raise DataError(place.name, f"is a text, not tokens; give it as text:{place.name}")
    low, high = numbers & 0xFFFF, numbers >> 16
    if len(numbers) and ((high >= 0) & (high <= 2)).all() and (low > 2).any():
        raise DataError(
            place.name,
            "seems to hold numbers of 32 bits, but tokens in a .bin without an .idx must be "
            "uint16; save them as .npy",
        )
    return np.dtype("<u2"), 0, None


def _is_text(head: bytes) -> bool:
    """Whether bytes are the beginning of a text in UTF-8, without control characters."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return len(head) > 0 and min(head) >= 9
