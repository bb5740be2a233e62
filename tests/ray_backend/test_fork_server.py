"""Worker programs as forks of a server; processes of the tests act as those of Ray."""

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from clusters import BOUND_S, ClusterRun, actor_pids
from processes import descendants_of, parent_of
from ray._private.ray_constants import PROCESS_TYPE_RAYLET

from raydl.ray_backend import fork_server

PROGRAM = """
import json, os, random, sys
name = sys.argv[1].partition("=")[2]
facts = {
    "process": os.getpid(), "server": os.getppid(), "has_torch": "torch" in sys.modules,
    "words": sys.argv, "folder": os.getcwd(), "name": __name__,
}
if facts["has_torch"]:
    import numpy, torch
    from ray._raylet import WorkerID
    facts["torch's"] = torch.rand(()).item()
    facts["random"] = [random.random(), numpy.random.random(), WorkerID.from_random().hex()]
print("output of", name)
with open(name + ".part", "w") as file:
    json.dump(facts, file)
os.rename(name + ".part", name)
"""
NO_LIBRARIES = "f._Server._prepare = lambda server: None"
IDLE_AT_ONCE = (
    "accept = f._Server._accept; "
    "f._Server._accept = lambda server: (setattr(f, '_IDLE_S', 0.1), accept(server))[1]"
)
"""Makes a server end soon after its last fork, once its first client has connected."""
NO_PROCESS = (
    "fork, count = os.fork, []; "
    "os.fork = lambda: count.append(1) or (fork() if len(count) < {} else open('/no process'))"
)
"""Makes the n-th fork fail: the second one starts the server, the third is the server's first."""
OTHER = "other = f._bind(f._address(os.getppid())); other.listen()"
"""Makes a client the process that uses the address of its server, and never answers."""
GRANDCHILD = (
    "lambda listener, real=f._is_grandchild: (open('servers', 'a').write('x'), real(listener))[1]"
)
"""Writes an x for each server that is started."""


def client(change, program):
    """Return the code of a client with a change, and with the program and time-out of the tests."""
    imports = "import os, sys; from raydl.ray_backend import fork_server as f"
    start = f"package = f._package(); f._PATIENCE_S = {BOUND_S}"
    worker = f"f._worker_program = lambda: {str(program)!r}"
    return f"{imports}; {start}; {worker}; {change}; f.main(sys.argv[1:], package)"


class FakeRaylet:
    """Starts worker programs, as a raylet does."""

    def __init__(self, folder):
        self.folder = folder
        self.program = folder / "program.py"
        self.program.write_text(PROGRAM)

    def words(self, name):
        """Return the words of a worker program that writes its facts to a file of this name."""
        return [str(self.program), f"--worker-id={name}"]

    def start_client(self, name, change="pass", *, files=(), **environment):
        """Start a client whose fork runs the program, with further open files."""
        with (self.folder / f"{name}.out").open("w") as out:
            return subprocess.Popen(
                [sys.executable, "-c", client(change, self.program), *self.words(name)],
                cwd=self.folder, stdout=out, stderr=out, env={**os.environ, **environment},
                pass_fds=files,
            )  # fmt: skip

    def run_program(self, name, change=NO_LIBRARIES, **environment):
        """Start a client, wait for its end, and return the facts that the program has written."""
        started = self.start_client(name, change, **environment)
        assert started.wait(timeout=BOUND_S) == 0
        self.until((self.folder / name).exists)
        return json.loads((self.folder / name).read_text()) | {"client": started.pid}

    def until(self, condition):
        deadline = time.monotonic() + BOUND_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def node(tmp_path):
    return FakeRaylet(tmp_path)


def has_ended(pid):
    return not os.path.exists(f"/proc/{pid}")


