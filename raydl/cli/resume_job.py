"""Resumes a run on the cluster after its driver was lost; ``raydl submit`` starts this, not people.

Only there, where the run's folder can be seen, is it known how far the lost one came. It reads
the folder and decides; what it then starts is ``raydl train``, which checks and writes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from raydl.cli import main
from raydl.cli.options import parse_train
from raydl.errors import CheckpointError, RaydlError
from raydl.text import escape_controls

HOLD_WAIT_S = 180.0
"""How long a lock is waited for: a file server keeps that of a machine that went for a while."""


def resume(arguments: Sequence[str]) -> int:
    """Go on with the run that this submission began, or begin it if it never did."""
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

    Waits, within bounds, until the driver of that attempt has given the folder back.

    Raises:
        RaydlError: the options are wrong, or the folder can not be read.
    """
    from raydl.run.folder import RunFolder, this_submission
    from raydl.run.lock import wait_until_free
    from raydl.storage import in_words

    config = parse_train(words)
    folder = RunFolder(config)
    wait_until_free(folder.storage, wait_s=HOLD_WAIT_S, say=partial(print, flush=True))
    mine = this_submission()
    if config.run.resume or mine is None:
        return False  # the words say it already, or nobody knows who began
    try:
        return folder.begun_by() == mine
    except OSError as error:
        raise CheckpointError(folder.root, f"can not be read: {in_words(error)}") from error


if __name__ == "__main__":
    sys.exit(resume(sys.argv[1:]))
