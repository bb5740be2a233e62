"""What is done about a storage that does not answer: it is told, and waited for only so long.

A file system that hangs, a file server that went away or an S3 that takes connections and says
nothing, blocks its caller, and nothing ends such a call. So all calls while a run trains are
made in threads that can be left behind, and this module looks on: see
:meth:`raydl.storage.Storage.unanswered`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

from raydl.errors import StorageSilentError
from raydl.redaction import redact
from raydl.storage import Storage

TELL_S = 8.0
"""After so long without an answer a line says so, in seconds."""
GIVE_UP_S = 45.0
"""After so long without an answer nothing waits for it any more, in seconds."""
_GRACE_S = 1.0
"""What a call is given of a storage that was given up before, in seconds."""
_LOOK_EVERY_S = 0.05
_RELEASE_S = 5.0
_Result = TypeVar("_Result")
_given_up: list[str] = []


class SilenceTeller:
    """Says once that a storage does not answer, and once that it does again.

    Args:
        storage: whose calls, of all threads, are looked at.
        meanwhile: what happens until it does: the end of the sentence.
    """

    def __init__(self, storage: Storage, meanwhile: str) -> None:
        self._storage = storage
        self._meanwhile = meanwhile
        self._since: float | None = None

    def news(self) -> str | None:
        """Return what is to be said now, if anything."""
        silent_s, what = self._storage.unanswered()
        if self._since is None and silent_s >= TELL_S:
            self._since = time.monotonic() - silent_s
            return (
                f"the storage {self._storage.root} has not answered for {silent_s:.0f} s ({what}); "
                f"{self._meanwhile}"
            )
        if self._since is not None and silent_s < TELL_S:
            for_s, self._since = time.monotonic() - self._since, None
            return f"the storage {self._storage.root} answers again, after {for_s:.0f} s"
        return None


def tell_on_stderr(sentence: str) -> None:
    """Say something where there is no log yet, or none any more."""
    print(redact(sentence), file=sys.stderr, flush=True)


def within(
    storage: Storage,
    act: Callable[[], _Result],
    *,
    tell: Callable[[str], None] = tell_on_stderr,
    limit_s: float = GIVE_UP_S,
) -> _Result:
    """Do something that needs a storage, in a thread, for as long as the storage answers.

    Args:
        storage: which.
        act: what is done; left behind if the storage falls silent.
        tell: takes a sentence if it is silent for some seconds.
        limit_s: the longest silence, in seconds; of one that was given up before, a second.

    Raises:
        StorageSilentError: it did not answer for so long.
        Exception: what ``act`` raises.
    """
    result: list[_Result] = []
    problem: list[BaseException] = []
    ended = threading.Event()

    def work() -> None:
        try:
            result.append(act())
        except BaseException as error:
            problem.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=work, name="storage", daemon=True)
    teller = SilenceTeller(storage, f"it is given up after {limit_s:.0f} s")
    began_at = time.monotonic()
    thread.start()
    try:
        while not ended.wait(_LOOK_EVERY_S):
            sentence = teller.news()
            if sentence and storage.root not in _given_up:
                tell(sentence)
            silent_s, what = storage.unanswered(thread.ident)
            if silent_s > limit_s and time.monotonic() - began_at > _GRACE_S:
                raise StorageSilentError(storage.root, silent_s, what)
    except BaseException:  # Ctrl-C, too
        give_up(storage.root)
        raise
    if problem:
        raise problem[0]
    return result[0]


@contextmanager
def entered_within(storage: Storage, context: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter and leave a context that needs a storage, each as :func:`within` does."""
    within(storage, context.__enter__)
    try:
        yield
    finally:
        with suppress(StorageSilentError):  # then the end of this process gives the folder back
            within(
                storage,
                lambda: context.__exit__(None, None, None),
                limit_s=_RELEASE_S,
                tell=lambda _: None,
            )


def give_up(name: str) -> None:
    """Note that a thread was left behind which may never come back."""
    if name not in _given_up:
        _given_up.append(name)


def is_anything_given_up() -> bool:
    """Whether a thread of this process was left behind: an orderly exit may wait for it."""
    return bool(_given_up)
