"""The training loop of one worker: get samples, take the local steps of a round, exchange, go on.

No Ray here: an actor drives it in a cluster, the trainer drives it in one process, and a test
drives several in threads. ``raydl.worker.round_runner`` exchanges.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from raydl.collective.sync_exchange import GradientGroup, Group
from raydl.core.center import Snapshot
from raydl.core.compression import ErrorFeedback, parse_codec
from raydl.core.copy_buffers import CopyBuffers, sizes_of
from raydl.core.exchange import StepPlan
from raydl.core.job import BeforeStep, Job, first_model
from raydl.core.membership import Membership
from raydl.core.non_trainable import NonTrainable
from raydl.core.optimizers import lr_at, make_optimizer
from raydl.core.replica import Replica, Stepped
from raydl.core.reports import Outcome, WorkerReport
from raydl.core.rules import Sends
from raydl.core.saved_state import pack
from raydl.core.strategy import Strategy, WorkerContext
from raydl.core.tensor_files import TensorFile
from raydl.data import Batches
from raydl.data.generators import generators_state, load_generators, seed_generators
from raydl.data.loader import Feed
from raydl.errors import ExchangeError, NonFiniteCenterError, NonFiniteError, StateLostError
from raydl.metrics import TimeParts
from raydl.parameter_server.protocol import CenterClient
from raydl.worker.round_runner import RoundRunner

LAST = -1
"""In place of a round: the state of a worker that has left its loop for good."""


class Worker:
    """One replica and its way through the epochs.

    Args:
        job: what all workers share.
        worker_id: the stable id, ``w0``, ``w1``, …
        batches: the training set.
        publish: takes a committed snapshot of the center to where it is served.
        incarnation: which life of this worker.
        before_step: is called before each local step.
        non_trainable: the non-trainable state of the run's first model; None: as the model is
            built.
    """

    def __init__(
        self,
        job: Job,
        worker_id: str,
        *,
        batches: Batches,
        publish: Callable[[Snapshot], object],
        incarnation: int = 0,
        before_step: BeforeStep | None = None,
        non_trainable: NonTrainable | None = None,
    ) -> None:
        self.worker_id = worker_id
        self._device = torch.device(job.config.scaling.device)
        self.parts = TimeParts.on(self._device)
        self._job = job
        self._publish = publish
        self._before_step = before_step
        self._method = job.method
        self._feed = Feed(batches, job.order, device=self._device, time_parts=self.parts)
        with self.parts.measure("initialization"):
            flat = first_model(job, non_trainable, device=job.config.scaling.device)
            model = flat.model
            self.replica = Replica(
                flat,
                job.task,
                rule=self._method.rule,
                make_optimizer=make_optimizer(job.method.inner, job.method.own_optimizer, model),
                training=job.config.training,
                time_parts=self.parts,
                has_dynamic_weights=job.config.method.dynamic_weights,
                needs_all_gradients=self._method.needs_all_gradients,
                who=lambda: (self.worker_id, self.local_step),
            )
        self.runner = RoundRunner(
            job,
            self.replica,
            time_parts=self.parts,
            incarnation=incarnation,
            worker_id=worker_id,
        )
        self._lock = threading.Lock()
        self._kept: dict[int, dict[str, Any]] = {}
        self._held: dict[int, TensorFile] = {}
        self._copies = CopyBuffers()
        self._first_non_trainable = non_trainable or {}
        self._non_trainable_then = (
            self._first_non_trainable
        )  # with the newest generation's snapshot
        self._has_diverged = False

    # joining and leaving a generation

    def join(
        self,
        membership: Membership,
        transport: Group | CenterClient,
        snapshot: Snapshot,
        own_state: dict[str, Any] | None = None,
        partners: Group | None = None,
    ) -> None:
        """Enter a generation.

        Args:
            membership: who trains.
            transport: connects this worker with the others, or with the center.
            snapshot: the center they all start from.
            own_state: what this worker kept in a checkpoint, or another one handed over; its
                tensors are this worker's from here on. None: nothing, or it is in memory.
            partners: connects the workers that share this one's replica, if any do.
        """
        with self.parts.measure("initialization"):
            if self.runner.strategy is None:
                self._start_from(snapshot, own_state)
            elif self._has_diverged:
                self._start_over(snapshot)
                self._has_diverged = self.runner.is_behind = False
            else:
                self.runner.catch_up(snapshot)
            context = self.runner.enter(membership, transport, snapshot)
            self._non_trainable_then = {**self._first_non_trainable, **snapshot.non_trainable}
            self._join_partners(partners, context)

    def _join_partners(self, group: Group | None, context: WorkerContext) -> None:
        """Share the replica of the group's first worker."""
        self.replica.partners = None
        if group is None:
            return
        weights, layers = context.flat.weights, context.flat.layer_sizes
        partners = GradientGroup(
            group, weights.numel(), len(layers), dtype=weights.dtype, device=context.center_device()
        )
        is_first = context.rank % self._job.config.method.group_size == 0
        try:
            is_other = self.replica.copy_first_(partners, is_first=is_first)
        except ExchangeError:
            self.runner.is_behind = True
            raise
        if is_other:  # what this worker did by itself is gone
            self.runner.trained.keep_first(0)
        self.replica.partners = partners

    def _start_from(self, snapshot: Snapshot, own_state: dict[str, Any] | None) -> None:
        self.runner.local_step = snapshot.progress.local_step
        self.runner.become(snapshot)
        self.replica.flat.non_trainable.load(snapshot.non_trainable)
        if not own_state:  # or one that was spoiled, of which nothing is kept
            seed_generators(self._job.config.training.seed, self.worker_id)
        else:
            by = snapshot.tuning or self._job.config.exchange
            self._load_state(own_state, by.compression)
            is_old = own_state.get("round", snapshot.progress.round) != snapshot.progress.round
            has_open = own_state.get("num_trained", 0) > 0  # free again in a checkpoint's ledger
            if (is_old or has_open) and self._method.rule.sends is not Sends.WEIGHTS:
                self.runner.become(snapshot)  # it follows the center, which has gone on

    # one round

    def run_round(self) -> Outcome:
        """Take the local steps up to the next exchange, exchange, and return what follows.

        Whatever it raises, the center is as before the round, and this worker may join the next
        generation.

        Raises:
            ExchangeError: the exchange failed.
            NonFiniteError: the replica diverged; it has become the center again.
        """
        self.runner.find_tuning()  # should it fail, there is nothing of this round to undo
        try:
            self._take_steps()
            decision = self.runner.close_round()
        except Exception as error:
            self.runner.undo_round()
            if isinstance(error, NonFiniteError):
                self._roll_back()
            raise
        keep = decision.keep
        if keep is not None:
            state = self._state_dict()
            with self._lock:
                self._kept[keep] = state
        if decision.publishes:
            self._publish_center(is_kept=keep is not None)
        return decision.outcome

    def _take_steps(self) -> None:
        """Take the local steps of a round; none, where the center has no work for this worker."""
        round = self.runner.open_round()
        steps = round.steps()
        if steps:
            self._feed.expect(steps, round.ahead)
        for epoch, positions in steps:
            self._notice_step()
            self._begin_step()
            loss = self.runner.take_step(partial(self._step, epoch, positions))
            self.runner.losses.add(self.local_step - 1, self._feed.num_in_batch, loss)

    def _step(self, epoch: int, positions: np.ndarray, step_plan: StepPlan) -> Stepped:
        return self.replica.step(self._feed.batch(epoch, positions), step_plan)

    def _notice_step(self) -> None:
        if self._before_step is not None:
            rank, num_workers = self._entered().place
            self._before_step(
                self.worker_id,
                rank=rank,
                num_workers=num_workers,
                local_step=self.local_step,
                round=self.round,
                seconds=self.runner.elapsed_s(),
            )

    def _begin_step(self) -> None:
        """Set the learning rate of the next step."""
        num_cuts = self._entered().num_cuts
        lr = lr_at(self._method.optimizer, self.runner.share_done(), num_cuts=num_cuts)
        self.replica.set_lr(lr)
        self.runner.begin_step(lr)

    def _publish_center(self, *, is_kept: bool) -> None:
        with self.parts.measure("host_device_parameters"):
            snapshot = self.runner.center(is_kept=is_kept)
        if not snapshot.is_finite():
            self._has_diverged = True
            raise NonFiniteCenterError(snapshot.progress.round)
        self._publish(snapshot)

    def _roll_back(self) -> None:
        """Let a replica that has diverged start over at the center.

        Raises:
            NonFiniteCenterError: that has diverged, too; the replica starts over where all do next.
        """
        center = self.runner.center()
        if not center.is_finite():
            self._has_diverged = True
            raise NonFiniteCenterError(center.progress.round)
        self._start_over(center)

    def _start_over(self, center: Snapshot) -> None:
        """Let the replica begin again at a center; its samples become free again."""
        self.runner.start_over(center)
        self.replica.flat.non_trainable.load(self._non_trainable_then)

    def _entered(self) -> Strategy:
        assert self.runner.strategy is not None, "join comes first"
        return self.runner.strategy

    @property
    def local_step(self) -> int:
        """Local steps of this worker, those of the others before it came among them."""
        return self.runner.local_step

    @property
    def round(self) -> int:
        """Rounds completed since the run began, or exchanges that the center has settled."""
        return self.runner.round

    @property
    def copy_age(self) -> tuple[int, int]:
        """(Rounds, changes of the ledger) that its copy of the center has seen; -1: it has none.

        One with values that are not finite is none. Not while it trains.
        """
        if self.runner.strategy is None:
            return -1, 0
        if not self.center().is_finite():
            self._has_diverged = True
            return -1, 0
        return self.round, self.runner.num_changes

    @property
    def copy_generation(self) -> int:
        """The generation that made its copy of the center; 0: the center itself made it."""
        return self.runner.generation if self._method.is_sync else 0

    @property
    def ledger_round(self) -> int:
        """The round up to which it knows the ledger; -1: it has no copy of the center."""
        return self.runner.strategy.ledger_round if self.runner.strategy is not None else -1

    # what others ask for

    def vote(self, generation: int, **votes: float) -> None:
        """Ask all ranks to ``stop``, ``regroup`` or keep a ``checkpoint`` after a round.

        A vote counts in its generation alone. It may come before the worker has joined that
        one, since it does not wait for the order to join.
        """
        self.runner.vote(generation, **votes)

    def report(self) -> WorkerReport:
        """Return all that is new since the last report."""
        round = self.round  # before its record
        with self._lock:
            kept = tuple(self._kept)
        runner = self.runner
        return WorkerReport(
            worker_id=self.worker_id,
            round=round,
            records=runner.pop_records(),
            kept=kept,
            time_parts=self.parts.as_dict(),
            generation=runner.generation,
            local_step=runner.local_step,
            step_s=runner.step_s,
            waited_s=runner.waited_s,
            round_s=runner.round_s,
            waiting_s=self.parts.since("device_device_parameters"),
            allreduce=runner.allreduce_report(),
            choice=runner.choice(),
            left_out=self._feed.left_out,
            told_s=time.monotonic(),
            cpu_s=time.process_time(),
        )

    def center(self) -> Snapshot:
        """Return this worker's copy of the center, to go on from. Not while it trains."""
        return self.runner.center()

    def pop_kept(self, round: int) -> dict[str, Any]:
        """Hand over the state kept at that round; older ones are dropped with it.

        A worker that has left its loop stays as it is, so without a kept state it hands over
        what it has.
        """
        with self._lock:
            state = self._kept.pop(round, None)
            self._kept = {r: s for r, s in self._kept.items() if r > round}
        if state is None and self._has_diverged:
            return {}
        return self._state_dict() if state is None else state

    def hold_last(self) -> None:
        """Hold the state of a worker that has left its loop for good, without a copy of it.

        One that was spoiled has none: what is held is empty.
        """
        held = pack({} if self._has_diverged else self._state_dict(_as_it_is))
        with self._lock:
            self._held[LAST] = held

    def hold_kept(self, round: int) -> None:
        """Hold the state kept at that round, as ``pop_kept`` finds it, to be written.

        It is held until ``release``, or until two newer ones are: that of the last round may be
        wanted while the one before it is being written.
        """
        held = pack(self.pop_kept(round))
        with self._lock:
            self._held.pop(round, None)
            self._held[round] = held
            for old in [r for r in self._held if r != LAST][:-2]:
                del self._held[old]

    def held(self, round: int) -> TensorFile:
        """Return the state that is held of a round, as a file.

        Raises:
            StateLostError: it is not held any more.
        """
        with self._lock:
            held = self._held.get(round)
        if held is None:
            raise StateLostError(self.worker_id, f"that of round {round} is not held any more")
        return held

    def release(self, round: int) -> None:
        """Hold the state of a round no more: it is written, or will not be."""
        with self._lock:
            self._held.pop(round, None)

    def prepare_copy(self) -> Callable[[], None]:
        """Return a function that readies memory for a first checkpoint, in any thread."""
        sizes, prepare_center = sizes_of(self.replica.tensors()), self.runner.prepare_copy()

        def prepare() -> None:
            self._copies.prepare(sizes)
            prepare_center()

        return prepare

    def _state_dict(self, copied: Callable[[Any], Any] | None = None) -> dict[str, Any]:
        with self.parts.measure("host_device_parameters"):
            return {
                "replica": self.replica.state_dict(copied or self._copies.of),
                "local_step": self.local_step,
                "round": self.round,
                "num_trained": len(self.runner.trained),
                **self.runner.losses.state_dict(),
                "feedback": [[*span, f.state_dict()] for span, f in self.runner.feedback.items()],
                "generators": generators_state(self._device),
            }

    def _load_state(self, state: dict[str, Any], compression: str) -> None:
        self.replica.load_state_dict(state["replica"], copies=False)
        self.runner.local_step = state["local_step"]
        self.runner.losses.load_state_dict(state)
        for start, stop, residual in state["feedback"]:
            feedback = self.runner.feedback[start, stop] = ErrorFeedback(parse_codec(compression))
            feedback.load_state_dict(residual)
        load_generators(state["generators"], self._device)


def _as_it_is(value: Any) -> Any:
    return value
