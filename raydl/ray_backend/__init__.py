"""Everything that runs on Ray; with two transports, the only code that imports it.

``worker_group`` makes a run's processes of the ``actors`` and watches them: ``fork_server`` starts
them without imports, ``pending_calls`` has the calls that have not returned, ``start_timeouts`` and
``liveness`` decide which processes count as lost. ``session`` connects, with a ``private_folder``
for a cluster of the run's own, if this process may open enough files (``open_files``);
``ray_version`` lists the versions whose private parts may be used. ``cluster`` knows nodes and
resources, ``state_transfer`` moves the states of workers. ``attach`` serves users' own workers,
``user_group`` their collective groups. ``ray_data`` and ``ray_metrics`` adapt Ray's data sets and
metrics; ``job_client`` and ``job_end`` its jobs; ``node_providers`` its autoscaler.
"""
