"""Every error can be pickled and is one sentence."""

import errno
import inspect
import os
import pickle

import pytest

from raydl import errors
from raydl.errors import RaydlError

EXAMPLES = [
    errors.StalledError("the center did not start within 60 s"),
    errors.CapacityError("2 of 4 workers came"),
    errors.InfrastructureError("w3", "MemoryError"),
    errors.NonFiniteCenterError(120),
    errors.NonFiniteError("w1", 3, "there are values that are not finite"),
    errors.RaydlError("something"),
    errors.ConfigError("method.beta", "must be in (0, 1], got 1.8"),
    errors.UnknownNameError("model", "lnet", ("lenet", "mlp")),
    errors.DataError("a/b.parquet", "holds no rows"),
    errors.UntrustedCodeError("runs/x/config.json", (("model", "nets:small"),)),
    errors.ShapeError("lenet", "needs images of 4x4 or more, got 2x2"),
    errors.ClusterError("10.0.0.1:6379", "does not answer"),
    errors.ResourceError("2 workers do not fit"),
    errors.CheckpointError("runs/x", "there is none"),
    errors.StateLostError("w1", "its process was killed"),
    errors.UnreadableCheckpointError("runs/x", "state.safetensors cannot be read"),
    errors.StorageSilentError("s3://kept/runs/x", 45.2, "to write status.json"),
    errors.StepError("w1", 12, "its weights are not finite"),
    errors.NonFiniteLossError("w1", 12, float("inf")),
    errors.ProcessLostError("w1", "killed"),
    errors.SupersededError("runs/x", 3, 4, "process 7 on b since 2026-11-23"),
    errors.AttachError("my-run", "2 of 4 workers came"),
    errors.ExchangeError(3, 1, "connection reset"),
    errors.ExchangeTimeoutError(3, 1, 30.0, ("w2", "w5")),
]


def test_the_examples_cover_all_errors():
    classes = {
        c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, RaydlError)
    }
    assert classes == {type(e) for e in EXAMPLES}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_an_error_keeps_its_text_and_fields_through_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.args == error.args
    assert {k: str(v) for k, v in vars(again).items()} == {
        k: str(v) for k, v in vars(error).items()
    }


@pytest.mark.parametrize(
    ("error", "cause", "status"),
    [
        (errors.CheckpointError("runs/x", "it could not be written"), errno.ENOSPC, 75),
        (errors.CheckpointError("runs/x", "cannot be read"), errno.EACCES, 2),
        (errors.ConfigError("run.storage_path", "cannot be reached"), errno.ECONNREFUSED, 2),
        (errors.CheckpointError("runs/x", "there is none"), None, 2),
        (errors.InfrastructureError("w3", "MemoryError"), None, 75),
    ],
)
def test_the_exit_status_says_whether_a_retry_may_succeed(error, cause, status):
    error.__cause__ = None if cause is None else OSError(cause, os.strerror(cause))
    assert errors.exit_status_of(error) == status


def test_a_time_out_names_the_missing_workers_its_length_and_the_setting():
    text = str(errors.ExchangeTimeoutError(1200, 7, 30.0, ["w2", "w5"]))
    assert text == (
        "exchange round 1200 (generation 7) failed: timed out after 30.0 s waiting for w2, w5; "
        "raise exchange.timeout_s if they were only slow"
    )


def test_an_unknown_name_lists_the_nearest_first():
    text = str(errors.UnknownNameError("model", "lnet", ("lenet", "mlp")))
    assert text == "model has no 'lnet'; did you mean lenet? known: lenet, mlp"


def test_an_unknown_name_without_near_ones_lists_all():
    text = str(errors.UnknownNameError("method.name", "foo", ("diloco", "hogwild-sgd")))
    assert text == "method.name has no 'foo'; known: diloco, hogwild-sgd"


@pytest.mark.parametrize("quoted", ["x" * 10_000, "a\nb" * 1000, "a\r\x0bb"])
def test_what_a_sentence_quotes_of_the_data_is_one_short_line(quoted):
    error = errors.DataError("a.csv", f"column 'x' holds {quoted}; leave the column out")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) < 1000
    assert str(error).startswith("a.csv: column 'x' holds ")
    assert str(error).endswith("; leave the column out")
