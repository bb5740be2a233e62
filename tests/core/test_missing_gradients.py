"""A parameter that the loss of a step does not reach is skipped, as in torch."""

import copy

import pytest
import torch
from ensembles import SHAPE, Ensemble
from replicas import batches, plain_optimizer
from torch import nn
from torch.nn import functional

import raydl
from raydl.config import (
    ExchangeConfig,
    MethodConfig,
    OptimizerConfig,
    ParamGroup,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.core.flat import FlatModel
from raydl.core.optimizers import OPTIMIZERS, make_optimizer
from raydl.core.replica import Replica
from raydl.errors import ShapeError, StepError
from raydl.methods.easgd import Elastic
from raydl.metrics import TimeParts
from raydl.tasks import Classification

PLAIN = {"lr_schedule": "constant", "warmup": 0.0, "clip_grad_norm": None}


class Experts(nn.Module):
    """Each step uses one of two experts in turn; the first steps use both."""

    def __init__(self, image_shape, num_classes, *, num_both=0):
        super().__init__()
        self.shared = nn.Linear(16, 6)
        self.experts = nn.ModuleList(nn.Linear(6, num_classes) for _ in range(2))
        self.num_both = num_both
        self.calls = 0

    def forward(self, images):
        hidden = torch.tanh(self.shared(images.flatten(1)))
        self.calls += self.training
        if self.calls <= self.num_both:
            return self.experts[0](hidden) + self.experts[1](hidden)
        return self.experts[self.calls % 2](hidden)


def pair(config, *, own=None, **more):
    """Return a replica of experts, and the same model in plain torch."""
    torch.manual_seed(3)
    model = Experts(SHAPE.input_shape, SHAPE.num_classes, **more)
    reference = copy.deepcopy(model)
    return experts_replica(model, config, own), reference


def experts_replica(model, config, own=None):
    return Replica(
        FlatModel(model),
        Classification(Experts),
        rule=Elastic(0.9),
        make_optimizer=make_optimizer(config, own, model),
        time_parts=TimeParts(),
    )


def step_reference(reference, optimizer, batch, max_norm=None):
    optimizer.zero_grad()
    functional.cross_entropy(reference(batch[0]), batch[1]).backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
    optimizer.step()


def assert_equal_bits(replica, reference):
    for (name, own), plain in zip(
        replica.flat.model.named_parameters(), reference.parameters(), strict=True
    ):
        assert torch.equal(own, plain), name


SETTINGS = {
    "sgd": {"momentum": 0.9, "weight_decay": 0.1},
    "asgd": {"weight_decay": 0.1},
}


@pytest.mark.parametrize("num_both", [0, 3])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_ten_steps_of_two_experts_equal_torch_optim_bit_for_bit(name, num_both):
    settings = SETTINGS.get(name, {})
    config = OptimizerConfig(name=name, lr=0.05, **settings, **PLAIN)
    replica, reference = pair(config, num_both=num_both)
    optimizer = plain_optimizer(name, reference, lr=0.05, **settings)
    for number, batch in enumerate(batches(10), start=1):
        lr = 0.005 * number  # a warm-up
        replica.set_lr(lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        replica.step(batch)
        step_reference(reference, optimizer, batch)
    assert_equal_bits(replica, reference)


def test_only_matrices_decay_and_gradients_are_clipped_as_in_torch():
    config = OptimizerConfig(
        name="adamw", lr=0.05, weight_decay=0.3, decay_only_matrices=True,
        **{**PLAIN, "clip_grad_norm": 0.1},
    )  # fmt: skip
    replica, reference = pair(config, num_both=2)
    parameters = list(reference.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.3},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.05,
    )
    for batch in batches(10):
        replica.step(batch)
        step_reference(reference, optimizer, batch, max_norm=0.1)
    assert_equal_bits(replica, reference)


def test_parameter_groups_do_not_change_in_a_step_without_gradients():
    group = ParamGroup(pattern="*.bias", lr_scale=0.5, weight_decay=0.0)
    config = OptimizerConfig(
        name="adamw", lr=0.05, weight_decay=0.3, param_groups=(group,), **PLAIN
    )
    replica, reference = pair(config, num_both=2)
    parameters = dict(reference.named_parameters())
    biases = [p for name, p in parameters.items() if name.endswith(".bias")]
    others = [p for name, p in parameters.items() if not name.endswith(".bias")]
    optimizer = torch.optim.AdamW(
        [{"params": others}, {"params": biases, "lr": 0.025, "weight_decay": 0.0}],
        lr=0.05, weight_decay=0.3,
    )  # fmt: skip
    for batch in batches(10):
        replica.step(batch)
        step_reference(reference, optimizer, batch)
    assert_equal_bits(replica, reference)


def test_a_users_optimizer_skips_missing_gradients_too():
    config = OptimizerConfig(name="test:adamw", lr=0.05, **PLAIN)
    replica, reference = pair(config, own=lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.2))
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.05, weight_decay=0.2)
    for batch in batches(6):
        replica.step(batch)
        step_reference(reference, optimizer, batch)
    assert_equal_bits(replica, reference)


