"""The keys of a state dict are matched with tensors, so hooks and torch.compile may rename them."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from user_loops import Threads, run_all, user_loop_config

import raydl
from raydl.config import MethodConfig
from raydl.core.flat import FlatModel
from raydl.core.state_names import check_round_trip
from raydl.errors import ShapeError
from raydl.run.evaluate import score_run

PREFIX = "inner."


class Hidden(nn.Module):
    """A module whose state dict does not show the name of its inner module."""

    def __init__(self, image_shape=(1, 28, 28), num_classes=10):
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8))
        self.inner.append(nn.Linear(8, num_classes))
        self.register_state_dict_post_hook(drop_prefix)
        self.register_load_state_dict_pre_hook(add_prefix)

    def forward(self, images):
        return self.inner(images)


def drop_prefix(module, state, prefix, *_):
    for key in [k for k in state if k.startswith(prefix + PREFIX)]:
        state[prefix + key.removeprefix(prefix + PREFIX)] = state.pop(key)


def add_prefix(module, state, prefix, *_):
    for key in list(state):
        state[prefix + PREFIX + key.removeprefix(prefix)] = state.pop(key)


def compiled(image_shape=(1, 28, 28), num_classes=10):
    return torch.compile(plain(), backend="eager")


def plain(image_shape=(1, 28, 28), num_classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))


def partly_compiled(image_shape=(1, 28, 28), num_classes=10):
    model = plain()
    model[1] = torch.compile(model[1], backend="eager")
    return model


def trainer(model, folder, *, epochs=1, resume=False, **more):
    return raydl.Trainer(
        model,
        raydl.data.load("synthetic:96"),
        training=raydl.TrainingConfig(epochs=epochs, batch_size=16),
        scaling=raydl.ScalingConfig(num_workers=0),
        checkpoint=raydl.CheckpointConfig(keep_best=True),
        run=raydl.RunConfig(run_dir=str(folder), progress="none", resume=resume),
        **more,
    )


def numbered(flat):
    """Return weights and buffers by which all elements differ."""
    weights = torch.arange(float(flat.num_parameters))
    return weights, torch.arange(float(flat.num_buffers)) + 0.5


@pytest.mark.parametrize("build", [plain, Hidden, compiled, partly_compiled])
def test_a_state_dict_goes_back_to_the_tensors_that_it_came_from(build):
    flat = FlatModel(build())
    weights, buffers = numbered(flat)
    state = flat.state_dict_of(weights, buffers)
    back = flat.flatten(state)
    assert torch.equal(back[0], weights)
    assert torch.equal(back[1], buffers)
    assert not any("_orig_mod" in key or PREFIX in key for key in state)
    twin = Hidden() if build is Hidden else plain()
    twin.load_state_dict(state)
    assert torch.equal(FlatModel(twin).weights, weights)


@pytest.mark.parametrize("build", [compiled, partly_compiled])
def test_files_of_earlier_versions_with_the_names_of_a_compiled_model_are_read(build):
    model = build()
    flat = FlatModel(model)
    weights, buffers = numbered(flat)
    flat.weights.copy_(weights)
    flat.buffers.copy_(buffers)
    old = {key: value.clone() for key, value in model.state_dict().items()}
    assert any("_orig_mod" in key for key in old)
    other = FlatModel(plain())
    assert all(map(torch.equal, other.flatten(old), (weights, buffers)))
    other.load_non_trainable({**old}, {})
    counter = {"_orig_mod.2.num_batches_tracked": torch.tensor(7)}
    other.non_trainable.load(counter)
    assert other.model[2].num_batches_tracked == 7


@pytest.mark.parametrize("build", [plain, Hidden, compiled, partly_compiled])
def test_the_round_trip_leaves_the_model_and_the_generators_as_they_were(build):
    model = build()
    tensors = [*model.parameters(), *model.buffers()]
    addresses, before = [t.data_ptr() for t in tensors], copy.deepcopy(model.state_dict())
    generator = torch.get_rng_state()
    check_round_trip(model, "model")
    assert [t.data_ptr() for t in tensors] == addresses
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())


def test_tied_weights_and_buffers_outside_the_state_dict_pass_the_round_trip():
    model = plain()
    model.append(nn.Linear(4, 10))
    model[4].weight = model[3].weight
    model.register_buffer("cache", torch.ones(3), persistent=False)
    model.register_buffer("counts", torch.zeros(5, dtype=torch.int8))
    model.register_buffer("flag", torch.tensor(False))
    model.register_buffer("rough", torch.rand(300).bfloat16())
    model.register_buffer("bits", torch.zeros(3, dtype=torch.uint32))
    model.register_buffer("tiny", torch.zeros(3, dtype=torch.float8_e4m3fn))
    model.register_buffer("wave", torch.zeros(3, dtype=torch.complex64))
    check_round_trip(model, "model")


class Refused(nn.Module):
    """A model with one hook or method that makes its state dict no renaming."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def with_hook(hook):
    model = Refused()
    model.register_state_dict_post_hook(lambda module, state, prefix, _: hook(state))
    return model


class Override(Refused):
    def state_dict(self, **_):
        return super().state_dict()  # detached


class WithoutArguments(Refused):
    def state_dict(self):
        return super().state_dict()


class Swapped(Refused):
    """The state dict itself is right, but weights of one shape are loaded into each other."""

    def __init__(self):
        super().__init__()
        self.register_load_state_dict_pre_hook(self.swap)

    @staticmethod
    def swap(module, state, *_):
        state["layer.weight"], state["frozen.weight"] = (
            state["frozen.weight"],
            state["layer.weight"],
        )


class Lenient(Refused):
    """Renames, and loads nothing under the new names."""

    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(self.rename)

    @staticmethod
    def rename(module, state, *_):
        state["weight"] = state.pop("layer.weight")

    def load_state_dict(self, state, strict=True):
        return super().load_state_dict(state, strict=False)


