"""Named models: their sizes, their inputs, and their batch norm in exchanges."""

import pickle
import re
import sys
import types

import numpy as np
import pytest
import torch
from ensembles import Ensemble
from torch import nn
from torch.nn import functional

from raydl import models
from raydl.config import (
    MethodConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.core.flat import FlatModel
from raydl.errors import ConfigError, ShapeError, UnknownNameError
from raydl.models import MODELS
from raydl.models.alexnet import LocalNorm
from raydl.models.parts import channels_last
from raydl.models.resnet import PlainShortcutBlock
from raydl.run.trainer import Trainer
from raydl.tasks import Classification, DataShape, evaluate

PUBLISHED = {
    "lenet": 431_080,
    "lenet5": 61_706,
    "alexnet": 61_100_840,
    "alexnet-cifar": 89_578,
    "vgg11": 132_863_336,
    "vgg11-bn": 132_868_840,
    "vgg16": 138_357_544,
    "vgg16-bn": 138_365_992,
    "vgg19": 143_667_240,
    "vgg19-bn": 143_678_248,
    "vgg11-bn-cifar": 9_231_114,
    "vgg16-bn-cifar": 14_728_266,
    "vgg19-bn-cifar": 20_040_522,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet56": 853_018,
    "googlenet": 6_998_552,
    "googlenet-bn": 6_624_904,
    "gpt2": 124_439_808,
}
PICTURES = [name for name, row in MODELS.items() if not row.reads_texts]
SMALLEST = {
    "lenet": 4,
    "alexnet": 63,
    "alexnet-cifar": 8,
    **{f"vgg{depth}{norm}": 32 for depth in (11, 16, 19) for norm in ("", "-bn")},
    "googlenet": 31,
    "googlenet-bn": 15,
    "googlenet-cifar": 2,
}
LIGHT = [
    "lenet", "lenet5", "mlp", "alexnet-cifar", "resnet20", "vgg11-bn-cifar", "googlenet-cifar",
]  # fmt: skip


def logits_on_meta(name, shape, num_classes):
    """Return logits of two pictures from a model on the meta device."""
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        for draw in ("normal_", "uniform_"):  # slow in Python, and without effect there
            patch.setattr(torch.Tensor, draw, lambda tensor, *_, **__: tensor)
        return MODELS[name].build(shape, num_classes).eval()(torch.empty(2, *shape))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_the_published_number_of_parameters(name):
    assert MODELS[name].num_parameters == PUBLISHED[name]


def test_the_parameters_of_googlenet_are_counted_by_hand():
    stem = (3 * 49 + 1) * 64 + (64 + 1) * 64 + (64 * 9 + 1) * 192
    block_3a = 193 * (64 + 96 + 16 + 32) + (96 * 9 + 1) * 128 + (16 * 25 + 1) * 32
    with torch.device("meta"):
        parameters = dict(MODELS["googlenet"].build((3, 224, 224), 1000).named_parameters())

    def count(start):
        return sum(p.numel() for name, p in parameters.items() if name.startswith(start))

    assert (count("conv"), count("inception3a")) == (stem, block_3a) == (124_416, 163_696)


@pytest.mark.parametrize("name", PICTURES)
def test_a_model_fits_any_number_of_channels_and_classes(name):
    (_, height, width), _ = MODELS[name].made_for
    for channels in (1, 4):
        assert logits_on_meta(name, (channels, height, width), 7).shape == (2, 7)


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_need_not_be_square(name):
    assert logits_on_meta(name, (3, 65, 96), 7).shape == (2, 7)


@pytest.mark.parametrize("name", PICTURES)
def test_the_smallest_pictures_are_accepted_and_smaller_ones_are_refused_in_a_sentence(name):
    smallest = SMALLEST.get(name, 1)
    assert logits_on_meta(name, (3, smallest, smallest), 7).shape == (2, 7)
    if smallest > 1:
        side = smallest - 1
        sentence = f"needs images of {smallest}x{smallest} or more, got 99x{side}$"
        with pytest.raises(ShapeError, match=sentence), torch.device("meta"):
            MODELS[name].build((3, 99, side), 7)


@pytest.mark.parametrize("side", [8, 28, 32])
@pytest.mark.parametrize("name", [n for n in PICTURES if MODELS[n].made_for[0][1] < 224])
def test_a_small_model_accepts_the_sizes_of_digits_mnist_and_cifar(name, side):
    assert logits_on_meta(name, (1, side, side), 10).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "side"),
    [*((name, 8) for name in LIGHT), ("resnet18", 33), ("googlenet", 64), ("googlenet-bn", 64)],
)
def test_a_loss_and_its_gradients_are_finite_and_reach_the_first_layer(name, side):
    torch.manual_seed(0)
    model = MODELS[name].build((3, side, side), 3)
    images, labels = torch.randn(4, 3, side, side), torch.tensor([0, 1, 2, 0])
    functional.cross_entropy(model(images), labels).backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[0].abs().max() > 0


