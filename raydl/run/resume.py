"""The start of a run: from the beginning, or from a checkpoint in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from raydl.checkpoint.best import BestCenter
from raydl.checkpoint.store import Checkpoint, CheckpointStore
from raydl.checkpoint.totals import Totals
from raydl.checkpoint.writer import snapshot_of
from raydl.config import TrainConfig
from raydl.core.callbacks import callbacks_of
from raydl.core.center import Snapshot, extended_state, first_snapshot
from raydl.core.flat import FlatModel
from raydl.core.method import Method
from raydl.core.optimizers import make_optimizer
from raydl.core.saved_state import reported_as_damage
from raydl.core.stop_condition import StopCondition
from raydl.data.ledger import check_state
from raydl.data.order import Order
from raydl.data.schema import Schema, compare, from_json
from raydl.data.sources import open_source
from raydl.errors import CheckpointError, ConfigError, DataError, UnknownNameError, reading_error
from raydl.run.folder import RunFolder
from raydl.storage import below, in_words


@dataclass(frozen=True)
class Start:
    """State from which a run begins or resumes."""

    folder: RunFolder
    store: CheckpointStore
    best: BestCenter
    snapshot: Snapshot
    flat: FlatModel
    """The run's first model, with all parameters that are trained from now on."""
    own_states: dict[str, Any]
    """The state of each worker, by id."""
    seconds: float
    """Training time of earlier starts, in seconds."""
    sentences: list[str]
    """Messages for the log."""
    before: Totals = field(default_factory=Totals)
    """Totals of earlier starts."""
    is_trained: bool = False
    """Whether the training is complete, but some of the last files are missing."""
    ended: tuple[str, str] = ("", "")
    """The callback that ended the run early, and its reason."""
    result: dict[str, Any] = field(default_factory=dict)
    """The figures of a trained run, if they were written."""

    @classmethod
    def from_folder(
        cls,
        folder: RunFolder,
        config: TrainConfig,
        flat: FlatModel,
        *,
        order: Order,
        schema: Schema | None = None,
        method: Method | None = None,
        unfrozen: Sequence[str] = (),
    ) -> Start:
        """Return the start from the newest checkpoint in the run's folder, or a new one.

        Args:
            folder: the run's folder, which is held.
            config: the settings.
            flat: the run's first model; it receives the non-trainable state of the checkpoint.
            order: the order of the training samples.
            schema: what a sample holds; None: it is not known.
            method: the run's method, if its center may have an optimizer.
            unfrozen: parameters that the models have unfrozen since, to be trained from now on.

        Raises:
            ConfigError: the run is complete, or began with other samples or another order.
            CheckpointError: no checkpoint can be read, or some have no manifest.
            ShapeError: the checkpoint is of another model.
        """
        try:
            return cls._from_folder(folder, config, flat, order, schema or {}, method, unfrozen)
        except OSError as error:
            raise reading_error(
                below(folder.root, "checkpoints"), f"cannot be read: {in_words(error)}", error
            ) from error

    @classmethod
    def _from_folder(
        cls,
        folder: RunFolder,
        config: TrainConfig,
        flat: FlatModel,
        order: Order,
        schema: Schema,
        method: Method | None,
        unfrozen: Sequence[str],
    ) -> Start:
        num_samples = order.num_samples
        epoch = folder.epoch.number
        store = CheckpointStore(
            folder.storage, keep=config.checkpoint.num_to_keep, driver_epoch=epoch
        )
        best = BestCenter(folder.storage, flat, driver_epoch=epoch, evaluation=config.evaluation)
        if not config.run.resume:
            return cls(folder, store, best, first_snapshot(flat, num_samples), flat, {}, 0.0, [])
        folder.load_earlier(config)
        warnings = _refuse_other_data(schema_of_run(folder), schema)
        warnings += best.load_earlier() if config.checkpoint.keep_best else []
        if not store.names() and not folder.storage.exists("result.json"):
            _refuse_without_manifest(folder, store)
            sentences = [*warnings, f"no checkpoint yet: the run starts again in {folder.root}"]
            first = first_snapshot(flat, num_samples)
            return cls(folder, store, best, first, flat, {}, 0.0, sentences)
        checkpoint, damage = store.read()
        names = [*checkpoint.state.get("unfrozen", ())]  # absent in earlier versions
        new = [name for name in unfrozen if name not in names]
        with reported_as_damage(below(folder.root, "checkpoints")):
            best.flat = flat = flat.with_unfrozen([*names, *new])
            snapshot = _extended(snapshot_of(checkpoint, flat), checkpoint, flat, method)
            check_state(snapshot.ledger)
            flat.load_non_trainable(checkpoint.center, checkpoint.state.get("untrained", {}))
            before = Totals.of(checkpoint, folder.storage)
        _refuse_other_number(config, snapshot.ledger["num_samples"], order.num_samples)
        _refuse_other_order(order, checkpoint.state.get("order"))
        result = _result_at(folder, snapshot)
        ended_by, why = result.get("ended_by"), result.get("ended_because")
        ended = (ended_by, why) if ended_by else tuple(checkpoint.state.get("ended", ("", "")))
        is_trained = _is_complete(config, snapshot, ended_by=ended[0])
        if is_trained and result and store.has_trained(snapshot.progress.round):
            _refuse_complete(snapshot, *ended)
        own_states = store.take_over(checkpoint)
        sentence = (
            f"the run in {folder.root} has finished training; its missing files are written"
            if is_trained
            else f"resuming from round {snapshot.progress.round} in {folder.root}"
        )
        return cls(
            folder,
            store,
            best,
            snapshot,
            flat,
            own_states,
            checkpoint.seconds,
            [*damage, *warnings, sentence],
            before,
            is_trained,
            ended,
            result,
        )


