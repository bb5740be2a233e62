"""Faults by plan: what goes wrong in a run, on whom, and when. Knows no Ray.

``plan`` reads the user's file; ``injector`` decides, inside a process of the run, what is
due; ``inflict`` does it to that process.
"""

from raydl.faults.inflict import Held, Partition, ProcessInflicts, inflict_here
from raydl.faults.injector import Inflicts, Injector
from raydl.faults.plan import Fault, FaultPlan

__all__ = [
    "Fault",
    "FaultPlan",
    "Held",
    "Inflicts",
    "Injector",
    "Partition",
    "ProcessInflicts",
    "inflict_here",
]
