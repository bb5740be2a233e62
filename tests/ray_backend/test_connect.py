"""A driver that cannot join a cluster soon gets an error with the reason in one sentence."""

import contextlib
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest
import ray
from ray import _raylet
from ray._private import services, utils, worker
from ray._private.node import Node
from ray._raylet import AuthenticationTokenLoader
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from raydl.errors import ClusterError
from raydl.ray_backend import session as ray_session
from raydl.ray_backend.session import begin

TOKEN = "a" * 64
BOUND_S = 20


class FakeGcs(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):
    """The first answer of a cluster over Ray's protocol: its id, for callers with its token."""

    def __init__(self, token):
        self.token = token

    def GetClusterId(self, request, context):
        given = dict(context.invocation_metadata()).get("authorization")
        if self.token is not None and given != f"Bearer {self.token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return gcs_service_pb2.GetClusterIdReply(cluster_id=b"c")


@contextlib.contextmanager
def gcs(token):
    server = grpc.server(ThreadPoolExecutor(1))
    gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(FakeGcs(token), server)
    port = server.add_insecure_port("0.0.0.0:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.fixture(autouse=True)
def no_connection(monkeypatch, tmp_path):
    """Start without a connection and a token; ``ray.init`` does nothing."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **how: None)
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    AuthenticationTokenLoader.instance().reset_cache()
    yield
    monkeypatch.undo()
    AuthenticationTokenLoader.instance().reset_cache()


def refusal_of(monkeypatch, address, *, mode="token", token=None):
    """Return the error message of a cluster that cannot be joined."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    if token is not None:
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    began = time.monotonic()
    with pytest.raises(ClusterError) as caught:
        ray_session.connect()
    assert time.monotonic() - began < BOUND_S
    sentence = str(caught.value)
    assert sentence.startswith(f"the Ray cluster at {address} (RAY_ADDRESS) ")
    assert "\n" not in sentence
    return sentence


def test_an_unused_address_is_reported_within_seconds(monkeypatch):
    sentence = refusal_of(monkeypatch, "127.0.0.1:1")
    assert "127.0.0.1:1 (RAY_ADDRESS) does not answer (Connection refused)" in sentence
    assert "start one with ray start --head" in sentence


def test_an_unknown_host_name_is_reported(monkeypatch):
    assert "does not answer (" in refusal_of(monkeypatch, "cluster.invalid:6379")


def test_a_silent_listener_is_reported_as_no_answer(monkeypatch):
    monkeypatch.setattr(ray_session, "_ANSWER_S", 0.2)
    with socket.create_server(("0.0.0.0", 0)) as silent:
        sentence = refusal_of(monkeypatch, f"127.0.0.1:{silent.getsockname()[1]}")
    assert "does not answer (no answer within 0.2 s)" in sentence


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1"])
def test_a_malformed_address_is_reported_with_the_right_form(monkeypatch, address):
    assert "give HOST:PORT" in refusal_of(monkeypatch, address)


def test_ray_clients_address_is_refused(monkeypatch):
    assert "Ray Client" in refusal_of(monkeypatch, "ray://127.0.0.1:10001")


def test_the_error_for_a_client_without_a_token_says_how_to_set_one(monkeypatch):
    with gcs(TOKEN) as address:
        sentence = refusal_of(monkeypatch, address, mode="disabled", token=TOKEN)
    assert "requires a token but this process sends none (RAY_AUTH_MODE is disabled)" in sentence
    assert "set RAY_AUTH_MODE=token" in sentence


def test_the_error_for_a_missing_token_says_where_ray_looks_for_it(monkeypatch):
    with gcs(TOKEN) as address:
        sentence = refusal_of(monkeypatch, address)
    assert (
        "requires a token, and none was found; put the cluster's token into RAY_AUTH_TOKEN or"
        in sentence
    )


def test_a_wrong_token_is_reported_and_not_shown(monkeypatch):
    with gcs(TOKEN) as address:
        sentence = refusal_of(monkeypatch, address, token="b" * 64)
    assert "rejects the token that was found" in sentence
    assert "bbb" not in sentence


def test_a_token_for_a_cluster_without_tokens_is_refused_before_its_actors_fail(monkeypatch):
    with gcs(None) as address:
        sentence = refusal_of(monkeypatch, address, token=TOKEN)
    assert "requires no token but this process sends one (RAY_AUTH_MODE=token)" in sentence
    assert "set RAY_AUTH_MODE=disabled" in sentence


@pytest.mark.parametrize(("mode", "token"), [("token", TOKEN), ("disabled", None)])
def test_a_process_with_the_clusters_token_mode_connects(monkeypatch, mode, token):
    with gcs(token) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
        assert ray_session.connect() is False


def test_a_cluster_that_ray_finds_by_itself_gets_the_existing_token(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("RAY_AUTH_MODE", "")  # to restore it after the test
    monkeypatch.delenv("RAY_AUTH_MODE")
    with gcs(TOKEN) as address:
        monkeypatch.setattr(services, "canonicalize_bootstrap_address", lambda auto: address)
        assert ray_session.connect() is False


def test_both_versions_are_reported_side_by_side(monkeypatch):
    cluster = {"ray_version": "2.9.1", "python_version": "3.9.2"}
    monkeypatch.setattr(ray, "init", lambda **how: utils.check_version_info(cluster, "here"))
    with gcs(None) as address:
        sentence = refusal_of(monkeypatch, address, mode="disabled")
    ours = f"but this process runs Ray {ray.__version__} on Python {sys.version.split()[0]}"
    assert f"runs Ray 2.9.1 on Python 3.9.2, {ours}; install the cluster's versions" in sentence


def test_another_refusal_of_ray_keeps_its_reason(monkeypatch):
    def init(**how):
        try:
            raise RuntimeError("no node of the cluster runs here\nand much more")
        except RuntimeError as error:
            raise ConnectionError("Failed to connect to Ray cluster") from error

    monkeypatch.setattr(ray, "init", init)
    with gcs(None) as address:
        sentence = refusal_of(monkeypatch, address, mode="disabled")
    assert "joined: Failed to connect to Ray cluster: no node of the cluster runs here;" in sentence


# Ray started in a thread


@pytest.fixture
def init(monkeypatch):
    """A fake ``ray.init`` that waits for ``may_end`` and raises ``problem``, if any."""
    fake = SimpleNamespace(may_end=threading.Event(), problem=None, calls=[])

    def init(**how):
        fake.calls.append(how)
        fake.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        assert fake.may_end.wait(60)
        if fake.problem:
            raise fake.problem

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_session, "_beginning", None)
    monkeypatch.setattr(ray_session, "_is_ending", threading.Event())
    monkeypatch.setattr(ray_session.atexit, "register", lambda *_: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    yield fake
    fake.may_end.set()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_ray_starts_once_in_a_thread_and_connect_waits_for_it(init):
    begin(has_forks=False)
    begin(has_forks=False)
    threading.Timer(0.05, init.may_end.set).start()
    assert ray_session.connect() is True
    assert init.may_end.is_set()
    assert [how["address"] for how in init.calls] == ["local"]
    for number, status in ((signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        with pytest.raises(SystemExit) as caught:  # an exception ends Ray, too
            signal.raise_signal(number)
        assert caught.value.code == status


def test_a_process_that_ends_first_waits_for_the_thread_that_starts_ray(init, monkeypatch):
    """Else the thread may use Ray after its shutdown, and Ray's C++ code ends the process."""
    handlers, order, is_warming = [], [], threading.Event()

    def warm_up():
        is_warming.set()
        time.sleep(0.1)
        order.append("the thread")

    monkeypatch.setattr(ray_session.atexit, "register", lambda *handler: handlers.append(handler))
    monkeypatch.setattr(ray_session.fork_server, "warm_up", warm_up)
    monkeypatch.setattr(ray, "shutdown", lambda: order.append("shutdown"))
    init.may_end.set()
    begin(has_forks=True)
    assert is_warming.wait(60)
    for function, *arguments in reversed(handlers):
        function(*arguments)
    assert order == ["the thread", "shutdown"]


def test_ray_may_take_longer_to_start_than_its_own_limit(init, monkeypatch):
    left = [RuntimeError("not yet")] * 3

    def get_node(*arguments):
        if left:
            raise left.pop()
        return arguments

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(ray, "init", lambda **how: services.get_node("gcs", "node"))
    assert ray_session.connect() is True
    assert left == []
    assert services.get_node is get_node
    left = [RuntimeError("not yet")] * 3
    monkeypatch.setattr(ray_session, "_START_S", -1.0)
    with pytest.raises(RuntimeError, match="not yet"):
        ray_session.connect()


class StartingNode:
    """A node whose raylet ends as it starts."""

    def __init__(self):
        self.all_processes, self.was_killed = {}, False

    def kill_all_processes(self, check_alive):
        self.was_killed = True


@pytest.mark.parametrize(("num_ended", "starts"), [(2, True), (3, False)])
def test_a_cluster_whose_raylet_ends_as_it_starts_is_started_again(
    init, monkeypatch, num_ended, starts
):
    """A raylet ends if its agent takes 15 s to start."""
    nodes = []

    def ray_init(**how):
        nodes.append(StartingNode())
        Node.start_ray_processes(nodes[-1])
        services.get_node("gcs", "node")

    def start(node):
        ended = 1 if len(nodes) <= num_ended else None
        process = SimpleNamespace(poll=lambda: ended)
        node.all_processes["raylet"] = [SimpleNamespace(process=process)]

    def get_node(*arguments):
        if len(nodes) <= num_ended:
            raise RuntimeError("not yet")

    monkeypatch.setattr(ray, "init", ray_init)
    monkeypatch.setattr(Node, "start_ray_processes", start)
    monkeypatch.setattr(services, "get_node", get_node)
    if starts:
        assert ray_session.connect() is True
    else:
        with pytest.raises(ClusterError, match="did not start in time"):
            ray_session.connect()
    assert len(nodes) == 3
    assert [node.was_killed for node in nodes] == [True, True, not starts]


def test_sighup_stays_ignored_under_nohup(init):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    init.may_end.set()
    ray_session.connect()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_the_processes_of_ray_outlive_a_terminal_that_closes(init):
    init.may_end.set()
    ray_session.connect()
    assert init.blocked == {signal.SIGHUP}, "they inherit what the thread that starts them blocks"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_a_limit_of_open_files_with_which_ray_would_hang_is_refused(init):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (127, before[1]))
    try:
        with pytest.raises(ClusterError) as caught:
            ray_session.connect()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert str(caught.value) == (
        "the Ray cluster of this run needs 128 open files per process, and the limit is 127; "
        "raise it, for instance with ulimit -n 1024"
    )
    assert init.calls == []


@pytest.mark.parametrize("has_forks", [True, False])
def test_processes_that_ray_starts_in_advance_import_torch_only_without_forks(init, has_forks):
    init.may_end.set()
    ray_session.connect(has_forks=has_forks)
    assert ("preload_python_modules" in init.calls[0]["_system_config"]) is not has_forks


@pytest.mark.parametrize("is_ready", [True, False])
def test_the_fork_server_is_started_early_only_for_a_caller_that_is_not_ready(
    monkeypatch, init, is_ready
):
    """The task that starts it leaves processes behind, which no actor of a ready caller uses."""
    begun, warmed_up = threading.Event(), threading.Event()
    monkeypatch.setattr(ray_session.fork_server, "warm_up", warmed_up.set)
    monkeypatch.setattr(ray_session, "_is_awaited", begun)
    begin(has_forks=True)
    if is_ready:
        threading.Thread(target=ray_session.connect, daemon=True).start()
        assert begun.wait(60)
    init.may_end.set()
    assert warmed_up.wait(0.2 if is_ready else 60) is not is_ready


def test_connect_raises_the_error_of_the_thread_and_can_be_called_again(init):
    init.problem = OSError("no space left")
    init.may_end.set()
    begin(has_forks=False)
    with pytest.raises(OSError, match="no space left"):
        ray_session.connect()
    init.problem = None
    assert ray_session.connect() is True


def test_a_cluster_of_the_run_that_does_not_start_in_time_raises_one_sentence(init):
    init.problem = Exception("The current node timed out during startup. This could happen because")
    init.may_end.set()
    begin(has_forks=False)
    with pytest.raises(
        ClusterError, match=r"^the Ray cluster of this run did not start in time: this"
    ):
        ray_session.connect()


@pytest.mark.parametrize("address", ["", "join"])
def test_drivers_with_one_seed_have_subscribers_with_different_ids(monkeypatch, address):
    """With the same id both would miss messages and poll without a pause."""
    monkeypatch.setattr(_raylet, "random", random)
    monkeypatch.setattr(ray_session, "_beginning", None)
    monkeypatch.setattr(ray_session.atexit, "register", lambda *_: None)
    drawn = []

    def init(**how):
        seeded = random.getstate()
        _raylet.GcsLogSubscriber(address="127.0.0.1:1")
        drawn.append(random.getstate() == seeded)

    with gcs(None) as own:
        for name, value in {"RAY_ADDRESS": address and own, "RAY_AUTH_MODE": "disabled"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setattr(ray, "init", init)
        for _ in range(2):
            random.seed(0)
            ray_session.connect()
    assert drawn == [True, True], "the id depends on the seed"


def test_a_cluster_with_an_address_is_joined_in_the_thread(monkeypatch, init):
    with gcs(None) as its_address:
        monkeypatch.setenv("RAY_ADDRESS", its_address)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        begin(has_forks=False)
        threading.Timer(0.05, init.may_end.set).start()
        assert ray_session.connect() is False
    assert ["address" in how for how in init.calls] == [False]


def test_a_cluster_that_does_not_answer_the_thread_raises_one_sentence(monkeypatch, init):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    begin(has_forks=False)
    with pytest.raises(ClusterError, match=r"does not answer"):
        ray_session.connect()


def test_begin_does_nothing_where_ray_already_runs(monkeypatch, init):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    begin(has_forks=False)
    assert ray_session.connect() is False
    assert init.calls == []


# Ray's messages


LOST = "A worker died or was killed while executing a task by an unexpected system error. To"


@pytest.fixture
def messages(monkeypatch, init, tmp_path):
    """What a connected driver shows of Ray's messages, and the folder of its logs."""
    shown = []
    monkeypatch.setattr(
        worker, "print_to_stdstream", lambda data, ignore_prefix: shown.append(data)
    )
    node = SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path))
    monkeypatch.setattr(worker, "_global_node", node)
    init.may_end.set()
    ray_session.connect()

    def receive(line, pid="raylet"):
        shown.clear()
        worker.print_to_stdstream({"lines": [line], "pid": pid}, ignore_prefix=False)
        return [data["lines"] for data in shown]

    return SimpleNamespace(receive=receive, log=tmp_path / f"raydl-driver-{os.getpid()}.log")


def test_rays_message_about_a_lost_process_goes_to_a_file(messages):
    for line in (LOST, "The node with node id: abc has been marked dead"):
        assert messages.receive(line) == []
        assert messages.log.read_text().endswith(f"] {line}\n")
    assert len(messages.log.read_text().splitlines()) == 2
    assert messages.log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("line", "pid"),
    [("3 Workers (tasks / actors) killed due to memory pressure (OOM)", "raylet"), (LOST, 4242)],
)
def test_other_messages_and_the_output_of_workers_are_shown(messages, line, pid):
    assert messages.receive(line, pid) == [[line]]
    assert not messages.log.exists()


@pytest.mark.parametrize("kind", ["link", "pipe", "no folder"])
def test_a_message_that_cannot_be_kept_is_shown(messages, kind, tmp_path):
    """Every user may write to the folder of the logs in a cluster of ray start."""
    if kind == "link":
        messages.log.symlink_to(tmp_path / "target")
    elif kind == "pipe":
        os.mkfifo(messages.log)
    else:
        tmp_path.rmdir()
    assert messages.receive(LOST) == [[LOST]]
    assert not (tmp_path / "target").exists()


def test_a_second_connection_keeps_each_message_once(messages):
    ray_session.connect()
    messages.receive(LOST)
    assert len(messages.log.read_text().splitlines()) == 1


# a real cluster


@pytest.mark.cluster
def test_a_cluster_of_the_run_has_imported_torch_before_an_actor_starts(tmp_path):
    code = (
        "import sys, ray; from raydl.ray_backend import fork_server, session; "
        "session.begin(has_forks=True); session.connect(); "
        "has_torch = ray.remote(lambda: 'torch' in sys.modules); "
        "forked = has_torch.options(runtime_env=fork_server.runtime_env()); "
        "sys.exit(not ray.get(forked.remote(), timeout=60))"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    words = [sys.executable, "-c", code]
    done = subprocess.run(
        words, env=environment | {"HOME": str(tmp_path)}, timeout=120, check=False
    )
    assert done.returncode == 0


def train(folder, name, address, **environment):
    """Start a run on a cluster; return its exit status and its last line of stderr."""
    words = [
        sys.executable, "-m", "raydl", "train", "--data", "synthetic:64", "--model", "mlp",
        "--workers", "1", "--batch-size", "8", "--run.progress", "plain",
        "--run-dir", str(folder / name),
    ]  # fmt: skip
    mine = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    mine |= {"HOME": str(folder), "RAY_ADDRESS": address, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(words, env=mine, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr.strip().splitlines()[-1]


@pytest.mark.cluster
def test_a_real_cluster_with_tokens_refuses_a_missing_or_wrong_token(four_cpus, tmp_path):
    cases = {
        "is disabled": {"RAY_AUTH_MODE": "disabled"},
        "none was found": {"RAY_AUTH_MODE": "token"},
        "rejects the token": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64},
    }
    for number, (words, environment) in enumerate(cases.items()):
        status, error = train(tmp_path, str(number), four_cpus.address, **environment)
        assert status == 2, error
        assert error.startswith(f"error: the Ray cluster at {four_cpus.address} (RAY_ADDRESS)"), (
            error
        )
        assert words in error
