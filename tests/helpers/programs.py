"""Programs of tests as forks of a process that has imported libraries, which takes over a second.

Such a program has its own environment, folder and output like any other. Ray is imported by the
program alone, since Ray reads the environment then.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

_LIBRARIES = (
    "raydl.core.torch_import",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "pyarrow.parquet",
    "rich.live",
    "torch.utils.tensorboard",
    "tyro",
)
"""What ``raydl train`` imports, as far as it does not depend on the environment."""
_MAX_BYTES = 1_000_000


class Program:
    """A running program, with methods of ``subprocess.Popen``.

    Args:
        words: arguments of Python: ``-m`` and a module, ``-c`` and code, or a script, and what
            follows.
        output: the file for its output.
        errors: the file for its errors; unset: that for its output.
        environment: its environment; PYTHONPATH must be that of this process.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        output: IO[str],
        errors: IO[str] | None = None,
        environment: Mapping[str, str],
    ) -> None:
        reader, writer = os.pipe()
        request = json.dumps([list(words), dict(environment), os.getcwd()])
        files = [output.fileno(), (errors or output).fileno(), writer]
        socket.send_fds(_server(), [request.encode()], files)
        os.close(writer)
        self._answers = open(reader, "rb", buffering=0)  # noqa: SIM115
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None
        """Its exit status, or the negative number of the signal that ended it."""

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit status.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(int(self._answers.readline()))
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def run_program(
    words: Sequence[str], *, timeout: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as ``subprocess.run`` does.

    Args:
        words: those of a ``Program``.
        timeout: the longest wait for its end, in seconds.
        environment: its environment; unset: that of this process.

    Raises:
        subprocess.TimeoutExpired: it has not ended in time; it is killed.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        program = Program(
            words,
            output=output,
            errors=errors,
            environment=os.environ if environment is None else environment,
        )
        try:
            returncode = program.wait(timeout)
        except subprocess.TimeoutExpired:
            program.kill()
            raise
        for file in (output, errors):
            file.seek(0)  # the program has moved the position, which is also its own
        return subprocess.CompletedProcess(words, returncode, output.read(), errors.read())


@functools.cache
def _server() -> socket.socket:
    """Start the process whose forks are the programs; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip

    def end() -> None:
        ours.close()
        process.wait(timeout=10)

    atexit.register(end)
    return ours


def _serve(requests: socket.socket) -> list[str]:
    """Fork for each request, until the tests have ended; return its words, in the fork alone."""
    for name in _LIBRARIES:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the forks
    while True:
        request, files, _, _ = socket.recv_fds(requests, _MAX_BYTES, 3)
        if not request:
            sys.exit()
        if not os.fork():
            requests.close()
            return _become_program(*json.loads(request), *files)
        for file in files:
            os.close(file)


def _become_program(
    words: list[str],
    environment: dict[str, str],
    folder: str,
    output: int,
    errors: int,
    answers: int,
) -> list[str]:
    """Become the program in a further fork, and report its id and its end from this one."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        os.write(answers, f"{pid}\n".encode())
        status = os.waitpid(pid, 0)[1]
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it
            os.write(answers, f"{status}\n".encode())
        os._exit(0)
    os.close(answers)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = folder
    return words


if __name__ == "__main__":
    words = _serve(socket.socket(fileno=int(sys.argv[1])))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")
