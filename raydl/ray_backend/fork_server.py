"""A fork server on each node, whose forks are Ray's worker processes.

A worker process of Ray imports Ray, torch and raydl, which takes more than a second of CPU time for
every worker, at the start of a run and again after every loss. A fork server imports them once. Its
forks share its memory.

Ray starts a worker process with the command in its runtime environment, ``py_executable``. Here it
is a client of the fork server: it starts the server of its node, if there is none, requests a fork,
and ends. The fork takes over its arguments, folder and output, and runs Ray's worker program. If
the server refuses, ends or is silent, the client runs that program itself, as Ray would.

A server forks only for clients with the same environment: libraries read the environment when they
are imported. It has the id of the job, which Ray's library keeps from then on, so each job has a
server of its own. A server ends with its raylet, or when it has had no fork for a while.

Client and server talk only to a process of the same user in the same container, that is in the same
namespaces and below the same root: a container that shares nothing but the network sees the socket,
too. A fork runs nothing but Ray's worker program, for the raylet that started the server. All of it
is behind ``runtime_env``, and used only with versions of Ray that raydl's tests have seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import select
import socket
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from raydl.ray_backend import ray_version
from raydl.ray_backend.setup_worker import folder_of_ray

# Only small modules at the top: each worker process begins with a client.

_OWN_PYTHON = (
    "py_executable", "pip", "uv", "conda", "container", "image_uri", "nsight", "rocprof_sys",
)  # fmt: skip
"""Fields of a runtime environment that choose the Python of a worker themselves."""
_PATIENCE_S = 20.0
"""The longest wait of a client for its fork, in seconds. Ray waits 60 s for a worker process."""
_RETRY_S = 0.01
_REQUEST_S = 2.0
"""The longest wait of the server for each part of a client's request, in seconds."""
_MAX_BYTES = 1_000_000
"""The longest request, in bytes."""
_IDLE_S = 20.0
"""How long a server without forks remains, in seconds."""
_LIBRARIES = (
    "raydl.core.torch_import",
    "ray._private.node",
    "ray.actor",
    "raydl.collective.ray_collective",
    "raydl.parameter_server.server",
    "raydl.worker.evaluator",
    "raydl.worker.loop",
)
"""What Ray's worker program and the actors import. None of it starts a thread that a fork would
need, or uses a GPU. No module with an actor's class: Ray draws an id for it, see
``_draw_the_same_ids``."""
_SERIALIZERS = (
    "ray._common.pydantic_compat",
    "ray._private.arrow_serialization",
    "pyarrow.json",
    "pydantic.v1",
)
"""What Ray imports once a process serializes an object; another version may have other names."""
_OF_ONE_WORKER = ("--worker-id=", "--worker-launch-time-ms=", "--runtime-env-hash=")
"""Arguments of Ray's worker program that differ between the workers of a raylet."""
_UCRED = struct.Struct("3i")
_SO_PEERPIDFD = 77
"""Of Linux 6.5: a descriptor of the process that connected, whose id may belong to another since.
Python's ``socket`` does not name it."""
_LENGTH = struct.Struct("!Q")
_HERE, _REFUSED, _GO = b"h", b"r", b"g"

_SUBREAPER = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"
"""With this setting a raylet kills all its children that it has not started itself."""

_BOOTSTRAP = """\
import os, sys
sys.path[0] = os.path.dirname(sys.argv[1])
try:
    from raydl.ray_backend.fork_server import main
except ImportError:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
main(sys.argv[1:], "{package}")"""
"""The client. Where Python finds no raydl before Ray adds the driver's folders to the path, it runs
Ray's program itself."""
# The runtime environment names no interpreter: the one of the node's raylet may have another path.
_INTERPRETER = (
    r"""$(python=$(tr '\0' '\n' < /proc/$PPID/cmdline """
    r"""| sed -n 's/^--python_worker_command=\([^ ]*\) .*/\1/p'); """
    r"""[ -x "$python" ] || python={python}; """
    r"""[ -x "$python" ] && echo "$python" || command -v python3)"""
)


def runtime_env() -> dict[str, Any] | None:
    """Return the runtime environment of an actor whose process is a fork; None: it cannot be one.

    Ray merges it with that of this process, which may choose the Python of the workers itself.
    """
    import ray

    if not ray_version.is_tested():
        return None
    of_this = ray.get_runtime_context().runtime_env
    names = {name.lstrip("_") for name, value in of_this.items() if value}
    command = None if names.intersection(_OWN_PYTHON) else client_command()
    return {"py_executable": command} if command else None


