"""A user's loop trains the same bits as the worker's loop; the user controls the rest."""

import contextlib
import dataclasses
import functools
import io
import re
import threading

import pytest
import torch
from ensembles import Ensemble, tiny_images
from user_loops import Threads, copy_state, equal_states, run_all, user_loop_config

import raydl
from raydl.config import (
    ExchangeConfig,
    MethodConfig,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.core.rules import GradientRule
from raydl.elastic.rendezvous import RendezvousServer
from raydl.errors import AttachError, ConfigError, RaydlError
from raydl.methods import METHODS
from raydl.methods.easgd import Elastic
from raydl.tasks import Classification
from raydl.worker.user_loop import job_of, terms_of

LR, MOMENTUM = 0.05, 0.9
IMAGES = tiny_images(144)  # a multiple of a round for every period below


def net(image_shape=(1, 4, 4), num_classes=3):
    """Return a small network with batch norm, whose statistics are exchanged too."""
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(16, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Linear(8, num_classes),
    )


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


class Recorded(Classification):
    """Records the batches of each model."""

    def __init__(self):
        super().__init__(net)
        self.batches = {}

    def loss(self, model, batch):
        self.batches.setdefault(id(model), []).append(batch)
        return super().loss(model, batch)


def train_in_run(method, num_rounds, **exchange):
    """Train in the worker's loop; return the ensemble, and the batches of each worker."""
    config = TrainConfig(
        method=method,
        training=TrainingConfig(epochs=1000, batch_size=4),
        optimizer=OptimizerConfig(
            lr=LR, momentum=MOMENTUM, lr_schedule="constant", warmup=0.0, clip_grad_norm=None
        ),
        exchange=ExchangeConfig(**exchange),
    )
    task = Recorded()
    ensemble = Ensemble(config, num_workers=3, images=IMAGES, task=task).join()
    ensemble.run(rounds=num_rounds)
    return ensemble, [task.batches[id(w.replica.flat.model)] for w in ensemble.workers]


def loop_of(threads, rank, batches, *, set_to_none=True, num_steps=None):
    """Return a user's loop over some batches."""

    torch.manual_seed(rank)
    model = net()
    optimizer = sgd(model)

    def loop():
        with threads.attach(model, optimizer, f"w{rank}") as elastic:
            for inputs, labels in batches[:num_steps]:
                optimizer.zero_grad(set_to_none=set_to_none)
                torch.nn.functional.cross_entropy(model(inputs), labels).backward()
                elastic.step()
            state = {k: v.clone() for k, v in model.state_dict().items()}
            return elastic.center_state_dict(), state

    return loop


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    ("name", "period", "exchange"),
    [
        ("sync-easgd", 1, {}),
        ("sync-easgd", 3, {}),
        ("sync-easgd", 4, {"fragments": 2, "delay": 1}),
        ("sync-easgd", 2, {"compression": "int8"}),
        ("local-sgd", 1, {}),
        ("local-sgd", 3, {}),
        ("diloco", 4, {"fragments": 2, "delay": 1}),
        ("original-easgd", 1, {}),
        ("original-easgd", 3, {}),
    ],
)
def test_a_users_loop_trains_the_same_bits_as_a_run(name, period, exchange, set_to_none):
    method = MethodConfig(name=name, period=period)
    ensemble, batches = train_in_run(method, 6, **exchange)
    threads = Threads(user_loop_config(method, 3, **exchange))
    loops = [loop_of(threads, r, batches[r], set_to_none=set_to_none) for r in range(3)]
    for worker, (_, own) in zip(ensemble.workers, run_all(loops), strict=True):
        for key, value in worker.replica.flat.model.state_dict().items():
            assert torch.equal(own[key], value), key


# calls around steps


def alone(method="sync-easgd", period=2, **exchange):
    """Return (model, optimizer, attached) of a run of one worker."""
    torch.manual_seed(3)
    model = net()
    optimizer = sgd(model)
    threads = Threads(user_loop_config(MethodConfig(name=method, period=period), 1, **exchange))
    return model, optimizer, threads.attach(model, optimizer)


def take_steps(model, optimizer, elastic, count, *, first=0):
    for step in range(first, first + count):
        inputs = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        elastic.step()


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_inside_center_the_model_holds_the_center_and_afterwards_its_own_weights(method):
    model, optimizer, elastic = alone(method)
    with elastic:
        take_steps(model, optimizer, elastic, 5)
        before = copy_state(model)
        with elastic.center() as held:
            assert held is model
            assert equal_states(copy_state(model), elastic.center_state_dict())
            assert not equal_states(before, copy_state(model))
        assert equal_states(before, copy_state(model))


