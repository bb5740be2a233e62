"""A column of a table is predicted from the others, without a task of one's own."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import raydl
from raydl import cli
from raydl.config import InputConfig
from raydl.data import DataShape, load
from raydl.data.in_memory import TableSet
from raydl.data.scaling import TableScaler, statistics_of_table
from raydl.errors import ConfigError, DataError, RaydlError
from raydl.run.evaluate import score_run
from raydl.tasks import Classification, Regression, task_for, task_on
from raydl.tools.data_info import inspect

SPECIES = {
    "setosa": ((5.006, 3.428, 1.462, 0.246), (0.352, 0.379, 0.174, 0.105)),
    "versicolor": ((5.936, 2.770, 4.260, 1.326), (0.516, 0.314, 0.470, 0.198)),
    "virginica": ((6.588, 2.974, 5.552, 2.026), (0.636, 0.322, 0.552, 0.275)),
}
"""Mean and deviation of sepal length and width, petal length and width in Fisher's data (1936)."""
NAMES = ("sepal_length", "sepal_width", "petal_length", "petal_width")


def iris(names=NAMES, factor=1.0):
    """Return 150 flowers as CSV, with the columns in some order."""
    random, lines = np.random.default_rng(0), [",".join([*names, "species"])]
    for species, (mean, std) in SPECIES.items():
        for values in random.normal(mean, std, (50, 4)).clip(0.1):
            row = dict(zip(NAMES, values, strict=True))
            lines.append(",".join([*(f"{factor * row[name]:.1f}" for name in names), species]))
    return "\n".join(lines) + "\n"


@pytest.fixture
def flowers(tmp_path, monkeypatch):
    """Work in a folder with iris.csv."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "iris.csv").write_text(iris())
    return tmp_path


def train(*options):
    plain = ("--workers", "0", "--run.progress", "none", "--run-dir", "run", "--batch-size", "27")
    return cli.main(["train", *plain, "--lr", "0.1", *options])


def config_of(folder):
    return json.loads((folder / "run/config.json").read_text())


IRIS = ("--data", "iris.csv", "--target", "species")


def test_flowers_are_classified_and_the_run_keeps_names_and_scale(flowers):
    assert train(*IRIS, "--epochs", "20", "--checkpoint.keep-best") == 0
    result = raydl.Result.from_path("run").metrics
    assert result["samples"] == 20 * 135
    assert result["center_accuracy"] >= 0.8
    kept = config_of(flowers)
    assert kept["config"]["model"] == "mlp"
    assert kept["schema"]["species"]["names"] == list(SPECIES)
    rows = load("iris.csv", input=InputConfig(target="species")).train.columns
    for name in NAMES:
        assert kept["normalization"]["mean"][name] == pytest.approx([rows[name].mean()])
        assert kept["normalization"]["std"][name] == pytest.approx([rows[name].std()], rel=1e-5)
    assert score_run("run")["accuracy"] == pytest.approx(result["center_accuracy"])
    assert score_run("run", best=True)["accuracy"] >= result["center_accuracy"]


def test_a_resumed_run_trains_on_with_every_flower_once_an_epoch(flowers):
    assert train(*IRIS, "--epochs", "2") == 0
    assert train(*IRIS, "--epochs", "4", "--resume") == 0
    assert raydl.Result.from_path("run").metrics["samples"] == 4 * 135


def test_a_resumed_run_and_other_data_are_scaled_as_the_run_began(flowers):
    assert train(*IRIS, "--epochs", "8") == 0
    before, accuracy = config_of(flowers)["normalization"], score_run("run")["accuracy"]
    order = ("petal_width", "sepal_length", "petal_length", "sepal_width")
    (flowers / "turned.csv").write_text(iris(order))
    assert score_run("run", data="turned.csv") == score_run("run")
    (flowers / "iris.csv").write_text(iris(factor=10.0))
    assert score_run("run")["accuracy"] < accuracy
    assert train(*IRIS, "--epochs", "9", "--resume") == 0
    assert config_of(flowers)["normalization"] == before


def test_the_same_flowers_in_parquet_and_json_lines_give_the_same_center(flowers):
    columns = load("iris.csv", input=InputConfig(target="species"))
    assert columns.train.class_names == tuple(SPECIES)
    head, *rows = [line.split(",") for line in iris().splitlines()]
    values = [[*map(float, row[:4]), row[4]] for row in rows]
    table = pa.table({name: [row[n] for row in values] for n, name in enumerate(head)})
    pq.write_table(table, "iris.parquet")
    lines = [json.dumps(dict(zip(head, row, strict=True))) for row in values]
    (flowers / "iris.jsonl").write_text("\n".join(lines))
    for other in ("iris.parquet", "iris.jsonl"):
        again = load(other, input=InputConfig(target="species"))
        for part in ("train", "test"):
            first, second = getattr(columns, part).columns, getattr(again, part).columns
            assert first.keys() == second.keys()
            assert all(np.array_equal(first[name], second[name]) for name in first)


def test_streamed_rows_have_the_values_of_those_in_memory(flowers):
    for part in ("train", "test"):
        (flowers / f"{part}.csv").write_text(iris())
    whole = load(str(flowers / "t*.csv"), input=InputConfig(target="species"))
    streamed = load(str(flowers / "t*.csv"), input=InputConfig(target="species", stream="always"))
    assert streamed.train.is_streamed
    assert streamed.train.shape == whole.train.shape
    rows = np.arange(150)[::-1]
    first, second = whole.test.fetch(rows), streamed.test.fetch(rows)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert statistics_of_table(streamed.train) == statistics_of_table(whole.train)


@pytest.fixture
def houses(tmp_path, monkeypatch):
    """Work in a folder with houses.csv: a price of 100,000 and more."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    rooms, area = random.integers(1, 9, 400), random.normal(100, 20, 400).round(1)
    prices = (30_000 * rooms + 1000 * area + random.normal(0, 2000, 400)).round()
    rows = [f"{r},{a},{p:.0f}" for r, a, p in zip(rooms, area, prices, strict=True)]
    (tmp_path / "houses.csv").write_text("\n".join(["rooms,area,price", *rows]))
    return tmp_path