def client_command() -> str | None:
    """Return the command of a client, which a shell runs with the words of the worker program.

    None: on this system, or in folders with such names, no process can be a fork.
    """
    if sys.platform != "linux":
        return None
    if not all(re.fullmatch(r"[\w./+@:~-]+", path) for path in (sys.executable, _package())):
        return None  # a shell would read more into it
    client = _BOOTSTRAP.replace("{package}", _package())
    interpreter = _INTERPRETER.replace("{python}", sys.executable)
    return f"{interpreter} -c '{client}'"


def _package() -> str:
    """Return the folder of the package that this process has imported."""
    return str(Path(__file__).parents[1])


def warm_up() -> None:
    """Start the fork server of this node, and do not wait for it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    environment = runtime_env()
    if environment is None:
        return
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    task = ray.remote(num_cpus=0, max_retries=0)(lambda: None)
    task.options(runtime_env=environment, scheduling_strategy=here).remote()


def main(words: Sequence[str], package: str) -> None:
    """Run Ray's worker program in a fork of the node's server, or else in this process.

    Args:
        words: the path of the program, and its arguments.
        package: the folder of the driver's raydl. If this node has it, a worker imports it, too.
    """
    is_other = os.path.isdir(package) and package != _package()
    # Not Ray's own program, for instance if options of Python come first: a fork is too late for
    # them.
    is_unknown = words[0] != _worker_program()
    is_killed = os.environ.get(_SUBREAPER, "").lower() in ("1", "true")
    if not (is_other or is_unknown or is_killed):
        try:
            fork = _fork_or_none(words)
        except (OSError, _RefusedError) as error:
            problem = str(error) or type(error).__name__
            print(f"raydl: no fork of the fork server: {problem}", file=sys.stderr, flush=True)
        else:
            if fork is not None:
                _become(fork)
            return
    os.execv(sys.executable, [sys.executable, *words])


def _worker_program() -> str:
    """Return the path of Ray's worker program for this Python."""
    return os.path.join(folder_of_ray(), "_private", "workers", "default_worker.py")


class _RefusedError(Exception):
    """The server cannot fork, for the reason in the text."""


def _fork_or_none(words: Sequence[str]) -> _Fork | None:
    """Request a fork, and start the server if there is none.

    Returns:
        What the fork takes over, in the fork; None in the client, which has nothing left to do.

    Raises:
        OSError: no server answers in time, or it belongs to another user.
        _RefusedError: the server cannot fork, or has ended.
    """
    files = [number for number in (0, 1, 2) if os.path.exists(f"/proc/self/fd/{number}")]
    raylet = os.getppid()
    address = _address(raylet)
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        if os.getppid() != raylet:
            return None  # the raylet has ended, and needs no worker process
        listener = _bind(address)
        if listener is not None:
            if _is_grandchild(listener):
                return _serve(listener, raylet, words)
            listener.close()
        try:
            _request_fork(address, words, files, deadline)
            return None
        except (ConnectionError, EOFError) as error:
            # A server that ends while clients wait for it would do so again for each of them.
            if listener is not None or not isinstance(error, ConnectionRefusedError):
                raise _RefusedError("it ended") from error
        except BlockingIOError:
            pass  # too many clients are waiting to connect
        time.sleep(_RETRY_S)  # another client's server does not listen yet
    raise TimeoutError(f"it did not answer within {_PATIENCE_S:g} s")


def _serve(listener: socket.socket, raylet: int, words: Sequence[str]) -> _Fork:
    """Be the server; return in each fork, and only there.

    Whatever happens, no server goes on as a client, which would run the worker program as well.
    """
    try:
        return _Server(listener, raylet, words).serve()
    except BaseException:  # above all, the raylet has ended
        os._exit(1)


def _is_grandchild(listener: socket.socket) -> bool:
    """Fork twice, so that no process has to wait for the second one; return whether this is it.

    It listens then: for the clients, the process that has begun to listen is the other side.

    Raises:
        OSError: this machine permits no further process.
    """
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        if status:
            raise OSError("no further process can be started")
        return False
    try:
        reader, writer = os.pipe()
        has_child = bool(os.fork())
        if not has_child:
            listener.listen(1024)
    except BaseException:  # neither process may go on as the client
        os._exit(1)
    os.close(writer)
    if has_child:
        os.read(reader, 1)  # returns once the child listens, or has ended
        os._exit(0)
    os.close(reader)
    return True


def _address(raylet: int) -> bytes:
    """Return the abstract address of the server for this environment; it needs no file."""
    with open(f"/proc/{raylet}/stat") as file:
        started = file.read().rpartition(")")[2].split()[19]
    identity = json.dumps([raylet, started, sys.executable, sorted(os.environ.items())])
    return b"\0raydl-fork-server-" + hashlib.sha256(identity.encode()).hexdigest().encode()


