"""TLS between workers on different hosts, for gloo, which torch's wheels have without it.

gloo listens on the loopback alone. A process beside each worker carries its connections:

    worker 1                                              worker 0
    gloo 127.0.0.2 -> 127.0.0.1 tunnel == TLS == tunnel -> 127.0.0.2 gloo

Each side asks the other for its certificate; the side that connects, for one of the address.
Workers of one host speak over the loopback without a tunnel.

It is a process of its own since its threads would wait behind the training for Python's lock. A
pair of workers has two connections of TLS, one in each direction, so that one thread has each:
OpenSSL permits no two. The tunnel ends with the worker, whose end of a pipe it reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from raydl.config.tls import TlsFiles

GLOO_HOST = "127.0.0.2"
"""Where gloo listens. Of two members the one with the lower address listens: a peer at
``_BELOW`` is connected to, one at ``_ABOVE`` is waited for."""
_BELOW, _ABOVE = "127.0.0.1", "127.0.0.3"
_GLOO_ADDRESS = re.compile(rb"\x02\x00(..)" + re.escape(socket.inet_aton(GLOO_HOST)), re.DOTALL)
"""An address of gloo as it writes it into the store: family, port, IPv4 address."""
_START_S = 20.0
TOLD_S = 0.2
"""How long after a failure its reason may come."""
_MEET_S = 20.0
"""The longest wait for the other half of a pair, in seconds."""
_CHUNK_BYTES = 1 << 18
_TOKEN_BYTES = 16
_TO, _FROM = b">", b"<"
_ROOT = str(Path(__file__).resolve().parents[2])
_START = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); "
    f"from raydl.collective.tls_tunnel import main; main()"
)


# the worker's side


class TlsTunnel:
    """The tunnel of one worker, in one generation.

    Args:
        files: the certificates of this node.
        host: the address that other hosts reach this worker by.

    Raises:
        RuntimeError: it does not start.
    """

    def __init__(self, files: TlsFiles, host: str) -> None:
        self.host = host
        self._problem = ""
        self._has_problem = threading.Event()
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._listen, daemon=True).start()
        self.port = int(self._ask({"files": asdict(files), "host": host})["port"])
        """Where the tunnels of others connect to."""

    def open_ways(self, peers: Mapping[int, tuple[str, int]]) -> dict[int, int]:
        """Return a port of the loopback for each peer, that leads to its tunnel.

        Args:
            peers: address and port of their tunnels, by rank.
        """
        ports = self._ask({"peers": {str(rank): place for rank, place in peers.items()}})["ways"]
        return {int(rank): port for rank, port in ports.items()}

    def forward_to(self, port: int) -> None:
        """Lead connections of others to a port of gloo's."""
        self._ask({"gloo": port})

    def problem(self, timeout_s: float = 0.0) -> str:
        """Return why a connection failed, which may be told a little later; empty: none did."""
        self._has_problem.wait(timeout_s)
        return self._problem

    def close(self) -> None:
        """Close all connections."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return self._answers.get(timeout=_START_S)
        except (OSError, ValueError, queue.Empty) as error:
            problem = self.problem(TOLD_S) or "it did not answer"
            raise RuntimeError(f"the tunnel for TLS failed: {problem}") from error

    def _listen(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout or ():
                told = json.loads(line)
                if "problem" in told:
                    self._problem = self._problem or told["problem"]
                    self._has_problem.set()
                else:
                    self._answers.put(told)


def hidden_port(value: bytes) -> int:
    """Return the port in what gloo writes of itself into the store.

    Raises:
        RuntimeError: it has no address there, or several.
    """
    found = _GLOO_ADDRESS.findall(value)
    if len(found) != 1:
        raise RuntimeError(
            f"torch {version('torch')} writes gloo's address in a way that raydl does not know, so "
            f"that TLS can not be used with it; take the torch of raydl's constraints.txt, or a "
            f"method by messages"
        )
    return int.from_bytes(found[0], "big")


def shown_at(value: bytes, host: str, port: int) -> bytes:
    """Return gloo's record of its own address, with another address."""
    address = b"\x02\x00" + port.to_bytes(2, "big") + socket.inet_aton(host)
    return _GLOO_ADDRESS.sub(lambda _: address, value)


def seen_by(value: bytes, *, rank: int, peer: int, ways: Mapping[int, int]) -> bytes:
    """Return a peer's record of itself as a rank shall see it.

    Args:
        value: what the peer wrote.
        rank: of the reader.
        peer: the rank of the writer.
        ways: ports that lead to peers of lower rank on other hosts; and 0 for those of higher
            rank, which come by themselves. Peers of this host are not among them.
    """
    if peer not in ways:
        return value
    if peer < rank:
        return shown_at(value, _BELOW, ways[peer])
    return shown_at(value, _ABOVE, hidden_port(value))


