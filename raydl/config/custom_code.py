"""Imports code of your own that a setting names by ``module:name``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

from raydl.errors import ConfigError


def load_own(setting: str, name: str) -> Any:
    """Return the object that ``module:name`` names; the module may lie in the current folder.

    Args:
        setting: the dotted name of the setting, for the message.
        name: ``module:name``.

    Raises:
        ConfigError: it can not be imported.
    """
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise ConfigError(setting, f"must be written module:name, got {name}")
    # A command finds what lies where it is given. What is raydl's may be named by a folder that
    # nobody trusts: then nothing is to come from here, and this may be that folder.
    if not module_name.startswith("raydl.") and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(setting, f"{name} can not be imported: {error}") from error


def made_of(setting: str, name: str) -> Any:
    """Return an instance of the class that ``module:Class`` names.

    Args:
        setting: the dotted name of the setting, for the message.
        name: ``module:Class``, or a function that returns what it makes.

    Raises:
        ConfigError: it can not be imported, or needs arguments.
    """
    make = load_own(setting, name)
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ConfigError(
            setting, f"{name} must be a class that needs no arguments: {error}"
        ) from error
    return make()
