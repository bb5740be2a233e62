"""Small sets of every format with random damage: each is read, or refused in one sentence."""

from __future__ import annotations

import functools
import gzip
import io
import json
import random
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from image_files import make_pictures
from image_sets import ALL, LABELS, PIXELS, made, table
from layouts import write_megatron
from PIL import Image

from raydl.config import InputConfig
from raydl.data import load
from raydl.errors import DataError
from raydl.tools.data_info import inspect

_FEW = 12
_LONGEST = 1000
"""Most characters of a sentence."""
_TOKENS = (np.arange(200) * 7 % 90 + 300).astype(np.uint16)
_ROWS = [{"a": n / 7, "b": n, "kind": "xyz"[n % 3]} for n in range(60)]


def _idx(folder, compress=lambda data: data, ending=""):
    images, labels = PIXELS[:, :, :, 0], LABELS.astype(np.uint8)
    for part in ("train", "t10k"):
        for array, name in ((images, "images-idx3"), (labels, "labels-idx1")):
            header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
            file = folder / f"{part}-{name}-ubyte{ending}"
            file.write_bytes(compress(header + array.tobytes()))


def _cifar(folder):
    pixels = np.moveaxis(make_pictures(_FEW, (32, 32, 3)), 3, 1).reshape(_FEW, -1)
    rows = np.concatenate([np.arange(_FEW)[:, None] % 10, pixels], 1).astype(np.uint8)
    for name in ("data_batch_1.bin", "test_batch.bin"):
        (folder / name).write_bytes(rows.tobytes())


def _csv(folder):
    lines = ["a,b,kind", *(",".join(map(str, row.values())) for row in _ROWS)]
    (folder / "train.csv").write_text("\n".join(lines) + "\n")


def _json_lines(folder):
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _ROWS))


def _of_road(road):
    return lambda folder: made(road, folder)


def _image_formats():
    """Return the formats that Pillow writes and reads here."""
    Image.init()
    formats = []
    for name in sorted(set(Image.SAVE) & set(Image.OPEN)):
        try:
            with Image.open(io.BytesIO(_encoded(name, PIXELS[0]))) as image:
                image.load()
        except Exception:  # it needs a program, a larger image, or another mode
            continue
        if image.size == PIXELS.shape[1:3]:  # else each image takes a second
            formats.append(name)
    return formats


def _encoded(name, pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, name)
    return file.getvalue()


def _of_image_format(name):
    """Return what writes images of one format into class folders; damage is done to their bytes."""

    def write(folder):
        for number, pixels in enumerate(PIXELS[:_FEW]):
            file = folder / "ab"[number % 2] / f"{number:02}.png"  # Pillow goes by the bytes
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(_encoded(name, pixels))

    return write


CONTAINERS: dict[str, Callable[[Path], object]] = {
    **{road: _of_road(road) for road in ALL},
    "idx": _idx,
    "idx.gz": functools.partial(_idx, compress=gzip.compress, ending=".gz"),
    "cifar": _cifar,
    "csv": _csv,
    "json lines": _json_lines,
    "nanogpt": lambda folder: _TOKENS.tofile(folder / "train.bin"),
    "npy": lambda folder: np.save(folder / "train.npy", _TOKENS),
    "megatron": lambda folder: write_megatron(
        folder / "a", [_TOKENS[:70], _TOKENS[70:]], np.uint16, 8
    ),
    "table": lambda folder: pq.write_table(
        table([b""] * 24).select(["label"]), folder / "a.parquet"
    ),
}
"""What writes a whole set, by format."""
IMAGES = {f"image/{name.lower()}": _of_image_format(name) for name in _image_formats()}
FORMATS = {**CONTAINERS, **IMAGES}


@functools.cache
def _whole(name):
    """Return the bytes of each file of a whole set, by path."""
    with tempfile.TemporaryDirectory() as folder:
        FORMATS[name](Path(folder))
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def _damaged(data, chance):
    """Return bytes with one random damage: cut off, others, zeros, or some in between."""
    data, kind = bytearray(data), chance.choice(["cut", "bytes", "ends", "zeros", "insert"])
    start = chance.randrange(len(data))
    if kind == "cut":
        return bytes(data[:start])
    if kind == "zeros":
        data[start : start + 512] = bytes(len(data[start : start + 512]))
    elif kind == "insert":
        data[start:start] = chance.randbytes(chance.choice([1, 17, 512]))
    else:
        for _ in range(chance.choice([1, 5, 50])):
            place = chance.randrange(len(data) if kind == "bytes" else min(120, len(data)))
            is_at_end = (
                kind == "ends" and chance.random() < 0.5
            )  # Parquet, Arrow and zip begin there
            data[-1 - place if is_at_end else place] = chance.randrange(256)
    return bytes(data)


def is_refused(name, seed, folder):
    """Damage one file of a set and read all that is left; return whether it was refused.

    Raises:
        AssertionError: if it was refused in more than one short sentence.
        Exception: if anything else was raised.
    """
    chance, files = random.Random(f"{name} {seed}"), _whole(name)
    victim = chance.choice(list(files))
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(_damaged(data, chance) if path == victim else data)
    source = str(folder / "set.npz") if name == "npz" else str(folder)
    stream, policy = chance.choice([("always", "stop"), ("never", "stop"), ("always", "skip")])
    input = InputConfig(
        context=4,
        stream=stream,
        on_bad_sample=policy,
        target="kind" if name in ("csv", "json lines") else "",
    )
    sentences = []
    for read in (inspect, lambda source: _read_all(source, input)):
        try:
            read(source)
        except DataError as error:
            sentences.append(str(error))
    for sentence in sentences:
        assert "\n" not in sentence, f"two lines: {sentence}"
        assert len(sentence) <= _LONGEST, f"{len(sentence)} characters: {sentence}"
    return bool(sentences)


def _read_all(source, input):
    data = load(source, input=input)
    for part in (data.train, data.test):
        rows = np.arange(part.num_samples)
        part.fetch_readable(rows) if hasattr(part, "fetch_readable") else part.fetch(rows)
