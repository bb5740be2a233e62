"""A model on three flat tensors computes the same as the original model."""

import pytest
import torch
from torch import nn

from raydl.core.flat import FlatModel
from raydl.errors import ShapeError


def test_weights_and_gradients_are_views_of_flat_tensors():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    flat = FlatModel(model)
    assert flat.num_parameters == 11
    flat.weights.fill_(1.0)
    assert all(p.eq(1.0).all() for p in model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(flat.gradients, torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    assert flat.gradients.abs().sum() > 0


def test_flat_storage_does_not_change_what_the_model_computes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    x = torch.randn(5, 1, 4, 4)
    expected = model(x)
    fresh = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    fresh.load_state_dict(model.state_dict())
    flat = FlatModel(fresh)
    assert torch.equal(fresh(x), expected)
    assert flat.num_buffers == 4  # running mean and variance, without the integer counter


def test_batch_norm_updates_the_flat_buffers():
    model = nn.BatchNorm1d(2)
    flat = FlatModel(model)
    before = flat.buffers.clone()
    model(torch.randn(8, 2) + 5)
    assert not torch.equal(flat.buffers, before)
    assert torch.equal(flat.buffers[:2], model.running_mean)


def test_state_dict_of_returns_other_values_by_the_names_in_the_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    flat = FlatModel(model)
    state = flat.state_dict_of(torch.arange(10.0), torch.arange(4.0))
    assert list(state) == list(model.state_dict())
    assert state["0.weight"].tolist() == [[0, 1], [2, 3]]
    assert state["1.running_var"].tolist() == [2, 3]
    weights, buffers = flat.flatten(state)
    assert torch.equal(weights, torch.arange(10.0))
    assert torch.equal(buffers, torch.arange(4.0))


def test_tied_weights_are_one_parameter_with_two_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2, bias=False)
            self.b = nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight

    flat = FlatModel(Tied())
    assert flat.num_parameters == 4
    state = flat.state_dict_of(torch.ones(4), torch.empty(0))
    assert torch.equal(state["a.weight"], state["b.weight"])


def test_buffers_outside_the_state_dict_are_not_averaged():
    model = nn.BatchNorm1d(2)
    model.register_buffer("mask", torch.ones(3), persistent=False)
    flat = FlatModel(model)
    assert flat.num_buffers == 4
    weights, buffers = flat.flatten(model.state_dict())
    assert torch.equal(weights, flat.weights)
    assert torch.equal(buffers, flat.buffers)
    assert model.mask.tolist() == [1, 1, 1]


def test_frozen_parameters_are_not_in_the_flat_weights_but_in_the_state_dict():
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    flat = FlatModel(model)
    assert flat.num_parameters == 2
    assert torch.equal(flat.state_dict_of(torch.zeros(2), torch.empty(0))["bias"], model.bias)


def test_a_model_without_parameters_is_refused_by_name():
    with pytest.raises(ShapeError, match="model flatten: has no parameter"):
        FlatModel(nn.Flatten(), name="flatten")


def test_two_dtypes_are_refused():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double())
    with pytest.raises(ShapeError, match="one dtype and device"):
        FlatModel(model)


def test_a_saved_state_of_another_shape_is_refused():
    flat = FlatModel(nn.Linear(2, 1))
    with pytest.raises(ShapeError, match=r"shape \[1, 2\], saved as \[1, 3\]"):
        flat.flatten(nn.Linear(3, 1).state_dict())
