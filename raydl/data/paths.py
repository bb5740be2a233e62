"""Images that a row has only the path of: files below the folder of the data, and nowhere else."""

from __future__ import annotations

import os
import posixpath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from raydl.data.files import Place


def with_files(column: Any, folder: Place | None) -> Any:
    """Return a column of images with the files in place of the paths, to take one by one.

    Args:
        column: images as bytes, as paths, or as structs of both; or anything else.
        folder: the folder of the data; None: none has only a path.
    """
    if folder is None or not isinstance(column, (pa.Array, pa.ChunkedArray)):
        return column
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return _Files(None, column, folder)
    if not pa.types.is_struct(column.type) or column.type.get_field_index("path") < 0:
        return column
    encoded, paths = pc.struct_field(column, "bytes"), pc.struct_field(column, "path")
    return _Files(encoded, paths, folder) if encoded.null_count else column


class _Files:
    """Images of which some are paths; each file is read when it is taken."""

    def __init__(self, encoded: Any, paths: Any, folder: Place) -> None:
        self._encoded, self._paths, self._folder = encoded, paths, folder

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, row: int) -> Any:
        """Return an image as a file; None: there is neither; an exception: it cannot be read."""
        encoded = None if self._encoded is None else self._encoded[row].as_py()
        path = self._paths[row].as_py()
        if encoded is not None or path is None:
            return encoded
        is_local = isinstance(self._folder.filesystem, fs.LocalFileSystem)
        root = os.path.abspath(self._folder.path) if is_local else self._folder.path
        inside = posixpath.relpath(posixpath.join(root, path), root)
        if inside.split("/")[0] == "..":
            return ValueError(f"its image is the file {path!r}, which is not in the data's folder")
        try:
            return (self._folder / inside).read()
        except Exception as error:  # this file alone
            return error