@pytest.mark.processes
def test_two_programs_are_forks_of_one_process_that_has_imported_torch(node):
    first, second = node.run_program("first", "pass"), node.run_program("second", "pass")
    assert first["server"] == second["server"] != os.getpid()
    assert first["process"] != second["process"]
    for name, facts in (("first", first), ("second", second)):
        assert facts["has_torch"]
        assert facts["words"] == node.words(name)
        assert (facts["name"], facts["folder"]) == ("__main__", str(node.folder))
        node.until(lambda name=name: (node.folder / f"{name}.out").read_text())
        assert (node.folder / f"{name}.out").read_text() == f"output of {name}\n"
    assert not set(first["random"]) & set(second["random"])
    assert first["torch's"] == second["torch's"]  # torch's generator has the same first state


@pytest.mark.processes
def test_each_environment_has_its_own_server(node):
    assert node.run_program("one")["server"] != node.run_program("other", OTHER="1")["server"]


@pytest.mark.processes
def test_a_server_that_has_had_no_fork_for_a_while_ends_and_the_next_client_starts_another(node):
    change = f"{NO_LIBRARIES}; {IDLE_AT_ONCE}"
    ended = node.run_program("first", change)["server"]
    node.until(lambda: has_ended(ended))
    assert node.run_program("second", change)["server"] != ended


@pytest.mark.processes
def test_a_server_ends_with_its_raylet(node):
    raylet = "import sys, subprocess; subprocess.run(sys.argv[1:]); input()"
    words = [
        sys.executable,
        "-c",
        client(NO_LIBRARIES, node.program),
        *node.words(node.folder / "name"),
    ]
    with subprocess.Popen([sys.executable, "-c", raylet, *words], stdin=subprocess.PIPE) as raylet:
        node.until((node.folder / "name").exists)
        server = json.loads((node.folder / "name").read_text())["server"]
        assert not has_ended(server)
        raylet.kill()
    node.until(lambda: has_ended(server))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("f._LIBRARIES = ('no_module_of_this_name',)", "ModuleNotFoundError: No module named"),
        ("f._LIBRARIES = ('raydl.ray_backend.actors',)", "its forks would draw the same ids"),
        # Another process uses its address and never answers.
        (f"f._PATIENCE_S = 0.1; {OTHER}", "timed out"),
        (f"{OTHER}; os.getuid = lambda: -1", "this user's"),
        (f"{OTHER}; f._surroundings = lambda process: process", "of another container"),
        (NO_PROCESS.format(2), "no further process can be started"),
        (f"{NO_LIBRARIES}; {NO_PROCESS.format(3)}", "/no process"),
        ("package = '/'", ""),
        ("sys.argv.insert(1, '-s')", ""),
        ("f._worker_program = lambda: '/ray/worker.py'", ""),
        ("os.environ[f._SUBREAPER] = 'true'", ""),
    ],
    ids=[
        "has no libraries", "has drawn an id", "does not answer", "belongs to another user",
        "is in another container", "cannot start", "cannot fork", "imports another raydl",
        "cannot have Python's options", "forks only Ray's worker program",
        "would be killed by the raylet",
    ],
)  # fmt: skip
def test_a_client_whose_server_cannot_be_used_runs_the_program_itself(node, change, reason):
    facts = node.run_program("name", change)
    assert (facts["process"], facts["has_torch"]) == (facts["client"], False)
    output = (node.folder / "name.out").read_text()
    assert ("raydl: no fork of the fork server: " in output) == bool(reason)
    assert reason in output
    node.until(lambda: "output of name" in (node.folder / "name.out").read_text())
    assert (node.folder / "name.out").read_text().count("output of name") == 1


@pytest.mark.processes
def test_a_server_that_refuses_a_client_stays_for_the_next_one(node):
    change = "f._LIBRARIES = ('no_module_of_this_name',)"
    for name in ("first", "second"):
        facts = node.run_program(name, f"f._is_grandchild = {GRANDCHILD}; {change}")
        assert facts["process"] == facts["client"]
    assert (node.folder / "servers").read_text() == "x"


