"""Each sample of every format that is streamed counts once an epoch, whatever workers are lost."""

import json

import numpy as np
import pytest
import torch
from histories import History, config
from image_sets import made

from raydl.config import InputConfig
from raydl.data import load

COUNT = 60


def write_rows(folder, ending, text_of):
    """Write a table of six files, of which each is a block."""
    for number, rows in enumerate(np.split(np.arange(COUNT), 6)):
        (folder / f"train-{number}{ending}").write_text(text_of(rows.tolist()))
    (folder / f"test{ending}").write_text(text_of([0, 1]))
    return str(folder)


def write_csv(folder):
    lines = [f"{n},{'ab'[n % 2]}\n" for n in range(COUNT)]
    return write_rows(folder, ".csv", lambda rows: "".join(["n,y\n", *(lines[n] for n in rows)]))


def write_json_lines(folder):
    lines = [json.dumps({"n": n, "y": "ab"[n % 2]}) + "\n" for n in range(COUNT)]
    return write_rows(folder, ".jsonl", lambda rows: "".join(lines[n] for n in rows))


def write_tokens(folder):
    for number, tokens in enumerate(np.split(np.arange(8 * COUNT + 1) % 7, [50, 90])):
        tokens.astype(np.uint16).tofile(folder / f"train-{number}.bin")
    np.arange(90, dtype=np.uint16).tofile(folder / "val.bin")
    return str(folder)


ROADS = ("tar", "paths", "class folders")
SETS = {
    "csv": write_csv,
    "json lines": write_json_lines,
    "tokens": write_tokens,
    **{
        road: lambda folder, road=road: made(road, folder)
        for road in ("tar", "paths", "class folders")
    },
}


class Plain:
    """A task for samples of any kind."""

    name = "plain"

    def build_model(self, shape):
        return torch.nn.Linear(2, 1)

    def loss(self, model, batch):
        return model.weight.square().sum()

    def metrics(self, model, batch):
        raise NotImplementedError


@pytest.mark.parametrize("method", ["sync-easgd", "sync-sgd"])
@pytest.mark.parametrize("name", SETS)
def test_each_sample_counts_once_an_epoch_though_workers_are_lost(tmp_path, name, method):
    target = "y" if name in ("csv", "json lines") else ""
    input = InputConfig(stream="always", shuffle_samples=10, context=8, target=target)
    train = load(SETS[name](tmp_path), input=input).train
    assert train.is_streamed
    history = History(config(method, epochs=8), images=train, task=Plain())
    history.train("w0", "w1", "w2", rounds=1)
    history.train("w0", "w1", "w2", lost={"w0": (1, 1)})
    history.train("w1", "w2", "w3", rounds=2)
    history.train("w1", "w2", "w3", lost={"w3": (0, 0), "w2": (1, 1)})
    history.end("w1", "w4")
    history.assert_every_sample_once_an_epoch()
