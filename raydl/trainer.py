"""The trainer: checks everything, starts the processes, runs the controller to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_tensors

from raydl import ray_session
from raydl.center import Snapshot, first_snapshot
from raydl.checkpoint import CheckpointStore
from raydl.config import (
    CheckpointConfig,
    ElasticConfig,
    EvaluationConfig,
    ExchangeConfig,
    MethodConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    TrainConfig,
    TrainingConfig,
    to_dict,
)
from raydl.control import Controller, State, kind_for
from raydl.crew import Crew
from raydl.data import Batches, Dataset, Normalizer, load
from raydl.errors import ConfigError, DataError, ShapeError
from raydl.examples import Examples
from raydl.extent import Extent
from raydl.faults import FaultPlan
from raydl.flat import FlatModel
from raydl.job import Job
from raydl.local_crew import LocalCrew
from raydl.method import Method
from raydl.methods import filled_in, resolve
from raydl.progress import make_progress
from raydl.recorder import RunRecorder, snapshot_of
from raydl.reports import Outcome
from raydl.rules import Rule
from raydl.run_loop import make_writer, open_desk, run_to_end
from raydl.run_view import EventLog, RunView
from raydl.runs.desk import RunDesk
from raydl.runs.folder import RunFolder, open_run
from raydl.runs.totals import Totals
from raydl.storage import below
from raydl.task import ChecksOutput, Classification, DataShape, Task, evaluate
from raydl.texts import config_as_markdown


@dataclass(frozen=True)
class Result:
    """What a run came to. The words are Ray Train's."""

    metrics: dict[str, Any]
    """The figures of ``result.json``."""
    path: str
    """The run's folder."""
    checkpoint: str
    """The newest checkpoint."""
    stopped_by: str
    """What ended the run before its time; empty if it finished."""


