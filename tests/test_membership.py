"""The decision table of who trains next."""

import pytest

from raydl.membership import Candidates, Membership, next_membership

THREE = ("w0", "w1", "w2")


@pytest.mark.parametrize(
    ("now", "ready", "waited_s", "expected", "reason"),
    [
        (None, (), 0.0, None, "0 of 2 workers are ready"),
        (None, ("w0",), 99.0, None, "1 of 2 workers are ready"),
        (None, ("w0", "w1"), 1.0, None, "2 workers are ready; up to 3 are wanted"),
        (None, ("w0", "w1"), 5.0, ("w0", "w1"), "w0, w1 start"),
        (None, THREE, 0.0, THREE, "w0, w1, w2 start"),
        (None, (*THREE, "w3"), 0.0, THREE, "w0, w1, w2 start"),
        (("w0", "w1"), ("w0", "w1"), 9.0, ("w0", "w1"), "nobody joins or leaves"),
        (("w1", "w0"), THREE, 9.0, ("w1", "w0", "w2"), "w2 joins"),
        (("w2",), THREE, 9.0, ("w2", "w0", "w1"), "w0, w1 join"),
        (THREE, (*THREE, "w3"), 9.0, THREE, "nobody joins or leaves"),
    ],
)
def test_who_trains_next_and_why(now, ready, waited_s, expected, reason):
    before = Membership(4, now) if now else None
    after, why = next_membership(
        before,
        Candidates(ready=ready, waited_s=waited_s),
        min_workers=2,
        max_workers=3,
        patience_s=5.0,
    )
    assert (after.worker_ids if after else None) == expected
    assert why == reason
    if before and after:
        assert after.generation == (4 if expected == now else 5)


def test_whole_groups_train():
    def decide(now, ready):
        return next_membership(
            now,
            Candidates(ready=ready, waited_s=9.0),
            min_workers=2,
            max_workers=6,
            patience_s=5.0,
            group_size=2,
        )[0]

    first = decide(None, ("w0", "w1", "w2"))
    assert first.worker_ids == ("w0", "w1")
    assert decide(first, ("w0", "w1", "w2")) == first
    assert decide(first, ("w0", "w1", "w2", "w3")).worker_ids == ("w0", "w1", "w2", "w3")
    assert first.partners_of("w1", 2) == (0, ("w0", "w1"))
