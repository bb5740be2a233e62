"""``muon``, Muon for hidden matrices and AdamW for the rest, and the method ``muloco``."""

import json

import numpy as np
import pytest
import torch
from ensembles import Ensemble, linear
from interruptions import assert_same_bits_after_an_interruption
from replicas import (
    PLAIN,
    MuonAndAdamW,
    batches,
    plain_optimizer,
    replica_config,
    replica_of,
    steps_of_both,
)
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from user_loops import attach_alone

from raydl import cli
from raydl.config import MethodConfig, OptimizerConfig, ParamGroup, TrainConfig
from raydl.core.muon import hidden_matrices
from raydl.core.reports import Outcome
from raydl.core.sharing import memory_of
from raydl.errors import ConfigError, UnknownNameError
from raydl.methods import METHODS, filled_in, resolve
from raydl.models import find

# the roles


def hidden_names(model):
    hidden = hidden_matrices(model)
    return [name for name, p in model.named_parameters() if memory_of(p) in hidden]


def test_the_weights_between_embedding_and_output_are_hidden():
    assert hidden_names(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5), nn.Linear(5, 9))) == [
        "1.weight"
    ]


def test_a_gpt_with_a_tied_head_has_its_tables_with_adamw():
    model = find("gpt-nano")((16,), 32)
    names = hidden_names(model)
    assert names == [n for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("h.")]
    assert "wte.weight" not in names
    assert "wpe.weight" not in names


def test_two_tensors_over_the_memory_of_an_embedding_are_tied_to_it():
    table, layer, last = nn.Embedding(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
    layer.weight.data = table.weight.data
    assert hidden_names(nn.Sequential(table, layer, nn.Linear(6, 6), last)) == ["2.weight"]


def test_filters_are_hidden_but_not_those_in_groups_nor_the_output():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 10, 1))
    assert hidden_names(model) == ["0.weight"]
    assert hidden_names(find("lenet")((1, 28, 28), 10))[0].endswith("weight")
    assert len(hidden_names(find("resnet20")((3, 32, 32), 10))) == 19


