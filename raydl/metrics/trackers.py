"""Experiment trackers beside TensorBoard: JSON lines, MLflow, Weights & Biases.

A tracker shows one run: a resumed run goes on in it, and the steps of its curves, the samples of
all workers, only rise. Points up to the last step of an earlier start are left out, and so are
points up to the last step before the center went back. The id of a tracker's run and its last step
are in ``tracker-NAME.json`` of the run's folder.

The address and the credentials of a server come from the tracker's own environment variables.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol, TypedDict

import numpy as np

from raydl.config.run import METRIC_LINES, TRACKER_STATES
from raydl.config.typed import Within
from raydl.errors import ConfigError, UnknownNameError, how_to_install
from raydl.metrics.writer import MetricsWriter
from raydl.storage import parse_json
from raydl.storage.local_files import LocalFiles
from raydl.text.redaction import redact

_STEP = "samples"
"""Name of the step of a point, among its values."""
_PROJECT = "raydl"
"""Experiment or project, unless the environment names another."""
_STATE_BYTES = 4096
"""Largest state of a tracker that is read."""
_MAX_PARAM_CHARS, _MAX_PARAMS = 500, 100
"""MLflow's limits of a parameter's value, and of parameters in one call."""


class Tracker(Protocol):
    """The calls to a tracker during a run; all of them may fail."""

    def write(self, values: Mapping[str, float], *, step: int, unix_s: float) -> None:
        """Write one point for each tag."""
        ...

    def write_text(self, name: str, markdown: str) -> None:
        """Write a text in place of an earlier one of the name."""
        ...

    def write_image(self, name: str, pixels: np.ndarray, *, step: int) -> None:
        """Write an image, uint8, shape [H, W, 3]."""
        ...

    def finish(self) -> None:
        """End the run."""
        ...


class _StateFile(TypedDict, total=False):
    run_id: str | None
    last_step: Annotated[int, Within(-1, 2**62)]
    num_writers: Annotated[int, Within(0, 2**62)]


class State:
    """The run in a tracker, in a file of the run's folder.

    Args:
        folder: the run's local folder.
        name: name of the tracker.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._files, self._name = LocalFiles(str(folder)), f"{TRACKER_STATES}{name}.json"
        own = self._read()
        self.run_id = own.get("run_id")
        """Id of the run in the tracker; None: it has none yet."""
        self.last_step = own.get("last_step", -1)
        """The largest step that was written; -1: none."""
        self.num_writers = own.get("num_writers", 0) + 1
        """Writers of the run so far: one for each start, and for each failure of the tracker."""

    def _read(self) -> _StateFile:
        try:
            with self._files.open(self._name) as file:
                return parse_json(file.read(_STATE_BYTES), _StateFile)
        except (FileNotFoundError, ValueError):  # the machine stopped while it was written
            return {}

    def save(self) -> None:
        """Write the file, for a start that resumes the run."""
        new = f".{self._name}-{uuid.uuid4().hex}"
        try:
            with self._files.create(new) as file:
                file.write(json.dumps(self._values()).encode())
            self._files.rename(new, self._name)
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.delete(new)
            raise

    def _values(self) -> dict[str, Any]:
        names = ("run_id", "last_step", "num_writers")
        return {name: getattr(self, name) for name in names}


