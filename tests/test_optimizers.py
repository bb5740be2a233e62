"""Optimizers, schedules and precision against plain torch, and what they refuse."""

import copy
import dataclasses
import functools
import math
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import SHAPE, Ensemble, linear, tiny_images
from test_controller import Stage, scored
from torch import nn
from torch.nn import functional

from raydl.center import Center, copied_to_cpu, joined_states, split_states
from raydl.checkpoint import Checkpoint, CheckpointStore
from raydl.checkpoint_writer import checkpoint_of, snapshot_of
from raydl.config import (
    ExchangeConfig,
    MethodConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.control.plateau import Plateau
from raydl.crew import Collected, Lost, Published, WorkerReady
from raydl.data import Batches, Normalizer
from raydl.data.samples import DataShape
from raydl.errors import ConfigError
from raydl.evaluator import Evaluator
from raydl.exchange.inner import GradientGroup
from raydl.exchange.local import LocalGroup
from raydl.methods import filled_in, resolve
from raydl.metrics import TimeParts
from raydl.optimizers import (
    ELEMENTWISE,
    OPTIMIZERS,
    as_config,
    check_for_model,
    is_elementwise,
    lr_at,
    make_optimizer,
    parameters_of,
)
from raydl.replica import Replica
from raydl.reports import Outcome
from raydl.rules import Elastic, MeanGradient, Tally, lr_factor
from raydl.storage import Storage
from raydl.task import Classification, LanguageModel, task_for, task_on
from raydl.trainer import Trainer

PLAIN = {"schedule": "constant", "warmup": 0.0, "max_grad_norm": None}


def deep(image_shape, num_classes):
    """Matrices, biases and a normalisation in turn."""
    size = image_shape[1] * image_shape[2]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(size, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, num_classes)
    )


def matrices(image_shape, num_classes):
    size = image_shape[1] * image_shape[2]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(size, 8, bias=False), nn.Linear(8, num_classes, bias=False)
    )


def replica_of(config, *, own=None, model=deep, rule=None, training=None):
    """Return a replica and a copy of its model."""
    torch.manual_seed(3)
    task = Classification(model)
    network = task.build_model(SHAPE)
    reference = copy.deepcopy(network)
    replica = Replica(
        network,
        task,
        rule=rule or Elastic(0.9),
        make_optimizer=make_optimizer(config, own, network),
        time_parts=TimeParts(),
        training=training or TrainingConfig(),
    )
    return replica, reference


def batches(num_steps, size=4):
    images = tiny_images(num_steps * size)
    data = Batches(images, Normalizer.of(images))
    return [data.batch(np.arange(i * size, (i + 1) * size)) for i in range(num_steps)]


