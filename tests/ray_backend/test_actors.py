"""The actors of worker and evaluator, without Ray."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from raydl.config import ExchangeConfig, TrainConfig
from raydl.core.membership import Membership
from raydl.core.reports import Outcome
from raydl.core.saved_state import pack
from raydl.errors import ExchangeError, InfrastructureError
from raydl.ray_backend import actors
from raydl.ray_backend.actors import EvaluatorActor, WorkerActor
from raydl.storage import Sum

STATE = {"round": 3}


@pytest.fixture
def actor():
    """An actor without Ray that has read its state, and cannot form a group."""
    actor = object.__new__(WorkerActor.__ray_metadata__.modified_class)
    actor._partition = Mock(both_ways=nullcontext)
    actor._job = SimpleNamespace(config=TrainConfig())
    actor._injector, actor._lock, actor._abandoned_up_to = Mock(), threading.Lock(), 0
    actor._goes_on, actor._own_state, actor._fed = False, dict(STATE), bytearray()
    actor._worker = Mock(worker_id="w0", copy_age=(-1, 0), copy_generation=0, ledger_round=None)
    actor._make_partners, actor._prepare_copy = Mock(return_value=None), Mock()
    actor._gated = lambda transport: transport
    actor._make_transport = Mock(side_effect=ExchangeError(0, 1, "w1 was lost"))
    return actor


def run(actor, generation, *, goes_on):
    membership = Membership(generation, ("w0", "w1"))
    return actor.run(membership, None, None, [], (), goes_on=goes_on)


def test_a_state_is_used_in_the_next_generation_if_the_first_did_not_form(actor):
    ended = run(actor, 1, goes_on=True)
    assert (ended.outcome, ended.round) == (Outcome.BROKEN, -1)
    assert actor._own_state == STATE
    actor._make_transport = Mock()
    actor._worker.run_round.return_value = Outcome.FINISHED
    run(actor, 2, goes_on=False)
    assert actor._worker.join.call_args.args[3] == STATE
    assert actor._own_state is None, "it may be as large as the replica"


def test_a_state_that_arrived_too_late_is_not_used(actor):
    run(actor, 1, goes_on=False)
    assert actor._own_state is None


def test_a_state_that_arrived_in_part_does_not_damage_the_next_one(actor):
    data = np.frombuffer(b"".join(pack({"round": 7}).pieces()), np.uint8)
    written = Sum.of([data])
    actor._own_state = None
    actor.feed_state(0, data[:10], written)
    for start in (0, 50):
        actor.feed_state(start, data[start : start + 50] if start == 0 else data[50:], written)
    assert actor._own_state == {"round": 7}


@pytest.mark.parametrize(
    ("error", "raised"), [(ZeroDivisionError("mine"), ZeroDivisionError), (MemoryError(), None)]
)
def test_an_error_while_the_evaluators_model_is_built_is_that_of_the_evaluation(
    monkeypatch, error, raised
):
    monkeypatch.setattr(actors, "Evaluator", Mock(side_effect=[error, Mock(num_scored=3)]))
    evaluator = EvaluatorActor.__ray_metadata__.modified_class(None, None, None, {})
    assert evaluator.num_scored() == 0
    with pytest.raises(raised or InfrastructureError):
        evaluator.evaluate(None)
    evaluator.evaluate(None)
    assert evaluator.num_scored() == 3


def test_the_group_sums_by_the_algorithm_of_the_settings(monkeypatch):
    make_group = Mock()
    monkeypatch.setattr(actors, "CollectiveGroup", make_group)
    worker = object.__new__(WorkerActor.__ray_metadata__.modified_class)
    config = TrainConfig(exchange=ExchangeConfig(allreduce="ring"))
    worker._job = SimpleNamespace(config=config, method=SimpleNamespace(is_sync=True))
    worker._worker, worker._shards, worker._abandoned = Mock(worker_id="w1"), ["center"], None
    worker._make_transport(Membership(1, ("w0", "w1")), None)
    assert make_group.call_args.args[1:] == (("w0", "w1"), 1)
    assert make_group.call_args.kwargs["algorithm"] == "ring"
