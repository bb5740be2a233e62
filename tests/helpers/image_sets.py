"""The same small set of images, written for each kind of source."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from image_files import make_pictures, png_of
from layouts import write_saved, write_tar

from raydl.data.schema import hub_metadata

NAMES = ("cat", "dog", "owl")
COUNT = 24
PIXELS = make_pictures(COUNT, (8, 8, 3))
LABELS = np.repeat(np.arange(3), COUNT // 3)  # class folders are read class by class
IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def table(images, labels=LABELS, names=NAMES):
    """Return images in the layout of the hub; labels without names if there are none."""
    cells = [{"bytes": image, "path": None} for image in images]
    features = {"image": {"_type": "Image"}}
    if names:
        features["label"] = {"_type": "ClassLabel", "names": list(names)}
    columns = {"image": pa.array(cells, IMAGE), "label": list(labels)}
    return pa.table(columns).replace_schema_metadata(hub_metadata(features))


def parquet(folder, images):
    pq.write_table(table(images), folder / "train.parquet", row_group_size=7)
    pq.write_table(table(images), folder / "test.parquet")


def several_files(folder, images):
    whole = table(images)
    for number, (start, stop) in enumerate(((0, 9), (9, COUNT))):
        part = whole.slice(start, stop - start)
        pq.write_table(part, folder / f"train-{number:05}-of-00002.parquet", row_group_size=4)
    pq.write_table(whole, folder / "validation.parquet")


def texts(folder, images):
    named = table(images, [NAMES[label] for label in LABELS], names=None)
    for part in ("train", "test"):
        pq.write_table(named, folder / f"{part}.parquet", row_group_size=7)


def saved(folder, images):
    write_saved(folder, table(images), ("train", "test"), rows_per_batch=7)


def folders(folder, images):
    for part in ("train", "test"):
        for number, (image, label) in enumerate(zip(images, LABELS, strict=True)):
            place = folder / part / NAMES[label] / f"{number:03}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(image)


def only_paths(folder, images):
    for number, image in enumerate(images):
        (folder / f"{number:03}.png").write_bytes(image)
    named = table(images)
    cells = [{"bytes": None, "path": f"{number:03}.png"} for number in range(len(images))]
    for part in ("train", "test"):
        whole = named.set_column(0, "image", pa.array(cells, IMAGE))
        pq.write_table(whole, folder / f"{part}.parquet", row_group_size=7)


def tar(folder, images):
    samples = enumerate(zip(images, LABELS, strict=True))
    files = [
        (f"{number:03}.{ending}", content)
        for number, (image, label) in samples
        for ending, content in (("png", image), ("cls", str(label).encode()))
    ]
    for part in ("train", "val"):
        write_tar(folder / f"{part}-000000.tar", files)


def arrays(folder, images):
    y = LABELS.astype(np.uint8)
    np.savez(folder / "set.npz", x_train=PIXELS, y_train=y, x_test=PIXELS, y_test=y)


FILES = {
    "parquet": parquet, "several files": several_files, "labels as texts": texts, "saved": saved,
    "class folders": folders, "paths": only_paths,
}  # fmt: skip
"""Roads of encoded images whose classes have names."""
ENCODED = {**FILES, "tar": tar}
ALL = {**ENCODED, "npz": arrays}


def made(road, folder, images=None):
    """Write the set for a road, and return its source."""
    ALL[road](folder, [png_of(pixels) for pixels in PIXELS] if images is None else images)
    return str(folder / "set.npz") if road == "npz" else str(folder)