def flattened(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def steps_of_both(replica, reference, optimizer, *, num_steps=6, max_norm=None):
    """Return the weights of a replica and of a plain model after the same steps."""
    for batch in batches(num_steps):
        replica.step(batch)
        optimizer.zero_grad()
        functional.cross_entropy(reference(batch[0]), batch[1]).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        optimizer.step()
    return replica.flat.weights, flattened(reference)


# any of torch.optim


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_of_torch_takes_its_own_steps_bit_for_bit(name):
    model = matrices if name == "muon" else deep
    config = OptimizerConfig(name=name, lr=0.01, **PLAIN)
    replica, reference = replica_of(config, model=model)
    optimizer = OPTIMIZERS[name](reference.parameters(), lr=0.01)
    ours, theirs = steps_of_both(replica, reference, optimizer)
    assert torch.equal(ours, theirs)


def test_elementwise_optimizers_hold_one_flat_tensor_and_others_the_models_parameters():
    for name in OPTIMIZERS:
        replica, reference = replica_of(OptimizerConfig(name=name, lr=0.1), model=matrices)
        sizes = [p.numel() for p in parameters_of(replica._optimizer)]
        layers = [p.numel() for p in reference.parameters()]
        assert sizes == ([sum(layers)] if name in ELEMENTWISE else layers), name


def test_options_and_fields_reach_the_optimizer():
    config = OptimizerConfig(
        name="adamw", lr=0.01, weight_decay=0.2, options="betas=(0.8, 0.9), eps=1e-6", **PLAIN
    )
    replica, reference = replica_of(config)
    optimizer = torch.optim.AdamW(
        reference.parameters(), lr=0.01, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6
    )
    assert torch.equal(*steps_of_both(replica, reference, optimizer))


@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor"])
def test_only_matrices_decay_where_that_is_asked_for(name):
    config = OptimizerConfig(
        name=name, lr=0.05, weight_decay=0.3, decay_only_matrices=True, **PLAIN
    )
    replica, reference = replica_of(config)
    groups = [
        {"params": [p for p in reference.parameters() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in reference.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = OPTIMIZERS[name](groups, lr=0.05)
    assert torch.equal(*steps_of_both(replica, reference, optimizer))


@pytest.mark.parametrize("settings", [{}, {"decay_only_matrices": True}, {"name": "adafactor"}])
def test_a_gradient_is_shortened_over_all_groups_together(settings):
    config = OptimizerConfig(lr=0.5, **{**PLAIN, "max_grad_norm": 0.01}, **settings)
    replica, reference = replica_of(config)
    optimizer = OPTIMIZERS[config.name](reference.parameters(), lr=0.5)
    ours, theirs = steps_of_both(replica, reference, optimizer, max_norm=0.01)
    torch.testing.assert_close(ours, theirs)


def test_a_function_of_parameters_is_an_optimizer_and_its_rate_the_highest():
    own = functools.partial(torch.optim.AdamW, lr=0.02, betas=(0.5, 0.9))
    settings, taken = as_config(own)
    config = TrainConfig(optimizer=dataclasses.replace(settings, **PLAIN))
    method = resolve(config, None, taken)
    assert method.optimizer.lr == 0.02
    assert is_elementwise(method.inner, method.own_optimizer)
    assert pickle.loads(pickle.dumps(method)).own_optimizer.keywords == own.keywords
    replica, reference = replica_of(method.inner, own=method.own_optimizer)
    replica.set_lr(0.02)
    assert torch.equal(*steps_of_both(replica, reference, own(reference.parameters())))


def two_rates(parameters):
    matrices, others = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    return torch.optim.Adam([{"params": matrices}, {"params": others, "lr": 0.001}], lr=0.01)


def test_groups_of_an_optimizer_of_ones_own_keep_their_rates_to_each_other():
    replica, _ = replica_of(OptimizerConfig(name="here:two_rates", **PLAIN), own=two_rates)
    replica.set_lr(0.005)
    rates = [group["lr"] for group in replica._optimizer.param_groups]
    assert rates == pytest.approx([0.005, 0.0005])


def low_first(parameters):
    groups = [{"params": parameters[:1], "lr": 0.001}, {"params": parameters[1:], "lr": 0.1}]
    return torch.optim.SGD(groups, lr=0.5)


def frozen_first(parameters):
    groups = [{"params": parameters[:1], "lr": 0.0}, {"params": parameters[1:]}]
    return torch.optim.SGD(groups, lr=0.1)


def body_and_head(parameters):
    *body, weight, bias = parameters
    return torch.optim.SGD([{"params": body}, {"params": [weight, bias], "lr": 0.1}], lr=0.01)


@pytest.mark.parametrize(
    ("own", "rates"),
    [(low_first, [0.0005, 0.05]), (frozen_first, [0.0, 0.05]), (body_and_head, [0.005, 0.05])],
)
def test_the_highest_rate_is_that_of_whichever_group_has_it(own, rates):
    replica, _ = replica_of(OptimizerConfig(name="here:own", **PLAIN), own=own)
    replica.set_lr(0.05)
    assert [group["lr"] for group in replica._optimizer.param_groups] == pytest.approx(rates)


@pytest.mark.parametrize("own", [low_first, frozen_first])
def test_the_rate_that_is_unset_is_the_highest_of_all_groups(own):
    settings, taken = as_config(own)
    assert resolve(TrainConfig(optimizer=settings), None, taken).optimizer.lr == 0.1


def test_a_function_that_counts_on_a_whole_model_is_taken_with_a_rate():
    settings, taken = as_config(body_and_head)
    settings = dataclasses.replace(settings, lr=0.05)
    assert resolve(TrainConfig(optimizer=settings), None, taken).optimizer.lr == 0.05


def with_an_object(parameters):
    return torch.optim.SGD([{"params": parameters, "owner": object()}], lr=0.1)


def test_an_optimizer_that_no_checkpoint_keeps_is_refused_before_the_start(tmp_path):
    refused = Trainer(
        "mlp",
        "synthetic:96",
        optimizer=with_an_object,
        scaling=ScalingConfig(num_workers=0),
        run=RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    )
    with pytest.raises(ConfigError, match="has in its param_groups/0/owner what no checkpoint"):
        refused.fit()
    assert not (tmp_path / "run").exists()


def test_an_optimizer_of_ones_own_is_found_by_module_and_name():
    config = TrainConfig(optimizer=OptimizerConfig(name=f"{__name__}:two_rates", schedule="linear"))
    method = resolve(config)
    assert method.own_optimizer is two_rates
    assert method.optimizer.lr == 0.01


def test_what_is_unset_is_the_methods_for_sgd_and_the_optimizers_own_for_others():
    def settings(method, name):
        config = TrainConfig(method=MethodConfig(name=method), optimizer=OptimizerConfig(name=name))
        optimizer = filled_in(config, resolve(config)).optimizer
        return optimizer.lr, optimizer.momentum

    assert settings("sync-measgd", "sgd") == (0.025, 0.9)
    assert settings("sync-easgd", "adamw") == (0.001, None)
    assert settings("sync-measgd", "rmsprop") == (0.01, 0.9)
    assert settings("async-msgd", "adamw") == (0.001, 0.9)  # the momentum is the master's


def test_the_filled_in_settings_are_taken_again():
    for method, name in [("sync-easgd", "adamw"), ("eamsgd", "sgd"), ("sync-sgd", "rprop")]:
        optimizer = OptimizerConfig(name=name, warmup=0.0)
        config = TrainConfig(method=MethodConfig(name=method), optimizer=optimizer)
        filled = filled_in(config, resolve(config))
        assert filled_in(filled, resolve(filled)) == filled


# what is refused, before any actor starts


def problem_of(*, method="sync-easgd", exchange=None, training=None, **optimizer):
    with pytest.raises(ConfigError) as caught:
        resolve(
            TrainConfig(
                method=MethodConfig(name=method),
                optimizer=OptimizerConfig(**optimizer),
                exchange=ExchangeConfig(**exchange or {}),
                training=TrainingConfig(**training or {}),
            )
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"name": "lbfgs"}, "optimizer.name can not be lbfgs: it asks for the loss several times"),
        ({"name": "sparseadam"}, "it takes sparse gradients only"),
        ({"name": "adamm"}, "optimizer.name has no 'adamm'; did you mean adam"),
        ({"name": "nowhere:at_all"}, "optimizer.name nowhere:at_all can not be imported"),
        ({"options": "eps"}, "optimizer.options must be NAME=VALUE by comma"),
        ({"options": "eps=open('x')"}, "optimizer.options must be NAME=VALUE by comma"),
        ({"options": "**{'eps': 1}"}, "optimizer.options must be NAME=VALUE by comma"),
        ({"options": "a=1)(b=2"}, "optimizer.options must be NAME=VALUE by comma"),
        ({"options": "lr=0.1"}, "optimizer.options can not hold lr: set optimizer.lr"),
        ({"name": "adam", "options": "bettas=(0.9, 0.99)"}, "has no 'bettas'; did you mean betas"),
        ({"name": "adam", "options": "betas=(2, 3)"}, "is not taken by adam: Invalid beta"),
        ({"name": "adam", "options": "betas=3"}, "optimizer.options 'betas=3' is not taken by"),
        ({"name": "adam", "momentum": 0.9}, "optimizer.momentum has no meaning for adam, got 0.9"),
        ({"name": "rprop", "weight_decay": 0.1}, "optimizer.weight_decay has no meaning for rprop"),
        ({"name": "rprop", "decay_only_matrices": True}, "decay_only_matrices has no meaning"),
        (
            {"name": "rprop"},
            "optimizer.warmup must be 0 for rprop, which takes its step sizes from",
        ),
        ({"name": "torch.optim:Rprop", "lr": 0.1}, "optimizer.warmup must be 0 for rprop"),
        (
            {"name": f"{__name__}:body_and_head"},
            "optimizer.lr must be set for test_optimizers:body_and_head, which does not take a "
            "single parameter on trial: ValueError: not enough values to unpack",
        ),
        ({"name": "adam", "method": "sync-measgd"}, "optimizer.momentum has no meaning for adam"),
        (
            {"name": f"{__name__}:two_rates", "weight_decay": 0.1},
            "optimizer.weight_decay is for an optimizer by name",
        ),
        (
            {"name": "adafactor", "method": "sync-sgd"},
            "optimizer.name can not be adafactor for sync-sgd, whose optimizer steps at the center",
        ),
        (
            {
                "training": {"deterministic": True},
                "schedule": "plateau",
            },
            "training.deterministic can not be kept with optimizer.schedule plateau",
        ),
        ({"milestones": "0.5,x"}, "optimizer.milestones must be numbers by comma"),
        ({"milestones": "0.7,0.5"}, "optimizer.milestones must be rising shares"),
        ({"schedule": "step", "milestones": "0.01"}, "must come after the warm-up of 0.05"),
        ({"gamma": 1.5}, "optimizer.gamma must be in (0, 1), got 1.5"),
        ({"training": {"precision": "fp8"}}, "training.precision has no 'fp8'"),
        ({"training": {"accumulate": 65}}, "training.accumulate must be at most the 64 samples"),
        ({"training": {"label_smoothing": 1.0}}, "training.label_smoothing must be in [0, 1)"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(settings, sentence):
    assert sentence in problem_of(**settings)


def test_a_decay_of_matrices_alone_is_refused_where_the_center_is_in_parts():
    sentence = problem_of(
        method="sync-msgd",
        exchange={"fragments": 2},
        decay_only_matrices=True,
        max_grad_norm=None,
        momentum=0.5,
    )
    assert "exchange.fragments" in sentence


def test_lbfgs_is_refused_as_a_class_too():
    model = linear((1, 4, 4), 3)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    config, own = as_config(torch.optim.LBFGS)
    with pytest.raises(ConfigError, match="can not be LBFGS: it asks for the loss several times"):
        check_for_model(config, own, model, flat)


def test_a_model_that_the_optimizer_does_not_take_is_refused():
    flat = nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match=r"optimizer\.name muon: Muon only supports 2D"):
        check_for_model(
            OptimizerConfig(name="muon", lr=0.1), None, linear((1, 4, 4), 3), flat.detach()
        )


def test_a_function_that_returns_no_optimizer_is_told_so():
    settings, own = as_config(lambda parameters: len(parameters))
    with pytest.raises(ConfigError, match=r"<lambda> must return a torch\.optim\.Optimizer"):
        resolve(TrainConfig(optimizer=settings), None, own)


def test_a_center_without_a_lock_steps_with_sgd_alone():
    config = TrainConfig(
        method=MethodConfig(name="raydl.rules:MeanGradient", schedule="hogwild"),
        optimizer=OptimizerConfig(name="adamw"),
    )
    with pytest.raises(ConfigError, match=r"optimizer\.name must be sgd .*, got adamw"):
        resolve(config)


def test_smoothing_is_for_models_by_name():
    trainer = Trainer(Classification(linear), training=TrainingConfig(label_smoothing=0.1))
    with pytest.raises(ConfigError, match=r"training\.label_smoothing is for a model by name"):
        trainer.fit()
    with pytest.raises(ConfigError, match="a name, an OptimizerConfig or a function"):
        Trainer(optimizer=3)


# what an optimizer remembers


def settings(method, *, training=None, exchange=None, workers=2, group_size=1, **optimizer):
    return TrainConfig(
        method=MethodConfig(name=method, period=2, group_size=group_size),
        training=TrainingConfig(**{"epochs": 2, "batch_size": 3, **(training or {})}),
        optimizer=OptimizerConfig(**{**PLAIN, **optimizer}),
        exchange=exchange or ExchangeConfig(timeout_s=20.0),
        scaling=ScalingConfig(num_workers=workers),
    )


def through_a_checkpoint(folder, ensemble, round):
    """Return the states of the workers and of the center's optimizer, written and read again."""
    store = CheckpointStore(Storage(str(folder)))
    workers = {w.worker_id: w.take_kept(round) for w in ensemble.workers}
    state = {"optimizer": ensemble.newest.optimizer}
    store.write(
        Checkpoint(
            round=round,
            generation=1,
            num_samples=0,
            seconds=0.0,
            center={"weights": torch.tensor(ensemble.newest.weights)},
            state=state,
            workers=workers,
        )
    )
    checkpoint, _ = store.read()
    return dataclasses.replace(ensemble.newest, **checkpoint.state), checkpoint.workers


@pytest.mark.parametrize("name", ["adamw", "nadam", "adagrad", "rprop"])
@pytest.mark.parametrize(
    ("method", "exchange"),
    [("sync-easgd", {}), ("sync-sgd", {}), ("sync-sgd", {"fragments": 2}), ("diloco", {})],
)
def test_a_run_that_was_interrupted_ends_with_the_same_bits(tmp_path, name, method, exchange):
    config = settings(
        method, name=name, lr=0.01, exchange=ExchangeConfig(timeout_s=20.0, **exchange)
    )
    images = tiny_images(31)
    whole = Ensemble(config, num_workers=2, images=images, model=deep).join()
    whole.run()

    first = Ensemble(config, num_workers=2, images=images, model=deep).join()
    first.run(2)
    for worker in first.workers:
        worker.vote(1, stop=1.0)
    assert set(first.run()) == {Outcome.STOPPED}
    snapshot, states = through_a_checkpoint(tmp_path, first, first.newest.round)
    again = Ensemble(config, num_workers=2, images=images, model=deep).join(snapshot, states)
    again.run()
    assert np.array_equal(again.newest.weights, whole.newest.weights)
    for one, other in zip(again.workers, whole.workers, strict=True):
        assert torch.equal(one.replica.flat.weights, other.replica.flat.weights)


def test_a_decay_of_matrices_alone_goes_through_a_checkpoint_too(tmp_path):
    config = settings("sync-sgd", name="adamw", lr=0.01, weight_decay=0.2, decay_only_matrices=True)
    whole = Ensemble(config, num_workers=1, model=deep).join()
    whole.run()
    first = Ensemble(config, num_workers=1, model=deep).join()
    first.run(2)
    first.workers[0].vote(1, stop=1.0)
    first.run()
    snapshot, states = through_a_checkpoint(tmp_path, first, first.newest.round)
    again = Ensemble(config, num_workers=1, model=deep).join(snapshot, states)
    again.run()
    assert np.array_equal(again.newest.weights, whole.newest.weights)


def test_sync_sgd_with_adamw_at_the_center_is_adamw_on_the_joined_batch():
    config = settings("sync-sgd", name="adamw", lr=0.01, training={"epochs": 1})
    config = dataclasses.replace(config, method=MethodConfig(name="sync-sgd", period=1))
    images = tiny_images(24)
    ensemble = Ensemble(config, num_workers=2, images=images)
    reference = linear(SHAPE.input_shape, SHAPE.num_classes)
    reference.load_state_dict(
        ensemble.flat.state_dict_of(ensemble.flat.weights, ensemble.flat.buffers)
    )
    ensemble.join().run()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    order = np.random.default_rng([0, 0]).permutation(24)
    for start in range(0, 24, 6):
        inputs, labels = ensemble.batches.batch(order[start : start + 6])
        optimizer.zero_grad()
        functional.cross_entropy(reference(inputs), labels).backward()
        optimizer.step()
    ours = torch.tensor(ensemble.newest.weights)
    torch.testing.assert_close(ours, flattened(reference), rtol=1e-3, atol=1e-5)


def test_a_state_split_into_spans_and_joined_again_is_the_same():
    flat = torch.arange(5.0)
    optimizer = torch.optim.AdamW([flat], lr=0.1)
    flat.grad = torch.ones(5)
    optimizer.step()
    whole = copied_to_cpu(optimizer.state_dict())
    parts = split_states(whole, [2, 3])
    assert [part["state"][0]["exp_avg"].numel() for part in parts] == [2, 3]
    assert str(joined_states(parts, [2, 3])) == str(whole)


def test_spans_that_were_not_exchanged_yet_lose_nothing_of_those_that_were():
    flat = torch.arange(3.0)
    optimizer = torch.optim.AdamW([flat], lr=0.1)
    new = copied_to_cpu(optimizer.state_dict())
    flat.grad = torch.ones(3)
    optimizer.step()
    joined = joined_states([new, copied_to_cpu(optimizer.state_dict())], [2, 3])
    assert joined["state"][0]["exp_avg"].tolist() == pytest.approx([0, 0, 0.1, 0.1, 0.1])


@pytest.mark.parametrize("name", ["adamw", "adagrad", "rprop", "sgd"])
def test_a_center_that_goes_back_remembers_what_it_did_then(name):
    config = OptimizerConfig(name=name, lr=0.1, momentum=0.9 if name == "sgd" else None, **PLAIN)
    weights = torch.ones(4)
    center = Center(
        weights, torch.zeros(0), rule=MeanGradient(), make_optimizer=make_optimizer(config)
    )

    def move():
        center.set_lr(0.1)
        center.apply_(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(0), Tally(1, 1, 2.0))
        return weights.clone()

    center.keep()
    once = move()
    center.undo_()
    assert torch.equal(move(), once)
    center.keep()
    twice = move()
    center.undo_()
    assert torch.equal(move(), twice)


def test_a_replica_that_is_copied_goes_on_as_the_first_does():
    first, _ = replica_of(OptimizerConfig(name="adamw", lr=0.01))
    other, _ = replica_of(OptimizerConfig(name="adamw", lr=0.01))
    data = batches(3)
    first.step(data[0])
    first.step(data[1])
    group = LocalGroup(2, timeout_s=5.0)

    def copied(rank, replica):
        flat = replica.flat
        partners = GradientGroup(
            group.member(rank),
            flat.num_parameters,
            dtype=flat.weights.dtype,
            device=flat.weights.device,
        )
        return replica.copy_first_(partners, is_first=rank == 0)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(copied, range(2), [first, other])) == [False, True]
    for replica in (first, other):
        replica.step(data[2])
    assert torch.equal(first.flat.weights, other.flat.weights)


def test_workers_that_share_a_replica_stay_identical_with_adamw():
    config = settings("sync-easgd", name="adamw", lr=0.01, workers=2, group_size=2)
    ensemble = Ensemble(config, num_workers=2).join()
    ensemble.run()
    one, other = (w.replica.flat.weights for w in ensemble.workers)
    assert torch.equal(one, other)


@pytest.mark.parametrize("method", ["async-easgd", "async-sgd", "hogwild-easgd"])
def test_adamw_trains_by_messages(method):
    config = settings(method, name="adamw", lr=0.01)
    ensemble = Ensemble(config, num_workers=2).join()
    assert ensemble.run() == [Outcome.FINISHED] * 2
    assert not np.array_equal(ensemble.center().weights, ensemble.first.weights)


# schedules

SHARES = [i / 20 for i in range(20)]


def torch_factors(make_scheduler):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler, factors = make_scheduler(optimizer), []
    for _ in SHARES:
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


@pytest.mark.parametrize(
    ("schedule", "make_scheduler"),
    [
        ("cosine", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=20)),
        (
            "linear",
            lambda o: torch.optim.lr_scheduler.LinearLR(
                o, start_factor=1.0, end_factor=0.0, total_iters=20
            ),
        ),
        ("constant", lambda o: torch.optim.lr_scheduler.ConstantLR(o, factor=1.0)),
        ("step", lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [10, 15], gamma=0.1)),
    ],
)
def test_schedules_are_those_of_torch_at_the_same_points(schedule, make_scheduler):
    ours = [lr_factor(schedule, share, milestones=(0.5, 0.75), gamma=0.1) for share in SHARES]
    assert ours == pytest.approx(torch_factors(make_scheduler))


