"""``raydl train``."""

from __future__ import annotations

from collections.abc import Sequence

from raydl.cli.options import STOPPED, parse_train


def train(arguments: Sequence[str]) -> int:
    """Train a model, with workers that come and go."""
    config = parse_train(arguments)
    # Imported here: --help and a wrong option should not wait for torch.
    from raydl.storage import parent_and_name
    from raydl.trainer import Trainer

    result = Trainer.from_config(config).fit()
    metrics = result.metrics
    if result.stopped_by:
        place = result.path
        if "://" in place:  # --storage-path has the rest of it
            place = f"runs/{parent_and_name(place)[1]}"
        print(
            f"stopped by {result.stopped_by} after {metrics['samples']:,} samples\n"
            f"  go on:        the same command with --run-dir {place} --resume"
        )
        return STOPPED.get(result.stopped_by, 1)
    print(
        f"center test accuracy {metrics['center_accuracy']:.2%}  "
        f"({metrics['samples']:,} samples in {metrics['seconds']:.1f} s)\n"
        f"  run:          {result.path}\n"
        f"  curves:       tensorboard --logdir {result.path}    (its page #custom_scalars)\n"
        f"  to send:      raydl report {result.path}"
    )
    return 0
