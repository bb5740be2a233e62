"""Lightning modules train together: the stock example, and the effects on the module."""

import re
import runpy
import time

import pytest
import ray
import torch
from repository import ROOT
from user_loops import Leader, Threads, attach_alone, copy_state, equal_states, user_loop_config

import raydl
from raydl.config import MethodConfig
from raydl.errors import ConfigError

BOUND_S = 200
JOB = ROOT / "jobs/lightning_module.py"
QUIET = "ignore::UserWarning:lightning", "ignore:.*LeafSpec:FutureWarning"
pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


@pytest.fixture(scope="module")
def job():
    """Return the global names of the example."""
    return runpy.run_path(str(JOB))


@pytest.fixture
def alone(monkeypatch):
    """Return a callback for a run of one worker, without Ray."""
    from raydl.ray_backend import lightning_callback

    monkeypatch.setattr(lightning_callback, "attach", attach_alone)
    return lightning_callback.LightningCallback(method="sync-easgd", worker_id="w0")


ACCELERATORS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


def fit(
    job, folder, callback, *, epochs=2, module=None, trainer=None, accelerator="cpu", **options
):
    """Train on a small part of the digits for whole rounds; return the trainer and the module."""
    import lightning

    torch.manual_seed(0)
    module = module or job["Perceptron"]()
    for parameter in module.parameters():  # the same start, whenever the module was made
        torch.nn.init.normal_(parameter, std=0.1)
    own = {"callbacks": [callback] if callback else [], **(trainer or {})}
    trainer = lightning.Trainer(
        max_epochs=epochs, limit_train_batches=8, limit_val_batches=2, accelerator=accelerator,
        default_root_dir=str(folder), logger=False, enable_progress_bar=False,
        enable_model_summary=False, **own,
    )  # fmt: skip
    trainer.fit(module, job["loader"]("train", shuffle=False), job["loader"]("test", shuffle=False),
                **options)  # fmt: skip
    return trainer, module


@pytest.mark.processes
@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_the_module_is_validated_saved_and_left_as_the_center(job, tmp_path, alone, accelerator):
    class Watched(job["Perceptron"]):
        seen = []  # noqa: RUF012

        def on_validation_epoch_start(self):
            self.seen.append(equal_states(copy_state(self), alone.elastic.center_state_dict()))

    trainer, module = fit(job, tmp_path, alone, module=Watched(), accelerator=accelerator)
    assert module.seen == [True] * 3  # before the training, and after each epoch
    assert alone.elastic is None, "it has left the others"
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    assert equal_states(saved["state_dict"], copy_state(module))


@pytest.mark.processes
@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_a_resumed_training_continues_with_replica_and_center(job, tmp_path, alone, accelerator):
    on = {"accelerator": accelerator}
    _, whole = fit(job, tmp_path / "whole", alone, epochs=3, **on)
    trainer, _ = fit(job, tmp_path / "part", alone, epochs=1, **on)
    checkpoint = trainer.checkpoint_callback.best_model_path
    _, resumed = fit(job, tmp_path / "rest", alone, epochs=3, ckpt_path=checkpoint, **on)
    assert equal_states(copy_state(whole), copy_state(resumed))


@pytest.mark.processes
def test_accumulation_clipping_and_schedules_give_the_steps_of_the_plain_module(
    job, tmp_path, monkeypatch
):
    from raydl.ray_backend import lightning_callback

    class Scheduled(job["Perceptron"]):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=2)
            return [optimizer], [{"scheduler": schedule, "interval": "epoch"}]

    def attach(model, optimizer, *, worker_id=None, **_):  # no exchange within these few steps
        config = user_loop_config(MethodConfig(name="sync-easgd", period=10**6), 1)
        elastic = Threads(config).attach(model, optimizer, worker_id)
        monkeypatch.setattr(elastic, "center_state_dict", lambda: copy_state(model))
        return elastic

    monkeypatch.setattr(lightning_callback, "attach", attach)
    callbacks = [None, lightning_callback.LightningCallback(worker_id="w0")]
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    ends = [
        copy_state(fit(job, tmp_path / str(n), callback, module=Scheduled(), trainer=options)[1])
        for n, callback in enumerate(callbacks)
    ]
    assert equal_states(*ends)