def _bind(address: bytes) -> socket.socket | None:
    """Return a socket with an address, or None if another one has it."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        return None
    return listener


def _request_fork(
    address: bytes, words: Sequence[str], files: Sequence[int], deadline: float
) -> None:
    """Have the server fork, and let the fork go on.

    The fork waits for the client's word: if the client has given up, it must not start a second
    worker process with the same id.

    Raises:
        OSError: no server answers in time.
        EOFError: the server ended.
        _RefusedError: the server cannot fork.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(max(_RETRY_S, deadline - time.monotonic()))
        connection.connect(address)
        _check_peer(connection)
        body = json.dumps([list(words), os.getcwd(), files]).encode()
        socket.send_fds(connection, [_LENGTH.pack(len(body))], files)
        connection.sendall(body)
        if _receive(connection, len(_HERE)) == _REFUSED:
            raise _RefusedError(connection.recv(1000).decode())
        connection.sendall(_GO)


def _check_peer(connection: socket.socket) -> None:
    """Check that the other side is a process of this user, and not of another container.

    Raises:
        PermissionError: if it is not.
        ConnectionResetError: if it has ended.
        OSError: if this process may not see its namespaces.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(credentials)
    if not pid or uid != os.getuid():
        raise PermissionError("the other side is none of this user's processes here")
    try:
        process = _process_of(connection, pid)
        try:
            is_here = _surroundings(str(pid)) == _surroundings("self")
            is_alive = not _ready([process], 0.0)  # then no other process has had its id since
        finally:
            os.close(process)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ConnectionResetError("the other side has ended") from error
    if not (is_here and is_alive):
        raise PermissionError("the other side is a process of another container, or has ended")


def _ready(descriptors: Iterable[int], bound_s: float | None) -> set[int]:
    """Wait until some of the descriptors can be read; return these.

    Args:
        descriptors: the descriptor of a process can be read once the process has ended.
        bound_s: the longest wait, in seconds; None: no bound.
    """
    poll = select.poll()  # select() fails from descriptor 1,024 on
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if bound_s is None else 1000 * bound_s)}


def _process_of(connection: socket.socket, pid: int) -> int:
    """Return a descriptor of the process that connected, or listened, on the other side."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # an older kernel
        return os.pidfd_open(pid)


def _surroundings(process: str) -> tuple[dict[str, str], tuple[int, int]]:
    """Return the namespaces of a process by their kind, and its root folder."""
    folder = f"/proc/{process}"
    kinds = [kind for kind in os.listdir(f"{folder}/ns") if not kind.endswith("_for_children")]
    root = os.stat(f"{folder}/root")
    namespaces = {kind: os.readlink(f"{folder}/ns/{kind}") for kind in kinds}
    return namespaces, (root.st_dev, root.st_ino)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


class _Fork:
    """The descriptors and values that a fork takes over from its client."""

    words: list[str]
    folder: str
    numbers: list[int]
    """The descriptors that its files are to have."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_REQUEST_S)
        _check_peer(connection)
        self.connection = connection
        self.files: list[int] = []
        head, self.files, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
        try:
            for file in self.files:
                os.set_inheritable(file, False)
            (size,) = _LENGTH.unpack(head)
            self.words, self.folder, self.numbers = json.loads(
                _receive(connection, min(size, _MAX_BYTES))
            )
            if len(self.files) != len(self.numbers):
                raise ValueError("some files were not received")
        except BaseException:
            self.close()
            raise

    def refuse(self, problem: str) -> None:
        """Tell the client that it gets no fork."""
        with contextlib.suppress(OSError):  # it has given up
            self.connection.sendall(_REFUSED + problem.encode()[:1000])
        self.close()

    def close(self) -> None:
        """Close the server's side."""
        self.connection.close()
        for file in self.files:
            os.close(file)


