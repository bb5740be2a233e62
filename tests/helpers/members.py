"""Ranks of a collective in threads of one process, which a center without Ray lets meet."""

import threading
import types
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime

from ray.exceptions import GetTimeoutError

from raydl.collective import ray_collective as collective
from raydl.collective.ray_collective import CollectiveGroup, GroupAddress, RayGroup
from raydl.collective.store import StoreServer

HOST = "127.0.0.1"


class Method:
    """A method of an actor, which a thread runs."""

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


class Center:
    """The keys of a run, and what was asked: (keys, seconds) of each call that waits."""

    def __init__(self):
        self.server = StoreServer()
        self.asked = []
        self.lost = None
        """Set to an error of Ray's, what each call fails with."""
        self.set_key, self.wait_for_keys = Method(self._set), Method(self._wait)

    def _set(self, *arguments):
        if self.lost is None:
            self.server.set_key(*arguments)

    def _wait(self, run_id, generation, keys, timeout_s):
        self.asked.append((keys, timeout_s))
        if self.lost is not None:
            raise self.lost
        return self.server.wait_for_keys(run_id, generation, keys, timeout_s)


class FakeRay:
    """What the collective asks of Ray; ``waited`` holds the bound of each ``get``."""

    def __init__(self):
        self.waited = []
        self.util = types.SimpleNamespace(get_node_ip_address=lambda: HOST)
        self.runtime = types.SimpleNamespace(get_node_id=lambda: "node")

    def get(self, asked, timeout):
        self.waited.append(timeout)
        try:
            return asked.result(timeout)
        except NotInTime as error:
            raise GetTimeoutError("no answer") from error

    def get_runtime_context(self):
        return self.runtime


class FakeGroups:
    """Ray's groups by name, those of each thread for themselves."""

    def __init__(self):
        self._mine = threading.local()
        self.destroyed = []

    def is_backend_available(self, name):
        return True

    def init_collective_group(self, world_size, rank, backend, group_name):
        assert backend == RayGroup.backend()
        vars(self._mine)[group_name] = RayGroup(world_size, rank, group_name)

    def get_group_handle(self, group_name):
        return vars(self._mine)[group_name]

    def destroy_collective_group(self, group_name):
        vars(self._mine).pop(group_name).destroy_group()
        self.destroyed.append(group_name)


class Ranks:
    """Members of a generation, each in one thread of its own."""

    def __init__(self, num_workers, monkeypatch, *, timeout_s=20.0):
        self.center, self.ray, self.names = Center(), FakeRay(), FakeGroups()
        monkeypatch.setattr(collective, "ray", self.ray)
        monkeypatch.setattr(collective, "collective", self.names)
        self.address = GroupAddress("run", 7, "cpu", timeout_s)
        self.worker_ids = tuple(f"w{rank}" for rank in range(num_workers))
        self.abandoned = [threading.Event() for _ in self.worker_ids]
        self.groups = {}
        self._threads_before = set(threading.enumerate())
        self._threads = [ThreadPoolExecutor(1) for _ in self.worker_ids]

    def begin(self, rank, act, *arguments, **more):
        """Let a rank act; return the result to come."""
        return self._threads[rank].submit(act, *arguments, **more)

    def form(self, rank, **more):
        """Begin to form a rank's group."""

        def formed():
            self.groups[rank] = CollectiveGroup(
                self.address,
                self.worker_ids,
                rank,
                center=self.center,
                abandoned=self.abandoned[rank],
                **more,
            )

        return self.begin(rank, formed)

    def form_all(self, **more):
        for forming in [self.form(rank, **more) for rank in range(len(self.worker_ids))]:
            forming.result(timeout=60.0)
        return self

    def each(self, act):
        """Return what each rank makes of its group."""
        found = [self.begin(rank, act, group) for rank, group in sorted(self.groups.items())]
        return [each.result(timeout=60.0) for each in found]

    def close(self):
        """Leave what is not left; no thread stays behind."""
        for group in self.groups.values():
            group._group.abort()
            if group.adaptive:
                group.adaptive.close()
        for thread in self._threads:
            thread.shutdown()
        for thread in set(threading.enumerate()) - self._threads_before:
            thread.join(5.0)  # none may end as the process does
