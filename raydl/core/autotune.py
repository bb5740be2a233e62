"""Chooses how often to exchange, with which fragments, delay and codec, by measured times.

    symbol  name here     meaning
    t       step_s        seconds of one local step, waiting not counted
    w       waited_s      seconds of a round waited for exchanges, of the worker that waits least
    E       exchange_s    seconds in which all parameters travel, each number in four bytes
    n, d    period, delay local steps between exchanges, and from the start of one to its effect
    f       fragments     parts of the parameters that travel one after another
    r       share         what a codec leaves of the bytes
    H       HIDDEN_STEP   share of a step behind which an exchange passes: forward and backward

A fragment's exchange passes behind d steps and the gradient of one more. What is left is waited:

    w = f max(0, E r / f - (d + H) t)         the share of waiting is w / (n t + w)

Where the period grows, the fragments grow with it: as many steps lie between two messages, each
message carries less, and a delay remains a short one. (Streaming DiLoCo, Douillard and others 2025,
exchanges so.)

The worker that waits least is the slowest one: its waiting is the link's, the others wait for this
worker too, which no tuning helps. Where it waits too much, E follows from w; the first of
``candidates`` by which little would be waited is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from raydl.core.compression import parse_codec

ENOUGH = 0.03
"""Share of a round that may be waited."""
HIDDEN_STEP = 0.75
SLACK = 1.3
"""Margin of an exchange over its measured time: first steps are slower than later ones, so
that more seems to pass behind them, and links are not even."""
TAKEN_OVER = "the workers before chose it"
"""The reason of a exchange tuning that a run, or a generation, begins with."""
_TIMES = (1, 2, 3, 4, 6, 10)
"""Factors for period and fragments."""
_LONGEST = 100
"""Local steps between exchanges."""
_CODECS = ("bf16", "int8")
_MANY = 1 << 20


@dataclass(frozen=True)
class ExchangeTuning:
    """How the workers of a synchronous method exchange."""

    period: int
    delay: int
    compression: str
    fragments: int = 1

    def __str__(self) -> str:
        parts = "" if self.fragments == 1 else f", {self.fragments} fragments"
        shortened = "" if self.compression == "none" else f", {self.compression}"
        return f"period {self.period}{parts}, delay {self.delay}{shortened}"


@dataclass(frozen=True)
class Measured:
    """Measured times of some rounds under one exchange tuning."""

    step_s: float
    waited_s: float
    num_workers: int

    def waiting(self, period: int) -> float:
        """Return the share of a round that was waited, 0..1."""
        return self.waited_s / (period * self.step_s + self.waited_s)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a choice."""

    overlap: bool = True
    """An exchange passes behind a gradient."""
    may_compress: bool = True
    """Messages may be shortened further than the user said."""


@dataclass(frozen=True)
class Choice:
    """A exchange tuning that was chosen, and why."""

    generation: int
    tuning: ExchangeTuning
    reason: str


def share_of_bytes(compression: str, num_workers: int) -> float:
    """Return the bytes of an exchange over those of an all-reduce that shortens nothing.

    Shortened messages are gathered: p - 1 of them reach every worker, where a ring brings
    2 (p - 1) / p.
    """
    codec = parse_codec(compression)
    if codec.name == "none":
        return 1.0
    return codec.num_bytes(_MANY) / (4 * _MANY) * num_workers / 2


def carried_over(chosen: ExchangeTuning, compression: str, num_workers: int) -> ExchangeTuning:
    """Return a chosen exchange tuning as another membership takes it over.

    A codec that shortens nothing among so many workers gives way to the user's.

    Args:
        chosen: by workers before.
        compression: the user's.
        num_workers: that train now.
    """
    now, users = (share_of_bytes(c, num_workers) for c in (chosen.compression, compression))
    return chosen if now < users else replace(chosen, compression=compression)


def exchange_s(now: ExchangeTuning, measured: Measured, limits: Limits) -> float:
    """Return E, from rounds in which somebody waited."""
    hidden_s = _hidden_s(now, measured.step_s, limits)
    share = share_of_bytes(now.compression, measured.num_workers)
    return (measured.waited_s + now.fragments * hidden_s) / share


def waiting(
    tuning: ExchangeTuning, seconds: float, step_s: float, num_workers: int, limits: Limits
) -> float:
    """Return the share of a round that would be waited, 0..1, where E is so many seconds."""
    sent_s = seconds * share_of_bytes(tuning.compression, num_workers) / tuning.fragments
    waited_s = tuning.fragments * max(0.0, sent_s - _hidden_s(tuning, step_s, limits))
    return Measured(step_s, waited_s, num_workers).waiting(tuning.period)


def _hidden_s(tuning: ExchangeTuning, step_s: float, limits: Limits) -> float:
    return (tuning.delay + (HIDDEN_STEP if limits.overlap else 0.0)) * step_s


def candidates(now: ExchangeTuning, limits: Limits) -> Iterator[ExchangeTuning]:
    """Yield what may be chosen, the mildest first: what exchanges as often, then less often.

    A delay lets a message pass behind all steps up to the next one, and changes no byte of it; then
    messages are shortened; then period and fragments grow. With each of them the shortest delay
    comes first: replicas that move on for longer with an older pull need more samples.
    """
    codecs = _CODECS if limits.may_compress and now.compression == "none" else ()
    longest = max(now.delay, now.period // now.fragments - 1)
    for times in _TIMES:
        period, fragments = times * now.period, times * now.fragments
        if times > 1 and period > _LONGEST:
            return
        for compression in (now.compression, *codecs):
            for delay in range(now.delay, longest + 1):
                yield ExchangeTuning(period, delay, compression, fragments)


def choose(
    now: ExchangeTuning, measured: Measured, limits: Limits, *, generation: int = 0
) -> Choice | None:
    """Return the mildest exchange tuning by which little would be waited; None: that of now is it.

    Where none is enough, the one by which least would be waited.

    Args:
        now: under which the times were taken.
        measured: of at least one round.
        limits: what the user's settings leave open.
        generation: which membership chooses.
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
        f"an exchange of {seconds * 1e3:,.0f} ms beside steps of {measured.step_s * 1e3:,.0f} ms "
        f"made the workers wait {share_now:.0%} of their time; now {share(best, 1.0):.0%} is "
        f"expected"
    )
    return Choice(generation, best, reason)
