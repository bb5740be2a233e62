"""``raydl.attach`` without Ray: the user's own training loop, whose replica exchanges with others.

The arithmetic is in ``raydl.core.replica.Replica``, and the strategies decide which exchanges
happen when, as in ``raydl.worker.loop``; but here the user's loop makes the calls. An exchange
begins at the end of the step before the one that it is due in, so that it overlaps with the user's
forward and backward.

All workers count the same steps: one that enters is never behind the others, and the training ends
for all when one of them reaches the end. ``Attached.epochs`` (in ``raydl.worker.epochs``) lets a
loop follow this count. The settings that all workers must agree on are checked before anything
starts. A model can be attached only once at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import warnings
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from raydl.config import TrainConfig, TrainingConfig, dotted, to_dict
from raydl.core.center import Snapshot, as_tensors, copied_to_cpu, first_snapshot
from raydl.core.exchange import cell_size
from raydl.core.flat import FlatModel
from raydl.core.job import Job
from raydl.core.method import check_weights
from raydl.core.non_trainable import NonTrainable
from raydl.core.optimizers import parameters_of
from raydl.core.progress import Progress
from raydl.core.replica import Replica
from raydl.core.reports import Outcome
from raydl.core.rules import Rule
from raydl.core.sharing import memory_of, trained_parameters
from raydl.core.strategy import Strategy
from raydl.data import DataShape
from raydl.elastic.rendezvous import Age, Signal, age_of
from raydl.elastic.rendezvous_client import RendezvousClient
from raydl.errors import AttachError, ConfigError, ExchangeError, ShapeError, StepError
from raydl.methods import resolve
from raydl.methods.custom_rule import try_rule
from raydl.metrics import TimeParts
from raydl.tasks import Batch
from raydl.worker.epochs import Epochs, Interval
from raydl.worker.round_runner import RoundRunner

_logger = logging.getLogger(__name__)
_Loss = TypeVar("_Loss")
_Item = TypeVar("_Item")
_HOLDERS: weakref.WeakKeyDictionary[nn.Module, tuple[Any, str]] = weakref.WeakKeyDictionary()
"""By model, a weak reference to its handle, which may be deleted without a detach, and the name of
the run."""


ENDLESS = 2**62
"""Number of steps of a loop that only the user ends."""


class UserLoop:
    """Stands in for the task of a run: the user's loop has model and loss.

    Args:
        name: of the model.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def build_model(self, shape: DataShape) -> nn.Module:
        """Never called."""
        raise AssertionError("the model is given")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Never called."""
        raise AssertionError("the user's loop computes the loss")

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Never called."""
        raise AssertionError("the user's loop scores the model")


class Endless:
    """The order of steps, each once."""

    num_samples = ENDLESS
    name = "endless"

    def rows(self, epoch: int, positions: Any) -> Any:
        """Return the positions."""
        return positions

    def cuts(self, epoch: int) -> None:
        """Return None: there are no blocks."""
        return None

    def near(self, epoch: int, position: int) -> Any:
        """Return no rows: there are no data."""
        return ()


