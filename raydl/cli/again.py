"""What ``raydl submit`` starts on the cluster after a driver was lost; no command for people.

Only there, where the run's folder can be seen, is it known how far the lost one came.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from raydl.cli import main
from raydl.cli.options import parse_train


def again(arguments: Sequence[str]) -> int:
    """Go on from the newest checkpoint of a run, or begin it anew if there is none yet."""
    from raydl.checkpoint import CheckpointStore
    from raydl.runs.folder import RunFolder
    from raydl.storage import Storage, parent_and_name

    words = [word for word in arguments if word != "--resume"]
    folder = RunFolder(parse_train(words))
    if CheckpointStore(folder.storage).names():
        return main(["train", *words, "--resume"])
    if folder.storage.exists("config.json"):
        print(f"no checkpoint in {folder.root} yet: the run begins anew", flush=True)
        parent, name = parent_and_name(folder.root)
        Storage(parent).delete_dir(name)
    return main(["train", *words])


if __name__ == "__main__":
    sys.exit(again(sys.argv[1:]))
