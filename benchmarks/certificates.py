"""Makes a certificate authority and the certificate of a node, for tests and benchmarks.

files = make_certificates(folder, ["10.77.0.1", "10.77.0.2"])
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from raydl.config.tls import TlsFiles


def make_certificates(folder: Path, addresses: Sequence[str], *, days: float = 2.0) -> TlsFiles:
    """Write the certificate of a new authority, and one certificate with its key for all nodes.

    Args:
        folder: folder of the files; it is created.
        addresses: IP addresses of the nodes.
        days: days until the nodes' certificate expires; below 0, it has expired.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority, node = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
    signed = {
        "ca": _signed("authority", authority, authority, is_authority=True, days=2.0, names=[]),
        "cert": _signed("node", node, authority, is_authority=False, days=days, names=names),
    }
    for name, certificate in signed.items():
        content = certificate.public_bytes(serialization.Encoding.PEM)
        (folder / f"{name}.pem").write_bytes(content)
    key = node.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "key.pem").write_bytes(key)
    return TlsFiles(**{name: str(folder / f"{name}.pem") for name in ("cert", "key", "ca")})


def environment_of(files: TlsFiles) -> dict[str, str]:
    """Return the environment variables with which Ray and raydl use the files."""
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": files.cert,
        "RAY_TLS_SERVER_KEY": files.key,
        "RAY_TLS_CA_CERT": files.ca,
    }


def _signed(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    authority: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool,
    days: float,
    names: Sequence[x509.GeneralName],
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name("authority"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=10))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(authority, hashes.SHA256())


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
