r"""Train a model as a Ray job, with ``ray job submit -- python jobs/train.py …``.

Command:   ray job submit --working-dir . -- python jobs/train.py --data digits --workers 2 \
               --storage-path /a/shared/folder --run-dir runs/digits
Expected:  97.8% center test accuracy on the bundled digits; run folder /a/shared/folder/digits
Time:      37 s from submission to end, of which 3 s are training
Hardware:  two shared CPU cores, busy with other work

The options are those of ``raydl train``; ``--workers 0`` runs in this process without Ray. The
working folder of a job is deleted with the job, so give ``--storage-path``. ``raydl submit`` does
the same, with a default storage path, a log that is followed, and retries: docs/jobs.md.
"""

import os
import sys
from pathlib import Path

# A checkout needs no install: this process and those that it starts import raydl from it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.getenv("PYTHONPATH")]))

from raydl.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]], ends_process=True))
