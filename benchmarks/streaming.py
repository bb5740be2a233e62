"""Measures memory and waiting of workers that stream a Parquet set larger than their memory limit.

Command:   python -m benchmarks.streaming            (--quick: 150 MB instead of 2 GB)

Writes pictures of 64x64 with noise, which do not compress, in row groups of 500, and trains on them
with two workers. It samples the resident memory of the workers' processes, and takes the share of
time spent waiting for data from the run. The figure for memory is the peak minus the peak of the
same workers with a few pictures.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.measure import Figure, Report, Spread, options_of
from benchmarks.programs import ROOT, end_cleanly, end_sessions

SIDE, ROWS_PER_GROUP, ROWS_PER_FILE = 64, 500, 20_000
NUM_WORKERS = 2
_BOUND_S = 1800.0
"""Time-out of a run, in seconds."""


def write_set(folder: Path, num_bytes: int) -> int:
    """Write pictures of about ``num_bytes`` and a small test set, and return the training rows."""
    random = np.random.default_rng(0)
    row_bytes = SIDE * SIDE * 3
    num_rows = num_bytes // row_bytes
    for number, start in enumerate(range(0, num_rows, ROWS_PER_FILE)):
        _write(folder / f"train-{number:05}.parquet", min(ROWS_PER_FILE, num_rows - start), random)
    _write(folder / "test-0.parquet", 500, random)
    return num_rows


def _write(path: Path, num_rows: int, random: np.random.Generator) -> None:
    schema = pa.schema({"image": pa.struct({"bytes": pa.binary()}), "label": pa.int64()})
    with pq.ParquetWriter(path, schema, compression="none") as writer:
        for start in range(0, num_rows, ROWS_PER_GROUP):
            count = min(ROWS_PER_GROUP, num_rows - start)
            labels = random.integers(0, 10, count)
            cells = [{"bytes": _encoded(random, int(label))} for label in labels]
            writer.write_table(pa.table({"image": cells, "label": labels}, schema=schema))


def _encoded(random: np.random.Generator, label: int) -> bytes:
    pixels = random.integers(0, 200, (SIDE, SIDE, 3), dtype=np.uint8)
    pixels[:, 6 * label : 6 * label + 6] += 55  # the label can be learned
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "BMP")
    return file.getvalue()


def train(data: str, run_dir: Path, *, stream: str, num_samples: int) -> tuple[int, dict[str, Any]]:
    """Train on a set and return (peak resident bytes of a worker, figures of the run)."""
    mark = uuid.uuid4().hex
    command = [
        sys.executable, "-m", "raydl", "train", "--data", data, "--model", "lenet",
        "--workers", str(NUM_WORKERS), "--samples", str(num_samples), "--lr", "0.02",
        "--input.stream", stream, "--run-dir", str(run_dir), "--run.progress", "none",
    ]  # fmt: skip
    environment = {**os.environ, "RAYDL_BENCHMARK": mark, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    peak, deadline = 0, time.monotonic() + _BOUND_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            peak = max([peak, *_resident_bytes(mark)])
            time.sleep(0.2)
    finally:
        end_sessions([process])
    if process.returncode:
        sys.exit(f"a run failed or took over {_BOUND_S:.0f} s")
    return peak, json.loads((run_dir / "result.json").read_text())


def _resident_bytes(mark: str) -> list[int]:
    """Return the resident bytes of each worker process of this benchmark."""
    sizes = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            is_worker = (entry / "cmdline").read_bytes().startswith(b"ray::WorkerActor")
            if is_worker and mark.encode() in (entry / "environ").read_bytes():
                pages = int((entry / "statm").read_text().split()[1])
                sizes.append(pages * os.sysconf("SC_PAGE_SIZE"))
        except OSError:  # the process has ended
            continue
    return sizes


def main() -> None:
    """Measure and report."""
    options = options_of(__doc__).parse_args()
    end_cleanly()
    num_bytes = 150_000_000 if options.quick else 2_000_000_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "set").mkdir()
        num_rows = write_set(folder / "set", num_bytes)
        few, _ = train("synthetic:256x3x64x64", folder / "few", stream="never", num_samples=2560)
        peak, figures = train(
            str(folder / "set"), folder / "run", stream="always", num_samples=num_rows
        )
    above = (peak - few) / 1e6
    parts = figures["time_parts"]
    trained_s = sum(seconds for part, seconds in parts.items() if part != "initialization")
    share = parts["data_io"] / trained_s
    report = Report.of_command("streaming", options)
    report.add_table(
        ("what", "value"),
        [
            (f"rows of the set, {num_bytes / 1e9:.1f} GB", f"{num_rows:,}"),
            ("peak of a worker, a few pictures in memory", f"{few / 1e6:,.0f} MB"),
            ("peak of a worker, the set streamed", f"{peak / 1e6:,.0f} MB"),
        ],
    )
    report.add_figures(
        Figure(
            name="streaming.megabytes_above",
            value=Spread.of([above]),
            target=1000,
            is_better="less",
        ),
        Figure(
            name="streaming.share_of_time_in_data",
            value=Spread.of([share]),
            target=0.02,
            is_better="less",
        ),
    )
    report.close(options.out)


if __name__ == "__main__":
    main()
