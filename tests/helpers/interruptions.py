"""Runs in one process that stop and resume from a checkpoint."""

import numpy as np
import torch
from ensembles import Ensemble, tiny_images
from replicas import deep

from raydl.checkpoint.store import CheckpointStore
from raydl.checkpoint.writer import checkpoint_of, snapshot_of
from raydl.core.reports import Outcome
from raydl.core.worker_group import Collected
from raydl.storage import Storage


def write_and_read_checkpoint(folder, ensemble, round):
    """Write a checkpoint of an ensemble; return its snapshot and worker states, read again."""
    store = CheckpointStore(Storage(str(folder)))
    states = {w.worker_id: w.pop_kept(round) for w in ensemble.workers}
    store.write(checkpoint_of(Collected(ensemble.newest, states), ensemble.flat, seconds=0.0))
    checkpoint, damage = store.read()
    assert not damage
    return snapshot_of(checkpoint, ensemble.flat), checkpoint.workers


def assert_same_bits_after_an_interruption(config, folder):
    """Assert that a stopped and resumed run ends with the bits of an uninterrupted one."""
    images = tiny_images(31)
    whole = Ensemble(config, num_workers=2, images=images, model=deep).join()
    whole.run()

    first = Ensemble(config, num_workers=2, images=images, model=deep).join()
    first.run(2)
    for worker in first.workers:
        worker.vote(1, stop=1.0)
    assert set(first.run()) == {Outcome.STOPPED}
    snapshot, states = write_and_read_checkpoint(folder, first, first.newest.progress.round)
    again = Ensemble(config, num_workers=2, images=images, model=deep).join(snapshot, states)
    again.run()
    assert np.array_equal(again.newest.weights, whole.newest.weights)
    for one, other in zip(again.workers, whole.workers, strict=True):
        assert torch.equal(one.replica.flat.weights, other.replica.flat.weights)
