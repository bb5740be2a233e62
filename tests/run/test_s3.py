"""Data, checkpoints and events on S3, through a local server with S3's protocol."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest
from checkpoints import make_checkpoint as make
from s3_server import s3_client, s3_server, use_test_credentials
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import raydl.data
from raydl import cli
from raydl.checkpoint import writer as checkpoint_writer
from raydl.checkpoint.store import CheckpointStore
from raydl.core.progress import Progress
from raydl.data import load
from raydl.errors import CheckpointError, RaydlError
from raydl.ray_backend import session as ray_session
from raydl.run import lock as hold
from raydl.run.control_channel import ControlChannel, request_removal
from raydl.run.status import RunStatus, WorkerStatus
from raydl.storage import Storage

pytestmark = pytest.mark.processes

BOUND_S = 40
TRAIN = [
    "train", "--model", "mlp", "--workers", "0", "--batch-size", "32",
    "--checkpoint.every-epochs", "1", "--run.progress", "plain",
]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    """A server on this machine with the bundled digits in s3://data and an empty s3://kept."""
    with s3_server() as url:
        with s3_client(url) as client:
            for bucket in ("data", "kept"):
                client.create_bucket(Bucket=bucket)
            for path in (Path(raydl.data.__file__).parent / "digits").glob("*.parquet"):
                client.put_object(Bucket="data", Key=f"digits/{path.name}", Body=path.read_bytes())
        yield url


@pytest.fixture(autouse=True)
def environment(server, monkeypatch, tmp_path):
    """The user's environment variables: the server's address and the credentials."""
    use_test_credentials(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)


def train(path, *more, place="s3://kept/runs", data="s3://data/digits"):
    where = ["--run-dir", str(path), *(["--storage-path", place] if place else [])]
    return cli.main([*TRAIN, "--data", data, *where, *more])


@pytest.fixture(scope="module")
def finished(server, tmp_path_factory):
    """A run of two epochs that is kept on S3: (its URI, its local folder)."""
    path = tmp_path_factory.mktemp("local") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        environment.__wrapped__(server, patch, path.parent)
        assert train(path, "--epochs", "2", "--checkpoint.keep-best") == 0
    return "s3://kept/runs/finished", path


def test_all_files_of_a_run_are_on_s3_and_no_temporary_ones(finished):
    uri, path = finished
    storage = Storage(uri)
    names = {name for name in storage.list_dir("") if storage.list_dir(name) or "." in name}
    events = {name for name in names if name.startswith("events.out.tfevents")}
    assert names - events == {
        "best.safetensors", "center.safetensors", "checkpoints", "config.json", "driver-epochs",
        "history-00000001.jsonl", "result.json", "status.json",
    }  # fmt: skip
    assert len(CheckpointStore(storage).names()) == 2
    assert json.loads(storage.read_bytes("result.json"))["samples"] == 2 * 1438
    local = {p.name for p in path.iterdir()}
    assert local == {*events, "history-00000001.jsonl"}


def test_the_events_on_s3_are_whole(finished, tmp_path):
    uri, path = finished
    storage = Storage(uri)
    (name,) = [n for n in storage.list_dir("") if n.startswith("events.out.tfevents")]
    assert storage.read_bytes(name) == (path / name).read_bytes()
    (tmp_path / name).write_bytes(storage.read_bytes(name))
    steps = [event.step for event in EventFileLoader(str(tmp_path / name)).Load()]
    assert max(steps) == 2 * 1438


def test_status_and_evaluate_take_the_uri(finished, capsys):
    uri, _ = finished
    assert cli.main(["status", uri]) == 0
    assert capsys.readouterr().out.startswith("finished\n")
    assert cli.main(["evaluate", uri]) == 0
    accuracy = json.loads(Storage(uri).read_bytes("result.json"))["center_accuracy"]
    assert accuracy in json.loads(capsys.readouterr().out).values()
    assert cli.main(["evaluate", uri, "--best"]) == 0
    best = json.loads(Storage(uri).read_bytes("result.json"))["best"]["accuracy"]
    assert best in json.loads(capsys.readouterr().out).values()


