"""A wrong setting is refused with its dotted name, its limit and its value."""

import dataclasses
import json
from typing import get_type_hints

import pytest

from raydl.cli.options import parse_train
from raydl.config import (
    CheckpointConfig,
    ElasticConfig,
    EvaluationConfig,
    ExchangeConfig,
    MethodConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
    from_dict,
    to_dict,
)
from raydl.errors import ConfigError, UnknownNameError
from raydl.methods import METHODS, filled_in, resolve
from raydl.run.trainer import Trainer


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: MethodConfig(beta=0.0), "method.beta must be a positive number, got 0.0"),
        (lambda: MethodConfig(beta=float("nan")), "method.beta must be a positive number, got nan"),
        (lambda: MethodConfig(period=0), "method.period must be 1 or more, got 0"),
        (lambda: OptimizerConfig(lr=-1), "optimizer.lr must be a positive number, got -1"),
        (lambda: OptimizerConfig(momentum=1.0), "optimizer.momentum must be in [0, 1), got 1.0"),
        (
            lambda: OptimizerConfig(weight_decay=-0.1),
            "optimizer.weight_decay must be 0 or more, got -0.1",
        ),
        (lambda: TrainingConfig(epochs=0), "training.epochs must be 1 or more, got 0"),
        (lambda: TrainingConfig(steps=0), "training.steps must be 1 or more, got 0"),
        (
            lambda: TrainingConfig(epochs=1, steps=1),
            "training.epochs and training.steps exclude each other; give one",
        ),
        (lambda: TrainingConfig(batch_size=0), "training.batch_size must be 1 or more, got 0"),
        (lambda: TrainingConfig(seed=-1), "training.seed must be in [0, 2^63), got -1"),
        (lambda: ScalingConfig(num_workers=-1), "scaling.num_workers must be 0 or more, got -1"),
        *(
            (
                lambda given=given: ScalingConfig(num_workers=given),
                f"scaling.num_workers must be a whole number, or two of them, got {given}",
            )
            for given in ((2,), (1, 2, 3), 2.5, ("2", "4"))
        ),
        (
            lambda: ScalingConfig(num_workers=(3, 2)),
            "scaling.num_workers must be MIN:MAX with MIN <= MAX, got 3:2",
        ),
        (
            lambda: ScalingConfig(num_workers=(0, 2)),
            "scaling.num_workers must be 0, or MIN:MAX from 1 up, got 0:2",
        ),
        (
            lambda: ScalingConfig(cpus_per_worker=-1),
            "scaling.cpus_per_worker must be 0 or more, got -1",
        ),
        (
            lambda: RunConfig(progress="loud"),
            "run.progress must be one of auto, panel, plain, none, got loud",
        ),
        (
            lambda: RunConfig(resume=True),
            "run.resume needs run.name or run.run_dir, the run to resume",
        ),
        (
            lambda: CheckpointConfig(num_to_keep=0),
            "checkpoint.num_to_keep must be 1 or more, got 0",
        ),
        (
            lambda: CheckpointConfig(every_s=0),
            "checkpoint.every_s must be a positive number of seconds, got 0",
        ),
        (
            lambda: EvaluationConfig(every_epochs=0),
            "evaluation.every_epochs must be 1 or more, got 0",
        ),
        (
            lambda: ExchangeConfig(timeout_s=0),
            "exchange.timeout_s must be a positive number of seconds, got 0",
        ),
        (
            lambda: ElasticConfig(lease_s=0),
            "elastic.lease_s must be a positive number of seconds, got 0",
        ),
        (
            lambda: ElasticConfig(lease_s=float("inf")),
            "elastic.lease_s must be a positive number of seconds, got inf",
        ),
        (
            lambda: ElasticConfig(max_step_s=0),
            "elastic.max_step_s must be a positive number of seconds, got 0",
        ),
        (lambda: ElasticConfig(quorum=0.0), "elastic.quorum must be in (0, 1], got 0.0"),
        (lambda: ElasticConfig(quorum=1.5), "elastic.quorum must be in (0, 1], got 1.5"),
        (lambda: ElasticConfig(quorum=float("nan")), "elastic.quorum must be in (0, 1], got nan"),
        (
            lambda: ElasticConfig(max_restarts=0),
            "elastic.max_restarts must be 1 or more, got 0",
        ),
    ],
)
def test_a_value_out_of_range_is_refused(make, sentence):
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == sentence


