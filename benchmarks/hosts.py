"""Simulates several hosts on one machine, connected by links of a given rate.

    with Hosts(4, mbit=100) as hosts:
        server = hosts.popen(0, ["python", "-m", "http.server", "--bind", hosts.address(0)])

A host has its own network namespace, with a loopback and one address (10.77.0.1 for host 0), and
its own process namespace: it does not see other processes. It shares the files and CPUs of the
machine. All hosts are connected to a bridge in another namespace, the switch. A token bucket (tbf)
at both ends of a link limits each direction to the rate. The network of the machine is unchanged,
and hosts cannot reach it.

The namespaces have no names, so several ``Hosts`` may exist simultaneously. The first process of
each namespace waits for the end of its input; when it ends, Linux kills all other processes of the
namespace. However the creator of the hosts ends, its end of that pipe closes, so no process
remains.

Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_NETWORK = "10.77.0"
_GATEWAY = f"{_NETWORK}.254"
_MOST_HOSTS = 250
_LEAST_BURST_BYTES = 16_384
_LEAST_QUEUE_BYTES = 100_000
_QUEUE_S = 0.2
"""The longest time that a byte waits in a link's queue; a full queue drops frames."""
_ETHERNET_BYTES, _IP_AND_TCP_BYTES = 14, 52
"""Bytes of headers in an Ethernet frame, and in its IP packet."""
_BOUND_S = 20.0
_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
# It ignores SIGCHLD, so that orphans in the namespace, which become its children, leave no zombies.
_KEEPER = ("env", "--ignore-signal=CHLD", "cat")


class HostsError(RuntimeError):
    """This machine does not permit hosts; the text is one sentence."""


def why_not() -> str:
    """Return a sentence that says why this machine does not permit hosts, or "" if it does."""
    try:
        with Hosts(1, mbit=100):
            return ""
    except HostsError as error:
        return str(error)


