"""Texts: how they are read, the loss of a language model, and the results of a run."""

import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from token_sets import token_samples
from torch import nn

from raydl import cli
from raydl.cli.options import parse_train
from raydl.config import InputConfig
from raydl.data import load, preparation_for
from raydl.data.samples import DataShape
from raydl.errors import DataError, ShapeError, UnknownNameError
from raydl.metrics import TIME_PARTS
from raydl.models import MODELS
from raydl.run.evaluate import score_run
from raydl.run.trainer import Trainer
from raydl.tasks import Classification, LanguageModel, evaluate, task_for
from raydl.tools.comparison import Comparison, compare

TEXTS = DataShape((4,), 256)
PICTURES = DataShape((1, 8, 8), 10)


def write(path, content):
    path.write_bytes(content)
    return str(path)


def read(source, context=4):
    return load(source, input=InputConfig(context=context))


def bytes_of(samples):
    """Return the tokens of all samples as bytes."""
    return bytes(samples.fetch(np.arange(samples.num_samples))[0].flatten().tolist())


# the samples


def test_a_sample_is_a_slice_of_tokens_and_its_next_tokens():
    tokens = token_samples(np.arange(10, dtype=np.uint8), 3, 256)
    inputs, following = tokens.fetch(np.array([2, 0]))
    assert inputs.tolist() == [[6, 7, 8], [0, 1, 2]]
    assert following.tolist() == [[7, 8, 9], [1, 2, 3]]
    assert inputs.dtype == following.dtype == torch.int64


@pytest.mark.parametrize(("num_tokens", "num_samples"), [(4, 1), (6, 1), (7, 2), (10, 3)])
def test_samples_are_whole_and_do_not_overlap(num_tokens, num_samples):
    tokens = token_samples(np.arange(num_tokens), 3, 256)
    assert tokens.num_samples == num_samples
    inputs, _ = tokens.fetch(np.arange(num_samples))
    assert inputs.flatten().tolist() == list(range(3 * num_samples))


def test_no_rows_make_an_empty_batch_of_the_right_shape():
    inputs, following = token_samples(np.arange(10), 3, 256).fetch(np.arange(0))
    assert inputs.shape == following.shape == (0, 3)


def test_batches_of_read_only_tokens_are_copies():
    memory = np.arange(10, dtype=np.int32)
    memory.flags.writeable = False
    inputs, _ = token_samples(memory, 3, 256).fetch(np.array([0]))
    inputs += 1
    assert memory.tolist() == list(range(10))


def test_every_sample_is_once_in_the_order_of_an_epoch():
    tokens = token_samples(np.arange(100), 3, 256)
    rows = tokens.order(7).rows(0, np.arange(tokens.num_samples))
    assert sorted(rows) == list(range(33))
    assert not tokens.is_streamed
    assert tokens.prefetch(rows) is None


# reading


