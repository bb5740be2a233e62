"""The center's accuracy beside that of plain PyTorch on one core, for the same samples.

Command:   python -m benchmarks.accuracy --model resnet20 --data ../shared/data/cifar10
           (--quick: a tenth of an epoch)

Plain PyTorch is a loop of twenty lines: one process, one thread, torch's SGD, the same network
from the same seed, the same batch size, augmentation, schedule and clipping. raydl trains the same
number of samples with two workers by its own defaults. Both are scored on the whole test set.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace

import numpy as np
import torch
from torch import nn

import raydl
from benchmarks.measure import Figure, Report, Spread, options_of
from raydl.config import TrainConfig
from raydl.data import Batches, Dataset, load, preparation_for
from raydl.evaluator import score
from raydl.rules import lr_factor
from raydl.task import Classification


def train_plainly(
    data: Dataset, config: TrainConfig, *, lr: float, momentum: float
) -> tuple[float, float]:
    """Return (test accuracy, seconds of training) of a plain loop over the samples."""
    assert config.training.samples is not None
    torch.manual_seed(config.training.seed)
    task = Classification(config.model)
    model = task.build_model(data.train.shape)
    prepare, order = preparation_for(data, config), data.train.order(config.training.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
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
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm or float("inf"))
        optimizer.step()
        num_done += len(rows)
    seconds = time.perf_counter() - began
    test = Batches(data.test, prepare)
    return score(task, model, test, config)["accuracy"], seconds


def train_elastically(
    data: Dataset, config: TrainConfig, options: argparse.Namespace
) -> tuple[float, float]:
    """Return (center test accuracy, seconds of training) of two workers over as many samples."""
    training = replace(config.training, batch_size=options.worker_batch)
    with tempfile.TemporaryDirectory() as folder:
        result = raydl.Trainer(
            options.model,
            data,
            method=raydl.MethodConfig(name=options.method, period=options.period),
            training=training,
            input=config.input,
            optimizer=config.optimizer,
            scaling=raydl.ScalingConfig(num_workers=2),
            evaluation=raydl.EvaluationConfig(every_epochs=1000),
            run=raydl.RunConfig(run_dir=f"{folder}/run", progress="none"),
        ).fit()
    return result.metrics["center_accuracy"], result.metrics["seconds"]


def main() -> None:
    """Train both ways, and tell the points between them."""
    parser = options_of(
        __doc__,
        model={"default": "resnet20"},
        data={"default": "../shared/data/cifar10"},
        samples={"type": int, "default": 100_000},
        method={"default": "sync-easgd"},
        period={"type": int, "help": "of the exchanges; unset: the method's"},
        worker_batch={"type": int, "default": 64, "help": "of a worker; plain PyTorch has 64"},
        lr={"type": float, "default": 0.1},
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
            samples=5000 if options.quick else options.samples, seed=options.seed
        ),
        input=raydl.InputConfig(augment=options.augment),
        optimizer=raydl.OptimizerConfig(lr=options.lr, momentum=options.momentum),
    )
    elastic, elastic_s = train_elastically(data, config, options)
    plain, plain_s = train_plainly(data, config, lr=options.lr, momentum=options.momentum)
    report = Report(
        "accuracy", f"python -m benchmarks.accuracy {' '.join(sys.argv[1:])}", options.quick
    )
    report.table(
        ("what", "test accuracy", "seconds of training"),
        [
            ("plain PyTorch, one core", f"{plain:.2%}", f"{plain_s:.0f}"),
            (f"{options.method}, 2 workers", f"{elastic:.2%}", f"{elastic_s:.0f}"),
        ],
    )
    report.judge(
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
