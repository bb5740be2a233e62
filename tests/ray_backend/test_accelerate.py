"""An attached optimizer works in Accelerate's unchanged loop."""

import pytest
import torch
from user_loops import Threads, user_loop_config

from raydl.config import MethodConfig

pytestmark = pytest.mark.processes  # the import of Accelerate takes seconds


def loop(accelerator, model, optimizer, num_steps=8):
    """Train as Accelerate's documentation does."""
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=4)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for step in range(num_steps):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def test_accumulation_clipping_and_schedules_give_the_steps_of_the_plain_optimizer():
    from accelerate import Accelerator

    weights, steps = [], []
    for is_attached in (False, True):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if is_attached:
            threads = Threads(user_loop_config(MethodConfig(name="sync-easgd", period=10**6), 1))
            optimizer = threads.attach(model, optimizer)
        loop(accelerator, model, optimizer)
        if is_attached:
            steps.append(optimizer.local_step)
            optimizer.detach()
        weights.append(model.weight.clone())
    assert torch.equal(*weights)
    assert steps == [4]
