"""Scores the newest or the best center of a run, from the run's folder alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from raydl.checkpoint.best import read_best
from raydl.checkpoint.store import CheckpointStore
from raydl.config import TrainConfig
from raydl.config.custom_code import hugging_face_folder
from raydl.core.state_names import own_keys
from raydl.data import Batches, Dataset, load
from raydl.data.generators import callers_generators_kept
from raydl.data.schema import Schema
from raydl.errors import DataError, UntrustedCodeError
from raydl.run.folder import RunFolder, open_run
from raydl.run.resume import schema_of_run
from raydl.storage import below
from raydl.tasks import build_model, preparation, shape_for, task_on
from raydl.worker.evaluator import score

_OWN_TASKS = (
    "auto", "classification", "regression", "raydl.tasks:Classification",
    "raydl.tasks:HuggingFace", "raydl.tasks:LanguageModel", "raydl.tasks:LossFromForward",
    "raydl.tasks:ModelAndLoss", "raydl.tasks:Regression",
)  # fmt: skip
"""raydl's own tasks, which need no trust, as ``config.json`` names them."""


@callers_generators_kept()
def score_run(
    path: str,
    *,
    data: str | None = None,
    best: bool = False,
    trust: bool | Callable[[UntrustedCodeError], bool] = False,
    note: Callable[[str], None] = lambda sentence: warnings.warn(sentence, RuntimeWarning, 2),
) -> dict[str, float]:
    """Return the metrics of a run's newest center, or its best, on its test set.

    Args:
        path: the run's folder, a path or URI.
        data: source of the data, instead of the run's own; or the same with its credentials, which
            ``config.json`` omits. Its classes are those of the run by their names, in any order.
        best: score the best center instead of the newest; it exists with ``checkpoint.keep_best``.
        trust: whether to import and run a user's model or task that ``config.json`` names, or a
            function that decides it. Everybody with write access to the folder can name any
            function that can be imported here.
        note: called with a sentence if a metric is NaN or infinite, or if the classes of other data
            cannot be compared with those of the run.

    Raises:
        UntrustedCodeError: the folder names code that is not raydl's; nothing was imported.
        CheckpointError: there is no checkpoint or no best center.
        DataError: there is no run, or the data cannot be read or do not fit the model.
    """
    folder = open_run(path)
    config = folder.read_config()
    _require_trust(folder, config, trust)
    store = CheckpointStore(folder.storage)
    center = read_best(folder.storage)[0] if best else store.read_center()[0]
    schema = schema_of_run(folder)
    if data and schema is None:
        note("an earlier version made the run and kept no names of its classes: labels are numbers")
    dataset = _test_data(folder, config, data, schema)
    task = task_on(None, dataset.train.shape, config)
    torch.set_num_threads(1)
    prepare = preparation(task, dataset, config, folder.normalization())
    shape, _ = shape_for(task, Batches(dataset.train, prepare))
    model = build_model(task, shape, seed=config.training.seed)
    try:
        model.load_state_dict(own_keys(model, center))
    except RuntimeError as error:
        raise DataError(dataset.source, f"does not fit the run's model: {error}") from error
    return score(task, model, Batches(dataset.test, prepare), config, note=note)


def code_named(config: TrainConfig) -> tuple[tuple[str, str], ...]:
    """Return pairs (setting, ``module:name``) of the code that is not raydl's and would run."""
    if config.task not in _OWN_TASKS:
        return (("task", config.task),)
    is_folder = hugging_face_folder(config.model) is not None  # none of its code runs
    is_named = ":" in config.model and not is_folder
    is_users = is_named and not config.model.startswith("torchvision:")
    return (("model", config.model),) if is_users else ()


def _require_trust(
    folder: RunFolder, config: TrainConfig, trust: bool | Callable[[UntrustedCodeError], bool]
) -> None:
    """Raise an UntrustedCodeError if the folder names code that may not run."""
    names = code_named(config)
    if not names or trust is True:
        return
    error = UntrustedCodeError(below(folder.root, "config.json"), names)
    if trust is False or not trust(error):
        raise error


def _test_data(
    folder: RunFolder, config: TrainConfig, data: str | None, schema: Schema | None
) -> Dataset:
    source, seed = data or config.data, config.training.seed
    try:
        return load(source, seed=seed, input=config.input, like=schema, task=config.task)
    except DataError as error:
        if data or "data" not in folder.redacted_settings():
            raise
        raise DataError(
            error.source,
            f"{error.problem}; config.json does not hold the credentials of this URI: set them in "
            f"the environment, or give the whole URI as --data",
        ) from error
