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


def require_local(setting: str, folder: str | None) -> None:
    """Raise ConfigError if a folder is a URI."""
    require("://" not in (folder or ""), setting, "a folder of this machine", folder)


def require_name(setting: str, name: str) -> None:
    """Raise ConfigError unless a name can be a folder, a part of a URI and of a job's id."""
    rule = "a name of letters, digits, _ . and - that does not begin with . or -"
    require(re.fullmatch(r"\w[\w.-]*", name) is not None, setting, rule, repr(name))
