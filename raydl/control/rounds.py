"""The controller of synchronous methods: all train, or all stop for a moment and regroup."""

from __future__ import annotations

from raydl.control.controller import Controller
from raydl.control.generation import Generation
from raydl.control.state import State
from raydl.control.worker_registry import Copy
from raydl.membership import Membership
from raydl.stragglers import late_workers

_ANSWER_S = 0.75
"""The least time that a survivor has to come out of an abandoned exchange, in seconds."""


class SyncController(Controller):
    """Lets all leave at the same round when someone joins or leaves.

    A vote rides on the exchange, so nobody waits for it. When a worker is lost in an exchange
    the others can not vote: they are told to abandon it, and go on from the round that the
    furthest of them has completed.
    """

    def _train_on(self, run: Generation) -> None:
        if run.lost or run.is_broken:
            self._abandon(run)
        elif not run.at_work:
            self._after_generation(run)
        elif not run.ended and not self._leave_out_late(run):
            self._regroup_if_wanted(run)

    def _regroup_if_wanted(self, run: Generation) -> None:
        if self._center_manager.is_lost:
            # Training goes on: workers hold the center, and meet where it was when they formed.
            self._center_manager.rebuild(None)
            self._say("the center is started again, and takes in the workers' copy")
        if not self._center_manager.published:  # a new center is on its way: nobody could meet now
            return
        membership, reason = self._worker_pool.decide(run.membership)
        if membership == run.membership:
            if not self._center_manager.is_new:
                return
            reason = "the center is back"
        elif not self._center_manager.is_new and self._waits_for_newcomer(run, membership):
            return
        self._say(f"{reason}: regrouping after this round")
        self._worker_group.vote(run.membership.generation, regroup=1.0)
        self._enter(State.REGROUPING)

    def _waits_for_newcomer(self, run: Generation, membership: Membership | None) -> bool:
        """Whether nobody leaves, somebody joins, and its replica is on its way."""
        if membership is None or not set(run.membership.worker_ids) < set(membership.worker_ids):
            return False
        return self._worker_pool.awaits_legacy(membership.worker_ids)

    def _regroup(self) -> None:
        run = self._run
        assert run is not None
        if run.lost or run.is_broken:
            self._abandon(run)
        elif not run.at_work:
            self._after_generation(run)
        elif not run.ended:
            self._leave_out_late(run)

    def _leave_out_late(self, run: Generation) -> bool:
        """Go on without workers that the others wait for beyond all that is usual."""
        elastic, p = self._config.elastic, len(run.at_work)
        if not elastic.leave_out_slow or p == 1:
            return False
        late = late_workers(
            self.worker_registry.waiting_s(run.at_work, generation=run.membership.generation),
            grace_s=self.stragglers.grace_s(),
            quorum=min(1.0, max(elastic.quorum, self._config.scaling.min_workers / p)),
        )
        if late:
            self._leave_out(run, late)
            self._abandon(run)
        return bool(late)

    def _answer_s(self) -> float:
        return max(_ANSWER_S, min(self.stragglers.grace_s(), self._config.exchange.timeout_s))

    def _round_to_go_on_from(self, run: Generation | None, copy: Copy | None) -> int | None:
        # Workers that are there may be behind, if others have gone that the center knew; and one
        # that was left out may have a round that the others trained anew, without it.
        is_of_now = copy is not None and copy.generation >= self._center_manager.newest_generation
        at = copy.round if copy and is_of_now else -1
        return at if at >= self._round else max(at, self._center_manager.newest)
