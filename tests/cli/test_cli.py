"""The command line without Ray: help, errors, and whole runs in this process."""

import dataclasses
import itertools
import json
import pickle
import shlex
import subprocess
import sys
import threading
import time
from importlib import metadata

import numpy as np
import pytest
import torch
from clocks import halt_the_clock
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raydl import cli
from raydl.cli.options import parse_train
from raydl.core.progress import Progress
from raydl.data import Normalizer, load
from raydl.metrics import TAGS, tag_of
from raydl.metrics.tags import OWN_METRIC
from raydl.models import MODELS, LeNet
from raydl.ray_backend import session as ray_session
from raydl.run import control_channel as run_control_channel
from raydl.run.control_channel import ControlChannel, RunStatus, WorkerStatus
from raydl.storage import Storage
from raydl.tasks import Classification, build_model

LOCAL = ["--workers", "0", "--run.progress", "none", "--model", "mlp", "--data", "synthetic:96"]


def train(run_dir, *options):
    return cli.main(["train", *LOCAL, "--run-dir", str(run_dir), *options])


def result_of(run_dir):
    return json.loads((run_dir / "result.json").read_text())


def error_of(capsys, *arguments):
    """Run a command that must fail with one sentence, and return it."""
    assert cli.main(list(arguments)) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    return text.removeprefix("error: ").strip()


def test_help_is_grouped_and_names_the_short_flags(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    flags = (
        "--data --model --method --workers --epochs --steps --batch-size --lr --momentum --beta "
        "--period --seed --name --run-dir --resume --storage-path --cpus-per-worker "
        "--gpus-per-worker --exchange.timeout-s --checkpoint.num-to-keep"
    )
    for flag in flags.split():
        assert flag in text, flag
    for group in ("training", "method", "optimizer", "scaling", "run", "checkpoint"):
        assert f"{group} options" in text


def test_workers_are_a_number_or_a_range():
    assert parse_train(["--workers", "3"]).scaling.num_workers == 3
    assert parse_train(["--workers", "2:8"]).scaling.num_workers == (2, 8)


def test_the_settings_that_workers_receive_are_of_the_classes_that_they_import():
    """A class that the command line made would be sent whole; to load it, workers import tyro."""
    config = parse_train(["--workers", "3", "--lr", "0.2"])
    sent = pickle.dumps(config)
    assert pickle.loads(sent) == config
    assert b"tyro" not in sent
    assert b"raydl.cli" not in sent


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--beta", "1.8"],
            "method.beta must be in (0, 1] for sync-easgd, got 1.8: ",
        ),
        (["--workers", "two"], "scaling.num_workers must be N or MIN:MAX, got two"),
        (["--workers", "2:"], "scaling.num_workers must be N or MIN:MAX, got 2:"),
        (["--model", "lnet"], "model has no 'lnet'; did you mean lenet or lenet5 or alexnet?"),
        (
            ["--method", "sync-egsd"],
            "method.name has no 'sync-egsd'; did you mean sync-easgd or sync-sgd or sync-measgd?",
        ),
        (["--data", "no/such/place"], "no/such/place: there is no such file or folder"),
        (
            ["--data", "synthetic:80x1x2x2", "--model", "lenet"],
            "model lenet: needs images of 4x4 or more, got 2x2",
        ),
        (
            ["--data", "synthetic:40", "--batch-size", "41"],
            "training.batch_size must be at most the 40 samples, got 41",
        ),
        (["--epochs", "five"], "training.epochs must be a whole number, got five"),
        (["--optimizer.nesterov", "3"], "optimizer.nesterov must be True or False, got 3"),
        (["--epoch", "5"], "raydl train has no option --epoch; did you mean --epochs?"),
        (
            ["--learning-rate", "5"],
            "raydl train has no option --learning-rate; did you mean --lr?",
        ),
        (["--optimizer.lr=5"], "raydl train has no option --optimizer.lr; did you mean --lr?"),
        (["--xyzzy"], "raydl train has no option --xyzzy; --help lists them"),
        (["--deterministic", "yes"], "raydl train takes no argument 'yes'; an option begins"),
        (["--resume"], "run.resume needs run.name or run.run_dir, the run to resume"),
        (
            ["--resume", "--run-dir", "no/run"],
            "no/run: no run is there; give the folder that raydl train printed",
        ),
    ],
)
def test_a_wrong_option_is_refused_in_one_sentence_before_anything_starts(
    capsys, options, sentence
):
    assert error_of(capsys, "train", "--workers", "0", *options).startswith(sentence)