def test_unknown_methods_and_schedules_list_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean sync-easgd or"):
        resolve(TrainConfig(method=MethodConfig(name="sync-eagsd")))
    with pytest.raises(UnknownNameError, match="did you mean cosine"):
        OptimizerConfig(lr_schedule="cosin")


def test_nesterov_without_momentum_is_refused():
    with pytest.raises(ConfigError, match=r"nesterov needs momentum; sync-sgd has none"):
        resolve(
            TrainConfig(
                method=MethodConfig(name="sync-sgd"), optimizer=OptimizerConfig(nesterov=True)
            )
        )


def test_settings_of_the_user_take_precedence_over_those_of_the_method():
    method = resolve(
        TrainConfig(
            method=MethodConfig(name="sync-measgd", period=3),
            optimizer=OptimizerConfig(momentum=0.5, lr=0.2),
        )
    )
    assert (method.period, method.optimizer.momentum, method.optimizer.lr) == (3, 0.5, 0.2)
    own = resolve(TrainConfig(method=MethodConfig(name="sync-measgd")))
    assert (own.period, own.optimizer.momentum) == (10, METHODS["sync-measgd"].local_step.momentum)


def test_the_configuration_of_a_run_records_the_defaults_of_its_method():
    user_config = TrainConfig(method=MethodConfig(name="sync-msgd"))
    config = filled_in(user_config, resolve(user_config))
    assert config.method.period == 1
    assert (config.optimizer.lr, config.optimizer.momentum) == (0.025, 0.9)
    assert filled_in(config, resolve(config)) == config


def test_the_quorum_may_be_all_workers():
    assert ElasticConfig(quorum=1.0, max_restarts=1).quorum == 1.0


def test_elasticity_is_set_by_dotted_names_and_the_fault_plan_by_a_short_one():
    options = "--elastic.lease-s 3 --elastic.no-leave-out-slow --fault-plan faults.yaml"
    config = parse_train(options.split())
    assert to_dict(config.elastic) == to_dict(ElasticConfig(lease_s=3.0, leave_out_slow=False))
    assert config.run.fault_plan == "faults.yaml"
    assert TrainConfig().run.fault_plan is None


def test_the_trainer_accepts_a_section_of_settings():
    elastic = ElasticConfig(lease_s=3.0)
    assert Trainer(elastic=elastic).config.elastic == elastic
    assert Trainer().config.elastic == ElasticConfig()


def test_settings_that_an_earlier_version_did_not_have_take_their_defaults():
    config = TrainConfig(model="mlp")
    for section, settings in to_dict(config).items():
        if section == "model":
            continue
        values = to_dict(config)
        del values[section]
        assert from_dict(TrainConfig, values) == config
        for setting in settings if isinstance(settings, dict) else ():
            values = to_dict(config)
            del values[section][setting]
            assert from_dict(TrainConfig, values) == config


def test_the_number_of_workers_may_be_a_list():
    assert ScalingConfig(num_workers=[2, 8]) == ScalingConfig(num_workers=(2, 8))


def test_settings_survive_json():
    config = TrainConfig(
        elastic=ElasticConfig(quorum=0.75),
        run=RunConfig(fault_plan="faults.yaml"),
        scaling=ScalingConfig(num_workers=(2, 8), resources_per_worker={"spot": 1.0}),
        method=MethodConfig(beta=0.5),
    )
    assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    ("name", "beta", "read"),
    [
        ("diloco", 0.9, None),
        ("sync-easgd", 0.9, None),
        ("sync-easgd", 0.5, 0.5),
        ("my:Own", 0.9, 0.9),
    ],
)
def test_the_beta_that_earlier_versions_recorded_for_every_method_is_the_default(name, beta, read):
    assert from_dict(MethodConfig, {"name": name, "beta": beta}).beta == read


