"""The eight time parts over the samples, stacked and in colours, as a small picture.

TensorBoard draws every band of its own stacked chart in the one colour of the run; this picture
lies beside it under *Images*. Not imported by the package itself: workers need no Pillow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from raydl.metrics.tags import STACK
from raydl.metrics.ticks import nice_step

Point = tuple[int, Mapping[str, float]]
"""Samples, and the seconds of each part."""

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

_WIDTH, _HEIGHT = 440, 348
"""TensorBoard shows a picture 350 pixels wide: letters must stand being made smaller."""
_LEFT, _TOP, _RIGHT, _BOTTOM = 50, 26, 428, 236
"""Where the bands lie."""
_FONT_SIZE, _LINE, _SQUARE = 13, 19, 11
_FINER = 4
"""Bands are drawn so many times larger and made smaller, which smooths their edges."""
_INK, _GRID, _PAPER = "#444444", "#dddddd", "white"
_MOST_POINTS = 512


class StackHistory:
    """The time parts of a run so far, in a bounded number of points."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._newest: Point | None = None
        self._count = 0
        self._stride = 1

    def add(self, num_samples: int, parts: Mapping[str, float]) -> None:
        """Add a point; of too many, every other one is forgotten, and of those to come."""
        self._newest = (num_samples, dict(parts))
        if self._count % self._stride == 0:
            self._points.append(self._newest)
        self._count += 1
        if len(self._points) > _MOST_POINTS:
            self._points, self._stride = self._points[::2], 2 * self._stride

    def go_back(self, *, num_samples: int) -> None:
        """Forget the points from a sample on."""
        self._points = [point for point in self._points if point[0] < num_samples]
        if self._newest is not None and self._newest[0] >= num_samples:
            self._newest = self._points[-1] if self._points else None
        self._count = 0  # so that the next point is kept

    @property
    def points(self) -> tuple[Point, ...]:
        """The points in the order in which they came, the newest among them."""
        newest = self._newest
        if newest is None or (self._points and newest is self._points[-1]):
            return tuple(self._points)
        return (*self._points, newest)


def draw_stack(points: Sequence[Point]) -> np.ndarray:
    """Return the picture, uint8, shape [H, W, 3].

    Args:
        points: at least two, in the order of samples.
    """
    tops = np.array([list(accumulate(parts[name] for name in STACK)) for _, parts in points])
    samples = np.array([count for count, _ in points], dtype=float)
    highest = max(float(tops.max()), 1e-9)
    sheet = _bands(samples, tops / highest)
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=_FONT_SIZE)
    _draw_axes(pen, font, highest, samples)
    _draw_legend(pen, font, points[-1][1])
    return np.asarray(sheet)


def _bands(samples: np.ndarray, tops: np.ndarray) -> Image.Image:
    """Return a sheet with the bands alone; ``tops``: shares of the height, [points, parts]."""
    sheet = Image.new("RGB", (_WIDTH * _FINER, _HEIGHT * _FINER), _PAPER)
    pen = ImageDraw.Draw(sheet)
    span = max(samples[-1] - samples[0], 1.0)
    xs = (_LEFT + (samples - samples[0]) / span * (_RIGHT - _LEFT)) * _FINER
    ys = (_BOTTOM - tops * (_BOTTOM - _TOP)) * _FINER
    lower = np.full(len(xs), float(_BOTTOM * _FINER))
    for index, color in enumerate(STACK.values()):
        upper = ys[:, index]
        there, back = zip(xs, upper, strict=True), zip(xs[::-1], lower[::-1], strict=True)
        pen.polygon([(float(x), float(y)) for x, y in (*there, *back)], fill=color)
        lower = upper
    return sheet.resize((_WIDTH, _HEIGHT), Image.Resampling.LANCZOS)


def _draw_axes(pen: ImageDraw.ImageDraw, font: _Font, highest: float, samples: np.ndarray) -> None:
    pen.text((_LEFT, 5), "seconds per worker, by part", _INK, font)
    step = nice_step(highest, 4)
    for number in range(int(highest / step + 1e-9) + 1):
        y = round(_BOTTOM - number * step / highest * (_BOTTOM - _TOP))
        pen.line((_LEFT - 4, y, _LEFT, y), _INK)
        pen.text((_LEFT - 7, y), f"{number * step:g}", _INK, font, anchor="rm")
    pen.line((_LEFT, _TOP, _LEFT, _BOTTOM), _INK)
    pen.line((_LEFT, _BOTTOM, _RIGHT, _BOTTOM), _INK)
    pen.text((_LEFT, _BOTTOM + 4), f"{samples[0]:,.0f}", _INK, font)
    pen.text((_RIGHT, _BOTTOM + 4), f"{samples[-1]:,.0f} samples", _INK, font, anchor="ra")


def _draw_legend(pen: ImageDraw.ImageDraw, font: _Font, seconds: Mapping[str, float]) -> None:
    """Name each part with its colour and its seconds now, the lowest of the stack first."""
    for index, (part, color) in enumerate(STACK.items()):
        column, row = divmod(index, 4)
        x, y = 8 + column * 218, _BOTTOM + 30 + row * _LINE
        pen.rectangle((x, y + 2, x + _SQUARE, y + 2 + _SQUARE), color, _GRID)
        text = f"{part.replace('_', ' ')} {seconds[part]:.2g} s"
        pen.text((x + _SQUARE + 5, y), text, _INK, font)
