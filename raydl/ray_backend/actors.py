"""The Ray actors: thin shells around plain objects."""

from __future__ import annotations

import raydl.core.torch_import  # noqa: F401  # isort: skip  (before torch)

import contextlib
import ctypes
import dataclasses
import gc
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from raydl.collective.ray_collective import CollectiveGroup, GroupAddress
from raydl.core.center import Snapshot, SnapshotCache, as_arrays, as_tensors
from raydl.core.job import Job
from raydl.core.membership import Membership
from raydl.core.reports import Outcome, WorkerReport
from raydl.core.saved_state import SavedPlace, SavedState, unpack
from raydl.core.scores import Evaluated
from raydl.core.tensor_files import TensorFile
from raydl.core.worker_group import Published, Refused, RunEnded
from raydl.data import Batches, Prepare, Samples
from raydl.data.ledger import Span
from raydl.elastic.center_endpoint import CenterEndpoint
from raydl.errors import ExchangeError, NonFiniteError, raise_if_of_machine
from raydl.faults import Announced, Fault, Held, Injector, Partition, ProcessInflicts, inflict_here
from raydl.parameter_server.protocol import HOME, CellAddress, Request, Response
from raydl.parameter_server.ray_transport import RayCenterClient
from raydl.parameter_server.server import CenterServer, OptimizerStates, make_shard
from raydl.parameter_server.shard import ShardState
from raydl.ray_backend.cluster import START_S, Place, node_here
from raydl.ray_backend.session import drain_node
from raydl.storage import Storage, Sum
from raydl.worker.evaluator import Evaluator
from raydl.worker.loop import LAST, Worker

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's ``mallopt``."""
_MIB = 1 << 20
_BACKGROUND_NICENESS = 15


def keep_freed_memory() -> None:
    """Keep the memory that a step frees in this process, for the next step.

    glibc returns free memory at the end of a heap to the system, and the heap of a thread once it
    is empty. Each step would then request the same pages again, and the system clears each of them.
    Without glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_MMAP_THRESHOLD, 32 * _MIB)  # the maximum
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 128 * _MIB)  # two heaps of a thread, so that none is returned


def give_way() -> None:
    """Lower the priority of this thread below that of other threads on the machine.

    Only Linux can do so for one thread of a process; elsewhere this does nothing.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            now = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, max(now, _BACKGROUND_NICENESS))


def freeze_objects() -> None:
    """Exclude all present objects from garbage collection: libraries, model, samples.

    They live as long as the process. A collection of them takes a tenth of a second, and the
    exchanges of a run cause one every few seconds.
    """
    gc.collect()
    gc.freeze()


_ANNOUNCE_S = 5.0
_A_BYTE = 1
"""A reservation of one byte: without any, Ray ignores the requested node or spreading."""


