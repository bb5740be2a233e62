"""A layer that the model unfreezes during a run is trained from then on."""

import dataclasses
import functools
import logging
import re

import pytest
import torch
from ensembles import Ensemble, tiny_images
from safetensors.torch import load_file
from torch import nn

import raydl
from raydl.checkpoint.store import CheckpointStore
from raydl.checkpoint.writer import checkpoint_of, snapshot_of
from raydl.config import (
    ExchangeConfig,
    MethodConfig,
    OptimizerConfig,
    ParamGroup,
    TrainConfig,
    TrainingConfig,
)
from raydl.core.center import extended_state
from raydl.core.flat import FlatModel
from raydl.core.optimizers import make_optimizer
from raydl.core.reports import Outcome
from raydl.core.worker_group import Collected
from raydl.errors import ShapeError
from raydl.methods import resolve
from raydl.run.progress_reporter import LOGGER
from raydl.storage import Storage
from raydl.tasks import Classification

GROUPS = (ParamGroup(pattern="last.bias", lr_scale=0.5), ParamGroup(pattern="first.*"))
NAMES = ("first.bias", "first.weight")
FROZEN_CALLS = 12


class Late(nn.Module):
    """Unfreezes its first layer after some calls; the counter is a buffer, and so is resumed."""

    def __init__(self, image_shape=(1, 4, 4), num_classes=3, *, frozen_calls=FROZEN_CALLS):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(image_shape[1] * image_shape[2], 8)
        self.last = nn.Linear(8, num_classes)
        self.first.requires_grad_(False)
        self.register_buffer("calls", torch.tensor(0), persistent=False)
        self.frozen_calls = frozen_calls

    def forward(self, images):
        if self.training and torch.is_grad_enabled():
            self.calls += 1
            if self.calls > self.frozen_calls:
                self.first.requires_grad_(True)
        return self.last(torch.tanh(self.first(images.flatten(1))))


class Recorded(Classification):
    """Records the batches of the training."""

    def __init__(self, model=Late):
        super().__init__(model)
        self.batches = []

    def loss(self, model, batch):
        if torch.is_grad_enabled():
            self.batches.append(tuple(part.clone() for part in batch))
        return super().loss(model, batch)


def trainer(task, folder, method, *, epochs=3, resume=False, workers=0, **more):
    more.setdefault("optimizer", OptimizerConfig(lr=0.05, lr_schedule="constant", warmup=0.0))
    return raydl.Trainer(
        task,
        raydl.data.load("digits"),
        method=method,
        training=raydl.TrainingConfig(epochs=epochs, batch_size=64),
        scaling=raydl.ScalingConfig(num_workers=workers, cpus_per_worker=0.5),
        run=raydl.RunConfig(run_dir=str(folder), progress="none", resume=resume),
        **more,
    )


def moved(folder, layer):
    first, now = Late((1, 8, 8), 10), load_file(folder / "center.safetensors")
    return not torch.equal(first.state_dict()[f"{layer}.weight"], now[f"{layer}.weight"])


@pytest.fixture
def events():
    """The events of the runs of a test."""
    sentences = []
    handler = logging.Handler()
    handler.emit = lambda record: sentences.append(record.getMessage())
    logger = logging.getLogger(LOGGER)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield sentences
    logger.removeHandler(handler)
    logger.setLevel(level)


def unfrozen_at(events):
    """Return the rounds from which the events say that the layer is trained."""
    pattern = r"the model has unfrozen first.bias and 1 more: trained from now on, from round (\d+)"
    return [int(found[1]) for sentence in events if (found := re.search(pattern, sentence))]


@pytest.mark.parametrize(
    "method",
    [
        "sync-easgd", "sync-measgd", "sync-sgd", "sync-msgd", "local-sgd", "diloco", "async-sgd",
        "async-msgd", "async-easgd", "hogwild-easgd", "async-diloco", "original-easgd",
    ],
)  # fmt: skip
def test_a_layer_that_is_unfrozen_during_a_run_is_trained_with_every_method(
    method, tmp_path, events
):
    folder = tmp_path / "run"
    config = MethodConfig(name=method, period=1 if "sgd" in method else 4)
    result = trainer(Classification(Late), folder, config).fit()
    num_samples = raydl.data.load("digits").train.num_samples
    assert result.metrics["samples"] == 3 * num_samples
    assert len(unfrozen_at(events)) == 1
    assert moved(folder, "first")
    assert moved(folder, "last")

    before = load_file(folder / "center.safetensors")
    again = trainer(Classification(Late), folder, config, epochs=4, resume=True).fit()
    assert again.metrics["samples"] == 4 * num_samples
    assert len(unfrozen_at(events)) == 1  # the checkpoint names the layer
    after = load_file(folder / "center.safetensors")
    assert not torch.equal(before["first.weight"], after["first.weight"])