class Positions(nn.Module):
    """A model whose table of positions is a plain parameter."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(7, 4))
        self.attention = nn.MultiheadAttention(4, 2)
        self.recurrent = nn.LSTM(4, 4)
        self.normed = weight_norm(nn.Linear(4, 4))
        self.gain = nn.Linear(4, 1)
        self.head = nn.Linear(4, 2)


def test_a_parameter_of_another_name_or_of_one_row_is_not_hidden():
    assert hidden_names(Positions()) == [
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "recurrent.weight_ih_l0",
        "recurrent.weight_hh_l0",
    ]


def test_a_model_without_parameters_or_without_layers_has_no_hidden_matrix():
    assert hidden_names(nn.ReLU()) == hidden_names(nn.Linear(4, 3)) == []


# the steps


def small_net(image_shape, num_classes):
    return nn.Sequential(
        nn.Conv2d(image_shape[0], 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(),
        nn.Linear(24, 5), nn.Tanh(), nn.Linear(5, num_classes),
    )  # fmt: skip


def test_a_filter_takes_the_step_of_its_matrix():
    """In plain torch the filter is a view of a matrix [out, in * height * width]."""
    config = OptimizerConfig(name="muon", lr=0.02, **PLAIN)
    replica, reference = replica_of(config, model=small_net)
    matrix = reference[0].weight.detach().view(6, -1).clone().requires_grad_()
    rest = [p for n, p in reference.named_parameters() if n not in ("0.weight", "4.weight")]
    optimizer = MuonAndAdamW([matrix, reference[4].weight], rest, lr=0.02)
    for images, labels in batches(6):
        replica.step((images, labels))
        optimizer.zero_grad()
        reference[0].weight.data = matrix.detach().view(6, 1, 3, 3)
        reference[0].weight.grad = None
        functional.cross_entropy(reference(images), labels).backward()
        matrix.grad = reference[0].weight.grad.view(6, -1)
        optimizer.step()
    expected = torch.cat([p.detach().reshape(-1) for p in reference.parameters()])
    assert torch.equal(replica.flat.weights, expected)


def test_the_schedule_moves_the_rates_of_both_parts():
    config = OptimizerConfig(name="muon", lr=0.1, **PLAIN)
    replica, reference = replica_of(config)
    replica.set_lr(0.003)
    optimizer = plain_optimizer("muon", reference, lr=0.003)
    assert torch.equal(*steps_of_both(replica, reference, optimizer))


def test_options_weight_decay_and_groups_reach_both_parts():
    group = ParamGroup(pattern="1.*", lr_scale=0.5, weight_decay=0.3)
    config = OptimizerConfig(
        name="muon", lr=0.02, momentum=0.8, nesterov=False, weight_decay=0.2, param_groups=(group,),
        decay_only_matrices=True, options="ns_steps=3, betas=(0.8, 0.9), adamw_eps=1e-6", **PLAIN,
    )  # fmt: skip
    replica, reference = replica_of(config)
    (first, first_bias), (gain, shift), (last, last_bias) = (
        (reference[n].weight, reference[n].bias) for n in (1, 2, 4)
    )
    optimizer = MuonAndAdamW([first], [last], lr=0.02)
    optimizer.muon = torch.optim.Muon(
        [first], lr=0.01, momentum=0.8, nesterov=False, weight_decay=0.3, ns_steps=3,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    optimizer.adamw = torch.optim.AdamW(
        [
            {"params": [first_bias], "lr": 0.01, "weight_decay": 0.3},
            {"params": [last], "weight_decay": 0.2},
            {"params": [gain, shift, last_bias], "weight_decay": 0.0},
        ],
        lr=0.02, betas=(0.8, 0.9), eps=1e-6,
    )  # fmt: skip
    assert torch.equal(*steps_of_both(replica, reference, optimizer))


def test_a_step_without_a_hidden_matrix_is_that_of_adamw():
    config = OptimizerConfig(name="muon", lr=0.02, **PLAIN)
    replica, reference = replica_of(config, model=linear)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.02, weight_decay=0.1)
    assert torch.equal(*steps_of_both(replica, reference, optimizer))


def test_a_replica_takes_the_same_steps_from_a_saved_state():
    config = OptimizerConfig(name="muon", lr=0.02, **PLAIN)
    whole, _ = replica_of(config, model=small_net)
    again, _ = replica_of(config, model=small_net)
    data = batches(6)
    for batch in data[:3]:
        whole.step(batch)
    again.load_state_dict(whole.state_dict())
    for batch in data[3:]:
        whole.step(batch)
        again.step(batch)
    assert torch.equal(again.flat.weights, whole.flat.weights)


@pytest.mark.parametrize("method", ["muloco", "sync-easgd"])
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path, method):
    config = replica_config(method, name="muon", lr=0.01, clip_grad_norm=1.0)
    assert_same_bits_after_an_interruption(config, tmp_path)


def test_a_worker_trains_with_muon_by_messages():
    config = replica_config("async-easgd", name="muon", lr=0.01)
    ensemble = Ensemble(config, num_workers=2, model=small_net).join()
    assert ensemble.run() == [Outcome.FINISHED] * 2
    assert not np.array_equal(ensemble.center().weights, ensemble.first.weights)


# what is refused


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"options": "betas=2"}, "must have betas as 2 values"),
        ({"options": "betas=(2, 3)"}, "is not accepted by muon: Invalid beta parameter"),
        ({"options": "adjust_lr_fn='none'"}, "is not accepted by muon: Adjust learning rate"),
        ({"options": "ns_steps=100"}, "is not accepted by muon: Number of steps"),
        ({"options": "momentum=0.5"}, "must not have momentum: set optimizer.momentum"),
    ],
)
def test_what_a_part_does_not_accept_is_refused_before_anything_starts(settings, sentence):
    with pytest.raises(ConfigError) as caught:
        resolve(TrainConfig(optimizer=OptimizerConfig(name="muon", **settings)))
    assert sentence in str(caught.value)


def test_an_option_of_neither_part_is_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean betas"):
        resolve(TrainConfig(optimizer=OptimizerConfig(name="muon", options="beta=(0.9, 0.95)")))


def test_muon_at_the_center_is_refused():
    config = TrainConfig(
        method=MethodConfig(name="sync-sgd"), optimizer=OptimizerConfig(name="muon")
    )
    with pytest.raises(ConfigError, match="cannot be muon for sync-sgd, whose optimizer steps at"):
        resolve(config)


# muloco


def method_of(method="muloco", **optimizer):
    optimizer = OptimizerConfig(**optimizer)
    return resolve(TrainConfig(method=MethodConfig(name=method), optimizer=optimizer))


def test_muloco_is_diloco_with_muon_inside_and_its_own_outer_step():
    method = method_of()
    assert (method.period, method.rule.lr, method.rule.momentum) == (30, 0.9, 0.8)
    assert method.rule.nesterov
    inner = method.inner
    assert (inner.name, inner.lr, inner.momentum, inner.nesterov) == ("muon", 1e-3, 0.9, True)
    assert filled_in(TrainConfig(method=MethodConfig(name="muloco")), method).optimizer == inner


def test_another_optimizer_under_muloco_has_its_own_defaults():
    adamw, sgd, faster = (
        method_of(**s).inner for s in ({"name": "adamw"}, {"name": "sgd"}, {"lr": 0.5})
    )
    assert (adamw.lr, adamw.momentum, adamw.nesterov) == (1e-3, None, None)
    assert (sgd.lr, sgd.momentum) == (method_of("diloco").inner.lr, 0.0)
    assert (faster.name, faster.lr, faster.momentum) == ("muon", 0.5, 0.9)


def test_methods_name_sgd_unless_they_say_otherwise():
    names = {name: method_of(name).inner.name for name in METHODS}
    assert {name for name, optimizer in names.items() if optimizer != "sgd"} == {
        "des-loc",
        "muloco",
    }
    assert method_of("diloco", name="muon").inner.momentum is None, "that of Muon itself"


def test_a_run_with_muloco_records_its_optimizer_and_learns(tmp_path):
    folder = tmp_path / "run"
    words = ["--method", "muloco", "--period", "5", "--epochs", "4", "--workers", "0"]
    assert cli.main(["train", *words, "--run-dir", str(folder), "--lr", "0.01"]) == 0
    recorded = json.loads((folder / "config.json").read_text())["config"]
    assert recorded["optimizer"]["name"] == "muon"
    assert json.loads((folder / "result.json").read_text())["center_accuracy"] > 0.8


def test_an_attached_loop_under_muloco_keeps_the_optimizer_of_the_user():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach_alone(model, optimizer, method="muloco") as attached:
        for _ in range(8):
            attached.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            attached.step()
        assert attached.param_groups[0] is optimizer.param_groups[0]
        assert attached.local_step == 8
