"""Properties that all methods share, in a scenario in this process."""

import dataclasses

import numpy as np
import pytest
import torch
from ensembles import Ensemble, tiny_images
from safetensors.torch import load_file
from scenarios import loss_of, scenario_config

from raydl.config import ExchangeConfig, RunConfig, ScalingConfig, TrainingConfig
from raydl.core.exchange import tensor_spans
from raydl.core.method import check_weights
from raydl.core.replica import DistanceTrend, DynamicWeights
from raydl.core.reports import Outcome
from raydl.errors import ConfigError
from raydl.methods import METHODS, resolve
from raydl.methods.conflicts import CONFLICTS, Choice
from raydl.methods.easgd import Elastic
from raydl.methods.outer import Outer
from raydl.run.trainer import Trainer

ELASTIC = [name for name, kind in METHODS.items() if issubclass(kind, Elastic)]
SYNC = [name for name, kind in METHODS.items() if kind.strategy == "sync"]
CODECS = ["bf16", "int8", "e3m0", "sign", "topk:0.3", "chunk-topk:20/64"]
BY_MESSAGES = [name for name in METHODS if name not in SYNC]


# one scenario for all


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_to_the_end_and_counts_every_sample(method, num_workers):
    images = tiny_images(31)
    ensemble = Ensemble(
        scenario_config(method, epochs=4, lr=0.05, workers=num_workers),
        num_workers=num_workers,
        images=images,
    ).join()
    before = loss_of(ensemble, ensemble.first.weights, images)
    assert ensemble.run() == [Outcome.FINISHED] * num_workers
    center = ensemble.center()
    assert center.progress.num_samples == 4 * 31
    assert center.progress.epoch == 4
    assert loss_of(ensemble, center.weights, images) < before


@pytest.mark.parametrize("end", [{"steps": 5}, {"samples": 40}, {"seconds": 0.05}])
@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd", "original-easgd", "diloco"])
def test_a_run_ends_after_its_steps_samples_or_seconds(method, end):
    ensemble = Ensemble(
        scenario_config(method, **end), num_workers=2, images=tiny_images(31)
    ).join()
    assert ensemble.run() == [Outcome.FINISHED] * 2
    if "steps" in end:
        assert [w.local_step for w in ensemble.workers] == [5, 5]
    if "samples" in end:
        assert ensemble.center().progress.num_samples == 40


@pytest.mark.parametrize("method", ["original-easgd", "async-easgd", "async-sgd"])
def test_a_worker_for_which_the_coordinator_has_no_work_finishes(method):
    ensemble = Ensemble(scenario_config(method, seconds=1e-9), num_workers=2).join()
    assert ensemble.run() == [Outcome.FINISHED] * 2
    assert ensemble.center().progress.num_samples == 0


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    "method", ["async-easgd", "hogwild-msgd", "async-diloco", "dc-asgd", "cgad"]
)
def test_messages_are_sent_in_fragments_to_shards_with_delay(method, shards, fragments, delay):
    exchange = ExchangeConfig(fragments=fragments, delay=delay, center_shards=shards)
    ensemble = Ensemble(
        scenario_config(method, epochs=3, period=4, exchange=exchange),
        num_workers=2,
        images=tiny_images(31),
    ).join()
    assert ensemble.run() == [Outcome.FINISHED] * 2
    assert ensemble.center().progress.num_samples == 3 * 31
    assert np.isfinite(ensemble.center().weights).all()


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_more_fragments_than_parameters_are_refused(method):
    """Each empty fragment would end a round and count samples that were never trained."""
    parameters = [torch.zeros(1, 1), torch.zeros(1)]
    fits, not_fits = (
        scenario_config(method, period=4, exchange=ExchangeConfig(fragments=fragments))
        for fragments in (2, 3)
    )
    check_weights("tiny", parameters, fits, resolve(fits))
    with pytest.raises(ConfigError) as caught:
        check_weights("tiny", parameters, not_fits, resolve(not_fits))
    assert str(caught.value) == (
        "exchange.fragments must be at most the 2 parameters of model tiny, got 3"
    )


class InFour(Outer):
    fragments = 4


def test_more_fragments_than_parameters_are_refused_if_a_class_has_them_by_default():
    config = scenario_config("own", period=4)
    with pytest.raises(ConfigError, match=r"^exchange.fragments must be at most the 2 parameters"):
        check_weights("tiny", [torch.zeros(1, 2)], config, resolve(config, InFour()))