@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        ({"name": "sgd", "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
        (
            {"name": "adamw", "weight_decay": 0.1},
            lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
        ),
        ({"name": "adafactor"}, lambda p: torch.optim.Adafactor(p, lr=0.05)),
        (
            {"name": "adam", "param_groups": (ParamGroup(pattern="first.*", lr_scale=0.1),)},
            None,
        ),
    ],
)
def test_its_steps_are_those_of_torch_from_its_first_gradient_on(optimizer, make, tmp_path, events):
    task, folder = Recorded(), tmp_path / "run"
    settings = {"lr": 0.05, "lr_schedule": "constant", "warmup": 0.0, "clip_grad_norm": None}
    method = MethodConfig(name="local-sgd", period=1)
    trainer(task, folder, method, optimizer=OptimizerConfig(**settings, **optimizer)).fit()
    (since,) = unfrozen_at(events)
    assert since == FROZEN_CALLS + 2  # the next message says so, which all obey after its round

    batches = task.batches[-(3 * 23) :]  # before them is the check of two samples
    model = Late((1, 8, 8), 10, frozen_calls=since)
    model.first.requires_grad_(True)
    if make is None:
        groups = [
            {"params": list(model.last.parameters())},
            {"params": list(model.first.parameters()), "lr": 0.005},
        ]
        reference = torch.optim.Adam(groups, lr=0.05)
    else:
        reference = make(model.parameters())
    for number, batch in enumerate(batches):
        reference.zero_grad()
        task.loss(model, batch).backward()
        if number < since:
            for parameter in model.first.parameters():
                parameter.grad = None
        reference.step()
    center = load_file(folder / "center.safetensors")
    for name, value in model.named_parameters():
        assert torch.allclose(center[name], value, atol=2e-6), name


def config_of(method, *, period=2, optimizer=None, **exchange):
    return TrainConfig(
        method=MethodConfig(name=method, period=period),
        training=TrainingConfig(epochs=6, batch_size=4),
        optimizer=OptimizerConfig(lr=0.05, lr_schedule="constant", **(optimizer or {})),
        exchange=ExchangeConfig(**exchange),
    )


class Unequal:
    """Builds models, the first of which unfreezes its layer earlier than the others."""

    def __init__(self):
        self.num_built = 0

    def __call__(self, image_shape, num_classes):
        self.num_built += 1
        calls = 3 if self.num_built == 2 else 10**6  # the first one is the driver's
        return Late(image_shape, num_classes, frozen_calls=calls)


def stopped_by_a_vote(config, *, model):
    """Return an ensemble of two workers that has stopped since one has unfrozen its layer."""
    ensemble = Ensemble(config, num_workers=2, images=tiny_images(40), model=model).join()
    assert set(ensemble.run()) == {Outcome.STOPPED}
    return ensemble


def resumed(stopped, folder, names=NAMES):
    """Return an ensemble that goes on from the checkpoint of a stopped one, extended by names."""
    round = stopped.newest.progress.round
    states = {w.worker_id: w.pop_kept(round) for w in stopped.workers}
    store = CheckpointStore(Storage(str(folder)))
    collected = Collected(stopped.newest, states, unfrozen=names)
    store.write(checkpoint_of(collected, stopped.flat, seconds=0.0))
    checkpoint, _ = store.read()
    assert tuple(checkpoint.state["unfrozen"]) == names
    again = Ensemble(
        stopped.config, num_workers=2, images=stopped.images, model=Late, unfrozen=names
    )
    snapshot = snapshot_of(checkpoint, again.flat)
    method, size = resolve(stopped.config), checkpoint.state["num_parameters"]
    make = None
    if not method.rule.takes_steps:
        make = make_optimizer(method.inner, method.own_optimizer, again.flat)
    state = extended_state(snapshot.optimizer, again.flat.weights, size, make)
    return again.join(dataclasses.replace(snapshot, optimizer=state), checkpoint.workers)