def test_the_bytes_of_a_text_are_its_tokens_and_its_last_tenth_is_the_test_set(tmp_path):
    text = ("Grüße, Welt. " * 20)[:200]
    data = read(write(tmp_path / "a.txt", text.encode()))
    assert data.train.shape == data.test.shape == TEXTS
    whole = text.encode()
    last_tenth = whole[-(len(whole) // 10) :]
    assert whole.startswith(bytes_of(data.train))
    assert last_tenth.startswith(bytes_of(data.test))
    assert data.train.num_samples == (len(whole) - len(last_tenth) - 1) // 4
    assert data.source == str(tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["a.md", "notes.rst", "no-ending"])
def test_a_file_of_any_name_can_be_given_as_text(tmp_path, name):
    path = write(tmp_path / name, b"to be or not to be " * 10)
    assert read(f"text:{path}").train.num_samples == 42
    assert read(f"text:file://{path}").train.num_samples == 42


def test_texts_that_match_a_pattern_are_concatenated(tmp_path):
    for name in ("b.md", "a.md", "c.txt"):
        write(tmp_path / name, name[0].encode() * 50)
    data = read(f"text:{tmp_path}/*.md")
    assert bytes_of(data.train) == b"a" * 50 + b"b" * 38


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_tokens_are_read_from_npy_and_the_greatest_makes_the_vocabulary(tmp_path, dtype):
    np.save(tmp_path / "tokens.npy", (np.arange(100) % 60).astype(dtype))
    data = read(str(tmp_path / "tokens.npy"))
    assert data.train.shape == DataShape((4,), 60)
    inputs, following = data.test.fetch(np.array([0, 1]))
    assert inputs.tolist() == [[30, 31, 32, 33], [34, 35, 36, 37]]
    assert following[0].tolist() == [31, 32, 33, 34]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty: a text needs tokens"),
        (b"x" * 49, "is too short: the last tenth of its 49 tokens is the test set, and 4 tokens "
                    "are less than one sample of input.context 4 and its next token; give 50 "
                    "tokens or lower input.context"),
        (b"x" * 70 + b"\xff" * 30, "is not a text in UTF-8: invalid start byte at byte 70"),
        ("ü".encode()[:1] + b"x" * 99, "is not a text in UTF-8: invalid continuation byte"),
    ],
)  # fmt: skip
def test_an_invalid_text_is_reported_in_one_sentence(tmp_path, content, sentence):
    path = write(tmp_path / "a.txt", content)
    with pytest.raises(DataError, match=f"^{path}: {sentence}"):
        read(path)


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (np.arange(0), "is empty"),
        (np.arange(100.0), "must hold integers, the tokens of a text, got float64"),
        (np.array(["a"] * 100), "must hold integers, the tokens of a text, got <U1"),
        (np.zeros((10, 10), int), r"must hold tokens of shape \[num_tokens\], got \[10, 10\]"),
        (np.array([0, 1, -3] * 40), "token 2 is -3; tokens must be 0 or more"),
        (np.array([None] * 100), "must hold integers, the tokens of a text, got object"),
    ],
)
def test_invalid_tokens_are_reported_in_one_sentence(tmp_path, array, sentence):
    np.save(tmp_path / "tokens.npy", array)
    with pytest.raises(DataError, match=sentence):
        read(str(tmp_path / "tokens.npy"))


def test_an_npy_whose_header_promises_40_gb_is_refused_before_memory_is_allocated(tmp_path):
    header = io.BytesIO()
    values = {"descr": "<i8", "fortran_order": False, "shape": (5_000_000_000,)}
    np.lib.format.write_array_header_1_0(header, values)
    path = write(tmp_path / "huge.npy", header.getvalue() + bytes(1000))
    with pytest.raises(DataError, match="must have 40,000,000,000 bytes by its header, got 1,000"):
        read(path)


def test_a_truncated_npy_and_an_archive_named_npy_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(1000))
    cut = write(tmp_path / "cut.npy", (tmp_path / "a.npy").read_bytes()[:500])
    with pytest.raises(DataError, match=r"cut.npy: is not a whole .npy file"):
        read(cut)
    np.savez(tmp_path / "b.npz", tokens=np.arange(1000))
    archive = write(tmp_path / "b.npy", (tmp_path / "b.npz").read_bytes())
    with pytest.raises(DataError, match="must hold integers, the tokens of a text, got an arch"):
        read(archive)


def test_a_header_that_numpy_tokenizes_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "train.npy"
    np.save(path, np.arange(200, dtype=np.uint16))
    data = bytearray(path.read_bytes())
    data[data.index(b"}")] = ord("{")  # NumPy looks for a header of Python 2 then
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"train.npy: is not a whole .npy file: it has no header"):
        load(str(tmp_path))


@pytest.mark.parametrize("name", ["text:{}/none", "{}/none.txt", "text:{}", "text:{}/*.md"])
def test_a_missing_text_is_reported(tmp_path, name):
    with pytest.raises(DataError, match=r"cannot be read|no file matches"):
        read(name.format(tmp_path))


