"""A new worker finds the rendezvous actor of its run, without Ray."""

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError

from raydl.errors import AttachError, ConfigError
from raydl.ray_backend import attach
from raydl.ray_backend.attach import Transports


class FakeRendezvousActors:
    """A sequence of rendezvous actors, each a dictionary of answers by method."""

    def __init__(self, *actors):
        self.actors = list(actors)
        self.num_found = 0

    def options(self, **settings):
        return SimpleNamespace(remote=self.find)

    def find(self, *arguments):
        self.num_found += 1
        answers = self.actors.pop(0)
        calls = {
            name: SimpleNamespace(remote=lambda *arguments, answer=answer: answer)
            for name, answer in answers.items()
        }
        return SimpleNamespace(**calls)


def get(answer, timeout):
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.fixture
def registered(monkeypatch):
    """Return a function that registers a worker: (worker id, the actors that it has found)."""

    def register(*actors):
        found = FakeRendezvousActors(*actors)
        context = SimpleNamespace(get_job_id=lambda: "job", get_actor_id=lambda: "actor")
        fake = SimpleNamespace(get=get, get_runtime_context=lambda: context)
        monkeypatch.setattr(attach, "ray", fake)
        monkeypatch.setattr(attach, "_RETRY_S", 0.0)
        monkeypatch.setattr(attach, "RendezvousActor", found)
        scaling = SimpleNamespace(max_workers=2)
        job = SimpleNamespace(config=SimpleNamespace(scaling=scaling))
        try:
            _, worker_id = Transports("run", job, {}).register("w0")
        except (AttachError, ConfigError) as error:
            return error, found.num_found
        return worker_id, found.num_found

    return register


ALIVE = {"run_id": "abc", "register": "w0"}
ENDED = {"run_id": ActorDiedError()}
ENDS = {"run_id": "abc", "register": ActorDiedError()}


def test_a_worker_that_finds_an_ending_actor_registers_at_the_next_one(registered):
    assert registered(ALIVE) == ("w0", 1)
    assert registered(ENDED, ALIVE) == ("w0", 2)
    assert registered(ENDS, ENDED, ALIVE) == ("w0", 3)


def test_a_worker_tries_five_actors(registered):
    error, num_found = registered(*[ENDED] * 9)
    assert "its process ended" in str(error)
    assert num_found == 5


def test_an_actor_that_does_not_answer_or_refuses_is_called_once(registered):
    error, num_found = registered({"run_id": GetTimeoutError()}, ALIVE)
    assert "did not answer for 120 s" in str(error)
    assert num_found == 1
    refusal = ConfigError("method.period", "must be the same for all workers")
    assert registered({"run_id": "abc", "register": refusal}, ALIVE) == (refusal, 1)
