"""Learning rate schedules compared with those of torch, and cuts of the rate."""

import dataclasses
import math

import pytest
import torch
from controller_harness import ControllerHarness, scored
from ensembles import Ensemble, tiny_images
from replicas import replica_config

from raydl.checkpoint.writer import checkpoint_of, snapshot_of
from raydl.config import OptimizerConfig
from raydl.core.lr_schedules import lr_at, lr_factor
from raydl.core.optimizers import check_optimizer
from raydl.core.worker_group import Collected, Lost, Published, WorkerReady
from raydl.elastic.plateau import Plateau
from raydl.errors import ConfigError, UnknownNameError

SHARES = [i / 20 for i in range(20)]


def torch_factors(make_scheduler):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler, factors = make_scheduler(optimizer), []
    for _ in SHARES:
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


@pytest.mark.parametrize(
    ("schedule", "make_scheduler"),
    [
        ("cosine", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=20)),
        (
            "linear",
            lambda o: torch.optim.lr_scheduler.LinearLR(
                o, start_factor=1.0, end_factor=0.0, total_iters=20
            ),
        ),
        ("constant", lambda o: torch.optim.lr_scheduler.ConstantLR(o, factor=1.0)),
        ("step", lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [10, 15], gamma=0.1)),
    ],
)
def test_schedules_equal_those_of_torch_at_the_same_points(schedule, make_scheduler):
    ours = [lr_factor(schedule, share, milestones=(0.5, 0.75), gamma=0.1) for share in SHARES]
    assert ours == pytest.approx(torch_factors(make_scheduler))


def test_the_rate_depends_on_the_share_of_the_run_and_the_number_of_cuts():
    config = OptimizerConfig(lr=0.4, lr_schedule="step", milestones="0.5", gamma=0.25, warmup=0.1)
    rates = [lr_at(config, share) for share in (0.05, 0.1, 0.49, 0.5, 1.0)]
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.1, 0.1])
    plateau = OptimizerConfig(lr=0.4, lr_schedule="plateau", gamma=0.5, warmup=0.0)
    assert [lr_at(plateau, 0.3, num_cuts=n) for n in range(3)] == pytest.approx([0.4, 0.2, 0.1])


def halving(share):
    return 0.5 ** (4 * share)


def broken(share):
    return 1 / share


def negative(share):
    return 0.5 - share


def custom_schedule(name):
    return OptimizerConfig(lr=0.4, lr_schedule=f"test_lr_schedules:{name}", warmup=0.5)


