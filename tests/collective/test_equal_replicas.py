"""Workers that train the same batches are found, by one number in the header of a round."""

import itertools
import warnings
import zlib

import numpy as np
import pytest
import torch
from ensembles import Ensemble, tiny_images
from user_loops import Threads, run_all, user_loop_config

from raydl.collective.equal_replicas import EqualityCheck, checksum
from raydl.config import ExchangeConfig, MethodConfig, OptimizerConfig, TrainConfig, TrainingConfig
from raydl.data import ImageSet

WORKERS = ("w0", "w1", "w2", "w3")


def compare(numbers_of, *, rounds, replicas=WORKERS):
    """Return what all ranks find; ``numbers_of`` is a function of (worker, round)."""
    groups = [(r,) if isinstance(r, str) else r for r in replicas]
    workers = [worker for group in groups for worker in group]
    ranks = {w: EqualityCheck(groups, generation=1) for w in workers}
    for round in range(rounds):
        sent = [
            np.float32(check.number_of(w, numbers_of(w, round), round=round))
            for w, check in ranks.items()
        ]
        total = float(np.sum(sent, dtype=np.float32))
        for check in ranks.values():
            check.note(total, round=round)
    found = {check.found for check in ranks.values()}
    assert len(found) == 1, "all ranks find the same"
    return found.pop()


def distinct(worker, round):
    return (float(zlib.crc32(f"{worker} {round}".encode())),)


def test_replicas_that_differ_are_not_equal_however_long_they_train():
    assert compare(distinct, rounds=3000) is None


def test_two_equal_replicas_are_found_in_their_third_round():
    found = compare(lambda worker, round: (0.5 * round,), rounds=3, replicas=("w0", "w1"))
    assert (found.first, found.second, found.since_round) == (("w0",), ("w1",), 0)
    assert compare(lambda worker, round: (0.5,), rounds=2, replicas=("w0", "w1")) is None


@pytest.mark.parametrize("pair", list(itertools.combinations(WORKERS, 2)))
def test_two_equal_replicas_among_others_are_found(pair):
    def numbers(worker, round):
        return (0.5 + round,) if worker in pair else distinct(worker, round)

    found = compare(numbers, rounds=200)
    assert (*found.first, *found.second) == pair


@pytest.mark.parametrize("known", [(), ("w0",), ("w1",)])
def test_a_replica_that_has_taken_no_step_equals_none(known):
    numbers = lambda worker, round: (0.5,) if worker in known else None  # noqa: E731
    assert compare(numbers, rounds=20, replicas=("w0", "w1")) is None


def test_replicas_that_are_equal_now_and_then_are_not_reported():
    def numbers(worker, round):
        return (1.0,) if round % 3 else distinct(worker, round)

    assert compare(numbers, rounds=300, replicas=("w0", "w1")) is None


def test_one_worker_is_compared_with_none():
    assert compare(lambda worker, round: (0.5,), rounds=9, replicas=("w0",)) is None


def test_workers_that_share_a_replica_count_as_one():
    groups = (("w0", "w1"), ("w2", "w3"))

    def numbers(worker, round):
        return (1.0 if worker in groups[0] else 2.0,)

    assert compare(numbers, rounds=20, replicas=groups) is None
    found = compare(lambda worker, round: (1.0,), rounds=3, replicas=groups)
    assert (found.first, found.second) == groups
    assert found.sentence("do this").startswith(
        "the replicas of w0 and w1 and of w2 and w3 have been equal since round 0: they train the "
        "same batches"
    )


def test_a_checksum_is_exact_in_float32_and_changes_with_the_round():
    sums = {checksum((value, 2.0), round=round) for value in (0.5, 0.25) for round in range(50)}
    assert len(sums) == 100
    assert all(0 < number == np.float32(number) < 2**24 for number in sums)


# in runs


def one_sample(num_samples):
    """Return a data set whose samples are all the same."""
    images = tiny_images(1)
    return ImageSet(
        np.repeat(images.images, num_samples, axis=0),
        np.repeat(images.labels, num_samples),
        images.class_names,
    )