@pytest.mark.parametrize(("name", "side"), [("lenet5", 28), ("alexnet-cifar", 8), ("resnet20", 8)])
def test_a_few_steps_lower_the_loss(name, side):
    torch.manual_seed(0)
    model = MODELS[name].build((1, side, side), 2)
    images, labels = torch.randn(8, 1, side, side), torch.tensor([0, 1] * 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(30):
        losses.append(functional.cross_entropy(model(images), labels))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", [*LIGHT, "googlenet", "resnet18"])
def test_initial_weights_follow_from_torchs_seed(name):
    def first_weights(seed):
        torch.manual_seed(seed)
        (channels, *_), _ = MODELS[name].made_for
        model = MODELS[name].build((channels, 32, 32), 3)
        return torch.cat([p.detach().flatten()[:100] for p in model.parameters()])

    assert torch.equal(first_weights(1), first_weights(1))
    assert not torch.equal(first_weights(1), first_weights(2))


def test_a_shortcut_without_parameters_takes_every_other_pixel_and_adds_zeros():
    block = PlainShortcutBlock(2, 4)
    for convolution in (block.conv1, block.conv2):
        nn.init.zeros_(convolution.weight)
    maps = torch.arange(32.0).view(1, 2, 4, 4)
    result = block(maps)
    assert result[0, 1].tolist() == [[0, 2], [8, 10]]
    assert result[0, 2].tolist() == [[16, 18], [24, 26]]
    assert result[0, [0, 3]].count_nonzero() == 0


def test_local_normalisation_worked_by_hand():
    result = LocalNorm()(torch.full((1, 1, 3, 3), 200.0))
    assert result[0, 0, 1, 1].item() == pytest.approx(200 / 3**0.75)  # 1 + 5e-5 * 200^2 = 3


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_is_used_where_it_is_faster(channels):
    pictures = torch.arange(2.0 * channels * 12).view(2, channels, 3, 4)
    laid_out = channels_last(pictures)
    assert torch.equal(laid_out, pictures)
    assert laid_out.stride() == (12 * channels, 1, 4 * channels, channels)


@pytest.mark.parametrize("name", ["lenet", "lenet5", "alexnet-cifar", "resnet20"])
def test_a_model_gives_the_same_output_in_either_layout(name, monkeypatch):
    row = MODELS[name]
    model = row.build(*row.made_for).eval()
    pictures = torch.randn(3, *row.made_for[0])
    found = model(pictures)
    assert torch.equal(model(pictures.to(memory_format=torch.channels_last)), found)
    monkeypatch.setattr(f"{type(model).__module__}.channels_last", lambda images: images)
    assert torch.allclose(model(pictures), found, atol=1e-5)


def test_lenet5_pads_digits_of_28_to_32():
    small, large = (MODELS["lenet5"].build((1, side, side), 10) for side in (28, 32))
    large.load_state_dict(small.state_dict())
    images = torch.randn(2, 1, 28, 28)
    torch.testing.assert_close(small(images), large(functional.pad(images, (2, 2, 2, 2))))


# batch norm in exchanges


def run_with_batch_norm(method):
    config = TrainConfig(
        method=MethodConfig(name=method, period=2),
        training=TrainingConfig(batch_size=4, epochs=3),
        optimizer=OptimizerConfig(lr=0.05),
    )
    ensemble = Ensemble(config, num_workers=2, model=MODELS["resnet20"].build)
    ensemble.join().run()
    return ensemble


@pytest.mark.parametrize("method", ["sync-easgd", "sync-sgd", "async-easgd", "diloco"])
def test_the_center_receives_and_uses_the_statistics_of_batch_norm(method):
    ensemble = run_with_batch_norm(method)
    flat, center = ensemble.flat, ensemble.center()
    buffers = torch.tensor(center.buffers)
    assert flat.num_buffers == 2 * (7 * 16 + 6 * 32 + 6 * 64)  # a mean and a variance per channel
    assert buffers.isfinite().all()
    assert (buffers != torch.tensor(ensemble.first.buffers)).float().mean() > 0.9
    _, statistics = flat.named(flat.weights, buffers)
    assert all((v > 0).all() for k, v in statistics.items() if k.endswith("running_var"))

    def loss_with(buffers):
        model = MODELS["resnet20"].build((1, 4, 4), 3)
        model.load_state_dict(flat.state_dict_of(torch.tensor(center.weights), buffers))
        batches = ensemble.batches
        measured = evaluate(
            Classification("resnet20"),
            model,
            lambda start, stop: batches.batch(np.arange(start, stop)),
            num_samples=24,
            batch_size=24,
        )
        return measured["loss"]

    assert loss_with(buffers) != loss_with(torch.tensor(ensemble.first.buffers))


def test_a_center_with_batch_norm_loads_into_plain_pytorch_under_the_models_own_names():
    torch.manual_seed(0)
    model = MODELS["resnet20"].build((1, 8, 8), 3)
    names = list(model.state_dict())
    images = torch.randn(4, 1, 8, 8)
    flat = FlatModel(model)
    model(images)  # updates the statistics once
    state = flat.state_dict_of(flat.weights, flat.buffers)
    plain = MODELS["resnet20"].build((1, 8, 8), 3)
    plain.load_state_dict(state)
    assert list(state) == names
    assert state["bn1.num_batches_tracked"].dtype == torch.int64
    assert torch.equal(plain.eval()(images), model.eval()(images))


# names that are not in the table


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "raydl_own_net.py").write_text(
        "from torch import nn\n"
        "width = 3\n"
        "def build(image_shape, num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "raydl_own_net"
    sys.modules.pop("raydl_own_net", None)


def test_a_custom_function_is_found_in_the_current_folder(own_module):
    task = Classification(f"{own_module}:build")
    assert task.name == "raydl_own_net:build"
    assert task.build_model(DataShape((1, 2, 2), 5))(torch.zeros(2, 1, 2, 2)).shape == (2, 5)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no_such_module:build", "model no_such_module:build cannot be imported: No module named"),
        ("raydl_own_net:biuld", "model raydl_own_net:biuld cannot be imported: module "),
        ("raydl_own_net:width", "model must be a function or class of .*, got raydl_own_net:width"),
        (":build", "model must be written module:name, got :build"),
    ],
)
def test_a_name_that_cannot_be_imported_is_reported(own_module, name, sentence):
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        Classification(name)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("import no_such_library", ModuleNotFoundError),
        ("raise ValueError('no_such_library')", ValueError),
    ],
)
def test_an_error_inside_a_users_module_arrives_unchanged(own_module, tmp_path, line, error):
    (tmp_path / f"{own_module}.py").write_text(line)
    with pytest.raises(error, match="no_such_library") as caught:
        Classification(f"{own_module}:build")
    assert caught.traceback[-1].path.name == f"{own_module}.py"


