"""Score the newest checkpoint of a run on its test set.

Command:   ray job submit --working-dir . -- python jobs/evaluate.py /a/shared/folder/digits
Expected:  JSON with the center's accuracy and loss, those that the run itself ended with
Time:      4 s, after the start of the job
Hardware:  two shared CPU cores, busy with other work

The options are those of ``raydl evaluate``: the run's folder, a path or URI that the head sees, and
``--data`` for the test part of other data. A run with a model or task of your own needs
``--trust``, since a job has no terminal to ask at. It runs in this process alone and asks for no
workers.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no install

from raydl.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
