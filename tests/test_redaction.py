"""Credentials in URIs are shown nowhere, and URIs without credentials stay unchanged."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import pytest
from checkpoints import make_checkpoint as make
from comparisons import figures_of as figures
from hypothesis import given
from hypothesis import strategies as st
from repository import ROOT

import raydl.data
from raydl import Trainer, cli, errors, storage
from raydl.checkpoint.store import CheckpointStore
from raydl.cli import submitting
from raydl.cli.commands import COMMANDS
from raydl.config import RunConfig, ScalingConfig, TrainConfig, TrainingConfig
from raydl.errors import ConfigError, DataError
from raydl.launch.submission import check_credentials
from raydl.run.evaluate import score_run
from raydl.run.folder import RunFolder
from raydl.run.lock import held, wait_until_free
from raydl.run.result import Result, RunCheckpoint
from raydl.storage import Storage
from raydl.text.redaction import has_credentials, redact, redact_values
from raydl.tools.comparison import Comparison, compare
from raydl.tools.comparison.settings import plan
from raydl.tools.runs import load_complete

# the function


@pytest.mark.parametrize(
    ("uri", "left"),
    [
        ("s3://KEY:SECRET@bucket/x", "s3://bucket/x"),
        ("s3://KEY:SEC%2FRET%2B@bucket/x?region=eu-west-1", "s3://bucket/x?region=eu-west-1"),
        ("s3://KEY:SE'C@RET@bucket/x", "s3://bucket/x"),
        ("s3://KEY:SEC/RET+x@bucket/x", "s3://bucket/x"),
        (
            "s3://bucket/x?access_key=SECRET&region=eu&secret_key=SECRET&session_token=SECRET",
            "s3://bucket/x?region=eu",
        ),
        ("s3://bucket/x?access_key=SECRET", "s3://bucket/x"),
        (
            "s3://b/x?endpoint_override=http%3A%2F%2FKEY%3ASECRET%40h%3A9000&scheme=http",
            "s3://b/x?endpoint_override=http%3A%2F%2Fh%3A9000&scheme=http",
        ),
        ("s3://b/x?endpoint_override=KEY:SECRET@h:9000", "s3://b/x?endpoint_override=h:9000"),
        ("https://user:SECRET@host:8443/a?b=c", "https://host:8443/a?b=c"),
        ("https://SECRET@host/a", "https://host/a"),
        (
            "https://a.blob.core.windows.net/c/b?sv=2024-11-04&sp=r&se=2026-12-31&sig=SECRET%3D",
            "https://a.blob.core.windows.net/c/b?sv=2024-11-04&sp=r&se=2026-12-31",
        ),
        (
            "abfss://container@account.dfs.core.windows.net/x?sig=SECRET&sv=1",
            "abfss://container@account.dfs.core.windows.net/x?sv=1",
        ),
        (
            "abfss://container:SECRET@account.dfs.core.windows.net/x",
            "abfss://container@account.dfs.core.windows.net/x",
        ),
        ("abfs://:SECRET@account.blob.core.windows.net/c/x", "abfs://account.blob.core.windows.net/c/x"),
        ("hdfs://user:SECRET@name.node:8020/x", "hdfs://user@name.node:8020/x"),
        (
            "https://b.s3.amazonaws.com/x?X-Amz-Credential=SECRET&X-Amz-Date=1&X-Amz-Signature=SECRET"
            "&X-Amz-Security-Token=SECRET",
            "https://b.s3.amazonaws.com/x?X-Amz-Date=1",
        ),
        (
            "https://b.s3.amazonaws.com/x?AWSAccessKeyId=SECRET&Expires=1&Signature=SECRET",
            "https://b.s3.amazonaws.com/x?Expires=1",
        ),
        (
            "https://storage.googleapis.com/b/x?GoogleAccessId=SECRET&Expires=1&Signature=SECRET",
            "https://storage.googleapis.com/b/x?Expires=1",
        ),
        ("https://h/x?key=SECRET&password=SECRET&token=SECRET&a=1#access_token=SECRET", "https://h/x?a=1"),
        ("https://h/x?a=1&password=wh?SECRET#SECRET\"SECRET&b=2", "https://h/x?a=1&b=2"),
        ("s3://KEY:S?SECRET#SECRET@bucket/x", "s3://bucket/x"),
        ("https://h/x?a=1;sig=SECRET&b=2", "https://h/x?a=1&b=2"),
        ("https://h/x?client_secret=SECRET&client_id=1&API-Key=SECRET", "https://h/x?client_id=1"),
    ],
)  # fmt: skip
def test_credentials_are_removed_and_the_place_stays(uri, left):
    assert "SECRET" not in redact(uri)
    assert redact(uri) == left
    assert has_credentials(uri)


PLAIN = [
    "digits", "/a/folder with spaces/x?token=1", "runs/a@b:c", "text:corpus.txt",
    "s3://bucket/a/b*.parquet", "s3://bucket/key=5/token=7/x.parquet",
    "s3://bucket/x?endpoint_override=127.0.0.1%3A9000&scheme=http&region=us-east-1",
    "s3://bucket/x?mail=me@here", "gs://anonymous@bucket/x", "gs://bucket/x",
    "abfss://container@account.dfs.core.windows.net/x", "hdfs://user@name.node:8020/x",
    "http://127.0.0.1:8265", "http://[::1]:8265/a@b", "http://HEAD:8265", "file:///tmp/a@b",
    "https://h/x?num_tokens=4&keys=3", "did you mean s3://bucket/x?",
    "betas=(0.9,0.95),eps=1e-8", "RAY_AUTH_MODE=token", "my.nets:small",
]  # fmt: skip


@pytest.mark.parametrize("text", PLAIN)
def test_a_text_without_credentials_is_unchanged(text):
    assert redact(text) == text
    assert not has_credentials(text)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            "s3://K:SECRET@b/x: cannot be read (see 'https://h/y?sig=SECRET'), or ask me@here.",
            "s3://b/x: cannot be read (see 'https://h/y'), or ask me@here.",
        ),
        ("the run is in s3://b/x?token=SECRET: go on there", "the run is in s3://b/x: go on there"),
        ("<s3://b/x?token=SECRET> `s3://b/y?sig=SECRET`", "<s3://b/x> `s3://b/y`"),
        ("| data | s3://b/x?token=SECRET | 1 |", "| data | s3://b/x | 1 |"),
        ('{"a": "s3://b/x?token=SECRET", "b": 1}', '{"a": "s3://b/x", "b": 1}'),
        ("train.py --data 's3://K:SECRET@b/x' --lr 1", "train.py --data 's3://b/x' --lr 1"),
    ],
)
def test_credentials_inside_sentences_are_removed(text, left):
    assert redact(text) == left


def test_credentials_inside_tracebacks_are_removed():
    try:
        raise ValueError("Cannot parse URI: 's3://KEY:SECRET@bucket' at character '@'")
    except ValueError:
        shown = redact(traceback.format_exc())
    assert "ValueError: Cannot parse URI: 's3://bucket' at character '@'" in shown
    assert 'raise ValueError("' in shown


WORDS = st.text(st.characters(categories=("L", "N"), include_characters="-_.~%+/="), min_size=1)
SECRETS = WORDS.map(lambda word: f"hush{word.replace('/', '')}hush")
NAMES = st.sampled_from([
    "sig", "token", "password", "secret_key", "access_key", "session_token", "X-Amz-Signature",
    "AWSAccessKeyId", "GoogleAccessId", "key", "AccountKey", "SAS", "client_secret", "api_key",
])  # fmt: skip


@st.composite
def uris(draw):
    """Return (a URI with credentials, its bucket)."""
    bucket = f"bucket{draw(st.integers(0, 99))}"
    login = draw(st.booleans())
    names = draw(st.lists(NAMES, min_size=0 if login else 1, max_size=3))
    plain = draw(st.lists(st.sampled_from(["region=eu", "scheme=http", "sv=1"]), max_size=2))
    pairs = [*(f"{name}={draw(SECRETS)}" for name in names), *plain]
    query = "&".join(draw(st.permutations(pairs)))
    who = f"{draw(SECRETS)}:{draw(SECRETS)}@" if login else ""
    scheme = draw(st.sampled_from(["s3", "https", "gs", "ftp", "S3"]))
    return f"{scheme}://{who}{bucket}/runs/first" + (f"?{query}" if query else ""), bucket


@given(uris(), st.sampled_from(["{}", "at {}: no", "('{}',)", 'x "{}" y', "{} {}", "<{}>\n{}\n"]))
def test_no_secret_is_left_at_any_position(made, pattern):
    uri, bucket = made
    shown = redact(pattern.format(uri, uri))
    assert "hush" not in shown
    assert f"://{bucket}/runs/first" in shown
    assert redact(shown) == shown


@given(st.text(st.sampled_from("ak:/?#&;=@%'\"[]. \n3sigtoken"), max_size=60))
def test_redacting_a_text_twice_changes_nothing_more(text):
    once = redact(f"s3://{text}")
    assert redact(once) == once


@given(st.text(max_size=80).filter(lambda text: "://" not in text))
def test_a_text_without_a_uri_is_unchanged(text):
    assert redact(text) == text


@pytest.mark.parametrize(
    "text",
    [
        f"{'a' * 10**6}://{'b' * 10**6}",
        "://" * 10**5,
        "://a:" * 10**5,
        f"s3://b?a={'%25' * 10**4}",
    ],
    ids=["one", "many", "bad ports", "escapes"],
)
def test_a_long_text_takes_seconds_at_most(text):
    began = time.monotonic()
    redact(text)
    assert time.monotonic() - began < 5  # a quadratic pattern takes minutes


def test_nested_values_keep_their_shape():
    values = {"a": ["s3://K:S@b", 1, None], "b": {"c": ("s3://b?sig=1", 0.5)}, "s3://K:S@b": True}
    assert redact_values(values) == {
        "a": ["s3://b", 1, None], "b": {"c": ("s3://b", 0.5)}, "s3://K:S@b": True,
    }  # fmt: skip


# errors


@pytest.mark.parametrize(
    "error",
    [
        errors.RaydlError("at s3://K:SECRET@b"),
        errors.ConfigError("run.storage_path", "s3://K:SECRET@b cannot be opened"),
        errors.UnknownNameError("model", "s3://K:SECRET@b", ("lenet",)),
        errors.DataError("s3://K:SECRET@b/x", "s3://b?sig=SECRET is missing"),
        errors.CheckpointError("s3://K:SECRET@b/x", "it is damaged"),
        errors.UntrustedCodeError("s3://K:SECRET@b/x/config.json", (("model", "a:b"),)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_error_has_credentials_in_its_text_fields_or_pickle(error):
    assert "SECRET" not in f"{error} {error!r} {vars(error)} {error.args}"
    data = pickle.dumps(error)
    assert b"SECRET" not in data
    assert str(pickle.loads(data)) == str(error)


@pytest.mark.parametrize("opened_by", [Storage, raydl.data.load, storage.open_filesystem])
def test_the_uri_in_pyarrows_errors_is_in_no_traceback(opened_by):
    with pytest.raises((errors.RaydlError, ValueError)) as caught:
        opened_by(URI)
    shown = "".join(traceback.format_exception(caught.value))
    assert "Cannot parse URI" in shown
    assert "SECRET" not in shown


URI = "s3://KEY:SEC/SECRET@bucket/x"  # the secret's slash should be %2F


def test_a_traceback_of_user_code_is_shown_without_credentials(monkeypatch, capsys):
    def fail(arguments):
        raise ZeroDivisionError(f"while reading {arguments[0]}")

    monkeypatch.setitem(COMMANDS, "check", fail)
    assert cli.main(["check", "s3://KEY:SECRET@bucket/x?sig=SECRET"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith("ZeroDivisionError: while reading s3://bucket/x\n")


# a run, its commands and its files

SECRET = "Hush7Hush"
QUERY = f"?token={SECRET}&password={SECRET}&sig={SECRET}%3D&X-Amz-Signature={SECRET}&key={SECRET}"
TRAIN = [
    "train", "--model", "mlp", "--workers", "0", "--batch-size", "32", "--checkpoint.keep-best",
    "--checkpoint.every-epochs", "1", "--run.progress", "plain",
]  # fmt: skip


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A URI of the digits with secrets, which PyArrow ignores."""
    folder = tmp_path_factory.mktemp("data") / "digits"
    shutil.copytree(Path(raydl.data.__file__).parent / "digits", folder)
    return f"file://{folder}{QUERY}"