class Hosts:
    """Hosts with a link each to one switch, which exist while this context is entered.

    Args:
        number: number of hosts, 1 to 250.
        mbit: rate of each link in each direction, in Mbit/s of whole Ethernet frames. A full frame
            of 1514 bytes has 1448 bytes of TCP payload, 95.6%.
        mtu: largest IP packet in bytes; above Ethernet's 1500, frames are "jumbo" frames.
        burst_bytes: bytes that an idle link transfers without delay, by which each message is too
            fast. Unset: the bytes of a millisecond, at least 16 KB. A smaller bucket overflows
            between two runs of the kernel's scheduler and slows the link.

    Raises:
        HostsError: on entering, if the machine does not permit hosts.
    """

    def __init__(
        self, number: int, *, mbit: float, mtu: int = 1500, burst_bytes: int | None = None
    ) -> None:
        assert 1 <= number <= _MOST_HOSTS, f"1 to {_MOST_HOSTS} hosts, not {number}"
        self.number = number
        self.mtu = mtu
        self._fixed_burst_bytes = burst_bytes
        self._set_rate(mbit)
        self._hosts: list[_Namespace] = []
        self._switch: _Namespace | None = None
        self._processes: list[subprocess.Popen[Any]] = []

    def _set_rate(self, mbit: float) -> None:
        assert mbit > 0, "a link needs a rate"
        self.mbit = mbit
        self.burst_bytes = self._fixed_burst_bytes or max(_LEAST_BURST_BYTES, round(mbit * 125))
        fits = self.burst_bytes >= self.mtu + _ETHERNET_BYTES
        assert fits, "a frame larger than the bucket never passes"

    def limit(self, mbit: float) -> None:
        """Set the rate of all links, in Mbit/s; connections stay open.

        Raises:
            HostsError: if the machine does not permit it; some links may have the new rate.
        """
        self._set_rate(mbit)
        for number, host in enumerate(self._hosts):
            host.configure("tc", f"qdisc change dev eth0 root {self._bucket()}")
            self._switched().configure("tc", f"qdisc change dev port{number} root {self._bucket()}")

    def cut(self, host: int) -> None:
        """Partition the network between a host and all others, in both directions.

        The link stays up: packets are lost without an error.

        Raises:
            HostsError: if the machine does not permit it.
        """
        self._switched().configure("ip", f"link set port{range(self.number)[host]} nomaster")

    def join(self, host: int) -> None:
        """Connect a host again after ``cut``.

        Raises:
            HostsError: if the machine does not permit it.
        """
        self._switched().configure("ip", f"link set port{range(self.number)[host]} master bridge")

    def _switched(self) -> _Namespace:
        assert self._switch is not None, "the hosts are not up"
        return self._switch

    @property
    def seconds_per_byte(self) -> float:
        """Seconds that a link needs per byte of TCP payload, including headers."""
        frame_bytes, data_bytes = self.mtu + _ETHERNET_BYTES, self.mtu - _IP_AND_TCP_BYTES
        return 8e-6 / self.mbit * frame_bytes / data_bytes

    def address(self, host: int) -> str:
        """Return the IP address of a host, by its number from 0."""
        return f"{_NETWORK}.{range(self.number)[host] + 1}"

    def popen(
        self,
        host: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a process in a host; it is killed at the latest with the hosts.

        Args:
            host: number of the host, from 0.
            argv: the program and its arguments.
            env: environment variables, in addition to those of this process.
            options: options of ``subprocess.Popen``.

        Returns:
            A process outside the host that waits for the one in the host and exits with its
            status. Its ``terminate()`` and ``kill()`` both kill the process in the host; its
            ``pid`` differs from the one in the host.
        """
        environment = {**os.environ, **(env or {})}
        command = self._hosts[host].inside(argv)
        process = subprocess.Popen(command, env=environment, **options)
        self._processes.append(process)
        return process

    def run(
        self,
        host: int,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Run a program in a host and return its output, including stderr.

        Raises:
            subprocess.CalledProcessError: if it failed; ``output`` has its output.
            subprocess.TimeoutExpired: if it did not end in time; it is killed.
        """
        output: str = subprocess.run(
            self._hosts[host].inside(argv), env={**os.environ, **(env or {})}, check=True,
            timeout=timeout_s, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ).stdout  # fmt: skip
        return output

    def processes(self, host: int) -> dict[int, str]:
        """Return the command lines of a host's processes, by process id outside of the host.

        The first process of the host, the keeper, is not included.
        """
        return self._hosts[host].processes()

    def __enter__(self) -> Hosts:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    def _build(self) -> None:
        _check_machine()
        self._switch = _Namespace()
        self._switch.configure(
            "ip",
            "link add bridge type bridge",
            f"address add {_GATEWAY}/24 dev bridge",
            "link set bridge up",
        )
        self._switch.forward()
        for number in range(self.number):
            self._hosts.append(_Namespace())
            self._add_link(number, self._hosts[number], self._switch)

    def _add_link(self, number: int, host: _Namespace, switch: _Namespace) -> None:
        """Add the link between a host and the switch."""
        port = f"port{number}"
        switch.configure(
            "ip",
            f"link add {port} mtu {self.mtu} type veth peer name eth0 mtu {self.mtu} "
            f"netns {host.keeper.pid}",
            f"link set {port} master bridge up",
        )
        host.configure(
            "ip",
            "link set lo up",
            f"address add {self.address(number)}/24 dev eth0",
            "link set eth0 up",
            # The gateway leads nowhere, but programs find their own address by the default route.
            f"route add default via {_GATEWAY}",
        )
        host.configure("tc", f"qdisc add dev eth0 root {self._bucket()}")
        switch.configure("tc", f"qdisc add dev {port} root {self._bucket()}")

    def _bucket(self) -> str:
        """Return the tc parameters that limit one direction of a link."""
        bits = round(self.mbit * 1e6)
        queue = max(round(bits / 8 * _QUEUE_S), _LEAST_QUEUE_BYTES)
        return f"tbf rate {bits}bit burst {self.burst_bytes} limit {self.burst_bytes + queue}"

    def _remove(self) -> None:
        spaces = [*self._hosts, *([self._switch] if self._switch else [])]
        for space in spaces:
            space.close()
        for process in self._processes:
            process.kill()
            process.wait(timeout=_BOUND_S)
        self._hosts, self._switch, self._processes = [], None, []


class _Namespace:
    """A network namespace, a process namespace, and its first process, the keeper."""

    def __init__(self) -> None:
        # In its own session, so that Ctrl-C in the terminal does not end it first.
        self.keeper = subprocess.Popen(
            ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", *_KEEPER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        reply = self._echo("ready\n")
        if reply != "ready\n":
            self.close()
            raise HostsError(f"a network namespace cannot be created here: {reply.strip()}")

    def _echo(self, line: str) -> str:
        """Send a line to the keeper, which echoes its input, and return its first line."""
        assert self.keeper.stdin is not None
        assert self.keeper.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.keeper.stdin.write(line)
            self.keeper.stdin.flush()
        return self.keeper.stdout.readline()

    def inside(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs a program in the namespaces and is killed with it."""
        namespaces = f"/proc/{self.keeper.pid}/ns"
        return [
            "nsenter", f"--net={namespaces}/net", f"--mount={namespaces}/mnt",
            f"--pid={namespaces}/pid_for_children", "setpriv", "--pdeathsig", "KILL",
            *map(str, argv),
        ]  # fmt: skip

    def processes(self) -> dict[int, str]:
        """Return the command lines of all processes but the keeper, by process id outside."""
        namespace = os.readlink(f"/proc/{self.keeper.pid}/ns/pid_for_children")
        commands = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                if os.readlink(f"/proc/{entry}/ns/pid") == namespace and not _is_first(entry):
                    cmdline = Path(f"/proc/{entry}/cmdline").read_bytes()
                    commands[int(entry)] = cmdline.replace(b"\0", b" ").decode(errors="replace")
        return commands

    def configure(self, tool: str, *lines: str) -> None:
        """Run lines of ``ip`` or ``tc`` commands on the network."""
        self._run([tool, "-batch", "-"], f"`{tool} {lines[0]}` or a later line", "\n".join(lines))

    def forward(self) -> None:
        """Enable IP forwarding: unreachable addresses then fail at once instead of timing out."""
        setting = "/proc/sys/net/ipv4/ip_forward"
        self._run(["sh", "-c", f"echo 1 > {setting}"], f"setting {setting}")

    def _run(self, argv: Sequence[str], what: str, input: str = "") -> None:
        """Run a program of the machine on the network.

        Raises:
            HostsError: if it failed.
        """
        command = ["nsenter", f"--net=/proc/{self.keeper.pid}/ns/net", *argv]
        done = subprocess.run(
            command, input=input, text=True, check=False, timeout=_BOUND_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode:
            reason = done.stdout.strip().partition("\n")[0]
            raise HostsError(f"this machine does not permit hosts: {what} failed: {reason}")

    def close(self) -> None:
        """End all processes of the namespaces."""
        try:
            self.keeper.communicate(timeout=_BOUND_S)
        except subprocess.TimeoutExpired:
            self.keeper.kill()  # with --kill-child, this kills the first process, too
            self.keeper.communicate()


def _is_first(pid: str) -> bool:
    """Return whether a process is the first one of its namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (ids,) = [line for line in lines if line.startswith("NSpid:")]
    return ids.split()[-1] == "1"


def _check_machine() -> None:
    """Check the system, the user and the tools.

    Raises:
        HostsError: if one of them does not permit hosts.
    """
    if sys.platform != "linux":
        raise HostsError(f"hosts are network namespaces of Linux; this system is {sys.platform}")
    if os.geteuid() != 0:
        raise HostsError("only root can create network namespaces; run this as root")
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise HostsError(f"`{tool}` is missing; install {package}")
