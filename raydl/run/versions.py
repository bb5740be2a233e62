"""Installed versions of packages.

The distribution is called ``elastic-raydl``: on the package index ``raydl`` is another project.
"""

from __future__ import annotations

import functools
from importlib import metadata

DISTRIBUTION = "elastic-raydl"
"""Name on the package index of the package that is imported as ``raydl``."""


@functools.cache
def installed_version(package: str) -> str:
    """Return the installed version of a package, given its import name.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    return metadata.version(DISTRIBUTION if package == "raydl" else package)


def requirements() -> list[str]:
    """Return the requirements of the installed raydl.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    return metadata.requires(DISTRIBUTION) or []
