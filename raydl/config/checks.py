"""Checks that the classes of settings share."""

from __future__ import annotations

import math
import re

from raydl.errors import ConfigError


def require(ok: bool, setting: str, rule: str, value: object) -> None:
    """Raise ConfigError, "SETTING must be RULE, got VALUE", unless ``ok``."""
    if not ok:
        raise ConfigError(setting, f"must be {rule}, got {value}")


def require_positive(setting: str, value: float, rule: str = "a positive number") -> None:
    """Raise ConfigError unless a number is above 0 and finite."""
    require(math.isfinite(value) and value > 0, setting, rule, value)


_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("kMGT", 1)},
          **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def bytes_of(setting: str, size: str) -> int:
    """Return the number of bytes of a size: ``2GB``, ``500 MiB``, ``1000``.

    Raises:
        ConfigError: if it is no positive size.
    """
    match = _SIZE.fullmatch(size)
    is_size = match is not None and match[2] in _UNITS
    num_bytes = round(float(match[1]) * _UNITS[match[2]]) if match and is_size else 0
    require(num_bytes >= 1, setting, "a size as 500MB, 2GB or 1GiB", repr(size))
    return num_bytes


def require_local(setting: str, folder: str | None) -> None:
    """Raise ConfigError if a folder is a URI."""
    require("://" not in (folder or ""), setting, "a folder of this machine", folder)


def require_name(setting: str, name: str) -> None:
    """Raise ConfigError unless a name can be a folder, a part of a URI and of a job's id."""
    rule = "a name of letters, digits, _ . and - that does not begin with . or -"
    require(re.fullmatch(r"\w[\w.-]*", name) is not None, setting, rule, repr(name))
