"""The random generators of one worker: begun from a seed, kept in a checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def seed_generators(seed: int, worker_id: str) -> None:
    """Begin the generators of a worker: others for each worker, the same in each run."""
    sequence = np.random.SeedSequence([seed, int(worker_id.lstrip("w"))])
    torch.manual_seed(int(sequence.generate_state(1)[0]))


def generators_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the generators that training on a device draws from."""
    cuda = torch.cuda.get_rng_state() if device.type == "cuda" else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def load_generators(state: dict[str, Any], device: torch.device) -> None:
    """Take over what :func:`generators_state` returned."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