def test_the_rate_is_a_function_of_the_share_of_the_run_and_of_the_cuts():
    config = OptimizerConfig(lr=0.4, schedule="step", milestones="0.5", gamma=0.25, warmup=0.1)
    rates = [lr_at(config, share) for share in (0.05, 0.1, 0.49, 0.5, 1.0)]
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.1, 0.1])
    plateau = OptimizerConfig(lr=0.4, schedule="plateau", gamma=0.5, warmup=0.0)
    assert [lr_at(plateau, 0.3, num_cuts=n) for n in range(3)] == pytest.approx([0.4, 0.2, 0.1])


@pytest.mark.parametrize(("name", "sign"), [("accuracy", 1), ("loss", -1)])
def test_the_center_stands_still_after_patience_evaluations_that_were_no_better(name, sign):
    plateau = Plateau(OptimizerConfig(schedule="plateau", patience=1), num_cuts=2)
    scores = [0.5, 0.6, 0.6, 0.55, 0.6, 0.7, 0.6, 0.6]
    cuts = []
    for score in scores:
        sentence = plateau.take({name: score if sign > 0 else 1 - score})
        assert bool(sentence) == (plateau.num_cuts > (cuts[-1] if cuts else 2))
        cuts.append(plateau.num_cuts)
    assert cuts == [2, 2, 2, 3, 3, 3, 3, 4]
    assert Plateau(OptimizerConfig()).take({name: 0.1}) == ""


