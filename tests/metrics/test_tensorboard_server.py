"""A TensorBoard server shows the curves, charts, texts and pictures of a run over HTTP."""

import importlib.util
import json
import time
import urllib.request

import pytest

from raydl import cli
from raydl.metrics import TAGS
from raydl.metrics.tags import tag_of

pytestmark = pytest.mark.processes

EXPECTED = {
    "train/loss", "center/accuracy", "throughput/samples_per_s", "workers/count",
    "exchange/seconds", "exchange/staleness", "time/forward_backward", "worker_step_s/w0",
}  # fmt: skip


@pytest.fixture(scope="module")
def fetch(tmp_path_factory):
    """Return a function that fetches JSON by path from a TensorBoard of a small run."""
    run = tmp_path_factory.mktemp("tensorboard") / "run"
    arguments = [
        "train",
        "--data",
        "digits",
        "--workers",
        "0",
        "--epochs",
        "3",
        "--run.progress",
        "none",
    ]
    assert cli.main([*arguments, "--run-dir", str(run)]) == 0
    with make_picture().tensorboard(str(run)) as address:

        def get(path):
            with urllib.request.urlopen(f"{address}/data/plugin/{path}", timeout=30) as answer:
                return json.load(answer)

        until = time.monotonic() + 60
        while not has_all(get) and time.monotonic() < until:
            time.sleep(0.2)
        yield get


def has_all(get):
    """Whether TensorBoard has read the run to its end; it lists the run before that."""
    scalars = {name for names in get("scalars/tags").values() for name in names}
    pictures = {name for names in get("images/tags").values() for name in names}
    if not (scalars >= EXPECTED and "center/predictions" in pictures):
        return False
    return get("scalars/scalars?run=run/.&tag=center/accuracy")[-1][1] >= 3 * 1438


def make_picture():
    from repository import ROOT

    spec = importlib.util.spec_from_file_location("make_picture", ROOT / "docs/make_picture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_lists_the_curves_of_a_run_and_each_has_its_sentence(fetch):
    (tags,) = fetch("scalars/tags").values()
    assert set(tags) >= EXPECTED
    for name in tags:
        assert tag_of(name).name in TAGS


def test_the_run_has_the_name_of_its_folder(fetch):
    assert list(fetch("scalars/tags")) == ["run/."]


def test_it_serves_the_points_of_a_curve(fetch):
    points = fetch("scalars/scalars?run=run/.&tag=center/accuracy")
    assert points[-1][1] == 3 * 1438  # the x-axis is samples
    assert 0.1 < points[-1][2] <= 1.0


def test_the_page_of_charts_opens_on_accuracy_and_loss(fetch):
    categories = fetch("custom_scalars/layout")["category"]
    titles = [category["title"] for category in categories]
    assert titles[:3] == ["Accuracy and loss", "Throughput and workers", "Time in eight parts"]


def test_settings_and_memberships_are_texts_and_predictions_a_picture(fetch):
    (texts,) = fetch("text/tags").values()
    assert {name.split("/")[0] for name in texts} >= {"settings", "membership", "events"}
    (pictures,) = fetch("images/tags").values()
    assert "center/predictions" in pictures