@ray.remote(num_cpus=0, memory=_A_BYTE, concurrency_groups={"rendezvous": 16})
class CenterActor(CenterEndpoint):
    """Holds the committed snapshots, and the keys by which each generation forms.

    In methods with messages it is also the home shard of the center. It then has a thread for each
    simultaneous caller.
    """

    def __init__(self) -> None:
        super().__init__()
        self._snapshots = SnapshotCache()
        self._others: list[ActorHandle] = []
        self._faults: list[tuple[int, str]] = []
        self._noted: dict[int, str] = {}
        """By planned fault, the worker that announced it first."""
        self._process = uuid.uuid4().hex

    def start_center(
        self,
        job: Job,
        snapshot: Snapshot,
        others: list[ActorHandle],
        optimizer: dict[str, Any] | None = None,
    ) -> Place:
        """Start the center from a snapshot, anew; return the node and the process id.

        Args:
            job: the job of the workers.
            snapshot: the snapshot to start from.
            others: the actors of the other shards.
            optimizer: the state of the previous center's optimizer, for a worker's snapshot, which
                has none; None: the snapshot has it.
        """
        torch.set_num_threads(1)
        snapshot = _with_optimizer(snapshot, optimizer)
        # Nothing of an earlier start stays: its later rounds would displace those of this one.
        self._snapshots = SnapshotCache()
        self._snapshots.put(snapshot)
        self._others = others
        self._center_server = (
            None if job.method.is_sync else CenterServer(job, snapshot, node=node_here())
        )
        # This may not be the requested node: Ray uses another one if that is unusable.
        return Place.here()

    # In its own threads; further waiters queue. In rounds all other calls share one thread, as does
    # ``set_key``, which they wait for.
    @ray.method(concurrency_group="rendezvous")
    def wait_for_keys(
        self, run_id: str, generation: int, keys: list[str], timeout_s: float
    ) -> dict[str, bytes] | None:
        """Return the keys of a generation, once some are present or the time is up."""
        return super().wait_for_keys(run_id, generation, keys, timeout_s)

    def begin(self, generation: int, round: int) -> Snapshot | None:
        """Begin a generation of a synchronous method; return its first snapshot, if it is here."""
        return self._snapshots.begin(generation, round)

    def put(self, snapshot: Snapshot) -> None:
        """Store a worker's snapshot, unless it is late."""
        self._snapshots.put(snapshot)

    def adopt(self, snapshot: Snapshot) -> None:
        """Store the copy that the next generation continues from."""
        self._snapshots.adopt(snapshot)

    def poll(self) -> Published:
        """Take the snapshots that are due; return the rounds held, and new records."""
        faults, self._faults = tuple(self._faults), []
        if self._center_server is None:
            return Published(
                self._snapshots.rounds(),
                faults=faults,
                num_changes=self._snapshots.num_changes(),
                process=self._process,
                generation=self._snapshots.generation,
                newest_generation=self._snapshots.newest().progress.generation,
                refused={"snapshots": self._snapshots.num_refused},
            )
        coordinator = self._center_server.coordinator
        for due in coordinator.pop_due():
            # Not ``put``: the center's own snapshot is never late, even if a worker joins.
            self._snapshots.adopt(self._center_server.snapshot(self._states_of_others, due))
        return Published(
            self._snapshots.rounds(),
            coordinator.pop_records(),
            faults,
            coordinator.is_complete(),
            sent_s=time.monotonic(),
            process=self._process,
            refused={"messages": self._center_server.num_refused},
        )

    def _states_of_others(self) -> list[ShardState]:
        states = [shard.state.remote() for shard in self._others]
        return list(ray.get(states, timeout=START_S))

    def optimizer_state(self) -> tuple[tuple[int, float], dict[str, Any]]:
        """Return ((completed exchanges, CPU seconds of the copy), state of the optimizer)."""
        began, version = time.thread_time(), self.center_server.coordinator.version
        others = ray.get([s.optimizer_states.remote() for s in self._others], timeout=START_S)
        state = self.center_server.optimizer_state(others)
        return (version, time.thread_time() - began), state

    def note_fault(self, number: int, worker_id: str) -> bool:
        """Record that a worker is about to inflict a fault on itself; return whether it may.

        A worker that takes over a lost worker's rank may find the same fault due before the driver
        has told it that the fault has fired. The same worker may announce a fault again: it may not
        have received the answer.
        """
        if number not in self._noted:
            self._faults.append((number, worker_id))
        return self._noted.setdefault(number, worker_id) == worker_id

    def inflict(self, fault: Fault) -> None:
        """Inflict a fault on this process."""
        inflict_here(fault)

    def get_to_write(self, round: int) -> Snapshot | None:
        """Return the snapshot of a round with its optimizer as arrays, for Ray's shared memory."""
        snapshot = self._snapshots.get(round)
        if snapshot is None:
            return None
        return dataclasses.replace(snapshot, optimizer=as_arrays(snapshot.optimizer))

    def newest(self) -> Snapshot:
        """Return the newest snapshot."""
        return self._snapshots.newest()

    # the home shard

    def form(self, membership: Membership) -> tuple[int, Snapshot]:
        """Begin a generation; return (its number, the snapshot that all members start from)."""
        formed = [shard.form.remote(membership) for shard in self._others]
        states = ray.get(formed, timeout=START_S)
        self.center_server.begin_generation(membership)
        return membership.generation, self.center_server.snapshot(lambda: states)

    def change(self, membership: Membership) -> tuple[int, Snapshot]:
        """Change the members while the others train on.

        Returns:
            (The generation, the snapshot that new members start from).
        """
        changed = [shard.change.remote(membership) for shard in self._others]
        states = ray.get(changed, timeout=START_S)
        return membership.generation, self.center_server.change(membership, states)

    def dismiss(self, worker_id: str) -> None:
        """Let one worker leave after its next exchange."""
        self.center_server.coordinator.dismiss(worker_id)

    def vote(self, generation: int, votes: dict[str, float]) -> None:
        """Cast votes."""
        self.center_server.coordinator.vote(generation, **votes)


