"""Transformers trainers train together: the stock example, and the effects on its trainer."""

import json
import os
import runpy
import signal
import time

import pytest
import ray
import torch
from user_loops import Leader, attach_alone, copy_state, equal_states

import raydl
from raydl.config import ElasticConfig
from raydl.errors import ConfigError

BOUND_S = 200
STEPS = 16
QUIET = "ignore::UserWarning:torch.utils.data", "ignore::FutureWarning:transformers"
pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


@pytest.fixture(scope="module")
def job(root_of_module):
    """Return the global names of the example."""
    return runpy.run_path(str(root_of_module / "jobs/transformers_lora.py"))


@pytest.fixture(scope="module")
def root_of_module():
    from repository import ROOT

    return ROOT


@pytest.fixture
def alone(monkeypatch):
    """Make trainers attach to a run of one worker, without Ray."""
    from raydl.ray_backend import transformers_trainer

    monkeypatch.setattr(transformers_trainer, "attach", attach_alone)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def trainer_of(job, folder, *, device="cpu", **arguments):
    """Return a trainer of the example's adapter, and its model."""
    import peft
    import transformers

    torch.manual_seed(0)
    base = job["BertForSequenceClassification"](job["SIZE"])
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", r=8))
    settings = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, learning_rate=5e-3, report_to="none", disable_tqdm=True,
        use_cpu=device == "cpu", gradient_accumulation_steps=2, **arguments,
    )  # fmt: skip
    data = job["samples"](200, 0)
    return transformers.Trainer(model, settings, train_dataset=data, eval_dataset=data[:40]), model


@pytest.mark.processes
@pytest.mark.parametrize("device", DEVICES)
def test_the_trainer_evaluates_saves_and_ends_with_the_center(
    job, tmp_path, alone, monkeypatch, device
):
    import peft
    from safetensors.torch import load_file

    trainer, model = trainer_of(
        job,
        tmp_path,
        device=device,
        eval_strategy="steps",
        eval_steps=8,
        save_steps=8,
        logging_steps=4,
    )
    callback = raydl.attach_trainer(trainer, method="sync-easgd", worker_id="w0")
    seen, evaluation_loop = [], trainer.evaluation_loop

    def look(*arguments, **named):
        seen.append(equal_states(copy_state(model), callback.elastic.center_state_dict()))
        return evaluation_loop(*arguments, **named)

    monkeypatch.setattr(trainer, "evaluation_loop", look)
    trainer.train()
    assert seen == [True, True]
    assert callback.elastic is None, "it has left the others"
    assert trainer.state.global_step == STEPS
    # The last checkpoint was written after the last step: its adapter is the center, too.
    saved = load_file(tmp_path / f"checkpoint-{STEPS}/adapter_model.safetensors")
    own = peft.get_peft_model_state_dict(model)
    assert equal_states(saved, {name: own[name] for name in saved})
    folder = str(tmp_path / f"checkpoint-{STEPS}")
    base = job["BertForSequenceClassification"](job["SIZE"])
    loaded = peft.PeftModel.from_pretrained(base, folder)
    again = peft.get_peft_model_state_dict(loaded)
    assert equal_states(again, {name: own[name] for name in again})


@pytest.mark.processes
@pytest.mark.parametrize("device", DEVICES)
def test_a_resumed_training_continues_with_replica_and_center(job, tmp_path, alone, device):
    ends = []
    for checkpoint in (None, str(tmp_path / f"checkpoint-{STEPS // 2}")):
        trainer, model = trainer_of(job, tmp_path, device=device, save_steps=STEPS // 2)
        raydl.attach_trainer(trainer, method="sync-easgd", worker_id="w0")
        trainer.train(resume_from_checkpoint=checkpoint)
        ends.append(copy_state(model))
    assert equal_states(*ends)


@pytest.mark.processes
def test_only_the_adapter_is_exchanged(job, tmp_path, alone):
    trainer, model = trainer_of(job, tmp_path)
    callback = raydl.attach_trainer(trainer, method="sync-easgd", worker_id="w0")
    trainer.create_optimizer()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    sent = callback.elastic.state_dict()["center"]["weights"].numel()
    assert sent == trained < 0.01 * sum(p.numel() for p in model.parameters())
    callback.elastic.detach()


@pytest.mark.processes
def test_each_worker_has_its_own_sample_order_unless_a_data_seed_is_given(job, tmp_path, alone):
    seeds = []
    for worker_id in ("w0", "w1", "w0"):
        trainer, _ = trainer_of(job, tmp_path)
        raydl.attach_trainer(trainer, method="sync-easgd", worker_id=worker_id)
        seeds.append((trainer.args.data_seed, trainer.accelerator.dataloader_config.data_seed))
    assert seeds[0] == seeds[2] != seeds[1]
    trainer, _ = trainer_of(job, tmp_path, data_seed=5)
    raydl.attach_trainer(trainer, method="sync-easgd", worker_id="w0")
    assert trainer.args.data_seed == 5


@pytest.mark.processes
def test_a_trainer_trains_again_and_an_error_lets_its_worker_leave(job, tmp_path, alone):
    trainer, model = trainer_of(job, tmp_path, save_strategy="no")
    callback = raydl.attach_trainer(trainer, method="sync-easgd", worker_id="w0")
    trainer.train()
    first = copy_state(model)
    trainer.train()
    assert not equal_states(first, copy_state(model))
    training_step = trainer.training_step

    def broken(*arguments, **named):
        if trainer.state.global_step == 3:
            raise ZeroDivisionError("my own mistake")
        return training_step(*arguments, **named)

    trainer.training_step = broken
    with pytest.raises(ZeroDivisionError, match="my own mistake"):
        trainer.train()
    assert callback.elastic is None


@pytest.mark.processes
def test_an_error_before_the_training_leaves_the_optimizer_that_the_trainer_was_given(
    job, tmp_path, alone
):
    trainer, model = trainer_of(job, tmp_path, save_strategy="no")
    trainer.optimizer = given = torch.optim.SGD(model.parameters(), lr=0.1)
    raydl.attach_trainer(trainer, method="sync-easgd", worker_id="w0")
    with pytest.raises(ValueError, match="checkpoint"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "absent"))
    assert trainer.optimizer is given
    trainer.train()
    assert trainer.optimizer is given


