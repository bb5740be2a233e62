"""Figures of comparisons."""

from raydl.metrics import TIME_PARTS


def figures_of(*, speed=1.0, accuracies=(0.5, 0.92, 0.95)):
    """Return the figures of a run that is evaluated every 100 samples, every 10 s at speed 1."""
    return {
        "center_accuracy": accuracies[-1],
        "communication_share": 0.25,
        "rounds": 30,
        "staleness": 0.5,
        "samples_per_s": 10 * speed,
        "seconds": 10 * len(accuracies) / speed,
        "samples": 100 * len(accuracies),
        "time_parts": dict.fromkeys(TIME_PARTS, 1 / speed),
        "evaluations": [
            {"round": i, "samples": 100 * i, "seconds": 10 * i / speed, "accuracy": a, "loss": 1.0}
            for i, a in enumerate(accuracies, 1)
        ],
        "stopped_by": "",
    }
