"""Settings of jobs whose workers exchange by messages."""

import time

from raydl.config import ExchangeConfig, MethodConfig, OptimizerConfig, TrainConfig, TrainingConfig


def message_job(method, *, compression="none", center_shards=1, period=2, **training):
    training = training or {"epochs": 2}
    return TrainConfig(
        method=MethodConfig(name=method, period=period),
        training=TrainingConfig(batch_size=3, **training),
        optimizer=OptimizerConfig(lr=0.05),
        exchange=ExchangeConfig(
            compression=compression, center_shards=center_shards, timeout_s=30.0
        ),
    )


def wait_for(is_true, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)
