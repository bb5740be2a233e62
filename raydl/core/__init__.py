"""The arithmetic and its words: rules, methods, replicas, the center, what a process reports.

Nothing here knows Ray, a network or a clock of its own.
"""