HOUSES = ("--data", "houses.csv", "--target", "price")


def test_prices_are_predicted_and_the_error_is_in_their_unit(houses):
    assert train(*HOUSES, "--task", "regression", "--epochs", "20") == 0
    metrics = score_run("run")
    assert metrics["loss"] < 0.05
    assert 1000 < metrics["absolute_error"] < 20_000
    assert raydl.Result.from_path("run").metrics["samples"] == 20 * 360
    assert train(*HOUSES, "--task", "regression", "--epochs", "21", "--resume") == 0


def test_a_regression_is_described_by_its_loss_and_its_error(houses, capsys):
    assert train(*HOUSES, "--task", "regression", "--epochs", "2") == 0
    error, loss = score_run("run")["absolute_error"], score_run("run")["loss"]
    capsys.readouterr()
    assert cli.main(["status", "run"]) == 0
    assert f"center loss {loss:.4f}\n" in capsys.readouterr().out
    assert cli.main(["list", "."]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert (head.split()[-1], row.split()[-2:]) == ("center", ["loss", f"{loss:.4f}"])
    assert cli.main(["report", "run", "--out", "page.html"]) == 0
    page = (houses / "page.html").read_text()
    assert f"absolute error {error:,.4g}" in page
    assert "accuracy" not in page.partition("<h2>Curves")[0].rpartition("</style>")[2]


def test_a_regression_in_python_is_the_same_task(houses):
    result = raydl.Trainer(
        raydl.Regression(),
        "houses.csv",
        input=InputConfig(target="price"),
        training=raydl.TrainingConfig(epochs=2, batch_size=27),
        scaling=raydl.ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir="run", progress="none"),
    ).fit()
    assert score_run(result.path)["loss"] == pytest.approx(result.metrics["center_loss"])


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
@pytest.mark.parametrize("stream", ["never", "always"])
def test_every_row_is_trained_on_exactly_once_an_epoch(tmp_path, name, stream):
    def text_of(rows):
        if name.endswith("csv"):
            return "id,y\n" + "".join(f"{n},{n % 3}\n" for n in rows)
        return "".join(json.dumps({"id": n, "y": n % 3}) + "\n" for n in rows)

    (tmp_path / f"train-{name}").write_text(text_of(range(1000)))
    (tmp_path / f"test-{name}").write_text(text_of(range(10)))
    seen = []

    def loss(model, batch):
        if torch.is_grad_enabled() and len(batch["id"]) > 2:  # two samples are tried before
            seen.extend(batch["id"].tolist())
        return (model.weight.sum() * batch["y"]).mean()

    raydl.Trainer(
        lambda: torch.nn.Linear(1, 1),
        str(tmp_path / f"t*-{name}"),
        loss=loss,
        input=InputConfig(stream=stream),
        training=raydl.TrainingConfig(epochs=3, batch_size=37),
        scaling=raydl.ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    ).fit()
    epochs = np.array(seen).reshape(3, 1000)
    assert (np.sort(epochs, 1) == np.arange(1000)).all()
    assert (epochs[0] != epochs[1]).any()


