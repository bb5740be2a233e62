"""Writes one self-contained HTML page that reports one run, or compares several.

The page is made from the folders of the runs alone. It contains its style sheet and its charts, so
a browser needs no network to show it.

    events.py     reads curves and logged events from TensorBoard event files
    facts.py      reads the folder of a run
    curves.py     the charts
    sections.py   the sections of one run
    page.py       the page
    html.py       HTML elements
    style.py      the style sheet
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from raydl.errors import ConfigError
from raydl.run.folder import open_run
from raydl.storage import Storage, below, parent_and_name
from raydl.tools.report.facts import RunFacts, read_run
from raydl.tools.report.page import make_page

__all__ = ["RunFacts", "make_page", "read_run", "write_report"]

NAME = "report.html"


def write_report(runs: Sequence[str], *, out: str | None = None) -> str:
    """Write the page of one or more runs and return its path or URI.

    Args:
        runs: folders of runs, paths or URIs, or names of runs in ``runs``, at least one.
        out: the file; None: ``report.html`` in the folder of the run or, for several runs, in the
            current folder.

    Raises:
        DataError: if a folder contains no run.
        ConfigError: if the page cannot be written.
    """
    folders = list(dict.fromkeys(open_run(run).root for run in runs))  # drops repeated runs
    facts = with_unique_names([read_run(folder) for folder in folders])
    if out is None:
        out = below(folders[0], NAME) if len(folders) == 1 else NAME
    _write(out, make_page(facts).encode())
    return out


def with_unique_names(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """Return the runs; runs of the same name are named by their whole path."""
    names = [run.name for run in runs]
    return [replace(r, name=r.root) if names.count(r.name) > 1 else r for r in runs]


def _write(out: str, page: bytes) -> None:
    if "://" not in out:
        parent, name = os.path.split(out)
    elif out.partition("?")[0].endswith("/"):
        parent, name = out, ""
    else:
        parent, name = parent_and_name(out)
    if not name:
        raise ConfigError("out", f"must be a file, got the folder {out}")
    try:
        Storage(parent or ".").write_bytes(name, page)
    except OSError as error:
        raise ConfigError("out", f"{out} cannot be written: {error}; name another") from error
