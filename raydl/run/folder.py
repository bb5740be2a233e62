"""The folder of a run: configuration, events, checkpoints, result.

    runs/NAME/
        config.json           all settings but the credentials of URIs, package versions, commit
        events.out.tfevents…  for TensorBoard
        checkpoints/          see raydl.checkpoint.store
        handovers/            replicas on their way from workers that leave to those that come
        center.safetensors    the trained weights, once the run has finished
        best.safetensors      the best ones so far, if they are kept: see raydl.checkpoint.best
        result.json           its figures
        status.json           how it stands; requests/ and answers/: raydl.run.control_channel
        driver.lock           who writes here now; drivers/ on object stores: raydl.run.lock
        driver-epochs/        all starts, numbered: raydl.run.driver_epoch

Without ``storage_path`` this is all there is. With it, all of this is there alone but for the
events: they are written to the local folder, and copied whenever a checkpoint is written.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from raydl.config import RunConfig, TrainConfig, dotted, from_dict, to_dict
from raydl.errors import ConfigError, DataError
from raydl.redaction import has_credentials, redact_values
from raydl.run.driver_epoch import DriverEpoch
from raydl.run.lock import held
from raydl.run.versions import installed_version
from raydl.storage import Storage, below, in_words, parent_and_name

_PACKAGES = ("raydl", "ray", "torch", "numpy", "pyarrow")
_EVENTS = "events.out.tfevents"
SUBMISSION = "RAYDL_SUBMISSION"
"""The variable that carries the id of a submission to the drivers of all its attempts."""
_MUST_STAY = (
    "data",
    "model",
    "training.seed",
    "training.batch_size",
    "method.name",
    "optimizer.name",
    "optimizer.options",
    "optimizer.decay_only_matrices",
)
NO_RUN = (
    "no run is there; give the folder that raydl train printed, or the place below "
    "--storage-path where the run is kept"
)
"""Sentence for a folder that holds no run."""


class RunFolder:
    """Files of one run.

    Args:
        config: names the folder, or leaves it to be named by method, model and time.
    """

    def __init__(self, config: TrainConfig) -> None:
        message_id = time.strftime("%Y%m%d-%H%M%S")
        name = re.sub(r"[^\w.-]+", ".", f"{config.method.name}-{config.model}")
        default = f"runs/{name}-{message_id}"
        self.path = Path(config.run.run_dir) if config.run.run_dir else _free(default)
        self.is_remote = config.run.storage_path is not None
        self.root = (
            below(config.run.storage_path, self.path.name)
            if config.run.storage_path is not None
            else str(self.path)
        )
        self.storage = Storage(self.root)
        """Of a driver that holds the folder: it refuses changes once its epoch is over."""
        self._epoch: DriverEpoch | None = None
        self._copied: dict[str, int] = {}

    @contextmanager
    def held(self, *, resume: bool) -> Iterator[None]:
        """Make the folder and keep other drivers out of it until the end of the ``with``.

        Raises:
            DataError: no run is there that could be resumed.
            ConfigError: it can not be written, another driver is at work there, or it holds a
                run that was not asked for.
        """
        if resume:
            self.read_config()  # first: nothing is made where somebody mistyped a name
        setting = "run.storage_path" if self.is_remote else "run.run_dir"
        self.storage.probe(setting)
        try:
            with self.storage.waiting(f"to make {self.path}"):
                self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{self.path} can not be made: {in_words(error)}"
            raise ConfigError("run.run_dir", problem) from error
        check = (lambda: None) if resume else self._refuse_run
        with held(storage := self.storage, setting, check=check) as epoch:
            self.storage, self._epoch = storage.guarded(epoch.check), epoch
            try:
                yield
            finally:
                self.storage, self._epoch = storage, None

    @property
    def epoch(self) -> DriverEpoch:
        """The epoch of this driver, which holds the folder."""
        assert self._epoch is not None, "the folder is not held"
        return self._epoch

    def _refuse_run(self) -> None:
        """Raise a ConfigError if there is a run already."""
        if self.storage.exists("config.json"):
            raise ConfigError(
                "run.run_dir", f"{self.root} already holds a run; add --resume, or name another"
            )

    def load_earlier(self, config: TrainConfig) -> None:
        """Go on with the run in the folder, which is held.

        Raises:
            DataError: no run is there, or its settings can not be read.
            ConfigError: a setting that must not change did.
        """
        # Without credentials, which config.json does not have: they may have changed, or moved.
        before, now = (dotted(redact_values(to_dict(c))) for c in (self.read_config(), config))
        for name in _MUST_STAY:
            if before[name] != now[name]:
                raise ConfigError(
                    name, f"is {now[name]} but the run began with {before[name]}; keep it to resume"
                )
        if self.is_remote:
            self._fetch_events()

    def _fetch_events(self) -> None:
        """Copy the event files of starts on other machines to the local folder."""
        for name in self.storage.list_dir(""):
            local = self.path / name
            if name.startswith(_EVENTS) and not local.exists():
                self.storage.copy_out(name, str(local))
                self._copied[name] = local.stat().st_size

    def write_config(self, config: TrainConfig) -> None:
        """Write all settings with the versions of what runs them, and who submitted it.

        Credentials of URIs are left out, and the settings that had some are listed.
        """
        settings = to_dict(config)
        values = {
            "config": redact_values(settings),
            "redacted": [name for name, v in dotted(settings).items() if has_credentials(v)],
            "versions": _versions(),
            "commit": _commit(),
            "submission": this_submission(),
            "driver_epoch": self.epoch.number,
        }
        self.storage.write_bytes("config.json", json.dumps(values, indent=2).encode())

    def read_config(self) -> TrainConfig:
        """Return the settings that the run began with.

        Raises:
            DataError: no run is there, or its settings can not be read.
        """
        try:
            values = json.loads(self.storage.read_bytes("config.json"))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataError(self.root, NO_RUN) from error
        except ValueError as error:
            raise DataError(self.root, f"its config.json is damaged: {error}") from error
        except OSError as error:
            raise DataError(self.root, f"it can not be read: {in_words(error)}") from error
        if not _is_of_raydl(values):
            raise DataError(self.root, "no run is there: its config.json is not of raydl")
        return from_dict(TrainConfig, values["config"])

    def redacted_settings(self) -> list[str]:
        """Return the settings, by dotted name, whose credentials ``config.json`` does not have."""
        try:
            values = json.loads(self.storage.read_bytes("config.json"))
        except (OSError, ValueError):
            return []
        found = values.get("redacted") if _is_of_raydl(values) else None
        return found if isinstance(found, list) else []

    def begun_by(self) -> str | None:
        """Return the id of the submission that wrote ``config.json``; None: none did.

        Raises:
            OSError: the storage does not answer.
        """
        try:
            values = json.loads(self.storage.read_bytes("config.json"))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        return values.get("submission") if _is_of_raydl(values) else None

    def write_result(self, result: dict[str, Any]) -> None:
        """Write the figures of the run."""
        self.storage.write_bytes(
            "result.json", json.dumps(redact_values(result), indent=2).encode()
        )

    def publish_events(self) -> None:
        """Copy the local event files that have grown to where the run is kept, if elsewhere.

        Raises:
            OSError: one could not be copied; the message is a sentence.
        """
        if not self.is_remote:
            return
        try:
            for path in sorted(self.path.glob(f"{_EVENTS}*")):
                self._publish(path)
        except OSError as error:
            raise OSError(
                f"the curves in {self.path} could not be copied: {in_words(error)}"
            ) from error

    def _publish(self, path: Path) -> None:
        size = path.stat().st_size  # before it is read: what comes meanwhile is copied next time
        if self._copied.get(path.name) != size:
            self.storage.copy_in(str(path), path.name)
            self._copied[path.name] = size


def this_submission() -> str | None:
    """Return the id of the submission that this process is an attempt of; None: of none."""
    return os.environ.get(SUBMISSION)


def open_run(path: str) -> RunFolder:
    """Return the folder of a run that is there, from its path or URI."""
    parent, name = parent_and_name(path)
    storage = parent if "://" in path else None
    run = RunConfig(run_dir=name if storage else path, storage_path=storage)
    return RunFolder(TrainConfig(run=run))


def _is_of_raydl(values: Any) -> bool:
    """Whether the content of a ``config.json`` is what ``RunFolder.write_config`` writes."""
    return (
        isinstance(values, dict) and "versions" in values and isinstance(values.get("config"), dict)
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = installed_version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _commit() -> str | None:
    """Return the commit of raydl's own sources, if they lie in a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _free(default: str) -> Path:
    """Return this folder or, where a run of the same second has it, one with a number more."""
    names = itertools.chain([default], (f"{default}-{n}" for n in itertools.count(2)))
    return next(path for path in map(Path, names) if not path.exists())
