"""The random generators of a process: torch's, NumPy's and Python's own.

Begun from a seed, kept in a checkpoint. NumPy's is the global one, of ``np.random.shuffle`` and
the like; a ``np.random.default_rng()`` of a task's own is the task's to seed.
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
    """Begin all generators from one seed: a model is then built alike in every process."""
    _seed(*np.random.SeedSequence(seed).generate_state(2).tolist(), torch_seed=seed)


def seed_generators(seed: int, worker_id: str) -> None:
    """Begin the generators of a worker: others for each worker, the same in each run."""
    sequence = np.random.SeedSequence([seed, int(worker_id.lstrip("w"))])
    for_torch, for_numpy, for_python = sequence.generate_state(3).tolist()
    _seed(for_numpy, for_python, torch_seed=for_torch)


def _seed(for_numpy: int, for_python: int, *, torch_seed: int) -> None:
    torch.manual_seed(torch_seed)
    np.random.seed(for_numpy)
    random.seed(for_python)


def generators_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the generators that training on a device draws from."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {
        "cpu": torch.get_rng_state(),
        "cuda": cuda,
        # As int64, which every checkpoint can hold.
        "numpy": [kind, np.asarray(keys, np.int64), *rest],
        "python": [version, np.array(numbers, np.int64), gauss],
    }


def load_generators(state: dict[str, Any], device: torch.device) -> None:
    """Take over what ``generators_state`` returned, perhaps by way of a checkpoint."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state:  # earlier checkpoints have torch's alone
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.asarray(keys).astype(np.uint32), *rest))
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(np.asarray(numbers).tolist()), gauss))


@contextlib.contextmanager
def callers_generators_kept() -> Iterator[None]:
    """Leave the generators of a caller as they were, whatever is seeded and drawn meanwhile."""
    state, seed = generators_state(_CPU), torch.initial_seed()
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    on_gpus = torch.cuda.get_rng_state_all() if has_cuda else []
    try:
        yield
    finally:
        load_generators(state, _CPU)
        if has_cuda:
            torch.cuda.set_rng_state_all(on_gpus)
        else:  # torch keeps the newest seed for the moment at which it starts CUDA
            torch.cuda.manual_seed_all(seed)
