"""The evaluator scores the center on the test set, or on a part of it."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from ensembles import Ensemble

from raydl.config import EvaluationConfig, MethodConfig, TrainConfig, TrainingConfig
from raydl.core.reports import Outcome
from raydl.data import Batches
from raydl.errors import ConfigError, DataError, ExchangeError
from raydl.tasks import MetricSums, metrics_of
from raydl.worker.evaluator import Evaluator, Scorer, share_of


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


# scores by the workers


class Gather:
    """Exchanges bytes among threads, by rank."""

    def __init__(self, num_workers):
        self._barrier = threading.Barrier(num_workers, timeout=30.0)
        self._own = [b""] * num_workers

    def of(self, rank):
        def gather(own):
            self._own[rank] = own
            self._barrier.wait()
            gathered = list(self._own)
            self._barrier.wait()
            return gathered

        return gather


class SlowBatches(RowRecorder):
    """Batches of which each sample takes some seconds."""

    def __init__(self, batches, sample_s):
        super().__init__(batches)
        self.sample_s = sample_s

    def batch(self, rows):
        time.sleep(self.sample_s * len(rows))
        return super().batch(rows)


def job_scored_by_workers(**more):
    evaluation = EvaluationConfig(by="workers", batch_size=4)
    return Ensemble(TrainConfig(evaluation=evaluation, **more), num_workers=1)


def scored_together(ensemble, tests, *, times=1, steps_s=None):
    """Return the last score of each worker; each has its own test set, and seconds of a step."""
    scorers = [Scorer(ensemble.job, test) for test in tests]
    gather = Gather(len(tests))

    def score(rank):
        step_s = steps_s[rank] if steps_s else 0.0
        for _ in range(times):
            tests[rank].rows.clear()
            found = scorers[rank].score(ensemble.first, rank, gather.of(rank), step_s=step_s)
        return found

    with ThreadPoolExecutor(len(tests)) as pool:
        return list(pool.map(score, range(len(tests))))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 30])
def test_workers_score_each_sample_once_and_the_first_has_the_score_of_all(num_workers):
    ensemble = job_scored_by_workers()
    tests = [RowRecorder(ensemble.batches) for _ in range(num_workers)]
    first, *others = scored_together(ensemble, tests)
    assert others == [None] * (num_workers - 1)
    tests[0].rows.pop()  # the last batch of the first contains the examples
    rows = [row for test in tests for batch in test.rows for row in batch]
    assert rows == list(range(tests[0].num_samples))
    alone = Evaluator(ensemble.job, ensemble.batches).evaluate(ensemble.first)
    assert first.metrics == pytest.approx(alone.metrics)
    assert first.predicted == alone.predicted


@pytest.mark.parametrize("speeds", [[1.0], [3.0, 1.0], [0.1, 0.2, 0.3, 0.4], [1e-9, 1e9]])
def test_the_shares_of_the_test_set_follow_the_speeds_and_cover_it(speeds):
    shares = [share_of(rank, speeds) for rank in range(len(speeds))]
    assert (shares[0][0], shares[-1][1]) == (0.0, 1.0)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(shares))
    sizes = [end - begin for begin, end in shares]
    assert sizes == pytest.approx([speed / sum(speeds) for speed in speeds])


def number_scored(test):
    return sum(len(batch) for batch in test.rows)


def test_before_the_first_score_the_shares_follow_the_speed_of_the_training():
    ensemble = job_scored_by_workers()
    tests = [RowRecorder(ensemble.batches) for _ in range(2)]
    scored_together(ensemble, tests, steps_s=[0.03, 0.01])
    assert number_scored(tests[1]) == 18, "three quarters of 24"


def test_later_shares_follow_the_speed_of_earlier_scores():
    ensemble = job_scored_by_workers()
    tests = [SlowBatches(ensemble.batches, sample_s) for sample_s in (0.001, 0.004)]
    scored_together(ensemble, tests, times=3, steps_s=[0.03, 0.01])
    assert number_scored(tests[1]) < 9, "the speed of the training would give it 18 of 24"


def test_a_newcomer_that_has_not_scored_gets_a_share_by_the_speed_of_the_training():
    ensemble = job_scored_by_workers()
    tests = [RowRecorder(ensemble.batches) for _ in range(2)]
    gather = Gather(2)
    old, new = (Scorer(ensemble.job, test) for test in tests)
    old.score(ensemble.first, 0, lambda own: [own], step_s=0.01)
    tests[0].rows.clear()
    with ThreadPoolExecutor(2) as pool:
        for scorer, rank in ((old, 0), (new, 1)):
            pool.submit(scorer.score, ensemble.first, rank, gather.of(rank), step_s=0.01)
    assert number_scored(tests[1]) == 12


def test_a_test_set_of_which_no_part_can_be_read_is_an_error():
    ensemble = job_scored_by_workers()
    parts = [MetricSums({}, 0, 3), MetricSums({}, 0, 4)]
    with pytest.raises(DataError, match="the test set: holds 7 samples, none of which can be"):
        metrics_of(ensemble.job.task, parts)


def with_dropout(image_shape, num_classes):
    size = image_shape[1] * image_shape[2]
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(size, num_classes)
    )


def trained(by, num_workers=2):
    config = TrainConfig(
        method=MethodConfig(name="sync-easgd", period=2),
        training=TrainingConfig(epochs=3, batch_size=2),
        evaluation=EvaluationConfig(by=by, every_samples=8),
    )
    ensemble = Ensemble(config, num_workers=num_workers, model=with_dropout).join()
    assert set(ensemble.run()) == {Outcome.FINISHED}
    return ensemble


def test_a_worker_that_scores_trains_the_same_center_bit_by_bit():
    scored, unscored = (trained(by, num_workers=1) for by in ("workers", "evaluator"))
    assert np.array_equal(scored.newest.weights, unscored.newest.weights)


def test_the_first_worker_reports_a_score_at_each_evaluation_and_one_of_the_last_center():
    ensemble = trained("workers")
    first, second = ensemble.workers
    report = first.report()
    assert [score.progress.num_samples for score in report.scores] == list(range(8, 72, 8))
    assert first.last_score.progress.num_samples == 72
    assert first.report().scores == second.report().scores == ()
    assert second.last_score is None
    alone = Evaluator(ensemble.job, ensemble.batches).evaluate(ensemble.newest)
    assert first.last_score.metrics == pytest.approx(alone.metrics)


def test_no_score_is_reported_if_the_evaluator_scores():
    [first, _] = trained("evaluator").workers
    assert (first.report().scores, first.last_score) == ((), None)


@pytest.mark.parametrize("outcome", [Outcome.GO_ON, Outcome.FINISHED])
def test_a_worker_lost_during_a_score_ends_the_generation_unless_the_training_is_complete(
    outcome, monkeypatch
):
    ensemble = trained("workers", num_workers=1)
    worker = ensemble.workers[0]
    worker.last_score = None

    def fail(own):
        raise ExchangeError(3, 1, "rank 1 left the group")

    monkeypatch.setattr(worker.runner, "gather", fail)
    if outcome is Outcome.GO_ON:
        with pytest.raises(ExchangeError):
            worker._score(ensemble.newest, outcome)
    else:
        worker._score(ensemble.newest, outcome)
    assert worker.last_score is None
