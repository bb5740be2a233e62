"""Records the progress of a run: TensorBoard, the terminal, checkpoints, unreadable samples."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from raydl.checkpoint.best import BestCenter
from raydl.checkpoint.store import CheckpointStore
from raydl.checkpoint.totals import StartTotals, StartTotalsHistory, Totals, speed_figures
from raydl.checkpoint.writer import CheckpointWriter
from raydl.config import TrainConfig
from raydl.core.autotune import Choice
from raydl.core.center import Snapshot
from raydl.core.flat import FlatModel
from raydl.core.membership import Membership
from raydl.core.progress import Progress
from raydl.core.reports import AllreduceReport, Record, WorkerReport
from raydl.core.scores import Evaluated
from raydl.core.stop_condition import StopCondition
from raydl.core.worker_group import Collected
from raydl.data.target import IGNORED
from raydl.elastic.controller import Controller
from raydl.elastic.run_state import State
from raydl.errors import CheckpointError, StorageSilentError
from raydl.metrics import (
    MembershipTable,
    MetricsWriter,
    PartsPerWorker,
    RecentSpeed,
    StackHistory,
    WorkerCurves,
    charts,
    communication_share,
    spread_of,
    time_values,
)
from raydl.run.history import HistoryWriter
from raydl.run.progress_reporter import ProgressReporter, ProgressView
from raydl.storage import Storage, within
from raydl.worker.examples import Examples


class BadSamples:
    """Counts the samples that were left out because they cannot be read, over all workers."""

    def __init__(self) -> None:
        self._by_worker: dict[str, int] = {}  # also of those that have left: they may rejoin
        self._log_from = 1

    @property
    def num_samples(self) -> int:
        """Number of samples left out."""
        return sum(self._by_worker.values())

    def note(self, reports: Mapping[str, WorkerReport]) -> str:
        """Update the counts; return a sentence when the total has doubled, else an empty text."""
        last = ""
        for worker_id, report in reports.items():
            if report.left_out.num_samples > self._by_worker.get(worker_id, 0):
                self._by_worker[worker_id] = report.left_out.num_samples
                last = report.left_out.last
        if not last or self.num_samples < self._log_from:
            return ""
        self._log_from = 2 * self.num_samples
        count = f"{self.num_samples:,} samples" if self.num_samples > 1 else "a sample"
        return f"skipped {count} that cannot be read; the last: {last}"


class IgnoredLabels:
    """Notes whether labels of -100 do not count, by a rule that the user has not named."""

    def __init__(self) -> None:
        self._is_said = False

    def note(self, reports: Mapping[str, WorkerReport]) -> str:
        """Return a sentence when the first worker met such labels, else an empty text."""
        found = [r.ignores for r in reports.values() if r.ignores is not None]
        if self._is_said or not found:
            return ""
        self._is_said = True
        name = repr(found[0]) if isinstance(found[0], str) else f"part {found[0]} of a batch"
        return (
            f"{name} holds labels of {IGNORED}, which do not count: the loss is taken as a mean "
            f"over the other labels, in parts of a batch, ranks and scores; if it is a mean over "
            f"something else, define count(batch) of the task"
        )


_EXAMPLES_EVERY_S = 20.0
"""Shortest time between two drawings of test images, in seconds."""
_CHART_EVERY_S = 60.0
"""Shortest time between two charts of the time parts, in seconds. The first imports matplotlib."""
_NO_TOTALS = Totals()
_IF_EQUAL = (
    "check that the samples of the training set differ, and that an iterable one which draws them "
    "at random draws others in each worker"
)
"""What to check in a run whose replicas are equal."""


class RunRecorder:
    """The recorder of a real run; see ``raydl.elastic.run_state.Recorder``.

    Args:
        config: the settings.
        num_train: number of samples in the training set.
        start: the snapshot from which the run starts or resumes.
        seconds_before: training time of earlier starts, in seconds.
        before: totals of earlier starts.
        writer: writes to TensorBoard.
        progress: shows the run on the terminal.
        store: the run's checkpoints.
        best: the run's best center.
        flat: names the weights.
        examples: test images to draw with the center's predictions.
        order: name of the order of the samples, for checkpoints.
        history: writes the history of this start.
        after_checkpoint: called after each checkpoint and at the end, to copy the curves; its
            ``OSError`` is logged, and the run goes on.
        storage: the run's folder; None for one that always answers.
        fallback_dir: see ``raydl.checkpoint.writer.CheckpointWriter``.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        num_train: int,
        start: Snapshot,
        seconds_before: float,
        before: Totals = _NO_TOTALS,
        writer: MetricsWriter,
        progress: ProgressReporter,
        store: CheckpointStore,
        best: BestCenter,
        flat: FlatModel,
        examples: Examples,
        order: str = "",
        history: HistoryWriter | None = None,
        after_checkpoint: Callable[[], None],
        storage: Storage | None = None,
        fallback_dir: Path | None = None,
    ) -> None:
        self._storage = storage
        self.last: Record | None = None
        self._evaluations = list(before.evaluations)
        self._allreduce: AllreduceReport | None = None
        self._choice: Choice | None = None
        self._worker_curves = WorkerCurves()
        self._worker_steps: dict[str, int] = {}
        self._first_losses: dict[str, float] = {}
        self._train_loss: float | None = None
        self._config = config
        self._num_train = num_train
        self._start = start
        self._seconds_before = seconds_before
        self._before = before
        self._controller: Controller | None = None
        self._writer = writer
        self._progress = progress
        self._examples = examples
        self._memberships = MembershipTable()
        self._text_at = start.progress.num_samples or -1
        self._stack = StackHistory()
        self._to_draw: Evaluated | None = None
        self._examples_drawn_at = -math.inf
        self._after_checkpoint = after_checkpoint
        self._opened_at = self._chart_drawn_at = time.monotonic()
        self._began_at: float | None = None
        self._ended_at = self._opened_at
        self._bad_samples, self._ignored_labels = BadSamples(), IgnoredLabels()
        self._warnings: dict[str, str] = {}
        """The first warning of each kind, which stays in the result."""
        self._parts = PartsPerWorker()
        self._facts = history
        self._history = StartTotalsHistory(
            StartTotals(
                round=start.progress.round,
                seconds=seconds_before,
                time_parts=self._parts.seconds,
                at_s=self._opened_at,
                trained_s=start.progress.seconds,
            )
        )
        self._speed = RecentSpeed()
        self._trains_since = self._opened_at
        self._is_age_logged = False
        self._best = best
        self.checkpoints = CheckpointWriter(
            store,
            flat,
            best,
            order=order,
            after=self._wrote_checkpoint,
            unanswered=storage.unanswered if storage else lambda thread: (0.0, ""),
            fallback_dir=fallback_dir,
        )
        """Writer of the checkpoints."""

    def follow(self, controller: Controller) -> None:
        """Record the controller's generations, pauses and faults from now on."""
        self._controller = controller

    def describe(self, markdown: str) -> None:
        """Write the configuration to TensorBoard."""
        self._writer.text("settings", markdown, num_samples=self._newest.num_samples)

    def event(self, sentence: str) -> None:
        """Show a sentence and write it to TensorBoard."""
        self._log(sentence, num_samples=self._newest.num_samples)

    def _warn(self, kind: str, sentence: str) -> None:
        """Log the first warning of a kind, and keep it for the result."""
        if kind not in self._warnings:
            self._warnings[kind] = sentence
            self.event(sentence)

    def _log(self, sentence: str, *, num_samples: int) -> None:
        self._progress.event(sentence)
        # TensorBoard shows one text per step: put simultaneous sentences a sample apart.
        self._text_at = max(self._text_at + 1, num_samples)
        self._writer.text("events", sentence, num_samples=self._text_at)

    def note(self, fact: Any) -> None:
        """Keep a fact in the history; if it cannot be written, say so once, and go on without."""
        if self._facts is None:
            return
        try:
            self._facts.write(fact, seconds=self.seconds, samples=self._newest.num_samples)
        except OSError as error:
            self._facts = None
            self._warn("history", f"the history of the run cannot be written: {error}")

    def formed(self, membership: Membership, reason: str) -> None:
        """Write the table of memberships to TensorBoard, and forget workers that have left.

        The training time begins with the first membership.
        """
        if self._began_at is None:
            self._began_at = time.monotonic()
            self._speed.note(self._began_at, self._start.progress.num_samples)
        at = self._newest.num_samples
        self._memberships.add(membership.generation, membership.worker_ids, reason, num_samples=at)
        self._writer.text("membership", self._memberships.markdown(), num_samples=self._text_at)
        members = dict.fromkeys((*membership.worker_ids, *membership.absent))
        if names := self._worker_curves.follow(members):
            pairs = ", ".join(f"{worker_id} as {name}" for worker_id, name in names.items())
            self.event(f"TensorBoard shows the curves of {pairs}")
        self._worker_steps = {w: s for w, s in self._worker_steps.items() if w in members}

    @property
    def _newest(self) -> Progress:
        return self.last.progress if self.last else self._start.progress

    @property
    def seconds(self) -> float:
        """Training time up to the last record, over all starts, in seconds."""
        if self._began_at is None:
            return self._seconds_before
        # Before the first record the end is the time at which this recorder was opened.
        return self._seconds_before + max(0.0, self._ended_at - self._began_at)

    @property
    def center_accuracy(self) -> float | None:
        """The newest accuracy of the center, also of earlier starts, or None if unknown."""
        return self._evaluations[-1].get("accuracy") if self._evaluations else None

    @property
    def center_loss(self) -> float | None:
        """The newest test loss of the center, also of earlier starts, or None if unknown."""
        return self._evaluations[-1].get("loss") if self._evaluations else None

    def record(self, record: Record, reports: dict[str, WorkerReport]) -> None:
        """Write a point of every curve."""
        now = record.at_s
        if self.last is not None and record.progress.num_samples < self.last.progress.num_samples:
            self._go_back(record.progress.num_samples, self.last.progress.num_samples)
        self.last, self._ended_at = record, now
        by_worker = {worker_id: report.time_parts for worker_id, report in reports.items()}
        self._parts.add(by_worker, num_workers=record.num_workers)
        self._add_up(record)
        self._speed.note(now, record.progress.num_samples)
        values = {
            "train/lr": record.lr,
            "train/epoch": record.progress.epoch,
            "center/distance": record.distance,
            "workers/count": record.num_workers,
            "workers/generation": record.progress.generation,
            "exchange/count": record.progress.round,
            "exchange/seconds": record.exchange_s,
            "exchange/bytes": record.exchange_bytes,
            "exchange/staleness": record.staleness,
            "exchange/period": record.period,
            "exchange/communication_share": communication_share(self._parts.seconds),
        }
        if (speed := self._speed.samples_per_s) is not None:
            values["throughput/samples_per_s"] = speed
        if not math.isnan(record.loss):
            values["train/loss"] = self._train_loss = record.loss
        self._first_losses |= {
            w: r.first_loss for w, r in reports.items() if r.first_loss is not None
        }
        values |= self._worker_values(reports)
        values |= self._allreduce_values(reports)
        self._log_tuning(reports)
        for equal in (r.equal_replicas for r in reports.values() if r.equal_replicas is not None):
            self._warn("equal replicas", equal.sentence(_IF_EQUAL))
        for sentence in (self._bad_samples.note(reports), self._ignored_labels.note(reports)):
            if sentence:
                self.event(sentence)
        if num_left_out := self._bad_samples.num_samples:
            values["data/left_out"] = num_left_out
        if num_refused := sum(self._controller.refused.values()) if self._controller else 0:
            values["exchange/refused"] = num_refused
        if num_lost := self._controller.num_lost_residuals if self._controller else 0:
            values["exchange/lost_residuals"] = num_lost
        values |= time_values(self._parts.seconds)
        self._stack.add(record.progress.num_samples, self._parts.seconds)
        self._writer.scalars(values, num_samples=record.progress.num_samples, unix_s=_unix_s(now))

    def _add_up(self, record: Record) -> None:
        before = self._history.up_to(record.progress.round - 1)
        num_rounds = max(0, record.progress.round - before.round)
        self._history.add(
            StartTotals(
                round=record.progress.round,
                seconds=self.seconds,
                staleness_sum=before.staleness_sum + record.staleness * num_rounds,
                period_sum=before.period_sum + record.period * num_rounds,
                time_parts=self._parts.seconds,
                at_s=record.at_s,
                trained_s=record.progress.seconds,
            )
        )

    def _go_back(self, num_samples: int, num_before: int) -> None:
        """Drop later points of the curves: the center has gone back to an earlier state."""
        self._writer.go_back(num_samples=num_samples)
        self._stack.go_back(num_samples=num_samples)
        self._evaluations = [e for e in self._evaluations if e["samples"] < num_samples]
        self._to_draw = None
        self._text_at = num_samples - 1
        self._log(
            f"the center was rolled back from {num_before:,} to {num_samples:,} samples; the "
            f"curves continue from there",
            num_samples=num_samples,
        )
        self._writer.text("membership", self._memberships.markdown(), num_samples=num_samples)

    def _worker_values(self, reports: dict[str, WorkerReport]) -> dict[str, float]:
        """Return the values of workers with new steps; the curves of other workers stop."""
        trained = {w: report for w, report in reports.items() if report.round_s > 0}
        new = {w: r for w, r in trained.items() if r.local_step != self._worker_steps.get(w)}
        self._worker_steps |= {w: report.local_step for w, report in new.items()}
        if not new:
            return {}
        values = {
            **spread_of("workers/step_s", [report.step_s for report in trained.values()]),
            **spread_of("workers/waited_s", [report.waited_s for report in trained.values()]),
        }
        for worker_id, report in new.items():
            if name := self._worker_curves.name_of(worker_id):
                values[f"worker_step_s/{name}"] = report.step_s
                values[f"worker_waited_s/{name}"] = report.waited_s
        return values

    def _allreduce_values(self, reports: dict[str, WorkerReport]) -> dict[str, float]:
        """Return the values of the all-reduce, and log each new choice once."""
        now = next((r.allreduce for r in reports.values() if r.allreduce is not None), None)
        if now is None:
            return {}
        before, self._allreduce = self._allreduce, now
        choice = (now.generation, now.algorithm, now.num_bytes)
        if before is None or (before.generation, before.algorithm, before.num_bytes) != choice:
            self.event(_allreduce_sentence(now))
        values = {"exchange/allreduce_s": now.measured_s}
        if now.predicted_s is not None:
            values["exchange/allreduce_predicted_s"] = now.predicted_s
        return values

    def _log_tuning(self, reports: dict[str, WorkerReport]) -> None:
        """Log each exchange tuning that the workers choose, once."""
        choices = [r.choice for r in reports.values() if r.choice is not None]
        newest = max(choices, key=lambda choice: choice.generation, default=self._choice)
        if newest is not None and (not self._choice or newest.tuning != self._choice.tuning):
            self.event(f"exchanges use {newest.tuning}: {newest.reason}")
        self._choice = newest

    def evaluated(self, evaluated: Evaluated) -> None:
        """Write the scores of the center, and images if the last ones are old."""
        self.checkpoints.score(evaluated)
        evaluated = evaluated.without_center()
        if evaluated.problem:
            self._warn("score", evaluated.problem)
        self._evaluations.append({**evaluated.progress.of_score(), **evaluated.metrics})
        values = {f"center/{name}": value for name, value in evaluated.metrics.items()}
        self._writer.scalars(
            values,
            num_samples=evaluated.progress.num_samples,
            unix_s=_unix_s(self._time_of(evaluated)),
        )
        self._to_draw = evaluated if evaluated.predicted else None
        if time.monotonic() - self._examples_drawn_at >= _EXAMPLES_EVERY_S:
            self._draw_examples()
        if time.monotonic() - self._chart_drawn_at >= _CHART_EVERY_S:
            self._draw_time_parts()

    def _time_of(self, evaluated: Evaluated) -> float:
        """Return the time of the scored snapshot, by this process's monotonic clock."""
        known = self._history.up_to(evaluated.progress.round)
        at_s = max(known.at_s, self._began_at or known.at_s)
        return min(time.monotonic(), at_s + max(0.0, evaluated.progress.seconds - known.trained_s))

    def _draw_examples(self) -> None:
        """Draw the test images with the center's newest predictions, unless drawn before."""
        self._examples_drawn_at = time.monotonic()
        scored, self._to_draw = self._to_draw, None
        if scored is not None:
            pixels = self._examples.draw(scored.predicted)
            self._writer.image(
                "center/predictions", pixels, num_samples=scored.progress.num_samples
            )

    def _draw_time_parts(self) -> None:
        """Draw the time parts so far."""
        self._chart_drawn_at = time.monotonic()
        points = self._stack.points
        if len(points) > 1:
            pixels = charts.areas(points).pixels()
            self._writer.image("time/stacked", pixels, num_samples=self._newest.num_samples)

    def checkpoint(self, collected: Collected) -> None:
        """Write a checkpoint in a thread of its own; a failure is logged, and the run goes on."""
        totals = self._history.pop_up_to(collected.snapshot.progress.round)
        run = self._controller
        ended = (run.ended_by, run.ended_because) if run and collected.is_last else ("", "")
        self.checkpoints.checkpoint(
            collected, seconds=totals.seconds, totals=self._totals(totals), ended=ended
        )

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written; the next one waits for it."""
        return self.checkpoints.is_writing

    @property
    def is_given_up(self) -> bool:
        """Whether the storage has been silent too long to wait for it."""
        return self.checkpoints.is_given_up

    def _wrote_checkpoint(self) -> None:
        self._writer.flush()
        self._after_checkpoint()

    def show(self, state: State, workers: Mapping[str, int]) -> None:
        """Log failures of checkpoints, and show the progress."""
        for sentence in self.checkpoints.pop_failures():
            self.event(sentence)
        self._log_old_checkpoint(state)
        self._progress.update(self._view(state, workers))

    def _log_old_checkpoint(self, state: State) -> None:
        """Log once that the newest checkpoint is older than two intervals."""
        now, every_s = time.monotonic(), self._config.checkpoint.every_s
        if state not in (State.TRAINING, State.REGROUPING, State.RECOVERING):
            self._trains_since = now  # a run that waits has written its state
        age_s = now - max(self.checkpoints.written_at or self._trains_since, self._trains_since)
        if every_s is None or age_s <= 2 * every_s:
            self._is_age_logged = False
        elif not self._is_age_logged:
            self._is_age_logged = True
            reason = "the workers have kept no states"
            if self.is_writing:
                reason = "one is still being written"
            elif self.checkpoints.has_failed:
                reason = "the newest could not be written"
            self.event(
                f"no checkpoint was written for {age_s:.0f} s, twice checkpoint.every_s: {reason}"
            )

    @property
    def checkpoint_at(self) -> float | None:
        """Unix time of the newest checkpoint of this start, or None."""
        written_at = self.checkpoints.written_at
        return None if written_at is None else _unix_s(written_at)

    def _view(self, state: State, workers: Mapping[str, int]) -> ProgressView:
        training, scaling, last = self._config.training, self._config.scaling, self.last
        progress = self._newest
        share_done = StopCondition.of(training, epoch_samples=self._num_train).share_done(
            num_samples=progress.num_samples,
            num_steps=progress.local_step,
            seconds=self.seconds,
            num_bytes=progress.num_bytes,
        )
        return ProgressView(
            state=state.value,
            elapsed_s=time.monotonic() - self._opened_at,
            progress=progress,
            num_epochs=training.num_epochs,
            num_steps=training.steps,
            share_done=share_done,
            samples_per_s=self._speed.samples_per_s,
            train_loss=last.loss if last and not math.isnan(last.loss) else None,
            center_accuracy=self.center_accuracy,
            center_loss=self.center_loss,
            workers=workers,
            wanted_workers=scaling.wanted() if scaling.max_workers else "1",
            communication_share=communication_share(self._parts.seconds) if last else None,
        )

    def _totals(self, this_start: StartTotals) -> Totals:
        """Return the totals of all starts, including this one up to a round."""
        run = self._controller
        return self._before.plus(
            evaluations=self._evaluations,
            longest_pause_s=run.pauses.longest_s if run else 0.0,
            staleness_sum=this_start.staleness_sum,
            period_sum=this_start.period_sum,
            time_parts=this_start.time_parts,
            faults_fired=run.planned_faults.fired if run else (),
            first_loss=fmean(self._first_losses.values()) if self._first_losses else None,
        )

    def figures(self) -> dict[str, Any]:
        """Return the entries of ``result.json`` on the whole run and on its last start."""
        last, start, run, progress = self.last, self._start, self._controller, self._newest
        return {
            **self._totals(self._history.newest).figures(progress.round),
            **speed_figures(progress.num_samples, self.seconds),
            "rounds": progress.round,
            "generations": run.generation if run else start.progress.generation,
            "exchange_bytes": last.exchange_bytes if last else 0,
            "bytes": progress.num_bytes,
            "messages": progress.num_messages,
            "best": self._best.kept.figures() if self._best.kept else None,
            "left_out_samples": self._bad_samples.num_samples,
            "refused": run.refused if run else {},
            "lost_residuals": run.num_lost_residuals if run else 0,
            "workers": last.num_workers if last else 0,
            "allreduce": vars(self._allreduce) if self._allreduce else None,
            "cadence": vars(self._choice.tuning) if self._choice else None,
            "last_train_loss": self._train_loss,
            "warnings": list(self._warnings.values()),
            "last_start": speed_figures(
                progress.num_samples - start.progress.num_samples,
                self.seconds - self._seconds_before,
            ),
        }

    def conclude(self) -> None:
        """Say if the run has ended with a loss of many times that of its first step."""
        scored = self._evaluations[-1] if self._evaluations else {}
        is_of_end = scored.get("round") == self._newest.round
        if sentence := divergence_sentence(
            self._totals(self._history.newest).first_loss,
            self._train_loss,
            scored.get("loss") if is_of_end else None,
        ):
            self._warn("divergence", sentence)

    def _try(self, write: Callable[[], None]) -> None:
        """Write to the storage as long as it answers; log an error: the run is complete without."""
        try:
            if self._storage is None:
                write()
            else:
                within(self._storage, write, log=self._progress.event)
        except (OSError, CheckpointError, StorageSilentError) as error:
            self._progress.event(f"{error}; all other files of the run are complete")

    def close(self) -> None:
        """Complete all files.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        with contextlib.ExitStack() as stack:  # in reverse order; each even if another one fails
            stack.callback(self._progress.close)
            stack.callback(self._try, self._after_checkpoint)
            stack.callback(self._writer.close)
            stack.callback(self._draw_time_parts)
            stack.callback(self._draw_examples)
            stack.callback(self._try, self._best.write)  # in case its last write failed
            self.checkpoints.close()


