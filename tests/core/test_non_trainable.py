"""Non-trainable state is equal in all processes and is kept in checkpoints."""

import os
import re

import numpy as np
import pytest
import torch
from ensembles import Ensemble, tiny_images
from histories import History, assert_same, config
from safetensors.torch import load_file
from torch import nn
from user_loops import Threads, run_all, user_loop_config

import raydl
from raydl.checkpoint.store import CheckpointStore
from raydl.checkpoint.writer import checkpoint_of, snapshot_of
from raydl.config import MethodConfig
from raydl.core.flat import FlatModel
from raydl.core.non_trainable import BufferChanges, _weighted_sum
from raydl.core.worker_group import Collected
from raydl.data import Batches, Normalizer, load
from raydl.errors import ConfigError, ShapeError
from raydl.storage import Storage
from raydl.tasks import Classification, evaluate
from raydl.worker.evaluator import Evaluator

METHODS = ["sync-easgd", "local-sgd", "async-easgd", "async-sgd"]


def unseeded(*shape):
    """Return random numbers without a seed, different in each process."""
    numbers = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
    return torch.tensor(numbers.standard_normal(shape), dtype=torch.float32)


class Mixed(nn.Module):
    """A model with every kind of non-trainable state, some of it random."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.frozen = nn.Linear(16, 32)
        with torch.no_grad():
            self.frozen.weight.copy_(unseeded(32, 16))
        self.frozen.requires_grad_(False)
        self.register_buffer("order", torch.argsort(unseeded(32)))
        self.register_buffer("scale", unseeded(32).double())
        self.register_buffer("bf16", unseeded(32).bfloat16())
        self.register_buffer("mask", torch.full((32,), -torch.inf))
        self.register_buffer("secret", unseeded(32), persistent=False)
        self.norm = nn.BatchNorm1d(32, momentum=None)
        self.head = nn.Linear(32, num_classes)

    def forward(self, images):
        mixed = self.frozen(images.flatten(1))[:, self.order] * self.scale.float()
        mixed = torch.maximum(mixed + self.bf16.float() + self.secret, self.mask)
        return self.head(torch.relu(self.norm(mixed)))


NON_TRAINABLE = {
    "frozen.weight", "frozen.bias", "order", "scale", "bf16", "mask", "secret",
    "norm.num_batches_tracked",
}  # fmt: skip


def arrays_of(worker):
    return worker.replica.flat.non_trainable.arrays()


def test_tensors_that_are_neither_trained_nor_averaged_are_non_trainable_state():
    flat = FlatModel(Mixed((1, 4, 4), 3))
    assert set(flat.non_trainable.names) == NON_TRAINABLE
    assert flat.num_buffers == 64  # mean and variance
    assert flat.num_parameters == 2 * 32 + 33 * 3


@pytest.mark.parametrize("method", METHODS)
def test_every_worker_starts_with_the_non_trainable_state_of_the_first_model(method):
    ensemble = Ensemble(config(method), num_workers=3, model=Mixed).join()
    first = ensemble.flat.non_trainable.arrays()
    for worker in ensemble.workers:
        assert_same(arrays_of(worker), first)
    ensemble.run()
    for worker in ensemble.workers:
        after = arrays_of(worker)
        assert after["norm.num_batches_tracked"] > 0
        for name in NON_TRAINABLE - {"norm.num_batches_tracked"}:
            assert_same(after[name], first[name])


def test_frozen_parameters_are_never_sent():
    case = config("sync-easgd", period=1)
    frozen, trained = (
        Ensemble(case, num_workers=2, model=model).join() for model in (Mixed, TrainedPart)
    )
    sizes = [e.workers[0].runner.strategy._exchange_bytes for e in (frozen, trained)]
    assert sizes[0] == sizes[1]


class TrainedPart(nn.Module):
    """The trained part of Mixed."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, num_classes)


def accuracy_of_center(path, data):
    """Return the accuracy of a run's center in plain torch."""
    model = Classification(Saved).build_model(data.train.shape)
    model.load_state_dict(load_file(f"{path}/center.safetensors"))
    test = Batches(data.test, Normalizer.of(data.train))
    return evaluate(
        Classification(Saved),
        model,
        lambda start, stop: test.batch(np.arange(start, stop)),
        num_samples=test.num_samples,
        batch_size=100,
    )["accuracy"]


