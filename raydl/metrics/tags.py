"""Every curve raydl writes, each with its sentence; and how they are laid out in pictures."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from raydl.metrics.time_parts import TIME_PARTS


class Thinning(enum.Enum):
    """How points are combined when a long run writes fewer of them; see ``thinning.py``."""

    NEWEST = "the newest value: of counters, sums since the start, and settings"
    MEAN = "the mean over the records since the point before"
    NEVER = "itself: every value is written"


@dataclass(frozen=True)
class Tag:
    """One TensorBoard scalar; a name that ends in ``/ID`` stands for one of each worker."""

    name: str
    sentence: str
    thinning: Thinning = Thinning.NEWEST

    @property
    def group(self) -> str:
        """The part of the name before the slash; TensorBoard shows a group's curves together."""
        return self.name.partition("/")[0]

    @property
    def is_per_worker(self) -> bool:
        """Whether the last part of the name is a worker's id."""
        return self.name.endswith("/ID")


STACK = {
    "forward_backward": "#2166ac",
    "replica_update": "#67a9cf",
    "center_update": "#b3d3e8",
    "device_device_parameters": "#d6604d",
    "host_device_parameters": "#f4a582",
    "host_device_data": "#fddbc7",
    "data_io": "#7fbf7b",
    "initialization": "#e3e3e3",
}
"""The time parts from the bottom of the stack to its top, with their colours in pictures: work
in blue, communication in red, then the rest."""

STACK_GROUP = "time_stacked"
"""The group of the curves that are the edges of the stack."""

STACK_GROUND = f"{STACK_GROUP}/ground"
"""The line that the stack stands on."""

OWN_METRIC = "center/NAME"
"""Stands for every metric of a user's task beside loss and accuracy."""

_TAGS = (
    Tag("train/loss", "Mean training loss of all workers since the point before.", Thinning.MEAN),
    Tag("train/lr", "Learning rate of the local step."),
    Tag("train/epoch", "Passes over the training set so far, by all workers together."),
    Tag(
        "center/accuracy",
        "Share of the test set that the center classifies rightly, 0 to 1.",
        Thinning.NEVER,
    ),
    Tag("center/loss", "Mean loss of the center on the test set.", Thinning.NEVER),
    Tag(
        OWN_METRIC,
        "Another metric that the task names, of the center, mean over the test set.",
        Thinning.NEVER,
    ),
    Tag(
        "center/distance",
        "Root mean square distance from the replicas to the center, over workers.",
        Thinning.MEAN,
    ),
    Tag(
        "throughput/samples_per_s",
        "Training samples per second, all workers together.",
        Thinning.MEAN,
    ),
    Tag("workers/count", "Workers that train."),
    Tag("workers/generation", "Number of the membership; it grows when workers join or leave."),
    Tag(
        "worker_step_s/ID",
        "Seconds that a local step took worker ID in its newest round, waiting not counted.",
        Thinning.MEAN,
    ),
    Tag(
        "worker_waited_s/ID",
        "Seconds that worker ID waited for exchanges in its newest round.",
        Thinning.MEAN,
    ),
    *(
        Tag(f"workers/{name}_{which}", f"{sentence}: the {which} of all workers.", Thinning.MEAN)
        for name, sentence in (
            ("step_s", "Seconds of a local step in a worker's newest round, waiting not counted"),
            ("waited_s", "Seconds that a worker waited for exchanges in its newest round"),
        )
        for which in ("least", "median", "most")
    ),
    Tag("exchange/count", "Exchanges completed since the run began."),
    Tag("exchange/seconds", "Time one exchange made a worker wait, in seconds.", Thinning.MEAN),
    Tag(
        "exchange/bytes",
        "Bytes of one worker in one round: its messages, and the center's answers; by shared "
        "memory as many.",
    ),
    Tag(
        "exchange/period",
        "Local steps of a worker from one exchange to its next, mean: fewer than the period where "
        "a round was cut short.",
        Thinning.MEAN,
    ),
    Tag(
        "exchange/staleness",
        "Exchanges of other workers that the center settled between two of the same worker, mean.",
        Thinning.MEAN,
    ),
    Tag(
        "exchange/allreduce_predicted_s",
        "Seconds that the chosen all-reduce should take by the measured network.",
    ),
    Tag(
        "exchange/allreduce_s",
        "Seconds that it takes, least of the newest 101: without waiting for late workers.",
    ),
    Tag(
        "exchange/communication_share",
        "Share of the workers' time since initialization that went into communication, 0 to 1.",
    ),
    Tag(
        "exchange/refused",
        "Messages, snapshots and checkpoints that came too late and were refused, since this "
        "start.",
    ),
    Tag("data/left_out", "Samples that could not be read and were skipped, since this start."),
    *(
        Tag(f"time/{part}", f"Seconds per worker since this start spent on {meaning}.")
        for part, meaning in TIME_PARTS.items()
    ),
    Tag(STACK_GROUND, "Always 0: the line that the stack of time parts stands on."),
    *(
        Tag(
            f"{STACK_GROUP}/{part}",
            f"Seconds of `time/{part}`, and of the {below} parts below it in the stack."
            if below
            else f"Seconds of `time/{part}`, the lowest part of the stack.",
        )
        for below, part in enumerate(STACK)
    ),
)

TAGS: dict[str, Tag] = {tag.name: tag for tag in _TAGS}
"""Every scalar of a run; ``docs/metrics.md`` says the same."""

COMPARED: dict[str, Tag] = {
    tag.name: tag
    for tag in (
        Tag("compare/accuracy", "Accuracy of the center at the end of the run."),
        Tag(
            "compare/seconds_to_target",
            "Seconds of training until the target was reached.",
        ),
        Tag("compare/samples_to_target", "Samples until the target was reached."),
        Tag(
            "compare/samples_per_s",
            "Training samples per second over the whole run.",
        ),
        Tag(
            "compare/communication_share",
            "Share of communication in the time, 0 to 1.",
        ),
    )
}
"""Tags that a comparison adds to each of its runs, one point at the run's last sample."""


OF_COMPARISON = ".compare"
"""The end of the names of the event files that a comparison adds to the folders of its runs."""


def tag_of(name: str) -> Tag:
    """Return the tag that explains a written name.

    For ``worker_step_s/w0`` that is ``worker_step_s/ID``; for a user's own metric of the test
    set, ``center/top5`` say, ``center/NAME``.
    """
    group = name.partition("/")[0]
    tag = (
        TAGS.get(name) or COMPARED.get(name) or TAGS.get(f"{group}/ID") or TAGS.get(f"{group}/NAME")
    )
    assert tag is not None, f"{name} has no sentence in metrics.TAGS"
    return tag


def time_values(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the curves of the eight parts: each alone, and stacked."""
    heights = accumulate(parts[part] for part in STACK)
    return {
        **{f"time/{part}": seconds for part, seconds in parts.items()},
        STACK_GROUND: 0.0,
        **{f"{STACK_GROUP}/{part}": height for part, height in zip(STACK, heights, strict=True)},
    }