# the tunnel's side


class _Far:
    """The tunnel: what it knows, and its threads."""

    def __init__(self, files: TlsFiles, host: str) -> None:
        self._client = files.client()
        self._server = files.server()
        self._gloo_port = 0
        self._halves: dict[bytes, dict[bytes, ssl.SSLSocket]] = {}
        self._changed = threading.Condition()
        self._listener = _listener(host)
        self.port = self._listener.getsockname()[1]
        _in_thread(self._accept, self._listener, self._admit)

    def forward_to(self, port: int) -> None:
        with self._changed:
            self._gloo_port = port
            self._changed.notify_all()

    def open_way(self, host: str, port: int) -> int:
        """Return a new port of the loopback that leads to another tunnel."""
        listener = _listener(_BELOW)

        def lead(near: socket.socket) -> None:
            token = secrets.token_bytes(_TOKEN_BYTES)
            try:
                there, back = (self._connect(host, port, token + way) for way in (_TO, _FROM))
            except OSError as error:
                _tell_problem(f"{host}:{port}: {error}")
                return near.close()
            _carry(near, there, back)

        _in_thread(self._accept, listener, lead)
        port_here: int = listener.getsockname()[1]
        return port_here

    def _connect(self, host: str, port: int, greeting: bytes) -> ssl.SSLSocket:
        plain = socket.create_connection((host, port), timeout=_MEET_S)
        far = self._client.wrap_socket(plain, server_hostname=host)
        far.sendall(greeting)
        far.settimeout(None)
        return far

    def _accept(self, listener: socket.socket, take: Any) -> None:
        while True:
            with contextlib.suppress(OSError):
                _in_thread(take, listener.accept()[0])

    def _admit(self, plain: socket.socket) -> None:
        """Take one half of a pair; the second one leads both to gloo."""
        plain.settimeout(_MEET_S)
        try:
            far = self._server.wrap_socket(plain, server_side=True)
            greeting = b""
            while len(greeting) < _TOKEN_BYTES + 1:
                if not (more := far.recv(_TOKEN_BYTES + 1 - len(greeting))):
                    return far.close()
                greeting += more
            far.settimeout(None)
        except OSError:  # a stranger: nothing to tell, and nobody to tell it to
            return plain.close()
        token, way = greeting[:-1], greeting[-1:]
        with self._changed:
            halves = self._halves.setdefault(token, {})
            halves[way] = far
            if len(halves) < 2 or not self._changed.wait_for(lambda: self._gloo_port, _MEET_S):
                return None
            del self._halves[token]
        try:
            near = socket.create_connection((GLOO_HOST, self._gloo_port), timeout=_MEET_S)
        except OSError as error:
            _tell_problem(f"gloo did not answer: {error}")
            for half in halves.values():
                half.close()
            return None
        near.settimeout(None)
        return _carry(near, halves[_FROM], halves[_TO])


def _carry(near: socket.socket, there: ssl.SSLSocket, back: ssl.SSLSocket) -> None:
    """Carry bytes from gloo there, and what comes back to gloo, until either side ends."""
    for each in (near, there, back):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _in_thread(_pump, near, there, (near, there, back))
    _in_thread(_pump, back, near, (near, there, back))


def _pump(source: socket.socket, target: socket.socket, all_of_them: Any) -> None:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with contextlib.suppress(OSError):
        while count := source.recv_into(buffer):
            target.sendall(buffer[:count])
    for each in all_of_them:  # the other thread may be in the middle of it: end the TCP alone
        with contextlib.suppress(OSError):
            socket.socket.shutdown(each, socket.SHUT_RDWR)


def _listener(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=512)


def _in_thread(act: Any, *arguments: Any) -> None:
    threading.Thread(target=act, args=arguments, daemon=True).start()


def _tell(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _tell_problem(problem: str) -> None:
    _tell({"problem": problem})


def main() -> None:
    """Serve as the tunnel of the process at the other end of standard input."""
    try:
        start = json.loads(sys.stdin.readline())
        far = _Far(TlsFiles(**start["files"]), start["host"])
    except (OSError, ValueError) as error:
        return _tell_problem(str(error))
    _tell({"port": far.port})
    for line in sys.stdin:
        asked = json.loads(line)
        if "gloo" in asked:
            far.forward_to(asked["gloo"])
            _tell({})
        else:
            _tell({"ways": {rank: far.open_way(*place) for rank, place in asked["peers"].items()}})
    os._exit(0)