class Saved(nn.Module):
    """A random frozen layer and a random permutation, both in the state dict."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.frozen = nn.Linear(64, 128)
        with torch.no_grad():
            self.frozen.weight.copy_(unseeded(128, 64) / 8)
        self.frozen.requires_grad_(False)
        self.register_buffer("order", torch.argsort(unseeded(128)))
        self.head = nn.Linear(128, num_classes)

    def forward(self, images):
        return self.head(torch.relu(self.frozen(images.flatten(1)))[:, self.order])


def train(tmp_path, method, num_workers, **more):
    run = raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none", **more.pop("run", {}))
    return raydl.Trainer(
        raydl.Classification(Saved),
        "digits",
        method=method,
        training=raydl.TrainingConfig(epochs=more.pop("epochs", 8)),
        scaling=raydl.ScalingConfig(num_workers=num_workers),
        run=run,
        **more,
    ).fit()


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_the_saved_center_equals_the_center_that_was_scored(tmp_path, method):
    result = train(tmp_path, method, 0)
    assert result.metrics["center_accuracy"] > 0.8
    assert accuracy_of_center(result.path, load("digits")) == pytest.approx(
        result.metrics["center_accuracy"]
    )


@pytest.mark.cluster
def test_processes_share_a_random_frozen_layer(cluster, tmp_path):
    result = train(tmp_path, "async-easgd", 2)
    assert result.metrics["center_accuracy"] > 0.8
    assert accuracy_of_center(result.path, load("digits")) == pytest.approx(
        result.metrics["center_accuracy"]
    )
    before = load_file(f"{result.path}/center.safetensors")

    train(tmp_path, "async-easgd", 2, epochs=12, run={"resume": True})
    after = load_file(f"{result.path}/center.safetensors")
    for name in ("frozen.weight", "frozen.bias", "order"):
        assert torch.equal(before[name], after[name])
    assert not torch.equal(before["head.weight"], after["head.weight"])


# a resumed run, newcomers


def resumed(before, after, tmp_path, members):
    """Continue a history from a checkpoint of another one, as in a new process."""
    states = {
        w: worker.pop_kept(before.snapshot.progress.round) for w, worker in before.workers.items()
    }
    store = CheckpointStore(Storage(str(tmp_path)))
    store.write(checkpoint_of(Collected(before.snapshot, states), before.flat, seconds=1.0))
    checkpoint, _ = store.read()
    after.snapshot = snapshot_of(checkpoint, after.flat)
    after.flat.load_non_trainable(checkpoint.center, checkpoint.state["untrained"])
    after.train(*members, rounds=0, states=checkpoint.workers)
    return after


@pytest.mark.parametrize("method", ["sync-easgd", "local-sgd", "sync-sgd"])
def test_a_resumed_run_has_the_counters_and_the_bits_of_an_uninterrupted_one(method, tmp_path):
    case, images = config(method, epochs=4), tiny_images(24)
    members = ("w0", "w1")
    whole = History(case, images=images, model=Mixed)
    whole.train(*members, rounds=3)
    cut = resumed(whole, History(case, images=images, model=Mixed), tmp_path, members)
    for worker_id in members:
        assert arrays_of(cut.workers[worker_id])["norm.num_batches_tracked"] > 0
        assert_same(arrays_of(cut.workers[worker_id]), arrays_of(whole.workers[worker_id]))
    whole.end(*members)
    cut.end(*members)
    assert_same(cut.bits(), whole.bits())


def test_a_newcomer_has_the_non_trainable_state_of_the_center(tmp_path):
    history = History(config("sync-easgd"), model=Mixed)
    history.train("w0", "w1", rounds=3)
    at_center = history.snapshot.non_trainable["norm.num_batches_tracked"]
    assert at_center == arrays_of(history.workers["w0"])["norm.num_batches_tracked"] > 0
    history.train("w0", "w1", "w2", rounds=0)
    assert_same(arrays_of(history.workers["w2"]), arrays_of(history.workers["w0"]))


@pytest.mark.parametrize("method", ["async-easgd", "async-sgd"])
def test_with_messages_the_center_has_the_counters_of_the_worker_that_exchanged_last(method):
    ensemble = Ensemble(config(method), num_workers=2, model=Mixed).join()
    ensemble.run()
    counts = [int(arrays_of(w)["norm.num_batches_tracked"]) for w in ensemble.workers]
    changed = ensemble.center().non_trainable
    assert set(changed) == {"norm.num_batches_tracked"}, "all other tensors are unchanged"
    # A message with the weights before a step has the counters before that step, too.
    assert int(changed["norm.num_batches_tracked"]) in {*counts, *(c - 1 for c in counts)}


def test_a_buffer_that_returns_to_its_first_value_is_sent():
    flat = FlatModel(Mixed((1, 4, 4), 3))
    flat.non_trainable.mark()
    changes = BufferChanges(flat.non_trainable)
    assert changes.pop_changes() == {}
    for counter in (1, 0):
        flat.model.norm.num_batches_tracked.fill_(counter)
        popped = changes.pop_changes()
        assert {name: int(value) for name, value in popped.items()} == {
            "norm.num_batches_tracked": counter
        }
    assert changes.pop_changes() == {}


def test_a_buffer_that_is_changed_through_its_data_is_sent():
    flat = FlatModel(Mixed((1, 4, 4), 3))
    flat.non_trainable.mark()
    changes = BufferChanges(flat.non_trainable)
    flat.model.norm.num_batches_tracked.data.add_(3)
    assert int(changes.pop_changes()["norm.num_batches_tracked"]) == 3


# a teacher that follows its student


class WithTeacher(nn.Module):
    """A frozen teacher that each training step moves towards the student."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.student = nn.Linear(16, num_classes)
        self.teacher = nn.Linear(16, num_classes).requires_grad_(False)
        with torch.no_grad():
            self.teacher.weight.copy_(unseeded(num_classes, 16))

    def forward(self, images):
        if self.training:  # like DINO's code; the version counter does not change
            self.teacher.weight.data.mul_(0.5).add_(self.student.weight.data, alpha=0.5)
        return self.student(images.flatten(1))


