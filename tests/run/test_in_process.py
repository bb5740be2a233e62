"""A run in one process, ``--workers 0``: it has one worker, and no other machine."""

from types import SimpleNamespace

import pytest

import raydl
from raydl.config import TrainConfig
from raydl.run.trainer import _own_states


class FailsLater(raydl.Classification):
    """A classification whose loss raises an error at its tenth call."""

    num_calls = 0

    def loss(self, model, batch):
        self.num_calls += 1
        if self.num_calls == 10:
            raise ZeroDivisionError("my own mistake")
        return super().loss(model, batch)


@pytest.mark.parametrize("policy", ["auto", "replace"])
def test_the_error_of_the_users_code_is_raised_since_no_other_process_could_go_on(tmp_path, policy):
    trainer = raydl.Trainer(
        FailsLater("mlp"),
        "synthetic:96",
        scaling=raydl.ScalingConfig(num_workers=0),
        training=raydl.TrainingConfig(epochs=9, batch_size=8),
        elastic=raydl.ElasticConfig(on_worker_error=policy),
        run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    )
    with pytest.raises(ZeroDivisionError, match="my own mistake"):
        trainer.fit()


def test_the_one_worker_resumes_the_first_state_whatever_the_id_of_its_worker():
    start = SimpleNamespace(own_states={"w1": "first", "w2": "second"})
    in_process = TrainConfig(scaling=raydl.ScalingConfig(num_workers=0))
    assert _own_states(start, in_process) == {"w0": "first"}
    assert _own_states(SimpleNamespace(own_states={}), in_process) == {}
    two = TrainConfig(scaling=raydl.ScalingConfig(num_workers=2))
    assert _own_states(start, two) == start.own_states
