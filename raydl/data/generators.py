"""The random generators of a process: of torch, NumPy and Python.

They are seeded, and checkpoints hold their states. NumPy's is the global one, of
``np.random.shuffle`` and the like; a task seeds a ``np.random.default_rng()`` of its own.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_CPU = torch.device("cpu")


def seed_everything(seed: int) -> None:
    """Seed all generators alike in every process, so that all build the same model."""
    _seed(seed, *np.random.SeedSequence(seed).generate_state(2).tolist())


def seed_generators(seed: int, worker_id: str) -> None:
    """Seed the generators of a worker: differently per worker, equally in each run."""
    sequence = np.random.SeedSequence([seed, int(worker_id.lstrip("w"))])
    _seed(*sequence.generate_state(3).tolist())


def _seed(for_torch: int, for_numpy: int, for_python: int) -> None:
    torch.manual_seed(for_torch)
    np.random.seed(for_numpy)
    random.seed(for_python)


def generators_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the generators that a training on a device uses."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {
        "cpu": torch.get_rng_state(),
        "cuda": cuda,
        # int64, since every checkpoint can hold it.
        "numpy": [kind, np.asarray(keys, np.int64), *rest],
        "python": [version, np.array(numbers, np.int64), gauss],
    }


def load_generators(state: dict[str, Any], device: torch.device) -> None:
    """Restore the state that ``generators_state`` returned, directly or from a checkpoint."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state:  # checkpoints of earlier versions hold torch's state only
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.asarray(keys).astype(np.uint32), *rest))
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(np.asarray(numbers).tolist()), gauss))


@contextlib.contextmanager
def callers_generators_kept() -> Iterator[None]:
    """Restore the states of all generators at the end of the context."""
    state, seed = generators_state(_CPU), torch.initial_seed()
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpu_states = torch.cuda.get_rng_state_all() if has_cuda else []
    try:
        yield
    finally:
        load_generators(state, _CPU)
        if has_cuda:
            torch.cuda.set_rng_state_all(gpu_states)
        else:  # torch will seed CUDA with the newest seed when it initializes CUDA
            torch.cuda.manual_seed_all(seed)
