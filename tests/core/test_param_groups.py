"""Parameter groups by patterns of names: settings, steps, checkpoints and errors."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from ensembles import SHAPE, Ensemble, linear, tiny_images
from interruptions import assert_same_bits_after_an_interruption
from replicas import PLAIN, batches, deep, replica_config, replica_of, steps_of_both

import raydl
from raydl import cli
from raydl.cli.options import parse_train
from raydl.config import (
    ExchangeConfig,
    MethodConfig,
    OptimizerConfig,
    ParamGroup,
    TrainConfig,
    dotted,
    from_dict,
    to_dict,
)
from raydl.core.lr_schedules import lr_at
from raydl.core.optimizers import OPTIMIZERS, check_for_model
from raydl.data import load
from raydl.errors import ConfigError, UnknownNameError
from raydl.methods import resolve
from raydl.methods.data_parallel import MeanGradient
from raydl.tasks import build_model

BIASES = ParamGroup(pattern="*.bias", weight_decay=0.0)
HEAD = ParamGroup(pattern="4.*", lr_scale=0.5, weight_decay=0.2)


def by_name(model, *, bias, head, others):
    """Return torch's parameter groups for the patterns ``*.bias`` and ``4.*``, in this order."""
    named = dict(model.named_parameters())
    biases = [p for name, p in named.items() if name.endswith(".bias")]
    heads = [named["4.weight"]]
    taken = {id(p) for p in biases + heads}
    rest = [p for p in named.values() if id(p) not in taken]
    return [{"params": rest, **others}, {"params": biases, **bias}, {"params": heads, **head}]


# the steps


@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor"])
def test_groups_take_the_steps_of_torch_bit_for_bit(name):
    config = OptimizerConfig(
        name=name, lr=0.05, weight_decay=0.3, param_groups=(BIASES, HEAD), **PLAIN
    )
    replica, reference = replica_of(config)
    groups = by_name(
        reference, bias={"weight_decay": 0.0}, head={"weight_decay": 0.2, "lr": 0.025}, others={}
    )
    optimizer = OPTIMIZERS[name](groups, lr=0.05, weight_decay=0.3)
    assert torch.equal(*steps_of_both(replica, reference, optimizer))


def test_options_of_a_group_reach_the_optimizer():
    group = ParamGroup(pattern="4.*", options="betas=(0.5, 0.9), eps=1e-6")
    config = OptimizerConfig(name="adamw", lr=0.05, param_groups=(group,), **PLAIN)
    replica, reference = replica_of(config)
    *body, weight, bias = reference.parameters()
    head = {"params": [weight, bias], "betas": (0.5, 0.9), "eps": 1e-6}
    optimizer = torch.optim.AdamW([{"params": body}, head], lr=0.05)
    assert torch.equal(*steps_of_both(replica, reference, optimizer))


def test_a_parameter_belongs_to_the_first_pattern_that_matches_its_name():
    biases, head = (ParamGroup(pattern=p, lr_scale=s) for p, s in (("*.bias", 0.25), ("4.*", 0.5)))
    for groups, scale in (((biases, head), 0.25), ((head, biases), 0.5)):
        config = OptimizerConfig(lr=0.1, param_groups=groups, **PLAIN)
        replica, reference = replica_of(config)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        last = reference[4].bias.clone()
        ours, theirs = steps_of_both(replica, reference, optimizer, num_steps=1)
        num_biases = last.numel()
        torch.testing.assert_close(ours[-num_biases:] - last, scale * (theirs[-num_biases:] - last))