class _Server:
    """Forks for each client, until its raylet ends or it has had no fork for a while.

    Args:
        listener: listens for clients.
        raylet: the process id of the node's raylet.
        words: the worker program and its arguments, from that raylet.
    """

    def __init__(self, listener: socket.socket, raylet: int, words: Sequence[str]) -> None:
        self._listener = listener
        self._command = _of_all_workers(words)
        self._title = f"raydl fork server of raylet {raylet}"
        self._raylet_id = raylet
        self._raylet = os.pidfd_open(raylet)
        self._forks: dict[int, int] = {}
        """Process ids by the descriptor that tells their end."""
        self._problem = ""
        """Why this server cannot fork."""

    def serve(self) -> _Fork:
        """Serve; it returns in each fork, and only there."""
        os.setpgid(0, 0)  # it receives no signal that a terminal sends to the raylet's group
        _silence()
        self._close_others()
        if self._raylet in self._ready(0.0):  # the imports would be in vain
            os._exit(0)
        self._prepare()
        while True:
            ready = self._ready(None if self._forks else _IDLE_S)
            if not ready or self._raylet in ready:
                os._exit(0)
            for ended in self._forks.keys() & ready:
                os.waitpid(self._forks.pop(ended), 0)
                os.close(ended)
            if self._listener.fileno() in ready:
                fork = self._accept()
                if fork is not None:
                    return fork

    def _ready(self, bound_s: float | None) -> set[int]:
        """Wait for a client, or for the end of the raylet or of a fork; return their descriptors.

        Args:
            bound_s: the longest wait, in seconds; None while there is a fork, since its end or that
                of the raylet ends the wait.
        """
        return _ready((self._listener.fileno(), self._raylet, *self._forks), bound_s)

    def _close_others(self) -> None:
        """Close what the raylet has opened for the first client: a pipe shows that one's end."""
        kept = (0, 1, 2, self._listener.fileno(), self._raylet)
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in kept:
                with contextlib.suppress(OSError):  # that of the listing
                    os.close(int(name))

    def _prepare(self) -> None:
        """Import the libraries, or note why this server cannot fork.

        It then refuses its clients: if it ended, each of them would start another one.
        """
        try:
            _import_libraries()
            _set_title(self._title)
            if _draw_the_same_ids():
                self._problem = "its forks would draw the same ids from Ray's generator"
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error}"
        if os.getppid() == self._raylet_id:
            self._problem = "the raylet would end it, as it ends all children that it does not know"

    def _accept(self) -> _Fork | None:
        """Fork for a client; return what the fork takes over, in the fork, and else None."""
        connection = self._listener.accept()[0]
        try:
            fork = _Fork(connection)
        except Exception:  # the client has given up, or is none
            connection.close()
            return None
        problem = self._problem
        if _of_all_workers(fork.words) != self._command:
            problem = "it forks workers of its own raylet only, with Ray's own program"
        try:
            pid = -1 if problem else os.fork()
        except OSError as error:  # too many processes, or too little memory
            pid, problem = -1, str(error)
        if problem:
            fork.refuse(problem)
            return None
        if pid:
            fork.close()
            self._forks[os.pidfd_open(pid)] = pid
            return None
        for descriptor in (self._listener.fileno(), self._raylet, *self._forks):
            os.close(descriptor)
        self._listener.detach()
        return fork


def _of_all_workers(words: Sequence[str]) -> list[str]:
    """Return the words of a worker's command that all workers of its raylet have."""
    return [word for word in words if not word.startswith(_OF_ONE_WORKER)]


def _silence() -> None:
    """Write nothing: the output of the first client is that of its worker."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(nothing, file)
    os.close(nothing)


def _import_libraries() -> None:
    import gc

    # Libraries read it when they are imported. Ray sets it in a worker: too late for a fork.
    has_default = "OMP_NUM_THREADS" not in os.environ
    if has_default:
        os.environ["OMP_NUM_THREADS"] = "1"
    for name in _LIBRARIES:
        importlib.import_module(name)
    for name in _SERIALIZERS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if has_default:
        del os.environ["OMP_NUM_THREADS"]
    gc.freeze()  # a collection would write to the pages that all forks share


def _draw_the_same_ids() -> bool:
    """Return whether two forks draw the same ids from Ray's generator of random numbers.

    They do once this process has drawn one. Then tasks of two workers have the same id, which ends
    the process that receives both. An import of another version of Ray might draw one.
    """
    from ray._raylet import WorkerID

    ids = []
    for _ in range(2):
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.write(writer, WorkerID.from_random().binary())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        os.close(writer)
        ids.append(os.read(reader, 64))
        os.close(reader)
    if not all(ids):
        raise RuntimeError("a trial fork drew no id")
    return ids[0] == ids[1]


def _set_title(title: str) -> None:
    """Set what ``ps`` shows of this process."""
    from ray import _raylet

    _raylet.setproctitle(title)  # type: ignore[attr-defined]


def _become(fork: _Fork) -> None:
    """Go on as the worker process that a client was asked to be."""
    import runpy

    import numpy as np

    os.setpgid(0, 0)  # Ray may end a worker process with its group
    try:
        fork.connection.sendall(_HERE)
        _receive(fork.connection, len(_GO))
    except (OSError, EOFError):
        os._exit(1)  # the client has given up
    for number, file in zip(fork.numbers, fork.files, strict=True):
        os.dup2(file, number)
    fork.close()
    os.chdir(fork.folder)
    np.random.seed()  # as in a process of its own; Python's generator is seeded by each fork
    sys.argv = fork.words
    runpy.run_path(fork.words[0], run_name="__main__")
