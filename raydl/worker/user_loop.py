"""Keep your own training loop: a replica that exchanges with the others when it is due.

The arithmetic is ``raydl.core.replica.Replica``'s, and the strategies say which exchanges
happen when, as in ``raydl.worker.loop``; but here the user's loop calls. An exchange that is due
begins at the end of the step before, so that it is on its way while the user's code computes the
gradient. What all workers must agree on is checked before anything starts; a model belongs to one
handle at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from raydl.config import TrainConfig, TrainingConfig, dotted, to_dict
from raydl.core.center import Snapshot, copied_to_cpu, first_snapshot
from raydl.core.custom_rule import try_rule
from raydl.core.exchange import cell_size
from raydl.core.flat import FlatModel
from raydl.core.job import Job
from raydl.core.methods import check_weights, resolve
from raydl.core.non_trainable import NonTrainable, as_tensors
from raydl.core.optimizers import parameters_of
from raydl.core.progress import Progress
from raydl.core.replica import Replica
from raydl.core.reports import Outcome
from raydl.core.rules import Rule, Sends
from raydl.core.strategy import Strategy
from raydl.data import DataShape
from raydl.elastic.rendezvous import Age, Signal
from raydl.elastic.rendezvous_client import RendezvousClient
from raydl.errors import AttachError, ConfigError, ExchangeError, ShapeError, StepError
from raydl.metrics import TimeParts
from raydl.tasks import Batch
from raydl.worker.round_runner import RoundRunner

_HOLDERS: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Any], str]] = (
    weakref.WeakKeyDictionary()
)
"""By model, its handle, which may be gone without having been detached, and the run's name."""


def claim(model: nn.Module, holder: object, name: str) -> None:
    """Note that a model is attached.

    Args:
        model: of the user.
        holder: the handle; the claim ends with it.
        name: of the run.

    Raises:
        ConfigError: another handle has it.
    """
    holder_now, name_now = _HOLDERS.get(model, (lambda: None, ""))
    if holder_now() is not None:
        raise ConfigError(
            "model",
            f"is attached to {name_now!r} already, and would wait for itself; call detach() of "
            f"that handle first, or leave its `with`",
        )
    _HOLDERS[model] = weakref.ref(holder), name


def release(model: nn.Module) -> None:
    """Let others attach a model."""
    _HOLDERS.pop(model, None)


ENDLESS = 2**62
"""Steps of a loop that only its owner ends."""


class UserLoop:
    """The place of a task: the user's loop knows model and loss.

    Args:
        name: of the model.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def build_model(self, shape: DataShape) -> nn.Module:
        """Never asked for."""
        raise AssertionError("the model is given")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Never asked for."""
        raise AssertionError("the user's loop computes the loss")

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Never asked for."""
        raise AssertionError("the user's loop scores the model")


class Endless:
    """The order of steps: each comes once."""

    num_samples = ENDLESS
    name = "endless"

    def rows(self, epoch: int, positions: Any) -> Any:
        """Return the positions."""
        return positions

    def cuts(self, epoch: int) -> None:
        """Return None: there are no blocks."""
        return None

    def near(self, epoch: int, position: int) -> Any:
        """Return no rows: nothing is read."""
        return ()


def job_of(config: TrainConfig, model: Any, optimizer: Any, rule: Rule | None) -> Job:
    """Return the job of all workers, without an end.

    Args:
        config: with the method, the workers, how they exchange, how they come and go.
        model: of the user.
        optimizer: of the user.
        rule: of the user's own, instead of the method's.

    Raises:
        ConfigError: something in it does not go together with a loop of one's own.
        ShapeError: the model has nothing to train, or not all of one kind.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError("model", f"must be a torch.nn.Module, got a {type(model).__name__}")
    FlatModel.check(model)
    check_optimizer(optimizer, model)
    if config.scaling.min_workers < 1:
        raise ConfigError("num_workers", f"must be 1 or more, got {config.scaling.wanted()}")
    name = type(model).__name__
    method = resolve(config, rule)
    trained = [p for p in model.parameters() if p.requires_grad]
    check_weights(name, trained, config, method)
    if method.has_custom_rule:
        size = sum(p.numel() for p in trained)
        fragments = config.exchange.fragments
        size = cell_size(size, num_shards=1, num_fragments=fragments)
        try_rule(method.rule, size, device=trained[0].device)
    if not method.rule.steps_replica:
        raise ConfigError(
            "method.name",
            f"can not be {method.name}: its optimizer steps at the center, and yours is here; "
            f"take local-sgd with method.period 1",
        )
    if method.finds_tuning:
        raise ConfigError("method.period", "must be a number with a loop of your own, got auto")
    for setting, value in (
        ("method.group_size", config.method.group_size),
        ("exchange.center_shards", config.exchange.center_shards),
    ):
        if value > 1:
            raise ConfigError(setting, f"must be 1 with a loop of your own, got {value}")
    return Job(config, method, UserLoop(name), DataShape((), 0), Endless())