@pytest.mark.processes
def test_a_checkpoint_of_weights_only_has_those_of_the_center(job, tmp_path, alone):
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(dirpath=tmp_path / "saved", save_weights_only=True)
    _, module = fit(job, tmp_path, alone, trainer={"callbacks": [alone, saving]})
    saved = torch.load(saving.best_model_path, weights_only=True)
    assert equal_states(saved["state_dict"], copy_state(module))


@pytest.fixture
def broken(job):
    """Return a module whose training fails in its fourth step."""

    class Broken(job["Perceptron"]):
        def training_step(self, batch, number):
            if number == 3:
                raise ZeroDivisionError("my own mistake")
            return super().training_step(batch, number)

    return Broken()


@pytest.mark.processes
def test_a_worker_leaves_after_an_error(job, tmp_path, alone, broken):
    with pytest.raises(ZeroDivisionError, match="my own mistake"):
        fit(job, tmp_path, alone, module=broken)
    assert alone.elastic is None


@pytest.mark.processes
@pytest.mark.parametrize("is_alone", [False, True])
def test_a_checkpoint_that_an_error_causes_has_the_center_and_the_replica(
    job, tmp_path, alone, broken, is_alone
):
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(
        dirpath=tmp_path / "saved", save_on_exception=True, save_weights_only=is_alone
    )
    with pytest.raises(ZeroDivisionError, match="my own mistake"):
        fit(job, tmp_path, alone, module=broken, trainer={"callbacks": [alone, saving]})
    (path,) = (tmp_path / "saved").iterdir()
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert not equal_states(saved, copy_state(broken))
    if is_alone:
        return
    (state,) = torch.load(path, weights_only=True)["optimizer_states"]
    assert torch.equal(flat_of(saved), state["center"]["weights"])
    assert torch.equal(flat_of(copy_state(broken)), state["replica"]["weights"])
    _, module = fit(job, tmp_path / "again", alone, ckpt_path=str(path))  # continues with both
    assert not equal_states(saved, copy_state(module))


def flat_of(state):
    """Return all tensors of a state as one."""
    return torch.cat([tensor.flatten() for tensor in state.values()])


@pytest.mark.processes
def test_an_error_before_the_worker_has_joined_is_the_only_one(job, tmp_path, alone):
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    class Broken(job["Perceptron"]):
        def on_fit_start(self):
            raise ZeroDivisionError("my own mistake")

    module, saving = Broken(), OnExceptionCheckpoint(tmp_path)
    with pytest.raises(ZeroDivisionError, match="my own mistake"):
        fit(job, tmp_path, alone, module=module, trainer={"callbacks": [alone, saving]})
    saved = torch.load(saving.ckpt_path, weights_only=True)["state_dict"]
    assert equal_states(saved, copy_state(module))


@pytest.mark.processes
def test_two_optimizers_are_refused_with_one_sentence(job, tmp_path, alone):
    class Two(job["Perceptron"]):
        automatic_optimization = False

        def configure_optimizers(self):
            return [super(Two, self).configure_optimizers() for _ in range(2)]

    with pytest.raises(ConfigError, match="must be one, but configure_optimizers returned 2"):
        fit(job, tmp_path, alone, module=Two())


# joining late


def line_module(seen, *, interval="step", is_manual=False):
    """Return a module that notes (step: epoch, batch, rate) before each optimizer step."""
    import lightning

    class Line(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(4, 4)
            self.automatic_optimization = not is_manual

        def training_step(self, batch, number):
            loss = torch.nn.functional.mse_loss(self.line(batch[0]), batch[0])
            optimizer = self.optimizers()
            progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
            seen[self.global_step] = (
                self.current_epoch, progress.ready, optimizer.param_groups[0]["lr"]
            )  # fmt: skip
            if is_manual:
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                if interval == "step" or self.trainer.is_last_batch:
                    self.lr_schedulers().step()
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 40)
            if is_manual:
                return [optimizer], [schedule]
            return [optimizer], [{"scheduler": schedule, "interval": interval}]

    return Line()


