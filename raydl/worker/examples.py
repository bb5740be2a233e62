"""A few test pictures with the center's predictions, drawn as one picture.

All evaluations use the same pictures, so that a person sees the center learn.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from raydl.data import Samples

NUM_EXAMPLES = 16
"""The most pictures that are shown."""

_COLUMNS = 4
_SIDE = 96
"""Size of a drawn picture along its longer side, in pixels."""
_GAP, _LINE, _FONT_SIZE, _FRAME = 10, 20, 17, 3
_RIGHT, _WRONG, _TRUE, _PAPER = "#1a7f37", "#cf222e", "#57606a", "white"


def example_rows(num_samples: int) -> np.ndarray:
    """Return the rows of the pictures to show, int64, ascending.

    They are spread over the whole set, since it may be sorted by class.
    """
    count = min(NUM_EXAMPLES, num_samples)
    return np.arange(count) * num_samples // max(1, count)


class Examples:
    """The pictures to show.

    Args:
        samples: the test set; without labelled pictures nothing is shown.
    """

    def __init__(self, samples: Samples) -> None:
        self._pictures: list[Image.Image] = []
        self._labels: list[int] = []
        self._names = samples.shape.class_names
        if samples.shape.has_labelled_pictures:
            pictures, labels = samples.fetch(example_rows(samples.num_samples))
            self._pictures = [_picture(picture) for picture in _as_bytes(pictures).numpy()]
            self._labels = labels.tolist()
        self._font = ImageFont.load_default(size=_FONT_SIZE)

    def draw(self, predicted: tuple[int, ...]) -> np.ndarray:
        """Return a grid of the pictures, uint8, shape [H, W, 3]; red frames mark wrong predictions.

        Args:
            predicted: the predicted class of each picture.
        """
        num_rows = -(-len(self._pictures) // _COLUMNS)
        width, height = _SIDE + _GAP, _SIDE + 2 * _LINE + _GAP
        size = (_COLUMNS * width + _GAP, num_rows * height + _GAP)
        sheet = Image.new("RGB", size, _PAPER)
        for index, predicted_class in enumerate(predicted[: len(self._pictures)]):
            row, column = divmod(index, _COLUMNS)
            at = (_GAP + column * width, _GAP + row * height)
            self._draw_one(sheet, index, predicted_class, at)
        return np.asarray(sheet)

    def _draw_one(
        self, sheet: Image.Image, index: int, predicted: int, at: tuple[int, int]
    ) -> None:
        picture, label = self._pictures[index], self._labels[index]
        color = _RIGHT if predicted == label else _WRONG
        x, y = at
        left, top = x + (_SIDE - picture.width) // 2, y + (_SIDE - picture.height) // 2
        sheet.paste(picture, (left, top))
        pen = ImageDraw.Draw(sheet)
        if predicted != label:
            right, bottom = left + picture.width - 1, top + picture.height - 1
            frame = (left - _FRAME, top - _FRAME, right + _FRAME, bottom + _FRAME)
            pen.rectangle(frame, outline=color, width=_FRAME)
        lines = ((self._name(predicted), color), (f"is {self._name(label)}", _TRUE))
        for line, (text, fill) in enumerate(lines):
            pen.text((x, y + _SIDE + 3 + line * _LINE), self._fitting(text), fill, self._font)

    def _name(self, number: int) -> str:
        return self._names[number] if number < len(self._names) else str(number)

    def _fitting(self, text: str) -> str:
        """Return the text, shortened to the width of a picture."""
        if self._font.getlength(text) <= _SIDE:
            return text
        while text and self._font.getlength(f"{text}...") > _SIDE:
            text = text[:-1]
        return f"{text}..."


def _as_bytes(pictures: Tensor) -> Tensor:
    """Return uint8 pictures; those of a user's own data set may be floats of any range."""
    if pictures.dtype == torch.uint8:
        return pictures
    darkest, range_ = pictures.min(), pictures.max() - pictures.min()
    return ((pictures - darkest) * (255 / range_.clamp_min(1e-12))).to(torch.uint8)


def _picture(pixels: np.ndarray) -> Image.Image:
    """Return uint8 pixels, shape [C, H, W], as a picture of the drawn size."""
    channels = pixels[:3] if len(pixels) >= 3 else np.repeat(pixels[:1], 3, axis=0)
    picture = Image.fromarray(np.ascontiguousarray(channels.transpose(1, 2, 0)))
    factor = _SIDE / max(picture.size)
    size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
    # Nearest neighbor keeps the model's pixels visible in an enlarged picture.
    resampling = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
    return picture.resize(size, resampling)