_SUMS_GRADIENTS = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Wrappers of torch that synchronize all workers in every step."""


def job_of(config: TrainConfig, model: Any, optimizer: Any, rule: Rule | None) -> Job:
    """Return the job of all workers, which has no end.

    Args:
        config: method, number of workers, exchange and elasticity.
        model: the user's model.
        optimizer: the user's optimizer.
        rule: the user's rule in place of the method's, or None.

    Raises:
        ConfigError: if a setting does not fit a user's own loop.
        ShapeError: if the model has no trainable parameters, or they differ in dtype or device.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError("model", f"must be a torch.nn.Module, got a {type(model).__name__}")
    name = type(model).__name__
    if name in _SUMS_GRADIENTS:
        raise ConfigError(
            "model",
            f"must not be wrapped by {name}, which sums all gradients and ends with the first lost "
            f"worker; pass the model itself, and use model.to(ray.train.torch.get_device()) in "
            f"place of Ray Train's prepare_model",
        )
    FlatModel.check(model)
    check_optimizer(optimizer, model)
    if config.scaling.min_workers < 1:
        raise ConfigError("num_workers", f"must be 1 or more, got {config.scaling.wanted()}")
    method = resolve(config, rule)
    trained = list(trained_parameters(model).values())
    check_weights(name, trained, config, method)
    if method.has_custom_rule:
        size = sum(p.numel() for p in trained)
        size = cell_size(size, num_shards=1, num_fragments=method.fragments)
        try_rule(method.rule, size, device=trained[0].device)
    if not method.has_local_steps:
        raise ConfigError(
            "method.name",
            f"cannot be {method.name}: its workers send gradients and only the center takes steps, "
            f"but your optimizer steps here; choose local-sgd with method.period 1",
        )
    if method.rule.varies_period:
        raise ConfigError(
            "method.name",
            f"cannot be {method.name} with raydl.attach: its period follows the learning rate of "
            f"raydl's own loop, and yours sets its own",
        )
    if method.rule.tilts:
        problem = (
            f"cannot be {method.name} with raydl.attach: it changes gradients before each step"
        )
        raise ConfigError("method.name", problem)
    if method.rule.inner:
        raise ConfigError(
            "method.name",
            f"cannot be {method.name} with raydl.attach: it shares the state of raydl's own "
            f"optimizer, and yours has its own",
        )
    if method.finds_tuning:
        raise ConfigError("method.period", "must be a number with raydl.attach, got auto")
    if config.method.steps_by_speed:
        raise ConfigError("method.steps_by_speed", "cannot be set with raydl.attach")
    for setting, value in (
        ("method.group_size", config.method.group_size),
        ("exchange.center_shards", config.exchange.center_shards),
    ):
        if value > 1:
            raise ConfigError(setting, f"must be 1 with raydl.attach, got {value}")
    return Job(config, method, UserLoop(name), DataShape((), 0), Endless())


def endless_training() -> TrainingConfig:
    """Return the length of a training that only the user ends; a step counts as one sample."""
    return TrainingConfig(steps=ENDLESS, batch_size=1)


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise a ConfigError unless an optimizer has exactly a model's trainable parameters."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "optimizer", f"must be a torch.optim.Optimizer, got a {type(optimizer).__name__}"
        )
    if isinstance(optimizer, Attached):
        raise ConfigError(
            "optimizer",
            "is attached already, and would exchange twice; pass the optimizer that it was made of",
        )
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        raise ConfigError(
            "optimizer",
            f"is wrapped already, in an {type(optimizer).__name__}; call raydl.attach before "
            f"accelerator.prepare",
        )
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "optimizer", "cannot be LBFGS: it computes the loss several times in a step"
        )
    held = {id(p): p for p in parameters_of(optimizer) if p.requires_grad}
    known = {id(p) for p in model.parameters()}
    # By memory: a tensor under two names is trained if the optimizer has one of them.
    stepped = {memory_of(p) for key, p in held.items() if key in known}
    trained = trained_parameters(model)
    missing = [name for name, p in trained.items() if memory_of(p) not in stepped]
    if missing:
        raise ConfigError(
            "optimizer",
            f"lacks {len(missing)} of the model's {len(trained)} parameters, for example "
            f"{missing[0]}; build it from model.parameters(), and call requires_grad_(False) on "
            f"parameters that are not trained",
        )
    others = len(held.keys() - known)
    if others:
        raise ConfigError(
            "optimizer",
            f"has {others} parameters that are not the model's and would not be exchanged; "
            f"attach one module that has all parameters",
        )


