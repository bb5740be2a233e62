"""The Python snippets of README and docs run, page by page."""

import re
from dataclasses import replace
from functools import partialmethod

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raydl.config import ScalingConfig, TrainingConfig
from raydl.run import trainer

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),  # warnings of Ray Data
]

PAGES = [
    "README.md",
    "docs/algorithms.md",
    "docs/data.md",
    "docs/models.md",
    "docs/python.md",
    "docs/tasks.md",
    "docs/training.md",
]
LONG_PAGES = [
    "docs/attach.md",
    "docs/collective.md",
    "docs/lightning.md",
    "docs/transformers.md",
    "docs/tune.md",
]
"""Pages whose snippets import large libraries or start several clusters."""

RESULTS = {"docs/attach.md": lambda names: 0 < names["saved"]["loss"] < 0.1}
"""Checks after the snippets of a page; here the replicas under Ray Train have learned."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder of the snippets, with their table."""
    features = np.random.default_rng(0).normal(size=(400, 8)).astype(np.float32)
    table = pa.table({"features": list(features), "target": features.sum(1)})
    pq.write_table(table, tmp_path / "table.parquet", row_group_size=50)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fit_here(self, fit):
    if self.config.scaling == ScalingConfig():
        self.config = replace(self.config, scaling=ScalingConfig(num_workers=0))
    if self.config.training == TrainingConfig():
        self.config = replace(self.config, training=TrainingConfig(epochs=2))
    return fit(self)


@pytest.mark.parametrize(
    "page", [*PAGES, *(pytest.param(page, marks=pytest.mark.slow) for page in LONG_PAGES)]
)
def test_the_snippets_of_a_page_run(page, root, folder, cluster, monkeypatch):
    # Runs without a number of workers train in this process, and those without a length take two
    # epochs, which is faster.
    monkeypatch.setattr(trainer.Trainer, "fit", partialmethod(fit_here, trainer.Trainer.fit))
    snippets = re.findall(r"^```python\n(.*?)^```", (root / page).read_text(), re.M | re.S)
    assert snippets
    names = {"__name__": "snippets"}
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), names)
    if page in RESULTS:
        assert RESULTS[page](names)


def test_every_page_with_python_is_tested(root):
    pages = ["README.md", *sorted(f"docs/{page.name}" for page in (root / "docs").glob("*.md"))]
    assert [p for p in pages if "```python" in (root / p).read_text()] == sorted(
        [*PAGES, *LONG_PAGES]
    )
