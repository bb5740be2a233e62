"""Lets the programs of a folder import only the raydl that lies in it, and notes those that do.

A copy of this file named ``sitecustomize.py``, in a folder on PYTHONPATH, is read by every Python
process as it starts, also by those that Ray starts: see ``benchmarks.bits``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent
NOTES = "processes"
"""File in the folder with the process id of each process that has imported raydl, one a line."""


class OnlyFromHere(PathFinder):
    """Finds ``raydl`` in this folder, and refuses any other."""

    @classmethod
    def find_spec(
        cls,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return where raydl is; None, so that others answer, for every other module.

        Raises:
            ImportError: if this process would import another raydl.
        """
        if fullname != "raydl":
            return None
        spec = super().find_spec(fullname, path, target)
        found = None if spec is None else spec.origin
        if found is None or not Path(found).resolve().is_relative_to(FOLDER):
            raise ImportError(f"this process would import raydl from {found}, not from {FOLDER}")
        with (FOLDER / NOTES).open("a") as notes:
            notes.write(f"{os.getpid()}\n")
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, OnlyFromHere)
