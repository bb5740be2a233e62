"""TLS certificates of a cluster, from the environment variables of Ray.

With ``RAY_USE_TLS=1``, Ray's connections and the connections between workers of a synchronous
method use the same three files, and each side verifies the certificate of the other.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from raydl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Paths of the PEM files of one node."""

    cert: str
    """Certificate (``RAY_TLS_SERVER_CERT``), followed by its intermediate certificates."""
    key: str
    """Private key of the certificate (``RAY_TLS_SERVER_KEY``), not encrypted."""
    ca: str
    """Certificate authority that signed the certificates of all nodes (``RAY_TLS_CA_CERT``)."""

    def client(self) -> ssl.SSLContext:
        """Return the TLS context of the connecting side. Raises OSError if a file is unusable."""
        return self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def server(self) -> ssl.SSLContext:
        """Return the TLS context of the listening side. Raises OSError if a file is unusable."""
        context = self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        context.num_tickets = 0  # no client resumes a session
        return context

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.ca)
        context.load_cert_chain(self.cert, self.key, password=_no_password)
        return context


def _no_password() -> str:
    """Refuse an encrypted key, for which OpenSSL would ask a password on the terminal."""
    raise ConfigError("RAY_TLS_SERVER_KEY", "must not be encrypted: no process asks for a password")


def tls_files(environment: Mapping[str, str]) -> TlsFiles | None:
    """Return the files that an environment names, or None if TLS is off.

    Raises:
        ConfigError: if TLS is on and a variable is not set.
    """
    if environment.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    paths = {}
    for field, name in _NAMES.items():
        paths[field] = environment.get(name, "")
        if not paths[field]:
            raise ConfigError(name, "must name a PEM file, since RAY_USE_TLS is on")
    return TlsFiles(**paths)


_NAMES = {"cert": "RAY_TLS_SERVER_CERT", "key": "RAY_TLS_SERVER_KEY", "ca": "RAY_TLS_CA_CERT"}


def check_device(device: str, environment: Mapping[str, str]) -> None:
    """Refuse all-reduces on a device with TLS.

    Args:
        device: device of the all-reduces of a synchronous method: ``cpu`` or ``cuda``.
        environment: environment of this process.

    Raises:
        ConfigError: if NCCL would send unencrypted while TLS is on.
    """
    if device == "cuda" and tls_files(environment) is not None:
        raise ConfigError(
            "exchange.resident",
            "must be false with RAY_USE_TLS=1: NCCL, which sums on the device, does not support "
            "TLS; gloo, which sums in host memory, does",
        )


def check_tls(files: TlsFiles) -> None:
    """Refuse files with which two processes of this node could not connect.

    Raises:
        ConfigError: if a file cannot be read, is not PEM, does not match another file, or has
            expired.
    """
    for field, name in _NAMES.items():
        path = getattr(files, field)
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(name, f"cannot be read: {path}: {error.strerror}") from error
        if b"-----BEGIN " not in text:
            raise ConfigError(name, f"must be a PEM file, got {path}")
    try:
        _shake_hands(files.client(), files.server())
    except ssl.SSLCertVerificationError as error:
        problem = f"{files.cert} is not accepted with {files.ca}: {error.verify_message}"
        raise ConfigError("RAY_TLS_SERVER_CERT", problem) from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"{files.key} is not the key of the certificate {files.cert}"
            raise ConfigError("RAY_TLS_SERVER_KEY", problem) from error
        problem = f"{files.cert}, {files.key} and {files.ca} cannot be used: {error.reason}"
        raise ConfigError("RAY_TLS_SERVER_CERT", problem) from error


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Complete a handshake of both sides in memory. Raises ssl.SSLError."""
    client.check_hostname = False  # there is no host in memory
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
