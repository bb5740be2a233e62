"""The notebooks of the docs run from top to bottom and have the described results."""

import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import nbformat
import pytest
from processes import kill_with_descendants
from repository import ROOT

BOUND_S = 200
FOLDER = ROOT / "docs/notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def run_notebook(name, folder):
    """Run a copy of a notebook in a folder, with its own Ray, and return it with its outputs."""
    shutil.copy(FOLDER / name, folder)
    command = [Path(sys.executable).with_name("jupyter-execute"), "--output", "executed", name]
    log = folder / "log"
    with (
        log.open("w") as stream,
        subprocess.Popen(command, cwd=folder, stdout=stream, stderr=stream) as process,
    ):
        status = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=BOUND_S)
        finally:
            if status is None:  # the notebook hangs, or this test was interrupted
                kill_with_descendants([process.pid])
    assert status == 0, log.read_text()
    return nbformat.read(folder / "executed.ipynb", as_version=4)


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def printed(notebook):
    """Return the text that a notebook prints."""
    outputs = outputs_of(notebook)
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


def num_figures(notebook):
    return sum("image/png" in output.get("data", {}) for output in outputs_of(notebook))


@pytest.mark.cluster
@pytest.mark.slow
def test_the_first_run_learns_survives_a_loss_and_gives_its_weights_to_pytorch(tmp_path):
    notebook = run_notebook("first_run.ipynb", tmp_path)
    text = printed(notebook)
    assert float(re.search(r"test accuracy of the center: ([\d.]+)%", text)[1]) > 90
    assert "faults_fired: without loss [], with loss ['fault 1: kill w1 at step 60']" in text
    before, after = re.search(r"samples: without loss (\d+), with loss (\d+)", text).groups()
    assert before == after
    assert int(re.search(r"generations: without loss \d+, with loss (\d+)", text)[1]) > 1
    plain, own = re.search(r"plain PyTorch: ([\d.]+)%, of the run: ([\d.]+)%", text).groups()
    assert float(plain) == pytest.approx(float(own), abs=0.3)  # one picture of 359
    assert num_figures(notebook) == 1


@pytest.mark.cluster
@pytest.mark.slow
def test_the_comparison_has_a_row_for_each_of_three_methods_and_a_chart(tmp_path):
    notebook = run_notebook("compare_methods.ipynb", tmp_path)
    rows = dict(re.findall(r"^(\S+) +([\d.]+)% +[\d.]+ ", printed(notebook), flags=re.M))
    assert list(rows) == ["sync-easgd", "async-easgd", "diloco"]
    assert all(float(accuracy) > 80 for accuracy in rows.values()), rows
    assert num_figures(notebook) == 1


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_stored_without_outputs_and_stops_its_ray(name):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert code[-1].source.endswith("ray.shutdown()")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_links_of_a_notebook_lead_to_files_and_the_docs_lead_to_it(name, root):
    cells = nbformat.read(FOLDER / name, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (FOLDER / link).exists(), link
    assert f"(notebooks/{name})" in (root / "docs/python.md").read_text()
