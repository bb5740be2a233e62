"""A worker writes its state itself, or the driver does, but never both at once."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from raydl.ray_backend import state_transfer
from raydl.ray_backend.state_transfer import RayState, RayStateWrite
from raydl.storage import Storage, Sum


@pytest.fixture
def stalled(tmp_path, monkeypatch):
    """Return a function that makes the write of a worker that makes no progress."""

    def make(*, ends):
        worker, ref = Mock(), object()

        def wait(refs, timeout):
            is_over = ends and worker.stop_writing.remote.called
            return (refs, []) if is_over else ([], refs)

        ray = SimpleNamespace(wait=wait, get=lambda ref, timeout=None: 100)
        monkeypatch.setattr(state_transfer, "ray", ray)
        monkeypatch.setattr(state_transfer, "SILENCE_S", 0.05)
        state = RayState(worker, "w1", 7, set())
        return RayStateWrite(state, Storage(str(tmp_path)), "worker-w1.safetensors", ref)

    return make


def test_the_driver_writes_the_state_once_the_workers_write_has_ended(stalled, monkeypatch):
    write = stalled(ends=True)
    monkeypatch.setattr(write, "_pieces", lambda: [b"state"])
    assert write.wait() == Sum.of([b"state"])
    assert write.state.without_storage == {"w1"}, "the next checkpoint does not wait for it"


def test_the_driver_writes_nothing_while_the_workers_write_may_still_replace_it(stalled, tmp_path):
    write = stalled(ends=False)
    with pytest.raises(OSError, match=r"w1 has not ended its write of worker-w1\.safetensors"):
        write.wait()
    assert list(tmp_path.iterdir()) == []
