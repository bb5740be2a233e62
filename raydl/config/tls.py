"""The certificates of a cluster, by the names that Ray gives them in the environment.

One setting serves all: with ``RAY_USE_TLS=1`` Ray's own connections and those between workers of
a synchronous method use the same three files, and each side asks the other for its certificate.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from raydl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """The files of one node, in PEM."""

    cert: str
    """Its certificate (``RAY_TLS_SERVER_CERT``), with those between it and the authority."""
    key: str
    """The certificate's private key (``RAY_TLS_SERVER_KEY``), not encrypted."""
    ca: str
    """The authority that has signed the certificates of all nodes (``RAY_TLS_CA_CERT``)."""

    def client(self) -> ssl.SSLContext:
        """Return the connecting side's TLS context. Raises OSError: a file is not usable."""
        return self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def server(self) -> ssl.SSLContext:
        """Return the listening side's TLS context. Raises OSError: a file is not usable."""
        context = self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        context.num_tickets = 0  # no client comes back
        return context

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.ca)
        context.load_cert_chain(self.cert, self.key, password=_no_password)
        return context


def _no_password() -> str:
    """Keep OpenSSL from asking for one on the terminal."""
    raise ConfigError("RAY_TLS_SERVER_KEY", "must not be encrypted: no process asks for a password")


def tls_files(environment: Mapping[str, str]) -> TlsFiles | None:
    """Return the files that an environment names; None: TLS is not asked for.

    Raises:
        ConfigError: it is asked for and a file is not named.
    """
    if environment.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    named = {}
    for field, name in _NAMES.items():
        named[field] = environment.get(name, "")
        if not named[field]:
            raise ConfigError(name, "must name a file in PEM, since RAY_USE_TLS is on")
    return TlsFiles(**named)


_NAMES = {"cert": "RAY_TLS_SERVER_CERT", "key": "RAY_TLS_SERVER_KEY", "ca": "RAY_TLS_CA_CERT"}


def check_device(device: str, environment: Mapping[str, str]) -> None:
    """Refuse sums on a device with TLS.

    Args:
        device: where the workers of a synchronous method sum: ``cpu`` or ``cuda``.
        environment: of this process.

    Raises:
        ConfigError: NCCL would send in plain what the user wants encrypted.
    """
    if device == "cuda" and tls_files(environment) is not None:
        raise ConfigError(
            "exchange.resident",
            "must be false with RAY_USE_TLS=1: NCCL, which sums on the device, has no TLS; in host "
            "memory gloo sums, through TLS",
        )


def check_tls(files: TlsFiles) -> None:
    """Refuse files with which no two processes of this node could speak.

    Raises:
        ConfigError: one can not be read, is no PEM, does not fit another one, or is out of date.
    """
    for field, name in _NAMES.items():
        path = getattr(files, field)
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(name, f"can not be read: {path}: {error.strerror}") from error
        if b"-----BEGIN " not in text:
            raise ConfigError(name, f"must be a file in PEM, which {path} is not")
    try:
        _shake_hands(files.client(), files.server())
    except ssl.SSLCertVerificationError as error:
        problem = f"{files.cert} is not accepted with {files.ca}: {error.verify_message}"
        raise ConfigError("RAY_TLS_SERVER_CERT", problem) from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"{files.key} is not the key of the certificate {files.cert}"
            raise ConfigError("RAY_TLS_SERVER_KEY", problem) from error
        problem = f"{files.cert}, {files.key} and {files.ca} can not be used: {error.reason}"
        raise ConfigError("RAY_TLS_SERVER_CERT", problem) from error


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Let both sides accept each other, in memory. Raises ssl.SSLError."""
    client.check_hostname = False  # the address is that of the peer
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(3):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