def endless_training() -> TrainingConfig:
    """Return the length of a training that only its owner ends: a step is a sample."""
    return TrainingConfig(steps=ENDLESS, batch_size=1)


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise a ConfigError unless an optimizer holds a model's parameters, and no others."""
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise ConfigError("optimizer", f"must be a torch.optim.Optimizer, got a {kind}")
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "optimizer", "can not be LBFGS: it asks for the loss several times in a step"
        )
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    held = {id(p) for p in parameters_of(optimizer) if p.requires_grad}
    missing = [name for key, name in trained.items() if key not in held]
    if missing:
        raise ConfigError(
            "optimizer",
            f"does not hold {len(missing)} of the model's {len(trained)} parameters, {missing[0]} "
            f"for example; make it of model.parameters(), and call requires_grad_(False) on "
            f"those that are not trained",
        )
    others = len(held - trained.keys())
    if others:
        raise ConfigError(
            "optimizer",
            f"holds {others} parameters that are not the model's and would not be exchanged; "
            f"attach one module that has them all",
        )


def terms_of(job: Job, model: nn.Module) -> dict[str, Any]:
    """Return the settings that all workers of a run must agree on."""
    config = job.config
    settings = {"method": to_dict(config.method), "exchange": to_dict(config.exchange)}
    return {**dotted(settings), "num_workers": config.scaling.wanted(), "model": _layout_of(model)}


def _layout_of(model: nn.Module) -> str:
    """Return in short which tensors a model has: two models of one layout fit each other."""
    tensors = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
    ]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return (
        f"{trained:,} trained parameters, {len(tensors)} tensors in all "
        f"({zlib.crc32(repr(tensors).encode()):08x})"
    )


_MOST_SKIPPED = 50
"""A GradScaler halves its scale with each step that is skipped; more of them lead nowhere."""


