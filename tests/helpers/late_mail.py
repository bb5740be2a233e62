"""Simulated worker groups whose events arrive late, out of order and twice."""

from __future__ import annotations

import dataclasses
import random

from simulations import POLL_S, SimWorker

from raydl.core.worker_group import GaveUp, Published, Reported


def late(kind):
    """Return a simulated group of a kind whose events may be up to 2 s late, and come again."""

    class Late(kind):
        def __init__(self, seed, **more):
            super().__init__(seed, **more)
            self.mail = random.Random(f"late {seed}")
            self.held = []
            self.num_events = 0

        def poll(self, timeout_s):
            for event in super().poll(timeout_s):
                self.num_events += 1
                at, event = self.now, self._dated(event)
                if self.mail.random() < 0.2:
                    at += POLL_S * self.mail.randint(1, 8)
                self.held.append((at, event))
                if self.mail.random() < 0.1:
                    self.held.append((at + POLL_S * self.mail.randint(0, 20), event))
            due = [event for at, event in self.held if at <= self.now]
            self.held = [(at, event) for at, event in self.held if at > self.now]
            self.mail.shuffle(due)
            return due

        def _dated(self, event):
            """Return an event with what tells its order, as real processes send it."""
            match event:
                case Published():
                    process = f"center {self.life}"
                    return dataclasses.replace(event, process=process, sent_s=self.now)
                case Reported(report):
                    return Reported(dataclasses.replace(report, sent_s=self.now))
            return event

        # What is asked of a worker that has died, whose loss is still on its way, is lost with it.

        def publish(self, worker_id):
            if worker_id in self.workers:
                super().publish(worker_id)
            else:
                self.events.append(GaveUp("publication", "it died"))

        def hand_in(self, worker_id):
            if worker_id in self.workers:
                super().hand_in(worker_id)

        def hand_over(self, worker_id, state):
            if worker_id in self.workers:
                super().hand_over(worker_id, state)

        def collect(self, round, worker_ids):
            if all(worker_id in self.workers for worker_id in worker_ids):
                super().collect(round, worker_ids)

        def form(self, membership, round, own_states):
            self._bury(membership.worker_ids)
            super().form(membership, round, own_states)

        def change(self, membership, own_states):
            self._bury(membership.worker_ids)
            super().change(membership, own_states)

        def rebuild_center(self, worker_id):
            self._bury([worker_id] if worker_id else [])
            super().rebuild_center(worker_id)

        def _bury(self, worker_ids):
            for worker_id in worker_ids:
                if worker_id not in self.workers:
                    self.workers[worker_id] = SimWorker(
                        is_up=True, is_dead=True, has_replica=True, has_strategy=True
                    )

    Late.__name__ = f"Late{kind.__name__}"
    return Late
