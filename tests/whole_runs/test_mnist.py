"""The accuracy that the README claims on MNIST; it takes minutes and runs in ``make test-slow``."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(900)]


def test_sync_easgd_reaches_99_percent_twice_with_the_same_bits(root, tmp_path):
    data = root.parent / "shared/data/mnist"
    if not data.is_dir():
        pytest.skip("needs the MNIST Parquet files beside the checkout, in ../shared/data/mnist")
    results = []
    for name in ("a", "b"):
        words = [
            sys.executable, "-m", "raydl", "train", "--data", str(data), "--model", "lenet",
            "--method", "sync-easgd", "--workers", "2", "--epochs", "5",
            "--run-dir", str(tmp_path / name),
        ]  # fmt: skip
        subprocess.run(words, check=True, timeout=400)
        result = json.loads((tmp_path / name / "result.json").read_text())
        weights = (tmp_path / name / "center.safetensors").read_bytes()
        results.append((result["center_accuracy"], weights))
    assert results[0][0] >= 0.99
    assert results[0] == results[1]