class TrackerWriter:
    """A ``MetricsWriter`` over a tracker, whose steps only rise.

    Args:
        tracker: the tracker.
        state: its run.
    """

    def __init__(self, tracker: Tracker, state: State) -> None:
        self._tracker, self._state = tracker, state
        self._written_to = state.last_step
        """Last step of earlier starts, or before the center went back: later ones are new."""
        self._texts: dict[str, str] = {}
        self._new_texts: set[str] = set()
        state.save()

    def _is_new(self, step: int) -> bool:
        """Whether a point is new; then its step is noted before it is written.

        A score of the center is older than the newest record: it was being computed meanwhile.
        """
        if step <= self._written_to:
            return False
        if step > self._state.last_step:
            self._state.last_step = step
            self._state.save()
        return True

    def scalars(
        self, values: Mapping[str, float], *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write one point for each tag."""
        if self._is_new(num_samples):
            at = time.time() if unix_s is None else unix_s
            self._tracker.write(values, step=num_samples, unix_s=at)

    def text(
        self, name: str, markdown: str, *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Note a text, without credentials of URIs; events are collected."""
        text = redact(markdown)
        self._texts[name] = f"{self._texts.get(name, '')}- {text}\n" if name == "events" else text
        self._new_texts.add(name)

    def image(self, name: str, pixels: np.ndarray, *, num_samples: int) -> None:
        """Write an image, uint8, shape [H, W, 3]."""
        if self._is_new(num_samples):
            self._tracker.write_image(name, pixels, step=num_samples)

    def go_back(self, *, num_samples: int) -> None:
        """Leave out points up to the last step from now on."""
        self._written_to = self._state.last_step

    def flush(self) -> None:
        """Write the texts."""
        number = self._state.num_writers
        for name in sorted(self._new_texts):
            # The texts of an earlier writer stay: this one does not have them.
            full_name = name if number == 1 else f"{name}-{number}"
            self._tracker.write_text(full_name, self._texts[name])
        self._new_texts.clear()

    def close(self) -> None:
        """Write the texts and end the run."""
        self.flush()
        self._tracker.finish()


class JsonLines:
    """Lines ``{"samples": ..., "unix_s": ..., TAG: ...}`` in a file of the run's folder.

    Args:
        folder: the run's local folder.
    """

    def __init__(self, folder: Path) -> None:
        self._files = LocalFiles(str(folder))

    def write(self, values: Mapping[str, float], *, step: int, unix_s: float) -> None:
        """Write one line."""
        finite = {name: value if np.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({_STEP: step, "unix_s": round(unix_s, 3), **finite})
        with self._files.append(METRIC_LINES) as file:
            file.write(f"{line}\n".encode())

    def write_text(self, name: str, markdown: str) -> None:
        """Do nothing: the log and the settings are files of the run's folder already."""

    def write_image(self, name: str, pixels: np.ndarray, *, step: int) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


class Mlflow:
    """A run of MLflow, at ``MLFLOW_TRACKING_URI``.

    Args:
        state: the run; it is created if there is none.
        run_name: name of a new run.
        settings: values by dotted name, the parameters of a new run.

    Raises:
        OSError: if the server cannot be reached, or refuses the run.
    """

    def __init__(self, state: State, run_name: str, settings: Mapping[str, Any]) -> None:
        # Its own default, eight attempts of up to two minutes, would outlast the run.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        with _as_os_error("MLflow"):
            from mlflow import entities
            from mlflow.tracking import MlflowClient

            self._entities, self._client = entities, MlflowClient()
            if state.run_id is None:
                state.run_id = self._new_run(run_name)
                state.save()
                self._write_settings(state.run_id, settings)
            else:
                self._client.update_run(state.run_id, status="RUNNING")
        self._run_id: str = state.run_id

    def _new_run(self, name: str) -> str:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
        run_id: str = self._client.create_run(experiment_id, run_name=name).info.run_id
        return run_id

    def _write_settings(self, run_id: str, settings: Mapping[str, Any]) -> None:
        params = [
            self._entities.Param(name, str(value)[:_MAX_PARAM_CHARS])
            for name, value in settings.items()
        ]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(run_id, params=params[start : start + _MAX_PARAMS])

    def write(self, values: Mapping[str, float], *, step: int, unix_s: float) -> None:
        """Write one point for each tag."""
        at_ms = round(unix_s * 1000)
        points = [self._entities.Metric(n, float(v), at_ms, step) for n, v in values.items()]
        with _as_os_error("MLflow"):
            self._client.log_batch(self._run_id, metrics=points)

    def write_text(self, name: str, markdown: str) -> None:
        """Write a text as the artifact NAME.md."""
        with _as_os_error("MLflow"):
            self._client.log_text(self._run_id, markdown, f"{name}.md")

    def write_image(self, name: str, pixels: np.ndarray, *, step: int) -> None:
        """Write an image."""
        with _as_os_error("MLflow"):
            self._client.log_image(self._run_id, pixels, key=name, step=step)

    def finish(self) -> None:
        """Mark the run as finished."""
        with _as_os_error("MLflow"):
            self._client.set_terminated(self._run_id)


class WandB:
    """A run of Weights & Biases; ``WANDB_MODE=offline`` keeps it in the run's folder.

    Args:
        state: the run; it is created if there is none.
        folder: the run's local folder, for the files of the run.
        settings: values by dotted name, the configuration of the run.

    Raises:
        OSError: if the run cannot begin.
    """

    def __init__(self, state: State, folder: Path, settings: Mapping[str, Any]) -> None:
        self._state = state
        if state.run_id is None:
            state.run_id = uuid.uuid4().hex[:8]
            state.save()
        with _as_os_error("Weights & Biases"):
            import wandb

            self._wandb = wandb
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT), id=state.run_id,
                name=folder.name, dir=str(folder), config=dict(settings), resume="allow",
                reinit="create_new",  # a run of the user's own program stays as it is
                settings=wandb.Settings(console="off", silent=True),
            )  # fmt: skip
            # Its own steps must rise from call to call; the curves are drawn over the samples.
            self._run.define_metric(_STEP)
            self._run.define_metric("*", step_metric=_STEP)

    def write(self, values: Mapping[str, float], *, step: int, unix_s: float) -> None:
        """Write one point for each tag."""
        with _as_os_error("Weights & Biases"):
            self._log({**values, _STEP: step, "unix_s": unix_s})

    def write_text(self, name: str, markdown: str) -> None:
        """Write a text as the file NAME.md of the run."""
        with _as_os_error("Weights & Biases"):
            Path(self._run.dir, f"{name}.md").write_text(markdown)

    def write_image(self, name: str, pixels: np.ndarray, *, step: int) -> None:
        """Write an image."""
        with _as_os_error("Weights & Biases"):
            self._log({name: self._wandb.Image(pixels), _STEP: step})

    def _log(self, values: dict[str, Any]) -> None:
        # A point below the newest step would be ignored: a score has that of the newest record.
        self._run.log(values, step=max(values[_STEP], self._state.last_step))

    def finish(self) -> None:
        """End the run."""
        with _as_os_error("Weights & Biases"):
            self._run.finish()


