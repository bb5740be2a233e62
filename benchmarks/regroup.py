"""How soon the actors of a user's group sum again after one of three is killed.

Command:   python -m benchmarks.regroup            (--quick: once)

Three actors sum 1,000 numbers again and again by ``ray.util.collective``; one is killed with
SIGKILL. The driver learns from the errors of the others which one is missing, and has them form the
next generation and sum. Of each repeat, from the kill on, in milliseconds:

failed      until both survivors have raised, with the name of the killed one
formed      until both are in the new group
summed      until the driver has the first sum of the new group

The newcomer of the next repeat is up before it begins.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import ray
from ray.util import collective

import raydl
from benchmarks.measure import Figure, Report, Spread, options_of
from raydl.errors import ExchangeError

_BOUND_S = 120.0
_STEADY_S = 0.5
_NAME = "regroup"


class Member:
    """An actor with a place in the group."""

    def pid(self) -> int:
        """Return its process id."""
        return os.getpid()

    def form(self, members: list[str], member: str, generation: int) -> None:
        """Form a generation."""
        raydl.init_collective_group(members, member, _NAME, generation=generation)

    def sum(self) -> float:
        """Return the sum of one over all members."""
        ones = np.ones(1000, np.float32)
        collective.allreduce(ones, _NAME)
        return float(ones[-1])

    def sum_until_it_fails(self) -> tuple[str, ...]:
        """Return the ids of the missing members, once there are some."""
        while True:
            try:
                self.sum()
            except ExchangeError as error:
                return error.missing


def _all(refs: list[Any]) -> list[Any]:
    return list(ray.get(refs, timeout=_BOUND_S))


class Group:
    """The members, and the generations that they form."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._generation = 0
        self._num_started = 0

    def fill(self) -> None:
        """Start members until there are three, and form a generation of them."""
        while len(self._actors) < 3:
            member = ray.remote(num_cpus=0)(Member)
            self._actors[f"m{self._num_started}"] = member.remote()
            self._num_started += 1
        self.form()

    def form(self) -> None:
        """Form the next generation of all that are there."""
        members = list(self._actors)
        _all([a.form.remote(members, m, self._generation) for m, a in self._actors.items()])
        self._generation += 1

    def lose_one(self) -> tuple[float, float, float]:
        """Kill a member while all sum; return the seconds until failed, formed and summed."""
        *_, lost = self._actors
        [pid] = _all([self._actors[lost].pid.remote()])
        waiting = {m: a.sum_until_it_fails.remote() for m, a in self._actors.items()}
        time.sleep(_STEADY_S)
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        del self._actors[lost], waiting[lost]
        assert _all(list(waiting.values())) == [(lost,)] * 2
        failed_s = time.monotonic() - began
        self.form()
        formed_s = time.monotonic() - began
        assert _all([a.sum.remote() for a in self._actors.values()]) == [2.0] * 2
        return failed_s, formed_s, time.monotonic() - began


def main() -> None:
    """Take the figures."""
    options = options_of(__doc__).parse_args()
    report = Report.of_command("regroup", options)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    group, taken = Group(), []
    for _ in range(options.repeats or (1 if options.quick else 5)):
        group.fill()
        taken.append(group.lose_one())
    rows = [[f"{1e3 * seconds:.0f}" for seconds in times] for times in taken]
    report.table(("failed ms", "formed ms", "summed ms"), rows)
    summed = Spread.of([summed_s for _, _, summed_s in taken])
    report.judge(Figure(name="regroup.3.kill-to-sum-s", value=summed))
    report.close(options.out)
    ray.shutdown()


if __name__ == "__main__":
    main()
