"""The controller: poll, decide, act; one iteration per call.

``controller`` has the states that all methods share, ``rounds`` and ``messages`` what differs:
in synchronous methods a change of the membership stops everybody for a moment, by messages
nobody. ``situation`` is what is known of the run, as events change it: ``workforce`` and
``generation``. ``staff`` decides who is asked for and who is let go; ``keeper`` knows what the
center holds, and what is to be scored and written.

It owns no process and no file: a crew acts for it, a recorder takes what it learns. So it
is tested with fakes, a step at a time.
"""

from raydl.control.controller import Controller
from raydl.control.messages import MessagesController
from raydl.control.rounds import RoundsController
from raydl.control.state import Recorder, State

__all__ = ["Controller", "MessagesController", "Recorder", "RoundsController", "State", "kind_for"]


def kind_for(*, is_sync: bool) -> type[Controller]:
    """Return the controller for a kind of method."""
    return RoundsController if is_sync else MessagesController
