"""An actor that keeps the keys of groups, as the center of a run does."""

import ray

from raydl.collective.key_store import StoreServer

StoreActor = ray.remote(num_cpus=0, max_concurrency=16)(StoreServer)
