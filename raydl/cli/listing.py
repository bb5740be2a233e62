"""``raydl methods`` and ``raydl models``: lists of the known methods and models."""

from __future__ import annotations

from collections.abc import Sequence

from raydl.cli.options import print_table
from raydl.errors import ConfigError


def list_methods(arguments: Sequence[str]) -> int:
    """List the training methods."""
    _refuse_arguments("raydl methods", arguments)
    from raydl.core.methods import METHODS

    rows = [
        (r.name, r.strategy, str(r.period), f"{r.lr:g}", f"{r.momentum:g}", r.sentence)
        for r in METHODS.values()
    ]
    print_table(("method", "strategy", "period", "lr", "momentum", "description"), rows)
    print("\nequations and sources: docs/algorithms.md; your own: --method module:Class")
    return 0


def list_models(arguments: Sequence[str]) -> int:
    """List the models."""
    _refuse_arguments("raydl models", arguments)
    from raydl.models import MODELS

    rows = [
        (name, row.input_size, f"{row.num_parameters:,}", row.sentence)
        for name, row in MODELS.items()
    ]
    print_table(("model", "made for", "parameters", "description"), rows, numbers=("parameters",))
    print(
        "\nparameters: with 1000 classes at 224x224, else with 10 classes; for texts with a"
        "\nvocabulary of 256 at 128 tokens and of 50257 at 1024; sources: docs/models.md"
        "\nother networks: --model torchvision:NAME or --model module:function"
    )
    return 0


def _refuse_arguments(command: str, arguments: Sequence[str]) -> None:
    rest = [word for word in arguments if word not in ("-h", "--help")]
    if rest:
        raise ConfigError(command, f"takes no options, got {' '.join(rest)}")
