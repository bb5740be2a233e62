"""Augmentations of training pictures follow from seed, epoch and row."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from ensembles import Ensemble, linear, tiny_images

from raydl.config import (
    InputConfig,
    MethodConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    TrainingConfig,
)
from raydl.config.input import AUGMENTATIONS
from raydl.data import Batches, Dataset, DataShape, ImageSet, Normalizer, preparation_for
from raydl.data.augment import Augment, crop, cutout, flip
from raydl.data.counter_rng import uniform
from raydl.data.order import Shuffled
from raydl.data.samples import as_they_are
from raydl.errors import ConfigError, UnknownNameError
from raydl.run.trainer import Trainer
from raydl.tasks import Classification

ALL = ",".join(AUGMENTATIONS)


def pictures_of(num_pictures=64, side=32, *, channels=3):
    """Return pictures whose pixels all differ, none of them 0."""
    shape = (num_pictures, channels, side, side)
    return torch.arange(1, 1 + np.prod(shape), dtype=torch.float32).view(shape)


def augmented(names, pictures, rows=None, *, seed=0, epoch=0):
    rows = np.arange(len(pictures)) if rows is None else rows
    return Augment(as_they_are, names.split(","), seed=seed).changed(pictures, rows, epoch)


def dataset(num_samples=24, *, side=8):
    images = np.random.default_rng(0).integers(0, 256, (num_samples, 3, side, side), np.uint8)
    part = ImageSet(images, np.arange(num_samples) % 3, ("0", "1", "2"))
    return Dataset(part, part, "some pictures")


def settings(augment=ALL, **training):
    training.setdefault("batch_size", 3)
    return TrainConfig(
        method=MethodConfig(name="sync-easgd", period=2),
        training=TrainingConfig(**training),
        optimizer=OptimizerConfig(lr=0.1),
        input=InputConfig(augment=augment),
    )


# random numbers


def test_the_random_numbers_never_change():
    rows = torch.tensor([0, 1, 2, 59_999, 2**40])
    numbers = (uniform(0, 0, rows, 0) * 2**24).long().tolist()
    assert numbers == [8595764, 2175092, 837519, 16023219, 11665317]
    assert (uniform(7, 3, rows, 4) * 2**24).long().tolist() == [
        14109594,
        8053253,
        9618062,
        10446963,
        6306176,
    ]


def test_the_numbers_are_those_of_splitmix64():
    def mixed(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    # The generator's published sequence from seed 1234567 confirms this reference function.
    outputs = [mixed((1234567 + golden * i) % 2**64) for i in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for seed, epoch, draw in [(0, 0, 0), (5, 2, 1), (2**63, 0, 4), (-1, 10**6, 3)]:
        key = 0
        for number in (seed, epoch, draw):
            key = mixed((key + number + golden) % 2**64)
        expected = [mixed((key + row * golden) % 2**64) >> 40 for row in range(50)]
        numbers = uniform(seed, epoch, torch.arange(50), draw)
        assert (numbers * 2**24).long().tolist() == expected


def test_the_numbers_are_spread_evenly_over_0_to_1():
    for seed, epoch, draw in itertools.product((0, 1), (0, 1), (0, 1)):
        numbers = uniform(seed, epoch, torch.arange(50_000), draw)
        assert numbers.dtype == torch.float32
        assert 0 <= numbers.min() < 1e-3
        assert 1 - 1e-3 < numbers.max() < 1
        counts = torch.histc(numbers, 100, 0, 1)
        chi_squared = float(((counts - 500) ** 2 / 500).sum())
        assert 50 < chi_squared < 160  # 99 degrees of freedom: outside less than once in 10,000


def correlation(first, second):
    return abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1]))


def test_numbers_of_different_seeds_epochs_rows_and_draws_are_uncorrelated():
    rows = torch.arange(50_000)
    keys = list(itertools.product((0, 1, 2), (0, 1, 2), (0, 1, 2)))
    drawn = [uniform(seed, epoch, rows, draw) for seed, epoch, draw in keys]
    for first, second in itertools.combinations(drawn, 2):
        assert correlation(first, second) < 0.025  # 5.6 standard deviations of random numbers
    for step in (1, 2, 3, 64, 1000):
        assert correlation(drawn[0][:-step], drawn[0][step:]) < 0.025


def test_two_draws_of_a_row_fill_the_square_evenly():
    rows = torch.arange(50_000)
    cells = (uniform(0, 0, rows, 1) * 10).long() * 10 + (uniform(0, 0, rows, 2) * 10).long()
    counts = torch.bincount(cells, minlength=100).float()
    assert 50 < float(((counts - 500) ** 2 / 500).sum()) < 160


# single augmentations


def test_a_flip_exchanges_left_and_right_of_the_selected_pictures():
    pictures = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]] * 2)
    flipped = flip(pictures, torch.tensor([True, False]))
    assert flipped.tolist() == [[[[2.0, 1.0], [4.0, 3.0]]], [[[1.0, 2.0], [3.0, 4.0]]]]


def test_a_crop_moves_a_picture_and_fills_with_zeros():
    pictures = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]] * 3)
    top, left = torch.tensor([1, 0, 2]), torch.tensor([1, 1, 0])
    moved = crop(pictures, top, left, pad=(1, 1))
    assert moved.tolist() == [
        [[[1.0, 2.0], [3.0, 4.0]]],
        [[[0.0, 0.0], [1.0, 2.0]]],
        [[[0.0, 3.0], [0.0, 0.0]]],
    ]


def test_a_cutout_is_a_square_that_may_reach_over_the_edge():
    pictures = torch.ones(2, 2, 4, 6)
    cut = cutout(pictures, torch.tensor([2, 0]), torch.tensor([2, 5]), side=2)
    whole = [[1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 1], [1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
    edge = [[1, 1, 1, 1, 0, 0], *[[1, 1, 1, 1, 1, 1]] * 3]
    assert cut.tolist() == [[whole, whole], [edge, edge]]


def test_half_of_the_pictures_are_flipped_and_no_other_pixel_moves():
    pictures = pictures_of(400, 4)
    flipped = augmented("flip", pictures)
    is_same = (flipped == pictures).flatten(1).all(1)
    is_mirrored = (flipped == pictures.flip(3)).flatten(1).all(1)
    assert (is_same ^ is_mirrored).all()
    assert 150 < int(is_mirrored.sum()) < 250


def shift(before, after):
    """Return the shift (down, right) of a picture, and check that nothing else has changed."""
    _, height, width = before.shape
    place = int(after[0, height // 2, width // 2] - before[0, 0, 0])
    down, right = height // 2 - place // width, width // 2 - place % width
    moved = torch.nn.functional.pad(before, (right, -right, down, -down))
    assert torch.equal(moved, after)
    return down, right


def test_a_crop_keeps_the_shape_and_moves_by_at_most_an_eighth_of_the_side():
    pictures = pictures_of(300, 32)
    cropped = augmented("crop", pictures)
    assert cropped.shape == pictures.shape
    shifts = [shift(*pair) for pair in zip(pictures, cropped, strict=True)]
    for axis in (0, 1):
        assert {pair[axis] for pair in shifts} == set(range(-4, 5))
    assert len(set(shifts)) > 70  # of 81: both directions are independent


def test_a_cutout_takes_a_square_of_half_the_side_from_all_channels():
    pictures = pictures_of(300, 32)
    cut = augmented("cutout", pictures)
    is_cut = cut == 0
    assert torch.equal(cut[~is_cut], pictures[~is_cut])
    assert torch.equal(is_cut.any(1), is_cut.all(1))
    heights, widths = is_cut[:, 0].any(2).sum(1), is_cut[:, 0].any(1).sum(1)
    assert torch.equal(heights * widths, is_cut[:, 0].flatten(1).sum(1))
    for sides in (heights, widths):
        assert sides.min() == 8  # its center is at the edge
        assert sides.max() == 16
    assert (heights != widths).any()


@pytest.mark.parametrize("shape", [(1, 1, 4, 4), (2, 3, 28, 20), (0, 3, 32, 32), (3, 1, 1, 1)])
def test_pictures_of_any_size_keep_theirs(shape):
    pictures = torch.ones(shape)
    after = augmented(ALL, pictures)
    assert after.shape == shape
    assert torch.equal(pictures, torch.ones(shape))


def test_pixels_shifted_in_or_cut_out_have_the_mean_color():
    data = dataset()
    config = settings("crop,cutout")
    after, _ = preparation_for(data, config)(data.train.fetch(np.arange(24)), np.arange(24), 0)
    mean = Normalizer.of(data.train)
    zero = (after == 0).all(1)
    assert 0.1 < float(zero.float().mean()) < 0.6
    original = mean.normalized(data.train.fetch(np.arange(24))[0])
    assert not (original == 0).all(1).any()


# dependence on sample, seed, epoch and names


def test_the_augmentation_of_a_sample_does_not_depend_on_its_batch():
    pictures = pictures_of(24, 8)
    whole = augmented(ALL, pictures, epoch=3)
    for size in (1, 5, 24):
        parts = [
            augmented(ALL, part, np.arange(24)[start : start + size], epoch=3)
            for start, part in zip(range(0, 24, size), pictures.split(size), strict=True)
        ]
        assert torch.equal(torch.cat(parts), whole)
    order = np.random.default_rng(0).permutation(24)
    assert torch.equal(augmented(ALL, pictures[order], order, epoch=3), whole[order])


def test_different_epochs_seeds_and_rows_have_different_augmentations():
    pictures = pictures_of(24, 32)
    first = augmented("crop", pictures)
    assert not torch.equal(first, augmented("crop", pictures, epoch=1))
    assert not torch.equal(first, augmented("crop", pictures, seed=1))
    assert not torch.equal(first, augmented("crop", pictures, np.arange(24) + 24))


def test_the_order_of_the_names_changes_nothing():
    pictures = pictures_of(24, 32)
    assert torch.equal(
        augmented("flip,crop,cutout", pictures), augmented("cutout,flip,crop", pictures)
    )


def test_an_augmentation_does_not_depend_on_the_others():
    pictures = pictures_of(24, 32)
    for names in itertools.combinations(AUGMENTATIONS, 2):
        one_by_one = augmented(names[1], augmented(names[0], pictures))
        assert torch.equal(one_by_one, augmented(",".join(names), pictures))


def test_a_flip_is_uncorrelated_with_a_crop():
    pictures = pictures_of(600, 8, channels=1)
    is_flipped = (augmented("flip", pictures) != pictures).flatten(1).any(1)
    shifts = [shift(*pair) for pair in zip(pictures, augmented("crop", pictures), strict=True)]
    for some in (is_flipped, ~is_flipped):
        found = {shifts[i] for i in torch.nonzero(some).flatten().tolist()}
        assert found == set(itertools.product((-1, 0, 1), repeat=2))


def test_augmentation_uses_no_stateful_generator():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    augmented(ALL, pictures_of(8))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_read_only_rows_are_accepted():
    rows = np.arange(8)
    rows.flags.writeable = False
    assert torch.equal(augmented(ALL, pictures_of(8), rows), augmented(ALL, pictures_of(8)))


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits_as_the_cpu():
    rows = torch.cat([torch.arange(10_000), torch.arange(2**40, 2**40 + 10_000)])
    for seed, epoch, draw in [(0, 0, 0), (-1, 10**6, 4), (2**62, 3, 1)]:
        on_device = uniform(seed, epoch, rows.cuda(), draw)
        assert on_device.is_cuda
        assert torch.equal(on_device.cpu(), uniform(seed, epoch, rows, draw))
    data = dataset(64, side=32)
    prepare, rows = preparation_for(data, settings()), np.arange(64)
    pictures, _ = prepare(data.train.fetch(rows), rows, 5)
    on_device, _ = prepare(tuple(t.cuda() for t in data.train.fetch(rows)), rows, 5)
    assert on_device.is_cuda
    assert torch.equal(on_device.cpu(), pictures)


# in runs


class RecordingPreparation:
    """A preparation that keeps the prepared picture of each sample in each epoch."""

    def __init__(self, prepare):
        self.prepare = prepare
        self.seen = {}

    def __call__(self, batch, rows, epoch):
        pictures, labels = self.prepare(batch, rows, epoch)
        for row, picture in zip(rows.tolist(), pictures, strict=True):
            assert (epoch, row) not in self.seen
            self.seen[epoch, row] = picture.numpy().tobytes()
        return pictures, labels


def run_of(config, *, num_workers, prepare=None):
    images = tiny_images(25)
    prepare = prepare or preparation_for(Dataset(images, images, "tiny"), config)
    ensemble = Ensemble(config, num_workers=num_workers, images=images)
    ensemble.batches = Batches(images, prepare)
    ensemble.use_task(Classification(linear))
    return ensemble


def seen_by(num_workers, **training):
    config = settings(epochs=2, **training)
    images = tiny_images(25)
    recording = RecordingPreparation(preparation_for(Dataset(images, images, "tiny"), config))
    run_of(config, num_workers=num_workers, prepare=recording).join().run()
    return recording.seen


def test_the_augmentation_of_a_sample_does_not_depend_on_the_number_of_workers():
    alone = seen_by(1)
    assert set(alone) == set(itertools.product(range(2), range(25)))
    assert seen_by(3) == alone
    assert seen_by(2, batch_size=5) == alone
    assert any(alone[0, row] != alone[1, row] for row in range(25))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_run_stopped_and_resumed_ends_with_the_bits_of_one_that_was_not(num_workers):
    config = settings(epochs=2)
    whole = run_of(config, num_workers=num_workers).join()
    whole.run()
    first = run_of(config, num_workers=num_workers).join()
    first.run(2)
    first.workers[-1].vote(1, stop=1.0)
    first.run()
    states = {w.worker_id: w.pop_kept(first.newest.progress.round) for w in first.workers}
    second = run_of(config, num_workers=num_workers).join(first.newest, states)
    second.run()
    assert first.newest.progress.round < second.newest.progress.round == whole.newest.progress.round
    assert np.array_equal(second.newest.weights, whole.newest.weights)
    plain = run_of(settings("none", epochs=2), num_workers=num_workers).join()
    plain.run()
    assert not np.array_equal(plain.newest.weights, whole.newest.weights)


def test_samples_of_evaluations_are_never_augmented():
    data = dataset()
    rows = np.arange(24)
    prepare = preparation_for(data, settings())
    plain, labels = Batches(data.test, Normalizer.of(data.train)).batch(rows)
    scored, scored_labels = Batches(data.test, prepare).batch(rows)
    assert torch.equal(scored, plain)
    trained, trained_labels = prepare(data.test.fetch(rows), rows, 0)
    assert not torch.equal(trained, plain)
    assert torch.equal(labels, scored_labels)
    assert torch.equal(labels, trained_labels)


def test_an_augmentation_can_be_pickled():
    data = dataset()
    prepare, rows = preparation_for(data, settings()), np.arange(24)
    there = pickle.loads(pickle.dumps(prepare))
    first, second = (p(data.train.fetch(rows), rows, 1)[0] for p in (prepare, there))
    assert torch.equal(first, second)


# settings


def test_without_augmentation_pictures_are_only_normalized():
    assert isinstance(preparation_for(dataset(), settings("none")), Normalizer)


def test_names_are_separated_by_commas_and_may_have_spaces():
    assert InputConfig().augmentations == ()
    assert InputConfig(augment="crop, flip").augmentations == ("crop", "flip")
    pictures = pictures_of(8)
    for name in AUGMENTATIONS:
        assert not torch.equal(augmented(name, pictures), pictures), name


def test_an_unknown_name_lists_the_known_ones():
    message = "input.augment has no 'flop'; did you mean flip.* known: none, flip, crop, cutout"
    with pytest.raises(UnknownNameError, match=message):
        InputConfig(augment="crop,flop")


@pytest.mark.parametrize("augment", ["flip,flip", "none,flip", "none,none"])
def test_a_repeated_name_and_none_with_another_name_are_refused(augment):
    message = f"input.augment must be none, or some of flip, crop, cutout, each once, got {augment}"
    with pytest.raises(ConfigError, match=message):
        InputConfig(augment=augment)


def test_an_empty_name_is_refused():
    with pytest.raises(UnknownNameError, match=r"input\.augment has no ''"):
        InputConfig(augment="flip,")


class Text:
    """A set of texts, with the members that a trainer uses before it starts."""

    num_samples = 8
    shape = DataShape((16,), 65)
    is_streamed = False

    def order(self, seed):
        return Shuffled(8, seed)

    def fetch(self, rows):
        return torch.zeros(len(rows), 16), torch.zeros(len(rows), dtype=torch.int64)

    def prefetch(self, rows):
        pass


def test_other_data_than_pictures_are_refused_before_anything_starts(tmp_path):
    config = {
        "input": InputConfig(augment="flip"),
        "training": TrainingConfig(batch_size=2),
        "run": RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    }
    message = (
        "^input.augment must be none for texts of 16 tokens out of 65, got flip: it changes "
        "images only$"
    )
    task = Classification(lambda shape, num_classes: torch.nn.Linear(16, num_classes))
    with pytest.raises(ConfigError, match=message):
        Trainer(task, Dataset(Text(), Text(), "a text"), **config).fit()
    assert not (tmp_path / "run").exists()
