"""Measures how much a limited link itself slows down other work on the same cores.

Command:   python -m benchmarks.link_cost            (--quick: 2 repeats instead of 10)

Two hosts of ``hosts.py`` send each other 144 kB eleven times a second, the messages of the workers
of ``thin_link.py`` with steps of 9 ms. Meanwhile two independent processes of plain PyTorch train
LeNet with one thread each. A figure is their steps per second with a limited link over those with
the same bytes on an unlimited link: the kernel delays the packets on the same cores.
"""

from __future__ import annotations

import argparse
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.hosts import Hosts, why_not
from benchmarks.measure import Figure, Report, Spread, interleaved, options_of, ratios
from benchmarks.programs import ROOT, data_at, end_cleanly
from benchmarks.runs_on_hosts import UNLIMITED_MBIT
from benchmarks.thin_link import MBITS
from benchmarks.watching import MODEL, Watched, WatchError

NUM_BYTES, EVERY_S = 144_000, 0.09
_PORT, _NUM_TRAINING = 29777, 2
_TRAIN = (
    "-m", "benchmarks.peers.plain", "--model", MODEL, "--batch-size", "64",
    "--samples", "1000000000",
)  # fmt: skip
_UP_S, _SETTLE_S, _WINDOW_S = 60.0, 1.0, 3.0


def exchange_bytes(address: str) -> None:
    """Send to the other host and receive from it forever; an empty address waits for it."""
    connection = _connect(address) if address else _accept()
    connection.settimeout(None)
    threading.Thread(target=_receive, args=(connection,), daemon=True).start()
    message = bytes(NUM_BYTES)
    while True:
        began = time.monotonic()
        connection.sendall(message)
        time.sleep(max(0.0, began + EVERY_S - time.monotonic()))


def _connect(address: str) -> socket.socket:
    until = time.monotonic() + _UP_S
    while True:
        try:
            return socket.create_connection((address, _PORT), timeout=_UP_S)
        except ConnectionRefusedError:  # the other host does not listen yet
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _accept() -> socket.socket:
    with socket.create_server(("", _PORT)) as server:
        server.settimeout(_UP_S)
        return server.accept()[0]


def _receive(connection: socket.socket) -> None:
    buffer = bytearray(1 << 16)
    while connection.recv_into(buffer):
        pass


def speed(hosts: Hosts, num_steps: Callable[[], int], mbit: float) -> float:
    """Return the steps per second of all training processes at a link rate.

    Args:
        hosts: hosts whose links get the rate.
        num_steps: returns the number of steps of all processes so far.
        mbit: rate in Mbit/s.
    """
    hosts.limit(mbit)
    time.sleep(_SETTLE_S)
    before, began = num_steps(), time.monotonic()
    time.sleep(_WINDOW_S)
    return (num_steps() - before) / (time.monotonic() - began)


def measure_rates(
    hosts: Hosts, num_steps: Callable[[], int], mbits: Sequence[int], *, repeats: int
) -> dict[str, list[float]]:
    """Return the steps per second on unlimited links and at each rate; see ``speed``."""
    cases = {
        "unlimited": partial(speed, hosts, num_steps, UNLIMITED_MBIT),
        **{f"{mbit} Mbit/s": partial(speed, hosts, num_steps, mbit) for mbit in mbits},
    }
    return interleaved(cases, repeats=repeats)


def add_results(
    report: Report, speeds: Mapping[str, Sequence[float]], mbits: Sequence[int]
) -> None:
    """Add the result of ``measure_rates``, and the share kept at each rate, to a report."""
    report.add_table(
        ("link", "steps per second"),
        [(name, Spread.of(of).text(".1f")) for name, of in speeds.items()],
    )
    for mbit in mbits:
        kept = ratios(speeds[f"{mbit} Mbit/s"], speeds["unlimited"])
        report.add_figures(Figure(name=f"{report.name}.{mbit}.kept", value=kept))


def measure(data: str, repeats: int) -> dict[str, list[float]]:
    """Return the steps per second on unlimited links and at each rate.

    Raises:
        WatchError: if a process did not train, or the hosts stopped sending.
    """
    with Hosts(2, mbit=UNLIMITED_MBIT) as hosts, ExitStack() as stack:
        runs = [
            stack.enter_context(Watched([*_TRAIN, "--data", data])) for _ in range(_NUM_TRAINING)
        ]
        program, paths = [sys.executable, "-m", "benchmarks.link_cost"], {"PYTHONPATH": str(ROOT)}
        senders = [
            hosts.popen(number, [*program, "--send-to", other], env=paths)
            for number, other in enumerate(("", hosts.address(0)))
        ]

        def num_steps() -> int:
            return sum(run.num_steps() for run in runs)

        def all_train() -> bool:
            return all(run.num_steps() > 0 for run in runs)

        runs[0].wait_until(all_train, "all processes take a step", within_s=_UP_S)
        speeds = measure_rates(hosts, num_steps, MBITS, repeats=repeats)
        if any(process.poll() is not None for process in senders):
            raise WatchError("the hosts stopped sending before the end")
        return speeds


def main(argv: Sequence[str] | None = None) -> Any:
    """Measure and report; return the argument of ``sys.exit``."""
    options = options_of(
        __doc__,
        data={"default": "../shared/data/mnist", "help": "folder of MNIST"},
        send_to={"help": argparse.SUPPRESS},
    ).parse_args(argv)
    if options.send_to is not None:
        return exchange_bytes(options.send_to)
    if reason := why_not():
        return reason
    end_cleanly()
    report = Report.of_command("link_cost", options)
    try:
        speeds = measure(data_at(options.data), options.repeats or (2 if options.quick else 10))
    except WatchError as error:
        return f"{error}"
    add_results(report, speeds, MBITS)
    report.close(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