def test_the_error_for_an_unknown_setting_names_it():
    with pytest.raises(ConfigError, match="gamma is no setting of MethodConfig"):
        from_dict(MethodConfig, {"gamma": 1})


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"training": {"batch_size": "64"}},
            "training.batch_size must be a whole number, got '64'",
        ),
        ({"training": {"epochs": [1]}}, "training.epochs must be a whole number, got a list"),
        ({"optimizer": {"lr": {}}}, "optimizer.lr must be a number, got an object"),
        ({"run": {"resume": None}}, "run.resume must be true or false, got None"),
        ({"optimizer": 3}, "optimizer must be settings by name, got 3"),
        ({"scaling": {"num_workers": "2"}}, "scaling.num_workers must be a whole number or a list"),
    ],
)
def test_a_setting_of_the_wrong_type_is_named(values, sentence):
    with pytest.raises(ConfigError) as caught:
        from_dict(TrainConfig, values)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("values", [{"x" * 10**6: 1}, {"method": "x" * 10**6}, ["x"] * 10**6])
def test_huge_names_and_values_do_not_make_a_huge_sentence(values):
    with pytest.raises(ConfigError) as caught:
        from_dict(TrainConfig, values)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("cls", "former", "now", "value"),
    [
        (MethodConfig, "schedule", "strategy", "hogwild"),
        (OptimizerConfig, "schedule", "lr_schedule", "linear"),
        (OptimizerConfig, "max_grad_norm", "clip_grad_norm", 3.0),
        (TrainingConfig, "accumulate", "microbatches", 4),
        (CheckpointConfig, "keep", "num_to_keep", 3),
    ],
)
def test_former_names_of_settings_are_read(cls, former, now, value):
    assert from_dict(cls, {former: value}) == cls(**{now: value})


def test_resources_are_named_as_in_ray_train():
    assert ScalingConfig().resources() == {"CPU": 1.0}
    gpu = ScalingConfig(use_gpu=True, resources_per_worker={"CPU": 4.0, "spot": 1.0})
    assert gpu.resources() == {"CPU": 4.0, "GPU": 1.0, "spot": 1.0}
    assert (gpu.device, ScalingConfig().device) == ("cuda", "cpu")
    assert gpu.num_threads == 4


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gpus_per_worker": 1.5}, "gpus_per_worker must be at most 1, or a whole number, got 1.5"),
        ({"resources_per_worker": {"GPU": 2.5}}, "must be at most 1, or a whole number, got 2.5"),
        ({"resources_per_worker": {"TPU": -1.0}}, "resources_per_worker TPU must be 0, or 0.0001"),
        ({"cpus_per_worker": 0.00001}, "resources_per_worker CPU must be 0, or 0.0001 or more"),
        ({"resources_per_worker": {"memory": 4e9}}, "memory must be left out: a worker cannot"),
    ],
)
def test_resources_that_ray_would_refuse_are_refused_before_it_starts(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ScalingConfig(**settings)


@pytest.mark.parametrize(
    ("gpus", "resident", "device"),
    [(0, True, "cpu"), (1, True, "cuda"), (2, True, "cuda"), (0.5, True, "cpu"), (1, False, "cpu")],
)
def test_workers_sum_on_a_gpu_of_their_own_and_in_host_memory_otherwise(gpus, resident, device):
    config = TrainConfig(
        scaling=ScalingConfig(gpus_per_worker=gpus), exchange=ExchangeConfig(resident=resident)
    )
    assert config.exchange_device == device


def test_every_setting_is_frozen_and_keyword_only():
    for field in dataclasses.fields(TrainConfig):
        section = getattr(TrainConfig(), field.name)
        if dataclasses.is_dataclass(section):
            assert section.__dataclass_params__.frozen
            assert all(f.kw_only for f in dataclasses.fields(section))
            assert set(get_type_hints(type(section))) == {
                f.name for f in dataclasses.fields(section)
            }
