"""Figures of several runs, and runs that are not trained."""

import json
from pathlib import Path

from raydl.config import to_dict
from raydl.metrics import TIME_PARTS


def figures_of(*, speed=1.0, accuracies=(0.5, 0.92, 0.95)):
    """Return the figures of a run that is evaluated every 100 samples, every 10 s at speed 1."""
    return {
        "center_accuracy": accuracies[-1],
        "center_loss": 1.0,
        "communication_share": 0.25,
        "rounds": 30,
        "staleness": 0.5,
        "samples_per_s": 10 * speed,
        "seconds": 10 * len(accuracies) / speed,
        "samples": 100 * len(accuracies),
        "bytes": 1000 * len(accuracies),
        "messages": 4 * len(accuracies),
        "time_parts": dict.fromkeys(TIME_PARTS, 1 / speed),
        "evaluations": [
            {
                "round": i,
                "samples": 100 * i,
                "seconds": 10 * i / speed,
                "bytes": 1000 * i,
                "messages": 4 * i,
                "accuracy": a,
                "loss": 1.0,
            }
            for i, a in enumerate(accuracies, 1)
        ],
        "stopped_by": "",
    }


class FakeFit:
    """A fake trainer that writes the folder of a run.

    Args:
        results: figures or errors by key, or by the first part of a key.
        key: returns the key of a run.
    """

    def __init__(self, results=None, *, key=lambda c: (c.method.name, c.training.seed)):
        self.results = results or {}
        self.key = key
        self.done = []

    def __call__(self, config):
        key = self.key(config)
        self.done.append(key)
        result = self.results.get(key, self.results.get(key[0], figures_of()))
        folder = Path(config.run.run_dir)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"config": to_dict(config), "versions": {}}))
        if isinstance(result, BaseException):
            raise result
        (folder / "result.json").write_text(json.dumps(result))
        return result
