"""Replicas of torchft and hivemind: their supervisor, which starts them again, and their steps."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.peers.loop import Events, Settings, read_data
from raydl import models
from raydl.config import TrainConfig
from raydl.data import Dataset, preparation_for

_DECODED = "RAYDL_BENCHMARK_DECODED"
"""Environment variable with the file of the decoded data."""


def supervise(
    module: str,
    arguments: list[str],
    *,
    settings: Settings,
    environment: dict[str, str],
    num_replicas: int,
) -> None:
    """Run the replicas until all have ended by themselves.

    A replica that fails or is killed is started again at once, as torchrun does. The data is
    decoded once for all.

    Args:
        module: module of a replica; it gets the option ``--replica NUMBER``.
        arguments: further arguments of its command.
        settings: settings of the run.
        environment: further environment variables.
        num_replicas: number of replicas.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with tempfile.NamedTemporaryFile(prefix="decoded-") as decoded:
        pickle.dump(read_data(settings), decoded)
        decoded.flush()
        all_variables = {**os.environ, **environment, _DECODED: decoded.name}
        command = [sys.executable, "-m", module, *arguments, "--replica"]

        def start(number: int) -> subprocess.Popen[bytes]:
            return subprocess.Popen([*command, str(number)], env=all_variables)

        replicas = {number: start(number) for number in range(num_replicas)}
        try:
            while replicas:
                for number, process in list(replicas.items()):
                    code = process.poll()
                    if code == 0:
                        del replicas[number]
                    elif code is not None:
                        replicas[number] = start(number)
                time.sleep(0.02)
        finally:
            for process in replicas.values():
                process.kill()


class Replica:
    """The model of a replica, and its random batches of the decoded data.

    Args:
        settings: settings of the run.
        number: number of the replica; its batches follow from it.
        data: the decoded data; None: those that ``supervise`` has decoded.
    """

    def __init__(self, settings: Settings, number: int, *, data: Dataset | None = None) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(settings.seed)
        if data is None:
            data = pickle.loads(Path(os.environ[_DECODED]).read_bytes())
        self._data: Dataset = data
        shape = self._data.train.shape
        self.model = models.find(settings.model)(shape.input_shape, shape.num_classes)
        self.settings = settings
        self._prepare = preparation_for(self._data, TrainConfig(model=settings.model))
        self._generator = np.random.default_rng(number)
        self._events = Events(settings.events)
        self._began, self._is_first = time.monotonic(), True

    def step(self, model: nn.Module, optimizer: Any) -> None:
        """Take a step on a random batch.

        Args:
            model: the model as the peer wraps it.
            optimizer: the optimizer as the peer wraps it.
        """
        train = self._data.train
        rows = self._generator.integers(0, train.num_samples, self.settings.batch_size)
        images, labels = self._prepare(train.fetch(rows), rows, 0)
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def note(self, num_samples: int) -> None:
        """Note the counted samples of all replicas, after a step."""
        self._events.write(num_samples, "first_step" if self._is_first else None)
        self._is_first = False

    def is_over(self, num_samples: int) -> bool:
        """Return whether the run has trained its samples or its seconds; note its last step."""
        settings = self.settings
        if settings.samples is not None:
            over = num_samples >= settings.samples
        else:
            over = time.monotonic() - self._began >= (settings.seconds or 0.0)
        if over:
            self._events.write(num_samples, "last_step")
        return over
