"""Keeps track of what the center holds, and has it scored and written."""

from __future__ import annotations

from collections.abc import Callable

from raydl.config import TrainConfig
from raydl.core.worker_group import Collected, Evaluated, Published, WorkerGroup
from raydl.elastic.generation import Generation
from raydl.elastic.worker_registry import Copy
from raydl.errors import StalledError

_CENTER_S = 300.0
"""The longest wait for the center to hold what all go on from: it may have to start again."""

_NUM_SCORED = 128
"""Rounds that are remembered as scored, the newest."""


class CenterManager:
    """The snapshots of the center, the evaluations and the checkpoints of a run.

    Args:
        worker_group: the processes.
        config: the run's settings.
        first_round: the round that the center starts from.
        clock: seconds, rising.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        config: TrainConfig,
        *,
        first_round: int,
        clock: Callable[[], float],
    ) -> None:
        self.published: tuple[int, ...] = ()
        """Rounds that the center holds; none before it is up."""
        self._num_changes = 0
        self.newest_generation = 0
        """The one that made the newest snapshot there; 0: the center itself did."""
        self._generation = 0
        self._was_up = False
        self.is_complete = True
        self.is_lost = False
        """Whether it has to be started again."""
        self.is_new = False
        """Whether it was started again since the newest generation has formed."""
        self.times = CheckpointTimes(config, clock())
        self._worker_group = worker_group
        self._clock = clock
        self._publishing: Copy | None = None
        self._lacking_since: float | None = None
        self.giving: frozenset[str] = frozenset()
        """Workers that are asked for what they kept for a checkpoint."""
        self._evaluating = self._evaluated = first_round
        self._scored: set[int] = set()
        self._num_scored = 0
        self.heard_at = clock()
        """When a score, a part of one, or states last came."""
        self.num_lost_scores = 0
        """Scores that were given up since one came."""
        self._lost_round = -1
        self._last_collected = self._collected_before = -1
        self.writing: frozenset[str] = frozenset()
        """Workers whose states of a collected round are being written."""

    # snapshots

    def note_published(self, published: Published) -> None:
        """Note what the center holds, unless that was before the newest generation began there."""
        self._was_up = True
        if 0 < published.generation < self._generation:
            return
        self.published, self._num_changes = published.rounds, published.num_changes
        self.newest_generation = published.newest_generation
        self.is_complete = published.is_complete

    @property
    def newest(self) -> int:
        """The newest round that the center holds; -1: it is on its way."""
        return max(self.published, default=-1)

    def holds(self, copy: Copy) -> bool:
        """Whether the center has all that a copy knows: its round, and what is claimed in it.

        A snapshot of a later generation than the copy's is none that the copy could replace.
        """
        is_of_before = copy.generation < self.newest_generation
        knows_more = copy.num_changes > self._num_changes and not is_of_before
        is_older = copy.round == self.newest and knows_more
        return copy.round in self.published and not is_older

    def note_presence(self, is_here: bool) -> bool:
        """Note whether the center holds what all go on from, and return it.

        Raises:
            StalledError: for too long it has not.
        """
        if is_here:
            self._lacking_since = None
            return True
        now = self._clock()
        if self._lacking_since is None:
            self._lacking_since = now
        if now - self._lacking_since > _CENTER_S:
            what = "get the newest copy of itself" if self._was_up else "start"
            raise StalledError(
                f"the center did not {what} within {_CENTER_S:.0f} s; the same command with "
                f"--resume goes on from the newest checkpoint"
            )
        return False

    def publish(self, copy: Copy) -> None:
        """Let the center take in the copy of a worker that has left its loop, once.

        A copy that knows more may come while another is on its way, from who was late: it is
        asked for as well.
        """
        if copy != self._publishing:
            self._publishing = copy
            self._worker_group.publish(copy.worker_id)

    def formed(self, generation: int, round: int) -> None:
        """Note that a generation has formed: it meets where the center is now.

        Args:
            generation: its number.
            round: what it starts from; the center drops what lies beyond.
        """
        self._generation = generation
        self.published = tuple(r for r in self.published if r <= round)
        self.is_new = False
        self.times.voted = False  # votes end with their generation

    def rebuild(self, copy: Copy | None) -> str:
        """Start the center again; return a sentence that says from what.

        Args:
            copy: what it should start from; None: nobody has any, or one will come.
        """
        self._lost_round = max(self.newest, self._evaluating)
        self.is_lost, self.is_new, self.published = False, True, ()
        if copy is not None and copy.round < self._last_collected:
            copy = None  # the newest checkpoint knows more
        optimizer = self._worker_group.rebuild_center(copy.worker_id if copy else None)
        for task in ("publication", "checkpoint", "evaluation"):
            self.gave_up(task)
        if copy is None:
            return "the center is started again, from the newest checkpoint or where this run began"
        sentence = (
            f"the center is rebuilt from what {copy.worker_id} saw last, of round {copy.round}"
        )
        return f"{sentence}; {optimizer}" if optimizer else sentence

    def go_on(self) -> None:
        """Note that all go on from what the center holds now.

        Later rounds are lost: new ones will have the same numbers.
        """
        self._publishing = None
        if self._evaluated > self.newest:
            self._scored = {round for round in self._scored if round <= self.newest}
            is_scored = self.newest in self._scored
            self._evaluating = self._evaluated = self.newest if is_scored else self.newest - 1
        if self._last_collected > self.newest:
            self._last_collected = self.newest - 1

    def lost(self, name: str) -> None:
        """Note that a process has gone: what it was to give will not come."""
        if self._publishing is not None and name == self._publishing.worker_id:
            self.gave_up("publication")
        if name in self.giving:
            self.gave_up("checkpoint")

    def gave_up(self, task: str) -> None:
        """Note that something which was asked for will not come."""
        match task:
            case "checkpoint":
                self.times.give_up()
                self.giving = frozenset()
            case "evaluation":
                self._evaluating = self._evaluated
            case "publication":
                self._publishing = None

    # scores

    def evaluate_newest(self) -> None:
        """Keep the evaluator busy with the newest snapshot it has not seen."""
        is_idle = self._evaluating == self._evaluated
        if is_idle and self.newest > self._evaluated:
            self._evaluating = self.newest
            self._worker_group.evaluate(self.newest)

    def note_score(self, evaluated: Evaluated) -> bool:
        """Note that a round was scored: that which was asked for, or a newer one.

        Returns:
            Whether it counts: not if the round was scored before, or went with a center that
            was lost.
        """
        round = evaluated.progress.round
        is_of_lost = self.newest < round <= self._lost_round
        if is_of_lost or round in self._scored:
            self.gave_up("evaluation")
            return False
        self.heard_at, self.num_lost_scores = self._clock(), 0
        self._scored.add(round)
        if len(self._scored) > _NUM_SCORED:  # one of so long ago is scored again at worst
            self._scored.remove(min(self._scored))
        self._evaluated = self._evaluating = round
        return True

    def note_scoring(self, num_samples: int) -> None:
        """Note how much of the test set the evaluator has scored."""
        if num_samples != self._num_scored:
            self._num_scored, self.heard_at = num_samples, self._clock()

    def is_scored(self, round: int) -> bool:
        """Whether a round, or a newer one, was scored."""
        return self._evaluated >= round

    # checkpoints

    def keep_checkpoints(self, run: Generation, *, is_writing: bool) -> None:
        """Vote for a checkpoint when one is due, and collect it when all have kept theirs.

        Rounds before the generation began do not count: somebody may have kept one for a vote
        that came to nothing.
        """
        if self.times.due(self._clock()) and not is_writing:
            self.times.voted = True
            run.note_vote()
            self._worker_group.vote(run.membership.generation, checkpoint=1.0)
        if self.times.voted and not self.times.collecting:
            before = max(self._last_collected, run.began_at_round)
            newer = {r for r in run.kept_everywhere() if r > before}
            ready = newer & set(self.published)
            if ready:
                self._collect(max(ready), run.present)

    def collect(self, run: Generation, round: int) -> None:
        """Gather the states of all who have left their loops at a round, once."""
        if not self.times.collecting and not self.is_collected(round):
            # By rank, which is the order that a resumed run takes.
            self._collect(round, tuple(w for w in run.present if w in run.ended))

    def _collect(self, round: int, worker_ids: tuple[str, ...]) -> None:
        self.times.collecting = True
        self.giving = frozenset(worker_ids)
        self._worker_group.collect(round, worker_ids)

    def note_collected(self, collected: Collected) -> None:
        """Note that all states of a round are here."""
        self.heard_at = self._clock()
        self._collected_before = self._last_collected
        self._last_collected = collected.snapshot.progress.round
        self.writing |= self.giving
        self.giving = frozenset()
        self.times.done(self._clock(), int(collected.snapshot.progress.epoch))

    def wrote(self) -> None:
        """Note that nothing is being written: nobody's state is needed any more."""
        self.writing = frozenset()

    def lost_states(self, round: int) -> None:
        """Note that a round which was collected will not be written: a worker has gone."""
        if round == self._last_collected:
            self._last_collected = self._collected_before
            self.times.take_back()

    def is_collected(self, round: int) -> bool:
        """Whether the states of a round, or of a newer one, are here."""
        return self._last_collected >= round


