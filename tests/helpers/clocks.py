"""A stopped clock."""

import time
from types import SimpleNamespace

from raydl.run import control_channel as run_session


def halt_the_clock(monkeypatch):
    """Stop the clock of the control channel."""
    now = time.time()
    monkeypatch.setattr(run_session, "time", SimpleNamespace(**vars(time) | {"time": lambda: now}))
