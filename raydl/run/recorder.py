"""Records what the controller learns: TensorBoard, the terminal, checkpoints, bad samples."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from raydl.checkpoint.best import BestCenter
from raydl.checkpoint.store import CheckpointStore
from raydl.checkpoint.totals import Sum, Sums, Totals, speed_figures
from raydl.checkpoint.writer import CheckpointWriter
from raydl.config import TrainConfig
from raydl.core.autotune import Choice
from raydl.core.center import Snapshot
from raydl.core.flat import FlatModel
from raydl.core.membership import Membership
from raydl.core.reports import AllreduceReport, Record, WorkerReport
from raydl.core.stop_condition import StopCondition
from raydl.core.worker_group import Collected, Evaluated
from raydl.elastic.controller import Controller
from raydl.elastic.state import State
from raydl.errors import CheckpointError, StorageSilentError
from raydl.metrics import (
    TIME_PARTS,
    MembershipTable,
    MetricsWriter,
    RecentSpeed,
    StackHistory,
    WorkerCurves,
    charts,
    communication_share,
    mean_parts,
    spread_of,
    time_values,
)
from raydl.run.progress_reporter import ProgressReporter, ProgressView
from raydl.storage import Storage, within
from raydl.worker.examples import Examples


class BadSamples:
    """The samples that were left out, over all workers there ever were."""

    def __init__(self) -> None:
        self._by_worker: dict[str, int] = {}
        self._num_of_gone = 0
        self._tell_from = 1

    @property
    def num_samples(self) -> int:
        """How many."""
        return self._num_of_gone + sum(self._by_worker.values())

    def keep(self, worker_ids: Container[str]) -> None:
        """Forget whose the samples were, but for these workers: the others have gone."""
        gone = [w for w in self._by_worker if w not in worker_ids]
        self._num_of_gone += sum(self._by_worker.pop(w) for w in gone)

    def note(self, reports: Mapping[str, WorkerReport]) -> str:
        """Take in the newest reports; return a sentence where one is due, else nothing."""
        last = ""
        for worker_id, report in reports.items():
            if report.left_out.num_samples > self._by_worker.get(worker_id, 0):
                self._by_worker[worker_id] = report.left_out.num_samples
                last = report.left_out.last
        if not last or self.num_samples < self._tell_from:
            return ""
        self._tell_from = 2 * self.num_samples
        count = f"{self.num_samples:,} samples" if self.num_samples > 1 else "a sample"
        return f"left out {count} that can not be read; the last: {last}"


_EXAMPLES_EVERY_S = 20.0
"""Test pictures are drawn no more often, and once more at the end."""
_CHART_EVERY_S = 60.0
"""So are the time parts, which take more of the driver: the first time, matplotlib's import."""
_NOTHING = Totals()