def test_a_driver_does_not_wait_for_the_compiler_that_torch_imports_with_an_optimizer():
    code = (
        "import sys, raydl.trainer; from raydl.config import OptimizerConfig; "
        "from raydl.control.plateau import Plateau; Plateau(OptimizerConfig()); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("name", "scores", "num_cuts"),
    [
        ("loss", [-1.0] * 4, 1),
        ("loss", [-1.0, -0.99, -0.98, -0.97], 1),  # it gets worse
        ("loss", [-1.0, -1.01, -1.02, -1.03], 0),
        ("loss", [1.0, 0.0, -1.0, -2.0], 0),
        ("accuracy", [0.98, 0.98005, 0.9801, 0.98015], 0),  # any better score counts
        ("accuracy", [math.nan] * 2, 1),
    ],
)
def test_a_plateau_is_told_from_progress_whatever_the_sign_of_the_score(name, scores, num_cuts):
    plateau = Plateau(OptimizerConfig(schedule="plateau", patience=1))
    for score in scores:
        plateau.take({name: score})
    assert plateau.num_cuts == num_cuts


def test_no_cut_is_told_of_that_can_not_come():
    stage = Stage().start()
    stage.controller._known.plateau = Plateau(OptimizerConfig(schedule="plateau", patience=0))
    stage.step(scored(1))
    stage.step(*stage.end("finished", 9, "w0", "w1"), Published((0, 9)))
    stage.step(scored(9))
    assert "stands still" not in str(stage.said)


