"""One self-contained HTML page of a run, or of several, to send to somebody.

It is made from what lies in a run's folder alone, and whoever opens it needs no network: style
and pictures are in it.

    events.py     curves and sentences from the TensorBoard event files
    facts.py      all that a folder says of its run
    curves.py     which curves are shown
    sections.py   what is said of one run
    page.py       the page
    html.py       elements; style.py how they look
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from raydl.errors import ConfigError
from raydl.storage import Storage, below, parent_and_name
from raydl.tools.report.facts import RunFacts, read_run
from raydl.tools.report.page import make_page

__all__ = ["RunFacts", "make_page", "read_run", "write_report"]

NAME = "report.html"


def write_report(runs: Sequence[str], *, out: str | None = None) -> str:
    """Write the page of some runs and return where it lies.

    Args:
        runs: their folders, paths or URIs, at least one.
        out: the file; None: ``report.html`` in the run's folder, or here for several runs.

    Raises:
        DataError: one of them is no run.
        ConfigError: the page can not be written.
    """
    folders = {below(run, NAME): run for run in runs}  # one named twice is there once
    facts = with_names_apart([read_run(folder) for folder in folders.values()])
    if out is None:
        out = next(iter(folders)) if len(folders) == 1 else NAME
    _write(out, make_page(facts).encode())
    return out


def with_names_apart(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """Return the runs, those that share a name called by their whole path."""
    names = [run.name for run in runs]
    return [replace(r, name=r.root) if names.count(r.name) > 1 else r for r in runs]


def _write(out: str, page: bytes) -> None:
    parent, name = _taken_apart(out)
    if not name:
        raise ConfigError("out", f"must be a file, got the folder {out}")
    try:
        Storage(parent or ".").write_bytes(name, page)
    except OSError as error:
        raise ConfigError("out", f"{out} can not be written: {error}; name another") from error


def _taken_apart(out: str) -> tuple[str, str]:
    """Return (folder, name) of a file, a path or URI; the name of a folder is empty."""
    if "://" not in out:
        return os.path.split(out)
    return (out, "") if out.partition("?")[0].endswith("/") else parent_and_name(out)
