"""What a batch counts: one step and one score, however batches and test sets are cut."""

import itertools
import json
import threading

import numpy as np
import pytest
import torch
from ensembles import Ensemble
from mails import mail
from torch import nn
from torch.nn import functional

import raydl
from raydl.config import (
    EvaluationConfig,
    ExchangeConfig,
    MethodConfig,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.core.center import Center
from raydl.core.exchange import StepPlan
from raydl.core.flat import FlatModel
from raydl.core.optimizers import make_optimizer
from raydl.core.replica import Replica
from raydl.core.rules import GradientRule, Now
from raydl.data import Batches
from raydl.data.in_memory import TableSet
from raydl.data.samples import DataShape, as_they_are, num_samples_of, part_of
from raydl.errors import ConfigError, ShapeError
from raydl.methods.data_parallel import MeanGradient
from raydl.methods.easgd import Elastic
from raydl.metrics import TimeParts
from raydl.tasks import Counter, MetricSums, ModelAndLoss, evaluate, metrics_of, shape_for
from raydl.worker.evaluator import Evaluator, Scorer

NUM_SAMPLES, LENGTH = 24, 4
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(NUM_SAMPLES, LENGTH, 3)).astype(np.float32)
CLASSES = RANDOM.integers(0, 5, (NUM_SAMPLES, LENGTH))
NUM_LABELS = RANDOM.integers(0, LENGTH + 1, NUM_SAMPLES)
NUM_LABELS[[4, 5]] = 0  # the third of four parts of the first 8 samples has no label
MASK = np.arange(LENGTH) < NUM_LABELS[:, None]
WEIGHTS = (RANDOM.random(NUM_SAMPLES) * (NUM_LABELS > 0)).astype(np.float32)
TIGHT = {"rtol": 1e-6, "atol": 1e-7}


def build():
    torch.manual_seed(1)
    return nn.Linear(3, 5)


def by_labels(model, batch):
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def by_mask(model, batch):
    logits = model(batch["x"]).transpose(1, 2)
    losses = functional.cross_entropy(logits, batch["classes"], reduction="none")
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def by_weight(model, batch):
    errors = model(batch["x"]).square().mean((1, 2))
    return (errors * batch["weight"]).sum() / batch["weight"].sum()


COLUMNS = {
    "labels": {"x": X, "labels": np.where(MASK, CLASSES, -100)},
    "padding": {"x": X, "classes": CLASSES, "mask": MASK},
    "weights": {"x": X, "weight": WEIGHTS},
}
TASKS = {
    "labels": lambda: ModelAndLoss(build, by_labels),
    "padding": lambda: ModelAndLoss(build, by_mask, count=lambda batch: batch["mask"].sum()),
    "weights": lambda: ModelAndLoss(build, by_weight, count=lambda b: b["weight"].sum()),
}
every_kind = pytest.mark.parametrize("kind", TASKS)


def table(kind, rows=slice(None)):
    return TableSet({name: column[rows] for name, column in COLUMNS[kind].items()})


def batch_of(kind, rows=slice(0, 8)):
    samples = table(kind, rows)
    return samples.fetch(np.arange(samples.num_samples))


def replica_of(kind, rule, *, microbatches=1, task=None, lr=1.0):
    task = task or TASKS[kind]()
    return Replica(
        FlatModel(task.build_model(table(kind).shape)),
        task,
        rule=rule,
        make_optimizer=make_optimizer(OptimizerConfig(lr=lr, momentum=0.0, clip_grad_norm=None)),
        time_parts=TimeParts(),
        training=TrainingConfig(batch_size=8, microbatches=microbatches),
    )


def reference(kind, rows=slice(0, 8)):
    """Return (loss, weights after a step of rate 1) of plain torch on the whole batch."""
    model = build()
    loss = {"labels": by_labels, "padding": by_mask, "weights": by_weight}[kind]
    value = loss(model, batch_of(kind, rows))
    value.backward()
    parameters = list(model.parameters())
    stepped = torch.cat([(p - p.grad).flatten() for p in parameters]).detach()
    return value.detach(), stepped


# microbatches