@pytest.mark.processes
def test_other_callbacks_see_the_center_at_the_end(job, tmp_path, alone):
    import transformers

    class Looking(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.elastic = callback.elastic

        def on_train_end(self, *_, model, **__):
            self.seen = copy_state(model)

    looking = Looking()
    trainer, _ = trainer_of(job, tmp_path, save_strategy="no")
    trainer.add_callback(looking)
    callback = raydl.attach_trainer(trainer, method="sync-easgd", worker_id="w0")
    trainer.train()
    assert equal_states(looking.seen, looking.elastic.center_state_dict())


@pytest.mark.processes
def test_a_checkpoint_has_the_frozen_model_once(job, tmp_path, alone):
    trainer, model = trainer_of(job, tmp_path, save_steps=8)
    raydl.attach_trainer(trainer, method="sync-easgd", worker_id="w0")
    trainer.train()
    frozen = sum(p.numel() * 4 for p in model.parameters() if not p.requires_grad)
    assert (tmp_path / "checkpoint-8/optimizer.pt").stat().st_size < 0.2 * frozen


# joining late


class Line(torch.nn.Module):
    """A line that returns its loss."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 4)

    def forward(self, x=None, labels=None):
        return {"loss": torch.nn.functional.mse_loss(self.line(x), labels)}


def line_trainer(folder, **arguments):
    """Return a trainer of a line with 10 batches in an epoch, and what it sees at each step."""
    import transformers

    seen = {}

    class Looking(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kw):
            seen[state.global_step] = state.epoch, kw["lr_scheduler"].get_last_lr()

    settings = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, learning_rate=1e-2, warmup_steps=4,
        report_to="none", disable_tqdm=True, use_cpu=True, **arguments,
    )  # fmt: skip
    data = [{"x": torch.ones(4) * n, "labels": torch.ones(4)} for n in range(40)]
    trainer = transformers.Trainer(
        Line(), settings, train_dataset=data, eval_dataset=data[:4], callbacks=[Looking()]
    )
    return trainer, seen


LENGTHS = [
    {"max_steps": 33},
    pytest.param({"num_train_epochs": 3}, marks=pytest.mark.slow),
    {"num_train_epochs": 6, "gradient_accumulation_steps": 3, "lr_scheduler_type": "cosine"},
]


@pytest.mark.processes
@pytest.mark.parametrize("length", LENGTHS)
def test_a_late_trainer_has_step_epoch_rate_and_end_of_the_others(tmp_path, monkeypatch, length):
    from raydl.ray_backend import transformers_trainer

    plain, expected = line_trainer(tmp_path / "plain", save_strategy="no", **length)
    plain.train()
    num_steps = plain.state.global_step
    leader = Leader(Line, num_steps=num_steps, joined_at=14)
    monkeypatch.setattr(transformers_trainer, "attach", leader.attach)
    intervals = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 8}
    trainer, seen = line_trainer(tmp_path / "late", **intervals, logging_steps=5, **length)
    raydl.attach_trainer(trainer, method="sync-easgd", worker_id="w1")
    trainer.train()
    assert 15 <= min(seen) <= 17
    assert seen == {step: expected[step] for step in range(min(seen), num_steps + 1)}
    assert trainer.state.global_step == num_steps
    assert equal_states(copy_state(trainer.model), leader.center())
    logs = trainer.state.log_history
    assert {log["step"] % 5 for log in logs if "loss" in log} == {0}
    per_epoch = 10 if "gradient_accumulation_steps" not in length else 4
    ends = [step for step in range(per_epoch, num_steps, per_epoch) if step >= min(seen)]
    assert [log["step"] for log in logs if "eval_loss" in log] == [*ends, num_steps]
    saved = {int(folder.name.split("-")[1]) for folder in (tmp_path / "late").iterdir()}
    assert saved == {*(step for step in range(8, num_steps, 8) if step >= min(seen)), num_steps}


@pytest.mark.processes
def test_a_trainer_that_comes_after_the_end_takes_no_step(tmp_path, monkeypatch):
    from raydl.ray_backend import transformers_trainer

    leader = Leader(Line, num_steps=10, joined_at=100)
    center = leader.center()
    leader._is_ready.set()
    monkeypatch.setattr(transformers_trainer, "attach", leader.attach)
    trainer, seen = line_trainer(tmp_path, max_steps=10, save_strategy="no")
    raydl.attach_trainer(trainer, method="sync-easgd", worker_id="w1")
    trainer.train()
    assert list(seen) == [10]
    assert equal_states(copy_state(trainer.model), center)


@pytest.mark.processes
def test_a_trainer_that_stops_early_does_not_end_the_others(tmp_path, monkeypatch):
    import transformers

    from raydl.ray_backend import transformers_trainer

    class Stopping(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kw):
            control.should_training_stop = state.global_step >= 20

    leader = Leader(Line, num_steps=30, joined_at=14)
    monkeypatch.setattr(transformers_trainer, "attach", leader.attach)
    trainer, seen = line_trainer(tmp_path, max_steps=30, save_strategy="no")
    trainer.add_callback(Stopping())
    raydl.attach_trainer(trainer, method="sync-easgd", worker_id="w1")
    trainer.train()
    assert max(seen) == 20
    leader.center()
    assert leader.num_taken == 30


@pytest.mark.processes
@pytest.mark.parametrize("what", ["is_deepspeed_enabled", "is_fsdp_enabled", "parallel"])
def test_a_trainer_that_shards_or_is_parallel_is_refused(job, tmp_path, monkeypatch, what):
    from transformers.training_args import ParallelMode, TrainingArguments

    trainer, _ = trainer_of(job, tmp_path)
    if what == "parallel":
        several = property(lambda arguments: ParallelMode.NOT_DISTRIBUTED)  # several GPUs
        monkeypatch.setattr(TrainingArguments, "parallel_mode", several)
    else:
        monkeypatch.setattr(trainer, what, True)
    with pytest.raises(ConfigError, match=r"DeepSpeed or FSDP|is parallel already"):
        raydl.attach_trainer(trainer, method="sync-easgd", worker_id="w0")


@pytest.mark.processes
def test_an_object_that_is_not_a_trainer_is_refused():
    with pytest.raises(ConfigError, match=r"must be a transformers\.Trainer, got a str"):
        raydl.attach_trainer("trainer", method="sync-easgd")


@ray.remote(num_cpus=0, max_concurrency=2)
class Tuner:
    """Runs the example and reports its number of steps."""

    def __init__(self, path):
        import transformers

        torch.set_num_threads(1)
        self.job, self.num_steps, self.rates = runpy.run_path(path), 0, {}
        training_step = transformers.Trainer.training_step

        def count(trainer, *arguments, **named):
            self.num_steps += 1
            self.rates[trainer.state.global_step] = trainer.optimizer.param_groups[0]["lr"]
            return training_step(trainer, *arguments, **named)

        transformers.Trainer.training_step = count

    def pid(self):
        return os.getpid()

    def steps(self):
        return self.num_steps

    def rate_by_step(self):
        return self.rates

    def train(self, folder):
        return self.job["train"](folder, (1, 2), elastic=ElasticConfig(lease_s=3.0))


@pytest.mark.cluster
@pytest.mark.slow
def test_the_example_learns_although_one_of_its_two_workers_is_killed_and_replaced(
    cluster, root, tmp_path
):
    actors = [Tuner.remote(str(root / "jobs/transformers_lora.py")) for _ in range(3)]
    pids = ray.get([actor.pid.remote() for actor in actors], timeout=BOUND_S)
    replacement = actors.pop()
    calls = [actor.train.remote(str(tmp_path / f"w{n}")) for n, actor in enumerate(actors)]
    deadline = time.monotonic() + BOUND_S
    while min(ray.get([actor.steps.remote() for actor in actors], timeout=BOUND_S)) < 20:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(pids[1], signal.SIGKILL)
    late = replacement.train.remote(str(tmp_path / "w2"))
    assert min(ray.get([calls[0], late], timeout=BOUND_S)) > 0.9
    first, second = ray.get([actor.rate_by_step.remote() for actor in (actors[0], replacement)])
    assert min(second) > 20, "it has the step of the others,"
    assert second == {step: first[step] for step in second}, "their learning rate,"
    assert max(second) <= max(first) == 499, "and their end"
    adapter = json.loads((tmp_path / "w0/adapter_config.json").read_text())
    assert adapter["r"] == 8
