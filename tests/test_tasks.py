"""Custom tasks: a class, a model with a loss, and a model that returns its loss."""

import json
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

import raydl
from raydl.cli import main
from raydl.data import DataShape
from raydl.errors import ConfigError, RaydlError, ShapeError
from raydl.run.evaluate import score_run
from raydl.tasks import LossFromForward, ModelAndLoss

SHAPE = DataShape((), 0, columns={"x": (3,), "y": ()})


@pytest.fixture
def table(tmp_path):
    x = np.random.default_rng(0).normal(size=(400, 3)).astype(np.float32)
    y = (x.sum(1) > 0).astype(np.int64)
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"x": list(x), "y": y}), path, row_group_size=50)
    return str(path)


def line(shape):
    return nn.Linear(shape.columns["x"][0], 2)


def cross_entropy(model, batch):
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def train(task, data, tmp_path, **more):
    return raydl.Trainer(
        task,
        data,
        training=raydl.TrainingConfig(epochs=20, batch_size=20),
        optimizer=raydl.OptimizerConfig(lr=0.5),
        scaling=raydl.ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
        **more,
    ).fit()


def test_a_function_that_builds_a_model_and_a_loss_are_a_task(table, tmp_path):
    result = train(line, table, tmp_path, loss=cross_entropy)
    assert result.metrics["center_loss"] < 0.2
    model = line(SHAPE)
    model.load_state_dict(load_file(tmp_path / "run" / "center.safetensors"))


def test_a_task_on_a_table_may_have_the_further_methods_of_tasks(table, tmp_path):
    columns = []

    class Line(ModelAndLoss):
        """A task on a table; ``export`` is a method of the user's own."""

        def check_output(self, model, inputs, shape):
            columns.append(sorted(inputs))

        def predict(self, model, inputs):
            raise AssertionError("no sample of a table is a picture")

        def export(self, path):
            raise AssertionError("raydl does not call it")

    result = train(Line(line, cross_entropy), table, tmp_path)
    assert result.metrics["center_loss"] < 0.2
    assert columns == [["x", "y"]]


def test_a_model_may_be_built_without_the_shape_of_the_data():
    task = ModelAndLoss(lambda: nn.Linear(3, 2), cross_entropy)
    assert task.build_model(SHAPE).out_features == 2
    assert ModelAndLoss(line, cross_entropy).name == "line"


def test_the_loss_is_added_with_what_it_is_a_mean_over():
    task = ModelAndLoss(
        line, cross_entropy, metrics=lambda model, batch: {"ones": batch["y"].sum()}
    )
    model = task.build_model(SHAPE)
    batch = {"x": torch.randn(6, 3), "y": torch.tensor([0, 1, 1, 0, 1, 1])}
    with torch.no_grad():
        sums, loss = task.metrics(model, batch), cross_entropy(model, batch)
    assert float(sums["ones"]) == 4
    total, count = sums["loss"]
    assert float(total) == pytest.approx(6 * float(loss))
    assert count == 6


