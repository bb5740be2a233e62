"""Checks that the classes of settings share."""

from __future__ import annotations

import math

from raydl.errors import ConfigError


def require(ok: bool, setting: str, rule: str, value: object) -> None:
    """Raise ConfigError, "SETTING must be RULE, got VALUE", unless ``ok``."""
    if not ok:
        raise ConfigError(setting, f"must be {rule}, got {value}")


def require_positive(setting: str, value: float, rule: str = "a positive number") -> None:
    """Raise ConfigError unless a number is above 0 and finite."""
    require(math.isfinite(value) and value > 0, setting, rule, value)
