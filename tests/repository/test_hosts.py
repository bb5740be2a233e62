"""Hosts on this machine have links of the given rate and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import command_of, processes_that

from benchmarks import hosts as module
from benchmarks.hosts import Hosts, HostsError, why_not

pytestmark = pytest.mark.processes

BOUND_S = 30
RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("up", flush=True)
connection, num_bytes = server.accept()[0], 0
start = time.perf_counter()
connection.send(b"!")
while got := connection.recv(1 << 16):
    num_bytes += len(got)
print((time.perf_counter() - start) / num_bytes)
"""
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000))
connection.recv(1)  # the receiver has started its clock
connection.sendall(bytes(int(sys.argv[2])))
"""
STAY = """
import subprocess, sys, time
from benchmarks.hosts import Hosts
with Hosts(1, mbit=100) as hosts:
    hosts.run(0, ["sh", "-c", f"setsid {sys.argv[1]} >/dev/null 2>&1 </dev/null &"], timeout_s=20)
    hosts.popen(0, sys.argv[1].split())
    print("up", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def permitted():
    if reason := why_not():
        pytest.skip(reason)


def seconds_per_byte(hosts, source, target, num_bytes):
    """Send bytes to another host, at most 20 times, and return the least seconds per byte.

    A busy machine delays transfers and never speeds them up: the fastest shows the link rate.
    """
    fastest = float("inf")
    for _ in range(20):
        fastest = min(fastest, sent_once(hosts, source, target, num_bytes))
        if fastest < 1.3 * hosts.seconds_per_byte:
            break
    return fastest


def sent_once(hosts, source, target, num_bytes):
    address = hosts.address(target)
    receiver = hosts.popen(
        target, [sys.executable, "-c", RECEIVE, address], stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout.readline() == "up\n"
    hosts.run(source, [sys.executable, "-c", SEND, address, str(num_bytes)], timeout_s=BOUND_S)
    return float(receiver.communicate(timeout=BOUND_S)[0])


def processes(text):
    """Return the processes of this machine whose command contains a text."""
    return processes_that(lambda pid: text in " ".join(command_of(pid)))


def network():
    """Return this machine's own devices, addresses, routes and queues."""
    commands = ("ip -o link", "ip -o address", "ip route", "tc qdisc")
    return [subprocess.check_output(line.split(), text=True) for line in commands]


@pytest.mark.parametrize(("mbit", "mtu"), [(10, 1500), (40, 1500), (40, 9000)])
def test_a_link_has_the_given_rate_in_both_directions(permitted, mbit, mtu):
    num_bytes = mbit * 60_000  # half a second
    with Hosts(2, mbit=mbit, mtu=mtu) as hosts:
        assert f" mtu {mtu} " in hosts.run(0, ["ip", "link", "show", "eth0"], timeout_s=BOUND_S)
        for source, target in ((0, 1), (1, 0)):
            ratio = seconds_per_byte(hosts, source, target, num_bytes) / hosts.seconds_per_byte
            assert 0.9 < ratio < 1.3  # the first burst passes without delay


def test_the_rate_of_links_can_be_changed_while_the_hosts_exist(permitted):
    with Hosts(2, mbit=1000) as hosts:
        burst_bytes = hosts.burst_bytes
        for mbit in (10, 40):
            hosts.limit(mbit)
            for source, target in ((0, 1), (1, 0)):
                ratio = seconds_per_byte(hosts, source, target, mbit * 60_000)
                assert 0.9 < ratio / hosts.seconds_per_byte < 1.3
        assert hosts.burst_bytes < burst_bytes


def test_a_host_that_is_cut_off_can_not_communicate_until_it_is_joined_again(permitted):
    with Hosts(3, mbit=100) as hosts:
        hosts.cut(1)
        for source, target in ((0, 1), (1, 0), (1, 2)):
            with pytest.raises(subprocess.CalledProcessError):
                ping(hosts, source, target, within_s=1.5)
        ping(hosts, 0, 2)
        hosts.join(1)
        for source, target in ((0, 1), (1, 0), (1, 2)):
            ping(hosts, source, target)


def ping(hosts, source, target, *, within_s=10):
    connect = (
        "import socket, sys\n"
        f"try: socket.create_connection((sys.argv[1], 5000), timeout={within_s})\n"
        "except ConnectionRefusedError: pass  # the host answers\n"
    )
    hosts.run(source, [sys.executable, "-c", connect, hosts.address(target)], timeout_s=BOUND_S)


def test_each_host_has_its_own_address_loopback_and_processes(permitted):
    with Hosts(2, mbit=100) as hosts:
        for host in range(2):
            found = hosts.run(host, ["ip", "-o", "address"], timeout_s=BOUND_S)
            assert f"{hosts.address(host)}/24" in found
            assert "127.0.0.1/8" in found
            assert hosts.address(1 - host) not in found
        hosts.popen(0, ["sleep", "98.7"])
        assert "sleep 98.7" not in hosts.run(1, ["ps", "-A", "-o", "args"], timeout_s=BOUND_S)


def test_a_host_lists_its_processes_by_their_ids_outside_without_the_keeper(permitted):
    with Hosts(2, mbit=100) as hosts:
        assert hosts.processes(1) == {}
        process = hosts.popen(1, ["sleep", "98.6"])
        deadline = time.monotonic() + BOUND_S
        while not (
            found := [p for p, command in hosts.processes(1).items() if "sleep 98.6" in command]
        ):
            assert time.monotonic() < deadline
        assert hosts.processes(0) == {}
        os.kill(found[0], signal.SIGKILL)
        process.wait(timeout=BOUND_S)
        assert hosts.processes(1) == {}
        assert hosts.run(1, ["echo", "here"], timeout_s=BOUND_S) == "here\n"


def test_a_program_in_a_host_has_the_environment_and_its_failure_raises(permitted):
    with Hosts(1, mbit=100) as hosts:
        output = hosts.run(0, ["sh", "-c", "echo $HOME $A"], env={"A": "b"}, timeout_s=BOUND_S)
        assert output.split() == [os.environ["HOME"], "b"]
        with pytest.raises(subprocess.CalledProcessError) as failure:
            hosts.run(0, ["sh", "-c", "echo why; exit 3"], timeout_s=BOUND_S)
        assert (failure.value.returncode, failure.value.output) == (3, "why\n")


def test_hosts_do_not_change_this_machines_network_and_several_may_exist(permitted):
    before = network()
    with Hosts(2, mbit=100) as some, Hosts(2, mbit=10) as others:
        assert some.address(1) == others.address(1)
        assert network() == before
        for hosts in (some, others):
            assert seconds_per_byte(hosts, 0, 1, 10_000) > 0
    assert network() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_no_process_remains_however_the_hosts_end(permitted, root, tmp_path, number):
    command = f"tail -f {tmp_path / 'x'}"
    (tmp_path / "x").touch()
    maker = subprocess.Popen(
        [sys.executable, "-c", STAY, command], cwd=root, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert maker.stdout.readline() == "up\n"
    assert processes(command)
    maker.send_signal(number)
    maker.communicate(timeout=BOUND_S)
    deadline = time.monotonic() + BOUND_S
    while left := processes(command):
        assert time.monotonic() < deadline, f"processes remain: {left}"


def test_why_not_says_why_a_machine_permits_no_hosts(monkeypatch):
    monkeypatch.setattr(module.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert why_not() == "`ip` is missing; install iproute2"
    monkeypatch.setattr(module.os, "geteuid", lambda: 1000)
    assert why_not() == "only root can create network namespaces; run this as root"
    with pytest.raises(HostsError, match="only root"), Hosts(1, mbit=100):
        pass
