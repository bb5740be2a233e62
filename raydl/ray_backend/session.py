"""Reaching a Ray cluster: the one a job runs in, or one started for this run.

Ray reads its environment when it is imported, so ``prepare`` comes before that.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from raydl.config.tls import check_tls, tls_files
from raydl.errors import ClusterError, ConfigError
from raydl.redaction import redact

_BOOTSTRAP = Path("~/ray_bootstrap_config.yaml")
"""Path of the cluster's configuration on the head, as `ray up` writes it."""
_ANSWER_S = 5.0
"""The longest wait for a cluster's first answer, in seconds. Ray by itself waits for minutes."""
_START_S = 60.0
"""The longest that the end of this process waits for a cluster that has just begun to start."""
_beginning: Future[None] | None = None
"""The start of a local cluster that is under way."""
_TOKEN = "put it into RAY_AUTH_TOKEN or ~/.ray/auth_token (on its head: ray get-auth-token)"


def prepare() -> None:
    """Decide what Ray reads from the environment at import, where the user did not.

    Does nothing in a process that has imported Ray already, or has a cluster to go to.
    """
    if "ray" in sys.modules or os.environ.get("RAY_ADDRESS"):
        return
    # A cluster and its clients must agree on authentication; say it aloud to both.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # What Ray will do by default: actors without a GPU do not see any.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def prepare_client(address: str | None) -> str | None:
    """Decide what Ray's job client reads from the environment, where the user did not.

    Args:
        address: what the user named; to Ray a name in the environment goes before it.

    Returns:
        The address as Ray's client takes it.

    Raises:
        ConfigError: it is none of a dashboard.
    """
    # Clusters ask for a token unless they were told not to, clients bring one only if told to.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS")
    if address:
        address = os.environ["RAY_API_SERVER_ADDRESS"] = dashboard_url(address)
    return address or None


def dashboard_url(address: str) -> str:
    """Return the URL of a cluster's dashboard, from what a user wrote.

    Raises:
        ConfigError: it is an address of Ray Client or of the head's own port, or no URL.
    """
    if address == "auto":  # Ray looks for the cluster of this machine
        return address
    scheme, mark, rest = address.rpartition("://")
    port = re.search(r":(\d+)/?$", rest)
    host = rest[: port.start()] if port else rest
    if scheme == "ray" or (port is not None and port[1] == "6379"):
        raise ConfigError(
            "submit.address",
            f"must be the cluster's dashboard, http://{host or 'HEAD'}:8265, got {address}",
        )
    url = address if mark else f"http://{address}"
    try:
        urlsplit(url).port  # noqa: B018
    except ValueError:  # which quotes a part of it: of a password, where its / was not encoded
        problem = f"must be a URL, http://HEAD:8265, got {url}"
        raise ConfigError("submit.address", problem) from None
    return url


def begin() -> None:
    """Start the local cluster in a thread, if ``connect`` would start one, and return at once.

    Ray's start is seconds of waiting for one process after the other; the caller's imports and
    data come meanwhile. ``connect`` waits for it, and raises what it raised. If nobody
    connects, the end of this process ends the cluster.
    """
    global _beginning
    if _beginning is not None or _address():
        return
    prepare()
    import ray

    if ray.is_initialized():
        return
    _beginning = Future()
    atexit.register(_end, _beginning)  # before what Ray has registered: the last come first
    threading.Thread(
        target=_start_and_stay, args=(_beginning,), name="start-of-ray", daemon=True
    ).start()


def connect() -> bool:
    """Connect to Ray; return whether a cluster was started on this machine for this process.

    A process that is connected stays as it is. Else ``RAY_ADDRESS`` (which ``ray job
    submit`` sets) names the cluster; without it a local one starts, and ends with us.

    Raises:
        ClusterError: none answers there, it wants another token, or is of another version.
        ConfigError: it should use TLS, and its certificates can not be used.
    """
    global _beginning
    import ray

    if _beginning is not None:
        begun, _beginning = _beginning, None
        begun.result()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as Ray does
        return True
    if ray.is_initialized():
        return False
    if _address():
        _join(_address())
        return False
    _start_here()
    return True


def _address() -> str:
    """Return the address of the cluster that the environment names; empty: none."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def _check_certificates() -> None:
    """Refuse certificates that Ray would fail with, in words of its own and after a long wait."""
    files = tls_files(os.environ)
    if files is not None:
        check_tls(files)


def _start_here() -> None:
    import ray

    _check_certificates()
    with _redacted_command(), _on_the_loopback():
        ray.init(
            address="local",
            include_dashboard=False,
            # Not yet what is less than an error: in a thread Ray warns that it leaves SIGTERM
            # alone.
            logging_level=logging.ERROR,
            # Ray starts a process per core ahead; so these have torch before an actor comes.
            _system_config={"preload_python_modules": ["torch"]},
        )
    logging.getLogger("ray").setLevel(logging.WARNING)
    atexit.register(ray.shutdown)


@contextmanager
def _redacted_command() -> Iterator[None]:
    """Have Ray keep the command of this driver without the credentials of URIs.

    A driver tells its cluster how it was called, and the dashboard and ``ray list jobs`` show it.
    Ray has no setting for it; this is the one place that touches its private function.
    """
    from ray._private import utils

    of_ray = getattr(utils, "get_entrypoint_name", None)
    if of_ray is None:  # another version: a test on a cluster tells
        yield
        return
    utils.get_entrypoint_name = lambda: redact(of_ray())
    try:
        yield
    finally:
        utils.get_entrypoint_name = of_ray


@contextmanager
def _on_the_loopback() -> Iterator[None]:
    """Let a cluster that starts meanwhile listen on 127.0.0.1 alone, where no other host comes.

    Ray does so on macOS and Windows. On Linux it takes the address that other nodes reach, for
    127.0.0.1 too, and its processes listen on all interfaces. There is no public setting.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _start_and_stay(beginning: Future[None]) -> None:
    """Start the local cluster. Linux kills its processes with the thread that started them."""
    try:
        _start_here()
        beginning.set_result(None)
    except BaseException as error:
        beginning.set_exception(error)
    threading.Event().wait()


def _end(beginning: Future[None]) -> None:
    """End a cluster that may have begun just now, and that nobody came to use."""
    import ray

    wait([beginning], timeout=_START_S)
    ray.shutdown()


def _join(address: str) -> None:
    """Connect to a cluster, once it is known that this can succeed."""
    import ray
    from ray._private.authentication import authentication_token_setup
    from ray._private.services import canonicalize_bootstrap_address
    from ray.exceptions import AuthenticationError

    if address.startswith("ray://"):
        problem = "is one for Ray Client, which a run can not use; give HOST:6379 from a machine "
        raise ClusterError(address, f"{problem}of the cluster, or submit the run as a job")
    _check_certificates()
    if address == "auto":  # as ray.init does for a cluster that it finds by itself
        authentication_token_setup.maybe_enable_token_auth_if_token_available(
            warn_if_disabled=False
        )
    try:
        if tls_files(os.environ) is None:
            _knock(address, canonicalize_bootstrap_address(address))
        with _redacted_command():
            ray.init(logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, AuthenticationError) as error:
        ray.shutdown()
        raise ClusterError(address, _refusal(error)) from error


def _knock(address: str, host_and_port: str) -> None:
    """Ask the cluster that an address stands for its id, without a token and with it.

    Ray itself tries to connect for minutes where nobody is, hides that a token is wrong, and
    joins a cluster without tokens with one in hand, where no actor will ever start.

    Raises:
        ClusterError: nobody answers, or the two do not agree about tokens.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "disabled").lower()
    answer, said = _ask_for_id(host_and_port, {})
    if answer == "OK" and mode == "token":
        raise ClusterError(
            address,
            "asks for no token and this process brings one (RAY_AUTH_MODE=token), so that its "
            "actors could not start; set RAY_AUTH_MODE=disabled here, or token on all its nodes",
        )
    if answer == "UNAUTHENTICATED":
        if mode != "token":
            problem = f"asks for a token and this process brings none (RAY_AUTH_MODE is {mode}); "
            raise ClusterError(address, f"{problem}set RAY_AUTH_MODE=token; the token: {_TOKEN}")
        token = _token()
        if not token:
            raise ClusterError(address, f"asks for a token and none is found; {_TOKEN}")
        answer, said = _ask_for_id(host_and_port, token)
        if answer == "UNAUTHENTICATED":
            raise ClusterError(address, f"asks for another token than the one found; {_TOKEN}")
    if answer == "DEADLINE_EXCEEDED":
        said = f"it said nothing for {_ANSWER_S:g} s"
    if answer != "OK":
        raise ClusterError(
            address,
            f"does not answer ({said}); start one with ray start --head, correct RAY_ADDRESS, or "
            f"unset it to run on this machine alone",
        )


def _token() -> dict[str, str]:
    """Return the header with this process's token, found as Ray finds it; empty: there is none."""
    import ray

    loader = ray._raylet.AuthenticationTokenLoader.instance()
    if not loader.has_token(ignore_auth_mode=True):
        return {}
    headers: dict[str, str] = loader.get_token_for_http_header()
    return headers


def _ask_for_id(host_and_port: str, headers: dict[str, str]) -> tuple[str, str]:
    """Return (gRPC's word for how it went, why it failed) of a cheap call to a cluster."""
    import grpc
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    # As Ray's own channels: a proxy for the web is none for a cluster.
    with grpc.insecure_channel(host_and_port, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        request = gcs_service_pb2.GetClusterIdRequest()
        metadata = [(key.lower(), value) for key, value in headers.items()]
        try:
            stub.GetClusterId(request, timeout=_ANSWER_S, metadata=metadata)
        except grpc.RpcError as error:
            details = " ".join((error.details() or "").split())
            return error.code().name, details.rpartition("Failed to connect to remote host: ")[2]
    return "OK", ""


def _refusal(error: Exception) -> str:
    """Return in words why ``ray.init`` did not join a cluster."""
    said = str(error)
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", said)
    if "Version mismatch" in said and len(versions) == 2:
        (its_ray, its_python), (our_ray, our_python) = versions
        return (
            f"runs Ray {its_ray} on Python {its_python}, this process Ray {our_ray} on Python "
            f"{our_python}; install the cluster's versions here, or submit the run as a job, "
            f"which uses the cluster's own"
        )
    if isinstance(error, ValueError):
        return f"is no address ({said}); give HOST:PORT of its head: the port is mostly 6379"
    # The first line of what Ray says, and of what it says was the reason.
    lines = [str(e).strip().partition("\n")[0] for e in (error, error.__cause__) if e]
    return f"can not be joined: {': '.join(filter(None, lines))}; start the run on one of its nodes"


def draining_nodes() -> dict[str, int]:
    """Return the nodes that got notice, by hex id: when they end, in ms of Unix time; 0: unknown.

    Ray has no public call for it; this is the one place that uses its private one.
    """
    from ray._private.state import state

    nodes: dict[str, int] = state.get_draining_nodes()
    return nodes


def nodes_to_add() -> list[tuple[str, dict[str, float], int]]:
    """Return the nodes that the cluster's autoscaler may start: (name, resources, how many in all).

    Ray has no public call for it. Where Kubernetes starts the nodes, Ray keeps the groups of
    nodes; where `ray up` does, the head's home has the cluster's configuration. A number
    below 0 is no limit. Empty if there is no autoscaler, or it can not be read.
    """
    import yaml
    from ray._private.state import state

    config = state.get_cluster_config()
    if config is not None:
        groups = config.node_group_configs
        return [(g.name, dict(g.resources), g.max_count) for g in groups if g.max_count]
    try:
        return _node_types(yaml.safe_load(_BOOTSTRAP.expanduser().read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return []


def _node_types(config: dict[str, Any]) -> list[tuple[str, dict[str, float], int]]:
    """Return the worker nodes of a configuration that `ray up` has taken."""
    limit = int(config.get("max_workers", 2))
    return [
        (name, dict(node["resources"]), min(limit, int(node.get("max_workers", limit))))
        for name, node in config["available_node_types"].items()
        if name != config["head_node_type"] and node.get("max_workers", limit)
    ]


def folder_sizes(folder: str, excludes: list[str]) -> tuple[dict[str, int], int]:
    """Return the bytes that Ray would send of a folder, by its entries, and Ray's limit.

    Counted by Ray's own walk, with .gitignore and .rayignore; Ray packs without compressing.
    The limit is the smaller of two: what the dashboard takes at once, and what Ray keeps.
    """
    from ray._private import ray_constants
    from ray._private.runtime_env import packaging

    sizes: dict[str, int] = {}
    root = Path(folder).absolute()

    def count(path: Path) -> None:
        if path.is_file() and path != root:
            entry = path.relative_to(root).parts[0]
            sizes[entry] = sizes.get(entry, 0) + path.stat().st_size

    leave_out = packaging._get_excludes(root, excludes)
    packaging._dir_travel(root, [leave_out], count, include_gitignore=True)
    return sizes, min(ray_constants.DASHBOARD_CLIENT_MAX_SIZE, packaging.GCS_STORAGE_MAX_SIZE)


def drain_node(node_id: str, *, deadline_s: float) -> None:
    """Give a node notice, as `ray drain-node` does. Nothing is killed by it.

    Raises:
        RuntimeError: Ray refused.
    """
    import ray
    from ray.core.generated import autoscaler_pb2

    client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, why = client.drain_node(
        node_id,
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "raydl was asked to",
        int((time.time() + deadline_s) * 1000),
    )
    if not accepted:
        raise RuntimeError(f"node {node_id} can not be drained: {why}")
