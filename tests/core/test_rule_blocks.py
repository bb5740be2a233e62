"""Rules compute the same block by block as over the whole vector."""

import pytest
import torch

from raydl.core.rules import BLOCK, AheadRule, Now, blocks_of, squared_distance
from raydl.methods.easgd import Elastic, elastic_center_, elastic_difference

SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]
NOW = Now(3)


def vectors(size, *, count):
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(size, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("size", SIZES)
def test_blocks_cover_a_vector_once_and_in_order(size):
    [vector] = vectors(size, count=1)
    blocks = [vector[block] for block in blocks_of(vector)]
    assert all(0 < len(block) <= BLOCK for block in blocks)
    assert torch.equal(torch.cat([torch.empty(0), *blocks]), vector)


@pytest.mark.parametrize("size", SIZES)
def test_the_distance_is_that_of_the_whole_vectors(size):
    a, b = vectors(size, count=2)
    wanted = pytest.approx(float((a.double() - b.double()).square().sum()), rel=1e-5)
    assert squared_distance(a, b, scratch=torch.empty(size)) == wanted
    assert Elastic(0.9).measured_pull(a, b, NOW, out=torch.empty(size)) == wanted


@pytest.mark.parametrize("size", SIZES)
def test_replica_and_center_get_the_bits_of_the_equations_over_the_whole(size):
    x, c, total = vectors(size, count=3)
    assert torch.equal(elastic_difference(x, c, moving_rate=0.3), (x - c) * 0.3)
    pull = torch.empty(size)
    Elastic(0.9).measured_pull(x, c, NOW, out=pull)
    assert torch.equal(pull, (x - c) * (0.9 / 3))
    at_once = c.clone().add_(total.clone().sub_(c, alpha=3), alpha=0.3)
    assert torch.equal(elastic_center_(c, total, num_messages=3, moving_rate=0.3), at_once)


class IgnoresOut(AheadRule):
    """Returns its pull in new memory, and counts the calls."""

    def __init__(self):
        self.num_calls = 0

    def pull(self, replica, center, now, *, out):
        self.num_calls += 1
        return 0.5 * (replica - center)

    def merge_(self, center, mail, state, now):
        center.copy_(mail.mean("weights"))


def test_a_custom_rule_is_called_once_and_need_not_use_out():
    x, c = vectors(2 * BLOCK, count=2)
    rule, pull, before = IgnoresOut(), torch.empty(2 * BLOCK), c.clone()
    squares = rule.exchange_(x, c, Now(1), out=pull)
    assert rule.num_calls == 1
    assert torch.equal(pull, 0.5 * (x - before))
    assert torch.equal(c, x)
    assert squares == pytest.approx(float((x - before).square().sum()), rel=1e-4)
