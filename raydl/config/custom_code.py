"""Imports code of the user that a setting names by ``module:name``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

from raydl.errors import ConfigError

HUGGING_FACE = "hf:"
"""Beginning of the name of a model in a local folder, ``hf:FOLDER``: none of its code runs."""


def hugging_face_folder(model: str) -> str | None:
    """Return FOLDER of a model ``hf:FOLDER``; None for any other name."""
    return model.removeprefix(HUGGING_FACE) if model.startswith(HUGGING_FACE) else None


def load_own(setting: str, name: str) -> Any:
    """Import the object that ``module:name`` names; the module may lie in the current folder.

    An exception that the module itself raises arrives unchanged, with its traceback.

    Args:
        setting: dotted name of the setting, for the message.
        name: ``module:name``.

    Raises:
        ConfigError: if there is no such module, or it has no such object.
    """
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute) or module_name.startswith("."):
        raise ConfigError(setting, f"must be written module:name, got {name}")
    # A command finds modules in the current folder. A module of raydl may be named by a run folder
    # that the user does not trust. The current folder may be that folder: import nothing from it.
    if not module_name.startswith("raydl.") and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(setting, f"{name} cannot be imported: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(setting, f"{name} cannot be imported: {error}") from error


def instantiate(setting: str, name: str) -> Any:
    """Import and call the class or function that ``module:Class`` names.

    Args:
        setting: dotted name of the setting, for the message.
        name: ``module:Class`` or ``module:function``.

    Raises:
        ConfigError: if it cannot be imported or needs arguments.
    """
    make = load_own(setting, name)
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ConfigError(
            setting, f"{name} must be a class that needs no arguments: {error}"
        ) from error
    return make()
