"""A metric of the center that is NaN or infinite is said once, with the rows concerned."""

import json

import numpy as np
import pytest
import torch
from ensembles import Ensemble

import raydl
from raydl.cli import main
from raydl.config import EvaluationConfig, MethodConfig, TrainConfig, TrainingConfig
from raydl.run.evaluate import score_run
from raydl.tasks import Classification, metric_sums
from raydl.worker.evaluator import Evaluator
from raydl.worker.not_finite import find_not_finite, joined

NAN, INF = float("nan"), float("inf")


class Metrics:
    """A task whose loss is the sum of the targets."""

    name = "sums"

    def metrics(self, model, batch):
        return {"loss": batch["y"].sum(), "count": torch.tensor(float(len(batch["y"])))}


class Together(Metrics):
    """Its metric is not defined for a batch without a positive target."""

    def metrics(self, model, batch):
        return {"f1": torch.tensor(NAN if (batch["y"][:4] < 0).any() else 0.5)}


class NeedsTwo(Metrics):
    def metrics(self, model, batch):
        if len(batch["y"]) < 2:
            raise ValueError("one sample has no variance")
        return super().metrics(model, batch)


def find(targets, *, batch_size=64, task=None, rows=None, column="y"):
    """Return what is found in a test set with these targets."""
    targets = torch.tensor(targets)

    def get_batch(start, stop):
        values = targets[start:stop]
        return {"y": values, "x": torch.ones(len(values))}

    task, model = task or Metrics(), torch.nn.Linear(1, 1)
    settings = {"num_samples": len(targets), "batch_size": batch_size}
    sums = metric_sums(task, model, get_batch, **settings)
    rows = np.arange(len(targets)) if rows is None else np.array(rows)
    return find_not_finite(task, model, get_batch, sums, rows=rows, batch_size=batch_size)


def targets_with(count, value, *places):
    return [value if index in places else 1.0 for index in range(count)]


def test_a_test_set_whose_metrics_are_finite_has_nothing_to_say():
    assert find([1.0] * 200) is None


@pytest.mark.parametrize("place", [0, 3, 31, 32, 63, 64, 100, 199])
def test_one_nan_among_the_targets_is_found_by_its_row(place):
    found = find(targets_with(200, NAN, place))
    assert (found.metric, list(found.rows), list(found.holding)) == ("loss", [place], ["y"])
    assert found.sentence(4) == (
        f"the loss of the center on the test set is NaN, as it is in 1 of its 4 batches, first in "
        f"row {place} (counted from 0), with values in y that are not finite; mend or remove such "
        f"rows, or leave them out in the task's metrics"
    )


def test_a_set_of_one_batch_names_the_row_too():
    found = find(targets_with(50, NAN, 3), batch_size=256)
    assert "in 1 of its 1 batches, first in row 3 (counted from 0)" in found.sentence(1)


def test_infinite_values_and_several_rows_are_said():
    found = find(targets_with(200, INF, 70, 72, 75, 76, 77, 78, 150))
    assert "is infinite, as it is in 2 of its 4 batches" in found.sentence(4)
    assert "first in rows 70, 72, 75, 76, 77 and others" in found.sentence(4)


def test_the_rows_are_those_of_the_test_set_not_of_the_drawn_ones():
    found = find(targets_with(8, NAN, 2), rows=[5, 10, 17, 20, 25, 30, 35, 40])
    assert list(found.rows) == [17]


def test_a_row_that_gives_nan_although_it_is_finite_is_named_without_a_column():
    class Logarithm(Metrics):
        def metrics(self, model, batch):
            return {"loss": torch.log(batch["y"]).sum()}

    sentence = find(targets_with(100, -1.0, 40), task=Logarithm()).sentence(2)
    assert "first in row 40 (counted from 0); mend" in sentence


def test_a_center_that_has_diverged_is_not_blamed_on_rows():
    class Diverged(Metrics):
        def metrics(self, model, batch):
            return {"loss": torch.tensor(NAN)}

    found = find([1.0] * 100, task=Diverged())
    assert found.sentence(2).endswith(
        "in 2 of its 2 batches and in each row tried: the center has diverged; lower optimizer.lr"
    )


def test_targets_that_are_all_nan_are_not_a_diverged_center():
    sentence = find([NAN] * 100).sentence(2)
    assert "diverged" not in sentence
    assert "with values in y that are not finite" in sentence


def test_a_metric_that_is_undefined_for_a_whole_batch_names_the_batch():
    class Whole(Metrics):
        def metrics(self, model, batch):
            return {"f1": torch.tensor(NAN if len(batch["y"]) == 20 else 0.5)}

    sentence = find([1.0] * 30, batch_size=20, task=Whole()).sentence(2)
    assert "the f1 of the center on the test set is NaN, as it is in 1 of its 2 batches" in sentence
    assert "the first with rows 0 to 19 (counted from 0); no row has this value" in sentence