def plateau_of(method):
    config = settings(method, lr=0.1, schedule="plateau", training={"steps": 12, "epochs": None})
    return Ensemble(config, num_workers=2, images=tiny_images(96)).join()


def test_all_ranks_cut_after_the_same_round_though_they_hear_of_it_in_different_ones():
    ensemble = plateau_of("sync-easgd")
    ensemble.run(1)
    ensemble.workers[0].vote(1, num_cuts=1)
    ensemble.run(1)
    ensemble.workers[1].vote(1, num_cuts=1)
    ensemble.run(2)
    assert [w._schedule.num_cuts for w in ensemble.workers] == [1, 1]
    ensemble.run()
    assert ensemble.newest.num_cuts == 1
    lrs = {r.round: r.lr for r in ensemble.workers[0].report().records}
    assert lrs[max(lrs)] == pytest.approx(0.01)


def test_by_messages_the_orders_tell_how_often_to_cut():
    ensemble = plateau_of("async-easgd")
    ensemble.run(1)
    for _ in range(2):  # told again it is still one cut
        ensemble.service.dispatcher.vote(1, num_cuts=1)
    ensemble.run(2)
    assert [w._schedule.num_cuts for w in ensemble.workers] == [1, 1]
    assert ensemble.workers[0].center().num_cuts == 1
    assert ensemble.center().num_cuts == 1
    again = Ensemble(ensemble.config, num_workers=2, images=tiny_images(96))
    again.join(ensemble.center())
    assert [w._schedule.num_cuts for w in again.workers] == [1, 1]


