"""The examples: the same pictures each time, drawn so that a wrong one is seen."""

import numpy as np
import pytest
import torch
from conftest import SHAPE, linear, tiny_images

from raydl.data import ImageSet
from raydl.examples import NUM_EXAMPLES, Examples, example_rows
from raydl.task import Classification, predict

RED = (0xCF, 0x22, 0x2E)


def has(pixels, color):
    return bool((pixels == color).all(axis=2).any())


def test_examples_are_spread_over_a_set_that_may_be_sorted_by_class():
    assert example_rows(1600).tolist() == list(range(0, 1600, 100))
    assert example_rows(3).tolist() == [0, 1, 2]
    assert len(example_rows(17)) == NUM_EXAMPLES


def test_only_a_wrong_one_is_marked():
    images = tiny_images(20)
    examples, rows = Examples(images), example_rows(20)
    right = tuple(int(label) for label in images.labels[rows])
    assert not has(examples.draw(right), RED)
    wrong = ((right[0] + 1) % 3, *right[1:])
    drawn = examples.draw(wrong)
    assert has(drawn, RED)
    changed = (drawn != examples.draw(right)).any(axis=2)
    assert not changed[:, changed.shape[1] // 2 :].any()


@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 8, 8), (3, 40, 20), (4, 300, 200), (3, 1, 500)])
def test_pictures_of_any_shape_and_names_of_any_length_fit_the_same_sheet(shape):
    images = np.random.default_rng(0).integers(0, 256, (30, *shape), dtype=np.uint8)
    names = ("a", "a very long name that no picture is as wide as", "\u732b")
    examples = Examples(ImageSet(images, np.arange(30) % 3, names))
    sheet = examples.draw((1,) * NUM_EXAMPLES)
    assert (sheet.dtype, sheet.ndim, sheet.shape[2]) == (np.uint8, 3, 3)
    assert max(sheet.shape) < 700


def test_a_task_that_knows_classes_is_asked_in_evaluation_mode():
    model = torch.nn.Sequential(linear(SHAPE.image_shape, 3), torch.nn.Dropout(0.9)).train()
    inputs = torch.randn(5, *SHAPE.image_shape)
    with torch.no_grad():
        expected = model.eval()(inputs).argmax(1).tolist()
    model.train()
    assert predict(Classification(linear), model, inputs) == tuple(expected)
    assert model.training


def test_a_task_without_classes_has_no_examples():
    class Regression:
        """Says nothing of classes."""

    assert predict(Regression(), torch.nn.Identity(), torch.zeros(2, 1)) == ()
