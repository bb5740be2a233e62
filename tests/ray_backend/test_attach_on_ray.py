"""Loops of one's own in plain actors and in Ray Train: workers die and come, the others go on."""

import os
import re
import runpy
import signal
import threading
import time

import pytest
import ray
import torch

import raydl
from raydl.config import ElasticConfig, MethodConfig
from raydl.errors import AttachError

pytestmark = pytest.mark.cluster

BOUND_S = 200
STEPS_MORE, STEPS_TO_LEARN = 30, 200


def data(seed):
    """Return pictures of two kinds: the sign of their sum."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(64, 8, generator=generator)
    return inputs, (inputs.sum(1) > 0).long()


def loss_of(model, seed=99):
    inputs, labels = data(seed)
    return torch.nn.functional.cross_entropy(model(inputs), labels)


def score(model):
    with torch.no_grad():
        return float(loss_of(model))


def make_net(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


@ray.remote(num_cpus=0, max_concurrency=2)
class Own:
    """A worker with a loop of its own, until it is told to stop."""

    def __init__(self):
        torch.set_num_threads(1)

    def begin(self, seed):
        """Be another worker from now on."""
        self.seed, self.elastic, self.loss_at_start = seed, None, None
        self.stopped = threading.Event()

    def pid(self):
        return os.getpid()

    def train(self, name, method, num_workers=(2, 3)):
        model = make_net(self.seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with raydl.attach(
            model,
            optimizer,
            method=method,
            name=name,
            num_workers=num_workers,
            elastic=ElasticConfig(lease_s=4.0),
            start_timeout_s=BOUND_S,
        ) as elastic:
            self.loss_at_start, self.elastic = score(model), elastic
            while not self.stopped.wait(0.005):  # which leaves the cores to others
                optimizer.zero_grad()
                loss_of(model, self.seed).backward()
                elastic.step()
            with elastic.center():
                return score(model)

    def where(self):
        """Return (local steps, workers, loss at the start) of a loop that has begun."""
        if self.elastic is None:
            return 0, 0, None
        return self.elastic.local_step, self.elastic.num_workers, self.loss_at_start

    def stop(self):
        self.stopped.set()


class Workers:
    """The processes of workers; those that were not killed serve again."""

    def __init__(self):
        self.alive = []

    def take(self, *seeds, start=0):
        """Return a worker for each seed, all of them up; those before ``start`` are at work."""
        self.alive += [Own.remote() for _ in range(start + len(seeds) - len(self.alive))]
        taken = self.alive[start : start + len(seeds)]
        ray.get([a.begin.remote(seed) for a, seed in zip(taken, seeds, strict=True)])
        return taken

    def kill(self, worker):
        self.alive.remove(worker)
        os.kill(ray.get(worker.pid.remote()), signal.SIGKILL)


@pytest.fixture(scope="module")
def workers(cluster):
    return Workers()


def until(actors, condition):
    """Wait until a condition on where each actor is holds for all; return where they are."""
    deadline = time.monotonic() + BOUND_S
    while True:
        places = ray.get([actor.where.remote() for actor in actors], timeout=BOUND_S)
        if all(condition(*place) for place in places):
            return places
        assert time.monotonic() < deadline, places
        time.sleep(0.1)


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_one_of_three_is_killed_the_others_go_on_and_a_new_one_gets_the_center(workers, method):
    config = MethodConfig(name=method, period=2)
    actors = workers.take(0, 1, 2)
    loops = [actor.train.remote(method, config) for actor in actors]
    places = until(actors, lambda steps, workers, _: steps > STEPS_MORE and workers == 3)
    workers.kill(actors.pop(0))
    reached = max(place[0] for place in places)
    until(actors, lambda steps, workers, _: workers == 2 and steps > reached + STEPS_MORE)
    actors += workers.take(7, start=2)
    loops = [*loops[1:], actors[2].train.remote(method, config)]
    until(actors, lambda steps, workers, _: workers == 3 and steps > reached + STEPS_TO_LEARN)
    new = ray.get(actors[2].where.remote())
    ray.get([actor.stop.remote() for actor in actors])
    non_trainable = score(make_net(7))
    assert new[2] < 0.8 * non_trainable
    for loss in ray.get(loops, timeout=BOUND_S):
        assert loss < 0.5 * non_trainable


def test_a_lost_rendezvous_actor_raises_one_sentence(workers):
    (actor,) = workers.take(0)
    loop = actor.train.remote("lost", MethodConfig(name="async-easgd"), 1)
    until([actor], lambda steps, *_: steps > 10)
    job_id = ray.get_runtime_context().get_job_id()
    ray.kill(ray.get_actor(f"raydl.attach {job_id} lost", namespace="raydl"))
    with pytest.raises(AttachError, match="the rendezvous actor was lost"):
        ray.get(loop, timeout=BOUND_S)


def test_the_job_with_a_loop_of_its_own_learns(cluster, capsys, root):
    runpy.run_path(str(root / "jobs/own_loop.py"))["main"]()
    (percent,) = re.findall(r"^center test accuracy ([\d.]+)%$", capsys.readouterr().out, re.M)
    assert float(percent) > 95
