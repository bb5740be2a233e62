"""Optimizers compared with plain torch, and settings that are refused."""

import dataclasses
import functools
import json
import pickle
import subprocess
import sys

import pytest
import torch
from ensembles import linear
from replicas import PLAIN, deep, matrices, plain_optimizer, replica_of, steps_of_both

import raydl
from raydl import cli
from raydl.config import (
    ExchangeConfig,
    MethodConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.core.optimizers import (
    ELEMENTWISE,
    OPTIMIZERS,
    as_config,
    check_for_model,
    is_elementwise,
    name_of,
    parameters_of,
)
from raydl.errors import ConfigError
from raydl.methods import filled_in, resolve
from raydl.run.trainer import Trainer
from raydl.tasks import Classification

# any of torch.optim


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_takes_the_steps_of_torch_bit_for_bit(name):
    config = OptimizerConfig(name=name, lr=0.01, **PLAIN)
    replica, reference = replica_of(config, model=deep)
    optimizer = plain_optimizer(name, reference, lr=0.01)
    ours, theirs = steps_of_both(replica, reference, optimizer)
    assert torch.equal(ours, theirs)


@pytest.mark.processes
def test_no_optimizer_that_raydl_makes_imports_the_compiler_of_torch():
    code = """
import sys, torch
from raydl.config import MethodConfig, OptimizerConfig, TrainConfig
from raydl.methods import METHODS, resolve
from raydl.core.center import Center
from raydl.core.rules import Letter, Mail, Now
from raydl.core.optimizers import OPTIMIZERS, make_optimizer
from raydl.elastic.plateau import Plateau
model = torch.nn.Linear(2, 2, bias=False)
for name in OPTIMIZERS:
    optimizer = make_optimizer(OptimizerConfig(name=name, lr=0.1), None, model)([model.weight])
    model.weight.grad = torch.ones(2, 2)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
for name in METHODS:
    method = resolve(TrainConfig(method=MethodConfig(name=name)))
    make = make_optimizer(method.inner, None, model)
    center = Center(torch.ones(4), torch.zeros(0), rule=method.rule, make_optimizer=make)
    sums = {lane: torch.ones(4) for lane in method.rule.lanes}
    numbers = dict.fromkeys(method.rule.numbers, 1.0)
    letters = None if method.rule.sums else [Letter(sums, 1.0)]
    center.apply_(Mail(sums, 1, 1.0, numbers, letters), torch.zeros(0), Now(1))
    center.load_optimizer(center.optimizer_state())
Plateau(OptimizerConfig(lr_schedule="plateau")).note_score({"accuracy": 0.5})
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_elementwise_optimizers_hold_one_flat_tensor_and_others_the_parameters_of_the_model():
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
def test_only_matrices_decay_with_decay_only_matrices(name):
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
def test_a_gradient_is_clipped_over_all_groups_together(settings):
    config = OptimizerConfig(lr=0.5, **{**PLAIN, "clip_grad_norm": 0.01}, **settings)
    replica, reference = replica_of(config)
    optimizer = OPTIMIZERS[name_of(config)](reference.parameters(), lr=0.5)
    ours, theirs = steps_of_both(replica, reference, optimizer, max_norm=0.01)
    torch.testing.assert_close(ours, theirs)


def test_a_function_of_parameters_is_an_optimizer_with_its_own_rate():
    own = functools.partial(torch.optim.AdamW, lr=0.02, betas=(0.5, 0.9))
    settings, own_optimizer = as_config(own)
    config = TrainConfig(optimizer=dataclasses.replace(settings, **PLAIN))
    method = resolve(config, None, own_optimizer)
    assert method.optimizer.lr == 0.02
    assert is_elementwise(method.inner, method.own_optimizer)
    assert pickle.loads(pickle.dumps(method)).own_optimizer.keywords == own.keywords
    replica, reference = replica_of(method.inner, own=method.own_optimizer)
    replica.set_lr(0.02)
    assert torch.equal(*steps_of_both(replica, reference, own(reference.parameters())))


def two_rates(parameters):
    matrices, others = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    return torch.optim.Adam([{"params": matrices}, {"params": others, "lr": 0.001}], lr=0.01)


def test_the_groups_of_a_users_optimizer_keep_the_ratios_of_their_rates():
    replica, _ = replica_of(OptimizerConfig(name="here:two_rates", **PLAIN), own=two_rates)
    replica.set_lr(0.005)
    rates = [group["lr"] for group in replica._optimizer.param_groups]
    assert rates == pytest.approx([0.005, 0.0005])


def low_rate_first(parameters):
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
    [(low_rate_first, [0.0005, 0.05]), (frozen_first, [0.0, 0.05]), (body_and_head, [0.005, 0.05])],
)
def test_the_group_with_the_highest_rate_gets_the_scheduled_one(own, rates):
    replica, _ = replica_of(OptimizerConfig(name="here:own", **PLAIN), own=own)
    replica.set_lr(0.05)
    assert [group["lr"] for group in replica._optimizer.param_groups] == pytest.approx(rates)


@pytest.mark.parametrize("own", [low_rate_first, frozen_first])
def test_the_default_rate_is_the_highest_of_all_groups(own):
    settings, own_optimizer = as_config(own)
    assert resolve(TrainConfig(optimizer=settings), None, own_optimizer).optimizer.lr == 0.1


def test_a_function_that_needs_a_whole_model_is_accepted_with_a_rate():
    settings, own_optimizer = as_config(body_and_head)
    settings = dataclasses.replace(settings, lr=0.05)
    assert resolve(TrainConfig(optimizer=settings), None, own_optimizer).optimizer.lr == 0.05


def with_an_object(parameters):
    return torch.optim.SGD([{"params": parameters, "owner": object()}], lr=0.1)


def test_an_optimizer_that_checkpoints_cannot_hold_is_refused_before_the_start(tmp_path):
    refused = Trainer(
        "mlp",
        "synthetic:96",
        optimizer=with_an_object,
        scaling=ScalingConfig(num_workers=0),
        run=RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    )
    with pytest.raises(
        ConfigError, match=r"they cannot hold a value of type object \(param_groups/0/owner\)"
    ):
        refused.fit()
    assert not (tmp_path / "run").exists()


def test_a_users_optimizer_is_found_by_module_and_name():
    config = TrainConfig(
        optimizer=OptimizerConfig(name=f"{__name__}:two_rates", lr_schedule="linear")
    )
    method = resolve(config)
    assert method.own_optimizer is two_rates
    assert method.optimizer.lr == 0.01


def test_unset_settings_come_from_the_method_for_sgd_and_from_the_optimizer_otherwise():
    def settings(method, name):
        config = TrainConfig(method=MethodConfig(name=method), optimizer=OptimizerConfig(name=name))
        optimizer = filled_in(config, resolve(config)).optimizer
        return optimizer.lr, optimizer.momentum

    assert settings("sync-measgd", "sgd") == (0.025, 0.9)
    assert settings("sync-easgd", "adamw") == (0.001, None)
    assert settings("sync-measgd", "rmsprop") == (0.01, 0.9)
    assert settings("async-msgd", "adamw") == (0.001, 0.9)  # the momentum is at the center


def test_resolved_settings_resolve_to_themselves():
    for method, name in [("sync-easgd", "adamw"), ("eamsgd", "sgd"), ("sync-sgd", "rprop")]:
        optimizer = OptimizerConfig(name=name, warmup=0.0)
        config = TrainConfig(method=MethodConfig(name=method), optimizer=optimizer)
        filled = filled_in(config, resolve(config))
        assert filled_in(filled, resolve(filled)) == filled


# settings that are refused before any actor starts


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
        ({"name": "lbfgs"}, "optimizer.name cannot be lbfgs: it evaluates the loss several times"),
        ({"name": "sparseadam"}, "it needs sparse gradients, and replicas have dense ones"),
        ({"name": "adamm"}, "optimizer.name has no 'adamm'; did you mean adam"),
        ({"name": "nowhere:at_all"}, "optimizer.name nowhere:at_all cannot be imported"),
        ({"options": "eps"}, "optimizer.options must be NAME=VALUE separated by commas"),
        ({"options": "eps=open('x')"}, "optimizer.options must be NAME=VALUE separated by commas"),
        ({"options": "**{'eps': 1}"}, "optimizer.options must be NAME=VALUE separated by commas"),
        ({"options": "a=1)(b=2"}, "optimizer.options must be NAME=VALUE separated by commas"),
        ({"options": "lr=0.1"}, "optimizer.options must not have lr: set optimizer.lr"),
        ({"name": "adam", "options": "bettas=(0.9, 0.99)"}, "has no 'bettas'; did you mean betas"),
        ({"name": "adam", "options": "betas=(2, 3)"}, "is not accepted by adam: Invalid beta"),
        (
            {"name": "adam", "options": "betas=3"},
            "optimizer.options must have betas as 2 values, as in betas=(0.9, 0.999), got betas=3",
        ),
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
            "optimizer.lr must be set for test_optimizers:body_and_head, which cannot be "
            "tried on a single parameter (ValueError: not enough values to unpack",
        ),
        ({"name": "adam", "method": "sync-measgd"}, "optimizer.momentum has no meaning for adam"),
        (
            {"name": f"{__name__}:two_rates", "weight_decay": 0.1},
            "optimizer.weight_decay is for optimizers by name",
        ),
        (
            {"name": "adafactor", "method": "sync-sgd"},
            "optimizer.name cannot be adafactor for sync-sgd, whose optimizer steps at the center",
        ),
        (
            {
                "training": {"deterministic": True},
                "lr_schedule": "plateau",
            },
            "training.deterministic is not possible with optimizer.lr_schedule plateau",
        ),
        ({"milestones": "0.5,x"}, "optimizer.milestones must be numbers separated by commas"),
        ({"milestones": "0.7,0.5"}, "optimizer.milestones must be increasing shares"),
        ({"lr_schedule": "step", "milestones": "0.01"}, "must come after the warm-up of 0.05"),
        ({"gamma": 1.5}, "optimizer.gamma must be in (0, 1), got 1.5"),
        ({"training": {"precision": "fp8"}}, "training.precision has no 'fp8'"),
        (
            {"training": {"microbatches": 65}},
            "training.microbatches must be at most the 64 samples",
        ),
        ({"training": {"label_smoothing": 1.0}}, "training.label_smoothing must be in [0, 1)"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_with_one_sentence(settings, sentence):
    assert sentence in problem_of(**settings)


def test_decay_only_matrices_is_refused_for_a_center_in_fragments():
    sentence = problem_of(
        method="sync-msgd",
        exchange={"fragments": 2},
        decay_only_matrices=True,
        clip_grad_norm=None,
        momentum=0.5,
    )
    assert "exchange.fragments" in sentence


def test_lbfgs_is_refused_as_a_class_too():
    model = linear((1, 4, 4), 3)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    config, own = as_config(torch.optim.LBFGS)
    with pytest.raises(ConfigError, match="cannot be LBFGS: it evaluates the loss several times"):
        check_for_model(config, own, model, flat)


def only_matrices(parameters):
    if any(p.ndim != 2 for p in parameters):
        raise ValueError("only matrices, please")
    return torch.optim.SGD(parameters, lr=0.1)


def test_a_model_that_the_optimizer_does_not_accept_is_refused():
    model = linear((1, 4, 4), 3)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    config, own = as_config(only_matrices)
    with pytest.raises(ConfigError, match=r"optimizer\.name .*:only_matrices: only matrices"):
        check_for_model(config, own, model, flat)


def test_a_function_that_returns_no_optimizer_is_refused():
    settings, own = as_config(lambda parameters: len(parameters))
    with pytest.raises(ConfigError, match=r"<lambda> must return a torch\.optim\.Optimizer"):
        resolve(TrainConfig(optimizer=settings), None, own)


def test_a_center_without_a_lock_accepts_only_sgd():
    config = TrainConfig(
        method=MethodConfig(name="raydl.methods.data_parallel:MeanGradient", strategy="hogwild"),
        optimizer=OptimizerConfig(name="adamw"),
    )
    with pytest.raises(ConfigError, match=r"optimizer\.name must be sgd .*, got adamw"):
        resolve(config)


def test_smoothing_is_for_models_by_name():
    trainer = Trainer(Classification(linear), training=TrainingConfig(label_smoothing=0.1))
    with pytest.raises(ConfigError, match=r"training\.label_smoothing must be 0 with your own"):
        trainer.fit()
    with pytest.raises(ConfigError, match="a name, an OptimizerConfig or a function"):
        Trainer(optimizer=3)


# a user's function, with settings


def my_adam(parameters):
    return torch.optim.Adam(parameters, lr=0.002, betas=(0.8, 0.9))


def train(run_dir, *options):
    words = ["train", "--workers", "0", "--data", "digits", "--model", "mlp"]
    words += ["--run.progress", "none", "--run-dir", str(run_dir), *options]
    return cli.main(words)


@pytest.mark.parametrize("name", ["torch.optim:AdamW", "test_optimizers:my_adam"])
def test_a_command_trains_with_an_optimizer_by_module_and_name_and_resumes_with_it(tmp_path, name):
    options = ["--optimizer", name, "--batch-size", "512"]
    assert train(tmp_path / "run", *options, "--epochs", "1") == 0
    assert train(tmp_path / "run", *options, "--epochs", "2", "--resume") == 0
    config = json.loads((tmp_path / "run/config.json").read_text())["config"]["optimizer"]
    assert config["name"] == name
    assert config["lr"] == (0.001 if "AdamW" in name else 0.002)


def test_a_function_is_used_with_the_settings_that_are_passed_with_it():
    around = OptimizerConfig(lr=0.5, lr_schedule="linear", warmup=0.25, clip_grad_norm=0.1)
    trainer = raydl.Trainer("mlp", "digits", make_optimizer=my_adam, optimizer=around)
    method = resolve(trainer.config, None, trainer.own_optimizer)
    assert method.own_optimizer is my_adam
    assert method.inner == dataclasses.replace(around, name="test_optimizers:my_adam")
    replica, reference = replica_of(method.inner, own=method.own_optimizer)
    replica.set_lr(0.01)
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.01, betas=(0.8, 0.9))
    assert torch.equal(*steps_of_both(replica, reference, optimizer, max_norm=0.1))


def test_arguments_that_contradict_a_users_function_are_refused():
    for settings, sentence in [
        ({"optimizer": "adamw"}, "optimizer.name adamw exclude each other; leave the name out"),
        ({"optimizer": my_adam}, "a function as optimizer exclude each other; give one"),
    ]:
        with pytest.raises(ConfigError, match=f"make_optimizer and {sentence}"):
            raydl.Trainer("mlp", "digits", make_optimizer=my_adam, **settings)
    with pytest.raises(ConfigError, match="make_optimizer must be a function of parameters, got"):
        raydl.Trainer("mlp", "digits", make_optimizer=3)


def test_the_argument_that_a_message_names_exists():
    def of_a_whole_model(parameters):
        first, *others = parameters
        return torch.optim.SGD([{"params": [first]}, {"params": [others[0]]}], lr=0.1)

    trainer = raydl.Trainer("mlp", "digits", make_optimizer=of_a_whole_model)
    with pytest.raises(ConfigError, match=r"pass optimizer=OptimizerConfig\(lr=\.\.\.\) with"):
        resolve(trainer.config, None, trainer.own_optimizer)
    trainer = raydl.Trainer(
        "mlp", "digits", make_optimizer=of_a_whole_model, optimizer=OptimizerConfig(lr=0.1)
    )
    assert resolve(trainer.config, None, trainer.own_optimizer).inner.lr == 0.1