class RunRecorder:
    """The recorder of a real run; see ``raydl.elastic.Recorder``.

    Args:
        config: the settings.
        num_train: samples in the training set.
        start: the snapshot the run goes on from.
        seconds_before: training time of earlier starts, in seconds.
        before: what else is known of earlier starts.
        writer: for TensorBoard.
        progress: for the terminal.
        store: for checkpoints.
        best: for the best center.
        flat: names the weights.
        examples: test pictures to draw with what the center says of them.
        order: name of the order of the samples, for checkpoints.
        after_checkpoint: called when one was written, and at the end: copies the curves. An
            ``OSError`` that it raises is told, and ends nothing.
        storage: the run's folder; None: one that always answers.
        refuge: see ``raydl.checkpoint.writer.CheckpointWriter``.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        num_train: int,
        start: Snapshot,
        seconds_before: float,
        before: Totals = _NOTHING,
        writer: MetricsWriter,
        progress: ProgressReporter,
        store: CheckpointStore,
        best: BestCenter,
        flat: FlatModel,
        examples: Examples,
        order: str = "",
        after_checkpoint: Callable[[], None],
        storage: Storage | None = None,
        refuge: Path | None = None,
    ) -> None:
        self._storage = storage
        self.last: Record | None = None
        self._evaluations = list(before.evaluations)
        self._allreduce: AllreduceReport | None = None
        self._choice: Choice | None = None
        self._worker_curves = WorkerCurves()
        self._worker_steps: dict[str, int] = {}
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
        self._told_at = start.progress.num_samples or -1
        self._stack = StackHistory()
        self._to_draw: Evaluated | None = None
        self._examples_drawn_at = -math.inf
        self._after_checkpoint = after_checkpoint
        self._opened_at = self._chart_drawn_at = time.monotonic()
        self._began_at: float | None = None
        self._ended_at = self._opened_at
        self._bad_samples = BadSamples()
        self._parts = dict.fromkeys(TIME_PARTS, 0.0)
        self._sums = Sums(
            Sum(
                round=start.progress.round,
                seconds=seconds_before,
                time_parts=self._parts,
                at_s=self._opened_at,
                trained_s=start.progress.seconds,
            )
        )
        self._speed = RecentSpeed()
        self._trains_since = self._opened_at
        self._is_old_told = False
        self._best = best
        self.checkpoints = CheckpointWriter(
            store,
            flat,
            best,
            order=order,
            after=self._wrote_checkpoint,
            **({"unanswered": storage.unanswered} if storage else {}),
            refuge=refuge,
        )
        """Writer of the events."""

    def follow(self, controller: Controller) -> None:
        """Count from now on its generations, pauses and faults."""
        self._controller = controller

    def describe(self, markdown: str) -> None:
        """Keep the configuration beside the curves."""
        self._writer.text("settings", markdown, num_samples=self._num_samples)

    def event(self, sentence: str) -> None:
        """Print the sentence and keep it beside the curves."""
        if self._began_at is None and sentence.startswith("generation"):
            self._began_at = time.monotonic()
            self._speed.note(self._began_at, self._start.progress.num_samples)
        self._tell(sentence, num_samples=self._num_samples)

    def _tell(self, sentence: str, *, num_samples: int) -> None:
        self._progress.event(sentence)
        # TensorBoard shows one text for each step: sentences of one moment are a sample apart.
        self._told_at = max(self._told_at + 1, num_samples)
        self._writer.text("events", sentence, num_samples=self._told_at)

    def formed(self, membership: Membership, reason: str) -> None:
        """Keep the table of memberships beside the curves, and forget workers that have gone."""
        self._memberships.add(
            membership.generation, membership.worker_ids, reason, num_samples=self._num_samples
        )
        self._writer.text("membership", self._memberships.markdown(), num_samples=self._told_at)
        here = dict.fromkeys((*membership.worker_ids, *membership.absent))
        places = self._worker_curves.follow(here)
        if places:
            which = ", ".join(f"{w} is {place}" for w, place in places.items())
            self.event(f"the curves of workers: {which}")
        self._worker_steps = {w: s for w, s in self._worker_steps.items() if w in here}
        self._bad_samples.keep(here)

    @property
    def _num_samples(self) -> int:
        return self.last.progress.num_samples if self.last else self._start.progress.num_samples

    @property
    def seconds(self) -> float:
        """Training time up to the last record, over all starts, in seconds."""
        began = self._began_at
        return self._seconds_before + (self._ended_at - began if began is not None else 0.0)

    @property
    def center_accuracy(self) -> float | None:
        """The newest accuracy of the center, of an earlier start too; None: not known."""
        return self._evaluations[-1].get("accuracy") if self._evaluations else None

    def record(self, record: Record, reports: dict[str, WorkerReport]) -> None:
        """Write a point of every curve."""
        now = record.at_s
        if self.last is not None and record.progress.num_samples < self.last.progress.num_samples:
            self._go_back(record.progress.num_samples, self.last.progress.num_samples)
        self.last, self._ended_at = record, now
        self._parts = mean_parts([r.time_parts for r in reports.values()])
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
            "exchange/communication_share": communication_share(self._parts),
        }
        speed = self._speed.samples_per_s
        if speed is not None:
            values["throughput/samples_per_s"] = speed
        if not math.isnan(record.loss):
            values["train/loss"] = record.loss
        values |= self._worker_values(reports)
        values |= self._allreduce_values(reports)
        self._tell_tuning(reports)
        values |= self._left_out_values(reports)
        values |= self._refused_values()
        values |= time_values(self._parts)
        self._stack.add(record.progress.num_samples, self._parts)
        self._writer.scalars(values, num_samples=record.progress.num_samples, unix_s=_unix_s(now))

    def _add_up(self, record: Record) -> None:
        before = self._sums.before(record.progress.round)
        num_rounds = max(0, record.progress.round - before.round)
        self._sums.add(
            Sum(
                round=record.progress.round,
                seconds=self.seconds,
                staleness_sum=before.staleness_sum + record.staleness * num_rounds,
                period_sum=before.period_sum + record.period * num_rounds,
                time_parts=self._parts,
                at_s=record.at_s,
                trained_s=record.progress.seconds,
            )
        )

    def _go_back(self, num_samples: int, num_before: int) -> None:
        """Drop what lies beyond: the center is one of before, and its curves go on from there."""
        self._writer.go_back(num_samples=num_samples)
        self._stack.go_back(num_samples=num_samples)
        self._evaluations = [e for e in self._evaluations if e["samples"] < num_samples]
        self._to_draw = None
        self._told_at = num_samples - 1
        self._tell(
            f"the center went back from {num_before:,} samples: the curves go on from "
            f"{num_samples:,}",
            num_samples=num_samples,
        )
        self._writer.text("membership", self._memberships.markdown(), num_samples=num_samples)

    def _worker_values(self, reports: dict[str, WorkerReport]) -> dict[str, float]:
        """Return the curves of workers with news: those of one that hangs or left stop."""
        news = {
            w: report
            for w, report in reports.items()
            if report.round_s > 0 and report.local_step != self._worker_steps.get(w)
        }
        self._worker_steps |= {w: report.local_step for w, report in news.items()}
        if not news:
            return {}
        all_told = [report for report in reports.values() if report.round_s > 0]
        values = {
            **spread_of("workers/step_s", [report.step_s for report in all_told]),
            **spread_of("workers/waited_s", [report.waited_s for report in all_told]),
        }
        for worker_id, report in news.items():
            if name := self._worker_curves.name_of(worker_id):
                values[f"worker_step_s/{name}"] = report.step_s
                values[f"worker_waited_s/{name}"] = report.waited_s
        return values

    def _allreduce_values(self, reports: dict[str, WorkerReport]) -> dict[str, float]:
        """Note how the workers sum, and tell each new choice once."""
        found = [r.allreduce for r in reports.values() if r.allreduce is not None]
        if not found:
            return {}
        before, now = self._allreduce, found[0]
        self._allreduce = now
        if before is None or (before.generation, before.algorithm) != (
            now.generation,
            now.algorithm,
        ):
            self.event(
                f"all-reduce of {now.num_bytes:,} bytes: {now.algorithm}, predicted "
                f"{now.predicted_s * 1000:.2f} ms, measured {now.measured_s * 1000:.2f} ms"
            )
        return {
            "exchange/allreduce_predicted_s": now.predicted_s,
            "exchange/allreduce_s": now.measured_s,
        }

    def _tell_tuning(self, reports: dict[str, WorkerReport]) -> None:
        """Tell each exchange tuning that the workers chose once."""
        chosen = [r.choice for r in reports.values() if r.choice is not None]
        newest = max(chosen, key=lambda choice: choice.generation, default=self._choice)
        if newest is not None and (not self._choice or newest.tuning != self._choice.tuning):
            self.event(f"exchanges go by {newest.tuning}: {newest.reason}")
        self._choice = newest

    def _left_out_values(self, reports: dict[str, WorkerReport]) -> dict[str, float]:
        """Tell of samples that could not be read; without any there is no curve."""
        sentence = self._bad_samples.note(reports)
        if sentence:
            self.event(sentence)
        num_samples = self._bad_samples.num_samples
        return {"data/left_out": num_samples} if num_samples else {}

    def _refused_values(self) -> dict[str, float]:
        """Return how much came too late; without any there is no curve."""
        num_refused = sum(self._controller.refused.values()) if self._controller else 0
        return {"exchange/refused": num_refused} if num_refused else {}

    def evaluated(self, evaluated: Evaluated) -> None:
        """Write the scores of the center, and now and then pictures."""
        self.checkpoints.score(evaluated)
        evaluated = evaluated.without_center()
        at = {"round": evaluated.progress.round, "samples": evaluated.progress.num_samples}
        self._evaluations.append({**at, "seconds": evaluated.progress.seconds, **evaluated.metrics})
        values = {f"center/{name}": value for name, value in evaluated.metrics.items()}
        self._writer.scalars(
            values,
            num_samples=evaluated.progress.num_samples,
            unix_s=_unix_s(self._moment_of(evaluated)),
        )
        self._to_draw = evaluated if evaluated.predicted else None
        if time.monotonic() - self._examples_drawn_at >= _EXAMPLES_EVERY_S:
            self._draw_examples()
        if time.monotonic() - self._chart_drawn_at >= _CHART_EVERY_S:
            self._draw_time_parts()

    def _moment_of(self, evaluated: Evaluated) -> float:
        """Return when the center was what was scored, by this process's monotonic clock."""
        known = self._sums.up_to(evaluated.progress.round)
        at_s = max(known.at_s, self._began_at or known.at_s)
        return min(time.monotonic(), at_s + max(0.0, evaluated.progress.seconds - known.trained_s))

    def _draw_examples(self) -> None:
        """Draw the test pictures with what the center says of them, if that is news."""
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
            self._writer.image("time/stacked", pixels, num_samples=self._num_samples)

    def checkpoint(self, collected: Collected) -> None:
        """Write a checkpoint in a thread of its own; a failure is told, and the run goes on."""
        reached = self._sums.pop_sum(collected.snapshot.progress.round)
        totals = self._totals(reached)
        run = self._controller
        ended = (run.ended_by, run.ended_because) if run and collected.is_last else ("", "")
        self.checkpoints.checkpoint(collected, seconds=reached.seconds, totals=totals, ended=ended)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written: the next one waits for it."""
        return self.checkpoints.is_writing

    @property
    def is_given_up(self) -> bool:
        """Whether the storage has not answered for so long that nothing waits for it."""
        return self.checkpoints.is_given_up

    def _wrote_checkpoint(self) -> None:
        self._writer.flush()
        self._after_checkpoint()

    def show(self, state: State, workers: Mapping[str, int]) -> None:
        """Refresh the terminal."""
        for sentence in self.checkpoints.pop_failures():
            self.event(sentence)
        self._tell_of_old_checkpoint(state)
        self._progress.update(self._view(state, workers))

    def _tell_of_old_checkpoint(self, state: State) -> None:
        """Say, once, that the newest checkpoint is twice as old as it should be."""
        now, every_s = time.monotonic(), self._config.checkpoint.every_s
        if state not in (State.TRAINING, State.REGROUPING, State.RECOVERING):
            self._trains_since = now  # a run that waits has written its state
        age_s = now - max(self.checkpoints.written_at or self._trains_since, self._trains_since)
        if every_s is None or age_s <= 2 * every_s:
            self._is_old_told = False
        elif not self._is_old_told:
            self._is_old_told = True
            self.event(
                f"no checkpoint was written for {age_s:.0f} s, twice checkpoint.every_s: "
                f"{self._why_no_checkpoint()}"
            )

    def _why_no_checkpoint(self) -> str:
        if self.is_writing:
            return "one is still being written"
        if self.checkpoints.has_failed:
            return "the newest could not be"
        return "the workers have kept no states"

    @property
    def checkpoint_at(self) -> float | None:
        """When this start wrote its newest checkpoint, Unix time; None: it wrote none yet."""
        written_at = self.checkpoints.written_at
        return None if written_at is None else _unix_s(written_at)

    def _view(self, state: State, workers: Mapping[str, int]) -> ProgressView:
        training, scaling, last = self._config.training, self._config.scaling, self.last
        progress = last.progress if last else self._start.progress
        share_done = StopCondition.of(training, epoch_samples=self._num_train).share_done(
            num_samples=progress.num_samples, num_steps=progress.local_step, seconds=self.seconds
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
            center_loss=self._evaluations[-1].get("loss") if self._evaluations else None,
            workers=workers,
            wanted_workers=scaling.wanted() if scaling.max_workers else "1",
            communication_share=communication_share(self._parts) if last else None,
        )

    def _totals(self, reached: Sum) -> Totals:
        """Return the totals of all starts up to a round of this one."""
        run = self._controller
        return self._before.plus(
            evaluations=self._evaluations,
            longest_pause_s=run.stragglers.longest_pause_s if run else 0.0,
            staleness_sum=reached.staleness_sum,
            period_sum=reached.period_sum,
            time_parts=reached.time_parts,
            faults_fired=run.planned_faults.fired if run else (),
        )

    def figures(self) -> dict[str, Any]:
        """Return the parts of ``result.json`` on the whole run and on its last start."""
        last, start, run = self.last, self._start, self._controller
        num_rounds, num_samples = (
            last.progress.round if last else start.progress.round,
            self._num_samples,
        )
        this_s = self.seconds - self._seconds_before
        return {
            **self._totals(self._sums.newest).figures(num_rounds),
            **speed_figures(num_samples, self.seconds),
            "rounds": num_rounds,
            "generations": run.generation if run else start.progress.generation,
            "exchange_bytes": last.exchange_bytes if last else 0,
            "best": self._best.kept.figures() if self._best.kept else None,
            "left_out_samples": self._bad_samples.num_samples,
            "refused": run.refused if run else {},
            "workers": last.num_workers if last else 0,
            "allreduce": vars(self._allreduce) if self._allreduce else None,
            "cadence": vars(self._choice.tuning) if self._choice else None,
            "last_start": speed_figures(num_samples - start.progress.num_samples, this_s),
        }

    def _copy_last(self) -> None:
        """Copy the curves to their end; if that fails, the run is whole all the same."""
        try:
            self._bounded(self._after_checkpoint)
        except (OSError, StorageSilentError) as error:
            self._progress.event(f"{error}; all else of the run is where it should be")

    def _write_best(self) -> None:
        """Try the best center once more if it could not be written; the run is whole without."""
        try:
            self._bounded(self._best.write)
        except (CheckpointError, StorageSilentError) as error:
            self._progress.event(f"{error}; all else of the run is where it should be")

    def _bounded(self, act: Callable[[], None]) -> None:
        """Do something on the storage for as long as that answers."""
        if self._storage is None:
            act()
        else:
            within(self._storage, act, tell=self._progress.event)

    def close(self) -> None:
        """Finish what is being written.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        with contextlib.ExitStack() as stack:  # each, whatever becomes of the others
            stack.callback(self._progress.close)
            stack.callback(self._copy_last)
            stack.callback(self._writer.close)
            stack.callback(self._draw_time_parts)
            stack.callback(self._draw_examples)
            stack.callback(self._write_best)
            self.checkpoints.close()


def _unix_s(monotonic_s: float) -> float:
    """Return a moment of the monotonic clock in seconds since 1970."""
    return time.time() - (time.monotonic() - monotonic_s)
