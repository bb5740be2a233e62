"""A training process keeps the memory of a step for the next step."""

import os
import subprocess
import sys
import threading

import pytest

from raydl.ray_backend.actors import give_way

STEPS = """
import resource, sys, threading
import torch
from raydl import models
from raydl.ray_backend.actors import freeze_objects, keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
    freeze_objects()

model = models.find("resnet20")((3, 32, 32), 10)
pictures = torch.randn(32, 3, 32, 32)

def step():
    model.zero_grad(set_to_none=False)  # as with flat gradients
    model(pictures).square().mean().backward()

def run():
    for _ in range(10):  # until the heap has its final size
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)

thread = threading.Thread(target=run)  # like the loop of a worker's actor
thread.start()
thread.join()
"""


def faults(how):
    """Return the page faults of each step of a small ResNet."""
    done = subprocess.run(
        [sys.executable, "-c", STEPS, how], capture_output=True, text=True, check=True, timeout=120
    )
    return int(done.stdout)


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_memory_that_a_step_frees_is_used_by_the_next_one():
    assert faults("kept") < 100 < 1000 < faults("as it comes")


def test_one_thread_lowers_its_priority_and_the_others_keep_theirs():
    before, found = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), []

    def work():
        give_way()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert found == [max(before, 15)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
