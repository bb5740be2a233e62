"""``raydl.attach`` for Ray actors and for the training functions of Ray Train.

The workers of a run meet in one named actor, which the first of them starts. It outlives that
worker, and ends once it has been without members for a minute.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
)
from torch import nn
from torch.optim import Optimizer

from raydl.collective.ray_collective import CollectiveGroup, GroupAddress
from raydl.config import ElasticConfig, ExchangeConfig, MethodConfig, ScalingConfig, TrainConfig
from raydl.config.tls import check_device
from raydl.core.job import Job
from raydl.core.membership import Membership
from raydl.core.rules import Rule
from raydl.elastic.rendezvous import RendezvousServer
from raydl.elastic.rendezvous_client import RendezvousClient
from raydl.errors import AttachError, ConfigError, RaydlError
from raydl.methods.custom_rule import as_method
from raydl.parameter_server.ray_transport import RayCenterClient
from raydl.ray_backend.cluster import (
    START_S,
    end_when_unused,
    has_ended,
    node_here,
    send_by_value,
)
from raydl.worker.user_loop import Attached, endless_training, job_of, terms_of

_ANSWER_S = 60.0
"""The longest wait for an answer of the rendezvous actor, in seconds."""
_RETRY_S = 0.2
_WATCH_EVERY_S = 0.1
"""Seconds between two checks for workers whose processes have ended."""
_MOST_STARTS = 5
"""The most rendezvous actors that a new worker tries: each may have been about to end."""
_LOST = "the rendezvous actor was lost ({}); attach under another name, from a state that you saved"


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    method: MethodConfig | Rule | str = "sync-easgd",
    name: str | None = None,
    num_workers: int | tuple[int, int] | None = None,
    worker_id: str | None = None,
    exchange: ExchangeConfig | None = None,
    elastic: ElasticConfig | None = None,
    start_timeout_s: float = 600.0,
) -> Attached:
    """Train your own loop together with the loops of other workers.

    The result takes the optimizer's place, as ``optimizer = raydl.attach(model, optimizer, ...)``:
    its ``step()`` exchanges when an exchange is due. Workers of one Ray job with the same name
    train together. Inside Ray Train, its run provides the name, the number of workers and the
    worker id.

    Args:
        model: the model, on its device. Its parameters become views of one tensor, so move or
            convert the model before.
        optimizer: over the model's parameters; raydl calls its ``step()`` and changes no setting.
        method: name of a method, or its settings, or your own rule.
        name: name of the run.
        num_workers: number of workers, or (fewest to start, most that train).
        worker_id: id of this worker; ranks follow the order of the ids. A second worker with the
            same id gets another one.
        exchange: settings of the exchange of replicas and center.
        elastic: settings of joins and losses: ``lease_s`` and ``max_restarts``.
        start_timeout_s: the longest wait for enough workers, in seconds.

    Raises:
        ConfigError: if a setting is wrong, or this process is not a Ray actor.
        ShapeError: if the model has no trainable parameters.
    """
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        raise ConfigError(
            "raydl.attach",
            "must be called inside a Ray actor, or the train_loop_per_worker of Ray Train; this "
            "process is neither",
        )
    name, num_workers, worker_id = _from_ray_train(name, num_workers, worker_id)
    method_config, rule = as_method(method)
    is_on_gpu = isinstance(model, nn.Module) and any(p.is_cuda for p in model.parameters())
    # Workers that share a GPU have less than one each; NCCL cannot connect them.
    gpus = ray.get_runtime_context().get_assigned_resources().get("GPU", 1.0) if is_on_gpu else 0.0
    config = TrainConfig(
        training=endless_training(),
        method=method_config,
        scaling=ScalingConfig(
            num_workers=num_workers, start_timeout_s=start_timeout_s, gpus_per_worker=gpus
        ),
        exchange=exchange or ExchangeConfig(),
        elastic=elastic or ElasticConfig(),
    )
    job = job_of(config, model, optimizer, rule)
    if job.method.is_sync and config.scaling.max_workers > 1:
        check_device(config.exchange_device, os.environ)
    send_by_value(type(job.method.rule))
    transports = Transports(name, job, terms_of(job, model))
    rendezvous = RendezvousClient(
        name,
        transports.register,
        transports.make,
        lease_s=config.elastic.lease_s,
        in_rounds=job.method.is_sync,
        preferred_id=worker_id,
    )
    return Attached(model, optimizer, job=job, rendezvous=rendezvous)


def _from_ray_train(
    name: str | None, num_workers: int | tuple[int, int] | None, worker_id: str | None
) -> tuple[str, int | tuple[int, int], str | None]:
    """Return the three values; missing ones are those of Ray Train, inside its functions."""
    context, train = None, sys.modules.get("ray.train")  # which its processes have imported
    if train is not None:
        # Raised outside a training function: the second in a trial of Ray Tune.
        with contextlib.suppress(RuntimeError, DeprecationWarning):
            context = train.get_context()
    if context is not None:
        name = name or context.get_experiment_name()
        num_workers = context.get_world_size() if num_workers is None else num_workers
        worker_id = worker_id or f"w{context.get_world_rank()}"
    if not name:
        raise ConfigError(
            "name",
            "must be given outside Ray Train; workers with the same name train together",
        )
    if num_workers is None:
        raise ConfigError("num_workers", "must be given outside Ray Train, as 4 or (2, 8)")
    return name, num_workers, worker_id


def seed_of_worker(worker_id: str | None) -> int:
    """Return a number that no other worker has, for an order of the data of its own.

    Args:
        worker_id: the id that ``attach`` was given, with which the number is always the same; None:
            it follows from the actor.
    """
    _, _, worker_id = _from_ray_train("any", 1, worker_id)
    return zlib.crc32((worker_id or ray.get_runtime_context().get_actor_id() or "").encode())


class Transports:
    """Connects a worker with the rendezvous actor, and with the other workers or the center.

    Args:
        name: name of the run.
        job: the job of all workers.
        terms: values that all workers must share, by setting.
    """

    def __init__(self, name: str, job: Job, terms: Mapping[str, Any]) -> None:
        self._terms = terms
        self._name = name
        self._job = job
        self._actor: ActorHandle = None
        self._run_id = ""

    def register(self, preferred_id: str | None) -> tuple[RendezvousServer, str]:
        """Register this worker at the rendezvous; return (a proxy of its server, the worker's id).

        Args:
            preferred_id: the worker's id, if no other worker has it.

        Raises:
            AttachError: if the rendezvous actor did not start.
            ConfigError: if this worker's settings differ from those of the run.
        """
        for _ in range(_MOST_STARTS - 1):
            try:
                return self._register(preferred_id)
            except AttachError as error:
                if not isinstance(error.__cause__, ActorDiedError):
                    raise
            time.sleep(_RETRY_S)  # it has just ended: start the next one
        return self._register(preferred_id)

    def _register(self, preferred_id: str | None) -> tuple[RendezvousServer, str]:
        """Register once, at the actor that exists; start it if this worker is the first."""
        most = self._job.config.scaling.max_workers
        self._actor = RendezvousActor.options(  # type: ignore[attr-defined]
            name=f"raydl.attach {ray.get_runtime_context().get_job_id()} {self._name}",
            namespace="raydl",
            get_if_exists=True,
            # Otherwise it would end with the worker that started it.
            lifetime="detached",
            max_concurrency=3 * most + 8,
            resources={"node:__internal_head__": 0.001},
        ).remote(self._name, self._job, self._terms)
        proxy = RendezvousProxy(self._name, self._actor)
        self._run_id = proxy.call("run_id", timeout_s=START_S)
        token, process = uuid.uuid4().hex, (ray.get_runtime_context().get_actor_id(), os.getpid())
        worker_id = proxy.call("register", preferred_id, self._terms, token, process)
        return cast(RendezvousServer, proxy), worker_id  # it has the same methods

    def make(self, worker_id: str, membership: Membership, abandoned: threading.Event) -> Any:
        """Connect a worker with a membership, until the event is set.

        Raises:
            ExchangeError: if another worker was lost, or did not arrive in time.
        """
        config = self._job.config
        timeout_s = config.exchange.timeout_s
        if not self._job.method.is_sync:
            return RayCenterClient([self._actor], timeout_s=timeout_s, abandoned=abandoned)
        address = GroupAddress(
            self._run_id, membership.generation, config.exchange_device, timeout_s
        )
        return CollectiveGroup(
            address,
            membership.worker_ids,
            membership.worker_ids.index(worker_id),
            center=self._actor,
            algorithm=config.exchange.allreduce,
            abandoned=abandoned,
        )


class RendezvousProxy:
    """A proxy of a run's ``RendezvousServer``: each method calls the actor's.

    Methods take only positional arguments.

    Args:
        name: name of the run.
        actor: the rendezvous actor.
    """

    def __init__(self, name: str, actor: ActorHandle) -> None:
        self._name = name
        self._actor = actor

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return functools.partial(self.call, method)

    def call(self, method: str, *arguments: Any, timeout_s: float = _ANSWER_S) -> Any:
        """Call a method of the actor, and retry while the actor is unreachable.

        Raises:
            AttachError: if the actor was lost, or does not answer within ``timeout_s``.
            RaydlError: if the method raises it.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                sent = getattr(self._actor, method).remote(*arguments)
                return ray.get(sent, timeout=max(_RETRY_S, deadline - time.monotonic()))
            except GetTimeoutError as error:
                raise AttachError(
                    self._name, f"the rendezvous actor did not answer for {timeout_s:g} s"
                ) from error
            except ActorUnavailableError as error:
                if time.monotonic() >= deadline:
                    raise AttachError(self._name, _LOST.format("it cannot be reached")) from error
                time.sleep(_RETRY_S)
            except RayTaskError as error:
                if isinstance(error.cause, RaydlError):
                    raise error.cause from None
                raise
            except RayActorError as error:
                raise AttachError(self._name, _LOST.format("its process ended")) from error


@ray.remote(num_cpus=0)
class RendezvousActor(RendezvousServer):
    """The rendezvous actor of one run; it ends after a minute without members."""

    def __init__(self, name: str, job: Job, terms: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        super().__init__(name, job, terms, node=node_here())
        self._run_id = uuid.uuid4().hex[:8]
        threading.Thread(target=self._watch, daemon=True).start()
        end_when_unused(self.unused_s)

    def _watch(self) -> None:
        """Take Ray's word for the end of a worker's process, which comes long before a lease."""
        while True:
            self.lose_ended(has_ended)
            time.sleep(_WATCH_EVERY_S)

    def run_id(self) -> str:
        """Return the id of the run, a prefix of its keys."""
        return self._run_id
