"""``raydl methods`` and ``raydl models`` list what can be chosen."""

from __future__ import annotations

from collections.abc import Sequence

from raydl.cli.options import print_table
from raydl.errors import ConfigError


def list_methods(arguments: Sequence[str]) -> int:
    """List the training methods."""
    _check_takes_nothing("raydl methods", arguments)
    from raydl.core.methods import METHODS

    rows = [
        (r.name, r.strategy, str(r.period), f"{r.lr:g}", f"{r.momentum:g}", r.sentence)
        for r in METHODS.values()
    ]
    print_table(("method", "strategy", "period", "lr", "momentum", "what it does"), rows)
    print("\nequations and sources: docs/algorithms.md; your own: --method module:Class")
    return 0


def list_models(arguments: Sequence[str]) -> int:
    """List the models."""
    _check_takes_nothing("raydl models", arguments)
    from raydl.models import MODELS

    rows = [
        (name, row.input_size, f"{row.num_parameters:,}", row.sentence)
        for name, row in MODELS.items()
    ]
    print_table(("model", "made for", "parameters", "what it is"), rows, numbers=("parameters",))
    print(
        "\nparameters: with 1000 classes at 224x224, else with 10; for texts with a vocabulary"
        "\nof 256 at 128 tokens, of 50257 at 1024; sources: docs/models.md"
        "\nany other: --model torchvision:NAME, --model module:function"
    )
    return 0


def _check_takes_nothing(command: str, arguments: Sequence[str]) -> None:
    rest = [word for word in arguments if word not in ("-h", "--help")]
    if rest:
        raise ConfigError(command, f"takes no options, got {' '.join(rest)}")
