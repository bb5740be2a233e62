"""Looks at a training run from outside: when each of its workers began each step.

The run trains ``lenet`` of this module, which notes each step, when its backward begins, in a
file of its process, in a folder that the environment names; so nothing that a run says of itself is
trusted. Times are those of ``time.monotonic()``, which all processes of a machine share.
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
"""What ``--model`` takes for a network whose steps are noted."""
FOLDER = "RAYDL_BENCHMARK"
"""Of the environment: the folder of the notes."""
_NOTE = struct.Struct("dq")
_LOOK_EVERY_S = 0.02
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
from ray.cluster_utils import Cluster
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
    import torch  # here, since one that only looks does not need it

    from raydl import models

    model = models.find("lenet")(image_shape, num_classes)
    _note("built", 0)

    def note_step(_: Any, inputs: tuple[Any, ...], outputs: Any) -> None:
        if torch.is_grad_enabled():  # a driver that tries a model takes no gradient either
            outputs.register_hook(lambda _: _note("steps", len(inputs[0])))

    model.register_forward_hook(note_step)
    return model


def _note(kind: str, number: int) -> None:
    """Write a time and a number; nothing is lost if the process is killed a moment later."""
    key = os.getpid(), kind
    if key not in _files:
        path = Path(os.environ[FOLDER]) / f"{key[0]}.{kind}"
        _files[key] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(_files[key], _NOTE.pack(time.monotonic(), number))


# beside the run


class WatchError(Exception):
    """What was waited for did not come; the text has what the processes said."""


class Session:
    """A command in a session of its own, in a folder that goes with it; every wait is bounded.

    What the command starts, Ray's processes too, belongs to the session, and ends with it.

    Args:
        command: ``{folder}`` in its words stands for the folder.
        environment: more than it inherits.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="watched-"))
        inherited = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", FOLDER)}
        own = {
            FOLDER: str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": str(self.folder),  # Ray would leave its logs behind
        }
        with (self.folder / "said.txt").open("w") as said:
            self.began_at = time.monotonic()
            self.process = subprocess.Popen(
                [word.replace("{folder}", str(self.folder)) for word in command],
                cwd=ROOT, env={**inherited, **own, **environment},
                stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def __enter__(self: _Session) -> _Session:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            _end_session(self.process)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def said(self) -> str:
        """Return what the command has printed."""
        return (self.folder / "said.txt").read_text()

    def wait_until(self, holds: Callable[[], bool], what: str, *, within_s: float) -> None:
        """Wait for something.

        Raises:
            WatchError: it did not come in time, or the command ended before.
        """
        deadline = time.monotonic() + within_s
        while not holds():
            if self.process.poll() is not None:
                raise WatchError(f"the run ended before {what}:\n{self.said()}")
            if time.monotonic() > deadline:
                raise WatchError(f"not within {within_s:g} s: {what}:\n{self.said()}")
            time.sleep(_LOOK_EVERY_S)

    def end(self, *, within_s: float) -> None:
        """Ask the command to end, and wait for it.

        Raises:
            WatchError: it did not end.
        """
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise WatchError(f"not within {within_s:g} s: its end:\n{self.said()}") from None


class Cluster(Session):
    """A Ray cluster of one node, which takes the notes of the runs on it.

    Args:
        num_cpus: that Ray hands out, however many there are.
        num_nodes: with one CPU each, instead, beside a head that has none; 0: one node.
    """

    def __init__(self, num_cpus: int = 0, *, num_nodes: int = 0) -> None:
        program = (_CLUSTER_OF_NODES if num_nodes else _CLUSTER).format(
            num_cpus=num_cpus, num_nodes=num_nodes, store_bytes=_OBJECT_STORE_BYTES
        )
        super().__init__([sys.executable, "-c", program], {"RAY_AUTH_MODE": "disabled"})
        self.environment: dict[str, str] = {}
        """Of a run on it."""

    def __enter__(self) -> Cluster:
        try:
            is_up = lambda: bool(re.search(r"^up at \S+$", self.said(), re.MULTILINE))  # noqa: E731
            self.wait_until(is_up, "Ray is up", within_s=_START_S)
        except BaseException:  # an interrupt, too: nobody else would end it
            self.__exit__()
            raise
        address = self.said().rpartition("up at ")[2].split()[0]
        self.environment = {
            "RAY_ADDRESS": address,
            "RAY_AUTH_MODE": "disabled",
            FOLDER: str(self.folder),
        }
        return self


class Watched(Session):
    """A training run whose steps are noted.

    Args:
        words: of the command, after the interpreter.
        cluster: where it runs; None: it starts a Ray of its own.
    """

    def __init__(self, words: Sequence[str], cluster: Cluster | None = None) -> None:
        for path in _notes_in(cluster.folder) if cluster else []:
            path.unlink()  # of the run before
        super().__init__([sys.executable, *words], cluster.environment if cluster else {})
        self._notes_at = cluster.folder if cluster else self.folder

    def steps(self) -> dict[int, list[Step]]:
        """Return the steps so far of each worker, by process id."""
        return {pid: [Step(*note) for note in notes] for pid, notes in self._notes("steps").items()}

    def built(self) -> dict[int, float]:
        """Return when each process, the driver maybe too, built its model, by process id."""
        return {pid: notes[0][0] for pid, notes in self._notes("built").items()}

    def num_at_work(self) -> int:
        """Return the workers that have completed a step, for they have begun the next one."""
        paths = [path for path in _notes_in(self._notes_at) if path.suffix == ".steps"]
        return sum(path.stat().st_size >= 2 * _NOTE.size for path in paths)

    def num_steps(self) -> int:
        """Return the steps of all workers so far."""
        return num_steps_in(self._notes_at)

    def _notes(self, kind: str) -> dict[int, list[Any]]:
        found = {}
        for path in _notes_in(self._notes_at):
            if path.suffix == f".{kind}":
                data = path.read_bytes()
                whole = data[: len(data) // _NOTE.size * _NOTE.size]
                found[int(path.stem)] = list(_NOTE.iter_unpack(whole))
        return {pid: notes for pid, notes in found.items() if notes}


def num_steps_in(folder: Path) -> int:
    """Return the steps that are noted in a folder so far, of all workers."""
    paths = [path for path in _notes_in(folder) if path.suffix == ".steps"]
    return sum(path.stat().st_size // _NOTE.size for path in paths)


def _notes_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix in (".steps", ".built")]


def processes_of(session: int) -> dict[int, str]:
    """Return the living processes of a session: their command lines, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # it has ended
            state, _, _, its_session = _stat(int(entry.name))[:4]
            if int(its_session) == session and state not in "ZX":
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = words.decode(errors="replace").strip()
    return found


def started_at(pid: int) -> float:
    """Return when a living process began, by ``time.monotonic()``, to 10 ms.

    Raises:
        OSError: it has ended.
    """
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.monotonic() - up_s + int(_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """Return what the kernel says of a process: its state, parent, group, session, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _end_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill all that is left of a session.

    Raises:
        WatchError: some live on.
    """
    deadline = time.monotonic() + _END_S
    # The leader's id stays its own until it is waited for, and with it the session's.
    while left := processes_of(leader.pid):
        if time.monotonic() > deadline:
            raise WatchError(f"processes that can not be killed: {left}")
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_EVERY_S)
    leader.wait(_END_S)
