r"""Train a small GPT to tell the next byte of this project's own documentation.

Command:   python jobs/language_model.py --workers 2 --run-dir runs/gpt
Expected:  center test loss 2.55 (5.55 non_trainable), perplexity 12.9, 28.7% of the next bytes told
Time:      2 min 12 s, of which 66 s are training
Hardware:  two shared CPU cores, busy with other work

As a job: ``ray job submit --working-dir . -- python jobs/language_model.py --workers 2
--storage-path /a/shared/folder --run-dir runs/gpt``. The figures move a little with the text.
The options are those of ``raydl train``, and any of them may be given anew: ``--model gpt-mini``,
``--data notes.txt`` for a text of yours, ``--workers 0`` for a run in this process without Ray.
Start it where ``docs/`` lies.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no install

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
    sys.exit(main(["train", *SETTINGS, *sys.argv[1:]]))
