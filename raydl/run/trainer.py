"""The trainer: checks everything, starts the processes, runs the controller to its end.

While the run goes on, its control channel is served, and signals are handled.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    to_dict,
)
from raydl.config.tls import check_device
from raydl.core.callbacks import Callback, callbacks_of, checked_callbacks
from raydl.core.custom_rule import as_method
from raydl.core.flat import FlatModel
from raydl.core.job import Job
from raydl.core.methods import Method, filled_in, resolve
from raydl.core.optimizers import OwnOptimizer, as_config
from raydl.core.reports import Outcome
from raydl.core.rules import Rule
from raydl.core.stop_condition import notes_on_period
from raydl.core.worker_group import WorkerGroup
from raydl.data import Batches, Dataset, Prepare, load, preparation_for
from raydl.data.generators import callers_generators_kept
from raydl.elastic.controller import Controller
from raydl.elastic.state import State
from raydl.errors import ConfigError, DataError
from raydl.faults import FaultPlan
from raydl.metrics import (
    BackgroundWriter,
    Forgiving,
    MetricsWriter,
    Tee,
    TensorBoardWriter,
    Thinned,
)
from raydl.ray_backend import session as ray_session
from raydl.redaction import redact, redact_values
from raydl.run.control_channel import ControlChannel
from raydl.run.driver_epoch import DriverEpoch
from raydl.run.folder import RunFolder
from raydl.run.local_worker_group import LocalWorkerGroup
from raydl.run.preflight import Trial, try_model
from raydl.run.progress_reporter import make_reporter
from raydl.run.recorder import RunRecorder
from raydl.run.resume import Start
from raydl.run.view import EventLog, RunView
from raydl.storage import Storage, below, entered_within, within
from raydl.tasks import ModelAndLoss, OwnFactory, OwnLoss, Task, checked_task, task_on
from raydl.text import config_as_markdown
from raydl.worker.evaluator import Evaluator
from raydl.worker.examples import Examples


@contextmanager
def open_control_channel(storage: Storage, view: RunView) -> Iterator[ControlChannel]:
    """Open a run's control channel, and close it with how the run ended, whichever way that was."""
    control_channel = ControlChannel(storage)
    control_channel.tell(view.status(), at_once=True)
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
    """Step the controller until the run is done; between two steps, see to the control channel.

    Raises:
        SupersededError: another driver has taken the run over.
        RaydlError: what ends the run; a user's own exception comes as it is.
    """
    view.follow(controller)
    with _stop_on_signal(controller):
        while not controller.step():
            epoch.raise_if_over()
            controller.note_refused("store", {"checkpoints": recorder.checkpoints.num_late})
            control_channel.tell(view.status)
            for request in control_channel.pop_requests():
                ok, sentence = remove(controller, request.worker_id, config=config)
                control_channel.answer(request, sentence, ok=ok)
            trouble = control_channel.take_trouble()
            if trouble:
                recorder.event(trouble)
    control_channel.tell(view.status, at_once=True)


def remove(controller: Controller, worker_id: str, *, config: TrainConfig) -> tuple[bool, str]:
    """Take a worker out, if that can be; return (whether it goes, a sentence)."""
    if config.scaling.max_workers == 0:
        return False, (
            f"{worker_id} is the run's only process (--workers 0); to end the run, interrupt it"
        )
    if controller.state in (State.FINISHING, State.DONE):
        return False, f"the run is about to end, and {worker_id} with it"
    return controller.remove(worker_id)


