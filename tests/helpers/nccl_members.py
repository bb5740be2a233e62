"""Members of an NCCL group, each in a process of its own, all on the first GPU."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from datetime import timedelta
from typing import Any

from one_gpu import own_host

from raydl.collective.process_group import TorchGroup, dist, is_done_on_device

HOST = "127.0.0.1"
START_S = 120.0
_SLICE = timedelta(seconds=0.05)


class Member:
    """A process that calls functions of this module, each in a thread of its own."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._newest: dict[str, int] = {}
        """The number of the newest call of each function."""
        self._answers: dict[tuple[str, int], Any] = {}
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, call: str, *arguments: Any) -> None:
        """Let the process call a function."""
        self._newest[call] = number = self._newest.get(call, 0) + 1
        self._pipe.send((call, number, arguments))

    def result(self, call: str, within_s: float) -> Any:
        """Return the result of the newest call of a function.

        Raises:
            RuntimeError: if the function raised one, of any subclass.
            TimeoutError: if it does not return in time.
        """
        deadline, wanted = time.monotonic() + within_s, (call, self._newest[call])
        while wanted not in self._answers:
            if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"{call} did not return within {within_s} s")
            call_and_number, answer = self._pipe.recv()
            self._answers[call_and_number] = answer
        answer = self._answers.pop(wanted)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    def call(self, call: str, *arguments: Any, within_s: float = 60.0) -> Any:
        """Let the process call a function, and return its result."""
        self.begin(call, *arguments)
        return self.result(call, within_s)

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self.process.kill()
        self.process.join(10.0)


def _serve(pipe: Any) -> None:
    os.environ |= own_host(str(os.getpid()))
    state: dict[str, Any] = {}
    lock = threading.Lock()

    def answer(call: str, number: int, arguments: Any) -> None:
        try:
            result = _CALLS[call](state, *arguments)
        except RuntimeError as error:
            result = RuntimeError(f"{type(error).__name__}: {error}")
        with lock:
            pipe.send(((call, number), result))

    while True:
        threading.Thread(target=answer, args=pipe.recv(), daemon=True).start()


def use_device(state: dict[str, Any]) -> str:
    """Start CUDA, and return the device's name."""
    import torch

    torch.ones(1, device="cuda")
    return torch.cuda.get_device_name()


def connect(
    state: dict[str, Any], port: int, generation: int, rank: int, size: int, timeout_s: float
) -> float:
    """Connect to a group; return the seconds that took."""
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=timeout)
    state["group"] = group = TorchGroup(rank, size, device="cuda", timeout_s=timeout_s)
    began = time.monotonic()
    group.connect(dist.PrefixStore(str(generation), store), host=HOST)
    return time.monotonic() - began


def total(state: dict[str, Any], size: int = 2) -> tuple[Any, float]:
    """Sum tensors of rank + 1 over the members.

    Returns:
        The first and the last number of the sum, or the text of the error; and the seconds.
    """
    import torch

    group = state["group"]
    tensor = torch.full((size,), group._rank + 1.0, device="cuda")
    began = time.monotonic()
    deadline = began + group._timeout.total_seconds()
    try:
        work = group.start_allreduce(tensor)
        while time.monotonic() < deadline and not is_done_on_device(work, _SLICE):
            pass
        work.wait()
        return [tensor[0].item(), tensor[-1].item()], time.monotonic() - began
    except (RuntimeError, AttributeError) as error:
        return str(error), time.monotonic() - began


def gathered(state: dict[str, Any]) -> list[list[float]]:
    """Return the ranks of all members, gathered on the device."""
    import torch

    group = state["group"]
    out = [torch.zeros(1, device="cuda") for _ in range(group._num_workers)]
    work = group.start_allgather(torch.tensor([float(group._rank)], device="cuda"), out)
    while not is_done_on_device(work, _SLICE):
        pass
    work.wait()
    return [each.tolist() for each in out]


def leave(state: dict[str, Any]) -> float:
    """Leave the group; return the seconds that took."""
    began = time.monotonic()
    if "group" in state:
        state.pop("group").abort()
    return time.monotonic() - began


def cut(state: dict[str, Any]) -> float:
    """Cut the group's connections; return the seconds that took."""
    began = time.monotonic()
    state["group"].cut()
    return time.monotonic() - began


def free_memory(state: dict[str, Any]) -> int:
    """Return the bytes of the device that no process uses, after what was dropped is freed."""
    import gc

    import torch

    gc.collect()
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


_CALLS = {
    call.__name__: call for call in (use_device, connect, total, gathered, leave, cut, free_memory)
}
