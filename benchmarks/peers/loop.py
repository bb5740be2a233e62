"""The training loop of the peers: PyTorch as its users write it, in one process or in many.

A pass over the samples in random order, torch's SGD on the mean cross entropy, a learning rate that
rises and then falls along half a cosine. It knows of no raydl but for what both sides should have
in common: the reading of the pictures and their normalisation (one multiplication and one addition
per batch of uint8), the order of the samples, the networks and the course of the learning rate.
Gradients are not clipped, as raydl's are by default: that is to the peer's advantage in speed.

In a process group each rank trains on its part of a global batch of ``batch_size`` per rank, and
scores its part of the test set; all ranks count the samples of all. The clock begins with the first
step, after all ranks are there, and stands while the test set is scored. A score is that of the
weights that all ranks hold; the running statistics of batch norm are each rank's own.
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
from raydl.core.rules import lr_factor
from raydl.data import Dataset, load, preparation_for

_AGREE_STEPS = 20
"""Steps from one agreement of the ranks on the time to the next, in a run by seconds."""
_EVENT_S = 0.1
"""The shortest time between two lines of a rank's progress."""
_SCORED_AT_ONCE = 128


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to train, for how long, and where to tell it."""

    model: str = "lenet"
    data: str = "../shared/data/mnist"
    batch_size: int = 64
    """Per rank."""
    samples: int | None = None
    """By all ranks together; the learning rate comes down to 0 at their end."""
    seconds: float | None = None
    """Of training, instead of samples."""
    lr: float = 0.1
    """The highest; as it is, whatever the number of ranks."""
    momentum: float = 0.0
    warmup: float = 0.05
    """Share of the run in which the learning rate rises from 0."""
    seed: int = 0
    evaluate_every: int | None = None
    """Samples by all ranks from one score of the test set to the next; None: no score."""
    stop_at_accuracy: float | None = None
    """Share of the test set, 0..1, that ends the run before its time."""
    checkpoint_every: int | None = None
    """Samples by all ranks from one checkpoint to the next, where there are any."""
    events: str | None = None
    """A file that takes a line of JSON for each sign of progress."""
    result: str | None = None
    """A file that takes the result as JSON; rank 0 writes it."""


class Keeps(Protocol):
    """Keeps the state of a run, and has that of the run that this one goes on from."""

    def load(self) -> dict[str, Any] | None:
        """Return what was kept last; None: the run begins."""
        ...

    def save(self, state: dict[str, Any]) -> None:
        """Keep a state. All ranks call it, with the same."""
        ...


class KeepsNothing:
    """Begins anew each time."""

    def load(self) -> None:
        """Return nothing."""

    def save(self, state: dict[str, Any]) -> None:
        """Let it go."""


_NOTHING = KeepsNothing()


def rank() -> int:
    """Return this process's place in its group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """Return the processes in the group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def summed(*values: float) -> list[float]:
    """Return the sums over all ranks, the same bits on each."""
    tensor = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return [float(value) for value in tensor]


def positions_of_step(
    num_done: int, *, num_samples: int, batch_size: int, rank: int, num_ranks: int
) -> tuple[int, np.ndarray, int]:
    """Return (epoch, this rank's positions in it, samples of all ranks) of the next step.

    The last step of an epoch is a smaller one; what does not divide by the ranks is left out.

    Args:
        num_done: samples by all ranks so far.
        num_samples: in the training set.
        batch_size: samples per rank.
        rank: of this process.
        num_ranks: processes.
    """
    per_epoch = num_samples // num_ranks * num_ranks
    epoch, start = divmod(num_done, per_epoch)
    stop = min(start + batch_size * num_ranks, per_epoch)
    share = (stop - start) // num_ranks
    first = start + rank * share
    return epoch, np.arange(first, first + share), stop - start


class Clock:
    """Seconds since the first step; it stands while somebody scores.

    Args:
        seconds: of training before this start.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._began = time.perf_counter() - seconds
        self.began_at = time.time()
        """Unix time of this start's first step."""
        self.stood_s = 0.0
        """Seconds that it stood."""

    @property
    def seconds(self) -> float:
        """Seconds of training."""
        return time.perf_counter() - self._began - self.stood_s

    def stand(self, do: Callable[[], float]) -> float:
        """Return what something returns that is not training."""
        began = time.perf_counter()
        try:
            return do()
        finally:
            self.stood_s += time.perf_counter() - began


