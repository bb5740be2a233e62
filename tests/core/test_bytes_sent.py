"""What the exchanges of a run send is counted, and may set its length."""

import dataclasses

import pytest
from coordinators import enter, make_coordinator, settle
from ensembles import Ensemble

from raydl.collective.sync_exchange import HEADER_SIZE
from raydl.collective.sync_strategy import bytes_of_all
from raydl.config import (
    ExchangeConfig,
    MethodConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.core.codecs import parse_codec
from raydl.core.progress import Progress
from raydl.core.reports import Outcome
from raydl.core.stop_condition import StopCondition
from raydl.errors import ConfigError
from raydl.methods import resolve

NUM_WEIGHTS = 51
MESSAGE = 4 * (NUM_WEIGHTS + HEADER_SIZE)


def run_of(method, *, num_workers=2, period=1, group_size=1, exchange=None, **training):
    training = training or {"samples": 96}
    config = TrainConfig(
        method=MethodConfig(name=method, period=period, group_size=group_size),
        training=TrainingConfig(batch_size=4, **training),
        scaling=ScalingConfig(num_workers=num_workers),
        exchange=ExchangeConfig(**exchange or {}),
    )
    return Ensemble(config, num_workers=num_workers).join()


def last(run):
    """Return the progress at the end of a run."""
    assert set(run.run()) == {Outcome.FINISHED}
    if run.job.method.is_sync:
        return run.published[max(run.published)].progress
    return run.service.coordinator.state()["progress"]


def test_a_sum_over_p_workers_counts_as_2_p_minus_1_messages_and_gathering_as_p_times_that():
    assert bytes_of_all(100, 1, is_gathered=False) == 0
    assert bytes_of_all(100, 4, is_gathered=False) == 2 * 3 * 100
    assert bytes_of_all(100, 4, is_gathered=True) == 4 * 3 * 100


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_synchronous_run_counts_every_round(num_workers):
    done = last(run_of("sync-easgd", num_workers=num_workers, period=2))
    assert done.num_messages == num_workers * done.round
    assert done.num_bytes == done.round * 2 * (num_workers - 1) * MESSAGE


def test_messages_of_a_codec_count_as_they_are_sent_to_every_other_worker():
    done = last(run_of("sync-easgd", num_workers=3, exchange={"compression": "int8"}))
    encoded = -(-parse_codec("int8").num_bytes(NUM_WEIGHTS) // 4) * 4
    assert done.num_bytes == done.round * 3 * 2 * (encoded + 4 * HEADER_SIZE)


def test_each_fragment_is_a_message():
    done = last(run_of("sync-easgd", period=2, exchange={"fragments": 2}))
    assert done.num_messages == 2 * 2 * done.round


def test_workers_that_share_a_replica_send_their_gradients_too():
    alone = last(run_of("sync-easgd", num_workers=4, period=2))
    shared = last(run_of("sync-easgd", num_workers=4, period=2, group_size=2))
    assert shared.round == alone.round
    gradients = shared.local_step * 2 * 2 * 4 * NUM_WEIGHTS
    assert shared.num_bytes == alone.num_bytes + gradients


def test_a_worker_alone_with_the_center_counts_its_messages_and_the_answers():
    done = last(run_of("async-easgd"))
    assert done.num_messages == done.round
    num_last = 2  # the answer to the last message of each worker comes after its count
    assert done.num_bytes == (2 * done.round - num_last) * 4 * NUM_WEIGHTS


def test_all_ranks_end_the_run_with_the_exchange_that_reaches_the_bytes():
    done = last(run_of("sync-easgd", bytes=f"{5 * MESSAGE}"))
    assert done.round == 3  # a round of two workers sends two messages
    assert done.num_bytes == 6 * MESSAGE


def test_the_coordinator_ends_the_run_of_every_worker_once_the_bytes_are_reached():
    coordinator = make_coordinator(bytes="160")  # a round of a worker sends 80
    for worker_id in ("w0", "w1"):
        enter(coordinator, worker_id)
    assert settle(coordinator, "w0").outcome is Outcome.GO_ON
    assert not coordinator.is_complete()
    assert settle(coordinator, "w1").outcome is Outcome.FINISHED
    assert coordinator.is_complete()


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_a_run_counts_on_from_the_snapshot_that_it_resumes(method):
    run = run_of(method)
    before = dataclasses.replace(run.first.progress, num_bytes=10**9, num_messages=1000)
    fresh = last(run)
    again = Ensemble(run.config, num_workers=2)
    resumed = last(again.join(dataclasses.replace(again.first, progress=before)))
    assert resumed.num_bytes == fresh.num_bytes + 10**9
    assert resumed.num_messages == fresh.num_messages + 1000


def test_the_learning_rate_follows_the_bytes_if_they_set_the_length():
    condition = StopCondition.of(TrainingConfig(bytes="1kB"), epoch_samples=10)
    done = {"num_samples": 10**6, "num_steps": 10**6, "seconds": 1e6}
    assert condition.share_done(**done, num_bytes=250) == 0.25
    assert not condition.is_reached(**done, num_bytes=999)
    assert condition.is_reached(**done, num_bytes=1000)
    assert condition.samples_left(10) is None


def test_progress_of_an_earlier_version_has_sent_nothing():
    assert Progress.from_dict({"round": 3, "num_samples": 30}).num_bytes == 0


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("1000", 1000), ("2GB", 2 * 10**9), ("1.5 MB", 1_500_000), ("64KiB", 65536)],
)
def test_a_size_has_a_unit(size, num_bytes):
    training = TrainingConfig(bytes=size)
    assert (training.num_bytes, training.num_epochs) == (num_bytes, None)


@pytest.mark.parametrize("size", ["0", "2 gigabytes", "-1MB", "", "1.5.2GB"])
def test_a_wrong_size_is_one_sentence(size):
    with pytest.raises(ConfigError, match=r"training.bytes must be a size as 500MB, 2GB or 1GiB"):
        TrainingConfig(bytes=size)


def test_one_length_excludes_the_others():
    with pytest.raises(ConfigError, match=r"training.steps and training.bytes exclude each other"):
        TrainingConfig(bytes="1GB", steps=3)


@pytest.mark.parametrize("workers", [0, 1, (1, 4)])
def test_bytes_need_two_workers_if_a_single_one_sends_nothing(workers):
    config = TrainConfig(
        training=TrainingConfig(bytes="1GB"), scaling=ScalingConfig(num_workers=workers)
    )
    with pytest.raises(ConfigError, match=r"training.bytes needs at least 2 workers"):
        resolve(config)
    resolve(dataclasses.replace(config, method=MethodConfig(name="async-easgd")))
