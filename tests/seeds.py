"""Simulates thousands of runs with random faults, and names those that do not end as they should.

Command:   python tests/seeds.py [FIRST [COUNT]]

The same simulations as in ``tests/elastic/test_controller_simulated.py``,
``test_controller_simulated_messages.py`` and ``test_decide.py``, which have few seeds: with each
seed one run to the end and one that is stopped, of both kinds of methods, with events in order, and
with events that are late, reordered and repeated. Each day has other seeds; FIRST repeats a run.
"""

from __future__ import annotations

import datetime
import os
import random
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS / "helpers"), str(TESTS / "elastic")]

from late_mail import late  # noqa: E402
from simulations import run  # noqa: E402
from test_controller_simulated import SimulatedRounds  # noqa: E402
from test_controller_simulated_messages import SimulatedMessages  # noqa: E402

COUNT = 3000
KINDS = (
    (SimulatedRounds, 400),
    (SimulatedMessages, 1500),
    (late(SimulatedRounds), 400),
    (late(SimulatedMessages), 1500),
)
"""Simulated worker groups, and their last rounds."""


def broken_runs(seed, kinds=KINDS):
    """Return a line for each run with a seed that raises an error."""
    lines = []
    for kind, last_round in kinds:
        for stop_at in (None, random.Random(seed).uniform(0.0, 40.0)):
            try:
                run(kind, seed, last_round=last_round, stop_at=stop_at)
            except Exception as error:
                end = "to the end" if stop_at is None else f"stopped at {stop_at:.2f} s"
                text = " ".join(str(error).split())[:300]
                lines.append(f"{kind.__name__}, seed {seed}, {end}: {type(error).__name__}: {text}")
    return lines


def main(first: int, count: int) -> int:
    """Simulate, print what is broken, and return 1 if anything is."""
    num_broken, seeds = 0, range(first, first + count)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found: Iterable[list[str]] = pool.map(broken_runs, seeds, chunksize=10)
        for lines in found:
            num_broken += len(lines)
            for line in lines:
                print(line, flush=True)
    num_runs = 2 * len(KINDS) * count
    print(f"{num_broken} of {num_runs:,} runs broken, seeds {first} to {seeds[-1]}")
    return int(num_broken > 0)


if __name__ == "__main__":
    today = datetime.datetime.now(datetime.timezone.utc).date()
    words = [int(word) for word in sys.argv[1:]]
    sys.exit(main(*words, *(today.toordinal() * COUNT, COUNT)[len(words) :]))
