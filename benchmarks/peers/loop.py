"""The training loop of the peers: ordinary PyTorch, in one process or in a process group.

Epochs over the samples in random order, torch's SGD on the mean cross entropy, a learning rate that
warms up and then decays along half a cosine. It shares with raydl only what must be equal on both
sides: reading the pictures, copying them to a GPU and normalizing them (one multiplication and one
addition per batch of uint8), the order of the samples, the networks, and the learning-rate
schedule. Gradients are not clipped, unlike raydl's by default, which is to the peer's advantage in
speed.

In a process group each rank trains on its part of a global batch of ``batch_size`` per rank, and
evaluates its part of the test set; the samples of all ranks are counted. The clock starts at the
first step, after a barrier, and pauses during evaluations. All ranks have the same weights; the
running statistics of batch norm differ between ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from raydl import models
from raydl.config import TrainConfig
from raydl.core.lr_schedules import lr_factor
from raydl.data import Dataset, load, preparation_for
from raydl.data.samples import to_device

_AGREE_STEPS = 20
"""Steps between two all-reduces of the elapsed time, in a run limited by seconds."""
_EVENT_S = 0.1
"""The shortest time between two events of a rank."""
_EVALUATION_BATCH = 128


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run."""

    model: str = "lenet"
    data: str = "../shared/data/mnist"
    batch_size: int = 64
    """Samples per rank and step."""
    samples: int | None = None
    """Samples of all ranks until the end, at which the learning rate is 0."""
    seconds: float | None = None
    """Seconds of training until the end, instead of samples."""
    lr: float = 0.1
    """The peak learning rate; it is not scaled by the number of ranks."""
    momentum: float = 0.0
    warmup: float = 0.05
    """Share of the run in which the learning rate rises from 0."""
    seed: int = 0
    device: str = "cpu"
    """cpu or cuda."""
    evaluate_every: int | None = None
    """Samples of all ranks between two evaluations; None: no evaluation."""
    stop_at_accuracy: float | None = None
    """Test accuracy, 0..1, that ends the run early."""
    checkpoint_every: int | None = None
    """Samples of all ranks between two checkpoints; None: no checkpoints."""
    untimed_steps: int = 0
    """Steps at the start that ``samples_per_s`` leaves out."""
    events: str | None = None
    """A file to which each event is appended as a line of JSON."""
    result: str | None = None
    """A file for the result as JSON; rank 0 writes it."""


class StateStore(Protocol):
    """Stores the state of a run for a later restart."""

    def load(self) -> dict[str, Any] | None:
        """Return the newest state, or None."""
        ...

    def save(self, state: dict[str, Any]) -> None:
        """Store a state. All ranks call this with the same state."""
        ...


class NullStore:
    """Stores nothing."""

    def load(self) -> None:
        """Return None."""

    def save(self, state: dict[str, Any]) -> None:
        """Ignore the state."""


_NULL_STORE = NullStore()


def rank() -> int:
    """Return the rank of this process, 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """Return the number of ranks, 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def summed(*values: float) -> list[float]:
    """Return the sums over all ranks, with the same bits on each rank."""
    tensor = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return [float(value) for value in tensor]


def positions_of_step(
    num_done: int, *, num_samples: int, batch_size: int, rank: int, num_ranks: int
) -> tuple[int, np.ndarray, int]:
    """Return (epoch, this rank's positions in it, samples of all ranks) of the next step.

    The last step of an epoch may be smaller; a remainder that does not divide by the ranks is
    skipped.

    Args:
        num_done: samples of all ranks so far.
        num_samples: samples in the training set.
        batch_size: samples per rank.
        rank: rank of this process.
        num_ranks: number of ranks.
    """
    per_epoch = num_samples // num_ranks * num_ranks
    epoch, start = divmod(num_done, per_epoch)
    stop = min(start + batch_size * num_ranks, per_epoch)
    share = (stop - start) // num_ranks
    first = start + rank * share
    return epoch, np.arange(first, first + share), stop - start


