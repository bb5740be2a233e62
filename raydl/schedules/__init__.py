"""Which exchanges happen when, as one worker sees it.

A schedule tells its worker what to do until the next complete exchange, and decides what
follows it. ``sync`` needs nobody for that: all ranks keep the same ledger and
see the same votes. ``messages`` does what the center's coordinator orders; it
serves async and hogwild, which differ at the center alone, and round robin.
"""

from raydl.schedules.base import Decision, Round, Strategy, WorkerContext, plan_round
from raydl.schedules.messages import AsyncStrategy
from raydl.schedules.sync import SyncStrategy

__all__ = [
    "AsyncStrategy",
    "Decision",
    "Round",
    "Strategy",
    "SyncStrategy",
    "WorkerContext",
    "plan_round",
]