@pytest.mark.processes
def test_after_the_end_of_the_raylet_a_client_runs_the_program_itself(node):
    ended = "os.pidfd_open = lambda raylet: open('/no process')"
    facts = node.run_program("name", f"f._is_grandchild = {GRANDCHILD}; {ended}")
    assert facts["process"] == facts["client"]
    assert (node.folder / "servers").read_text() == "x"
    output = (node.folder / "name.out").read_text()
    assert output == "raydl: no fork of the fork server: it ended\noutput of name\n"


@pytest.mark.processes
def test_a_stranger_that_makes_no_request_does_not_end_the_server(node):
    server = node.run_program("first")["server"]
    stranger = (
        "s = f.socket.socket(f.socket.AF_UNIX); s.connect(f._address(os.getppid())); "
        "s.sendall(bytes([255] * 8)); s.close()"
    )
    assert node.run_program("second", f"{NO_LIBRARIES}; {stranger}")["server"] == server


STRANGER = """
import json, os, signal, socket, struct, sys
signal.alarm(60)
address, words, change = bytes.fromhex(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
server, parent = socket.socket(socket.AF_UNIX), os.getpid()
if change.startswith("/"):
    os.chroot(change)
server.connect(address)
if change == "ended" and os.fork():
    os._exit(0)  # its child has the connection
if change == "ended":
    while os.getppid() == parent:
        pass
body = json.dumps([words, "/", []]).encode()
answer = b""
try:
    server.sendall(struct.pack("!Q", len(body)) + body)
    answer = server.recv(1000)
    if answer == b"h":
        server.sendall(b"g")
except ConnectionError:
    pass
print(answer.decode() or "no answer", flush=True)
"""
"""Requests a fork in the way of a client, without its checks."""


class Server:
    """A fork server that serves a client of the test, and what others get from it."""

    def __init__(self, node):
        self.node = node
        facts = node.run_program("first")
        self.address = fork_server._address(os.getpid())
        self.process = facts["server"]

    def answer_to(self, words, *wrapper, change=""):
        """Return the answer to a request for a fork that runs some words."""
        command = [sys.executable, "-c", STRANGER, self.address.hex(), json.dumps(words), change]
        os.kill(self.process, signal.SIGSTOP)
        with subprocess.Popen(
            [*wrapper, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as stranger:
            if change == "ended":
                stranger.wait(timeout=BOUND_S)
            os.kill(self.process, signal.SIGCONT)
            answer, _ = stranger.communicate(timeout=BOUND_S)
        if wrapper and "unshare failed" in answer:
            pytest.skip(f"needs a right that this process lacks: {answer}")
        return answer.strip()


@pytest.mark.processes
def test_a_request_in_the_way_of_a_client_gets_a_fork(node):
    """This shows that the next tests refuse for the reason that they name."""
    server = Server(node)
    assert server.answer_to(node.words(node.folder / "other")) == "h"
    node.until((node.folder / "other").exists)


@pytest.mark.processes
@pytest.mark.parametrize(
    "kind",
    [
        "--mount",
        "--user",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("--pid", "--ipc", "--uts", "--cgroup")
        ),
    ],
)
def test_a_process_of_the_same_user_in_another_container_gets_no_fork(node, kind):
    """Namespaces make a container; all of them but that of the network may differ here."""
    server = Server(node)
    words = node.words(node.folder / "other")
    assert server.answer_to(words, "unshare", "--fork", kind) == "no answer"
    assert node.run_program("second")["server"] == server.process
    assert not (node.folder / "other").exists()


@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="only root may change its root folder")
def test_a_process_below_another_root_gets_no_fork(node):
    server = Server(node)
    words = node.words(node.folder / "other")
    assert server.answer_to(words, change=str(node.folder)) == "no answer"


@pytest.mark.processes
def test_a_connection_of_a_process_that_has_ended_gets_no_fork(node):
    """Its process id may belong to another process by now."""
    server = Server(node)
    words = node.words(node.folder / "other")
    assert server.answer_to(words, change="ended") == "no answer"


