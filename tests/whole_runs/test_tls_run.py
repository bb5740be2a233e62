"""A run across hosts on a cluster whose connections all use TLS."""

import json
import subprocess
import sys
import time

import pytest
from processes import command_of, listeners_of, processes_that

from benchmarks.certificates import environment_of, make_certificates
from benchmarks.hosts import Hosts, why_not
from benchmarks.ray_on_hosts import start_ray

pytestmark = pytest.mark.slow

BOUND_S = 200


def test_workers_on_two_hosts_train_through_the_tunnels_of_rays_certificates(
    short_path, monkeypatch, root
):
    if reason := why_not():
        pytest.skip(reason)
    monkeypatch.setenv("PYTHONPATH", str(root))
    run, log = short_path / "run", short_path / "log"
    with Hosts(2, mbit=1000) as hosts, log.open("w") as out:
        addresses = [hosts.address(host) for host in range(2)]
        files = make_certificates(short_path / "tls", [*addresses, "127.0.0.1"])
        environment = start_ray(hosts, short_path, environment_of(files))
        words = ["-m", "raydl", "train", "--workers", "2", "--epochs", "3", "--run-dir", str(run)]
        driver = hosts.popen(
            0, [sys.executable, *words], env=environment, stdout=out, stderr=subprocess.STDOUT
        )
        tunnels = set()
        deadline = time.monotonic() + BOUND_S
        while driver.poll() is None:
            assert time.monotonic() < deadline, log.read_text()
            found = processes_that(
                lambda pid: any("raydl.collective.tls_tunnel" in word for word in command_of(pid))
            )
            tunnels |= {host for pid in found for host, _ in listeners_of(pid)}
            time.sleep(0.05)
        assert driver.returncode == 0, log.read_text()
    assert {*addresses} <= tunnels
    assert json.loads((run / "result.json").read_text())["center_accuracy"] > 0.5