class Attached:
    """A model and an optimizer of the user's, and their exchanges with those of other workers.

    Args:
        model: on its device; its parameters become views of one tensor.
        optimizer: over its parameters.
        job: what all workers do; the job has no end, and its samples are steps.
        rendezvous: the way to the others.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, job: Job, rendezvous: RendezvousClient
    ) -> None:
        claim(model, self, rendezvous.name)
        self._job, self._rendezvous, self._optimizer = job, rendezvous, optimizer
        self._method = job.method
        self._is_ahead = job.method.rule.sends is Sends.WEIGHTS and job.method.overlap
        flat = FlatModel(model, name=job.task.name)
        self._parts = TimeParts.on(flat.weights.device)
        self._replica = Replica(
            flat,
            job.task,
            rule=job.method.rule,
            make_optimizer=lambda _: optimizer,
            time_parts=self._parts,
            has_dynamic_weights=job.config.method.dynamic_weights,
            who=_who(weakref.ref(self)),  # a handle that is dropped goes at once
        )
        self._flat = self._replica.flat
        self._flat.release_gradients()
        self._runner = RoundRunner(job, self._replica, time_parts=self._parts)
        self._loaded: Snapshot | None = None
        self._loaded_non_trainable: Mapping[str, Any] = {}
        self._is_away = False
        self._num_failed = self._num_skipped = 0
        weakref.finalize(
            self, rendezvous.fall_silent
        ).atexit = False  # a loop that forgot to detach

    # what the user's loop asks

    def step(self) -> None:
        """Take the optimizer's step, and exchange as far as it is due; for ``optimizer.step()``.

        With gradients that are not finite, as a GradScaler's may be, nothing is done: neither the
        replica nor the center moves, and the step does not count.

        Raises:
            AttachError: this worker can not go on together with others; see its sentence.
            ExchangeError: no round was completed in ``elastic.max_restarts`` attempts.
            StepError: the gradients of 50 steps in a row were not finite, or the weights are not.
        """
        self._check_step()
        if not self._has_finite_gradients():
            self._skip_step()
            return
        self._num_skipped = 0
        if self._runner.strategy is None:  # the gradient is that of the weights before
            self._optimizer.step()
            self._runner.local_step += 1
            self._join()
            return
        try:
            self._take_step()
        except ExchangeError as error:
            self._fall_behind(error)
            self._join()

    @property
    def local_step(self) -> int:
        """Local steps so far; of a worker that came later, with those of the others before it."""
        return self._runner.local_step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's: with them this object serves ``torch.amp.GradScaler`` as one."""
        return self._optimizer.param_groups

    @property
    def rank(self) -> int:
        """This worker's, 0..num_workers-1 in this generation."""
        return self._inside().place[0]

    @property
    def num_workers(self) -> int:
        """Workers that train now."""
        return self._inside().place[1]

    @property
    def generation(self) -> int:
        """How often the workers have changed, as far as this one has noticed."""
        self._inside()
        return self._runner.generation

    @property
    def worker_id(self) -> str:
        """Stable, and never used again."""
        self._inside()
        return self._rendezvous.worker_id

    def center_state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict with the center's weights and buffers, on the CPU."""
        center = self._newest_center()
        return self._flat.state_dict_of(*_tensors_of(center), center.non_trainable)

    @contextlib.contextmanager
    def center(self) -> Iterator[nn.Module]:
        """Let the model hold the center's weights and buffers, for an evaluation; then its own."""
        center = self._newest_center()
        self._flat.rebind()
        kept = self._flat.weights.clone(), self._flat.buffers.clone()
        kept_non_trainable = self._flat.non_trainable.own()
        self._is_away = True
        try:
            self._hold(*_tensors_of(center))
            self._flat.non_trainable.load(center.non_trainable)
            yield self._flat.model
        finally:
            self._hold(*kept)
            self._flat.non_trainable.load(kept_non_trainable)
            self._is_away = False

    def state_dict(self) -> dict[str, Any]:
        """Return all that this worker needs to go on later, on the CPU: its model, the center."""
        center = self._rendezvous.center() or self._center()
        weights, buffers = _tensors_of(center)
        non_trainable = as_tensors(center.non_trainable)
        return {
            "local_step": self.local_step,
            "replica": self._replica.state_dict(),
            "untrained": as_tensors(self._flat.non_trainable.arrays()),
            "center": {
                **{name: value for name, value in vars(center).items() if name not in _RENAMED},
                **vars(center.progress),
                "weights": weights,
                "buffers": buffers,
                "untrained": non_trainable,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; before this worker comes to the others.

        Where workers bring different centers, the one with most exchanges is taken.

        Raises:
            AttachError: this worker trains already.
        """
        if self._runner.strategy is not None:
            raise AttachError(
                self._rendezvous.name,
                "load_state_dict comes first: before `with`, step() and the question for a rank",
            )
        self._loaded = _loaded_center(state["center"])
        self._flat.non_trainable.load(state.get("untrained", {}))  # earlier states have none
        self._loaded_non_trainable = state["replica"].get("untrained", {})
        self._replica.load_state_dict(state["replica"])
        self._optimizer.load_state_dict(copied_to_cpu(state["replica"]["optimizer"]))
        self._runner.local_step = state["local_step"]

    def detach(self) -> None:
        """Leave; the others go on. Steps since the last exchange are lost with this worker."""
        self._rendezvous.leave_rendezvous(self._center)
        release(self._flat.model)

    def __enter__(self) -> Attached:
        self._inside()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    # entering a generation

    def _inside(self) -> Strategy:
        """Return the strategy of this generation; enter one first, if it must be."""
        if self._runner.strategy is None:
            self._join()
        assert self._runner.strategy is not None
        return self._runner.strategy

    def _join(self) -> None:
        """Enter the next generation and open its first round.

        Raises:
            ExchangeError: it failed again and again.
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
                self._fall_behind(error)

    def _fall_behind(self, error: ExchangeError) -> None:
        """Undo what an exchange that failed has done in part."""
        self._runner.undo_round()
        self._count_failure(error)

    def _count_failure(self, error: ExchangeError) -> None:
        """Give up after too many in a row, without a round between them."""
        self._num_failed += 1
        if self._num_failed >= self._job.config.elastic.max_restarts:
            raise error

    def _enter(self) -> None:
        with self._parts.measure("initialization"):
            entry = self._rendezvous.enter(self._age(), self._center, self._first_non_trainable)
            snapshot = entry.snapshot or self._center()
            if entry.non_trainable is not None:
                self._take_over_non_trainable(entry.non_trainable, snapshot)
            self._take_over(snapshot)
            self._runner.worker_id = self._rendezvous.worker_id
            self._runner.enter(entry.membership, entry.transport, snapshot)

    def _first_non_trainable(self) -> NonTrainable:
        """Return the non-trainable state of this worker's model, which all begin with."""
        self._flat.non_trainable.mark()
        return self._flat.non_trainable.arrays()

    def _take_over_non_trainable(self, first: NonTrainable, snapshot: Snapshot) -> None:
        """Begin with the others' non-trainable state; what was loaded is this worker's own."""
        self._flat.non_trainable.load_first(first)
        self._flat.non_trainable.load(snapshot.non_trainable)
        self._flat.non_trainable.load(self._loaded_non_trainable)

    def _age(self) -> Age:
        """Return the age of this worker's copy of the center, by the ledger that it knows.

        By messages others may know the same ledger, and later weights: so their exchanges count,
        too.
        """
        runner = self._runner
        if runner.strategy is not None:
            return runner.strategy.ledger_round, runner.num_changes + runner.round
        if self._loaded is None:
            return 0, 0
        return self._loaded.progress.round, int(self._loaded.ledger["num_changes"])

    def _take_over(self, snapshot: Snapshot) -> None:
        """Let the replica go on from where a generation starts."""
        self._flat.rebind()
        if self._runner.strategy is not None:
            self._runner.catch_up(snapshot)
            return
        self._runner.is_behind = False
        if self._loaded is None:
            self._runner.local_step = max(self.local_step, snapshot.progress.local_step)
            self._runner.become(snapshot)
        elif (
            self._method.rule.sends is not Sends.WEIGHTS
            and self._loaded.progress.round != snapshot.progress.round
        ):
            self._runner.become(snapshot)  # it follows the center, which has gone on

    # a round, step by step

    def _open_round(self) -> None:
        self._runner.open_round()
        self._begin_step()

    def _begin_step(self) -> None:
        """Begin a step; send what is due in it, while the user's code computes its gradient."""
        self._runner.begin_step(float(self._optimizer.param_groups[0]["lr"]))
        self._vote()
        if self._is_ahead:
            self._runner.send_ahead()

    def _vote(self) -> None:
        """Vote to leave the generation with the next header, if somebody waits to join."""
        if self._rendezvous.signal is Signal.REGROUP:
            self._runner.vote(self._runner.generation, regroup=1.0)

    def _take_step(self) -> None:
        self._vote()
        self._runner.take_step(lambda plan: (None, self._replica.step_as_it_is(plan)))
        if self._runner.num_left:
            self._check_signal()
            self._begin_step()
        else:
            self._close_round()

    def _check_signal(self) -> None:
        """Leave a generation that is over, unless an exchange under way may yet arrive."""
        if self._rendezvous.signal is Signal.OVER and not self._runner.num_flying:
            runner = self._runner
            raise ExchangeError(runner.round, runner.generation, "the generation is over")

    def _close_round(self) -> None:
        decision = self._runner.close_round()
        self._num_failed = 0
        self._runner.pop_records()  # nobody reads them; they would pile up
        if decision.outcome is Outcome.GO_ON and self._rendezvous.signal is not Signal.OVER:
            self._open_round()
        else:
            self._join()

    def _has_finite_gradients(self) -> bool:
        """Whether the gradients are finite; with none at all they are."""
        gradients = [p.grad for p in parameters_of(self._optimizer) if p.grad is not None]
        found = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        if math.isfinite(float(nn.utils.get_total_norm(found))):
            return True
        # The squares of large numbers may have been too large for a sum.
        return all(bool(torch.isfinite(gradient).all()) for gradient in found)

    def _skip_step(self) -> None:
        self._num_skipped += 1
        if self._num_skipped == _MOST_SKIPPED:
            raise StepError(
                self._rendezvous.worker_id,
                self.local_step,
                f"the gradients were not finite {_MOST_SKIPPED} times in a row, so it was not "
                f"taken; lower the learning rate, or look at the data of that step",
            )

    # weights

    def _check_step(self) -> None:
        self._rendezvous.check()
        if self._is_away:
            problem = "step() inside `with elastic.center()`: the model holds the center there"
            raise AttachError(self._rendezvous.name, problem)
        try:
            self._flat.rebind()
        except ShapeError as error:
            raise AttachError(
                self._rendezvous.name,
                f"{error}; move or convert the model before it is attached",
            ) from error

    def _hold(self, weights: Tensor, buffers: Tensor) -> None:
        """Put other weights and buffers into the model."""
        self._flat.rebind()
        self._flat.weights.copy_(weights)
        self._flat.buffers.copy_(buffers)

    def _center(self) -> Snapshot:
        """Return the center as this worker knows it."""
        if self._runner.strategy is not None:
            return self._runner.center()
        if self._loaded is not None:
            return self._loaded
        first = first_snapshot(self._flat, ENDLESS)
        return dataclasses.replace(first, progress=Progress(local_step=self.local_step))

    def _newest_center(self) -> Snapshot:
        """Return the center as it is now, wherever it is."""
        self._inside()
        return self._rendezvous.center() or self._center()


def _who(handle: weakref.ref[Attached]) -> Callable[[], tuple[str, int]]:
    """Return what tells (worker, its local step) of a handle, while that exists."""

    def who() -> tuple[str, int]:
        attached = handle()
        assert attached is not None, "a step is its handle's"
        return attached._rendezvous.worker_id, attached.local_step

    return who


_RENAMED = ("progress", "non_trainable")
"""Fields of a snapshot that stand in a saved state under other names."""


def _loaded_center(center: Mapping[str, Any]) -> Snapshot:
    """Return the center of a saved state."""
    names = {field.name for field in dataclasses.fields(Snapshot)}
    kept = {name: value for name, value in center.items() if name in names}
    arrays = {name: center[name].numpy() for name in ("weights", "buffers")}
    non_trainable = {name: tensor.numpy() for name, tensor in center.get("untrained", {}).items()}
    progress = Progress.from_dict(center)
    return Snapshot(**{**kept, **arrays, "progress": progress, "non_trainable": non_trainable})


def _tensors_of(snapshot: Snapshot) -> tuple[Tensor, Tensor]:
    return torch.tensor(snapshot.weights), torch.tensor(snapshot.buffers)