def test_an_evaluation_of_the_center_changes_no_later_step():
    results = []
    for evaluates in (False, True):
        model, optimizer, elastic = alone(period=1)
        with elastic:
            for step in range(6):
                take_steps(model, optimizer, elastic, 1, first=step)
                if evaluates:
                    with elastic.center():
                        model(torch.zeros(4, 1, 4, 4))  # in training mode: the statistics change
            results.append(copy_state(model))
    assert equal_states(*results)


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_state_that_is_saved_inside_center_has_the_replica(is_nested):
    model, optimizer, elastic = alone()
    with elastic:
        take_steps(model, optimizer, elastic, 5)
        before = elastic.state_dict()
        with elastic.center():
            with elastic.center() if is_nested else contextlib.nullcontext():
                saved = elastic.state_dict()
            with pytest.raises(AttachError, match="the model holds the center"):
                elastic.step()
    for name in ("weights", "buffers"):
        assert torch.equal(saved["replica"][name], before["replica"][name])
    for part in (saved, saved["replica"]):
        expected = before["untrained"] if part is saved else before["replica"]["untrained"]
        assert equal_states(part["untrained"], expected)


def test_a_step_inside_center_is_refused():
    _, _, elastic = alone()
    with elastic, elastic.center(), pytest.raises(AttachError, match="the model holds the center"):
        elastic.step()


@pytest.mark.parametrize(
    ("method", "exchange"),
    [
        ("sync-easgd", {}),
        ("local-sgd", {"compression": "topk:0.1"}),
        ("local-sgd", {"compression": "topk:0.1", "fragments": 2}),
    ],
)
def test_a_loop_resumed_from_its_state_trains_the_same_bits(method, exchange):
    model, optimizer, elastic = alone(method, **exchange)
    with elastic:
        take_steps(model, optimizer, elastic, 4)
        state = roundtrip(elastic.state_dict())
        take_steps(model, optimizer, elastic, 5, first=4)
        whole, center = copy_state(model), elastic.center_state_dict()
    model, optimizer, elastic = alone(method, **exchange)
    elastic.load_state_dict(state)
    with elastic:
        assert elastic.local_step == 4
        take_steps(model, optimizer, elastic, 5, first=4)
        assert equal_states(whole, copy_state(model))
        assert equal_states(center, elastic.center_state_dict())


