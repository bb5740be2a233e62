"""An actor that stores the keys of groups, like the center of a run."""

import ray

from raydl.collective.key_store import StoreServer

StoreActor = ray.remote(num_cpus=0, max_concurrency=16)(StoreServer)
