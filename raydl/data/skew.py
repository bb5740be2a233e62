"""Samples that differ between workers: an order in shares, each with its own mix of classes.

The training set is divided once, by the seed, into as many shares of equal size as there are
workers. The classes of each share are drawn from a Dirichlet distribution (Hsu, Qi and Brown 2019,
arXiv 1909.06335):

    q ~ Dir(alpha * C * prior)      q_c   share of class c among the samples of a share
                                    C     number of classes; prior their shares in the whole set

For equally frequent classes every concentration is alpha: 0.1 gives most shares one or two classes,
100 gives all shares nearly the mix of the whole set. A class that has no samples left is left out,
so the last shares get what the first ones did not take.

A worker claims the samples of its rank's share first (``Ledger.claim``). So each sample is still
trained once an epoch, whoever is there: what a missing or slower worker leaves, others take.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from raydl.config import TrainConfig
from raydl.data.in_memory import ImageSet, TableSet
from raydl.data.ledger import split_evenly
from raydl.data.order import Order
from raydl.data.samples import Samples
from raydl.errors import ConfigError

_STREAM = 0x5E
"""Distinguishes the random numbers of the division from those of the epochs."""


def order_of(samples: Samples, config: TrainConfig) -> Order:
    """Return the order of the training set: its own, or shares that differ by class.

    Raises:
        ConfigError: if ``input.skew`` is set, and the samples are not in memory or have no classes.
    """
    seed, alpha = config.training.seed, config.input.skew
    if alpha is None:
        return samples.order(seed)
    labels = samples.labels if isinstance(samples, ImageSet | TableSet) else None
    if labels is None:
        what = "no classes" if isinstance(samples, TableSet) else "no classes in memory"
        problem = (
            f"needs samples in memory with a class each, and these have {what}: name the column of "
            f"a table by --target, read files at the start by --input.stream never, or unset it"
        )
        raise ConfigError("input.skew", problem)
    return Skewed(labels, alpha=alpha, num_shares=max(1, config.scaling.max_workers), seed=seed)


def shares_by_class(
    labels: np.ndarray, num_shares: int, *, alpha: float, seed: int
) -> list[np.ndarray]:
    """Divide samples into shares whose sizes differ by at most one.

    Args:
        labels: class of each sample, int64, shape [N].
        num_shares: number of shares.
        alpha: concentration, above 0: the lower, the more the shares differ.
        seed: seed of the division.

    Returns:
        The rows of each share, int64; every row is in one of them.
    """
    random = np.random.default_rng([seed, _STREAM])
    classes, counts = np.unique(labels, return_counts=True)
    rows = [random.permutation(np.flatnonzero(labels == c)) for c in classes]
    concentrations = alpha * len(classes) * counts / len(labels)
    left, shares = counts.copy(), []
    for size in split_evenly(len(labels), num_shares):
        weights, own = random.dirichlet(concentrations), list[np.ndarray]()
        while size:
            likely = np.where(left > 0, weights, 0.0)
            if not likely.sum() > 0:  # only classes that the share wants least are left
                likely = left.astype(float)
            taken = np.minimum(random.multinomial(size, likely / likely.sum()), left)
            own += [rows[c][left[c] - n : left[c]] for c, n in enumerate(taken) if n]
            left -= taken
            size -= int(taken.sum())
        shares.append(np.concatenate([np.empty(0, np.int64), *own]))
    return shares


class Skewed:
    """Shares that differ by class, one after the other; each is shuffled anew in every epoch.

    Args:
        labels: class of each sample, int64, shape [N].
        alpha: concentration of the Dirichlet distribution.
        num_shares: number of shares, one per worker.
        seed: seed of the division and of the orders.
    """

    def __init__(self, labels: np.ndarray, *, alpha: float, num_shares: int, seed: int) -> None:
        self.num_samples = len(labels)
        self._alpha, self._seed = alpha, seed
        self._shares = shares_by_class(labels, num_shares, alpha=alpha, seed=seed)
        self._ends = [int(end) for end in np.cumsum([len(share) for share in self._shares])]
        self._orders: dict[int, np.ndarray] = {}
        self.note = self._describe(labels)
        """A sentence for the log."""

    def _describe(self, labels: np.ndarray) -> str:
        most = [
            np.unique(labels[share], return_counts=True)[1].max() / len(share)
            for share in self._shares
            if len(share)
        ]
        return (
            f"the samples are in {len(self._shares)} shares that differ by class (input.skew "
            f"{self._alpha:g}), and each worker trains the share of its rank first: the most "
            f"frequent class of a share has {min(most):.0%} to {max(most):.0%} of it"
        )

    @property
    def name(self) -> str:
        """Description of the order."""
        return f"in {len(self._shares)} shares by input.skew {self._alpha:g}"

    def rows(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the rows at some positions of an epoch."""
        if epoch not in self._orders:
            random = np.random.default_rng([self._seed, epoch])
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = np.concatenate([random.permutation(s) for s in self._shares])
        rows: np.ndarray = self._orders[epoch][positions]
        return rows

    def cuts(self, epoch: int) -> list[int]:
        """Return the ends of the shares, the same in each epoch."""
        return self._ends

    def near(self, epoch: int, position: int) -> np.ndarray:
        """Return the row at a position: there are no row groups."""
        return self.rows(epoch, np.array([position]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_orders": {}}
