"""The one road from pieces to batches: read, decode, convert, number, check, locate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from raydl.data.image_files import with_files
from raydl.data.order import InBlocks, Shuffled
from raydl.data.pieces import Columns, Piece
from raydl.data.row_groups import GroupCache
from raydl.data.samples import Batch, DataShape, check_readable
from raydl.data.schema import Schema, size_text
from raydl.data.values import (
    Bad,
    Decoder,
    convert,
    decodes_in_threads,
    image_at,
    images_of,
    mode_of,
)
from raydl.errors import DataError, in_one_line

_FIRST_ROWS = 64
"""Samples to look at for the mode of all images, or for the first one that can be read."""
_STATISTICS_GROUPS, _STATISTICS_IMAGES = 8, 2048
"""Least row groups and images to compute mean and deviation of a set from."""


@dataclass(frozen=True)
class Ready:
    """Stored samples in the types of a batch, except for images, which are decoded when needed."""

    columns: Mapping[str, Any]
    """By column of the batch, an item per sample."""
    bad: Bad
    """What is wrong with which sample."""


@dataclass(frozen=True)
class Part:
    """Samples of some pieces, numbered through: a training set or a test set."""

    pieces: tuple[Piece, ...]
    """Either all have groups or none has."""
    columns: Mapping[str, str]
    """Name in the pieces of each column of a batch."""
    schema: Schema
    """Columns of a batch: image and label, or those of a table."""
    decoder: Decoder = field(default_factory=Decoder)
    numbering: Mapping[int, np.ndarray] = field(default_factory=dict)
    """By number of the piece: the number of each class that the piece has numbered otherwise."""
    chosen: tuple[tuple[int, int], ...] | np.ndarray | None = None
    """Chosen groups, (piece, group), or numbers of chosen samples; None: all."""
    target: str = ""
    """Column of a table to predict, or ""."""

    @property
    def is_grouped(self) -> bool:
        """Whether samples are read by groups."""
        return bool(self.pieces[0].groups)

    @property
    def has_images(self) -> bool:
        """Whether a sample is an image with its class; otherwise it is a row of a table."""
        return "image" in self.schema and self.schema["image"].kind == "image"

    @property
    def has_tokens(self) -> bool:
        """Whether a sample is a sequence of tokens, with the token after it."""
        return "tokens" in self.schema and self.schema["tokens"].kind == "tokens"

    @cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """(Piece, group) of each group."""
        if isinstance(self.chosen, tuple):
            return self.chosen
        return tuple((p, g) for p, x in enumerate(self.pieces) for g in range(len(x.groups)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each group."""
        return tuple(self.pieces[p].groups[g] for p, g in self.groups)

    @cached_property
    def _starts(self) -> np.ndarray:
        """First sample of each group, or of each piece without groups, and the one after all."""
        sizes = self.sizes if self.is_grouped else [piece.num_rows for piece in self.pieces]
        return np.cumsum([0, *sizes])

    def _locate(self, rows: Any) -> tuple[Any, Any]:
        """Return (group, or piece without groups; place in it) of samples, or of one."""
        if isinstance(self.chosen, np.ndarray):
            rows = self.chosen[rows]
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        return numbers, rows - self._starts[numbers]

    @property
    def num_rows(self) -> int:
        """Samples of the part."""
        return int(len(self.chosen) if isinstance(self.chosen, np.ndarray) else self._starts[-1])

    @property
    def shape(self) -> DataShape:
        """The shape to build a model for."""
        if self.has_images:
            names = self.schema["label"].names
            return DataShape(self._shape_of("image"), len(names), names)
        if self.has_tokens:
            tokens = self.schema["tokens"]
            return DataShape((self._shape_of("tokens")[0] - 1,), tokens.vocabulary)
        columns = {name: self._shape_of(name) for name in self.schema}
        names = self.schema[self.target].names if self.target else ()
        return DataShape((), len(names), names, columns=columns, target=self.target)

    def _shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(n for n in self.schema[name].shape if n is not None)

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all samples in memory; texts, which a batch cannot hold, count as nothing."""
        per_row = 0
        for name, feature in self.schema.items():
            if feature.dtype != "text" and (name != "label" or not self.has_images):
                per_row += int(np.prod(self._shape_of(name))) * np.dtype(feature.dtype).itemsize
        return per_row * self.num_rows

    def choose_groups(self, numbers: Sequence[int]) -> Part:
        """Return some of the groups."""
        return replace(self, chosen=tuple(self.groups[n] for n in numbers))

    def choose_rows(self, rows: np.ndarray) -> Part:
        """Return some of all samples, of pieces without groups."""
        return replace(self, chosen=rows)

    def where(self, row: int) -> str:
        """Return where a sample lies, for messages."""
        number, within = map(int, self._locate(row))
        if not self.is_grouped:
            return self.pieces[number].where(within)
        piece, group = self.groups[number]
        return self.pieces[piece].where(sum(self.pieces[piece].groups[:group]) + within)

    def read_group(self, number: int) -> Ready:
        """Return the samples of a group.

        Raises:
            DataError: if it cannot be read.
        """
        piece, group = self.groups[number]
        columns = self.pieces[piece].read_group(group, list(self.columns.values()))
        return self.ready(piece, columns)

    def read_rows(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Ready]]:
        """Yield (places in ``rows``, these samples) of each piece without groups.

        Raises:
            DataError: if a piece cannot be read.
        """
        numbers, within = self._locate(rows)
        for number in sorted(set(numbers.tolist())):
            places = np.flatnonzero(numbers == number)
            columns = self.pieces[number].read(within[places], list(self.columns.values()))
            yield places, self.ready(number, columns)

    def ready(self, number: int, columns: Columns) -> Ready:
        """Return stored samples of a piece, converted and checked.

        Args:
            number: number of the piece.
            columns: stored values of the columns of this part.

        Raises:
            DataError: if a column holds something else than it should.
        """
        ready, bad = dict[str, Any](), dict[int, "str | Exception"]()
        for name, feature in self.schema.items():
            stored = self.columns[name]
            try:
                if feature.kind == "image":
                    ready[name] = images_of(with_files(columns[stored], self.pieces[number].folder))
                    continue
                # In a table -1 or -100 may stand for no class: the loss of a user's task knows.
                is_label = self.has_images or name == self.target
                checked = feature if is_label or not feature.names else replace(feature, names=())
                values, problems = convert(columns[stored], checked)
            except ValueError as error:
                raise DataError(self.pieces[number].name, f"column {stored!r} {error}") from error
            if None not in feature.shape and values.shape[1:] != feature.shape:
                size, first = size_text(values.shape[1:]), size_text(feature.shape)
                problems |= dict.fromkeys(range(len(values)), f"is {size}, the first one {first}")
                values = np.zeros((len(values), *self._shape_of(name)), feature.dtype)
            if feature.kind == "class" and number in self.numbering:
                numbering = self.numbering[number]
                mapped = numbering[np.clip(values, 0, len(numbering) - 1)]
                values = np.where(values < 0, values, mapped)
            ready[name] = values
            for row, problem in problems.items():
                is_text = isinstance(problem, str)
                bad.setdefault(row, f"column {stored!r} {problem}" if is_text else problem)
        return Ready(ready, bad)

    def first(self) -> Ready:
        """Return the first samples, without the rest of their group.

        Raises:
            DataError: if they cannot be read.
        """
        return self.ready(0, next(self.pieces[0].batches(list(self.columns.values()), _FIRST_ROWS)))

    def error(self, row: int, problem: str | Exception) -> DataError:
        """Return the error of a sample, with its cause."""
        if isinstance(problem, DataError):
            return problem
        if isinstance(problem, str):
            return DataError(self.where(row), problem)
        is_sentence = isinstance(problem, ValueError)  # of the decoder
        text = str(problem) if is_sentence else f"cannot be read: {in_one_line(problem)}"
        error = DataError(self.where(row), text)
        error.__cause__ = problem
        return error


def with_shapes(part: Part, *, skips: bool) -> tuple[Part, str]:
    """Return a part with the shapes and the mode of its first sample; and a sentence, or "".

    The sentence tells that images of both modes are among the first.

    Args:
        part: the part.
        skips: whether to take the first sample that can be read, instead of the first.

    Raises:
        DataError: if that sample cannot be read.
    """
    ready, first_error = part.first(), None
    num_first = next(len(column) for column in ready.columns.values())
    for row in range(num_first if skips else 1):
        try:
            if problem := ready.bad.get(row):
                raise part.error(row, problem)
            return _with_shapes_of(part, ready, row)
        except (ValueError, DataError) as error:
            first_error = first_error or part.error(row, error)
    assert first_error is not None, "no piece is empty"
    raise first_error


def _with_shapes_of(part: Part, ready: Ready, row: int) -> tuple[Part, str]:
    schema, decoder, note = dict(part.schema), part.decoder, ""
    for name, feature in schema.items():
        if feature.kind == "image":
            images = ready.columns[name]
            image = image_at(images, row)
            if isinstance(image, Exception):
                raise part.error(row, image)
            pixels = decoder.decode(image)
            decoder = replace(decoder, mode="L" if len(pixels) == 1 else "RGB")
            schema[name] = replace(feature, shape=pixels.shape)
            note = "" if part.decoder.mode else _note_on_modes(images, decoder.mode)
        elif None in feature.shape:
            schema[name] = replace(feature, shape=ready.columns[name].shape[1:])
    return replace(part, schema=schema, decoder=decoder), note


def _note_on_modes(images: Any, mode: str) -> str:
    """Return a sentence if some of the images have another mode than the first, or ""."""
    modes = [mode_of(image_at(images, row)) for row in range(len(images))]
    others = sum(other not in ("", mode) for other in modes)
    if not others:
        return ""
    words = ("grayscale", "in color") if mode == "L" else ("in color", "grayscale")
    return (
        f"the first image is {words[0]} and decides for all, but {others} of the first "
        f"{len(modes)} are {words[1]}: --input.mode L or RGB decides otherwise"
    )


class Streamed:
    """The samples of a part, read from storage when they are needed.

    Args:
        part: the part, with all shapes.
        shuffle_samples: samples of a block, the groups that are shuffled together, on average.
        num_threads: threads that decode large images.
        skips: leave out samples that cannot be read, instead of ending the run.
    """

    def __init__(
        self, part: Part, *, shuffle_samples: int, num_threads: int, skips: bool = False
    ) -> None:
        self.part, self._skips = part, skips
        self._shuffle_samples, self._num_threads = shuffle_samples, num_threads
        self.shape = part.shape
        """The shape to build a model for; all samples must have that of the first."""
        self.num_samples = part.num_rows
        """Samples of the part."""
        self._groups = GroupCache(part.sizes, part.read_group) if part.is_grouped else None

    @cached_property
    def _pool(self) -> ThreadPoolExecutor | None:
        if not decodes_in_threads(self.shape.input_shape):
            return None
        return ThreadPoolExecutor(self._num_threads, thread_name_prefix="decode")

    @property
    def is_streamed(self) -> bool:
        """Whether samples are read ahead; not if they are in memory, as those of a text."""
        return not self.part.pieces[0].is_in_memory

    def order(self, seed: int) -> InBlocks | Shuffled:
        """Return the order of the samples in each epoch: blocks of groups, or all samples."""
        size = self._shuffle_samples
        if self.part.is_grouped:
            return InBlocks(self.part.sizes, seed, block_samples=size)
        has_blocks = not self.part.has_tokens
        return Shuffled(self.num_samples, seed, block_samples=size if has_blocks else None)

    def prefetch(self, rows: np.ndarray) -> None:
        """Start to read the groups of these samples."""
        if self._groups is not None:
            self._groups.prefetch(rows)

    def statistics_rows(self) -> np.ndarray:
        """Return samples from across the set, enough for mean and deviation."""
        if not self.part.is_grouped:
            count = min(self.num_samples, _STATISTICS_IMAGES)
            return np.linspace(0, self.num_samples - 1, count).astype(np.int64)
        sizes = np.asarray(self.part.sizes)
        starts, num_groups = np.cumsum(sizes) - sizes, _STATISTICS_GROUPS
        while True:
            numbers = np.unique(np.linspace(0, len(sizes) - 1, num_groups).astype(int))
            counts = np.minimum(sizes[numbers], -(-_STATISTICS_IMAGES // len(numbers)))
            if counts.sum() >= _STATISTICS_IMAGES or len(numbers) == len(sizes):
                pairs = zip(starts[numbers], counts, strict=True)
                return np.concatenate([start + np.arange(count) for start, count in pairs])
            num_groups *= 2

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return (uint8 images [B, C, H, W], int64 labels [B]), or ``{column: tensor}``.

        Raises:
            DataError: with the file and the row, if a sample cannot be read.
        """
        return self.fetch_readable(rows)[0]

    def fetch_readable(self, rows: np.ndarray) -> tuple[Batch, np.ndarray, list[str]]:
        """Return a batch, its rows, and one sentence per skipped sample.

        Raises:
            DataError: see ``check_readable``.
        """
        values, bad = self.values(rows)
        if bad:
            errors = [self.part.error(int(rows[place]), bad[place]) for place in sorted(bad)]
            check_readable(errors, num_samples=len(rows), skips=self._skips)
            good = np.setdiff1d(np.arange(len(rows)), list(bad))
            values, rows = {name: array[good] for name, array in values.items()}, rows[good]
        tensors = {name: torch.from_numpy(array) for name, array in values.items()}
        return self._batch_of(tensors), rows, [str(error) for error in errors] if bad else []

    def _batch_of(self, tensors: dict[str, torch.Tensor]) -> Batch:
        if self.part.has_tokens:
            tokens = tensors["tokens"]
            return tokens[:, :-1], tokens[:, 1:]
        return tuple(tensors.values()) if self.part.has_images else tensors

    def values(self, rows: np.ndarray) -> tuple[dict[str, np.ndarray], Bad]:
        """Return samples by column, and what is wrong with which, by their places in ``rows``."""
        schema = self.part.schema
        values = {
            name: np.empty((len(rows), *self.part._shape_of(name)), feature.dtype)
            for name, feature in schema.items()
        }
        bad: Bad = {}
        encoded: list[tuple[int, Any, int]] = []
        for places, ready, within in self._stored(rows, bad):
            for name, column in ready.columns.items():
                if schema[name].kind != "image" or self._is_decoded(column):
                    values[name][places] = column[within]
                else:
                    pairs = zip(places.tolist(), within.tolist(), strict=True)
                    encoded += [(place, column, n) for place, n in pairs]
            if ready.bad:
                for place, n in zip(places.tolist(), within.tolist(), strict=True):
                    if n in ready.bad:
                        bad.setdefault(place, ready.bad[n])
        self._decode(encoded, values, bad)
        return values, bad

    def _stored(self, rows: np.ndarray, bad: Bad) -> Iterator[tuple[np.ndarray, Ready, np.ndarray]]:
        """Yield (places in ``rows``, samples that were read, which of them are at these places)."""
        if self._groups is None:
            for places, ready in self.part.read_rows(rows):
                yield places, ready, np.arange(len(places))
            return
        numbers, within = self._groups.locate(rows)
        for number in sorted(set(numbers.tolist())):
            places = np.flatnonzero(numbers == number)
            try:
                ready = self._groups.get(number)
            except DataError as error:
                bad.update(dict.fromkeys(places.tolist(), error))
            else:
                yield places, ready, within[places]

    def _decode(
        self, encoded: list[tuple[int, Any, int]], values: Mapping[str, np.ndarray], bad: Bad
    ) -> None:
        """Decode images into their places."""
        each = map if self._pool is None else self._pool.map
        for (place, _, _), found in zip(encoded, each(self._pixels, encoded), strict=True):
            if isinstance(found, Exception):
                bad.setdefault(place, found)
            else:
                values["image"][place] = found

    def _pixels(self, job: tuple[int, Any, int]) -> np.ndarray | Exception:
        """Return the pixels of an image (place, images, row), or what is wrong with it."""
        _, images, row = job
        image = image_at(images, row)
        if isinstance(image, Exception):
            return image
        try:
            pixels = self.part.decoder.decode(image)
        except ValueError as error:
            return error
        if pixels.shape == self.shape.input_shape:
            return pixels
        size, first = size_text(pixels.shape), size_text(self.shape.input_shape)
        return ValueError(
            f"the image is {size}, but the first one is {first}; give all one size by "
            f"--input.image-size"
        )

    def _is_decoded(self, images: Any) -> bool:
        """Whether images need no more than to be copied."""
        return (
            isinstance(images, np.ndarray)
            and images.dtype == np.uint8
            and images.shape[1:] == self.shape.input_shape
            and not self.part.decoder.size
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_pool"}
