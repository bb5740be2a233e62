"""Parameter-server methods (async, Hogwild, round robin): workers exchange with the center alone.

``protocol`` has the messages, ``client`` the worker's side of an exchange, ``shard`` the center's:
it applies pushes, under a lock or, for Hogwild, without one. ``shared_memory`` is the same exchange
between processes of one node. ``coordinator`` assigns samples, with the state of each member in
``members``; ``server`` puts home shard and coordinator behind one interface. ``async_strategy``
plans a worker's exchanges; ``ray_transport`` sends messages as calls of Ray actors.
"""