def fit_line(module, callbacks, **length):
    """Train a line on 10 batches per epoch; return the trainer."""
    import lightning

    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks, **length,
    )  # fmt: skip
    samples = torch.utils.data.TensorDataset(torch.randn(40, 4))
    trainer.fit(module, torch.utils.data.DataLoader(samples, batch_size=4))
    return trainer


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({}, {"max_steps": 33}),
        ({"is_manual": True, "interval": "epoch"}, {"max_epochs": 3}),
        pytest.param({"interval": "epoch"}, {"max_epochs": 3}, marks=pytest.mark.slow),
        pytest.param({}, {"max_epochs": 6, "accumulate_grad_batches": 3}, marks=pytest.mark.slow),
        pytest.param({"is_manual": True}, {"max_steps": 33}, marks=pytest.mark.slow),
    ],
)
def test_a_late_trainer_has_step_epoch_rate_and_end_of_the_others(monkeypatch, options, length):
    from raydl.ray_backend import lightning_callback

    expected, seen = {}, {}
    num_steps = fit_line(line_module(expected, **options), [], **length).global_step
    module = line_module(seen, **options)
    leader = Leader(lambda: line_module({}, **options), num_steps=num_steps, joined_at=14)
    monkeypatch.setattr(lightning_callback, "attach", leader.attach)
    manual = {"manual_schedulers": options.get("interval", "step")}
    callback = lightning_callback.LightningCallback(worker_id="w1", **manual)
    trainer = fit_line(module, [callback], **length)
    assert 14 <= min(seen) <= 16
    assert seen == {step: expected[step] for step in range(min(seen), num_steps)}
    assert trainer.global_step == num_steps
    assert trainer.current_epoch == -(
        -num_steps // (4 if "accumulate_grad_batches" in length else 10)
    )
    assert equal_states(copy_state(module), leader.center())


@pytest.mark.processes
@pytest.mark.parametrize("length", [{"max_steps": 10}, {"max_epochs": 1}])
def test_a_trainer_that_comes_after_the_end_takes_no_step(monkeypatch, length):
    from raydl.ray_backend import lightning_callback

    leader = Leader(lambda: line_module({}), num_steps=10, joined_at=100)
    center = leader.center()
    leader._is_ready.set()
    monkeypatch.setattr(lightning_callback, "attach", leader.attach)
    seen = {}
    module = line_module(seen)
    fit_line(module, [lightning_callback.LightningCallback(worker_id="w1")], **length)
    assert seen == {}
    assert equal_states(copy_state(module), center)


@ray.remote(num_cpus=0, max_concurrency=2)
class Fitter:
    """Trains the module of the example, and notes (step: epoch, rate)."""

    def __init__(self, path):
        torch.set_num_threads(1)
        self.job, self.seen = runpy.run_path(path), {}

    def steps(self):
        return dict(self.seen)

    def fit(self, worker_id):
        import lightning

        seen = self.seen

        class Slow(self.job["Perceptron"]):
            def training_step(self, batch, number):
                time.sleep(0.03)
                rate = self.optimizers().param_groups[0]["lr"]
                seen[self.global_step] = self.current_epoch, rate
                return super().training_step(batch, number)

            def configure_optimizers(self):
                optimizer = super().configure_optimizers()
                return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

        elastic = raydl.LightningCallback(
            method="sync-easgd", name="late", num_workers=(1, 2), worker_id=worker_id
        )
        trainer = lightning.Trainer(
            max_epochs=10, limit_train_batches=20, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, callbacks=[elastic],
        )  # fmt: skip
        module = Slow()
        trainer.fit(module, self.job["loader"]("train", shuffle=True))
        return copy_state(module)


@pytest.mark.cluster
@pytest.mark.slow
def test_a_replacement_has_step_epoch_rate_and_end_of_the_others_on_ray(cluster):
    first, late = (Fitter.remote(str(JOB)) for _ in range(2))
    assert ray.get(late.steps.remote(), timeout=BOUND_S) == {}
    calls = [first.fit.remote("w0")]
    deadline = time.monotonic() + BOUND_S
    while len(ray.get(first.steps.remote(), timeout=BOUND_S)) < 30:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    calls.append(late.fit.remote("w1"))
    centers = ray.get(calls, timeout=BOUND_S)
    all_steps, late_steps = ray.get([first.steps.remote(), late.steps.remote()], timeout=BOUND_S)
    assert sorted(all_steps) == list(range(200))
    assert min(late_steps) >= 30
    assert late_steps == {step: all_steps[step] for step in range(min(late_steps), 200)}
    assert equal_states(*centers)


@pytest.mark.cluster
@pytest.mark.slow
def test_the_example_learns(cluster, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(JOB), run_name="__main__")
    (percent,) = re.findall(r"^center test accuracy ([\d.]+)%$", capsys.readouterr().out, re.M)
    assert float(percent) > 95
