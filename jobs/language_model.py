r"""Train a small GPT to predict the next byte of this project's documentation.

Command:   python jobs/language_model.py --workers 2 --run-dir runs/gpt
Expected:  center test loss 2.55 (5.55 untrained), perplexity 12.9, next-byte accuracy 28.7%
Time:      2 min 12 s, of which 66 s are training
Hardware:  two shared CPU cores, busy with other work

As a job: ``ray job submit --working-dir . -- python jobs/language_model.py --workers 2
--storage-path /a/shared/folder --run-dir runs/gpt``. The figures change slightly with the text.
All options of ``raydl train`` are accepted and override the settings below: ``--model gpt-mini``,
``--data notes.txt`` for your own text, ``--workers 0`` to run in this process without Ray. Start
the job in the folder that contains ``docs/``.
"""

import os
import sys
from pathlib import Path

# A checkout needs no install: this process and those that it starts import raydl from it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.getenv("PYTHONPATH")]))

from raydl.cli import main

SETTINGS = [
    "--data", "text:docs/*.md",
    "--model", "gpt-nano",
    "--context", "64",
    "--optimizer", "adamw",
    "--lr", "3e-3",
    "--batch-size", "16",
    "--epochs", "20",
]  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(["train", *SETTINGS, *sys.argv[1:]], ends_process=True))