def _with_optimizer(snapshot: Snapshot, optimizer: dict[str, Any] | None) -> Snapshot:
    state = snapshot.optimizer if optimizer is None else optimizer
    return dataclasses.replace(snapshot, optimizer=as_tensors(state))


@ray.remote(num_cpus=0, memory=_A_BYTE)
class ShardActor:
    """Holds one shard of the center, other than the home shard."""

    def __init__(
        self, job: Job, snapshot: Snapshot, index: int, optimizer: dict[str, Any] | None = None
    ) -> None:
        torch.set_num_threads(1)
        snapshot = _with_optimizer(snapshot, optimizer)
        self._index = index
        self._process = uuid.uuid4().hex
        self._shard = make_shard(job, snapshot, index, None, node=node_here())

    def form(self, membership: Membership) -> ShardState:
        """Begin a generation; return the state that all members start from."""
        self._shard.begin_generation(membership)
        return self._shard.state()

    def change(self, membership: Membership) -> ShardState:
        """Change the members; return the state that new members start from."""
        return self._shard.change(membership)

    def inflict(self, fault: Fault) -> None:
        """Inflict a fault on this process."""
        inflict_here(fault)

    def optimizer_states(self) -> OptimizerStates:
        """Return the states of the optimizers, by span."""
        return self._shard.optimizer_states()

    def ping(self) -> tuple[int, Place, Refused]:
        """Return (index of the shard, its place, the messages it has refused)."""
        refused = Refused(self._process, self._shard.num_refused)
        return self._index, Place.here(), refused

    def shared_cells(self, worker_id: str, node: str) -> dict[Span, CellAddress]:
        """Return the memory that a worker on a node may map."""
        return self._shard.shared_cells(worker_id, node)

    def exchange(self, request: Request) -> Response:
        """Apply a message, and answer it."""
        return self._shard.exchange(request)

    def applied(self, worker_id: str, generation: int) -> dict[Span, int]:
        """Return which messages of a worker this shard has applied, by span."""
        return self._shard.applied(worker_id, generation)

    def state(self) -> ShardState:
        """Return a copy of the state of this shard."""
        return self._shard.state()


