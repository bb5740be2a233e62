"""A few test pictures with what the center says of them, drawn as one picture.

They are the same ones at every evaluation, so that a person sees the center learn.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from raydl.data import Samples

NUM_EXAMPLES = 16
"""Pictures that are shown, at most."""

_COLUMNS = 4
_SIDE = 96
"""Pixels that a picture is drawn with, at most, along its longer side."""
_GAP, _LINE, _FONT_SIZE, _FRAME = 10, 20, 17, 3
_RIGHT, _WRONG, _TRUE, _PAPER = "#1a7f37", "#cf222e", "#57606a", "white"


def example_rows(num_samples: int) -> np.ndarray:
    """Return the rows that are shown, int64, rising.

    They are spread over the whole set, which may be sorted by class.
    """
    count = min(NUM_EXAMPLES, num_samples)
    return np.arange(count) * num_samples // max(1, count)


class Examples:
    """The pictures that are shown.

    Args:
        samples: the test set; of one without pictures nothing is shown.
    """

    def __init__(self, samples: Samples) -> None:
        self._pictures: list[Image.Image] = []
        self._labels: list[int] = []
        self._names = samples.shape.class_names
        if len(samples.shape.input_shape) == 3:
            pictures, labels = samples.fetch(example_rows(samples.num_samples))
            self._pictures = [_picture(picture.numpy()) for picture in pictures]
            self._labels = labels.tolist()
        self._font = ImageFont.load_default(size=_FONT_SIZE)

    def draw(self, predicted: tuple[int, ...]) -> np.ndarray:
        """Return a grid of the pictures, uint8, shape [H, W, 3]; wrong ones have a red frame.

        Args:
            predicted: a class for each picture.
        """
        num_rows = -(-len(self._pictures) // _COLUMNS)
        width, height = _SIDE + _GAP, _SIDE + 2 * _LINE + _GAP
        size = (_COLUMNS * width + _GAP, num_rows * height + _GAP)
        sheet = Image.new("RGB", size, _PAPER)
        for index, said in enumerate(predicted[: len(self._pictures)]):
            row, column = divmod(index, _COLUMNS)
            self._draw_one(sheet, index, said, (_GAP + column * width, _GAP + row * height))
        return np.asarray(sheet)

    def _draw_one(self, sheet: Image.Image, index: int, said: int, at: tuple[int, int]) -> None:
        picture, label = self._pictures[index], self._labels[index]
        color = _RIGHT if said == label else _WRONG
        x, y = at
        left, top = x + (_SIDE - picture.width) // 2, y + (_SIDE - picture.height) // 2
        sheet.paste(picture, (left, top))
        pen = ImageDraw.Draw(sheet)
        if said != label:
            box = (left - _FRAME, top - _FRAME)
            far = (left + picture.width + _FRAME - 1, top + picture.height + _FRAME - 1)
            pen.rectangle((*box, *far), outline=color, width=_FRAME)
        for line, text, fill in ((0, self._name(said), color), (1, self._truth(label), _TRUE)):
            pen.text((x, y + _SIDE + 3 + line * _LINE), self._fitting(text), fill, self._font)

    def _name(self, number: int) -> str:
        return self._names[number] if number < len(self._names) else str(number)

    def _truth(self, label: int) -> str:
        return f"is {self._name(label)}"

    def _fitting(self, text: str) -> str:
        """Return the text, shortened to the width of a picture."""
        if self._font.getlength(text) <= _SIDE:
            return text
        while text and self._font.getlength(f"{text}...") > _SIDE:
            text = text[:-1]
        return f"{text}..."


def _picture(pixels: np.ndarray) -> Image.Image:
    """Return uint8 pixels, shape [C, H, W], as a picture of the size that is drawn."""
    channels = pixels[:3] if len(pixels) >= 3 else np.repeat(pixels[:1], 3, axis=0)
    picture = Image.fromarray(np.ascontiguousarray(channels.transpose(1, 2, 0)))
    factor = _SIDE / max(picture.size)
    size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
    # Enlarged, the pixels that the model sees stay visible.
    way = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
    return picture.resize(size, way)