def _extended(
    snapshot: Snapshot, checkpoint: Checkpoint, flat: FlatModel, method: Method | None
) -> Snapshot:
    """Return a snapshot whose optimizer at the center has all elements that are trained now."""
    num_elements = checkpoint.state.get("num_parameters", flat.num_parameters)
    flat.first_parameters(num_elements)  # raises an error if it is of another model
    if not snapshot.optimizer or num_elements == flat.num_parameters or method is None:
        return snapshot
    make = None
    if not method.rule.takes_steps:
        make = make_optimizer(method.inner, method.own_optimizer, flat)
    state = extended_state(snapshot.optimizer, flat.weights, num_elements, make)
    return replace(snapshot, optimizer=state)


def _refuse_without_manifest(folder: RunFolder, store: CheckpointStore) -> None:
    """Raise a CheckpointError if there are checkpoints that cannot be read.

    A run that started again in this folder would delete them.
    """
    names = store.without_manifest()
    if names:
        raise CheckpointError(
            below(folder.root, "checkpoints"),
            f"holds {', '.join(names)} without manifest.json, so none of them can be read; restore "
            f"the manifests, or start again in another folder",
        )


def _refuse_other_number(config: TrainConfig, before: int, now: int) -> None:
    """Raise a ConfigError if the run began with another number of training samples."""
    if before == now:
        return
    reason = "in a folder of Parquet, files called test or validation are no training set any more"
    if num_tif := _num_tif(config):
        reason = (
            f"{num_tif:,} images end in .tif or .tiff, which earlier versions did not read: move "
            f"them out of the folder to go on, or start a new run"
        )
    raise ConfigError(
        "data", f"has {now} training samples, but the run began with {before}; {reason}"
    )


def _num_tif(config: TrainConfig) -> int:
    """Return how many images of the data's training folder end in .tif or .tiff."""
    try:
        found = open_source(config.data, input=config.input)
    except (DataError, UnknownNameError):  # the data are no path, but objects in Python
        return 0
    pieces = found.pieces["train"] if found.kind == "folders" else ()
    names = (piece.where(row).lower() for piece in pieces for row in range(piece.num_rows))
    return sum(name.endswith((".tif", ".tiff")) for name in names)


def _refuse_other_order(order: Order, name_before: str | None) -> None:
    """Raise a ConfigError if positions in the run's ledger now refer to other samples.

    Args:
        order: the present order.
        name_before: name of the order with which it began; None in files of earlier versions.
    """
    if name_before and name_before != order.name:
        raise ConfigError(
            "input",
            f"orders the samples differently ({order.name}) than at the start of the run "
            f"({name_before}), so some would be trained on twice; keep the settings of input, "
            f"and row groups or blocks, to resume",
        )


def schema_of_run(folder: RunFolder) -> Schema | None:
    """Return what a sample of a run's data holds; empty: not known; None: an earlier version's run.

    Raises:
        DataError: there is no run, or its settings cannot be read.
    """
    values = folder.schema()
    try:
        return None if values is None else from_json(values)
    except ValueError as error:
        raise DataError(folder.root, f"its config.json is damaged: {error}") from error


def _refuse_other_data(before: Schema | None, now: Schema) -> list[str]:
    """Raise a ConfigError if a sample is not what it was; return sentences for the log.

    Args:
        before: what a sample held at the start of the run; None in files of earlier versions.
        now: what it holds; empty: not known.
    """
    if before is None:
        sentence = "an earlier version began the run and did not note what its data hold"
        return [f"{sentence}: names of classes and types are not compared"] if now else []
    differences = [*compare(before, now), *compare(now, before)] if before and now else []
    if differences:
        raise ConfigError(
            "data",
            f"is not what the run began with: {differences[0].problem}",
        )
    return []


def _is_complete(config: TrainConfig, snapshot: Snapshot, *, ended_by: str) -> bool:
    """Whether the training is complete according to these settings."""
    stop_condition = StopCondition.of(config.training, epoch_samples=snapshot.ledger["num_samples"])
    is_reached = stop_condition.is_reached(
        num_samples=snapshot.progress.num_samples,
        num_steps=snapshot.progress.local_step,
        seconds=snapshot.progress.seconds,
        num_bytes=snapshot.progress.num_bytes,
    )
    return is_reached or ended_by in [callback.name for callback in callbacks_of(config)]


def _refuse_complete(snapshot: Snapshot, ended_by: str, ended_because: str) -> NoReturn:
    at = snapshot.progress
    raise ConfigError(
        "run.resume",
        f"the run is complete: {ended_because}; change {ended_by.partition(' ')[0]} to train on"
        if ended_by
        else f"the run is complete at epoch {at.epoch:g}, step {at.local_step}; "
        f"raise training.epochs (or steps, samples, seconds, bytes) to train on",
    )


def _result_at(folder: RunFolder, snapshot: Snapshot) -> dict[str, Any]:
    """Return the figures of a start that finished with this snapshot, or an empty dict."""
    result = folder.finished_result()
    return result if result.get("samples") == snapshot.progress.num_samples else {}
