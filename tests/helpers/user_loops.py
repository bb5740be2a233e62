"""Workers with user loops in threads of this process, and a rendezvous without Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from raydl.config import ElasticConfig, ExchangeConfig, MethodConfig, ScalingConfig, TrainConfig
from raydl.elastic.rendezvous import RendezvousServer, Signal
from raydl.elastic.rendezvous_client import RendezvousClient
from raydl.worker.in_process import LocalCenterClient, LocalGroup
from raydl.worker.user_loop import Attached, endless_training, job_of, terms_of

TIMEOUT_S = 30.0


def user_loop_config(
    method: MethodConfig,
    num_workers: Any,
    *,
    lease_s: float = 60.0,
    gpus: float = 0.0,
    **exchange: Any,
) -> TrainConfig:
    return TrainConfig(
        method=method,
        training=endless_training(),
        scaling=ScalingConfig(
            num_workers=num_workers, start_timeout_s=TIMEOUT_S, gpus_per_worker=gpus
        ),
        exchange=ExchangeConfig(timeout_s=TIMEOUT_S, **exchange),
        elastic=ElasticConfig(lease_s=lease_s),
    )


class ThreadCenterClient(LocalCenterClient):
    """A client with a ``close`` that does nothing."""

    def close(self) -> None:
        """Do nothing."""


class Threads:
    """The rendezvous and the transports of one run."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.is_sync = config, False
        self.server: RendezvousServer | None = None
        self.groups: dict[int, LocalGroup] = {}
        self._lock = threading.Lock()

    def attach(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, worker_id: str | None = None
    ) -> Attached:
        """Return the handle of a user loop, as ``raydl.attach`` does with Ray."""
        job = job_of(self.config, model, optimizer, None)
        options = terms_of(job, model)
        self.is_sync = job.method.is_sync

        def register(preferred_id: str | None) -> tuple[RendezvousServer, str]:
            with self._lock:
                self.server = self.server or RendezvousServer("run", job, options)
            process = (preferred_id or "", 0)  # as if each worker were an actor with that id
            return self.server, self.server.register(preferred_id, options, None, process)

        rendezvous = RendezvousClient(
            "run",
            register,
            self.make_transport,
            lease_s=self.config.elastic.lease_s,
            in_rounds=job.method.is_sync,
            preferred_id=worker_id,
        )
        return Attached(model, optimizer, job=job, rendezvous=rendezvous)

    def make_transport(self, worker_id: str, membership: Any, abandoned: threading.Event) -> Any:
        if self.server and not self.is_sync:
            return ThreadCenterClient(self.server.center_server)
        with self._lock:
            group = self.groups.setdefault(
                membership.generation,
                LocalGroup(
                    membership.num_workers, timeout_s=TIMEOUT_S, generation=membership.generation
                ),
            )
        return group.member(membership.worker_ids.index(worker_id))


def attach_alone(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    method: str,
    worker_id: str | None = None,
) -> Attached:
    """Return the handle of a user loop that is the only worker of its run, without Ray."""
    gpus = float(any(p.is_cuda for p in model.parameters()))
    config = user_loop_config(MethodConfig(name=method, period=4), 1, gpus=gpus)
    return Threads(config).attach(model, optimizer, worker_id)


class Leader:
    """A worker that is at a step when a second one joins, and goes on to the end with it.

    Args:
        make_model: makes the model of both.
        num_steps: length of the training.
        joined_at: the step at which it waits until the second one attaches.
        method: of both.
    """

    def __init__(
        self,
        make_model: Callable[[], torch.nn.Module],
        *,
        num_steps: int,
        joined_at: int,
        method: str = "sync-easgd",
    ) -> None:
        self.threads = Threads(user_loop_config(MethodConfig(name=method, period=2), (1, 2)))
        self.num_steps, self.joined_at, self.num_taken = num_steps, joined_at, 0
        self.model = make_model()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self._is_ready, self._is_joined = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(self._train)

    def attach(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        worker_id: str | None = None,
        **_: Any,
    ) -> Attached:
        """Attach the second worker, as ``raydl.attach`` does."""
        assert self._is_ready.wait(TIMEOUT_S)
        self._is_joined.set()
        return self.threads.attach(model, optimizer, worker_id)

    def center(self) -> dict[str, torch.Tensor]:
        """Return the center at the end."""
        return self._future.result(timeout=60)

    def _train(self) -> dict[str, torch.Tensor]:
        with self.threads.attach(self.model, self._optimizer, "leader") as elastic:
            for _, batches in elastic.epochs([None], num_steps=self.num_steps):
                for _ in batches:
                    self._optimizer.zero_grad()
                    sum(p.square().sum() for p in self.model.parameters()).backward()
                    elastic.step()
                    self.num_taken += 1
                    if elastic.local_step == self.joined_at:
                        self._is_ready.set()
                        assert self._is_joined.wait(TIMEOUT_S)
                        while elastic._rendezvous.signal is not Signal.REGROUP:
                            time.sleep(0.01)  # until the second one waits to join
            return elastic.center_state_dict()


def copy_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the state of a model."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal_states(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Return whether two states have the same names and values, on whatever devices."""
    return a.keys() == b.keys() and all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a)


def run_all(loops: list[Callable[[], Any]]) -> list[Any]:
    """Run loops in threads and return their results."""
    with ThreadPoolExecutor(len(loops)) as pool:
        futures = [pool.submit(loop) for loop in loops]
        return [future.result(timeout=60) for future in futures]
