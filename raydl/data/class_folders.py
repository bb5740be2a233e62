"""Pictures in folders that are named by their class."""

from __future__ import annotations

import numpy as np

from raydl.data.files import Place
from raydl.data.images import ImageSet, checked_set
from raydl.data.pictures import decode_all
from raydl.errors import DataError

_PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm")
_LAYOUTS = "train-*.parquet, IDX files, data_batch_*.bin, or folders of pictures named by class"


def read_class_folders(folder: Place) -> ImageSet:
    """Return all pictures of a folder of class folders, decoded.

    Raises:
        DataError: there are none, one does not decode, or they differ in size.
    """
    pictures, labels, names = labelled_files(folder)
    images = decode_all(
        (picture.read() for picture in pictures), count=len(pictures), source=folder.name
    )
    return checked_set(images, labels, source=folder.name, class_names=names)


def labelled_files(folder: Place) -> tuple[list[Place], np.ndarray, list[str]]:
    """Return FOLDER/CLASS/*.png and the like, their labels, and the classes, numbered by name.

    Raises:
        DataError: there are none.
    """
    classes = [child for child in folder.children() if child.is_dir()]
    pictures = [
        (picture, number)
        for number, child in enumerate(classes)
        for picture in child.children()
        if picture.basename.lower().endswith(_PICTURE_ENDINGS)
    ]
    if not pictures:
        raise DataError(folder.name, f"holds nothing that is known here: {_LAYOUTS}")
    labels = np.array([number for _, number in pictures])
    return [picture for picture, _ in pictures], labels, [child.basename for child in classes]