def test_workers_are_told_of_cuts_and_told_again_when_they_form_anew():
    stage = Stage().start()
    stage.controller._known.plateau = Plateau(OptimizerConfig(schedule="plateau", patience=0))
    assert stage.step(scored(1)) == []
    assert ("vote", "num_cuts") in stage.step(scored(2))
    assert "the center stands still at accuracy 0.5000" in stage.said[-1]
    assert ("vote", "num_cuts") not in stage.step()
    stage.step(Lost("w1", "the actor died"))
    stage.step(*stage.end("broken", 0, "w0"))
    stage.step(WorkerReady("w2", "node"))
    told = [told for _ in range(4) for told in stage.step()]
    assert ("vote", "num_cuts") in told


def test_a_checkpoint_holds_the_cuts_and_one_without_them_has_none():
    ensemble = plateau_of("sync-easgd")
    snapshot = dataclasses.replace(ensemble.first, num_cuts=3)
    checkpoint = checkpoint_of(Collected(snapshot, {}), ensemble.flat, seconds=1.0)
    assert snapshot_of(checkpoint, ensemble.flat).num_cuts == 3
    del checkpoint.state["num_cuts"]
    assert snapshot_of(checkpoint, ensemble.flat).num_cuts == 0


# precision, accumulation, smoothing


