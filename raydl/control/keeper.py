"""What the center holds, and what of it is to be scored and written."""

from __future__ import annotations

from collections.abc import Callable

from raydl.config import TrainConfig
from raydl.control.checkpoint_times import CheckpointTimes
from raydl.control.generation import Generation
from raydl.crew import Collected, Crew, Evaluated, Published, RunEnded


class CenterKeeper:
    """The snapshots of the center, the evaluations and the checkpoints of a run.

    Args:
        crew: the processes.
        config: the run's settings.
        first_round: the round whose snapshot the center holds.
        clock: seconds, rising.
    """

    def __init__(
        self, crew: Crew, config: TrainConfig, *, first_round: int, clock: Callable[[], float]
    ) -> None:
        self.published: tuple[int, ...] = (first_round,)
        self.is_complete = True
        self.is_lost = False
        """Whether it has to be started again."""
        self.times = CheckpointTimes(config, clock())
        self._crew = crew
        self._clock = clock
        self._publishing = ""
        self._evaluating = self._evaluated = first_round
        self._last_collected = -1

    # snapshots

    def take_published(self, published: Published) -> None:
        """Note what the center holds."""
        self.published, self.is_complete = published.rounds, published.is_complete

    @property
    def newest(self) -> int:
        """The newest round that the center holds; -1: it is on its way."""
        return max(self.published, default=-1)

    def publish(self, end: RunEnded | None) -> None:
        """Let the center take in the copy of a worker that has left its loop, once."""
        if end is not None and not self._publishing:
            self._publishing = end.worker_id
            self._crew.publish(end.worker_id)

    def published_all(self) -> None:
        """Note that nothing more needs to be taken in."""
        self._publishing = ""

    def rebuild(self, end: RunEnded | None) -> str:
        """Start the center again; return a sentence that says from what.

        Args:
            end: how the worker ended whose copy it should start from; None: a copy will come.
        """
        self.is_lost, self.published = False, ()
        source = end.worker_id if end is not None and end.round >= 0 else None
        self._crew.rebuild_center(source)
        self.gave_up("publication")
        self.gave_up("checkpoint")
        self.gave_up("evaluation")
        if end is None or source is None:
            return "the center is started again, and takes in the workers' copy"
        return f"the center is rebuilt from what {source} saw last, of round {end.round}"

    def gave_up(self, task: str) -> None:
        """Note that something which was asked for will not come."""
        match task:
            case "checkpoint":
                self.times.voted = self.times.collecting = False
            case "evaluation":
                self._evaluating = self._evaluated
            case "publication":
                self._publishing = ""

    # scores

    def evaluate_newest(self) -> None:
        """Keep the evaluator busy with the newest snapshot it has not seen."""
        is_idle = self._evaluating == self._evaluated
        if is_idle and self.newest > self._evaluated:
            self._evaluating = self.newest
            self._crew.evaluate(self.newest)

    def take_score(self, evaluated: Evaluated) -> None:
        """Note that a round was scored: that which was asked for, or a newer one."""
        self._evaluated = self._evaluating = evaluated.round

    def is_scored(self, round: int) -> bool:
        """Whether a round, or a newer one, was scored."""
        return self._evaluated >= round

    # checkpoints

    def keep_checkpoints(self, run: Generation, *, is_writing: bool) -> None:
        """Vote for a checkpoint when one is due, and collect it when all have kept theirs."""
        if self.times.due(self._clock()) and not is_writing:
            self.times.voted = True
            run.note_vote()
            self._crew.vote(run.membership.generation, checkpoint=1.0)
        if self.times.voted and not self.times.collecting:
            newer = {r for r in run.kept_everywhere() if r > self._last_collected}
            ready = newer & set(self.published)
            if ready:
                self._collect(max(ready), run.present)

    def collect(self, run: Generation, round: int) -> None:
        """Gather the states of all who have left their loops at a round, once."""
        if not self.times.collecting and not self.is_collected(round):
            self._collect(round, tuple(run.ended))

    def _collect(self, round: int, worker_ids: tuple[str, ...]) -> None:
        self.times.collecting = True
        self._crew.collect(round, worker_ids)

    def take_collected(self, collected: Collected) -> None:
        """Note that all states of a round are here."""
        self._last_collected = collected.snapshot.round
        self.times.done(self._clock(), collected.snapshot.epoch)

    def is_collected(self, round: int) -> bool:
        """Whether the states of a round, or of a newer one, are here."""
        return self._last_collected >= round