class ModelWithLoss(nn.Module):
    """A model that returns its loss in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.inner, self.way = nn.Linear(3, 2), way

    def forward(self, x, y):
        logits = self.inner(x)
        return self.way(functional.cross_entropy(logits, y), logits)


@dataclass
class Output:
    """An output like those of Hugging Face models."""

    loss: torch.Tensor
    logits: torch.Tensor


WAYS = {
    "attribute": Output,
    "key": lambda loss, logits: {"loss": loss, "logits": logits},
    "first": lambda loss, logits: (loss, logits),
    "alone": lambda loss, logits: loss,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_returns_its_loss_is_a_task(way, table, tmp_path):
    task = LossFromForward(lambda: ModelWithLoss(WAYS[way]))
    model = task.build_model(SHAPE)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    expected = functional.cross_entropy(model.inner(x), y)
    assert torch.equal(task.loss(model, {"x": x, "y": y}), expected)
    assert torch.equal(task.loss(model, (x, y)), expected)
    if way == "attribute":
        assert train(task, table, tmp_path).metrics["center_loss"] < 0.2


@pytest.mark.parametrize(
    ("task", "more", "sentence"),
    [
        (line, {}, "task line has no name, build_model, loss, metrics; give a task"),
        (nn.Linear(3, 2), {"loss": cross_entropy}, "is a model, a Linear; give a function"),
        (ModelAndLoss, {}, r"is the class ModelAndLoss; give an instance: ModelAndLoss\(\)"),
        (ModelAndLoss(line, cross_entropy), {"loss": cross_entropy}, "this task has its own"),
        ("lenet", {"loss": cross_entropy}, "is for a model of your own, not for lenet by name"),
        (lambda: 3, {"loss": cross_entropy}, "must return a torch.nn.Module"),
        (
            LossFromForward(lambda: ModelWithLoss(lambda loss, logits: logits)),
            {},
            "returned no loss",
        ),
    ],
)
def test_an_invalid_task_is_refused_before_any_process_starts(
    task, more, sentence, table, tmp_path
):
    with pytest.raises(ConfigError, match=sentence):
        train(task, table, tmp_path, **more)
    assert not (tmp_path / "run").exists()


def mean_of(model, batch):
    return {"loss": cross_entropy(model, batch)}


@pytest.mark.parametrize(
    ("loss", "metrics", "sentence"),
    [
        (
            lambda model, batch: None,
            None,
            "the loss must be one number in .*, but it is a NoneType",
        ),
        (lambda model, batch: 0.5, None, "the loss must be one number in .*, but it is a float"),
        (
            lambda model, batch: model(batch["x"]),
            None,
            r"must be one number, but it has shape \[2, 2\]",
        ),
        (lambda model, batch: cross_entropy(model, batch).detach(), None, "has no gradient"),
        (
            cross_entropy,
            lambda model, batch: 3,
            "metrics must return a dict of sums by name, got 3",
        ),
        (cross_entropy, lambda model, batch: {"x": batch["y"]}, r"metric x .* has shape \[2\]"),
        (
            cross_entropy,
            lambda model, batch: {"x": "1"},
            "metric x must be one number, the sum over the samples of a batch, but it is a str",
        ),
        (cross_entropy, mean_of, "metric loss must be the sum over .*, but it is the mean"),
    ],
)
def test_invalid_losses_and_metrics_are_refused_before_any_process_starts(
    loss, metrics, sentence, table, tmp_path
):
    with pytest.raises(ShapeError, match=sentence):
        train(ModelAndLoss(line, loss, metrics=metrics), table, tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_task_without_loss_among_its_metrics_is_refused(table, tmp_path):
    class Silent(ModelAndLoss):
        def metrics(self, model, batch):
            return {"ones": batch["y"].sum()}

    with pytest.raises(ShapeError, match="must include loss, but they are ones"):
        train(Silent(line, cross_entropy), table, tmp_path)
    Silent.metrics = lambda self, model, batch: None
    with pytest.raises(ShapeError, match="must be a dict of name and sum, but they are a NoneType"):
        train(Silent(line, cross_entropy), table, tmp_path)


@pytest.mark.parametrize(
    ("classes", "got"),
    [
        (lambda logits: logits.softmax(1), r"torch.float32 of shape \[2, 10\]"),
        (lambda logits: logits.argmax(1).tolist(), "<class 'list'>"),
    ],
)
def test_predictions_that_are_no_classes_are_refused_before_any_process_starts(
    classes, got, tmp_path
):
    class Predicts(raydl.Classification):
        def predict(self, model, inputs):
            return classes(model(inputs))

    with pytest.raises(ShapeError, match=f"predict must return 2 whole numbers .*, got {got}"):
        train(Predicts("mlp"), "synthetic:64", tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_training", [False, True])
def test_a_model_that_is_built_in_evaluation_mode_trains_so_and_that_is_logged(
    is_training, table, tmp_path
):
    def build(shape):
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
        return model.train(is_training)

    train(build, table, tmp_path, loss=cross_entropy)
    events = json.loads((tmp_path / "run/status.json").read_text())["events"]
    logged = [e for e in events if "2 modules with dropout or batch norm are in evaluation" in e]
    assert len(logged) == (not is_training)


def test_a_task_may_need_more_than_one_sample(table, tmp_path):
    def spread(model, batch):
        assert len(batch["y"]) > 1
        return {"spread": batch["x"].std(0).sum() * len(batch["y"])}

    train(ModelAndLoss(line, cross_entropy, metrics=spread), table, tmp_path)


def test_a_lazy_model_is_refused_in_one_sentence(table, tmp_path):
    with pytest.raises(ShapeError, match="has lazy layers"):
        train(lambda: nn.LazyLinear(2), table, tmp_path, loss=cross_entropy)


@pytest.mark.parametrize(
    ("data", "more", "sentence"),
    [
        (None, {}, "data: must be a path or URI, .* got a NoneType"),
        (torch.zeros(3), {}, "got a Tensor"),
        ({"train": "a.parquet", "test": "b.parquet"}, {}, "got a str"),
        ("digits", {"exchange": 2}, "exchange must be a raydl.ExchangeConfig, got 2"),
    ],
)
def test_arguments_of_wrong_types_are_refused_in_one_sentence(data, more, sentence, tmp_path):
    with pytest.raises(RaydlError, match=sentence):
        train("mlp", data, tmp_path, **more)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("test_tasks:ModelAndLoss", "must be a class that needs no arguments: missing"),
        ("test_tasks", "must be written module:name, got test_tasks"),
    ],
)
def test_a_class_that_cannot_be_instantiated_is_refused_in_one_sentence(
    name, sentence, table, capsys
):
    assert main(["train", "--data", table, "--task", name, "--workers", "0"]) == 2
    assert sentence in capsys.readouterr().err


def test_the_command_line_can_name_the_class_of_the_task(table, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Mine:\n"
        '    name = "mine"\n'
        "    def build_model(self, shape):\n"
        '        return torch.nn.Linear(shape.columns["x"][0], 2)\n'
        "    def loss(self, model, batch):\n"
        '        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])\n'
        "    def metrics(self, model, batch):\n"
        '        return {"loss": self.loss(model, batch) * len(batch["y"])}\n'
    )
    monkeypatch.chdir(tmp_path)
    options = ["--data", table, "--task", "mine:Mine", "--workers", "0", "--run-dir", "run"]
    assert main(["train", *options, "--epochs", "2", "--run.progress", "none"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "run", "--trust"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["loss"]
    assert main(["train", "--task", "mine:main", "--workers", "0"]) == 2
    assert "task mine:main cannot be imported" in capsys.readouterr().err


def short_run(tmp_path):
    return {
        "scaling": raydl.ScalingConfig(num_workers=0),
        "training": raydl.TrainingConfig(steps=2, batch_size=8),
        "run": raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    }


def test_a_run_of_a_built_in_task_with_a_named_model_can_be_evaluated(tmp_path):
    task = raydl.Classification("mlp")  # not the model of a Classification() without arguments
    result = raydl.Trainer(task, "synthetic:64x1x4x4", **short_run(tmp_path)).fit()
    scores = score_run(str(tmp_path / "run"))
    assert scores["loss"] == pytest.approx(result.metrics["center_loss"], rel=1e-5)


def flat(shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes))


def test_a_run_of_a_function_of_a_script_is_not_evaluated_with_another_model(tmp_path):
    raydl.Trainer(raydl.Classification(flat), "synthetic:64x1x4x4", **short_run(tmp_path)).fit()
    with pytest.raises(
        ConfigError, match="the names Classification and flat: the run began with a"
    ):
        score_run(str(tmp_path / "run"))
