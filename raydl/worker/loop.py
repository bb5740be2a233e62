"""The training loop of one worker: get samples, take the local steps of a round, exchange, repeat.

No Ray here: an actor drives it in a cluster, the trainer drives it in one process, and a test
drives several in threads. ``raydl.worker.round_runner`` exchanges.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from raydl.collective.sync_exchange import GradientGroup, Group
from raydl.config import ScalingConfig
from raydl.core.center import Snapshot
from raydl.core.copy_buffers import CopyBuffers, sizes_of
from raydl.core.exchange import StepPlan
from raydl.core.job import BeforeStep, Job, first_model
from raydl.core.lr_schedules import lr_at
from raydl.core.membership import Membership
from raydl.core.non_trainable import NonTrainable
from raydl.core.optimizers import make_optimizer
from raydl.core.replica import Replica, Stepped
from raydl.core.reports import Outcome, WorkerReport
from raydl.core.saved_state import pack, reported_as_damage
from raydl.core.scores import Evaluated
from raydl.core.strategy import WorkerContext
from raydl.core.tensor_files import TensorFile
from raydl.data import Batches
from raydl.data.generators import generators_state, load_generators, seed_generators
from raydl.data.loader import Feed
from raydl.errors import (
    ConfigError,
    ExchangeError,
    InfrastructureError,
    NonFiniteCenterError,
    NonFiniteError,
    StateLostError,
)
from raydl.metrics import TimeParts
from raydl.parameter_server.protocol import CenterClient
from raydl.worker.evaluator import Scorer
from raydl.worker.round_runner import RoundRunner

LAST = -1
"""In place of a round: the last state of a worker that has left its loop for good."""


def _device_of(scaling: ScalingConfig, worker_id: str) -> torch.device:
    """Return a worker's device.

    Raises:
        ConfigError: if it is a GPU, and this build of torch supports none.
        InfrastructureError: if torch finds no GPU here.
    """
    device = torch.device(scaling.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            raise ConfigError(
                "scaling.gpus_per_worker",
                f"requests a GPU, but torch {torch.__version__} of {worker_id} has no CUDA; "
                f"install a CUDA build of torch where workers run, or request no GPU",
            )
        raise InfrastructureError(worker_id, "torch finds no GPU, though Ray reserved one")
    return device


def use_deterministic_kernels() -> None:
    """Let torch refuse CUDA kernels whose results vary, and cuBLAS use a fixed workspace.

    Source: torch's notes on reproducibility. Call it before the first use of the device.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


