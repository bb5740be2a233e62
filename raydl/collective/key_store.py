"""The keys by which the workers of a generation meet, and the proof that they are its members.

A TCPStore of torch listens on all interfaces and lets anybody read, write and delete. These keys
are kept by an actor of the run, so that Ray carries them, and asks for the cluster's token.

Each generation has a secret. A process that took a rank's place on the network does not know it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time

SECRET = "secret"
"""The key of a generation's secret: 32 random bytes."""
PROOF_BYTES = 32
_KEPT = 2
"""Generations of a run that are kept: members of the one before may still ask who is late."""


class StoreServer:
    """The keys of each generation, in the process that hosts them. Any thread may call."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[int, dict[str, bytes]]] = {}
        self._changed = threading.Condition()

    def set_key(self, run_id: str, generation: int, key: str, value: bytes) -> None:
        """Write a key; nothing is written to a generation that is over."""
        with self._changed:
            keys = self._keys(run_id, generation)
            if keys is not None:
                keys[key] = value
                self._changed.notify_all()

    def wait_for_keys(
        self, run_id: str, generation: int, keys: list[str], timeout_s: float
    ) -> dict[str, bytes] | None:
        """Return all keys of a generation once the wanted ones are there, or the time is up.

        Returns:
            None if the generation is over.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (found := self._keys(run_id, generation)) is not None:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or found.keys() >= set(keys):
                    return dict(found)
                self._changed.wait(left_s)
            return None

    def _keys(self, run_id: str, generation: int) -> dict[str, bytes] | None:
        """Return the keys of a generation, which begins by being asked for; None: it is over."""
        run = self._runs.setdefault(run_id, {})
        if generation not in run:
            if run and generation < max(run):
                return None
            run[generation] = {SECRET: secrets.token_bytes(32)}
            for old in sorted(run)[:-_KEPT]:
                del run[old]
            self._changed.notify_all()
        return run[generation]


def proof(secret: bytes, *, source: int, target: int) -> bytes:
    """Return a rank's proof to another one that it knows the secret: 32 bytes.

    The direction is part of it: a proof that was received proves nothing when it is sent back.
    """
    return hmac.digest(secret, f"{source} to {target}".encode(), hashlib.sha256)
