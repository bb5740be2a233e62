"""Clocks that stand still."""

import time
from types import SimpleNamespace

from raydl.run import control_channel as run_session


def halt_the_clock(monkeypatch):
    """Let no time pass between what is told and who reads it."""
    now = time.time()
    monkeypatch.setattr(run_session, "time", SimpleNamespace(**vars(time) | {"time": lambda: now}))
