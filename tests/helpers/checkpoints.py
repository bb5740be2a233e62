"""Checkpoints of small states, and a storage that behaves like an object store."""

import torch

from raydl.checkpoint.store import Checkpoint
from raydl.core.progress import Progress
from raydl.core.saved_state import SavedState
from raydl.storage import Storage


def make_checkpoint(round, value=1.0):
    optimizer = torch.optim.SGD([torch.ones(3)], lr=0.1, momentum=0.9).state_dict()
    return Checkpoint(
        progress=Progress(round=round, generation=2, epoch=1.0, num_samples=10 * round),
        seconds=1.5,
        center={"linear.weight": torch.full((2, 3), value), "linear.bias": torch.zeros(2)},
        state={"ledger": {"free": [[0, 3]]}, "optimizer": optimizer},
        workers={"w0": {"weights": torch.arange(8.0)}, "w1": {"weights": torch.ones(8)}},
    )


def same_state(a, b):
    """Return whether nested values are bitwise equal."""
    if isinstance(a, SavedState):
        return same_state(a.load(), b)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and all(same_state(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and (a == b or (a != a and b != b))


class ObjectStore(Storage):
    """A storage that cannot rename folders, like S3."""

    is_object_store = True

    def move_dir(self, name, new_name):
        raise AssertionError("object stores cannot rename folders")
