"""Ray: actors, the worker group made of them, the cluster, Ray Data and Ray's metrics."""
