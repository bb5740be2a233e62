"""Steps of the methods worked by hand, and custom rules."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from ensembles import Ensemble, tiny_images
from scenarios import Slope, loss_of, scenario_config

from raydl.config import (
    ExchangeConfig,
    MethodConfig,
    RunConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.core.method import Method
from raydl.core.reports import Outcome
from raydl.core.rules import AheadRule, Rule
from raydl.errors import ConfigError
from raydl.methods import resolve
from raydl.run.trainer import Trainer

# by hand, p = 2, constant gradients


def by_hand(method, starts, *, center, steps, period=1, lr=1.0, exchange=None, **method_settings):
    """Return (replicas, center) of two workers with gradient 1 after some local steps."""
    config = scenario_config(method, steps=steps, period=period, lr=lr, exchange=exchange)
    config = dataclasses.replace(
        config, method=dataclasses.replace(config.method, **method_settings)
    )
    ensemble = Ensemble(config, num_workers=2, images=tiny_images(60))
    ensemble.use_task(Slope())
    first = dataclasses.replace(ensemble.first, weights=np.array([center], np.float32))
    ensemble.join(first)
    for worker, start in zip(ensemble.workers, starts, strict=True):
        worker.replica.flat.weights.fill_(start)
    ensemble.run()
    replicas = [float(w.replica.flat.weights) for w in ensemble.workers]
    return replicas, float(ensemble.center().weights[0])


def test_sync_easgd_by_hand():
    # alpha 1/4: x <- x - 1 - (x - c)/4 ; c <- c + (sum x - 2c)/4
    replicas, center = by_hand("sync-easgd", (4, 0), center=1, steps=1, beta=0.5)
    assert (replicas, center) == ([2.25, -0.75], 1.5)
    replicas, center = by_hand("sync-easgd", (4, 0), center=1, steps=2, beta=0.5)
    assert (replicas, center) == ([1.0625, -1.1875], 1.125)


def test_sync_easgd_with_delay_uses_the_values_that_were_sent():
    # Sent at the first step of two: 4, 0, -2 local steps, minus (4 - 1)/4 and (0 - 1)/4.
    replicas, center = by_hand(
        "sync-easgd",
        (4, 0),
        center=1,
        steps=2,
        period=2,
        beta=0.5,
        exchange=ExchangeConfig(delay=1),
    )
    assert (replicas, center) == ([1.25, -1.75], 1.5)


def test_original_easgd_by_hand():
    # w0: 4 - 1 - (4 - 1)/4 = 2.25, c = 1.75; then w1: 0 - 1 - (0 - 1.75)/4, c = 1.3125
    replicas, center = by_hand("original-easgd", (4, 0), center=1, steps=1, beta=0.5)
    assert (replicas, center) == ([2.25, -0.5625], 1.3125)


def test_local_sgd_by_hand():
    # both take 2 steps from 1 to -1; the mean of -1 and -1
    assert by_hand("local-sgd", (1, 1), center=1, steps=2, period=2) == ([-1, -1], -1)


def test_diloco_by_hand():
    # D = 2 each: m = 2, c = 1 - (2 + m/2)/2 = -0.5; then m = 3, c = -0.5 - (2 + 1.5)/2
    diloco = {"period": 2, "outer_lr": 0.5, "outer_momentum": 0.5}
    assert by_hand("diloco", (1, 1), center=1, steps=2, **diloco)[1] == -0.5
    assert by_hand("diloco", (1, 1), center=1, steps=4, **diloco) == ([-2.25, -2.25], -2.25)


def test_diloco_without_outer_momentum_is_local_sgd_with_a_rate():
    # D = 2 each: c = 1 - 2/2
    diloco = {"period": 2, "outer_lr": 0.5, "outer_momentum": 0.0}
    assert by_hand("diloco", (1, 1), center=1, steps=2, **diloco)[1] == 0.0


def test_diloco_with_delay_keeps_the_steps_since_the_message():
    # D = 1 is sent after the first step: c = 1 - 1.5/2 = 0.25; the second step is kept.
    diloco = {"period": 2, "outer_lr": 0.5, "outer_momentum": 0.5}
    replicas, center = by_hand(
        "diloco", (1, 1), center=1, steps=2, exchange=ExchangeConfig(delay=1), **diloco
    )
    assert (replicas, center) == ([-0.75, -0.75], 0.25)


def test_async_diloco_by_hand():
    # D = 1 twice, p = 2, rate 1/2, mu 1/2: c = 1 - 1/4; then m = 1: c -= 1/4 + 1/4
    config = {"period": 1, "outer_lr": 0.5, "outer_momentum": 0.5}
    assert by_hand("async-diloco", (1, 1), center=1, steps=1, **config)[1] == 0.25


def test_sync_msgd_by_hand():
    # v = 1, then 1.9: 1 - 1 - 1.9
    assert by_hand("sync-msgd", (1, 1), center=1, steps=2)[1] == pytest.approx(-1.9)


# custom rules


class Halfway(AheadRule):
    """The center becomes the mean; replicas move half of the way to the old center."""

    period = 4

    def pull(self, replica, center, now, *, out):
        return torch.sub(replica, center, out=out).mul_(0.5)

    def merge_(self, center, mail, state, now):
        center.copy_(mail.mean("weights"))


def test_a_rule_is_found_by_module_and_class():
    config = TrainConfig(method=MethodConfig(name="test_methods_by_hand:Halfway"))
    method = resolve(config)
    assert isinstance(method.rule, Rule)
    assert type(method.rule).__name__ == "Halfway"
    assert (method.strategy, method.period) == ("sync", 4)
    by_messages = MethodConfig(name="test_methods_by_hand:Halfway", strategy="hogwild")
    assert resolve(TrainConfig(method=by_messages)).strategy == "hogwild"


@pytest.mark.parametrize(("number", "name"), [(1, "SignElastic"), (2, "Echo"), (3, "Halving")])
def test_the_rules_of_the_docs_are_twenty_lines_and_train(
    root, tmp_path, monkeypatch, number, name
):
    text = (root / "docs/algorithms.md").read_text().split("## A rule of your own")[1]
    code = text.split("```python\n")[number].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    (tmp_path / f"my_{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for strategy in ("sync",) if name == "Halving" else ("sync", "hogwild"):
        config = scenario_config(f"my_{name}:{name}", epochs=6, lr=0.05)
        method = dataclasses.replace(config.method, strategy=strategy)
        images = tiny_images(31)
        ensemble = Ensemble(
            dataclasses.replace(config, method=method), num_workers=2, images=images
        ).join()
        before = loss_of(ensemble, ensemble.first.weights, images)
        assert ensemble.run() == [Outcome.FINISHED] * 2
        assert loss_of(ensemble, ensemble.center().weights, images) < before


def test_a_rule_can_be_passed_as_an_object():
    method = resolve(TrainConfig(method=MethodConfig(name="Halfway")), Halfway())
    assert isinstance(method, Method)
    config = scenario_config("test_methods_by_hand:Halfway", epochs=3, lr=0.05)
    ensemble = Ensemble(config, num_workers=2, images=tiny_images(31)).join()
    assert ensemble.run() == [Outcome.FINISHED] * 2


def trainer_of(rule, tmp_path):
    return Trainer(
        "mlp",
        "synthetic:64x1x4x4",
        method=rule,
        training=TrainingConfig(samples=96, batch_size=8),
        scaling=ScalingConfig(num_workers=0),
        run=RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    )


def test_a_run_accepts_a_rule_that_cannot_be_imported(tmp_path):
    class Inside(Halfway):
        """A rule defined in a function."""

    result = trainer_of(Inside(), tmp_path).fit()
    assert result.metrics["samples"] == 96


@pytest.mark.parametrize("strategy", [None, "async"])
def test_a_run_accepts_a_custom_rule(tmp_path, strategy):
    trainer = trainer_of(Halfway(), tmp_path)
    method = dataclasses.replace(trainer.config.method, strategy=strategy)
    trainer.config = dataclasses.replace(trainer.config, method=method)
    result = trainer.fit()
    assert result.metrics["samples"] == 96
    written = json.loads((tmp_path / "run/config.json").read_text())
    assert "test_methods_by_hand:Halfway" in json.dumps(written)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no_such_module:Rule", "method.name no_such_module:Rule cannot be imported: No module"),
        (
            "test_methods_by_hand:Nothing",
            "method.name test_methods_by_hand:Nothing cannot be imported: module",
        ),
        (
            "test_methods_by_hand:Slope",
            "method.name test_methods_by_hand:Slope is no subclass of raydl.core.rules.Rule",
        ),
    ],
)
def test_a_name_that_is_not_a_rule_is_refused(name, sentence):
    with pytest.raises(ConfigError) as caught:
        resolve(TrainConfig(method=MethodConfig(name=name)))
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("method", "changes", "sentence"),
    [
        ("sync-easgd", {"method": {"beta": 1.2}}, "method.beta must be in (0, 1] for sync-"),
        ("async-easgd", {"method": {"beta": 2.5}}, "method.beta must be at most the 2 workers"),
        ("sync-easgd", {"method": {"strategy": "async"}}, "method.strategy of sync-easgd is sync"),
        ("sync-easgd", {"method": {"outer_lr": 0.5}}, "method.outer_lr has no meaning for sync-ea"),
        ("sync-easgd", {"exchange": {"fragments": 11}}, "exchange.fragments must be at most the p"),
        ("sync-easgd", {"exchange": {"delay": 10}}, "exchange.delay must be less than period / fr"),
        (
            "original-easgd",
            {"exchange": {"delay": 1}, "method": {"period": 4}},
            "exchange.delay has no meaning for original-easgd",
        ),
        ("sync-easgd", {"exchange": {"center_shards": 2}}, "exchange.center_shards has no meaning"),
        (
            "async-easgd",
            {"exchange": {"packed": False}},
            "exchange.packed can be turned off for sy",
        ),
        (
            "async-sgd",
            {"exchange": {"overlap": False}},
            "exchange.overlap has no meaning for async",
        ),
        ("diloco", {"method": {"dynamic_weights": True}}, "method.dynamic_weights has no meaning"),
        (
            "sync-easgd",
            {"method": {"dynamic_weights": True, "group_size": 2}},
            "method.dynamic_weights needs method.group_size 1, got 2",
        ),
        ("async-easgd", {"method": {"group_size": 2}}, "method.group_size is for sync methods"),
        ("sync-sgd", {"method": {"group_size": 2}}, "method.group_size is for sync methods"),
        (
            "sync-easgd",
            {"method": {"group_size": 3}},
            "method.group_size must divide scaling.num_workers, got 3 and 2",
        ),
        (
            "async-msgd",
            {"optimizer": {"nesterov": True}},
            "optimizer.nesterov is for momentum at the replicas; async-msgd has it at the center",
        ),
        (
            "sync-sgd",
            {"exchange": {"fragments": 2}, "method": {"period": 4}},
            "optimizer.clip_grad_norm must be None for sync-sgd in fragments or shards",
        ),
        (
            "async-diloco",
            {"evaluation": {"by": "workers"}},
            "evaluation.by cannot be workers with async-diloco: its workers do not pause together",
        ),
        (
            "async-easgd",
            {"exchange": {"allreduce": "ring"}},
            "exchange.allreduce has no meaning for async-easgd",
        ),
        (
            "original-easgd",
            {"exchange": {"allreduce": "ring", "compression": "int8"}},
            "exchange.allreduce has no meaning for original-easgd",
        ),
        (
            "sync-easgd",
            {"exchange": {"allreduce": "ring", "compression": "int8"}},
            "exchange.allreduce has no meaning with exchange.compression int8",
        ),
        (
            "sync-easgd",
            {"exchange": {"packed": False, "compression": "int8"}},
            "exchange.packed cannot be turned off with exchange.compression",
        ),
        (
            "sync-easgd",
            {"exchange": {"allreduce": "auto"}, "training": {"deterministic": True}},
            "exchange.allreduce cannot be auto with training.deterministic",
        ),
        (
            "sync-easgd",
            {"exchange": {"compression": "int9"}},
            "exchange.compression must be none, bf16, int8, e3m0, sign, topk:SHARE",
        ),
        (
            "async-easgd",
            {"exchange": {"compression": "int8"}, "method": {"beta": 1.5}},
            "method.beta must be in (0, 1] with exchange.compression, got 1.5",
        ),
        (
            "sync-easgd",
            {"training": {"deterministic": True}, "scaling": {"num_workers": (1, 2)}},
            "training.deterministic needs a fixed number of workers, got 1:2",
        ),
        (
            "hogwild-easgd",
            {"training": {"deterministic": True}},
            "training.deterministic is not possible with hogwild-easgd",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_before_any_process_starts(
    method, changes, sentence
):
    config = TrainConfig(method=MethodConfig(name=method))
    for section, values in changes.items():
        changed = dataclasses.replace(getattr(config, section), **values)
        config = dataclasses.replace(config, **{section: changed})
    with pytest.raises(ConfigError) as caught:
        resolve(config)
    assert str(caught.value).startswith(sentence)
