"""The trainer: checks all settings, starts the processes, and steps the controller until the end.

Between the steps it serves the control channel and handles signals.
"""

from __future__ import annotations

import raydl.core.torch_import  # noqa: F401  # isort: skip  (before torch)

import functools
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

from raydl import models
from raydl.config import (
    CheckpointConfig,
    ElasticConfig,
    EvaluationConfig,
    ExchangeConfig,
    InputConfig,
    MethodConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
    dotted,
    to_dict,
)
from raydl.config.custom_code import hugging_face_folder
from raydl.config.run import RUNS
from raydl.config.tls import check_device
from raydl.core.callbacks import Callback, callbacks_of, checked_callbacks
from raydl.core.flat import FlatModel
from raydl.core.job import Job
from raydl.core.method import Method
from raydl.core.optimizers import OwnOptimizer, as_config
from raydl.core.reports import Outcome
from raydl.core.rules import Rule
from raydl.core.stop_condition import notes_on_period
from raydl.core.worker_group import WorkerGroup
from raydl.data import Batches, Dataset, Order, Prepare, load, statistics_of
from raydl.data.datasets import load_each
from raydl.data.generators import callers_generators_kept
from raydl.data.iterable_style import IterableStyle, from_iterable, is_iterable
from raydl.data.map_style import Loaded, from_map_style, is_map_style
from raydl.data.pieces import Piece
from raydl.data.saved_dataset import HubRows, is_stored
from raydl.data.schema import Schema, to_json
from raydl.data.skew import Skewed, order_of
from raydl.elastic.controller import Controller
from raydl.elastic.run_state import State
from raydl.errors import STOP_COMMAND, ConfigError, DataError
from raydl.faults import FaultPlan
from raydl.methods import filled_in, resolve
from raydl.methods.custom_rule import as_method
from raydl.metrics import (
    BackgroundWriter,
    MetricsWriter,
    RetryingWriter,
    Tee,
    TensorBoardWriter,
    Thinned,
    trackers,
)
from raydl.ray_backend import session as ray_session
from raydl.run.control_channel import ControlChannel
from raydl.run.driver_epoch import DriverEpoch
from raydl.run.folder import RunFolder, with_index_dir
from raydl.run.history import HistoryWriter
from raydl.run.local_worker_group import LocalWorkerGroup
from raydl.run.preflight import PreflightResult, try_model
from raydl.run.progress_reporter import make_reporter
from raydl.run.recorder import RunRecorder
from raydl.run.result import Result
from raydl.run.resume import Start
from raydl.run.view import EventLog, RunView
from raydl.storage import Storage, entered_within, within
from raydl.tasks import (
    HuggingFace,
    ModelAndLoss,
    OwnCount,
    OwnFactory,
    OwnLoss,
    Task,
    checked_task,
    preparation,
    shape_for,
    task_on,
)
from raydl.text.formatting import settings_table
from raydl.text.redaction import redact_values
from raydl.worker.evaluator import Evaluator
from raydl.worker.examples import Examples


@contextmanager
def open_control_channel(storage: Storage, view: RunView) -> Iterator[ControlChannel]:
    """Open the control channel of a run, and close it with the last status, also after an error."""
    control_channel = ControlChannel(storage)
    control_channel.report(view.status(), at_once=True)
    try:
        yield control_channel
    except BaseException as error:
        control_channel.close(view.end(error))
        raise
    control_channel.close(view.end())


def run_to_end(
    controller: Controller,
    recorder: RunRecorder,
    control_channel: ControlChannel,
    view: RunView,
    *,
    config: TrainConfig,
    epoch: DriverEpoch,
) -> None:
    """Step the controller until the run is done; between two steps, serve the control channel.

    Raises:
        SupersededError: another driver has taken over the run.
        RaydlError: the error that ends the run; an exception of user code is raised unchanged.
    """
    view.follow(controller)
    with _stop_on_signal(controller):
        while not controller.step():
            epoch.raise_if_over()
            controller.note_refused("store", {"checkpoints": recorder.checkpoints.num_late})
            control_channel.report(view.status)
            for request in control_channel.pop_requests():
                if request.worker_id is None:
                    ok, sentence = stop(controller)
                else:
                    ok, sentence = remove(controller, request.worker_id, config=config)
                control_channel.answer(request, sentence, ok=ok)
            if problem := control_channel.pop_problem():
                recorder.event(problem)
    control_channel.report(view.status, at_once=True)


