"""User loops in plain actors and in Ray Train: workers die and join, the others train on."""

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
LEASE_S = 1000.0  # far beyond BOUND_S: only Ray's word tells that a process has ended
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
class LoopActor:
    """A worker with a user loop that runs until ``stop``."""

    def __init__(self):
        torch.set_num_threads(1)

    def reset(self, seed):
        """Become another worker."""
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
            elastic=ElasticConfig(lease_s=LEASE_S),
            start_timeout_s=BOUND_S,
        ) as elastic:
            self.loss_at_start, self.elastic = score(model), elastic
            while not self.stopped.wait(0.005):  # leave the cores to other processes
                optimizer.zero_grad()
                loss_of(model, self.seed).backward()
                elastic.step()
            with elastic.center():
                return score(model)

    def progress(self):
        """Return (local steps, workers, loss at the start) of a loop that has begun."""
        if self.elastic is None:
            return 0, 0, None
        return self.elastic.local_step, self.elastic.num_workers, self.loss_at_start

    def stop(self):
        self.stopped.set()


class Workers:
    """The actors of workers; actors that were not killed are used again."""

    def __init__(self):
        self.alive = []

    def start_workers(self, *seeds, start=0):
        """Return a ready worker for each seed; the first ``start`` workers are in use already."""
        self.alive += [LoopActor.remote() for _ in range(start + len(seeds) - len(self.alive))]
        taken = self.alive[start : start + len(seeds)]
        ray.get([a.reset.remote(seed) for a, seed in zip(taken, seeds, strict=True)])
        return taken

    def kill(self, worker):
        self.alive.remove(worker)
        os.kill(ray.get(worker.pid.remote()), signal.SIGKILL)


@pytest.fixture(scope="module")
def workers(cluster):
    return Workers()


def wait_until(actors, condition):
    """Wait until the progress of all actors meets a condition; return their progress."""
    deadline = time.monotonic() + BOUND_S
    while True:
        found = ray.get([actor.progress.remote() for actor in actors], timeout=BOUND_S)
        if all(condition(*progress) for progress in found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


@pytest.mark.parametrize(
    "method", [pytest.param("sync-easgd", marks=pytest.mark.slow), "async-easgd"]
)
def test_after_a_kill_the_others_train_on_and_a_new_worker_starts_at_the_center(workers, method):
    config = MethodConfig(name=method, period=2)
    actors = workers.start_workers(0, 1, 2)
    loops = [actor.train.remote(method, config) for actor in actors]
    found = wait_until(actors, lambda steps, workers, _: steps > STEPS_MORE and workers == 3)
    workers.kill(actors.pop(0))
    reached = max(progress[0] for progress in found)
    wait_until(actors, lambda steps, workers, _: workers == 2 and steps > reached + STEPS_MORE)
    actors += workers.start_workers(7, start=2)
    loops = [*loops[1:], actors[2].train.remote(method, config)]
    wait_until(actors, lambda steps, workers, _: workers == 3 and steps > reached + STEPS_TO_LEARN)
    new = ray.get(actors[2].progress.remote())
    ray.get([actor.stop.remote() for actor in actors])
    non_trainable = score(make_net(7))
    assert new[2] < 0.8 * non_trainable
    for loss in ray.get(loops, timeout=BOUND_S):
        assert loss < 0.5 * non_trainable


def test_a_lost_rendezvous_actor_raises_one_sentence(workers):
    (actor,) = workers.start_workers(0)
    loop = actor.train.remote("lost", MethodConfig(name="async-easgd"), 1)
    wait_until([actor], lambda steps, *_: steps > 10)
    job_id = ray.get_runtime_context().get_job_id()
    ray.kill(ray.get_actor(f"raydl.attach {job_id} lost", namespace="raydl"))
    with pytest.raises(AttachError, match="the rendezvous actor was lost"):
        ray.get(loop, timeout=BOUND_S)


@pytest.mark.slow
def test_the_job_with_a_user_loop_learns(cluster, capsys, root):
    runpy.run_path(str(root / "jobs/own_loop.py"))["main"]()
    (percent,) = re.findall(r"^center test accuracy ([\d.]+)%$", capsys.readouterr().out, re.M)
    assert float(percent) > 95
