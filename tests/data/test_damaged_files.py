"""Tar and token files with random damage: read, or refused in one sentence, never anything else."""

import random

import numpy as np
import pytest
from test_tar import samples, write_tar
from test_tokens import TOKENS, write_megatron

from raydl.config import InputConfig
from raydl.data import load
from raydl.errors import DataError


def damaged(data, chance):
    """Return bytes with one random damage: cut off, other bytes, zeros, or bytes in between."""
    data, kind = bytearray(data), chance.choice(["cut", "bytes", "header", "zeros", "insert"])
    start = chance.randrange(len(data))
    if kind == "cut":
        return bytes(data[:start])
    if kind == "zeros":
        data[start : start + 512] = bytes(len(data[start : start + 512]))
    elif kind == "insert":
        data[start:start] = chance.randbytes(chance.choice([1, 17, 512]))
    else:
        for _ in range(chance.choice([1, 5, 50])):
            end = len(data) if kind == "bytes" else min(80, len(data))
            data[chance.randrange(end)] = chance.randrange(256)
    return bytes(data)


@pytest.mark.parametrize("name", ["a.tar", "a.idx", "a.bin", "tokens.bin", "a.npy"])
def test_random_damage_is_refused_in_one_sentence_or_read(tmp_path, name):
    if name == "a.tar":
        write_tar(tmp_path / "a.tar", samples(range(12)))
    elif name in ("a.idx", "a.bin"):
        write_megatron(tmp_path / "a", [TOKENS[:70], TOKENS[70:]])
    elif name == "a.npy":
        np.save(tmp_path / name, TOKENS)
    else:
        TOKENS.tofile(tmp_path / name)
    whole, chance, refusals = (tmp_path / name).read_bytes(), random.Random(0), []
    for _ in range(30):
        (tmp_path / name).write_bytes(damaged(whole, chance))
        try:
            data = load(str(tmp_path), input=InputConfig(context=4, stream="always"))
            for part in (data.train, data.test):
                part.fetch(np.arange(part.num_samples))
        except DataError as error:
            refusals.append(str(error))
    assert refusals
    assert not any("\n" in sentence for sentence in refusals)
