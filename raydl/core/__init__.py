"""The algorithms, without Ray and without a network.

The arithmetic: ``rules`` has the update equations, ``methods`` the named methods, ``custom_rule``
those of users. A worker: ``flat`` and ``replica``, with ``optimizers``, ``compression``,
``non_trainable`` state and ``sharing`` of memory. The center: ``center``. Exchanges: ``exchange``
and ``strategy`` are the protocols that the packages ``collective`` and ``parameter_server``
implement; ``autotune`` chooses their settings by ``cost_model``. A run: ``job``, ``membership``,
``progress``, ``reports`` and ``stop_condition``; ``worker_group`` is the protocol between the
controller and its processes. ``torch_import`` shortens the start of each process.
"""
