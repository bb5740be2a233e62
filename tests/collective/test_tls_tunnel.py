"""TLS with a cluster's certificates: checks before anything starts, and encrypted traffic."""

import contextlib
import dataclasses
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from processes import descendants_of, listeners_of

from benchmarks.certificates import environment_of, make_certificates
from raydl.collective.key_store import StoreServer
from raydl.collective.process_group import TorchGroup
from raydl.collective.tls_tunnel import gloo_port
from raydl.config import ExchangeConfig, ScalingConfig, TrainConfig
from raydl.config.tls import check_device, check_tls, tls_files
from raydl.errors import ConfigError
from raydl.ray_backend import session

HOSTS = ("127.0.1.1", "127.0.1.2")
"""Two hosts from the view of the workers; both are loopback addresses of this machine."""
SOON_S = 10.0
SECRET_FLOAT = 1.2345678


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"), HOSTS)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """The files of another authority."""
    return make_certificates(tmp_path_factory.mktemp("others"), HOSTS)


# the settings


def refusal_of(files):
    with pytest.raises(ConfigError) as caught:
        check_tls(files)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_ray_use_tls_there_is_no_tls():
    assert tls_files({}) is None
    assert tls_files({"RAY_USE_TLS": "0", "RAY_TLS_SERVER_CERT": "x"}) is None


@pytest.mark.parametrize("on", ["1", "true", "True"])
def test_the_files_are_those_that_ray_uses(files, on):
    assert tls_files({**environment_of(files), "RAY_USE_TLS": on}) == files
    check_tls(files)


@pytest.mark.parametrize("name", ["RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"])
def test_a_missing_setting_is_named(files, name):
    environment = environment_of(files)
    del environment[name]
    with pytest.raises(ConfigError, match=f"{name} must name a PEM file, since RAY_USE_TLS"):
        tls_files(environment)


@pytest.mark.parametrize("field", ["cert", "key", "ca"])
def test_a_file_that_is_missing_or_not_pem_is_named(files, tmp_path, field):
    missing = dataclasses.replace(files, **{field: str(tmp_path / "missing.pem")})
    assert f"cannot be read: {tmp_path}/missing.pem: No such file" in refusal_of(missing)
    (tmp_path / "text").write_text("no certificate")
    other = dataclasses.replace(files, **{field: str(tmp_path / "text")})
    assert f"must be a PEM file, got {tmp_path}/text" in refusal_of(other)


def test_a_key_of_another_certificate_is_refused(files, others):
    mixed = dataclasses.replace(files, key=others.key)
    assert refusal_of(mixed) == (
        f"RAY_TLS_SERVER_KEY {others.key} is not the key of the certificate {files.cert}"
    )


def test_a_certificate_of_another_authority_is_refused(files, others):
    message = refusal_of(dataclasses.replace(files, ca=others.ca))
    assert message.startswith(
        f"RAY_TLS_SERVER_CERT {files.cert} is not accepted with {others.ca}: "
    )


def test_an_expired_certificate_is_refused(tmp_path):
    old = make_certificates(tmp_path, HOSTS, days=-1.0)
    assert "certificate has expired" in refusal_of(old)


def test_a_key_with_a_password_is_refused_without_a_prompt(files, tmp_path):
    key = tmp_path / "key.pem"
    words = ["openssl", "pkcs8", "-topk8", "-in", files.key, "-passout", "pass:abcd", "-out", key]
    subprocess.run(words, check=True, capture_output=True)
    message = refusal_of(dataclasses.replace(files, key=str(key)))
    assert message.startswith("RAY_TLS_SERVER_KEY must not be encrypted")


def test_sums_by_nccl_are_refused_because_they_are_unencrypted(files):
    sync = TrainConfig(scaling=ScalingConfig(num_workers=2, gpus_per_worker=1))
    with pytest.raises(ConfigError, match=r"exchange.resident must be false with RAY_USE_TLS=1"):
        check_device(sync.exchange_device, environment_of(files))
    check_device(sync.exchange_device, {})
    on_the_host = dataclasses.replace(sync, exchange=ExchangeConfig(resident=False))
    check_device(on_the_host.exchange_device, environment_of(files))


def test_a_run_with_a_bad_certificate_joins_no_cluster(files, others, monkeypatch):
    bad = dataclasses.replace(files, ca=others.ca)
    for name, value in {**environment_of(bad), "RAY_ADDRESS": "127.0.0.1:1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"RAY_TLS_SERVER_CERT {bad.cert} is not accepted"):
        session.connect()


@pytest.mark.processes
def test_a_run_with_a_bad_certificate_ends_before_anything_starts(files, others, tmp_path):
    bad = dataclasses.replace(files, ca=others.ca)
    done = subprocess.run(
        [sys.executable, "-m", "raydl", "train", "--run-dir", tmp_path / "run", "--epochs", "1"],
        env={**os.environ, **environment_of(bad), "RAY_ADDRESS": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert f"RAY_TLS_SERVER_CERT {bad.cert} is not accepted" in last


# traffic between workers on several hosts


class RelayedKeys(dist.Store):
    """The keys of a generation, in which the address of a rank's relay replaces its tunnel's."""

    def __init__(self, server, relays=None):
        super().__init__()
        self.server, self.relays = server, relays or {}

    def set(self, key, value):
        if key in self.relays:
            value = self.relays[key].before(value)
        self.server.set_key("run", 1, key, value)

    def get(self, key):
        return self.multi_get([key])[0]

    def multi_get(self, keys):
        found = self.server.wait_for_keys("run", 1, keys, SOON_S)
        return [found[key] for key in keys]

    def wait(self, keys, timeout=None):
        self.multi_get(keys)

    def check(self, keys):
        return self.server.wait_for_keys("run", 1, keys, 0.0).keys() >= set(keys)


class Relay:
    """A relay in front of a tunnel that records the bytes in both directions."""

    def __init__(self):
        self.seen = bytearray()
        self._open = contextlib.ExitStack()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._open.close()

    def before(self, place):
        """Listen in place of a tunnel; return the address in the tunnel's format."""
        host, port = json.loads(place)
        listener = self._open.enter_context(socket.create_server((host, 0), backlog=64))
        threading.Thread(target=self._serve, args=(listener, (host, port)), daemon=True).start()
        return json.dumps([host, listener.getsockname()[1]]).encode()

    def _serve(self, listener, tunnel):
        with contextlib.suppress(OSError):
            while True:
                pair = listener.accept()[0], socket.create_connection(tunnel)
                for one, other in (pair, pair[::-1]):
                    self._open.enter_context(one)
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def groups_on(hosts, files, pool, relays=None, timeout_s=SOON_S):
    """Yield a group of workers on hosts, and the text of each worker's error as it connected."""
    server = StoreServer()
    ranks = range(len(hosts))
    groups = [TorchGroup(rank, len(hosts), device="cpu", timeout_s=timeout_s) for rank in ranks]

    def connect(rank):
        try:
            groups[rank].connect(RelayedKeys(server, relays), host=hosts[rank], tls=files[rank])
        except RuntimeError as error:
            return str(error)
        return ""

    try:
        yield groups, list(pool.map(connect, ranks))
    finally:
        for group in groups:
            group.abort()


