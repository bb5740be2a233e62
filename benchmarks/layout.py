"""Measures which models are faster on a CPU if the channels of a pixel are adjacent in memory.

Command:   python -m benchmarks.layout            (--quick: the models for small pictures, once)

Each named model computes loss and gradient of a batch (64 small pictures, or 4 of ImageNet's size)
with one thread, once with pictures and feature maps as [B, C, H, W] in memory and once as
[B, H, W, C]. A figure is the time of the first over that of the second: above 1 the model is faster
with the channels last and should use ``raydl.models.parts.channels_last``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch
from torch.nn import functional

from benchmarks.measure import Figure, Report, interleaved, options_of, ratios
from raydl.models import MODELS, ModelRow
from raydl.ray_backend.actors import keep_freed_memory

LAYOUTS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}
CONVERTING = ("alexnet", "googlenet", "lenet", "resnet")
"""Modules of models that convert their pictures."""
_SMALL = 64
"""The largest side of a small picture."""


@contextlib.contextmanager
def as_given() -> Iterator[None]:
    """Prevent models from converting the layout of their pictures."""
    with contextlib.ExitStack() as stack:
        for name in CONVERTING:
            stack.enter_context(mock.patch(f"raydl.models.{name}.channels_last", lambda x: x))
        yield


def is_small(row: ModelRow) -> bool:
    """Whether a model is designed for small pictures."""
    return row.made_for[0][-1] <= _SMALL


def cases(row: ModelRow) -> dict[str, Callable[[], float]]:
    """Return functions that compute a gradient and return its seconds, by layout."""
    (shape, num_classes), batch_size = row.made_for, 64 if is_small(row) else 4
    torch.manual_seed(0)
    model = row.build(shape, num_classes)
    pictures, labels = torch.randn(batch_size, *shape), torch.randint(num_classes, (batch_size,))

    def gradient(layout: torch.memory_format) -> float:
        given = pictures.to(memory_format=layout)
        began = time.process_time()
        functional.cross_entropy(model(given), labels).backward()  # type: ignore[no-untyped-call]
        return time.process_time() - began

    return {name: partial(gradient, layout) for name, layout in LAYOUTS.items()}


def main() -> None:
    """Measure and report."""
    options = options_of(__doc__).parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    report = Report.of_command("layout", options)
    repeats = 1 + (options.repeats or (1 if options.quick else 5))  # the first warms up
    for name, row in MODELS.items():
        if row.reads_texts or (options.quick and not is_small(row)):
            continue
        with as_given():
            seconds = interleaved(cases(row), repeats=repeats)
        first, last = (seconds[layout][1:] for layout in LAYOUTS)
        report.add_figures(Figure(name=f"layout.{name}", value=ratios(first, last)))
    report.close(options.out)


if __name__ == "__main__":
    main()
