"""What a link that is limited costs the cores beside it: the most that thin_link can keep.

Command:   python -m benchmarks.link_cost            (--quick: 2 repeats rather than 10)

Two hosts of ``hosts.py`` send one another as many bytes as thin_link's at 25 Mbit/s, 431 kB five
times a second. Two plain PyTorch processes, one thread each, which have nothing to do with that,
compute gradients of LeNet meanwhile. Gradients per second, the link at a rate, over those with the
same bytes on a link that limits nothing: the kernel holds back packets on the same cores.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.hosts import Hosts, why_not
from benchmarks.measure import Figure, Report, Spread, interleaved, options_of, ratios
from benchmarks.programs import ROOT, RunError
from benchmarks.runs_on_hosts import UNLIMITED_MBIT

MBITS = (100, 25)
NUM_BYTES, EVERY_S = 431_000, 0.2
_PORT, _NUM_COMPUTING, _DIGITS = 29777, 2, 12
_UP_S, _SETTLE_S, _WINDOW_S = 60.0, 1.0, 3.0


def compute(count_at: Path) -> None:
    """Compute gradients for ever, and keep their count in a file."""
    import torch

    from raydl import models

    torch.set_num_threads(1)
    model = models.find("lenet")((1, 28, 28), 10)
    images, labels = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))
    with count_at.open("wb", buffering=0) as file:
        for count in itertools.count(1):
            model.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            file.seek(0)
            file.write(b"%0*d" % (_DIGITS, count))


def talk(address: str) -> None:
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


def _part(*words: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.link_cost", *words]


@contextmanager
def computing(folder: Path) -> Iterator[list[Path]]:
    """Yield the files in which processes that compute count."""
    counts = [folder / str(number) for number in range(_NUM_COMPUTING)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(_part("--compute", str(path)), cwd=ROOT, env=environment)
        for path in counts
    ]
    try:
        yield counts
    finally:
        for process in started:
            process.kill()
            process.wait()


def speed(hosts: Hosts, counts: Sequence[Path], mbit: float) -> float:
    """Return the gradients per second of all, with links of a rate."""
    hosts.limit(mbit)
    time.sleep(_SETTLE_S)
    before, began = _sum_of(counts), time.monotonic()
    time.sleep(_WINDOW_S)
    return (_sum_of(counts) - before) / (time.monotonic() - began)


def _sum_of(counts: Sequence[Path]) -> int:
    return sum(int(path.read_text()) for path in counts)


def _wait_for(counts: Sequence[Path]) -> None:
    until = time.monotonic() + _UP_S
    while not all(path.exists() and path.stat().st_size == _DIGITS for path in counts):
        if time.monotonic() > until:
            raise TimeoutError(f"nothing was computed within {_UP_S:.0f} s")
        time.sleep(0.1)


def measure(repeats: int) -> dict[str, list[float]]:
    """Return the gradients per second at each rate."""
    with (
        tempfile.TemporaryDirectory(prefix="raydl-") as folder,
        Hosts(2, mbit=UNLIMITED_MBIT) as hosts,
        computing(Path(folder)) as counts,
    ):
        words = ("", hosts.address(0))
        paths = {"PYTHONPATH": str(ROOT)}
        talking = [hosts.popen(i, _part("--talk", of), env=paths) for i, of in enumerate(words)]
        _wait_for(counts)
        cases = {
            "unlimited": partial(speed, hosts, counts, UNLIMITED_MBIT),
            **{f"{mbit} Mbit/s": partial(speed, hosts, counts, mbit) for mbit in MBITS},
        }
        speeds = interleaved(cases, repeats=repeats)
        if any(process.poll() is not None for process in talking):
            raise RunError("the hosts did not talk to one another until the end")
        return speeds


def main(argv: Sequence[str] | None = None) -> Any:
    """Measure, and report; the return value is what ``sys.exit`` takes."""
    hidden = argparse.SUPPRESS
    options = options_of(
        __doc__, compute={"type": Path, "help": hidden}, talk={"help": hidden}
    ).parse_args(argv)
    if options.compute:
        return compute(options.compute)
    if options.talk is not None:
        return talk(options.talk)
    if reason := why_not():
        return reason
    report = Report.of_command("link_cost", options)
    try:
        speeds = measure(options.repeats or (2 if options.quick else 10))
    except (RunError, TimeoutError) as error:
        return f"{error}"
    report.table(
        ("link", "gradients per second"),
        [(name, Spread.of(of).text(".1f")) for name, of in speeds.items()],
    )
    for mbit in MBITS:
        kept = ratios(speeds[f"{mbit} Mbit/s"], speeds["unlimited"])
        report.judge(Figure(name=f"link_cost.{mbit}.kept", value=kept))
    report.close(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