@contextmanager
def _stop_on_signal(controller: Controller) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into a stop with a checkpoint; the second ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        signal.signal(number, signal.default_int_handler)
        controller.request_stop(name)

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_writer(
    config: TrainConfig,
    folder: RunFolder,
    purge_after: int | None,
    tell: Callable[[str], None],
    *,
    seconds_before: float = 0.0,
) -> MetricsWriter:
    """Return the writers of measurements: event files, and Ray's metrics where Ray runs.

    Args:
        config: the settings.
        folder: of the event files.
        purge_after: in a resumed run, the samples at its checkpoint.
        tell: takes a sentence of what can not be written.
        seconds_before: seconds of training in earlier starts; an old run writes fewer points.
    """

    def make_events(is_first: bool) -> MetricsWriter:
        return TensorBoardWriter(str(folder.path), purge_after=purge_after, goes_on=not is_first)

    name = f"the curves in {folder.path}"
    events = BackgroundWriter(lambda say: Forgiving(make_events, name, say), name, tell)
    tensorboard = Thinned(events, seconds_before=seconds_before)
    if config.scaling.max_workers == 0:
        return tensorboard
    from raydl.ray_backend.ray_metrics import RayMetrics  # imports Ray

    gauges = RayMetrics(folder.path.name, first_sample=purge_after or 0)
    return Tee(tensorboard, Forgiving(lambda _: gauges, "Ray's metrics", tell))


_Settings = TypeVar("_Settings")


@dataclass(frozen=True)
class Result:
    """Result of a run. The words are Ray Train's."""

    metrics: dict[str, Any]
    """The figures of ``result.json``."""
    path: str
    """The run's folder; a URI as it was given, credentials included, so that it can be opened."""
    checkpoint: str
    """The newest checkpoint; like ``path``."""
    stopped_by: str
    """Reason for an early end; empty if the run finished."""

    def __repr__(self) -> str:
        """Return all of it, without credentials of URIs."""
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return redact(f"{type(self).__name__}({values})")


