"""A server of the S3 protocol on this machine, and a client of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# The functions import server and client, which takes a second, only for the tests that use them.


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Yield the URL of an empty server in this process."""
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextlib.contextmanager
def s3_client(url: str) -> Iterator[Any]:
    """Yield a client that any server of this kind accepts."""
    import boto3

    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
    try:
        yield client
    finally:
        client.close()


def use_test_credentials(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Set the server's keys for clients of this test, instead of an account of the user."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(folder / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
