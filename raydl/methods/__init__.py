"""The methods: a file for each family, with its equations, symbols, sources and defaults.

``names`` lists them. ``resolve`` makes the method of a run from its settings; ``conflicts``
lists settings that exclude each other. ``custom_rule`` and ``custom_codec`` try the user's classes.
"""

from raydl.methods.names import METHODS
from raydl.methods.resolve import filled_in, resolve

__all__ = ["METHODS", "filled_in", "resolve"]