def train_arguments(tmp_path, digits, *more, secret_query=QUERY):
    place = f"file://{tmp_path}/kept{secret_query}"
    where = ["--run-dir", str(tmp_path / "local/first"), "--storage-path", place]
    return [*TRAIN, "--data", digits, *where, *more]


def uri_of(tmp_path):
    return f"file://{tmp_path}/kept/first{QUERY}"


def files_in(tmp_path):
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    return {str(path): path.read_bytes() for path in files}


def assert_no_secret_in(tmp_path, capsys):
    for name, content in files_in(tmp_path).items():
        assert SECRET.encode() not in content, name
        assert SECRET not in name
    out, err = capsys.readouterr()
    assert SECRET not in out + err
    return out


def test_no_byte_of_a_run_and_no_line_of_its_commands_has_a_secret(tmp_path, digits, capfd):
    assert cli.main(train_arguments(tmp_path, digits, "--epochs", "2")) == 0
    for command in ("status", "check", "report", "evaluate"):
        assert cli.main([command, uri_of(tmp_path)]) == 0, command
    assert cli.main(["status", uri_of(tmp_path), "--json"]) == 0
    assert cli.main(["evaluate", uri_of(tmp_path), "--best", "--data", digits]) == 0
    assert cli.main(["data", "info", digits]) == 0
    assert cli.main(["data", "info", digits, "--json"]) == 0
    out_uri = f"file://{tmp_path}/parquet{QUERY}"
    assert cli.main(["data", "convert", digits, out_uri]) == 0
    out = assert_no_secret_in(tmp_path, capfd)
    assert f"run:          file://{tmp_path}/kept/first\n" in out  # the place is shown
    config = json.loads((tmp_path / "kept/first/config.json").read_bytes())
    assert config["config"]["data"] == digits.removesuffix(QUERY)
    assert config["redacted"] == ["data", "run.storage_path"]
    assert (tmp_path / "kept/first/report.html").stat().st_size > 10_000


