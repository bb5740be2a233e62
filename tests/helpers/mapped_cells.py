"""Cells of the center in shared memory, opened as a worker opens them."""

import torch
from message_jobs import message_job as job

from raydl.core.membership import Membership
from raydl.core.non_trainable import NonTrainableState
from raydl.core.optimizers import make_optimizer
from raydl.core.reports import Outcome
from raydl.methods.easgd import Elastic
from raydl.parameter_server.client import ClientSession
from raydl.parameter_server.protocol import (
    NOTHING,
    Assignment,
    Response,
)
from raydl.parameter_server.shard import Shard
from raydl.parameter_server.shared_memory import MappedCell, MappedExchange
from raydl.worker.in_process import HERE


class FakeCenterClient:
    """A client that receives the same assignment for each completion."""

    num_shards = 1

    def __init__(self, *, refusal=""):
        self.settled = []
        self.refusal = refusal

    def request(self, shard, request):
        self.settled.append(request)
        return self

    def wait(self):
        return Response(NOTHING, NOTHING, ASSIGNMENT, self.refusal)


ASSIGNMENT = Assignment(Outcome.GO_ON, [], [], 2, 0, 1, 0, 0.0, 0)


def open_shard(size, *, rule=None, is_locked=True, timeout_s=5.0, workers=("w0", "w1")):
    shard = Shard(
        [(0, size)],
        torch.zeros(size),
        torch.zeros(0),
        rule=rule or Elastic(0.5),
        make_optimizer=make_optimizer(job("async-easgd").optimizer),
        is_locked=is_locked,
        node=HERE,
        lock_timeout_s=timeout_s,
    )
    shard.begin_generation(Membership(1, workers))
    return shard


def open_exchange(shard, worker_id="w0", *, client=None, rule=None, is_locked=True, timeout_s=5.0):
    """Return the exchange of a worker in another process of the center's node."""
    [(span, address)] = shard.shared_cells(worker_id, HERE).items()
    cell = MappedCell.open_address(address, span[1], is_locked=is_locked, timeout_s=timeout_s)
    session = ClientSession(worker_id, 1, NonTrainableState("", {}), ledger={}, ledger_round=0)
    session.set_assignment(ASSIGNMENT)
    return MappedExchange(
        cell,
        address.slot,
        span=slice(*span),
        buffers=torch.zeros(0),
        rule=rule or Elastic(0.5),
        client=client or FakeCenterClient(),
        is_last=True,
        session=session,
    )
