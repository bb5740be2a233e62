"""Calls of actors that are under way, and whom they belong to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayTaskError

from raydl.core.worker_group import Event
from raydl.errors import RaydlError

Handler = Callable[[Any], "list[Event]"]

_GATHER_S, _LONGEST_GATHER_S = 0.2e-3, 0.1
"""How long answers that can wait are gathered, for each call under way and at most, in seconds."""
_DEATHS = {
    "its worker process has died": "its process was killed, or crashed",
    "its node has died": "its node was lost",
}
"""Ray's sentences on an actor that died, below lines of numbers, and ours for the user."""


@dataclass(frozen=True)
class Call:
    """A call under way."""

    who: str
    """Which process."""
    handle: Handler
    """Makes events of the answer."""
    task: str = ""
    """Name of the work that is given up if the call fails; empty: the process counts as lost."""
    generation: int = 0
    """Of a worker's loop; 0: it is no loop."""
    can_wait: bool = False
    """Whether its answer may come a little later, with those of others."""


class PendingCalls:
    """All calls under way."""

    def __init__(self) -> None:
        self._by_ref: dict[Any, Call] = {}

    def __iter__(self) -> Any:
        return iter(list(self._by_ref.values()))

    def expect(
        self,
        ref: Any,
        who: str,
        handle: Handler,
        *,
        task: str = "",
        generation: int = 0,
        can_wait: bool = False,
    ) -> None:
        """Note a call."""
        self._by_ref[ref] = Call(who, handle, task, generation, can_wait)

    def forget(self, is_meant: Callable[[Call], bool]) -> None:
        """Wait no more for some."""
        self._by_ref = {ref: call for ref, call in self._by_ref.items() if not is_meant(call)}

    def wait(self, timeout_s: float) -> list[Any]:
        """Return the references of answers that are there, after ``timeout_s`` at the latest.

        One that can wait does so for a moment, and the longer the more there are: all answers of
        hundreds of workers are looked at in few polls, each of which costs something per worker.
        """
        refs = list(self._by_ref)
        ready, _ = ray.wait(refs, num_returns=1, timeout=timeout_s)
        if not ready:
            return []
        if self._by_ref[ready[0]].can_wait:
            urgent = [ref for ref, call in self._by_ref.items() if not call.can_wait]
            _wait_for_one(urgent, min(_GATHER_S * len(refs), _LONGEST_GATHER_S, timeout_s))
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return list(ready)

    def pop_call(self, ref: Any) -> Call | None:
        """Return the call behind a reference; None: it was forgotten meanwhile."""
        return self._by_ref.pop(ref, None)


def _wait_for_one(refs: list[Any], timeout_s: float) -> None:
    """Wait for the first of some answers, or for so long."""
    if refs:
        ray.wait(refs, num_returns=1, timeout=timeout_s, fetch_local=False)
    else:
        time.sleep(timeout_s)


def original(error: RayTaskError) -> Exception:
    """Return raydl's own error as it was raised; a user's keeps Ray's text with its traceback."""
    cause = error.cause
    return cause if isinstance(cause, RaydlError) else error


def in_few_words(error: BaseException) -> str:
    """Return why a call failed: how the actor died, or the first of the lines that Ray says."""
    text = str(error).strip()
    known = [words for said, words in _DEATHS.items() if said in text]
    return (*known, *text.splitlines(), type(error).__name__)[0]