@ray.remote(concurrency_groups={"loop": 1, "control": 1, "files": 1})
class WorkerActor:
    """Hosts one ``Worker``: one thread runs its loop, another answers calls.

    A third thread writes the states that the worker holds for checkpoints, and reads a state that
    was handed over, during the training.
    """

    @ray.method(concurrency_group="control")
    def ping(self) -> Place:
        """Answer that this process runs, and where."""
        return Place.here()

    def setup(
        self,
        job: Job,
        worker_id: str,
        train: Samples,
        prepare: Prepare,
        non_trainable: dict[str, np.ndarray],
        saved: SavedPlace | None = None,
        test: Samples | None = None,
    ) -> tuple[Place, bool]:
        """Build the worker; return its place, and whether it has read ``saved``.

        Not in ``__init__``, from which Ray would wrap an error.

        Args:
            job: the job of all workers.
            worker_id: its id.
            train: the training set.
            prepare: prepares samples for the model.
            non_trainable: the non-trainable state of the run's first model.
            saved: the file of its own state in a checkpoint; None: there is none, or the driver
                sends the state.
            test: the test set, if the workers score the center.
        """
        self._job, place = job, Place.here()
        self._partition = Partition()
        self._injector = Injector(
            job.faults.for_workers,
            ProcessInflicts(self._partition, lambda s: drain_node(place.node, deadline_s=s)),
            self._announce,
        )
        self._lock = threading.Lock()
        self._generation = self._abandoned_up_to = 0
        self._abandoned = threading.Event()
        self._num_written, self._may_write = 0, threading.Event()
        self._fed = bytearray()
        self._goes_on = False
        self._num_prepared = 0
        keep_freed_memory()
        torch.set_num_threads(job.config.scaling.num_threads)
        try:
            self._worker = Worker(
                job,
                worker_id,
                batches=Batches(train, prepare),
                publish=self._publish,
                before_step=self._injector.before_step if job.faults.faults else None,
                non_trainable=non_trainable,
                test=None if test is None else Batches(test, prepare),
            )
            if job.faults.faults:
                self._worker.replica.alter = self._injector.altered
            self._own_state = None if saved is None else _load_saved(saved)
        except Exception as error:
            raise_if_of_machine(worker_id, error)
            raise
        freeze_objects()
        return place, self._own_state is not None

    def _publish(self, snapshot: Snapshot) -> None:
        self._partition.hold()
        self._shards[HOME].put.remote(snapshot)

    def _announce(self, fault: Fault) -> Announced:
        """Announce a fault to the center before it fires."""
        self._partition.hold()
        noted = self._shards[HOME].note_fault.remote(fault.number, self._worker.worker_id)
        try:
            is_first = ray.get(noted, timeout=_ANNOUNCE_S)
        except RayActorError:  # the center was lost
            return Announced.LOST
        except RayError:  # the center may have received it
            return Announced.FIRST
        return Announced.FIRST if is_first else Announced.AGAIN

    @ray.method(concurrency_group="loop")
    def run(
        self,
        membership: Membership,
        address: GroupAddress,
        snapshot: Snapshot,
        shards: list[ActorHandle],
        fired: tuple[int, ...],
        *,
        goes_on: bool,
    ) -> RunEnded:
        """Train in one generation until this worker leaves it; return how and where it ended.

        Args:
            membership: the members of the generation.
            address: address of their group.
            snapshot: the snapshot that they start from.
            shards: the shards of the center, the home shard first.
            fired: numbers of the planned faults that have fired.
            goes_on: whether this worker starts from the state that it has: its own from a
                checkpoint, or a leaver's replica.
        """
        # In a generation that did not form it has not been used: the next one starts from it, too.
        self._goes_on = self._goes_on or goes_on
        if not self._goes_on:
            self._own_state = None  # it arrived too late
        with self._partition.both_ways():
            # OpenMP counts threads per calling thread.
            torch.set_num_threads(self._job.config.scaling.num_threads)
            self._shards = shards
            self._injector.skip(fired)
            generation = membership.generation
            with self._lock:
                self._generation, self._abandoned = generation, threading.Event()
                if generation <= self._abandoned_up_to:  # ``abandon`` was called before
                    self._abandoned.set()
            try:
                outcome = self._train(membership, address, snapshot)
            except (ExchangeError, NonFiniteError) as error:
                return self._ended(Outcome.BROKEN, generation, error)
            except Exception as error:
                raise_if_of_machine(self._worker.worker_id, error)
                raise
            return self._ended(outcome, generation)

    def _ended(self, outcome: Outcome, generation: int, error: Exception | None = None) -> RunEnded:
        worker = self._worker
        round, num_changes = worker.copy_age
        return RunEnded(
            worker.worker_id,
            outcome,
            round,
            generation,
            problem=str(error) if error else "",
            num_changes=num_changes,
            copy_generation=worker.copy_generation,
            ledger_round=worker.ledger_round,
            error=error if isinstance(error, NonFiniteError) else None,
            has_bad_copy=worker.has_bad_copy,
            score=worker.last_score,
        )

    @ray.method(concurrency_group="control")
    def raised(self, generation: int) -> RunEnded:
        """Return the end of a loop that raised an error: that of a failed exchange."""
        return self._ended(Outcome.BROKEN, generation)

    def _train(self, membership: Membership, address: GroupAddress, snapshot: Snapshot) -> Outcome:
        transports: list[Any] = []
        try:
            transports.append(self._make_transport(membership, address))
            partners = self._make_partners(membership, address)
            transports += [partners] if partners else []
            group, partners = self._gated(transports[0]), self._gated(partners)
            self._worker.join(membership, group, snapshot, self._own_state, partners)
            self._own_state = None  # it may be as large as the replica
            self._prepare_copy()
            outcome = self._worker.run_round()
            self._prepare_copy()
            while outcome is Outcome.GO_ON:
                outcome = self._worker.run_round()
            return outcome
        finally:
            # At once: the exchange of the peers fails when a member closes its connections.
            self._partition.hold()
            for transport in transports:
                transport.close()

    def _prepare_copy(self) -> None:
        """Allocate memory for the first checkpoint, in a thread.

        Once before the first round, and once after it: an optimizer has no state before a step.
        """
        checkpoint = self._job.config.checkpoint
        if self._num_prepared > 1 or not (checkpoint.every_s or checkpoint.every_epochs):
            return
        self._num_prepared += 1
        # At full priority: on a busy machine it would otherwise end too late.
        prepare = self._worker.prepare_copy()
        threading.Thread(target=prepare, name="copy-of-state", daemon=True).start()

    def _gated(self, transport: Any) -> Any:
        """Return the transport; with planned faults, one whose messages a partition delays."""
        has_faults = self._job.faults.faults and transport is not None
        return Held(transport, self._partition.hold) if has_faults else transport

    @ray.method(concurrency_group="control")
    def abandon(self, generation: int) -> None:
        """Leave a generation at once, even during an exchange; it may not have begun yet."""
        with self._partition.both_ways(), self._lock:
            self._abandoned_up_to = max(self._abandoned_up_to, generation)
            if self._generation <= generation:
                self._abandoned.set()

    def _make_transport(
        self, membership: Membership, address: GroupAddress
    ) -> CollectiveGroup | RayCenterClient:
        if not self._job.method.is_sync:
            return RayCenterClient(
                self._shards, timeout_s=address.timeout_s, abandoned=self._abandoned
            )
        rank = membership.worker_ids.index(self._worker.worker_id)
        algorithm = self._job.config.exchange.allreduce
        return CollectiveGroup(
            address,
            membership.worker_ids,
            rank,
            center=self._shards[HOME],
            algorithm=algorithm,
            abandoned=self._abandoned,
        )

    def _make_partners(
        self, membership: Membership, address: GroupAddress
    ) -> CollectiveGroup | None:
        size, worker_id = self._job.config.method.group_size, self._worker.worker_id
        if size == 1:
            return None
        number, workers = membership.partners_of(worker_id, size)
        place = dataclasses.replace(address, run_id=f"{address.run_id}-partners{number}")
        rank = workers.index(worker_id)
        return CollectiveGroup(
            place, workers, rank, center=self._shards[HOME], abandoned=self._abandoned
        )

    @ray.method(concurrency_group="control")
    def report(self) -> WorkerReport:
        """Return the news since the last report."""
        with self._partition.both_ways():
            return self._worker.report()

    @ray.method(concurrency_group="control")
    def center(self) -> Snapshot:
        """Return this worker's copy of the center."""
        with self._partition.both_ways():
            return self._worker.center()

    @ray.method(concurrency_group="control")
    def vote(self, generation: int, votes: dict[str, float]) -> None:
        """Cast votes."""
        with self._partition.both_ways():
            self._worker.vote(generation, **votes)

    # its state, to a file and from one

    @ray.method(concurrency_group="control")
    def hold_last(self) -> int:
        """Hold the state of this worker, which has left for good; return its size in bytes."""
        with self._partition.both_ways():
            self._worker.hold_last()
            return self._worker.held(LAST).num_bytes

    @ray.method(concurrency_group="files")
    def load_state(self, saved: SavedPlace | None) -> bool:
        """Read the replica that a leaver has handed in; return whether this process can read it."""
        with self._partition.both_ways():
            self._own_state = None if saved is None else _load_saved(saved)
            return self._own_state is not None

    @ray.method(concurrency_group="control")
    def hold_kept(self, round: int) -> int:
        """Hold the state kept at a round, to be written; return its size in bytes."""
        self._worker.hold_kept(round)
        return self._worker.held(round).num_bytes

    @ray.method(concurrency_group="control")
    def release(self, round: int) -> None:
        """Release the held state of a round."""
        self._worker.release(round)

    @ray.method(concurrency_group="files")
    def write_held(self, round: int, address: str, name: str, token: str) -> Sum | None:
        """Write the held state of a round; return None if this process does not see the storage.

        Args:
            round: a round that is held.
            address: address of the run's folder, which may be unknown in this process.
            name: name of the file.
            token: a file that exists if this process sees the same folder.

        Raises:
            OSError: if the write failed, or the checkpoint was given up.
        """
        give_way()  # the training has priority
        with self._partition.both_ways():
            held = self._worker.held(round)
            self._num_written, self._may_write = 0, threading.Event()
            self._may_write.set()
            try:
                here = Storage(address)
                is_seen = here.exists(token)
            except Exception:  # without credentials, packages or a network: the driver has them
                return None
            return here.write_pieces(name, self._counted(held), in_place=True) if is_seen else None

    def _counted(self, held: TensorFile) -> Iterator[memoryview]:
        for piece in held.pieces():
            if not self._may_write.is_set():
                raise OSError("the checkpoint was given up")
            yield piece
            self._num_written += len(piece)

    @ray.method(concurrency_group="control")
    def stop_writing(self) -> None:
        """Stop the write under way."""
        self._may_write.clear()

    @ray.method(concurrency_group="control")
    def num_written(self) -> int:
        """Return the bytes written by the write under way."""
        return self._num_written

    @ray.method(concurrency_group="control")
    def num_held(self, round: int) -> int:
        """Return the size of the held state of a round, in bytes."""
        return self._worker.held(round).num_bytes

    @ray.method(concurrency_group="control")
    def read_held(self, round: int, start: int, num_bytes: int) -> np.ndarray:
        """Return a part of the held state of a round: uint8, [num_bytes] or fewer at the end."""
        return np.frombuffer(self._worker.held(round).read(start, num_bytes), np.uint8)

    @ray.method(concurrency_group="control")
    def feed_state(self, start: int, piece: np.ndarray, written: Sum) -> None:
        """Receive the piece of this worker's state from ``start`` on; unpack it with the last one.

        An earlier state may have arrived in part.
        """
        del self._fed[start:]
        self._fed += piece.tobytes()
        if len(self._fed) >= written.num_bytes:
            data, self._fed = self._fed, bytearray()
            self._own_state = unpack(data) if Sum.of([data]) == written else None

    @ray.method(concurrency_group="control")
    def has_own_state(self) -> bool:
        """Return whether this worker has a state to start from."""
        return self._own_state is not None


