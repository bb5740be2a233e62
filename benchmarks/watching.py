"""Observes the steps of a training run from outside.

The run trains ``lenet`` of this module. At the start of each backward pass, the model writes a note
to a file of its process, in a folder that an environment variable names. So the measurement does
not rely on what the run reports. Times are those of ``time.monotonic()``, which all processes of a
machine share.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.programs import ROOT

MODEL = "benchmarks.watching:lenet"
"""Value of ``--model`` for a network that notes its steps."""
FOLDER = "RAYDL_BENCHMARK"
"""Environment variable with the folder of the notes."""
_NOTE = struct.Struct("dq")
_POLL_EVERY_S = 0.02
_RECENT_S = 1.0
_START_S = 120.0
_END_S = 10.0
_OBJECT_STORE_BYTES = 200 << 20
_CLUSTER = """
import ray, signal
context = ray.init(
    address="local", num_cpus={num_cpus}, object_store_memory={store_bytes},
    include_dashboard=False,
)
print("up at", context.address_info["gcs_address"], flush=True)
signal.pause()
"""
_CLUSTER_OF_NODES = """
import signal
from ray._private import utils
from ray.cluster_utils import Cluster
# The small form of Ray's agent: the full one uses some 3 s of CPU time on each node.
utils.get_dashboard_dependency_error = lambda: ImportError("no dashboard")
sizes = dict(object_store_memory={store_bytes})
cluster = Cluster(
    initialize_head=True, head_node_args=dict(num_cpus=0, include_dashboard=False, **sizes),
)
for _ in range({num_nodes}):
    print("node", cluster.add_node(num_cpus=1, **sizes).node_id)