def test_a_run_that_is_resumed_elsewhere_ends_with_the_same_bits(finished, tmp_path, monkeypatch):
    write, whole_ones = Storage.write_pieces, []

    def write_one_checkpoint(storage, name, pieces, **options):
        if whole_ones and name.startswith(("checkpoints/", "center")):
            raise OSError("the network is down")
        written = write(storage, name, pieces, **options)
        if name.endswith("manifest.json"):
            whole_ones.append(name)
        return written

    monkeypatch.setattr(checkpoint_writer, "_RETRY_S", 1.0)
    monkeypatch.setattr(Storage, "write_pieces", write_one_checkpoint)
    assert train(tmp_path / "a/parts", "--epochs", "2") == 2
    monkeypatch.setattr(Storage, "write_pieces", write)
    assert train(tmp_path / "b/parts", "--epochs", "2", "--resume") == 0
    whole, parts = (Storage(uri) for uri in (finished[0], "s3://kept/runs/parts"))
    assert parts.read_bytes("center.safetensors") == whole.read_bytes("center.safetensors")
    kept = [name for name in parts.list_dir("") if name.startswith("events.out.tfevents")]
    assert len(kept) == 2, "one of each start"
    assert all((tmp_path / "b/parts" / name).exists() for name in kept), "all were fetched"


def test_a_second_run_with_the_same_name_is_refused(finished, tmp_path, capsys):
    assert train(tmp_path / "finished", "--epochs", "2") == 2
    assert "s3://kept/runs/finished already holds a run" in capsys.readouterr().err
    with hold.held(Storage(finished[0]), "run.storage_path"):
        assert train(tmp_path / "finished", "--epochs", "3", "--resume") == 2
    assert "s3://kept/runs/finished is in use by process" in capsys.readouterr().err


def test_data_are_read_from_a_folder_a_glob_and_a_file():
    folder, some = load("s3://data/digits"), load("s3://data/digits/*.parquet")
    assert folder.train.num_samples == some.train.num_samples == 1438
    assert (folder.test.images == some.test.images).all()
    one = load("s3://data/digits/test-00000-of-00001.parquet")
    assert one.train.num_samples + one.test.num_samples == 359


