"""The algorithms, without Ray and without a network.

``rules`` has what every method is, ``method`` that of a run; the equations are in
``raydl.methods``. A worker: ``flat`` and ``replica``, with ``optimizers``, ``compression``,
``non_trainable`` state and ``sharing`` of memory. The center: ``center``. Exchanges: ``exchange``
and ``strategy`` are the protocols that the packages ``collective`` and ``parameter_server``
implement; ``autotune`` chooses their settings by ``cost_model``. A run: ``job``, ``membership``,
``progress``, ``reports`` and ``stop_condition``; ``worker_group`` is the protocol between the
controller and its processes. ``torch_import`` shortens the start of each process.
"""
