"""Changes of a run's folder that somebody who may write it could make."""

import contextlib
import copy
import json
import os
import random
import socket
import struct
import subprocess
import zlib

from tensorboard.compat.proto import event_pb2

ABSENT = object()
VALUES = (
    ABSENT, None, True, -1, 0, 10**400, 1e308, -1e308, float("nan"), float("inf"), "", "x",
    "../../outside", "\x1b]0;owned\x07", "y" * 100_000, [], [None], [[[]]], [-1, "x"], {}, {"a": 1},
    2**63, [0] * 1000,
)  # fmt: skip
"""Values in place of those of a JSON file."""
SPARSE = 1 << 40


def _pipe(path):
    os.mkfifo(path)


def _socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket has at most 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def _hole(path):
    with path.open("wb") as file:
        file.truncate(SPARSE)


def of_kinds(outside):
    """Return what may have the name of a file, by kind: functions of the path, which is free.

    Args:
        outside: a file outside of the run's folder.
    """
    return {
        "absent": lambda path: None,
        "empty": lambda path: path.write_bytes(b""),
        "garbage": lambda path: path.write_bytes(bytes(range(256)) * 40),
        "deep": lambda path: path.write_bytes(b"[" * 200_000),
        "nested": lambda path: path.write_bytes(b'{"a":' * 900 + b"1" + b"}" * 900),
        "huge text": lambda path: path.write_bytes(b"[" + b"[]," * 1_000_000 + b"[]]"),
        "hole": _hole,
        "folder": lambda path: path.mkdir(),
        "link": lambda path: path.symlink_to(outside),
        "dangling link": lambda path: path.symlink_to(outside.parent / "nothing"),
        "pipe": _pipe,
        "socket": _socket,
    }


@contextlib.contextmanager
def folders_in_each_other(path, depth):
    """Put a folder at a path, with one in it, and so on; remove all of them at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    above = os.open(path.parent, os.O_RDONLY)
    for name in [path.name, *["a"] * (depth - 1)]:
        os.mkdir(name, dir_fd=above)
        inner = os.open(name, os.O_RDONLY, dir_fd=above)
        os.close(above)
        above = inner
    os.close(above)
    try:
        yield
    finally:
        subprocess.run(["rm", "-rf", path], check=True)  # shutil would not reach the last one


def changed_json(text, rng):
    """Return a JSON text with one or two values replaced, at random places."""
    values = json.loads(text)
    for _ in range(rng.choice((1, 1, 2))):
        places = list(_places(values))
        if not places:
            break
        container, key = rng.choice(places)
        value = rng.choice(VALUES)
        if value is ABSENT:
            del container[key]
        else:  # a copy, which the next change may change
            container[key] = copy.deepcopy(value)
    if rng.random() < 0.05:
        values = rng.choice([v for v in VALUES if v is not ABSENT])
    return json.dumps(values)


def _places(values):
    """Yield (container, key) of all values in nested dicts and lists."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in list(items):
        yield values, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


def changed_tensors(data, rng):
    """Return a safetensors file with a changed header: of tensors, or of the values in it."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    metadata = header.get("__metadata__", {})
    if metadata and rng.random() < 0.7:
        key = rng.choice(sorted(metadata))
        metadata[key] = changed_json(metadata[key], rng)
        text = json.dumps(header)
    else:
        text = changed_json(json.dumps(header), rng)
    text = text.encode()
    length = rng.choice([len(text)] * 8 + [0, 1 << 62])
    return length.to_bytes(8, "little") + text + data[8 + size :]


def changed_events(data, rng):
    """Return an event file with a crafted record in it."""
    event = event_pb2.Event(wall_time=1.0, step=5)
    event.summary.value.add(tag="center/accuracy", simple_value=0.5)
    kind = rng.randrange(6)
    if kind == 0:
        event.wall_time = rng.choice((float("nan"), float("inf"), -1.0, 1e308))
    elif kind == 1:
        event.step = rng.choice((-1, -(2**63), 2**63 - 1))
    elif kind == 2:
        event.summary.value[0].simple_value = rng.choice((3e38, -3e38, 1e-45))
    elif kind == 3:
        event.summary.value[0].tag = rng.choice(
            ("worker_step_s/x/..", "", "workers/count", "\x1b[")
        )
    record = event.SerializeToString()
    length = rng.choice((0, 1 << 62, 1 << 30)) if kind == 4 else len(record)
    framed = struct.pack("<QI", length, 0) + record + b"\0" * 4
    if kind == 5:
        framed = bytes(rng.randrange(256) for _ in range(200))
    return data + framed * rng.choice((1, 50))


def seal_manifest(path):
    """Give a manifest the checksum of its content."""
    manifest = json.loads(path.read_text())
    if isinstance(manifest, dict):
        manifest.pop("crc32", None)
        manifest["crc32"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
        path.write_text(json.dumps(manifest))


def note_in_manifest(path):
    """Note the size and the checksum of a checkpoint's file in its manifest."""
    manifest = json.loads((path.parent / "manifest.json").read_text())
    data = path.read_bytes()
    manifest["files"][path.name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    (path.parent / "manifest.json").write_text(json.dumps(manifest))
    seal_manifest(path.parent / "manifest.json")


def change(path, seed):
    """Change the content of a file of a run, at random."""
    rng = random.Random(f"{path.name}{seed}")
    if path.suffix == ".safetensors":
        path.write_bytes(changed_tensors(path.read_bytes(), rng))
        if (path.parent / "manifest.json").exists():
            note_in_manifest(path)
    elif path.name.startswith("events"):
        path.write_bytes(changed_events(path.read_bytes(), rng))
    elif path.name == "metrics.jsonl":
        path.write_text(changed_json(path.read_text().splitlines()[0], rng))
    else:
        path.write_text(changed_json(path.read_text(), rng))
        if path.name == "manifest.json":
            seal_manifest(path)
