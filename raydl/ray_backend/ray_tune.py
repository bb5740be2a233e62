"""A trial of Ray Tune, as seen from its run: its folder, and the reports to the search."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ray import tune

from raydl.checkpoint.store import CheckpointStore
from raydl.core.callbacks import Callback
from raydl.core.progress import Progress
from raydl.core.scores import Evaluated
from raydl.storage import Storage, below, open_filesystem

_RESERVED = {"memory": 1}
"""Resources of a trial: one byte, since Tune does not accept none at all. Any part of a CPU would
take the place of a worker: two CPUs less 0.01 hold one worker of one CPU."""


def as_trial(
    function: Callable[[Mapping[str, Any]], None],
) -> Callable[[Mapping[str, Any]], None]:
    """Return a trial's function that reserves no CPU: its workers reserve their own."""
    trial: Callable[[Mapping[str, Any]], None] = tune.with_resources(function, _RESERVED)
    return trial


def trial_folder() -> str:
    """Return the local folder for the run of this trial.

    It is in the trial's working directory: Tune does not copy it while checkpoints are written.
    """
    return os.path.join(os.getcwd(), tune.get_context().get_trial_id())


class TrialReports(Callback):
    """Reports each score to Tune, with a checkpoint if there is a new one.

    Args:
        run: where the run is kept, a folder or a URI.
    """

    def __init__(self, run: str) -> None:
        self._run, self._store = run, CheckpointStore(Storage(run))
        self._reported = ""

    def evaluated(self, evaluated: Evaluated) -> None:
        """Report a score; Tune may end the trial here."""
        self._report({**evaluated.metrics, **evaluated.progress.of_score()}, evaluated.progress)

    def repeat(self, score: Mapping[str, Any]) -> None:
        """Report the last score of a run that was complete before this start of the trial."""
        self._report(score, self._store.read()[0].progress)

    def _report(self, score: Mapping[str, Any], progress: Progress) -> None:
        values = {name: value for name, value in score.items() if name != "round"}
        values |= {"epoch": progress.epoch, "run": self._run}
        tune.report(values, checkpoint=self.new_checkpoint())

    def new_checkpoint(self) -> tune.Checkpoint | None:
        """Return the newest checkpoint of the run, or None if it was returned before."""
        names = self._store.names()
        if not names or names[-1] == self._reported:
            return None
        self._reported = names[-1]
        return _checkpoint_at(below(self._store.root, f"checkpoints/{names[-1]}"))


def _checkpoint_at(place: str) -> tune.Checkpoint:
    """Return the checkpoint in a local folder or at a URI."""
    if "://" not in place:
        return tune.Checkpoint.from_directory(place)
    filesystem, path = open_filesystem(place)
    return tune.Checkpoint(path, filesystem)
