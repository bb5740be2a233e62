"""Train a model: what ``ray job submit -- python jobs/train.py …`` starts.

Command:   ray job submit --working-dir . -- python jobs/train.py --data digits --workers 2
Expected:  about 98% center test accuracy on the bundled digits
Time:      under a minute on two CPU cores
Keep:      a job works in a temporary folder; add --storage-path to keep the run

The options are those of ``raydl train``; ``--workers 0`` runs in this process without Ray.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no install

from raydl.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
