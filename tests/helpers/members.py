"""Ranks of a collective in threads of one process, with a key store without Ray."""

import threading
import time
import types
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from datetime import timedelta

import ray.util.collective.collective as ray_api
from ray.exceptions import GetTimeoutError
from ray.util import collective

from raydl.collective import failure_diagnosis, ray_collective
from raydl.collective.failure_diagnosis import FailureDiagnosis
from raydl.collective.key_store import StoreServer
from raydl.collective.ray_collective import CenterStore, CollectiveGroup, GroupAddress

HOST = "127.0.0.1"


class FakeActorMethod:
    """A method of a fake actor, executed by a thread."""

    def __init__(self, act):
        self._act = act

    def remote(self, *arguments):
        result = Future()

        def run():
            try:
                result.set_result(self._act(*arguments))
            except Exception as error:
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return result


class FakeCenter:
    """A fake center with the keys of a run; ``waits`` has (keys, seconds) of each wait."""

    def __init__(self):
        self.server = StoreServer()
        self.waits = []
        self.closed = threading.Event()
        """Once it is set, no wait takes longer."""
        self.lost = None
        """An error of Ray that each call raises, or None."""
        self.set_key, self.wait_for_keys = FakeActorMethod(self._set), FakeActorMethod(self._wait)

    def _set(self, *arguments):
        if self.lost is None:
            self.server.set_key(*arguments)

    def _wait(self, run_id, generation, keys, timeout_s):
        self.waits.append((keys, timeout_s))
        if self.lost is not None:
            raise self.lost
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            known = self.server.wait_for_keys(run_id, generation, keys, min(left_s, 0.1))
            is_over = known is None or known.keys() >= set(keys) or not left_s
            if is_over or self.closed.is_set():
                return known


class FakeRay:
    """The parts of Ray that the collective uses; ``timeouts`` has the time-out of each ``get``."""

    def __init__(self):
        self.timeouts = []
        self.is_connected = True
        self.util = types.SimpleNamespace(get_node_ip_address=lambda: HOST)
        self.runtime = types.SimpleNamespace(get_node_id=lambda: "node")

    def is_initialized(self):
        return self.is_connected

    def get(self, future, timeout):
        self.timeouts.append(timeout)
        try:
            return future.result(timeout)
        except NotInTime as error:
            raise GetTimeoutError("no answer") from error

    def get_runtime_context(self):
        return self.runtime


def no_actor(name):
    raise ValueError(name)


class Ranks:
    """Members of a generation, each in its own thread.

    Ray identifies the groups of a process by name, so each rank has its own name here.

    Args:
        num_workers: number of members.
        monkeypatch: replaces Ray.
        timeout_s: time-out of an operation, in seconds.
        device: device of the tensors.
        is_user_group: whether failures name the missing members, as in a user's group.
    """

    def __init__(
        self, num_workers, monkeypatch, *, timeout_s=20.0, device="cpu", is_user_group=False
    ):
        self.center, self.ray = FakeCenter(), FakeRay()
        monkeypatch.setattr(ray_collective, "ray", self.ray)
        monkeypatch.setattr(ray_api, "_check_inside_actor", lambda: None)
        monkeypatch.setattr(ray_api, "ray", types.SimpleNamespace(get_actor=no_actor))
        # All members time out in this process, so they learn of each other sooner.
        monkeypatch.setattr(ray_collective, "_PRESENCE_WAIT", timedelta(seconds=1.5))
        monkeypatch.setattr(failure_diagnosis, "_WAIT_S", 1.5)
        ray_collective.register()  # before the threads, which might register twice
        self.address = GroupAddress("run", 7, device, timeout_s)
        self.worker_ids = tuple(f"w{rank}" for rank in range(num_workers))
        self.abandoned = [threading.Event() for _ in self.worker_ids]
        self.groups = {}
        self.lost = []
        """The ranks whose processes have ended, according to Ray."""
        self._is_user_group = is_user_group
        self._threads_before = set(threading.enumerate())
        self._threads = [ThreadPoolExecutor(1) for _ in self.worker_ids]

    def name(self, rank):
        """Return Ray's name of a rank's group."""
        return f"{id(self)} {rank}"

    def is_known(self, rank):
        """Return whether Ray knows a rank's group."""
        return collective.is_group_initialized(self.name(rank))

    def begin(self, rank, act, *arguments, **more):
        """Call a function in a rank's thread and return the future."""
        return self._threads[rank].submit(act, *arguments, **more)

    def form(self, rank, **more):
        """Begin to form the group of a rank, and return the future."""

        def formed():
            self.groups[rank] = CollectiveGroup(
                self.address,
                self.worker_ids,
                rank,
                center=self.center,
                abandoned=self.abandoned[rank],
                name=self.name(rank),
                diagnosis=self._diagnosis(rank) if self._is_user_group else None,
                **more,
            )

        return self.begin(rank, formed)

    def _diagnosis(self, rank):
        return FailureDiagnosis(
            "ring",
            self.address.generation,
            self.worker_ids,
            rank,
            store=CenterStore(self.center, self.address, len(self.worker_ids)),
            timeout_s=self.address.timeout_s,
            has_ended=lambda rank: rank in self.lost,
        )

    def form_all(self, **more):
        for forming in [self.form(rank, **more) for rank in range(len(self.worker_ids))]:
            forming.result(timeout=60.0)
        return self

    def each(self, act):
        """Call a function with each rank's group and return the results."""
        found = [self.begin(rank, act, group) for rank, group in sorted(self.groups.items())]
        return [each.result(timeout=60.0) for each in found]

    def by_ray(self, act):
        """Call a function with the name of each rank's group and return the results."""
        found = [self.begin(rank, act, self.name(rank), rank) for rank in sorted(self.groups)]
        return [each.result(timeout=60.0) for each in found]

    def close(self):
        """Destroy the remaining groups and wait for all threads."""
        for rank, group in self.groups.items():
            if self.is_known(rank):
                collective.destroy_collective_group(self.name(rank))
            if group.adaptive:
                group.adaptive.close()
        for thread in self._threads:
            thread.shutdown()
        # A thread of an abandoned group still waits for keys. It must end before the fake of Ray is
        # replaced by Ray itself, which would start a cluster for its next call.
        self.ray.is_connected = False
        self.center.closed.set()
        for thread in set(threading.enumerate()) - self._threads_before:
            thread.join(5.0)  # a thread that runs at exit may crash the process