class Trainer:
    """Trains a task on data with workers that come and go.

    Args:
        task: what is learned, or the name of a model: it classifies pictures, or tells the
            next token of a text, as the data are. With ``loss`` a function that builds a model.
        data: anything ``raydl.data.load`` knows, a loaded dataset, a ``ray.data.Dataset``,
            or one of these for each of ``{"train": ..., "test": ...}``.
        method: a named method, or its settings, or a rule of your own.
        training: epochs or steps, batch size, seed.
        optimizer: the local step: settings, a name in torch.optim, or a function of parameters.
        make_optimizer: a function of parameters, where ``optimizer`` has the settings around it:
            the learning rate and its course, clipping.
        scaling: the workers.
        run: the run's folder.
        checkpoint: when checkpoints are written.
        evaluation: when the center is scored.
        input: how samples are read.
        exchange: how replicas and center exchange.
        elastic: how workers come and go.
        loss: of (model, batch), the mean over the batch: for a model of your own.
        callbacks: hear of each score of the center, and may end the run.
    """

    def __init__(
        self,
        task: Task | OwnFactory | str = "lenet",
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
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.task = _as_task(task, loss)
        """The task; None: the data's own, with the model by its name."""
        self.data = data
        self.callbacks = checked_callbacks(callbacks)
        method_config, self.rule = as_method(method)
        optimizer, self.own_optimizer = as_config(optimizer, make_optimizer)
        self.config = TrainConfig(
            data=data if isinstance(data, str) else getattr(data, "source", "ray.data.Dataset"),
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
        """Return the trainer that these settings describe."""
        trainer = cls(config.model, config.data)
        trainer.config = config
        return trainer

    @callers_generators_kept()
    def fit(self) -> Result:
        """Train to the end and return the figures.

        Raises:
            RaydlError: a setting, the data or the model is wrong (before any actor starts),
                or the run could not go on.
            Exception: what the task's own code or a callback raised, with its own traceback.
        """
        method = resolve(self.config, self.rule, self.own_optimizer)
        self.config = config = filled_in(self.config, method)
        dataset = self._load_data()
        shape = dataset.train.shape
        task = task_on(self.task, shape, config)
        _check_batch_size(config, dataset)
        prepare = preparation_for(dataset, config)
        batches = Batches(dataset.train, prepare)
        trial = try_model(task, batches, config, method)
        flat = trial.flat
        faults = _read_faults(config)
        folder = RunFolder(config)
        with entered_within(folder.storage, folder.held(resume=config.run.resume)):
            order = dataset.train.order(config.training.seed)
            start = within(
                folder.storage, lambda: Start.from_folder(folder, config, flat, order=order)
            )
            start.sentences.extend(_notes_on(trial, method))
            start.sentences.extend(
                notes_on_period(config, period=method.period, num_samples=order.num_samples)
            )
            job = Job(config, method, task, shape, order, faults)
            view = RunView(
                config, start.snapshot, seconds_before=start.seconds,
                center_accuracy=start.before.center_accuracy,
            )  # fmt: skip
            with open_control_channel(start.folder.storage, view) as control_channel:
                examples = Examples(dataset.test)
                if start.is_trained:
                    evaluator = _make_evaluator(job, dataset, prepare, flat)
                    result = self._end(evaluator, flat, start, job, view, examples)
                else:
                    worker_group = _make_worker_group(job, dataset, prepare, flat, folder.storage)
                    try:
                        result = self._run(
                            worker_group, job, flat, start, control_channel, view, examples
                        )
                    finally:
                        worker_group.close()
        for callback in self.callbacks:
            callback.ended(result.metrics)
        return result

    def _load_data(self) -> Dataset:
        if isinstance(self.data, Dataset):
            return self.data
        seed = self.config.training.seed
        if isinstance(self.data, str):
            return load(self.data, seed=seed, input=self.config.input)
        parts = self.data.values() if isinstance(self.data, Mapping) else [self.data]
        for part in parts:
            if not hasattr(part, "materialize"):
                raise DataError(
                    "data",
                    f"must be a path or URI, what raydl.data.load returns, or a ray.data.Dataset "
                    f"or two of them named train and test; got a {type(part).__name__}",
                )
        from raydl.ray_backend.ray_data import from_ray  # imports Ray

        return from_ray(self.data, seed=seed, input=self.config.input)

    def _run(
        self,
        worker_group: WorkerGroup,
        job: Job,
        flat: FlatModel,
        start: Start,
        control_channel: ControlChannel,
        view: RunView,
        examples: Examples,
    ) -> Result:
        config, snapshot = self.config, start.snapshot
        worker_group.start_center(snapshot)
        with self._recorded(job, flat, start, view, examples) as recorder:
            controller = Controller(
                worker_group,
                config,
                job.method,
                recorder,
                first_round=snapshot.progress.round,
                first_generation=snapshot.progress.generation,
                first_cuts=snapshot.num_cuts,
                own_states=start.own_states,
                faults=job.faults,
                callbacks=(*callbacks_of(config.training), *self.callbacks),
            )
            recorder.follow(controller)
            run_to_end(
                controller, recorder, control_channel, view, config=config, epoch=start.folder.epoch
            )
            if controller.outcome is Outcome.FINISHED:
                recorder.checkpoints.finish()
        assert controller.state is State.DONE
        is_stopped = controller.outcome is Outcome.STOPPED
        return _finish(
            recorder,
            start,
            lacks_score=controller.lacks_score,
            stopped_by=controller.stop_reason if is_stopped else "",
            ended_by=controller.ended_by,
            ended_because=controller.ended_because,
        )

    def _end(
        self,
        evaluator: Evaluator,
        flat: FlatModel,
        start: Start,
        job: Job,
        view: RunView,
        examples: Examples,
    ) -> Result:
        """Write the end of a run whose last checkpoint is there, and what comes after it not."""
        with self._recorded(job, flat, start, view, examples) as recorder:
            recorder.checkpoints.finish()
            if not start.before.is_scored(start.snapshot.progress.round):
                evaluated = evaluator.evaluate(start.snapshot)
                recorder.evaluated(evaluated)
                for callback in self.callbacks:
                    callback.evaluated(evaluated.without_center())
        if start.result:
            return _result_of(start, start.result)
        ended_by, ended_because = start.ended
        return _finish(recorder, start, ended_by=ended_by, ended_because=ended_because)

    @contextmanager
    def _recorded(
        self, job: Job, flat: FlatModel, start: Start, view: RunView, examples: Examples
    ) -> Iterator[RunRecorder]:
        """Open the recorder, tell what is known at the start, and close it in the end."""
        config, folder, snapshot = self.config, start.folder, start.snapshot
        purge_after = snapshot.progress.num_samples if config.run.resume else None
        log = EventLog(make_reporter(config.run.progress))
        recorder = RunRecorder(
            config,
            num_train=snapshot.ledger["num_samples"],
            start=snapshot,
            seconds_before=start.seconds,
            before=start.before,
            writer=make_writer(
                config, folder, purge_after, tell=log.event, seconds_before=start.seconds
            ),
            progress=log,
            store=start.store,
            best=start.best,
            flat=flat,
            examples=examples,
            order=job.order.name,
            after_checkpoint=folder.publish_events,
            storage=folder.storage,
            refuge=folder.path if folder.is_remote else None,
        )
        view.follow_recorder(recorder, log)
        try:
            within(folder.storage, lambda: folder.write_config(config), tell=log.event)
            recorder.describe(config_as_markdown(redact_values(to_dict(config))))
            for sentence in start.sentences:
                recorder.event(sentence)
            yield recorder
        except BaseException:
            recorder.checkpoints.abort()
            raise
        finally:
            recorder.close()


def _as_task(task: Task | OwnFactory | str, loss: OwnLoss | None) -> Task | None:
    if isinstance(task, str):
        if loss is not None:
            raise ConfigError("loss", f"is for a model of your own, not for {task} by name")
        models.find(task)  # which has a sentence if there is none
        return None
    if loss is None:
        return checked_task(task)
    if hasattr(task, "build_model"):
        raise ConfigError("loss", "is for a function that builds a model; this task has its own")
    return ModelAndLoss(task, loss)


def _settings(name: str, given: _Settings | None, kind: type[_Settings]) -> _Settings:
    """Return a group of settings, those as they come if none are given."""
    if given is not None and not isinstance(given, kind):
        raise ConfigError(name, f"must be a raydl.{kind.__name__}, got {given!r}")
    return kind() if given is None else given


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _read_faults(config: TrainConfig) -> FaultPlan:
    if config.run.fault_plan is None:
        return FaultPlan()
    plan = FaultPlan.read(config.run.fault_plan)
    plan.check(max_workers=config.scaling.max_workers, num_shards=config.exchange.center_shards)
    return plan


def _notes_on(trial: Trial, method: Method) -> list[str]:
    """Return warnings about a model before it is trained."""
    if not trial.moved or method.is_sync:
        return []
    others = f" and {len(trial.moved) - 1} more" if len(trial.moved) > 1 else ""
    return [
        f"the model moves its frozen {trial.moved[0]}{others} by itself: each worker keeps its "
        f"own, and the center has what the run began with; take a synchronous method to keep that "
        f"of one worker"
    ]


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
    from raydl.ray_backend.cluster import check_room  # imports Ray, as the next does
    from raydl.ray_backend.worker_group import RayWorkerGroup

    is_ours = ray_session.connect()
    if is_ours:
        check_room(scaling)
    return RayWorkerGroup(job, dataset, prepare, non_trainable, storage)


def _make_evaluator(job: Job, dataset: Dataset, prepare: Prepare, first: FlatModel) -> Evaluator:
    return Evaluator(job, Batches(dataset.test, prepare), first.non_trainable.arrays())


def _finish(
    recorder: RunRecorder,
    start: Start,
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
    }
    metrics |= {"lacks_score": lacks_score, "driver_epoch": start.folder.epoch.number}
    if lacks_score:  # that of an earlier center is none of this one
        metrics |= {"center_accuracy": None, "center_loss": None}
    within(start.folder.storage, lambda: start.folder.write_result(metrics))
    return _result_of(start, metrics)


def _result_of(start: Start, metrics: dict[str, Any]) -> Result:
    names = within(start.folder.storage, start.store.names)
    newest = below(start.folder.root, f"checkpoints/{names[-1]}") if names else ""
    return Result(metrics, start.folder.root, newest, metrics["stopped_by"])
