"""Transports: how a replica and the center come together.

All of them serve the protocol :class:`raydl.step_plan.Exchange`. ``sync`` sums one packed
message over all ranks, through a group: ``local`` among threads of one process, or
``collective`` among Ray actors. ``messages`` goes to the center's shards, through a post
(``client``): ``local``, or ``remote`` among Ray actors. ``mapped`` writes the center's memory.
"""
