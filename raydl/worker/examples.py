"""A few test images with the center's predictions, drawn as one image.

All evaluations use the same images, so that a person sees the center learn.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from raydl.data import Samples

NUM_EXAMPLES = 16
"""The most images that are shown."""

_COLUMNS = 4
_SIDE = 96
"""Size of a drawn image along its longer side, in pixels."""
_GAP, _LINE, _FONT_SIZE, _FRAME = 10, 20, 17, 3
_RIGHT, _WRONG, _TRUE, _PAPER = "#1a7f37", "#cf222e", "#57606a", "white"


def example_rows(num_samples: int) -> np.ndarray:
    """Return the rows of the images to show, int64, ascending.

    They are spread over the whole set, since it may be sorted by class.
    """
    count = min(NUM_EXAMPLES, num_samples)
    return np.arange(count) * num_samples // max(1, count)


class Examples:
    """The images to show.

    Args:
        samples: the test set; without labelled images nothing is shown.
    """

    def __init__(self, samples: Samples) -> None:
        self._images: list[Image.Image] = []
        self._labels: list[int] = []
        self._names = samples.shape.class_names
        if samples.shape.has_labelled_images:
            images, labels = samples.fetch(example_rows(samples.num_samples))
            self._images = [_image(image) for image in _as_bytes(images).numpy()]
            self._labels = labels.tolist()
        self._font = ImageFont.load_default(size=_FONT_SIZE)

    def draw(self, predicted: tuple[int, ...]) -> np.ndarray:
        """Return a grid of the images, uint8, shape [H, W, 3]; red frames mark wrong predictions.

        Args:
            predicted: the predicted class of each image.
        """
        num_rows = -(-len(self._images) // _COLUMNS)
        width, height = _SIDE + _GAP, _SIDE + 2 * _LINE + _GAP
        size = (_COLUMNS * width + _GAP, num_rows * height + _GAP)
        sheet = Image.new("RGB", size, _PAPER)
        for index, predicted_class in enumerate(predicted[: len(self._images)]):
            row, column = divmod(index, _COLUMNS)
            at = (_GAP + column * width, _GAP + row * height)
            self._draw_one(sheet, index, predicted_class, at)
        return np.asarray(sheet)

    def _draw_one(
        self, sheet: Image.Image, index: int, predicted: int, at: tuple[int, int]
    ) -> None:
        image, label = self._images[index], self._labels[index]
        color = _RIGHT if predicted == label else _WRONG
        x, y = at
        left, top = x + (_SIDE - image.width) // 2, y + (_SIDE - image.height) // 2
        sheet.paste(image, (left, top))
        pen = ImageDraw.Draw(sheet)
        if predicted != label:
            right, bottom = left + image.width - 1, top + image.height - 1
            frame = (left - _FRAME, top - _FRAME, right + _FRAME, bottom + _FRAME)
            pen.rectangle(frame, outline=color, width=_FRAME)
        lines = ((self._name(predicted), color), (f"is {self._name(label)}", _TRUE))
        for line, (text, fill) in enumerate(lines):
            pen.text((x, y + _SIDE + 3 + line * _LINE), self._fitting(text), fill, self._font)

    def _name(self, number: int) -> str:
        return self._names[number] if number < len(self._names) else str(number)

    def _fitting(self, text: str) -> str:
        """Return the text, shortened to the width of an image."""
        if self._font.getlength(text) <= _SIDE:
            return text
        while text and self._font.getlength(f"{text}...") > _SIDE:
            text = text[:-1]
        return f"{text}..."


def _as_bytes(images: Tensor) -> Tensor:
    """Return uint8 images; those of a user's own data set may be floats of any range."""
    if images.dtype == torch.uint8:
        return images
    darkest, range_ = images.min(), images.max() - images.min()
    return ((images - darkest) * (255 / range_.clamp_min(1e-12))).to(torch.uint8)


def _image(pixels: np.ndarray) -> Image.Image:
    """Return uint8 pixels, shape [C, H, W], as an image of the drawn size."""
    channels = pixels[:3] if len(pixels) >= 3 else np.repeat(pixels[:1], 3, axis=0)
    image = Image.fromarray(np.ascontiguousarray(channels.transpose(1, 2, 0)))
    factor = _SIDE / max(image.size)
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    # Nearest neighbor keeps the model's pixels visible in an enlarged image.
    resampling = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
    return image.resize(size, resampling)
