"""Sets in the layouts of other libraries, written without them."""

import io
import json
import struct
import tarfile

import numpy as np
import pyarrow as pa


def write_saved(folder, table, parts, rows_per_batch):
    """Write a table as each of the parts that ``DatasetDict.save_to_disk`` writes."""
    for part in parts:
        (folder / part).mkdir()
        name = "data-00000-of-00001.arrow"
        with pa.ipc.new_stream(folder / part / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=rows_per_batch)
        (folder / part / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        (folder / part / "dataset_info.json").write_text("{}")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(parts)}))


def write_tar(path, files):
    """Write pairs (name, content) as WebDataset's ``TarWriter`` does, with tarfile."""
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.uname, info.gname = len(content), 0o444, "big", "data"
            tar.addfile(info, io.BytesIO(content))


def write_megatron(path, documents, dtype=np.int32, code=4):
    """Write NAME.bin and NAME.idx as Megatron's ``IndexedDatasetBuilder`` does."""
    lengths = np.array([len(document) for document in documents], np.int32)
    starts = np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize
    path.with_suffix(".bin").write_bytes(
        b"".join(document.astype(dtype).tobytes() for document in documents)
    )
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
        + lengths.tobytes()
        + starts.astype(np.int64).tobytes()
        + np.arange(len(documents) + 1, dtype=np.int64).tobytes()
    )