def test_the_decay_of_a_group_comes_before_decay_only_matrices():
    decayed = ParamGroup(pattern="2.bias", weight_decay=0.4)
    config = OptimizerConfig(
        name="adamw", lr=0.05, weight_decay=0.3, decay_only_matrices=True,
        param_groups=(decayed, ParamGroup(pattern="4.*", lr_scale=0.5)), **PLAIN,
    )  # fmt: skip
    replica, reference = replica_of(config)
    named = dict(reference.named_parameters())
    groups = [
        {"params": [named["1.weight"]]},
        {"params": [named[n] for n in ("1.bias", "2.weight")], "weight_decay": 0.0},
        {"params": [named["2.bias"]], "weight_decay": 0.4},
        {"params": [named["4.weight"]], "lr": 0.025},
        {"params": [named["4.bias"]], "lr": 0.025, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.3)
    assert torch.equal(*steps_of_both(replica, reference, optimizer))


def test_a_schedule_is_multiplied_by_the_scale_of_a_group():
    config = OptimizerConfig(
        lr=0.2, lr_schedule="linear", warmup=0.0, param_groups=(HEAD, BIASES), clip_grad_norm=None
    )
    replica, _ = replica_of(config)
    for share, rates in ((0.0, [0.2, 0.1, 0.2]), (0.5, [0.1, 0.05, 0.1]), (1.0, [0.0, 0.0, 0.0])):
        replica.set_lr(lr_at(config, share))
        found = [group["lr"] for group in replica._optimizer.param_groups]
        assert found == pytest.approx(rates)


def test_a_gradient_is_clipped_over_all_groups_together():
    config = OptimizerConfig(
        lr=0.5, param_groups=(BIASES, HEAD), **{**PLAIN, "clip_grad_norm": 0.01}
    )
    replica, reference = replica_of(config)
    groups = by_name(reference, bias={}, head={"weight_decay": 0.2, "lr": 0.25}, others={})
    optimizer = torch.optim.SGD(groups, lr=0.5)
    torch.testing.assert_close(*steps_of_both(replica, reference, optimizer, max_norm=0.01))


# methods of each kind: what is sent, how, and where the optimizer is


@pytest.mark.parametrize(
    "method",
    [
        "sync-easgd",
        "sync-sgd",
        "diloco",
        "async-easgd",
        "async-msgd",
        "async-diloco",
        "hogwild-sgd",
    ],
)
def test_in_every_kind_of_method_a_group_with_scale_0_does_not_change(method, tmp_path):
    fits = []
    for scale in (0.0, 1.0):
        trainer = raydl.Trainer(
            "mlp",
            "synthetic:96",
            method=method,
            scaling=raydl.ScalingConfig(num_workers=0),
            training=raydl.TrainingConfig(steps=4, batch_size=16),
            optimizer=OptimizerConfig(
                warmup=0.0, param_groups=[ParamGroup(pattern="*.bias", lr_scale=scale)]
            ),
            run=raydl.RunConfig(run_dir=str(tmp_path / f"run-{scale}"), progress="none"),
        )
        fits.append(trainer.fit().checkpoint.to_state_dict())
    frozen, trained = fits
    task = raydl.Classification("mlp")
    first = build_model(task, load("synthetic:96", seed=0).train.shape, seed=0).state_dict()
    for name, value in frozen.items():
        stays = name.endswith(".bias")
        assert torch.equal(value, first[name]) is stays, name
        assert not torch.equal(trained[name], first[name]), name


def test_sync_sgd_with_groups_at_the_center_equals_torch_on_the_joined_batch():
    group = ParamGroup(pattern="*.bias", lr_scale=0.5, weight_decay=0.0)
    config = replica_config(
        "sync-sgd", name="adamw", lr=0.01, weight_decay=0.2, training={"epochs": 1},
        param_groups=(group,),
    )  # fmt: skip
    config = dataclasses.replace(config, method=MethodConfig(name="sync-sgd", period=1))
    images = tiny_images(24)
    ensemble = Ensemble(config, num_workers=2, images=images, model=deep)
    reference = deep(SHAPE.input_shape, SHAPE.num_classes)
    flat = ensemble.flat
    reference.load_state_dict(flat.state_dict_of(flat.weights, flat.buffers))
    ensemble.join().run()
    biases = [p for name, p in reference.named_parameters() if name.endswith(".bias")]
    others = [p for name, p in reference.named_parameters() if not name.endswith(".bias")]
    optimizer = torch.optim.AdamW(
        [{"params": others}, {"params": biases, "lr": 0.005, "weight_decay": 0.0}],
        lr=0.01, weight_decay=0.2,
    )  # fmt: skip
    order = np.random.default_rng([0, 0]).permutation(24)
    for start in range(0, 24, 6):
        inputs, labels = ensemble.batches.batch(order[start : start + 6])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(reference(inputs), labels).backward()
        optimizer.step()
    theirs = torch.cat([p.detach().reshape(-1) for p in reference.parameters()])
    ours = torch.tensor(ensemble.newest.weights)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


# checkpoints


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("method", ["sync-easgd", "sync-sgd", "diloco"])
def test_an_interrupted_run_with_groups_ends_with_the_same_bits(tmp_path, name, method):
    config = replica_config(
        method, name=name, lr=0.01, weight_decay=0.1, param_groups=(BIASES, HEAD),
        momentum=0.9 if name == "sgd" else None,
    )  # fmt: skip
    assert_same_bits_after_an_interruption(config, tmp_path)


def test_a_replica_takes_the_same_steps_from_a_saved_state():
    config = OptimizerConfig(name="adamw", lr=0.05, param_groups=(HEAD, BIASES), **PLAIN)
    whole, _ = replica_of(config)
    again, _ = replica_of(config)
    data = batches(6)
    for batch in data[:3]:
        whole.step(batch)
    again.load_state_dict(whole.state_dict())
    for batch in data[3:]:
        whole.step(batch)
        again.step(batch)
    assert torch.equal(again.flat.weights, whole.flat.weights)


# the settings


GROUPS = (
    ParamGroup(pattern="*.bias", weight_decay=0.0),
    ParamGroup(pattern="fc*", lr_scale=0.1, options="betas=(0.9, 0.95)"),
)
WORDS = [
    "--optimizer", "adamw", "--param-group", "*.bias:weight_decay=0",
    "--param-group", "fc*:lr_scale=0.1,betas=(0.9,0.95)",
]  # fmt: skip
FILES = (
    """
optimizer:
  name: adamw
  param_groups:
    - {pattern: "*.bias", weight_decay: 0}
    - {pattern: "fc*", lr_scale: 0.1, betas: "(0.9, 0.95)"}
""",
    """
optimizer: {name: adamw}
param-group: ["*.bias:weight_decay=0", "fc*:lr_scale=0.1,betas=(0.9,0.95)"]
""",
)


def test_the_command_line_python_and_a_file_give_the_same_groups(tmp_path):
    config = TrainConfig(optimizer=OptimizerConfig(name="adamw", param_groups=list(GROUPS)))
    assert to_dict(parse_train(WORDS)) == to_dict(config)
    for number, text in enumerate(FILES):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        assert to_dict(parse_train(["--config", str(path)])) == to_dict(config)


def test_groups_on_the_command_line_or_in_a_later_file_replace_those_of_a_file(tmp_path):
    files = []
    for name in ("a", "b"):
        files += ["--config", str(tmp_path / f"{name}.yaml")]
        (tmp_path / f"{name}.yaml").write_text(f'param-group: ["{name}*:lr_scale=0.1"]\n')
    patterns = [[g.pattern for g in parse_train(words).optimizer.param_groups] for words in (
        files, [*files, "--param-group", "c*:lr_scale=1"], ["--param-group=c*:lr_scale=1", *files],
    )]  # fmt: skip
    assert patterns == [["b*"], ["c*"], ["c*"]]


@pytest.mark.parametrize("group", [*GROUPS, ParamGroup(pattern="a:b"), HEAD])
def test_a_group_is_written_as_the_text_that_it_is_read_from(group):
    assert ParamGroup.parse(str(group)) == group


def test_groups_survive_json():
    config = TrainConfig(optimizer=OptimizerConfig(name="adamw", param_groups=GROUPS))
    assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config
    assert from_dict(TrainConfig, to_dict(config)) == config


def test_a_run_records_its_groups_and_keeps_them_to_resume(tmp_path, capsys):
    words = ["train", "--workers", "0", "--run.progress", "none", "--model", "mlp", "--data"]
    words += ["synthetic:96", "--run-dir", str(tmp_path / "run")]
    group = ["--param-group", "*.bias:lr_scale=0.5"]
    assert cli.main([*words, *group, "--epochs", "1"]) == 0
    values = json.loads((tmp_path / "run/config.json").read_text())["config"]
    (written,) = dotted(values)["optimizer.param_groups"]
    assert written == {
        "pattern": "*.bias", "lr_scale": 0.5, "weight_decay": None, "options": ""
    }  # fmt: skip
    again = parse_train(["--config", str(tmp_path / "run/config.json")])
    assert again.optimizer.param_groups == (ParamGroup(pattern="*.bias", lr_scale=0.5),)
    assert cli.main([*words, *group, "--epochs", "2", "--resume"]) == 0
    capsys.readouterr()
    assert cli.main([*words, "--epochs", "3", "--resume"]) == 2
    assert "optimizer.param_groups is () but the run began with" in capsys.readouterr().err


# errors before any actor starts


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("*.bias", "optimizer.param_groups must be PATTERN:NAME=VALUE,..., as in *.bias:weight"),
        (":lr_scale=1", "optimizer.param_groups must be groups with a pattern, got an empty one"),
        ("a:lr_scale", "optimizer.param_groups must be NAME=VALUE separated by commas"),
        ("a:lr_scale=-1", "lr_scale of optimizer.param_groups must be a number, 0 or more, got -1"),
        ("a:lr_scale='x'", "lr_scale of optimizer.param_groups must be a number, 0 or more, got x"),
        ("a:weight_decay=-1", "weight_decay of optimizer.param_groups must be a number, 0 or more"),
    ],
)
def test_a_text_that_is_not_a_group_is_refused(text, sentence):
    with pytest.raises(ConfigError) as error:
        parse_train(["--param-group", text])
    assert str(error.value).startswith(sentence)