@pytest.mark.parametrize(
    ("workers", "data", "is_begun"),
    [("2", "digits", True), ("0", "digits", False), ("2", "no/such/place", False)],
)
def test_ray_starts_ahead_for_workers_unless_the_data_are_mistyped(
    monkeypatch, capsys, workers, data, is_begun
):
    calls = []
    monkeypatch.setattr(ray_session, "begin", lambda has_forks: calls.append(has_forks))
    assert error_of(capsys, "train", "--workers", workers, "--data", data, "--model", "lnet")
    assert bool(calls) is is_begun


def test_none_removes_a_limit():
    assert parse_train(["--optimizer.clip-grad-norm", "None"]).optimizer.clip_grad_norm is None
    assert parse_train(["--optimizer.nesterov", "true"]).optimizer.nesterov is True


def test_help_shows_no_type_that_a_user_cannot_type(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = capsys.readouterr().out
    assert "{None}" not in text
    assert "(default: None)" not in text
    sentence = "on one node if they fit; each group exchanges with the center as one."
    assert sentence in " ".join(text.replace("│", " ").split())


def test_the_version_is_printed(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"raydl {metadata.version('elastic-raydl')}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("methods", "--json"), "raydl methods takes no options, got --json"),
        (("models", "foo"), "raydl models takes no options, got foo"),
        (("plan", "--perod", "3"), "raydl plan has no option --perod; did you mean --period?"),
        (("plan", "--period", "x"), "period must be a whole number, got x"),
        (("evaluate", "no/run"), "no/run: no run is there; give the folder that raydl train"),
    ],
)
def test_unknown_arguments_are_refused(capsys, arguments, sentence):
    assert error_of(capsys, *arguments).startswith(sentence)


def test_unknown_commands_list_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert "there is no command 'trian'; did you mean train?" in capsys.readouterr().out


def test_methods_and_models_are_listed(capsys):
    assert cli.main(["methods"]) == 0
    assert "sync-easgd" in capsys.readouterr().out
    assert cli.main(["models"]) == 0
    out = capsys.readouterr().out
    for name, row in MODELS.items():
        (line,) = [words for words in map(str.split, out.splitlines()) if words[:1] == [name]]
        assert f"{row.num_parameters:,}" in line


STATUS = RunStatus(
    "training",
    Progress(round=1234, generation=3, epoch=2.5, num_samples=157_952, seconds=65.4),
    2, "2:4", 0.9731,
    (
        WorkerStatus("w0", "training", "node-a", 12_340, 1234, 0.0123, 4.2, 65.0),
        WorkerStatus("w1", "training", "node-b", 12_340, 1234, 0.0123, 4.2, 65.0),
        WorkerStatus("w2", "left out", "[c]", 11_000, 1100, 0.1, 0.0, 5.0),
    ),
    ("generation 3: w2 is left out", "[bold] is not markup"),
)  # fmt: skip


def write_final_status(folder, state="finished"):
    ControlChannel(Storage(str(folder))).close(dataclasses.replace(STATUS, state=state))


