"""Fault plans: which faults hit which processes of a run, and when. Independent of Ray.

``plan`` parses the user's file; ``injector`` decides in each process of the run which faults are
due; ``inflict`` inflicts them on that process.
"""

from raydl.faults.inflict import Held, Partition, ProcessInflicts, inflict_here
from raydl.faults.injector import Announced, Inflicts, Injector
from raydl.faults.plan import Fault, FaultPlan

__all__ = [
    "Announced",
    "Fault",
    "FaultPlan",
    "Held",
    "Inflicts",
    "Injector",
    "Partition",
    "ProcessInflicts",
    "inflict_here",
]
