"""Measure weak scaling: the work per worker is constant, the number of workers grows.

Command:   python jobs/weak_scaling.py --workers 1,2 --data digits --steps 300 --out runs/weak
Expected:  a table with samples/s, efficiency and the time parts of a step, and the same figures in
           runs/weak/weak_scaling.json; 100% in the first row, less in the following ones
Time:      36 s, of which 7 s are training: every run starts its own workers
Hardware:  two shared CPU cores, busy with other work: 9,319 samples/s with one worker and 8,449
           with two, an efficiency of 45%, since each worker had less than one core

The options are those of ``raydl weak-scaling``: ``--workers P,P,P``, ``--out DIR``, and every
option of ``raydl train``; ``--steps`` counts per worker. For a Ray job, choose ``--out`` on a
persistent disk.
"""

import os
import sys
from pathlib import Path

# A checkout needs no install: this process and those that it starts import raydl from it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.getenv("PYTHONPATH")]))

from raydl.cli import main

if __name__ == "__main__":
    sys.exit(main(["weak-scaling", *sys.argv[1:]], ends_process=True))