def terms_of(job: Job, model: nn.Module) -> dict[str, Any]:
    """Return the settings that all workers of a run must agree on."""
    config = job.config
    settings = {"method": to_dict(config.method), "exchange": to_dict(config.exchange)}
    terms = {**dotted(settings), "num_workers": config.scaling.wanted(), "model": _layout_of(model)}
    if job.method.has_custom_rule:
        terms["method"] = _text_of_rule(job.method.rule)
    if job.method.is_sync:
        terms["device of the exchange"] = config.exchange_device
    return terms


def _text_of_rule(rule: Rule) -> str:
    """Return a rule's class and plain values; others, as functions, look different everywhere."""
    values = ", ".join(
        f"{name}={value!r}"
        for name, value in sorted(getattr(rule, "__dict__", {}).items())
        if isinstance(value, (bool, int, float, str))
    )
    return f"{type(rule).__qualname__}({values})"


def _layout_of(model: nn.Module) -> str:
    """Return a short text for a model's tensors; models with the same text fit each other."""
    named = [*model.named_parameters(), *model.named_buffers()]
    first = {memory_of(tensor): name for name, tensor in reversed(named)}
    tensors = [
        (name, tuple(t.shape), str(t.dtype), t.requires_grad, first[memory_of(t)])
        for name, t in named
    ]
    trained = sum(p.numel() for p in trained_parameters(model).values())
    return (
        f"{trained:,} trained parameters, {len(tensors)} tensors in all "
        f"({zlib.crc32(repr(tensors).encode()):08x})"
    )


_Tensors = tuple[Tensor, Tensor, dict[str, Any]]
_MOST_SKIPPED = 50
"""The most steps skipped in a row. A GradScaler halves its scale with each of them, so that more
skipped steps do not help."""