def test_a_task_of_ones_own_gets_the_columns_as_they_are(houses):
    seen = []

    def loss(model, batch):
        seen.append(batch)
        return ((model(batch["area"][:, None] / 100)[:, 0] - batch["price"] / 1e5) ** 2).mean()

    raydl.Trainer(
        lambda: torch.nn.Linear(1, 1),
        "houses.csv",
        loss=loss,
        input=InputConfig(target="price"),
        training=raydl.TrainingConfig(steps=2, batch_size=27),
        scaling=raydl.ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir="run", progress="none"),
    ).fit()
    assert seen[0].keys() == {"rooms", "area", "price"}
    assert seen[0]["price"].dtype == torch.int64
    assert seen[0]["price"].min() > 20_000


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (IRIS[:2], "column 'species' must hold numbers, got string such as 'setosa'; name the "
                   "column to predict by --target, or the columns to read in input.columns"),
        ((*IRIS[:3], "kind"), "must have a column kind, got sepal_length"),
        ((*IRIS, "--task", "regression"),
         "column 'species' must hold numbers for a regression, got texts"),
        ((*IRIS[:3], "petal_width", "--input.columns", "sepal_width"),
         "column 'petal_width' holds fractions, and classes are texts or integers from 0 to 99: "
         "predict numbers by --task regression"),
        ((*IRIS[:3], "petal_width", "--task", "regression"),
         "column 'species' must hold numbers, got string such as 'setosa'; name the columns to "
         "read in input.columns"),
        ((*IRIS, "--model", "lenet"), "takes images, but the data are rows of"),
        ((*IRIS, "--input.columns", "species"), "no column from which to predict 'species'"),
        (("--data", "digits", "--task", "regression"),
         "regression predicts a column of a table: name it by --target"),
        (("--data", "iris.csv", "--input.columns", "sepal_width"),
         "needs a column to predict, but the data are rows of sepal_width"),
        ((*IRIS, "--input.stream", "always"),
         "has no test part and only one block: too few to split; give a folder with a training "
         "and a test file, or set --input.stream never"),
    ],
)  # fmt: skip
def test_what_a_table_lacks_is_said_in_one_sentence(flowers, capsys, options, sentence):
    assert train(*options, "--epochs", "1") == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert not (flowers / "run").exists()


def test_rows_that_lack_a_value_are_left_out_and_the_log_has_their_number(flowers, capsys):
    text = iris().splitlines()
    text[3] = text[3].replace("setosa", "?")
    (flowers / "iris.csv").write_text("\n".join(text))
    assert train(*IRIS, "--epochs", "1") == 2
    assert "column 'species' has no value in row 2" in capsys.readouterr().err
    plain = ("--input.nulls", "drop", "--run.progress", "plain")
    assert train(*IRIS, "--epochs", "1", *plain) == 0
    assert "1 of 150 rows of iris.csv lack a value: left out" in capsys.readouterr().out
    assert raydl.Result.from_path("run").metrics["samples"] == 135  # nine tenths of 149


