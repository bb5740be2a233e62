"""Calls of actors that are under way, and whom they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayTaskError

from raydl.crew import Event
from raydl.errors import RaydlError

Handler = Callable[[Any], "list[Event]"]

_DEATHS = {
    "its worker process has died": "its process was killed, or crashed",
    "its node has died": "its node was lost",
}
"""What Ray says, below lines of numbers, of an actor that died; and what a person reads."""


@dataclass(frozen=True)
class Call:
    """A call under way."""

    who: str
    """Which process."""
    handle: Handler
    """Makes events of the answer."""
    task: str = ""
    """What is given up if the call fails; empty: the process counts as lost."""
    generation: int = 0
    """Of a worker's loop; 0: it is no loop."""


class Calls:
    """All calls under way."""

    def __init__(self) -> None:
        self._by_ref: dict[Any, Call] = {}

    def __iter__(self) -> Any:
        return iter(list(self._by_ref.values()))

    def expect(
        self, ref: Any, who: str, handle: Handler, *, task: str = "", generation: int = 0
    ) -> None:
        """Note a call."""
        self._by_ref[ref] = Call(who, handle, task, generation)

    def forget(self, is_meant: Callable[[Call], bool]) -> None:
        """Wait no more for some."""
        self._by_ref = {ref: call for ref, call in self._by_ref.items() if not is_meant(call)}

    def wait(self, timeout_s: float) -> list[Any]:
        """Return the references of answers that are there, after ``timeout_s`` at the latest."""
        ready, _ = ray.wait(list(self._by_ref), num_returns=1, timeout=timeout_s)
        if ready:  # one came: take all the others that came with it
            ready, _ = ray.wait(
                list(self._by_ref), num_returns=len(self._by_ref), timeout=0, fetch_local=False
            )
        return list(ready)

    def take(self, ref: Any) -> Call | None:
        """Return the call behind a reference; None: it was forgotten meanwhile."""
        return self._by_ref.pop(ref, None)


def original(error: RayTaskError) -> Exception:
    """Return raydl's own error as it was raised; a user's keeps Ray's text with its traceback."""
    cause = error.cause
    return cause if isinstance(cause, RaydlError) else error


def in_few_words(error: BaseException) -> str:
    """Return why a call failed: how the actor died, or the first of the lines that Ray says."""
    text = str(error).strip()
    known = [words for said, words in _DEATHS.items() if said in text]
    return (*known, *text.splitlines(), type(error).__name__)[0]
