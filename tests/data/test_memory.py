"""Data larger than memory: what a process holds does not grow with the rows."""

import json
import multiprocessing
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from image_sets import IMAGE
from layouts import write_saved, write_tar

from raydl.config import InputConfig
from raydl.data import load
from raydl.data.schema import hub_metadata

ROWS = 4000
"""A set of some 20 MB; the larger one has twice as many."""
GROUP = 100
MOST_GROWTH = 1.2
NOISE_BYTES = 4 << 20
"""What the allocators of the libraries keep or return by chance."""


def images(count):
    """Yield noise as files that are quick to write: 5 KB each."""
    random = np.random.default_rng(0)
    for _ in range(count):
        yield b"P6 40 42 255 " + random.bytes(3 * 40 * 42)


def labels(count):
    return [str(number % 10) for number in range(count)]


def image_table(count):
    cells = [{"bytes": image, "path": None} for image in images(count)]
    table = pa.table({"image": pa.array(cells, IMAGE), "label": labels(count)})
    return table.replace_schema_metadata(hub_metadata({"image": {"_type": "Image"}}))


def write_parquet(folder, part, count):
    pq.write_table(image_table(count), folder / f"{part}.parquet", row_group_size=GROUP)


def write_saved_part(folder, part, count):
    write_saved(folder, image_table(count), [part], rows_per_batch=GROUP)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))


def write_folders(folder, part, count):
    for number, (image, label) in enumerate(zip(images(count), labels(count), strict=True)):
        place = folder / part / label / f"{number}.ppm"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(image)


def write_tar_part(folder, part, count):
    samples = enumerate(zip(images(count), labels(count), strict=True))
    files = (
        (f"{number:06}.{ending}", content)
        for number, (image, label) in samples
        for ending, content in (("ppm", image), ("cls", label.encode()))
    )
    write_tar(folder / f"{part}.tar", files)


def numbers(count):
    """Return rows of 500 numbers: some 5 KB as text."""
    return np.random.default_rng(0).integers(0, 1_000_000_000, (count, 500))


def write_csv(folder, part, count):
    columns = {f"x{n}": values for n, values in enumerate(numbers(count).T)}
    pa.csv.write_csv(pa.table(columns), folder / f"{part}.csv")


def write_json_lines(folder, part, count):
    with (folder / f"{part}.jsonl").open("w") as file:
        file.writelines(json.dumps({"x": row}) + "\n" for row in numbers(count).tolist())


def write_tokens(folder, part, count):
    random = np.random.default_rng(0)
    random.integers(0, 50_000, 2500 * count).astype(np.uint16).tofile(folder / f"{part}.bin")


FORMATS = {
    "parquet": write_parquet,
    "saved": write_saved_part,
    "class folders": write_folders,
    "tar": write_tar_part,
    "csv": write_csv,
    "json lines": write_json_lines,
    "tokens": write_tokens,
}


def peak_bytes(source):
    """Read a training set as a worker does, for half an epoch; return the most memory held.

    Files that are mapped do not count: the system takes their memory back when it needs it.
    """
    peak, is_over = 0, threading.Event()

    def watch():
        nonlocal peak
        while not is_over.wait(0.01):
            peak = max(peak, held_bytes())  # within a fetch

    watcher = threading.Thread(target=watch)
    watcher.start()
    input = InputConfig(stream="always", shuffle_samples=2 * GROUP, context=500)
    train = load(source, input=input).train
    order = train.order(0)
    for start in range(0, train.num_samples // 2, GROUP):
        rows = order.rows(0, np.arange(start, min(start + GROUP, train.num_samples)))
        train.prefetch(rows)
        batch = train.fetch(rows)
        peak = max(peak, held_bytes())
        del batch
    is_over.set()
    watcher.join()
    return peak


def held_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not tell RssAnon")


def send_peaks(sources, sender):
    first = held_bytes()
    sender.send([peak_bytes(source) - first for source in sources])


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        "parquet",
        "saved",
        "tokens",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("class folders", "tar", "csv", "json lines")
        ),
    ],
)
def test_twice_as_many_rows_need_no_more_memory(tmp_path, name):
    sources = []
    for factor in (1, 2):
        folder = tmp_path / f"{factor}"
        folder.mkdir()
        FORMATS[name](folder, "train", factor * ROWS)
        FORMATS[name](folder, "test", 10)
        sources.append(str(folder))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["raydl.data"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_peaks, args=(sources, sender))
    process.start()
    sender.close()
    small, large = receiver.recv()
    process.join()
    assert large <= MOST_GROWTH * small + NOISE_BYTES
