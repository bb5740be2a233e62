"""Compares methods, all else equal: which runs, what came of them, what is reported.

settings.py   settings -> the runs; every one is checked before the first starts
runner.py     runs them one after another; one that fails does not stop the others
figures.py    their figures -> one row per method, the first at the target on top
hparams.py    the runs as rows of TensorBoard's page HParams
report.py     the table, the text and the pictures
"""

from raydl.tools.comparison.runner import compare
from raydl.tools.comparison.settings import Comparison

__all__ = ["Comparison", "compare"]
