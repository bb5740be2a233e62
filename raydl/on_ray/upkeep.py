"""What a process that trains asks of Python and of the C library: little upkeep between steps."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's ``mallopt``."""
_MIB = 1 << 20
_GIVES_WAY = 15
"""The niceness of a thread that can wait."""


def keep_freed_memory() -> None:
    """Let memory that a step frees stay with this process, for the next step.

    glibc gives what lies free at the end of a heap back to the system, and the heap of a thread
    as soon as it is empty; each step then takes the same pages anew, of which the system clears
    every one. Without glibc nothing is done.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_MMAP_THRESHOLD, 32 * _MIB)  # the most there is
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 128 * _MIB)  # two heaps of a thread: none is given back


def give_way() -> None:
    """Let this thread compute only when others of the machine have nothing to do.

    Where the system can not do that for one thread of a process, nothing is done.
    """
    if sys.platform == "linux":  # elsewhere it would be the whole process
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            now = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, max(now, _GIVES_WAY))


def freeze_objects() -> None:
    """Let the garbage collector pass over what there is now: libraries, model, samples.

    They live as long as the process. To look through them all takes a tenth of a second each time,
    and the exchanges of a run give occasion for it every few seconds.
    """
    gc.collect()
    gc.freeze()
