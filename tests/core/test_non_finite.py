"""No NaN and no infinite number reaches the center, by any transport."""

import math
import re

import numpy as np
import pytest
import torch
from ensembles import Ensemble, linear
from histories import History, config
from torch import nn
from user_loops import Threads, run_all, user_loop_config

import raydl
from raydl.config import MethodConfig
from raydl.errors import ShapeError, StepError
from raydl.tasks import Classification

METHODS = ["sync-easgd", "local-sgd", "sync-sgd", "async-easgd", "async-sgd", "hogwild-easgd"]
BAD = [math.nan, math.inf, -math.inf, 1e30]


class BadGradient(Classification):
    """A task in which the gradient of one worker, but not its loss, is non-finite at one step."""

    def __init__(self, value, *, at):
        super().__init__(linear)
        self.value, self.at = value, at
        self.steps = {}

    def loss(self, model, batch):
        step = self.steps[id(model)] = self.steps.get(id(model), -1) + 1
        is_first = id(model) == next(iter(self.steps))
        loss = super().loss(model, batch)
        if is_first and step == self.at:
            value = self.value
            model[1].bias.register_hook(lambda gradient: torch.full_like(gradient, value))
        return loss


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    ("method", "is_mapped"),
    [*((name, False) for name in METHODS), ("async-easgd", True), ("hogwild-easgd", True)],
)
def test_non_finite_weights_are_refused_with_worker_and_step(method, value, is_mapped):
    case = config(method, period=2, optimizer={"lr": 0.1, "clip_grad_norm": None})
    task = BadGradient(value, at=3)
    ensemble = Ensemble(case, num_workers=1, task=task, has_neighbours=is_mapped).join()
    with pytest.raises(StepError) as error:
        ensemble.run()
    assert re.search(r"local step [345] of worker w0", str(error.value))
    assert error.value.args[:2] == ("w0", error.value.local_step)
    center = ensemble.center() if not ensemble.job.method.is_sync else ensemble.workers[0].center()
    assert np.isfinite(center.weights).all()
    assert np.abs(center.weights).max() < 100


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_non_finite_statistics_are_refused(method):
    def normed(image_shape, num_classes):
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, num_classes))

    ensemble = Ensemble(config(method), num_workers=1, model=normed).join()
    ensemble.run(1)
    ensemble.workers[0].replica.flat.model[1].running_var.fill_(math.inf)
    with pytest.raises(StepError, match="values in its float buffers are NaN, infinite"):
        ensemble.run()
    center = ensemble.center() if method == "async-easgd" else ensemble.workers[0].center()
    assert np.isfinite(center.buffers).all()


def test_a_refused_message_leaves_the_center_of_the_other_workers():
    case = config("sync-easgd", period=2, optimizer={"lr": 0.1, "clip_grad_norm": None})
    history = History(case, task=BadGradient(math.nan, at=3))
    with pytest.raises(StepError):
        history.train("w0", "w1")
    for worker in history.workers.values():
        assert np.isfinite(worker.center().weights).all()


def not_a_number(image_shape, num_classes):
    model = linear((1, 8, 8), num_classes)
    model[1].bias.data[0] = math.nan
    return model


def test_a_model_that_begins_with_nan_is_refused_before_any_worker_starts(tmp_path):
    run = raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none")
    trainer = raydl.Trainer(
        Classification(not_a_number), scaling=raydl.ScalingConfig(num_workers=0), run=run
    )
    with pytest.raises(ShapeError, match="must begin with finite parameters"):
        trainer.fit()


# a user's training loop


def attached(threads, rank=0, *, model=None, **settings_of_sgd):
    model = model or linear((1, 4, 4), 3)
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 5e-5, **settings_of_sgd})
    return model, optimizer, threads.attach(model, optimizer, f"w{rank}")


def backward(model, step, *, scale=1.0):
    inputs = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(step))
    (1000 * model(inputs).square().mean() * scale).backward()


def alone(method="sync-easgd", period=2):
    return Threads(user_loop_config(MethodConfig(name=method, period=period), 1))


