"""Exchanges average running statistics, and leave every other buffer to its replica."""

import copy

import numpy as np
import pytest
import torch
from coordinators import change, enter, make_coordinator, request
from ensembles import Ensemble, tiny_images
from histories import History, assert_same, config
from safetensors.torch import load_file
from scenarios import ALL
from torch import nn
from torch.nn import functional
from user_loops import Threads, attach_alone, copy_state, run_all, user_loop_config

import raydl
from raydl.config import MethodConfig
from raydl.core import flat as flat_module
from raydl.core.exchange import Header
from raydl.core.flat import FlatModel
from raydl.errors import ShapeError
from raydl.parameter_server.protocol import Completion
from raydl.tasks import Classification, build_model


class Norm(nn.Module):
    """A norm of a user's own, with a third statistic, a constant and a queue."""

    def __init__(self, size=4):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))
        self.register_buffer("running_max", torch.zeros(size))
        self.register_buffer("epsilon", torch.tensor(1e-5))
        self.register_buffer("queue", torch.randn(size, size))


class Half(nn.Module):
    """A module with only one of the two statistics."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("running_var", torch.ones(2))


def named(module, *names):
    module.averaged_buffers = names
    return module


def with_buffers(**buffers):
    layer = nn.Linear(2, 2)
    for name, tensor in buffers.items():
        layer.register_buffer(name, tensor)
    return layer


@pytest.mark.parametrize(
    ("model", "averaged"),
    [
        (nn.BatchNorm1d(2), ["running_mean", "running_var"]),
        (nn.Sequential(nn.SyncBatchNorm(2)), ["0.running_mean", "0.running_var"]),
        (nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
         ["running_mean", "running_var"]),
        (nn.BatchNorm1d(2, track_running_stats=False), []),
        (Norm(), ["running_mean", "running_var", "running_max"]),
        (Half(), []),
        (named(Half(), "running_var"), ["running_var"]),
        (nn.utils.spectral_norm(nn.Linear(2, 2)), []),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), []),
        (with_buffers(mask=torch.ones(2), ema=torch.zeros(3)), []),
        (named(with_buffers(mask=torch.ones(2), ema=torch.zeros(3)), "ema"), ["ema"]),
        (named(nn.Sequential(with_buffers(ema=torch.zeros(3))), "0.ema"), ["0.ema"]),
        (nn.Sequential(named(with_buffers(ema=torch.zeros(3)), "ema")), ["0.ema"]),
    ],
)  # fmt: skip
def test_running_statistics_and_named_buffers_are_averaged(model, averaged):
    flat = FlatModel(model)
    _, views = flat.named(flat.weights, flat.buffers)
    assert list(views) == averaged
    others = {name for name, _ in model.named_buffers()} - set(averaged)
    assert others <= set(flat.non_trainable.names)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (named(with_buffers(count=torch.tensor(1)), "count"), "names count in averaged_buffers of"),
        (named(with_buffers(), "emma"), "names emma in averaged_buffers of the model, which must"),
        (nn.Sequential(named(nn.Linear(1, 1), "weight")), "names weight in averaged_buffers of 0,"),
        (named(with_buffers(low=torch.tensor(-torch.inf)), "low"), "with finite values below 1e19"),
    ],
)
def test_a_name_that_cannot_be_averaged_is_refused(model, sentence):
    for check in (FlatModel, FlatModel.check):
        with pytest.raises(ShapeError, match=sentence):
            check(model)


def test_averaged_buffers_must_be_a_list_of_names():
    model = nn.Linear(1, 1)
    model.averaged_buffers = "ema"
    with pytest.raises(ShapeError, match="has averaged_buffers 'ema', which must be a list"):
        FlatModel(model)


def test_a_task_may_name_buffers_of_its_model():
    task = Classification(lambda shape, classes: with_buffers(ema=torch.zeros(3)))
    task.averaged_buffers = ["ema"]
    shape = tiny_images().shape
    assert FlatModel(build_model(task, shape, seed=0)).num_buffers == 3


def test_one_statistic_of_two_modules_counts_once():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[1].running_mean.data = model[0].running_mean.data
    flat = FlatModel(model)
    assert flat.num_buffers == 6
    flat.buffers.fill_(3.0)
    assert model[1].running_mean.tolist() == [3.0, 3.0]


# exchanges


class Queue(nn.Module):
    """A contrastive queue of unit vectors, spectral norm, a constant and batch norm."""

    def __init__(self, image_shape=(1, 4, 4), num_classes=3):
        super().__init__()
        self.layer = nn.utils.spectral_norm(nn.Linear(16, 8))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, num_classes)
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(32, 8, generator=generator)
        self.register_buffer("queue", functional.normalize(keys, dim=1))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.randn(100, generator=generator))

    def forward(self, images):
        keys = self.norm(self.layer(images.flatten(1)))
        if self.training:
            rows = (self.at + torch.arange(len(keys))) % 32
            self.queue[rows] = functional.normalize(keys.detach(), dim=1)
            self.at.copy_((self.at + len(keys)) % 32)
        return self.head(keys) + 0 * self.table.sum()


METHODS = ["sync-easgd", "local-sgd", "diloco", "sync-sgd", "async-easgd", "async-sgd"]


def norms(queue):
    return torch.linalg.vector_norm(torch.as_tensor(queue), dim=1)


def center_of(flat, snapshot):
    weights, buffers = torch.tensor(snapshot.weights), torch.tensor(snapshot.buffers)
    return flat.state_dict_of(weights, buffers, snapshot.non_trainable)


@pytest.mark.parametrize("method", METHODS)
def test_each_replica_keeps_its_queue_and_the_center_has_that_of_rank_0(method):
    ensemble = Ensemble(
        config(method, period=1, epochs=4), num_workers=3, model=Queue, images=tiny_images(36)
    ).join()
    ensemble.run()
    queues = [worker.replica.flat.model.queue for worker in ensemble.workers]
    for queue in queues:
        assert torch.allclose(norms(queue), torch.ones(32), atol=1e-6)
    assert not torch.equal(queues[0], queues[1])
    assert not torch.equal(queues[1], queues[2])
    center = center_of(ensemble.flat, ensemble.center())
    first = ensemble.workers[0].replica.flat.model
    for name in ("queue", "at", "table", "layer.weight_u", "layer.weight_v"):
        if method != "async-easgd":  # whose messages are sent at the begin of the step
            assert torch.equal(center[name], first.state_dict()[name]), name
    assert torch.allclose(norms(center["queue"]), torch.ones(32), atol=1e-6)
    assert torch.equal(center["table"], Queue().table)
    assert not torch.equal(center["norm.running_mean"], torch.zeros(8))


@pytest.mark.parametrize("method", ["sync-easgd", "local-sgd"])
def test_a_newcomer_starts_with_the_buffers_of_the_center(method):
    history = History(config(method, epochs=8), model=Queue, images=tiny_images(24))
    history.train("w0", "w1", rounds=2)
    own = {w: history.workers[w].replica.flat.non_trainable.arrays() for w in ("w0", "w1")}
    history.train("w0", "w1", "w2", rounds=0)
    for worker_id in ("w0", "w1"):
        assert_same(history.workers[worker_id].replica.flat.non_trainable.arrays(), own[worker_id])
    assert_same(history.workers["w2"].replica.flat.non_trainable.arrays(), own["w0"])
    assert not np.array_equal(own["w0"]["queue"], own["w1"]["queue"])


def test_without_rank_0_the_center_has_the_buffers_of_the_next_one():
    history = History(config("sync-easgd", epochs=8), model=Queue, images=tiny_images(24))
    history.train("w0", "w1", rounds=2)
    history.train("w1", rounds=1)
    queue = history.workers["w1"].replica.flat.model.queue
    assert torch.equal(center_of(history.flat, history.snapshot)["queue"], queue)


def test_a_replica_that_follows_the_center_keeps_its_queue():
    ensemble = Ensemble(config("local-sgd", period=1), num_workers=2, model=Queue).join()
    ensemble.run(2)
    replica, center = ensemble.workers[1].replica, ensemble.first
    queue = replica.flat.model.queue.clone()
    replica.become(torch.tensor(center.weights), torch.tensor(center.buffers))
    assert torch.equal(replica.flat.model.queue, queue)


# exchanges by messages


def settle(coordinator, worker_id, sequence, changes, replaces=()):
    arrays = {name: np.array(value) for name, value in changes.items()}
    completion = Completion(Header(), 2, ALL, 0.1, 80, arrays, replaces)
    return coordinator.settle(request(worker_id, sequence, [], generation=1, completion=completion))


def buffers_of(coordinator):
    return {k: int(v) for k, v in coordinator.state()["non_trainable"].items()}


def test_a_center_takes_the_buffers_of_rank_0_alone():
    coordinator = make_coordinator()
    for worker_id in ("w0", "w1"):
        enter(coordinator, worker_id)
    names = ("queue", "at")
    settle(coordinator, "w0", 1, {"queue": 1, "at": 1}, names)
    settle(coordinator, "w1", 1, {"queue": 2, "at": 2}, names)
    assert buffers_of(coordinator) == {"queue": 1, "at": 1}
    settle(coordinator, "w0", 2, {"queue": 3})
    assert buffers_of(coordinator) == {"queue": 3, "at": 1}


def test_the_first_buffers_of_a_new_rank_0_replace_all_of_the_last_one():
    """A buffer that is at its first value is not sent, and must not stay at another worker's."""
    coordinator = make_coordinator(non_trainable={"frozen": np.array(7)})
    for worker_id in ("w0", "w1"):
        enter(coordinator, worker_id)
    settle(coordinator, "w0", 1, {"queue": 1, "at": 1}, ("queue", "at"))
    change(coordinator, 2, "w1")
    settle(coordinator, "w1", 1, {"queue": 2}, ("queue", "at"))
    assert buffers_of(coordinator) == {"queue": 2, "frozen": 7}