class Events:
    """Writes this rank's progress to a file that others watch.

    Each line: ``{"time": unix, "rank": r, "pid": p, "samples": by all ranks}``. As the first step
    begins it has ``"event": "first_step"`` too, and when the last one has ended ``"last_step"``.

    Args:
        path: of the file, to which all ranks append; None: nobody watches.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._told_at = 0.0

    def tell(self, samples: int, event: str | None = None) -> None:
        """Append a line, unless the last one is just written and nothing special happens."""
        now = time.time()
        if self._path is None or (event is None and now - self._told_at < _EVENT_S):
            return
        self._told_at = now
        line: dict[str, Any] = {"time": now, "rank": rank(), "pid": os.getpid(), "samples": samples}
        if event:
            line["event"] = event
        with open(self._path, "ab", buffering=0) as file:
            file.write(f"{json.dumps(line)}\n".encode())  # one write: ranks do not mix


class Run:
    """One training run of one rank.

    Args:
        settings: of the run.
        data: the pictures.
        wrap: makes of a model one whose gradients are summed over the ranks.
        keeps: for checkpoints.
    """

    def __init__(
        self,
        settings: Settings,
        data: Dataset,
        *,
        wrap: Callable[[nn.Module], nn.Module],
        keeps: Keeps = _NOTHING,
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(settings.seed)
        shape = data.train.shape
        self._settings = settings
        self._data = data
        self._keeps = keeps
        self._prepare = preparation_for(data, TrainConfig(model=settings.model))
        self._order = data.train.order(settings.seed)
        self._module = models.find(settings.model)(shape.input_shape, shape.num_classes)
        self._model = wrap(self._module)
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), lr=settings.lr, momentum=settings.momentum
        )
        self._events = Events(settings.events)
        self._num_done = self._num_steps = 0
        self._share_done = 0.0
        self._evaluations: list[tuple[float, int, float]] = []
        self._scored_s: list[float] = []

    def train(self) -> dict[str, Any]:
        """Train to the end; return the result, and write it where the settings say."""
        seconds_before = self._load()
        if dist.is_initialized():
            dist.barrier()
        clock = Clock(seconds_before)
        self._events.tell(self._num_done, "first_step")
        while not self._is_over(clock):
            before = self._num_done
            self._step()
            self._events.tell(self._num_done)
            if self._is_due(self._settings.evaluate_every, before):
                self._score(clock)
            if self._is_due(self._settings.checkpoint_every, before):
                self._keeps.save(self._state(clock.seconds))
        seconds = clock.seconds
        self._events.tell(self._num_done, "last_step")
        if self._settings.evaluate_every and not self._is_scored():
            self._score(clock)
        return self._told(clock, seconds)

    def _is_over(self, clock: Clock) -> bool:
        settings = self._settings
        wanted = settings.stop_at_accuracy
        if wanted is not None and self._evaluations and self._evaluations[-1][2] >= wanted:
            return True
        if settings.seconds is None:
            self._share_done = self._num_done / (settings.samples or 1)
        elif self._num_steps % _AGREE_STEPS == 0:  # clocks differ: no rank stops alone
            self._share_done = summed(clock.seconds)[0] / num_ranks() / settings.seconds
        return self._share_done >= 1

    def _is_due(self, every: int | None, before: int) -> bool:
        return every is not None and self._num_done // every > before // every

    def _is_scored(self) -> bool:
        return bool(self._evaluations) and self._evaluations[-1][1] == self._num_done

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
        images, labels = self._prepare(self._data.train.fetch(rows), rows, epoch)
        lr = settings.lr * lr_factor("cosine", self._share_done, warmup=settings.warmup)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad()
        functional.cross_entropy(self._model(images), labels).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._num_done += count
        self._num_steps += 1

    def _score(self, clock: Clock) -> None:
        seconds = clock.seconds
        accuracy = clock.stand(self._accuracy)
        self._evaluations.append((seconds, self._num_done, accuracy))
        self._scored_s.append(seconds + clock.stood_s)

    def _accuracy(self) -> float:
        """Return the share of right answers on the test set, the same on all ranks."""
        test = self._data.test
        rows = np.arange(test.num_samples)[rank() :: num_ranks()]
        self._module.eval()
        with torch.no_grad():
            parts = range(0, len(rows), _SCORED_AT_ONCE)
            num_right = sum(self._num_right(rows[i : i + _SCORED_AT_ONCE]) for i in parts)
        self._module.train()
        return summed(num_right)[0] / test.num_samples

    def _num_right(self, rows: np.ndarray) -> int:
        images, labels = self._prepare(self._data.test.fetch(rows), rows, None)
        answers: Tensor = self._module(images).argmax(1)
        return int((answers == labels).sum())

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
        """Go on from what was kept, if anything was; return its seconds of training."""
        state = self._keeps.load()
        if state is None:
            return 0.0
        self._module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._num_done, self._num_steps = state["num_done"], state["num_steps"]
        self._evaluations = [tuple(score) for score in state["evaluations"]]
        self._scored_s = state["scored_s"]
        return float(state["seconds"])

    def _told(self, clock: Clock, seconds: float) -> dict[str, Any]:
        result = {
            "samples": self._num_done,
            "seconds": seconds,
            "steps": self._num_steps,
            "first_step_at": clock.began_at,
            "accuracy": self._evaluations[-1][2] if self._evaluations else None,
            "evaluations": self._evaluations,
            "scored_s": self._scored_s,
            "evaluation_seconds": clock.stood_s,
            "lr": self._settings.lr,
            "momentum": self._settings.momentum,
            "ranks": num_ranks(),
        }
        if self._settings.result and rank() == 0:
            aside = Path(f"{self._settings.result}.aside")
            aside.write_text(json.dumps(result))
            aside.replace(self._settings.result)  # whoever waits for it sees a whole one
        return result


def as_it_is(model: nn.Module) -> nn.Module:
    """Return the model."""
    return model


def read_data(settings: Settings) -> Dataset:
    """Return the data that the settings name."""
    return load(settings.data, seed=settings.seed)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the settings as options.

    Args:
        doc: of the peer; its first line is the description.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    words = ("model", "data", "events", "result")
    numbers = ("lr", "momentum", "warmup", "seconds", "stop_at_accuracy")
    kinds: dict[str, Callable[[str], Any]] = {**dict.fromkeys(words, str)}
    kinds |= dict.fromkeys(numbers, float)
    for field in fields(Settings):
        kind = kinds.get(field.name, int)
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=kind, default=field.default)
    return parser


def settings_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Settings:
    """Return the settings that the options say; exit with a sentence where they say no end."""
    settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
    if (settings.samples is None) == (settings.seconds is None):
        parser.error("give one of --samples and --seconds")
    return settings