def test_the_center_of_a_round_has_the_teacher_of_the_first_worker():
    history = History(config("sync-easgd"), model=WithTeacher)
    history.train("w0", "w1", rounds=2)
    teacher = history.workers["w0"].replica.flat.model.teacher.weight
    assert torch.equal(torch.tensor(history.snapshot.non_trainable["teacher.weight"]), teacher)
    center = history.flat.state_dict_of(
        torch.tensor(history.snapshot.weights),
        torch.tensor(history.snapshot.buffers),
        history.snapshot.non_trainable,
    )
    assert torch.equal(center["teacher.weight"], teacher)


def test_a_moving_teacher_is_reported_in_a_run_with_messages(tmp_path, capsys):
    raydl.Trainer(
        raydl.Classification(lambda s, n: WithTeacherOfDigits(n)),
        "digits",
        method="async-easgd",
        training=raydl.TrainingConfig(epochs=1),
        scaling=raydl.ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="plain"),
    ).fit()
    assert (
        "the model changes its frozen teacher.weight by itself: each worker keeps its own values, "
        "and the center keeps the first ones; use a synchronous method to keep those of one worker"
    ) in capsys.readouterr().out


class WithTeacherOfDigits(WithTeacher):
    def __init__(self, num_classes):
        super().__init__((1, 8, 8), num_classes)
        self.student = nn.Linear(64, num_classes)
        self.teacher = nn.Linear(64, num_classes).requires_grad_(False)


# a user's training loop


