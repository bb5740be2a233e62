"""Compares training methods under otherwise equal settings.

settings.py   plans the runs, and checks all of them before the first one starts
runner.py     executes them (``raydl.tools.runs``) and has them reported
figures.py    reduces the figures of the runs to one row per method
hparams.py    writes the runs as rows of TensorBoard's page HParams
report.py     writes the table, the text and the charts
"""

from raydl.tools.comparison.runner import compare
from raydl.tools.comparison.settings import Comparison

__all__ = ["Comparison", "compare"]