@pytest.mark.parametrize("rule", [Elastic(0.9), MeanGradient()])
@pytest.mark.parametrize("num_parts", [2, 3, 8])
def test_a_batch_in_parts_has_the_gradient_of_the_whole(rule, num_parts):
    (batch,) = batches(1, size=8)
    results = []
    for accumulate in (1, num_parts):
        training = TrainingConfig(batch_size=8, accumulate=accumulate)
        replica, _ = replica_of(OptimizerConfig(lr=0.1), rule=rule, training=training)
        loss, _ = replica.step(batch)
        results.append((loss, replica.flat.weights, replica.flat.gradients))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_less_samples_than_parts_make_a_step_all_the_same():
    training = TrainingConfig(batch_size=8, accumulate=8)
    replica, _ = replica_of(OptimizerConfig(lr=0.1), training=training)
    before = replica.flat.weights.clone()
    replica.step(batches(1, size=3)[0])
    assert not torch.equal(before, replica.flat.weights)


@pytest.mark.parametrize(
    ("num_samples", "sizes"), [(64, [16] * 4), (5, [5]), (17, [9, 8]), (33, [11] * 3), (1, [1])]
)
def test_the_tail_of_an_epoch_makes_fewer_parts_not_smaller_ones(num_samples, sizes):
    seen = []

    class Seen(nn.Module):
        def forward(self, inputs):
            seen.append(len(inputs))
            return inputs

    training = TrainingConfig(batch_size=64, accumulate=4)
    model = lambda *shape: nn.Sequential(Seen(), deep(*shape))  # noqa: E731
    replica, _ = replica_of(OptimizerConfig(lr=0.1), model=model, training=training)
    replica.step(batches(1, size=num_samples)[0])
    assert seen == sizes


