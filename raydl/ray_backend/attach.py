"""``raydl.attach`` inside a Ray actor, or in the training function of Ray Train.

The workers of a run meet in one named actor, made by the first of them. It outlives that
worker, and ends by itself once nobody has been there for a minute.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, cast

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError
from torch import nn
from torch.optim import Optimizer

from raydl.collective.ray_collective import CollectiveGroup, GroupAddress
from raydl.config import ElasticConfig, ExchangeConfig, MethodConfig, ScalingConfig, TrainConfig
from raydl.config.tls import check_device
from raydl.core.custom_rule import as_method
from raydl.core.job import Job
from raydl.core.membership import Membership
from raydl.core.rules import Rule
from raydl.elastic.rendezvous import RendezvousServer
from raydl.elastic.rendezvous_client import RendezvousClient
from raydl.errors import AttachError, ConfigError, RaydlError
from raydl.parameter_server.ray_transport import RayCenterClient
from raydl.ray_backend.cluster import START_S, end_when_quiet, node_here, send_by_value
from raydl.worker.user_loop import Attached, endless_training, job_of, terms_of

_ANSWER_S = 60.0
"""The longest wait for an answer of the meeting point, in seconds."""
_AGAIN_S = 0.2
_LOST = (
    "the actor in which the workers meet was lost ({}); attach under another name, from a "
    "state that you kept"
)


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
    """Let a loop of your own train together with those of other workers.

    Call ``step()`` of what is returned in place of ``optimizer.step()``. Workers of one job and
    one name train together. Inside Ray Train name, number and rank are those of its run.

    Args:
        model: on its device. Its parameters become views of one tensor: move or convert it before.
        optimizer: over its parameters; it is stepped as it is, learning rate and all.
        method: a named method, or its settings, or a rule of your own.
        name: of the run.
        num_workers: how many train, or (the fewest that start, the most that train).
        worker_id: has this worker a name already; numbers go by the order of these. A second
            worker of that id gets another.
        exchange: how replicas and center exchange.
        elastic: how workers come and go: ``lease_s`` and ``max_restarts``.
        start_timeout_s: the longest wait for enough workers, in seconds.

    Raises:
        ConfigError: a setting is wrong, or this process is no Ray actor.
        ShapeError: the model has nothing to train.
    """
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        raise ConfigError(
            "raydl.attach",
            "works inside a Ray actor, or the train_loop_per_worker of Ray Train; this process "
            "is neither",
        )
    name, num_workers, worker_id = _from_ray_train(name, num_workers, worker_id)
    method_config, rule = as_method(method)
    config = TrainConfig(
        training=endless_training(),
        method=method_config,
        scaling=ScalingConfig(
            num_workers=num_workers, start_timeout_s=start_timeout_s, use_gpu=_is_on_gpu(model)
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
        transports.find,
        transports.make,
        terms=transports.terms,
        lease_s=config.elastic.lease_s,
        in_rounds=job.method.is_sync,
        wish=worker_id,
    )
    return Attached(model, optimizer, job=job, rendezvous=rendezvous)


def _is_on_gpu(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(p.is_cuda for p in model.parameters())


def _from_ray_train(
    name: str | None, num_workers: int | tuple[int, int] | None, worker_id: str | None
) -> tuple[str, int | tuple[int, int], str | None]:
    """Return the three, as Ray Train has them where they are not given."""
    context = _train_context()
    if context is not None:
        name = name or context.get_experiment_name()
        num_workers = context.get_world_size() if num_workers is None else num_workers
        worker_id = worker_id or f"w{context.get_world_rank()}"
    if not name:
        raise ConfigError("name", "must be given outside Ray Train: workers of one name meet")
    if num_workers is None:
        raise ConfigError("num_workers", "must be given outside Ray Train, as 4 or (2, 8)")
    return name, num_workers, worker_id


def _train_context() -> Any:
    """Return Ray Train's context; None: this is none of its training functions."""
    train = sys.modules.get("ray.train")  # who is inside it has imported it
    if train is None:
        return None
    try:
        return train.get_context()
    except RuntimeError:
        return None


class Transports:
    """How a worker reaches the meeting point, and from there the others.

    Args:
        name: of the run.
        job: what all workers do.
        terms: what all workers must agree on.
    """

    def __init__(self, name: str, job: Job, terms: Mapping[str, Any]) -> None:
        self.terms = terms
        self._name = name
        self._job = job
        self._actor: ActorHandle = None
        self._run_id = ""

    def find(self) -> RendezvousServer:
        """Return the rendezvous server in its actor; start that, if this worker is the first.

        Raises:
            AttachError: it did not start.
        """
        most = self._job.config.scaling.max_workers
        self._actor = RendezvousActor.options(  # type: ignore[attr-defined]
            name=f"raydl.attach {ray.get_runtime_context().get_job_id()} {self._name}",
            namespace="raydl",
            get_if_exists=True,
            # Else it would go with the worker that made it, which any worker may.
            lifetime="detached",
            max_concurrency=3 * most + 8,
            resources={"node:__internal_head__": 0.001},
        ).remote(self._name, self._job, self.terms)
        proxy = RendezvousProxy(self._name, self._actor)
        self._run_id = proxy.call("run_id", timeout_s=START_S)
        return cast(RendezvousServer, proxy)  # it has the methods of its actor, which is one

    def make(self, worker_id: str, membership: Membership, abandoned: threading.Event) -> Any:
        """Connect a worker with a membership, until the event is set.

        Raises:
            ExchangeError: somebody went away, or did not come in time.
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
    """A run's ``RendezvousServer`` in its actor: each method is a call of the actor's.

    It takes positional arguments alone.

    Args:
        name: of the run.
        actor: where the workers meet.
    """

    def __init__(self, name: str, actor: ActorHandle) -> None:
        self._name = name
        self._actor = actor

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return functools.partial(self.call, method)

    def call(self, method: str, *arguments: Any, timeout_s: float = _ANSWER_S) -> Any:
        """Return the result of one of the actor's methods, once it can be reached.

        Raises:
            AttachError: it was lost, or does not answer.
            RaydlError: what the method raised.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                sent = getattr(self._actor, method).remote(*arguments)
                return ray.get(sent, timeout=max(_AGAIN_S, deadline - time.monotonic()))
            except GetTimeoutError as error:
                raise AttachError(
                    self._name,
                    f"the actor in which the workers meet did not answer for {timeout_s:g} s",
                ) from error
            except ActorUnavailableError as error:
                if time.monotonic() >= deadline:
                    raise AttachError(self._name, _LOST.format("it can not be reached")) from error
                time.sleep(_AGAIN_S)
            except RayTaskError as error:
                if isinstance(error.cause, RaydlError):
                    raise error.cause from None
                raise
            except RayActorError as error:
                raise AttachError(self._name, _LOST.format("its process ended")) from error


@ray.remote(num_cpus=0)
class RendezvousActor(RendezvousServer):
    """The rendezvous of one run; it ends once nobody has been there for a minute."""

    def __init__(self, name: str, job: Job, terms: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        super().__init__(name, job, terms, node=node_here())
        self._run_id = uuid.uuid4().hex[:8]
        end_when_quiet(self.quiet_s)

    def run_id(self) -> str:
        """Return the prefix of this run's keys."""
        return self._run_id