# the task


class Counting(nn.Module):
    """A model that predicts the next number, with a logit of ln 3 among three zeros."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0).log())

    def forward(self, tokens):
        return self.scale * nn.functional.one_hot((tokens + 1) % 4, 4).float()


COUNTED = (torch.tensor([[0, 1], [1, 2], [3, 0]]), torch.tensor([[1, 2], [2, 1], [1, 1]]))


def test_loss_and_metrics_of_a_text_worked_by_hand():
    task, right, wrong = LanguageModel(), torch.tensor(2.0).log(), torch.tensor(6.0).log()
    loss = task.loss(Counting(), COUNTED)  # 4 of 6 right: shares 3/6 and 1/6
    assert loss.item() == pytest.approx((4 * right + 2 * wrong).item() / 6)
    sums = task.metrics(Counting(), COUNTED)
    assert sums["accuracy"].item() == pytest.approx(1 + 0.5 + 0.5)
    assert sums["loss"].item() == pytest.approx((4 * right + 2 * wrong).item() / 2)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_the_perplexity_of_a_set_does_not_depend_on_its_batches(batch_size):
    found = evaluate(
        LanguageModel(),
        Counting(),
        lambda start, stop: tuple(tensor[start:stop] for tensor in COUNTED),
        num_samples=3,
        batch_size=batch_size,
    )
    assert found["accuracy"] == pytest.approx(4 / 6)
    assert found["perplexity"] == pytest.approx((2**4 * 6**2) ** (1 / 6))


def test_a_perplexity_that_overflows_is_infinite():
    assert LanguageModel().derived({"loss": 1e4}) == {"perplexity": float("inf")}


def test_the_data_determine_the_task_of_a_model():
    assert isinstance(task_for("gpt-nano", TEXTS), LanguageModel)
    assert isinstance(task_for("lenet", PICTURES), Classification)
    with pytest.raises(UnknownNameError, match="did you mean gpt-nano"):
        task_for("gpt-nan", TEXTS)


@pytest.mark.parametrize(
    ("model", "shape", "sentence"),
    [
        ("lenet", TEXTS, "model lenet: takes images, but the data are texts of 4 tokens out of "
                         "256; choose gpt-nano, gpt-mini, gpt2"),
        ("mlp", TEXTS, "model mlp: takes images or tables"),
        ("gpt-nano", PICTURES, "model gpt-nano: takes texts, but the data are 1x8x8 images of 10 "
                               "classes; choose lenet, lenet5, mlp"),
        ("lenet", DataShape((), 0, columns={"x": (), "y": ()}),
         "model lenet: needs a column to predict, but the data are rows of x, y: name it by "
         "--target, or give your own task"),
        ("lenet", DataShape((), 2, columns={"x": (), "y": ()}, target="y"),
         "model lenet: takes images, but the data are rows of x, y; choose mlp"),
    ],
)  # fmt: skip
def test_a_model_of_another_kind_of_data_is_refused_in_one_sentence(model, shape, sentence):
    with pytest.raises(ShapeError, match=f"^{sentence}"):
        task_for(model, shape).build_model(shape)


def test_a_custom_function_may_have_the_name_of_a_known_model():
    def lenet(input_shape, vocabulary):
        return nn.Embedding(vocabulary, vocabulary)

    assert LanguageModel(lenet).build_model(TEXTS).weight.shape == (256, 256)


# whole runs, without Ray


def train(folder, data, *options):
    common = ["train", "--workers", "0", "--run-dir", str(folder), "--run.progress", "plain"]
    return cli.main([*common, "--data", data, "--context", "8", "--batch-size", "8", *options])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a short run on a text, and the text."""
    folder = tmp_path_factory.mktemp("texts")
    text = write(folder / "a.txt", b"to be or not to be, that is the question. " * 30)
    assert train(folder / "run", text, "--model", "gpt-nano", "--epochs", "1") == 0
    return folder / "run"


