"""The pending calls of actors, and the handlers of their answers."""

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
"""How long answers that can wait are gathered, in seconds: for each pending call, and at most."""
_PAUSE_S = 0.01
"""The wait if no answer is due, in seconds: threads of the driver may bring results."""
_DEATHS = {
    "its worker process has died": "its process was killed, or crashed",
    "its node has died": "its node was lost",
}
"""Ray's sentences about an actor that died, which follow lines of numbers, and ours."""


@dataclass(frozen=True)
class Call:
    """A pending call."""

    who: str
    """The called process."""
    handle: Handler
    """Turns the answer into events."""
    task: str = ""
    """Name of the work to give up if the call fails; empty: the process counts as lost."""
    generation: int = 0
    """Generation of a worker's loop; 0: the call runs no loop."""
    can_wait: bool = False
    """Whether its answer may be handled a little later, together with others."""


class PendingCalls:
    """All pending calls."""

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
        """Add a call; for the arguments see ``Call``."""
        self._by_ref[ref] = Call(who, handle, task, generation, can_wait)

    def forget(self, is_meant: Callable[[Call], bool]) -> None:
        """Drop the calls for which ``is_meant`` is true: their answers are ignored."""
        self._by_ref = {ref: call for ref, call in self._by_ref.items() if not is_meant(call)}

    def wait(self, timeout_s: float) -> list[Any]:
        """Return the references of the answers that have arrived, after at most ``timeout_s``.

        If the first answer can wait, others are gathered for a moment, which is longer the more
        calls are pending. So the answers of hundreds of workers take few polls, and each poll costs
        something per worker.
        """
        refs = list(self._by_ref)
        if not refs:  # Ray would return at once, and the caller would ask again without a pause
            time.sleep(min(_PAUSE_S, timeout_s))
            return []
        ready, _ = ray.wait(refs, num_returns=1, timeout=timeout_s)
        if not ready:
            return []
        if self._by_ref[ready[0]].can_wait:
            gather_s = min(_GATHER_S * len(refs), _LONGEST_GATHER_S, timeout_s)
            urgent = [ref for ref, call in self._by_ref.items() if not call.can_wait]
            if urgent:
                ray.wait(urgent, num_returns=1, timeout=gather_s, fetch_local=False)
            else:
                time.sleep(gather_s)
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return list(ready)

    def pop_call(self, ref: Any) -> Call | None:
        """Remove and return the call of a reference, or None if it was forgotten."""
        return self._by_ref.pop(ref, None)


def original(error: RayTaskError) -> Exception:
    """Return raydl's own error as it was raised; a user's keeps Ray's text with its traceback."""
    cause = error.cause
    return cause if isinstance(cause, RaydlError) else error


def in_few_words(error: BaseException) -> str:
    """Return why a call failed: how the actor died, or the first line of Ray's message."""
    text = str(error).strip()
    known = [words for sentence, words in _DEATHS.items() if sentence in text]
    return (*known, *text.splitlines(), type(error).__name__)[0]