def user_loop(threads, rank, *, state=None, num_steps=6):
    model = Mixed((1, 4, 4), 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loop():
        elastic = threads.attach(model, optimizer, f"w{rank}")
        if state is not None:
            elastic.load_state_dict(state)
        with elastic:
            for step in range(num_steps):
                generator = torch.Generator().manual_seed(100 * rank + step)
                inputs = torch.randn(8, 1, 4, 4, generator=generator)
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                elastic.step()
            return elastic.center_state_dict(), elastic.state_dict()

    return loop


@pytest.mark.parametrize("method", ["sync-easgd", "local-sgd", "async-easgd"])
def test_attached_models_share_the_non_trainable_state(method):
    threads = Threads(user_loop_config(MethodConfig(name=method, period=2), 3))
    (first, _), *others = run_all([user_loop(threads, rank) for rank in range(3)])
    for center, _ in others:
        assert center.keys() == first.keys()
        for name in ("frozen.weight", "frozen.bias", "order", "scale", "bf16", "mask"):
            assert torch.equal(center[name], first[name]), name


def test_a_resumed_attached_model_has_its_saved_non_trainable_state():
    threads = Threads(user_loop_config(MethodConfig(name="sync-easgd", period=2), 2))
    before = run_all([user_loop(threads, rank) for rank in range(2)])
    again = Threads(user_loop_config(MethodConfig(name="sync-easgd", period=2), 2))
    after = run_all([user_loop(again, rank, state=before[rank][1]) for rank in range(2)])
    for name in ("frozen.weight", "order", "scale", "bf16"):
        assert torch.equal(after[0][0][name], before[0][0][name]), name
    counts = [int(center["norm.num_batches_tracked"]) for center, _ in (before[0], after[0])]
    assert counts == [6, 12]


def test_attached_models_of_another_layout_are_refused():
    threads = Threads(user_loop_config(MethodConfig(name="sync-easgd", period=2), (1, 2)))

    def attach(model):
        return threads.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with attach(nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))) as first:
        assert first.rank == 0
        other = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1, track_running_stats=False))
        with pytest.raises(ConfigError, match="model must be the same for all workers of 'run'"):
            print(attach(other).rank)


# tensors that a model replaces, and state that is refused


class Replaces(nn.Module):
    """Assigns new tensors to its parameter and its buffer, as is common."""

    averaged_buffers = ("center",)

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.layer = nn.Linear(16, num_classes)
        self.register_buffer("center", torch.zeros(num_classes))

    def forward(self, images):
        if self.training:
            self.layer.weight.data = self.layer.weight.data.clamp(-0.05, 0.05)
        logits = self.layer(images.flatten(1))
        if self.training:
            self.center = 0.9 * self.center + logits.detach().mean(0)
        return logits


def test_a_buffer_that_a_model_replaces_is_averaged_and_a_parameter_is_trained():
    ensemble = Ensemble(config("local-sgd", period=1), num_workers=2, model=Replaces).join()
    ensemble.run(3)
    one, two = (worker.replica.flat for worker in ensemble.workers)
    assert torch.equal(one.weights, two.weights)
    assert one.weights[:48].abs().max() < 0.15, "clamped, then changed by one step"
    assert torch.equal(one.model.layer.weight.flatten(), one.weights[:48])
    assert torch.equal(one.model.center, two.model.center)
    assert one.model.center.abs().sum() > 0


def test_a_replacement_of_another_shape_is_refused():
    flat = FlatModel(Replaces((1, 4, 4), 3))
    flat.model.center = torch.zeros(7)
    with pytest.raises(ShapeError, match=r"replaced a parameter or buffer of shape \[3\]"):
        flat.rebind()


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("order", torch.zeros(32), "order of torch.float32, but the run's first model has int64"),
        ("more", torch.arange(2), "has more, but the run's first model lacks it"),
    ],
)
def test_a_process_that_builds_another_model_is_refused(name, tensor, sentence):
    first = FlatModel(Mixed((1, 4, 4), 3)).non_trainable.arrays()
    model = Mixed((1, 4, 4), 3)
    if hasattr(model, name):
        del model._buffers[name]
    model.register_buffer(name, tensor)
    with pytest.raises(ShapeError, match=re.escape(sentence)):
        FlatModel(model, non_trainable=first).non_trainable.load_first(first)


