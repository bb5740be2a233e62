"""Runs ``raydl train`` on a Ray cluster on hosts, with another link rate for each run.

    with cluster(2) as hosts:
        hosts.limit(25)
        result = hosts.train("--method", "sync-easgd", "--samples", "10000")

Hosts and Ray start once, with unlimited links. A run starts with its own link rate; the time to
send the training set and the center to the hosts is not part of the measured speed.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.hosts import Hosts
from benchmarks.programs import LOG_LINES, ROOT, RunError, end_cleanly, wait_for
from benchmarks.ray_on_hosts import PULL_MS, start_ray
from benchmarks.runs import NO_SCORES

UNLIMITED_MBIT = 10_000
"""Rate of unlimited links: a message of LeNet takes 1.4 ms."""
BOUND_S = 600.0
"""Time-out of a run, in seconds."""
PAUSING_MODEL = "benchmarks.runs_on_hosts:pausing_lenet"
"""Value of ``--model`` for ``pausing_lenet``."""
_PAUSE = "RAYDL_BENCHMARK_PAUSE_S"
_FEWEST_RECORDS = 4
_AT_ONCE_S = 0.1
"""Records less than this apart came in one report; reports come every 0.5 s."""
UNSCORED = (*NO_SCORES, "--checkpoint.every-s", "100000")
"""Options without evaluations and checkpoints in the measured time; the end is evaluated."""
_RESERVE_HEAD = """
import ray
from ray.util.placement_group import placement_group
ray.init(log_to_driver=False)
here = "node:" + ray.util.get_node_ip_address()
group = placement_group([{"CPU": 1, here: 0.001}], lifetime="detached", name="head")
ray.get(group.ready(), timeout=60)
"""


@dataclass
class Cluster:
    """Hosts with a Ray node each, on which programs run."""

    hosts: Hosts
    environment: Mapping[str, str]
    """Environment variables of a driver in host 0."""
    folder: Path
    """Folder of all files; it is deleted with the cluster."""
    num_workers: int
    """Number of hosts that train."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def limit(self, mbit: float) -> None:
        """Set the rate of all links, in Mbit/s."""
        self.hosts.limit(mbit)

    def train(
        self, *arguments: str, is_scored: bool = False, num_skipped: int = 0
    ) -> dict[str, Any]:
        """Run ``raydl train`` in host 0 and return the figures of ``result.json``.

        A further figure is ``steady_samples_per_s``, from the first record after the skipped
        samples to the last one of the training.

        Args:
            arguments: options of the command.
            is_scored: whether evaluations and checkpoints follow the options; else the center is
                evaluated at the end only.
            num_skipped: samples at the start that ``steady_samples_per_s`` leaves out.

        Raises:
            RunError: if the run failed or did not end in time.
        """
        run_dir = self.folder / f"run-{next(self._numbers)}"
        quiet = () if is_scored else UNSCORED
        self.run(
            [(sys.executable, "-m", "raydl", "train", *arguments, *quiet, "--run-dir", str(run_dir),
              "--run.progress", "plain")],
        )  # fmt: skip
        result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
        result["steady_samples_per_s"] = _steady_rate(run_dir, num_skipped)
        shutil.rmtree(run_dir)
        if result["generations"] != 1:
            print(f"  {result['generations']} generations: a worker was lost or late", flush=True)
        return result

    def run(
        self,
        programs: Sequence[Sequence[str]],
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Run the first program in host 0, the second in host 1, ..., and wait for their ends.

        Raises:
            RunError: if a program failed or did not end in time; all are then killed.
        """
        environment = {**self.environment, **(env or {})}
        logs = [self.folder / f"log-{next(self._numbers)}" for _ in programs]
        started = []
        try:
            for host, (command, path) in enumerate(zip(programs, logs, strict=True)):
                with path.open("w") as log:
                    started.append(
                        self.hosts.popen(
                            host, command, env=environment, cwd=ROOT, stdout=log, stderr=log
                        )
                    )
            wait_for(started, programs, logs, bound_s=BOUND_S)
        finally:
            for process in started:
                process.kill()
                process.wait()


@contextmanager
def cluster(
    number: int,
    *,
    pause_s: float = 0.0,
    has_master: bool = False,
    mtu: int = 1500,
    pull_ms: str = PULL_MS,
) -> Iterator[Cluster]:
    """Yield hosts with a Ray node each, which runs one worker; all of it ends with the context.

    Args:
        number: number of hosts that train.
        pause_s: pause of ``pausing_lenet`` in a step, in seconds.
        has_master: whether a further host, host 0, runs driver and center and no worker.
        mtu: MTU of the links, see ``Hosts``.
        pull_ms: milliseconds until a node repeats its request for an object.

    Raises:
        HostsError: if this machine does not permit hosts.
        RunError: if Ray did not start in a host.
    """
    folder = Path(tempfile.mkdtemp(prefix="raydl-"))
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    variables = {"PYTHONPATH": paths, _PAUSE: str(pause_s)}  # Ray's workers inherit them
    before = signal.getsignal(signal.SIGTERM)
    end_cleanly()
    try:
        with (
            mock.patch.dict(os.environ, variables),
            Hosts(number + has_master, mbit=UNLIMITED_MBIT, mtu=mtu) as hosts,
        ):
            made = Cluster(hosts, _started(hosts, folder, pull_ms), folder, number)
            if has_master:
                made.run([(sys.executable, "-c", _RESERVE_HEAD)])
            yield made
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(folder, ignore_errors=True)


def _steady_rate(run_dir: Path, num_skipped: int) -> float:
    """Return the samples per second from the first record after some samples to the last one.

    The time before the first record, in which the center is sent and the workers form their group,
    does not count, nor does the last report, which waits for the center to be sent back over the
    link.

    Raises:
        RunError: if there are too few records.
    """
    from raydl.tools.report.events import read_history

    files = [path.read_bytes() for path in sorted(run_dir.glob("events.out.tfevents*"))]
    curve = read_history(files).curves["train/lr"]  # has a point per record
    last = bisect.bisect_left(curve.seconds, curve.seconds[-1] - _AT_ONCE_S) - 1
    first = bisect.bisect_left(curve.samples, num_skipped)
    if last - first < _FEWEST_RECORDS - 1:
        number = max(0, last - first + 1)
        raise RunError(f"{number} records after {num_skipped} samples are too few; train longer")
    seconds = curve.seconds[last] - curve.seconds[first]
    return (curve.samples[last] - curve.samples[first]) / seconds


def _started(hosts: Hosts, folder: Path, pull_ms: str) -> Mapping[str, str]:
    try:
        return start_ray(hosts, folder, {"RAY_object_manager_pull_timeout_ms": pull_ms})
    except (RuntimeError, subprocess.SubprocessError) as error:
        output = str(getattr(error, "output", None) or error)
        end = "\n".join(output.splitlines()[-LOG_LINES:])
        raise RunError(f"Ray did not start in the hosts: {end}") from error


def cut_set(source: str, folder: Path, *, num_train: int, num_test: int = 1000) -> str:
    """Write the first samples of a Parquet data set into a new folder and return its path."""
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    for part, count in (("train", num_train), ("test", num_test)):
        table = pq.read_table(sorted(Path(source).glob(f"{part}-*.parquet"))[0])
        assert len(table) >= count, f"{source} holds {len(table)} {part} samples, not {count}"
        pq.write_table(table.slice(0, count), folder / f"{part}-0.parquet")
    return str(folder)


def pausing_lenet(image_shape: tuple[int, int, int], num_classes: int) -> Any:
    """Return a LeNet whose training steps pause without using the CPU.

    An environment variable sets the pause. It simulates a worker whose gradients are computed by
    its own device, so more workers than cores do not slow down each other.
    """
    import torch  # here: the benchmark itself does not need it

    from raydl import models

    pause_s = float(os.environ.get(_PAUSE, "0"))
    model = models.find("lenet")(image_shape, num_classes)

    def pause_with_gradient(module: Any, inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():  # the driver's check of the model takes no gradient
            outputs.register_hook(lambda _: time.sleep(pause_s))

    model.register_forward_hook(pause_with_gradient)
    return model