def train(images, *, num_workers=2, name="sync-easgd", lr=0.1, exchange=None, **method):
    config = TrainConfig(
        method=MethodConfig(name=name, period=4, **method),
        training=TrainingConfig(epochs=1000, batch_size=4),
        optimizer=OptimizerConfig(lr=lr, lr_schedule="constant", warmup=0.0),
        exchange=ExchangeConfig(**exchange or {}),
    )
    ensemble = Ensemble(config, num_workers=num_workers, images=images).join()
    ensemble.run(rounds=8)
    return [worker.report().equal_replicas for worker in ensemble.workers]


WITH_LOCAL_STEPS = ("sync-easgd", "sync-measgd", "local-sgd", "diloco")
DELAYED = {"fragments": 2, "delay": 1}


@pytest.mark.parametrize("exchange", [{}, {"compression": "int8"}, DELAYED], ids=str)
@pytest.mark.parametrize("name", WITH_LOCAL_STEPS)
def test_workers_of_a_run_that_train_the_same_batches_say_so(name, exchange):
    found = train(one_sample(4000), name=name, exchange=exchange)
    assert found[0] == found[1] is not None
    assert (found[0].first, found[0].second) == (("w0",), ("w1",))


def test_workers_that_exchange_without_overlap_say_so_too():
    assert train(one_sample(4000), exchange={"overlap": False})[0] is not None


@pytest.mark.parametrize("name", WITH_LOCAL_STEPS)
def test_workers_of_a_run_with_samples_that_differ_are_not_equal(name):
    assert train(tiny_images(144), name=name) == [None, None]


def test_replicas_with_dynamic_weights_are_compared_too():
    assert train(one_sample(4000), dynamic_weights=True)[0] is not None


@pytest.mark.parametrize("name", ["sync-sgd", "sync-msgd"])
def test_a_method_without_local_steps_has_equal_replicas_by_design(name):
    assert train(one_sample(4000), name=name) == [None, None]


def test_replicas_that_do_not_move_are_not_said_to_be_equal():
    assert train(one_sample(4000), lr=1e-30) == [None, None]


def test_groups_with_samples_that_differ_are_not_equal():
    assert train(tiny_images(144), num_workers=4, group_size=2) == [None] * 4
    found = train(one_sample(4000), num_workers=4, group_size=2)
    assert found[0].second == ("w2", "w3")


# under attach


def attached(seeds, *, num_rounds=6, name="sync-easgd", lrs=(0.1,), period=2):
    """Train in user loops with the batches of some seeds; return their warnings."""
    threads = Threads(user_loop_config(MethodConfig(name=name, period=period), len(seeds)))

    def loop(rank, seed):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        groups = [
            {"params": layer.parameters(), "lr": lrs[n % len(lrs)]} for n, layer in enumerate(model)
        ]
        optimizer = torch.optim.SGD(groups)
        generator = torch.Generator().manual_seed(seed)
        with threads.attach(model, optimizer, f"w{rank}") as elastic:
            for _ in range(num_rounds * period):
                optimizer.zero_grad()
                model(torch.randn(8, 4, generator=generator)).square().mean().backward()
                elastic.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_all([lambda r=r, s=s: loop(r, s) for r, s in enumerate(seeds)])
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("name", ["sync-easgd", "local-sgd"])
def test_attached_workers_with_the_same_seed_are_warned_once_each(name):
    said = attached([7, 7], name=name, num_rounds=12)
    assert len(said) == 2
    assert said[0] == said[1]
    assert "the replicas of w0 and of w1 have been equal since round" in said[0]
    assert "torch.manual_seed(seed + elastic.rank)" in said[0]


def test_attached_workers_with_other_seeds_are_not_warned():
    assert attached([7, 8]) == []


def test_attached_workers_at_rate_zero_are_not_warned():
    assert attached([7, 7], lrs=(0.0,)) == []


def test_a_first_group_at_rate_zero_does_not_hide_the_others():
    assert len(attached([7, 7], lrs=(0.0, 0.1))) == 2


def test_two_of_three_attached_workers_with_the_same_seed_are_named():
    said = attached([7, 8, 7], num_rounds=60)
    assert len(said) == 3
    assert all("the replicas of w0 and of w2" in sentence for sentence in said)