def test_a_process_that_builds_a_frozen_layer_of_another_shape_is_refused():
    first = FlatModel(Mixed((1, 4, 4), 3)).non_trainable.arrays()
    model = Mixed((1, 4, 4), 3)
    model.frozen.bias = nn.Parameter(torch.zeros(30), requires_grad=False)
    sentence = r"frozen.bias of shape \[30\], but the run's first model has shape \[32\]"
    with pytest.raises(ShapeError, match=sentence):
        FlatModel(model, non_trainable=first).non_trainable.load_first(first)


def test_state_that_is_not_a_tensor_is_refused():
    class Scaled(nn.Linear):
        def get_extra_state(self):
            return {"scale": 3}

        def set_extra_state(self, state):
            pass

    with pytest.raises(ShapeError, match=r"has Scaled with extra state \(get_extra_state\)"):
        FlatModel(Scaled(2, 1))


def test_a_mask_of_minus_infinity_stays_a_mask():
    ensemble = Ensemble(config("sync-easgd", period=1), num_workers=2, model=Mixed).join()
    ensemble.run(2)
    for worker in ensemble.workers:
        assert torch.isneginf(worker.replica.flat.model.mask).all()
        assert torch.isfinite(worker.replica.flat.buffers).all()


# buffers of the evaluator's model


class ChangedByScores(nn.Module):
    """Each forward pass replaces one buffer and increments two others."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.layer = nn.Linear(16, num_classes)
        self.register_buffer("shift", torch.zeros(num_classes))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("cache", torch.zeros(()), persistent=False)

    def forward(self, images):
        self.shift = self.shift + 1.0
        self.count += 1
        self.cache += 100.0
        return self.layer(images.flatten(1)) + self.shift.cumsum(0) * self.count + self.cache


def test_earlier_evaluations_do_not_change_the_score_of_a_center():
    ensemble = Ensemble(config("sync-easgd"), num_workers=1, model=ChangedByScores)
    evaluator = Evaluator(ensemble.job, ensemble.batches)
    first, second, third = (evaluator.evaluate(ensemble.first).metrics for _ in range(3))
    assert first == second == third


# buffers of every type


class Holder(nn.Module):
    """A layer with one more tensor as a buffer."""

    def __init__(self, tensor, **how):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("held", tensor, **how)


def received(tensor, **how):
    """Return the tensor that another process receives from the first model."""
    first = FlatModel(Holder(tensor, **how))
    other = FlatModel(
        Holder(torch.zeros_like(tensor), **how), non_trainable=first.non_trainable.names
    )
    other.non_trainable.load_first(first.non_trainable.arrays())
    return other.model.held


@pytest.mark.parametrize("largest", [-torch.inf, torch.finfo(torch.float32).min, 1e30])
def test_a_mask_with_values_too_large_for_an_exchange_is_not_averaged(largest):
    mask = torch.tensor([0.0, largest])
    assert FlatModel(Holder(mask)).num_buffers == 0
    assert torch.equal(received(mask), mask)


def test_an_expanded_buffer_is_sent():
    assert torch.equal(received(torch.arange(3).expand(4, 3)), torch.arange(3).expand(4, 3))


def test_a_complex_buffer_is_sent():
    assert torch.equal(received(torch.tensor([1 + 2j])), torch.tensor([1 + 2j]))


@pytest.mark.parametrize(
    "tensor", [torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.complex128)]
)
def test_a_saved_tensor_that_checkpoints_cannot_hold_is_refused(tensor):
    with pytest.raises(ShapeError, match=r"has held, torch\..* which checkpoints cannot hold"):
        FlatModel(Holder(tensor))
    assert FlatModel(Holder(tensor, persistent=False)).non_trainable.names == ()


class GrowingBuffer(nn.Module):
    """Stores the size of each batch."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.layer = nn.Linear(image_shape[1] * image_shape[2], num_classes)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))

    def forward(self, images):
        if self.training:
            self.seen = torch.cat([self.seen, torch.tensor([len(images)])])
        return self.layer(images.flatten(1))


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_a_run_with_a_growing_buffer_can_be_resumed(tmp_path, method):
    def fit(steps, *, resume=False):
        run = raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none", resume=resume)
        raydl.Trainer(
            raydl.Classification(GrowingBuffer),
            method=method,
            training=raydl.TrainingConfig(steps=steps),
            scaling=raydl.ScalingConfig(num_workers=0),
            run=run,
        ).fit()
        return CheckpointStore(Storage(str(tmp_path / "run"))).read()[0]

    first = fit(8).center["seen"]
    assert first.numel() > 1
    assert fit(24, resume=True).center["seen"].numel() > first.numel()


