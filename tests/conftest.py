"""Fixtures of all tests, and what must be set before any of them starts."""

from __future__ import annotations

import os
import shutil
import tempfile
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch
from disks import mounted
from ensembles import Ensemble, tiny_images
from repository import HELPERS, ROOT

from raydl.data import ImageSet
from raydl.ray_backend import session

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

session.prepare()  # before any test imports Ray

# Processes of a cluster import the classes that tests define, and this checkout.
_FOLDERS = [ROOT, HELPERS, *sorted({path.parent for path in (ROOT / "tests").rglob("test_*.py")})]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*map(str, _FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Each time a seed is set, torch writes down the stack for devices that are not in use.
for device in (torch.cuda, torch.xpu):
    device.traceback = types.SimpleNamespace(format_stack=lambda: [])  # type: ignore[attr-defined]

# How long an example takes depends on the machine, and says nothing of what is promised.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: at the end nobody waits for it alone."""
    items.sort(key=lambda item: "whole_runs" not in item.path.parts)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_wait_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would survive a power failure is seen by no test but those that count these calls."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def no_ray_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command in the process of the tests starts no Ray that outlives its test."""
    monkeypatch.setattr(session, "begin", lambda: None)


@pytest.fixture
def root() -> Path:
    return ROOT


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for Ray's sockets, whose paths may have 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="raydl-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
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
    """A cluster of one node with four CPUs, for all tests that leave its processes alone."""
    from clusters import nodes

    with nodes(4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(four_cpus: Cluster) -> Iterator[None]:
    """The connection of one module's tests to that cluster."""
    import ray

    ray.init(address=four_cpus.address)
    yield
    ray.shutdown()
