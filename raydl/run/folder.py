"""The folder of a run: configuration, events, checkpoints, result.

    runs/NAME/
        config.json           settings without credentials, package versions, commit
        events.out.tfevents…  for TensorBoard
        history-….jsonl       what happened and was decided: see raydl.run.history
        checkpoints/          see raydl.checkpoint.store
        handovers/            replicas of workers that leave, for their replacements
        center.safetensors    the trained weights, once the run has finished
        best.safetensors      the best weights so far, if kept: see raydl.checkpoint.best
        result.json           the figures of the run
        status.json           its status; requests/ and answers/: see raydl.run.control_channel
        driver.lock           the present driver; drivers/ on object stores: see raydl.run.lock
        driver-epochs/        all starts, numbered: see raydl.run.driver_epoch

With ``storage_path`` all files are there. Only events and history are first written to the local
folder, and copied with every checkpoint.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

from raydl.checkpoint.figures import read_figures
from raydl.config import InputConfig, RunConfig, TrainConfig, dotted, from_dict, to_dict
from raydl.config.run import METRIC_LINES, RUNS, TRACKER_STATES
from raydl.config.typed import Count, typed
from raydl.errors import CheckpointError, ConfigError, DataError
from raydl.run.driver_epoch import DriverEpoch
from raydl.run.lock import held
from raydl.run.versions import installed_version
from raydl.storage import Storage, below, in_words, parent_and_name
from raydl.text.redaction import has_credentials, redact_values

_PACKAGES = ("raydl", "ray", "torch", "numpy", "pyarrow")
_EVENTS = "events.out.tfevents"
HISTORY = "history-"
"""Beginning of the names of the files of a history; see ``raydl.run.history``."""
_CURVES = (_EVENTS, TRACKER_STATES, METRIC_LINES, HISTORY)
"""Beginnings of the names of the files that a driver writes to its local folder."""
SUBMISSION = "RAYDL_SUBMISSION"
"""Environment variable with the id of the submission, for the drivers of all its attempts."""
_FIXED_SETTINGS = (
    "data",
    "input.target",
    "model",
    "training.seed",
    "training.batch_size",
    "method.name",
    "optimizer.name",
    "optimizer.options",
    "optimizer.decay_only_matrices",
    "optimizer.param_groups",
)
NO_RUN = (
    "no run is there; give the folder that raydl train printed, or the place below "
    "--storage-path where the run is kept"
)
"""Problem of a folder without a run."""


class _ConfigOfAll(TypedDict):
    config: dict[str, Any]
    versions: dict[str, str]


class ConfigFile(_ConfigOfAll, total=False):
    """The content of ``config.json``; that of earlier versions lacks some."""

    redacted: list[str]
    normalization: dict[str, list[float]] | dict[str, dict[str, list[float]]] | None
    schema: dict[str, Any] | None
    commit: str | None
    submission: str | None
    driver_epoch: Count


def read_config_file(storage: Storage) -> ConfigFile:
    """Return the content of a run's ``config.json``.

    Args:
        storage: the run's folder.

    Raises:
        OSError: it is absent or cannot be read.
        ValueError: it is damaged.
        DataError: it is the ``config.json`` of another program.
    """
    values = storage.read_json("config.json", object)
    if not isinstance(values, dict) or not {"config", "versions"} <= values.keys():
        raise DataError(storage.root, "no run is there: its config.json is not of raydl")
    return typed(ConfigFile, values)


def with_index_dir(input: InputConfig, folder: str) -> InputConfig:
    """Return settings by which indexes of large files are kept beside the local folder of a run."""
    return replace(input, index_dir=input.index_dir or str(Path(folder).parent / ".index"))


class RunFolder:
    """Files of one run.

    Args:
        config: names the folder; by default it is named after method, model and time.
    """

    def __init__(self, config: TrainConfig) -> None:
        name = re.sub(r"[^\w.-]+", ".", f"{config.method.name}-{config.model}")
        default = f"{RUNS}/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.path = Path(config.run.folder) if config.run.folder else _free(default)
        self._setting = "run.name" if config.run.name else "run.run_dir"
        self.is_remote = config.run.storage_path is not None
        self.root = (
            below(config.run.storage_path, self.path.name)
            if config.run.storage_path is not None
            else str(self.path)
        )
        self.storage = Storage(self.root)
        """While a driver holds the folder, this refuses changes once its epoch is over."""
        self._epoch: DriverEpoch | None = None
        self._copied: dict[str, tuple[int, int]] = {}

    @contextmanager
    def held(self, *, resume: bool) -> Iterator[None]:
        """Create the folder, and hold it until the end of the ``with``.

        Args:
            resume: the folder must hold a run; otherwise it must not hold one.

        Raises:
            DataError: there is no run to resume.
            ConfigError: the folder cannot be written, another driver holds it, or it holds a run
                that is not to be resumed.
        """
        if resume:
            self.read_config()  # first: a mistyped name must not create a folder
        setting = "run.storage_path" if self.is_remote else "run.run_dir"
        self.storage.probe(setting)
        try:
            with self.storage.waiting(f"to make {self.path}"):
                self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f": {self.path} cannot be made: {in_words(error)}"
            raise ConfigError("run.run_dir", problem) from error
        check = (lambda: None) if resume else self._refuse_run
        with held(storage := self.storage, setting, check=check) as epoch:
            self.storage, self._epoch = storage.guarded(epoch.check), epoch
            try:
                self.storage.delete_uploads()
                yield
            finally:
                self.storage, self._epoch = storage, None

    @property
    def epoch(self) -> DriverEpoch:
        """The epoch of this driver, which must hold the folder."""
        assert self._epoch is not None, "the folder is not held"
        return self._epoch

    def _refuse_run(self) -> None:
        """Raise a ConfigError if the folder holds a run."""
        if self.storage.exists("config.json"):
            raise ConfigError(
                self._setting,
                f": {self.root} already holds a run; add --resume to continue it, or choose "
                f"another name",
            )
        if self.is_remote and any(p.name.startswith(_CURVES) for p in self.path.iterdir()):
            raise ConfigError(
                "run.run_dir",
                f": {self.path} on this machine holds the curves of another run; move it away, or "
                f"choose another name",
            )

    def load_earlier(self, config: TrainConfig) -> None:
        """Check the settings against those of the run in the folder, and fetch its events.

        Raises:
            DataError: there is no run, or its settings cannot be read.
            ConfigError: a setting that must not change has changed.
        """
        # Without credentials, which config.json omits: they may have changed, or moved.
        before, now = (dotted(redact_values(to_dict(c))) for c in (self.read_config(), config))
        for name in _FIXED_SETTINGS:
            if before[name] != now[name]:
                raise ConfigError(
                    name, f"is {now[name]} but the run began with {before[name]}; keep it to resume"
                )
        if not self.is_remote:
            return
        for name in self.storage.list_dir(""):
            local = self.path / name
            if name.startswith(_CURVES) and self._is_newer(name, local):
                self.storage.copy_out(name, str(local))
                self._copied[name] = _version_of(local)

    def _is_newer(self, name: str, local: Path) -> bool:
        """Whether a file of curves in the storage is of a later start on another machine.

        Each start has event files of its own. The other files go on, and the longer is the newer.
        """
        if not local.exists():
            return True
        is_of_all = not name.startswith(_EVENTS)
        return is_of_all and self.storage.num_bytes(name) > local.stat().st_size

    def write_config(
        self,
        config: TrainConfig,
        *,
        normalization: Mapping[str, Any] | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> None:
        """Write all settings, the versions of the packages, and the submission.

        Credentials of URIs are omitted; the file lists the settings that had some.

        Args:
            config: the settings.
            normalization: mean and standard deviation, by which images are normalized, per
                channel, or the numbers of a table, per column.
            schema: what a sample of the data holds, as ``raydl.data.schema.to_json`` has it.
        """
        settings = to_dict(config)
        values = {
            "config": redact_values(settings),
            "redacted": [name for name, v in dotted(settings).items() if has_credentials(v)],
            "normalization": normalization,
            "schema": schema or {},
            "versions": _versions(),
            "commit": _commit(),
            "submission": this_submission(),
            "driver_epoch": self.epoch.number,
        }
        self.storage.write_bytes("config.json", json.dumps(values, indent=2).encode())

    def read_config(self) -> TrainConfig:
        """Return the settings with which the run began.

        Raises:
            DataError: there is no run, or its settings cannot be read.
        """
        return from_dict(TrainConfig, self._read_config()["config"])

    def normalization(self) -> Mapping[str, Any] | None:
        """Return mean and standard deviation by which the run normalizes, as ``write_config``.

        None: it does not, or an earlier version wrote its ``config.json``.

        Raises:
            DataError: there is no run, or its settings cannot be read.
        """
        return self._read_config().get("normalization")

    def schema(self) -> dict[str, Any] | None:
        """Return what a sample of the run's data holds, for ``raydl.data.schema.from_json``.

        Empty: it is not known. None: an earlier version wrote its ``config.json``.

        Raises:
            DataError: there is no run, or its settings cannot be read.
        """
        return self._read_config().get("schema")

    def _read_config(self) -> ConfigFile:
        try:
            return read_config_file(self.storage)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataError(self.root, NO_RUN) from error
        except ValueError as error:
            raise DataError(self.root, f"its config.json is damaged: {error}") from error
        except OSError as error:
            raise DataError(self.root, f"it cannot be read: {in_words(error)}") from error

    def is_complete(self) -> bool:
        """Return whether the newest start trained to the end and wrote all files of the run.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        try:
            config = read_config_file(self.storage)
            is_newest = self.finished_result().get("driver_epoch", 0) == config.get("driver_epoch")
            return is_newest and self.storage.exists("center.safetensors")
        except (FileNotFoundError, ValueError, DataError):
            return False
        except OSError as error:
            raise CheckpointError(self.root, f"cannot be read: {in_words(error)}") from error

    def finished_result(self) -> dict[str, Any]:
        """Return the figures of a start that trained to the end; empty without one.

        Raises:
            OSError: the storage failed.
        """
        try:
            result = read_figures(self.storage)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return {}
        return {} if result.get("stopped_by") else result

    def redacted_settings(self) -> list[str]:
        """Return the dotted names of the settings whose credentials ``config.json`` omits."""
        try:
            return read_config_file(self.storage).get("redacted", [])
        except (OSError, ValueError, DataError):
            return []

    def begun_by(self) -> str | None:
        """Return the id of the submission that wrote ``config.json``, or None.

        Raises:
            OSError: the storage failed.
        """
        try:
            return read_config_file(self.storage).get("submission")
        except (FileNotFoundError, NotADirectoryError, ValueError, DataError):
            return None

    def write_result(self, result: dict[str, Any]) -> None:
        """Write the figures of the run."""
        self.storage.write_bytes(
            "result.json", json.dumps(redact_values(result), indent=2).encode()
        )

    def publish_events(self) -> None:
        """Copy the local files of curves that have changed to a remote folder of the run.

        Raises:
            OSError: a file could not be copied; the message is a sentence.
        """
        if not self.is_remote:
            return
        try:
            for path in sorted(p for p in self.path.iterdir() if p.name.startswith(_CURVES)):
                version = _version_of(path)  # before the copy: later points follow next time
                if self._copied.get(path.name) != version:
                    self.storage.copy_in(str(path), path.name)
                    self._copied[path.name] = version
        except OSError as error:
            raise OSError(
                f"the curves in {self.path} could not be copied: {in_words(error)}"
            ) from error