def roundtrip(state):
    """Write a state and return it as read with ``weights_only``."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def test_an_old_state_without_untrained_tensors_and_error_feedback_can_be_loaded():
    model, optimizer, elastic = alone()
    with elastic:
        take_steps(model, optimizer, elastic, 4)
        state = roundtrip(elastic.state_dict())
    for part in (state, state["center"], state["replica"]):
        del part["untrained"]
    del state["feedback"]
    model, optimizer, elastic = alone()
    elastic.load_state_dict(state)
    with elastic:
        take_steps(model, optimizer, elastic, 2, first=4)
        assert elastic.local_step == 6


def test_sparse_gradients_are_checked_too():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = MethodConfig(name="sync-easgd", period=10)
    with Threads(user_loop_config(method, 1)).attach(model, optimizer) as elastic:
        before = copy_state(model)
        for factor in (torch.inf, 1.0):
            optimizer.zero_grad()
            (factor * model(torch.tensor([1, 1, 3])).sum()).backward()
            elastic.step()
            assert equal_states(copy_state(model), before) == (factor != 1.0)
        assert elastic.local_step == 1


class Replaced(torch.nn.Linear):
    """Replaces its buffer by another tensor in each pass, in evaluations, too."""

    def __init__(self):
        super().__init__(2, 1)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, inputs):
        self.mean = 0.5 * self.mean + inputs.detach().mean(0)
        return super().forward(inputs)


def test_a_buffer_replaced_in_an_evaluation_is_restored():
    model = Replaced()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Threads(user_loop_config(MethodConfig(name="sync-easgd"), 1)).attach(
        model, optimizer
    ) as elastic:
        before = copy_state(model)
        for _ in range(2):
            with elastic.center():
                model(torch.ones(4, 2))
            assert equal_states(before, copy_state(model))


def test_a_state_must_be_loaded_before_the_worker_joins():
    model, optimizer, elastic = alone()
    with elastic:
        first = elastic.state_dict()
        take_steps(model, optimizer, elastic, 1)
        second = elastic.state_dict()
        for state in (first, {**second, "replica": first["replica"]}, {**second, "local_step": 2}):
            with pytest.raises(AttachError, match="load_state_dict must be called before"):
                elastic.load_state_dict(state)


@pytest.mark.parametrize("num_steps", [0, 3])
def test_the_current_state_may_be_loaded_at_any_time(num_steps):
    """``accelerator.prepare`` loads the current state."""
    model, optimizer, elastic = alone()
    with elastic:
        take_steps(model, optimizer, elastic, num_steps)
        before = copy_state(model)
        elastic.load_state_dict(elastic.state_dict())
        assert equal_states(copy_state(model), before)
        take_steps(model, optimizer, elastic, 1)
        assert elastic.local_step == num_steps + 1


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_a_worker_that_joined_late_may_load_its_current_state(method):
    threads = Threads(user_loop_config(MethodConfig(name=method, period=2), (1, 2)))
    is_first_trained, is_second_done = threading.Event(), threading.Event()

    def first():
        model = net()
        optimizer = sgd(model)
        with threads.attach(model, optimizer, "w0") as elastic:
            while not is_second_done.is_set():
                take_steps(model, optimizer, elastic, 2)
                is_first_trained.set()

    def second():
        assert is_first_trained.wait(60)
        model = net()
        try:
            with threads.attach(model, sgd(model), "w1") as elastic:
                assert elastic.local_step > 0
                elastic.load_state_dict(elastic.state_dict())
        finally:
            is_second_done.set()

    run_all([first, second])


def test_a_detached_worker_takes_no_step():
    model, optimizer, elastic = alone()
    with elastic:
        take_steps(model, optimizer, elastic, 3)
    assert elastic.center_state_dict().keys() == model.state_dict().keys()
    with pytest.raises(AttachError, match="is detached; attach again"):
        elastic.step()


def test_an_attached_model_is_attached_again_only_after_a_detach():
    model, optimizer, elastic = alone()
    threads = Threads(user_loop_config(MethodConfig(name="sync-easgd"), 1))
    with elastic, pytest.raises(ConfigError, match="already attached to 'run', and would wait for"):
        threads.attach(model, optimizer)
    again = threads.attach(model, optimizer)
    del again  # the loop ended without a detach
    with threads.attach(model, optimizer) as elastic:
        take_steps(model, optimizer, elastic, 3)


def test_a_model_that_was_converted_raises():
    model, _, elastic = alone()
    with elastic:
        model.double()
        with pytest.raises(AttachError, match=r"move or convert the model before raydl\.attach"):
            elastic.step()


@pytest.mark.parametrize("has_closure", [False, True])
def test_a_layer_that_is_unfrozen_later_is_reported_before_it_is_trained(has_closure):
    """Exchanges contain only the parameters that were trainable when the model was attached."""
    model = net()
    model[1].requires_grad_(False)
    optimizer = sgd(model)  # includes the frozen layer
    threads = Threads(user_loop_config(MethodConfig(name="sync-easgd", period=2), 1))
    with threads.attach(model, optimizer) as elastic:
        take_steps(model, optimizer, elastic, 3)
        model[1].requires_grad_(True)
        before = copy_state(model)

        def closure():
            optimizer.zero_grad()
            loss = model[1](torch.ones(2, 16)).square().mean()
            loss.backward()
            return loss

        if not has_closure:
            closure()
        with pytest.raises(AttachError, match=r"1\.weight has a gradient but was not trainable at"):
            elastic.step(closure if has_closure else None)
        assert equal_states(copy_state(model), before)
        assert elastic.local_step == 3


def test_a_parameter_without_a_gradient_does_not_change():
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    method = MethodConfig(name="sync-easgd", period=10)
    with Threads(user_loop_config(method, 1)).attach(model, optimizer) as elastic:
        before = model[1].weight.clone()
        model[0](torch.ones(1, 2)).sum().backward()
        elastic.step()
        assert torch.equal(model[1].weight, before)
        assert model[0].weight.grad is not None  # the gradient stays until the loop zeroes it


# in place of the optimizer


def gradient(model, step, *, scale=lambda loss: loss):
    inputs = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(step))
    loss = model(inputs).square().mean()
    scale(loss).backward()
    return loss


def trained(loop, **settings):
    """Return the model after a loop with the plain optimizer, and after one with the handle."""
    models = []
    for is_attached in (False, True):
        model, optimizer, elastic = alone("sync-easgd", 20)  # no exchange within these few steps
        with elastic:
            loop(model, elastic if is_attached else optimizer, **settings)
        models.append(copy_state(model))
    return models


def with_a_scheduler(model, optimizer):
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=5)
    for step in range(8):
        optimizer.zero_grad()
        gradient(model, step)
        optimizer.step()
        schedule.step()


def with_accumulation_and_clipping(model, optimizer):
    for step in range(8):
        gradient(model, step, scale=lambda loss: 100.0 * loss)
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def with_closures(model, optimizer):
    for step in range(5):

        def closure(step=step):
            optimizer.zero_grad()
            return gradient(model, step)

        with torch.no_grad():
            assert optimizer.step(closure) > 0


def with_hooks(model, optimizer):
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for step in range(3):
        gradient(model, step)
        optimizer.step()
    assert calls == ["before", "after"] * 3


@pytest.mark.filterwarnings("error")  # a scheduler warns if no step preceded it
@pytest.mark.parametrize(
    "loop", [with_a_scheduler, with_accumulation_and_clipping, with_closures, with_hooks]
)
def test_an_unchanged_loop_takes_the_steps_of_its_optimizer(loop):
    plain, attached = trained(loop)
    assert equal_states(plain, attached)


def test_a_scheduler_and_a_state_of_the_plain_optimizer_share_its_groups():
    model, optimizer, elastic = alone()
    torch.optim.lr_scheduler.StepLR(elastic, 1, gamma=0.5)
    assert optimizer.param_groups[0]["initial_lr"] == LR
    state = sgd(net()).state_dict()
    state["param_groups"][0]["lr"] = 0.125
    with elastic:
        gradient(model, 0)
        elastic.step()
        elastic.load_state_dict(state)
        assert elastic.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.125
        assert elastic.state is optimizer.state
        assert elastic.defaults is optimizer.defaults


def test_a_step_that_a_gradient_scaler_skips_does_not_count_for_the_exchange():
    """The others wait for the next step, and no non-finite value reaches the center."""
    model, _, elastic = alone(period=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1000)
    with elastic:
        for step in range(6):
            elastic.zero_grad()
            factor = float("inf") if step == 2 else 1.0
            gradient(model, step, scale=lambda loss, by=factor: scaler.scale(by * loss))
            scaler.unscale_(elastic)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(elastic)
            scaler.update()
        assert elastic.local_step == 5
        assert scaler.get_scale() == 1.0
        weights = [v for k, v in elastic.center_state_dict().items() if "weight" in k]
        assert all(torch.isfinite(value).all() for value in weights)


def test_a_group_cannot_be_added_later():
    _, _, elastic = alone()
    with pytest.raises(AttachError, match=r"cannot be added after raydl\.attach; add it to the"):
        elastic.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def test_an_attached_optimizer_is_not_attached_again():
    model, _, elastic = alone()
    with elastic, pytest.raises(ConfigError, match="is attached already, and would exchange twice"):
        Threads(user_loop_config(MethodConfig(name="sync-easgd"), 1)).attach(model, elastic)


# checks before anything starts


class Descends(GradientRule):
    """c <- c - 0.1 * g, without the user's optimizer."""

    def merge_(self, center, mail, state, now):
        center.sub_(mail.mean("gradient"), alpha=0.1)


