"""DES-LOC: weights and the moments of Adam are averaged, each at its own interval."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from raydl.core.rules import LocalStep, Mail, Message, Now, ReplicaSpan, State
from raydl.methods.local_sgd import LocalSGD
from raydl.methods.options import at_least

_MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}
"""The names of Adam's moments in the state of torch's optimizer, by lane."""


class DESLOC(LocalSGD):
    """Local steps of Adam, then the mean of the weights, and more rarely those of the two moments.

    D_i = c - x_i ; c <- c - lr*mean(D) ; x_i <- c
    u_i <- mean(u) in every 3rd exchange, v_i <- mean(v) in every 6th

    u and v are the first and second moment in Adam. They change more slowly than the weights, so
    their means may be older. An exchange of all three sends three times the bytes; over six
    exchanges it is 1.5 times on average. A newcomer begins without moments, and gets those of all
    with the next mean. Its count of steps, by which Adam corrects them, is its own: at first its
    steps are shorter than those of the others. (arXiv 2505.22549, at second hand: intervals of tau,
    3 tau and 6 tau.)

    Args:
        first: exchanges from one mean of u to the next.
        second: the same for v.
    """

    name, source = "des-loc", "arXiv 2505.22549"
    lanes = ("progress", *_MOMENTS)
    inner = tuple(_MOMENTS.values())
    local_step = LocalStep("adamw", lr=1e-3)

    def __init__(
        self,
        lr: float | None = None,
        *,
        momentum: float | None = None,
        first: int = 3,
        second: int = 6,
    ) -> None:
        super().__init__(lr, momentum=momentum)
        self.lane_rounds = {
            "first": at_least("first", first, 1),
            "second": at_least("second", second, 1),
        }

    @property
    def shared(self) -> tuple[str, ...]:  # type: ignore[override]
        """The newest mean of u and of v, and the outer momentum, if any."""
        return (*_MOMENTS, *super().shared)

    def compose(
        self, replica: ReplicaSpan, center: Tensor, state: State, out: Mapping[str, Tensor]
    ) -> Message:
        """Return D, and copies of u and v if they travel now."""
        lanes = dict(super().compose(replica, center, state, out).lanes)
        for lane in out.keys() & _MOMENTS.keys():
            lanes[lane] = out[lane].copy_(replica.inner[_MOMENTS[lane]])
        return Message(lanes)

    def merge_(self, center: Tensor, mail: Mail, state: State, now: Now) -> None:
        """Step along mean(D), and note the means of u and v that have travelled."""
        for lane in mail.sums.keys() & _MOMENTS.keys():
            state[lane].copy_(mail.mean(lane))
        super().merge_(center, mail, state, now)

    def land_(self, replica: ReplicaSpan, center: Tensor, state: State, now: Now) -> None:
        """Do x <- c, and u <- mean(u), v <- mean(v) if they have travelled."""
        super().land_(replica, center, state, now)
        for lane in replica.sent.keys() & _MOMENTS.keys():
            replica.inner[_MOMENTS[lane]].copy_(state[lane])
