"""The distance of a replica to the center, also if fragments change between two rounds."""

import pytest

from raydl.core.replica import Distances


def test_the_total_counts_the_newest_exchange_of_each_span():
    distances = Distances()
    assert distances.total() == 0
    distances.note(slice(0, 5), 3.0)
    distances.note(slice(5, 10), 4.0)
    distances.note(slice(0, 5), 1.0)
    assert distances.total() == 5.0


@pytest.mark.parametrize(
    "spans", [[(0, 10)], [(0, 5), (5, 10)], [(0, 3), (3, 6), (6, 10)], [(0, 4), (4, 10)]]
)
def test_fragments_that_no_longer_exist_are_not_counted(spans):
    distances = Distances()
    for start, stop in ((0, 4), (4, 7), (7, 10)):
        distances.note(slice(start, stop), 100.0)
    for start, stop in spans:
        distances.note(slice(start, stop), 1.0)
    assert distances.total() == len(spans)
    again = Distances()
    again.load(distances.state())
    assert again.total() == len(spans)