@pytest.mark.processes
@pytest.mark.parametrize(
    "change",
    [
        lambda words: ["/proc/1/root/tmp/program.py", *words[1:]],
        lambda words: [*words, "--gcs-address=10.0.0.1:6379"],
        lambda words: [],
    ],
    ids=["another program", "another cluster", "nothing"],
)
def test_a_server_forks_only_what_its_raylet_starts(node, change):
    server = Server(node)
    words = node.words(node.folder / "other")
    answer = server.answer_to(change(words))
    assert answer == "rit forks workers of its own raylet only, with Ray's own program"
    assert node.run_program("second")["server"] == server.process


@pytest.mark.processes
def test_a_server_does_not_keep_the_open_files_of_its_first_client(node):
    reader, writer = os.pipe()
    started = node.start_client("name", NO_LIBRARIES, files=(writer,))
    os.close(writer)
    assert started.wait(timeout=BOUND_S) == 0
    with os.fdopen(reader) as pipe:
        assert select.select([pipe], [], [], BOUND_S)[0]
        assert pipe.read() == ""
    node.until((node.folder / "name").exists)
    assert not has_ended(json.loads((node.folder / "name").read_text())["server"])


@pytest.mark.processes
def test_a_fork_whose_client_has_given_up_runs_nothing(node):
    gives_up = (
        f"{NO_LIBRARIES}; f._HERE = b'hello'; receive = f._receive; "
        "f._receive = lambda c, size: os._exit(0) if size == 5 else receive(c, size)"
    )
    started = node.start_client("given up", gives_up)
    assert started.wait(timeout=BOUND_S) == 0
    server = node.run_program("next")["server"]
    node.until(lambda: len(descendants_of(server)) == 1)
    assert not (node.folder / "given up").exists()


@pytest.mark.parametrize(
    ("of_job", "is_fork"),
    [
        ({}, True),
        ({"working_dir": "gcs://one.zip", "env_vars": {"A": "1"}}, True),
        ({"pip": ["emoji"]}, False),
        ({"_nsight": "default"}, False),
        ({"py_executable": "uv run"}, False),
    ],
)
def test_a_job_with_its_own_python_has_no_fork_server(monkeypatch, of_job, is_fork):
    monkeypatch.setattr(
        "ray.get_runtime_context", lambda: SimpleNamespace(runtime_env=of_job), raising=True
    )
    assert (fork_server.runtime_env() is not None) == is_fork


def test_another_version_of_ray_has_no_fork_server(monkeypatch):
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(runtime_env={}))
    assert fork_server.runtime_env() is not None
    monkeypatch.setattr("ray.__version__", "2.61.0")
    assert fork_server.runtime_env() is None


def test_an_interpreter_whose_path_has_a_space_has_no_fork_server(monkeypatch):
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(runtime_env={}))
    assert fork_server.runtime_env() is not None
    monkeypatch.setattr("sys.executable", "/home/her name/bin/python")
    assert fork_server.runtime_env() is None


@pytest.mark.parametrize("name", fork_server._SERIALIZERS)
def test_what_ray_imports_to_serialize_has_its_name_in_this_version_of_ray(name):
    """Under another name each worker would import it anew."""
    importlib.import_module(name)


@pytest.mark.cluster
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="forks"),
        pytest.param(("--scaling.no-fork-server",), id="none", marks=pytest.mark.slow),
    ],
)
def test_the_processes_of_a_run_are_forks_unless_the_user_turns_them_off(
    four_cpus, tmp_path, options
):
    words = ["--data", "synthetic:64", "--model", "mlp", "--batch-size", "8", "--epochs", "99999"]
    raylet = four_cpus.head_node.all_processes[PROCESS_TYPE_RAYLET][0].process.pid
    with ClusterRun(four_cpus, tmp_path / "run", "--workers", "2", *words, *options) as run:
        run.until_training(2)
        processes = actor_pids(four_cpus, "WorkerActor") + actor_pids(four_cpus, "CenterActor")
        servers = {parent_of(pid) for pid in processes}
    assert len(processes) == 3
    assert len(servers) == 1
    assert (servers == {raylet}) == bool(options)
