"""The controller: poll, decide, act; one iteration per call.

``controller`` has the states of a run and what each event changes. ``membership_policy`` decides
when members come and go: in synchronous methods a change stops everybody for a moment, by messages
nobody. ``worker_pool`` requests, releases and replaces workers, ``worker_registry`` knows where
each stands and ``generation`` who trains together; ``center_manager`` knows what the center holds,
and what is to be scored and written; ``failures`` says which errors stop a run. ``center_endpoint``
has the calls of workers to the center's actor, in a run and under ``raydl.attach``.

The controller owns no process and no file: a worker group acts for it, and a recorder writes down
what it learns. So it is tested with fakes, a step at a time.
"""
