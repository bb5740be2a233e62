"""A tiny job with pictures, a linear model, and workers in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from raydl.config import MethodConfig, OptimizerConfig, TrainConfig, TrainingConfig
from raydl.core.center import Snapshot, first_snapshot
from raydl.core.flat import FlatModel
from raydl.core.job import Job
from raydl.core.membership import Membership
from raydl.core.reports import Outcome
from raydl.core.saved_state import SavedState
from raydl.data import Batches, ImageSet, Normalizer, Samples
from raydl.data.samples import as_they_are
from raydl.data.skew import order_of
from raydl.methods import resolve
from raydl.parameter_server.coordinator import Due
from raydl.parameter_server.server import CenterServer, make_shard
from raydl.tasks import Classification, DataShape
from raydl.worker.in_process import HERE, LocalCenterClient, LocalGroup
from raydl.worker.loop import Worker

SHAPE = DataShape((1, 4, 4), 3)


def tiny_images(num_samples: int = 24, *, seed: int = 0) -> ImageSet:
    random = np.random.default_rng(seed)
    labels = random.integers(0, 3, num_samples)
    images = random.integers(0, 256, (num_samples, 1, 4, 4), dtype=np.uint8)
    images[np.arange(num_samples), 0, labels, labels] = 255
    return ImageSet(images, labels, ("0", "1", "2"))


def linear(image_shape: tuple[int, int, int], num_classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(image_shape[1] * image_shape[2], num_classes)
    )


class Ensemble:
    """The workers of one job, in threads of this process."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        num_workers: int,
        images: Samples | None = None,
        model: Callable[..., torch.nn.Module] = linear,
        task: Any = None,
        tests: Sequence[Batches] = (),
        has_neighbours: bool = False,
        unfrozen: Sequence[str] = (),
    ) -> None:
        self.unfrozen = tuple(unfrozen)
        """Parameters that an earlier start of the run has unfrozen."""
        self.tests = tests
        """The test set of each worker; by default all have the training set."""
        self.node = HERE if has_neighbours else None
        self.images = images or tiny_images()
        self.config, self.num_workers = config, num_workers
        has_pictures = isinstance(self.images, ImageSet)
        self.batches = Batches(
            self.images, Normalizer.of(self.images) if has_pictures else as_they_are
        )
        self.use_task(task or Classification(model))

    def use_task(self, task: Any) -> None:
        """Create new workers, for another task."""
        torch.manual_seed(self.config.training.seed)
        self.flat = FlatModel(task.build_model(self.images.shape), unfrozen=self.unfrozen)
        self.published: dict[int, Snapshot] = {}
        self.first = first_snapshot(self.flat, self.images.num_samples)
        order = order_of(self.images, self.config)
        self.job = Job(
            self.config,
            resolve(self.config),
            task,
            self.images.shape,
            order,
            unfrozen=self.unfrozen,
        )
        non_trainable = self.flat.non_trainable.arrays()
        self.workers = [
            Worker(
                self.job,
                f"w{i}",
                batches=self.batches,
                publish=self._publish,
                non_trainable=non_trainable,
                test=self._test_of(i),
            )
            for i in range(self.num_workers)
        ]

    def _test_of(self, rank: int) -> Batches | None:
        if not self.config.evaluation.is_by_workers:
            return None
        return self.tests[rank] if self.tests else self.batches

    def _publish(self, snapshot: Snapshot) -> None:
        self.published[snapshot.progress.round] = snapshot

    def join(
        self, snapshot: Snapshot | None = None, states: dict[str, Any] | None = None
    ) -> Ensemble:
        """Join all workers to a generation."""
        snapshot = snapshot or self.first
        membership = Membership(1, tuple(w.worker_id for w in self.workers))
        self.group = group = LocalGroup(len(self.workers), timeout_s=30.0)
        size = self.config.method.group_size
        shared = [LocalGroup(size, timeout_s=30.0) for _ in range(self.num_workers // size)]

        def partners(rank: int) -> Any:
            return shared[rank // size].member(rank % size) if size > 1 else None

        client = None if self.job.method.is_sync else self._open_center(snapshot, membership)

        def join(rank: int, worker: Worker) -> None:
            own = (states or {}).get(worker.worker_id)
            own = own.load() if isinstance(own, SavedState) else own
            worker.join(membership, client or group.member(rank), snapshot, own, partners(rank))

        if size == 1:  # in rank order, which decides the assignment of samples
            for rank, worker in enumerate(self.workers):
                join(rank, worker)
            return self
        with ThreadPoolExecutor(self.num_workers) as pool:
            list(pool.map(join, range(self.num_workers), self.workers))
        return self

    def _open_center(self, snapshot: Snapshot, membership: Membership) -> LocalCenterClient:
        self.service = CenterServer(self.job, snapshot, node=self.node)
        num_shards = self.job.config.exchange.center_shards
        self.others = [
            make_shard(self.job, snapshot, i, None, node=self.node) for i in range(1, num_shards)
        ]
        self.service.begin_generation(membership)
        for shard in self.others:
            shard.begin_generation(membership)
        return LocalCenterClient(self.service, self.others)

    def center_weights(self) -> Any:
        """Return the weights of the center between two rounds."""
        if self.job.method.is_sync:
            return self.workers[0].runner.strategy.snapshot(is_kept=False, local_step=0).weights
        return self.center().weights

    def center(self) -> Snapshot:
        """Return a snapshot of the center."""
        if self.job.method.is_sync:
            return self.newest
        return self.service.snapshot(lambda: [s.state() for s in self.others], Due(0, False))

    def run(self, rounds: int | None = None) -> list[Outcome]:
        """Run all workers for some rounds or to their end, and raise the first of their errors."""
        outcomes: dict[int, Outcome] = {}
        errors: list[Exception] = []

        def loop(rank: int) -> None:
            try:
                done = 0
                outcome = Outcome.GO_ON
                while outcome is Outcome.GO_ON and (rounds is None or done < rounds):
                    outcome = self.workers[rank].run_round()
                    done += 1
                outcomes[rank] = outcome
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=loop, args=(i,)) for i in range(len(self.workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        if errors:
            raise errors[0]
        return [outcomes[rank] for rank in range(len(self.workers))]

    @property
    def newest(self) -> Snapshot:
        return self.published[max(self.published)]


def rows_trained(samples: Samples, method: str, *, task: Any, num_workers: int = 3) -> list[Any]:
    """Return the (epoch, row) of each sample that workers train on in two epochs, sorted."""
    config = TrainConfig(
        method=MethodConfig(name=method, period=2),
        training=TrainingConfig(epochs=2, batch_size=3),
        optimizer=OptimizerConfig(lr=0.01),
    )
    seen = []

    def prepare(batch: Any, rows: np.ndarray, epoch: int) -> Any:
        seen.extend((epoch, row) for row in rows.tolist())
        inputs, targets = batch
        return inputs.float() if inputs.ndim == 4 else inputs, targets

    ensemble = Ensemble(config, num_workers=num_workers, images=samples, task=task)
    ensemble.batches.prepare = prepare
    ensemble.join().run()
    return sorted(seen)
