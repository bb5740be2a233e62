"""Transports: how a replica and the center come together.

All of them serve the protocol :class:`raydl.replica.Exchange`. ``sync`` sums one packed
message over all ranks, through a group: ``local`` among threads of one process, or
``collective`` among Ray actors.
"""
