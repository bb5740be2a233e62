"""The one listing of a source: every file is read, left out for a reason, or a problem."""

from __future__ import annotations

import os
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pyarrow import fs

from raydl.data.files import Place, wording

_WORDS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
"""Words of a part in the names of files and folders, as the Hugging Face hub has them."""
_PART = {word: part for part, words in _WORDS.items() for word in words}
_WORD = re.compile(rf"(?<![^-._ 0-9])({'|'.join(_PART)})(?![^-._ 0-9])", re.IGNORECASE)
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\..*)?")
_MOST_TOLD = 3
"""Reasons for leaving files out that one line has."""

Parts = dict[str, list[str]]
"""Paths of the files of train and, if there is one, of test, below the folder of the source."""

_T = TypeVar("_T")


@dataclass
class Listing:
    """The files of a source, and what becomes of each of them."""

    root: Place
    """The folder; of a file, the folder that has it."""
    name: str
    """What the user named, for messages."""
    files: list[str]
    """Paths of the files below the folder that may be read, sorted by folder."""
    is_explicit: bool = False
    """Whether the user named the files: then they are read, whatever their names say."""
    left_out: dict[str, str] = field(default_factory=dict)
    """What each of the other files and hidden folders is: ``ending in .json``, ``of no part``."""
    problems: list[str] = field(default_factory=list)
    """Sentences, each of which refuses a run; ``data info`` shows all of them."""

    def places(self, paths: Iterable[str]) -> list[Place]:
        """Return the places of some of the files."""
        return [self.root / path for path in paths]

    def each(self, parts: Parts, make: Callable[[Place], _T]) -> dict[str, list[_T]]:
        """Return by part what a function makes of each of its files, one by one."""
        return {
            part: [make(place) for place in self.places(paths)]
            for part, paths in parts.items()
            if part
        }

    def ending_in(self, endings: Sequence[str]) -> list[str]:
        """Return the files whose names end so, in upper or lower case."""
        return [path for path in self.files if path.lower().endswith(tuple(endings))]

    def keep(self, parts: Parts) -> None:
        """Note why files that belong to no part are not read."""
        kept = {path for paths in parts.values() for path in paths}
        for path in self.files:
            if path not in kept:
                ending = posixpath.splitext(path)[1]
                why = f"ending in {ending}" if ending else "without an ending"
                self.left_out.setdefault(path, why)

    def note(self) -> str:
        """Return one line about what was left out, or ''."""
        counts = Counter(why for why in self.left_out.values() if why != _HIDDEN)
        told = [f"{count:,} {why}" for why, count in counts.most_common(_MOST_TOLD)]
        others = len(counts) - len(told)
        told += [f"others for {others} more reasons"] if others else []
        return f"files of {self.name} that are not read: {'; '.join(told)}" if told else ""


_HIDDEN = "hidden"


def list_folder(root: Place) -> Listing:
    """Return the listing of a folder and of those below it, without hidden ones.

    Raises:
        DataError: if it cannot be listed.
    """
    found = Listing(root, root.name, [])
    with wording(root.name, "listed"):
        if root.is_local:
            _walk(found, root.path, "", set())
        else:
            _select(found)
    return found


def _walk(found: Listing, folder: str, below: str, seen: set[tuple[int, int]]) -> None:
    """Add the files of a local folder.

    PyArrow's selector would leave out links to missing files in silence, and follow loops of links.
    """
    info = os.stat(folder)
    if (info.st_dev, info.st_ino) in seen:
        return
    seen.add((info.st_dev, info.st_ino))
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = below + entry.name
        if _is_hidden(entry.name):
            found.left_out[path] = _HIDDEN
        elif not entry.name.isprintable() and "\ufffd" in _shown(entry.name):
            found.problems.append(f"{_shown(path)} has a name that is not UTF-8; rename it")
        elif entry.is_dir():
            _walk(found, entry.path, path + "/", seen)
        elif entry.is_symlink() and not os.path.exists(entry.path):
            found.problems.append(f"{path} is a link to a missing file; fetch it, or remove it")
        else:
            found.files.append(path)


def _shown(name: str) -> str:
    """Return a name with a mark for each byte that is not UTF-8."""
    return os.fsencode(name).decode("utf-8", "replace")


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"  # which macOS adds to archives


