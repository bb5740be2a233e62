"""TLS for gloo between workers on different hosts; torch's wheels build gloo without it.

gloo listens on the loopback only. A process beside each worker forwards its connections:

    worker 1                                              worker 0
    gloo 127.0.0.2 -> 127.0.0.1 tunnel == TLS == tunnel -> 127.0.0.2 gloo

Each side verifies the other's certificate; the connecting side also verifies that it matches the
address. Workers of one host connect over the loopback without a tunnel.

The tunnel is a separate process, since its threads would wait for Python's interpreter lock behind
the training. A pair of workers has two TLS connections, one per direction, with one thread each:
OpenSSL does not permit two threads on one connection. The tunnel reads a pipe from its worker, and
ends when that closes.
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
"""The address that gloo listens on. Of two members, the one with the lower address listens: gloo
connects to a peer at ``_BELOW``, and waits for a peer at ``_ABOVE``."""
_BELOW, _ABOVE = "127.0.0.1", "127.0.0.3"
_GLOO_ADDRESS = re.compile(rb"\x02\x00(..)" + re.escape(socket.inet_aton(GLOO_HOST)), re.DOTALL)
"""An address as gloo writes it to the store: family, port, IPv4 address."""
_START_S = 20.0
REASON_WAIT_S = 0.2
"""The longest wait for the tunnel to report why a connection failed, in seconds."""
_PAIR_WAIT_S = 20.0
"""The longest wait for the second connection of a pair, in seconds."""
_CHUNK_BYTES = 1 << 18
_TOKEN_BYTES = 16
_TO_GLOO, _FROM_GLOO = b">", b"<"
"""The direction of a connection, seen from the accepting side."""
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
        host: the address at which other hosts reach this worker.

    Raises:
        RuntimeError: if the process does not start.
    """

    def __init__(self, files: TlsFiles, host: str) -> None:
        self._problem = ""
        self._has_problem = threading.Event()
        self._responses: queue.Queue[dict[str, Any]] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._read_responses, daemon=True).start()
        self.port = int(self._request({"files": asdict(files), "host": host})["port"])
        """The port that other tunnels connect to."""

    def open_ports(self, peers: Mapping[int, tuple[str, int]]) -> dict[int, int]:
        """Open a loopback port for each peer that leads to its tunnel; return the ports by rank.

        Args:
            peers: host and port of the peers' tunnels, by rank.
        """
        addresses = {str(rank): address for rank, address in peers.items()}
        ports = self._request({"peers": addresses})["ports"]
        return {int(rank): port for rank, port in ports.items()}

    def forward_to(self, port: int) -> None:
        """Forward incoming connections to gloo's port."""
        self._request({"gloo": port})

    def problem(self, timeout_s: float = 0.0) -> str:
        """Return why a connection failed, or an empty text if none did.

        Args:
            timeout_s: the longest wait for a reason, which may be reported late, in seconds.
        """
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

    def _request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return self._responses.get(timeout=_START_S)
        except (OSError, ValueError, queue.Empty) as error:
            problem = self.problem(REASON_WAIT_S) or "it did not answer"
            raise RuntimeError(f"the TLS tunnel failed: {problem}") from error

    def _read_responses(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout or ():
                response = json.loads(line)
                if "problem" in response:
                    self._problem = self._problem or response["problem"]
                    self._has_problem.set()
                else:
                    self._responses.put(response)


def gloo_port(value: bytes) -> int:
    """Return the port in gloo's address, as gloo writes it to the store.

    Raises:
        RuntimeError: if there is no address, or several.
    """
    ports = _GLOO_ADDRESS.findall(value)
    if len(ports) != 1:
        raise RuntimeError(
            f"torch {version('torch')} writes gloo's address in an unknown format, so TLS cannot "
            f"be used with it; install the torch of raydl's constraints.txt, or choose a method "
            f"with messages"
        )
    return int.from_bytes(ports[0], "big")


def rewritten_address(value: bytes, *, rank: int, peer: int, ports: Mapping[int, int]) -> bytes:
    """Return a peer's address record with the address at which this rank finds the peer.

    Args:
        value: the record that the peer wrote.
        rank: of the reader.
        peer: rank of the writer.
        ports: by rank, for peers on other hosts only: the loopback port that leads to a peer of
            lower rank; 0 for a peer of higher rank, which connects to this one.
    """
    if peer not in ports:
        return value
    host, port = (_BELOW, ports[peer]) if peer < rank else (_ABOVE, gloo_port(value))
    address = b"\x02\x00" + port.to_bytes(2, "big") + socket.inet_aton(host)
    return _GLOO_ADDRESS.sub(lambda _: address, value)


# the tunnel's side


class _TunnelServer:
    """The state of the tunnel process, and its threads."""

    def __init__(self, files: TlsFiles, host: str) -> None:
        self._client = files.client()
        self._server = files.server()
        self._gloo_port = 0
        self._pairs: dict[bytes, dict[bytes, ssl.SSLSocket]] = {}
        self._changed = threading.Condition()
        self._listener = _listener(host)
        self.port = self._listener.getsockname()[1]
        _in_thread(self._accept, self._listener, self._accept_peer)

    def forward_to(self, port: int) -> None:
        with self._changed:
            self._gloo_port = port
            self._changed.notify_all()

    def open_port(self, host: str, port: int) -> int:
        """Return a new loopback port that leads to another tunnel."""
        listener = _listener(_BELOW)

        def connect(gloo: socket.socket) -> None:
            token = secrets.token_bytes(_TOKEN_BYTES)
            try:
                to_peer = self._connect(host, port, token + _TO_GLOO)
                from_peer = self._connect(host, port, token + _FROM_GLOO)
            except OSError as error:
                _send({"problem": f"{host}:{port}: {error}"})
                return gloo.close()
            _relay(gloo, to_peer, from_peer)

        _in_thread(self._accept, listener, connect)
        local_port: int = listener.getsockname()[1]
        return local_port

    def _connect(self, host: str, port: int, greeting: bytes) -> ssl.SSLSocket:
        plain = socket.create_connection((host, port), timeout=_PAIR_WAIT_S)
        encrypted = self._client.wrap_socket(plain, server_hostname=host)
        encrypted.sendall(greeting)
        encrypted.settimeout(None)
        return encrypted

    def _accept(self, listener: socket.socket, handle: Any) -> None:
        while True:
            with contextlib.suppress(OSError):
                _in_thread(handle, listener.accept()[0])

    def _accept_peer(self, plain: socket.socket) -> None:
        """Accept one connection of a pair; the second one connects both to gloo."""
        plain.settimeout(_PAIR_WAIT_S)
        try:
            encrypted = self._server.wrap_socket(plain, server_side=True)
            greeting = b""
            while len(greeting) < _TOKEN_BYTES + 1:
                if not (more := encrypted.recv(_TOKEN_BYTES + 1 - len(greeting))):
                    return encrypted.close()
                greeting += more
            encrypted.settimeout(None)
        except OSError:  # not a member: there is nothing to report
            return plain.close()
        token, direction = greeting[:-1], greeting[-1:]
        with self._changed:
            pair = self._pairs.setdefault(token, {})
            pair[direction] = encrypted
            if len(pair) < 2 or not self._changed.wait_for(lambda: self._gloo_port, _PAIR_WAIT_S):
                return None
            del self._pairs[token]
        try:
            gloo = socket.create_connection((GLOO_HOST, self._gloo_port), timeout=_PAIR_WAIT_S)
        except OSError as error:
            _send({"problem": f"gloo did not answer: {error}"})
            for connection in pair.values():
                connection.close()
            return None
        gloo.settimeout(None)
        return _relay(gloo, pair[_FROM_GLOO], pair[_TO_GLOO])


def _relay(gloo: socket.socket, to_peer: ssl.SSLSocket, from_peer: ssl.SSLSocket) -> None:
    """Copy bytes between gloo and a peer in both directions, until either side closes."""
    sockets = (gloo, to_peer, from_peer)
    for each in sockets:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _in_thread(_copy, gloo, to_peer, sockets)
    _in_thread(_copy, from_peer, gloo, sockets)


def _copy(source: socket.socket, target: socket.socket, sockets: Any) -> None:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with contextlib.suppress(OSError):
        while count := source.recv_into(buffer):
            target.sendall(buffer[:count])
    for each in sockets:  # the other thread may be using them: shut down TCP only, not TLS
        with contextlib.suppress(OSError):
            socket.socket.shutdown(each, socket.SHUT_RDWR)


def _listener(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=512)


def _in_thread(act: Any, *arguments: Any) -> None:
    threading.Thread(target=act, args=arguments, daemon=True).start()


def _send(response: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(response) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve as the tunnel of the process at the other end of standard input."""
    try:
        start = json.loads(sys.stdin.readline())
        server = _TunnelServer(TlsFiles(**start["files"]), start["host"])
    except (OSError, ValueError) as error:
        return _send({"problem": str(error)})
    _send({"port": server.port})
    for line in sys.stdin:
        request = json.loads(line)
        if "gloo" in request:
            server.forward_to(request["gloo"])
            _send({})
        else:
            peers = request["peers"].items()
            _send({"ports": {rank: server.open_port(*address) for rank, address in peers}})
    os._exit(0)