class Worker:
    """Trains one replica through the epochs.

    Args:
        job: the job of all workers.
        worker_id: the stable id, ``w0``, ``w1``, …
        batches: the training set.
        publish: sends a committed snapshot of the center to the center's process.
        before_step: called before each local step.
        non_trainable: the non-trainable state of the run's first model; None: as the model is
            built.
        test: the test set, if the workers score the center.
    """

    def __init__(
        self,
        job: Job,
        worker_id: str,
        *,
        batches: Batches,
        publish: Callable[[Snapshot], object],
        before_step: BeforeStep | None = None,
        non_trainable: NonTrainable | None = None,
        test: Batches | None = None,
    ) -> None:
        self.worker_id = worker_id
        self._device = _device_of(job.config.scaling, worker_id)
        if job.config.training.deterministic and self._device.type == "cuda":
            use_deterministic_kernels()
        self.parts = TimeParts.on(self._device)
        self._job = job
        self._publish = publish
        self._before_step = before_step
        self._method = method = job.method
        self._feed = Feed(batches, job.order, device=self._device, time_parts=self.parts)
        with self.parts.measure("initialization"):
            # Before the replica: to build a model seeds the generators that the replica draws from.
            self._scorer = None if test is None else Scorer(job, test, non_trainable)
            flat = first_model(job, non_trainable, device=job.config.scaling.device)
            self.replica = Replica(
                flat,
                job.task,
                rule=self._method.rule,
                make_optimizer=make_optimizer(method.inner, method.own_optimizer, flat),
                training=job.config.training,
                time_parts=self.parts,
                has_dynamic_weights=job.config.method.dynamic_weights,
                needs_all_gradients=self._method.needs_all_gradients,
                who=lambda: (self.worker_id, self.local_step),
                labels=job.shape.labels,
            )
        self.runner = RoundRunner(job, self.replica, time_parts=self.parts, worker_id=worker_id)
        self._lock = threading.Lock()
        self._scores: tuple[Evaluated, ...] = ()
        self.last_score: Evaluated | None = None
        """Score of the run's last center, if the workers score it and this is the first of them."""
        self._kept: dict[int, dict[str, Any]] = {}
        self._held: dict[int, TensorFile] = {}
        self._copies = CopyBuffers()
        self._first_non_trainable = non_trainable or {}
        self._joined_non_trainable = self._first_non_trainable
        """The non-trainable state at the start of the newest generation."""
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
            membership: the members.
            transport: connects this worker to the others, or to the center.
            snapshot: the center that they all start from.
            own_state: this worker's state in a checkpoint, or the state that a leaver handed over;
                the worker owns its tensors from now on. None: no state, or it is in memory.
            partners: connects the workers that share this worker's replica, or None.
        """
        self.last_score = None
        with self.parts.measure("initialization"):
            if self.runner.strategy is None:
                self._start_from(snapshot, own_state)
            elif self._has_diverged:
                self._start_over(snapshot, is_earlier=True)
                self._has_diverged = self.runner.is_behind = False
            else:
                self.runner.catch_up(snapshot)
            context = self.runner.enter(membership, transport, snapshot)
            self._joined_non_trainable = {**self._first_non_trainable, **snapshot.non_trainable}
        with self.parts.measure("device_device_parameters"):  # the others wait for the first one
            self._join_partners(partners, context)

    def _join_partners(self, group: Group | None, context: WorkerContext) -> None:
        """Copy the replica of the group's first worker, and share it from now on."""
        self.replica.partners = None
        if group is None:
            return
        weights, layers = context.flat.weights, context.flat.layer_sizes
        partners = GradientGroup(
            group, weights.numel(), len(layers), dtype=weights.dtype, device=context.center_device()
        )
        is_first = context.rank % self._job.config.method.group_size == 0
        try:
            take_over = self.runner.copy_first_residuals(partners, is_first=is_first)
            has_changed = self.replica.copy_first_(partners, is_first=is_first)
        except ExchangeError:
            self.runner.is_behind = True
            raise
        take_over()
        if has_changed:  # this worker's own steps are lost
            self.runner.trained.keep_first(0)
        self.replica.partners = partners

    def _start_from(self, snapshot: Snapshot, own_state: dict[str, Any] | None) -> None:
        self.runner.local_step = snapshot.progress.local_step
        self.runner.become(snapshot)
        self.replica.flat.non_trainable.load(snapshot.non_trainable)
        if not own_state:  # None, or empty because the replica diverged
            return seed_generators(self._job.config.training.seed, self.worker_id)
        with reported_as_damage(f"of worker {self.worker_id}"):
            self._load(own_state, snapshot)

    def _load(self, own_state: dict[str, Any], snapshot: Snapshot) -> None:
        self.replica.load_state_dict(own_state["replica"], copies=False)
        self.runner.local_step = own_state["local_step"]
        self.runner.losses.load_state_dict(own_state)
        tuned = snapshot.tuning
        compression = tuned.compression if tuned else self._method.compression
        self.runner.load_feedback(own_state["feedback"], compression)
        load_generators(own_state["generators"], self._device)
        is_old = own_state.get("round", snapshot.progress.round) != snapshot.progress.round
        has_open = own_state.get("num_trained", 0) > 0  # free again in a checkpoint's ledger
        if (is_old or has_open) and not self._method.rule.ahead:
            self.runner.become(snapshot)  # it follows the center, which has moved since

    # one round

    def run_round(self) -> Outcome:
        """Take the local steps up to the next exchange, exchange, and return the outcome.

        After an exception the center is as before the round; if only the loss of the last step was
        not finite, the round is settled. This worker may join the next generation.

        Raises:
            ExchangeError: if the exchange failed.
            NonFiniteError: if the replica diverged; it has become the center again.
        """
        self.runner.find_tuning()  # if it fails, no part of this round needs an undo
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
                self._kept.pop(keep, None)  # the newest comes last
                self._kept[keep] = state
                # A vote reaches the workers in different rounds. Older states are of votes that
                # led to no checkpoint.
                while len(self._kept) > self.runner.entered().place[1] + 2:
                    del self._kept[next(iter(self._kept))]
        if decision.publishes or decision.is_score_due:
            with self.parts.measure("host_device_parameters"):
                snapshot = self.runner.center(is_kept=keep is not None)
        if decision.publishes:
            self._check_finite(snapshot)
            self._publish(snapshot)
        if decision.is_score_due:
            self._score(snapshot, decision.outcome)
        return decision.outcome

    def _score(self, snapshot: Snapshot, outcome: Outcome) -> None:
        """Score the center together with the other workers.

        Raises:
            ExchangeError: if a worker was lost, and the training goes on.
        """
        if self._scorer is None:
            return
        self.stop_fetching()  # both sets may share an open file
        try:
            evaluated = self._scorer.score(snapshot, self.runner)
        except ExchangeError:
            if outcome is Outcome.GO_ON:
                raise
            return  # the training is complete, and the evaluator scores its last center
        if evaluated is not None and outcome is Outcome.GO_ON:
            with self._lock:
                self._scores += (evaluated,)
        else:
            self.last_score = evaluated

    def _take_steps(self) -> None:
        """Take the local steps of a round; none if the center has no work for this worker."""
        round = self.runner.open_round()
        steps = round.steps()
        if steps:
            # A number that grows with epochs and changes, and is the same for all members.
            entered = self.runner.entered()
            start = steps[0][0] + entered.generation - 1
            self._feed.take_shard(entered.place, start=start)
            self._feed.prefetch(steps, round.ahead)
        for epoch, positions in steps:
            self._call_before_step()
            num_cuts = self.runner.entered().num_cuts
            lr = lr_at(self._method.optimizer, self.runner.share_done(), num_cuts=num_cuts)
            self.replica.set_lr(lr)
            self.runner.begin_step(lr)
            loss = self.runner.take_step(partial(self._step, epoch, positions))
            self.runner.losses.add(self.local_step - 1, self.replica.batch_count, loss)

    def stop_fetching(self) -> None:
        """Wait until no thread reads the training set; see ``raydl.data.loader.Feed``."""
        self._feed.stop_fetching()

    def _step(self, epoch: int, positions: np.ndarray, step_plan: StepPlan) -> Stepped:
        return self.replica.step(self._feed.batch(epoch, positions), step_plan)

    def _call_before_step(self) -> None:
        if self._before_step is not None:
            rank, num_workers = self.runner.entered().place
            self._before_step(
                self.worker_id,
                rank=rank,
                num_workers=num_workers,
                local_step=self.local_step,
                round=self.round,
                seconds=self.runner.elapsed_s(),
            )

    def _roll_back(self) -> None:
        """Restart a diverged replica at the center.

        Raises:
            NonFiniteCenterError: if the center has diverged, too; the replica restarts when it
                joins the next generation.
        """
        center = self.runner.center()
        self._check_finite(center)
        self._start_over(center)

    def _check_finite(self, center: Snapshot) -> None:
        """Raise NonFiniteCenterError if the center has diverged."""
        if not center.is_finite():
            self._has_diverged = True
            raise NonFiniteCenterError(center.progress.round)

    def _start_over(self, center: Snapshot, *, is_earlier: bool = False) -> None:
        """Restart the replica at a center; its samples become free again."""
        self.runner.start_over(center, is_earlier=is_earlier)
        self.replica.flat.non_trainable.load(self._joined_non_trainable)

    @property
    def local_step(self) -> int:
        """Local steps so far; a newcomer's count includes the others' steps before it joined."""
        return self.runner.local_step

    @property
    def round(self) -> int:
        """Rounds completed since the run began, or exchanges that the center has completed."""
        return self.runner.round

    @property
    def copy_age(self) -> tuple[int, int]:
        """(Rounds, changes of the ledger) in its copy of the center; (-1, 0) if it has none.

        A copy with values that are not finite does not count. Do not call this while it trains.
        """
        if self.runner.strategy is None:
            return -1, 0
        if not self.center().is_finite():
            self._has_diverged = True
            return -1, 0
        return self.round, self.runner.num_changes

    @property
    def has_bad_copy(self) -> bool:
        """Whether a round or ``copy_age`` found bad values in its copy of the center."""
        return self._has_diverged

    @property
    def copy_generation(self) -> int:
        """The generation that made its copy of the center; 0 if the center itself made it."""
        return self.runner.generation if self._method.is_sync else 0

    @property
    def ledger_round(self) -> int:
        """The round up to which it knows the ledger; -1 if it has no copy of the center."""
        return self.runner.strategy.ledger_round if self.runner.strategy is not None else -1

    # for the actor

    def vote(self, generation: int, **votes: float) -> None:
        """Vote that all ranks ``stop``, ``regroup`` or keep a ``checkpoint`` after a round.

        A vote counts in its generation only. It may arrive before the worker has joined that
        generation: it travels separately from the request to join.
        """
        self.runner.vote(generation, **votes)

    def report(self) -> WorkerReport:
        """Return the changes since the last report."""
        round = self.round  # read before the records, so that the round's record is among them
        with self._lock:
            kept = tuple(self._kept)
            scores, self._scores = self._scores, ()
        num_scored = self._scorer.num_scored if self._scorer is not None else None
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
            idle_s=self.parts.idle_s(),
            allreduce=runner.allreduce_report(),
            scores=scores,
            num_scored=num_scored,
            choice=runner.choice(),
            first_loss=runner.losses.first,
            equal_replicas=runner.equal_replicas(),
            left_out=self._feed.left_out,
            residual=runner.residual,
            lost_residuals=runner.pop_lost_residuals(),
            ignores=self.replica.counter.ignores,
            unfrozen=tuple(sorted(self.replica.flat.newly_trained)),
            is_starting=self._feed.is_starting,
            sent_s=time.monotonic(),
            cpu_s=time.process_time(),
        )

    def center(self) -> Snapshot:
        """Return this worker's copy of the center. Do not call this while it trains."""
        return self.runner.center()

    def pop_kept(self, round: int) -> dict[str, Any]:
        """Remove and return the state kept at a round; drop older ones.

        Without a kept state, return the current state: a worker that has left its loop does not
        change.
        """
        with self._lock:
            state = self._kept.pop(round, None)
            self._kept = {r: s for r, s in self._kept.items() if r > round}
        if state is None and self._has_diverged:
            return {}
        return self._state_dict() if state is None else state

    def hold_last(self) -> None:
        """Hold the state of a worker that has left its loop for good, without a copy of it.

        If the replica diverged, the state is empty.
        """
        held = pack({} if self._has_diverged else self._state_dict(lambda state: state))
        with self._lock:
            self._held[LAST] = held

    def hold_kept(self, round: int) -> None:
        """Hold the state kept at a round, as returned by ``pop_kept``, until it is written.

        It is held until ``release``, or until two newer ones are held: the state of the last round
        may be needed while the previous one is being written.
        """
        held = pack(self.pop_kept(round))
        with self._lock:
            self._held.pop(round, None)
            self._held[round] = held
            for old in [r for r in self._held if r != LAST][:-2]:
                del self._held[old]

    def held(self, round: int) -> TensorFile:
        """Return the state held for a round, as a file.

        Raises:
            StateLostError: if it is no longer held.
        """
        with self._lock:
            held = self._held.get(round)
        if held is None:
            raise StateLostError(self.worker_id, f"its state of round {round} is no longer held")
        return held

    def release(self, round: int) -> None:
        """Release the state held for a round: it is written, or will not be."""
        with self._lock:
            self._held.pop(round, None)

    def prepare_copy(self) -> Callable[[], None]:
        """Return a function, for any thread, that prepares memory for the first checkpoint."""
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
                "feedback": self.runner.feedback_state(),
                "generators": generators_state(self._device),
            }
