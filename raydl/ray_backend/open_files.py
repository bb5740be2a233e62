"""How many files a process may open: with too few, Ray's processes hang or end without a word."""

from __future__ import annotations

import math
import resource

from raydl.errors import ClusterError

MANY_FILES = 1024
"""A limit that suffices for a local cluster."""
_FEWEST_FILES = 128
"""The lowest limit with which a small local cluster runs."""


def open_file_limit() -> float:
    """Return how many files this process may open; infinity: any number."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return math.inf if limit == resource.RLIM_INFINITY else limit


def check_open_files() -> None:
    """Check that a local cluster can run with the files that this process may open.

    Raises:
        ClusterError: if Ray's processes would hang or end.
    """
    limit = open_file_limit()
    if limit < _FEWEST_FILES:
        raise ClusterError(
            "local",
            f"needs {_FEWEST_FILES} open files per process, and the limit is {limit}; raise it, "
            f"for instance with ulimit -n {MANY_FILES}",
        )