def test_torchvision_is_imported_only_if_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert Classification("resnet18").name == "resnet18"
    with pytest.raises(ConfigError, match="torchvision:NAME needs a torchvision that matches"):
        Classification("torchvision:resnet18")


@pytest.fixture
def torchvision(monkeypatch):
    """A fake torchvision with one model for pictures of three channels."""

    def get_model(name, *, weights, num_classes, **settings):
        assert weights is None
        assert bool(settings) == (name == "googlenet")
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.ReLU()),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes),
        )  # fmt: skip

    package, zoo = types.ModuleType("torchvision"), types.ModuleType("torchvision.models")
    zoo.get_model, zoo.list_models = get_model, lambda module: ["googlenet", "squeezenet1_1"]
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.models", zoo)


@pytest.mark.parametrize("name", ["googlenet", "squeezenet1_1"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_model_of_torchvision_fits_the_channels_and_classes(torchvision, name, channels):
    model = models.find(f"torchvision:{name}")((channels, 8, 8), 5)
    assert model(torch.zeros(2, channels, 8, 8)).shape == (2, 5)
    assert model[0][0].weight.shape == (8, channels, 3, 3)
    assert (model[0][0].stride, model[0][0].bias) == ((2, 2), None)


def test_the_error_for_an_unknown_model_of_torchvision_lists_the_nearest(torchvision):
    with pytest.raises(UnknownNameError, match="'squeezenet11'; did you mean squeezenet1_1"):
        models.find("torchvision:squeezenet11")


@pytest.mark.parametrize("name", [*MODELS, "torchvision:squeezenet1_1"])
def test_a_factory_can_be_pickled(torchvision, name):
    found = models.find(name)
    again = pickle.loads(pickle.dumps(found))
    assert getattr(again, "func", again) is getattr(found, "func", found)


def test_the_docs_have_the_current_table_of_models(root):
    text = (root / "docs/models.md").read_text()
    documented = re.findall(
        r"^\| `([\w-]+)` \| (.+?) \| (.+?) \| ([\d,]+) \| (.+?) \|$", text, re.M
    )
    assert documented == [
        (
            name,
            row.source,
            row.input_size,
            f"{row.num_parameters:,}",
            "any size" if name not in SMALLEST else f"{SMALLEST[name]}x{SMALLEST[name]}",
        )
        for name, row in MODELS.items()
    ]


class ModelWithOutput(nn.Module):
    """A model of one weight with a given output."""

    def __init__(self, output):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self._output = output

    def forward(self, x):
        return self._output(x)


def fails(x):
    return {}["no such key"]


@pytest.mark.parametrize(
    ("factory", "error", "sentence"),
    [
        (
            lambda shape, classes: 3,
            ShapeError,
            r"must be a torch.nn.Module, but its builder returned an object of type int$",
        ),
        (lambda shape: 3, ShapeError, r"\(image shape, number of classes\), got \(shape\)"),
        (
            lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
            ShapeError,
            r"logits of shape \[2, 10\] for 2 samples of 10 classes, got shape \[2, 3\]$",
        ),
        (lambda shape, classes: ModelWithOutput(lambda x: (x, x)), ShapeError, "got a tuple$"),
        (
            lambda shape, classes: nn.Linear(3, 10),
            ShapeError,
            "does not accept 1x8x8 images of 10",
        ),
        (lambda shape, classes: ModelWithOutput(fails), KeyError, "no such key"),
    ],
)
def test_a_custom_model_that_does_not_fit_is_refused_before_anything_starts(
    tmp_path, factory, error, sentence
):
    run = RunConfig(run_dir=str(tmp_path / "a"), progress="none")
    scaling = ScalingConfig(num_workers=0)
    with pytest.raises(error, match=sentence):
        Trainer(Classification(factory), "digits", run=run, scaling=scaling).fit()
    assert not (tmp_path / "a").exists()
