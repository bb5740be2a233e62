"""``raydl.tune``: runs as trials of Ray Tune.

A trial is a run with workers of its own, which join and leave as in any run. The trial itself only
drives them, so it reserves next to nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ray import tune

import raydl
from raydl.checkpoint.store import CheckpointStore
from raydl.config import TrainConfig, dotted, from_dict, to_dict
from raydl.core.callbacks import Callback
from raydl.core.worker_group import Evaluated
from raydl.errors import ConfigError, DataError
from raydl.storage import Storage, below, open_filesystem

_CPUS_OF_A_TRIAL = 0.01


def trainable(config: TrainConfig) -> Callable[[Mapping[str, Any]], None]:
    """Return what ``ray.tune.Tuner`` trains: a run for each set of parameters.

    A parameter is a setting by its dotted name: ``{"optimizer.lr": tune.loguniform(0.01, 1)}``.
    Each score of the center is reported: ``accuracy``, ``loss``, and so on, with ``samples``,
    ``epoch`` and ``seconds``, the folder of the run as ``run``, and its newest checkpoint. A trial
    that Tune starts again on the same machine, or with ``run.storage_path`` on any, resumes its
    run.

    Args:
        config: the settings of all trials; ``run.run_dir`` and ``run.resume`` are the trial's.

    Raises:
        ConfigError: if ``run.name`` is set, which all trials would share.
    """
    _refuse_name(config)

    def run_trial(parameters: Mapping[str, Any]) -> None:
        # In the trial's working directory: Tune does not copy it while checkpoints are written.
        folder = os.path.join(os.getcwd(), tune.get_context().get_trial_id())
        settings = _with_parameters(config, parameters)
        _refuse_name(settings)
        resumes = Storage(_root_of(settings, folder)).exists("config.json")
        run = replace(settings.run, run_dir=folder, resume=resumes, progress="none")
        settings = replace(settings, run=run)
        reports = _Reports(_root_of(settings, folder))
        # By its public name: this module is below it.
        trainer = raydl.Trainer.from_config(settings)
        trainer.callbacks = (reports,)
        try:
            trainer.fit()
        except ConfigError as error:  # if the run is complete, and its length the same
            if error.setting != "run.resume" or not reports.repeat_last():
                raise

    resources: Callable[[Mapping[str, Any]], None] = tune.with_resources(
        run_trial, {"CPU": _CPUS_OF_A_TRIAL}
    )
    return resources


def _refuse_name(config: TrainConfig) -> None:
    """Raise a ConfigError if the settings name a run."""
    if config.run.name is not None:
        raise ConfigError(
            "run.name",
            f"cannot be set for trials, which have folders of their own, got {config.run.name}; "
            f"name the search: ray.tune.RunConfig(name=...)",
        )


class _Reports(Callback):
    """Reports each score to Tune, with a checkpoint if there is a new one."""

    def __init__(self, run: str) -> None:
        self._run, self._store = run, CheckpointStore(Storage(run))
        self._reported = ""

    def evaluated(self, evaluated: Evaluated) -> None:
        """Report a score; Tune may end the trial here."""
        progress = evaluated.progress
        values = {
            **evaluated.metrics,
            "samples": progress.num_samples,
            "epoch": progress.epoch,
            "seconds": progress.seconds,
            "run": self._run,
        }
        tune.report(values, checkpoint=self._new_checkpoint())

    def repeat_last(self) -> bool:
        """Report the last score of a complete run again; return whether the run is complete."""
        try:
            result = raydl.Result.from_path(self._run)
        except DataError:  # it has not ended
            return False
        if result.stopped_by or not Storage(self._run).exists("center.safetensors"):
            return False
        if scores := result.metrics["evaluations"]:
            values = {name: value for name, value in scores[-1].items() if name != "round"}
            values |= {"epoch": self._store.read()[0].progress.epoch, "run": self._run}
            tune.report(values, checkpoint=self._new_checkpoint())
        return True

    def _new_checkpoint(self) -> tune.Checkpoint | None:
        names = self._store.names()
        if not names or names[-1] == self._reported:
            return None
        self._reported = names[-1]
        return _checkpoint_at(below(self._store.root, f"checkpoints/{names[-1]}"))


def _checkpoint_at(place: str) -> tune.Checkpoint:
    """Return the checkpoint in a local folder or at a URI."""
    if "://" not in place:
        return tune.Checkpoint.from_directory(place)
    filesystem, path = open_filesystem(place)
    return tune.Checkpoint(path, filesystem)


def _root_of(config: TrainConfig, folder: str) -> str:
    """Return where the run of a local folder is kept."""
    if config.run.storage_path is None:
        return folder
    return below(config.run.storage_path, os.path.basename(folder))


def _with_parameters(config: TrainConfig, parameters: Mapping[str, Any]) -> TrainConfig:
    """Return the settings with those of a trial.

    Raises:
        ConfigError: if a parameter is no setting.
    """
    values = to_dict(config)
    known = dotted(values)
    for name, value in parameters.items():
        if name not in known:
            raise ConfigError(
                "param_space", f"has {name!r}, which is no setting; give dotted names: optimizer.lr"
            )
        *groups, last = name.split(".")
        inner = values
        for group in groups:
            inner = inner[group]
        inner[last] = value
    return from_dict(TrainConfig, values)
