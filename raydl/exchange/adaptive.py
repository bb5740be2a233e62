"""The adaptive all-reduce beside a gradient: chosen per message, run in a thread of its own.

With it, how a wait for torch's own operations is bounded: in a thread, in slices, by closing
the connections.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from raydl.exchange.allreduce import Link, Node, Reducer, choose, measure_network, predict_s
from raydl.reports import AllreduceReport

_CUT_TAG = 1
"""Of messages that nobody sends."""

T = TypeVar("T")


class AdaptiveAllreduce:
    """Sums tensors over the ranks in the order in which they are given.

    Latency and bandwidth are measured when it is made, by all ranks together.

    Args:
        link: the way to the other ranks.
        nodes: the node of each rank.
        algorithm: a name of ``allreduce.ALGORITHMS``, or ``auto``: the cheapest by prediction.
        generation: the membership, for the report.

    Raises:
        RuntimeError: a message of the measurement failed.
    """

    def __init__(
        self, link: Link, nodes: Sequence[Node], algorithm: str, *, generation: int = 0
    ) -> None:
        self._generation = generation
        self._network = measure_network(link, nodes)
        self._nodes = list(nodes)
        self._reducer = Reducer(link, nodes, self._network)
        self._algorithm = None if algorithm == "auto" else algorithm
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="allreduce")
        self._lock = threading.Lock()
        self._times: dict[int, list[float]] = {}

    def start(self, tensor: Tensor) -> AdaptiveWork:
        """Begin to replace ``tensor`` by its sum over the ranks, and return at once."""
        return AdaptiveWork(self._pool.submit(self._reduce, tensor))

    def _reduce(self, tensor: Tensor) -> None:
        torch.set_num_threads(1)  # OpenMP counts threads per calling thread
        start = time.perf_counter()
        self._reducer.allreduce(tensor, algorithm=self._algorithm)
        seconds = time.perf_counter() - start
        with self._lock:
            times = self._times.setdefault(tensor.nbytes, [])
            times.append(seconds)
            del times[:-101]

    def report(self) -> AllreduceReport | None:
        """Return how the largest messages so far are summed; None before the first."""
        with self._lock:
            if not self._times:
                return None
            num_bytes = max(self._times)
            # The least: the others include waiting for ranks that came late.
            measured_s = min(self._times[num_bytes])
        if self._algorithm is None:
            name, predicted_s = choose(num_bytes, self._nodes, self._network)
        else:
            name = self._algorithm
            predicted_s = predict_s(name, num_bytes, self._nodes, self._network)
        return AllreduceReport(self._generation, name, num_bytes, predicted_s, measured_s)

    def close(self) -> None:
        """Take no more; what is under way ends when the link is cut, or by its time-out."""
        self._pool.shutdown(wait=False)


class AdaptiveWork:
    """A sum under way in the thread; its methods are those of a work of torch."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_completed(self) -> bool:
        """Return whether the sum came to its end, good or bad."""
        return self._future.done()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the sum.

        Raises:
            RuntimeError: a message failed, or the sum is not there within ``timeout``; then
                it goes on.
        """
        seconds = None if timeout is None else timeout.total_seconds()
        if not wait([self._future], seconds).done:
            raise RuntimeError(f"the sum is not there after {seconds} s")
        self._future.result()


def in_thread(act: Callable[[], T]) -> Future[T]:
    """Return the result to come of a function, in a thread that no process end waits for."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(act())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def is_done(work: Any, within: timedelta) -> bool:
    """Return whether an operation comes to its end, good or bad, within a time.

    Not for a single message: gloo closes the connections if its receiver waits in vain.
    """
    try:
        work.wait(within)
    except RuntimeError:  # it failed, or goes on
        return bool(work.is_completed())
    return True


def close_connections(process_group: Any) -> None:
    """Close all connections of a gloo group; what is under way fails, here and at the peers.

    gloo has no call for that, and its destructor waits for what is under way. But a receive
    that times out closes every connection of its group. From a peer that is gone already it
    fails at once and closes no other, so that each peer has its turn.
    """
    for peer in range(process_group.size()):
        if peer != process_group.rank():
            with contextlib.suppress(RuntimeError):
                receive = process_group.recv([torch.empty(1)], peer, _CUT_TAG)
                receive.wait(timedelta(milliseconds=1))
