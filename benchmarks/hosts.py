"""Several hosts on one machine, joined by links of a stated rate: how a run does on thin ones.

    with Hosts(4, mbit=100) as hosts:
        server = hosts.popen(0, ["python", "-m", "http.server", "--bind", hosts.address(0)])

A host has its own network (a namespace of Linux, with a loopback and one address, 10.77.0.1 for
host 0) and its own processes: it sees no others. Files and CPUs are the machine's. All hosts hang
on a bridge in one more namespace, the switch. A token bucket (tbf) at both ends of a link holds
each direction to its rate. The machine's own network is not touched, and from a host nothing
outside is reached.

The namespaces have no names, so that any number of ``Hosts`` may be up at once. In each one process
waits for the end of its input. It is the namespace's first: Linux kills all others with it. However
the process that made the hosts ends, its side of that pipe closes, and nothing is left behind.

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
"""The longest that a byte waits in a link's queue; what comes then is dropped, and sent again."""
_ETHERNET_BYTES, _IP_AND_TCP_BYTES = 14, 52
"""Of headers in a frame, and in its IP packet."""
_BOUND_S = 20.0
_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
# Orphans in the namespace become its children, and stay as zombies where it does not ignore them.
_KEEPER = ("env", "--ignore-signal=CHLD", "cat")


class HostsError(RuntimeError):
    """This machine does not permit such hosts; its text is one sentence."""


def why_not() -> str:
    """Return in one sentence why this machine does not permit such hosts; empty: it does."""
    try:
        with Hosts(1, mbit=100):
            return ""
    except HostsError as error:
        return str(error)


