"""The worker group of a run as Ray actors."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
from raydl.errors import InfrastructureError, NonFiniteCenterError
from raydl.faults import Fault
from raydl.ray_backend import fork_server, ray_version
from raydl.ray_backend.actors import CenterActor, EvaluatorActor, ShardActor, WorkerActor
from raydl.ray_backend.cluster import (
    Notices,
    Place,
    describe_pending,
    fits_elsewhere,
    kill_process,
    node_here,
    place_of,
    request_start,
    request_times,
    send_by_value,
    spare_options,
    worker_options,
)
from raydl.ray_backend.liveness import Liveness, Times, start_of, times_of
from raydl.ray_backend.pending_calls import Call, PendingCalls, in_few_words, original
from raydl.ray_backend.start_timeouts import StartTimeouts
from raydl.ray_backend.state_transfer import Handovers, RayState, feed
from raydl.storage import Storage
from raydl.worker.loop import LAST

_POLL_EVERY_S = 0.5
_CHECK_AFTER = 0.25
"""Share of a lease without an answer after which a process's node is asked for its CPU time. The
task for that may take seconds to start."""
_BACKUP_EVERY_S = 1.0
"""The shortest time between two copies of the center's optimizer state, in seconds."""
_SCORE_S = 300.0
"""The longest time without progress of an evaluation, in seconds, as at the end of a run."""
_CLEAR_S = 5.0
"""The longest wait at the end of a run for the deletion of handover files, in seconds."""


@dataclass
class _Backup:
    """A copy of the optimizer state at the center, which workers' copies of the center lack.

    Copies use at most a fiftieth of a core of the center.
    """

    is_needed: bool
    """Whether the center has an optimizer whose state no worker has."""
    state: Any = None
    """Reference of the newest copy, in the shared memory of a node."""
    version: int = 0
    """Completed exchanges of the center at the copy."""
    is_requested: bool = False
    _next_at: float = 0.0
    _is_final: bool = False

    def begin(self, state: Any, version: int) -> None:
        """Set the state that a center starts from, or that of a checkpoint."""
        self.state, self.version, self._is_final = state, version, False

    def revert(self, state: Any, version: int) -> None:
        """Go back to the state of a checkpoint until the center restarts, since it has diverged.

        Its optimizer may have diverged before its weights did.
        """
        self.state, self.version, self._is_final = state, version, True

    def restarted(self) -> Any:
        """Return the state that a center restarts with; from now on it is copied again."""
        self._is_final = False
        return self.state

    def is_due(self, now: float) -> bool:
        """Whether to request another copy."""
        return self.is_needed and not self.is_requested and now >= self._next_at

    def keep(self, state: Any, version: int, seconds: float, *, now: float) -> None:
        """Keep a new copy, which took ``seconds`` of CPU time."""
        if not self._is_final:
            self.state, self.version = state, version
        self.is_requested = False
        self._next_at = now + max(_BACKUP_EVERY_S, 50 * seconds)