def test_a_model_with_few_tensors_has_fewer_fragments_of_whole_tensors():
    config = scenario_config("streaming-diloco", period=20)
    check_weights("tiny", [torch.zeros(1, 2)], config, resolve(config))
    assert tensor_spans([2], resolve(config).fragments) == [(0, 2)]


@pytest.mark.parametrize(("fragments", "delay"), [(1, 1), (3, 0), (3, 1)])
@pytest.mark.parametrize("method", SYNC)
def test_sync_rounds_with_fragments_and_delay_are_deterministic(method, fragments, delay):
    config = scenario_config(
        method, epochs=2, period=6, exchange=ExchangeConfig(fragments=fragments, delay=delay)
    )
    centers = []
    for _ in range(2):
        ensemble = Ensemble(config, num_workers=2, images=tiny_images(31)).join()
        assert ensemble.run() == [Outcome.FINISHED] * 2
        centers.append(ensemble.center().weights)
    assert not np.array_equal(centers[0], ensemble.first.weights)
    assert np.isfinite(centers[0]).all()
    assert np.array_equal(*centers)


@pytest.mark.parametrize("fragments", [1, 2, 4])
def test_the_distance_is_that_of_all_fragments(fragments):
    config = scenario_config(
        "sync-easgd", steps=8, period=4, exchange=ExchangeConfig(fragments=fragments)
    )
    ensemble = Ensemble(config, num_workers=1, images=tiny_images(60))
    ensemble.use_task(NoGradient())
    ensemble.join()
    ensemble.workers[0].replica.flat.weights.add_(1.0)
    ensemble.run(1)
    # Each of the 8 weights had a distance of 1 when its fragment exchanged.
    assert ensemble.workers[0].replica.distance_squared == pytest.approx(8.0)


def test_a_run_in_one_process_saves_all_shards_of_its_center(tmp_path):
    result = Trainer(
        "mlp",
        "synthetic:64x1x4x4",
        method="async-easgd",
        training=TrainingConfig(samples=96, batch_size=8),
        scaling=ScalingConfig(num_workers=0),
        exchange=ExchangeConfig(center_shards=3, fragments=2),
        run=RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    ).fit()
    center = load_file(tmp_path / "run/center.safetensors")
    assert all(0 < float(tensor.abs().max()) < 100 for tensor in center.values())
    assert result.metrics["center_loss"] < 10


def test_a_resumed_run_uses_its_new_optimizer_settings():
    first = scenario_config("sync-msgd", epochs=2)
    ensemble = Ensemble(first, num_workers=1, images=tiny_images(31)).join()
    ensemble.run(2)
    ensemble.workers[0].vote(1, stop=1.0)
    ensemble.run()
    kept, snapshot = {"w0": ensemble.workers[0].pop_kept(3)}, ensemble.newest
    centers = []
    for momentum in (0.9, 0.0):
        optimizer = dataclasses.replace(first.optimizer, momentum=momentum)
        config = dataclasses.replace(first, optimizer=optimizer)
        again = Ensemble(config, num_workers=1, images=tiny_images(31)).join(snapshot, kept)
        again.run()
        centers.append(again.center().weights)
    assert not np.array_equal(*centers)


# equivalences


def center_of(config, num_workers=2):
    ensemble = Ensemble(config, num_workers=num_workers, images=tiny_images(31)).join()
    ensemble.run()
    return ensemble.center().weights


@pytest.mark.parametrize("method", ["sync-easgd", "sync-sgd", "diloco"])
@pytest.mark.parametrize(
    "exchange",
    [
        {"resident": False},
        {"packed": False},
        {"resident": False, "packed": False, "fragments": 2},
    ],
)
def test_easgd_1_2_and_3_give_the_same_bits(method, exchange):
    """Staged or resident, per layer or packed, with sums in the order of the ranks."""
    plain = {"fragments": exchange["fragments"]} if "fragments" in exchange else {}
    config = scenario_config(method, epochs=2, exchange=ExchangeConfig(**exchange))
    same = scenario_config(method, epochs=2, exchange=ExchangeConfig(**plain))
    assert np.array_equal(center_of(config), center_of(same))


@pytest.mark.parametrize("resident", [True, False])
def test_overlapped_or_not_sync_easgd_gives_the_same_bits(resident):
    exchange = ExchangeConfig(overlap=False, resident=resident)
    config = scenario_config("sync-easgd", epochs=2, exchange=exchange)
    assert np.array_equal(center_of(config), center_of(scenario_config("sync-easgd", epochs=2)))


