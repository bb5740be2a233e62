"""A process of a run imports torch without garbage collections."""

import subprocess
import sys

import pytest


@pytest.mark.processes
@pytest.mark.parametrize("module", ["raydl.run.trainer", "raydl.ray_backend.actors"])
def test_a_starting_process_collects_no_garbage_among_the_modules_of_torch(module):
    code = (
        f"import gc, sys, {module}; "
        "sys.exit(not (gc.isenabled() and gc.get_freeze_count() > 100_000))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.processes
def test_objects_of_a_program_that_has_imported_torch_can_still_be_collected():
    code = "import gc, sys, torch, raydl.run.trainer; sys.exit(gc.get_freeze_count())"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
