"""What limits the figures that miss their targets, as far as it was measured; for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

_JOURNAL = "journal.md"


@dataclass(frozen=True)
class Limit:
    """The limit of some figures."""

    figures: Sequence[str]
    """Their names; ``*`` stands for any characters."""
    text: str
    """What limits them, as one or more sentences."""
    section: str
    """The section of the journal with the measurements, as an anchor."""

    def is_of(self, figure: str) -> bool:
        """Whether it is the limit of a figure."""
        return any(fnmatchcase(figure, name) for name in self.figures)

    def markdown(self) -> str:
        """Return the text with a link to the journal."""
        return f"{self.text} ([journal]({_JOURNAL}#{self.section}))"


LIMITS = (
    Limit(
        ["speeds.points_of_fednova_below_local_sgd"],
        "The ledger gives each sample to some worker once an epoch: what the slow worker leaves of "
        "its share, the other takes. Before any share is shared the two are equal.",
        "fednova-where-each-sample-is-trained-once-an-epoch",
    ),
    Limit(
        ["allreduces.*.auto"],
        "On four hosts `auto` chose torch's own all-reduce for these networks in each repeat, so "
        "the two differ only by as much as runs differ. On one node LeNet's is within 1% of it.",
        "the-adaptive-all-reduce-gains-where-nodes-hold-several-workers",
    ),
    Limit(
        ["recovery.*-spare.full_strength_s"],
        "On the day of this run the machine needed four times as long to decode MNIST as on that "
        "of the run before, which had 0.21 and 0.24 s.",
        "starts-and-recoveries-with-and-without-the-fork-server",
    ),
    Limit(
        ["efficiency.lenet.*_over_*"],
        "raydl loses here what it loses in the rows above. A run of five repeats had 1.25 over "
        "torchrun DDP and 1.24 over Ray Train.",
        "a-workers-step-beside-that-of-a-plain-process",
    ),
    Limit(
        ["efficiency.lenet.sync-easgd-p1"],
        "Both workers wait after each step for the slower one, as the ranks of DDP do. The sum "
        "itself takes 0.31 ms, and would take no less through shared memory.",
        "a-workers-step-beside-that-of-a-plain-process",
    ),
    Limit(
        ["efficiency.lenet.*-p10"],
        "Two workers use both cores. The processes of Ray, driver, center and evaluator use 2.7% "
        "of them (4.1% where messages move the center), the threads of gloo and Ray 2%, clipping, "
        "counting and timing 4%; two workers of `sync-easgd` wait 4% of the time for one another. "
        "ResNet-20, whose steps take longer, loses less. Later a single worker, with a core left "
        "for the other processes, had 0.99.",
        "a-workers-step-beside-that-of-a-plain-process",
    ),
    Limit(
        ["efficiency.resnet20.sync-easgd-p10"],
        "Other runs had 1.03 and 0.99. In this one each worker used 96.4% of a core, the driver "
        "1.5% and the center up to 1%.",
        "a-workers-step-beside-that-of-a-plain-process",
    ),
    Limit(
        ["exchange.alexnet.sync"],
        "The weights are copied into the message, since the replica trains on while it is summed. "
        "A prototype whose message is sent in pieces took 1.16 of the bare sum, one without the "
        "copy 1.05; torch's all-reduce has neither form.",
        "exchange",
    ),
    Limit(
        ["exchange.alexnet.async", "exchange.alexnet.hogwild"],
        "The difference between replica and center is stored, as the center moves before the "
        "replica does. A prototype that moves both at one moment had 1.38, but each round would "
        "wait for the center.",
        "exchange",
    ),
    Limit(
        ["exchange.lenet.async", "exchange.lenet.hogwild"],
        "Of 0.65 ms, most is a call of Ray, which completes the message; four passes over these "
        "weights take 0.18 ms.",
        "exchange",
    ),
    Limit(
        ["goodput.*-spare-worker"],
        "Other runs had 0.85 to 1.01 for `sync-easgd`, 0.91 to 1.01 for "
        "`async-easgd`. The quiet speed, by which they are divided, is uncertain by 5% to 9%.",
        "goodput",
    ),
    Limit(
        ["goodput.*-center"],
        "While a new center starts, the two workers lack 0.2 to 0.45 s of CPU time, 0.7% to 1.5% "
        "of that between two kills. The quiet speed, by which the figure is divided, is uncertain "
        "by 5% to 9%; a shorter run had 1.01.",
        "goodput",
    ),
    Limit(
        ["goodput.*-notice"],
        "A drained worker moves to a new node. To import there and to start a process takes 2 s of "
        "CPU time, and all nodes share two cores here; the workers of a synchronous method wait "
        "0.75 s for the replica.",
        "goodput",
    ),
    Limit(
        ["growth.workers.sync-*"],
        "Eight processes share two cores: the all-reduce alone grows as much "
        "(`workers.bare-8-per-worker-over-2`, of the same run).",
        "growth",
    ),
    Limit(
        ["growth.plan.*-4-*", "growth.plan.sync-easgd-2-250-*"],
        "The prediction does not include the wait for other workers, which is most of a share of a "
        "few per cent, and four workers share two cores.",
        "growth",
    ),
    Limit(
        ["mixed_speed.*.sync-easgd-by-speed"],
        "The workers use 92% to 95% of their quotas: the fastest takes 10 steps in a round, the "
        "others a whole number of steps, so they wait for one another, and longer while the steps "
        "follow a change. The rest is that of the asynchronous methods.",
        "workers-of-different-speed",
    ),
    Limit(
        ["mixed_speed.slow.*", "mixed_speed.slow-of-four.*", "mixed_speed.changing.*"],
        "The workers use 97% to 100% of their quotas, so they hardly wait. They train 3% to 12% "
        "fewer samples per CPU second than plain processes. A single worker, with the other core "
        "left for center, driver and Ray, has 0.99 of a plain process; so what is lost is not the "
        "worker's own step, but probably the price of sharing two cores with these.",
        "workers-of-different-speed",
    ),
    Limit(
        ["time_to_accuracy.ray-train_over_*", "time_to_accuracy.torchrun-ddp_over_*"],
        "With equal tuning all need the same samples, and a score costs all the same time: two "
        "cores have no room for it. So this is the ratio of their speeds, see `efficiency`. "
        "Earlier runs had 1.19 (two of them) and 0.99 for Ray Train over the tuned case.",
        "time-to-accuracy",
    ),
    Limit(
        ["time_to_accuracy.*_over_sync-easgd"],
        "These are the defaults, which are not chosen for one network: with equal tuning the first "
        "method is `sync-easgd`. The samples of a method differ by a tenth between seeds, which is "
        "the distance of two scores, so two seeds order no methods that are this close.",
        "time-to-accuracy",
    ),
)
"""The first one with a figure's name counts."""


def limit_of(figure: str) -> Limit | None:
    """Return the limit of a figure; None: it is not known."""
    return next((limit for limit in LIMITS if limit.is_of(figure)), None)
