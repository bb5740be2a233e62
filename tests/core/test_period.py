"""The period is the number of local steps between exchanges, however short an epoch is."""

import json

import pytest
from ensembles import Ensemble, tiny_images
from histories import AllProgress, History, config, counting
from scenarios import steps_of

import raydl
from raydl.config import MethodConfig, ScalingConfig, TrainConfig, TrainingConfig
from raydl.core.reports import Outcome
from raydl.core.stop_condition import notes_on_period
from raydl.core.strategy import plan_round
from raydl.tools.comparison.figures import COLUMNS, make_rows
from raydl.tools.runs import Run


@pytest.mark.parametrize("method", ["diloco", "sync-easgd", "sync-sgd", "local-sgd"])
@pytest.mark.parametrize("members", [("w0",), ("w0", "w1", "w2")])
def test_a_round_spans_epochs_and_every_sample_counts_once_in_each(method, members):
    """25 samples in batches of 2 are 13 or 5 local steps an epoch, a round is 30."""
    history = History(config(method, period=30, epochs=20))
    history.train(*members, rounds=2)
    assert history.snapshot.progress.round == 2
    assert history.snapshot.progress.local_step == 60
    history.end(*members)
    history.assert_every_sample_once_an_epoch()
    steps = 20 * (13 if len(members) == 1 else 5)
    assert history.snapshot.progress.local_step == steps
    assert history.snapshot.progress.round == -(-steps // 30), "only the last round is shorter"


@pytest.mark.parametrize("method", ["async-easgd", "async-sgd", "original-easgd"])
def test_the_period_with_messages_spans_epochs_too(method):
    ensemble = Ensemble(
        config(method, period=30, epochs=20), num_workers=2, images=tiny_images(25)
    ).join()
    assert steps_of(ensemble.workers[0].runner.strategy._assignment) == 30
    assert ensemble.run() == [Outcome.FINISHED] * 2
    assert ensemble.service.coordinator.state()["progress"].num_samples == 20 * 25
    records = ensemble.service.coordinator.pop_records()
    assert records[0].period == 30


def test_a_step_never_mixes_two_epochs():
    ensemble = Ensemble(config("diloco", period=30), num_workers=2, images=tiny_images(25)).join()
    steps = ensemble.workers[0].runner.strategy.next_round(0).steps()
    sizes = [(epoch, len(positions)) for epoch, positions in steps]
    assert [epoch for epoch, _ in sizes] == sorted(epoch for epoch, _ in sizes)
    assert {epoch for epoch, _ in sizes} == {0, 1, 2}
    assert max(size for _, size in sizes) == 2


def test_each_fragment_is_applied_one_delay_after_it_is_sent_and_the_last_one_in_the_last_step():
    assert plan_round(4, fragments=2, delay=1) == [([0], []), ([], [0]), ([1], []), ([], [1])]
    assert plan_round(1, fragments=2, delay=1) == [([0, 1], [0, 1])]


def test_a_round_without_steps_has_an_empty_plan():
    """The coordinator has no work for a worker that joins at the end of the run."""
    assert plan_round(0, fragments=2, delay=1) == []


@pytest.mark.parametrize("lost", [(0, 3), (1, 17)])
def test_the_claims_of_a_lost_worker_in_several_epochs_are_released(lost):
    history = counting(AllProgress(), epochs=12, period=20)
    history.train("w0", "w1", "w2", lost={"w1": lost})
    history.end("w0", "w2")
    assert (history.snapshot.weights == 12).all()


def test_a_late_worker_keeps_its_claims_in_several_epochs():
    history = counting(AllProgress(), epochs=12, period=20)
    history.train("w0", "w1", "w2", late={"w1": (0, 9)})
    history.train("w0", "w2", rounds=1)
    history.end("w0", "w1", "w2")
    assert (history.snapshot.weights == 12).all()


def test_the_learning_rate_follows_its_schedule_within_a_long_round():
    ensemble = Ensemble(
        config("diloco", period=39, epochs=3), num_workers=1, images=tiny_images(25)
    ).join()
    strategy = ensemble.workers[0].runner.strategy
    num_steps = strategy.next_round(0).num_steps
    shares = [strategy.share_done(step, 0) for step in range(num_steps)]
    assert num_steps == 39
    assert shares[0] == 0.0
    assert shares[13] == pytest.approx(1 / 3)
    assert shares[26] == pytest.approx(2 / 3)
    assert shares == sorted(set(shares))


# warnings


def period_config(*, workers=2, **training):
    return TrainConfig(
        training=TrainingConfig(batch_size=64, **training),
        scaling=ScalingConfig(num_workers=workers),
        method=MethodConfig(name="diloco"),
    )


@pytest.mark.parametrize(
    ("period", "training", "notes"),
    [
        (10, {"epochs": 20}, []),
        (
            500,
            {"epochs": 60},
            [
                "method.period 500 is 41.7 epochs for each of 2 workers: the center is updated, "
                "evaluated and checkpointed no more often than that"
            ],
        ),
        (
            500,
            {"epochs": 10},
            [
                "the run has 113 local steps for each of 2 workers, fewer than method.period 500: "
                "the center is updated only once, at the end"
            ],
        ),
        (
            500,
            {"steps": 499},
            [
                "the run has 499 local steps for each of 2 workers, fewer than method.period 500: "
                "the center is updated only once, at the end"
            ],
        ),
        (11, {"seconds": 5.0}, []),
    ],
)
def test_a_period_longer_than_an_epoch_or_the_run_is_reported(period, training, notes):
    config = period_config(**training)
    assert notes_on_period(config, period=period, num_samples=1438) == notes


def test_a_run_logs_the_warning_and_its_result_has_the_mean_period(tmp_path, capsys):
    raydl.Trainer(
        "mlp",
        "digits",
        method=MethodConfig(name="diloco", period=100),
        training=TrainingConfig(epochs=9, batch_size=64),
        scaling=ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="plain"),
    ).fit()
    assert "method.period 100 is 4.3 epochs for one worker" in capsys.readouterr().out
    result = json.loads((tmp_path / "run/result.json").read_text())
    # An epoch of 1,438 samples has 23 local steps: 9 epochs are two full rounds and one of 7 steps.
    assert result["rounds"] == 3
    assert result["period"] == pytest.approx(9 * 23 / 3)
    (row,) = make_rows([Run("diloco, seed 0", period_config(), "sync", result)], 0.9)
    heading, form = COLUMNS["period"]
    assert (heading, form.format(row.figures["period"].median)) == ("local steps each", "69.0")
