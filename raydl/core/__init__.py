"""Update rules, methods, replica, center, exchange and membership.

Nothing here imports Ray or uses the network.
"""