def test_the_uri_itself_may_name_the_server(server, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    host = quote(server.removeprefix("http://"), safe="")
    query = f"?endpoint_override={host}&scheme=http&region=us-east-1"
    place, data = f"s3://kept/with-server{query}", f"s3://data/digits{query}"
    assert train(tmp_path / "run", "--epochs", "1", place=place, data=data) == 0
    uri = f"s3://kept/with-server/run{query}"
    assert uri in capsys.readouterr().out
    assert cli.main(["status", uri]) == 0
    assert cli.main(["evaluate", uri]) == 0
    assert load(f"s3://data/digits/*.parquet{query}").train.num_samples == 1438


def test_credentials_in_the_uri_open_the_store_and_are_written_nowhere(
    server, tmp_path, monkeypatch, capfd
):
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    host = quote(server.removeprefix("http://"), safe="")
    query = f"?endpoint_override={host}&scheme=http&region=us-east-1"
    place, data = (
        f"s3://HushKey:Hush%2FHush@kept/hushed{query}",
        f"s3://HushKey:Hush@data/digits{query}",
    )
    assert train(tmp_path / "run", "--epochs", "1", place=place, data=data) == 0
    assert train(tmp_path / "run", "--epochs", "2", "--resume", place=place, data=data) == 0
    uri = f"s3://HushKey:Hush%2FHush@kept/hushed/run{query}"
    for command in ("status", "check", "report"):
        assert cli.main([command, uri]) == 0
    assert cli.main(["evaluate", uri, "--data", data]) == 0
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert cli.main(["evaluate", uri]) == 0  # by the credentials of the environment
    out, err = capfd.readouterr()
    assert f"run:          s3://kept/hushed/run{query}" in out
    assert "Hush" not in out + err
    storage = Storage(uri)
    names = [n for n in storage.list_dir("") if "." in n]
    names += [
        f"checkpoints/{folder}/{name}"
        for folder in storage.list_dir("checkpoints")
        for name in storage.list_dir(f"checkpoints/{folder}")
    ]
    assert {"config.json", "status.json", "result.json", "report.html"} <= set(names)
    for name in names:
        assert b"Hush" not in storage.read_bytes(name), name
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"Hush" not in path.read_bytes(), path


def test_a_worker_is_removed_by_the_uri_of_its_run(monkeypatch):
    uri = "s3://kept/runs/asked-for"
    worker = WorkerStatus("w0", "training", "a", 9, 3, 0.01, 0.0, 1.0)
    status = RunStatus(
        "training",
        Progress(round=3, generation=1, epoch=0.5, num_samples=90, seconds=1.0),
        1,
        "1",
        None,
        (worker,),
        (),
    )
    control_channel, ended = ControlChannel(Storage(uri), clock=time.monotonic), threading.Event()

    def drive():
        while not ended.wait(0.02):
            control_channel.report(status)
            for request in control_channel.pop_requests():
                control_channel.answer(request, f"{request.worker_id} leaves", ok=True)

    driver = threading.Thread(target=drive)
    driver.start()
    try:
        storage, until = Storage(uri), time.monotonic() + 60
        while not storage.exists("status.json") and time.monotonic() < until:
            time.sleep(0.02)
        assert request_removal(uri, "w0", timeout_s=20) == "w0 leaves"
    finally:
        ended.set()
        driver.join(timeout=10)
        control_channel.close(status)


class Cut(Storage):
    """A storage that fails at the manifest, the last file of a checkpoint."""

    def write_pieces(self, name, pieces, **options):
        if name.endswith("manifest.json"):
            raise OSError("the network is down")
        return super().write_pieces(name, pieces, **options)


def test_a_checkpoint_that_was_cut_off_does_not_count_and_the_previous_one_stays():
    uri = "s3://kept/runs/cut"
    CheckpointStore(Storage(uri)).write(make(1))
    with pytest.raises(CheckpointError, match="could not be written: the network is down"):
        CheckpointStore(Cut(uri)).write(make(2))
    store = CheckpointStore(Storage(uri))
    assert store.names() == ["round-00000001"]
    assert store.read()[0].progress.round == 1
    store.write(make(2))
    assert store.names() == ["round-00000001", "round-00000002"]


# a driver that is halted


DRIVER = """
import sys
from raydl import cli
from raydl.run import lock
lock.STALE_S = 1.0
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture
def drive(tmp_path):
    """Start a driver of a long run on S3, with further options; end all drivers afterwards."""
    started = []

    def drive(name, *more):
        options = [*TRAIN, "--epochs", "100000", "--run-dir", str(tmp_path / name / "halted")]
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, *options, "--storage-path", "s3://kept/runs", *more],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield drive
    for process in started:
        process.kill()
        process.communicate(timeout=BOUND_S)


def wait_until(holds):
    deadline = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_superseded_driver_that_was_halted_ends_and_changes_nothing(drive, server):
    storage = Storage("s3://kept/runs/halted")
    store = CheckpointStore(storage)
    halted = drive("a")
    wait_until(lambda: len(store.names()) == 2)
    os.kill(halted.pid, signal.SIGSTOP)
    own = {name for name in storage.list_dir("") if name.startswith(("events.", "history-"))}
    assert len(own) == 2
    successor = drive("b", "--resume")
    wait_until(lambda: any(name.endswith("-e2") for name in store.names()[:1]))
    successor.send_signal(signal.SIGTERM)
    output, _ = successor.communicate(timeout=BOUND_S)
    assert successor.returncode == 143, output
    before = objects(server)
    assert halted.poll() is None
    os.kill(halted.pid, signal.SIGCONT)
    output, _ = halted.communicate(timeout=BOUND_S)
    assert halted.returncode == 3, output
    error = output.splitlines()[-1]
    assert error.startswith(f"error: s3://kept/runs/halted: process {successor.pid} on ")
    assert "; this driver, of epoch 1, ends" in error
    # Writes that were under way when it was halted may still arrive: a status, its own curves and
    # history, and a file of a checkpoint with a name of its own.
    others = {k: v for k, v in before.items() if k not in {"status.json", *own}}
    after = objects(server)
    assert {k: after.get(k) for k in others} == others
    assert all("/round-" in k and "-e2/" not in k for k in after.keys() - before.keys())
    assert store.names()[-1].endswith("-e2")
    assert json.loads(storage.read_bytes("config.json"))["driver_epoch"] == 2
    checkpoint, damage = CheckpointStore(storage, driver_epoch=3).read()
    assert damage == []
    assert checkpoint.progress.round > 0


def objects(server):
    """Return the ETags of the objects of the run by key; an ETag identifies the content."""
    prefix = "runs/halted/"
    with s3_client(server) as client:
        listed = client.list_objects_v2(Bucket="kept", Prefix=prefix)["Contents"]
    return {item["Key"].removeprefix(prefix): item["ETag"] for item in listed}


# errors before any actor starts


@pytest.fixture
def wrong_keys(server):
    """The server requires credentials and refuses all."""
    require_keys(server, b"0")
    yield
    require_keys(server, b"inf")


def require_keys(server, after):
    request = urllib.request.Request(
        f"{server}/moto-api/reset-auth", data=after, headers={"Content-Type": "text/plain"}
    )
    urllib.request.urlopen(request, timeout=10).close()


@pytest.fixture
def no_server(monkeypatch):
    """No server listens at the address in the environment."""
    with socket.socket() as taken:  # does not listen, and reserves the port
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        yield


def error_of(capsys, act):
    """Return the one sentence of a command that fails within the time limit.

    On a busy machine, lines before it may report that the store does not answer yet.
    """
    began = time.monotonic()
    try:
        status = act()
    except RaydlError as error:
        status, sentence = 2, f"error: {error}"
    else:
        *before, sentence = capsys.readouterr().err.strip().splitlines()
        assert all("has not answered for" in line for line in before)
    assert time.monotonic() - began < BOUND_S
    assert status == 2
    assert sentence.startswith("error: ")
    assert "\n" not in sentence
    return sentence


def accesses(tmp_path, bucket):
    """Return the commands that access a bucket, as functions, by what they access."""
    return {
        "storage": lambda: train(
            tmp_path / "r", "--workers", "2", place=f"s3://{bucket}/runs", data="digits"
        ),
        "data": lambda: train(
            tmp_path / "r", "--workers", "2", place=None, data=f"s3://{bucket}/digits"
        ),
        "status": lambda: cli.main(["status", f"s3://{bucket}/runs/finished"]),
        "evaluate": lambda: cli.main(["evaluate", f"s3://{bucket}/runs/finished"]),
        "resume": lambda: train(tmp_path / "r", "--resume", place=f"s3://{bucket}/runs"),
    }


@pytest.fixture
def no_actors(monkeypatch):
    def connect(**_):
        raise AssertionError("Ray was connected")

    monkeypatch.setattr(ray_session, "connect", connect)


@pytest.mark.usefixtures("no_actors")
@pytest.mark.parametrize("access", ["storage", "data", "status", "evaluate"])
def test_an_absent_bucket_is_an_error(tmp_path, capsys, access):
    sentence = error_of(capsys, accesses(tmp_path, "nobucket")[access])
    assert "nobucket" in sentence
    if access == "storage":
        assert sentence.startswith(
            "error: run.storage_path: s3://nobucket/runs/r cannot be written"
        )
    assert {
        "storage": "the bucket does not exist; create it",
        "data": "there is no such file or folder",
        "status": "no run is there",
        "evaluate": "no run is there",
    }[access] in sentence


@pytest.mark.usefixtures("no_actors", "wrong_keys")
@pytest.mark.parametrize("access", ["storage", "data", "status", "evaluate", "resume"])
def test_the_error_of_refused_credentials_names_the_variables_to_set(tmp_path, capsys, access):
    sentence = error_of(capsys, accesses(tmp_path, "kept" if access != "data" else "data")[access])
    assert "the store refuses these credentials; set AWS_ACCESS_KEY_ID" in sentence


@pytest.mark.usefixtures("no_actors", "no_server")
@pytest.mark.parametrize("access", ["storage", "data", "status", "evaluate", "resume"])
def test_an_absent_server_is_an_error_within_seconds(tmp_path, capsys, access):
    sentence = error_of(capsys, accesses(tmp_path, "kept")[access])
    assert "the store does not answer; check AWS_ENDPOINT_URL" in sentence
