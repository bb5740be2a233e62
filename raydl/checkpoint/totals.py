"""Totals of a run over all its starts; each checkpoint holds them.

A checkpoint is written some rounds after the round that it holds. After a resume, these rounds are
trained again, and must not be counted twice. So the totals of a start are kept for each record.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raydl.checkpoint.figures import Score, read_figures
from raydl.checkpoint.store import Checkpoint
from raydl.config.typed import Amount, Seconds, typed
from raydl.metrics import communication_share
from raydl.storage import Storage


@dataclass(frozen=True, kw_only=True)
class StartTotals:
    """Totals of one start up to a round."""

    round: int
    seconds: float
    """Training time over all starts."""
    staleness_sum: float = 0.0
    """Sum of the staleness over the rounds of this start."""
    period_sum: float = 0.0
    """Local steps before each exchange, summed over the rounds of this start."""
    time_parts: dict[str, float]
    """Mean seconds per worker by part, in this start."""
    at_s: float = 0.0
    """Time of the record, by the driver's monotonic clock."""
    trained_s: float = 0.0
    """Seconds of training up to the round, by the workers' clocks."""


_MOST_KEPT = 1024
"""Limit of entries. At five records a second the last 100 s are complete, older ones thinned."""


class StartTotalsHistory:
    """The totals of a start at its records since the newest checkpoint, oldest first.

    Without checkpoints the list would grow forever: at its limit every second entry of the older
    half is dropped.

    Args:
        first: the totals at the beginning of the start.
    """

    def __init__(self, first: StartTotals) -> None:
        self._entries = [first]

    def add(self, entry: StartTotals) -> None:
        """Add the totals of a record, and drop those of its round and later ones.

        There are such entries if the center went back to an earlier round.
        """
        at = bisect.bisect_left(self._entries, entry.round, key=lambda known: known.round)
        self._entries[at:] = [entry]
        if len(self._entries) > _MOST_KEPT:
            half = _MOST_KEPT // 2
            self._entries[:half] = self._entries[:half:2]  # keeps the oldest, the beginning

    @property
    def newest(self) -> StartTotals:
        """The totals at the newest record."""
        return self._entries[-1]

    def up_to(self, round: int) -> StartTotals:
        """Return the newest totals that are not after a round, or the oldest known ones."""
        at = bisect.bisect_right(self._entries, round, key=lambda known: known.round)
        return self._entries[max(at - 1, 0)]

    def pop_up_to(self, round: int) -> StartTotals:
        """Return the totals for a checkpoint of a round, and drop the older ones."""
        totals = self.up_to(round)
        self._entries = self._entries[self._entries.index(totals) :]
        return totals


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Totals of all starts of a run up to a round."""

    evaluations: tuple[Score, ...] = ()
    """The scores of the center, oldest first."""
    longest_pause_s: Seconds = 0.0
    """The longest time in which no worker trained, in one start."""
    staleness_sum: Amount = 0.0
    """Sum of the staleness over all rounds."""
    period_sum: Amount = 0.0
    """Local steps of a worker before each exchange, summed over all rounds."""
    time_parts: dict[str, Seconds] = field(default_factory=dict)
    """Mean seconds per worker by part, summed over the starts."""
    faults_fired: tuple[str, ...] = ()
    """A sentence for each fault."""
    first_loss: float | None = None
    """Training loss of the first local step; None: unknown, as in earlier versions."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, storage: Storage) -> Totals:
        """Return the totals in a checkpoint, with the scores that came after it was written.

        Args:
            checkpoint: the checkpoint to resume from; those of earlier versions have no totals.
            storage: the run's folder.

        Raises:
            ValueError: those in the checkpoint are damaged.
        """
        totals = typed(cls, checkpoint.state.get("totals", {}), "totals")
        # result.json does not have all: a start that was killed wrote none.
        scores = (*_scores_in_result(storage), *totals.evaluations)
        by_round = {
            score["round"]: score
            for score in scores
            if "round" in score and score["samples"] <= checkpoint.progress.num_samples
        }
        return replace(totals, evaluations=tuple(by_round[r] for r in sorted(by_round)))

    @property
    def center_accuracy(self) -> float | None:
        """The newest accuracy of the center, or None if unknown."""
        return self.evaluations[-1].get("accuracy") if self.evaluations else None

    def is_scored(self, round: int) -> bool:
        """Whether the center of a round has a score."""
        return any(score["round"] == round for score in self.evaluations)

    def to_state(self) -> dict[str, Any]:
        """Return the totals as nested values for a checkpoint."""
        return asdict(self)

    def plus(
        self,
        *,
        evaluations: Iterable[dict[str, Any]],
        longest_pause_s: float,
        staleness_sum: float,
        period_sum: float,
        time_parts: Mapping[str, float],
        faults_fired: Iterable[str],
        first_loss: float | None = None,
    ) -> Totals:
        """Return the totals including one more start.

        Args:
            evaluations: scores of the whole run: a center that went back has lost some of them.
            longest_pause_s: of the new start, as are all that follow.
            staleness_sum: sum over its rounds.
            period_sum: sum over its rounds.
            time_parts: mean seconds per worker by part.
            faults_fired: a sentence for each fault.
            first_loss: training loss of its first local step, if the run began with it.
        """
        before = self.time_parts
        return Totals(
            evaluations=tuple(evaluations),
            longest_pause_s=max(self.longest_pause_s, longest_pause_s),
            staleness_sum=self.staleness_sum + staleness_sum,
            period_sum=self.period_sum + period_sum,
            time_parts={part: s + before.get(part, 0.0) for part, s in time_parts.items()},
            faults_fired=(*self.faults_fired, *faults_fired),
            first_loss=first_loss if self.first_loss is None else self.first_loss,
        )

    def figures(self, num_rounds: int) -> dict[str, Any]:
        """Return the entries of ``result.json`` after ``num_rounds`` rounds."""
        return {
            "center_accuracy": self.center_accuracy,
            "center_loss": self.evaluations[-1].get("loss") if self.evaluations else None,
            "communication_share": communication_share(self.time_parts),
            "time_parts": self.time_parts,
            "staleness": self.staleness_sum / num_rounds if num_rounds else 0.0,
            "period": self.period_sum / num_rounds if num_rounds else 0.0,
            "evaluations": list(self.evaluations),
            "longest_pause_s": self.longest_pause_s,
            "faults_fired": list(self.faults_fired),
            "first_train_loss": self.first_loss,
        }


def speed_figures(num_samples: int, seconds: float) -> dict[str, Any]:
    """Return samples, seconds of training, and samples per second, or None if unknown."""
    speed = num_samples / seconds if seconds > 0 else None
    return {"samples": num_samples, "seconds": seconds, "samples_per_s": speed}


def _scores_in_result(storage: Storage) -> list[Score]:
    """Return the scores in ``result.json``.

    The last center of a start is often scored after its checkpoint was written.
    """
    try:
        scores: list[Score] = read_figures(storage).get("evaluations", [])
    except (OSError, ValueError):  # no start has ended
        return []
    return scores