_MANY_TIMES = 10.0
"""The training has diverged if its loss ends at this many times that of the first step."""
_NEAR_ZERO = 1.0
"""A loss that ends below it is not compared: it may have begun near zero."""


def divergence_sentence(first: float | None, last: float | None, center: float | None) -> str:
    """Return a sentence if the losses at the end are many times the one at the start, else "".

    Args:
        first: training loss of the first step; None: unknown. A loss that begins at zero or below
            has no multiples.
        last: training loss at the end; None: unknown.
        center: loss of the last center on the test set; None: unknown.
    """
    at_end = {"a training loss of": last, "a loss on the test set of": center}
    known = {
        what: loss for what, loss in at_end.items() if loss is not None and math.isfinite(loss)
    }
    if first is None or first <= 0 or not known:
        return ""
    if min(known.values()) < max(_MANY_TIMES * first, _NEAR_ZERO):
        return ""
    return (
        f"the training has diverged: it began with a training loss of {first:.3g} and ended with "
        f"{' and '.join(f'{what} {loss:.3g}' for what, loss in known.items())}; lower "
        f"optimizer.lr or optimizer.clip_grad_norm"
    )


def _allreduce_sentence(report: AllreduceReport) -> str:
    """Return how the workers sum their largest messages, and the other algorithms they tried."""
    sentence = (
        f"all-reduce of {report.num_bytes:,} bytes: {report.algorithm}, measured "
        f"{report.measured_s * 1000:.2f} ms"
    )
    if report.predicted_s is not None:
        sentence += f", predicted {report.predicted_s * 1000:.2f} ms"
    if report.tried:
        tried = sorted(report.tried.items(), key=lambda item: item[1])
        medians = ", ".join(f"{name} {seconds * 1000:.2f} ms" for name, seconds in tried)
        sentence += f"; the medians of the first sums: {medians}"
    return sentence


def _unix_s(monotonic_s: float) -> float:
    """Return a time of the monotonic clock as Unix time, in seconds."""
    return time.time() - (time.monotonic() - monotonic_s)
