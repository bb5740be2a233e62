"""A model whose tensors are split between processes is refused before anything starts."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from user_loops import user_loop_config

import raydl
from raydl.config import MethodConfig
from raydl.core.flat import FlatModel
from raydl.errors import ShapeError
from raydl.worker.user_loop import job_of


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def fully_sharded(mesh):
    from torch.distributed.fsdp import fully_shard

    model = layers()
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return parallelize_module(layers(), mesh, {"2": ColwiseParallel()})


def with_a_distributed_buffer(mesh):
    from torch.distributed.tensor import distribute_tensor

    model = layers()
    model.register_buffer("scale", distribute_tensor(torch.ones(3), mesh), persistent=False)
    return model


@pytest.mark.parametrize(
    ("make", "name"),
    [(fully_sharded, r"0\.weight"), (tensor_parallel, r"2\.weight"),
     (with_a_distributed_buffer, "scale")],
)  # fmt: skip
def test_attach_refuses_a_model_with_distributed_tensors(mesh, make, name):
    model = make(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = user_loop_config(MethodConfig(name="diloco"), 2)
    sentence = (
        f"has {name}, a DTensor, of which each process may hold a part, but raydl needs whole "
        f"tensors in every worker; give it the model before fully_shard"
    )
    with pytest.raises(ShapeError, match=sentence):
        job_of(config, model, optimizer, None)


def test_a_run_refuses_a_model_with_distributed_tensors(mesh, tmp_path):
    samples = [(torch.zeros(4), torch.zeros(2))] * 64
    trainer = raydl.Trainer(
        lambda: tensor_parallel(mesh),
        {"train": samples, "test": samples},
        loss=lambda model, batch: model(batch[0]).square().mean(),
        scaling=raydl.ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    )
    with pytest.raises(ShapeError, match=r"has 2\.weight, a DTensor"):
        trainer.fit()


def test_a_fully_sharded_model_is_refused_while_it_holds_whole_tensors(mesh):
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(layers(), mesh=mesh, reshard_after_forward=False)
    model(torch.ones(1, 4))
    assert not any(type(p).__name__ == "DTensor" for p in model.parameters())
    with pytest.raises(ShapeError, match="has a model prepared by fully_shard"):
        FlatModel.check(model)


def test_a_tensor_that_wraps_others_is_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    model = layers()
    model[2].weight = nn.Parameter(TwoTensor(torch.ones(2, 4), torch.ones(2, 4)))
    with pytest.raises(ShapeError, match=r"has 2\.weight, a TwoTensor, which wraps other tensors"):
        FlatModel(model)


@pytest.mark.processes
def test_the_check_does_not_import_distributed_tensors():
    program = (
        "import sys, torch; from raydl.core.flat import FlatModel; "
        "FlatModel(torch.nn.Linear(1, 1)); "
        "assert 'torch.distributed.tensor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
