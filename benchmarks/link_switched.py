"""What sync-easgd keeps on a thin link, by turns within one run: limited, not limited, and so on.

Command:   python -m benchmarks.link_switched     (--quick: at 100 Mbit/s, 2 turns rather than 10)

Two hosts of ``hosts.py``, one worker in each, LeNet on MNIST, as in ``thin_link.py``. A run trains
while its links change every few seconds, and its steps are counted from outside: the pauses of a
shared machine fall on both sides, and neither the first rounds nor the end of a run count. A run
starts on the links it is judged on, which is what ``--settings="--period auto"`` chooses by.
``--mtu`` sends larger frames than 1,500 bytes: fewer of them cost the cores less.
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
from benchmarks.link_cost import by_turns, tell
from benchmarks.measure import Report, options_of
from benchmarks.programs import ROOT, RunError, data_at, end_of
from benchmarks.runs_on_hosts import UNSCORED, Cluster, cluster
from benchmarks.thin_link import MBITS, SETTINGS
from benchmarks.watching import FOLDER, MODEL, num_steps_in

_WARM_STEPS = 1000
"""Of both workers: then steps are as fast as they get, and a exchange tuning has been chosen."""
_UP_S = 120.0


@contextmanager
def training(hosts: Cluster, data: str, words: Sequence[str]) -> Iterator[subprocess.Popen[Any]]:
    """Yield a run in the hosts, which trains without an end while this context is entered.

    Raises:
        RunError: it ended all the same; this one, and any from within, get what it said.
    """
    command = [
        sys.executable, "-m", "raydl", "train", "--data", data, "--model", MODEL,
        "--method", "sync-easgd", "--workers", "2", "--batch-size", "64",
        "--samples", "1000000000", *UNSCORED, *words,
        "--run-dir", str(hosts.folder / "run"), "--run.progress", "plain",
    ]  # fmt: skip
    log = hosts.folder / "log"
    with log.open("w") as said:
        process = hosts.hosts.popen(
            0, command, env=hosts.environment, cwd=ROOT, stdout=said, stderr=said
        )
    try:
        yield process
        if process.poll() is not None:
            raise RunError("the run ended while it was watched")
    except RunError as error:
        raise RunError(f"{error}:\n{end_of(log)}") from error
    finally:
        process.kill()
        process.wait()


def speeds(
    data: str, words: Sequence[str], *, mbit: int, mtu: int, repeats: int
) -> dict[str, list[float]]:
    """Return the steps per second of both workers, without a limit and at a rate.

    Raises:
        HostsError: this machine does not permit hosts.
        RunError: the run failed, or did not begin.
    """
    with tempfile.TemporaryDirectory(prefix="watched-") as folder:
        num_steps = partial(num_steps_in, Path(folder))
        with (
            mock.patch.dict(os.environ, {FOLDER: folder}),  # Ray's workers inherit it
            cluster(2, mtu=mtu) as hosts,
        ):
            hosts.limit(mbit)
            with training(hosts, data, words) as run:
                _wait_for_steps(run, num_steps)
                return by_turns(hosts.hosts, num_steps, (mbit,), repeats=repeats)


def _wait_for_steps(run: subprocess.Popen[Any], num_steps: Callable[[], int]) -> None:
    until = time.monotonic() + _UP_S
    while num_steps() < _WARM_STEPS:
        if run.poll() is not None or time.monotonic() > until:
            raise RunError(f"the run took fewer than {_WARM_STEPS:,} steps in {_UP_S:.0f} s")
        time.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> Any:
    """Measure, and report; the return value is what ``sys.exit`` takes."""
    options = options_of(
        __doc__,
        data={"default": "../shared/data/mnist", "help": "MNIST as a folder of Parquet"},
        settings={"default": shlex.join(SETTINGS), "help": "of the run, as one word"},
        mtu={"type": int, "default": 1500, "help": "the most bytes of a packet"},
    ).parse_args(argv)
    if reason := why_not():
        return reason
    data, words = data_at(options.data), shlex.split(options.settings)
    repeats = options.repeats or (2 if options.quick else 10)
    report = Report.of_command("link_switched", options)
    report.add_text(f"`{options.settings}`, packets of {options.mtu:,} bytes.")
    for mbit in MBITS[:1] if options.quick else MBITS:
        try:
            found = speeds(data, words, mbit=mbit, mtu=options.mtu, repeats=repeats)
        except RunError as error:
            return f"{error}"
        tell(report, found, (mbit,))
    report.close(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