def test_a_run_on_a_text_ends_with_loss_perplexity_and_accuracy(run, tmp_path, capsys):
    text = run.parent / "a.txt"
    assert train(tmp_path / "b", f"text:{text}", "--model", "gpt-nano", "--steps", "2") == 0
    metrics = json.loads((tmp_path / "b/result.json").read_text())["evaluations"][-1]
    assert (
        f"center test accuracy {metrics['accuracy']:.2%}, loss {metrics['loss']:.4g}, "
        f"perplexity {metrics['perplexity']:.4g}  (" in capsys.readouterr().out
    )
    assert metrics["perplexity"] == pytest.approx(np.exp(metrics["loss"]))


def test_evaluating_a_run_on_a_text_gives_its_final_scores(run, capsys):
    before = json.loads((run / "result.json").read_text())
    assert cli.main(["evaluate", str(run)]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["loss"] == pytest.approx(before["center_loss"])
    assert set(scores) == {"loss", "accuracy", "perplexity"}
    with pytest.raises(DataError, match="must have a column tokens, got image, label"):
        score_run(str(run), data="digits")


def test_the_center_of_a_run_loads_into_plain_pytorch(run):
    model = MODELS["gpt-nano"].build((8,), 256)
    model.load_state_dict(load_file(run / "center.safetensors"), strict=True)
    data = read(str(run.parent / "a.txt"), context=8)
    task = LanguageModel()
    loss = task.loss(model, data.test.fetch(np.arange(data.test.num_samples)))
    expected = json.loads((run / "result.json").read_text())["center_loss"]
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_a_run_on_a_text_that_is_resumed_ends_with_the_bits_of_one_that_was_not(run, tmp_path):
    options = [str(run.parent / "a.txt"), "--model", "gpt-nano", "--lr-schedule", "constant"]
    # A run that is extended has exchanged at its former end; with period 1 both runs do.
    options += ["--optimizer.warmup", "0", "--period", "1"]
    assert train(tmp_path / "whole", *options, "--epochs", "2") == 0
    assert train(tmp_path / "parted", *options, "--epochs", "1") == 0
    assert train(tmp_path / "parted", *options, "--epochs", "2", "--resume") == 0
    whole, parted = (
        (tmp_path / name / "center.safetensors").read_bytes() for name in ("whole", "parted")
    )
    assert whole == parted


@pytest.mark.parametrize(("model", "data"), [("lenet", "{}/a.txt"), ("gpt-nano", "digits")])
def test_a_model_that_does_not_fit_the_data_is_refused_before_anything_starts(
    run, tmp_path, capsys, model, data
):
    assert train(tmp_path / "run", data.format(run.parent), "--model", model) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: model {model}: takes ")
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


class OnlyLoss(LanguageModel):
    """A task without accuracy."""

    def metrics(self, model, batch):
        sums = super().metrics(model, batch)
        return {"loss": sums["loss"], "bits": sums["loss"] / np.log(2)}


def test_a_run_without_accuracy_has_a_status_and_a_report(run, tmp_path, capsys):
    config = parse_train([
        "--workers", "0", "--run-dir", str(tmp_path / "run"), "--run.progress", "plain",
        "--steps", "3", "--batch-size", "8", "--context", "8",
    ])  # fmt: skip
    result = Trainer(
        OnlyLoss("gpt-nano"), str(run.parent / "a.txt"),
        training=config.training, run=config.run, scaling=config.scaling, input=config.input,
    ).fit()  # fmt: skip
    assert result.metrics["center_accuracy"] is None
    assert "center -" in capsys.readouterr().out
    assert cli.main(["status", str(tmp_path / "run")]) == 0
    loss = f"{result.metrics['center_loss']:.4f}"
    assert f", center loss {loss}\n" in capsys.readouterr().out
    both = ["report", str(tmp_path / "run"), str(run), "--out", str(tmp_path / "both.html")]
    assert cli.main(both) == 0
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run/report.html").read_text()
    assert "Center loss" in page
    assert "Test loss of the center, over samples" in page


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        ({"loss": 0.5, "accuracy": 0.9}, "accuracy 90.00%"),
        ({"loss": 0.51234, "rmse": 2.0}, "loss 0.5123, rmse 2"),
        ({"loss": 0.5, "accuracy": 0.9, "perplexity": 1.6}, "accuracy 90.00%, loss 0.5, perplex"),
    ],
)
def test_the_last_line_has_the_metrics_of_the_task(monkeypatch, capsys, scores, text):
    figures = {
        "samples": 10, "seconds": 1.0, "lacks_score": False,
        "evaluations": [{"round": 1, "samples": 10, "seconds": 1.0, **scores}],
    }  # fmt: skip
    result = type("Result", (), {"metrics": figures, "path": "runs/a", "stopped_by": ""})
    monkeypatch.setattr(Trainer, "fit", lambda self: result)
    assert cli.main(["train"]) == 0
    assert f"center test {text}" in capsys.readouterr().out


