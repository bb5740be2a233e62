"""Fixtures for all tests, and settings that must precede them."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import numpy as np
import pytest
import torch
from disks import mounted
from ensembles import Ensemble, tiny_images
from repository import HELPERS, ROOT
from tyro._parsers import ParserSpecification

from raydl.data import ImageSet
from raydl.data.values import Decoder
from raydl.ray_backend import fork_server, session
from raydl.run.recorder import RunRecorder

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

session.prepare()  # before any test imports Ray
# Under nohup SIGHUP is ignored, also in the programs that tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Processes of a cluster import this checkout and classes from the test modules.
_FOLDERS = [ROOT, HELPERS, *sorted({path.parent for path in (ROOT / "tests").rglob("test_*.py")})]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*map(str, _FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# A shell without job control ignores SIGINT in its background commands. Their child processes,
# for example the programs that tests interrupt, would ignore it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# At each seed torch records the stack for devices that are not in use.
for device in (torch.cuda, torch.mtia, torch.xpu):
    device.traceback = types.SimpleNamespace(format_stack=lambda: [])  # type: ignore[attr-defined]

# The duration of an example depends on the machine, and no test checks it.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")


# The longest modules come first, so that none of them runs alone at the end. The third starts no
# Ray: Ray gives up if a node takes 30 s to start, and the first two start many at once.
_FIRST = ["test_counting", "test_elastic_runs", "test_s3", "test_jobs", "test_runs"]

# The modules whose fast tests wait most of the time, for time-outs and for other threads.
_WAITING = [
    "test_silent_storage",
    "test_process_group",
    "test_collective_group",
    "test_tls_tunnel",
    "test_storage",
    "test_faults",
    "test_ends_of_runs",
    "test_ray_operations",
    "test_rendezvous",
    "test_allreduce",
    "test_run_commands",
]


def pytest_sessionstart() -> None:
    gc.disable()
    # As it exits, the interpreter would search all objects for garbage several times: seconds.
    atexit.register(gc.freeze)


def pytest_collection_finish() -> None:
    """Exclude the objects of all imported modules from garbage collections."""
    gc.freeze()
    gc.enable()


def _waits(item: pytest.Item) -> bool:
    starts_others = item.get_closest_marker("cluster") or item.get_closest_marker("processes")
    return item.path.stem in _WAITING and not starts_others


def _waits_beside_work(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests in an order in which those that wait run beside those that need a core.

    Half of the waiting tests are the first, half are in the middle. pytest-xdist gives each process
    a part of the list, so two of the processes begin with tests that wait, the others do not, and
    few such tests are left at the end.
    """
    waiting = sorted(filter(_waits, items), key=lambda item: _WAITING.index(item.path.stem))
    others = [item for item in items if not _waits(item)]
    half, middle = len(waiting) // 2, len(others) // 2
    return waiting[:half] + others[:middle] + waiting[half:] + others[middle:]


@pytest.hookimpl(trylast=True)  # when only the selected tests are left
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.stem
        return _FIRST.index(name) if name in _FIRST else len(_FIRST)

    items.sort(key=place)
    items[:] = _waits_beside_work(items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def monkeypatch_session() -> Iterator[pytest.MonkeyPatch]:
    """What ``monkeypatch`` is, for all tests of this process: a patch per test takes time."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_disks(monkeypatch_session: pytest.MonkeyPatch) -> None:
    """Skip waits for the disk; a test that records these calls replaces them itself."""
    monkeypatch_session.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch_session.setattr(os, "fdatasync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def no_chart_at_the_end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the chart at the end of a run, which takes 0.1 s, except in tests marked ``charts``."""
    if request.node.get_closest_marker("charts") is None:
        monkeypatch.setattr(RunRecorder, "_draw_time_parts", lambda self: None)


_decoded: dict[tuple[Decoder, object], np.ndarray] = {}
_decode = Decoder.decode


def decode_once(decoder: Decoder, data: object) -> np.ndarray:
    """Return an image as ``Decoder.decode`` does, from memory if it was decoded before."""
    if not isinstance(data, bytes):
        return _decode(decoder, data)
    image = _decoded.get((decoder, data))
    if image is None:
        image = _decode(decoder, data)
        if len(_decoded) < 4000:  # tests measure the memory of this process
            _decoded[decoder, data] = image
    return image


@pytest.fixture(scope="session", autouse=True)
def images_decoded_once(monkeypatch_session: pytest.MonkeyPatch) -> None:
    """Decode each of the bundled digits once: that was half of the time of a short run."""
    monkeypatch_session.setattr(Decoder, "decode", decode_once)


@pytest.fixture(scope="session", autouse=True)
def options_made_once(monkeypatch_session: pytest.MonkeyPatch) -> None:
    """Make the options of each command once: tyro takes 15 ms, and tests run 600 commands."""
    make = ParserSpecification.from_callable_or_type
    made: dict[tuple[type, str | None], ParserSpecification] = {}

    def make_once(f: type, **more: Any) -> ParserSpecification:
        if more["parent_classes"]:  # a part of the options
            return make(f, **more)
        key = (f, more["description"])
        if key not in made:
            made[key] = make(f, **more)
        return made[key]

    name = "from_callable_or_type"
    monkeypatch_session.setattr(ParserSpecification, name, staticmethod(make_once))


@pytest.fixture(autouse=True)
def no_ray_by_itself(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call of Ray fail in a test without a cluster.

    Ray would start a cluster in the test process, which ends with the thread of that call, and
    then ends the test process, too.
    """
    if request.node.get_closest_marker("cluster") is None:
        from ray._private import auto_init_hook

        monkeypatch.setattr(auto_init_hook, "enable_auto_connect", False)


@pytest.fixture(scope="session", autouse=True)
def no_ray_ahead(monkeypatch_session: pytest.MonkeyPatch) -> None:
    """Prevent commands in the test process from starting Ray, which would outlive the test."""
    monkeypatch_session.setattr(session, "begin", lambda **_: None)


@pytest.fixture
def root() -> Path:
    return ROOT


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a short path: paths of Ray's sockets may have at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="raydl-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted disk of 2 MiB."""
    with mounted(tmp_path / "disk", kib=2048) as disk:
        yield disk


@pytest.fixture
def ensemble() -> type[Ensemble]:
    return Ensemble


@pytest.fixture
def images() -> ImageSet:
    return tiny_images()


@pytest.fixture(scope="session")
def four_cpus() -> Iterator[Cluster]:
    """A one-node cluster with four CPUs, for tests that do not kill its processes."""
    from clusters import start_cluster

    with start_cluster(4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(four_cpus: Cluster) -> Iterator[None]:
    """Connect the tests of a module to the cluster ``four_cpus``.

    Ray's worker processes are forks of raydl's fork server, also for the tests' own actors, since
    each would need a second of CPU time for its imports.
    """
    import ray

    command = fork_server.client_command()
    ray.init(address=four_cpus.address, runtime_env={"py_executable": command} if command else None)
    yield
    ray.shutdown()
