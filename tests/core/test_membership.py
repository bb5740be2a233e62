"""The decision table of the next membership, and the reasons of its decisions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydl.core.membership import Candidates, Membership, next_membership

THREE = ("w0", "w1", "w2")
FOUR = (*THREE, "w3")
LATE = "is late and left out"


def decide(
    now,
    ready,
    *,
    was_absent=(),
    absent=(),
    causes=None,
    waited_s=9.0,
    min_workers=2,
    max_workers=3,
    group_size=1,
):
    """Return the decision in generation 4; ``now`` is a membership or the ids of its workers."""
    before = Membership(4, now, was_absent) if isinstance(now, tuple) else now
    return next_membership(
        before,
        Candidates(ready=ready, waited_s=waited_s, absent=absent, causes=causes or {}),
        min_workers=min_workers,
        max_workers=max_workers,
        patience_s=5.0,
        group_size=group_size,
    )


def ids(membership):
    return membership.worker_ids if membership else None


@pytest.mark.parametrize(
    ("ready", "waited_s", "expected", "reason"),
    [
        ((), 0.0, None, "0 of 2 workers are ready"),
        (("w0",), 99.0, None, "1 of 2 workers are ready"),
        (("w0", "w1"), 4.9, None, "2 of up to 3 workers are ready"),
        (("w0", "w1"), 5.0, ("w0", "w1"), "w0, w1 start"),
        (THREE, 0.0, THREE, "w0, w1, w2 start"),
        (("w2", "w0", "w1"), 0.0, ("w2", "w0", "w1"), "w2, w0, w1 start"),
        (FOUR, 0.0, THREE, "w0, w1, w2 start"),
    ],
)
def test_the_first_membership_forms_when_all_are_ready_or_enough_after_the_patience(
    ready, waited_s, expected, reason
):
    after, why = decide(None, ready, waited_s=waited_s)
    assert (ids(after), why) == (expected, reason)
    assert after is None or after.generation == 1


def test_one_worker_starts_alone():
    after, why = decide(None, ("w0",), min_workers=1, max_workers=1)
    assert (ids(after), why) == (("w0",), "w0 starts")


@pytest.mark.parametrize(
    ("now", "ready", "causes", "expected", "reason"),
    [
        # joining
        (("w1", "w0"), THREE, {}, ("w1", "w0", "w2"), "w2 joins"),
        (("w2",), THREE, {}, ("w2", "w0", "w1"), "w0, w1 join"),
        # lost, without a replacement
        (THREE, ("w1", "w2"), {"w0": "was lost"}, ("w1", "w2"), "w0 was lost"),
        (THREE, ("w0", "w2"), {"w1": "was lost"}, ("w0", "w2"), "w1 was lost"),
        (THREE, ("w0", "w1"), {"w2": "was lost"}, ("w0", "w1"), "w2 was lost"),
        # lost, and a replacement is ready
        (THREE, FOUR[1:], {"w0": "was lost"}, FOUR[1:], "w0 was lost, w3 joins"),
        (
            THREE,
            ("w0", "w2", "w3"),
            {"w1": "was lost"},
            ("w0", "w2", "w3"),
            "w1 was lost, w3 joins",
        ),
        # several at once
        (
            THREE,
            ("w2", "w3", "w4"),
            {"w0": "was lost", "w1": "was lost"},
            ("w2", "w3", "w4"),
            "w0 was lost, w1 was lost, w3, w4 join",
        ),
        (
            THREE,
            ("w3", "w4"),
            {"w0": "was lost", "w1": "is on a draining node", "w2": "was removed"},
            ("w3", "w4"),
            "w0 was lost, w1 is on a draining node, w2 was removed, w3, w4 join",
        ),
        # announced in advance
        (
            THREE,
            ("w0", "w1", "w3"),
            {"w2": "is on a draining node"},
            ("w0", "w1", "w3"),
            "w2 is on a draining node, w3 joins",
        ),
        (THREE, ("w0", "w1"), {"w2": "was removed"}, ("w0", "w1"), "w2 was removed"),
        # without a known cause
        (THREE, ("w0", "w1"), {}, ("w0", "w1"), "w2 is not ready"),
        # below the minimum
        (
            THREE,
            ("w2",),
            {"w0": "was lost", "w1": "is on a draining node"},
            None,
            "1 of 2 workers are left (w0 was lost, w1 is on a draining node)",
        ),
        (
            ("w0", "w1"),
            (),
            {"w0": "was lost", "w1": "was lost"},
            None,
            "0 of 2 workers are left (w0 was lost, w1 was lost)",
        ),
        (("w0",), ("w0",), {}, None, "1 of 2 workers are left"),
    ],
)
def test_members_that_are_ready_stay_and_newcomers_replace_the_others(
    now, ready, causes, expected, reason
):
    after, why = decide(now, ready, causes=causes)
    assert (ids(after), why) == (expected, reason)
    assert after is None or after.generation == 5


@pytest.mark.parametrize("ready", [THREE, FOUR, ("w2", "w1", "w0")])
def test_the_same_membership_is_returned_if_nothing_changes(ready):
    """The controller relies on this after a broken exchange that lost no worker."""
    now = Membership(4, THREE)
    assert decide(now, ready) == (now, "no worker joins or leaves")


def test_too_few_members_wait_for_a_newcomer():
    now, lost = Membership(4, ("w0", "w1")), {"w0": "was lost"}
    assert decide(now, ("w1",), causes=lost)[0] is None
    after, why = decide(now, ("w1", "w2"), causes=lost)
    assert (ids(after), why) == (("w1", "w2"), "w0 was lost, w2 joins")


# workers left out, and their return


def test_a_worker_left_out_is_absent_and_named_in_the_reason():
    after, why = decide(THREE, ("w0", "w2"), absent=("w1",), causes={"w1": LATE})
    assert after == Membership(5, ("w0", "w2"), ("w1",))
    assert why == "w1 is late and left out"


def test_an_absent_worker_changes_nothing_while_it_is_absent():
    now = Membership(4, ("w0", "w2"), ("w1",))
    after, why = decide(now, ("w0", "w2"), absent=("w1",), causes={"w1": LATE})
    assert (after, why) == (now, "no worker joins or leaves")


def test_an_absent_worker_returns_with_the_last_rank():
    after, why = decide(("w0", "w2"), THREE, was_absent=("w1",), causes={"w1": LATE})
    assert after == Membership(5, ("w0", "w2", "w1"))
    assert why == "w1 returns"


def test_the_reason_distinguishes_returning_workers_from_new_ones():
    _, why = decide(("w0",), ("w0", "w1", "w2", "w3"), was_absent=("w1", "w3"), max_workers=4)
    assert why == "w1, w3 return, w2 joins"


def test_an_absent_worker_that_is_lost_is_named():
    """Its claims are released with a new membership, so one must form."""
    after, why = decide(("w0", "w2"), ("w0", "w2"), was_absent=("w1",), causes={"w1": "was lost"})
    assert after == Membership(5, ("w0", "w2"))
    assert why == "w1 was lost"


@pytest.mark.parametrize("cause", ["is on a draining node", "was removed"])
def test_an_absent_worker_that_leaves_is_named(cause):
    _, why = decide(("w0", "w2"), ("w0", "w2", "w3"), was_absent=("w1",), causes={"w1": cause})
    assert why == f"w1 {cause}, w3 joins"


def test_an_absent_worker_is_on_standby_while_its_replacement_trains():
    after, why = decide(FOUR[1:], FOUR, was_absent=("w0",), causes={"w0": LATE})
    assert after == Membership(5, FOUR[1:])
    assert why == "w0 is on standby"


def test_the_reason_names_only_the_absent_worker_that_changed():
    after, why = decide(
        ("w0", "w1"),
        ("w0", "w1"),
        was_absent=("w2", "w3"),
        absent=("w3",),
        causes={"w2": "was lost", "w3": LATE},
    )
    assert after == Membership(5, ("w0", "w1"), ("w3",))
    assert why == "w2 was lost"


def test_the_reason_for_too_few_workers_names_all_that_do_not_train():
    after, why = decide(
        ("w0", "w1"),
        ("w1",),
        was_absent=("w2",),
        absent=("w2",),
        causes={"w0": "was lost", "w2": LATE},
    )
    assert after is None
    assert why == "1 of 2 workers are left (w0 was lost, w2 is late and left out)"


# fewer workers requested


def test_members_stay_if_fewer_workers_are_requested():
    now = Membership(4, FOUR)
    assert decide(now, FOUR, max_workers=2) == (now, "no worker joins or leaves")


def test_a_removed_worker_is_not_replaced_if_fewer_workers_are_requested():
    after, why = decide(FOUR, ("w0", "w1", "w3", "w4"), causes={"w2": "was removed"}, max_workers=3)
    assert (ids(after), why) == (("w0", "w1", "w3"), "w2 was removed")


def test_an_absent_worker_returns_only_below_the_maximum():
    after, _ = decide(("w0", "w2"), THREE, was_absent=("w1",), max_workers=2)
    assert after == Membership(5, ("w0", "w2"))


# groups


def in_pairs(now, ready, *, causes=None, min_workers=2, max_workers=6, waited_s=9.0):
    return decide(
        now,
        ready,
        causes=causes,
        min_workers=min_workers,
        max_workers=max_workers,
        waited_s=waited_s,
        group_size=2,
    )


def test_whole_groups_start_and_grow():
    first, why = in_pairs(None, THREE)
    assert (ids(first), why) == (("w0", "w1"), "w0, w1 start")
    assert in_pairs(first, THREE) == (first, "no worker joins or leaves")
    after, why = in_pairs(first, FOUR)
    assert (ids(after), why) == (FOUR, "w2, w3 join")
    assert first.partners_of("w1", 2) == (0, ("w0", "w1"))
    assert after.partners_of("w1", 2) == (0, ("w0", "w1"))
    assert after.partners_of("w2", 2) == (1, ("w2", "w3"))


def test_all_ready_workers_are_counted_before_the_first_membership():
    assert in_pairs(None, ("w0",)) == (None, "1 of 2 workers are ready")
    assert in_pairs(None, THREE, waited_s=0.0) == (None, "3 of up to 6 workers are ready")


def test_a_complete_group_stays_together_and_the_rest_of_a_broken_one_is_on_standby():
    after, why = in_pairs(FOUR, ("w0", "w2", "w3"), causes={"w1": "was lost"})
    assert (ids(after), why) == (("w2", "w3"), "w0 is on standby, w1 was lost")


def test_survivors_of_broken_groups_form_new_groups_by_rank():
    now = ("w5", "w1", "w2", "w3", "w4", "w0")
    lost = {"w1": "was lost", "w0": "was lost"}
    after, why = in_pairs(now, ("w2", "w3", "w4", "w5"), causes=lost)
    assert (ids(after), why) == (("w2", "w3", "w5", "w4"), "w1 was lost, w0 was lost")


def test_a_survivor_forms_a_group_with_a_replacement():
    after, why = in_pairs(FOUR, ("w0", "w2", "w3", "w4"), causes={"w1": "was lost"}, max_workers=4)
    assert (ids(after), why) == (("w2", "w3", "w0", "w4"), "w1 was lost, w4 joins")


def test_survivors_rank_before_newcomers_whatever_the_order_of_requests():
    """w0 was left out and is ready again; w4 and w5 have lost w3 and w6."""
    now = ("w1", "w2", "w3", "w4", "w5", "w6")
    after, _ = in_pairs(now, ("w0", "w1", "w2", "w4", "w5"), max_workers=4)
    assert ids(after) == ("w1", "w2", "w4", "w5")


def test_survivors_form_a_group_even_if_fewer_workers_are_requested():
    after, _ = in_pairs(FOUR, ("w0", "w3", "w4"), max_workers=1)
    assert ids(after) == ("w0", "w3")


def test_too_few_groups_are_left():
    after, why = in_pairs(FOUR, ("w0", "w2", "w3"), causes={"w1": "was lost"}, min_workers=4)
    assert (after, why) == (None, "2 of 4 workers are left (w0 is on standby, w1 was lost)")


# properties

names = [f"w{i}" for i in range(9)]


@st.composite
def cases(draw):
    """Draw members in whole groups, absent workers, ready workers and others."""
    group_size = draw(st.integers(1, 3))
    order = draw(st.permutations(names))
    num_members = group_size * draw(st.integers(0, len(names) // group_size))
    members = tuple(order[:num_members])
    was_absent = tuple(w for w in order[num_members:] if draw(st.booleans()))
    state = {w: draw(st.sampled_from(["ready", "absent", "gone"])) for w in names}
    min_workers = group_size * draw(st.integers(1, 3))
    return {
        "now": Membership(4, members, was_absent) if members else None,
        "candidates": Candidates(
            ready=tuple(w for w in names if state[w] == "ready"),
            waited_s=draw(st.sampled_from([0.0, 9.0])),
            absent=tuple(w for w in names if state[w] == "absent"),
            causes={w: "was lost" for w in names if state[w] == "gone"},
        ),
        "min_workers": min_workers,
        "max_workers": min_workers + draw(st.integers(0, 6)),
        "group_size": group_size,
    }


@given(cases())
def test_only_whole_groups_of_ready_workers_train_in_any_case(case):
    now, ready, size = case["now"], case["candidates"].ready, case["group_size"]
    after, why = next_membership(**case, patience_s=5.0)
    assert why
    if after is None:
        assert why.startswith(f"{len(ready)} of ") or "are left" in why
        return
    chosen = after.worker_ids
    assert len(chosen) % size == 0
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(ready)
    assert case["min_workers"] <= len(chosen)
    if now is None:
        assert len(chosen) <= case["max_workers"]
        return
    members = [w for w in now.worker_ids if w in ready]
    assert len(chosen) <= max(case["max_workers"], len(members))
    groups = [now.worker_ids[i : i + size] for i in range(0, len(now.worker_ids), size)]
    whole = [w for group in groups if set(group) <= set(ready) for w in group]
    assert list(chosen[: len(whole)]) == whole, "complete groups keep their order and rank first"
    rest = [w for w in chosen[len(whole) :] if w in now.worker_ids]
    assert rest == [w for w in members if w in rest], "survivors of broken groups keep their order"
    assert len(members) - len(whole) - len(rest) < size, "only a remainder is on standby"
    newcomers = [w for w in chosen if w not in members]
    assert newcomers == [w for w in ready if w in newcomers], (
        "newcomers follow in their order of readiness"
    )


@given(cases())
def test_a_membership_changes_exactly_when_its_members_or_absent_workers_change(case):
    now = case["now"]
    after, why = next_membership(**case, patience_s=5.0)
    if now is None or after is None:
        return
    is_same = (after.worker_ids, set(after.absent)) == (now.worker_ids, set(now.absent))
    assert is_same == (after is now) == (why == "no worker joins or leaves")
    assert after.generation == (4 if is_same else 5)
    if is_same:
        return
    before, then = {*now.worker_ids}, {*after.worker_ids}
    moved = (before ^ then) | (({*now.absent} ^ {*after.absent}) - then)
    assert moved == {w for w in names if w in why}, "the reason names exactly these workers"
    for worker_id, cause in case["candidates"].causes.items():
        assert worker_id not in why or f"{worker_id} {cause}" in why
