"""Tensors over the same memory are one: counted once, trained once, saved under all their names."""

import copy
import itertools
import random
import re

import pytest
import torch
from ensembles import Ensemble
from torch import nn
from user_loops import attach_alone, equal_states, user_loop_config

from raydl.config import MethodConfig, OptimizerConfig, ParamGroup, TrainConfig, TrainingConfig
from raydl.core.flat import FlatModel
from raydl.core.job import first_model
from raydl.core.sharing import move
from raydl.errors import AttachError, ConfigError, ShapeError
from raydl.worker.user_loop import job_of, terms_of


class Pair(nn.Module):
    """Two layers with weights of one shape, [4, 4]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = x.flatten(1)[:, :4]
        return self.head(self.b(torch.tanh(self.a(x))))


def by_object(pair):
    pair.b.weight = pair.a.weight


def by_data(pair):
    pair.b.weight.data = pair.a.weight.data


def by_set(pair):
    with torch.no_grad():
        pair.b.weight.set_(pair.a.weight)


def by_a_new_parameter(pair):
    pair.b.weight = nn.Parameter(pair.a.weight.data)


def by_an_array(pair):
    """Two storages over one memory."""
    memory = pair.a.weight.detach().numpy()
    pair.a.weight.data, pair.b.weight.data = torch.from_numpy(memory), torch.from_numpy(memory)


def by_a_frozen_alias(pair):
    pair.b.weight = nn.Parameter(pair.a.weight.data, requires_grad=False)


def by_a_trained_alias_of_a_frozen_one(pair):
    pair.a.weight.requires_grad_(False)
    pair.b.weight = nn.Parameter(pair.a.weight.data)


def by_a_buffer(pair):
    del pair.b.weight
    pair.b.register_buffer("weight", pair.a.weight.data)


def by_an_unsaved_buffer(pair):
    del pair.b.weight
    pair.b.register_buffer("weight", pair.a.weight.data, persistent=False)


TRAINED = [by_object, by_data, by_set, by_a_new_parameter, by_an_array]
"""Ways in which both names are trained."""
FOLLOWING = [
    by_a_frozen_alias, by_a_trained_alias_of_a_frozen_one, by_a_buffer, by_an_unsaved_buffer,
]  # fmt: skip


def tied(tie):
    pair = Pair()
    tie(pair)
    return pair


def inputs(step=0):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def near(one, other):
    """Whether two states agree; the sums of gradients are rounded in another order."""
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], atol=1e-6) for name in one
    )


def train(model, optimizer, num_steps=10):
    for step in range(num_steps):
        optimizer.zero_grad()
        (model(inputs(step)) - 1).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("tie", TRAINED + FOLLOWING)
def test_what_coincides_is_one_tensor(tie):
    pair = tied(tie)
    first = {name: value.clone() for name, value in pair.state_dict().items()}
    flat = FlatModel(pair)
    assert flat.num_parameters == 16 + 4 + 4 + 15
    assert equal_states(first, pair.state_dict())
    assert not flat.non_trainable.names
    flat.weights.add_(1.0)
    assert torch.equal(pair.a.weight, pair.b.weight)
    state = flat.state_dict_of(torch.arange(39.0), flat.buffers)
    assert state.keys() == first.keys()
    assert torch.equal(state["a.weight"], state.get("b.weight", state["a.weight"]))
    assert torch.equal(flat.flatten(state)[0], torch.arange(39.0))


@pytest.mark.parametrize("tie", TRAINED + FOLLOWING)
def test_gradients_by_all_names_accumulate_as_in_torch(tie):
    plain, pair = tied(tie), tied(tie)
    flat = FlatModel(pair)
    flat.watch_gradients()
    for model in (plain, pair):
        model(inputs()).square().mean().backward()
        model(inputs(1)).square().mean().backward()
    own = [p for p in (plain.a.weight, plain.b.weight) if p.grad is not None]
    expected = sum(p.grad for p in dict.fromkeys(own))
    name = next(n for n in ("a.weight", "b.weight") if n in flat.sharing)
    assert torch.allclose(flat.named(flat.gradients, flat.buffers)[0][name], expected)
    assert all(flat.is_reached([0] * len(flat.num_reached)))


@pytest.mark.parametrize("tie", TRAINED)
def test_gradients_that_the_model_sets_to_none_accumulate_again(tie):
    flat = FlatModel(tied(tie))
    flat.watch_gradients()
    flat.model(inputs()).square().mean().backward()
    expected = flat.gradients.clone()
    flat.model.zero_grad()
    flat.model(inputs()).square().mean().backward()
    assert torch.equal(flat.gradients, expected)


def test_one_name_that_the_loss_reaches_is_enough():
    pair = tied(by_data)
    flat = FlatModel(pair)
    flat.watch_gradients()
    pair.b(inputs()).sum().backward()
    assert "a.weight" not in flat.unreached([0] * 5)
    with flat.without_gradients_of(["a.weight"]):
        assert pair.a.weight.grad is pair.b.weight.grad is None
    assert pair.a.weight.grad is pair.b.weight.grad is not None


@pytest.mark.parametrize("tie", TRAINED + FOLLOWING)
@pytest.mark.parametrize("replace", [lambda v: v.clamp(-0.1, 0.1), lambda v: v * 0.5])
def test_values_that_a_model_replaces_under_all_names_stay_one(tie, replace):
    pair = tied(tie)
    flat = FlatModel(pair)
    expected = replace(pair.a.weight.data)
    for layer in (pair.a, pair.b):
        if layer is pair.a or tie is not by_object:
            layer.weight.data = replace(layer.weight.data)
    flat.rebind()
    name = next(n for n in ("a.weight", "b.weight") if n in flat.sharing)
    assert torch.equal(flat.named(flat.weights, flat.buffers)[0][name], expected)
    flat.weights.add_(1.0)
    assert torch.equal(pair.a.weight, expected + 1.0)
    assert torch.equal(pair.b.weight, expected + 1.0)


@pytest.mark.parametrize("tie", [by_data, by_a_buffer])
def test_values_that_a_model_replaces_under_one_name_are_refused(tie):
    pair = tied(tie)
    flat = FlatModel(pair)
    pair.b.weight.data = pair.b.weight.data * 0.5
    with pytest.raises(ShapeError, match=r"replaced b\.weight apart from a\.weight, which had"):
        flat.rebind()


def test_a_parameter_that_gets_the_memory_of_another_one_in_the_run_is_refused():
    pair = Pair()
    flat = FlatModel(pair)
    by_data(pair)
    with pytest.raises(ShapeError, match=r"gave b\.weight the memory of another parameter"):
        flat.rebind()


# runs


class ByBuilder:
    """Builds a pair with tied weights, as the model of a run."""

    def __init__(self, tie):
        self.tie = tie

    def __call__(self, image_shape, num_classes):
        return tied(self.tie)


@pytest.mark.parametrize("tie", [*TRAINED[1:], by_a_frozen_alias, by_a_buffer])
@pytest.mark.parametrize(
    ("method", "optimizer"),
    [
        ("sync-easgd", OptimizerConfig(lr=0.1)),
        ("local-sgd", OptimizerConfig(name="adam", lr=0.01, clip_grad_norm=1.0)),
        ("sync-msgd", OptimizerConfig(lr=0.1)),
        ("async-easgd", OptimizerConfig(name="adafactor", lr=0.1)),
        (
            "local-sgd",
            OptimizerConfig(lr=0.1, param_groups=(ParamGroup(pattern="head.*", lr_scale=2.0),)),
        ),
    ],
)
def test_a_run_keeps_memory_tied_like_one_object(tie, method, optimizer):
    config = TrainConfig(
        method=MethodConfig(name=method),
        training=TrainingConfig(epochs=2, batch_size=4, microbatches=2),
        optimizer=optimizer,
    )

    def center_of(tie):
        num_workers = 1 if method.startswith("async") else 2
        ensemble = Ensemble(config, num_workers=num_workers, model=ByBuilder(tie)).join()
        ensemble.run()
        center = ensemble.center()
        weights, buffers = torch.tensor(center.weights), torch.tensor(center.buffers)
        return ensemble, ensemble.flat.state_dict_of(weights, buffers, center.non_trainable)

    ensemble, center = center_of(tie)
    assert torch.equal(center["a.weight"], center["b.weight"])
    for worker in ensemble.workers:
        pair = worker.replica.flat.model
        assert torch.equal(pair.a.weight, pair.b.weight)
    if tie in TRAINED:
        assert near(center, center_of(by_object)[1])


def test_a_resumed_replica_is_still_tied():
    config = TrainConfig(
        method=MethodConfig(name="sync-easgd"), training=TrainingConfig(epochs=2, batch_size=4)
    )
    ensemble = Ensemble(config, num_workers=2, model=ByBuilder(by_data)).join()
    ensemble.run(2)
    state = copy.deepcopy(ensemble.workers[0].replica.state_dict())
    again = Ensemble(config, num_workers=2, model=ByBuilder(by_data)).workers[1].replica
    again.load_state_dict(state)
    assert torch.equal(again.flat.weights, ensemble.workers[0].replica.flat.weights)
    assert torch.equal(again.flat.model.a.weight, again.flat.model.b.weight)


def test_a_saved_state_of_untied_weights_is_refused_with_both_names():
    apart = Pair().state_dict()
    with pytest.raises(ShapeError, match=r"has b\.weight and a\.weight over the same memory, but"):
        FlatModel(tied(by_data)).flatten(apart)


@pytest.mark.parametrize("tie", [by_object, by_data, by_a_buffer])
@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_move_to_a_device_keeps_memory_shared(tie, device):
    pair = tied(tie)
    pair.register_buffer("seen", torch.zeros(2))
    pair.a.register_buffer("seen", pair.seen)
    move(pair, device)
    assert pair.seen is pair.a.seen
    assert pair.a.weight.device.type == pair.b.weight.device.type == device
    assert pair.b.weight.untyped_storage()._cdata == pair.a.weight.untyped_storage()._cdata


def test_the_model_of_a_worker_is_moved_with_its_ties():
    config = TrainConfig(method=MethodConfig(name="sync-easgd"))
    ensemble = Ensemble(config, num_workers=1, model=ByBuilder(by_data))
    assert first_model(ensemble.job, None).num_parameters == 39


# a user's own loop


@pytest.mark.parametrize("tie", TRAINED + FOLLOWING)
@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda ps: torch.optim.AdamW(ps, lr=0.01),
    ],
)
def test_an_attached_loop_takes_the_steps_of_torch(tie, make):
    plain, pair = tied(tie), tied(tie)
    train(plain, make(plain.parameters()))
    with attach_alone(pair, make(pair.parameters()), method="local-sgd") as elastic:
        train(pair, elastic)
        assert near(plain.state_dict(), pair.state_dict())
        assert torch.equal(pair.a.weight, pair.b.weight)
        center = elastic.center_state_dict()
        assert torch.equal(center["a.weight"], center.get("b.weight", center["a.weight"]))


def test_names_of_one_tensor_may_be_in_two_groups_of_a_users_optimizer():
    def optimizer(model):
        slow = [model.b.weight]
        others = [p for p in model.parameters() if p is not model.b.weight]
        return torch.optim.SGD([{"params": slow, "lr": 0.01}, {"params": others}], lr=0.1)

    plain, pair = tied(by_data), tied(by_data)
    train(plain, optimizer(plain))
    with attach_alone(pair, optimizer(pair), method="local-sgd") as elastic:
        train(pair, elastic)
    assert near(plain.state_dict(), pair.state_dict())


def test_an_optimizer_with_one_name_of_each_tensor_is_complete():
    config = user_loop_config(MethodConfig(name="local-sgd"), 1)
    pair = tied(by_data)
    once = [p for p in pair.parameters() if p is not pair.a.weight]
    job_of(config, pair, torch.optim.SGD(once, lr=0.1), None)
    neither = [p for p in once if p is not pair.b.weight]
    with pytest.raises(ConfigError, match=r"lacks 1 of the model's 5 parameters, .* a\.weight"):
        job_of(config, pair, torch.optim.SGD(neither, lr=0.1), None)


def test_workers_with_tied_and_untied_weights_do_not_fit_each_other():
    config = user_loop_config(MethodConfig(name="local-sgd"), 1)

    def terms(model):
        job = job_of(config, model, torch.optim.SGD(model.parameters(), lr=0.1), None)
        return terms_of(job, model)["model"]

    assert terms(tied(by_data)).startswith("39 trained parameters, 6 tensors")
    assert terms(tied(by_data)) == terms(tied(by_set))
    assert terms(Pair()).startswith("55 trained parameters, 6 tensors")


def test_a_parameter_that_an_attached_model_replaces_alone_is_refused_by_name():
    pair = tied(by_data)
    with attach_alone(
        pair, torch.optim.SGD(pair.parameters(), lr=0.1), method="local-sgd"
    ) as elastic:
        pair.a.weight.data = pair.a.weight.data + 1
        with pytest.raises(AttachError, match=r"replaced a\.weight apart from b\.weight"):
            elastic.step()


# views that are neither one tensor nor two


class Two(nn.Module):
    """Two tensors of a model, registered as a parameter or a buffer."""

    def __init__(self, one, other, how):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for name, tensor, kind in zip(("one", "other"), (one, other), how, strict=True):
            if kind == "buffer":
                self.register_buffer(name, tensor)
            else:
                parameter = nn.Parameter(tensor, requires_grad=kind == "trained")
                self.register_parameter(name, parameter)


KINDS = list(itertools.product(["trained", "frozen", "buffer"], repeat=2))


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda m: m[:4], lambda m: m[2:6]),
        (lambda m: m[:4, :4], lambda m: m[:4, :4].t()),
        (lambda m: m, lambda m: m[3]),
        (lambda m: m, lambda m: m.view(-1)),
        (lambda m: m[:, ::2], lambda m: m[:, ::3]),
        (lambda m: m, lambda m: m.view(torch.int32)),
    ],
    ids=["overlapping", "transposed", "row", "reshaped", "columns", "bits"],
)
def test_what_overlaps_is_refused_with_both_names(one, other, how):
    memory = torch.randn(8, 8)
    if not one(memory).is_floating_point() or (
        not other(memory).is_floating_point() and how[1] == "trained"
    ):
        return
    model = Two(one(memory), other(memory), how)
    sentence = "has one and other, which share elements but are not the same view of them"
    if how == ("buffer", "frozen") or how == ("buffer", "trained"):
        sentence = sentence.replace("one and other", "other and one")  # parameters come first
    with pytest.raises(ShapeError, match=re.escape(sentence)):
        FlatModel(model)
    with pytest.raises(ShapeError, match=re.escape(sentence)):
        FlatModel.check(model)


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda m: m[:4], lambda m: m[4:]),
        (lambda m: m[:, ::2], lambda m: m[:, 1::2]),
        (lambda m: m[:, :3], lambda m: m[:, 3:]),
        (lambda m: m.t()[:4], lambda m: m.t()[4:]),
        (lambda m: m[:0], lambda m: m),
    ],
    ids=["slices", "alternating", "columns", "transposed", "empty"],
)
def test_disjoint_slices_of_one_memory_are_two_tensors(one, other, how):
    memory = torch.randn(8, 8)
    model = Two(one(memory), other(memory), how)
    expected = [model.one.clone(), model.other.clone()]
    flat = FlatModel(model)
    sizes = (model.one.numel(), model.other.numel())
    count = sum(n for n, kind in zip(sizes, how, strict=True) if kind == "trained")
    assert flat.num_parameters == 6 + count
    assert torch.equal(model.one, expected[0])
    assert torch.equal(model.other, expected[1])


def test_recurrent_layers_may_share_a_storage():
    assert FlatModel(nn.LSTM(3, 4, num_layers=2, bidirectional=True)).num_parameters == 736


def test_views_share_an_element_exactly_if_their_offsets_meet():
    draw = random.Random(0)
    num_refused = 0
    for _ in range(300):
        memory = torch.zeros(60)
        views = []
        for _ in range(2):
            shape = [draw.randint(1, 3) for _ in range(draw.randint(0, 3))]
            strides = [draw.randint(1, 9) for _ in shape]
            views.append(memory.as_strided(shape, strides, draw.randint(0, 5)))
        one, other = ({int(i) for i in offsets_of(v)} for v in views)
        is_same = views[0].shape == views[1].shape and list(offsets_of(views[0])) == list(
            offsets_of(views[1])
        )
        try:
            FlatModel(Two(*views, ("buffer", "buffer")))
            is_refused = False
        except ShapeError:
            is_refused = True
        assert is_refused == (bool(one & other) and not is_same)
        num_refused += is_refused
    assert 50 < num_refused < 250


def offsets_of(view):
    """Return the offset in its memory of each element."""
    numbers = torch.arange(60)
    return numbers.as_strided(view.shape, view.stride(), view.storage_offset()).flatten()


def test_a_trained_parameter_whose_own_elements_share_memory_is_refused():
    model = Two(torch.zeros(1).expand(4), torch.zeros(1), ("trained", "buffer"))
    with pytest.raises(ShapeError, match="has one, whose own elements share memory"):
        FlatModel(model)