def test_integers_are_classes_only_from_0_to_99(tmp_path):
    def opened(values, **input):
        lines = "".join(f"{n % 7},{v}\n" for n, v in enumerate(values))
        (tmp_path / "table.csv").write_text("a,b\n" + lines)
        return load(str(tmp_path / "table.csv"), input=InputConfig(target="b", **input))

    assert opened([0, 1, 2] * 10).train.class_names == ("0", "1", "2")
    assert opened(["True", "False"] * 10).train.class_names == ("0", "1")
    for values, held in (([0, 250] * 9, "integers from 0 to 250"), ([-1, 1] * 9, "from -1 to 1")):
        with pytest.raises(DataError, match=rf"{held}.*--task regression, or write classes as"):
            opened(values)


def test_a_class_that_only_the_test_set_has_is_named(flowers):
    (flowers / "train.csv").write_text(iris())
    (flowers / "test.csv").write_text(iris().replace("virginica", "lily"))
    with pytest.raises(RaydlError, match=r"test\.csv, row 100: .*'lily', which is none of the cla"):
        load(str(flowers / "t*.csv"), input=InputConfig(target="species"))


def test_scaled_rows_have_mean_0_and_deviation_1_whatever_their_size():
    random = np.random.default_rng(0)
    columns = {
        "time": random.integers(1_700_000_000, 1_700_000_100, 20_000),
        "pair": random.normal(5, [1e-3, 1e3], (20_000, 2)).astype(np.float32),
        "constant": np.full(20_000, 7.0, np.float32),
        "flag": random.random(20_000) < 0.5,
        "y": random.integers(0, 3, 20_000),
    }
    samples = TableSet(columns, target="y", class_names=("a", "b", "c"))
    scaler = TableScaler("y", statistics_of_table(samples))
    rows = np.arange(20_000)
    inputs, target = scaler(samples.fetch(rows), rows, 0)
    assert inputs.shape == (20_000, 5)
    assert inputs.dtype == torch.float32
    assert inputs.mean(0).abs().max() < 1e-3
    assert (inputs.std(0)[[0, 1, 2, 4]] - 1).abs().max() < 1e-3
    assert inputs[:, 3].unique().tolist() == [0.0]
    assert target.dtype == torch.int64
    none = scaler(samples.fetch(rows[:0]), rows[:0], None)
    assert [len(tensor) for tensor in none] == [0, 0]


def test_a_number_that_is_not_finite_is_refused_by_its_column():
    samples = TableSet({"a": np.array([1.0, np.nan], np.float32), "y": np.zeros(2, np.int64)},
                          target="y", class_names=("0",))  # fmt: skip
    with pytest.raises(DataError, match="column 'a' holds NaN or infinite numbers"):
        statistics_of_table(samples)


def test_a_model_by_name_takes_a_table_with_a_target():
    shape = DataShape((), 3, columns={"a": (), "b": (4,), "y": ()}, target="y", spread=10.0)
    assert isinstance(task_for("mlp", shape), Classification)
    assert task_for("mlp", shape).build_model(shape)(torch.zeros(2, 5)).shape == (2, 3)
    regression = Regression()
    model = regression.build_model(shape)
    batch = torch.zeros(2, 5), model(torch.zeros(2, 5))[:, 0].detach() + 0.5
    with torch.no_grad():
        sums = regression.metrics(model, batch)
    assert float(sums["loss"]) == pytest.approx(2 * 0.25)
    assert float(sums["absolute_error"]) == pytest.approx(2 * 0.5 * 10)
    with pytest.raises(ConfigError, match=r"label_smoothing.*only classes are smoothed"):
        task_on(None, shape, raydl.TrainConfig(
            task="regression", training=raydl.TrainingConfig(label_smoothing=0.1)))  # fmt: skip


def test_data_info_describes_a_table_in_a_text_file(flowers):
    info = inspect("iris.csv")
    assert (info.kind, info.holds, info.parts[0].num_rows) == ("csv", "table", 150)
    assert [column.name for column in info.columns] == [*NAMES, "species"]
    assert any("--target" in warning for warning in info.warnings)
    assert cli.main(["data", "info", "iris.csv"]) == 0


def test_a_table_in_a_text_file_is_converted_to_parquet(flowers):
    assert cli.main(["data", "convert", "iris.csv", "set"]) == 0
    columns = [
        load(source, input=InputConfig(target="species")).train.columns
        for source in ("iris.csv", "set")
    ]
    assert all(np.array_equal(columns[0][name], columns[1][name]) for name in columns[0])
