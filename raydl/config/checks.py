"""Checks that settings share."""

from __future__ import annotations

import math

from raydl.errors import ConfigError


def require(ok: bool, setting: str, rule: str, value: object) -> None:
    """Raise ConfigError, "SETTING must be RULE, got VALUE", unless the value is ok."""
    if not ok:
        raise ConfigError(setting, f"must be {rule}, got {value}")


def is_positive(value: float) -> bool:
    """Return whether a number is above 0 and finite."""
    return math.isfinite(value) and value > 0
