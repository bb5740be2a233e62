"""Failures of a machine are distinguished from errors in the code that ran there."""

import errno
import pickle

import pytest
import torch

from raydl.config import ElasticConfig
from raydl.elastic.decide import new_state
from raydl.elastic.failure_policy import why_not_replaced
from raydl.elastic.limits import Limits
from raydl.elastic.state import Phase, Worker
from raydl.errors import DataError, InfrastructureError, failure_of_machine

OF_MACHINE = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.ESTALE, "Stale file handle"),
    OSError("When reading information for key 'x': AWS Error NETWORK_CONNECTION during HeadObject"),
    ConnectionResetError("Connection reset by peer"),
    TimeoutError("timed out"),
]  # fmt: skip
OF_CODE = [
    ValueError("mean is undefined"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x16 and 10x3)"),
    FileNotFoundError(errno.ENOENT, "No such file or directory"),
    PermissionError(errno.EACCES, "Permission denied"),
    IsADirectoryError(errno.EISDIR, "Is a directory"),
    OSError("When getting 'x': AWS Error ACCESS_DENIED during GetObject operation"),
    OSError("cannot identify image file 'a.png'"),
    KeyError("CUDA error"),
    AssertionError(),
]


@pytest.mark.parametrize("error", OF_MACHINE, ids=repr)
def test_errors_of_memory_devices_disks_and_networks_are_failures_of_the_machine(error):
    description = failure_of_machine(error)
    assert description.startswith(type(error).__name__)
    assert "\n" not in description


@pytest.mark.parametrize("error", OF_CODE, ids=repr)
def test_all_other_errors_are_those_of_the_code(error):
    assert failure_of_machine(error) == ""


def raised_from(cause, error):
    try:
        try:
            raise cause
        except type(cause) as inner:
            raise error from inner
    except type(error) as outer:
        return outer


def test_an_error_is_classified_by_its_cause():
    error = raised_from(OF_MACHINE[5], DataError("a.parquet", "cannot be read"))
    assert failure_of_machine(error) == "a.parquet: cannot be read"
    error = raised_from(OF_CODE[2], DataError("a.parquet", "cannot be read"))
    assert failure_of_machine(error) == ""


def test_the_error_that_torch_raises_without_memory_is_a_failure_of_the_machine():
    with pytest.raises(RuntimeError) as error:
        torch.empty(10**15)
    assert failure_of_machine(error.value).startswith("RuntimeError: ")


def test_the_error_names_the_process_and_survives_pickling():
    error = pickle.loads(pickle.dumps(InfrastructureError("w3", "MemoryError")))
    assert str(error) == "the machine of w3 failed: MemoryError"
    assert error.exit_status == 75


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1, "first"), (2, "second"), (3, "third"), (4, "4th"), (10, "10th"),
        (11, "11th"), (12, "12th"), (13, "13th"), (14, "14th"), (20, "20th"),
        (21, "21st"), (22, "22nd"), (23, "23rd"), (24, "24th"), (101, "101st"),
        (111, "111th"), (112, "112th"), (113, "113th"), (122, "122nd"),
    ],
)  # fmt: skip
def test_a_worker_that_failed_too_often_is_not_replaced_and_the_number_is_said(number, text):
    limits = Limits(elastic=ElasticConfig(max_worker_errors=number - 1))
    state = with_errors(number - 1, origin="w1")
    assert why_not_replaced(state, limits, Worker("w1", Phase.TRAINING, 0.0), OF_RAM, 0.0) == (
        f"w1 failed for the {text} time within an hour, more often than elastic.max_worker_errors"
    )
    state = with_errors(number - 2, origin="w1")
    limits = Limits(elastic=ElasticConfig(max_worker_errors=max(1, number - 1)))
    assert why_not_replaced(state, limits, Worker("w1", Phase.TRAINING, 0.0), OF_RAM, 0.0) == ""


OF_RAM = InfrastructureError("w1", "MemoryError")


def with_errors(number, *, origin):
    """Return a state of a run in which a worker has failed so often."""
    state = new_state(Limits(), 0.0)
    state.budgets.errors = ((0.0, origin, "node"),) * number
    return state


def test_errors_of_an_hour_ago_are_forgotten_and_those_of_the_worker_before_are_not():
    limits = Limits(elastic=ElasticConfig(max_worker_errors=1))
    state, heir = with_errors(1, origin="w1"), Worker("w4", Phase.TRAINING, 0.0, origin="w1")
    assert why_not_replaced(state, limits, heir, OF_RAM, 0.0) == (
        "w4, which replaces w1, failed for the second time within an hour, more often than "
        "elastic.max_worker_errors"
    )
    assert why_not_replaced(state, limits, heir, OF_RAM, 3599.0)
    assert why_not_replaced(state, limits, heir, OF_RAM, 3600.0) == ""