def test_the_last_line_shows_no_score_of_an_earlier_center(monkeypatch, capsys):
    figures = {
        "samples": 10, "seconds": 1.0, "lacks_score": True,
        "evaluations": [{"round": 1, "samples": 5, "seconds": 1.0, "accuracy": 0.9}],
    }  # fmt: skip
    result = type("Result", (), {"metrics": figures, "path": "runs/a", "stopped_by": ""})
    monkeypatch.setattr(Trainer, "fit", lambda self: result)
    assert cli.main(["train"]) == 0
    assert "center test scores: the last center was not evaluated" in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.slow
def test_the_job_learns_from_the_documentation(root, tmp_path, monkeypatch):
    monkeypatch.chdir(root)
    spec = importlib.util.spec_from_file_location("language_model", root / "jobs/language_model.py")
    job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    options = ["--workers", "0", "--run-dir", str(tmp_path / "run"), "--run.progress", "none"]
    tiny = ["--epochs", "1", "--context", "16", "--batch-size", "64"]
    assert cli.main(["train", *job.SETTINGS, *options, *tiny]) == 0
    figures = json.loads((tmp_path / "run/result.json").read_text())
    assert figures["center_loss"] < 0.8 * np.log(256)


def test_methods_are_compared_on_a_task_without_accuracy(tmp_path):
    figures = {
        "center_accuracy": None, "center_loss": 0.5, "communication_share": 0.1, "rounds": 3,
        "staleness": 0.0, "samples": 20, "samples_per_s": 20.0, "seconds": 1.0,
        "time_parts": dict.fromkeys(TIME_PARTS, 0.1),
        "evaluations": [{"round": 1, "samples": 20, "seconds": 1.0, "loss": 0.5}],
    }  # fmt: skip
    base = parse_train(["--steps", "3"])
    comparison = Comparison(methods="sync-easgd", seeds=1, out=str(tmp_path), base=base)

    def fit(config):
        Path(config.run.run_dir).mkdir(parents=True)
        return figures

    assert compare(comparison, fit=fit) == 0
    (line,) = [
        line for line in (tmp_path / "comparison.md").read_text().splitlines()
        if line.startswith("| sync-easgd | 10 |")
    ]  # fmt: skip
    assert "| sync | 1 of 1 | 0 of 1 | never | never | never | - | 10% |" in line
    assert not (tmp_path / "accuracy_over_seconds.png").exists()
    assert (tmp_path / "time_parts.png").exists()


def test_texts_need_no_preparation(run):
    data = read(str(run.parent / "a.txt"))
    config = parse_train([])
    batch = data.train.fetch(np.arange(2))
    assert preparation_for(data, config)(batch, np.arange(2), 0) is batch
