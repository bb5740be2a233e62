"""Settings come from a file with any options; the command line takes precedence."""

import json
import os

import pytest

from raydl import cli
from raydl.cli import submitting
from raydl.cli.options import parse_train
from raydl.config import dotted, to_dict
from raydl.errors import ConfigError, RaydlError
from raydl.launch import submission


@pytest.fixture
def file(tmp_path):
    """Return a function that writes a file and returns the option for it."""

    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return ["--config", str(path)]

    return write


FORMS = [  # plain YAML would read 2:8 of the first as 128
    "optimizer: {lr: 0.25}\nmethod: {name: diloco, period: 20}\nscaling: {num_workers: 2:8}\n",
    "optimizer.lr: 0.25\nmethod.name: diloco\nmethod.period: 20\nscaling.num-workers: [2, 8]\n",
    "lr: 0.25\nmethod: diloco\nperiod: 20\nworkers: 2:8\n",
]


@pytest.mark.parametrize("text", FORMS)
def test_a_setting_may_be_nested_dotted_or_an_option(file, text):
    options = ["--lr", "0.25", "--method", "diloco", "--period", "20", "--workers", "2:8"]
    assert parse_train(file(text)) == parse_train(options)


def test_the_command_line_takes_precedence_before_and_after_the_file(file):
    from_file = file("epochs: 3\nscaling: {fork_server: false}\naugment: [flip, crop]\n")
    for options in (["--epochs", "7", *from_file], [*from_file, "--epochs", "7"]):
        config = parse_train(options)
        assert config.training.epochs == 7
        assert not config.scaling.fork_server
        assert config.input.augmentations == ("flip", "crop")
    assert parse_train([*from_file, "--scaling.fork-server"]).scaling.fork_server
    assert parse_train([f"--config={from_file[1]}"]).training.epochs == 3
    assert parse_train(file("")) == parse_train([])


def test_a_length_on_the_command_line_replaces_the_one_of_the_file(file):
    training = parse_train([*file("epochs: 3\n"), "--samples", "500"]).training
    assert (training.epochs, training.samples) == (parse_train([]).training.epochs, 500)


def test_a_later_file_takes_precedence_also_with_another_length(tmp_path):
    texts = ("epochs: 3\nlr: 0.5\nseed: 1\n", "steps: 500\nlr: 0.25\n", "steps: null\nlr: 0.125\n")
    files = []
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        files += ["--config", str(path)]
    config = parse_train(files[:4])
    assert (config.training.steps, config.optimizer.lr, config.training.seed) == (500, 0.25, 1)
    config = parse_train([*files[:2], *files[4:]])
    assert (config.training.epochs, config.optimizer.lr, config.training.seed) == (3, 0.125, 1)


@pytest.mark.parametrize("option", ["--param-group", "--param_group"])
def test_parameter_groups_on_the_command_line_replace_those_of_the_file(file, option):
    from_file = file("param-group: ['bias:lr_scale=2']\n")
    groups = parse_train([*from_file, option, "norm:lr_scale=3"]).optimizer.param_groups
    assert groups == parse_train(["--param-group", "norm:lr_scale=3"]).optimizer.param_groups


def test_the_config_json_of_a_run_is_such_a_file_without_its_folder(tmp_path, capsys):
    options = ["--data", "synthetic:64", "--model", "mlp", "--workers", "0", "--batch-size", "8"]
    options += ["--epochs", "2", "--optimizer.clip-grad-norm", "None", "--run.progress", "none"]
    run = tmp_path / "run"
    assert cli.main(["train", *options, "--run-dir", str(run)]) == 0
    capsys.readouterr()
    written = json.loads((run / "config.json").read_text())
    checkpoint = written["config"]["checkpoint"]
    checkpoint["keep"] = checkpoint.pop("num_to_keep")  # its name in an earlier version
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = parse_train(["--config", str(tmp_path / "config.json"), "--seed", "5"])
    assert config.run.run_dir is None
    assert not config.run.resume
    before = dotted(json.loads((run / "config.json").read_text())["config"])
    changed = {"run.run_dir", "training.seed"}
    now = dotted(json.loads(json.dumps(to_dict(config))))
    assert {name for name in before if before[name] != now[name]} == changed


def test_the_configuration_of_a_run_may_come_from_a_pipe():
    reader, writer = os.pipe()
    with open(writer, "w") as pipe:  # can be read only once
        json.dump({"config": {"optimizer": {"lr": 0.25}}, "versions": {}}, pipe)
    try:
        assert parse_train(["--config", f"/dev/fd/{reader}"]).optimizer.lr == 0.25
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("optimizer: {learning_rate: 1}", "has optimizer.learning_rate, which is no setting"),
        ("epoch: 3", "has epoch, which is no setting; did you mean epochs?"),
        ("epochs: many", "training.epochs must be a whole number, got many"),
        ("- epochs", "must have settings by name, as in epochs: 5"),
        ("a: [", "is no YAML: while parsing a flow node"),
        ("batch-size: 0", "training.batch_size must be 1 or more, got 0"),
    ],
)
def test_a_mistake_in_the_file_is_reported_in_one_sentence(file, text, sentence):
    with pytest.raises(RaydlError) as error:
        parse_train(file(text))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_the_error_for_a_missing_file_names_it(tmp_path):
    for options, sentence in (
        (["--config", str(tmp_path / "no.yaml")], r"no\.yaml cannot be read: No such file"),
        (["--epochs", "3", "--config"], "--config needs the name of a file"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            parse_train(options)


def test_a_job_gets_the_settings_of_the_file(file, monkeypatch):
    planned = []
    monkeypatch.setattr(submission, "plan_run", lambda options, *_, **__: planned.extend(options))
    monkeypatch.setattr(submitting, "_connect", lambda options: None)
    monkeypatch.setattr(submission, "Submitter", lambda *_: None)
    monkeypatch.setattr(submitting, "_watch", lambda *_, **__: 0)
    assert cli.main(["submit", "--", *file("epochs: 3\nworkers: 2\n"), "--epochs", "7"]) == 0
    assert planned == ["--workers", "2", "--epochs", "7"]
