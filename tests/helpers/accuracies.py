"""Events of an evaluation with a given accuracy."""

from raydl.core.progress import Progress
from raydl.core.scores import Evaluated


def accuracy_of(value, round=1, **more):
    return Evaluated(
        Progress(round=round, num_samples=10 * round, seconds=1.0), {"accuracy": value}, **more
    )
