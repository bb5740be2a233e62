"""Opens data sets of all kinds: describes their parts, compares them, splits and reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from raydl.config import InputConfig
from raydl.data.in_memory import ImageSet, TableSet
from raydl.data.part import Part, Streamed, with_shapes
from raydl.data.pieces import Piece
from raydl.data.samples import Dataset, Samples
from raydl.data.schema import Feature, Schema, as_classes, columns_of, compare
from raydl.data.sources import Source, open_source
from raydl.data.values import Decoder
from raydl.errors import DataError

_TEST_SHARE = 10
"""One in this many samples or groups is split off as test set."""
_FEWEST_IMAGES = 10
"""Fewest images that are split."""
_MOST_CLASSES, _MOST_OF_TABLE = 100_000, 100
"""Most classes; most that the integers of a table may mean, else they are amounts."""
_CLASSIFICATION = ("auto", "classification", "raydl.tasks:Classification")
_REGRESSION = ("regression", "raydl.tasks:Regression")
_CHUNK = 256
"""Samples to decode at once where all are read."""
_DEFAULTS = InputConfig()


def load(
    source: str,
    *,
    seed: int = 0,
    input: InputConfig = _DEFAULTS,
    like: Schema | None = None,
    task: str = "auto",
) -> Dataset:
    """Return the training set and the test set of a source, decoded or streamed.

    A source without a test part is split 90/10 by the seed.

    Args:
        source: ``digits``, ``synthetic``, ``synthetic:N[xCxHxW[xK]]``, or a path or URI of
            Parquet files (file, glob or folder), of CSV, TSV or JSON lines, a folder of
            ``datasets.save_to_disk``, an IDX folder, CIFAR's binary folder, an .npz file, a folder
            of class folders, a text (.txt, .md, or ``text:PATH`` for any other name), token files
            (.bin, .npy), or tar files.
        seed: seed of the split and of synthetic data.
        input: settings of the input.
        like: what a sample must be, for a model that was trained on such samples: classes get the
            numbers of their names there.
        task: ``TrainConfig.task``, on which depends whether a target is a class or a number.

    Raises:
        DataError: if the data are missing, empty, truncated, mislabelled or of unknown kind.
        UnknownNameError: if a bare word is neither a path nor a bundled set.
    """
    found = open_source(source, input=input, seed=seed)
    described = describe(found, input=input, like=like, task=task)
    return described.dataset(seed=seed, input=input)


def load_each(
    data: Any, piece_of: Callable[[Any], Piece], *, seed: int, input: InputConfig, task: str
) -> Dataset:
    """Return the training set and the test set of a data set in Python.

    Args:
        data: the set, a tenth of which becomes the test set, or ``{"train": ..., "test": ...}``.
        piece_of: makes a piece of such a set.
        seed: seed of that split.
        input: how samples are read.
        task: see ``load``.

    Raises:
        DataError: see ``load``.
    """
    parts = data if isinstance(data, Mapping) else {"train": data}
    if isinstance(data, Mapping):
        check_parts(data)
    pieces = {name: [piece_of(part)] for name, part in parts.items()}
    described = describe(Source(pieces["train"][0].name, "", pieces), input=input, task=task)
    return described.dataset(seed=seed, input=input)


def check_parts(data: Mapping[str, Any]) -> None:
    """Raise DataError unless data sets are named train and test."""
    if set(data) != {"train", "test"}:
        raise DataError("data", f"must be named train and test, got {', '.join(data)}")


@dataclass(frozen=True)
class Described:
    """The parts of a source under one schema, not yet read."""

    source: str
    train: Part
    test: Part | None
    problems: tuple[DataError, ...]
    """What refuses a run, in the order of finding; ``raydl data info`` shows all."""
    notes: tuple[str, ...]
    """Sentences for the log of a run."""
    like: Schema | None = None
    """What a sample must be, if a model was trained on such samples."""

    @property
    def parts(self) -> dict[str, Part]:
        """The parts by name: train and, if there is one, test."""
        return {"train": self.train} | ({} if self.test is None else {"test": self.test})

    @property
    def can_be_streamed(self) -> bool:
        """Whether samples can be read when they are needed; arrays are in memory already."""
        return not self.train.pieces[0].is_in_memory

    def streams(self, input: InputConfig) -> bool:
        """Whether a run reads samples when they are needed."""
        if self.train.has_tokens:  # which are cut into samples when they are needed
            return True
        return self.can_be_streamed and input.streams(lambda: self.train.decoded_bytes)

    def shaped(self, *, skips: bool) -> Described:
        """Return the same with the shapes and the mode of the first sample, and what differs.

        Args:
            skips: whether to take the first sample that can be read, instead of the first.

        Raises:
            DataError: if that sample cannot be read.
        """
        texts = [name for name, f in self.train.schema.items() if f.dtype == "text"]
        problems = [*self.problems, *(_of_text(self.train, name) for name in texts)]
        if len(texts) == len(self.train.schema):
            raise problems[0]
        train, note = with_shapes(_without(self.train, texts), skips=skips)
        test, notes = self.test, (*self.notes, *filter(None, [note]))
        if test is not None:
            test = replace(test, columns=train.columns, schema=train.schema, decoder=train.decoder)
            problems += _of_test_shapes(test, skips=skips)
        for difference in compare(self.like or {}, train.schema):
            problems.append(DataError(train.pieces[0].name, difference.problem))
        return replace(self, train=train, test=test, problems=tuple(problems), notes=notes)

    def dataset(self, *, seed: int, input: InputConfig) -> Dataset:
        """Return the parts as sets to train on and to test, split if there is no test part.

        Raises:
            DataError: if a sample cannot be read, or there are too few to split.
        """
        shaped = self.shaped(skips=input.on_bad_sample == "skip")
        for problem in shaped.problems:
            raise problem
        train, test = shaped._sets(seed=seed, input=input)
        return Dataset(train, test, self.source, shaped.train.schema, shaped.notes)

    def _sets(self, *, seed: int, input: InputConfig) -> Iterable[Samples]:
        train, test, streams = self.train, self.test, self.streams(input)
        if test is None and streams and train.is_grouped:
            split = split_numbers(len(train.sizes), train.pieces[0].word, seed, self.source)
            train, test = (train.choose_groups(numbers.tolist()) for numbers in split)
        elif test is None and streams:
            train, test = map(train.choose_rows, self._split_rows(seed))
        if test is None:
            arrays, split = _arrays_of(train), self._split_rows(seed)
            return (_set_of(train, {n: a[rows] for n, a in arrays.items()}) for rows in split)
        if streams:
            skips, size = input.on_bad_sample == "skip", input.shuffle_samples
            make = partial(
                Streamed, shuffle_samples=size, num_threads=input.num_threads, skips=skips
            )
            return map(make, (train, test))
        return (_set_of(part, _arrays_of(part)) for part in (train, test))

    def _split_rows(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        count = self.train.num_rows
        if self.train.has_images and count < _FEWEST_IMAGES:
            problem = f"has no test part and only {count} images: too few to split"
            raise DataError(self.source, problem)
        return split_numbers(count, "row", seed, self.source)


def split_numbers(count: int, what: str, seed: int, source: str) -> tuple[np.ndarray, np.ndarray]:
    """Split 0..count-1 at random into (nine tenths, one tenth), each ascending.

    Raises:
        DataError: if there is only one.
    """
    if count < 2:
        advice = "name files train-*.parquet and test-*.parquet, or save splits train and test"
        if what == "block":
            advice = "give a folder with a training and a test file, or set --input.stream never"
        raise DataError(source, f"has no test part and only one {what}: too few to split; {advice}")
    order = np.random.default_rng(seed).permutation(count)
    num_test = max(1, count // _TEST_SHARE)
    return np.sort(order[num_test:]), np.sort(order[:num_test])


def _arrays_of(part: Part) -> dict[str, np.ndarray]:
    """Return all samples of a part, by column.

    Raises:
        DataError: if one cannot be read.
    """
    samples = Streamed(part, shuffle_samples=1, num_threads=os.cpu_count() or 1)
    whole: dict[str, np.ndarray] = {}
    for start in range(0, part.num_rows, _CHUNK):
        rows = np.arange(start, min(start + _CHUNK, part.num_rows))
        samples.prefetch(np.arange(start, min(start + 2 * _CHUNK, part.num_rows)))
        values, bad = samples.values(rows)
        for place in sorted(bad):
            raise part.error(int(rows[place]), bad[place])
        for name, array in values.items():
            if not start:
                whole[name] = np.empty((part.num_rows, *array.shape[1:]), array.dtype)
            whole[name][start : start + len(rows)] = array
    return whole


def _set_of(part: Part, arrays: dict[str, np.ndarray]) -> Samples:
    """Return samples in memory."""
    if part.has_images:
        return ImageSet(arrays["image"], arrays["label"], part.schema["label"].names)
    return TableSet(arrays, part.target, part.shape.class_names)


def describe(
    found: Source, *, input: InputConfig, like: Schema | None = None, task: str = "auto"
) -> Described:
    """Return the parts of a source under one schema, with all that differs from it.

    No image is decoded. Of the samples only the labels are read, if the files do not name classes.

    Args:
        found: the source.
        input: settings of the input.
        like: see ``load``.
        task: see ``load``.

    Raises:
        DataError: if there are no samples, the columns are not clear, or labels are no classes.
    """
    pieces = {part: list(some) for part, some in found.pieces.items() if some}
    if "train" not in pieces:
        raise (*found.problems, DataError(found.name, "holds no rows"))[0]
    first = pieces["train"][0]
    columns = columns_of(first.schema, input.columns_named, source=first.name, target=input.target)
    if like:  # the data to score may have more
        columns = {name: stored for name, stored in columns.items() if name in like}
    schema = {name: first.schema[stored] for name, stored in columns.items()}
    problems, numbering = list(found.problems), dict[str, dict[int, np.ndarray]]()
    for part, some in pieces.items():
        found_here, numbering[part] = _compared(like or schema, columns, some, maps=bool(like))
        problems += found_here
    if like:
        for problem in problems:
            raise problem
        schema = {name: like[name] for name in columns}
    decoder = Decoder(input.mode or _mode_of(like), input.image_size, input.span_of_values)
    parts = {
        name: Part(tuple(some), columns, schema, decoder, numbering[name])
        for name, some in pieces.items()
    }
    target = "" if parts["train"].has_images else input.target
    if parts["train"].has_images:
        schema["label"] = _with_names(schema["label"], parts)
    elif target:
        schema[target] = _of_target(parts, target, task)
    parts = {n: replace(part, schema=schema, target=target) for n, part in parts.items()}
    test = parts.get("test")
    return Described(found.name, parts["train"], test, tuple(problems), tuple(found.notes), like)


def _mode_of(like: Schema | None) -> str:
    """Return the mode of the images that a model was trained on, or ""."""
    shape = like["image"].shape if like and "image" in like else ()
    return {1: "L", 3: "RGB"}.get(shape[0] or 0, "") if shape else ""


def _compared(
    first: Schema, columns: Mapping[str, str], pieces: Sequence[Piece], *, maps: bool
) -> tuple[list[DataError], dict[int, np.ndarray]]:
    """Return what differs from a schema, and the numbers of classes that can be mapped by name."""
    stored = {columns.get(name, name): feature for name, feature in first.items()}
    problems, numbering = [], {}
    for number, piece in enumerate(pieces):
        for difference in compare(stored, piece.schema):
            if maps and difference.numbering is not None:
                numbering[number] = np.array(difference.numbering)
            else:
                problems.append(DataError(piece.name, difference.problem))
    return problems, numbering


def _of_target(parts: Mapping[str, Part], name: str, task: str) -> Feature:
    """Return the feature of a column to predict from the others: a number, or a class.

    Raises:
        DataError: if it is neither, or it is not clear which of them.
    """
    train = parts["train"]
    source, target = train.pieces[0].name, train.schema[name]
    if len(train.schema) == 1:
        raise DataError(source, f"has no column from which to predict {name!r}")
    if target.kind != "number":
        if task in _REGRESSION:
            problem = f"column {name!r} must hold numbers for a regression, got {target}"
            raise DataError(source, problem)
        return _with_names(target, parts, name)
    if task not in _CLASSIFICATION:
        return target
    if target.dtype == "bool":
        return as_classes(target, ["0", "1"])
    held = "fractions"
    if target.dtype == "int64":
        numbers = _distinct(name, *parts.values())
        if min(numbers) >= 0 and max(numbers) < _MOST_OF_TABLE:
            return _with_names(target, parts, name)
        held = f"integers from {min(numbers):,} to {max(numbers):,}"
    raise DataError(
        source,
        f"column {name!r} holds {held}, and classes are texts or integers from 0 to "
        f"{_MOST_OF_TABLE - 1}: predict numbers by --task regression, or write classes as texts",
    )


def _with_names(label: Feature, parts: Mapping[str, Part], name: str = "label") -> Feature:
    """Return the feature of labels with the names of all classes.

    Without names in the files, classes are numbered up to the largest label, and those given as
    text in the order of their names.

    Raises:
        DataError: if labels are no integers and no texts, are ids, or there are none.
    """
    train = parts["train"]
    source, stored = train.pieces[0].name, train.columns[name]
    if label.names:
        return label
    if label.kind == "text" and not label.shape:
        texts = _distinct(name, train)
        _refuse_ids(len(texts), len(texts), source, stored)
        return as_classes(label, sorted(map(str, texts)))
    if label.dtype != "int64" or label.shape:
        problem = f"column {stored!r} must hold integers or texts, got {label.stored or label}"
        raise DataError(source, problem)
    numbers = _distinct(name, *parts.values())
    largest = max(numbers, default=-1)
    if largest < 0:
        raise DataError(source, "must hold labels of 0 or more, got none: no classes to learn")
    _refuse_ids(largest + 1, len(numbers), source, stored)
    return as_classes(label, [str(number) for number in range(largest + 1)])


def _distinct(name: str, *parts: Part) -> set[Any]:
    """Return the different labels of some parts; read only the column of labels."""
    of_each = (piece.distinct(part.columns[name]) for part in parts for piece in part.pieces)
    return set().union(*of_each) - {None}


def _refuse_ids(num_classes: int, num_distinct: int, source: str, column: str) -> None:
    """Raise DataError if labels would make more classes than any model has."""
    if num_classes > _MOST_CLASSES:
        raise DataError(
            source,
            f"column {column!r} holds ids, not classes: {num_distinct:,} different values, which "
            f"would make {num_classes:,} classes; number them from 0, or give them as text",
        )


def _of_text(part: Part, name: str) -> DataError:
    """Return the problem of a column that a batch cannot hold."""
    is_open = not part.has_images and not part.target
    hint = "name the column to predict by --target, or " if is_open else "name "
    return DataError(
        part.pieces[0].name,
        f"column {part.columns[name]!r} must hold numbers, got {part.schema[name].stored}; {hint}"
        f"the columns to read in input.columns",
    )


def _without(part: Part, names: Sequence[str]) -> Part:
    """Return a part without some columns."""
    return replace(
        part,
        columns={name: stored for name, stored in part.columns.items() if name not in names},
        schema={name: feature for name, feature in part.schema.items() if name not in names},
    )


def _of_test_shapes(test: Part, *, skips: bool) -> list[DataError]:
    """Return what differs in the first sample of a test set from those of the training set."""
    own_shapes = test.pieces[0].schema
    stored = {
        name: replace(feature, shape=own_shapes[test.columns[name]].shape)
        for name, feature in test.schema.items()
        if test.columns[name] in own_shapes
    }
    try:
        own, _ = with_shapes(replace(test, schema=stored), skips=skips)
    except DataError as error:
        return [error]
    differences = compare(test.schema, own.schema)
    return [DataError(test.pieces[0].name, difference.problem) for difference in differences]
