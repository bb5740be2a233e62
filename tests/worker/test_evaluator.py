"""The evaluator scores the center on the test set, or on a part of it."""

import dataclasses
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from ensembles import Ensemble, tiny_images

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


class Colleagues:
    """Workers that score together, as the one of a rank sees them; all have one barrier."""

    def __init__(self, rank, gathered, barrier, *, step_s=0.0):
        self.place, self.step_s = (rank, len(gathered)), step_s
        self._gathered, self._barrier = gathered, barrier

    def begin_score(self):
        pass

    def raise_if_abandoned(self):
        pass

    def gather(self, own):
        self._gathered[self.place[0]] = own
        self._barrier.wait()
        gathered = list(self._gathered)
        self._barrier.wait()
        return gathered


def colleagues(steps_s):
    """Return the view of each of some workers, with these seconds of a step."""
    gathered, barrier = [b""] * len(steps_s), threading.Barrier(len(steps_s), timeout=30.0)
    return [
        Colleagues(rank, gathered, barrier, step_s=step_s) for rank, step_s in enumerate(steps_s)
    ]


class SlowBatches(RowRecorder):
    """Batches of which each sample takes some seconds by its own clock."""

    def __init__(self, batches, sample_s):
        super().__init__(batches)
        self.sample_s, self.now = sample_s, 0.0

    def batch(self, rows):
        self.now += self.sample_s * len(rows)
        return super().batch(rows)


def job_scored_by_workers(**more):
    evaluation = EvaluationConfig(by="workers", batch_size=4)
    return Ensemble(TrainConfig(evaluation=evaluation, **more), num_workers=1)


def score_at_once(ensemble, scorers, workers):
    """Return what each scorer returns; all score at the same time."""
    with ThreadPoolExecutor(len(scorers)) as pool:
        pairs = zip(scorers, workers, strict=True)
        each = [pool.submit(scorer.score, ensemble.first, worker) for scorer, worker in pairs]
        return [scored.result(30.0) for scored in each]


def scored_together(ensemble, tests, *, times=1, steps_s=None):
    """Return the last score of each worker; each has its own test set, and seconds of a step."""
    scorers = [Scorer(ensemble.job, t, clock=lambda t=t: getattr(t, "now", 0.0)) for t in tests]
    workers = colleagues(steps_s or [0.0] * len(tests))
    for _ in range(times):
        for test in tests:
            test.rows.clear()
        found = score_at_once(ensemble, scorers, workers)
    return found


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