def requests_of(ensemble, rounds):
    """Return the completions that each worker sends."""
    sent = {}
    for worker in ensemble.workers:
        session = worker.runner.strategy._session
        make = session.make_request

        def note(*args, make=make, worker_id=worker.worker_id, **kwargs):
            made = make(*args, **kwargs)
            if made.completion is not None:
                sent.setdefault(worker_id, []).append(made.completion)
            return made

        session.make_request = note
    ensemble.run(rounds)
    return sent


def test_buffers_are_sent_by_rank_0_alone_and_only_if_they_have_changed():
    ensemble = Ensemble(
        config("async-easgd", period=1, epochs=20), num_workers=2, model=Queue
    ).join()
    sent = requests_of(ensemble, 3)
    moving = {"queue", "at", "norm.num_batches_tracked", "layer.weight_u", "layer.weight_v"}
    changes = [set(completion.non_trainable) for completion in sent["w0"]]
    assert changes == [set(), moving, moving], "the first message is sent before the first step"
    assert "table" in sent["w0"][0].replaces
    assert [completion.replaces for completion in sent["w0"][1:]] == [()] * 2
    assert all(not c.non_trainable and not c.replaces for c in sent["w1"])
    center = ensemble.center().non_trainable
    assert_same({k: center[k] for k in moving}, sent["w0"][-1].non_trainable)