def test_status_is_a_short_table(tmp_path, capsys):
    write_final_status(tmp_path, "stopped")
    assert cli.main(["status", str(tmp_path)]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "stopped",
        "epoch 2.5, 157,952 samples in 0:01:05, center accuracy 97.31%",
        "generation 3, round 1,234, workers requested: 2:4",
        "",
        "worker  state         for  node    round    step    a step   waited",
        "w0      training  0:01:05  node-a  1,234  12,340   12.3 ms  0:00:04",
        "w1      training  0:01:05  node-b  1,234  12,340   12.3 ms  0:00:04",
        "w2      left out  0:00:05  [c]     1,100  11,000  100.0 ms  0:00:00",
        "",
        "generation 3: w2 is left out",
        "[bold] is not markup",
    ]


HOSTILE = "\x1b]0;title\x07\x1b[2J"


def test_control_characters_in_files_do_not_reach_the_terminal(tmp_path, capsys):
    worker = dataclasses.replace(STATUS.workers[0], node=HOSTILE)
    status = dataclasses.replace(
        STATUS, state=f"failed: {HOSTILE}", workers=(worker,), events=(HOSTILE,)
    )
    ControlChannel(Storage(str(tmp_path))).close(status)
    assert cli.main(["status", str(tmp_path)]) == 0
    folder = tmp_path / "pictures"
    for number in range(4):
        write_picture(folder / f"cat{HOSTILE.replace(chr(7), '')}" / f"{number}.png")
        write_picture(folder / "dog" / f"{number}.png")
    assert cli.main(["data", "info", str(folder)]) == 0
    assert cli.main(["status", str(tmp_path / f"no{HOSTILE}")]) == 2
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err
    assert "\\x1b[2J" in output.out
    assert "\\x1b[2J" in output.err


def write_picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4)).save(path)


