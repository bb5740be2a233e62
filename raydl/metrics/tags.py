"""Names and descriptions of all curves, and the order and colors of the time parts."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from raydl.metrics.time_parts import TIME_PARTS


class Thinning(enum.Enum):
    """The value of a point that stands for several records; see ``thinning.py``."""

    NEWEST = "the newest value, for counters, sums since the start, and settings"
    MEAN = "the mean over the records since the previous point"
    NEVER = "every value is written"


@dataclass(frozen=True)
class Tag:
    """One TensorBoard scalar; a name with the ending ``/ID`` stands for one scalar per worker."""

    name: str
    sentence: str
    thinning: Thinning = Thinning.NEWEST

    @property
    def group(self) -> str:
        """Part of the name before the slash; TensorBoard shows the curves of a group together."""
        return self.name.partition("/")[0]

    @property
    def is_per_worker(self) -> bool:
        """Whether the last part of the name is the id of a worker."""
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
"""Colors of the time parts, from the bottom to the top of the stack: work in blue, communication
in red, then the rest."""

STACK_GROUP = "time_stacked"
"""Group of the curves between the bands of the stack."""

STACK_GROUND = f"{STACK_GROUP}/ground"
"""The curve below the lowest band."""

OWN_METRIC = "center/NAME"
"""Stands for each metric of a custom task other than loss and accuracy."""

_TAGS = (
    Tag("train/loss", "Mean training loss of all workers since the previous point.", Thinning.MEAN),
    Tag("train/lr", "Learning rate of the local step."),
    Tag("train/epoch", "Passes over the training set so far, by all workers together."),
    Tag(
        "center/accuracy",
        "Share of the test set that the center classifies correctly, 0 to 1.",
        Thinning.NEVER,
    ),
    Tag("center/loss", "Mean loss of the center on the test set.", Thinning.NEVER),
    Tag(
        OWN_METRIC,
        "Another metric of the task, for the center, mean over the test set.",
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
        "Seconds per local step of worker ID in its newest round, without waiting.",
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
            ("step_s", "Seconds per local step in a worker's newest round, without waiting"),
            ("waited_s", "Seconds that a worker waited for exchanges in its newest round"),
        )
        for which in ("least", "median", "most")
    ),
    Tag("exchange/count", "Exchanges completed since the run began."),
    Tag("exchange/seconds", "Seconds that a worker waited for one exchange.", Thinning.MEAN),
    Tag(
        "exchange/bytes",
        "Bytes of one worker in one round: its messages and the center's responses, also in "
        "shared memory.",
    ),
    Tag(
        "exchange/period",
        "Local steps of a worker between two exchanges, mean: fewer than the period after a round "
        "that was cut short.",
        Thinning.MEAN,
    ),
    Tag(
        "exchange/staleness",
        "Exchanges of other workers between two exchanges of one worker, mean.",
        Thinning.MEAN,
    ),
    Tag(
        "exchange/allreduce_predicted_s",
        "Predicted seconds of the chosen all-reduce, from the measured network; not of torch's "
        "own.",
    ),
    Tag(
        "exchange/allreduce_s",
        "Measured seconds of the all-reduce, least of the newest 101: without waiting for late "
        "workers.",
    ),
    Tag(
        "exchange/communication_share",
        "Share of communication in the workers' time since initialization, 0 to 1.",
    ),
    Tag(
        "exchange/refused",
        "Messages, snapshots and checkpoints that were refused as outdated, since this start.",
    ),
    Tag(
        "exchange/lost_residuals",
        "How often something that compressed messages had left out was lost, since this start.",
    ),
    Tag("data/left_out", "Samples that could not be read and were skipped, since this start."),
    *(
        Tag(f"time/{part}", f"Seconds per worker since this start spent on {meaning}.")
        for part, meaning in TIME_PARTS.items()
    ),
    Tag(STACK_GROUND, "Always 0: the baseline of the stack of time parts."),
    *(
        Tag(
            f"{STACK_GROUP}/{part}",
            f"Seconds of `time/{part}` and the parts below it in the stack."
            if below
            else f"Seconds of `time/{part}`, the lowest part of the stack.",
        )
        for below, part in enumerate(STACK)
    ),
)

TAGS: dict[str, Tag] = {tag.name: tag for tag in _TAGS}
"""All scalars of a run; ``docs/metrics.md`` has the same descriptions."""

COMPARED: dict[str, Tag] = {
    tag.name: tag
    for tag in (
        Tag("compare/accuracy", "Accuracy of the center at the end of the run."),
        Tag("compare/seconds_to_target", "Seconds of training until the target was reached."),
        Tag("compare/samples_to_target", "Samples until the target was reached."),
        Tag("compare/bytes_to_target", "Bytes sent in exchanges until the target was reached."),
        Tag("compare/samples_per_s", "Training samples per second over the whole run."),
        Tag("compare/communication_share", "Share of communication in the time, 0 to 1."),
    )
}
"""Tags that a comparison adds to each of its runs, one point at the last sample of the run."""


OF_COMPARISON = ".compare"
"""Suffix of the event files that a comparison adds to the folders of its runs."""


def tag_of(name: str) -> Tag:
    """Return the tag that describes the name of a curve.

    It is ``worker_step_s/ID`` for ``worker_step_s/w0``, and ``center/NAME`` for a metric of a
    custom task, such as ``center/top5``.
    """
    group = name.partition("/")[0]
    tag = (
        TAGS.get(name) or COMPARED.get(name) or TAGS.get(f"{group}/ID") or TAGS.get(f"{group}/NAME")
    )
    assert tag is not None, f"{name} has no description in metrics.TAGS"
    return tag


def time_values(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the values of the curves of the eight parts, single and stacked, in seconds."""
    heights = accumulate(parts[part] for part in STACK)
    return {
        **{f"time/{part}": seconds for part, seconds in parts.items()},
        STACK_GROUND: 0.0,
        **{f"{STACK_GROUP}/{part}": height for part, height in zip(STACK, heights, strict=True)},
    }