@contextlib.contextmanager
def _as_os_error(name: str) -> Iterator[None]:
    """Turn any error of a tracker's library into an OSError in one line, which is tried again."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise OSError(f"{name}: {redact(lines[0])}") from error


_LIBRARIES = {"jsonl": "", "mlflow": "mlflow", "wandb": "wandb"}
"""By name of a tracker, the library that it needs; the extra has the same name."""


def names_of(trackers: str) -> tuple[str, ...]:
    """Return the names in a setting: ``mlflow,jsonl``; () for ``none``.

    Raises:
        UnknownNameError: if there is no tracker of a name.
        ConfigError: if its library is not installed, or cannot record with these settings, or a
            name is there twice.
    """
    names = tuple(name.strip() for name in trackers.split(","))
    if names == ("none",):
        return ()
    for name in names:
        if name == "tensorboard":
            problem = "names trackers beside TensorBoard, which every run writes; leave it out"
            raise ConfigError("run.tracker", problem)
        if name not in _LIBRARIES:
            raise UnknownNameError("run.tracker", name, ("none", *_LIBRARIES))
        library = _LIBRARIES[name]
        if library and importlib.util.find_spec(library) is None:
            raise ConfigError(
                "run.tracker",
                f"{name} needs {library}, which is not installed; {how_to_install(library)}",
            )
    if "mlflow" in names:
        _check_mlflow_store()
    if len(set(names)) < len(names):
        raise ConfigError("run.tracker", f"must name each tracker once, got {trackers}")
    return names


def _check_mlflow_store() -> None:
    """Check that MLflow has a store; its library for clients, our extra, has none of its own.

    Raises:
        ConfigError: if MLflow would write an SQLite file, its default, and cannot.
    """
    if importlib.util.find_spec("sqlalchemy") is not None:
        return
    import mlflow

    if mlflow.get_tracking_uri().startswith("sqlite:"):
        raise ConfigError(
            "run.tracker",
            "mlflow needs the address of a tracking server in MLFLOW_TRACKING_URI, or, to record "
            "in a local file, pip install mlflow",
        )


def maker_of(
    name: str, folder: Path, settings: Mapping[str, Any]
) -> Callable[[bool], MetricsWriter]:
    """Return a function that makes the writer of a tracker, again after a failure.

    Args:
        name: name of the tracker.
        folder: the run's local folder.
        settings: settings of the run by dotted name, without credentials.
    """

    def make(_: bool) -> MetricsWriter:
        state = State(folder, name)
        if name == "mlflow":
            return TrackerWriter(Mlflow(state, folder.name, settings), state)
        if name == "wandb":
            return TrackerWriter(WandB(state, folder, settings), state)
        return TrackerWriter(JsonLines(folder), state)

    return make
