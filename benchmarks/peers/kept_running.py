"""Replicas of a peer that are started again when they are killed."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.peers.loop import Settings, read_data
from raydl.data import Dataset

_DECODED = "RAYDL_BENCHMARK_DECODED"
"""Environment variable with the file of the decoded data."""


def keep_running(
    module: str,
    words: list[str],
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
        words: further words of its command.
        settings: settings of the run.
        environment: further environment variables.
        num_replicas: number of replicas.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with tempfile.NamedTemporaryFile(prefix="decoded-") as decoded:
        pickle.dump(read_data(settings), decoded)
        decoded.flush()
        all_variables = {**os.environ, **environment, _DECODED: decoded.name}
        command = [sys.executable, "-m", module, *words, "--replica"]

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


def decoded_data() -> Dataset:
    """Return the data that ``keep_running`` has decoded."""
    data: Dataset = pickle.loads(Path(os.environ[_DECODED]).read_bytes())
    return data


def is_over(settings: Settings, num_samples: int, began: float) -> bool:
    """Return whether a run has trained its samples or its seconds.

    Args:
        settings: settings of the run.
        num_samples: counted samples of all replicas.
        began: when the run began, by ``time.monotonic()``.
    """
    if settings.samples is not None:
        return num_samples >= settings.samples
    return time.monotonic() - began >= (settings.seconds or 0.0)
