"""Every sample of an epoch is completed once."""

from hypothesis import given
from hypothesis import strategies as st

from raydl.ledger import Ledger, share_round, split_evenly


def test_claims_run_along_the_epoch_and_stop_at_its_end():
    ledger = Ledger(10)
    assert ledger.claim("w0", 6) == (0, [(0, 6)])
    assert ledger.claim("w1", 6) == (0, [(6, 10)])
    assert ledger.claim("w0", 1) == (1, [(0, 1)])  # nobody waits for the last samples
    ledger.complete("w1")
    assert ledger.epoch == 0
    ledger.complete("w0")
    assert ledger.epoch == 1


def test_what_a_lost_worker_had_claimed_goes_back():
    ledger = Ledger(10)
    ledger.claim("w0", 4)
    ledger.claim("w1", 4)
    assert ledger.give_back("w0") == 4
    assert ledger.complete("w1") == 4
    assert ledger.claim("w2", 10) == (0, [(0, 4), (8, 10)])
    ledger.complete("w2")
    assert (ledger.epoch, ledger.num_done_ever) == (1, 10)


def test_a_full_round_gives_everyone_a_full_share():
    share = share_round(10_000, num_workers=3, batch_size=64, max_steps=10)
    assert (share.num_steps, share.counts) == (10, (640, 640, 640))


def test_the_last_round_splits_what_remains_evenly():
    share = share_round(131, num_workers=2, batch_size=64, max_steps=10)
    assert (share.num_steps, share.counts) == (2, (66, 65))
    assert share_round(1, num_workers=2, batch_size=64, max_steps=10).counts == (1, 0)


def test_parts_differ_by_one_at_most():
    assert split_evenly(7, 3) == [3, 2, 2]
    assert split_evenly(0, 2) == [0, 0]


def test_a_saved_ledger_frees_what_was_under_way():
    ledger = Ledger(8)
    ledger.claim("w0", 3)
    ledger.complete("w0")
    ledger.claim("w1", 2)
    again = Ledger.from_state_dict(ledger.state_dict())
    assert again.num_done_ever == 3
    assert again.claim("w0", 100) == (0, [(3, 5), (5, 8)])


@given(
    num_samples=st.integers(1, 300),
    num_workers=st.integers(1, 5),
    batch_size=st.integers(1, 40),
    period=st.integers(1, 6),
    losses=st.lists(st.integers(0, 4), max_size=5),
)
def test_an_epoch_completes_every_position_once(
    num_samples, num_workers, batch_size, period, losses
):
    """Rounds in which one worker is lost give its share back to later rounds."""
    ledger, seen = Ledger(num_samples), []
    lost = list(losses)
    while ledger.epoch == 0:
        share = share_round(
            ledger.num_free, num_workers=num_workers, batch_size=batch_size, max_steps=period
        )
        assert share.num_steps <= period
        assert max(share.counts) <= share.num_steps * batch_size
        loser = lost.pop() if lost else None
        for worker, count in enumerate(share.counts):
            _, spans = ledger.claim(f"w{worker}", count)
            if worker == loser:
                ledger.give_back(f"w{worker}")
                continue
            seen += [position for start, stop in spans for position in range(start, stop)]
            ledger.complete(f"w{worker}")
    assert sorted(seen) == list(range(num_samples))