class Attached(Optimizer):
    """A user's model and optimizer, and their exchanges with other workers.

    It stands in for the optimizer, also in a ``torch.optim.lr_scheduler``, a
    ``torch.amp.GradScaler`` and libraries that call ``step()`` themselves: groups, state, hooks and
    ``zero_grad`` are the optimizer's own.

    Args:
        model: on its device; its parameters become views of one tensor.
        optimizer: over its parameters.
        job: the job of all workers; it has no end, and its samples are steps.
        rendezvous: forms generations with the other workers.

    Raises:
        ConfigError: if the model is attached already.
    """

    # torch's __init__ would make groups and state of its own.
    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, job: Job, rendezvous: RendezvousClient
    ) -> None:
        holder, name = _HOLDERS.get(model, (lambda: None, ""))
        if holder() is not None:
            raise ConfigError(
                "model",
                f"is already attached to {name!r}, and would wait for itself; call detach() of "
                f"that handle first, or leave its `with`",
            )
        _HOLDERS[model] = weakref.ref(self), rendezvous.name
        self._job, self._rendezvous, self._optimizer = job, rendezvous, optimizer
        # A hook that is registered here is registered with the optimizer, which calls it.
        vars(self).update({k: v for k, v in vars(optimizer).items() if k.endswith("_hooks")})
        self._method = job.method
        self._is_ahead = job.method.rule.ahead and job.method.overlap
        flat = FlatModel(model, name=job.task.name)
        self._parts = TimeParts.on(flat.weights.device)
        self._replica = Replica(
            flat,
            job.task,
            rule=job.method.rule,
            make_optimizer=lambda _: optimizer,
            time_parts=self._parts,
            has_dynamic_weights=job.config.method.dynamic_weights,
            who=_who(weakref.ref(self)),  # no cycle: a dropped handle is freed at once
        )
        self._flat = self._replica.flat
        self._flat.release_gradients()
        self._exchanged = {id(p) for ps in self._flat.sharing.values() for p in ps}
        self._runner = RoundRunner(job, self._replica, time_parts=self._parts)
        self._loaded: Snapshot | None = None
        self._loaded_non_trainable: Mapping[str, Any] = {}
        self._own: _Tensors | None = None
        """While the model holds the center: its own weights, buffers and non-trainable state."""
        self.saves_frozen = True
        """Whether ``state_dict()`` has frozen parameters. Where a library saves the model as well,
        those of a large frozen model need not be there twice."""
        self.takes_steps = True
        """Whether ``step()`` does anything. A library that takes one more step after the end sets
        False."""
        self.epoch = 0
        """Number of the pass over the data, from 0; set by the loop that ``epochs()`` or a library
        runs."""
        self._end: int | None = None
        self._has_ended = False
        self._num_ahead = 0
        self._num_failed = self._num_skipped = 0
        self._has_warned = False
        # For a loop that does not call detach().
        weakref.finalize(self, rendezvous.stop_heartbeats).atexit = False

    # for the user's loop

    # torch's own signatures of step() differ from optimizer to optimizer.
    def step(self, closure: Callable[[], _Loss] | None = None) -> _Loss | None:  # type: ignore[override]
        """Take the optimizer's step, and exchange if that is due; replaces ``optimizer.step()``.

        If gradients are not finite, as a GradScaler's may be, the step is skipped: neither replica
        nor center moves, and the step does not count.

        Args:
            closure: computes the gradients and returns the loss; None: the parameters have them.

        Returns:
            The loss of the closure; None without one.

        Raises:
            AttachError: if this worker cannot continue together with the others.
            ExchangeError: if no round was completed in ``elastic.max_restarts`` attempts.
            StepError: if the gradients of 50 steps in a row or the weights are not finite.
        """
        self._check_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.takes_steps:
            self._step_and_exchange()
        return loss

    def _step_and_exchange(self) -> None:
        """Take the step along the gradients that the parameters have, or skip it."""
        self._check_exchanged()
        if not self._has_finite_gradients():
            self._num_skipped += 1
            if self._num_skipped == _MOST_SKIPPED:
                raise StepError(
                    self._rendezvous.worker_id,
                    self.local_step,
                    f"the gradients of {_MOST_SKIPPED} steps in a row were not finite, so all were "
                    f"skipped; lower the learning rate, or check the data of these steps",
                )
            return
        self._num_skipped = 0
        if self._runner.strategy is None:  # the gradient belongs to the weights before joining
            self._optimizer.step()
            self._runner.local_step += 1
            self._join()
            return
        try:
            self._take_step()
        except ExchangeError as error:
            self._undo_round(error)
            self._join()

    @property
    def local_step(self) -> int:
        """Local steps so far; a newcomer's count includes the others' steps before it joined.

        Whenever a worker enters, also after it was left out, it is at least at the step of the
        others. So it may rise by more than one in a ``step()``.
        """
        return self._runner.local_step

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def end(self) -> int | None:
        """The number of steps of the training; None if the loop has not said it."""
        return self._end

    @property
    def is_over(self) -> bool:
        """Whether the training has ended: this worker or another one has reached its end."""
        return self._has_ended or (self._end is not None and self.local_step >= self._end)

    def epochs(
        self,
        loader: Iterable[_Item],
        num_epochs: int | None = None,
        *,
        num_steps: int | None = None,
        scheduler: Any = None,
        interval: Interval = "step",
        batches_per_step: int = 1,
    ) -> Iterator[tuple[int, Iterator[_Item]]]:
        """Return (number of the epoch, its batches) for each epoch, in step with the others.

        A worker that joins late begins in the epoch of the others, takes the batches that are left
        of it, and has their learning rate. All workers end when the first one has reached the end.
        The loop replaces ``for epoch in range(num_epochs)``, and the loop in it goes over the
        batches in place of the loader.

        Args:
            loader: the batches of an epoch, such as a ``DataLoader``. Without a length it needs
                ``num_steps``, and a newcomer begins with its first batch.
            num_epochs: number of epochs; None: ``num_steps`` is the length.
            num_steps: number of steps; None: ``num_epochs`` is the length.
            scheduler: a scheduler of ``torch.optim.lr_scheduler``. You go on calling its
                ``step()``; it is brought to the step of the others, or to their epoch.
            interval: whether you step the scheduler once per ``"step"`` or ``"epoch"``.
            batches_per_step: batches of a step, with gradient accumulation.

        Raises:
            ConfigError: if an argument is wrong, or a scheduler needs scores, as
                ``ReduceLROnPlateau`` does: it cannot be brought to a step.
        """
        return iter(
            Epochs(
                self,
                loader,
                num_epochs,
                num_steps=num_steps,
                scheduler=scheduler,
                interval=interval,
                batches_per_step=batches_per_step,
            )
        )

    def set_end(self, num_steps: int | None) -> None:
        """Set the number of steps of the training; ``epochs()`` does so itself."""
        self._end = num_steps
        if self._has_ended:
            self._move_to(num_steps or 0)

    def begin_at(self, step: int) -> None:
        """Set the step of a loop that is resumed, before the worker joins the others."""
        if self._runner.strategy is None:
            self._runner.local_step = max(self.local_step, step)

    def pop_num_ahead(self) -> int:
        """Return how many steps the others were ahead of this worker, since the last call.

        By so many steps its loop and its schedulers are to move on.
        """
        num_ahead, self._num_ahead = self._num_ahead, 0
        return num_ahead

    def finish(self) -> None:
        """Say that the training has reached its end, so that all other workers end, too.

        ``epochs()`` does so itself. The center can still be read; then leave with ``detach()``.
        """
        self._note_end()
        if self._runner.strategy is not None:
            self._rendezvous.end_training(self._center)

    def _note_end(self) -> None:
        self._has_ended = True
        self._move_to(self._end or 0)

    def _move_to(self, step: int) -> None:
        """Move the count of steps on to a step, if it is behind."""
        num_ahead = max(0, step - self.local_step)
        self._runner.local_step += num_ahead
        self._num_ahead += num_ahead

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The optimizer's groups."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's state, by parameter."""
        return self._optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The optimizer's defaults of a group."""
        return self._optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an AttachError: further parameters would not be exchanged."""
        raise AttachError(
            self._rendezvous.name,
            "a parameter group cannot be added after raydl.attach; add it to the optimizer before",
        )

    @property
    def rank(self) -> int:
        """This worker's rank in this generation, 0..num_workers-1."""
        return self._inside().place[0]

    @property
    def num_workers(self) -> int:
        """Number of workers that train now."""
        return self._inside().place[1]

    @property
    def generation(self) -> int:
        """Number of the generation that this worker is in."""
        self._inside()
        return self._runner.generation

    @property
    def worker_id(self) -> str:
        """This worker's stable id, which is never used again."""
        self._inside()
        return self._rendezvous.worker_id

    def center_state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict with the center's weights and buffers, on the CPU."""
        center = self._newest_center()
        return self._flat.state_dict_of(*_tensors_of(center), center.non_trainable)

    @contextlib.contextmanager
    def center(self) -> Iterator[nn.Module]:
        """Load the center into the model for an evaluation; restore its own weights at the end."""
        center = self._newest_center()
        self._flat.rebind()
        flat, outer = self._flat, self._own
        kept = flat.weights.clone(), flat.buffers.clone(), flat.non_trainable.own()
        self._own = outer or kept
        try:
            self._load(*_tensors_of(center), center.non_trainable)
            yield flat.model
        finally:
            self._load(*kept)
            self._own = outer

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's complete state, on the CPU: its replica and the center."""
        center = self._rendezvous.center() or self._center()
        weights, buffers = _tensors_of(center)
        own = self._own_state()
        return {
            "local_step": self.local_step,
            "replica": {**self._replica.state_dict(), **own},
            "untrained": {**self._frozen(), **own.get("untrained", {})},
            "feedback": self._runner.feedback_state(),
            "center": {
                **{name: value for name, value in vars(center).items() if name not in _RENAMED},
                **vars(center.progress),
                "weights": weights,
                "buffers": buffers,
                "untrained": as_tensors(center.non_trainable),
            },
        }

    def _own_state(self) -> dict[str, Any]:
        """Return the replica's part of the model's state if the model holds the center now."""
        if self._own is None:
            return {}
        weights, buffers, non_trainable = self._own
        return {
            **copied_to_cpu({"weights": weights, "buffers": buffers}),
            "untrained": as_tensors(non_trainable),
        }

    def _frozen(self) -> Any:
        """Return the state that is neither trained nor averaged, for a saved state."""
        non_trainable = self._flat.non_trainable
        return as_tensors(non_trainable.arrays() if self.saves_frozen else non_trainable.own())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, before this worker joins the others.

        If workers load different centers, all start from the one with the most exchanges. The state
        of a plain optimizer is loaded at any time, into the optimizer alone.

        Raises:
            AttachError: if this worker has joined already, and this is not its present state.
        """
        if "replica" not in state:
            self._optimizer.load_state_dict(state)
            return
        if self._runner.strategy is not None:
            if self._is_present(state):
                return  # some libraries load the state that they have just read
            raise AttachError(
                self._rendezvous.name,
                "load_state_dict must be called before `with`, step() and rank",
            )
        self._flat.non_trainable.load(state.get("untrained", {}))  # earlier states have none
        if state["local_step"] or self.local_step:
            untrained = state["replica"].get("untrained", {})
            _, others = self._flat.split_buffers(state["replica"]["buffers"], untrained)
            self._loaded = _loaded_center(state["center"], self._flat, untrained)
            self._loaded_non_trainable = {**untrained, **others}
        self._replica.load_state_dict(state["replica"])
        self._optimizer.load_state_dict(copied_to_cpu(state["replica"]["optimizer"]))
        compression = self._method.compression
        self._runner.load_feedback(state.get("feedback", []), compression)  # not in earlier states
        self._runner.local_step = state["local_step"]

    def _is_present(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state of ``state_dict`` has this worker's present steps and weights."""
        weights = state["replica"]["weights"].to(self._flat.weights)
        return state["local_step"] == self.local_step and torch.equal(weights, self._flat.weights)

    def join(self) -> None:
        """Join the others now; otherwise this worker does so with its first step.

        Raises:
            ExchangeError: if that failed too often.
        """
        self._inside()

    def detach(self) -> None:
        """Leave; the others continue. This worker's steps since its last exchange are lost."""
        # Without a strategy it has not got as far as a copy of the center.
        self._rendezvous.leave_rendezvous(self._center if self._runner.strategy else None)
        _HOLDERS.pop(self._flat.model, None)

    def __enter__(self) -> Attached:
        self.join()
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    # entering a generation

    def _inside(self) -> Strategy:
        """Return the strategy of this generation; join one first if necessary."""
        if self._runner.strategy is None:
            self._join()
        return self._runner.entered()

    def _join(self) -> None:
        """Enter the next generation and open its first round.

        Raises:
            ExchangeError: if that failed too often.
        """
        while True:
            try:
                self._enter()
            except ExchangeError as error:
                self._count_failure(error)
                continue
            try:
                return self._open_round()
            except ExchangeError as error:
                self._undo_round(error)

    def _undo_round(self, error: ExchangeError) -> None:
        """Undo the committed parts of a round whose exchange failed."""
        self._runner.undo_round()
        self._count_failure(error)

    def _count_failure(self, error: ExchangeError) -> None:
        """Raise the error after too many failures in a row, without a completed round between."""
        self._num_failed += 1
        if self._num_failed >= self._job.config.elastic.max_restarts:
            raise error

    def _enter(self) -> None:
        with self._parts.measure("initialization"):
            is_new = self._runner.strategy is None
            entry = self._rendezvous.enter(self._age(), self._center, self._first_non_trainable)
            snapshot = entry.snapshot or self._center()
            if entry.non_trainable is not None:  # the loaded state, if any, is this worker's own
                self._flat.non_trainable.load_first(entry.non_trainable)
                self._flat.non_trainable.load(snapshot.non_trainable)
                self._flat.non_trainable.load(self._loaded_non_trainable)
            self._start_replica(snapshot)
            self._runner.worker_id = self._rendezvous.worker_id
            self._runner.enter(entry.membership, entry.transport, snapshot)
        if entry.has_ended:
            self._note_end()
        if entry.has_ended and is_new:
            _logger.warning(
                "the training %r has ended at step %d, so worker %s does not begin; to train "
                "again, attach under another name",
                self._rendezvous.name,
                snapshot.progress.local_step,
                self._rendezvous.worker_id,
            )

    def _first_non_trainable(self) -> NonTrainable:
        """Return the non-trainable state of this worker's model, for all workers to start with."""
        self._flat.non_trainable.mark()
        return self._flat.non_trainable.arrays()

    def _age(self) -> Age:
        """Return the age of this worker's copy of the center, by its copy of the ledger.

        With messages another worker may have the same ledger and later weights, so the exchanges
        count, too.
        """
        runner = self._runner
        if runner.strategy is not None:
            return runner.strategy.ledger_round, runner.num_changes + runner.round
        if self._loaded is None:
            return 0, 0
        return age_of(self._loaded)

    def _start_replica(self, snapshot: Snapshot) -> None:
        """Bring the replica to the start of a generation."""
        self._flat.rebind()
        self._move_to(snapshot.progress.local_step)
        if self._runner.strategy is not None:
            self._runner.catch_up(snapshot)
            return
        self._runner.is_behind = False
        if self._loaded is None:
            self._runner.become(snapshot)
        elif not self._method.rule.ahead and self._loaded.progress.round != snapshot.progress.round:
            self._runner.become(snapshot)  # it follows the center, which has moved since

    # a round, step by step

    def _open_round(self) -> None:
        self._runner.open_round()
        self._begin_step()

    def _begin_step(self) -> None:
        """Begin a step and its exchanges, before the user's code computes the gradient."""
        self._runner.begin_step(float(self._optimizer.param_groups[0]["lr"]))
        self._vote()
        if self._is_ahead:
            self._runner.send_ahead()

    def _vote(self) -> None:
        """Vote to regroup with the next header, if a worker waits to join."""
        if self._rendezvous.signal is Signal.REGROUP:
            self._runner.vote(self._runner.generation, regroup=1.0)

    def _take_step(self) -> None:
        self._vote()
        self._runner.take_step(lambda plan: (None, self._replica.step_with_given_gradients(plan)))
        runner = self._runner
        if runner.num_left:
            # A pending exchange may still arrive.
            is_over = self._rendezvous.signal is Signal.OVER and not runner.num_pending
            if is_over and not self._ends_in_round():
                raise ExchangeError(runner.round, runner.generation, "the generation is over")
            self._begin_step()
            return
        decision = runner.close_round()
        self._num_failed = 0
        self._warn_of_equal_replicas()
        runner.pop_records()  # dropped, or they would pile up
        for lost in runner.pop_lost_residuals():
            warnings.warn(lost.sentence(runner.worker_id), RuntimeWarning, stacklevel=2)
        if self._rendezvous.signal is Signal.ENDED and not self._has_ended:
            self._note_end()
        if decision.outcome is Outcome.GO_ON and self._rendezvous.signal is not Signal.OVER:
            self._open_round()
        else:
            self._join()

    def _ends_in_round(self) -> bool:
        """Return whether the training ends before the last step of this round.

        Then the others may have left before this worker, which needs them no more.
        """
        return self._end is not None and self._end < self.local_step + self._runner.num_left

    def _warn_of_equal_replicas(self) -> None:
        """Warn once if two workers train the same batches."""
        if self._has_warned or (equal := self._runner.equal_replicas()) is None:
            return
        self._has_warned = True
        advice = (
            "seed each worker differently, as by torch.manual_seed(seed + elastic.rank), or give "
            "each its own samples, as by a DistributedSampler with elastic.rank"
        )
        warnings.warn(equal.sentence(advice), RuntimeWarning, stacklevel=5)

    def _has_finite_gradients(self) -> bool:
        """Return whether all gradients are finite; True if there are none."""
        gradients = [p.grad for p in parameters_of(self._optimizer) if p.grad is not None]
        gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        if math.isfinite(float(nn.utils.get_total_norm(gradients))):
            return True
        # The sum of the squares of finite values may overflow.
        return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)

    # weights

    def _check_step(self) -> None:
        self._rendezvous.check()
        if self._own is not None:
            problem = "step() cannot be called in `with center()`: the model holds the center there"
            raise AttachError(self._rendezvous.name, problem)
        try:
            self._flat.rebind()
        except ShapeError as error:
            raise AttachError(
                self._rendezvous.name,
                f"{error}; move or convert the model before raydl.attach",
            ) from error

    def _check_exchanged(self) -> None:
        """Raise an AttachError if the optimizer would train a parameter that is not exchanged."""
        for parameter in parameters_of(self._optimizer):
            if parameter.grad is not None and id(parameter) not in self._exchanged:
                names = {id(p): name for name, p in self._flat.model.named_parameters()}
                name = names.get(id(parameter), "a parameter")
                raise AttachError(
                    self._rendezvous.name,
                    f"{name} has a gradient but was not trainable at raydl.attach, so it would be "
                    f"trained without being exchanged; unfreeze it before raydl.attach, and set "
                    f"its group's lr to 0 until it is to be trained",
                )

    def _load(self, weights: Tensor, buffers: Tensor, non_trainable: NonTrainable) -> None:
        """Load weights, buffers and non-trainable state into the model."""
        self._flat.rebind()
        self._flat.weights.copy_(weights)
        self._flat.buffers.copy_(buffers)
        self._flat.non_trainable.load(non_trainable)

    def _center(self) -> Snapshot:
        """Return this worker's copy of the center, with this worker's count of steps."""
        if self._runner.strategy is not None:
            center = self._runner.center()
            progress = dataclasses.replace(center.progress, local_step=self.local_step)
            return dataclasses.replace(center, progress=progress)
        if self._loaded is not None:
            return self._loaded
        first = first_snapshot(self._flat, ENDLESS)
        return dataclasses.replace(first, progress=Progress(local_step=self.local_step))

    def _newest_center(self) -> Snapshot:
        """Return the current center: from the rendezvous, or this worker's copy."""
        self._inside()
        return self._rendezvous.center() or self._center()


