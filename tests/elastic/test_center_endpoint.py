"""The calls of workers to the center's actor, without Ray."""

import numpy as np
import pytest
from ensembles import Ensemble, tiny_images
from message_jobs import message_job as job

from raydl.elastic.center_endpoint import CenterEndpoint
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
def test_workers_that_call_the_endpoint_come_to_the_same_bits(
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
