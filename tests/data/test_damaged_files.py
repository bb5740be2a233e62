"""Files of every format with random damage: each is read, or refused in one sentence."""

import os
import signal

import pytest
from damaged_sets import FORMATS, is_refused

from tests import fuzz

SEEDS = range(2)
"""A few; ``make fuzz`` takes thousands."""


@pytest.mark.parametrize("name", FORMATS)
def test_random_damage_is_refused_in_one_sentence_or_read(tmp_path, name):
    for seed in SEEDS:
        (tmp_path / f"{seed}").mkdir()
        is_refused(name, seed, tmp_path / f"{seed}")


def read_or_end(name, seed, folder):
    """Stand for a reader with faults at some seeds."""
    if seed == 1:
        raise KeyError("image")
    if seed == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    return seed == 4


@pytest.mark.processes
def test_the_fuzz_names_each_set_that_ends_as_none_should_and_goes_on():
    lines, num_refused = fuzz.broken_sets("png", range(6), read_or_end)
    assert lines == [
        "png, seed 1: KeyError: 'image'",
        "png, seed 3: the process ended with SIGSEGV",
    ]
    assert num_refused == 1