@pytest.mark.parametrize(
    "config",
    [
        config_of("sync-easgd"),
        config_of("sync-measgd", fragments=2),
        config_of("sync-easgd", compression="int8", fragments=2),
        config_of("local-sgd", compression="topk:0.2"),
        config_of("sync-msgd", period=1),
        config_of("sync-msgd", period=1, optimizer={"param_groups": GROUPS}),
        config_of("diloco"),
    ],
    ids=["elastic", "fragments", "int8", "topk", "momentum at the center", "groups", "outer"],
)  # fmt: skip
def test_all_workers_go_on_with_what_one_of_them_has_unfrozen(config, tmp_path):
    stopped = stopped_by_a_vote(config, model=Unequal())
    assert set(stopped.workers[0].report().unfrozen) == set(NAMES)
    assert stopped.workers[1].report().unfrozen == ()
    before = stopped.newest
    again = resumed(stopped, tmp_path)
    size = stopped.flat.num_parameters
    for old, new in zip(stopped.workers, again.workers, strict=True):
        flats = old.replica.flat, new.replica.flat
        assert torch.equal(flats[1].weights[:size], flats[0].weights)
        frozen = old.replica.flat.model.first
        whole = torch.cat([frozen.bias.reshape(-1), frozen.weight.reshape(-1)])
        assert torch.equal(flats[1].weights[size:], whole)
        optimizer = new.replica.state_dict()["optimizer"]
        if optimizer.get("state"):  # none of the new parameters has a state yet
            shapes = {tuple(v.shape) for s in optimizer["state"].values() for v in s.values()}
            assert tuple(frozen.weight.shape) not in shapes
    again.run()
    after = again.newest
    assert after.progress.num_samples == 6 * 40
    assert after.progress.num_samples > before.progress.num_samples
    state = again.flat.state_dict_of(torch.tensor(after.weights), torch.tensor(after.buffers))
    assert not torch.equal(state["first.weight"], Late().state_dict()["first.weight"])


def test_elements_that_were_trained_before_keep_their_places():
    flat = FlatModel(Late())
    weights = flat.weights.clone()
    extended = flat.with_unfrozen(NAMES)
    assert [name for name, _ in extended.named_parameters()] == [
        "last.weight",
        "last.bias",
        *NAMES,
    ]
    assert torch.equal(extended.weights[: len(weights)], weights)
    assert extended.with_unfrozen(NAMES) is extended
    assert not set(NAMES) & set(extended.non_trainable.names)
    further = FlatModel(Late(), unfrozen=NAMES[:1]).with_unfrozen(NAMES)
    assert torch.equal(further.weights, extended.weights)


def test_a_state_of_another_model_is_refused_although_its_size_fits_the_first_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ShapeError, match="has 12 trained elements, but a saved state has 6"):
        FlatModel(model).first_parameters(6)


def test_a_frozen_parameter_of_another_dtype_cannot_be_trained():
    model = Late()
    model.first.half()
    with pytest.raises(ShapeError, match="must have parameters of one dtype and device"):
        FlatModel(model).with_unfrozen(NAMES)


def test_a_layer_that_is_frozen_again_has_no_gradient_and_keeps_its_weights():
    model = Late(frozen_calls=0)
    flat = FlatModel(model, unfrozen=NAMES)
    flat.watch_gradients()
    before = tuple(flat.num_reached)
    model.first.requires_grad_(False)
    model.frozen_calls = 10**6
    model(torch.ones(2, 1, 4, 4)).sum().backward()
    assert flat.unreached(before) == list(NAMES)
    model.first.requires_grad_(True)
    model(torch.ones(2, 1, 4, 4)).sum().backward()
    assert flat.unreached(before) == []


def test_frozen_parameters_without_a_gradient_are_not_noticed():
    model = Late()
    flat = FlatModel(model)
    flat.watch_gradients()
    assert not any(p.requires_grad for p in model.first.parameters())
    model(torch.ones(2, 1, 4, 4)).sum().backward()
    assert flat.newly_trained == set()
    model.first.bias.requires_grad_(True)
    assert flat.newly_trained == set()
    model(torch.ones(2, 1, 4, 4)).sum().backward()
    assert flat.newly_trained == {"first.bias"}


@pytest.mark.cluster
@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_workers_in_processes_train_what_they_unfreeze(cluster, method, tmp_path, events):
    folder = tmp_path / "run"
    config = MethodConfig(name=method, period=2)
    best = raydl.CheckpointConfig(keep_best=True)
    task = Classification(Late)
    result = trainer(task, folder, config, workers=2, epochs=24, checkpoint=best).fit()
    assert len(unfrozen_at(events)) == 1
    num_samples = raydl.data.load("digits").train.num_samples
    assert result.metrics["samples"] == 24 * num_samples
    assert moved(folder, "first")
    assert not result.metrics["stopped_by"]
    Late((1, 8, 8), 10).load_state_dict(load_file(folder / "best.safetensors"))


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_what_is_unfrozen_in_the_last_step_is_said_if_it_is_not_trained(method, tmp_path, events):
    steps = -(-raydl.data.load("digits").train.num_samples // 64)
    task = Classification(functools.partial(Late, frozen_calls=steps - 1))
    trainer(task, tmp_path / "run", MethodConfig(name=method, period=2), epochs=1).fit()
    assert not moved(tmp_path / "run", "first")
    sentence = "the model has unfrozen first.bias and 1 more, but the run ended before"
    assert any(sentence in event for event in events) or unfrozen_at(events)