def test_an_object_that_is_not_a_group_is_refused():
    for groups in ("*.bias", [{"pattern": "*.bias"}], ParamGroup(pattern="a")):
        with pytest.raises(ConfigError, match=r"must be a list of raydl\.ParamGroup, got"):
            OptimizerConfig(param_groups=groups)
    with pytest.raises(ConfigError, match="must not have weight_decay among the options: set"):
        ParamGroup(pattern="a", options="weight_decay=0")


def test_a_group_of_a_file_without_a_pattern_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    for text, sentence in (
        ("param-group: [{lr_scale: 2}]", "must be groups with a pattern, got an empty one"),
        ("param-group: [[a, b]]", "has a parameter group that is no mapping with a pattern"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=sentence):
            parse_train(["--config", str(path)])


@pytest.mark.parametrize(
    ("optimizer", "text", "sentence"),
    [
        ("adamw", "a:lr=0.1", "must not have lr in 'a:lr=0.1': set lr_scale, its factor"),
        ("sgd", "a:momentum=0.5", "momentum in 'a:momentum=0.5': it is the same for all .* set op"),
        (
            "adagrad",
            "a:initial_accumulator_value=1",
            "the same for all parameters; set optimizer.o",
        ),
        ("rprop", "a:weight_decay=0", "weight_decay of .* has no meaning for rprop: it has no wei"),
        ("adamw", "a:bettas=(0.9,0.95)", "param_groups of adamw has no 'bettas'; did you mean bet"),
        ("adamw", "a:betas=(2,3)", "'betas=.2, 3.' is not accepted by adamw: Invalid beta"),
        ("torch.optim:AdamW", "a:lr_scale=2", "param_groups is for optimizers by name; torch.opt"),
    ],
)
def test_a_setting_that_the_optimizer_does_not_take_is_refused(optimizer, text, sentence):
    config = OptimizerConfig(
        name=optimizer, lr=0.1, warmup=0.0, param_groups=(ParamGroup.parse(text),)
    )
    with pytest.raises((ConfigError, UnknownNameError), match=sentence):
        resolve(TrainConfig(optimizer=config))


@pytest.mark.parametrize(
    ("patterns", "sentence"),
    [
        (["*.bais"], "has the pattern '[*].bais', which matches no trained parameter; they are "),
        (["*", "4.*"], "has the pattern '4.[*]', which matches only parameters that an earlier "),
    ],
)
def test_a_pattern_that_has_no_parameter_is_refused(patterns, sentence):
    config = OptimizerConfig(lr=0.1, param_groups=[ParamGroup(pattern=p) for p in patterns])
    model = deep((1, 4, 4), 3)
    with pytest.raises(ConfigError, match=sentence):
        check_for_model(config, None, model, torch.empty(0))


def test_a_pattern_may_match_only_frozen_parameters_which_the_model_may_unfreeze():
    model = linear((1, 4, 4), 3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("bias"))
    config = OptimizerConfig(lr=0.1, param_groups=(BIASES,))
    assert check_for_model(config, None, model, torch.empty(0)) == {}


def test_a_pattern_is_tried_before_the_folder_is_made(tmp_path):
    refused = raydl.Trainer(
        "mlp",
        "synthetic:96",
        optimizer=OptimizerConfig(param_groups=[ParamGroup(pattern="head.*", lr_scale=10)]),
        scaling=raydl.ScalingConfig(num_workers=2),
        run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    )
    with pytest.raises(ConfigError, match=r"has the pattern 'head\.\*', which matches no trained"):
        refused.fit()
    assert not (tmp_path / "run").exists()


def test_groups_are_refused_for_an_optimizer_at_a_center_in_parts():
    group = (ParamGroup(pattern="*.bias", lr_scale=0.5),)
    in_fragments = replica_config(
        "sync-msgd", exchange=ExchangeConfig(fragments=2), momentum=0.5, param_groups=group
    )
    by_messages = TrainConfig(
        method=MethodConfig(name="raydl.methods.data_parallel:MeanGradient", strategy="async"),
        optimizer=OptimizerConfig(param_groups=group),
    )
    for config, rule in ((in_fragments, None), (by_messages, MeanGradient())):
        with pytest.raises(ConfigError, match=r"optimizer\.param_groups cannot be set .* in parts"):
            resolve(config, rule)
