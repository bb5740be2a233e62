"""The worker group of Ray actors that a controller commands."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydl.collective.ray_collective import GroupAddress
from raydl.core.center import Snapshot
from raydl.core.job import Job
from raydl.core.membership import Membership
from raydl.core.reports import Outcome, WorkerReport
from raydl.core.saved_state import SavedState
from raydl.core.worker_group import (
    Busy,
    Changed,
    Collected,
    Draining,
    Event,
    Failed,
    GaveUp,
    HandedIn,
    Lost,
    Published,
    Refused,
    Reported,
    RunEnded,
    Scoring,
    StatesLost,
    TookOver,
    WorkerReady,
)
from raydl.data import Dataset, Prepare
from raydl.elastic.heartbeat import Heartbeats
from raydl.errors import InfrastructureError
from raydl.faults import Fault
from raydl.ray_backend.actors import CenterActor, EvaluatorActor, ShardActor, WorkerActor
from raydl.ray_backend.cluster import (
    Notices,
    Place,
    ask_times,
    awaited,
    has_room_elsewhere,
    kill_process,
    node_here,
    place_held,
    send_by_value,
    worker_options,
)
from raydl.ray_backend.liveness import Liveness, Times, times_of
from raydl.ray_backend.pending_calls import Call, Handler, PendingCalls, in_few_words, original
from raydl.ray_backend.start_timeouts import StartTimeouts
from raydl.ray_backend.state_transfer import Handovers, RayState, feed
from raydl.storage import Storage
from raydl.worker.loop import LAST

_ASK_EVERY_S = 0.5
_LOOK_AFTER = 0.25
"""Of a lease: after so long without an answer a process's node is asked how it is. To start the
task that looks may take seconds."""
_BACKUP_EVERY_S = 1.0
"""The shortest time from one copy of the center's optimizer to the next, in seconds."""
_CLEAR_S = 5.0
"""The longest wait at the end of a run for the storage to delete what nobody took over."""


@dataclass
class _Backup:
    """A copy of the state of the optimizer at the center, which workers' copies do not have.

    It is made so often that it costs the center a fiftieth of a core at most.
    """

    is_needed: bool
    """The center has an optimizer, and it alone has the state."""
    state: Any = None
    """Reference of the newest copy, in the shared memory of a node."""
    version: int = 0
    """Exchanges that the center had settled by then."""
    is_asked: bool = False
    _next_at: float = 0.0

    def begin(self, state: Any, version: int) -> None:
        """Begin with the state that a center starts from, or that a checkpoint has."""
        self.state, self.version = state, version

    def is_due(self, now: float) -> bool:
        """Whether to make another one."""
        return self.is_needed and not self.is_asked and now >= self._next_at

    def keep(self, state: Any, version: int, seconds: float, *, now: float) -> None:
        """Take one that is made, and the CPU seconds that it took."""
        self.state, self.version, self.is_asked = state, version, False
        self._next_at = now + max(_BACKUP_EVERY_S, 50 * seconds)


