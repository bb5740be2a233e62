"""The controller: poll, decide, act; one iteration per call.

``controller`` has the states that all methods share, ``rounds`` and ``messages`` what differs:
in synchronous methods a change of the membership stops everybody for a moment, by messages
nobody. ``situation`` is what is known of the run, as events change it: ``worker_registry`` and
``generation``. ``worker_pool`` requests, releases and replaces workers; ``center_manager`` knows
what the center holds, and what is to be scored and written.

The controller owns no process and no file: a worker group acts for it, and a recorder writes down
what it learns. So it is tested with fakes, a step at a time.
"""

from raydl.control.controller import Controller
from raydl.control.messages import AsyncController
from raydl.control.rounds import SyncController
from raydl.control.state import Recorder, State

__all__ = ["AsyncController", "Controller", "Recorder", "State", "SyncController", "kind_for"]


def kind_for(*, is_sync: bool) -> type[Controller]:
    """Return the controller for a kind of method."""
    return SyncController if is_sync else AsyncController
