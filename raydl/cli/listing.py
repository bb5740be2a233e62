"""What there is to choose from: ``raydl methods``, ``raydl models``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from raydl.cli.options import print_table


def list_methods(arguments: Sequence[str]) -> int:
    """List the training methods."""
    from raydl.methods import METHODS

    rows = [
        (r.name, r.schedule, str(r.period), f"{r.lr:g}", f"{r.momentum:g}", r.sentence)
        for r in METHODS.values()
    ]
    print_table(("method", "schedule", "period", "lr", "momentum", "what it does"), rows)
    print("\nequations and sources: docs/algorithms.md; your own: --method module:Class")
    return 0


def list_models(arguments: Sequence[str]) -> int:
    """List the models."""
    from raydl.models import MODELS

    rows = [(name, inspect.getdoc(model) or "") for name, model in MODELS.items()]
    print_table(("model", "what it is"), [(n, doc.split("\n\n")[0]) for n, doc in rows])
    return 0