@every_kind
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_a_batch_has_the_step_of_torch_in_any_number_of_parts(kind, microbatches):
    replica = replica_of(kind, Elastic(0.9), microbatches=microbatches)
    loss, _ = replica.step(batch_of(kind))
    expected_loss, expected = reference(kind)
    torch.testing.assert_close(loss, expected_loss, **TIGHT)
    torch.testing.assert_close(replica.flat.weights.detach(), expected, **TIGHT)


@every_kind
@pytest.mark.parametrize("rule", [Elastic(0.9), MeanGradient()])
def test_a_batch_without_labels_takes_no_step_and_its_loss_is_no_nan(kind, rule):
    replica = replica_of(kind, rule, microbatches=2)
    before = replica.flat.weights.clone()
    loss, _ = replica.step(batch_of(kind, slice(4, 6)))
    assert loss == 0.0
    assert replica.batch_count == 0.0
    assert torch.equal(replica.flat.weights, before)
    assert not replica.flat.gradients.any()


class Sent:
    """An exchange that records its message and its header."""

    def __init__(self, size):
        self.span, self.center = (
            slice(0, size),
            Center(
                torch.zeros(size), torch.zeros(0), rule=Elastic(0.9), make_optimizer=lambda _: None
            ),
        )
        self.messages = []

    def begin(self, message, buffers, header, distrust=0.0):
        self.messages.append((message.lanes["gradient"].clone(), message.weight))


@every_kind
def test_a_sum_of_gradients_weighs_what_its_batches_count(kind):
    replica = replica_of(kind, MeanGradient(), microbatches=2)
    exchange = Sent(replica.flat.num_parameters)
    for rows in (slice(0, 8), slice(4, 6), slice(8, 11)):
        replica.step(batch_of(kind, rows))
    replica.begin(StepPlan(begin=(exchange,)))
    ((total, count),) = exchange.messages
    rows = [*range(11), 4, 5]
    assert count == pytest.approx(float(Counter(TASKS[kind]()).of(batch_of(kind, rows))), rel=1e-6)
    start = torch.cat([p.detach().flatten() for p in build().parameters()])
    torch.testing.assert_close(start - total / count, reference(kind, rows)[1], **TIGHT)


# ranks


def trained_center(kind, num_workers, *, microbatches=1, epochs=1):
    config = TrainConfig(
        method=MethodConfig(name="sync-sgd", period=1),
        training=TrainingConfig(
            epochs=epochs, batch_size=NUM_SAMPLES // num_workers, microbatches=microbatches
        ),
        optimizer=OptimizerConfig(lr=1.0, lr_schedule="constant", warmup=0.0, clip_grad_norm=None),
        exchange=ExchangeConfig(timeout_s=20.0),
        scaling=ScalingConfig(num_workers=num_workers),
    )
    ensemble = Ensemble(config, num_workers=num_workers, images=table(kind), task=TASKS[kind]())
    ensemble.join().run()
    return ensemble


@every_kind
@pytest.mark.parametrize(("num_workers", "microbatches"), [(1, 4), (2, 1), (3, 2), (6, 1)])
def test_ranks_that_sum_gradients_take_the_step_of_the_joined_batch(
    kind, num_workers, microbatches
):
    ensemble = trained_center(kind, num_workers, microbatches=microbatches)
    expected = reference(kind, slice(None))[1]
    torch.testing.assert_close(torch.tensor(ensemble.newest.weights), expected, **TIGHT)


