"""Elasticity: which workers train, and what follows when one joins, leaves, fails or is late.

``decide`` answers each event of a run by actions; ``state`` is what it knows, and the policies say
what follows: ``failure_policy``, ``scaling_policy``, ``membership_policy``, ``center_policy``.
``controller`` carries the actions out. ``rendezvous`` is the same for ``raydl.attach``, whose
workers arrive by themselves.
"""