def test_a_task_that_cannot_score_one_row_names_the_part():
    sentence = find(targets_with(100, NAN, 40), task=NeedsTwo()).sentence(2)
    assert (
        "the first with rows 32 to 63 (counted from 0), with values in y that are not finite"
        in sentence
    )


def test_parts_of_a_test_set_are_counted_together_and_the_first_row_is_named():
    parts = [None, find(targets_with(100, NAN, 40)), find(targets_with(100, NAN, 3))]
    found = joined(parts)
    assert (found.num_batches, list(found.rows)) == (2, [40])
    assert joined([None, None]) is None


class OneBadRow(Classification):
    """A loss that is NaN for the batches with the picture of row 5."""

    def __init__(self, model, bad):
        super().__init__(model)
        self.bad = bad

    def metrics(self, model, batch):
        sums = super().metrics(model, batch)
        has_bad = any(torch.equal(picture, self.bad) for picture in batch[0])
        return {**sums, "loss": sums["loss"] * NAN} if has_bad else sums


def ensemble_with_one_bad_row(num_workers, by):
    config = TrainConfig(
        method=MethodConfig(name="sync-easgd", period=2),
        training=TrainingConfig(epochs=3, batch_size=4, deterministic=True),
        evaluation=EvaluationConfig(by=by, batch_size=4, every_epochs=1),
    )
    ensemble = Ensemble(config, num_workers=num_workers)
    picture = ensemble.batches.batch(np.array([5]))[0][0]
    ensemble.use_task(OneBadRow(ensemble.job.task._factory, picture))
    return ensemble


def test_the_evaluator_says_it_with_its_first_such_score_only():
    ensemble = ensemble_with_one_bad_row(1, "evaluator")
    evaluator = Evaluator(ensemble.job, ensemble.batches)
    problems = [evaluator.evaluate(ensemble.first).problem for _ in range(2)]
    assert "as it is in 1 of its 6 batches, first in row 5 (counted from 0)" in problems[0]
    assert problems[1] == ""


def test_workers_that_score_together_say_it_too():
    ensemble = ensemble_with_one_bad_row(2, "workers").join()
    ensemble.run(rounds=4)
    scores = [score for worker in ensemble.workers for score in worker.report().scores]
    assert "as it is in 1 of its 6 batches, first in row 5 (counted from 0)" in scores[0].problem


def test_a_mean_that_is_nan_with_finite_sums_is_said():
    class Derived(Classification):
        def derived(self, means):
            return {"ratio": NAN}

    ensemble = Ensemble(TrainConfig(), num_workers=1)
    ensemble.use_task(Derived(ensemble.job.task._factory))
    problem = Evaluator(ensemble.job, ensemble.batches).evaluate(ensemble.first).problem
    assert problem.startswith("the ratio of the center on the test set is NaN, although it is")


class Points(torch.utils.data.Dataset):
    """Points on a line; one of the test set has no target."""

    def __init__(self, bad=None):
        self.bad = bad

    def __len__(self):
        return 32

    def __getitem__(self, index):
        x = torch.tensor([index / 32.0])
        return x, torch.full((1,), NAN) if index == self.bad else 2 * x


def squared(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def line():
    return torch.nn.Linear(1, 1)


def train(folder, **optimizer):
    return raydl.Trainer(
        line,
        {"train": Points(), "test": Points(bad=7 if not optimizer else None)},
        loss=squared,
        training=raydl.TrainingConfig(epochs=3, batch_size=8),
        optimizer=raydl.OptimizerConfig(**optimizer),
        scaling=raydl.ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir=str(folder), progress="plain"),
    ).fit()


def test_a_run_says_once_that_its_score_is_nan_and_keeps_it_in_the_result(tmp_path, capsys):
    result = train(tmp_path / "run")
    [warning] = result.metrics["warnings"]
    assert (
        "first in row 7 (counted from 0), with values in the targets that are not finite" in warning
    )
    assert capsys.readouterr().out.count("first in row 7") == 1
    assert json.loads((tmp_path / "run/result.json").read_text())["warnings"] == [warning]


def test_raydl_evaluate_says_it_beside_the_figures(tmp_path, capsys, monkeypatch):
    folder = str(tmp_path / "run")
    raydl.Trainer(
        "mlp",
        "synthetic:96",
        training=raydl.TrainingConfig(steps=2, batch_size=8),
        scaling=raydl.ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir=folder, progress="none"),
    ).fit()
    right = Classification.metrics

    def wrong(task, model, batch):
        sums = right(task, model, batch)
        return {**sums, "loss": sums["loss"] * NAN}

    monkeypatch.setattr(Classification, "metrics", wrong)
    capsys.readouterr()
    assert main(["evaluate", folder]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["accuracy"] >= 0
    assert "in each row tried: the center has diverged; lower optimizer.lr" in err
    with pytest.warns(RuntimeWarning, match="the center has diverged"):
        score_run(folder)
