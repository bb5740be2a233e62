"""The adaptive all-reduce beside a gradient: chosen per message, run in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta

import torch
from torch import Tensor

from raydl.exchange.allreduce import Link, Reducer, measure_network
from raydl.network import Node, choose, predict_s
from raydl.reports import AllreduceReport


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