def test_a_run_that_is_resumed_twice_shows_no_credentials_and_may_get_others(
    tmp_path, digits, capfd
):
    assert cli.main(train_arguments(tmp_path, digits, "--epochs", "1")) == 0
    assert cli.main(train_arguments(tmp_path, digits, "--epochs", "2", "--resume")) == 0
    other = [f"{digits.removesuffix(QUERY)}?token={SECRET}-new"]
    more = ("--epochs", "3", "--resume")
    assert (
        cli.main(train_arguments(tmp_path, *other, *more, secret_query=f"?sig={SECRET}-new")) == 0
    )
    plain, more = digits.removesuffix(QUERY), ("--epochs", "4", "--resume")
    assert cli.main(train_arguments(tmp_path, plain, *more, secret_query="")) == 0
    assert "resuming from round" in assert_no_secret_in(tmp_path, capfd)
    (folder,) = (tmp_path / "kept").iterdir()
    assert json.loads((folder / "config.json").read_bytes())["redacted"] == []


def test_a_run_with_credentials_does_not_resume_with_other_data(tmp_path, digits, capfd):
    assert cli.main(train_arguments(tmp_path, digits, "--epochs", "1")) == 0
    elsewhere = digits.replace("digits?", "other?")
    shutil.copytree(digits[7:].partition("?")[0], elsewhere[7:].partition("?")[0])
    assert cli.main(train_arguments(tmp_path, elsewhere, "--epochs", "2", "--resume")) == 2
    assert "but the run began with file://" in capfd.readouterr().err


