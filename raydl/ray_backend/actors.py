"""The Ray actors: thin shells around plain objects."""

from __future__ import annotations

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
from raydl.core.center import Snapshot, SnapshotShelf, as_arrays, as_tensors
from raydl.core.job import Job
from raydl.core.membership import Membership
from raydl.core.reports import Outcome, WorkerReport
from raydl.core.saved_state import SavedPlace, SavedState, unpack
from raydl.core.tensor_files import TensorFile
from raydl.core.worker_group import Evaluated, Published, Refused, RunEnded
from raydl.data import Batches, Prepare, Samples
from raydl.data.ledger import Span
from raydl.elastic.center_endpoint import CenterEndpoint
from raydl.elastic.failures import raise_if_of_machine
from raydl.errors import ExchangeError, NonFiniteError
from raydl.faults import Fault, Held, Injector, Partition, ProcessInflicts, inflict_here
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
_GIVES_WAY = 15
"""The niceness of a thread that can wait."""


def keep_freed_memory() -> None:
    """Let memory that a step frees stay with this process, for the next step.

    glibc gives what lies free at the end of a heap back to the system, and the heap of a thread
    as soon as it is empty; each step then takes the same pages anew, of which the system clears
    every one. Without glibc nothing is done.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_MMAP_THRESHOLD, 32 * _MIB)  # the most there is
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 128 * _MIB)  # two heaps of a thread: none is given back


def give_way() -> None:
    """Let this thread compute only when others of the machine have nothing to do.

    Where the system can not do that for one thread of a process, nothing is done.
    """
    if sys.platform == "linux":  # elsewhere it would be the whole process
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            now = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, max(now, _GIVES_WAY))


def freeze_objects() -> None:
    """Let the garbage collector pass over what there is now: libraries, model, samples.

    They live as long as the process. To look through them all takes a tenth of a second each time,
    and the exchanges of a run give occasion for it every few seconds.
    """
    gc.collect()
    gc.freeze()


_ANNOUNCE_S = 5.0
_A_BYTE = 1
"""Ray puts an actor that reserves nothing on any node, whatever node or spreading was asked for."""


@ray.remote(num_cpus=0, memory=_A_BYTE, concurrency_groups={"rendezvous": 16})
class CenterActor(CenterEndpoint):
    """Holds the committed snapshots, and the keys by which each generation meets.

    For methods that exchange by messages it is the home shard of the center, too: it then
    runs in as many threads as may call at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shelf = SnapshotShelf()
        self._others: list[ActorHandle] = []
        self._faults: list[tuple[int, str]] = []
        self._process = uuid.uuid4().hex

    def start_center(
        self,
        job: Job,
        snapshot: Snapshot,
        others: list[ActorHandle],
        optimizer: dict[str, Any] | None = None,
    ) -> Place:
        """Take in a snapshot; return the node and the process id.

        Args:
            job: what the workers do.
            snapshot: what the run starts from.
            others: the actors of the other shards.
            optimizer: what the optimizer of the center before remembered, for a snapshot of a
                worker's, which has no such thing.
        """
        torch.set_num_threads(1)
        snapshot = _with_optimizer(snapshot, optimizer)
        self._shelf.put(snapshot)
        self._others = others
        if not job.method.is_sync:
            self._center_server = CenterServer(job, snapshot, node=node_here())
        # Not always the node that was asked for: of one that it can not use Ray makes another.
        return node_here(), os.getpid()

    # In threads of its own: in rounds all other calls share one, ``set_key`` too, which writes what
    # these wait for. More waiters than threads wait for their turn.
    @ray.method(concurrency_group="rendezvous")
    def wait_for_keys(
        self, run_id: str, generation: int, keys: list[str], timeout_s: float
    ) -> dict[str, bytes] | None:
        """Return the keys of a generation, once it has some of them or the time is up."""
        return super().wait_for_keys(run_id, generation, keys, timeout_s)

    def begin(self, generation: int, round: int) -> Snapshot | None:
        """Begin a generation of a synchronous method; return the snapshot that it starts from."""
        return self._shelf.begin(generation, round)

    def put(self, snapshot: Snapshot) -> None:
        """Take in a worker's snapshot, unless it comes too late."""
        self._shelf.put(snapshot)

    def adopt(self, snapshot: Snapshot) -> None:
        """Take in the copy that all go on from."""
        self._shelf.adopt(snapshot)

    def poll(self) -> Published:
        """Make the snapshots that are wanted; return the rounds held, and new records."""
        faults, self._faults = tuple(self._faults), []
        if self._center_server is None:
            return Published(
                self._shelf.rounds(),
                faults=faults,
                num_changes=self._shelf.num_changes(),
                process=self._process,
                generation=self._shelf.generation,
                newest_generation=self._shelf.newest().progress.generation,
                refused={"snapshots": self._shelf.num_refused},
            )
        coordinator = self._center_server.coordinator
        for due in coordinator.pop_due():
            # No put: the center's own snapshot is never late, whoever joins while it is made.
            self._shelf.adopt(self._center_server.snapshot(self._states_of_others, due))
        return Published(
            self._shelf.rounds(),
            coordinator.pop_records(),
            faults,
            coordinator.is_complete(),
            told_s=time.monotonic(),
            process=self._process,
            refused={"messages": self._center_server.num_refused},
        )

    def _states_of_others(self) -> list[ShardState]:
        states: list[ShardState] = ray.get(
            [shard.state.remote() for shard in self._others], timeout=START_S
        )
        return states

    def optimizer_state(self) -> tuple[tuple[int, float], dict[str, Any]]:
        """Return ((exchanges settled, CPU seconds of the copy), what the optimizer remembers)."""
        began, version = time.thread_time(), self.center_server.coordinator.version
        others = ray.get([s.optimizer_states.remote() for s in self._others], timeout=START_S)
        state = self.center_server.optimizer_state(others)
        return (version, time.thread_time() - began), state

    def note_fault(self, number: int, worker_id: str) -> None:
        """Note that a worker is about to inflict a fault on itself."""
        self._faults.append((number, worker_id))

    def inflict(self, fault: Fault) -> None:
        """Inflict a fault on this process."""
        inflict_here(fault)

    def get(self, round: int) -> Snapshot | None:
        """Return the snapshot of a round."""
        return self._shelf.get(round)

    def get_to_write(self, round: int) -> Snapshot | None:
        """Return the snapshot of a round so that it lies in shared memory, its optimizer too."""
        snapshot = self._shelf.get(round)
        if snapshot is None:
            return None
        return dataclasses.replace(snapshot, optimizer=as_arrays(snapshot.optimizer))

    def newest(self) -> Snapshot:
        """Return the newest snapshot."""
        return self._shelf.newest()

    # the home shard

    def form(self, membership: Membership) -> tuple[int, Snapshot]:
        """Begin a generation; return its number, and what all start from."""
        opened = [shard.form.remote(membership) for shard in self._others]
        states = ray.get(opened, timeout=START_S)
        self.center_server.begin_generation(membership)
        return membership.generation, self.center_server.snapshot(lambda: states)

    def change(self, membership: Membership) -> tuple[int, Snapshot]:
        """Let workers join and leave while the others train on.

        Returns:
            The generation, and what those who join start from.
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
    known = snapshot.optimizer if optimizer is None else optimizer
    return dataclasses.replace(snapshot, optimizer=as_tensors(known))


@ray.remote(num_cpus=0, memory=_A_BYTE)
class ShardActor:
    """Holds one shard of the center, away from home."""

    def __init__(
        self,
        job: Job,
        snapshot: Snapshot,
        index: int,
        optimizer: dict[str, Any] | None = None,
    ) -> None:
        torch.set_num_threads(1)
        snapshot = _with_optimizer(snapshot, optimizer)
        self._index = index
        self._process = uuid.uuid4().hex
        self._shard = make_shard(job, snapshot, index, None, node=node_here())

    def form(self, membership: Membership) -> ShardState:
        """Begin a generation; return what all start from."""
        self._shard.begin_generation(membership)
        return self._shard.state()

    def change(self, membership: Membership) -> ShardState:
        """Let workers join and leave; return what those who join start from."""
        return self._shard.change(membership)

    def inflict(self, fault: Fault) -> None:
        """Inflict a fault on this process."""
        inflict_here(fault)

    def optimizer_states(self) -> OptimizerStates:
        """Return the states of the optimizers, by span."""
        return self._shard.optimizer_states()

    def ping(self) -> tuple[int, Place, Refused]:
        """Return which shard this is, where it runs, and what was refused here."""
        refused = Refused(self._process, self._shard.num_refused)
        return self._index, (node_here(), os.getpid()), refused

    def shared_cells(self, worker_id: str, node: str) -> dict[Span, CellAddress]:
        """Return the memory that a worker of a node may map."""
        return self._shard.shared_cells(worker_id, node)

    def exchange(self, request: Request) -> Response:
        """Take a message."""
        return self._shard.exchange(request)

    def state(self) -> ShardState:
        """Return a copy of what is here."""
        return self._shard.state()


@ray.remote(concurrency_groups={"loop": 1, "control": 1, "files": 1})
class WorkerActor:
    """Hosts one ``Worker``: the loop in one thread, questions to it in another.

    A third one writes what the worker holds for a checkpoint, beside the training.
    """

    @ray.method(concurrency_group="control")
    def ping(self) -> None:
        """Answer, which shows that this process came to run."""

    def setup(
        self,
        job: Job,
        worker_id: str,
        train: Samples,
        prepare: Prepare,
        non_trainable: dict[str, np.ndarray],
        saved: SavedPlace | None = None,
    ) -> tuple[Place, bool]:
        """Build the worker; return its node and process id, and whether it has read ``saved``.

        Not in ``__init__``: errors arrive as they are.

        Args:
            job: what all workers do.
            worker_id: its id.
            train: the training set.
            prepare: makes its samples ready for the model.
            non_trainable: the non-trainable state of the run's first model.
            saved: where its own state in a checkpoint may be read; None: there is none, or the
                driver sends it.
        """
        try:
            return self._set_up(job, worker_id, Batches(train, prepare), non_trainable, saved)
        except Exception as error:
            raise_if_of_machine(worker_id, error)
            raise

    def _set_up(
        self,
        job: Job,
        worker_id: str,
        batches: Batches,
        non_trainable: dict[str, np.ndarray],
        saved: SavedPlace | None,
    ) -> tuple[Place, bool]:
        keep_freed_memory()
        torch.set_num_threads(job.config.scaling.num_threads)
        node = node_here()
        self._partition = Partition()
        self._injector = Injector(
            job.faults.for_workers,
            ProcessInflicts(self._partition, lambda s: drain_node(node, deadline_s=s)),
            self._announce,
        )
        self._worker = Worker(
            job,
            worker_id,
            batches=batches,
            publish=self._publish,
            before_step=self._injector.before_step if job.faults.faults else None,
            non_trainable=non_trainable,
        )
        self._num_threads = job.config.scaling.num_threads
        self._job = job
        self._lock = threading.Lock()
        self._generation = self._abandoned_up_to = 0
        self._abandoned = threading.Event()
        self._num_written, self._may_write = 0, threading.Event()
        self._fed = bytearray()
        self._num_prepared = 0
        self._own_state = None if saved is None else _load_saved(saved)
        freeze_objects()
        return (node, os.getpid()), self._own_state is not None

    def _publish(self, snapshot: Snapshot) -> None:
        self._partition.hold()
        self._shards[HOME].put.remote(snapshot)

    def _announce(self, fault: Fault) -> bool:
        """Tell of a fault before it comes; return whether that may have been heard."""
        self._partition.hold()
        noted = self._shards[HOME].note_fault.remote(fault.number, self._worker.worker_id)
        try:
            ray.get(noted, timeout=_ANNOUNCE_S)
        except RayActorError:  # the next generation knows the new center
            return False
        except RayError:
            return True
        return True

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
        """Train in one generation until this worker leaves it; return why, and where.

        Args:
            membership: who trains.
            address: where the members meet.
            snapshot: what they start from.
            shards: of the center, the home shard first.
            fired: faults of the plan that have fired.
            goes_on: it starts from a state that is here already: its own of a checkpoint, or that
                of a worker that left.
        """
        if not goes_on:
            self._own_state = None  # one that came too late
        with self._partition.both_ways():
            return self._run(membership, address, snapshot, shards, fired)

    def _run(
        self,
        membership: Membership,
        address: GroupAddress,
        snapshot: Snapshot,
        shards: list[ActorHandle],
        fired: tuple[int, ...],
    ) -> RunEnded:
        torch.set_num_threads(self._num_threads)  # OpenMP counts threads per calling thread
        self._shards = shards
        self._injector.skip(fired)
        generation = membership.generation
        with self._lock:
            self._generation, self._abandoned = generation, threading.Event()
            if generation <= self._abandoned_up_to:  # the order came before us
                self._abandoned.set()
        try:
            outcome, problem = self._train(membership, address, snapshot), ""
        except ExchangeError as error:
            outcome, problem = Outcome.BROKEN, str(error)
        except NonFiniteError as error:
            return self._ended(Outcome.BROKEN, generation, str(error), error)
        except Exception as error:
            raise_if_of_machine(self._worker.worker_id, error)
            raise
        return self._ended(outcome, generation, problem)

    def _ended(
        self,
        outcome: Outcome,
        generation: int,
        problem: str = "",
        error: NonFiniteError | None = None,
    ) -> RunEnded:
        worker = self._worker
        round, num_changes = worker.copy_age
        return RunEnded(
            worker.worker_id,
            outcome,
            round,
            generation,
            problem,
            num_changes,
            worker.copy_generation,
            worker.ledger_round,
            error,
        )

    @ray.method(concurrency_group="control")
    def raised(self, generation: int) -> RunEnded:
        """Return how the loop ended that raised: as one whose exchange did not complete."""
        return self._ended(Outcome.BROKEN, generation)

    def _train(self, membership: Membership, address: GroupAddress, snapshot: Snapshot) -> Outcome:
        transports: list[Any] = []
        try:
            transports.append(self._make_transport(membership, address))
            partners = self._make_partners(membership, address)
            transports += [partners] if partners else []
            own_state, self._own_state = self._own_state, None
            self._worker.join(
                membership, self._held(transports[0]), snapshot, own_state, self._held(partners)
            )
            del own_state  # it may be as large as the replica
            self._prepare_copy()
            outcome = self._worker.run_round()
            self._prepare_copy()
            while outcome is Outcome.GO_ON:
                outcome = self._worker.run_round()
            return outcome
        finally:
            # At once: peers notice by it that a member has left a broken exchange.
            self._partition.hold()
            for transport in transports:
                transport.close()

    def _prepare_copy(self) -> None:
        """Make memory ready for the first checkpoint, beside the training.

        Before the first round, and after it: without a step an optimizer remembers nothing.
        """
        checkpoint = self._job.config.checkpoint
        if self._num_prepared > 1 or not (checkpoint.every_s or checkpoint.every_epochs):
            return
        self._num_prepared += 1
        # It does not give way: on a busy machine it would not be done in time.
        prepare = self._worker.prepare_copy()
        threading.Thread(target=prepare, name="copy-of-state", daemon=True).start()

    def _held(self, transport: Any) -> Any:
        """Return a road that this process's partitions hold back; without faults as it is."""
        has_faults = self._job.faults.faults and transport is not None
        return Held(transport, self._partition.hold) if has_faults else transport

    @ray.method(concurrency_group="control")
    def abandon(self, generation: int) -> None:
        """Leave a generation at once, out of any exchange; it may not have begun yet."""
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
        """Return all that is new since the last report."""
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

    # its own state, to a file and from one

    @ray.method(concurrency_group="control")
    def hold_last(self) -> int:
        """Hold the state of this worker, which has left its loop for good; return its bytes."""
        with self._partition.both_ways():
            self._worker.hold_last()
            return self._worker.held(LAST).num_bytes

    @ray.method(concurrency_group="files")
    def load_state(self, saved: SavedPlace | None) -> bool:
        """Read what another worker has handed in; return whether that can be done here."""
        self._own_state = None if saved is None else _load_saved(saved)
        return self._own_state is not None

    @ray.method(concurrency_group="control")
    def hold_kept(self, round: int) -> int:
        """Hold the state kept at a round, to be written; return its bytes."""
        self._worker.hold_kept(round)
        return self._worker.held(round).num_bytes

    @ray.method(concurrency_group="control")
    def release(self, round: int) -> None:
        """Hold the state of a round no more."""
        self._worker.release(round)

    @ray.method(concurrency_group="files")
    def write_held(self, round: int, address: str, name: str, token: str) -> Sum | None:
        """Write what is held of a round; None: this process does not see the storage.

        Args:
            round: one that is held.
            address: of the run's folder; it may not be known here.
            name: of the file.
            token: a file that is there if this process sees that same folder.

        Raises:
            OSError: the storage refused, or the checkpoint was given up.
        """
        give_way()  # the training goes first
        held = self._worker.held(round)
        self._num_written, self._may_write = 0, threading.Event()
        self._may_write.set()
        try:
            here = Storage(address)
            is_seen = here.exists(token)
        except Exception:  # credentials, packages, a network: what is lacking here the driver has
            return None
        return here.write_pieces(name, self._counted(held)) if is_seen else None

    def _counted(self, held: TensorFile) -> Iterator[memoryview]:
        for piece in held.pieces():
            if not self._may_write.is_set():
                raise OSError("the checkpoint was given up")
            yield piece
            self._num_written += len(piece)

    @ray.method(concurrency_group="control")
    def stop_writing(self) -> None:
        """Write no more of what is held."""
        self._may_write.clear()

    @ray.method(concurrency_group="control")
    def num_written(self) -> int:
        """Return how many bytes are written of what is being written."""
        return self._num_written

    @ray.method(concurrency_group="control")
    def num_held(self, round: int) -> int:
        """Return the bytes of what is held of a round."""
        return self._worker.held(round).num_bytes

    @ray.method(concurrency_group="control")
    def read_held(self, round: int, start: int, num_bytes: int) -> np.ndarray:
        """Return a stretch of what is held of a round: uint8, [num_bytes] or fewer at the end."""
        return np.frombuffer(self._worker.held(round).read(start, num_bytes), np.uint8)

    @ray.method(concurrency_group="control")
    def feed_state(self, piece: np.ndarray, written: Sum) -> None:
        """Take the next piece of this worker's state in a checkpoint, and all of it at its end."""
        self._fed += piece.tobytes()
        if len(self._fed) >= written.num_bytes:
            data, self._fed = self._fed, bytearray()
            self._own_state = unpack(data) if Sum.of([data]) == written else None

    @ray.method(concurrency_group="control")
    def has_own_state(self) -> bool:
        """Return whether the state of a checkpoint is here."""
        return self._own_state is not None


def _load_saved(saved: SavedPlace) -> dict[str, Any] | None:
    """Return a worker's state from a checkpoint; None: it can not be read here."""
    try:
        address, name, written = saved
        return SavedState(Storage(address), name, written).load()
    except Exception:  # as in write_held, or it is a disk of another machine
        return None


@ray.remote(num_cpus=0, memory=_A_BYTE, concurrency_groups={"control": 1})
class EvaluatorActor:
    """Scores snapshots of the center, beside the workers."""

    def __init__(
        self, job: Job, test: Samples, prepare: Prepare, non_trainable: dict[str, np.ndarray]
    ) -> None:
        keep_freed_memory()
        torch.set_num_threads(1)
        self._evaluator = Evaluator(job, Batches(test, prepare), non_trainable)

    def evaluate(self, snapshot: Snapshot) -> Evaluated:
        """Return the metrics of a snapshot."""
        torch.set_num_threads(1)  # another thread than the constructor's
        try:
            return self._evaluator.evaluate(snapshot)
        except Exception as error:
            raise_if_of_machine("evaluator", error)
            raise

    @ray.method(concurrency_group="control")
    def num_scored(self) -> int:
        """Return how many samples of the center under way are scored."""
        return self._evaluator.num_scored
