"""How far an event travels: the files from a lost worker to the next generation."""

import sys
from pathlib import Path

from controller_harness import DIED, ControllerHarness

import raydl
from raydl.core.worker_group import Lost, Published
from raydl.elastic import controller, decide

ROOT = Path(raydl.__file__).parent
DECIDES = {
    "core/membership.py",
    "elastic/center_policy.py",
    "elastic/decide.py",
    "elastic/facts.py",
    "elastic/failure_policy.py",
    "elastic/membership_policy.py",
    "elastic/scaling_policy.py",
    "elastic/state.py",
}
MEASURES = {"elastic/stragglers.py"}
"""The pause between two generations is timed."""


def files_of(act):
    """Return the files of raydl with a function that is called, below ``raydl/``."""
    files = set()

    def note(frame, what, _):
        path = Path(frame.f_code.co_filename)
        if what == "call" and ROOT in path.parents:
            files.add(path.relative_to(ROOT).as_posix())

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = act()
    finally:
        sys.setprofile(before)
    return files, result


def test_a_lost_worker_reaches_its_next_generation_in_ten_files(monkeypatch):
    """The two others are the worker group, which reports it, and the controller, which acts."""
    harness, files = ControllerHarness((1, 2)).start(), set()

    def followed(*arguments):
        found, result = files_of(lambda: decide.decide(*arguments))
        files.update(found)
        return result

    monkeypatch.setattr(controller, "decide", followed)
    calls = harness.step(Lost("w1", DIED))
    calls += harness.step(*harness.end("broken", 5, "w0"), Published((0, 5)))
    assert ("form", 2, ("w0",), 5) in [*calls, *harness.step()]
    assert files == DECIDES | MEASURES