class RayWorkerGroup:
    """A worker group of Ray actors: one center, one evaluator, and the requested workers.

    Workers without resources stay pending, which makes an autoscaler add nodes. Center and
    evaluator run on the driver's node, which lives as long as the run; other shards of the center
    are spread over the nodes.

    Args:
        job: the job of the workers.
        dataset: put into shared memory once; every node has one copy for its workers.
        prepare: prepares samples for the model.
        non_trainable: the non-trainable state of the run's first model, which all processes start
            with; put into shared memory once as well.
        storage: the run's folder, through which leavers hand over their replicas.
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
        self._runtime_env = fork_server.runtime_env() if job.config.scaling.fork_server else None
        self._threads = 1 if job.method.is_sync else 2 * job.config.scaling.max_workers + 4
        self._shards: list[ActorHandle] = []
        self._workers: dict[str, ActorHandle] = {}
        self._spares: dict[str, str] = {}
        """By worker that was requested as a hot spare, the node that it was requested on."""
        self._places: dict[str, Place] = {}
        self._found: dict[str, Place] = {}
        """Of processes that have not started yet, and of the evaluator."""
        self._calls = PendingCalls()
        self._heartbeats = Heartbeats(job.config.elastic.lease_s)
        self._starts = StartTimeouts(job.config.elastic.max_busy_s)
        self._setups = StartTimeouts(job.config.scaling.start_timeout_s)
        self._notices = Notices()
        self._avoided: set[str] = set()
        self._liveness = Liveness(min(1.0, self._check_after_s()))
        self._reported_busy: set[str] = set()
        self._polled_at = 0.0
        self._fired: set[int] = set()
        self._members: tuple[str, ...] = ()
        self._newest_generation = self._rebuilt_in = 0
        """The newest generation, and the newest one when the center was rebuilt last."""
        self._collected: dict[str, Any] = {}
        self._held: tuple[int, tuple[str, ...]] = -1, ()
        self._events: list[Event] = []
        self._from_threads: deque[Callable[[], list[Event]]] = deque()
        """Handlers of results from other threads; ``poll`` calls them."""
        self._without_storage: set[str] = set()
        self._handovers = Handovers(storage, self._run_id)
        self._handovers.clear()
        self._evaluator: ActorHandle | None = None
        self._num_scored, self._scored_at = 0, 0.0
        """Test samples scored by the evaluator, and when that changed or the evaluation began."""
        method = job.method
        self._backup = _Backup(not method.is_sync and method.rule.has_state)

    # the processes

    def _options(self, **options: Any) -> dict[str, Any]:
        """Return the options of an actor, by default on the driver's node."""
        return {
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self._home, soft=True),
            "runtime_env": self._runtime_env,
            **options,
        }

    def start_center(self, snapshot: Snapshot) -> None:
        """Start the center."""
        self._keep(snapshot)
        self._backup.begin(*self._kept_optimizer)
        self._start_center(self._kept)

    def _keep(self, snapshot: Snapshot, ref: Any = None) -> None:
        """Keep a snapshot to restart the center from, if no worker has a newer copy.

        Args:
            snapshot: the snapshot.
            ref: its reference in the shared memory of the center's node. It is safe only on the
                driver's node.
        """
        is_safe = ref is not None and self._places["center"][0] == self._home
        self._kept = ref if is_safe else ray.put(snapshot)
        optimizer = ray.put(snapshot.optimizer) if self._backup.is_needed else None
        self._kept_optimizer = optimizer, snapshot.progress.round

    def _start_center(self, snapshot: Any, optimizer: Any = None) -> None:
        """Start all shards of the center.

        Args:
            snapshot: the snapshot that they start from.
            optimizer: the state of their optimizer, if the snapshot lacks it.
        """
        options = self._options(max_concurrency=self._threads)
        center = CenterActor.options(**options).remote()  # type: ignore[attr-defined]
        options["scheduling_strategy"] = "SPREAD"
        others = [
            ShardActor.options(**options).remote(self._job, snapshot, index, optimizer)  # type: ignore[attr-defined]
            for index in range(1, self._job.config.exchange.center_shards)
        ]
        self._shards = [center, *others]
        self._is_center_up = False
        for who in ("center", *(f"shard {i}" for i in range(1, len(self._shards)))):
            self._starts.begin(who)
        started = center.start_center.remote(self._job, snapshot, others, optimizer)
        self._calls.expect(started, "center", self._on_center_started)

    def _on_center_started(self, place: Place) -> list[Event]:
        self._starts.end("center")
        self._places["center"] = place
        self._is_center_up = True
        self._poll_soon()  # no generation forms before its answer
        return []

    @property
    def _center(self) -> ActorHandle:
        return self._shards[0]

    def rebuild_center(self, worker_id: str | None) -> str:
        """Restart the center; return what became of its optimizer's state."""
        for shard in self._shards:
            ray.kill(shard)
        for who in ("center", *(f"shard {i}" for i in range(1, len(self._shards)))):
            self._forget(who)
        self._backup.is_requested, self._rebuilt_in = False, self._newest_generation
        self._calls.forget(lambda call: call.task == "evaluation")  # of the former center
        if worker_id is None:
            self._backup.begin(*self._kept_optimizer)
            self._start_center(self._kept)
            return ""
        copy = self._workers[worker_id].center.remote()
        if not self._backup.is_needed:
            self._start_center(copy)
            return ""
        self._start_center(copy, self._backup.restarted())
        return f"its optimizer is as it was after {self._backup.version:,} exchanges"

    def request_worker(self, worker_id: str, own_state: SavedState | None = None) -> None:
        """Request one more worker."""
        options = worker_options(
            self._job.config.scaling, not_on=self._notices.nodes | self._avoided
        )
        self._start_worker(worker_id, options, own_state)

    def request_spare(self, worker_id: str) -> None:
        """Request a hot spare, on the node of workers that has the fewest spares."""
        avoided = self._notices.nodes | self._avoided
        nodes = [place[0] for w, place in self._places.items() if w in self._workers]
        spares = list(self._spares.values())
        free = [node for node in dict.fromkeys(nodes) if node not in avoided]
        node = min(free, key=spares.count, default="")
        self._spares[worker_id] = node
        self._start_worker(worker_id, spare_options(self._job.config.scaling, node, avoided))

    def _start_worker(
        self, worker_id: str, options: dict[str, Any], own_state: SavedState | None = None
    ) -> None:
        worker = WorkerActor.options(**self._options(**options)).remote()  # type: ignore[attr-defined]
        self._workers[worker_id] = worker
        self._starts.begin(worker_id)
        self._setups.begin(worker_id)
        self._calls.expect(worker.ping.remote(), worker_id, partial(self._on_alive, worker_id))
        ref = worker.setup.remote(
            self._job,
            worker_id,
            self._train,
            self._prepare,
            self._non_trainable,
            own_state and own_state.place,
            self._test if self._job.config.evaluation.is_by_workers else None,
        )
        self._calls.expect(ref, worker_id, partial(self._on_set_up, worker_id, own_state))

    def avoid(self, node: str) -> bool:
        """Start no further worker on a node, if a worker fits elsewhere; return whether it does."""
        avoided = self._avoided | {node}
        if not fits_elsewhere(self._job.config.scaling, avoided | self._notices.nodes):
            return False
        self._avoided = avoided
        return True

    def _on_alive(self, worker_id: str, place: Place) -> list[Event]:
        self._starts.end(worker_id)
        self._found[worker_id] = place
        return []

    def _on_set_up(
        self, worker_id: str, own_state: SavedState | None, answer: tuple[Place, bool]
    ) -> list[Event]:
        self._setups.end(worker_id)
        place, has_state = answer
        if has_state or own_state is None:
            return self._note_ready(worker_id, place)
        self._feed(worker_id, place, own_state)
        return []

    def _note_ready(self, worker_id: str, place: Place) -> list[Event]:
        self._places[worker_id] = place
        return [WorkerReady(worker_id, place[0])]

    def _feed(self, worker_id: str, place: Place, saved: SavedState) -> None:
        """Send a worker the state that it cannot read itself; then it is ready."""
        worker = self._workers[worker_id]

        def after(problem: Exception | None) -> list[Event]:
            if self._workers.get(worker_id) is not worker:  # it was ended meanwhile
                return []
            if problem is None:
                return self._note_ready(worker_id, place)
            if isinstance(problem, RayError):
                return self._lose(worker_id, in_few_words(problem))
            # A worker may start late, when newer checkpoints have replaced the one of its state.
            gave_up = GaveUp("saved state", str(problem), worker_id)
            return [gave_up, *self._note_ready(worker_id, place)]

        feed(worker, saved, lambda problem: self._from_threads.append(lambda: after(problem)))

    def end(self, worker_id: str) -> None:
        """End a worker's process."""
        worker = self._workers.pop(worker_id, None)
        self._spares.pop(worker_id, None)
        if worker is not None:
            self._kill(worker_id, worker)
        self._forget(worker_id)

    def _kill(self, who: str, actor: ActorHandle) -> None:
        """End a process. If it has long been silent, kill it by its id: a stopped one gets no call.

        Ray reports a process that is killed by its id to the user as a crash. One that is only
        late, as on a busy machine, is left to Ray's call, and to its own bound of 5 s.
        """
        if who in self._places and self._heartbeats.owed_s(who) > self._check_after_s():
            kill_process(self._places[who], home=self._home)
        ray.kill(actor)

    def _forget(self, who: str) -> None:
        self._calls.forget(lambda call: call.who == who)
        self._places.pop(who, None)
        self._found.pop(who, None)
        self._heartbeats.answer(who)
        self._starts.end(who)
        self._setups.end(who)
        if who == "center":  # the next one may continue from an earlier round
            self._drop_collection()

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

    # events

    def poll(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call."""
        self._poll_processes()
        for ref in self._calls.wait(timeout_s):
            call = self._calls.pop_call(ref)
            if call is not None:  # its process may have just been lost
                self._events += self._on_answer(ref, call)
        while self._from_threads:
            self._events += self._from_threads.popleft()()
        self._events += self._end_silent_evaluator()
        self._check_silent()
        for who in self._heartbeats.expired():
            self._events += self._on_lease_expired(who)
        for who, waited_s in self._starts.expired(self._is_placed):
            reason = f"its process has not answered since it started, {waited_s:.0f} s ago"
            self._events += self._on_start_expired(who, f"{reason} (elastic.max_busy_s)")
        for who, waited_s in self._setups.expired(lambda who: who not in self._starts):
            reason = f"its setup has not ended for {waited_s:.0f} s (scaling.start_timeout_s)"
            self._events += self._on_start_expired(who, reason)
        events, self._events = self._events, []
        return events

    def _check_after_s(self) -> float:
        return _CHECK_AFTER * self._job.config.elastic.lease_s

    def _check_silent(self) -> None:
        """Request the CPU time of processes that are silent for part of their lease."""
        now = time.monotonic()
        silent = self._heartbeats.silent(self._check_after_s())
        for who in self._liveness.due([w for w in silent if w in self._places], now):
            place = self._places[who]
            if place[0] == self._home:
                self._liveness.note(who, times_of(place[1]), now)
                continue
            on_times = partial(self._on_times, who)
            self._calls.expect(request_times(place), who, on_times, task="times")
        self._reported_busy &= set(silent)

    def _on_times(self, who: str, times: Times | None) -> list[Event]:
        self._liveness.note(who, times, time.monotonic())
        return []

    def _on_lease_expired(self, who: str) -> list[Event]:
        """End a process whose lease has expired, unless it is busy."""
        now, silent_s = time.monotonic(), self._heartbeats.owed_s(who)
        is_busy = self._liveness.is_busy(who, now)
        if is_busy and silent_s <= self._job.config.elastic.max_busy_s:
            if who in self._reported_busy:
                return []
            self._reported_busy.add(who)
            return [Busy(who, silent_s)]
        why = self._liveness.why_silent(who, now)
        setting = "elastic.max_busy_s" if is_busy else "elastic.lease_s"
        return self._lose(who, f"it did not answer for {silent_s:.0f} s ({setting}){why}")

    def _place_of_starting(self, who: str) -> Place | None:
        """Return the place of a worker or a shard that starts."""
        actor = self._workers[who] if who in self._workers else self._shards[_index_of(who)]
        return self._find(who, actor)

    def _find(self, who: str, actor: ActorHandle) -> Place | None:
        """Return where Ray has put a process that may not answer; None: it waits for a place.

        At first sight its node is asked when the process started.
        """
        place = self._found.get(who)
        if place is None and (place := place_of(actor)) is not None:
            if place.node == self._home:
                place = place._replace(start=start_of(place.pid))
            else:
                ask = partial(self._on_start_known, who, place)
                self._calls.expect(request_start(place), who, ask, task="start")
            self._found[who] = place
        return place

    def _on_start_known(self, who: str, place: Place, start: int | None) -> list[Event]:
        if self._found.get(who) == place:
            self._found[who] = place._replace(start=start)
        return []

    def _is_placed(self, who: str) -> bool:
        if not ray_version.is_tested() and who not in self._workers:
            return True  # Ray does not tell, but a shard reserves nothing, so that it has a place
        return self._place_of_starting(who) is not None

    def _on_start_expired(self, who: str, reason: str) -> list[Event]:
        """End a process that a node holds, but that has not started in time."""
        place = self._place_of_starting(who)
        if place is not None:  # it may be stopped, and receive no call
            kill_process(place, home=self._home)
        return self._lose(who, reason)

    def _end_silent_evaluator(self) -> list[Event]:
        """End an evaluator whose evaluation makes no progress; the next one starts another."""
        if self._evaluator is None:
            return []
        place = self._find("evaluator", self._evaluator)
        if time.monotonic() - self._scored_at <= _SCORE_S:
            return []
        if not any(call.task == "evaluation" for call in self._calls):
            return []
        if place is not None:  # it may be stopped, and receive no call
            kill_process(place, home=self._home)
        self._end_evaluator()
        self._forget("evaluator")
        return [GaveUp("evaluation", f"the evaluator has scored nothing for {_SCORE_S:.0f} s")]

    @property
    def _started(self) -> list[str]:
        """The workers whose processes have started, in the order of their requests."""
        return [worker_id for worker_id in self._workers if worker_id in self._places]

    def _poll_processes(self) -> None:
        """Poll all processes, except those that owe an answer, twice a second at most."""
        now = time.monotonic()
        if now - self._polled_at < _POLL_EVERY_S:
            return
        self._polled_at = now
        polled = {call.who for call in self._calls if self._is_poll(call)}
        for worker_id in self._started:
            if worker_id in polled:
                continue
            ref = self._workers[worker_id].report.remote()
            self._calls.expect(ref, worker_id, _on_report, can_wait=True)
            self._heartbeats.expect_answer(worker_id)
        if self._is_center_up and "center" not in polled:
            self._calls.expect(self._center.poll.remote(), "center", self._on_poll)
            self._heartbeats.expect_answer("center")
        if self._is_center_up and self._backup.is_due(now):
            self._request_backup()
        for index in range(1, len(self._shards)):
            who = f"shard {index}"
            is_starting = who in self._starts
            if who not in polled and (is_starting or who in self._places):  # else it was lost
                ref = self._shards[index].ping.remote()
                self._calls.expect(ref, who, self._on_ping, can_wait=True)
                if not is_starting:  # its lease begins with its first answer
                    self._heartbeats.expect_answer(who)
        handlers = [call.handle for call in self._calls if call.who == "evaluator"]
        if self._evaluator is not None and handlers and self._on_progress not in handlers:
            ref = self._evaluator.num_scored.remote()
            self._calls.expect(ref, "evaluator", self._on_progress, task="progress")
        homes = {w: place[0] for w, place in self._places.items() if w in self._workers}
        self._events += [Draining(w, left_s) for w, left_s in self._notices.new(homes).items()]

    def _poll_soon(self) -> None:
        """Let the next ``poll`` poll the processes without a wait."""
        self._polled_at = 0.0

    def _request_backup(self) -> None:
        """Have the center copy its optimizer's state into the shared memory of its node."""
        answer, state = self._center.optimizer_state.options(num_returns=2).remote()

        def keep(version_and_seconds: tuple[int, float]) -> list[Event]:
            self._backup.keep(state, *version_and_seconds, now=time.monotonic())
            return []

        self._backup.is_requested = True
        self._calls.expect(answer, "center", keep, task="backup")

    def _on_poll(self, published: Published) -> list[Event]:
        self._fired.update(number for number, _ in published.faults)
        return [published]

    def _on_ping(self, answer: tuple[int, Place, Refused]) -> list[Event]:
        index, place, refused = answer
        self._places[f"shard {index}"] = place
        self._starts.end(f"shard {index}")
        return [refused]

    def _is_poll(self, call: Call) -> bool:
        """Whether a call is repeated regularly, so that its answer renews a lease."""
        return call.handle in (_on_report, self._on_poll, self._on_ping)

    def _renew_lease(self, call: Call) -> None:
        if self._is_poll(call):
            self._heartbeats.answer(call.who)

    def _on_answer(self, ref: Any, call: Call) -> list[Event]:
        try:
            answer = ray.get(ref)
            self._renew_lease(call)
            return call.handle(answer)
        except RayTaskError as error:
            self._renew_lease(call)  # the process itself raised it
            return self._on_task_error(error, call)
        except ActorUnavailableError:
            if self._is_poll(call):  # the process still owes an answer; the next poll may succeed
                return []
            return self._give_up_or_lose(call, "the connection to it broke")
        except RayError as error:
            return self._give_up_or_lose(call, in_few_words(error))

    def _on_task_error(self, task_error: RayTaskError, call: Call) -> list[Event]:
        """Report the error of a call, or the loss of an argument that it needed."""
        if isinstance(task_error.cause, RayError):
            reason = in_few_words(task_error.cause)
            if call.generation:  # its loop did not begin
                return [RunEnded(call.who, Outcome.BROKEN, -1, call.generation, reason)]
            return self._give_up_or_lose(call, reason)
        error = original(task_error)
        self._setups.end(call.who)  # if it was the setup that failed
        if isinstance(error, NonFiniteCenterError):
            self._backup.revert(*self._kept_optimizer)
        if call.who == "evaluator":
            self._end_evaluator()
            if isinstance(error, InfrastructureError):
                return [GaveUp(call.task, str(error))]
        if call.generation and not isinstance(error, InfrastructureError):
            # Get the last round of its loop.
            ended = self._workers[call.who].raised.remote(call.generation)
            self._calls.expect(ended, call.who, lambda end: [end])
        return [Failed(call.who, error)]

    def _give_up_or_lose(self, call: Call, reason: str) -> list[Event]:
        if call.task == "progress":  # the call that evaluates fails as well
            return []
        if call.task in ("times", "start"):  # ``Liveness`` notices that the node does not answer
            return []
        if call.who == "evaluator":
            self._end_evaluator()
        if call.task == "backup":  # another one will follow
            self._backup.is_requested = False
            return []
        if not call.task:
            return self._lose(call.who, reason)
        if call.task == "checkpoint":
            self._drop_collection()
        return [GaveUp(call.task, reason, call.who if call.who in self._workers else "")]

    def _lose(self, who: str, reason: str) -> list[Event]:
        """End a lost process, and report the loss."""
        if who in self._workers:
            self.end(who)
        else:
            if who == "center":
                self._kill(who, self._center)
            self._forget(who)
            self._is_center_up = False
        return [Lost(who, reason)]

    # commands

    def form(self, membership: Membership, round: int, own_states: dict[str, Any]) -> None:
        """Form a generation."""
        self._members, self._newest_generation = membership.worker_ids, membership.generation
        if not self._job.config.evaluation.is_by_workers:
            self._started_evaluator()  # not before: the start of the workers has priority
        if self._job.method.is_sync:
            snapshot = self._center.begin.remote(membership.generation, round)
        else:  # a shard refuses workers that are not its members
            formed, snapshot = self._center.form.options(num_returns=2).remote(membership)
            self._calls.expect(formed, "center", _on_change)
        for worker_id in membership.worker_ids:
            self._run(worker_id, membership, snapshot, own_states.get(worker_id))

    def change(self, membership: Membership, own_states: dict[str, Any]) -> None:
        """Change the members while the others train on."""
        changed, snapshot = self._center.change.options(num_returns=2).remote(membership)
        self._calls.expect(changed, "center", _on_change)
        before, self._members = self._members, membership.worker_ids
        self._newest_generation = membership.generation
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
            tuple(sorted(self._fired)),
            goes_on=own_state is not None,  # which the worker has
        )
        self._calls.expect(ref, worker_id, self._on_run_ended, generation=generation)

    def _on_run_ended(self, ended: RunEnded) -> list[Event]:
        self._poll_soon()  # the center may be lost, or have its last snapshot
        # A worker may notice late that the former center had diverged.
        is_of_former = ended.generation <= self._rebuilt_in
        if isinstance(ended.error, NonFiniteCenterError) and not is_of_former:
            self._backup.revert(*self._kept_optimizer)
        return [ended]

    def dismiss(self, worker_id: str) -> None:
        """Have one worker leave after its next exchange."""
        self._center.dismiss.remote(worker_id)

    def abandon(self, generation: int) -> None:
        """Have the workers of a generation leave at once."""
        for worker_id in self._started:
            self._workers[worker_id].abandon.remote(generation)

    def vote(self, generation: int, **votes: float) -> None:
        """Send votes to the coordinator, or to all workers that have started."""
        if not self._job.method.is_sync:
            self._center.vote.remote(generation, votes)
            return
        for worker_id in self._started:
            self._workers[worker_id].vote.remote(generation, votes)

    def publish(self, worker_id: str) -> None:
        """Have the center adopt a worker's copy of it."""
        adopted = self._center.adopt.remote(self._workers[worker_id].center.remote())

        def poll_at_once(_: None) -> list[Event]:
            self._calls.expect(self._center.poll.remote(), "center", self._on_poll)
            return []

        self._calls.expect(adopted, worker_id, poll_at_once, task="publication")

    def hand_in(self, worker_id: str) -> None:
        """Write the replica of a worker that has left its loop for good."""
        worker, task = self._workers[worker_id], "hand in"

        def after(result: SavedState | Exception) -> list[Event]:
            if isinstance(result, SavedState):
                return [HandedIn(worker_id, result)]
            if worker_id not in self._workers:
                return []
            return [GaveUp(task, _in_words(result), worker_id)]

        def handle(_: int) -> list[Event]:
            state = RayState(worker, worker_id, LAST, self._without_storage)
            self._handovers.keep(state, lambda r: self._from_threads.append(lambda: after(r)))
            return []

        self._calls.expect(worker.hold_last.remote(), worker_id, handle, task=task)

    def hand_over(self, worker_id: str, state: SavedState) -> None:
        """Have a worker read the replica of a leaver, or send it if the worker cannot read it."""
        worker, task = self._workers[worker_id], "hand over"

        def after(problem: Exception | None) -> list[Event]:
            if self._workers.get(worker_id) is not worker:  # it was ended meanwhile
                return []
            if problem:
                return [GaveUp(task, _in_words(problem), worker_id)]
            return [TookOver(worker_id)]

        def handle(has_state: bool) -> list[Event]:
            if has_state:
                return after(None)
            feed(worker, state, lambda problem: self._from_threads.append(lambda: after(problem)))
            return []

        self._calls.expect(worker.load_state.remote(state.place), worker_id, handle, task=task)

    def forget(self, state: SavedState) -> None:
        """Delete the file of a leaver's replica."""
        self._handovers.forget(state)

    def inflict(self, fault: Fault) -> None:
        """Inflict a fault on a shard of the center."""
        self._fired.add(fault.number)
        self._shards[_index_of(fault.target)].inflict.remote(fault)

    def evaluate(self, round: int) -> None:
        """Have the evaluator score the center of a round, or of a newer one."""
        self._num_scored, self._scored_at = -1, time.monotonic()  # its first answer is progress
        # The center may no longer hold that round.
        ref = self._started_evaluator().evaluate.remote(self._center.newest.remote())
        self._calls.expect(ref, "evaluator", lambda evaluated: [evaluated], task="evaluation")

    def _on_progress(self, num_samples: int) -> list[Event]:
        if num_samples != self._num_scored:
            self._num_scored, self._scored_at = num_samples, time.monotonic()
        return [Scoring(num_samples)]

    def _started_evaluator(self) -> ActorHandle:
        """Return the evaluator; start it if it does not run."""
        if self._evaluator is None:
            self._evaluator = EvaluatorActor.options(**self._options()).remote(  # type: ignore[attr-defined]
                self._job, self._test, self._prepare, self._non_trainable
            )
        return self._evaluator

    def _end_evaluator(self) -> None:
        if self._evaluator is not None:
            ray.kill(self._evaluator)
            self._evaluator = None
            self._found.pop("evaluator", None)

    def collect(self, round: int, worker_ids: tuple[str, ...]) -> None:
        """Collect the center of a round; the workers hold their states until they are written."""
        self._drop_collection(but=round)
        self._held = round, worker_ids
        self._collected = dict.fromkeys(("center", *worker_ids))
        center = self._center.get_to_write.remote(round)
        self._calls.expect(center, "center", partial(self._on_center, center), task="checkpoint")
        for worker_id in worker_ids:
            held = self._workers[worker_id].hold_kept.remote(round)
            on_held = partial(self._on_held, worker_id, round)
            self._calls.expect(held, worker_id, on_held, task="checkpoint")

    def _drop_collection(self, *, but: int = -1) -> None:
        """Drop the collection under way, and release the states that workers hold for it.

        Args:
            but: a round whose states they keep, since it is collected again.
        """
        self._calls.forget(lambda call: call.task == "checkpoint")
        round, worker_ids = self._held
        self._held, self._collected = (-1, ()), {}
        for worker_id in worker_ids:
            if round != but and worker_id in self._workers:
                self._workers[worker_id].release.remote(round)

    def _on_center(self, ref: Any, snapshot: Snapshot | None) -> list[Event]:
        if snapshot is None:
            return [GaveUp("checkpoint", "the center no longer holds its round")]
        self._collected["center"] = snapshot, ref
        return self._events_if_complete()

    def _on_held(self, worker_id: str, round: int, _: int) -> list[Event]:
        worker = self._workers[worker_id]
        self._collected[worker_id] = RayState(worker, worker_id, round, self._without_storage)
        return self._events_if_complete()

    def _events_if_complete(self) -> list[Event]:
        """Return the event of a complete collection, if it is."""
        if any(part is None for part in self._collected.values()):
            return []
        workers, self._collected = self._collected, {}
        self._held = -1, ()  # from now on the writer of the checkpoint releases the states
        snapshot, ref = workers.pop("center")
        self._keep(snapshot, ref)
        if self._backup.version < self._kept_optimizer[1]:
            self._backup.begin(*self._kept_optimizer)

        def on_loss(reason: str) -> None:
            lost = StatesLost(snapshot.progress.round, reason)
            self._from_threads.append(lambda: [lost])

        return [Collected(snapshot, workers, on_loss=on_loss)]

    def waiting_for(self) -> str:
        """Return what the workers that have not started wait for, in a few words."""
        pending = [worker for w, worker in self._workers.items() if w not in self._places]
        return describe_pending(pending, self._job.config.scaling)


def _index_of(shard: str) -> int:
    """Return 2 for ``shard 2``, and 0 for ``center``, the home shard."""
    return int(shard.removeprefix("shard ")) if shard.startswith("shard ") else 0


def _on_change(_: int) -> list[Event]:
    return [Changed()]


def _in_words(problem: Exception) -> str:
    return in_few_words(problem) if isinstance(problem, RayError) else str(problem)


def _on_report(report: WorkerReport) -> list[Event]:
    return [Reported(report)]
