"""What is done a block at a time is what would be done at once."""

import pytest
import torch

from raydl.blocks import BLOCK, blocks_of, squared_distance
from raydl.center import Center
from raydl.rules import Elastic, Tally

SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]


def vectors(size, *, count):
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(size, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("size", SIZES)
def test_blocks_are_all_of_a_vector_once_and_in_order(size):
    [vector] = vectors(size, count=1)
    blocks = [vector[block] for block in blocks_of(vector)]
    assert all(0 < len(block) <= BLOCK for block in blocks)
    assert torch.equal(torch.cat([torch.empty(0), *blocks]), vector)


@pytest.mark.parametrize("size", SIZES)
def test_the_distance_is_that_of_the_whole_vectors(size):
    a, b = vectors(size, count=2)
    squares = squared_distance(a, b, scratch=torch.empty(size))
    assert squares == pytest.approx(float((a.double() - b.double()).square().sum()), rel=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_a_center_that_moves_in_blocks_has_the_bits_of_one_that_moves_at_once(size):
    start, total = vectors(size, count=2)
    rule, tally = Elastic(0.9), Tally(num_workers=3, num_messages=3, num_samples=1.0)
    at_once = start.clone()
    rule.update_center_(at_once, total.clone(), tally, None)
    center = Center(start.clone(), torch.empty(0), rule=rule, make_optimizer=lambda tensors: None)
    center.apply_(total.clone(), torch.empty(0), tally)
    assert torch.equal(center.weights, at_once)