def _select(found: Listing) -> None:
    """Add the files of a folder in a store, which has no links: one request per thousand files."""
    filesystem, root = found.root.filesystem, found.root.path
    infos = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    files = [info.path for info in infos if info.type == fs.FileType.File]
    paths = (posixpath.relpath(path, root) for path in files)
    for path in sorted(paths, key=lambda path: path.split("/")):
        if any(map(_is_hidden, path.split("/"))):
            found.left_out[path] = _HIDDEN
        else:
            found.files.append(path)


def split_of(path: str) -> set[str]:
    """Return the parts that a path names: by its folders, or else by the name of its file."""
    *folders, name = path.split("/")
    for text in (*folders, name.split(".")[0]):
        if words := _WORD.findall(text):
            return {_PART[word.lower()] for word in words}
    return set()


def parts_by_name(found: Listing, paths: Sequence[str]) -> Parts:
    """Assign files to train and test by their names, as the Hugging Face hub does.

    ``validation`` is the test set if there is no other. Files of no part train if no others do.
    """
    if found.is_explicit and len({frozenset(split_of(path)) for path in paths}) < 2:
        return {"train": list(paths)}
    by_part: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        names = split_of(path)
        if len(names) > 1:
            found.problems.append(f"{path} names several parts; give the files of one of them")
        by_part[min(names, default="")].append(path)
    parts = _assigned(found, by_part)
    _check_configurations(found, parts["train"])
    _check_shards(found, paths)
    return parts


def _assigned(found: Listing, by_part: dict[str, list[str]]) -> Parts:
    train = by_part["train"] or by_part[""]
    test = by_part["test"] or by_part["validation"]
    if by_part["train"]:
        found.left_out |= dict.fromkeys(by_part[""], "of no part")
    if by_part["test"]:
        found.left_out |= dict.fromkeys(by_part["validation"], "of a second test set")
    if not train:
        found.problems.append("holds a test set and nothing to train on; give its files by name")
    return {"train": train, **({"test": test} if test else {})}


def _check_configurations(found: Listing, train: Sequence[str]) -> None:
    """Add a problem if files of several configurations of a set would be mixed."""
    folders = {path.split("/")[0] for path in train if "/" in path}
    several = sorted(folder for folder in folders if not _WORD.search(folder))
    if len(several) > 1:
        found.problems.append(f"holds several sets, {', '.join(several)}; give the folder of one")


def _check_shards(found: Listing, paths: Sequence[str]) -> None:
    """Add a problem for files that the numbers in the names of others promise."""
    numbers: dict[tuple[str, int, str], set[int]] = defaultdict(set)
    for match in filter(None, map(_SHARD.fullmatch, paths)):
        numbers[match[1], int(match[3]), match[4] or ""].add(int(match[2]))
    for (stem, count, ending), present in numbers.items():
        missing = sorted(set(range(count)) - present)
        if missing and not found.is_explicit:
            name = f"{stem}-{missing[0]:05}-of-{count:05}{ending}"
            more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
            found.problems.append(f"{name} is missing{more}; fetch it, or rename the others")


def class_of(path: str) -> str:
    """Return the class of an image: its first folder, or that below the folder of its part."""
    folders = path.split("/")[:-1]
    return folders[1] if len(folders) > 1 and split_of(folders[0] + "/") else folders[0]


def image_parts(
    found: Listing, paths: Sequence[str], class_of: Callable[[str], str] = class_of
) -> Parts:
    """Assign images in folders named by class to train and test: ``CLASS/*``, ``train/CLASS/*``.

    A folder ``train`` that holds images itself is a class. A test set whose one folder is called
    ``images`` has no classes, as that of Tiny ImageNet.
    """
    by_part: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        folders = path.split("/")[:-1]
        names = split_of(folders[0] + "/") if len(folders) > 1 else set()
        if not folders:
            found.left_out[path] = "beside the class folders"
        else:
            by_part[min(names, default="")].append(path)
    trained = set(map(class_of, by_part["train"] or by_part[""]))
    for part in ("test", "validation"):
        if {*map(class_of, by_part[part])} == {"images"} and "images" not in trained:
            found.left_out |= dict.fromkeys(by_part.pop(part), "without classes")
    return _assigned(found, by_part)
