"""The worker's loop: the same bits for a seed and after a resume, and decisions by vote."""

import dataclasses
import math
import os

import numpy as np
import pytest
import torch
from ensembles import Ensemble, tiny_images
from scenarios import FourSlopes, scenario_config

from raydl.config import ExchangeConfig, MethodConfig, OptimizerConfig, TrainConfig, TrainingConfig
from raydl.core.membership import Membership
from raydl.data import ImageSet
from raydl.errors import (
    CheckpointError,
    ConfigError,
    InfrastructureError,
    NonFiniteError,
    NonFiniteLossError,
)
from raydl.worker.in_process import LocalGroup
from raydl.worker.loop import Outcome, use_deterministic_kernels

METHODS = ["sync-easgd", "sync-measgd", "sync-sgd", "sync-msgd"]


class WithBuffer(torch.nn.Module):
    """A linear model that keeps a running mean of its inputs, as batch norm does."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.linear = torch.nn.Linear(16, num_classes)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, images):
        flat = images.flatten(1)
        if self.training:
            self.mean.mul_(0.9).add_(flat.mean(0).detach(), alpha=0.1)
        return self.linear(flat - self.mean)


def dropout(image_shape, num_classes):
    """A model whose steps draw random numbers."""
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(16, num_classes)
    )


def loop_config(method, *, lr=0.1, **training):
    training.setdefault("batch_size", 3)
    return TrainConfig(
        method=MethodConfig(name=method, period=2),
        training=TrainingConfig(**training),
        optimizer=OptimizerConfig(lr=lr),
    )


def weights_after(config, num_workers=2, model=WithBuffer):
    ensemble = Ensemble(config, num_workers=num_workers, images=tiny_images(25), model=model)
    ensemble.join().run()
    return ensemble.newest.weights


@pytest.mark.parametrize("method", METHODS)
def test_equal_seeds_give_equal_bits_and_different_seeds_do_not(method):
    first = weights_after(loop_config(method, epochs=2, seed=5))
    assert np.array_equal(first, weights_after(loop_config(method, epochs=2, seed=5)))
    assert not np.array_equal(first, weights_after(loop_config(method, epochs=2, seed=6)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_run_stopped_after_any_round_resumes_to_the_same_bits(method, num_workers):
    config = loop_config(method, epochs=2)
    images = tiny_images(25)
    # One generator serves all threads of this process, so only one worker can draw from it.
    model = dropout if num_workers == 1 else WithBuffer
    whole = Ensemble(config, num_workers=num_workers, images=images, model=model)
    whole.join().run()
    num_rounds = whole.newest.progress.round
    for stop_after in range(1, num_rounds):
        first = Ensemble(config, num_workers=num_workers, images=images, model=model).join()
        if stop_after > 1:
            first.run(stop_after - 1)
        first.workers[-1].vote(1, stop=1.0)
        assert first.run() == [Outcome.STOPPED] * num_workers
        snapshot = first.newest
        assert snapshot.progress.round == stop_after
        states = {w.worker_id: w.pop_kept(stop_after) for w in first.workers}

        second = Ensemble(config, num_workers=num_workers, images=images, model=model)
        second.join(snapshot, states).run()
        assert np.array_equal(second.newest.weights, whole.newest.weights)
        assert np.array_equal(second.newest.buffers, whole.newest.buffers)
        assert second.newest.progress.round == num_rounds


@pytest.mark.parametrize(
    ("cuda", "error", "problem"),
    [
        (
            None,
            ConfigError,
            r"gpus_per_worker requests a GPU.*w0 has no CUDA; install a CUDA build",
        ),
        ("13.0", InfrastructureError, "machine of w0 failed: torch finds no GPU"),
    ],
)
def test_a_worker_without_its_gpu_stops_the_run_only_if_torch_cannot_use_one(
    monkeypatch, cuda, error, problem
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    config = loop_config("sync-easgd", epochs=1)
    scaling = dataclasses.replace(config.scaling, gpus_per_worker=0.5)
    config = dataclasses.replace(config, scaling=scaling)
    with pytest.raises(error, match=problem):
        Ensemble(config, num_workers=1)


def test_every_sample_of_an_epoch_is_read_once_by_one_worker():
    seen = []

    class RecordingImages(ImageSet):
        def fetch(self, rows):
            seen.extend(rows.tolist())
            return super().fetch(rows)

    images = RecordingImages(**vars(tiny_images(25)))
    Ensemble(loop_config("sync-easgd", epochs=1), num_workers=3, images=images).join().run()
    assert sorted(seen) == list(range(25))


def test_all_ranks_stop_after_the_same_round_by_one_vote():
    ensemble = Ensemble(loop_config("sync-easgd", epochs=50), num_workers=3).join()
    ensemble.workers[1].vote(1, stop=1.0)
    assert ensemble.run() == [Outcome.STOPPED] * 3
    assert len({w.round for w in ensemble.workers}) == 1


def test_a_checkpoint_vote_keeps_the_state_of_one_round_on_all_ranks_and_training_continues():
    ensemble = Ensemble(loop_config("sync-easgd", epochs=50), num_workers=2).join()
    ensemble.workers[0].vote(1, checkpoint=1.0)
    assert ensemble.run(3) == [Outcome.GO_ON] * 2
    assert [w.report().kept for w in ensemble.workers] == [(1,), (1,)]
    assert 1 in ensemble.published


def test_a_vote_of_the_last_generation_is_ignored():
    ensemble = Ensemble(loop_config("sync-easgd", epochs=50), num_workers=2)
    for worker in ensemble.workers:
        worker.vote(0, regroup=1.0)
    assert ensemble.join().run(2) == [Outcome.GO_ON] * 2


def test_a_vote_that_arrives_before_the_request_to_join_still_counts():
    ensemble = Ensemble(loop_config("sync-easgd", epochs=50), num_workers=2)
    ensemble.workers[1].vote(1, stop=1.0)
    assert ensemble.join().run(2) == [Outcome.STOPPED] * 2


def test_a_limit_of_steps_ends_the_run():
    ensemble = Ensemble(loop_config("sync-easgd", steps=5), num_workers=2).join()
    assert ensemble.run() == [Outcome.FINISHED] * 2
    assert [w.local_step for w in ensemble.workers] == [5, 5]
    assert ensemble.newest.progress.round == 3  # two rounds of two steps and one of one step


def test_records_add_up_to_the_samples_of_the_run():
    ensemble = Ensemble(loop_config("sync-easgd", epochs=2), num_workers=2).join()
    ensemble.run()
    records = ensemble.workers[0].report().records
    assert records[-1].progress.num_samples == 48
    assert records[-1].progress.epoch == 2.0
    assert all(r.num_workers == 2 for r in records)


def test_a_nan_loss_names_worker_and_step():
    ensemble = Ensemble(loop_config("sync-easgd", epochs=5), num_workers=1).join()
    ensemble.run(1)
    ensemble.workers[0].replica.flat.weights.fill_(float("nan"))
    with pytest.raises(NonFiniteLossError, match="nan at local step 2 of worker w0; lower"):
        ensemble.run()


def test_a_nan_loss_in_the_step_of_an_exchange_leaves_the_round_settled(monkeypatch):
    """The exchange sent the weights before that step, and has moved the center."""
    ensemble = Ensemble(loop_config("sync-easgd", epochs=5), num_workers=1).join()
    ensemble.run(1)
    (worker,) = ensemble.workers
    replica, losses = worker.replica, iter([1.0, math.nan])
    gradient = replica._own_gradient
    monkeypatch.setattr(replica, "_own_gradient", lambda batch: gradient(batch) * next(losses))
    with pytest.raises(NonFiniteLossError, match="nan at local step 3 of worker w0"):
        ensemble.run(1)
    center = worker.center()
    assert (center.progress.round, center.progress.num_samples) == (2, 12)
    assert torch.equal(replica.flat.weights, torch.tensor(center.weights))


def test_states_that_a_worker_keeps_for_checkpoints_do_not_pile_up():
    """A vote that a change of the members voids leads to no collection."""
    ensemble = Ensemble(loop_config("sync-easgd", epochs=50), num_workers=1).join()
    (worker,) = ensemble.workers
    for _ in range(6):
        worker.vote(1, checkpoint=1.0)
        ensemble.run(1)
    assert list(worker._kept) == [4, 5, 6]


def test_more_workers_than_samples_still_complete_the_epoch():
    images = tiny_images(2)
    few = ImageSet(images.images, images.labels, images.class_names)
    ensemble = Ensemble(loop_config("sync-easgd", epochs=3), num_workers=3, images=few).join()
    assert ensemble.run() == [Outcome.FINISHED] * 3
    assert ensemble.newest.progress.num_samples == 6


def test_only_an_error_about_a_worker_s_own_state_is_said_of_a_checkpoint():
    ensemble = Ensemble(TrainConfig(), num_workers=1)
    damaged = {"w0": {"replica": {}}}
    with pytest.raises(CheckpointError, match="of worker w0: holds a state that cannot be loaded"):
        ensemble.join(states=damaged)
    short = dataclasses.replace(ensemble.first, weights=ensemble.first.weights[:-1])
    with pytest.raises(RuntimeError, match="must match the size"):
        Ensemble(TrainConfig(), num_workers=1).join(short)


def test_kernels_whose_results_vary_are_refused(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        use_deterministic_kernels()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


# what compressed messages leave out


def slopes(method, codec, *, num_workers=2, **exchange):
    """Return workers whose gradient is always ``FourSlopes.gradient``."""
    config = scenario_config(
        method,
        steps=40,
        period=exchange.get("fragments", 1),
        lr=1.0,
        workers=num_workers,
        exchange=ExchangeConfig(timeout_s=20.0, compression=codec, **exchange),
    )
    ensemble = Ensemble(config, num_workers=num_workers, images=tiny_images(6000))
    ensemble.use_task(FourSlopes())
    ensemble.first = dataclasses.replace(ensemble.first, weights=np.zeros(4, np.float32))
    return ensemble


def moved_and_left_out(ensemble):
    left_out = torch.zeros(4)
    for worker in ensemble.workers:
        for (start, stop), feedback in worker.runner.feedback.items():
            if len(feedback.residual):
                left_out[start:stop] += feedback.residual / len(ensemble.workers)
    return (left_out - torch.tensor(ensemble.center_weights())).numpy()


@pytest.mark.parametrize("method", ["sync-sgd", "local-sgd"])
@pytest.mark.parametrize(
    ("codec", "exchange"),
    [("topk:0.25", {}), ("topk:0.5", {}), ("int8", {}), ("none", {}), ("none", {"packed": False})],
)
def test_a_run_that_resumes_with_another_codec_loses_nothing(method, codec, exchange):
    first = slopes(method, "topk:0.25").join()
    first.run(rounds=5)
    assert moved_and_left_out(first).tolist() == [40, 20, 10, 5]
    states = {w.worker_id: w.pop_kept(-1) for w in first.workers}
    second = slopes(method, codec, **exchange).join(first.workers[0].center(), states)
    assert moved_and_left_out(second).tolist() == [40, 20, 10, 5]
    second.run(rounds=1)
    np.testing.assert_allclose(moved_and_left_out(second), [48, 24, 12, 6], rtol=1e-5)
    if codec == "none":
        assert second.center_weights().tolist() == [-48, -24, -12, -6]


@pytest.mark.parametrize("empty", [("w0", "w1"), ("w1",)], ids=["all", "one"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_round_without_samples_keeps_what_was_left_out(empty, fragments):
    ensemble = slopes("sync-sgd", "topk:0.25", fragments=fragments).join()
    ensemble.run(rounds=5)
    before = moved_and_left_out(ensemble)
    feeds = [w._feed for w in ensemble.workers if w.worker_id in empty]
    for feed in feeds:
        feed.all_samples = feed.batch
        feed.batch = lambda *place, feed=feed: tuple(t[:0] for t in feed.all_samples(*place))
    ensemble.run(rounds=1)
    added = (moved_and_left_out(ensemble) - before).tolist()
    if len(empty) == 1:
        assert added == [8, 4, 2, 1]
    else:  # with fragments the first one still had the last step of the round before
        assert added == ([0, 0, 0, 0] if fragments == 1 else [8, 4, 0, 0])


def test_a_run_that_resumes_with_other_fragments_and_without_a_codec_loses_nothing():
    first = slopes("local-sgd", "topk:0.25").join()
    first.run(rounds=5)
    states = {w.worker_id: w.pop_kept(-1) for w in first.workers}
    second = slopes("local-sgd", "none", fragments=2).join(first.workers[0].center(), states)
    assert moved_and_left_out(second).tolist() == [40, 20, 10, 5]
    second.run(rounds=1)
    assert second.center_weights().tolist() == [-48, -24, -14, -7], "one and two steps"


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("method", ["scaffold", "des-loc"])
def test_what_a_method_with_other_vectors_left_out_is_lost_and_said(method, fragments):
    first = slopes("local-sgd", "topk:0.25").join()
    first.run(rounds=5)
    states = {w.worker_id: w.pop_kept(-1) for w in first.workers}
    second = slopes(method, "none", fragments=fragments)
    second.join(first.workers[0].center(), states).run(rounds=3)
    for worker in second.workers:
        [lost] = worker.report().lost_residuals
        assert lost.norm > 0
        assert lost.why == "the messages of the method before had other vectors"


def test_gradients_left_out_by_an_earlier_version_are_read_as_means():
    """It stored sums over the samples of a round: three samples a step here."""
    first = slopes("sync-sgd", "topk:0.25").join()
    first.run(rounds=5)
    states = {w.worker_id: w.pop_kept(-1) for w in first.workers}
    for state in states.values():
        for *_, feedback in state["feedback"]:
            del feedback["of"]
            feedback["residual"] *= 3
    second = slopes("sync-sgd", "topk:0.25").join(first.workers[0].center(), states)
    assert moved_and_left_out(second).tolist() == [40, 20, 10, 5]


@pytest.mark.parametrize("codec", ["topk:0.5", "int8", "none"])
def test_a_changed_codec_and_a_resumed_run_begin_with_the_same_residual(codec):
    first = slopes("local-sgd", "topk:0.25").join()
    first.run(rounds=3)
    runner = first.workers[0].runner
    state = runner.feedback_state()
    context = runner.strategy._context
    changed = context.feedback_of((0, 4), codec)
    resumed = slopes("local-sgd", codec).workers[0].runner
    resumed.load_feedback(state, codec)
    assert changed.norm() > 0
    assert torch.equal(changed.residual, resumed.feedback[0, 4].residual)
    assert changed.codec.name == resumed.feedback[0, 4].codec.name == codec


def test_a_replica_that_diverged_still_sends_what_completed_exchanges_left_out():
    ensemble = slopes("local-sgd", "topk:0.25", num_workers=1).join()
    ensemble.run(rounds=5)
    (worker,) = ensemble.workers
    left_out = worker.runner.feedback[0, 4].residual.clone()
    worker.replica.flat.weights.fill_(math.nan)
    with pytest.raises(NonFiniteError):
        worker.run_round()
    assert torch.equal(worker.runner.feedback[0, 4].residual, left_out)
    assert moved_and_left_out(ensemble).tolist() == [40, 20, 10, 5]
    assert worker.report().lost_residuals == ()


def test_what_was_left_out_is_lost_with_the_exchanges_of_a_center_that_diverged():
    ensemble = slopes("local-sgd", "topk:0.25", num_workers=1).join()
    (worker,) = ensemble.workers
    ensemble.run(rounds=5)
    norm = worker.report().residual
    assert norm == pytest.approx(float(worker.runner.feedback[0, 4].residual.norm()))
    worker.runner.strategy._weights.fill_(math.nan)
    assert worker.copy_age == (-1, 0)
    worker.join(Membership(2, ("w0",)), LocalGroup(1, timeout_s=1.0).member(0), ensemble.first)
    report = worker.report()
    (lost,) = report.lost_residuals
    assert (lost.norm, lost.why) == (norm, "the center went back to an earlier state")
    assert report.residual == 0


def test_partners_send_the_same_and_keep_what_the_first_one_has_left_out():
    config = scenario_config(
        "local-sgd", steps=40, period=2, exchange=ExchangeConfig(compression="topk:0.25")
    )
    config = dataclasses.replace(config, method=dataclasses.replace(config.method, group_size=2))
    ensemble = Ensemble(config, num_workers=2, images=tiny_images(6000))
    ensemble.use_task(FourSlopes())
    ensemble.join()
    ensemble.run(rounds=3)
    states = {w.worker_id: w.pop_kept(-1) for w in ensemble.workers}
    first, second = (states[w]["feedback"][0][2]["residual"] for w in ("w0", "w1"))
    assert torch.equal(first, second)
    second += 1
    again = Ensemble(config, num_workers=2, images=tiny_images(6000))
    again.use_task(FourSlopes())
    again.join(ensemble.workers[0].center(), states)
    copied = [w.runner.feedback[0, 4].residual for w in again.workers]
    assert torch.equal(copied[0], first)
    assert torch.equal(copied[1], first)
    (lost,) = again.workers[1].report().lost_residuals
    assert lost.norm == pytest.approx(float(second.norm()))
    assert lost.why == "it copied the replica of its partner"
    assert again.workers[0].report().lost_residuals == ()
    again.run(rounds=2)
    assert torch.equal(*(w.runner.feedback[0, 4].residual for w in again.workers))