def test_a_custom_schedule_is_a_function_of_the_share_of_the_run():
    assert [lr_at(custom_schedule("halving"), share) for share in (0.0, 0.5, 1.0)] == [
        0.4,
        0.1,
        0.025,
    ]
    check_optimizer(custom_schedule("halving"), None)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("broken", r"for 0\.0 it raised ZeroDivisionError"),
        ("negative", r"must return 0 or more, but for 1\.0 it gave -0\.5"),
        ("missing", "cannot be imported: .*missing"),
    ],
)
def test_a_schedule_that_gives_no_factor_is_refused_before_anything_starts(name, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_optimizer(custom_schedule(name), None)


def test_a_decay_leaves_room_for_the_warm_up():
    with pytest.raises(ConfigError, match=r"must leave room for the warm-up of 0\.5, got 0\.6"):
        OptimizerConfig(lr_schedule="wsd", warmup=0.5, decay=0.6)
    with pytest.raises(UnknownNameError, match="did you mean cosine"):
        OptimizerConfig(lr_schedule="cosin")


@pytest.mark.parametrize(("name", "sign"), [("accuracy", 1), ("loss", -1)])
def test_the_rate_is_cut_after_too_many_evaluations_without_improvement(name, sign):
    plateau = Plateau(OptimizerConfig(lr_schedule="plateau", patience=1), num_cuts=2)
    scores = [0.5, 0.6, 0.6, 0.55, 0.6, 0.7, 0.6, 0.6]
    cuts = []
    for score in scores:
        sentence = plateau.note_score({name: score if sign > 0 else 1 - score})
        assert bool(sentence) == (plateau.num_cuts > (cuts[-1] if cuts else 2))
        cuts.append(plateau.num_cuts)
    assert cuts == [2, 2, 2, 3, 3, 3, 3, 4]
    assert Plateau(OptimizerConfig()).note_score({name: 0.1}) == ""


@pytest.mark.parametrize(
    ("name", "scores", "num_cuts"),
    [
        ("loss", [-1.0] * 4, 1),
        ("loss", [-1.0, -0.99, -0.98, -0.97], 1),  # the score gets worse
        ("loss", [-1.0, -1.01, -1.02, -1.03], 0),
        ("loss", [1.0, 0.0, -1.0, -2.0], 0),
        ("accuracy", [0.98, 0.98005, 0.9801, 0.98015], 0),  # any better score counts
        ("accuracy", [math.nan] * 2, 1),
    ],
)
def test_a_plateau_is_recognized_whatever_the_sign_of_the_score(name, scores, num_cuts):
    plateau = Plateau(OptimizerConfig(lr_schedule="plateau", patience=1))
    for score in scores:
        plateau.note_score({name: score})
    assert plateau.num_cuts == num_cuts


def test_no_cut_is_logged_after_the_training_has_ended():
    harness = ControllerHarness().start()
    harness.controller._plateau = Plateau(OptimizerConfig(lr_schedule="plateau", patience=0))
    harness.step(scored(1))
    harness.step(*harness.end("finished", 9, "w0", "w1"), Published((0, 9)))
    harness.step(scored(9))
    assert "stopped improving" not in str(harness.log_lines)


def plateau_of(method):
    config = replica_config(
        method, lr=0.1, lr_schedule="plateau", training={"steps": 12, "epochs": None}
    )
    return Ensemble(config, num_workers=2, images=tiny_images(96)).join()


def test_all_ranks_cut_after_the_same_round_even_if_the_request_arrives_in_different_rounds():
    ensemble = plateau_of("sync-easgd")
    ensemble.run(1)
    ensemble.workers[0].vote(1, num_cuts=1)
    ensemble.run(1)
    ensemble.workers[1].vote(1, num_cuts=1)
    ensemble.run(2)
    assert [w.runner.strategy.num_cuts for w in ensemble.workers] == [1, 1]
    ensemble.run()
    assert ensemble.newest.num_cuts == 1
    lrs = {r.progress.round: r.lr for r in ensemble.workers[0].report().records}
    assert lrs[max(lrs)] == pytest.approx(0.01)


def test_with_messages_the_assignment_has_the_number_of_cuts():
    ensemble = plateau_of("async-easgd")
    ensemble.run(1)
    for _ in range(2):  # a repeated request counts as one cut
        ensemble.service.coordinator.vote(1, num_cuts=1)
    ensemble.run(2)
    assert [w.runner.strategy.num_cuts for w in ensemble.workers] == [1, 1]
    assert ensemble.workers[0].center().num_cuts == 1
    assert ensemble.center().num_cuts == 1
    again = Ensemble(ensemble.config, num_workers=2, images=tiny_images(96))
    again.join(ensemble.center())
    assert [w.runner.strategy.num_cuts for w in again.workers] == [1, 1]


def test_cuts_are_sent_to_workers_and_sent_again_to_a_new_generation():
    harness = ControllerHarness().start()
    harness.controller._plateau = Plateau(OptimizerConfig(lr_schedule="plateau", patience=0))
    assert harness.step(scored(1)) == []
    assert ("vote", "num_cuts") in harness.step(scored(2))
    assert "the center stopped improving at accuracy 0.5000" in harness.log_lines[-1]
    assert ("vote", "num_cuts") not in harness.step()
    harness.step(Lost("w1", "the actor died"))
    harness.step(*harness.end("broken", 0, "w0"))
    harness.step(WorkerReady("w2", "node"))
    calls = [call for _ in range(4) for call in harness.step()]
    assert ("vote", "num_cuts") in calls


def test_a_checkpoint_holds_the_number_of_cuts_and_an_older_one_means_none():
    ensemble = plateau_of("sync-easgd")
    snapshot = dataclasses.replace(ensemble.first, num_cuts=3)
    checkpoint = checkpoint_of(Collected(snapshot, {}), ensemble.flat, seconds=1.0)
    assert snapshot_of(checkpoint, ensemble.flat).num_cuts == 3
    del checkpoint.state["num_cuts"]
    assert snapshot_of(checkpoint, ensemble.flat).num_cuts == 0
