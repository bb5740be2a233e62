"""Workers in Ray actors that send something else than their messages."""

import numpy as np
import pytest
from safetensors.numpy import load_file

import raydl
from raydl.config import EvaluationConfig, TrainingConfig

pytestmark = pytest.mark.cluster


def test_a_center_whose_workers_all_send_zeros_stays_where_it_began(cluster, tmp_path):
    """So two methods that begin at the same center also end there."""

    def center_of(method, bad_workers=None):
        folder = tmp_path / f"{method}-{bad_workers is None}"
        raydl.Trainer(
            "mlp",
            "synthetic:240",
            method=method,
            training=TrainingConfig(epochs=2),
            scaling=raydl.ScalingConfig(num_workers=2),
            evaluation=EvaluationConfig(every_epochs=1000),
            run=raydl.RunConfig(run_dir=str(folder), progress="none", bad_workers=bad_workers),
        ).fit()
        return load_file(folder / "center.safetensors")

    trained = center_of("local-sgd")
    rounds, messages = (center_of(m, "1.0:zeros") for m in ("local-sgd", "async-sgd"))
    assert all(np.array_equal(rounds[name], messages[name]) for name in trained)
    assert not all(np.array_equal(rounds[name], trained[name]) for name in trained)