# states of earlier versions


@pytest.fixture
def all_float_buffers_are_averaged(monkeypatch):
    """The rule of earlier versions, until the function that the fixture returns is called."""

    def statistics(model, dtype, name):
        return dict(flat_module._float_buffers(model, dtype))

    monkeypatch.setattr(flat_module, "_statistics", statistics)
    return monkeypatch.undo


def test_a_replica_of_an_earlier_version_has_its_buffers(all_float_buffers_are_averaged):
    def replica_of(model):
        return Ensemble(config("local-sgd"), num_workers=1, model=model).workers[0].replica

    old = replica_of(Queue)
    assert old.flat.num_buffers == 8 + 16 + 16 + 256 + 100
    old.flat.model.queue.mul_(-1)
    old.flat.model.norm.running_var.fill_(5.0)
    state = copy.deepcopy(old.state_dict())
    all_float_buffers_are_averaged()
    new = replica_of(Queue)
    assert new.flat.num_buffers == 16
    new.load_state_dict(state)
    for name, value in old.flat.model.state_dict().items():
        assert torch.equal(new.flat.model.state_dict()[name], value), name
    again = replica_of(Queue)
    again.load_state_dict(copy.deepcopy(new.state_dict()))
    assert torch.equal(again.flat.model.queue, old.flat.model.queue)