class CheckpointTimes:
    """When a checkpoint is due; one at a time."""

    def __init__(self, config: TrainConfig, now: float) -> None:
        self._config = config.checkpoint
        self._last_s = now
        self._last_epoch = self._epoch = 0
        self._before = now, 0
        self.voted = False
        self.collecting = False

    def saw_epoch(self, epoch: int) -> None:
        """Note how many epochs are complete."""
        self._epoch = epoch

    def due(self, now: float) -> bool:
        """Whether to vote for a checkpoint now."""
        if self.voted or self.collecting:
            return False
        every_s, every_epochs = self._config.every_s, self._config.every_epochs
        by_time = every_s is not None and now - self._last_s >= every_s
        by_epoch = every_epochs is not None and self._epoch - self._last_epoch >= every_epochs
        return by_time or by_epoch

    def give_up(self) -> None:
        """Note that a checkpoint will not come; the next vote begins anew."""
        self.voted = self.collecting = False

    def done(self, now: float, epoch: int) -> None:
        """Note that a checkpoint was collected."""
        self._before = self._last_s, self._last_epoch
        self._last_s, self._last_epoch = now, epoch
        self.voted = self.collecting = False

    def take_back(self) -> None:
        """Note that the checkpoint which was collected last will not be written."""
        self._last_s, self._last_epoch = self._before