def _version_of(path: Path) -> tuple[int, int]:
    """Return a pair that differs once a file has changed."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def this_submission() -> str | None:
    """Return the id of the submission to which this process belongs, or None."""
    return os.environ.get(SUBMISSION)


def open_run(path: str) -> RunFolder:
    """Return the folder of an existing run, from its path, its URI, or its name in ``runs``."""
    if path == os.path.basename(path) and not Path(path).exists() and Path(RUNS, path).is_dir():
        path = f"{RUNS}/{path}"
    parent, name = parent_and_name(path)
    storage = parent if "://" in path else None
    run = RunConfig(run_dir=name if storage else path, storage_path=storage)
    return RunFolder(TrainConfig(run=run))


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = installed_version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _commit() -> str | None:
    """Return the commit of raydl's sources, or None outside a checkout of raydl.

    An installed raydl may lie in another project's checkout, below its virtual environment.
    """
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "rev-parse", "--show-prefix", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    prefix, _, commit = result.stdout.strip().partition("\n")
    return commit if prefix == f"{here.parent.name}/{here.name}/" and commit else None


def _free(default: str) -> Path:
    """Return this folder, or if a run of the same second has it, one with a number appended."""
    names = itertools.chain([default], (f"{default}-{n}" for n in itertools.count(2)))
    return next(path for path in map(Path, names) if not path.exists())