def optimizer_of_no_model():
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"method": "sync-easdg"}, "method.name has no 'sync-easdg'; did you mean sync-easgd"),
        ({"method": "sync-sgd"}, "choose local-sgd with method.period 1"),
        ({"method": "qsr"}, "method.name cannot be qsr with raydl.attach: its period follows the"),
        ({"method": "scaffold"}, "method.name cannot be scaffold with raydl.attach: it changes"),
        ({"method": "des-loc"}, "method.name cannot be des-loc with raydl.attach: it shares the"),
        ({"method": "test_user_loop:Descends"}, "choose local-sgd with method.period 1"),
        ({"num_workers": 0}, "num_workers must be 1 or more, got 0"),
        (
            {"method": "sync-easgd", "group_size": 2},
            "method.group_size must be 1 with raydl.attach, got 2",
        ),
        ({"center_shards": 2}, "exchange.center_shards must be 1 with raydl.attach, got 2"),
        (
            {"model": torch.nn.Linear(1, 1), "fragments": 3},
            "exchange.fragments must be at most the 2 parameters of model Linear, got 3",
        ),
        ({"model": torch.nn.ReLU()}, "model ReLU: has no parameter that requires a gradient"),
        ({"model": "lenet"}, "model must be a torch.nn.Module, got a str"),
        (
            {"model": type("DistributedDataParallel", (torch.nn.Linear,), {})(1, 1)},
            "model must not be wrapped by DistributedDataParallel, which sums all gradients",
        ),
        ({"optimizer": "sgd"}, "optimizer must be a torch.optim.Optimizer, got a str"),
        (
            {"make_optimizer": optimizer_of_no_model},
            "lacks 6 of the model's 6 parameters, for example 1.weight",
        ),
        ({"more": optimizer_of_no_model}, "has 2 parameters that are not the model's"),
        ({"kind": torch.optim.LBFGS}, "cannot be LBFGS"),
    ],
)
def test_an_error_is_reported_in_one_sentence_before_anything_starts(change, sentence):
    model = change.get("model", net())
    optimizer = change.get("optimizer")
    if "make_optimizer" in change:
        optimizer = change["make_optimizer"]()
    elif optimizer is None:
        parameters = [] if isinstance(model, str) else list(model.parameters())
        kind = change.get("kind", torch.optim.SGD)
        optimizer = kind(parameters or list(net().parameters()), lr=0.1)
    if "more" in change:
        optimizer.add_param_group({"params": change["more"]().param_groups[0]["params"]})
    method = MethodConfig(
        name=change.get("method", "async-easgd"), group_size=change.get("group_size", 1)
    )
    exchange = {key: change.get(key, 1) for key in ("center_shards", "fragments")}
    config = user_loop_config(method, change.get("num_workers", 2), **exchange)
    before = copy_state(model) if isinstance(model, torch.nn.Module) else {}
    with pytest.raises(RaydlError, match=re.escape(sentence)):
        Threads(config).attach(model, optimizer)
    assert not before or equal_states(before, copy_state(model))


