"""``raydl.tune``: runs as trials of Ray Tune.

A trial is a run with workers of its own, which join and leave as in any run. The trial itself only
drives them, so it reserves no CPU.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raydl.config import TrainConfig
from raydl.errors import ConfigError, DataError
from raydl.run.progress_reporter import LOGGER
from raydl.run.result import Result
from raydl.run.trainer import Trainer
from raydl.storage import Storage, below
from raydl.tools.runs import with_settings

if TYPE_CHECKING:
    from raydl.ray_backend.ray_tune import TrialReports


def trainable(config: TrainConfig) -> Callable[[Mapping[str, Any]], None]:
    """Return what ``ray.tune.Tuner`` trains: a run for each set of parameters.

    A parameter is a setting by its dotted name: ``{"optimizer.lr": tune.loguniform(0.01, 1)}``.
    Each score of the center is reported: ``accuracy``, ``loss``, and so on, with ``samples``,
    ``epoch``, ``seconds``, ``bytes`` and ``messages``, the folder of the run as ``run``, and its
    newest checkpoint. A trial that Tune starts again on the same machine, or with
    ``run.storage_path`` on any, resumes its run.

    Args:
        config: the settings of all trials; ``run.run_dir`` and ``run.resume`` are the trial's.

    Raises:
        ConfigError: if ``run.name`` is set, which all trials would share.
    """
    _refuse_name(config)
    from raydl.ray_backend.ray_tune import TrialReports, as_trial, trial_folder

    def run_trial(parameters: Mapping[str, Any]) -> None:
        folder = trial_folder()
        settings = with_settings(config, parameters)
        _refuse_name(settings)
        root = _root_of(settings, folder)
        resumes = Storage(root).exists("config.json")
        run = replace(settings.run, run_dir=folder, resume=resumes, progress="none")
        reports = TrialReports(root)
        trainer = Trainer.from_config(replace(settings, run=run))
        trainer.callbacks = (reports,)
        try:
            with events_printed():
                trainer.fit()
        except ConfigError as error:  # if the run is complete, and its length the same
            if error.setting != "run.resume" or not _repeat_last(reports, root):
                raise

    return as_trial(run_trial)


@contextmanager
def events_printed() -> Iterator[None]:
    """Print the events of the run, which Ray shows in the terminal of the search.

    Tune shows a trial as running while its run waits for workers.
    """
    logger, handler = logging.getLogger(LOGGER), logging.StreamHandler(sys.stdout)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _refuse_name(config: TrainConfig) -> None:
    """Raise a ConfigError if the settings name a run."""
    if config.run.name is not None:
        raise ConfigError(
            "run.name",
            f"cannot be set for trials, which have folders of their own, got {config.run.name}; "
            f"name the search: ray.tune.RunConfig(name=...)",
        )


def _repeat_last(reports: TrialReports, root: str) -> bool:
    """Report the last score of a complete run again; return whether the run is complete."""
    try:
        result = Result.from_path(root)
    except DataError:  # it has not ended
        return False
    if result.stopped_by or not Storage(root).exists("center.safetensors"):
        return False
    if scores := result.metrics["evaluations"]:
        reports.repeat(scores[-1])
    return True


def _root_of(config: TrainConfig, folder: str) -> str:
    """Return where the run of a local folder is kept."""
    if config.run.storage_path is None:
        return folder
    return below(config.run.storage_path, os.path.basename(folder))
