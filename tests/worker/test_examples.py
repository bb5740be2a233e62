"""The sheet of examples: the same pictures each time, with wrong predictions marked."""

import dataclasses

import numpy as np
import pytest
import torch
from ensembles import SHAPE, Ensemble, linear, tiny_images

from raydl.config import TrainConfig
from raydl.core.center import first_snapshot
from raydl.core.flat import FlatModel
from raydl.data import Batches, ImageSet, Normalizer
from raydl.tasks import Classification, predict
from raydl.worker.evaluator import Evaluator
from raydl.worker.examples import NUM_EXAMPLES, Examples, example_rows

RED = (0xCF, 0x22, 0x2E)


def has(pixels, color):
    return bool((pixels == color).all(axis=2).any())


def test_examples_are_spread_over_a_set_that_may_be_sorted_by_class():
    assert example_rows(1600).tolist() == list(range(0, 1600, 100))
    assert example_rows(3).tolist() == [0, 1, 2]
    assert len(example_rows(17)) == NUM_EXAMPLES


def test_only_a_wrong_prediction_is_marked():
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


def test_a_task_with_classes_predicts_in_evaluation_mode():
    model = torch.nn.Sequential(linear(SHAPE.input_shape, 3), torch.nn.Dropout(0.9)).train()
    inputs = torch.randn(5, *SHAPE.input_shape)
    with torch.no_grad():
        expected = model.eval()(inputs).argmax(1).tolist()
    model.train()
    assert predict(Classification(linear), model, inputs) == tuple(expected)
    assert model.training


def test_a_task_without_classes_has_no_examples():
    class Regression(Classification):
        """A task without classes."""

        predict = None

    images = tiny_images(20)
    job = Ensemble(TrainConfig(), num_workers=0, images=images).job
    snapshot = first_snapshot(FlatModel(linear(SHAPE.input_shape, 3)), 20)
    test = Batches(images, Normalizer.of(images))
    for task, count in ((Classification(linear), NUM_EXAMPLES), (Regression(linear), 0)):
        evaluator = Evaluator(dataclasses.replace(job, task=task), test)
        assert len(evaluator.evaluate(snapshot).predicted) == count
