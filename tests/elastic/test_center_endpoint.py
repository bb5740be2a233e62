"""The calls of workers to the center's actor, without Ray."""

import numpy as np
import pytest
from ensembles import Ensemble, tiny_images
from message_jobs import message_job as job

from raydl.elastic.center_endpoint import CenterEndpoint
from raydl.parameter_server.protocol import MessageId
from raydl.worker.in_process import LocalCenterClient


class Endpoint(CenterEndpoint):
    def __init__(self, center):
        super().__init__()
        self._center_server = center


def center_of(method, num_workers, *, is_mapped):
    run = Ensemble(
        job(method), num_workers=num_workers, images=tiny_images(24), has_neighbours=is_mapped
    )
    run.join().run()
    return run.center().weights


@pytest.mark.parametrize(
    ("method", "num_workers", "is_mapped"),
    [("original-easgd", 2, False), ("async-msgd", 1, False), ("async-easgd", 1, True)],
)
def test_workers_that_call_the_endpoint_get_the_same_bits(
    monkeypatch, method, num_workers, is_mapped
):
    expected = center_of(method, num_workers, is_mapped=is_mapped)
    endpoints = []

    def client(center, others):
        endpoints.append(Endpoint(center))
        return LocalCenterClient(endpoints[-1], others)

    monkeypatch.setattr("ensembles.LocalCenterClient", client)
    found = center_of(method, num_workers, is_mapped=is_mapped)
    assert len(endpoints) == 1
    assert np.array_equal(found, expected)


def test_a_worker_learns_from_the_endpoint_which_of_its_messages_were_applied():
    run = Ensemble(job("async-sgd", compression="int8"), num_workers=1, images=tiny_images(24))
    run.join().run(rounds=2)
    client = LocalCenterClient(Endpoint(run.service))
    (number,) = client.applied(MessageId("w0", 2, 0), 1).values()
    assert number > 0
    assert client.applied(MessageId("w0", 2, 0), 7) == {}