def test_a_run_of_an_earlier_raydl_whose_config_has_the_secret_is_resumed(tmp_path, digits, capfd):
    assert cli.main(train_arguments(tmp_path, digits, "--epochs", "1")) == 0
    path = tmp_path / "kept/first/config.json"
    values = json.loads(path.read_bytes())
    del values["redacted"]
    values["config"]["data"] = digits
    path.write_text(json.dumps(values))
    assert cli.main(["report", uri_of(tmp_path)]) == 0
    assert cli.main(["evaluate", uri_of(tmp_path)]) == 0
    assert cli.main(train_arguments(tmp_path, digits, "--epochs", "2", "--resume")) == 0
    assert_no_secret_in(tmp_path, capfd)


MISTAKES = {
    "no data": lambda uri: [*TRAIN, "--data", uri],
    "an extra argument": lambda uri: [*TRAIN, uri],
    "no number": lambda uri: [*TRAIN, "--epochs", uri],
    "no model": lambda uri: [*TRAIN, "--model", uri],
    "no folder": lambda uri: [*TRAIN, "--run-dir", uri],
    "no run": lambda uri: ["status", uri],
    "no run to score": lambda uri: ["evaluate", uri],
    "two runs to score": lambda uri: ["evaluate", "a", uri],
    "no run to report": lambda uri: ["report", uri],
    "no worker": lambda uri: ["remove", uri, "w0"],
    "no data to see": lambda uri: ["data", "info", uri],
    "no data to convert": lambda uri: ["data", "convert", uri, uri],
    "no option": lambda uri: ["submit", uri],
    "no submission": lambda uri: ["submit", "--", "--data", uri],
    "no cluster": lambda uri: ["submit", "--address", uri.replace("s3", "http"), "--follow", "x"],
    "no method": lambda uri: ["plan", "--method", uri],
    "models of what": lambda uri: ["models", uri],
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("bad", [f"s3://KEY:{SECRET}/{SECRET}@127.0.0.1:1/x?sig={SECRET}", ""])
def test_no_error_shows_a_secret(mistake, bad, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    uri = bad or f"file://{tmp_path}/nowhere{QUERY}"
    try:
        status = cli.main(MISTAKES[mistake](uri))
    except SystemExit as ended:
        status = ended.code
    out, err = capfd.readouterr()
    assert status == 2
    assert SECRET not in out + err
    assert err


def test_errors_of_a_runs_folder_show_no_credentials(tmp_path, digits, capfd):
    assert cli.main(train_arguments(tmp_path, digits, "--epochs", "1")) == 0
    folder = tmp_path / "kept/first"
    with held(Storage(uri_of(tmp_path)), "run.storage_path"):
        assert cli.main(train_arguments(tmp_path, digits, "--resume")) == 2
    for path in folder.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    assert cli.main(["check", uri_of(tmp_path)]) == 1
    assert cli.main(train_arguments(tmp_path, digits, "--epochs", "2", "--resume")) == 2
    for path in folder.rglob("manifest.json"):
        path.unlink()
    assert cli.main(["check", uri_of(tmp_path)]) == 1
    assert cli.main(train_arguments(tmp_path, digits, "--epochs", "2", "--resume")) == 2
    assert_no_secret_in(tmp_path, capfd)


def test_a_driver_that_waits_for_a_lock_logs_no_credentials(tmp_path):
    root, messages, now = f"file://{tmp_path}/run{QUERY}", [], iter(range(99))
    (tmp_path / "run").mkdir()
    with held(Storage(root), "run.storage_path"):
        wait_until_free(
            Storage(root),
            wait_s=2,
            log=messages.append,
            clock=lambda: next(now),
            sleep=lambda seconds: None,
        )
    (sentence,) = messages
    assert sentence.startswith(f"file://{tmp_path}/run is still in use")


def test_the_warning_of_old_checkpoints_shows_no_credentials(tmp_path, monkeypatch):
    class Undeletable(Storage):
        def delete_dir(self, name):
            raise OSError(f"{self.root}: busy")

    store = CheckpointStore(Undeletable(f"file://{tmp_path}/run{QUERY}"), keep=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for round in (1, 2):
            store.write(make(round))
    assert any("old ones stay" in str(warning.message) for warning in caught)
    assert not any(SECRET in str(warning.message) for warning in caught)


# results in Python


def test_the_path_of_a_result_has_credentials_and_its_text_has_none():
    path = f"file:///kept/first{QUERY}"
    result = Result({"samples": 1}, path, RunCheckpoint(path, "round-3"), "")
    assert SECRET in result.path
    assert repr(result) == (
        "Result(metrics={'samples': 1}, path='file:///kept/first', checkpoint="
        "RunCheckpoint('file:///kept/first/checkpoints/round-3'), "
        "stopped_by='')"
    )


def test_score_run_accepts_the_path_of_a_result(tmp_path, digits):
    run = RunConfig(
        run_dir=str(tmp_path / "first"), storage_path=f"file://{tmp_path}/kept{QUERY}",
        progress="none",
    )  # fmt: skip
    training = TrainingConfig(epochs=1, batch_size=32)
    scaling = ScalingConfig(num_workers=0)
    result = Trainer("mlp", digits, run=run, training=training, scaling=scaling).fit()
    assert score_run(result.path)["accuracy"] == result.metrics["center_accuracy"]


# data whose credentials config.json does not have


@pytest.fixture
def guarded(tmp_path, digits, monkeypatch):
    """A run on data that require the token, and the URI of the data."""
    assert cli.main(train_arguments(tmp_path, digits, "--epochs", "1")) == 0
    folder = digits.removeprefix("file://").partition("?")[0]
    open_plain = raydl.data.files.open_filesystem

    def open_guarded(uri):
        if folder in uri and SECRET not in uri:
            raise OSError("When listing objects: AWS Error ACCESS_DENIED during ListObjects")
        return open_plain(uri)

    monkeypatch.setattr(raydl.data.files, "open_filesystem", open_guarded)
    return uri_of(tmp_path)


def test_the_error_of_a_score_says_that_config_json_has_no_credentials(guarded, digits, capfd):
    assert cli.main(["evaluate", guarded]) == 2
    sentence = capfd.readouterr().err
    assert "the store refuses these credentials" in sentence
    assert "config.json does not hold the credentials of this URI: set them" in sentence
    assert "or give the whole URI as --data" in sentence
    assert cli.main(["evaluate", guarded, "--data", digits]) == 0


def test_the_error_of_data_without_credentials_does_not_mention_them(tmp_path, digits, capfd):
    assert cli.main(train_arguments(tmp_path, digits.removesuffix(QUERY), "--epochs", "1")) == 0
    assert cli.main(["evaluate", uri_of(tmp_path), "--data", "nowhere/x"]) == 2
    path = tmp_path / "kept/first/config.json"
    path.write_text(path.read_text().replace("/digits", "/gone"))
    assert cli.main(["evaluate", uri_of(tmp_path)]) == 2
    assert "credentials" not in capfd.readouterr().err


# a comparison


def test_a_comparison_writes_and_prints_no_credentials(tmp_path, digits, capfd):
    base = TrainConfig(
        data=digits, model="mlp", training=TrainingConfig(samples=640, batch_size=32),
    )  # fmt: skip
    comparison = Comparison(methods="sync-sgd", seeds=2, out=str(tmp_path / "out"), base=base)

    def fit(config):
        if config.training.seed:
            raise OSError(f"no answer from {config.data}")
        folder = RunFolder(config)
        with folder.held(resume=False):
            folder.write_config(config)
            folder.write_result(figures())
        return figures()

    command = f"raydl compare --data {digits}"
    assert compare(comparison, fit=fit, command=command) == 1
    out = "".join(capfd.readouterr())
    assert SECRET not in out
    assert digits.removesuffix(QUERY) in out
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {"comparison.json", "comparison.md", "error.txt"} <= {path.name for path in files}
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
    taken = [load_complete(run) for run in plan(comparison, tmp_path / "out")]
    assert [run.figures is not None for run in taken] == [True, False]


# a job


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (["--data", f"s3://KEY:{SECRET}@bucket/x"], "data"),
        (["--data", f"s3://bucket/x?session_token={SECRET}"], "data"),
        (["--storage-path", f"s3://KEY:{SECRET}@b", "--run-dir", "a"], "run.storage_path"),
        (["--data", f"s3://KEY:{SECRET}@bucket/x", "--data", "digits"], "submit"),
    ],
)
def test_credentials_are_refused_in_the_command_of_a_job(arguments, setting, capsys, monkeypatch):
    monkeypatch.setattr(
        submitting, "_connect", lambda options: pytest.fail("a cluster was contacted")
    )
    assert cli.main(["submit", "--", *arguments]) == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith(f"error: {setting} has credentials in its URI, and a job's command")
    assert "AWS_SECRET_ACCESS_KEY" in sentence
    assert SECRET not in sentence


def test_a_container_a_user_and_an_endpoint_are_accepted_in_the_command_of_a_job():
    for uri in PLAIN:
        check_credentials(["--data", uri], TrainConfig(data=uri))


def test_the_error_for_a_wrong_place_shows_no_credentials():
    with pytest.raises(ConfigError) as error:
        RunConfig(run_dir=f"s3://KEY:{SECRET}@bucket/x")
    assert "s3://bucket/x" in str(error.value)
    assert SECRET not in str(error.value)
    with pytest.raises(DataError, match="nowhere: "):
        raydl.data.load(f"file:///nowhere{QUERY}")


# logs and tables of a Ray cluster

DRIVER = """
import sys
from ray._private.state import state
from raydl import cli
status = cli.main(sys.argv[1:])
print("job table", state.job_table())
print("actor table", state.actor_table(None))
sys.exit(status)
"""


@pytest.mark.cluster
def test_no_log_of_ray_and_no_entry_of_its_tables_has_a_secret(tmp_path, digits):
    ray_folder = Path(tempfile.mkdtemp(dir="/tmp"))  # a socket's path must be short
    arguments = [*train_arguments(tmp_path, digits, "--epochs", "1"), "--workers", "1"]
    try:
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(ray_folder)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert f"--data {digits.removesuffix(QUERY)}" in done.stdout.partition("job table")[2]
        assert SECRET not in done.stdout + done.stderr
        logs = [p for p in ray_folder.rglob("*") if p.is_file() and not p.is_symlink()]
        assert any("python-core-driver" in path.name for path in logs)
        for path in logs:
            assert SECRET.encode() not in path.read_bytes(), path
        for path, content in files_in(tmp_path).items():
            assert SECRET.encode() not in content, path
    finally:
        shutil.rmtree(ray_folder, ignore_errors=True)
