"""Entries of fault plans."""

from raydl.faults import Fault


def kill_fault(target="w1", when="step", at=4.0, *, number=0, draw=0):
    return Fault(number, "kill", target, when, at, draw=draw)
