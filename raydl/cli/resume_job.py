"""Resumes a run after its driver was lost; ``raydl submit`` starts it on the cluster.

Only the cluster can read the run's folder, which shows how far the lost driver came. This module
reads the folder and decides; ``raydl train``, which it then starts, checks and writes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from raydl.cli import main, run_to_exit
from raydl.errors import CheckpointError, RaydlError, exit_status_of
from raydl.text.formatting import escape_controls

if TYPE_CHECKING:
    from raydl.run.folder import RunFolder

LOCK_WAIT_S = 180.0
"""Longest wait for the run's lock, in seconds: a file server keeps the lock of a lost machine."""


def resume(arguments: Sequence[str]) -> int:
    """Resume the run that this submission began, or begin it if no attempt did."""
    from raydl.cli.options import parse_train  # imports much, which the parent process is without

    words = list(arguments)
    try:
        folder = _begun_folder(words)
        if folder is not None and folder.is_complete():
            print(f"the run is complete: {escape_controls(folder.root)}")
            return 0
    except RaydlError as error:
        print(escape_controls(f"error: {error}"), file=sys.stderr)
        return exit_status_of(error)
    if folder is not None and not parse_train(words).run.resume:
        words.append("--resume")
    return main(["train", *words])


def _begun_folder(words: Sequence[str]) -> RunFolder | None:
    """Return the run's folder if an earlier attempt of this submission began the run there.

    Waits, at most ``LOCK_WAIT_S``, until the driver of that attempt has released the folder.

    Raises:
        RaydlError: if the options are wrong or the folder cannot be read.
    """
    from raydl.cli.options import parse_train
    from raydl.run.folder import RunFolder, this_submission
    from raydl.run.lock import wait_until_free
    from raydl.storage import in_words

    config = parse_train(words)
    folder = RunFolder(config)
    wait_until_free(folder.storage, wait_s=LOCK_WAIT_S, log=partial(print, flush=True))
    submission = this_submission()
    if submission is None:
        return None
    try:
        return folder if folder.begun_by() == submission else None
    except OSError as error:
        raise CheckpointError(folder.root, f"cannot be read: {in_words(error)}") from error


if __name__ == "__main__":
    sys.exit(run_to_exit(partial(resume, sys.argv[1:])))
