"""Files of images: IDX, PNG, Parquet."""

import io
import json
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def png_of(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def make_pictures(count, shape=(5, 6), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def write_parquet(path, images, labels, names=None):
    encoded = [x if isinstance(x, bytes) else png_of(x) for x in images]
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table(
        {
            "image": pa.array([{"bytes": x, "path": None} for x in encoded], image),
            "label": pa.array(labels, pa.int64()),
        }
    )
    if names:
        features = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({b"huggingface": json.dumps(features)})
    pq.write_table(table, path)


def write_idx(array):
    return (
        bytes((0, 0, 8, array.ndim))
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )
