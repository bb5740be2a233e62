"""Connects to a Ray cluster: the cluster of the job, or a local one started for this run.

Ray reads its environment when it is imported, so call ``prepare`` before that.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import re
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from raydl.config.tls import check_tls, tls_files
from raydl.errors import STOPPED, ClusterError, ConfigError
from raydl.ray_backend import fork_server, ray_version
from raydl.ray_backend.open_files import check_open_files
from raydl.ray_backend.private_folder import make_private_folder
from raydl.text.redaction import redact

_BOOTSTRAP = Path("~/ray_bootstrap_config.yaml")
"""The cluster's configuration, which `ray up` writes on the head."""
_ANSWER_S = 5.0
"""The longest wait for a cluster's first answer, in seconds. Ray itself waits for minutes."""
_START_S = 120.0
"""The longest wait for the node of a cluster of the run's own, in seconds. Ray's own is 30."""
_ATTEMPTS = 3
"""How often a cluster of the run's own is started, if its raylet ends as it starts."""
_END_S = 60.0
"""How long this process waits at its end for a cluster that is starting, in seconds."""
_beginning: Future[bool] | None = None
"""A connection that is under way; its result is that of ``connect``."""
_is_awaited = threading.Event()
"""Whether ``connect`` has been called since ``begin``."""
_is_ending = threading.Event()
"""Whether this process ends while its cluster may still be starting."""
_OF_LOSSES = ("A worker died or was killed while executing", "The node with node id: ")
"""How Ray's messages about a lost process or node begin."""
_HINT = (
    "put the cluster's token into RAY_AUTH_TOKEN or ~/.ray/auth_token (ray get-auth-token on its "
    "head prints it)"
)


def prepare() -> None:
    """Set the environment variables that Ray reads at import, unless the user has set them.

    Does nothing if this process has imported Ray already, or if RAY_ADDRESS names a cluster.
    """
    if "ray" in sys.modules or os.environ.get("RAY_ADDRESS"):
        return
    # A cluster and its clients must agree on authentication, so set it explicitly for both.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # The default of newer versions of Ray: actors that reserve no GPU see the GPUs of their node.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def notes() -> list[str]:
    """Return sentences about how Ray starts here, for the log of a run."""
    prepare()  # before the import
    note = ray_version.note()
    return [note] if note else []


def prepare_client(address: str | None) -> str | None:
    """Set the environment variables of Ray's job client, unless the user has set them.

    Args:
        address: the address from the user. It is also written to the environment, which Ray
            prefers.

    Returns:
        The address for Ray's client.

    Raises:
        ConfigError: if it is not the address of a dashboard.
    """
    # By default a cluster requires a token, and a client sends none.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS")
    if address:
        address = os.environ["RAY_API_SERVER_ADDRESS"] = dashboard_url(address)
    return address or None


def dashboard_url(address: str) -> str:
    """Return the URL of a cluster's dashboard from an address of the user.

    Raises:
        ConfigError: if it is an address for Ray Client, that of the head's own port, or no URL.
    """
    if address == "auto":  # Ray finds the cluster of this machine
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
    except ValueError:  # it may quote a part of a password with an unencoded /
        problem = f"must be a URL, http://HEAD:8265, got {url}"
        raise ConfigError("submit.address", problem) from None
    return url


def begin(*, has_forks: bool) -> None:
    """Connect in a thread, as ``connect`` would, and return at once.

    Ray takes seconds to start one process after the other; meanwhile the caller imports modules and
    reads data. ``connect`` waits for the connection, and raises its error. A local cluster ends
    with this process.

    Args:
        has_forks: whether the run's processes will be forks: start this node's fork server, too,
            unless the caller waits by then. Its first actor starts the server as well, and the task
            that starts it early leaves a process that no actor can use.
    """
    global _beginning
    if _beginning is not None:
        return
    prepare()
    import ray

    if ray.is_initialized():
        return
    _beginning = Future()
    _is_awaited.clear()
    _is_ending.clear()
    if not _address():  # runs before Ray's handlers, which are registered earlier
        atexit.register(_end, _beginning)
    threading.Thread(
        target=_connect_and_stay, args=(_beginning, has_forks), name="start-of-ray", daemon=True
    ).start()


def connect(*, has_forks: bool = True) -> bool:
    """Connect to Ray; return whether a local cluster was started for this process.

    An existing connection is kept. Otherwise ``RAY_ADDRESS``, which ``ray job submit`` sets, names
    the cluster. Without it a local cluster starts, which ends with this process.

    Args:
        has_forks: whether the run's processes will be forks, if ``begin`` was not called.

    Raises:
        ClusterError: if no cluster answers, it rejects the token, or has another version.
        ConfigError: if it is to use TLS, and its certificates are unusable.
    """
    global _beginning
    import ray

    if _beginning is not None:
        begun, _beginning = _beginning, None
        _is_awaited.set()
        is_local = begun.result()
        end_on_signals()
        return is_local
    if ray.is_initialized():
        return False
    is_local = _connect(has_forks=has_forks)
    if is_local:
        atexit.register(ray.shutdown)
    end_on_signals()
    return is_local


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end this process as an exception does, with all that it has started.

    Ray's own handler of SIGTERM exits with a status that looks like a failure, and SIGHUP would
    end this process alone. Under ``nohup`` SIGHUP stays ignored. Only the main thread may set
    handlers; called in another one, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, _exit)
    if handles_hangup():
        signal.signal(signal.SIGHUP, _exit)


def handles_hangup() -> bool:
    """Whether this process ends when its terminal closes; under ``nohup`` it does not."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def leave_closed_terminal() -> None:
    """Replace output to a terminal that is closed, where each write would fail, by none."""
    closed = select.poll()
    for stream in (0, 1, 2):
        closed.register(stream, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream, events in closed.poll(0):
        if events & select.POLLHUP and stat.S_ISCHR(os.fstat(stream).st_mode):
            os.dup2(nothing, stream)
    os.close(nothing)


def _exit(number: int, _: FrameType | None) -> None:
    if number == signal.SIGHUP:
        leave_closed_terminal()
    sys.exit(STOPPED[signal.Signals(number).name])


def _connect(*, has_forks: bool) -> bool:
    is_local = not _address()
    _check_command()
    if is_local:
        _start_here(has_forks=has_forks)
    else:
        _join(_address())
    logging.getLogger("ray").setLevel(logging.WARNING)
    return is_local


def _address() -> str:
    """Return the address of the cluster in the environment, or "" if there is none."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def _check_command() -> None:
    """Refuse credentials in the command of this process if Ray would record them.

    Raises:
        ConfigError: if it has some, and this version of Ray does not let raydl remove them.
    """
    import ray

    command = " ".join(sys.orig_argv)
    if not ray_version.is_tested() and redact(command) != command:
        raise ConfigError(
            "ray",
            f"must be {' or '.join(ray_version.TESTED)} with credentials in a URI of the command, "
            f"got {ray.__version__}: this version would show them in its list of jobs; put them "
            f"into the environment",
        )


def _check_certificates() -> None:
    """Check the TLS certificates: with bad ones, Ray would fail after a long wait."""
    files = tls_files(os.environ)
    if files is not None:
        check_tls(files)


def _start_here(*, has_forks: bool) -> None:
    _check_certificates()
    check_open_files()
    patches = (
        _redacted_command, _on_the_loopback, _without_dashboard, _own_setup_worker, _patiently
    )  # fmt: skip
    cause: Exception | None = None
    for _ in range(_ATTEMPTS):
        try:
            with _without_hangups(), _patched(*patches):
                _start_ray(has_forks=has_forks)
            return
        except _RayletEndedError as error:
            cause = error
            if _is_ending.is_set():
                break
        except Exception as error:
            if "timed out during startup" not in str(error):  # Ray's words
                raise
            cause = error
            break
    raise ClusterError(
        "local",
        "did not start in time: this machine is very busy, or lacks memory or disk space; try "
        "again, or start a cluster with ray start and set RAY_ADDRESS=auto",
    ) from cause


def _start_ray(*, has_forks: bool) -> None:
    import ray

    ray.init(
        address="local",
        include_dashboard=False,
        logging_level=_level(),
        _temp_dir=str(make_private_folder(os.environ)),
        _system_config=_system_config(has_forks) if ray_version.is_tested() else None,
    )


def _system_config(has_forks: bool) -> dict[str, Any]:
    """Return the settings of a cluster of the run's own that Ray does not document.

    Ray starts a process per core in advance. It cannot become a fork; an actor without forks runs
    in it, and finds torch imported.
    """
    if has_forks and sys.platform == "linux":
        return {"prestart_worker_first_driver": False}
    return {"preload_python_modules": ["raydl.core.torch_import"]}


def _level() -> int:
    """Return Ray's level of logging while it connects.

    In a thread it would warn that it sets no handler for SIGTERM, which ``connect`` does.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return logging.WARNING if is_main else logging.ERROR


def _draw_ids_from_the_system() -> None:
    """Make Ray draw the ids of this driver's subscribers from the system's random numbers.

    Ray draws them from Python's global generator, which the driver of a run seeds. Two drivers with
    one seed would have the same ids: each would receive only some of its workers' output, and both
    would poll the cluster's control store without a pause. Ray has no setting for it.
    """
    from ray import _raylet

    _raylet.random = random.SystemRandom()  # type: ignore[attr-defined]


def _log_losses_to_file() -> None:
    """Write Ray's messages about lost processes to a file among Ray's logs, not to the terminal.

    Each has twelve lines, most of which guess at what may have killed the process. Ray has no
    setting for it. The file is ``raydl-driver-PID.log``, on the machine of the driver.
    """
    from ray._private import worker

    show = worker.print_to_stdstream
    if show.__module__ == __name__:  # of an earlier connection
        return

    def keep_or_show(data: dict[str, Any], ignore_prefix: bool) -> None:
        lines = data["lines"]
        is_of_loss = data.get("pid") == "raylet" and all(x.startswith(_OF_LOSSES) for x in lines)
        if not (is_of_loss and _keep(worker._global_node.get_logs_dir_path(), lines)):
            show(data, ignore_prefix)

    worker.print_to_stdstream = keep_or_show


def _keep(folder: str, lines: Sequence[str]) -> bool:
    """Append messages to a file in a folder; return whether that succeeded."""
    path = Path(folder) / f"raydl-driver-{os.getpid()}.log"
    # Other users can write to the log folder of a cluster that was started with ray start.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        with open(os.open(path, flags, 0o600), "a") as file:
            file.writelines(f"[{now}] {line}\n" for line in lines)
    except OSError:
        return False
    return True


@contextmanager
def _patched(*patches: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Patch Ray inside this context, if raydl has been tested with this version of Ray."""
    with ExitStack() as stack:
        if ray_version.is_tested():
            _draw_ids_from_the_system()
            _log_losses_to_file()
            for patch in patches:
                stack.enter_context(patch())
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a private name of Ray inside this context, where Ray has no setting."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _redacted_command() -> Iterator[None]:
    """Remove the credentials of URIs from the command that Ray records for this driver.

    The dashboard and ``ray list jobs`` show that command.
    """
    from ray._private import utils

    original = utils.get_entrypoint_name
    with _replaced(utils, "get_entrypoint_name", lambda: redact(original())):
        yield


@contextmanager
def _on_the_loopback() -> Iterator[None]:
    """Let a cluster that starts inside this context listen only on 127.0.0.1.

    Ray does so on macOS and Windows. On Linux it replaces 127.0.0.1 by the address that other nodes
    reach, and its processes listen on all interfaces.
    """
    from ray._private import ray_constants

    with _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False):
        yield


@contextmanager
def _without_dashboard() -> Iterator[None]:
    """Let a node that starts inside this context run only the processes that a run needs.

    Also for a cluster without a dashboard Ray starts its process, which then reports the use of
    Ray, and a monitor for the autoscaler. Each node has an agent that serves the dashboard; Ray
    starts the small form of it where the packages of the dashboard are missing.
    """
    from ray._private import utils
    from ray._private.node import Node

    missing = ImportError("this cluster has no dashboard")
    with (
        _replaced(Node, "start_api_server", lambda node, **_: None),
        _replaced(Node, "start_monitor", lambda node: None),
        _replaced(utils, "get_dashboard_dependency_error", lambda: missing),
    ):
        yield


@contextmanager
def _without_hangups() -> Iterator[None]:
    """Let the processes that start inside this context outlive a terminal that closes.

    SIGHUP reaches every process of the terminal, and the run needs Ray's for its last checkpoint.
    Ray does the same with SIGINT. The processes end with the driver.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _own_setup_worker() -> Iterator[None]:
    """Let a node that starts inside this context set up its workers without importing Ray first.

    The program is ``setup_worker.py`` beside this module. It is written for Linux.
    """
    from ray._private import ray_constants

    if sys.platform != "linux":
        yield
        return
    path = str(Path(__file__).with_name("setup_worker.py"))
    with _replaced(ray_constants, "SETUP_WORKER_FILENAME", path):
        yield


class _RayletEndedError(Exception):
    """The raylet of a node has ended before the node was ready."""


@contextmanager
def _patiently() -> Iterator[None]:
    """Let a node that starts inside this context take longer than Ray permits.

    Ray asks the control store for the node, and gives up after 30 s. A raylet ends if its agent has
    not started within 15 s, as on a machine on which other runs start; then waiting is in vain.
    Neither bound is a setting.

    Raises:
        _RayletEndedError: in place of what Ray would raise; no process of the node is left.
    """
    from ray._private import services
    from ray._private.node import Node

    original, start, until = (
        services.get_node,
        Node.start_ray_processes,
        time.monotonic() + _START_S,
    )
    nodes: list[Any] = []

    def start_processes(node: Any) -> None:
        nodes.append(node)
        start(node)

    def get_node(*arguments: Any) -> Any:
        while True:
            try:
                return original(*arguments)
            except RuntimeError as error:  # not yet registered
                if _has_raylet_ended(nodes):
                    raise _RayletEndedError from error
                if _is_ending.is_set() or time.monotonic() > until:
                    raise
                time.sleep(0.1)

    with (
        _replaced(services, "get_node", get_node),
        _replaced(Node, "start_ray_processes", start_processes),
    ):
        try:
            yield
        except BaseException:
            for node in nodes:
                node.kill_all_processes(check_alive=False)
            raise


def _has_raylet_ended(nodes: Sequence[Any]) -> bool:
    raylets = [info for node in nodes for info in node.all_processes.get("raylet", ())]
    return any(info.process.poll() is not None for info in raylets)


def _connect_and_stay(beginning: Future[bool], has_forks: bool) -> None:
    """Connect, then wait forever: Linux kills the processes of a local cluster with this thread."""
    try:
        is_local = _connect(has_forks=has_forks)
        if has_forks and not _is_awaited.is_set():
            fork_server.warm_up()
        beginning.set_result(is_local)
    except BaseException as error:
        beginning.set_exception(error)
    threading.Event().wait()


def _end(beginning: Future[bool]) -> None:
    """End a local cluster, which may still be starting."""
    import ray

    _is_ending.set()
    wait([beginning], timeout=_END_S)
    ray.shutdown()


def _join(address: str) -> None:
    """Connect to a cluster, after a check that it answers."""
    import ray
    from ray.exceptions import AuthenticationError

    if address.startswith("ray://"):
        problem = (
            "is an address for Ray Client, which a run cannot use; give HOST:6379 on a machine "
        )
        raise ClusterError(address, f"{problem}of the cluster, or submit the run as a job")
    _check_certificates()
    try:
        if ray_version.is_tested():
            _check_cluster(address)
        with _patched(_redacted_command):
            ray.init(logging_level=_level())
    except (ConnectionError, RuntimeError, ValueError, AuthenticationError) as error:
        ray.shutdown()
        raise ClusterError(address, _refusal(error)) from error


def _check_cluster(address: str) -> None:
    """Find the cluster of an address as Ray does, and check that it answers, except with TLS."""
    from ray._private.authentication import authentication_token_setup
    from ray._private.services import canonicalize_bootstrap_address

    if address == "auto":  # as ray.init does for a cluster that it finds
        authentication_token_setup.maybe_enable_token_auth_if_token_available(
            warn_if_disabled=False
        )
    if tls_files(os.environ) is None:
        _check_answer(address, canonicalize_bootstrap_address(address))


def _check_answer(address: str, host_and_port: str) -> None:
    """Request a cluster's id, first without a token and then with one.

    Ray itself retries an unused address for minutes, and hides that a token is wrong. A process
    with a token may join a cluster without tokens, where its actors never start.

    Raises:
        ClusterError: if no cluster answers, or it does not accept this process's token.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "disabled").lower()
    answer, details = _request_id(host_and_port, {})
    if answer == "OK" and mode == "token":
        raise ClusterError(
            address,
            "requires no token but this process sends one (RAY_AUTH_MODE=token), so its actors "
            "could not start; set RAY_AUTH_MODE=disabled here, or token on all its nodes",
        )
    if answer == "UNAUTHENTICATED":
        if mode != "token":
            problem = f"requires a token but this process sends none (RAY_AUTH_MODE is {mode}); "
            raise ClusterError(address, f"{problem}set RAY_AUTH_MODE=token, and {_HINT}")
        token = _token()
        if not token:
            raise ClusterError(address, f"requires a token, and none was found; {_HINT}")
        answer, details = _request_id(host_and_port, token)
        if answer == "UNAUTHENTICATED":
            raise ClusterError(address, f"rejects the token that was found; {_HINT}")
    if answer == "DEADLINE_EXCEEDED":
        details = f"no answer within {_ANSWER_S:g} s"
    if answer != "OK":
        raise ClusterError(
            address,
            f"does not answer ({details}); start one with ray start --head, correct RAY_ADDRESS, "
            f"or unset it to run only on this machine",
        )


def _token() -> dict[str, str]:
    """Return the header with this process's token from Ray's own search, or {} if there is none."""
    import ray

    loader = ray._raylet.AuthenticationTokenLoader.instance()
    if not loader.has_token(ignore_auth_mode=True):
        return {}
    headers: dict[str, str] = loader.get_token_for_http_header()
    return headers


def _request_id(host_and_port: str, headers: dict[str, str]) -> tuple[str, str]:
    """Request a cluster's id; return (name of the gRPC status, why the call failed)."""
    import grpc
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    # Like Ray's own channels: do not use a web proxy.
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
    """Return why ``ray.init`` did not connect to a cluster."""
    text = str(error)
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", text)
    if "Version mismatch" in text and len(versions) == 2:
        (its_ray, its_python), (our_ray, our_python) = versions
        return (
            f"runs Ray {its_ray} on Python {its_python}, but this process runs Ray {our_ray} on "
            f"Python {our_python}; install the cluster's versions here, or submit the run as a "
            f"job, which uses the cluster's own"
        )
    if isinstance(error, ValueError):
        return f"is not an address ({text}); give HOST:PORT of its head: the port is usually 6379"
    # The first lines of Ray's error and of its cause.
    lines = [str(e).strip().partition("\n")[0] for e in (error, error.__cause__) if e]
    return f"cannot be joined: {': '.join(filter(None, lines))}; start the run on one of its nodes"


def draining_nodes() -> dict[str, int]:
    """Return the draining nodes by hex id: their deadlines in ms of Unix time; 0: unknown.

    Ray has no public call for it: empty with another version of Ray.
    """
    if not ray_version.is_tested():
        return {}
    from ray._private.state import state

    nodes: dict[str, int] = state.get_draining_nodes()
    return nodes


def nodes_to_add() -> list[tuple[str, dict[str, float], int]]:
    """Return the nodes that the cluster's autoscaler may start: (name, resources, maximum number).

    Ray has no public call for it. With Kubernetes, Ray has the groups of nodes; with `ray up`, the
    head's home folder has the cluster's configuration. A number below 0 means no limit. Empty if
    there is no autoscaler, or its configuration cannot be read.
    """
    import yaml

    config = _cluster_config()
    if config is not None:
        groups = config.node_group_configs
        return [(g.name, dict(g.resources), g.max_count) for g in groups if g.max_count]
    try:
        config = yaml.safe_load(_BOOTSTRAP.expanduser().read_text())
        limit = int(config.get("max_workers", 2))
        return [
            (name, dict(node["resources"]), min(limit, int(node.get("max_workers", limit))))
            for name, node in config["available_node_types"].items()
            if name != config["head_node_type"] and node.get("max_workers", limit)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return []


def _cluster_config() -> Any:
    """Return the configuration that an autoscaler has given to Ray, or None."""
    if not ray_version.is_tested():
        return None
    from ray._private.state import state

    return state.get_cluster_config()


def folder_sizes(files: Mapping[Path, int]) -> tuple[dict[str, int], int]:
    """Return the bytes of ``uploaded_files`` by the folder's entries, and Ray's limit.

    Ray does not compress. The limit is the smaller of two: the dashboard's largest request, and
    Ray's largest stored package.
    """
    from ray._private import ray_constants
    from ray._private.runtime_env import packaging

    sizes: dict[str, int] = {}
    for path, size in files.items():
        sizes[path.parts[0]] = sizes.get(path.parts[0], 0) + size
    return sizes, min(ray_constants.DASHBOARD_CLIENT_MAX_SIZE, packaging.GCS_STORAGE_MAX_SIZE)


def uploaded_files(folder: str, excludes: list[str]) -> dict[Path, int] | None:
    """Return the files of a folder that Ray would upload, by their paths in it, with their bytes.

    Ray's own walk finds them, with .gitignore and .rayignore. None: another version of Ray may walk
    in another way.
    """
    if not ray_version.is_tested():
        return None
    from ray._private.runtime_env import packaging

    sizes: dict[Path, int] = {}
    root = Path(folder).absolute()

    def count(path: Path) -> None:
        if path.is_file() and path != root:
            sizes[path.relative_to(root)] = path.stat().st_size

    excluded = packaging._get_excludes(root, excludes)
    has_gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"  # as Ray
    packaging._dir_travel(root, [excluded], count, include_gitignore=has_gitignore)
    return sizes


def drain_node(node_id: str, *, deadline_s: float) -> None:
    """Drain a node, as `ray drain-node` does. It kills nothing.

    Raises:
        RuntimeError: if Ray refuses, or is of another version.
    """
    import ray

    if not ray_version.is_tested():
        raise RuntimeError(f"node {node_id} cannot be drained with Ray {ray.__version__}")
    from ray.core.generated import autoscaler_pb2

    client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, why = client.drain_node(
        node_id,
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "raydl was asked to",
        int((time.time() + deadline_s) * 1000),
    )
    if not accepted:
        raise RuntimeError(f"node {node_id} cannot be drained: {why}")
