"""Copies equal their state and reuse memory that no tensor refers to."""

import threading
from typing import NamedTuple

import torch
from ensembles import Ensemble, tiny_images

from raydl.config import MethodConfig, OptimizerConfig, TrainConfig, TrainingConfig
from raydl.core.center import as_arrays, as_tensors, copied_to_cpu
from raydl.core.copy_buffers import CopyBuffers, sizes_of

LARGE = 1 << 18  # floats: large enough for its own block


def state_of(value):
    return {
        "weights": torch.full((LARGE,), value),
        "optimizer": {"state": {0: {"m": torch.full((2, LARGE // 2), value), "step": 3}}},
        "small": [torch.tensor(value), "text", None],
        "half": torch.full((2 * LARGE,), value).bfloat16(),
    }


def places(state):
    momentum = state["optimizer"]["state"][0]["m"]
    return {t.data_ptr() for t in (state["weights"], momentum, state["half"])}


def has_value(state, value):
    momentum = state["optimizer"]["state"][0]["m"]
    tensors = (state["weights"], momentum, state["half"], state["small"][0])
    kinds = [(t.shape, t.dtype) for t in tensors]
    first = state_of(value)
    momentum = first["optimizer"]["state"][0]["m"]
    expected = (first["weights"], momentum, first["half"], first["small"][0])
    assert kinds == [(t.shape, t.dtype) for t in expected]
    return all(bool((t == value).all()) for t in tensors)


def test_a_copy_equals_the_state_and_shares_no_memory_with_it():
    state = state_of(2.0)
    copy = CopyBuffers().of(state)
    state["weights"].zero_()
    state["half"].zero_()
    assert has_value(copy, 2.0)
    assert copy["small"][1:] == ["text", None]
    assert copy["optimizer"]["state"][0]["step"] == 3


class Pair(NamedTuple):
    fast: torch.Tensor
    slow: torch.Tensor


def test_tensors_in_tuples_are_copied_and_the_tuples_keep_their_types():
    ones = torch.ones(LARGE), torch.ones(2)
    state = {"averages": ones, "pair": Pair(*ones), "shape": ones[1].shape, "betas": (0.9, 0.99)}
    copy, arrays = CopyBuffers().of(state), as_arrays(copied_to_cpu(state))
    for tensor in ones:
        tensor.zero_()
    for copied in (copy, as_tensors(arrays)):
        assert all(bool(t.eq(1).all()) for t in (*copied["averages"], *copied["pair"]))
        assert [type(v) for v in copied.values()] == [tuple, Pair, torch.Size, tuple]
        assert (copied["shape"], copied["betas"]) == (ones[1].shape, (0.9, 0.99))
    assert sizes_of(state) == 2 * [4 * LARGE, 8]


def test_the_memory_of_a_copy_is_reused_after_the_copy_is_deleted():
    copies = CopyBuffers()
    first = copies.of(state_of(1.0))
    second = copies.of(state_of(2.0))
    assert not places(first) & places(second)
    assert has_value(first, 1.0)
    before = places(first)
    del first
    third = copies.of(state_of(3.0))
    assert places(third) == before
    assert has_value(second, 2.0)


def test_a_view_of_a_copy_keeps_its_memory():
    copies = CopyBuffers()
    copy = copies.of(state_of(1.0))
    memory = copy["weights"][5:9].numpy().data  # like the memory of a file that is being written
    del copy
    copies.of(state_of(2.0))
    copies.of(state_of(3.0))
    assert memory.tolist() == [1.0] * 4


def test_memory_that_no_copy_needs_is_freed():
    copies = CopyBuffers()
    many = [copies.of(state_of(1.0)) for _ in range(4)]
    assert len(copies._blocks) == 12
    del many
    held = copies.of(state_of(1.0))
    assert len(copies._blocks) == 3
    del held
    copies.of({})
    assert copies._blocks == []


def test_prepared_memory_is_used_first():
    copies, state = CopyBuffers(), state_of(1.0)
    thread = threading.Thread(target=copies.prepare, args=(sizes_of(state),))
    thread.start()
    thread.join()
    ready = {block._memory.ctypes.data for block in copies._blocks}
    assert len(ready) == 3
    copies.prepare(sizes_of(state))
    assert {block._memory.ctypes.data for block in copies._blocks} == ready, "nothing is missing"
    assert places(copies.of(state)) == ready


def test_a_worker_copies_state_and_center_to_prepared_memory(monkeypatch):
    monkeypatch.setattr("raydl.core.copy_buffers._LEAST_BYTES", 1)
    worker = trained_worker()
    worker.prepare_copy()()
    ready = {
        block._memory.ctypes.data
        for copies in (worker._copies, worker.runner.strategy._copies)
        for block in copies._blocks
    }
    replica, center = worker.pop_kept(-1)["replica"], worker.center()
    tensors = [replica["weights"], replica["gradients"]]
    tensors.append(replica["optimizer"]["state"][0]["momentum_buffer"])
    assert {t.data_ptr() for t in tensors} | {center.weights.ctypes.data} <= ready


def trained_worker():
    config = TrainConfig(
        method=MethodConfig(name="sync-easgd", period=1),
        training=TrainingConfig(epochs=50, batch_size=4),
        optimizer=OptimizerConfig(momentum=0.9),
    )
    ensemble = Ensemble(config, num_workers=1, images=tiny_images(16)).join()
    ensemble.run(rounds=2)
    return ensemble.workers[0]