REFUSED = {"sync-sgd", "sync-msgd", "demo", "qsr", "post-local-sgd", "scaffold", "des-loc"}


@pytest.mark.parametrize("name", METHODS)
def test_each_method_is_attached_or_refused_by_its_name(name):
    model = net()
    attach = functools.partial(
        job_of, user_loop_config(MethodConfig(name=name), 2), model, sgd(model), None
    )
    if name not in REFUSED:
        assert attach().method.name == name
        return
    with pytest.raises(ConfigError, match=f"^method.name cannot be {name}[ :]"):
        attach()


def test_attach_outside_a_ray_actor_says_that_it_needs_one():
    model = net()
    with pytest.raises(ConfigError, match="must be called inside a Ray actor"):
        raydl.attach(model, sgd(model), name="run", num_workers=2)


def test_a_worker_whose_rule_has_other_values_is_refused():
    job = functools.partial(job_of, user_loop_config(MethodConfig(name="x:Elastic"), 1))
    first, other = net(), net()
    terms = terms_of(job(first, sgd(first), Elastic(0.9)), first)
    assert terms == terms_of(job(other, sgd(other), Elastic(0.9)), other)
    server = RendezvousServer("run", job(first, sgd(first), Elastic(0.9)), terms)
    with pytest.raises(ConfigError, match=r"method must be .*: it is Elastic\(beta=0.9.*beta=0.5"):
        server.register(None, terms_of(job(other, sgd(other), Elastic(0.5)), other))


def test_a_worker_that_would_sum_on_another_kind_of_device_is_refused():
    config, model = user_loop_config(MethodConfig(name="sync-easgd"), 2), net()
    on_gpu = dataclasses.replace(config, scaling=ScalingConfig(num_workers=2, use_gpu=True))
    job, other = (job_of(c, model, sgd(model), None) for c in (config, on_gpu))
    server = RendezvousServer("run", job, terms_of(job, model))
    with pytest.raises(ConfigError, match=r"device of the exchange must be .* it is cpu, got cuda"):
        server.register(None, terms_of(other, model))


def test_the_error_for_a_worker_with_different_settings_names_them():
    threads = Threads(user_loop_config(MethodConfig(name="sync-easgd", period=2), 1))
    model = net()
    with threads.attach(model, sgd(model)):
        threads.config = user_loop_config(MethodConfig(name="sync-easgd", period=3), 1)
        other = net()
        with pytest.raises(ConfigError, match=r"method.period must be .* 'run': it is 2, got 3"):
            threads.attach(other, sgd(other)).rank  # noqa: B018