@pytest.mark.parametrize("num_before", [2, 5])
def test_a_replica_resumes_from_a_state_of_either_form(num_before):
    """Up to the third step the optimizer holds the flat tensor, from then on the parameters."""
    config = OptimizerConfig(name="adamw", lr=0.05, weight_decay=0.1, **PLAIN)
    whole, reference = pair(config, num_both=3)
    data = batches(9)
    for batch in data[:num_before]:
        whole.step(batch)
    again = copy.deepcopy(reference)
    again.calls = num_before
    cut = experts_replica(again, config)
    cut.load_state_dict(whole.state_dict())
    for batch in data[num_before:]:
        whole.step(batch)
        cut.step(batch)
    assert torch.equal(cut.flat.weights, whole.flat.weights)


def test_gradients_that_the_models_own_code_set_to_none_are_used():
    """A loss that computes its own gradient often sets the gradients to None afterwards."""

    class Penalised(Classification):
        def loss(self, model, batch):
            super().loss(model, batch).backward()
            model.zero_grad()
            return super().loss(model, batch)

    torch.manual_seed(3)
    plain, _ = pair(OptimizerConfig(lr=0.1, **PLAIN), num_both=9)
    torch.manual_seed(3)
    other, _ = pair(OptimizerConfig(lr=0.1, **PLAIN), num_both=9)
    other._task = Penalised(Experts)
    for batch in batches(3):
        plain.step(batch)
        other.step(batch)
    assert torch.equal(plain.flat.weights, other.flat.weights)


def experts_config(method, *, workers=2, group_size=1, **optimizer):
    return TrainConfig(
        method=MethodConfig(name=method, period=2, group_size=group_size),
        training=TrainingConfig(epochs=2, batch_size=3),
        optimizer=OptimizerConfig(**{"lr": 0.05, **PLAIN, **optimizer}),
        exchange=ExchangeConfig(timeout_s=20.0),
        scaling=ScalingConfig(num_workers=workers),
    )


class ByRank(Classification):
    """Each worker's model uses another expert."""

    def __init__(self):
        super().__init__(Experts)
        self.models = []

    def loss(self, model, batch):
        if all(model is not known for known in self.models):
            self.models.append(model)
        model.calls = next(i for i, known in enumerate(self.models) if known is model)
        return super().loss(model, batch)


def test_workers_that_share_a_replica_update_the_parameters_that_either_has_used():
    config = experts_config("sync-easgd", name="adamw", weight_decay=0.5, group_size=2)
    ensemble = Ensemble(config, num_workers=2, task=ByRank()).join()
    ensemble.run(2)
    one, other = (worker.replica for worker in ensemble.workers)
    assert torch.equal(one.flat.weights, other.flat.weights)
    assert all(state["step"] == 4 for state in one._optimizer.state.values())


def test_plain_sgd_at_the_center_accepts_a_model_with_experts():
    ensemble = Ensemble(experts_config("sync-sgd"), num_workers=2, model=Experts).join()
    ensemble.run()


def test_an_optimizer_at_the_center_refuses_a_missing_gradient_at_the_step():
    ensemble = Ensemble(
        experts_config("sync-msgd", momentum=0.9), num_workers=1, model=OneExpert
    ).join()
    with pytest.raises(StepError) as error:
        ensemble.run()
    assert str(error.value) == (
        "local step 1 of worker w0: the loss gives no gradient to the parameter "
        "experts.1.weight and 1 more, but an optimizer at the center would update them anyway; "
        "choose a method with local "
        "steps (local-sgd), an optimizer without momentum and weight decay, or make the loss "
        "depend on all parameters"
    )


class OneExpert(Experts):
    def forward(self, images):
        self.calls = 1
        return super().forward(images)


def test_a_model_with_an_unused_parameter_is_refused_before_any_worker_starts(tmp_path):
    with pytest.raises(ShapeError, match=r"the parameter unused\.weight and 1 more"):
        raydl.Trainer(
            raydl.Classification(half_used),
            "digits",
            method="sync-msgd",
            training=raydl.TrainingConfig(epochs=1),
            scaling=raydl.ScalingConfig(num_workers=0),
            run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
        ).fit()


def half_used(image_shape, num_classes):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
    model.unused = nn.Linear(2, 2)
    model.forward = lambda images: model[1](model[0](images))
    return model
