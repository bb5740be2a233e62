"""The evaluator scores the center on the test set, or on a part of it."""

import itertools

import pytest
from ensembles import Ensemble

from raydl.config import EvaluationConfig, TrainConfig
from raydl.data import Batches
from raydl.errors import ConfigError
from raydl.worker.evaluator import Evaluator


class RowRecorder(Batches):
    """Batches that record the rows of each batch."""

    def __init__(self, batches):
        super().__init__(batches.samples, batches.prepare)
        self.rows = []

    def batch(self, rows):
        self.rows.append(rows.tolist())
        return super().batch(rows)


def scored_rows(num_samples, *, times=1):
    """Return (rows that were scored, in batches, by evaluation; number of rows)."""
    config = TrainConfig(evaluation=EvaluationConfig(num_samples=num_samples, batch_size=4))
    ensemble = Ensemble(config, num_workers=1)
    found = []
    test = RowRecorder(ensemble.batches)
    evaluator = Evaluator(ensemble.job, test)
    for _ in range(times):
        test.rows.clear()
        evaluator.evaluate(ensemble.first)
        found.append(test.rows[:-1])  # the last batch contains the examples
    return found, test.num_samples


def test_each_evaluation_scores_the_requested_number_of_samples_and_always_the_same_ones():
    (first, second), num_samples = scored_rows(7, times=2)
    assert first == second
    assert [len(batch) for batch in first] == [4, 3]
    rows = list(itertools.chain(*first))
    assert sorted(set(rows)) == rows
    assert rows != list(range(7)), "drawn from the whole set, which may be sorted by class"
    assert max(rows) < num_samples


@pytest.mark.parametrize("num_samples", [None, 10**9])
def test_all_samples_are_scored_without_a_number_or_with_a_large_one(num_samples):
    (batches,), number = scored_rows(num_samples)
    assert list(itertools.chain(*batches)) == list(range(number))


def test_a_number_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"evaluation.num_samples must be 1 or more, got 0"):
        EvaluationConfig(num_samples=0)