def test_status_without_workers_is_three_lines(tmp_path, capsys):
    bare = dataclasses.replace(STATUS, center_accuracy=None, workers=(), events=())
    ControlChannel(Storage(str(tmp_path))).close(
        dataclasses.replace(bare, state="failed: no workers")
    )
    assert cli.main(["status", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 3
    assert out.startswith("failed: no workers\n")
    assert "center accuracy -\n" in out


def test_status_of_a_silent_driver_begins_with_a_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_control_channel, "LOOK_AGAIN_S", 0.01)
    halt_the_clock(monkeypatch)
    values = dataclasses.asdict(STATUS) | {"driver": "process 12 on node-a, 0a1b2c3d"}
    now = run_control_channel.time.time()
    values |= {"told_at": now - 37, "checkpoint_at": now - 62}
    (tmp_path / "status.json").write_text(json.dumps(values))
    assert cli.main(["status", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "the driver, process 12 on node-a, has not reported for 37 s: it may be lost; "
        "the same command with --resume resumes the run\nlast state: training\n"
    )
    assert "\nnewest checkpoint 0:01:02 ago\n" in out


def test_status_as_json_is_complete(tmp_path, capsys):
    write_final_status(tmp_path)
    assert cli.main(["status", str(tmp_path), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    names = {f.name for kind in (RunStatus, Progress) for f in dataclasses.fields(kind)}
    assert set(values) == names - {"progress"}
    assert values["workers"][2]["state"] == "left out"


def test_remove_prints_the_answer_of_the_driver(tmp_path, capsys):
    control_channel = ControlChannel(Storage(str(tmp_path)), clock=itertools.count().__next__)
    is_over = threading.Event()

    def answer_requests():
        while not is_over.wait(0.005):
            control_channel.report(STATUS)
            for request in control_channel.pop_requests():
                is_known = request.worker_id != "w0"
                sentence = "leaves after this round" if is_known else "is needed"
                control_channel.answer(request, f"{request.worker_id} {sentence}", ok=is_known)

    thread = threading.Thread(target=answer_requests)
    thread.start()
    while not (tmp_path / "status.json").exists():
        time.sleep(0.001)
    assert cli.main(["remove", str(tmp_path), "w1"]) == 0
    assert capsys.readouterr().out == "w1 leaves after this round\n"
    assert error_of(capsys, "remove", str(tmp_path), "w0") == "w0 is needed"
    unknown = error_of(capsys, "remove", str(tmp_path), "w5", "--timeout-s", "1")
    assert unknown == f"{tmp_path} has no worker 'w5'; it has w0, w1, w2"
    is_over.set()
    thread.join()
    control_channel.close(STATUS)


@pytest.mark.parametrize("command", [["status"], ["remove", "w0"]])
def test_a_folder_without_a_run_is_reported_in_one_sentence(tmp_path, capsys, command):
    name, *worker = command
    sentence = error_of(capsys, name, str(tmp_path), *worker)
    assert sentence.startswith(f"{tmp_path}: no run is there; give the folder that raydl train")


def test_status_imports_neither_ray_nor_torch(tmp_path):
    write_final_status(tmp_path)
    code = (
        "import sys; from raydl import cli; cli.main(sys.argv[1:]); "
        "sys.exit(bool({'ray', 'torch'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "status", str(tmp_path)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0


def test_a_run_learns_and_writes_all_its_files(tmp_path, capsys):
    run = tmp_path / "run"
    assert train(run, "--epochs", "12") == 0
    out = capsys.readouterr().out
    assert f"tensorboard --logdir_spec run:{run}" in out
    result = result_of(run)
    assert result["center_accuracy"] > 0.9
    assert result["samples"] == 12 * 96
    assert result["generations"] == 1
    assert 0 <= result["communication_share"] < 1
    expected = {
        "center_accuracy", "center_loss", "samples", "seconds", "samples_per_s",
        "communication_share", "time_parts", "generations", "workers",
    }  # fmt: skip
    assert expected <= set(result)
    assert len(result["time_parts"]) == 8
    config = json.loads((run / "config.json").read_text())
    assert config["config"]["training"]["epochs"] == 12
    assert "torch" in config["versions"]
    assert load_file(run / "center.safetensors")["layers.1.weight"].shape == (256, 784)


def test_evaluate_prints_the_accuracy_of_the_result(tmp_path, capsys):
    run = tmp_path / "run"
    train(run, "--epochs", "3")
    capsys.readouterr()
    assert cli.main(["evaluate", str(run)]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["accuracy"] == result_of(run)["center_accuracy"]
    assert scores["loss"] == pytest.approx(result_of(run)["center_loss"])


def test_evaluate_normalizes_other_images_as_those_that_the_run_was_trained_on(tmp_path, capsys):
    digits = load("digits")
    bright = digits.test.images // 2 + 100
    sets = {"x_train": bright, "y_train": digits.test.labels}
    np.savez(tmp_path / "bright.npz", x_test=bright, y_test=digits.test.labels, **sets)
    run = tmp_path / "run"
    train(run, "--epochs", "3", "--data", "digits")
    capsys.readouterr()
    assert cli.main(["evaluate", str(run), "--data", str(tmp_path / "bright.npz")]) == 0
    scores = json.loads(capsys.readouterr().out)
    model = build_model(Classification("mlp"), digits.train.shape, seed=0)
    model.load_state_dict(load_file(run / "center.safetensors"))
    pictures = Normalizer.of(digits.train).normalized(torch.tensor(bright))
    is_right = model(pictures).argmax(1) == torch.tensor(digits.test.labels)
    assert scores["accuracy"] == pytest.approx(float(is_right.float().mean()))


def test_two_runs_with_the_same_seed_write_the_same_weights(tmp_path):
    files = []
    for name in ("a", "b"):
        train(tmp_path / name, "--epochs", "2", "--seed", "3")
        files.append((tmp_path / name / "center.safetensors").read_bytes())
    assert files[0] == files[1]


def test_a_run_is_not_overwritten(tmp_path, capsys):
    train(tmp_path / "run", "--epochs", "1")
    capsys.readouterr()
    options = ["train", *LOCAL, "--run-dir", str(tmp_path / "run")]
    assert "already holds a run; add --resume" in error_of(capsys, *options)


def test_a_resumed_run_may_not_change_its_seed(tmp_path, capsys):
    train(tmp_path / "run", "--epochs", "1")
    capsys.readouterr()
    options = ["train", *LOCAL, "--run-dir", str(tmp_path / "run"), "--resume", "--seed", "4"]
    assert "training.seed is 4 but the run began with 0" in error_of(capsys, *options)


def test_resuming_a_complete_run_is_an_error(tmp_path, capsys):
    train(tmp_path / "run", "--epochs", "1")
    capsys.readouterr()
    options = ["train", *LOCAL, "--run-dir", str(tmp_path / "run"), "--resume", "--epochs", "1"]
    assert "the run is complete at epoch 1" in error_of(capsys, *options)


def test_a_run_that_is_extended_continues_its_curves_without_gaps_or_duplicates(tmp_path):
    run = tmp_path / "run"
    train(run, "--epochs", "2")
    first = result_of(run)
    train(run, "--epochs", "4", "--resume")
    whole = result_of(run)
    assert whole["samples"] == 4 * 96
    assert whole["evaluations"][: len(first["evaluations"])] == first["evaluations"]
    assert [e["samples"] for e in whole["evaluations"]][-1] == 4 * 96
    assert (first["generations"], whole["generations"]) == (1, 2)
    assert whole["samples_per_s"] == whole["samples"] / whole["seconds"]
    assert (first["last_start"]["samples"], whole["last_start"]["samples"]) == (2 * 96, 2 * 96)
    assert whole["last_start"]["seconds"] == pytest.approx(whole["seconds"] - first["seconds"], 0.5)
    assert whole["time_parts"]["forward_backward"] > first["time_parts"]["forward_backward"]
    events = EventAccumulator(str(run)).Reload()
    tags = set(events.Tags()["scalars"])
    # No all-reduce is chosen since torch's own is used, and this task has no metric of its own;
    # every sample could be read, no exchange was too late, and no message was compressed.
    expected = {tag for tag in TAGS if "allreduce" not in tag}
    expected -= {OWN_METRIC, "data/left_out", "exchange/refused", "exchange/lost_residuals"}
    assert {tag_of(tag).name for tag in tags} == expected
    for tag in tags:
        steps = [e.step for e in events.Scalars(tag)]
        assert steps == sorted(set(steps)), tag
    assert [e.step for e in events.Scalars("center/accuracy")][-1] == 4 * 96
    assert any(tag.startswith("settings") for tag in events.Tags()["tensors"])


def test_a_storage_path_keeps_the_whole_run(tmp_path):
    run = tmp_path / "local" / "name"
    store = tmp_path / "store"
    train(run, "--epochs", "2", "--storage-path", store.as_uri())
    kept = {p.name for p in (store / "name").iterdir()}
    assert {"config.json", "result.json", "center.safetensors", "checkpoints"} <= kept
    assert any(name.startswith("events.out") for name in kept)
    assert not (run / "checkpoints").exists()


def test_lenet_has_the_published_number_of_parameters():
    assert sum(p.numel() for p in LeNet((1, 28, 28), 10).parameters()) == 431_080
    for shape in [(1, 8, 8), (3, 32, 32), (1, 4, 4), (3, 17, 31)]:
        model = LeNet(shape, 7)
        images = np.zeros((2, *shape), np.float32)
        import torch

        assert model(torch.from_numpy(images)).shape == (2, 7)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["raydl", "we"], ["weak-scaling"]),
        (["raydl", "train", "--method", "async-d"], ["async-diloco"]),
        (["raydl", "train", "--model", "resnet2"], ["resnet20"]),
        (["raydl", "train", "--spa"], ["--spares"]),
        (["raydl", "status", "--spa"], []),
    ],
)
def test_a_shell_completes_commands_options_and_names(words, completed, capsys):
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    quoted = " ".join(map(shlex.quote, words))
    script += f"\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _raydl"
    script += '\nprintf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == completed
    assert done.stderr == ""
