"""Chooses period, fragments, delay and codec of a synchronous method from measured times.

    symbol  name here     meaning
    t       step_s        seconds of one local step, without waiting
    w       waited_s      seconds per round that the worker with the least waiting spends waiting
    E       exchange_s    seconds to exchange all parameters at four bytes per number
    n, d    period, delay local steps between exchanges, and from the start of one to its effect
    f       fragments     parts of the parameters that are exchanged one after another
    r       share         bytes of a compressed message relative to a plain one
    H       HIDDEN_STEP   share of a step that hides an exchange: forward and backward

The exchange of a fragment is hidden behind d steps and the gradient of one more. Workers wait for
the rest:

    w = f max(0, E r / f - (d + H) t)         the share of waiting is w / (n t + w)

A longer period has more fragments in proportion, as in Streaming DiLoCo (Douillard and others
2025): the steps between two messages stay the same, each message is smaller, and the delay stays
short.

The slowest worker waits least, and only for the network. The other workers also wait for the
slowest one, which no tuning shortens. If the slowest worker waits too much, E follows from w, and
the first of ``candidates`` with a small predicted share of waiting is chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from raydl.config.typed import Count, Positive
from raydl.core.codecs import parse_codec

ENOUGH = 0.03
"""Largest share of a round that workers may wait."""
HIDDEN_STEP = 0.75
SLACK = 1.3
"""Safety factor on the measured time of an exchange: the first steps are slower than later ones
and hide more, and the speed of a network varies."""
TAKEN_OVER = "chosen by earlier workers"
"""Reason of a tuning that a run or a generation starts with."""
_FACTORS = (1, 2, 3, 4, 6, 10)
"""Factors for period and fragments."""
_MAX_PERIOD = 100
"""Local steps."""
_CODECS = ("bf16", "int8")


@dataclass(frozen=True)
class ExchangeTuning:
    """How the workers of a synchronous method exchange."""

    period: Positive
    delay: Count
    compression: str
    fragments: Positive = 1

    def __str__(self) -> str:
        parts = "" if self.fragments == 1 else f", {self.fragments} fragments"
        codec = "" if self.compression == "none" else f", {self.compression}"
        return f"period {self.period}{parts}, delay {self.delay}{codec}"


@dataclass(frozen=True)
class Measured:
    """Times of some rounds under one exchange tuning."""

    step_s: float
    waited_s: float
    num_workers: int

    def waiting(self, period: int) -> float:
        """Return the share of a round spent waiting, 0..1."""
        return self.waited_s / (period * self.step_s + self.waited_s)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that the user's settings put on a choice."""

    overlap: bool = True
    """Exchanges overlap with the gradient."""
    may_compress: bool = True
    """Messages may be compressed although the user did not ask for a codec."""
    max_fragments: int = sys.maxsize
    """Number of parameters, since none of the fragments may be empty."""


@dataclass(frozen=True)
class Choice:
    """A chosen exchange tuning."""

    generation: int
    tuning: ExchangeTuning
    reason: str


def share_of_bytes(compression: str, num_workers: int) -> float:
    """Return the bytes of an exchange relative to an uncompressed all-reduce.

    Compressed messages are gathered: each worker receives p - 1 of them, against
    2 (p - 1) / p messages in a ring.
    """
    codec = parse_codec(compression)
    if codec.name == "none":
        return 1.0
    num_values = 1 << 20  # enough to make the overhead per message negligible
    return codec.num_bytes(num_values) / (4 * num_values) * num_workers / 2


def carried_over(chosen: ExchangeTuning, compression: str, num_workers: int) -> ExchangeTuning:
    """Return the tuning of an earlier membership, adapted to another number of workers.

    The user's codec replaces the chosen one unless that sends fewer bytes.

    Args:
        chosen: tuning of the earlier membership.
        compression: the user's codec.
        num_workers: workers that train now.
    """
    now, users = (share_of_bytes(c, num_workers) for c in (chosen.compression, compression))
    return chosen if now < users else replace(chosen, compression=compression)


def exchange_s(now: ExchangeTuning, measured: Measured, limits: Limits) -> float:
    """Return E in seconds, from rounds in which workers waited."""
    hidden_s = _hidden_s(now, measured.step_s, limits)
    share = share_of_bytes(now.compression, measured.num_workers)
    return (measured.waited_s + now.fragments * hidden_s) / share


def waiting(
    tuning: ExchangeTuning, seconds: float, step_s: float, num_workers: int, limits: Limits
) -> float:
    """Return the predicted share of a round spent waiting, 0..1, for E = ``seconds``."""
    sent_s = seconds * share_of_bytes(tuning.compression, num_workers) / tuning.fragments
    waited_s = tuning.fragments * max(0.0, sent_s - _hidden_s(tuning, step_s, limits))
    return Measured(step_s, waited_s, num_workers).waiting(tuning.period)


def _hidden_s(tuning: ExchangeTuning, step_s: float, limits: Limits) -> float:
    return (tuning.delay + (HIDDEN_STEP if limits.overlap else 0.0)) * step_s


def candidates(now: ExchangeTuning, limits: Limits) -> Iterator[ExchangeTuning]:
    """Yield the tunings to choose from, the mildest change first.

    A longer delay comes first: it hides a message behind more steps and changes no byte of it.
    Compression comes second, a longer period with more fragments last. Each of them is tried with
    the shortest delay first, since replicas that apply older pulls need more samples.
    """
    codecs = _CODECS if limits.may_compress and now.compression == "none" else ()
    max_delay = max(now.delay, now.period // now.fragments - 1)
    for factor in _FACTORS:
        period = factor * now.period
        fragments = min(factor * now.fragments, limits.max_fragments)
        if factor > 1 and period > _MAX_PERIOD:
            return
        for compression in (now.compression, *codecs):
            for delay in range(now.delay, max_delay + 1):
                yield ExchangeTuning(period, delay, compression, fragments)


def choose(
    now: ExchangeTuning, measured: Measured, limits: Limits, *, generation: int = 0
) -> Choice | None:
    """Return the mildest tuning with little waiting, or None if the present one is it.

    If every candidate waits too much, return the one that waits least.

    Args:
        now: tuning under which the times were measured.
        measured: times of at least one round.
        limits: limits from the user's settings.
        generation: generation that chooses.
    """
    share_now = measured.waiting(now.period)
    if share_now <= ENOUGH:
        return None
    seconds = exchange_s(now, measured, limits)

    def share(tuning: ExchangeTuning, slack: float = SLACK) -> float:
        p, step_s = measured.num_workers, measured.step_s
        return waiting(tuning, slack * seconds, step_s, p, limits)

    shares = {tuning: share(tuning) for tuning in candidates(now, limits)}
    enough = (tuning for tuning, waited in shares.items() if waited <= ENOUGH)
    best = next(enough, min(shares, key=shares.__getitem__))
    if best == now:
        return None
    reason = (
        f"workers waited {share_now:.0%} of their time, with {seconds * 1e3:,.0f} ms per exchange "
        f"and {measured.step_s * 1e3:,.0f} ms per step; {share(best, 1.0):.0%} is expected now"
    )
    return Choice(generation, best, reason)
