"""Measures the speed of sync-easgd on a thin link within one run that alternates link rates.

Command:   python -m benchmarks.link_switched     (--quick: only 100 Mbit/s, 2 repeats, not 10)

Two hosts of ``hosts.py``, one worker in each, LeNet on MNIST, as in ``thin_link.py``. The links of
a run change every few seconds between unlimited and limited, and its steps are counted from
outside. So the pauses of a shared machine affect both rates, and neither the first rounds nor the
end of a run count. A run starts with the limited rate, by which ``--settings="--period auto"``
tunes itself. ``--mtu`` sets larger frames than 1,500 bytes: fewer frames need less CPU.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.hosts import why_not
from benchmarks.link_cost import add_results, measure_rates
from benchmarks.measure import Report, options_of
from benchmarks.programs import ROOT, RunError, data_at, end_of
from benchmarks.runs_on_hosts import UNSCORED, Cluster, cluster
from benchmarks.thin_link import MBITS, SETTINGS
from benchmarks.watching import FOLDER, MODEL, num_steps_in

_WARM_STEPS = 1000
"""Steps of both workers until the steps have their final speed and the exchange is tuned."""
_UP_S = 120.0


@contextmanager
def training(
    hosts: Cluster, data: str, arguments: Sequence[str]
) -> Iterator[subprocess.Popen[Any]]:
    """Yield a run in the hosts that trains endlessly while this context is entered.

    Raises:
        RunError: if the run ended; this error, and any from within, get the end of its log.
    """
    command = [
        sys.executable, "-m", "raydl", "train", "--data", data, "--model", MODEL,
        "--method", "sync-easgd", "--workers", "2", "--batch-size", "64",
        "--samples", "1000000000", *UNSCORED, *arguments,
        "--run-dir", str(hosts.folder / "run"), "--run.progress", "plain",
    ]  # fmt: skip
    log_path = hosts.folder / "log"
    with log_path.open("w") as log:
        process = hosts.hosts.popen(
            0, command, env=hosts.environment, cwd=ROOT, stdout=log, stderr=log
        )
    try:
        yield process
        if process.poll() is not None:
            raise RunError("the run ended before the measurement")
    except RunError as error:
        raise RunError(f"{error}:\n{end_of(log_path)}") from error
    finally:
        process.kill()
        process.wait()


def speeds(
    data: str, arguments: Sequence[str], *, mbit: int, mtu: int, repeats: int
) -> dict[str, list[float]]:
    """Return the steps per second of both workers, on unlimited links and at a rate.

    Raises:
        HostsError: if this machine does not permit hosts.
        RunError: if the run failed or did not start.
    """
    with tempfile.TemporaryDirectory(prefix="watched-") as folder:
        num_steps = partial(num_steps_in, Path(folder))
        with (
            mock.patch.dict(os.environ, {FOLDER: folder}),  # Ray's workers inherit it
            cluster(2, mtu=mtu) as hosts,
        ):
            hosts.limit(mbit)
            with training(hosts, data, arguments) as run:
                _wait_for_steps(run, num_steps)
                return measure_rates(hosts.hosts, num_steps, (mbit,), repeats=repeats)


def _wait_for_steps(run: subprocess.Popen[Any], num_steps: Callable[[], int]) -> None:
    until = time.monotonic() + _UP_S
    while num_steps() < _WARM_STEPS:
        if run.poll() is not None or time.monotonic() > until:
            raise RunError(f"the run took fewer than {_WARM_STEPS:,} steps in {_UP_S:.0f} s")
        time.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> Any:
    """Measure and report; return the argument of ``sys.exit``."""
    options = options_of(
        __doc__,
        data={"default": "../shared/data/mnist", "help": "MNIST as a folder of Parquet"},
        settings={"default": shlex.join(SETTINGS), "help": "settings of the run, as one argument"},
        mtu={"type": int, "default": 1500, "help": "largest IP packet, in bytes"},
    ).parse_args(argv)
    if reason := why_not():
        return reason
    data, arguments = data_at(options.data), shlex.split(options.settings)
    repeats = options.repeats or (2 if options.quick else 10)
    report = Report.of_command("link_switched", options)
    report.add_text(f"`{options.settings}`, packets of {options.mtu:,} bytes.")
    for mbit in MBITS[:1] if options.quick else MBITS:
        try:
            by_rate = speeds(data, arguments, mbit=mbit, mtu=options.mtu, repeats=repeats)
        except RunError as error:
            return f"{error}"
        add_results(report, by_rate, (mbit,))
    report.close(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
