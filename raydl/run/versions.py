"""The versions that are installed.

The distribution is called ``elastic-raydl``: on the package index ``raydl`` is another project.
"""

from __future__ import annotations

import functools
from importlib import metadata

DISTRIBUTION = "elastic-raydl"
"""Name for ``pip`` of the package that is imported as ``raydl``."""


@functools.cache
def installed_version(package: str) -> str:
    """Return the installed version of a package, by the name that it is imported under.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    return metadata.version(DISTRIBUTION if package == "raydl" else package)


def requirements() -> list[str]:
    """Return the requirements of raydl, as installed.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    return metadata.requires(DISTRIBUTION) or []
