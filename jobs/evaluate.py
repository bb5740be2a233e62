"""Score the newest checkpoint of a run on its test set.

Command:   ray job submit --working-dir . -- python jobs/evaluate.py /a/shared/folder/digits
Expected:  JSON with accuracy and loss of the center, the same as in the run's result.json
Time:      4 s, after the start of the job
Hardware:  two shared CPU cores, busy with other work

The options are those of ``raydl evaluate``: the folder of the run, a path or URI that the head node
can read, and ``--data`` to evaluate on the test part of other data. A run with your own model or
task needs ``--trust``, since a job has no terminal for the question. The evaluation runs in this
process and starts no workers.
"""

import os
import sys
from pathlib import Path

# A checkout needs no install: this process and those that it starts import raydl from it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.getenv("PYTHONPATH")]))

from raydl.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]], ends_process=True))
