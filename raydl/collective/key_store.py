"""The rendezvous keys of a generation's workers, and the proof that a peer is a member.

torch's TCPStore listens on all interfaces and lets anyone read, write and delete. Here an actor
of the run keeps the keys: Ray carries the calls, and requires the cluster's token.

Each generation has a secret, which a process that took a rank's place on the network does not know.
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
"""Generations kept per run: members of the previous one may still look up which workers are
late."""


class StoreServer:
    """The keys of each generation, in the process that hosts them. Thread-safe."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[int, dict[str, bytes]]] = {}
        self._changed = threading.Condition()

    def set_key(self, run_id: str, generation: int, key: str, value: bytes) -> None:
        """Write a key; do nothing if the generation is over."""
        with self._changed:
            keys = self._keys(run_id, generation)
            if keys is not None:
                keys[key] = value
                self._changed.notify_all()

    def wait_for_keys(
        self, run_id: str, generation: int, keys: list[str], timeout_s: float
    ) -> dict[str, bytes] | None:
        """Wait until ``keys`` are set or the time is up, and return all keys of the generation.

        Returns:
            All keys with their values, or None if the generation is over.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (known := self._keys(run_id, generation)) is not None:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or known.keys() >= set(keys):
                    return dict(known)
                self._changed.wait(left_s)
            return None

    def _keys(self, run_id: str, generation: int) -> dict[str, bytes] | None:
        """Return the keys of a generation, or None if it is over; the first call begins it."""
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
    """Return the 32 bytes by which a rank proves to another that it knows the secret.

    The proof includes the direction, so a received proof is worthless when it is sent back.
    """
    return hmac.digest(secret, f"{source} to {target}".encode(), hashlib.sha256)