def _own_states(start: Start, config: TrainConfig) -> dict[str, Any]:
    """Return the states of workers to resume; the only worker of a process resumes the first."""
    if config.scaling.max_workers == 0:
        return dict(zip(["w0"], start.own_states.values(), strict=False))
    return start.own_states


def stop(controller: Controller) -> tuple[bool, str]:
    """Stop the run after its round, if it goes on; return (whether it stops, a sentence)."""
    if controller.state in (State.FINISHING, State.DONE):
        return False, "the run is about to end by itself"
    controller.request_stop(STOP_COMMAND)
    return True, "the run stops after this round, with a checkpoint; --resume continues it"


def remove(controller: Controller, worker_id: str, *, config: TrainConfig) -> tuple[bool, str]:
    """Remove a worker, if possible; return (whether it leaves, a sentence)."""
    if config.scaling.max_workers == 0:
        return False, (
            f"{worker_id} is the run's only process (--workers 0); to end the run, interrupt it"
        )
    if controller.state in (State.FINISHING, State.DONE):
        return False, f"the run is about to end, and {worker_id} with it"
    return controller.remove(worker_id)


@contextmanager
def _stop_on_signal(controller: Controller) -> Iterator[None]:
    """Stop with a checkpoint at the first SIGINT, SIGTERM or SIGHUP.

    At once at a second SIGINT or SIGTERM. SIGHUP comes twice when a terminal closes: the kernel and
    the shell send it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            ray_session.leave_closed_terminal()
        else:
            signal.signal(number, signal.default_int_handler)
        controller.request_stop(signal.Signals(number).name)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if ray_session.handles_hangup():
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _make_writer(
    config: TrainConfig,
    folder: RunFolder,
    purge_after: int | None,
    log: Callable[[str], None],
    *,
    seconds_before: float,
) -> MetricsWriter:
    """Return the writer of measurements: to event files, trackers, and Ray's metrics if Ray runs.

    Args:
        config: the settings.
        folder: the folder of the event files.
        purge_after: in a resumed run, the number of samples at its checkpoint.
        log: receives a sentence if something cannot be written.
        seconds_before: seconds of training in earlier starts; a long run writes fewer points.
    """

    def make_events(is_first: bool) -> MetricsWriter:
        return TensorBoardWriter(str(folder.path), purge_after=purge_after, goes_on=not is_first)

    def in_background(
        make: Callable[[bool], MetricsWriter], name: str, place: str
    ) -> MetricsWriter:
        curves = BackgroundWriter(lambda r: RetryingWriter(make, name, r), name, log, place=place)
        return Thinned(curves, seconds_before=seconds_before)

    writers = [in_background(make_events, f"the curves in {folder.path}", "their disk")]
    settings = dotted(redact_values(to_dict(config)))
    for name in trackers.names_of(config.run.tracker):
        make = trackers.maker_of(name, folder.path, settings)
        writers.append(in_background(make, f"the curves in {name}", name))
    if config.scaling.max_workers:
        from raydl.ray_backend.ray_metrics import RayMetrics  # imports Ray

        gauges = RayMetrics(folder.path.name, first_sample=purge_after or 0)
        writers.append(RetryingWriter(lambda _: gauges, "Ray's metrics", log))
    return Tee(*writers)


_Settings = TypeVar("_Settings")


class Trainer:
    """Trains a task on data with workers that join and leave.

    Args:
        task: the task, or the name of a model, which classifies images or rows of a table or
            predicts the next token of a text, depending on the data (``auto``: also the model);
            with ``loss`` a function that builds a model.
        data: a source that ``raydl.data.load`` accepts, a loaded dataset, a map-style
            ``torch.utils.data.Dataset`` or a ``DataLoader`` of one, a ``ray.data.Dataset``, or two
            of one of the last three as ``{"train": ..., "test": ...}``; ``train`` may be an
            ``IterableDataset`` or a ``DataLoader`` of one.
        method: the name of a method, or its settings, or a rule of your own.
        training: epochs or steps, batch size, seed.
        optimizer: the local step: settings, a name in torch.optim, or a function of parameters.
        make_optimizer: a function of parameters, if ``optimizer`` has the other settings: learning
            rate, its schedule, clipping.
        scaling: number and resources of the workers.
        run: the run's folder.
        checkpoint: when checkpoints are written.
        evaluation: when the center is scored.
        input: how samples are read.
        exchange: how replicas and center exchange.
        elastic: how the run reacts to workers that are lost, late or new.
        loss: the loss of (model, batch), the mean over the batch, for a model of your own.
        count: with ``loss``, how much a batch counts, if the loss is not a mean over its samples or
            over the labels that are not -100: the denominator of that mean.
        callbacks: called with each score of the center; they may end the run.
    """

    def __init__(
        self,
        task: Task | OwnFactory | str = "auto",
        data: Dataset | str | Any = "digits",
        *,
        method: MethodConfig | Rule | str = "sync-easgd",
        training: TrainingConfig | None = None,
        optimizer: OptimizerConfig | OwnOptimizer | str | None = None,
        make_optimizer: OwnOptimizer | None = None,
        scaling: ScalingConfig | None = None,
        run: RunConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        evaluation: EvaluationConfig | None = None,
        input: InputConfig | None = None,
        exchange: ExchangeConfig | None = None,
        elastic: ElasticConfig | None = None,
        loss: OwnLoss | None = None,
        count: OwnCount | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.task = _as_task(task, loss, count)
        """The task, or None for the one that suits the data, with the named model."""
        self.data = data
        self.callbacks = checked_callbacks(callbacks)
        method_config, self.rule = as_method(method)
        optimizer, self.own_optimizer = as_config(optimizer, make_optimizer)
        self.config = TrainConfig(
            data=_name_of_data(data),
            model=task if isinstance(task, str) else cast(Task, self.task).name,
            task="auto" if self.task is None else _name_of(type(self.task)),
            method=method_config,
            training=_settings("training", training, TrainingConfig),
            optimizer=optimizer,
            scaling=_settings("scaling", scaling, ScalingConfig),
            run=_settings("run", run, RunConfig),
            checkpoint=_settings("checkpoint", checkpoint, CheckpointConfig),
            evaluation=_settings("evaluation", evaluation, EvaluationConfig),
            input=_settings("input", input, InputConfig),
            exchange=_settings("exchange", exchange, ExchangeConfig),
            elastic=_settings("elastic", elastic, ElasticConfig),
        )

    @classmethod
    def from_config(cls, config: TrainConfig) -> Trainer:
        """Return a trainer with these settings."""
        trainer = cls(config.model, config.data)
        trainer.config = config
        return trainer

    @callers_generators_kept()
    def fit(self) -> Result:
        """Train to the end and return the figures.

        Raises:
            RaydlError: a setting, the data or the model is wrong (before any actor starts),
                or the run failed.
            Exception: the error of the user's task or callback, with its own traceback.
        """
        method = resolve(self.config, self.rule, self.own_optimizer)
        self.config = config = filled_in(self.config, method)
        trackers.names_of(config.run.tracker)  # raises an error if there is none of a name
        dataset = self._load_data()
        if config.model == "auto":
            model = models.USUAL[dataset.train.shape.kind]
            self.config = config = replace(config, model=model)
        task = task_on(self.task, dataset.train.shape, config)
        _check_batch_size(config, dataset)
        folder, kept = RunFolder(config), None
        if config.run.resume:
            kept = within(folder.storage, folder.normalization)
        prepare = preparation(task, dataset, config, kept)
        batches = Batches(dataset.train, prepare)
        shape, note_on_labels = shape_for(task, batches)
        preflight = try_model(task, batches, shape, config, method)
        flat = preflight.flat
        faults = _read_faults(config)
        with entered_within(folder.storage, folder.held(resume=config.run.resume)):
            order = order_of(dataset.train, config)
            start = self._start_from(folder, flat, order, dataset.schema, method)
            start.sentences.extend(dataset.notes)
            start.sentences.extend(_notes_on(preflight, method))
            if config.scaling.max_workers:
                start.sentences.extend(ray_session.notes())
            if note_on_labels:
                start.sentences.append(note_on_labels)
            if isinstance(dataset.train, IterableStyle):
                start.sentences.append(dataset.train.note)
            if isinstance(order, Skewed):
                start.sentences.append(order.note)
            start.sentences.extend(
                notes_on_period(config, period=method.period, num_samples=order.num_samples)
            )
            job = Job(config, method, task, shape, order, faults)
            view = RunView(
                config, start.snapshot, seconds_before=start.seconds,
                center_accuracy=start.before.center_accuracy,
            )  # fmt: skip
            with open_control_channel(start.folder.storage, view) as control_channel:
                ended = self._train_from(start, job, dataset, prepare, control_channel, view)
                while not isinstance(ended, Result):
                    start = self._start_again(start, job, dataset.schema, ended)
                    view.start_again(start.snapshot, seconds_before=start.seconds)
                    ended = self._train_from(start, job, dataset, prepare, control_channel, view)
            result, self.config = ended, config
        for callback in self.callbacks:
            callback.ended(result.metrics)
        return result

    def _start_from(
        self,
        folder: RunFolder,
        flat: FlatModel,
        order: Order,
        schema: Schema,
        method: Method,
        unfrozen: Sequence[str] = (),
    ) -> Start:
        read = functools.partial(
            Start.from_folder, folder, self.config, flat, order=order, schema=schema, method=method
        )
        return within(folder.storage, lambda: read(unfrozen=unfrozen))

    def _start_again(
        self, start: Start, job: Job, schema: Schema, unfrozen: tuple[str, ...]
    ) -> Start:
        """Return the start from the newest checkpoint, with further parameters trained."""
        self.config = replace(self.config, run=replace(self.config.run, resume=True))
        again = self._start_from(start.folder, start.flat, job.order, schema, job.method, unfrozen)
        if new := again.flat.unfrozen[len(start.flat.unfrozen) :]:
            again.sentences[-1] = (
                f"the model has unfrozen {_first_of(new)}: trained from now on, from round "
                f"{again.snapshot.progress.round}"
            )
        return again

    def _train_from(
        self,
        start: Start,
        job: Job,
        dataset: Dataset,
        prepare: Prepare,
        control_channel: ControlChannel,
        view: RunView,
    ) -> Result | tuple[str, ...]:
        """Train from a start to the end.

        Returns:
            The result; or the frozen parameters that the models have unfrozen, if the run stopped
            with a checkpoint only to be resumed with them.
        """
        job = replace(job, unfrozen=start.flat.unfrozen)
        examples, statistics = Examples(dataset.test), statistics_of(prepare)
        recording = self._recording(job, start, view, examples, statistics, dataset.schema)
        if start.is_trained:
            test = Batches(dataset.test, prepare)
            evaluator = Evaluator(job, test, start.flat.non_trainable.arrays())
            return self._end(recording, start, job.task, evaluator)
        workers = _make_worker_group(job, dataset, prepare, start.flat, start.folder.storage)
        with closing(workers):
            return self._run(recording, start, job, workers, control_channel, view)

    def _load_data(self) -> Dataset:
        parts = list(self.data.values()) if isinstance(self.data, Mapping) else [self.data]
        if any(map(is_iterable, parts)):
            return from_iterable(self.data, self.config)
        if self.config.input.samples_per_epoch is not None:
            raise ConfigError("input.samples_per_epoch", "is for iterable data sets; unset it")
        if isinstance(self.data, Dataset):
            return self.data
        seed = self.config.training.seed
        if isinstance(self.data, str):
            folder = self.config.run.folder or f"{RUNS}/new"
            input = with_index_dir(self.config.input, folder)
            return load(self.data, seed=seed, input=input, task=self.config.task)
        if all(map(is_stored, parts)):
            return self._load_each(HubRows, self.config.input)
        if all(map(is_map_style, parts)):
            return from_map_style(self.data, self.config)
        for part in parts:
            if not hasattr(part, "materialize"):
                raise DataError(
                    "data",
                    f"must be a path or URI, a result of raydl.data.load, a torch Dataset, a "
                    f"DataLoader of one, a ray.data.Dataset, or two of a kind named train and "
                    f"test; got a {type(part).__name__}",
                )
        from raydl.ray_backend.ray_data import RayBlocks  # imports Ray

        return self._load_each(RayBlocks, replace(self.config.input, stream="always"))

    def _load_each(self, piece_of: Callable[[Any], Piece], input: InputConfig) -> Dataset:
        seed, task = self.config.training.seed, self.config.task
        return load_each(self.data, piece_of, seed=seed, input=input, task=task)

    def _run(
        self,
        recording: AbstractContextManager[RunRecorder],
        start: Start,
        job: Job,
        worker_group: WorkerGroup,
        control_channel: ControlChannel,
        view: RunView,
    ) -> Result | tuple[str, ...]:
        """Run the controller to its end; returns as ``_train_from``."""
        config, snapshot = self.config, start.snapshot
        worker_group.start_center(snapshot)
        with recording as recorder:
            controller = Controller(
                worker_group,
                config,
                job.method,
                recorder,
                first_round=(round := snapshot.progress.round),
                # A driver may be killed between a checkpoint and its score.
                is_first_scored=round == 0 or start.before.is_scored(round),
                first_seconds=snapshot.progress.seconds,
                first_generation=snapshot.progress.generation,
                first_cuts=snapshot.num_cuts,
                own_states=_own_states(start, config),
                faults=job.faults,
                callbacks=(*callbacks_of(config), *self.callbacks),
            )
            recorder.follow(controller)
            run_to_end(
                controller, recorder, control_channel, view, config=config, epoch=start.folder.epoch
            )
            if controller.unfrozen and not controller.restarts:
                recorder.event(
                    f"the model has unfrozen {_first_of(controller.unfrozen)}, but the run ended "
                    f"before it could train them; --resume with more epochs trains them"
                )
            recorder.conclude()
            if controller.outcome is Outcome.FINISHED:
                recorder.checkpoints.finish()
        assert controller.state is State.DONE
        if controller.restarts:
            return controller.unfrozen
        is_stopped = controller.outcome is Outcome.STOPPED
        return _finish(
            recorder,
            start,
            job.task,
            lacks_score=controller.lacks_score,
            stopped_by=controller.stop_reason if is_stopped else "",
            ended_by=controller.ended_by,
            ended_because=controller.ended_because,
        )

    def _end(
        self,
        recording: AbstractContextManager[RunRecorder],
        start: Start,
        task: Task,
        evaluator: Evaluator,
    ) -> Result:
        """Write the last files of a trained run that are missing after its last checkpoint."""
        with recording as recorder:
            recorder.checkpoints.finish()
            if not start.before.is_scored(start.snapshot.progress.round):
                evaluated = evaluator.evaluate(start.snapshot)
                recorder.evaluated(evaluated)
                for callback in self.callbacks:
                    callback.evaluated(evaluated.without_center())
            recorder.conclude()
        if start.result:
            metrics = {**start.result, "driver_epoch": start.folder.epoch.number}
            within(start.folder.storage, lambda: start.folder.write_result(metrics))
            return _result_of(start, metrics)
        ended_by, ended_because = start.ended
        return _finish(recorder, start, task, ended_by=ended_by, ended_because=ended_because)

    @contextmanager
    def _recording(
        self,
        job: Job,
        start: Start,
        view: RunView,
        examples: Examples,
        normalization: Mapping[str, Any] | None,
        schema: Schema,
    ) -> Iterator[RunRecorder]:
        """Open the recorder, log the messages of the start, and close the recorder at the end."""
        config, folder, snapshot = self.config, start.folder, start.snapshot
        purge_after = snapshot.progress.num_samples if config.run.resume else None
        log = EventLog(make_reporter(config.run.progress, log_format=config.run.log_format))
        with ExitStack() as stack:
            stack.callback(log.close)  # the panel, if the recorder cannot be opened
            # Before the first curve: without it a start counts as none, and can be repeated.
            write = functools.partial(
                folder.write_config, config, normalization=normalization, schema=to_json(schema)
            )
            within(folder.storage, write, log=log.event)
            recorder = RunRecorder(
                config,
                num_train=snapshot.ledger["num_samples"],
                start=snapshot,
                seconds_before=start.seconds,
                before=start.before,
                writer=_make_writer(
                    config, folder, purge_after, log.event, seconds_before=start.seconds
                ),
                progress=log,
                store=start.store,
                best=start.best,
                flat=start.flat,
                examples=examples,
                order=job.order.name,
                history=HistoryWriter(folder.path, folder.epoch.number),
                after_checkpoint=folder.publish_events,
                storage=folder.storage,
                fallback_dir=folder.path if folder.is_remote else None,
            )
            stack.pop_all()
        view.follow_recorder(recorder, log)
        try:
            recorder.describe(settings_table(dotted(redact_values(to_dict(config)))))
            for sentence in start.sentences:
                recorder.event(sentence)
            yield recorder
        except BaseException:
            recorder.checkpoints.abort()
            raise
        finally:
            recorder.close()


def _as_task(
    task: Task | OwnFactory | str, loss: OwnLoss | None, count: OwnCount | None
) -> Task | None:
    if count is not None and loss is None:
        raise ConfigError("count", "needs loss=; a task of your own has a method count(batch)")
    if isinstance(task, str):
        if loss is not None:
            raise ConfigError("loss", f"is for a model of your own, not for {task} by name")
        if task == "auto":
            return None
        if hugging_face_folder(task) is not None:
            HuggingFace(task)  # raises an error if the folder has no model
            return None
        models.find(task)  # raises an error if there is none
        return None
    if loss is None:
        return checked_task(task)
    if hasattr(task, "build_model"):
        raise ConfigError("loss", "is for a function that builds a model; this task has its own")
    return ModelAndLoss(task, loss, count=count)


def _first_of(names: Sequence[str]) -> str:
    """Return the first name, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _settings(name: str, given: _Settings | None, kind: type[_Settings]) -> _Settings:
    """Return a group of settings, or its defaults if ``given`` is None."""
    if given is not None and not isinstance(given, kind):
        raise ConfigError(name, f"must be a raydl.{kind.__name__}, got {given!r}")
    return kind() if given is None else given


