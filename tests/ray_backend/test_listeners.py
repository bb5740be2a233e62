"""Sockets on which a run listens, and their answers to a process without the cluster's token."""

import contextlib
import socket
import struct
import sys
import time
import urllib.error
import urllib.request
from ipaddress import ip_address

import grpc
import pytest
import torch.distributed
from clusters import ClusterRun, start_cluster
from processes import command_of, descendants_of, driver_of, listeners_of
from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.cluster

LONG = ("--model", "origins:model", "--workers", "2", "--epochs", "100000", "--period", "4")
CALLS = (
    "CoreWorkerService/NumPendingTasks",
    "NodeManagerService/GetNodeStats",
    "ObjectManagerService/Pull",
    "NodeInfoGcsService/GetClusterId",
    "ReporterService/GetTraceback",
)
"""A call of each of Ray's services."""
OURS = ("ray::WorkerActor", "ray::CenterActor", "ray::EvaluatorActor")
OF_ALL = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}
"""The address to connect to where a process listens on all interfaces."""
WITHIN_S = 1.0
BOUND_S = 60.0
NONCE = b"rayd"
VALIDATE_AND_PING = b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\x0d"
"""The first message of a client of torch's TCPStore."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a cluster of two nodes, with an address that other hosts reach."""
    with (
        start_cluster(1, 1, kind=Cluster) as cluster,
        ClusterRun(cluster, tmp_path_factory.mktemp("runs") / "run", *LONG) as run,
    ):
        run.until_training(2)
        run.cluster = cluster
        yield run


def our_processes(run):
    """Return the processes of the run's actors and its driver."""
    raylets = [
        node.all_processes[PROCESS_TYPE_RAYLET][0].process.pid
        for node in run.cluster.list_all_nodes()
    ]
    below = [pid for raylet in raylets for pid in descendants_of(raylet)]
    return [
        driver_of(run.process.pid),
        *(pid for pid in below if command_of(pid)[0].startswith(OURS)),
    ]


def answer_to_a_call(host, port, name):
    """Return the gRPC status of a call of Ray's without a token."""
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(_at(host, port), options=options) as channel:
        call = channel.unary_unary(f"/ray.rpc.{name}")
        try:
            call(b"", timeout=WITHIN_S)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


def asks_for_a_token(host, port):
    """Return whether a listener is one of Ray's that refuses a call without the token."""
    answers = set()
    for name in CALLS:
        answers.add(answer_to_a_call(host, port, name))
        if answers & {"UNAVAILABLE", "DEADLINE_EXCEEDED"}:
            break  # it does not speak gRPC
    return "UNAUTHENTICATED" in answers and answers <= {"UNAUTHENTICATED", "UNIMPLEMENTED"}


def http_status(host, port, path):
    """Return the status of a page without a token; 0: it is no web server."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{_at(host, port)}{path}", timeout=2) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return 0


def is_open(host, port):
    """Return whether a process still listens there."""
    try:
        socket.create_connection((OF_ALL.get(host, host), port), timeout=WITHIN_S).close()
    except ConnectionRefusedError:
        return False
    except TimeoutError:
        pass  # its queue of connections is full
    return True


def shows(host, port):
    """Return what a listener shows without a token: "nothing", "figures" or something else.

    A busy process may not answer in time, and another may end: the question is repeated.
    """
    deadline = time.monotonic() + BOUND_S
    while is_open(host, port):
        if asks_for_a_token(host, port) or http_status(host, port, "/api/version") == 401:
            return "nothing"
        if http_status(host, port, "/metrics") == 200:
            return "figures"
        if time.monotonic() > deadline:
            return "something else"
    return "nothing"


def _at(host, port):
    return f"{OF_ALL.get(host, host)}:{port}"


def progress(run):
    return run.status()["num_samples"]


def test_the_run_itself_opens_no_port_on_all_interfaces(run):
    """A port that is open there belongs to Ray and requires the token."""

    on_all, on_one = [], []

    def are_up():
        """Return whether Ray listens in each process, and gloo in each worker."""
        processes = our_processes(run)
        on_all.clear()
        on_one.clear()
        for place in (place for pid in processes for place in listeners_of(pid)):
            (on_all if ip_address(place[0]).is_unspecified else on_one).append(place)
        return len(on_all) == len(processes) and len(on_one) == 2

    run.until(are_up)  # the evaluator may be starting, or a worker may be between two generations
    assert [place for place in on_all if shows(*place) != "nothing"] == []
    assert {host for host, _ in on_one} == {run.cluster.head_node.node_ip_address}


def test_rays_sockets_require_the_token_or_show_only_figures(run):
    opened = set()
    for node in run.cluster.list_all_nodes():
        for processes in node.all_processes.values():
            for process in processes:
                for pid in descendants_of(process.process.pid):
                    opened.update(listeners_of(pid))
    opened -= {place for pid in our_processes(run) for place in listeners_of(pid)}
    assert len(opened) > 5
    assert [place for place in opened if shows(*place) == "something else"] == []


def answers_as_a_store(host, port):
    """Return whether a listener answers a stranger in the protocol of torch's TCPStore.

    Not by its own client: that waits without a bound for somebody who speaks another one.
    """
    with socket.create_connection((host, port), timeout=2) as stranger:
        try:
            stranger.sendall(VALIDATE_AND_PING + NONCE)
            return stranger.recv(len(NONCE)) == NONCE
        except OSError:
            return False


def test_a_store_of_torch_answers_any_process():
    """This shows that the next test would find one."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert answers_as_a_store("127.0.0.1", store.port)


def test_a_stranger_finds_no_store_in_which_to_read_write_or_delete(run):
    places = [place for pid in our_processes(run) for place in listeners_of(pid)]
    assert places
    for host, port in places:
        is_open = answers_as_a_store("127.0.0.1" if ip_address(host).is_unspecified else host, port)
        assert not is_open, port


def test_a_stranger_that_guesses_a_workers_number_does_not_become_a_rank(run):
    """gloo reads the number of a pair from any connection; all pairs are taken."""
    places = [
        place
        for pid in our_processes(run)
        for place in listeners_of(pid)
        if not ip_address(place[0]).is_unspecified
    ]
    assert places
    strangers = []
    with contextlib.ExitStack() as until_the_end:
        for place in places:
            for number in range(32):
                stranger = socket.create_connection(place, timeout=5)
                strangers.append(until_the_end.enter_context(stranger))
                stranger.sendall(number.to_bytes(8, sys.byteorder))
                stranger.setblocking(False)
        before = progress(run)
        run.until(lambda: progress(run) > before + 10_000)
        for stranger in strangers:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                assert stranger.recv(1) == b""  # no byte of the run's data
    assert run.status()["generation"] == 1
