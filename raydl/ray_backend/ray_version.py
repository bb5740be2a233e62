"""The versions of Ray whose private parts raydl uses.

Ray has no public way to fork its worker processes, to listen on the loopback alone, to start
without a dashboard, or to tell which nodes drain. raydl does these things by private names, which
may mean something else in another version. With a version that is not listed here, no private name
is used: Ray starts in its own way.
"""

from __future__ import annotations

TESTED = ("2.60.0",)
"""The versions with which raydl's tests have passed."""


def is_tested() -> bool:
    """Whether raydl may use private parts of the Ray that is installed here."""
    import ray

    return ray.__version__ in TESTED


def note() -> str:
    """Return a sentence about what a run lacks with another version of Ray; empty with these."""
    import ray

    if is_tested():
        return ""
    return (
        f"Ray {ray.__version__} starts in its own way, since raydl's tests have seen only "
        f"{' and '.join(TESTED)}: processes start more slowly, without the fork server; a cluster "
        f"of the run's own listens on all interfaces; nodes that drain, and workers that hang as "
        f"they start, are not noticed; install ray=={TESTED[-1]} to change this"
    )