def _name_of_data(data: Any) -> str:
    """Return the source of a data set, or the name of its class."""
    if isinstance(data, (str, Dataset)):
        return data if isinstance(data, str) else data.source
    part = next(iter(data.values()), None) if isinstance(data, Mapping) else data
    is_torch = is_map_style(part) or is_iterable(part)
    return Loaded.of(part).name if is_torch else "ray.data.Dataset"


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _read_faults(config: TrainConfig) -> FaultPlan:
    run, scaling = config.run, config.scaling
    plan = FaultPlan() if run.fault_plan is None else FaultPlan.read(run.fault_plan)
    if run.bad_share is not None:
        plan = plan.with_bad_workers(*run.bad_share, num_workers=scaling.min_workers)
    if plan.faults:
        plan.check(max_workers=scaling.max_workers, num_shards=config.exchange.center_shards)
    return plan


def _notes_on(preflight: PreflightResult, method: Method) -> list[str]:
    """Return warnings about what a user may not expect of the model."""
    notes = []
    if count := preflight.num_in_evaluation:
        notes.append(
            f"{count} module{'s' if count > 1 else ''} with dropout or batch norm "
            f"{'are' if count > 1 else 'is'} in evaluation mode, as the model was built, and "
            f"{'stay' if count > 1 else 'stays'} in it; call train() on the built model to train "
            f"with dropout and batch statistics"
        )
    if count := preflight.num_uncounted:
        notes.append(
            f"none of the first {count} training samples counts, so no step is taken on them: all "
            f"their labels are -100, or count(batch) of the task is 0; check both"
        )
    moved = preflight.moved
    if moved and not method.is_sync:  # messages do not carry them
        others = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
        notes.append(
            f"the model changes its frozen {moved[0]}{others} by itself: each worker keeps its own "
            f"values, and the center keeps the first ones; use a synchronous method to keep those "
            f"of one worker"
        )
    return notes


