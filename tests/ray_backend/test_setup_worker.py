"""The program that sets up a worker process in place of Ray's."""

import json
import os
import sys

import pytest

from raydl.ray_backend import setup_worker

WORKER = ["default_worker.py", "--node-ip-address=127.0.0.1", "--name=it's $HOME"]


class ExecError(Exception):
    """What a recorded call of exec raises, since the real one does not return."""


@pytest.fixture
def program(monkeypatch):
    """The recorded calls of exec: path, arguments and the environment at that time."""
    calls = []

    def become(path, args):
        calls.append((path, list(args), dict(os.environ)))
        raise ExecError

    for name in ("execv", "execvp"):
        monkeypatch.setattr(os, name, become)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return calls


def words_of(context, language="PYTHON"):
    return [
        f"{setup_worker._CONTEXT}{json.dumps(context)}",
        *WORKER,
        f"{setup_worker._LANGUAGE}{language}",
    ]


@pytest.mark.parametrize(
    "context",
    [
        {},
        {"env_vars": {"A": "1", "PATH": "/bin:${PATH}", "B": "x${NO_SUCH_VARIABLE}y"}},
        {"py_executable": "/usr/bin/env python3 -c 'import os'"},
        {"command_prefix": ["source", "/env/activate", "&&"], "py_executable": None},
        {"env_vars": None, "java_jars": [], "override_worker_entrypoint": None},
    ],
)
def test_a_worker_gets_the_command_and_the_variables_that_ray_gives_it(context, program):
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray.core.generated.common_pb2 import Language

    before = os.environ.copy()
    with pytest.raises(ExecError):
        setup_worker.main(words_of(context))
    os.environ.clear()
    os.environ.update(before)
    with pytest.raises(ExecError):
        RuntimeEnvContext(**context).exec_worker(list(WORKER), Language.PYTHON)
    ours, of_ray = program
    assert ours == of_ray


@pytest.mark.parametrize(
    ("context", "language"),
    [
        ({"override_worker_entrypoint": "/in/the/image.py"}, "PYTHON"),
        ({"a_field_of_another_ray": 1}, "PYTHON"),
        ({}, "JAVA"),
    ],
)
def test_what_the_program_does_not_know_it_leaves_to_rays_own(context, language, program):
    words = words_of(context, language)
    with pytest.raises(ExecError):
        setup_worker.main(words)
    [(path, (python, script, *rest), _)] = program
    assert path == python == sys.executable
    assert script.endswith("ray/_private/workers/setup_worker.py")
    assert os.path.isfile(script)
    assert rest == words
