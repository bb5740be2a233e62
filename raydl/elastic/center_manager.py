"""Tracks the snapshots of the center, and has them scored and written."""

from __future__ import annotations

from collections.abc import Callable

from raydl.config import TrainConfig
from raydl.core.scores import Evaluated
from raydl.core.worker_group import Collected, Published, WorkerGroup
from raydl.elastic.generation import Generation
from raydl.elastic.worker_registry import Copy
from raydl.errors import StalledError

_CENTER_S = 300.0
"""The longest wait for the round that training continues from, in seconds: the center may have to
restart."""

_NUM_SCORED = 128
"""The number of scored rounds that are remembered."""


class CenterManager:
    """The snapshots of the center, the evaluations and the checkpoints of a run.

    Args:
        worker_group: the processes.
        config: the run's settings.
        first_round: the round that the center starts from.
        is_first_scored: whether the center of that round needs no score.
        clock: seconds, rising.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        config: TrainConfig,
        *,
        first_round: int,
        is_first_scored: bool = True,
        clock: Callable[[], float],
    ) -> None:
        self.published: tuple[int, ...] = ()
        """Rounds that the center holds; empty before it has started."""
        self._num_changes = 0
        self.newest_generation = 0
        """The generation that made the center's newest snapshot; 0: the center itself did."""
        self._generation = 0
        self._was_up = False
        self.is_complete = True
        """Whether nothing is left to train, as far as the center knows."""
        self.is_lost = False
        """Whether the center has to be restarted."""
        self.is_new = False
        """Whether it was restarted since the newest generation formed."""
        self.checkpoint_times = CheckpointTimes(config, clock())
        self._worker_group = worker_group
        self._is_by_evaluator = not config.evaluation.is_by_workers
        self._clock = clock
        self._publishing: Copy | None = None
        self._not_to_score = -1
        """The round that was last sent to the center for the next generation, not for a score."""
        self._lacking_since: float | None = None
        self.collecting_from: frozenset[str] = frozenset()
        """Workers whose kept states are being collected for a checkpoint."""
        self._evaluating = self._evaluated = first_round - (not is_first_scored)
        self._scored: set[int] = set()
        self._num_scored = 0
        self.progress_at = clock()
        """When a score, a part of one, or states last arrived."""
        self.num_lost_scores = 0
        """Scores that were given up since the last one arrived."""
        self._lost_round = -1
        self._last_collected = self._collected_before = -1
        self.writing: frozenset[str] = frozenset()
        """Workers whose states of a collected round are being written."""

    # snapshots

    def note_published(self, published: Published) -> None:
        """Record what the center holds, unless the report is from before the newest generation."""
        self._was_up = True
        if 0 < published.generation < self._generation:
            return
        self.published, self._num_changes = published.rounds, published.num_changes
        self.newest_generation = published.newest_generation
        self.is_complete = published.is_complete

    @property
    def newest(self) -> int:
        """The newest round that the center holds; -1: it is starting."""
        return max(self.published, default=-1)

    def holds(self, copy: Copy) -> bool:
        """Whether the center has the round of a copy, with all the claims that the copy has.

        A copy does not replace a snapshot of a later generation.
        """
        if copy.round not in self.published:
            return False
        has_more_claims = copy.num_changes > self._num_changes and copy.round == self.newest
        return not has_more_claims or copy.generation < self.newest_generation

    def note_presence(self, is_here: bool) -> bool:
        """Note whether the center holds the round that training continues from, and return it.

        Raises:
            StalledError: if the center has lacked that round for too long.
        """
        if is_here:
            self._lacking_since = None
            return True
        now = self._clock()
        if self._lacking_since is None:
            self._lacking_since = now
        if now - self._lacking_since > _CENTER_S:
            what = "receive its newest copy" if self._was_up else "start"
            raise StalledError(
                f"the center did not {what} within {_CENTER_S:.0f} s; the same command with "
                f"--resume resumes from the newest checkpoint"
            )
        return False

    def publish(self, copy: Copy) -> None:
        """Have the center adopt the copy of a worker that has left its loop, once.

        A late worker may have a copy with more claims while another copy is being sent: that one is
        requested as well.
        """
        if copy != self._publishing:
            self._publishing, self._not_to_score = copy, copy.round
            self._worker_group.publish(copy.worker_id)

    def formed(self, generation: int, round: int) -> None:
        """Note that a generation has formed at the current center.

        Args:
            generation: its number.
            round: the round that it starts from; the center drops later ones.
        """
        self._generation = generation
        self.published = tuple(r for r in self.published if r <= round)
        if round < self._not_to_score:  # it will be trained again
            self._not_to_score = -1
        self.is_new = False
        self.checkpoint_times.voted = False  # a vote ends with its generation

    def rebuild(self, copy: Copy | None) -> str:
        """Restart the center; return a sentence about its source.

        Args:
            copy: the copy that it should start from; None: there is none, or it will adopt one.
        """
        self._lost_round = max(self.newest, self._evaluating)
        self.is_lost, self.is_new, self.published = False, True, ()
        if copy is not None and copy.round < self._last_collected:
            copy = None  # the newest checkpoint is newer
        optimizer = self._worker_group.rebuild_center(copy.worker_id if copy else None)
        for task in ("publication", "checkpoint", "evaluation"):
            self.gave_up(task)
        if copy is None:
            return "the center restarts from the newest checkpoint, or from where this run began"
        self._not_to_score = copy.round
        sentence = (
            f"the center is rebuilt from the last copy of {copy.worker_id}, of round {copy.round}"
        )
        return f"{sentence}; {optimizer}" if optimizer else sentence

    def restart_from_newest(self) -> None:
        """Note that training continues from the newest round that the center holds.

        Later rounds are lost; new ones will have the same numbers.
        """
        self._publishing = None
        if self._evaluated > self.newest:
            self._scored = {round for round in self._scored if round <= self.newest}
            is_scored = self.newest in self._scored
            self._evaluating = self._evaluated = self.newest if is_scored else self.newest - 1
        if self._last_collected > self.newest:
            self._last_collected = self.newest - 1

    def note_lost(self, name: str) -> None:
        """Note that a process was lost, and with it the results requested from it."""
        if self._publishing is not None and name == self._publishing.worker_id:
            self.gave_up("publication")
        if name in self.collecting_from:
            self.gave_up("checkpoint")

    def gave_up(self, task: str) -> None:
        """Note that a requested result will not arrive."""
        match task:
            case "checkpoint":
                self.checkpoint_times.give_up()
                self.collecting_from = frozenset()
            case "evaluation":
                self._evaluating = self._evaluated
            case "publication":
                self._publishing = None

    # scores

    def evaluate_newest(self, *, is_end: bool) -> None:
        """Have the newest snapshot scored, unless a score is under way or exists.

        A change of the workers and a restart of the center make a snapshot, too, which is scored
        only if it is the last one: the evaluator would take CPU time from workers that have just
        lost some. If the workers score, the evaluator does it only at the end, if they could not.

        Args:
            is_end: whether the training has ended.
        """
        is_due = is_end or (self._is_by_evaluator and self.newest != self._not_to_score)
        is_idle = self._evaluating == self._evaluated
        if is_due and is_idle and self.newest > self._evaluated:
            self._evaluating = self.newest
            self._worker_group.evaluate(self.newest)

    def note_score(self, evaluated: Evaluated) -> bool:
        """Record the score of a round: the requested one, or a newer one.

        Returns:
            Whether it counts. It does not if the round was scored before, or was lost with the
            center.
        """
        round = evaluated.progress.round
        is_of_lost = self.newest < round <= self._lost_round
        if is_of_lost or round in self._scored:
            self.gave_up("evaluation")
            return False
        self.progress_at, self.num_lost_scores = self._clock(), 0
        self._scored.add(round)
        if len(self._scored) > _NUM_SCORED:  # at worst an old round is scored again
            self._scored.remove(min(self._scored))
        self._evaluated = max(self._evaluated, round)  # an earlier score may arrive later
        self._evaluating = self._evaluated
        return True

    def note_scoring(self, num_samples: int) -> None:
        """Record how many test samples the evaluator has scored."""
        if num_samples != self._num_scored:
            self._num_scored, self.progress_at = num_samples, self._clock()

    def is_scored(self, round: int) -> bool:
        """Whether a round or a newer one was scored."""
        return self._evaluated >= round

    # checkpoints

    def keep_checkpoints(self, run: Generation, *, is_writing: bool) -> None:
        """Vote for a checkpoint when one is due, and collect it once all members keep their states.

        Rounds before the generation began do not count: a member may keep one from an earlier vote
        that led to no checkpoint.
        """
        if self.checkpoint_times.due(self._clock()) and not is_writing:
            self.checkpoint_times.voted = True
            run.note_vote()
            self._worker_group.vote(run.membership.generation, checkpoint=1.0)
        if self.checkpoint_times.voted and not self.checkpoint_times.collecting:
            before = max(self._last_collected, run.began_at_round)
            ready = {r for r in run.kept_everywhere() & set(self.published) if r > before}
            if ready:
                self._collect(max(ready), run.present)

    def collect(self, run: Generation, round: int) -> None:
        """Collect the states of all members that have left their loops at a round, once."""
        if not self.checkpoint_times.collecting and not self.is_collected(round):
            # By rank: a resumed run assigns ranks in this order.
            self._collect(round, tuple(w for w in run.present if w in run.ended))

    def _collect(self, round: int, worker_ids: tuple[str, ...]) -> None:
        self.checkpoint_times.collecting = True
        self.collecting_from = frozenset(worker_ids)
        self._worker_group.collect(round, worker_ids)

    def note_collected(self, collected: Collected) -> None:
        """Note that the states of a round were collected."""
        self.progress_at = self._clock()
        self._collected_before = self._last_collected
        self._last_collected = collected.snapshot.progress.round
        self.writing |= self.collecting_from
        self.collecting_from = frozenset()
        self.checkpoint_times.done(self._clock(), int(collected.snapshot.progress.epoch))

    def note_states_lost(self, round: int) -> None:
        """Note that a collected round cannot be written, since a worker was lost."""
        if round == self._last_collected:
            self._last_collected = self._collected_before
            self.checkpoint_times.take_back()

    def is_collected(self, round: int) -> bool:
        """Whether the states of a round or a newer one were collected."""
        return self._last_collected >= round


class CheckpointTimes:
    """Decides when a checkpoint is due; one at a time."""

    def __init__(self, config: TrainConfig, now: float) -> None:
        self._config = config.checkpoint
        self._last_s = now
        self._last_epoch = 0
        self.epoch = 0
        """Completed epochs."""
        self._before = now, 0
        self.voted = False
        self.collecting = False

    def due(self, now: float) -> bool:
        """Whether to vote for a checkpoint now."""
        if self.voted or self.collecting:
            return False
        every_s, every_epochs = self._config.every_s, self._config.every_epochs
        by_time = every_s is not None and now - self._last_s >= every_s
        by_epoch = every_epochs is not None and self.epoch - self._last_epoch >= every_epochs
        return by_time or by_epoch

    def give_up(self) -> None:
        """Note that a checkpoint was given up; another vote may follow."""
        self.voted = self.collecting = False

    def done(self, now: float, epoch: int) -> None:
        """Note that a checkpoint was collected."""
        self._before = self._last_s, self._last_epoch
        self._last_s, self._last_epoch = now, epoch
        self.voted = self.collecting = False

    def take_back(self) -> None:
        """Note that the checkpoint collected last will not be written."""
        self._last_s, self._last_epoch = self._before