def _who(handle: weakref.ref[Attached]) -> Callable[[], tuple[str, int]]:
    """Return a function that returns (worker id, local step), without a reference to the handle."""

    def who() -> tuple[str, int]:
        attached = handle()
        assert attached is not None, "only the handle takes steps"
        return attached._rendezvous.worker_id, attached.local_step

    return who


_RENAMED = ("progress", "non_trainable")
"""Fields of a snapshot that have other names in a saved state."""


def _loaded_center(
    center: Mapping[str, Any], flat: FlatModel, untrained: Collection[str]
) -> Snapshot:
    """Return the center in a saved state.

    Args:
        center: from the state.
        flat: the model.
        untrained: names of the replica's non-trainable state.
    """
    names = {field.name for field in dataclasses.fields(Snapshot)}
    kept = {name: value for name, value in center.items() if name in names}
    buffers, others = flat.split_buffers(center["buffers"].cpu(), untrained)
    arrays = {"weights": center["weights"].cpu().numpy(), "buffers": buffers.numpy()}
    others |= center.get("untrained", {})
    non_trainable = {name: tensor.cpu().numpy() for name, tensor in others.items()}
    progress = Progress.from_dict(center)
    return Snapshot(**{**kept, **arrays, "progress": progress, "non_trainable": non_trainable})


def _tensors_of(snapshot: Snapshot) -> tuple[Tensor, Tensor]:
    return torch.tensor(snapshot.weights), torch.tensor(snapshot.buffers)