def drop(state, key):
    del state[key]


def rename_only(state):
    state["renamed"] = state.pop("layer.weight")


def join(state):
    state["layer.weight"] = state.pop("frozen.weight")


REFUSED = {
    "has no frozen.weight in its state dict": lambda: with_hook(lambda s: drop(s, "frozen.weight")),
    "has no norm.running_mean in its state dict": lambda: with_hook(
        lambda s: drop(s, "norm.running_mean")
    ),
    "has no layer.weight in its state dict": lambda: with_hook(join),
    "has layer.bias in its state dict, which is none of": lambda: with_hook(
        lambda s: s.update({"layer.bias": s["layer.bias"].half()})
    ),
    "has layer.weight in its state dict, which is none of": lambda: with_hook(
        lambda s: s.update({"layer.weight": s["layer.weight"][:2]})
    ),
    "has extra in its state dict, which is none of": lambda: with_hook(
        lambda s: s.update(extra=torch.ones(2))
    ),
    "cannot load its own state dict: .*renamed": lambda: with_hook(rename_only),
    "has layer.weight in its state dict, which is none": Override,
    "does not accept state_dict.keep_vars=True": WithoutArguments,
    "does not get layer.weight back": Swapped,
    "does not get layer.weight back from": Lenient,
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_state_dict_that_is_no_renaming_is_refused_in_one_sentence(sentence):
    model = REFUSED[sentence]()
    before = [t.clone() for t in (*model.parameters(), *model.buffers())]
    with pytest.raises(ShapeError, match=sentence) as raised:
        check_round_trip(model, "mine")
    assert "remove them" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert all(map(torch.equal, before, (*model.parameters(), *model.buffers())))


def test_such_a_model_is_refused_before_the_run(tmp_path):
    def build(shape):
        model = plain()
        model.register_state_dict_post_hook(lambda module, state, *_: drop(state, "1.bias"))
        return model

    with pytest.raises(ShapeError, match=r"has no 1.bias in its state dict"):
        trainer(raydl.Classification(lambda shape, classes: build(shape)), tmp_path / "run").fit()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["Hidden", "compiled", "partly_compiled"])
def test_a_run_resumes_is_evaluated_and_loads_into_the_plain_model(name, tmp_path):
    model, folder = f"{__name__}:{name}", tmp_path / "run"
    trainer(model, folder).fit()
    result = trainer(model, folder, epochs=2, resume=True).fit()
    scores = [score_run(str(folder), best=best, trust=True) for best in (False, True)]
    assert scores[0]["loss"] == pytest.approx(result.metrics["center_loss"])
    assert scores[1]["accuracy"] >= scores[0]["accuracy"]
    for file in ("center.safetensors", "best.safetensors"):
        state = load_file(folder / file)
        (Hidden() if name == "Hidden" else plain()).load_state_dict(state)


def test_a_run_of_an_earlier_version_with_a_compiled_model_resumes_and_is_evaluated(
    tmp_path, monkeypatch
):
    model, folder = f"{__name__}:compiled", tmp_path / "run"
    state_dict_of = FlatModel.state_dict_of

    def with_inserted(self, *arguments, **named):
        state = state_dict_of(self, *arguments, **named)
        return {f"_orig_mod.{key}": value for key, value in state.items()}

    monkeypatch.setattr(FlatModel, "state_dict_of", with_inserted)
    trainer(model, folder).fit()
    assert all(key.startswith("_orig_mod.") for key in load_file(folder / "center.safetensors"))
    for best in (False, True):
        assert score_run(str(folder), best=best, trust=True)["loss"] > 0
    monkeypatch.undo()
    trainer(model, folder, epochs=2, resume=True).fit()
    plain().load_state_dict(load_file(folder / "center.safetensors"))


def test_groups_of_parameters_of_a_compiled_model_go_by_its_plain_names(tmp_path):
    groups = (raydl.ParamGroup(pattern="3.*", lr_scale=0.0),)
    optimizer = raydl.OptimizerConfig(lr=0.1, param_groups=groups)
    folder = tmp_path / "run"
    before = {}

    class Remembers(raydl.Classification):
        def build_model(self, shape):
            model = super().build_model(shape)
            before.update(copy.deepcopy(model._orig_mod.state_dict()))
            return model

    task = Remembers(f"{__name__}:compiled")
    trainer(task, folder, optimizer=optimizer).fit()
    after = load_file(folder / "center.safetensors")
    assert torch.equal(after["3.weight"], before["3.weight"])
    assert not torch.equal(after["1.weight"], before["1.weight"])


@pytest.mark.parametrize("build", [Hidden, compiled, partly_compiled])
def test_an_attached_model_gives_its_center_under_the_keys_of_its_files(build):
    threads = Threads(user_loop_config(MethodConfig(name="sync-easgd", period=1), 1))

    def work():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with threads.attach(model, optimizer, "w0") as elastic:
            model(torch.ones(2, 1, 28, 28)).sum().backward()
            elastic.step()
            return elastic.center_state_dict(), elastic.state_dict()["replica"]["weights"]

    ((center, weights),) = run_all([work])
    twin = Hidden() if build is Hidden else plain()
    twin.load_state_dict(center)
    assert FlatModel(twin).weights.shape == weights.shape


def test_an_attached_model_that_hides_a_trained_parameter_is_refused():
    threads = Threads(user_loop_config(MethodConfig(name="sync-easgd", period=1), 1))
    model = with_hook(lambda s: s.update({"layer.bias": s["layer.bias"].clone()}))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(ShapeError, match=r"has no layer.bias in its state dict, or a copy of it"):
        threads.attach(model, optimizer, "w0")