class Trainer:
    """Trains a task on data with workers that come and go.

    Args:
        task: what is learned, or the name of a model to classify with.
        data: anything :func:`raydl.data.load` knows, or a loaded dataset.
        method: a named method, or its settings, or a rule of your own.
        training: epochs or steps, batch size, seed.
        optimizer: the local step.
        scaling: the workers.
        run: the run's folder.
        checkpoint: when checkpoints are written.
        evaluation: when the center is scored.
        exchange: how replicas and center exchange.
        elastic: how workers come and go.
    """

    def __init__(
        self,
        task: Task | str = "lenet",
        data: Dataset | str = "digits",
        *,
        method: MethodConfig | Rule | str = "sync-easgd",
        training: TrainingConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        scaling: ScalingConfig | None = None,
        run: RunConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        evaluation: EvaluationConfig | None = None,
        exchange: ExchangeConfig | None = None,
        elastic: ElasticConfig | None = None,
    ) -> None:
        self.task = Classification(task) if isinstance(task, str) else task
        self.data = data
        self.rule = method if isinstance(method, Rule) else None
        self.config = TrainConfig(
            data=data if isinstance(data, str) else data.source,
            model=self.task.name,
            method=_method_config(method),
            training=training or TrainingConfig(),
            optimizer=optimizer or OptimizerConfig(),
            scaling=scaling or ScalingConfig(),
            run=run or RunConfig(),
            checkpoint=checkpoint or CheckpointConfig(),
            evaluation=evaluation or EvaluationConfig(),
            exchange=exchange or ExchangeConfig(),
            elastic=elastic or ElasticConfig(),
        )

    @classmethod
    def from_config(cls, config: TrainConfig) -> Trainer:
        """Return the trainer that these settings describe."""
        trainer = cls(config.model, config.data)
        trainer.config = config
        return trainer

    def fit(self) -> Result:
        """Train to the end and return the figures.

        Raises:
            RaydlError: a setting, the data or the model is wrong (before any actor starts),
                or the run could not go on.
            Exception: what the task's own code raised, with its own traceback.
        """
        method = resolve(self.config, self.rule)
        self.config = config = filled_in(self.config, method)
        dataset = self._load_data()
        shape = DataShape(dataset.train.image_shape, dataset.train.num_classes)
        _check_batch_size(config, dataset)
        flat = self._try_model(dataset, shape, method)
        faults = _read_faults(config)
        folder = RunFolder(config)
        with folder.held(resume=config.run.resume):
            start = _Start.open(folder, config, flat, num_samples=dataset.train.num_samples)
            job = Job(config, method, self.task, shape, faults)
            view = RunView(
                config, start.snapshot, seconds_before=start.seconds,
                center_accuracy=start.before.center_accuracy,
            )  # fmt: skip
            with open_desk(start.folder.storage, view) as desk:
                crew = _make_crew(job, dataset)
                try:
                    return self._run(crew, job, flat, start, desk, view, Examples(dataset.test))
                finally:
                    crew.close()

    def _load_data(self) -> Dataset:
        if isinstance(self.data, Dataset):
            return self.data
        return load(self.data, seed=self.config.training.seed)

    def _try_model(self, dataset: Dataset, shape: DataShape, method: Method) -> FlatModel:
        """Build the initial model and try one batch, before any process starts."""
        torch.manual_seed(self.config.training.seed)
        model = self.task.build_model(shape)
        flat = FlatModel(model, name=self.task.name)
        _check_dtype(self.config, method, self.task.name, flat)
        weights, buffers = flat.weights.clone(), flat.buffers.clone()
        batches = Batches(dataset.train, Normalizer.of(dataset.train))
        batch = batches.batch(np.arange(min(2, dataset.train.num_samples)))
        try:
            with torch.no_grad():
                if isinstance(self.task, ChecksOutput):
                    with torch.random.fork_rng(devices=()):  # dropout draws from it
                        self.task.check_output(model, batch[0], shape)
                loss = self.task.loss(model, batch)
        except (RuntimeError, IndexError) as error:
            size = "x".join(map(str, shape.image_shape))
            problem = f"does not take {size} pictures of {shape.num_classes} classes: {error}"
            raise ShapeError(self.task.name, problem) from error
        if loss.shape != ():
            raise ShapeError(
                self.task.name, f"the loss must be one number, it has shape {list(loss.shape)}"
            )
        flat.weights.copy_(weights)
        flat.buffers.copy_(buffers)
        return flat

    def _run(
        self,
        crew: Crew,
        job: Job,
        flat: FlatModel,
        start: _Start,
        desk: RunDesk,
        view: RunView,
        examples: Examples,
    ) -> Result:
        config, folder, snapshot = self.config, start.folder, start.snapshot
        purge_after = snapshot.num_samples if config.run.resume else None
        log = EventLog(make_progress(config.run.progress))
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
            flat=flat,
            examples=examples,
            after_checkpoint=folder.publish_events,
        )
        view.follow_recorder(recorder, log)
        try:
            folder.write_config(config)
            recorder.describe(config_as_markdown(to_dict(config)))
            for sentence in start.sentences:
                recorder.event(sentence)
            crew.open(snapshot)
            controller = kind_for(is_sync=job.method.is_sync)(
                crew,
                config,
                job.method,
                recorder,
                first_round=snapshot.round,
                first_generation=snapshot.generation,
                own_states=start.own_states,
                faults=job.faults,
            )
            recorder.follow(controller)
            run_to_end(controller, recorder, desk, view, config=config)
        finally:
            recorder.close()
        return _finish(controller, recorder, start)


def _method_config(method: MethodConfig | Rule | str) -> MethodConfig:
    if isinstance(method, MethodConfig):
        return method
    if isinstance(method, str):
        return MethodConfig(name=method)
    return MethodConfig(name=f"{type(method).__module__}:{type(method).__qualname__}")


def _check_dtype(config: TrainConfig, method: Method, name: str, flat: FlatModel) -> None:
    dtype = flat.weights.dtype
    if dtype not in (torch.float32, torch.float64):
        raise ShapeError(name, f"must have float32 or float64 parameters, they are {dtype}")
    is_plain = method.is_sync and config.exchange.compression == "none"
    if dtype is torch.float64 and not is_plain:
        raise ShapeError(
            name,
            f"must have float32 parameters for method {config.method.name} with compression "
            f"{config.exchange.compression}, they are {dtype}",
        )


def _read_faults(config: TrainConfig) -> FaultPlan:
    if config.run.fault_plan is None:
        return FaultPlan()
    plan = FaultPlan.read(config.run.fault_plan)
    plan.check(max_workers=config.scaling.max_workers, num_shards=config.exchange.center_shards)
    return plan


def _check_batch_size(config: TrainConfig, dataset: Dataset) -> None:
    batch_size, num_samples = config.training.batch_size, dataset.train.num_samples
    if batch_size > num_samples:
        raise ConfigError(
            "training.batch_size", f"must be at most the {num_samples} samples, got {batch_size}"
        )


