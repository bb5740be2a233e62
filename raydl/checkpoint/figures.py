"""The figures of a run in its ``result.json``, as later commands read them."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypedDict

from raydl.config.typed import Amount, Count, Keys, Seconds, typed
from raydl.storage import Storage

Score: TypeAlias = Annotated[dict[str, float], Keys(("samples", "seconds"))]
"""A score of the center: round, samples, seconds, bytes, messages, and each metric."""


class Figures(TypedDict, total=False):
    """The content of ``result.json``: the figures that are read again."""

    samples: Count
    seconds: Seconds
    samples_per_s: Amount | None
    rounds: Count
    center_accuracy: float | None
    center_loss: float | None
    communication_share: Amount | None
    time_parts: dict[str, Seconds]
    staleness: Amount
    period: Amount
    evaluations: list[Score]
    longest_pause_s: Seconds
    faults_fired: list[str]
    first_train_loss: float | None
    exchange_bytes: Amount
    bytes: Count
    messages: Count
    warnings: list[str]
    best: dict[str, float | None] | None
    allreduce: dict[str, Any] | None
    stopped_by: str
    ended_by: str
    ended_because: str
    driver_epoch: Count


def read_figures(storage: Storage) -> dict[str, Any]:
    """Return the figures in ``result.json``.

    Args:
        storage: the run's folder.

    Raises:
        OSError: the file is absent or cannot be read.
        ValueError: it is damaged.
    """
    return {**storage.read_json("result.json", Figures)}


def readable_figures(storage: Storage) -> tuple[dict[str, Any], list[str]]:
    """Return the figures in ``result.json`` that are not damaged, and a sentence for each other.

    Args:
        storage: the run's folder.

    Raises:
        OSError: the file is absent or cannot be read.
        ValueError: it holds no figures.
    """
    figures: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in storage.read_json("result.json", dict[str, Any]).items():
        for part in [[element] for element in value] if isinstance(value, list) else [value]:
            try:
                typed(Figures, {name: part})
            except ValueError as error:
                problems.append(str(error))
            else:
                figures[name] = [*figures.get(name, []), *part] if part is not value else value
    return figures, problems