def test_bf16_takes_steps_with_falling_loss_and_keeps_its_weights_in_float32():
    training = TrainingConfig(precision="bf16")
    replica, _ = replica_of(OptimizerConfig(lr=0.2), training=training)
    (batch,) = batches(1, size=32)
    losses = [float(replica.step(batch)[0]) for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]
    assert replica.flat.weights.dtype == torch.float32
    exact, _ = replica_of(OptimizerConfig(lr=0.2))
    first = float(exact.step(batch)[0])
    assert losses[0] != first
    assert losses[0] == pytest.approx(first, rel=0.05)


def test_the_center_is_scored_in_the_precision_of_the_run():
    losses = []
    for precision in ("float32", "bf16"):
        config = settings("sync-easgd", training={"precision": precision})
        ensemble = Ensemble(config, num_workers=1)
        evaluated = Evaluator(ensemble.job, ensemble.batches).evaluate(ensemble.first)
        losses.append(evaluated.metrics["loss"])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_smoothing_is_in_the_loss_and_not_in_the_metrics():
    model, (batch,) = linear(SHAPE.input_shape, 3), batches(1)
    plain, smooth = Classification(linear), Classification(linear, label_smoothing=0.2)
    expected = functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.2)
    assert torch.equal(smooth.loss(model, batch), expected)
    assert not torch.equal(smooth.loss(model, batch), plain.loss(model, batch))
    assert smooth.metrics(model, batch)["loss"] == plain.metrics(model, batch)["loss"]
    named = task_for("mlp", SHAPE, label_smoothing=0.2)
    assert torch.equal(named.loss(model, batch), expected)


def test_a_language_model_is_smoothed_in_its_loss_alone():
    texts = DataShape((4,), 7)
    tokens = torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(2))
    batch = tokens[:, :-1], tokens[:, 1:]
    model = nn.Embedding(7, 7)
    plain, smooth = (
        task_for(model_of(model), texts),
        LanguageModel(model_of(model), label_smoothing=0.2),
    )
    expected = functional.cross_entropy(
        model(batch[0]).flatten(0, 1), batch[1].flatten(), label_smoothing=0.2
    )
    assert torch.equal(smooth.loss(model, batch), expected)
    assert smooth.loss(model, batch) != plain.loss(model, batch)
    assert smooth.metrics(model, batch)["loss"] == plain.metrics(model, batch)["loss"]
    named = task_for(model_of(model), texts, label_smoothing=0.2)
    assert torch.equal(named.loss(model, batch), expected)


def model_of(model):
    return lambda input_shape, num_classes: model


def test_the_smoothing_that_is_set_reaches_the_task_of_a_run():
    model, (batch,) = linear(SHAPE.input_shape, 3), batches(1)
    config = TrainConfig(model="mlp", training=TrainingConfig(label_smoothing=0.2))
    expected = functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.2)
    assert torch.equal(task_on(None, SHAPE, config).loss(model, batch), expected)


@pytest.mark.parametrize("center_shards", [1, 2])
def test_shards_that_are_made_again_have_the_masters_momentum(center_shards):
    config = settings(
        "async-msgd",
        lr=0.1,
        workers=1,
        momentum=0.9,
        exchange=ExchangeConfig(center_shards=center_shards, timeout_s=20.0),
    )
    ensemble = Ensemble(config, num_workers=1).join()
    ensemble.run(3)
    snapshot = ensemble.center()
    (momentum,) = [s["momentum_buffer"] for s in snapshot.optimizer["state"].values()]
    assert momentum.abs().sum() > 0
    again = Ensemble(config, num_workers=1).join(snapshot)
    (same,) = [s["momentum_buffer"] for s in again.center().optimizer["state"].values()]
    assert torch.equal(same, momentum)
