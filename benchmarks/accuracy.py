"""Compares the center's accuracy with that of plain PyTorch after the same number of samples.

Command:   python -m benchmarks.accuracy            (--quick: 4,000 samples)

Plain PyTorch is a loop of twenty lines in one process with one thread: torch's SGD and the same
network, seed, augmentation, learning-rate schedule and clipping. raydl trains with two workers.
Both are evaluated on the whole test set.

Each of the two workers has half the batch of plain PyTorch, so both sides take the same number of
steps. The elastic force does not change the sum of all replicas and the center: a step that both
workers take moves replicas and center by only p / (p + 1) = 2/3 of it. Therefore the workers'
learning rate is 1.5 times as high. The full form, ten epochs of CIFAR-10, takes an hour.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace

import numpy as np
import torch
from torch import nn

import raydl
from benchmarks.measure import Figure, Report, Spread, options_of
from raydl.config import TrainConfig
from raydl.core.lr_schedules import lr_factor
from raydl.data import Batches, Dataset, load, preparation_for
from raydl.tasks import Classification
from raydl.worker.evaluator import score


def train_plainly(data: Dataset, config: TrainConfig, *, lr: float) -> tuple[float, float]:
    """Return (test accuracy, seconds of training) of the plain loop."""
    assert config.training.samples is not None
    torch.manual_seed(config.training.seed)
    task = Classification(config.model)
    model = task.build_model(data.train.shape)
    prepare, order = preparation_for(data, config), data.train.order(config.training.seed)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=lr, momentum=config.optimizer.momentum or 0.0
    )
    batch_size, num_done, began = config.training.batch_size, 0, time.perf_counter()
    while num_done < config.training.samples:
        epoch, start = divmod(num_done, data.train.num_samples)
        rows = order.rows(epoch, np.arange(start, min(start + batch_size, data.train.num_samples)))
        rate = lr * lr_factor(
            "cosine", num_done / config.training.samples, warmup=config.optimizer.warmup
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        task.loss(model, prepare(data.train.fetch(rows), rows, epoch)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(
            model.parameters(), config.optimizer.clip_grad_norm or float("inf")
        )
        optimizer.step()
        num_done += len(rows)
    seconds = time.perf_counter() - began
    test = Batches(data.test, prepare)
    return score(task, model, test, config)["accuracy"], seconds


def train_elastically(
    data: Dataset, config: TrainConfig, options: argparse.Namespace
) -> tuple[float, float]:
    """Return (test accuracy of the center, seconds of training) of two workers."""
    training = replace(config.training, batch_size=options.batch // 2)
    with tempfile.TemporaryDirectory() as folder:
        result = raydl.Trainer(
            options.model,
            data,
            method=raydl.MethodConfig(name=options.method, period=options.period),
            training=training,
            input=config.input,
            optimizer=replace(config.optimizer, lr=1.5 * options.lr),
            scaling=raydl.ScalingConfig(num_workers=2),
            evaluation=raydl.EvaluationConfig(every_epochs=1000),
            run=raydl.RunConfig(run_dir=f"{folder}/run", progress="none"),
        ).fit()
    return result.metrics["center_accuracy"], result.metrics["seconds"]


def main() -> None:
    """Train both ways and report the difference in percentage points."""
    parser = options_of(
        __doc__,
        model={"default": "resnet20"},
        data={"default": "../shared/data/cifar10"},
        samples={"type": int, "default": 500_000},
        method={"default": "sync-easgd"},
        period={"type": int, "default": 4, "help": "local steps per exchange"},
        batch={"type": int, "default": 64, "help": "batch of plain PyTorch; half per worker"},
        lr={"type": float, "default": 0.1, "help": "rate of plain PyTorch; workers take 1.5 times"},
        momentum={"type": float, "default": 0.9},
        augment={"default": "none"},
        seed={"type": int, "default": 0},
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = load(options.data)
    config = TrainConfig(
        model=options.model,
        training=raydl.TrainingConfig(
            samples=4000 if options.quick else options.samples,
            batch_size=options.batch,
            seed=options.seed,
        ),
        input=raydl.InputConfig(augment=options.augment),
        optimizer=raydl.OptimizerConfig(momentum=options.momentum),
    )
    elastic, elastic_s = train_elastically(data, config, options)
    plain, plain_s = train_plainly(data, config, lr=options.lr)
    report = Report.of_command("accuracy", options)
    report.add_table(
        ("what", "test accuracy", "seconds of training"),
        [
            ("plain PyTorch, one core", f"{plain:.2%}", f"{plain_s:.0f}"),
            (f"{options.method}, 2 workers", f"{elastic:.2%}", f"{elastic_s:.0f}"),
        ],
    )
    report.add_figures(
        Figure(
            name=f"accuracy.{options.model}.points_below_plain",
            value=Spread.of([100 * (plain - elastic)]),
            target=1.0,
            is_better="less",
        )
    )
    report.close(options.out)


if __name__ == "__main__":
    main()
