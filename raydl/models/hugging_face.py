"""Models of Hugging Face's transformers in a local folder: ``hf:FOLDER``.

The folder is one that ``save_pretrained`` wrote. Nothing comes from a hub, and no code of the
folder runs: its architecture must be one of the installed transformers.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raydl.errors import ConfigError

PREFIX = "hf:"
_TEXT_FILES = ("tokenizer", "vocab", "merges", "special_tokens", "spiece", "sentencepiece")
"""Beginnings of the names of files of a tokenizer."""


class LocalModel:
    """A model in a local folder.

    Args:
        folder: the folder.

    Raises:
        ConfigError: if the folder has no model.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        try:
            self._config: dict[str, Any] = json.loads(Path(folder, "config.json").read_text())
            (architecture,) = self._config["architectures"]
        except FileNotFoundError as error:
            raise ConfigError(
                "model",
                f"{PREFIX}{folder} must be a local folder with a config.json, as save_pretrained "
                f"writes it; download a model of the hub first: hf download NAME --local-dir DIR",
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                "model", f"{PREFIX}{folder} must name one architecture in its config.json"
            ) from error

        self.architecture: str = architecture
        """Name of its class in transformers."""

    @property
    def is_causal(self) -> bool:
        """Whether it predicts the next token of a text."""
        return self.architecture.endswith(("ForCausalLM", "LMHeadModel"))

    def build(self) -> nn.Module:
        """Return the model with the weights of the folder.

        Where the folder is not, as on another machine, it has random weights: those of the center
        follow.

        Raises:
            ConfigError: if transformers is not installed, does not know the architecture, or cannot
                read the weights.
        """
        transformers = _transformers()
        kind: Any = getattr(transformers, self.architecture, None)
        if not hasattr(kind, "from_pretrained"):
            raise ConfigError(
                "model",
                f"{PREFIX}{self.folder} is a {self.architecture}, which transformers "
                f"{transformers.__version__} does not have",
            )
        if not Path(self.folder, "config.json").is_file():
            values = {k: v for k, v in self._config.items() if k != "model_type"}
            config = transformers.AutoConfig.for_model(self._config["model_type"], **values)
            model: nn.Module = kind(config)
            return model.train()
        try:
            # In float32, also where the file has half the bits: small steps add up.
            model = kind.from_pretrained(self.folder, local_files_only=True, dtype=torch.float32)
        except (OSError, ValueError, RuntimeError) as error:
            problem = str(error).splitlines()[0]
            raise ConfigError(
                "model", f"{PREFIX}{self.folder} cannot be read: {problem}"
            ) from error
        return model.train()

    def save(self, weights: Mapping[str, Tensor], target: str) -> None:
        """Write weights as a folder that ``from_pretrained`` reads, with the tokenizer's files."""
        model: Any = self.build()
        model.load_state_dict(weights)
        model.save_pretrained(target)
        source = Path(self.folder)
        for path in source.iterdir() if source.is_dir() else ():
            if path.name.startswith(_TEXT_FILES) and path.is_file():
                shutil.copy(path, target)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "model",
            f"{PREFIX}FOLDER needs transformers, which is not installed: "
            f"pip install 'elastic-raydl[transformers]'",
        ) from error
