"""``raydl train``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raydl.cli.options import parse_train, print_lines
from raydl.config.run import RUNS
from raydl.core.progress import AXES
from raydl.errors import STOPPED
from raydl.ray_backend import session as ray_session

if TYPE_CHECKING:
    from raydl.run.result import Result

_NO_METRICS = (*AXES,)
"""Values of an evaluation that are no metrics of the task."""


def train(arguments: Sequence[str]) -> int:
    """Train a model with elastic workers."""
    config = parse_train(arguments)
    if config.scaling.max_workers and _may_exist(config.data):
        ray_session.begin(has_forks=config.scaling.fork_server)
    # Imported here: --help and a wrong option should not wait for torch.
    from raydl.metrics.tensorboard import viewing_command
    from raydl.run.trainer import Trainer
    from raydl.storage import parent_and_name

    result = Trainer.from_config(config).fit()
    metrics = result.metrics
    if result.stopped_by:
        folder = config.run.run_dir or result.path
        is_kept = config.run.storage_path is not None or "://" in folder
        if config.run.run_dir is None and is_kept:  # in the folder that --storage-path names
            folder = f"{RUNS}/{parent_and_name(folder)[1]}"
        option = "" if config.run.name else f"--run-dir {folder} "
        print_lines(
            f"stopped by {result.stopped_by} after {metrics['samples']:,} samples\n"
            f"  resume:       the same command with {option}--resume"
        )
        return STOPPED.get(result.stopped_by, 1)
    print_lines(
        f"center test {_last_scores(metrics)}  "
        f"({metrics['samples']:,} samples in {metrics['seconds']:.1f} s)\n"
        f"{_end_and_best(result)}"
        f"  run:          {result.path}\n"
        f"  curves:       {viewing_command(result.path)}    (its page #custom_scalars)\n"
        f"  report:       raydl report {result.path}"
    )
    return 0


def _may_exist(source: str) -> bool:
    """Whether data may exist, by a quick check: a mistyped path should not wait for Ray."""
    is_name = source.partition(":")[0] in ("digits", "synthetic", "text")
    return is_name or "://" in source or "*" in source or os.path.exists(source)


def _end_and_best(result: Result) -> str:
    """Return a line on why the run ended early, if it did, and one on the best center, if kept."""
    from raydl.checkpoint.best import FILE  # imports torch
    from raydl.storage import below  # imports PyArrow

    reason, best = result.metrics.get("ended_because"), result.metrics.get("best")
    lines = f"  ended:        {reason}\n" if reason else ""
    if best:
        file = below(result.path, FILE)
        lines += f"  best:         {_scores(best)} after {best['samples']:,} samples, in {file}\n"
    return lines


def _last_scores(metrics: Mapping[str, Any]) -> str:
    if metrics["lacks_score"]:
        return "scores: the last center was not evaluated"
    evaluations = metrics["evaluations"]
    return _scores(evaluations[-1]) if evaluations else "scores: none"


def _scores(evaluation: Mapping[str, Any]) -> str:
    """Return the metrics of an evaluation as text; of a classifier, the accuracy alone."""
    from raydl.core.scores import AVERAGED

    scores = {name: evaluation[name] for name in evaluation if name not in _NO_METRICS}
    number = scores.pop(f"{AVERAGED}centers", None)
    if number is None:
        return _in_words(scores)
    averaged = {n[len(AVERAGED) :]: scores.pop(n) for n in [*scores] if n.startswith(AVERAGED)}
    own = _in_words(scores)
    return f"{own}; the mean of {number:.0f} centers has {_in_words(averaged)}"


def _in_words(scores: dict[str, Any]) -> str:
    """Return metrics as text; of a classifier, the accuracy alone."""
    if set(scores) == {"accuracy", "loss"}:
        scores.pop("loss")
    accuracy = scores.pop("accuracy", None)
    texts = [] if accuracy is None else [f"accuracy {accuracy:.2%}"]
    return ", ".join(texts + [f"{name} {value:.4g}" for name, value in scores.items()])
