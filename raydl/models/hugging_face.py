"""Models of Hugging Face's transformers in a local folder: ``hf:FOLDER``.

The folder is one that ``save_pretrained`` wrote. Nothing comes from a hub, and no code of the
folder runs: its architecture must be one of the installed transformers.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raydl.config.custom_code import HUGGING_FACE
from raydl.errors import ConfigError, how_to_install

_OF_THE_MODEL = (".safetensors", ".bin", ".h5", ".msgpack", ".index.json")
"""Endings of the names of files with weights, which the trained ones replace."""

_WEIGHTS = {"config.json": "*.safetensors", "adapter_config.json": "adapter_model.safetensors"}
"""Names of files with weights, by the file that says that there are some."""


_IGNORED = -100
"""The label that the losses of transformers leave out."""
_GENERATIVE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of models whose loss may compare a position with the label of the next one."""
_OVER_SAMPLES = ("CTC", "RNNT", "TDT")
"""Parts of the names of losses of sequences, which are no means over their labels."""


@dataclass(frozen=True)
class LabelRule:
    """Which labels the mean loss of a model of transformers counts."""

    is_shifted: bool = False
    """Whether the first label of each sequence has no prediction, so that it does not count."""
    ignored: int | None = _IGNORED
    """The label that does not count; None: the loss is a mean over samples."""

    def count(self, labels: Tensor) -> Tensor | int:
        """Return how much labels count, shape [B, ...]; targets that are floats, by sample."""
        if self.ignored is None or labels.is_floating_point():
            return len(labels)
        if self.is_shifted and labels.ndim > 1:
            labels = labels[..., 1:]
        return (labels != self.ignored).sum()


def label_rule_of(model: nn.Module) -> LabelRule | None:
    """Return which labels the loss of a model counts; None: it is no model of transformers."""
    inner: Any = getattr(model, "_orig_mod", model)  # of a compiled model
    if hasattr(inner, "get_base_model"):  # an adapter of PEFT
        inner = inner.get_base_model()
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(inner, transformers.PreTrainedModel):
        return None
    loss = str(getattr(inner, "loss_type", None))
    if any(part in loss for part in _OVER_SAMPLES):
        return LabelRule(ignored=None)
    if loss == "ForSemanticSegmentation":
        return LabelRule(ignored=getattr(inner.config, "semantic_loss_ignore_index", _IGNORED))
    return LabelRule(is_shifted=_is_shifted(inner))


def _is_shifted(model: Any) -> bool:
    """Whether the loss of a model compares each position with the label of the next one.

    Neither names nor settings tell: a decoder like that of BART is a ForCausalLM whose user shifts
    the labels. So the model computes a loss in which the first label alone counts. If it is shifted
    that is no number.
    """
    if not any(kind.__name__.endswith(_GENERATIVE) for kind in type(model).__mro__):
        return False
    tokens = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    labels = torch.tensor([[0, _IGNORED]], device=model.device)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):  # for dropout
            output = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels)
        return not float(output.loss) > 0
    except Exception:  # it needs images or sounds as well
        return not model.config.is_encoder_decoder


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
            if Path(folder, "adapter_config.json").exists():
                raise ConfigError(
                    "model",
                    f"{HUGGING_FACE}{folder} holds an adapter only; train it in your own loop "
                    f"(raydl.attach_trainer), or pass a model of get_peft_model to raydl.Trainer",
                ) from error
            raise ConfigError(
                "model",
                f"{HUGGING_FACE}{folder} must be a local folder with a config.json, as "
                f"save_pretrained writes it; download a model of the hub first: "
                f"hf download NAME --local-dir DIR",
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                "model", f"{HUGGING_FACE}{folder} must name one architecture in its config.json"
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
        if not _is_model(kind, transformers):
            raise ConfigError(
                "model",
                f"{HUGGING_FACE}{self.folder} is a {self.architecture}, which is no model of "
                f"transformers {transformers.__version__}",
            )
        if not Path(self.folder, "config.json").is_file():
            values = {k: v for k, v in self._config.items() if k != "model_type"}
            config = transformers.AutoConfig.for_model(self._config["model_type"], **values)
            model: nn.Module = kind(config)
            return model.train()
        self._check_weights()
        try:
            # In float32, also where the file has half the bits: small steps add up.
            model = kind.from_pretrained(
                self.folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
            )
        except (OSError, ValueError, RuntimeError) as error:
            problem = str(error).splitlines()[0]
            raise ConfigError(
                "model", f"{HUGGING_FACE}{self.folder} cannot be read: {problem}"
            ) from error
        return model.train()

    def _check_weights(self) -> None:
        """Refuse a folder whose weights transformers would unpickle."""
        for config, weights in _WEIGHTS.items():
            if Path(self.folder, config).exists() and not any(Path(self.folder).glob(weights)):
                raise ConfigError(
                    "model",
                    f"{HUGGING_FACE}{self.folder} has no {weights}, and pickled weights (*.bin) "
                    f"are not read; if you trust them, load them with from_pretrained and write "
                    f"them with save_pretrained",
                )

    def save(self, weights: Mapping[str, Tensor], target: str) -> None:
        """Write weights as a folder that ``from_pretrained`` reads, with the other files."""
        model: Any = self.build()
        model.load_state_dict(weights)
        model.save_pretrained(target)
        source = Path(self.folder)
        for path in source.iterdir() if source.is_dir() else ():  # of a tokenizer, for example
            is_new = not Path(target, path.name).exists() and path.is_file()
            if is_new and not path.name.endswith(_OF_THE_MODEL):
                shutil.copy(path, target)


def _is_model(kind: Any, transformers: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "model",
            f"{HUGGING_FACE}FOLDER needs transformers, which is not installed; "
            f"{how_to_install('transformers')}",
        ) from error
