"""Scores what a run has kept, from its folder alone."""

from __future__ import annotations

import torch

from raydl.best import read_best
from raydl.checkpoint import CheckpointStore
from raydl.data import Batches, load, preparation_for
from raydl.errors import DataError
from raydl.evaluator import score
from raydl.generators import callers_generators_kept
from raydl.runs.folder import open_run
from raydl.task import build_model, task_on


@callers_generators_kept()
def score_run(path: str, *, data: str | None = None, best: bool = False) -> dict[str, float]:
    """Return the metrics of a run's newest center, or its best, on its test set.

    Args:
        path: the run's folder, a path or URI.
        data: another source than the run's own.
        best: score the center that ``checkpoint.keep_best`` has kept.

    Raises:
        CheckpointError: no run, no checkpoint or no best center is there.
        DataError: the data can not be read or are of another kind.
    """
    folder = open_run(path)
    config = folder.read_config()
    store = CheckpointStore(folder.storage)
    center = read_best(folder.storage)[0] if best else store.read_center()[0]
    dataset = load(data or config.data, seed=config.training.seed, input=config.input)
    task = task_on(None, dataset.train.shape, config)
    torch.set_num_threads(1)
    model = build_model(task, dataset.train.shape, seed=config.training.seed)
    try:
        model.load_state_dict(center)
    except RuntimeError as error:
        raise DataError(dataset.source, f"does not fit the run's model: {error}") from error
    test = Batches(dataset.test, preparation_for(dataset, config))
    return score(task, model, test, config)
