"""Synchronous methods: all ranks exchange together, by one all-reduce.

``sync_strategy`` plans the exchanges and keeps center and ledger on every rank; ``sync_exchange``
is one of them. ``ray_collective`` is the back end for ``ray.util.collective``, with the time-out of
each operation; ``process_group`` has the connections, by gloo or NCCL, and ``tls_tunnel`` encrypts
them. ``allreduce`` has raydl's own algorithms. Workers find each other by the keys of
``key_store``. For groups of a user's own actors, ``user_tensors`` converts their tensors, and
``failure_diagnosis`` names the members that were lost.
"""