def _load_saved(saved: SavedPlace) -> dict[str, Any] | None:
    """Return a worker's state from its file, or None if this process cannot read it."""
    try:
        address, name, written = saved
        return SavedState(Storage(address), name, written).load()
    except Exception:  # as in ``write_held``, or the storage is a disk of another machine
        return None


@ray.remote(num_cpus=0, memory=_A_BYTE, concurrency_groups={"control": 1})
class EvaluatorActor:
    """Scores snapshots of the center while the workers train."""

    def __init__(
        self, job: Job, test: Samples, prepare: Prepare, non_trainable: dict[str, np.ndarray]
    ) -> None:
        keep_freed_memory()
        self._evaluator: Evaluator | None = None
        # Not built here: Ray would wrap an error of the user's code.
        self._arguments = job, Batches(test, prepare), non_trainable

    def evaluate(self, snapshot: Snapshot) -> Evaluated:
        """Return the metrics of a snapshot."""
        torch.set_num_threads(1)  # in this thread
        try:
            self._evaluator = self._evaluator or Evaluator(*self._arguments)
            return self._evaluator.evaluate(snapshot)
        except Exception as error:
            raise_if_of_machine("evaluator", error)
            raise

    @ray.method(concurrency_group="control")
    def num_scored(self) -> int:
        """Return how many samples the evaluation under way has scored."""
        return self._evaluator.num_scored if self._evaluator else 0
