"""Compare training methods: time and samples to a target accuracy, and where the time went.

Command:   python jobs/compare.py --methods sync-easgd,async-easgd --workers 2 --epochs 10 --seeds 2
Expected:  runs/compare-DATE/comparison.md with a table and charts, comparison.html with charts to
           choose from, and the figures as CSV and JSON; both methods reach 94% to 95% after ten
           epochs of the digits
Time:      50 s, of which 5 s are training: every run starts its own workers
Hardware:  two shared CPU cores; there the 34 runs of --methods all --epochs 40 took 15 minutes

The options are those of ``raydl compare``: ``--methods all`` or names with commas, your own rules
as module:Class among them, ``--samples N``, ``--seconds S``, ``--bytes SIZE`` or ``--epochs E``,
``--seeds 3``, ``--tune lr=0.1:0.2``, ``--target 0.985``, ``--out DIR``, and every option of ``raydl
train``.

If a method fails, the others still run, and the exit status is 1. Repeat the command with --out DIR
to continue a comparison that was stopped. For a Ray job, choose --out on a persistent disk.
"""

import os
import sys
from pathlib import Path

# A checkout needs no install: this process and those that it starts import raydl from it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.getenv("PYTHONPATH")]))

from raydl.cli import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]], ends_process=True))
