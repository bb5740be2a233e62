"""Imports torch sooner: without searches for garbage among its modules, and without its compiler.

The import makes a million objects that live as long as the process. Python's garbage collector
would look through them many times while the process starts, and once more when it ends: a quarter
of the CPU time of such a process. Import this module before everything that imports torch.
"""

import functools
import gc
import inspect
import sys
from typing import Any, TypeVar

_is_first = "torch" not in sys.modules and gc.isenabled()
if _is_first:
    gc.disable()
try:
    import torch
    from torch.optim import Optimizer
finally:
    if _is_first:
        gc.freeze()  # a process that has not imported torch yet is young, and has no garbage
        gc.enable()

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def without_compiler(kind: type[OptimizerT]) -> type[OptimizerT]:
    """Return an optimizer class of torch without the decorators that import torch's compiler.

    The decorators matter only in a compiled training step. The import takes a second of CPU time,
    which each process with an optimizer would spend before its first step.
    """
    names = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    compute = inspect.unwrap(kind.step)

    @functools.wraps(compute)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
            return compute(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {**methods, "step": step})