class Hosts:
    """So many hosts, each with a link of its own to one switch, while this context is entered.

    Args:
        number: hosts, 1 to 250.
        mbit: the rate of each link in each direction, in Mbit/s of whole Ethernet frames: of 1514
            bytes of a full one TCP has 1448, 95.6%.
        mtu: the most bytes of an IP packet; larger ones than Ethernet's 1500 are "jumbo" frames.
        burst_bytes: what a link that was idle takes at once, whatever its rate: so much too fast
            is a message. Unset: what passes in a millisecond, at least 16 KB; a bucket that is
            smaller runs over between two turns of the kernel, and slows the link.

    Raises:
        HostsError: on entering, if the machine does not permit it.
    """

    def __init__(
        self, number: int, *, mbit: float, mtu: int = 1500, burst_bytes: int | None = None
    ) -> None:
        assert 1 <= number <= _MOST_HOSTS, f"1 to {_MOST_HOSTS} hosts, not {number}"
        self.number = number
        self.mtu = mtu
        self._asked_burst_bytes = burst_bytes
        self._set_rate(mbit)
        self._hosts: list[_Namespace] = []
        self._switch: _Namespace | None = None
        self._processes: list[subprocess.Popen[Any]] = []

    def _set_rate(self, mbit: float) -> None:
        assert mbit > 0, "a link needs a rate"
        self.mbit = mbit
        self.burst_bytes = self._asked_burst_bytes or max(_LEAST_BURST_BYTES, round(mbit * 125))
        whole = self.burst_bytes >= self.mtu + _ETHERNET_BYTES
        assert whole, "a bucket that holds no whole frame lets none pass"

    def limit(self, mbit: float) -> None:
        """Give all links another rate, in Mbit/s; connections stay, and go on at it.

        Raises:
            HostsError: the machine does not permit it; some links may have the new rate.
        """
        self._set_rate(mbit)
        for number, host in enumerate(self._hosts):
            host.configure("tc", f"qdisc change dev eth0 root {self._bucket()}")
            self._switched().configure("tc", f"qdisc change dev port{number} root {self._bucket()}")

    def cut(self, host: int) -> None:
        """Let nothing through between a host and all others, in either direction.

        Its link stays up: what is sent is lost, and nobody is told, as in a network that is parted.

        Raises:
            HostsError: the machine does not permit it.
        """
        self._switched().configure("ip", f"link set port{range(self.number)[host]} nomaster")

    def join(self, host: int) -> None:
        """Let everything through again after ``cut``.

        Raises:
            HostsError: the machine does not permit it.
        """
        self._switched().configure("ip", f"link set port{range(self.number)[host]} master bridge")

    def _switched(self) -> _Namespace:
        assert self._switch is not None, "the hosts are not up"
        return self._switch

    @property
    def seconds_per_byte(self) -> float:
        """Seconds that a link takes for each byte of a TCP connection, headers counted in."""
        frame_bytes, data_bytes = self.mtu + _ETHERNET_BYTES, self.mtu - _IP_AND_TCP_BYTES
        return 8e-6 / self.mbit * frame_bytes / data_bytes

    def address(self, host: int) -> str:
        """Return the address of a host, by its number from 0."""
        return f"{_NETWORK}.{range(self.number)[host] + 1}"

    def popen(
        self,
        host: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a process in a host; it is killed with the hosts if it has not ended by then.

        Args:
            host: its number from 0.
            argv: the program and its arguments.
            env: what its environment has besides that of this process, or instead.
            options: of ``subprocess.Popen``.

        Returns:
            What waits for the process beside the host, and ends as it does. Its ``terminate()``
            and ``kill()`` both kill the process; its ``pid`` is not the one within the host.
        """
        environment = {**os.environ, **(env or {})}
        words = self._hosts[host].inside(argv)
        process = subprocess.Popen(words, env=environment, **options)
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
        """Run a program in a host and return what it printed, errors included.

        Raises:
            subprocess.CalledProcessError: it failed; ``output`` has what it said.
            subprocess.TimeoutExpired: it did not end in time, and was killed.
        """
        said: str = subprocess.run(
            self._hosts[host].inside(argv), env={**os.environ, **(env or {})}, check=True,
            timeout=timeout_s, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ).stdout  # fmt: skip
        return said

    def processes(self, host: int) -> dict[int, str]:
        """Return the processes of a host: their ids outside of it, and their command lines.

        The host's first process, with which all others end, is not among them.
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
            self._lay_link(number, self._hosts[number], self._switch)

    def _lay_link(self, number: int, host: _Namespace, switch: _Namespace) -> None:
        """Lay the link between a host and the switch."""
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
            # Nothing is there, but a program finds its own address by asking for the way out.
            f"route add default via {_GATEWAY}",
        )
        host.configure("tc", f"qdisc add dev eth0 root {self._bucket()}")
        switch.configure("tc", f"qdisc add dev {port} root {self._bucket()}")

    def _bucket(self) -> str:
        """Return the words that limit one direction of a link."""
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
    """A network and a table of processes of its own, and its first process, the keeper."""

    def __init__(self) -> None:
        # A session of its own: what interrupts a terminal's programs must not end it first.
        self.keeper = subprocess.Popen(
            ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", *_KEEPER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        said = self._echo("ready\n")
        if said != "ready\n":
            self.close()
            raise HostsError(f"no network namespace can be made here: {said.strip()}")

    def _echo(self, line: str) -> str:
        """Return the first line from the keeper, which repeats what it is told once it is there."""
        assert self.keeper.stdin is not None
        assert self.keeper.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.keeper.stdin.write(line)
            self.keeper.stdin.flush()
        return self.keeper.stdout.readline()

    def inside(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs a program in here, and kills it if it is killed itself."""
        here = f"/proc/{self.keeper.pid}/ns"
        return [
            "nsenter", f"--net={here}/net", f"--mount={here}/mnt",
            f"--pid={here}/pid_for_children", "setpriv", "--pdeathsig", "KILL", *map(str, argv),
        ]  # fmt: skip

    def processes(self) -> dict[int, str]:
        """Return the ids, as outside, and command lines of all processes here but the first."""
        here = os.readlink(f"/proc/{self.keeper.pid}/ns/pid_for_children")
        found = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if os.readlink(f"/proc/{entry}/ns/pid") == here and not _is_first(entry):
                    words = Path(f"/proc/{entry}/cmdline").read_bytes()
                    found[int(entry)] = words.replace(b"\0", b" ").decode(errors="replace")
        return found

    def configure(self, tool: str, *lines: str) -> None:
        """Let ``ip`` or ``tc`` carry out lines on the network here."""
        self._do(
            [tool, "-batch", "-"], f"do `{tool} {lines[0]}` and what follows", "\n".join(lines)
        )

    def forward(self) -> None:
        """Be a router, which tells at once that nothing lies beyond, rather than keep silent."""
        setting = "/proc/sys/net/ipv4/ip_forward"
        self._do(["sh", "-c", f"echo 1 > {setting}"], f"set {setting}")

    def _do(self, argv: Sequence[str], what: str, said: str = "") -> None:
        """Run a program of the machine on the network here.

        Raises:
            HostsError: it failed.
        """
        words = ["nsenter", f"--net=/proc/{self.keeper.pid}/ns/net", *argv]
        done = subprocess.run(
            words, input=said, text=True, check=False, timeout=_BOUND_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode:
            reason = done.stdout.strip().partition("\n")[0]
            raise HostsError(f"this machine does not let us {what}: {reason}")

    def close(self) -> None:
        """End it with all that is in it."""
        try:
            self.keeper.communicate(timeout=_BOUND_S)
        except subprocess.TimeoutExpired:
            self.keeper.kill()  # and with it, by --kill-child, the namespace's first process
            self.keeper.communicate()


def _is_first(pid: str) -> bool:
    """Return whether a process is the first of its namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (ids,) = [line for line in lines if line.startswith("NSpid:")]
    return ids.split()[-1] == "1"


def _check_machine() -> None:
    """Say what is missing, as far as that can be seen without trying."""
    if sys.platform != "linux":
        raise HostsError(f"hosts are network namespaces of Linux, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise HostsError("only root can make network namespaces; run this as root")
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise HostsError(f"`{tool}` is not here; install {package}")