print("up at", cluster.address, flush=True)
signal.pause()
"""
_Session = TypeVar("_Session", bound="Session")
_files: dict[tuple[int, str], int] = {}


@dataclass(frozen=True)
class Step:
    """A step of one worker."""

    began_at: float
    num_samples: int


# in the processes of the run


def lenet(image_shape: tuple[int, int, int], num_classes: int) -> Any:
    """Return a LeNet that notes when it was built, and each of its training steps."""
    from raydl import models

    return with_notes(models.find("lenet")(image_shape, num_classes))


def with_notes(model: Any) -> Any:
    """Return a new model that notes when it was built, and each of its training steps."""
    import torch  # here: the observer does not need it

    _note("built", 0)

    def note_step(_: Any, inputs: tuple[Any, ...], outputs: Any) -> None:
        if torch.is_grad_enabled():  # the driver's check of the model takes no gradient
            outputs.register_hook(lambda _: _note("steps", len(inputs[0])))

    model.register_forward_hook(note_step)
    return model


def _note(kind: str, number: int) -> None:
    """Write the time and a number, unbuffered: a killed process loses no note."""
    key = os.getpid(), kind
    if key not in _files:
        path = Path(os.environ[FOLDER]) / f"{key[0]}.{kind}"
        _files[key] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(_files[key], _NOTE.pack(time.monotonic(), number))


# in the observer


class WatchError(Exception):
    """An awaited condition did not occur; the text contains the log."""


class Session:
    """A command in its own session and its own folder; all waits are bounded.

    All processes that the command starts, including Ray's, belong to the session. They are killed,
    and the folder is deleted, at the end of the context.

    Args:
        command: the program and its arguments; ``{folder}`` is replaced by the folder.
        environment: further environment variables.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="watched-"))
        inherited = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", FOLDER)}
        own = {
            FOLDER: str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            # All temporary files are in the folder: those of killed programs are deleted, too.
            "RAY_TMPDIR": str(self.folder),
            "TMPDIR": str(self.folder),
        }
        with (self.folder / "log.txt").open("w") as log:
            self.began_at = time.monotonic()
            self.process = subprocess.Popen(
                [argument.replace("{folder}", str(self.folder)) for argument in command],
                cwd=ROOT, env={**inherited, **own, **environment},
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def __enter__(self: _Session) -> _Session:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            _end_session(self.process)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """Return the output of the command so far."""
        return (self.folder / "log.txt").read_text()

    def wait_until(self, holds: Callable[[], bool], what: str, *, within_s: float) -> None:
        """Wait until a condition holds.

        Raises:
            WatchError: if it did not hold in time, or the command ended before.
        """
        deadline = time.monotonic() + within_s
        while not holds():
            if self.process.poll() is not None:
                raise WatchError(f"the run ended before {what}:\n{self.log()}")
            if time.monotonic() > deadline:
                raise WatchError(f"timed out after {within_s:g} s before {what}:\n{self.log()}")
            time.sleep(_POLL_EVERY_S)

    def end(self, *, within_s: float) -> None:
        """Send SIGTERM to the command and wait for its end.

        Raises:
            WatchError: if it did not end in time.
        """
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise WatchError(f"the run did not end within {within_s:g} s:\n{self.log()}") from None


class Cluster(Session):
    """A Ray cluster, whose folder receives the notes of the runs on it.

    Args:
        num_cpus: CPUs of the only node, as Ray counts them.
        num_nodes: number of nodes with one CPU each, beside a head node without CPUs; 0: one node.
    """

    def __init__(self, num_cpus: int = 0, *, num_nodes: int = 0) -> None:
        program = (_CLUSTER_OF_NODES if num_nodes else _CLUSTER).format(
            num_cpus=num_cpus, num_nodes=num_nodes, store_bytes=_OBJECT_STORE_BYTES
        )
        super().__init__([sys.executable, "-c", program], {"RAY_AUTH_MODE": "disabled"})
        self.environment: dict[str, str] = {}
        """Environment variables of a run on the cluster."""

    def __enter__(self) -> Cluster:
        try:
            is_up = lambda: bool(re.search(r"^up at \S+$", self.log(), re.MULTILINE))  # noqa: E731
            self.wait_until(is_up, "Ray is up", within_s=_START_S)
        except BaseException:  # also an interrupt: no one else would end the session
            self.__exit__()
            raise
        address = self.log().rpartition("up at ")[2].split()[0]
        self.environment = {
            "RAY_ADDRESS": address,
            "RAY_AUTH_MODE": "disabled",
            FOLDER: str(self.folder),
        }
        return self


class Watched(Session):
    """A training run that notes its steps.

    Args:
        arguments: arguments of the interpreter.
        cluster: the cluster of the run; None: the run starts its own Ray.
    """

    def __init__(self, arguments: Sequence[str], cluster: Cluster | None = None) -> None:
        for path in _notes_in(cluster.folder) if cluster else []:
            path.unlink()  # a note of the previous run
        super().__init__([sys.executable, *arguments], cluster.environment if cluster else {})
        self._notes_at = cluster.folder if cluster else self.folder

    def steps(self) -> dict[int, list[Step]]:
        """Return the steps of each worker so far, by process id."""
        return {pid: [Step(*note) for note in notes] for pid, notes in self._notes("steps").items()}

    def driver(self) -> int:
        """Return the process id of the driver: ``raydl train`` runs it as a child."""
        own = self.process.pid
        commands = processes_of(own)
        for pid, command in commands.items():
            with suppress(OSError):  # it has ended
                if command == commands.get(own) and int(stat_fields(pid)[1]) == own:
                    return pid
        return own

    def wait_for_driver(self, *, within_s: float) -> int:
        """Wait until ``raydl train`` has started its driver, and return that process id."""
        has_started = lambda: self.driver() != self.process.pid  # noqa: E731
        self.wait_until(has_started, "the driver runs", within_s=within_s)
        return self.driver()

    def built(self) -> dict[int, float]:
        """Return when each process, possibly also the driver, built its model, by process id."""
        return {pid: notes[0][0] for pid, notes in self._notes("built").items()}

    def num_training(self) -> int:
        """Return the number of workers that have completed a step: they have begun a second one."""
        paths = [path for path in _notes_in(self._notes_at) if path.suffix == ".steps"]
        return sum(path.stat().st_size >= 2 * _NOTE.size for path in paths)

    def training_now(self) -> list[int]:
        """Return the processes that have begun a step within the last second."""
        since = time.time() - _RECENT_S
        paths = [path for path in _notes_in(self._notes_at) if path.suffix == ".steps"]
        return sorted(int(path.stem) for path in paths if path.stat().st_mtime > since)

    def num_steps(self) -> int:
        """Return the number of steps of all workers so far."""
        return num_steps_in(self._notes_at)

    def _notes(self, kind: str) -> dict[int, list[Any]]:
        by_pid = {}
        for path in _notes_in(self._notes_at):
            if path.suffix == f".{kind}":
                data = path.read_bytes()
                complete = data[: len(data) // _NOTE.size * _NOTE.size]
                by_pid[int(path.stem)] = list(_NOTE.iter_unpack(complete))
        return {pid: notes for pid, notes in by_pid.items() if notes}


def num_steps_in(folder: Path) -> int:
    """Return the number of steps noted in a folder so far, of all workers."""
    paths = [path for path in _notes_in(folder) if path.suffix == ".steps"]
    return sum(path.stat().st_size // _NOTE.size for path in paths)


def _notes_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix in (".steps", ".built")]


def processes_of(session: int) -> dict[int, str]:
    """Return the command lines of a session's living processes, by process id."""
    commands = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # the process has ended
            state, _, _, session_of_process = stat_fields(int(entry.name))[:4]
            if int(session_of_process) == session and state not in "ZX":
                cmdline = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                commands[int(entry.name)] = cmdline.decode(errors="replace").strip()
    return commands


def started_at(pid: int) -> float:
    """Return when a process started, on the clock of ``time.monotonic()``, to 10 ms.

    Raises:
        OSError: if the process has ended.
    """
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.monotonic() - up_s + int(stat_fields(pid)[19]) / os.sysconf("SC_CLK_TCK")


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command: state, parent, group, session, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _end_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill the remaining processes of a session.

    Raises:
        WatchError: if a process survives.
    """
    deadline = time.monotonic() + _END_S
    # The id of the session is not reused before the leader is waited for.
    while left := processes_of(leader.pid):
        if time.monotonic() > deadline:
            raise WatchError(f"processes that cannot be killed: {left}")
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_EVERY_S)
    leader.wait(_END_S)
