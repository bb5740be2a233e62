"""The state of an optimizer in a worker, at the center and in a checkpoint."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from ensembles import SHAPE, Ensemble, linear, tiny_images
from interruptions import assert_same_bits_after_an_interruption, write_and_read_checkpoint
from mails import NO_BUFFERS, mail
from replicas import PLAIN, batches, deep, flattened, replica_config, replica_of
from torch.nn import functional

from raydl.collective.sync_exchange import GradientGroup
from raydl.config import ExchangeConfig, MethodConfig, OptimizerConfig
from raydl.core.center import Center, copied_to_cpu, joined_states, split_states
from raydl.core.optimizers import make_optimizer
from raydl.core.reports import Outcome
from raydl.core.rules import Now
from raydl.methods.data_parallel import MeanGradient
from raydl.worker.in_process import LocalGroup


@pytest.mark.parametrize("name", ["adamw", "nadam", "adagrad", "rprop"])
@pytest.mark.parametrize(
    ("method", "exchange"),
    [("sync-easgd", {}), ("sync-sgd", {}), ("sync-sgd", {"fragments": 2}), ("diloco", {})],
)
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path, name, method, exchange):
    config = replica_config(
        method, name=name, lr=0.01, exchange=ExchangeConfig(timeout_s=20.0, **exchange)
    )
    assert_same_bits_after_an_interruption(config, tmp_path)


def test_decay_only_matrices_survives_a_checkpoint(tmp_path):
    config = replica_config(
        "sync-sgd", name="adamw", lr=0.01, weight_decay=0.2, decay_only_matrices=True
    )
    whole = Ensemble(config, num_workers=1, model=deep).join()
    whole.run()
    first = Ensemble(config, num_workers=1, model=deep).join()
    first.run(2)
    first.workers[0].vote(1, stop=1.0)
    first.run()
    snapshot, states = write_and_read_checkpoint(tmp_path, first, first.newest.progress.round)
    again = Ensemble(config, num_workers=1, model=deep).join(snapshot, states)
    again.run()
    assert np.array_equal(again.newest.weights, whole.newest.weights)


def test_sync_sgd_with_adamw_at_the_center_equals_adamw_on_the_joined_batch():
    config = replica_config("sync-sgd", name="adamw", lr=0.01, training={"epochs": 1})
    config = dataclasses.replace(config, method=MethodConfig(name="sync-sgd", period=1))
    images = tiny_images(24)
    ensemble = Ensemble(config, num_workers=2, images=images)
    reference = linear(SHAPE.input_shape, SHAPE.num_classes)
    reference.load_state_dict(
        ensemble.flat.state_dict_of(ensemble.flat.weights, ensemble.flat.buffers)
    )
    ensemble.join().run()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    order = np.random.default_rng([0, 0]).permutation(24)
    for start in range(0, 24, 6):
        inputs, labels = ensemble.batches.batch(order[start : start + 6])
        optimizer.zero_grad()
        functional.cross_entropy(reference(inputs), labels).backward()
        optimizer.step()
    ours = torch.tensor(ensemble.newest.weights)
    torch.testing.assert_close(ours, flattened(reference), rtol=1e-3, atol=1e-5)


def test_a_state_split_into_spans_and_joined_again_is_the_same():
    flat = torch.arange(5.0)
    optimizer = torch.optim.AdamW([flat], lr=0.1)
    flat.grad = torch.ones(5)
    optimizer.step()
    whole = copied_to_cpu(optimizer.state_dict())
    parts = split_states(whole, [2, 3])
    assert [part["state"][0]["exp_avg"].numel() for part in parts] == [2, 3]
    assert str(split_states(joined_states(parts, [2, 3]), [5])) == str([whole])


def test_spans_that_were_not_exchanged_yet_have_a_zero_state():
    flat = torch.arange(3.0)
    optimizer = torch.optim.AdamW([flat], lr=0.1)
    new = copied_to_cpu(optimizer.state_dict())
    flat.grad = torch.ones(3)
    optimizer.step()
    states = [new, copied_to_cpu(optimizer.state_dict())]
    [joined] = split_states(joined_states(states, [2, 3]), [5])
    assert joined["state"][0]["exp_avg"].tolist() == pytest.approx([0, 0, 0.1, 0.1, 0.1])


@pytest.mark.parametrize("name", ["adamw", "adagrad", "rprop", "sgd"])
def test_a_center_that_is_undone_takes_the_same_step_again(name):
    config = OptimizerConfig(name=name, lr=0.1, momentum=0.9 if name == "sgd" else None, **PLAIN)
    weights = torch.ones(4)
    center = Center(
        weights, torch.zeros(0), rule=MeanGradient(), make_optimizer=make_optimizer(config)
    )

    def move():
        center.set_lr(0.1)
        total = torch.tensor([1.0, 2.0, 3.0, 4.0])
        center.apply_(mail(MeanGradient(), total, weight=2), NO_BUFFERS, Now(1))
        return weights.clone()

    center.keep()
    once = move()
    center.undo_()
    assert torch.equal(move(), once)
    center.keep()
    twice = move()
    center.undo_()
    assert torch.equal(move(), twice)


def test_a_copied_replica_takes_the_same_next_step():
    first, _ = replica_of(OptimizerConfig(name="adamw", lr=0.01))
    other, _ = replica_of(OptimizerConfig(name="adamw", lr=0.01))
    data = batches(3)
    first.step(data[0])
    first.step(data[1])
    group = LocalGroup(2, timeout_s=30.0)

    def copied(rank, replica):
        flat = replica.flat
        partners = GradientGroup(
            group.member(rank),
            flat.num_parameters,
            len(flat.layer_sizes),
            dtype=flat.weights.dtype,
            device=flat.weights.device,
        )
        return replica.copy_first_(partners, is_first=rank == 0)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(copied, range(2), [first, other])) == [False, True]
    for replica in (first, other):
        replica.step(data[2])
    assert torch.equal(first.flat.weights, other.flat.weights)


def test_workers_that_share_a_replica_stay_identical_with_adamw():
    config = replica_config("sync-easgd", name="adamw", lr=0.01, workers=2, group_size=2)
    ensemble = Ensemble(config, num_workers=2).join()
    ensemble.run()
    one, other = (w.replica.flat.weights for w in ensemble.workers)
    assert torch.equal(one, other)


@pytest.mark.parametrize("method", ["async-easgd", "async-sgd", "hogwild-easgd"])
def test_adamw_trains_with_messages(method):
    config = replica_config(method, name="adamw", lr=0.01)
    ensemble = Ensemble(config, num_workers=2).join()
    assert ensemble.run() == [Outcome.FINISHED] * 2
    assert not np.array_equal(ensemble.center().weights, ensemble.first.weights)


@pytest.mark.parametrize("center_shards", [1, 2])
def test_rebuilt_shards_have_the_momentum_of_the_center(center_shards):
    config = replica_config(
        "async-msgd",
        lr=0.1,
        workers=1,
        momentum=0.9,
        exchange=ExchangeConfig(center_shards=center_shards, timeout_s=20.0),
    )
    ensemble = Ensemble(config, num_workers=1).join()
    ensemble.run(3)
    snapshot = ensemble.center()
    momentum = momentum_of(snapshot)
    assert momentum.abs().sum() > 0
    again = Ensemble(config, num_workers=1).join(snapshot)
    assert torch.equal(momentum_of(again.center()), momentum)


def momentum_of(center):
    """Return the momentum of a whole center, shape [num_parameters]."""
    [whole] = split_states(center.optimizer, [center.weights.size])
    return whole["state"][0]["momentum_buffer"]