def summed(groups, pool, size):
    """Return the sum of a number by each rank."""
    tensors = [torch.full((size,), SECRET_FLOAT) for _ in groups]

    def add(group, tensor):
        group.start_allreduce(tensor).wait()
        return tensor

    return list(pool.map(add, groups, tensors))


@pytest.mark.parametrize("spread", ["01", "10", "0011", "0101", "0"])
def test_workers_on_any_hosts_sum_through_tls(files, pool, spread):
    hosts = [HOSTS[int(at)] for at in spread]
    with groups_on(hosts, [files] * len(hosts), pool) as (groups, problems):
        assert problems == [""] * len(hosts)
        for tensor in summed(groups, pool, 100_001):
            torch.testing.assert_close(tensor, torch.full((100_001,), len(hosts) * SECRET_FLOAT))


def test_a_relay_between_two_hosts_sees_no_weights(files, pool):
    size = 50_000
    with (
        Relay() as relay,
        groups_on(HOSTS, [files] * 2, pool, {"tunnel/0": relay}) as (groups, problems),
    ):
        assert problems == ["", ""]
        summed(groups, pool, size)
        assert len(relay.seen) > 4 * size  # all weights passed
        assert torch.full((2,), SECRET_FLOAT).numpy().tobytes() not in relay.seen


def test_gloo_listens_on_the_loopback_only_and_a_tunnel_on_its_hosts_address(files, pool):
    before = {place for pid in descendants_of(os.getpid()) for place in listeners_of(pid)}
    with groups_on(HOSTS, [files] * 2, pool):
        after = {place for pid in descendants_of(os.getpid()) for place in listeners_of(pid)}
        assert {host for host, _ in after - before} == {"127.0.0.1", "127.0.0.2", *HOSTS}


def test_a_process_without_a_certificate_of_the_authority_does_not_connect(files, others, pool):
    with groups_on(HOSTS, [files, others], pool, timeout_s=1.0) as (_, problems):
        assert all(problems)
        assert "no TLS connection: " in problems[1]  # it does not trust the other side, either
        assert "certificate verify failed" in problems[1]


def end_of(far):
    """Return the last bytes of the other side, or nothing if it closed the connection."""
    try:
        return far.recv(1)
    except OSError:
        return b""


def test_a_tunnel_closes_connections_without_a_certificate(files, pool):
    trusting = ssl.create_default_context(cafile=files.ca)
    with groups_on(HOSTS, [files] * 2, pool) as (groups, _):
        places = [place for pid in descendants_of(os.getpid()) for place in listeners_of(pid)]
        [place] = [place for place in places if place[0] == HOSTS[0]]
        with socket.create_connection(place, timeout=SOON_S) as plain:
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
            while end_of(plain):
                pass
        with (
            socket.create_connection(place, timeout=SOON_S) as plain,
            trusting.wrap_socket(plain, server_hostname=HOSTS[0]) as far,
        ):
            assert end_of(far) == b""
        summed(groups, pool, 10)


def test_a_member_that_leaves_fails_the_sum_of_the_others_at_once(files, pool):
    with groups_on(HOSTS, [files] * 2, pool) as (groups, _):
        began = time.monotonic()
        sum_of_one = groups[0].start_allreduce(torch.ones(10))
        groups[1].abort()
        with pytest.raises(RuntimeError):
            sum_of_one.wait()
        assert time.monotonic() - began < SOON_S / 2


@pytest.mark.parametrize("value", [b"", b"\x02\x00\x12\x34\x7f\x00\x00\x02" * 2])
def test_an_unknown_format_of_gloos_address_is_refused_with_one_sentence(value):
    with pytest.raises(RuntimeError, match=r"^torch 2\..* TLS cannot be used with it; .*$"):
        gloo_port(value)
