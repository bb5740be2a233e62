"""Compares training methods under otherwise equal settings.

settings.py   plans the runs, and checks all of them before the first one starts
runner.py     executes them (``raydl.tools.runs``) and has them reported
figures.py    reduces the figures of the runs to one row per method
hparams.py    writes the runs as rows of TensorBoard's page HParams
report.py     makes the table, the text and the charts
page.py       makes the page with charts to choose from
csv_files.py  writes the table and the curves as CSV
"""

from raydl.tools.comparison.runner import compare
from raydl.tools.comparison.settings import Comparison

__all__ = ["Comparison", "compare"]