def _check_batch_size(config: TrainConfig, dataset: Dataset) -> None:
    batch_size, num_samples = config.training.batch_size, dataset.train.num_samples
    if batch_size > num_samples:
        raise ConfigError(
            "training.batch_size", f"must be at most the {num_samples} samples, got {batch_size}"
        )


def _make_worker_group(
    job: Job, dataset: Dataset, prepare: Prepare, first: FlatModel, storage: Storage
) -> WorkerGroup:
    scaling, non_trainable = job.config.scaling, first.non_trainable.arrays()
    if scaling.max_workers == 0:
        return LocalWorkerGroup(job, dataset, prepare, non_trainable)
    if job.method.is_sync and scaling.max_workers > 1:
        check_device(job.config.exchange_device, os.environ)
    ray_session.prepare()
    from raydl.ray_backend.cluster import check_room  # imports Ray, like the next line
    from raydl.ray_backend.worker_group import RayWorkerGroup

    is_own_cluster = ray_session.connect(has_forks=scaling.fork_server)
    if is_own_cluster:  # it does not grow
        check_room(scaling)
    return RayWorkerGroup(job, dataset, prepare, non_trainable, storage)


def _finish(
    recorder: RunRecorder,
    start: Start,
    task: Task,
    *,
    lacks_score: bool = False,
    stopped_by: str = "",
    ended_by: str = "",
    ended_because: str = "",
) -> Result:
    metrics = {
        **recorder.figures(),
        "stopped_by": stopped_by,
        "ended_by": ended_by,
        "ended_because": ended_because,
        "lacks_score": lacks_score,
        "driver_epoch": start.folder.epoch.number,
    }
    if lacks_score:  # the newest score is that of an earlier center
        metrics |= {"center_accuracy": None, "center_loss": None}
    if isinstance(task, HuggingFace):  # before the result, which marks the run as complete
        _export(task, start)
    within(start.folder.storage, lambda: start.folder.write_result(metrics))
    return _result_of(start, metrics)


def _export(task: HuggingFace, start: Start) -> None:
    """Write the newest center as a model of transformers to the folder ``model`` of the run."""
    storage = start.folder.storage
    if not within(storage, start.store.names):
        return
    weights, _ = within(storage, start.store.read_center)
    with tempfile.TemporaryDirectory() as folder:
        task.export(weights, folder)
        for path in sorted(Path(folder).iterdir()):
            within(storage, functools.partial(storage.copy_in, str(path), f"model/{path.name}"))


def _result_of(start: Start, metrics: dict[str, Any]) -> Result:
    folder = start.folder
    return within(folder.storage, lambda: Result.of(metrics, folder.root, start.store))