@pytest.mark.parametrize("method", ["sync-easgd", "local-sgd", "async-easgd", "async-sgd"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_step_with_a_non_finite_gradient_changes_nothing(method, value):
    model, optimizer, elastic = attached(alone(method), momentum=0.9)
    with elastic:
        for step in range(9):
            optimizer.zero_grad()
            backward(model, step)
            if step in (3, 4):
                before = [p.clone() for p in model.parameters()]
                model[1].bias.grad[0] = value
                elastic.step()
                assert all(map(torch.equal, before, model.parameters()))
            else:
                elastic.step()
        assert elastic.local_step == 7
        assert all(torch.isfinite(v).all() for v in elastic.center_state_dict().values())


def test_large_finite_gradients_are_accepted():
    model, _, elastic = attached(alone(), lr=1e-30)
    with elastic:
        backward(model, 0)
        model[1].bias.grad[0] = 1e25
        elastic.step()
        assert elastic.local_step == 1


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaled_loss_gives_the_same_weights_as_an_unscaled_one(unscales):
    """The first steps with the scaler overflow and are repeated with a smaller scale."""
    scaled, plain = [], []
    for scaler, ends in ((torch.amp.GradScaler("cpu", init_scale=2.0**127), scaled), (None, plain)):
        torch.manual_seed(0)
        model, optimizer, elastic = attached(alone())
        step = 0
        with elastic:
            while elastic.local_step < 6:
                optimizer.zero_grad()
                if scaler is None:
                    backward(model, elastic.local_step)
                    elastic.step()
                    continue
                backward(model, elastic.local_step, scale=scaler.scale(torch.ones(())))
                if unscales:
                    scaler.unscale_(elastic)
                    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                scaler.step(elastic)
                scaler.update()
                step += 1
            ends += [p.clone() for p in model.parameters()]
            ends.append(torch.tensor(step))
    assert scaled[-1] > 6, "no step was skipped"
    for one, other in zip(scaled[:-1], plain[:-1], strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def test_the_other_workers_wait_for_a_worker_that_skips_steps():
    threads = Threads(user_loop_config(MethodConfig(name="sync-easgd", period=2), 2))

    def loop(rank):
        model, optimizer, elastic = attached(threads, rank)

        def run():
            with elastic:
                step = 0
                while elastic.local_step < 8:
                    optimizer.zero_grad()
                    backward(model, step)
                    if rank == 1 and step < 5:
                        model[1].bias.grad.fill_(math.inf)
                    elastic.step()
                    step += 1
                return elastic.center_state_dict(), elastic.generation

        return run

    (one, first), (other, second) = run_all([loop(0), loop(1)])
    assert first == second == 1
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_50_non_finite_gradients_in_a_row_raise_one_sentence():
    model, _, elastic = attached(alone())
    with elastic:
        backward(model, 0)
        model[1].bias.grad.fill_(math.nan)
        for _ in range(49):
            elastic.step()
        with pytest.raises(StepError) as error:
            elastic.step()
    assert str(error.value) == (
        "local step 0 of worker w0: the gradients of 50 steps in a row were not finite, so all "
        "were skipped; lower the learning rate, or check the data of these steps"
    )


@pytest.mark.parametrize("method", ["local-sgd", "async-easgd"])
def test_non_finite_weights_of_a_users_loop_do_not_reach_the_center(method):
    model, optimizer, elastic = attached(alone(method))
    with elastic:
        for step in range(4):
            backward(model, step)
            elastic.step()
        kept = elastic.center_state_dict()
        with torch.no_grad():
            model[1].bias[0] = math.nan
        with pytest.raises(StepError, match=r"local step \d+ of worker w0: values in its"):
            steps_without_gradient(optimizer, elastic)
        now = elastic.center_state_dict()
        assert all(torch.equal(kept[name], now[name]) for name in kept)


def steps_without_gradient(optimizer, elastic):
    for _ in range(4):
        optimizer.zero_grad()
        elastic.step()


def test_a_model_that_begins_with_nan_is_not_attached():
    model = linear((1, 4, 4), 3)
    model[1].bias.data[0] = math.nan
    with pytest.raises(ShapeError, match="must begin with finite parameters"):
        attached(alone(), model=model)
