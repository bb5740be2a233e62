"""An actor that keeps the keys of groups, as the center of a run does."""

import ray

from raydl.collective.store import StoreServer


@ray.remote(num_cpus=0, max_concurrency=16)
class StoreActor:
    def __init__(self):
        self._store = StoreServer()

    def set_key(self, *arguments):
        self._store.set(*arguments)

    def wait_for_keys(self, *arguments):
        return self._store.wait(*arguments)
