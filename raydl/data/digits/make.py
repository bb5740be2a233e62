"""Write the bundled digits from scikit-learn's data: python -m raydl.data.digits.make FOLDER."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

_SEED = 1998


def main(folder: Path) -> None:
    """Write ``train-…`` and ``test-…`` Parquet files in the hub's layout into ``folder``."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.round(digits.images * 255 / 16).astype(np.uint8)
    random = np.random.default_rng(_SEED)
    order = random.permutation(len(pixels))
    is_test = np.zeros(len(pixels), bool)
    for label in range(10):
        rows = [row for row in order if digits.target[row] == label]
        is_test[rows[: round(len(rows) / 5)]] = True
    for part, chosen in (("train", ~is_test), ("test", is_test)):
        rows = [row for row in order if chosen[row]]
        table = pa.table(
            {
                "image": [{"bytes": _png(pixels[row]), "path": None} for row in rows],
                "label": pa.array([int(digits.target[row]) for row in rows], pa.int64()),
            }
        )
        pq.write_table(table, folder / f"{part}-00000-of-00001.parquet", compression="zstd")


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
