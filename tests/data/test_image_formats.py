"""Images in layouts of well-known sets: nested folders, MedMNIST, CIFAR-100, and only by a path."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raydl.config import InputConfig
from raydl.data import load
from raydl.errors import DataError

RNG = np.random.default_rng(0)


def encoded(number, form="PNG"):
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(file, form)
    return file.getvalue()


def write(root, files):
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return str(root)


def by_pixel(samples):
    """Return the name of the class of each sample, by the value of its pixels."""
    images, labels = samples.fetch(np.arange(samples.num_samples))
    names = samples.shape.class_names
    return {
        int(image[0, 0, 0]): names[label]
        for image, label in zip(images, labels.tolist(), strict=True)
    }


# folders


KINDS = ("n01443537", "n01629819")


def tiny_imagenet(annotations=None):
    """Return the files of a small Tiny ImageNet by path: images 0 to 19, 20 to 29 and 30 to 34."""
    files = {
        f"train/{KINDS[n % 2]}/images/{KINDS[n % 2]}_{n}.JPEG": encoded(n, "JPEG")
        for n in range(20)
    }
    files |= {f"train/{kind}/{kind}_boxes.txt": b"0 0 8 8" for kind in KINDS}
    files |= {f"val/images/val_{n}.JPEG": encoded(n, "JPEG") for n in range(20, 30)}
    files |= {f"test/images/test_{n}.JPEG": encoded(n, "JPEG") for n in range(30, 35)}
    lines = [f"val_{n}.JPEG\t{KINDS[n % 3 % 2]}\t0\t0\t8\t8\n" for n in range(20, 30)]
    files["val/val_annotations.txt"] = annotations or "".join(lines).encode()
    return files | {"wnids.txt": "\n".join(KINDS).encode(), "words.txt": b"n01443537\tgoldfish"}


def test_tiny_imagenet_is_read_as_it_is_unpacked(tmp_path):
    data = load(write(tmp_path, tiny_imagenet()))
    assert by_pixel(data.train) == {n: KINDS[n % 2] for n in range(20)}
    assert by_pixel(data.test) == {n: KINDS[n % 3 % 2] for n in range(20, 30)}
    assert "5 without classes" in data.notes[0]
    assert "4 ending in .txt" in data.notes[0]


def test_a_list_of_classes_that_is_damaged_is_told_in_one_sentence(tmp_path):
    for damaged in (b"val_20.JPEG n01443537", b"\xff\xfe"):
        folder = write(tmp_path, tiny_imagenet(damaged))
        with pytest.raises(DataError, match=r"val_annotations.txt.*is not a list of images with"):
            load(folder)
    folder = write(tmp_path, tiny_imagenet(b"val_20.JPEG\tn01443537"))
    with pytest.raises(DataError, match="has the class 'images', but elsewhere the classes n0"):
        load(folder)


def test_a_test_set_without_classes_is_left_out_and_a_tenth_is_split_off(tmp_path):
    files = {p: c for p, c in tiny_imagenet().items() if p != "val/val_annotations.txt"}
    data = load(write(tmp_path, files))
    assert set(by_pixel(data.train).values()) == set(KINDS)
    assert (data.train.num_samples, data.test.num_samples) == (18, 2)
    assert "15 without classes" in data.notes[0]


def test_images_may_be_a_class(tmp_path):
    files = {f"train/{('images', 'texts')[n % 2]}/{n}.png": encoded(n) for n in range(10)}
    files |= {f"test/images/{n}.png": encoded(n) for n in range(10, 13)}
    assert by_pixel(load(write(tmp_path, files)).test) == dict.fromkeys(range(10, 13), "images")


def test_a_folder_named_train_that_holds_images_is_a_class(tmp_path):
    files = {f"{('bus', 'car', 'train')[n % 3]}/{n}.tif": encoded(n, "TIFF") for n in range(30)}
    data = load(write(tmp_path, files))
    assert data.train.shape.class_names == ("bus", "car", "train")
    assert all(
        ("bus", "car", "train")[pixel % 3] == name for pixel, name in by_pixel(data.train).items()
    )


# arrays


def test_the_arrays_of_medmnist_have_labels_in_a_column_and_a_second_test_set(tmp_path):
    pixels = {
        part: RNG.integers(0, 256, (9, 28, 28, 3), np.uint8) for part in ("train", "val", "test")
    }
    labels = {part: RNG.integers(0, 4, (9, 1)).astype(np.uint8) for part in pixels}
    arrays = {f"{part}_images": pixels[part] for part in pixels}
    arrays |= {f"{part}_labels": labels[part] for part in pixels}
    np.savez_compressed(tmp_path / "bloodmnist.npz", **arrays)
    data = load(str(tmp_path / "bloodmnist.npz"))
    for part, samples in (("train", data.train), ("test", data.test)):
        images, numbers = samples.fetch(np.arange(9))
        assert (images.numpy() == np.moveaxis(pixels[part], 3, 1)).all()
        assert (numbers.numpy() == labels[part][:, 0]).all()
    assert any("a second test set" in note for note in data.notes)


def test_several_labels_of_an_image_are_refused(tmp_path):
    images, labels = np.zeros((9, 28, 28), np.uint8), np.zeros((9, 14), np.uint8)
    np.savez(tmp_path / "a.npz", train_images=images, train_labels=labels,
             test_images=images, test_labels=labels)  # fmt: skip
    with pytest.raises(DataError, match="train_labels has 14 labels for an image; keep one"):
        load(str(tmp_path / "a.npz"))


@pytest.mark.parametrize("has_names", [True, False])
def test_cifar_100_has_fine_labels_and_coarse_ones_by_name(tmp_path, has_names):
    rows = RNG.integers(0, 256, (12, 3074), np.uint8)
    rows[:, 0], rows[:, 1] = np.arange(12) % 20, 99 - np.arange(12)
    rows.tofile(tmp_path / "train.bin")
    rows[:5].tofile(tmp_path / "test.bin")
    if has_names:
        for file, kind, count in (("coarse", "family", 20), ("fine", "kind", 100)):
            names = "".join(f"{kind}_{n}\n" for n in range(count))
            (tmp_path / f"{file}_label_names.txt").write_text(names)
    data = load(str(tmp_path))
    images, labels = data.train.fetch(np.arange(12))
    assert (images.numpy().reshape(12, -1) == rows[:, 2:]).all()
    assert labels.tolist() == rows[:, 1].tolist()
    assert data.test.num_samples == 5
    assert data.train.shape.class_names[99] == ("kind_99" if has_names else "99")
    coarse = load(str(tmp_path), input=InputConfig(columns="image,coarse_label")).train
    assert coarse.fetch(np.arange(12))[1].tolist() == rows[:, 0].tolist()
    assert len(coarse.shape.class_names) == 20


def test_a_cifar_100_file_that_is_cut_off_is_refused(tmp_path):
    RNG.integers(0, 20, (3, 3074)).astype(np.uint8).tofile(tmp_path / "test.bin")
    write(tmp_path, {"train.bin": bytes(3000), "fine_label_names.txt": b"a\n" * 100})
    with pytest.raises(DataError, match=r"whole rows of 3074 bytes \(two labels and 3x32x32 pix"):
        load(str(tmp_path))


# paths


def write_table(root, images):
    """Write a Parquet file of images, with the numbers 0 and 1 in turn as labels."""
    root.mkdir(exist_ok=True)
    table = pa.table({"image": images, "label": [n % 2 for n in range(len(images))]})
    pq.write_table(table, root / "train.parquet")


CELL = pa.struct({"bytes": pa.binary(), "path": pa.string()})


@pytest.mark.parametrize("stream", ["always", "never"])
def test_images_that_are_only_a_path_are_read_below_the_folder_of_the_data(tmp_path, stream):
    root = tmp_path / "set"
    write(root, {f"images/{n}.png": encoded(n) for n in range(20)})
    cells = [{"bytes": None, "path": f"images/{n}.png"} for n in range(20)]
    cells[3] = {"bytes": encoded(3), "path": "/elsewhere/3.png"}
    cells[4]["path"] = str(root / "images/4.png")
    write_table(root, pa.array(cells, CELL))
    write_table(tmp_path / "texts", [f"../texts/../texts/images/{n}.png" for n in range(20)])
    write(tmp_path / "texts", {f"images/{n}.png": encoded(n) for n in range(20)})
    for folder in (root, tmp_path / "texts"):
        pq.write_table(pq.read_table(folder / "train.parquet"), folder / "test.parquet")
        data = load(str(folder), input=InputConfig(stream=stream))
        assert by_pixel(data.train) == {n: str(n % 2) for n in range(20)}


@pytest.mark.parametrize("path", ["../secret.png", "/etc/passwd", "images/../../secret.png"])
def test_a_path_that_leaves_the_folder_of_the_data_is_refused(tmp_path, path):
    write(tmp_path, {"secret.png": encoded(9), "set/a.png": encoded(1)})
    cells = [{"bytes": None, "path": "a.png"}] * 20
    cells[12] = {"bytes": None, "path": path}
    write_table(tmp_path / "set", pa.array(cells, CELL))
    with pytest.raises(DataError, match=f"row 12: its image is the file '{path}', which is not in"):
        load(str(tmp_path / "set"))


def test_an_image_whose_file_is_missing_is_a_bad_sample(tmp_path):
    cells = [{"bytes": None, "path": "none.png"}] * 20
    write_table(tmp_path, pa.array(cells, CELL))
    with pytest.raises(DataError, match=r"none.png: cannot be read"):
        load(str(tmp_path))
