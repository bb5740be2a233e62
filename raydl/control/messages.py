"""The controller of methods with messages: workers join and leave while the others train."""

from __future__ import annotations

from raydl.control.controller import CAUSE_S, Controller
from raydl.control.generation import Generation
from raydl.control.state import State
from raydl.control.worker_registry import Copy, Phase
from raydl.membership import Membership
from raydl.reports import Outcome


class AsyncController(Controller):
    """Changes the membership at the center alone; who stays does not notice.

    One change at a time: until the center knows it, nothing else is decided.
    """

    _is_regroup_voted = False

    def _form(self, membership: Membership, reason: str) -> None:
        self._known.is_changing = True
        self._is_regroup_voted = False
        super()._form(membership, reason)

    def _train(self) -> None:
        if self._center_manager.is_lost or not self._known.is_changing:
            super()._train()

    @property
    def _center_knows_all(self) -> bool:
        return not self._known.is_changing

    def _train_on(self, run: Generation) -> None:
        if self._center_manager.is_lost:
            self._abandon(run)
            return
        self._drop_those_out(run)
        if self._known.error is not None:
            self._stop_on_error(run)
            return
        if not run.at_work and run.is_broken:  # news of the center may follow
            return
        if not run.at_work and not run.lost:
            self._after_generation(run)
            return
        membership, reason = self._worker_pool.decide(run.membership)
        if membership is not None and run.lost:
            self._count_out(run)
            return
        if membership is None:
            self._say(f"{reason}: all leave after their next exchange")
            self._enter(State.REGROUPING)
            return
        self._dismiss_leavers(run)
        is_new = membership.worker_ids != run.membership.worker_ids
        if is_new and not self._waits_for_leaver(run, membership):
            self._change(run, membership, reason)

    def _stop_on_error(self, run: Generation) -> None:
        """Wait until the others have left by vote, and the center has kept where they were."""
        if run.lost:
            self._count_out(run)
        elif not run.at_work and self._known.num_news > 1:
            self._after_generation(run)

    def _drop_those_out(self, run: Generation) -> None:
        """Count out those whose loop has ended while the run goes on."""
        # Else it may be the center that went away.
        is_explained = self._known.error is not None or self._clock() - run.broken_at > CAUSE_S
        out = [
            end
            for end in run.ended.values()
            if end.outcome is Outcome.LEFT
            or (end.outcome is Outcome.BROKEN and (is_explained or end.error is not None))
        ]
        for end in out:
            worker_id = end.worker_id
            if end.outcome is Outcome.BROKEN:
                if end.error is None and self._known.error is None:
                    self._say(f"{worker_id} left its exchange: {end.problem}")
                    self._worker_pool.count_loss(worker_id, end.problem)
                self.worker_registry.stand_by(worker_id, "diverged" if end.error else "")
            run.lose(worker_id)

    def _count_out(self, run: Generation) -> None:
        """Let the center wait for nobody who is gone; who comes, comes with the next change."""
        gone = [w for w in run.membership.worker_ids if w in run.lost]
        reason = ", ".join(f"{w} {self.worker_registry.cause_of(w)}" for w in gone)
        self._change(run, Membership(0, run.present), reason)

    def _dismiss_leavers(self, run: Generation) -> None:
        for worker_id in self.worker_registry.named(Phase.LEAVING):
            entry = self.worker_registry[worker_id]
            if worker_id in run.at_work and not entry.is_dismissed:
                entry.is_dismissed = True
                self._worker_group.dismiss(worker_id)

    def _waits_for_leaver(self, run: Generation, membership: Membership) -> bool:
        """Whether somebody is on the way to the exchange after which it leaves, or its state."""
        is_leaving = any(self.worker_registry[w].phase is Phase.LEAVING for w in run.at_work)
        return is_leaving or self._worker_pool.awaits_legacy(membership.worker_ids)

    def _change(self, run: Generation, membership: Membership, reason: str) -> None:
        membership = self._number(membership, reason)
        self._known.is_changing = True
        new = tuple(w for w in membership.worker_ids if w not in run.membership)
        self._worker_group.change(membership, self._worker_pool.states_for(new))
        run.change(membership)
        self.worker_registry.formed(membership)
        if not self._center_manager.times.collecting:  # who comes has not kept what others have
            self._center_manager.times.voted = False

    def _regroup(self) -> None:
        run = self._run
        assert run is not None
        if self._center_manager.is_lost:
            self._abandon(run)
        elif not self._known.is_changing:
            self._regroup_on(run)

    def _regroup_on(self, run: Generation) -> None:
        self._drop_those_out(run)
        if run.lost:
            self._count_out(run)
        elif not run.at_work and run.is_broken:
            return  # news of the center may follow
        elif not self._is_regroup_voted:
            self._is_regroup_voted = True
            self._worker_group.vote(run.membership.generation, regroup=1.0)
        elif not run.at_work:
            self._after_generation(run)

    def _answer_s(self) -> float:
        return self._config.elastic.lease_s  # nobody waits but for the center

    def _round_to_go_on_from(self, run: Generation | None, copy: Copy | None) -> int | None:
        # The center makes the last snapshot by itself; a new one has what it has.
        end, newest = run.freshest() if run else None, self._center_manager.newest
        is_there = end is None or self._center_manager.is_new or newest >= end.round
        return newest if is_there else None
