"""Totals of a run over all its starts, as each checkpoint carries them on.

A checkpoint is written some rounds after its own: what lies between is trained again after a
resume, and would be counted twice. So the sums of a start are known at each of its records.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from raydl.checkpoint.store import Checkpoint
from raydl.metrics import communication_share
from raydl.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Sum:
    """Totals of one start at a round."""

    round: int
    seconds: float
    """Training time over all starts."""
    staleness_sum: float = 0.0
    """Of the rounds of this start."""
    period_sum: float = 0.0
    """Local steps before each exchange, over the rounds of this start."""
    time_parts: dict[str, float]
    """Mean seconds per worker by part, of this start."""
    at_s: float = 0.0
    """When it was there, by the driver's monotonic clock."""
    trained_s: float = 0.0
    """Seconds of training up to there, by the workers' clocks."""


_MOST = 1024
"""Sums that are kept. At five records a second all of the last 100 s are; older ones lie apart."""


class Sums:
    """The sums at the records since the newest checkpoint, oldest first.

    Without checkpoints there are ever more of them: then every other one of the older half goes.

    Args:
        first: where the start begins.
    """

    def __init__(self, first: Sum) -> None:
        self._notes = [first]

    def add(self, note: Sum) -> None:
        """Note a record; of those at its round or beyond, the center went back."""
        at = bisect.bisect_left(self._notes, note.round, key=lambda known: known.round)
        self._notes[at:] = [note]
        if len(self._notes) > _MOST:
            half = _MOST // 2
            self._notes[:half] = self._notes[:half:2]  # the oldest, where this start began, stays

    @property
    def newest(self) -> Sum:
        """That of the newest record."""
        return self._notes[-1]

    def before(self, round: int) -> Sum:
        """Return the newest of an earlier round, or the oldest that is known."""
        at = bisect.bisect_left(self._notes, round, key=lambda known: known.round)
        return self._notes[max(at - 1, 0)]

    def up_to(self, round: int) -> Sum:
        """Return that of a round, or the newest of an earlier one, or the oldest that is known."""
        at = bisect.bisect_right(self._notes, round, key=lambda known: known.round)
        return self._notes[max(at - 1, 0)]

    def pop_sum(self, round: int) -> Sum:
        """Return the sum of a checkpoint's round, or the newest before it; forget what is older."""
        taken = self.up_to(round)
        self._notes = self._notes[self._notes.index(taken) :]
        return taken


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Totals of all starts of a run, up to some round."""

    evaluations: tuple[dict[str, Any], ...] = ()
    """The scores of the center, oldest first: round, samples, seconds, and each metric."""
    longest_pause_s: float = 0.0
    """The longest time from one generation to the next; none counts from one start to another."""
    staleness_sum: float = 0.0
    """Of all rounds."""
    period_sum: float = 0.0
    """Local steps of a worker before each exchange, over all rounds."""
    time_parts: dict[str, float] = field(default_factory=dict)
    """Mean seconds per worker by part, summed over the starts."""
    faults_fired: tuple[str, ...] = ()
    """Sentences."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, storage: Storage) -> Totals:
        """Return the totals in a checkpoint, with the scores that came after it was written.

        Args:
            checkpoint: where the run goes on; one of an older raydl carries nothing.
            storage: the run's folder.
        """
        state = dict(checkpoint.state.get("totals", {}))
        # Not all are in result.json: a start that was killed wrote none.
        found = (*_in_result(storage), *state.get("evaluations", ()))
        by_round = {e["round"]: e for e in found if e["samples"] <= checkpoint.progress.num_samples}
        state["evaluations"] = tuple(by_round[round] for round in sorted(by_round))
        return cls(**state)

    @property
    def center_accuracy(self) -> float | None:
        """The newest accuracy of the center; None: not known."""
        return self.evaluations[-1].get("accuracy") if self.evaluations else None

    def is_scored(self, round: int) -> bool:
        """Whether the center of a round has a score."""
        return any(score["round"] == round for score in self.evaluations)

    def to_state(self) -> dict[str, Any]:
        """Return the totals as a checkpoint can hold them."""
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
    ) -> Totals:
        """Return the totals with those of one more start.

        Args:
            evaluations: all of the run, those of earlier starts too: some may have been taken
                back.
            longest_pause_s: of the new start, as are the others.
            staleness_sum: of its rounds.
            period_sum: of its rounds.
            time_parts: mean seconds per worker.
            faults_fired: sentences.
        """
        before = self.time_parts
        return Totals(
            evaluations=tuple(evaluations),
            longest_pause_s=max(self.longest_pause_s, longest_pause_s),
            staleness_sum=self.staleness_sum + staleness_sum,
            period_sum=self.period_sum + period_sum,
            time_parts={part: s + before.get(part, 0.0) for part, s in time_parts.items()},
            faults_fired=(*self.faults_fired, *faults_fired),
        )

    def figures(self, num_rounds: int) -> dict[str, Any]:
        """Return their part of ``result.json``, after so many rounds."""
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
        }


def speed_figures(num_samples: int, seconds: float) -> dict[str, Any]:
    """Return samples, seconds of training, and samples per second; None: not known."""
    speed = num_samples / seconds if seconds > 0 else None
    return {"samples": num_samples, "seconds": seconds, "samples_per_s": speed}


def _in_result(storage: Storage) -> list[dict[str, Any]]:
    """Return the scores in ``result.json``.

    The last center of a start is often scored when its checkpoint is written already.
    """
    try:
        told = json.loads(storage.read_bytes("result.json"))["evaluations"]
        return [score for score in told if {"round", "samples"} <= score.keys()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none came to its end
        return []