class Clock:
    """Measures seconds of training; it pauses during evaluations.

    Args:
        seconds: seconds of training before this start.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._began = time.perf_counter() - seconds
        self.began_at = time.time()
        """Unix time of this start's first step."""
        self.paused_s = 0.0
        """Seconds of all pauses."""

    @property
    def seconds(self) -> float:
        """Seconds of training."""
        return time.perf_counter() - self._began - self.paused_s

    def pause(self, act: Callable[[], float]) -> float:
        """Pause, call a function, and return its value."""
        began = time.perf_counter()
        try:
            return act()
        finally:
            self.paused_s += time.perf_counter() - began


class Events:
    """Appends this rank's progress to a file.

    Each line is ``{"time": unix, "rank": r, "pid": p, "samples": of all ranks}``. The line before
    the first step also has ``"event": "first_step"``, and the line after the last step
    ``"last_step"``.

    Args:
        path: the file, to which all ranks append; None: no file.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._written_at = 0.0

    def write(self, samples: int, event: str | None = None) -> None:
        """Append a line; skip it if it has no event and the last line is less than 0.1 s old."""
        now = time.time()
        if self._path is None or (event is None and now - self._written_at < _EVENT_S):
            return
        self._written_at = now
        line: dict[str, Any] = {"time": now, "rank": rank(), "pid": os.getpid(), "samples": samples}
        if event:
            line["event"] = event
        with open(self._path, "ab", buffering=0) as file:
            file.write(f"{json.dumps(line)}\n".encode())  # one write: lines of ranks do not mix


class Run:
    """A training run, on one rank.

    Args:
        settings: settings of the run.
        data: data set of pictures.
        wrap: wraps a model so that its gradients are summed over the ranks.
        store: stores checkpoints.
    """

    def __init__(
        self,
        settings: Settings,
        data: Dataset,
        *,
        wrap: Callable[[nn.Module], nn.Module],
        store: StateStore = _NULL_STORE,
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(settings.seed)
        shape = data.train.shape
        self._settings = settings
        self._data = data
        self._store = store
        self._prepare = preparation_for(data, TrainConfig(model=settings.model))
        self._order = data.train.order(settings.seed)
        self._device = torch.device(settings.device)
        module = models.find(settings.model)(shape.input_shape, shape.num_classes)
        self._module = module.to(self._device)
        self._model = wrap(self._module)
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), lr=settings.lr, momentum=settings.momentum
        )
        self._events = Events(settings.events)
        self._num_done = self._num_steps = 0
        self._timed_from: tuple[int, float] | None = None
        """Samples and seconds of training before the first timed step."""
        self._share_done = 0.0
        self._evaluations: list[tuple[float, int, float]] = []
        self._scored_s: list[float] = []

    def train(self) -> dict[str, Any]:
        """Train to the end, and return and write the result."""
        seconds_before = self._load()
        if dist.is_initialized():
            dist.barrier()
        clock = Clock(seconds_before)
        self._events.write(self._num_done, "first_step")
        while not self._is_over(clock):
            before = self._num_done
            if self._timed_from is None and self._num_steps >= self._settings.untimed_steps:
                self._timed_from = before, clock.seconds
            self._step()
            self._events.write(self._num_done)
            if self._is_due(self._settings.evaluate_every, before):
                self._score(clock)
            if self._is_due(self._settings.checkpoint_every, before):
                self._store.save(self._state(clock.seconds))
        seconds = clock.seconds
        self._events.write(self._num_done, "last_step")
        is_scored = bool(self._evaluations) and self._evaluations[-1][1] == self._num_done
        if self._settings.evaluate_every and not is_scored:
            self._score(clock)
        return self._write_result(clock, seconds)

    def _is_over(self, clock: Clock) -> bool:
        settings = self._settings
        wanted = settings.stop_at_accuracy
        if wanted is not None and self._evaluations and self._evaluations[-1][2] >= wanted:
            return True
        if settings.seconds is None:
            self._share_done = self._num_done / (settings.samples or 1)
        elif self._num_steps % _AGREE_STEPS == 0:  # clocks differ: all ranks must stop together
            self._share_done = summed(clock.seconds)[0] / num_ranks() / settings.seconds
        return self._share_done >= 1

    def _is_due(self, every: int | None, before: int) -> bool:
        return every is not None and self._num_done // every > before // every

    def _step(self) -> None:
        settings = self._settings
        epoch, positions, count = positions_of_step(
            self._num_done,
            num_samples=self._data.train.num_samples,
            batch_size=settings.batch_size,
            rank=rank(),
            num_ranks=num_ranks(),
        )
        rows = self._order.rows(epoch, positions)
        images, labels = self._batch(self._data.train.fetch(rows), rows, epoch)
        lr = settings.lr * lr_factor("cosine", self._share_done, warmup=settings.warmup)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad()
        functional.cross_entropy(self._model(images), labels).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._num_done += count
        self._num_steps += 1

    def _batch(self, batch: Any, rows: np.ndarray, epoch: int | None) -> Any:
        return self._prepare(to_device(batch, self._device), rows, epoch)

    def _score(self, clock: Clock) -> None:
        seconds = clock.seconds
        accuracy = clock.pause(self._accuracy)
        self._evaluations.append((seconds, self._num_done, accuracy))
        self._scored_s.append(seconds + clock.paused_s)

    def _accuracy(self) -> float:
        """Return the test accuracy, the same on all ranks."""
        test = self._data.test
        rows = np.arange(test.num_samples)[rank() :: num_ranks()]
        self._module.eval()
        with torch.no_grad():
            batches = range(0, len(rows), _EVALUATION_BATCH)
            num_correct = sum(self._num_correct(rows[i : i + _EVALUATION_BATCH]) for i in batches)
        self._module.train()
        return summed(num_correct)[0] / test.num_samples

    def _num_correct(self, rows: np.ndarray) -> int:
        images, labels = self._batch(self._data.test.fetch(rows), rows, None)
        predictions: Tensor = self._module(images).argmax(1)
        return int((predictions == labels).sum())

    def _state(self, seconds: float) -> dict[str, Any]:
        return {
            "model": self._module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "num_done": self._num_done,
            "num_steps": self._num_steps,
            "seconds": seconds,
            "evaluations": self._evaluations,
            "scored_s": self._scored_s,
        }

    def _load(self) -> float:
        """Restore the newest state, if any, and return its seconds of training."""
        state = self._store.load()
        if state is None:
            return 0.0
        self._module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._num_done, self._num_steps = state["num_done"], state["num_steps"]
        self._evaluations = [tuple(score) for score in state["evaluations"]]
        self._scored_s = state["scored_s"]
        return float(state["seconds"])

    def _write_result(self, clock: Clock, seconds: float) -> dict[str, Any]:
        samples_before, seconds_before = self._timed_from or (self._num_done, seconds)
        timed_s = seconds - seconds_before
        result = {
            "samples": self._num_done,
            "seconds": seconds,
            "samples_per_s": (self._num_done - samples_before) / timed_s if timed_s else None,
            "steps": self._num_steps,
            "first_step_at": clock.began_at,
            "accuracy": self._evaluations[-1][2] if self._evaluations else None,
            "evaluations": self._evaluations,
            "scored_s": self._scored_s,
            "evaluation_seconds": clock.paused_s,
            "lr": self._settings.lr,
            "momentum": self._settings.momentum,
            "ranks": num_ranks(),
        }
        if self._settings.result and rank() == 0:
            temporary = Path(f"{self._settings.result}.aside")
            temporary.write_text(json.dumps(result))
            temporary.replace(self._settings.result)  # atomic: a reader sees the whole result
        return result


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model unchanged."""
    return model


def read_data(settings: Settings) -> Dataset:
    """Return the data set of the settings."""
    return load(settings.data, seed=settings.seed)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the settings as options.

    Args:
        doc: docstring of the peer; its first line is the description.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    strings = ("model", "data", "device", "events", "result")
    numbers = ("lr", "momentum", "warmup", "seconds", "stop_at_accuracy")
    kinds: dict[str, Callable[[str], Any]] = {**dict.fromkeys(strings, str)}
    kinds |= dict.fromkeys(numbers, float)
    for field in fields(Settings):
        kind = kinds.get(field.name, int)
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=kind, default=field.default)
    return parser


def settings_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Settings:
    """Return the settings of the options; exit unless they give either samples or seconds."""
    settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
    if (settings.samples is None) == (settings.seconds is None):
        parser.error("give one of --samples and --seconds")
    return settings
