"""The methods: a file for each family, with its equations, symbols, sources and defaults.

``names`` lists them. ``resolve`` makes the method of a run from its settings; ``conflicts`` has
what does not fit together. ``custom_rule`` and ``custom_codec`` try what a user has written.
"""

from raydl.methods.names import METHODS
from raydl.methods.resolve import filled_in, resolve

__all__ = ["METHODS", "filled_in", "resolve"]