def test_a_replica_of_another_model_is_refused():
    replica = Ensemble(config("local-sgd"), num_workers=1, model=Queue).workers[0].replica
    state = copy.deepcopy(replica.state_dict())
    state["buffers"] = torch.zeros(17)
    with pytest.raises(ShapeError, match="has float buffers of 16 elements, but the state has 17"):
        replica.load_state_dict(state)


@pytest.mark.parametrize("method", ["local-sgd", "async-easgd"])
def test_a_run_of_an_earlier_version_resumes(tmp_path, method, all_float_buffers_are_averaged):
    def fit(epochs, *, resume=False):
        return raydl.Trainer(
            raydl.Classification(Queue),
            "synthetic:96x1x4x4x3",
            method=method,
            training=raydl.TrainingConfig(epochs=epochs, batch_size=16),
            scaling=raydl.ScalingConfig(num_workers=0),
            run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none", resume=resume),
        ).fit()

    fit(2)
    all_float_buffers_are_averaged()
    result = fit(4, resume=True)
    center = load_file(f"{result.path}/center.safetensors")
    assert torch.allclose(norms(center["queue"]), torch.ones(32), atol=1e-5)
    assert torch.equal(center["table"], Queue().table)


def attached_state(threads, rank, *, state=None, num_steps=4):
    model = Queue()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loop():
        elastic = threads.attach(model, optimizer, f"w{rank}")
        if state is not None:
            elastic.load_state_dict(state)
        with elastic:
            for step in range(num_steps):
                generator = torch.Generator().manual_seed(10 * rank + step)
                optimizer.zero_grad()
                model(torch.randn(8, 1, 4, 4, generator=generator)).square().mean().backward()
                elastic.step()
            return elastic.center_state_dict(), elastic.state_dict(), copy_state(model)

    return loop


@pytest.mark.parametrize("method", ["sync-easgd", "local-sgd", "async-easgd"])
def test_attached_models_keep_their_queues_and_the_center_has_that_of_rank_0(method):
    threads = Threads(user_loop_config(MethodConfig(name=method, period=2), 2))
    (center, _, first), (_, _, second) = run_all([attached_state(threads, r) for r in range(2)])
    assert not torch.equal(first["queue"], second["queue"])
    assert torch.allclose(norms(second["queue"]), torch.ones(32), atol=1e-6)
    assert torch.equal(center["table"], Queue().table)
    if method != "async-easgd":  # there it is the one at the begin of the step
        assert torch.equal(center["queue"], first["queue"])
    assert torch.allclose(norms(center["queue"]), torch.ones(32), atol=1e-6)


def test_an_attached_state_of_an_earlier_version_resumes(all_float_buffers_are_averaged):
    def threads():
        return Threads(user_loop_config(MethodConfig(name="sync-easgd", period=2), 2))

    before = run_all([attached_state(t, r) for t in [threads()] for r in range(2)])
    all_float_buffers_are_averaged()
    again = threads()
    after = run_all([attached_state(again, r, state=before[r][1], num_steps=0) for r in range(2)])
    for (_, _, old), (center, _, new) in zip(before, after, strict=True):
        assert torch.equal(new["queue"], old["queue"])
        assert torch.equal(new["norm.running_mean"], old["norm.running_mean"])
        assert center.keys() == new.keys()


def test_attach_refuses_a_name_that_it_cannot_average():
    model = named(nn.Linear(1, 1), "ema")
    with pytest.raises(ShapeError, match="names ema in averaged_buffers of the model"):
        attach_alone(model, torch.optim.SGD(model.parameters(), lr=0.1), method="local-sgd")