@dataclass(frozen=True)
class _Start:
    """Where a run begins, or goes on."""

    folder: RunFolder
    store: CheckpointStore
    snapshot: Snapshot
    own_states: dict[str, Any]
    seconds: float
    sentences: list[str]
    before: Totals = field(default_factory=Totals)
    """What earlier starts came to."""

    @classmethod
    def open(
        cls, folder: RunFolder, config: TrainConfig, flat: FlatModel, *, num_samples: int
    ) -> _Start:
        """Return the start that the run's folder holds, or a new one."""
        store = CheckpointStore(folder.storage, keep=config.checkpoint.keep)
        if not config.run.resume:
            folder.open_new()
            return cls(folder, store, first_snapshot(flat, num_samples), {}, 0.0, [])
        folder.open_again(config)
        if not store.names() and not folder.storage.exists("result.json"):
            sentences = [f"no checkpoint yet: the run begins anew in {folder.root}"]
            return cls(folder, store, first_snapshot(flat, num_samples), {}, 0.0, sentences)
        checkpoint, sentences = store.read()
        snapshot = snapshot_of(checkpoint, flat)
        if snapshot.ledger["num_samples"] != num_samples:
            raise ConfigError(
                "data",
                f"has {num_samples} training samples, the run began with "
                f"{snapshot.ledger['num_samples']}",
            )
        if _is_complete(config, snapshot):
            raise ConfigError(
                "run.resume",
                f"the run is complete at epoch {snapshot.epoch}, step {snapshot.local_step}; "
                f"raise training.epochs (or steps, samples, seconds) to train on",
            )
        sentences.append(f"resuming from round {snapshot.round} in {folder.root}")
        before = Totals.of(checkpoint, folder.storage)
        seconds, states = checkpoint.seconds, checkpoint.workers
        return cls(folder, store, snapshot, states, seconds, sentences, before)


def _is_complete(config: TrainConfig, snapshot: Snapshot) -> bool:
    extent = Extent.of(config.training, epoch_samples=snapshot.ledger["num_samples"])
    return extent.is_reached(
        num_samples=snapshot.num_samples, num_steps=snapshot.local_step, seconds=snapshot.seconds
    )


def _make_crew(job: Job, dataset: Dataset) -> Crew:
    scaling = job.config.scaling
    if scaling.max_workers == 0:
        return LocalCrew(job, dataset)
    ray_session.prepare()
    from raydl.on_ray.cluster import check_room  # imports Ray, as the next does
    from raydl.on_ray.crew import RayCrew

    is_ours = ray_session.connect()
    if is_ours:
        check_room(scaling)
    return RayCrew(job, dataset)


def _finish(controller: Controller, recorder: RunRecorder, start: _Start) -> Result:
    assert controller.state is State.DONE
    folder, store = start.folder, start.store
    is_stopped = controller.outcome is Outcome.STOPPED
    metrics = {
        **recorder.figures(),
        "stopped_by": controller.stop_reason if is_stopped else "",
    }
    names = store.names()
    if names and not is_stopped:
        center, _ = store.read_center()
        folder.storage.write_bytes("center.safetensors", save_tensors(center))
    folder.write_result(metrics)
    newest = below(folder.root, f"checkpoints/{names[-1]}") if names else ""
    return Result(metrics, folder.root, newest, metrics["stopped_by"])


def score_run(path: str, *, data: str | None = None) -> dict[str, float]:
    """Return the metrics of a run's newest center on its test set.

    Args:
        path: the run's folder, a path or URI.
        data: another source than the run's own.

    Raises:
        CheckpointError: no checkpoint is there.
        DataError: no run is there, or the data can not be read or are of another kind.
    """
    folder = open_run(path)
    config = folder.read_config()
    center, _ = CheckpointStore(folder.storage).read_center()
    dataset = load(data or config.data, seed=config.training.seed)
    task = Classification(config.model)
    torch.set_num_threads(1)
    model = task.build_model(DataShape(dataset.train.image_shape, dataset.train.num_classes))
    try:
        model.load_state_dict(center)
    except RuntimeError as error:
        raise DataError(dataset.source, f"does not fit the run's model: {error}") from error
    test = Batches(dataset.test, Normalizer.of(dataset.train))
    return evaluate(
        task,
        model,
        lambda first, last: test.batch(np.arange(first, last)),
        num_samples=test.num_samples,
        batch_size=config.evaluation.batch_size,
    )