@pytest.mark.parametrize(
    ("alone", "reference"),
    [
        ("async-easgd", "sync-easgd"),
        ("async-measgd", "sync-measgd"),
        ("hogwild-easgd", "sync-easgd"),
        ("original-easgd", "sync-easgd"),
        ("async-sgd", "local-sgd"),
    ],
)
def test_a_single_worker_trains_the_same_under_every_strategy(alone, reference):
    first = center_of(scenario_config(alone, epochs=2, workers=1), num_workers=1)
    assert np.array_equal(
        first, center_of(scenario_config(reference, epochs=2, workers=1), num_workers=1)
    )


@pytest.mark.parametrize("method", ["async-easgd", "async-diloco"])
def test_a_delay_changes_the_center_a_little(method):
    at_once, delayed = (
        center_of(
            scenario_config(
                method, epochs=2, workers=1, period=4, exchange=ExchangeConfig(delay=delay)
            ),
            num_workers=1,
        )
        for delay in (0, 2)
    )
    assert not np.array_equal(at_once, delayed)
    assert np.abs(at_once - delayed).max() < 0.5


def test_async_sgd_with_one_worker_is_plain_sgd():
    images, config = tiny_images(31), scenario_config("async-sgd", epochs=2, period=1, workers=1)
    ensemble = Ensemble(config, num_workers=1, images=images).join()
    ensemble.run()
    model = ensemble.job.task.build_model(ensemble.job.shape)
    torch.nn.utils.vector_to_parameters(torch.tensor(ensemble.first.weights), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        order = np.random.default_rng([0, epoch]).permutation(31)
        for start in range(0, 31, 3):
            optimizer.zero_grad()
            batch = ensemble.batches.batch(order[start : start + 3])
            ensemble.job.task.loss(model, batch).backward()
            optimizer.step()
    expected = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(torch.tensor(ensemble.center().weights), expected)


def test_round_robin_exchanges_strictly_in_rank_order():
    config = scenario_config("original-easgd", epochs=2, period=1, workers=3)
    ensemble = Ensemble(config, num_workers=3, images=tiny_images(27)).join()
    service, senders = ensemble.service, []
    exchange = service.home.exchange

    def watched(request):
        senders.append(request.message_id.worker_id)
        return exchange(request)

    service.home.exchange = watched
    ensemble.run()
    assert senders == ["w0", "w1", "w2"] * 6


def test_round_robin_is_deterministic():
    config = scenario_config("original-easgd", epochs=2, workers=3)
    assert np.array_equal(center_of(config, 3), center_of(config, 3))


# conservation; not for Hogwild, which may lose parts of updates


class NoGradient:
    """A task without gradients: only exchanges change the weights."""

    name = "still"

    def build_model(self, shape):
        return torch.nn.Linear(3, 2)

    def loss(self, model, batch):
        return sum(p.sum() for p in model.parameters()) * 0.0


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("method", [m for m in ELASTIC if not m.startswith("hogwild")])
def test_exchanges_conserve_the_sum_of_replicas_and_center(method, fragments):
    config = scenario_config(method, steps=6, exchange=ExchangeConfig(fragments=fragments))
    ensemble = Ensemble(config, num_workers=3, images=tiny_images(60))
    ensemble.use_task(NoGradient())
    ensemble.join()
    for rank, worker in enumerate(ensemble.workers):
        worker.replica.flat.weights.add_(float(rank) - 0.5)
    before = sum(w.replica.flat.weights.sum() for w in ensemble.workers)
    before = float(before) + float(ensemble.first.weights.sum())
    ensemble.run()
    after = sum(float(w.replica.flat.weights.sum()) for w in ensemble.workers)
    after += float(ensemble.center().weights.sum())
    assert after == pytest.approx(before, abs=1e-4)
    spread = max(
        float(torch.dist(w.replica.flat.weights, torch.tensor(ensemble.center().weights)))
        for w in ensemble.workers
    )
    assert spread < 4.0  # the replicas have converged


@pytest.mark.parametrize("fragments", [2, 3])
def test_without_gradients_fragments_change_nothing(fragments):
    ends = []
    for count in (1, fragments):
        config = scenario_config(
            "sync-easgd", steps=6, period=3, exchange=ExchangeConfig(fragments=count)
        )
        ensemble = Ensemble(config, num_workers=2, images=tiny_images(60))
        ensemble.use_task(NoGradient())
        ensemble.join()
        for rank, worker in enumerate(ensemble.workers):
            worker.replica.flat.weights.add_(float(rank))
        ensemble.run()
        ends.append(ensemble.center().weights)
    assert np.array_equal(*ends)


# two levels


def in_groups(config, size):
    return dataclasses.replace(config, method=dataclasses.replace(config.method, group_size=size))


@pytest.mark.parametrize("method", ["sync-easgd", "sync-measgd", "diloco"])
@pytest.mark.parametrize("exchange", [{}, {"compression": "int8"}, {"fragments": 2}])
def test_workers_of_a_group_are_one_replica_and_train_to_the_end(method, exchange):
    config = scenario_config(method, epochs=2, workers=4, exchange=ExchangeConfig(**exchange))
    ensemble = Ensemble(in_groups(config, 2), num_workers=4, images=tiny_images(61)).join()
    assert ensemble.run() == [Outcome.FINISHED] * 4
    first, second, third, fourth = [w.replica.flat.weights for w in ensemble.workers]
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert method == "diloco" or not torch.equal(first, third)
    assert ensemble.center().progress.num_samples == 2 * 61


def test_one_group_of_all_with_elastic_steps_is_one_worker_with_the_joined_batch():
    """Gradients of a group are those of one batch, and the exchange counts it once."""
    # A group's members take consecutive samples over a round, a single worker over a step:
    # with one step a round both see the same batches.
    config = scenario_config("sync-easgd", epochs=2, period=1, batch_size=2, workers=2)
    shared = Ensemble(in_groups(config, 2), num_workers=2, images=tiny_images(40)).join()
    shared.run()
    alone = scenario_config("sync-easgd", epochs=2, period=1, batch_size=4, workers=1)
    single = Ensemble(alone, num_workers=1, images=tiny_images(40)).join()
    single.run()
    np.testing.assert_allclose(shared.center().weights, single.center().weights, rtol=1e-4)


# dynamic weights


def run_in_turn(ensemble, rounds):
    """Run some rounds; by messages one worker after the other, since their order matters."""
    if ensemble.job.method.is_sync:
        ensemble.run(rounds)
        return
    for _ in range(rounds):
        for worker in ensemble.workers:
            worker.run_round()


def trained(method, *, is_dynamic, compression):
    """Return an ensemble of two workers after some rounds."""
    exchange = ExchangeConfig(compression=compression, timeout_s=20.0)
    config = scenario_config(method, steps=40, period=2, exchange=exchange)
    config = dataclasses.replace(
        config, method=dataclasses.replace(config.method, dynamic_weights=is_dynamic)
    )
    ensemble = Ensemble(config, num_workers=2, images=tiny_images(60)).join()
    run_in_turn(ensemble, 12)
    return ensemble


def jump(method, *, is_dynamic, compression="none"):
    """Return how far a distant replica moves the center, and its distance after that."""
    ensemble = trained(method, is_dynamic=is_dynamic, compression=compression)
    before, lost = torch.tensor(ensemble.center_weights()), ensemble.workers[1].replica.flat.weights
    lost.add_(5.0)
    run_in_turn(ensemble, 1)
    center = torch.tensor(ensemble.center_weights())
    return float(torch.dist(before, center)), float(torch.dist(lost, center))


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("method", ["sync-easgd", "async-measgd", "original-easgd"])
def test_a_replica_that_is_suddenly_far_away_hardly_moves_the_center(method, codec):
    plain = jump(method, is_dynamic=False, compression=codec)
    dynamic = jump(method, is_dynamic=True, compression=codec)
    assert dynamic[0] < 0.2 * plain[0]  # the center
    assert dynamic[1] < 0.2 * plain[1]  # the replica returns to the others at once


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("method", ["async-measgd", "hogwild-easgd", "original-easgd"])
def test_a_replica_without_any_trust_leaves_the_center_where_the_others_have_moved_it(
    method, codec
):
    ensemble = trained(method, is_dynamic=True, compression=codec)
    one, lost = ensemble.workers
    before = ensemble.center_weights()
    one.run_round()
    moved = ensemble.center_weights()
    assert not np.array_equal(moved, before)
    lost.replica.flat.weights.add_(50.0)
    lost.run_round()
    assert np.array_equal(ensemble.center_weights(), moved)


def test_each_span_is_trusted_by_its_own_distances_and_always_without_dynamic_weights():
    dynamic_weights = DynamicWeights(is_on=True)
    for _ in range(5):
        dynamic_weights.note_distance(0, 2.0)
        dynamic_weights.note_distance(8, 2.0)
    dynamic_weights.note_distance(8, 100.0)
    assert (
        dynamic_weights.distrust_at(0),
        dynamic_weights.distrust_at(8),
        dynamic_weights.distrust_at(16),
    ) == (0, 1, 0)
    again, never = DynamicWeights(is_on=True), DynamicWeights(is_on=False)
    for other in (again, never):
        other.load(dynamic_weights.state())
    again.note_distance(0, 100.0)
    assert again.distrust_at(0) == 1
    assert never.state() == []


def test_trust_follows_the_trend_of_the_distance():
    trust = DistanceTrend()
    assert [trust.distrust(d) for d in (0.1, 1.0, 2.0, 2.0)] == [
        0,
        0,
        0,
        0,
    ]  # at the beginning of a run
    assert trust.distrust(2.0) == 0
    assert trust.distrust(100.0) == 1
    again = DistanceTrend()
    again.load_state_dict(trust.state_dict())
    assert 0 < again.distrust(5.0) < 1


# compressed messages


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "method", ["sync-easgd", "sync-sgd", "diloco", "async-easgd", "hogwild-sgd", "original-easgd"]
)
def test_methods_train_with_compressed_messages(method, codec):
    images = tiny_images(31)
    exchange = ExchangeConfig(compression=codec, fragments=2, timeout_s=20.0)
    config = scenario_config(method, epochs=4, lr=0.05, exchange=exchange)
    ensemble = Ensemble(config, num_workers=3, images=images).join()
    before = loss_of(ensemble, ensemble.first.weights, images)
    assert ensemble.run() == [Outcome.FINISHED] * 3
    assert ensemble.center().progress.num_samples == 4 * 31
    assert loss_of(ensemble, ensemble.center().weights, images) < before


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd", "original-easgd"])
def test_compressed_messages_conserve_the_sum_of_replicas_and_center(method, codec):
    exchange = ExchangeConfig(compression=codec, center_shards=1 if method[:6] == "sync-e" else 2)
    config = scenario_config(method, steps=40, exchange=exchange)
    ensemble = Ensemble(config, num_workers=3, images=tiny_images(60))
    ensemble.use_task(NoGradient())
    ensemble.join()
    for rank, worker in enumerate(ensemble.workers):
        worker.replica.flat.weights.add_(float(rank) - 0.5)
    before = sum(float(w.replica.flat.weights.sum()) for w in ensemble.workers)
    before += float(ensemble.first.weights.sum())
    ensemble.run()
    center = torch.tensor(ensemble.center().weights)
    after = sum(float(w.replica.flat.weights.sum()) for w in ensemble.workers)
    assert after + float(center.sum()) == pytest.approx(before, abs=1e-4)
    if method == "async-easgd":  # one thread may have finished before another began
        return
    for worker in ensemble.workers:  # all values were sent: all workers are equal
        assert float((worker.replica.flat.weights - center).abs().max()) < 0.1


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd", "async-sgd"])
def test_compressed_messages_have_fewer_bytes(method):
    num_bytes = {}
    for codec in ("none", "bf16", "int8"):
        config = scenario_config(method, steps=4, exchange=ExchangeConfig(compression=codec))
        ensemble = Ensemble(config, num_workers=1, images=tiny_images(60), model=wide).join()
        ensemble.run()
        records = ensemble.workers[0].report().records
        if not ensemble.job.method.is_sync:
            records = ensemble.service.coordinator.pop_records()
        num_bytes[codec] = records[-1].exchange_bytes
    assert num_bytes["bf16"] < 0.55 * num_bytes["none"]
    assert num_bytes["int8"] < 0.30 * num_bytes["none"]


def wide(image_shape, num_classes):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(16, 500), torch.nn.Linear(500, 3)
    )


@pytest.mark.parametrize("method", ["sync-sgd", "diloco", "sync-easgd"])
def test_a_resumed_run_has_the_residuals_of_its_messages(method):
    exchange = ExchangeConfig(compression="topk:0.3")
    config = scenario_config(method, epochs=2, exchange=exchange)
    whole = Ensemble(config, num_workers=2, images=tiny_images(31)).join()
    whole.run()
    first = Ensemble(config, num_workers=2, images=tiny_images(31)).join()
    first.run(2)
    first.workers[0].vote(1, stop=1.0)
    first.run()
    states = {w.worker_id: w.pop_kept(3) for w in first.workers}
    second = Ensemble(config, num_workers=2, images=tiny_images(31)).join(first.newest, states)
    second.run()
    assert np.array_equal(whole.center().weights, second.center().weights)


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda conflict: conflict.setting)
def test_each_sentence_about_a_conflict_can_be_told(conflict):
    config = scenario_config("sync-sgd")
    choice = Choice(config, resolve(config))
    assert "{" not in conflict.sentence.format(x=choice)
