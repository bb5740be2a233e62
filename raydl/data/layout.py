"""What lies under the name of a source, told without reading it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from raydl.data import files
from raydl.data.files import Place
from raydl.data.sources import parquet_parts
from raydl.data.text import TEXT_ENDINGS
from raydl.data.whole import refuse_unfinished

_BINARY = (("cifar", "data_batch_*.bin"), ("idx", "*-ubyte*"))


@dataclass(frozen=True)
class Layout:
    """The kind of a source, and the files or folders that make its parts."""

    kind: str
    """parquet, folders (one per class), idx, cifar, npz, text, synthetic, or other."""
    train: tuple[Place, ...] = ()
    """Of the training set; of a kind that lies in one place, the place."""
    test: tuple[Place, ...] = ()
    """Of the test set; none: the source has none, or both lie in one place."""


def find_layout(source: str) -> Layout:
    """Return the layout of what :func:`raydl.data.load` reads under this name.

    What it would refuse is ``other``, or ``folders`` of which there are none.

    Raises:
        DataError: it can not be reached, or is a conversion that was cut off.
    """
    if source == "digits":
        source = str(Path(__file__).parent / "digits")
    if source.split(":")[0] == "synthetic":
        return Layout("synthetic")
    if source.startswith("text:") or source.endswith(TEXT_ENDINGS):
        return Layout("text")
    if "*" in source:
        found = files.glob(source)
        if found:
            refuse_unfinished(found[0])
        return _parquet(found) if found else Layout("other")
    place = files.find(source)
    if place.is_dir():
        return _of_folder(place)
    for ending in (".npz", ".parquet"):
        if place.path.endswith(ending) and place.is_file():
            return _parquet([place]) if ending == ".parquet" else Layout("npz", (place,))
    return Layout("other")


def _of_folder(folder: Place) -> Layout:
    for place in (folder, folder / "data"):
        parquet = place.children("*.parquet") if place.is_dir() else []
        if parquet:
            refuse_unfinished(parquet[0])
            return _parquet(parquet)
    for kind, pattern in _BINARY:
        found = folder.children(pattern)
        if found:
            return Layout(kind, tuple(found))
    train, test = folder / "train", folder / "test"
    if not train.is_dir():
        return Layout("folders", (folder,))
    return Layout("folders", (train,), (test,) if test.is_dir() else ())


def _parquet(found: list[Place]) -> Layout:
    train, test = parquet_parts(found)
    return Layout("parquet", tuple(train), tuple(test))
