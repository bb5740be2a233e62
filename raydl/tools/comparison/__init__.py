"""Compares training methods under otherwise equal settings.

settings.py   plans the runs, and checks all of them before the first one starts
runner.py     executes the runs one after another, and goes on after a failed run
figures.py    reduces the figures of the runs to one row per method
hparams.py    writes the runs as rows of TensorBoard's page HParams
report.py     writes the table, the text and the charts
"""

from raydl.tools.comparison.runner import compare
from raydl.tools.comparison.settings import Comparison

__all__ = ["Comparison", "compare"]
