"""Where measurements go: the protocol, and several such places at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np


class MetricsWriter(Protocol):
    """Where measurements go. The x-axis is always samples seen by all workers."""

    def scalars(
        self, values: Mapping[str, float], *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write one point for each tag.

        Args:
            values: by tag.
            num_samples: where the point lies.
            unix_s: when it happened; None: now.
        """
        ...

    def text(self, name: str, markdown: str, *, num_samples: int) -> None:
        """Write a text in Markdown."""
        ...

    def image(self, name: str, pixels: np.ndarray, *, num_samples: int) -> None:
        """Write a picture, uint8, shape [H, W, 3]."""
        ...

    def go_back(self, *, num_samples: int) -> None:
        """Hide what lies from a sample on: the center went back, and its curves go on there."""
        ...

    def flush(self) -> None:
        """Make what was written visible to readers."""
        ...

    def close(self) -> None:
        """Flush and end."""
        ...


class Tee:
    """Hands all on to several writers.

    Args:
        writers: they take everything in this order.
    """

    def __init__(self, *writers: MetricsWriter) -> None:
        self._writers = writers

    def scalars(
        self, values: Mapping[str, float], *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write one point for each tag."""
        for writer in self._writers:
            writer.scalars(values, num_samples=num_samples, unix_s=unix_s)

    def text(self, name: str, markdown: str, *, num_samples: int) -> None:
        """Write a text in Markdown."""
        for writer in self._writers:
            writer.text(name, markdown, num_samples=num_samples)

    def image(self, name: str, pixels: np.ndarray, *, num_samples: int) -> None:
        """Write a picture, uint8, shape [H, W, 3]."""
        for writer in self._writers:
            writer.image(name, pixels, num_samples=num_samples)

    def go_back(self, *, num_samples: int) -> None:
        """Hide what lies from a sample on."""
        for writer in self._writers:
            writer.go_back(num_samples=num_samples)

    def flush(self) -> None:
        """Make what was written visible to readers."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Flush and end."""
        for writer in self._writers:
            writer.close()


class Forgiving:
    """Hands all on to a writer until that fails; from then on training goes on without it.

    Args:
        writer: to disk, say, which may be full.
        name: what is lost with it: the beginning of a sentence.
        tell: takes the sentence.
    """

    def __init__(self, writer: MetricsWriter, name: str, tell: Callable[[str], None]) -> None:
        self._writer: MetricsWriter | None = writer
        self._name = name
        self._tell = tell

    def _try(self, act: Callable[[MetricsWriter], None]) -> None:
        if self._writer is None:
            return
        try:
            act(self._writer)
        except (OSError, RuntimeError, ValueError) as error:
            self._writer = None
            self._tell(f"{self._name} can not be written ({error}); training goes on without")

    def scalars(
        self, values: Mapping[str, float], *, num_samples: int, unix_s: float | None = None
    ) -> None:
        """Write one point for each tag."""
        self._try(lambda writer: writer.scalars(values, num_samples=num_samples, unix_s=unix_s))

    def text(self, name: str, markdown: str, *, num_samples: int) -> None:
        """Write a text in Markdown."""
        self._try(lambda writer: writer.text(name, markdown, num_samples=num_samples))

    def image(self, name: str, pixels: np.ndarray, *, num_samples: int) -> None:
        """Write a picture, uint8, shape [H, W, 3]."""
        self._try(lambda writer: writer.image(name, pixels, num_samples=num_samples))

    def go_back(self, *, num_samples: int) -> None:
        """Hide what lies from a sample on."""
        self._try(lambda writer: writer.go_back(num_samples=num_samples))

    def flush(self) -> None:
        """Make what was written visible to readers."""
        self._try(lambda writer: writer.flush())

    def close(self) -> None:
        """Flush and end."""
        self._try(lambda writer: writer.close())
