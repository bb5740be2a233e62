"""What lies under the name of a source, told without reading it: the one place that decides."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from raydl.data import files
from raydl.data.files import Place
from raydl.data.text import TEXT_ENDINGS
from raydl.data.whole import refuse_unfinished
from raydl.errors import DataError, UnknownNameError

_BUNDLED = ("digits", "synthetic")
_IDX_NAMES = ("{part}-images-idx3-ubyte", "{part}-images.idx3-ubyte")


@dataclass(frozen=True)
class Layout:
    """The kind of a source, and the files or folders that make its parts."""

    kind: str
    """parquet, folders (one per class), idx, cifar, npz, text or synthetic."""
    name: str
    """Of the source, for messages; of a text its path or URI."""
    train: tuple[Place, ...] = ()
    """Of the training set, IDX pictures before their labels; of an .npz file, the file."""
    test: tuple[Place, ...] = ()
    """Of the test set; none: the source has none, or both lie in one place."""
    class_names: Place | None = None
    """The file that may name the classes, of cifar."""


def find_layout(source: str) -> Layout:
    """Return what lies under a name that :func:`raydl.data.load` takes.

    A folder of which nothing is known is one of class folders; there may be none in it.

    Raises:
        DataError: nothing is there, it can not be reached, a part of it is missing, or it is a
            conversion that was cut off.
        UnknownNameError: a bare word that is neither a path nor a bundled set.
    """
    if source == "digits":
        return _of_folder(files.find(str(Path(__file__).parent / "digits")))
    if source.split(":")[0] == "synthetic":
        return Layout("synthetic", source)
    if source.startswith("text:") or source.endswith(TEXT_ENDINGS):
        return Layout("text", source.removeprefix("text:"))
    if "*" in source:
        found = files.glob(source)
        if not found:
            raise DataError(source, "no file matches")
        return _parquet(found, source)
    place = files.find(source)
    if place.is_dir():
        return _of_folder(place)
    if not place.is_file():
        if re.fullmatch(r"[\w-]+", source):
            setting = "data: no such file or folder is there, and the bundled data"
            raise UnknownNameError(setting, source, _BUNDLED)
        raise DataError(source, "there is no such file or folder")
    return _of_file(place)


def _of_file(file: Place) -> Layout:
    if file.path.endswith(".npz"):
        return Layout("npz", file.name, (file,))
    if file.path.endswith(".parquet"):
        return _parquet([file], file.name)
    raise DataError(
        file.name,
        "a single file must be .parquet or .npz, or for a text .txt, .md, .npy or text:PATH; name "
        "the folder otherwise",
    )


def _of_folder(folder: Place) -> Layout:
    for place in (folder, folder / "data"):
        parquet = place.children("*.parquet") if place.is_dir() else []
        if parquet:
            return _parquet(parquet, folder.name)
    return _idx(folder) or _cifar(folder) or _class_folders(folder)


def _idx(folder: Place) -> Layout | None:
    for name in _IDX_NAMES:
        train, test = (_idx_pair(folder, name.format(part=part)) for part in ("train", "t10k"))
        if train and test:
            return Layout("idx", folder.name, train, test)
        if train:
            raise DataError(folder.name, "has IDX files for training (train-*) but none for t10k-*")
    return None


def _idx_pair(folder: Place, images_name: str) -> tuple[Place, ...]:
    """Return (pictures, labels), plain or packed, or nothing if no such pictures are there."""
    for ending in ("", ".gz"):
        images = folder / (images_name + ending)
        if images.is_file():
            labels_name = images_name.replace("images", "labels").replace("idx3", "idx1")
            labels = folder / (labels_name + ending)
            if not labels.is_file():
                raise DataError(labels.name, "is missing beside its pictures")
            return images, labels
    return ()


def _cifar(folder: Place) -> Layout | None:
    batches, test = folder.children("data_batch_*.bin"), folder / "test_batch.bin"
    if not batches:
        return None
    if not test.is_file():
        raise DataError(test.name, "is missing beside the training batches")
    names = folder / "batches.meta.txt"
    return Layout("cifar", folder.name, tuple(batches), (test,), names)


def _class_folders(folder: Place) -> Layout:
    train, test = folder / "train", folder / "test"
    if not train.is_dir():
        return Layout("folders", folder.name, (folder,))
    return Layout("folders", folder.name, (train,), (test,) if test.is_dir() else ())


def _parquet(found: list[Place], name: str) -> Layout:
    """Sort files by their names: train, test (or validation); else all are for training."""
    refuse_unfinished(found[0])
    train, test, validation = (
        tuple(file for file in found if re.match(rf"{part}\b", file.basename))
        for part in ("train", "test", "validation")
    )
    tested = test or validation
    if train and tested:
        return Layout("parquet", name, train, tested)
    return Layout("parquet", name, train or tuple(found))
