"""Who may talk when, as one worker sees it.

A schedule tells its worker what to do until the next complete exchange, and decides what
follows it. ``sync`` needs nobody for that: all ranks keep the same ledger and
see the same votes. ``messages`` does what the center's dispatcher orders; it
serves async and hogwild, which differ at the center alone, and round robin.
"""

from raydl.schedules.base import Decision, Round, Schedule, Site, plan_talks
from raydl.schedules.messages import MessageSchedule
from raydl.schedules.sync import SyncSchedule

__all__ = ["Decision", "MessageSchedule", "Round", "Schedule", "Site", "SyncSchedule", "plan_talks"]
