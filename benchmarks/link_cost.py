"""What a link that is limited costs the cores beside it: the most that thin_link can keep.

Command:   python -m benchmarks.link_cost            (--quick: 2 repeats rather than 10)

Two hosts of ``hosts.py`` send one another as many bytes as the workers of thin_link do, 144 kB
eleven times a second. Two plain PyTorch processes, one thread each, which have nothing to do with
that, train LeNet meanwhile. Their steps per second, the link at a rate, over those with the same
bytes on a link that limits nothing: the kernel holds back packets on the same cores.
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


def step_plan(address: str) -> None:
    """Send and receive for ever; an empty address waits for the other."""
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
        except ConnectionRefusedError:  # the other has not come so far
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
    """Return the steps per second of all that train, with links of a rate.

    Args:
        hosts: whose links get that rate.
        num_steps: returns the steps of all so far.
        mbit: the rate.
    """
    hosts.limit(mbit)
    time.sleep(_SETTLE_S)
    before, began = num_steps(), time.monotonic()
    time.sleep(_WINDOW_S)
    return (num_steps() - before) / (time.monotonic() - began)


def by_turns(
    hosts: Hosts, num_steps: Callable[[], int], mbits: Sequence[int], *, repeats: int
) -> dict[str, list[float]]:
    """Return the steps per second without a limit and at each rate; see ``speed``."""
    cases = {
        "unlimited": partial(speed, hosts, num_steps, UNLIMITED_MBIT),
        **{f"{mbit} Mbit/s": partial(speed, hosts, num_steps, mbit) for mbit in mbits},
    }
    return interleaved(cases, repeats=repeats)


def tell(report: Report, speeds: Mapping[str, Sequence[float]], mbits: Sequence[int]) -> None:
    """Report what ``by_turns`` returned, and what is kept at each rate."""
    report.add_table(
        ("link", "steps per second"),
        [(name, Spread.of(of).text(".1f")) for name, of in speeds.items()],
    )
    for mbit in mbits:
        kept = ratios(speeds[f"{mbit} Mbit/s"], speeds["unlimited"])
        report.add_figures(Figure(name=f"{report.name}.{mbit}.kept", value=kept))


def _trains(run: Watched) -> bool:
    return run.num_steps() > 0


def _num_steps(runs: Sequence[Watched]) -> int:
    return sum(run.num_steps() for run in runs)


def measure(data: str, repeats: int) -> dict[str, list[float]]:
    """Return the steps per second at each rate.

    Raises:
        WatchError: nobody trained, or the hosts did not talk until the end.
    """
    with Hosts(2, mbit=UNLIMITED_MBIT) as hosts, ExitStack() as stack:
        runs = [
            stack.enter_context(Watched([*_TRAIN, "--data", data])) for _ in range(_NUM_TRAINING)
        ]
        program, paths = [sys.executable, "-m", "benchmarks.link_cost"], {"PYTHONPATH": str(ROOT)}
        talking = [
            hosts.popen(number, [*program, "--talk", other], env=paths)
            for number, other in enumerate(("", hosts.address(0)))
        ]
        for run in runs:
            run.wait_until(partial(_trains, run), "a step is taken", within_s=_UP_S)
        speeds = by_turns(hosts, partial(_num_steps, runs), MBITS, repeats=repeats)
        if any(process.poll() is not None for process in talking):
            raise WatchError("the hosts did not talk to one another until the end")
        return speeds


def main(argv: Sequence[str] | None = None) -> Any:
    """Measure, and report; the return value is what ``sys.exit`` takes."""
    options = options_of(
        __doc__,
        data={"default": "../shared/data/mnist", "help": "a folder"},
        step_plan={"help": argparse.SUPPRESS},
    ).parse_args(argv)
    if options.step_plan is not None:
        return step_plan(options.step_plan)
    if reason := why_not():
        return reason
    end_cleanly()
    report = Report.of_command("link_cost", options)
    try:
        speeds = measure(data_at(options.data), options.repeats or (2 if options.quick else 10))
    except WatchError as error:
        return f"{error}"
    tell(report, speeds, MBITS)
    report.close(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
