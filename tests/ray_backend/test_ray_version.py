"""Private parts of Ray are used only with the versions that these tests have seen."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from clusters import BOUND_S
from programs import Program
from ray import _raylet
from ray._private import ray_constants, utils, worker
from ray._private.node import Node

from raydl import cli
from raydl.errors import ConfigError
from raydl.ray_backend import cluster, ray_version, session

PRIVATE = re.compile(r"\bray\.(_[a-z]\w*|core\.)|from ray import _|\._ray_\w+")
USERS = {"cluster.py", "fork_server.py", "session.py"}
"""The modules that name private parts of Ray, each of which asks ``is_tested``."""
OTHER_RAY = """
import sys
from raydl.ray_backend import ray_version
ray_version.TESTED = ("2.0.0",)
from raydl import cli
sys.exit(cli.main(sys.argv[1:]))
"""
"""The command line of raydl whose tests have seen another version than the one that runs."""


@pytest.fixture
def other_ray(monkeypatch):
    monkeypatch.setattr(ray, "__version__", "2.61.0")


@pytest.fixture
def inits(monkeypatch):
    """The calls of ``ray.init``, with the names of Ray that raydl may replace."""
    calls = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **how: calls.append((how, replaceable())))
    monkeypatch.setattr(session, "_beginning", None)
    monkeypatch.setattr(session.atexit, "register", lambda *_: None)
    monkeypatch.setattr(_raylet, "random", object())
    monkeypatch.setattr(worker, "print_to_stdstream", lambda data, ignore_prefix: None)
    for name in ("RAY_ADDRESS", "RAY_USE_TLS"):
        monkeypatch.delenv(name, raising=False)
    return calls


def replaceable():
    return {
        "ids": _raylet.random,
        "command": utils.get_entrypoint_name,
        "addresses": ray_constants.ENABLE_RAY_CLUSTER,
        "dashboard": Node.start_api_server,
        "monitor": Node.start_monitor,
        "agent": utils.get_dashboard_dependency_error,
        "messages": worker.print_to_stdstream,
        "setup": ray_constants.SETUP_WORKER_FILENAME,
    }


def test_the_version_that_is_installed_is_among_those_that_the_tests_have_seen():
    assert ray.__version__ in ray_version.TESTED
    assert session.notes() == []


@pytest.mark.skipif(sys.platform != "linux", reason="the own setup of workers")
def test_with_a_version_that_was_seen_all_private_names_are_replaced(inits):
    before = replaceable()
    assert session.connect(has_forks=True) is True
    [(how, during)] = inits
    assert [name for name in before if during[name] is before[name]] == []
    assert how["_system_config"]


@pytest.mark.parametrize("has_forks", [True, False])
def test_another_version_of_ray_starts_in_its_own_way(inits, other_ray, has_forks):
    before = replaceable()
    assert session.connect(has_forks=has_forks) is True
    [(how, during)] = inits
    assert during == before
    assert how["_system_config"] is None
    assert f"raydl-{os.getuid()}" in how["_temp_dir"]  # an option that Ray documents


def test_another_version_of_ray_joins_a_cluster_in_its_own_way(monkeypatch, inits, other_ray):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    before = replaceable()
    assert session.connect() is False
    [(_, during)] = inits
    assert during == before


def test_another_version_of_ray_is_said_in_one_sentence(other_ray):
    [sentence] = session.notes()
    assert sentence.startswith("Ray 2.61.0 starts in its own way, since raydl's tests have seen")
    assert "install ray==2.60.0" in sentence
    assert "\n" not in sentence


def test_another_version_of_ray_gets_no_command_with_credentials(monkeypatch, inits, other_ray):
    """Only a private part of Ray lets raydl remove them from the list of jobs."""
    uri = "s3://KEY:hunter2@bucket/data"
    monkeypatch.setattr(sys, "orig_argv", ["raydl", "train", "--data", uri])
    with pytest.raises(
        ConfigError, match=r"^ray must be 2.60.0 with credentials in a URI"
    ) as error:
        session.connect()
    assert "hunter2" not in str(error.value)
    assert inits == []


def test_with_another_version_of_ray_what_only_private_parts_know_is_unknown(
    monkeypatch, other_ray, tmp_path
):
    monkeypatch.setattr(session, "_BOOTSTRAP", tmp_path / "absent")
    assert session.draining_nodes() == {}
    assert session.nodes_to_add() == []
    assert session.uploaded_files(str(tmp_path), []) is None
    assert cluster.place_of(SimpleNamespace()) is None
    assert cluster.has_ended("0" * 32, 1) is False
    with pytest.raises(RuntimeError, match=r"cannot be drained with Ray 2\.61\.0"):
        session.drain_node("0" * 56, deadline_s=1.0)


def test_only_modules_that_ask_for_the_version_name_private_parts_of_ray():
    """The node providers are apart: their classes are those of a file for ``ray up``."""
    users = {
        path.name: path.read_text()
        for path in Path(cli.__file__).parents[1].rglob("*.py")
        if path.parent.name != "node_providers" and PRIVATE.search(_code_of(path))
    }
    assert users.keys() == USERS
    for name, text in users.items():
        assert "ray_version.is_tested()" in text, name


def _code_of(path):
    """Return a module's text without the names of loggers, which need not exist."""
    return path.read_text().replace('"ray._private.runtime_env"', "")


@pytest.mark.cluster
@pytest.mark.slow
def test_a_run_with_another_version_of_ray_trains_and_says_so_once(tmp_path):
    words = [
        "-c", OTHER_RAY, "train", "--data", "synthetic:64", "--model", "mlp", "--workers", "2",
        "--cpus-per-worker", "0.5", "--batch-size", "8", "--epochs", "2", "--run.progress", "plain",
        "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    with (tmp_path / "out").open("w") as out:
        process = Program(words, output=out, environment=os.environ)
    output = (tmp_path / "out").read_text
    assert process.wait(timeout=BOUND_S) == 0, output()
    assert output().count(f"Ray {ray.__version__} starts in its own way") == 1
    assert "center test" in output()