class RayWorkerGroup:
    """A worker group of Ray actors: one center, one evaluator, and the workers that are asked for.

    Workers that the cluster can not hold yet stay pending, which is what an autoscaler
    answers to. Center and evaluator live on the driver's node, where they are safe as long as
    the run is; other shards of the center spread.

    Args:
        job: what the workers do.
        dataset: put into shared memory once; every node holds one copy for its workers.
        prepare: makes its samples ready for the model.
        non_trainable: the non-trainable state of the run's first model, which all processes begin
            with; put into shared memory once, too.
        storage: the run's folder, where those who leave put their replicas for those who come.
    """

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        prepare: Prepare,
        non_trainable: dict[str, np.ndarray],
        storage: Storage,
    ) -> None:
        send_by_value(type(job.method.rule))
        self._job = job
        self._run_id = uuid.uuid4().hex[:8]
        self._home = node_here()
        self._train = ray.put(dataset.train)
        self._prepare = ray.put(prepare)
        self._non_trainable = ray.put(non_trainable)
        self._test = ray.put(dataset.test)
        self._threads = 1 if job.method.is_sync else 2 * job.config.scaling.max_workers + 4
        self._shards: list[ActorHandle] = []
        self._workers: dict[str, ActorHandle] = {}
        self._places: dict[str, Place] = {}
        self._calls = PendingCalls()
        self._heartbeats = Heartbeats(job.config.elastic.lease_s)
        self._starts = StartTimeouts(job.config.elastic.max_busy_s)
        self._notices = Notices()
        self._avoided: set[str] = set()
        self._liveness = Liveness()
        self._told_busy: set[str] = set()
        self._asked_at = 0.0
        self._fired: set[int] = set()
        self._members: tuple[str, ...] = ()
        self._collected: dict[str, Any] = {}
        self._held: tuple[int, tuple[str, ...]] = -1, ()
        self._events: list[Event] = []
        self._late: deque[Callable[[], list[Event]]] = deque()
        self._blind: set[str] = set()
        self._handovers = Handovers(storage, self._run_id)
        self._handovers.clear()  # of what earlier starts have left
        self._evaluator: ActorHandle | None = None
        method = job.method
        self._backup = _Backup(not method.is_sync and method.has_center_optimizer)

    # the processes

    def _at_home(self) -> dict[str, Any]:
        """Return the options of an actor that should live on the driver's node."""
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(self._home, soft=True)}

    def start_center(self, snapshot: Snapshot) -> None:
        """Start the center."""
        self._know(snapshot)
        self._backup.begin(*self._known_optimizer)
        self._start_center(self._known)

    def _know(self, snapshot: Snapshot, ref: Any = None) -> None:
        """Keep a snapshot from which a center can begin anew, if no worker has a newer one.

        Args:
            snapshot: the snapshot.
            ref: where it is already in the shared memory of the center's node; that of the driver
                is where it is safe.
        """
        is_safe = ref is not None and self._places["center"][0] == self._home
        self._known = ref if is_safe else ray.put(snapshot)
        optimizer = ray.put(snapshot.optimizer) if self._backup.is_needed else None
        self._known_optimizer = optimizer, snapshot.progress.round

    def _start_center(self, snapshot: Any, optimizer: Any = None) -> None:
        """Start all shards of the center.

        Args:
            snapshot: what they start from.
            optimizer: what their optimizer remembers, if the snapshot does not have it.
        """
        threads = self._threads
        center = CenterActor.options(max_concurrency=threads, **self._at_home()).remote()  # type: ignore[attr-defined]
        others = [
            ShardActor.options(max_concurrency=threads, scheduling_strategy="SPREAD").remote(  # type: ignore[attr-defined]
                self._job, snapshot, index, optimizer
            )
            for index in range(1, self._job.config.exchange.center_shards)
        ]
        self._shards = [center, *others]
        self._is_open = False
        for index in range(1, len(self._shards)):
            self._starts.begin(f"shard {index}")
        opened = center.start_center.remote(self._job, snapshot, others, optimizer)
        self._calls.expect(opened, "center", self._on_opened)

    def _on_opened(self, place: Place) -> list[Event]:
        self._places["center"] = place
        self._is_open = True
        return []

    @property
    def _center(self) -> ActorHandle:
        return self._shards[0]

    def rebuild_center(self, worker_id: str | None) -> str:
        """Start the center anew; return what became of its optimizer's state."""
        for shard in self._shards:
            ray.kill(shard)
        for who in ("center", *(f"shard {i}" for i in range(1, len(self._shards)))):
            self._forget(who)
        self._backup.is_asked = False
        self._calls.forget(lambda call: call.task == "evaluation")  # of the center that was
        if worker_id is None:
            self._backup.begin(*self._known_optimizer)
            self._start_center(self._known)
            return ""
        copy = self._workers[worker_id].center.remote()
        if not self._backup.is_needed:
            self._start_center(copy)
            return ""
        self._start_center(copy, self._backup.state)
        return f"its optimizer is as it was after {self._backup.version:,} exchanges"

    def request_worker(self, worker_id: str, own_state: SavedState | None = None) -> None:
        """Ask for one more worker."""
        options = worker_options(
            self._job.config.scaling, not_on=self._notices.nodes | self._avoided
        )
        worker = WorkerActor.options(**options).remote()  # type: ignore[attr-defined]
        self._workers[worker_id] = worker
        self._starts.begin(worker_id)
        self._calls.expect(worker.ping.remote(), worker_id, self._on_alive(worker_id))
        ref = worker.setup.remote(
            self._job,
            worker_id,
            self._train,
            self._prepare,
            self._non_trainable,
            own_state and own_state.place,
        )
        self._calls.expect(ref, worker_id, self._on_ready(worker_id, own_state))

    def avoid(self, node: str) -> bool:
        """Start no further worker on a node, if another one could hold it."""
        avoided = self._avoided | {node}
        if not has_room_elsewhere(self._job.config.scaling, avoided | self._notices.nodes):
            return False
        self._avoided = avoided
        return True

    def _on_alive(self, worker_id: str) -> Handler:
        def handle(_: None) -> list[Event]:
            self._starts.end(worker_id)
            return []

        return handle

    def _on_ready(self, worker_id: str, own_state: SavedState | None) -> Handler:
        def handle(told: tuple[Place, bool]) -> list[Event]:
            place, has_state = told
            if not has_state and own_state is not None:
                self._feed(worker_id, place, own_state)
                return []
            return self._came_up(worker_id, place)

        return handle

    def _came_up(self, worker_id: str, place: Place) -> list[Event]:
        self._places[worker_id] = place
        return [WorkerReady(worker_id, place[0])]

    def _feed(self, worker_id: str, place: Place, saved: SavedState) -> None:
        """Hand a worker its state that it can not read by itself; it is ready then."""
        worker = self._workers[worker_id]

        def after(problem: Exception | None) -> list[Event]:
            if self._workers.get(worker_id) is not worker:  # it was ended meanwhile
                return []
            if problem is None:
                return self._came_up(worker_id, place)
            if isinstance(problem, RayError):
                return self._lose(worker_id, in_few_words(problem))
            # Checkpoints that came after it may have taken its place: a worker may come late.
            gave_up = GaveUp(f"saved state of {worker_id}", str(problem))
            return [gave_up, *self._came_up(worker_id, place)]

        feed(worker, saved, lambda problem: self._late.append(lambda: after(problem)))

    def end(self, worker_id: str) -> None:
        """End a worker's process."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._kill(worker_id, worker)
        self._forget(worker_id)

    def _kill(self, who: str, actor: ActorHandle) -> None:
        """End a process; one that does not answer may be stopped, and hears no call."""
        if who in self._places and self._heartbeats.owed_s(who) > 2 * _ASK_EVERY_S:
            kill_process(self._places[who], home=self._home)
        ray.kill(actor)

    def _forget(self, who: str) -> None:
        self._calls.forget(lambda call: call.who == who)
        self._places.pop(who, None)
        self._heartbeats.answer(who)
        self._starts.end(who)

    def close(self) -> None:
        """End the actors at once."""
        for worker_id, worker in self._workers.items():
            self._kill(worker_id, worker)
        if self._shards:
            self._kill("center", self._center)
        for shard in self._shards[1:]:
            ray.kill(shard)
        self._end_evaluator()
        self._calls.forget(lambda _: True)
        self._handovers.clear(all=True).join(_CLEAR_S)

    # what happened

    def poll(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call."""
        self._ask_for_news()
        for ref in self._calls.wait(timeout_s):
            call = self._calls.pop_call(ref)
            if call is not None:  # its process may have been lost a moment ago
                self._events += self._answer(ref, call)
        while self._late:
            self._events += self._late.popleft()()
        self._look_at_the_silent()
        for who in self._heartbeats.expired():
            self._events += self._end_or_wait(who)
        for who, waited_s in self._starts.look(self._is_there):
            self._events += self._give_up_start(who, waited_s)
        events, self._events = self._events, []
        return events

    def _look_at_the_silent(self) -> None:
        """Ask how processes are that have not answered for a while, before their lease ends."""
        now = time.monotonic()
        silent = self._heartbeats.silent(_LOOK_AFTER * self._job.config.elastic.lease_s)
        for who in self._liveness.due([w for w in silent if w in self._places], now):
            place = self._places[who]
            if place[0] == self._home:
                self._liveness.note(who, times_of(place[1]), now)
                continue
            self._calls.expect(ask_times(place), who, self._on_times(who), task="times")
        self._told_busy &= set(silent)

    def _on_times(self, who: str) -> Handler:
        def handle(times: Times | None) -> list[Event]:
            self._liveness.note(who, times, time.monotonic())
            return []

        return handle

    def _end_or_wait(self, who: str) -> list[Event]:
        """End a process whose lease is over, unless it is busy."""
        now, silent_s = time.monotonic(), self._heartbeats.owed_s(who)
        is_busy = self._liveness.is_busy(who, now)
        if is_busy and silent_s <= self._job.config.elastic.max_busy_s:
            if who in self._told_busy:
                return []
            self._told_busy.add(who)
            return [Busy(who, silent_s)]
        why = self._liveness.why_silent(who, now)
        setting = "elastic.max_busy_s" if is_busy else "elastic.lease_s"
        return self._lose(who, f"it did not answer for {silent_s:.0f} s ({setting}){why}")

    def _starting(self, who: str) -> ActorHandle:
        """Return the actor of a worker or a shard that has not answered yet."""
        return self._workers[who] if who in self._workers else self._shards[_index_of(who)]

    def _is_there(self, who: str) -> bool:
        """Whether a node holds a process that has not answered yet."""
        return place_held(self._starting(who)) is not None

    def _give_up_start(self, who: str, waited_s: float) -> list[Event]:
        """End a process that is there and does not come to run."""
        place = place_held(self._starting(who))
        if place is not None:  # it may be stopped, and hear no call
            kill_process(place, home=self._home)
        reason = f"its process has not answered since it began, {waited_s:.0f} s ago"
        return self._lose(who, f"{reason} (elastic.max_busy_s)")

    def _ask_for_news(self) -> None:
        """Ask everybody for news, unless that was just done."""
        now = time.monotonic()
        if now - self._asked_at < _ASK_EVERY_S:
            return
        self._asked_at = now
        asked = {call.who for call in self._calls if self._is_question(call)}
        for worker_id in self._places.keys() & self._workers.keys() - asked:
            ref = self._workers[worker_id].report.remote()
            self._calls.expect(ref, worker_id, _on_report, can_wait=True)
            self._heartbeats.expect_answer(worker_id)
        if self._is_open and "center" not in asked:
            self._calls.expect(self._center.poll.remote(), "center", self._on_poll)
            self._heartbeats.expect_answer("center")
        if self._is_open and self._backup.is_due(now):
            self._ask_for_backup()
        for index in range(1, len(self._shards)):
            who = f"shard {index}"
            if who not in asked:
                ref = self._shards[index].ping.remote()
                self._calls.expect(ref, who, self._on_ping, can_wait=True)
                if who in self._places:  # else it starts, and has no lease yet
                    self._heartbeats.expect_answer(who)
        self._ask_the_evaluator()
        homes = {w: place[0] for w, place in self._places.items() if w in self._workers}
        self._events += [Draining(worker_id) for worker_id in self._notices.new(homes)]

    def _ask_the_evaluator(self) -> None:
        """Ask how far a score is, if one is under way and that was not just asked."""
        handlers = [call.handle for call in self._calls if call.who == "evaluator"]
        if self._evaluator is not None and handlers and _on_progress not in handlers:
            ref = self._evaluator.num_scored.remote()
            self._calls.expect(ref, "evaluator", _on_progress, task="progress")

    def _ask_for_backup(self) -> None:
        """Let the center copy its optimizer's state; it stays in the node's shared memory."""
        told, state = self._center.optimizer_state.options(num_returns=2).remote()

        def keep(version_and_seconds: tuple[int, float]) -> list[Event]:
            self._backup.keep(state, *version_and_seconds, now=time.monotonic())
            return []

        self._backup.is_asked = True
        self._calls.expect(told, "center", keep, task="backup")

    def _on_poll(self, published: Published) -> list[Event]:
        self._fired.update(number for number, _ in published.faults)
        return [published]

    def _on_ping(self, answer: tuple[int, Place, Refused]) -> list[Event]:
        index, place, refused = answer
        self._places[f"shard {index}"] = place
        self._starts.end(f"shard {index}")
        return [refused]

    def _is_question(self, call: Call) -> bool:
        """Whether it is one of those that are asked again and again."""
        return call.handle in (_on_report, self._on_poll, self._on_ping)

    def _answer(self, ref: Any, call: Call) -> list[Event]:
        if self._is_question(call):
            self._heartbeats.answer(call.who)
        try:
            return call.handle(ray.get(ref))
        except RayTaskError as error:
            return self._take_error(error, call)
        except ActorUnavailableError:
            if self._is_question(call):
                self._heartbeats.expect_answer(call.who)  # asked again, it may answer yet
                return []
            return self._give_up_or_lose(call, "the connection to it broke")
        except RayError as error:
            return self._give_up_or_lose(call, in_few_words(error))

    def _take_error(self, error: RayTaskError, call: Call) -> list[Event]:
        """Report the error of a task, or the loss of something that it needed."""
        if not isinstance(error.cause, RayError):
            return self._take_raised(original(error), call)
        reason = in_few_words(error.cause)
        if call.generation:  # its loop did not begin
            return [RunEnded(call.who, Outcome.BROKEN, -1, call.generation, reason)]
        return self._give_up_or_lose(call, reason)

    def _take_raised(self, error: Exception, call: Call) -> list[Event]:
        """Tell what a process raised; of a worker in its loop, let it say how far it had come."""
        if call.who == "evaluator":
            self._end_evaluator()
            if isinstance(error, InfrastructureError):
                return [GaveUp(call.task, str(error))]
        if call.generation and not isinstance(error, InfrastructureError):
            ended = self._workers[call.who].raised.remote(call.generation)
            self._calls.expect(ended, call.who, lambda end: [end])
        return [Failed(call.who, error)]

    def _give_up_or_lose(self, call: Call, reason: str) -> list[Event]:
        if call.handle is _on_progress:  # what becomes of the score, the call for it tells
            return []
        if call.who == "evaluator":
            self._end_evaluator()
        if call.task == "times":  # its node does not answer, which tells enough
            return []
        if call.task == "backup":  # another one will be made, of this center or the next
            self._backup.is_asked = False
            return []
        if not call.task:
            return self._lose(call.who, reason)
        if call.task == "checkpoint":
            self._calls.forget(lambda other: other.task == "checkpoint")
            self._release_held()
        return [GaveUp(call.task, reason)]

    def _lose(self, who: str, reason: str) -> list[Event]:
        """Make sure that a process is gone, and tell it."""
        if who in self._workers:
            self.end(who)
        else:
            if who == "center":
                self._kill(who, self._center)
            self._forget(who)
            self._is_open = False
        return [Lost(who, reason)]

    # what they are told

    def form(self, membership: Membership, round: int, own_states: dict[str, Any]) -> None:
        """Let the members meet and train."""
        self._members = membership.worker_ids
        self._wake_evaluator()  # not before: the start of the workers goes first
        if self._job.method.is_sync:
            snapshot = self._center.begin.remote(membership.generation, round)
        else:  # workers send only to shards that know them
            formed, snapshot = self._center.form.options(num_returns=2).remote(membership)
            self._calls.expect(formed, "center", _on_change)
        for worker_id in membership.worker_ids:
            self._run(worker_id, membership, snapshot, own_states.get(worker_id))

    def change(self, membership: Membership, own_states: dict[str, Any]) -> None:
        """Let workers join and leave while the others train on."""
        changed, snapshot = self._center.change.options(num_returns=2).remote(membership)
        self._calls.expect(changed, "center", _on_change)
        before, self._members = self._members, membership.worker_ids
        for worker_id in membership.worker_ids:
            if worker_id not in before:
                self._run(worker_id, membership, snapshot, own_states.get(worker_id))

    def _run(self, worker_id: str, membership: Membership, snapshot: Any, own_state: Any) -> None:
        config, generation = self._job.config, membership.generation
        address = GroupAddress(
            run_id=self._run_id,
            generation=generation,
            device=config.exchange_device,
            timeout_s=config.exchange.timeout_s,
        )
        ref = self._workers[worker_id].run.remote(
            membership,
            address,
            snapshot,
            self._shards,
            tuple(self._fired),
            goes_on=own_state is not None,  # the worker has it
        )
        self._calls.expect(ref, worker_id, lambda end: [end], generation=generation)

    def dismiss(self, worker_id: str) -> None:
        """Let one worker leave after its next exchange."""
        self._center.dismiss.remote(worker_id)

    def abandon(self, generation: int) -> None:
        """Let the workers of a generation leave at once."""
        for worker_id in self._places.keys() & self._workers.keys():
            self._workers[worker_id].abandon.remote(generation)

    def vote(self, generation: int, **votes: float) -> None:
        """Hand the votes to the coordinator, or to all workers that are up."""
        if not self._job.method.is_sync:
            self._center.vote.remote(generation, votes)
            return
        for worker_id in self._places.keys() & self._workers.keys():
            self._workers[worker_id].vote.remote(generation, votes)

    def publish(self, worker_id: str) -> None:
        """Let the center take in a worker's copy of it."""
        put = self._center.adopt.remote(self._workers[worker_id].center.remote())

        def poll_at_once(_: None) -> list[Event]:
            self._calls.expect(self._center.poll.remote(), "center", self._on_poll)
            return []

        self._calls.expect(put, worker_id, poll_at_once, task="publication")

    def hand_in(self, worker_id: str) -> None:
        """Keep the state of a worker that has left its loop for good."""
        worker, task = self._workers[worker_id], f"state of {worker_id}"

        def after(told: SavedState | Exception) -> list[Event]:
            if isinstance(told, SavedState):
                return [HandedIn(worker_id, told)]
            return [GaveUp(task, _in_words(told))] if worker_id in self._workers else []

        def handle(_: int) -> list[Event]:
            state = RayState(worker, worker_id, LAST, blind=self._blind)
            self._handovers.keep(state, lambda told: self._late.append(lambda: after(told)))
            return []

        self._calls.expect(worker.hold_last.remote(), worker_id, handle, task=task)

    def hand_over(self, worker_id: str, state: SavedState) -> None:
        """Let a worker take over what another one handed in; it reads it itself if it can."""
        worker, task = self._workers[worker_id], f"handover to {worker_id}"

        def after(problem: Exception | None) -> list[Event]:
            if self._workers.get(worker_id) is not worker:  # it was ended meanwhile
                return []
            return [GaveUp(task, _in_words(problem)) if problem else TookOver(worker_id)]

        def handle(has_state: bool) -> list[Event]:
            if has_state:
                return after(None)
            feed(worker, state, lambda problem: self._late.append(lambda: after(problem)))
            return []

        self._calls.expect(worker.load_state.remote(state.place), worker_id, handle, task=task)

    def forget(self, state: SavedState) -> None:
        """Delete what a worker handed in."""
        self._handovers.forget(state)

    def inflict(self, fault: Fault) -> None:
        """Inflict a fault on the center, or on a shard of it."""
        self._fired.add(fault.number)
        self._shards[_index_of(fault.target)].inflict.remote(fault)

    def evaluate(self, round: int) -> None:
        """Let the evaluator score the center of a round."""
        # That of the round may be gone by now; a newer one is as good.
        ref = self._wake_evaluator().evaluate.remote(self._center.newest.remote())
        self._calls.expect(ref, "evaluator", lambda evaluated: [evaluated], task="evaluation")

    def _wake_evaluator(self) -> ActorHandle:
        """Return the evaluator; it starts if it does not run."""
        if self._evaluator is None:
            self._evaluator = EvaluatorActor.options(**self._at_home()).remote(  # type: ignore[attr-defined]
                self._job, self._test, self._prepare, self._non_trainable
            )
        return self._evaluator

    def _end_evaluator(self) -> None:
        if self._evaluator is not None:
            ray.kill(self._evaluator)
            self._evaluator = None

    def collect(self, round: int, worker_ids: tuple[str, ...]) -> None:
        """Gather the center of a round; the workers hold their states until they are written."""
        self._calls.forget(lambda call: call.task == "checkpoint")
        self._release_held(but=round)
        self._held = round, worker_ids
        self._collected = dict.fromkeys(("center", *worker_ids))
        center = self._center.get_to_write.remote(round)
        self._calls.expect(center, "center", self._on_center(center), task="checkpoint")
        for worker_id in worker_ids:
            held = self._workers[worker_id].hold_kept.remote(round)
            self._calls.expect(held, worker_id, self._on_held(worker_id, round), task="checkpoint")

    def _release_held(self, *, but: int = -1) -> None:
        """Let workers hold no more what they were asked for and nobody came to write."""
        round, worker_ids = self._held
        self._held = -1, ()
        for worker_id in worker_ids:
            if round != but and worker_id in self._workers:
                self._workers[worker_id].release.remote(round)

    def _on_center(self, ref: Any) -> Handler:
        def handle(snapshot: Snapshot | None) -> list[Event]:
            if snapshot is None:
                return [GaveUp("checkpoint", "the center does not hold its round any more")]
            self._collected["center"] = snapshot, ref
            return self._events_if_all_are_here()

        return handle

    def _on_held(self, worker_id: str, round: int) -> Handler:
        def lost(reason: str) -> None:
            self._late.append(lambda: [StatesLost(round, reason)])

        def handle(_: int) -> list[Event]:
            worker = self._workers[worker_id]
            self._collected[worker_id] = RayState(
                worker, worker_id, round, blind=self._blind, on_loss=lost
            )
            return self._events_if_all_are_here()

        return handle

    def _events_if_all_are_here(self) -> list[Event]:
        if any(part is None for part in self._collected.values()):
            return []
        workers, self._collected = self._collected, {}
        self._held = -1, ()  # from here on the writer of the checkpoint releases them
        snapshot, ref = workers.pop("center")
        self._know(snapshot, ref)
        if self._backup.version < self._known_optimizer[1]:
            self._backup.begin(*self._known_optimizer)
        return [Collected(snapshot, workers)]

    def waiting_for(self) -> str:
        """Return the workers that start, the needs of the others, and the cluster's resources."""
        coming = [self._workers[w] for w in self._workers.keys() - self._places.keys()]
        return awaited(coming, self._job.config.scaling)


def _index_of(shard: str) -> int:
    """Return 2 for ``shard 2``; ``center``, the home shard, is 0."""
    return int(shard.removeprefix("shard ")) if shard.startswith("shard ") else 0


def _on_change(_: int) -> list[Event]:
    return [Changed()]


def _in_words(problem: Exception) -> str:
    return in_few_words(problem) if isinstance(problem, RayError) else str(problem)


def _on_report(report: WorkerReport) -> list[Event]:
    return [Reported(report)]


def _on_progress(num_samples: int) -> list[Event]:
    return [Scoring(num_samples)]
