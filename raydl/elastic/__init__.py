"""The controller of a run, and the rendezvous of workers that keep their own training loop.

``controller`` has the states of a run and handles each event. ``membership_policy`` decides when
workers join and leave: in synchronous methods all workers regroup after a round; in methods with
messages the others train on. ``worker_pool`` requests, releases and replaces workers;
``worker_registry`` has the phase of each worker, ``generation`` the members that train together.
``center_manager`` tracks the snapshots of the center and has them scored and written. ``failures``
decides which errors stop a run. ``center_endpoint`` has the calls that workers make to the center's
actor, both in a run and under ``raydl.attach``.

The controller owns no process and no file: a worker group acts for it, and a recorder writes its
results. Tests replace both with fakes and run one iteration at a time.
"""
