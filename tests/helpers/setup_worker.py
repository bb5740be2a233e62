"""Sets up a worker process of Ray in tests, without the half second of imports of Ray's program.

It does what ``ray/_private/workers/setup_worker.py`` does for the runtime environments of tests:
it sets their variables, and becomes the worker program with their Python.
"""

import json
import os
import re
import shlex
import sys

_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main(words):
    """Become the worker program that the words after the options name."""
    context = {}
    for word in words:
        if word.startswith(_CONTEXT):
            context = json.loads(word.removeprefix(_CONTEXT))
    for name, value in (context.get("env_vars") or {}).items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    rest = [shlex.quote(w) for w in words if not w.startswith((_CONTEXT, _LANGUAGE))]
    prefix = context.get("command_prefix") or []
    command = [*prefix, "exec", context.get("py_executable") or sys.executable, *rest]
    os.execvp("bash", ["bash", "-c", " ".join(command)])


if __name__ == "__main__":
    main(sys.argv[1:])