@every_kind
def test_partners_take_the_step_of_their_joined_batch(kind):
    ensemble = trained_center(kind, 1)
    config = TrainConfig(
        method=MethodConfig(name="local-sgd", period=1, group_size=2),
        training=TrainingConfig(epochs=1, batch_size=NUM_SAMPLES // 2),
        optimizer=ensemble.config.optimizer,
        exchange=ExchangeConfig(timeout_s=20.0),
        scaling=ScalingConfig(num_workers=2),
    )
    pair = Ensemble(config, num_workers=2, images=table(kind), task=TASKS[kind]())
    pair.join().run()
    expected = torch.tensor(ensemble.newest.weights)
    torch.testing.assert_close(torch.tensor(pair.newest.weights), expected, **TIGHT)


def test_samples_without_labels_are_done_and_leave_the_center_where_it_is():
    columns = {"x": X, "labels": np.full_like(CLASSES, -100)}
    config = TrainConfig(
        method=MethodConfig(name="sync-sgd"),
        training=TrainingConfig(epochs=2, batch_size=3),
        exchange=ExchangeConfig(timeout_s=20.0),
    )
    ensemble = Ensemble(
        config, num_workers=2, images=TableSet(columns), task=ModelAndLoss(build, by_labels)
    )
    ensemble.join().run()
    assert ensemble.newest.progress.num_samples == 2 * NUM_SAMPLES
    assert np.array_equal(ensemble.newest.weights, ensemble.first.weights)


class OwnMean(GradientRule):
    """A rule of a user's own, as the documentation says: it divides by the number."""

    def merge_(self, center, mail, state, now):
        center.sub_(mail.total("gradient") / mail.weight)


def test_a_rule_of_ones_own_gets_no_gradients_that_count_nothing():
    center = Center(
        torch.ones(2), torch.zeros(1), rule=OwnMean(), make_optimizer=lambda _: None
    )  # fmt: skip
    center.apply_(mail(OwnMean(), torch.zeros(2), weight=0), torch.ones(1), Now(1))
    assert center.weights.tolist() == [1.0, 1.0]
    assert center.buffers.tolist() == [1.0]
    center.apply_(mail(OwnMean(), torch.ones(2), weight=4), torch.ones(1), Now(1))
    assert center.weights.tolist() == [0.75, 0.75]


def test_the_training_loss_is_a_mean_over_what_counts():
    ensemble = trained_center("labels", 3, epochs=2)
    loss = ensemble.workers[0].report().records[-1].loss  # a header has those of the steps before
    assert loss == pytest.approx(float(reference("labels", slice(None))[0]), rel=1e-6)


# scores


@every_kind
@pytest.mark.parametrize("batch_size", [1, 2, 7, NUM_SAMPLES])
def test_a_score_does_not_depend_on_the_test_batches(kind, batch_size):
    task, samples = TASKS[kind](), table(kind)
    scores = evaluate(
        task,
        task.build_model(samples.shape),
        lambda start, stop: samples.fetch(np.arange(start, stop)),
        num_samples=NUM_SAMPLES,
        batch_size=batch_size,
    )
    assert scores == {"loss": pytest.approx(float(reference(kind, slice(None))[0]), rel=1e-6)}


class Colleague:
    """One of two workers in threads that score together, with given speeds."""

    def __init__(self, rank, step_s, barrier, table):
        self.place, self.step_s = (rank, 2), step_s
        self._barrier, self._table = barrier, table

    def begin_score(self):
        pass

    def raise_if_abandoned(self):
        pass

    def gather(self, own):
        self._table[self.place[0]] = own
        self._barrier.wait(20)
        gathered = [self._table[rank] for rank in range(2)]
        self._barrier.wait(20)
        return gathered


@every_kind
@pytest.mark.parametrize("step_s", [(1.0, 1.0), (0.1, 0.9)])
def test_workers_and_the_evaluator_give_one_score(kind, step_s):
    config = TrainConfig(evaluation=EvaluationConfig(batch_size=5))
    ensemble = Ensemble(config, num_workers=1, images=table(kind), task=TASKS[kind]())
    alone = Evaluator(ensemble.job, ensemble.batches).evaluate(ensemble.first).metrics
    barrier, gathered, scores = threading.Barrier(2), {}, {}

    def score(rank):
        scorer = Scorer(ensemble.job, ensemble.batches)
        colleague = Colleague(rank, step_s[rank], barrier, gathered)
        scores[rank] = scorer.score(ensemble.first, colleague)

    threads = [threading.Thread(target=score, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores[1] is None
    assert scores[0].metrics == {"loss": pytest.approx(alone["loss"], rel=1e-6)}


class Derived(ModelAndLoss):
    """A task with a metric over labels, one over samples, and one that follows from both."""

    def derived(self, means):
        return {"product": means["accuracy"] * means["first"]}


def own_metrics(model, batch):
    labels, predicted = batch["labels"], model(batch["x"]).argmax(2)
    right = (predicted == labels).sum()
    return {"accuracy": (right, (labels != -100).sum()), "first": (labels[:, 0] == 1).sum()}


def test_a_metric_may_have_a_denominator_of_its_own():
    task, samples = Derived(build, by_labels, metrics=own_metrics), table("labels")
    model = task.build_model(samples.shape)
    scores = [
        evaluate(
            task, model, lambda start, stop: samples.fetch(np.arange(start, stop)),
            num_samples=NUM_SAMPLES, batch_size=size,
        )
        for size in (1, 7, NUM_SAMPLES)
    ]  # fmt: skip
    batch = samples.fetch(np.arange(NUM_SAMPLES))
    labels, predicted = batch["labels"], model(batch["x"]).argmax(2)
    accuracy = float((predicted == labels)[labels != -100].float().mean())
    first = float((labels[:, 0] == 1).float().mean())
    for score in scores:
        assert score["accuracy"] == pytest.approx(accuracy)
        assert score["first"] == pytest.approx(first)
        assert score["product"] == pytest.approx(accuracy * first)


def test_a_metric_is_a_pair_for_all_batches_or_for_none():
    task = ModelAndLoss(build, by_labels)
    parts = [MetricSums({"f": 2.0}, 2, counts={"f": 4.0}), MetricSums({"f": 2.0}, 2)]
    with pytest.raises(ShapeError, match=r"metric f must be a pair .* for all batches or for none"):
        metrics_of(task, parts)


def test_the_loss_of_a_test_set_without_labels_is_nan_and_other_metrics_are_not():
    task = ModelAndLoss(build, by_labels)
    parts = [MetricSums({"loss": 0.0, "f": 3.0}, 2, counts={"loss": 0.0})]
    scores = metrics_of(task, parts)
    assert np.isnan(scores["loss"])
    assert scores["f"] == 1.5


# which tensor has the labels

INTS = torch.tensor([[1, -100], [2, 3]])
FLOATS = torch.tensor([[0.5, -100.0], [1.0, 2.0]])


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ((FLOATS, INTS), 3),
        ((INTS, FLOATS), 2),
        ((FLOATS, torch.tensor([3, -100])), 1),
        ((FLOATS, torch.tensor([3, 4])), 2),
        ({"labels": INTS, "y": FLOATS}, 3),
        ({"labels": FLOATS, "y": INTS}, 2),
        ({"target": INTS.to(torch.int8), "x": FLOATS}, 3),
        ({"y": INTS > 0, "x": INTS}, 2),
        ({"x": FLOATS}, 2),
        ({"tags": INTS, "x": FLOATS}, 2),
    ],
)
def test_the_labels_of_a_batch_are_known_by_their_name_or_place(batch, count):
    assert Counter(ModelAndLoss(build, by_labels)).of(batch) == count


def batches_of(columns):
    return Batches(TableSet(columns), as_they_are)


SECOND_TAGS = np.where(RANDOM.random((300, 2)) < 0.1, -100, 1)
UNTAGGED = np.ones((300, 2), np.int64)


def test_labels_of_another_name_are_found_in_the_first_samples():
    task = ModelAndLoss(build, by_labels)
    shape, note = shape_for(task, batches_of({"tokens": UNTAGGED, "tags": SECOND_TAGS}))
    assert (shape.labels, note) == ("tags", "")
    counter = Counter(task, shape.labels)
    batch = {"tokens": torch.ones(2, 2).long(), "tags": INTS}
    assert counter.of(batch) == 3
    assert counter.of({**batch, "tags": INTS.clamp(min=0)}) == 4, "one unit for all batches"
    shape, note = shape_for(task, batches_of({"a": SECOND_TAGS, "b": SECOND_TAGS}))
    assert shape.labels is None
    assert note.startswith("'a' and 'b' both hold entries of -100, so it is not known over what")


def test_a_task_that_counts_needs_no_labels():
    task = ModelAndLoss(build, by_labels, count=num_samples_of)
    batches = batches_of({"a": SECOND_TAGS, "b": SECOND_TAGS})
    assert shape_for(task, batches) == (batches.samples.shape, "")


class Places(torch.utils.data.Dataset):
    """Tuples whose labels are not the last tensor, but the second of three."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, i):
        labels = np.where(MASK, CLASSES, -100)
        return torch.tensor(X[i]), torch.tensor(labels[i]), torch.tensor(MASK[i]).long()


def by_place(model, batch):
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class Named(Places):
    """Samples whose labels have a name of their own."""

    def __getitem__(self, i):
        x, tags, _ = super().__getitem__(i)
        return {"x": x, "tags": tags}


def by_tags(model, batch):
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["tags"].flatten())


def run_alone(data, tmp_path, loss, *, microbatches=1, batch_size=5, name="run", **more):
    """Return the result of a run in this process, and its log."""
    result = raydl.Trainer(
        build,
        {"train": data, "test": data},
        loss=loss,
        method="local-sgd",
        scaling=ScalingConfig(num_workers=0),
        training=TrainingConfig(steps=2, batch_size=len(data), microbatches=microbatches),
        evaluation=EvaluationConfig(batch_size=batch_size),
        run=raydl.RunConfig(run_dir=str(tmp_path / name), progress="none"),
        **more,
    ).fit()
    return result, json.loads((tmp_path / name / "status.json").read_text())["events"]


@pytest.mark.parametrize(
    ("data", "loss", "name"),
    [(Named(), by_tags, "'tags'"), (Places(), by_place, "part 1 of a batch")],
)
def test_a_run_says_once_that_labels_of_minus_100_do_not_count(data, loss, name, tmp_path):
    scores = []
    for microbatches, batch_size in itertools.product((1, 4), (1, NUM_SAMPLES)):
        folder = f"run-{microbatches}-{batch_size}"
        result, events = run_alone(
            data, tmp_path, loss, microbatches=microbatches, batch_size=batch_size, name=folder
        )
        scores.append(result.metrics["center_loss"])
        said = [event for event in events if "which do not count" in event]
        assert len(said) == 1
        assert f"{name} holds labels of -100" in said[0]
    assert max(scores) - min(scores) < 1e-6


def own_count(batch):
    return (batch["tags"] != -100).sum()


WHOLE = [{"x": X[i], "tags": CLASSES[i]} for i in range(NUM_SAMPLES)]


@pytest.mark.parametrize(("data", "more"), [(WHOLE, {}), (Named(), {"count": own_count})])
def test_a_run_with_all_labels_or_with_its_own_count_says_nothing(data, more, tmp_path):
    _, events = run_alone(data, tmp_path, by_tags, **more)
    assert not [event for event in events if "do not count" in event]


def test_training_samples_that_count_nothing_are_said_at_the_start(tmp_path):
    data = [{"x": x, "tags": np.full(LENGTH, -100)} for x in X]
    result, events = run_alone(data, tmp_path, by_tags)
    said = [event for event in events if "none of the first 24 training samples counts" in event]
    assert len(said) == 1
    assert np.isnan(result.metrics["center_loss"])


# what is refused


@pytest.mark.parametrize(
    ("count", "sentence"),
    [
        (lambda batch: -1.0, "the count of a batch must be finite and 0 or more, but it is -1.0"),
        (lambda batch: torch.tensor(float("nan")), "finite and 0 or more, but it is nan"),
        (lambda batch: batch["mask"], r"must be one number, .* but it has shape \[2, 4\]"),
        (lambda batch: "8", "must be one number, the denominator of its loss, but it is a str"),
        (lambda batch: batch["mask"].float().mean(), "return a sum from count.batch., not a mean"),
    ],
)
def test_a_wrong_count_is_refused_in_one_sentence_before_any_process_starts(
    count, sentence, tmp_path
):
    samples = [
        {"x": X[i], "classes": CLASSES[i], "mask": np.ones(LENGTH) * (i % 3)} for i in range(1, 9)
    ]
    with pytest.raises(ShapeError, match=sentence):
        run_alone(samples, tmp_path, by_mask, count=count)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"loss": by_mask, "count": 3}, "count must be a function of a batch, got 3"),
        ({"count": len}, r"count needs loss=; a task of your own has a method count\(batch\)"),
    ],
)
def test_a_count_is_a_function_and_belongs_to_a_loss(more, sentence):
    task = build if "loss" in more else ModelAndLoss(build, by_mask)
    with pytest.raises(ConfigError, match=sentence):
        raydl.Trainer(task, "digits", **more)


def test_a_count_that_turns_negative_during_a_run_ends_it_in_one_sentence():
    task = ModelAndLoss(build, by_labels, count=lambda batch: 2.0 - num_samples_of(batch))
    with pytest.raises(ShapeError, match="finite and 0 or more, but it is -6"):
        replica_of("labels", Elastic(0.9), task=task).step(batch_of("labels"))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ((1.0, 2.0, 3.0), "metric f must be a sum .*, or a pair .*, but it has 3 values"),
        ((1.0, -2.0), "the count of the metric f must be finite and 0 or more, but it is -2.0"),
        ((1.0, "2"), "metric f must be .* a pair .* but it is a str"),
    ],
)
def test_a_wrong_pair_is_refused_before_any_process_starts(value, sentence, tmp_path):
    task = ModelAndLoss(build, by_tags, metrics=lambda model, batch: {"f": value})
    with pytest.raises(ShapeError, match=sentence):
        raydl.Trainer(
            task,
            {"train": Named(), "test": Named()},
            scaling=ScalingConfig(num_workers=0),
            training=TrainingConfig(steps=2, batch_size=4),
            run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
        ).fit()


def test_a_pair_with_the_mean_instead_of_the_sum_is_refused(tmp_path):
    def mean(model, batch):
        count = (batch["tags"] != -100).sum()
        return {"loss": (by_tags(model, batch), count)}

    data = [{"x": X[i], "tags": CLASSES[i]} for i in range(8)]
    with pytest.raises(ShapeError, match="it is the mean; multiply it by its count"):
        raydl.Trainer(
            ModelAndLoss(build, by_tags, metrics=mean),
            {"train": data, "test": data},
            scaling=ScalingConfig(num_workers=0),
            training=TrainingConfig(steps=2, batch_size=4),
            run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
        ).fit()


def test_the_tasks_of_raydl_count_what_is_labelled():
    pictures, classes = torch.zeros(3, 1, 2, 2), torch.tensor([1, -100, 0])
    assert Counter(raydl.Classification()).of((pictures, classes.clamp(min=0))) == 3
    assert Counter(raydl.Classification()).of((pictures, classes)) == 2
    tokens, next_tokens = torch.ones(3, 4).long(), torch.ones(3, 4).long()
    assert Counter(raydl.LanguageModel()).of((tokens, next_tokens)) == 3, "whole texts"
    next_tokens[0, 1:] = -100
    assert Counter(raydl.LanguageModel()).of((tokens, next_tokens)) == 2.25


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_scores_of_the_tasks_of_raydl_do_not_depend_on_the_batches(size):
    torch.manual_seed(0)
    pictures, tokens = torch.randn(5, 3), torch.randint(7, (5, 4))
    for task, inputs, shape in (
        (raydl.Classification(lambda *_: torch.nn.Linear(3, 7)), pictures, (5,)),
        (raydl.LanguageModel(lambda *_: torch.nn.Embedding(7, 7)), tokens, (5, 4)),
    ):
        model = task._factory((), 7)
        labels = torch.randint(7, shape)
        labels.view(-1)[::3] = -100
        scores = evaluate(
            task, model, lambda a, b, i=inputs, t=labels: (i[a:b], t[a:b]),
            num_samples=5, batch_size=size,
        )  # fmt: skip
        logits = model(inputs).detach().reshape(-1, 7)
        expected = torch.nn.functional.cross_entropy(logits, labels.view(-1))
        is_right = logits.argmax(1) == labels.view(-1)
        assert scores["loss"] == pytest.approx(float(expected), rel=1e-6)
        assert scores["accuracy"] == int(is_right.sum()) / int((labels != -100).sum())


def test_a_batch_of_no_samples_counts_nothing():
    texts = torch.ones(3, 4).long(), torch.ones(3, 4).long()
    assert DataShape((), 0).labels is None
    assert Counter(ModelAndLoss(build, by_labels)).of(part_of(texts, 0, 0)) == 0
