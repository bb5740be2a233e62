"""The processes that compute: training loops of workers, and the evaluator.

``loop`` is the loop of a run's worker, ``user_loop`` the handle of ``raydl.attach``; both run their
rounds by ``round_runner``. ``evaluator`` scores the center, and ``examples`` draws some of its
predictions. ``in_process`` has transports without Ray.
"""
