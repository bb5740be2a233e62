"""Resumes a run after its driver was lost; ``raydl submit`` starts it on the cluster.

Only the cluster can read the run's folder, which shows how far the lost driver came. This module
reads the folder and decides; ``raydl train``, which it then starts, checks and writes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from raydl.cli import main
from raydl.cli.options import parse_train
from raydl.errors import CheckpointError, RaydlError
from raydl.text import escape_controls

LOCK_WAIT_S = 180.0
"""Longest wait for the run's lock, in seconds: a file server keeps the lock of a lost machine."""


def resume(arguments: Sequence[str]) -> int:
    """Resume the run that this submission began, or begin it if no attempt did."""
    words = list(arguments)
    try:
        if _is_ours(words):
            words.append("--resume")
    except RaydlError as error:
        print(escape_controls(f"error: {error}"), file=sys.stderr)
        return error.exit_status
    return main(["train", *words])


def _is_ours(words: Sequence[str]) -> bool:
    """Whether an earlier attempt of this submission began the run in the folder.

    Waits, at most ``LOCK_WAIT_S``, until the driver of that attempt has released the folder.

    Raises:
        RaydlError: if the options are wrong or the folder cannot be read.
    """
    from raydl.run.folder import RunFolder, this_submission
    from raydl.run.lock import wait_until_free
    from raydl.storage import in_words

    config = parse_train(words)
    folder = RunFolder(config)
    wait_until_free(folder.storage, wait_s=LOCK_WAIT_S, log=partial(print, flush=True))
    submission = this_submission()
    if config.run.resume or submission is None:
        return False  # --resume is given already, or no submission is known
    try:
        return folder.begun_by() == submission
    except OSError as error:
        raise CheckpointError(folder.root, f"cannot be read: {in_words(error)}") from error


if __name__ == "__main__":
    sys.exit(resume(sys.argv[1:]))
