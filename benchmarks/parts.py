"""Runs parts of a benchmark in their own processes, each with its own Ray.

    answer = run_part("benchmarks.exchange", "--part", "one-node", timeout_s=100.0)

starts the same module in a new process, which recognizes its part by the options:

    with ray_here():
        write_answer(options.answer, measure())
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray

from benchmarks.measure import options_of
from benchmarks.programs import ROOT, end_cleanly, end_sessions
from raydl.ray_backend import session as ray_session


def parser_of_parts(doc: str | None, **more: dict[str, Any]) -> argparse.ArgumentParser:
    """Return a parser for a benchmark's options and the hidden ones of ``run_part``.

    Args:
        doc: docstring of the benchmark.
        more: further hidden options, in the form of ``options_of``.
    """
    hidden = argparse.SUPPRESS
    own: dict[str, dict[str, Any]] = {"part": {}, "answer": {"type": Path}, **more}
    return options_of(doc, **{name: {**settings, "help": hidden} for name, settings in own.items()})


def run_part(module: str, *arguments: str, timeout_s: float) -> Any:
    """Run ``python -m MODULE ARGUMENTS --answer FILE`` and return its answer.

    The process and all processes that it started have ended when this returns.

    Raises:
        RuntimeError: if the process failed or did not end in time; with the end of its log.
    """
    end_cleanly()
    with tempfile.TemporaryDirectory(prefix="raydl-", ignore_cleanup_errors=True) as folder:
        answer, log = Path(folder) / "answer", Path(folder) / "log"
        command = [sys.executable, "-m", module, *arguments, "--answer", str(answer)]
        with log.open("w") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment(folder), stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_sessions([process])
        if code != 0 or not answer.exists():
            how = f"did not end within {timeout_s:.0f} s" if code is None else f"ended with {code}"
            raise RuntimeError(f"{' '.join(arguments)} {how}:\n{log.read_text()[-4000:]}")
        return json.loads(answer.read_text())


def environment(folder: str) -> dict[str, str]:
    """Return the environment of a process that starts its own Ray in a folder."""
    own = {"RAY_ADDRESS": "", "RAY_AUTH_MODE": "token", "RAY_TMPDIR": folder}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def ray_here() -> Iterator[None]:
    """Connect to the Ray of ``RAY_ADDRESS``, or to a new one, until the block ends."""
    ray_session.prepare()
    ray_session.connect()
    try:
        yield
    finally:
        ray.shutdown()


def write_answer(path: Path, answer: Mapping[str, Any]) -> None:
    """Write the answer that ``run_part`` returns."""
    path.write_text(json.dumps(answer))