class Shifted(torch.nn.Module):
    """A linear model with a buffer that is added to its logits, and not averaged."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.layer = torch.nn.Linear(16, num_classes)
        self.register_buffer("shift", torch.zeros(num_classes))

    def forward(self, images):
        return self.layer(images.flatten(1)) + self.shift


def test_all_workers_score_the_center_with_the_buffers_of_the_first():
    config = TrainConfig(evaluation=EvaluationConfig(by="workers", batch_size=4))
    ensemble = Ensemble(config, num_workers=1, model=Shifted)
    own = [
        dataclasses.replace(
            ensemble.first, non_trainable={"shift": np.arange(3, dtype=np.float32) * rank}
        )
        for rank in (1, 5)
    ]
    scorers = [Scorer(ensemble.job, ensemble.batches) for _ in own]
    with ThreadPoolExecutor(2) as pool:
        arguments = zip(scorers, own, colleagues([0.0, 0.0]), strict=True)
        first, _ = pool.map(lambda each: each[0].score(*each[1:]), arguments)
    alone = Evaluator(ensemble.job, ensemble.batches).evaluate(own[0])
    assert first.metrics == pytest.approx(alone.metrics)


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
    tests = [SlowBatches(ensemble.batches, sample_s) for sample_s in (1.0, 3.0)]
    scored_together(ensemble, tests, times=2, steps_s=[0.03, 0.01])
    assert number_scored(tests[1]) == 6, "the speed of the training would give it 18 of 24"


def test_shares_are_equal_in_a_deterministic_run():
    ensemble = job_scored_by_workers(training=TrainingConfig(deterministic=True))
    tests = [SlowBatches(ensemble.batches, sample_s) for sample_s in (1.0, 3.0)]
    scored_together(ensemble, tests, times=2, steps_s=[0.03, 0.01])
    assert number_scored(tests[1]) == 12


def test_no_share_is_so_small_that_its_speed_is_never_measured_again():
    ensemble = Ensemble(
        TrainConfig(evaluation=EvaluationConfig(by="workers")),
        num_workers=1,
        images=tiny_images(200),
    )
    tests = [SlowBatches(ensemble.batches, sample_s) for sample_s in (1.0, 1e6)]
    scored_together(ensemble, tests, times=4)
    assert number_scored(tests[1]) == 4


def test_a_newcomer_that_has_not_scored_gets_a_share_by_the_speed_of_the_training():
    ensemble = job_scored_by_workers()
    tests = [RowRecorder(ensemble.batches) for _ in range(2)]
    scorers = [Scorer(ensemble.job, test) for test in tests]
    scorers[0].score(ensemble.first, *colleagues([0.01]))
    score_at_once(ensemble, scorers, colleagues([0.01, 0.01]))
    assert number_scored(tests[1]) == 12


def test_a_worker_of_an_abandoned_generation_leaves_before_its_next_batch():
    ensemble = job_scored_by_workers()
    test = RowRecorder(ensemble.batches)
    scorer, [worker] = Scorer(ensemble.job, test), colleagues([0.0])
    error = ExchangeError(3, 1, "its generation was abandoned")
    worker.raise_if_abandoned = Mock(side_effect=[None, error])
    with pytest.raises(ExchangeError, match="abandoned"):
        scorer.score(ensemble.first, worker)
    assert test.rows == [[0, 1, 2, 3]]


def test_a_worker_counts_the_samples_that_it_has_scored_while_it_scores():
    ensemble = job_scored_by_workers()
    test, counts = RowRecorder(ensemble.batches), []
    scorer, [worker] = Scorer(ensemble.job, test), colleagues([0.0])
    worker.raise_if_abandoned = lambda: counts.append(scorer.num_scored)
    assert scorer.num_scored is None
    scorer.score(ensemble.first, worker)
    assert counts == [0, 4, 8, 12, 16, 20]
    assert scorer.num_scored is None


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


@pytest.mark.parametrize("votes", [{"stop": 1.0}, {"stop": 1.0, "score": 1.0}], ids=str)
def test_workers_that_stop_score_the_last_center_if_that_is_voted_for(votes):
    config = TrainConfig(
        method=MethodConfig(name="sync-easgd"), evaluation=EvaluationConfig(by="workers")
    )
    ensemble = Ensemble(config, num_workers=2).join()
    ensemble.workers[1].vote(1, **votes)
    assert ensemble.run() == [Outcome.STOPPED] * 2
    assert (ensemble.workers[0].last_score is not None) == ("score" in votes)


def test_no_score_is_reported_if_the_evaluator_scores():
    [first, _] = trained("evaluator").workers
    assert (first.report().scores, first.last_score) == ((), None)


class LeavingBatches(Batches):
    """A test set at whose first batch the worker of rank 1 leaves its group."""

    ensemble = None

    def batch(self, rows):
        self.ensemble.group.remove_member(1)
        raise OSError("the machine is gone")


@pytest.mark.parametrize("period", [2, 6], ids=["during the training", "at its end"])
def test_a_worker_lost_during_a_score_ends_the_generation_unless_the_training_is_complete(period):
    config = TrainConfig(
        method=MethodConfig(name="sync-easgd", period=period),
        training=TrainingConfig(epochs=1, batch_size=2),
        evaluation=EvaluationConfig(by="workers", every_samples=8),
    )
    plain = Ensemble(config, num_workers=0).batches
    lost = LeavingBatches(plain.samples, plain.prepare)
    ensemble = lost.ensemble = Ensemble(config, num_workers=2, tests=[plain, lost]).join()
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(worker.run_round) for worker in ensemble.workers)
    assert isinstance(second.exception(), OSError)
    if period == 2:
        with pytest.raises(ExchangeError, match="rank 1 left the group"):
            first.result()
    else:
        assert first.result() is Outcome.FINISHED
    assert ensemble.workers[0].last_score is None
