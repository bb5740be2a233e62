"""Reads thousands of damaged sets of every format, and names those that end as none should.

Command:   python tests/fuzz.py [FIRST [COUNT [FORMAT ...]]]

The same damage as in ``tests/data/test_damaged_files.py``, which has few seeds. Each set must be
read, or be refused in one sentence, within a time and an amount of memory; a process that is killed
counts as broken. Each day has other seeds; FIRST repeats a set.
"""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS / "helpers")]

from damaged_sets import FORMATS, is_refused  # noqa: E402

COUNT = 100
LONGEST_S = 60
"""The longest time for one set."""
MOST_BYTES = 8 << 30
"""The most memory of a process, which Arrow and torch reserve generously."""


def broken_sets(
    name: str, seeds: Sequence[int], read: Callable[[str, int, Path], bool] = is_refused
) -> tuple[list[str], int]:
    """Return a line for each set that ends as none should, and how many were refused.

    A process reads the sets; if one of them ends it, another process goes on behind it.
    """
    context = multiprocessing.get_context("spawn")
    lines, refused, left = list[str](), 0, list(seeds)
    while left:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_read_sets, args=(read, name, left, sender), daemon=True)
        process.start()
        sender.close()
        for was_refused, problem in _received(receiver):
            seed = left.pop(0)
            refused += was_refused
            if problem:
                lines.append(f"{name}, seed {seed}: {problem}")
        process.join()
        if left:
            seed, code = left.pop(0), process.exitcode or 0
            ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            lines.append(f"{name}, seed {seed}: the process ended with {ended}")
    return lines, refused


def _received(receiver: multiprocessing.connection.Connection) -> Iterator[tuple[bool, str]]:
    while True:
        try:
            yield receiver.recv()
        except EOFError:
            return


def _read_sets(
    read: Callable[[str, int, Path], bool],
    name: str,
    seeds: Sequence[int],
    sender: multiprocessing.connection.Connection,
) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # decoders warn there
    for seed in seeds:
        signal.alarm(LONGEST_S)  # its default ends the process
        refused, problem = False, ""
        with tempfile.TemporaryDirectory() as folder:
            try:
                refused = read(name, seed, Path(folder))
            except BaseException as error:
                problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        sender.send((refused, problem))


def main(first: int, count: int, names: Sequence[str]) -> int:
    """Read damaged sets, print what is broken, and return 1 if anything is."""
    num_broken = num_refused = 0
    seeds = range(first, first + count)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for lines, refused in pool.map(lambda name: broken_sets(name, seeds), names):
            num_broken, num_refused = num_broken + len(lines), num_refused + refused
            for line in lines:
                print(line, flush=True)
    total = count * len(names)
    print(
        f"{num_broken} of {total:,} damaged sets of {len(names)} formats broken, {num_refused:,} "
        f"refused, seeds {first} to {seeds[-1]}"
    )
    return int(num_broken > 0)


if __name__ == "__main__":
    today = datetime.datetime.now(datetime.timezone.utc).date().toordinal()
    first, count = (
        int(sys.argv[n]) if len(sys.argv) > n else default
        for n, default in ((1, today * COUNT), (2, COUNT))
    )
    sys.exit(main(first, count, sys.argv[3:] or list(FORMATS)))
