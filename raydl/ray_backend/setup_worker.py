"""Sets up a worker process of a local cluster, without the imports of Ray's own program.

Ray runs such a program before each worker process: it sets the variables of the runtime
environment, and becomes the worker program with the Python of that environment. Ray's
``_private/workers/setup_worker.py`` first imports a part of Ray, a third of a second of CPU time
for each process. What this program does not know, it leaves to Ray's.
"""

# Only small modules: each worker process begins here.
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="
_KNOWN = {"command_prefix", "env_vars", "py_executable"}
_UNSET = re.compile(r"\$\{[A-Z0-9_]+\}")


def main(words: Sequence[str]) -> None:
    """Become the worker program.

    Args:
        words: the options of Ray's program, then the worker program and its arguments.
    """
    context, language, rest = _parse(words)
    if language != "PYTHON" or any(context[name] for name in context.keys() - _KNOWN):
        program = os.path.join(folder_of_ray(), "_private", "workers", "setup_worker.py")
        os.execv(sys.executable, [sys.executable, program, *words])
    for name, value in (context.get("env_vars") or {}).items():
        os.environ[name] = _UNSET.sub("", os.path.expandvars(value))
    python = context.get("py_executable") or sys.executable  # a shell's words, not only a path
    command = [*(context.get("command_prefix") or []), "exec", python, *map(shlex.quote, rest)]
    os.execvp("bash", ["bash", "-c", " ".join(command)])


def _parse(words: Sequence[str]) -> tuple[Mapping[str, Any], str, list[str]]:
    """Return (the runtime environment, the language of the worker program, the other words)."""
    context, language, rest = "", "", []
    for word in words:
        if word.startswith(_CONTEXT):
            context = word.removeprefix(_CONTEXT)
        elif word.startswith(_LANGUAGE):
            language = word.removeprefix(_LANGUAGE)
        else:
            rest.append(word)
    return json.loads(context or "{}"), language, rest


def folder_of_ray() -> str:
    """Return the folder of Ray's package for this Python, without an import."""
    import importlib.util

    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    return os.path.dirname(ray.origin)


if __name__ == "__main__":
    main(sys.argv[1:])
