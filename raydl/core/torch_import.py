"""Imports torch sooner: without searches for garbage among the objects of its modules.

The import makes a million objects that live as long as the process. Python's garbage collector
would look through them many times while the process starts, and once more when it ends: a quarter
of the CPU time of such a process. Import this module before everything that imports torch.
"""

import gc
import sys

if "torch" not in sys.modules and gc.isenabled():
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()  # a process that has not imported torch yet is young, and has no garbage
        gc.enable()