def test_an_unsaved_buffer_may_change_its_dtype_and_its_layout():
    first = FlatModel(Holder(torch.zeros(3), persistent=False))
    later = FlatModel(Holder(torch.zeros(3), persistent=False), non_trainable=["held"])
    first.model.held = torch.ones(4, dtype=torch.float64)
    later.non_trainable.load_first(first.non_trainable.arrays())
    assert torch.equal(later.model.held, torch.ones(4, dtype=torch.float64))
    first.model.held = torch.eye(2).to_sparse()
    assert first.non_trainable.own() == {}


@pytest.mark.parametrize(
    "other", [torch.tensor([0.5]), torch.tensor([1 + 2j]).conj(), torch.arange(4)]
)
def test_a_buffer_that_changes_its_dtype_or_shape_is_sent(other):
    flat = FlatModel(Holder(torch.tensor([0])))
    flat.non_trainable.mark()
    changes = BufferChanges(flat.non_trainable)
    flat.model.held = other
    assert np.array_equal(changes.pop_changes()["held"], other.resolve_conj().numpy())
    assert changes.pop_changes() == {}


def test_a_parameter_that_is_also_registered_as_a_buffer_is_trained():
    model = nn.Linear(2, 1)
    model.register_buffer("copy", model.weight)
    flat = FlatModel(model)
    assert (flat.num_parameters, flat.num_buffers, flat.non_trainable.names) == (3, 0, ())
    flat.weights.fill_(7)
    assert torch.equal(model.state_dict()["copy"], torch.full((1, 2), 7.0))


def test_a_parameter_that_is_a_buffer_of_the_enclosing_module_is_trained():
    model = nn.Sequential(nn.Linear(2, 1))
    model.register_buffer("anchor", model[0].weight)
    flat = FlatModel(model)
    assert (flat.num_parameters, flat.num_buffers, flat.non_trainable.names) == (3, 0, ())


def test_the_checksum_of_a_device_depends_on_positions():
    values = torch.arange(1000)
    assert _weighted_sum(values) == _weighted_sum(values.clone())
    assert _weighted_sum(values) != _weighted_sum(values.roll(1)) != _weighted_sum(values + 1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_frozen_parameter_whose_values_are_permuted_has_moved(device):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(device)
    model[0].requires_grad_(False)
    flat = FlatModel(model)
    flat.non_trainable.mark()
    assert flat.non_trainable.moved_parameters() == ()
    model[0].weight.copy_(model[0].weight.roll(1, 0))
    assert flat.non_trainable.moved_parameters() == ("0.weight",)


class FilledLater(nn.Module):
    """Creates a buffer with the first batch, as some quantizers do."""

    def __init__(self, image_shape, num_classes, persistent=True):
        super().__init__()
        self.layer = nn.Linear(image_shape[0] * 64, num_classes)
        self.register_buffer("mean", None, persistent=persistent)

    def forward(self, images):
        if self.mean is None:
            self.mean = images.detach().mean(0)
        return self.layer((images - self.mean).flatten(1))


class CacheFilledLater(FilledLater):
    """A FilledLater with a buffer that is not saved."""

    def __init__(self, image_shape, num_classes):
        super().__init__(image_shape, num_classes, persistent=False)


def test_saved_state_that_is_created_with_the_first_batch_is_refused(tmp_path):
    def fit(model):
        raydl.Trainer(
            raydl.Classification(model),
            "digits",
            training=raydl.TrainingConfig(steps=2),
            scaling=raydl.ScalingConfig(num_workers=0),
            run=raydl.RunConfig(run_dir=str(tmp_path / model.__name__), progress="none"),
        ).fit()

    with pytest.raises(ShapeError, match="has mean only from its first batch on"):
        fit(FilledLater)
    fit(CacheFilledLater)
