"""Networks that are parted for real, and what must hold of a run all the while."""

import json
import os
import signal
import subprocess
import sys

import pytest
from checkpoints import make_checkpoint as make

from benchmarks import counting
from benchmarks.hosts import Hosts, why_not
from benchmarks.outside import BACK_S, LEASE_S, UP_S, Run, Watched, falls, why_not_once
from benchmarks.partitions import LONGEST_S, METHODS, SHORTEST_S, cuts_of, partitioned
from benchmarks.ray_on_hosts import USUAL_PULL_MS
from benchmarks.runs_on_hosts import cluster
from raydl.checkpoint.store import CheckpointStore
from raydl.data.ledger import Ledger
from raydl.storage import Storage

NUMBER = int(os.environ.get("RAYDL_PARTITIONS", "6"))
"""Partitions of the slow test, over all methods."""


# what is looked for


def manifest(round, generation, driver_epoch=1, **more):
    return {"round": round, "generation": generation, "driver_epoch": driver_epoch, **more}


def test_a_checkpoint_of_an_earlier_generation_or_driver_or_round_is_found_stale():
    watched = Watched()
    watched.note_manifest("a", manifest(10, 1))
    watched.note_manifest("b", manifest(12, 1))
    watched.note_manifest("c", manifest(11, 2))  # the next generation went on from an earlier round
    watched.note_manifest("d", manifest(11, 2, 2, copy_of="c"))
    assert watched.stale == []
    for stale in (manifest(20, 1, 2), manifest(30, 5, 1), manifest(10, 2, 2)):
        watched.note_manifest("x", stale)
    assert len(watched.stale) == 3


@pytest.mark.parametrize("is_stale", [False, True])
def test_checkpoints_that_came_between_two_looks_are_taken_in_the_order_of_their_writing(
    tmp_path, is_stale
):
    """A center that was lost goes on from an earlier round, in a later generation."""
    written = [("round-0925", manifest(925, 2)), ("round-0912", manifest(912, 5))]
    for at, (name, content) in enumerate(reversed(written) if is_stale else written):
        path = tmp_path / "checkpoints" / name / "manifest.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))
        os.utime(path, (1000 + at, 1000 + at))
    watched = Watched()
    watched.look(tmp_path)
    watched.look(tmp_path)
    assert len(watched.written) == 2
    assert bool(watched.stale) == is_stale


def test_a_generation_that_falls_is_found():
    assert falls([1, 1, 2, 3]) == []
    assert falls([1, 3, 2]) == ["the curve of generations falls from 3 to 2"]


@pytest.mark.parametrize(
    ("change", "is_found"),
    [(lambda state: None, False), (lambda state: state["open"][0].__setitem__(1, 9), True)],
)
def test_a_sample_that_is_counted_twice_is_found(tmp_path, change, is_found):
    ledger = Ledger(10)
    ledger.claim("w0", 4)
    ledger.complete("w0")
    ledger.claim("w1", 3)
    state = ledger.state_dict()
    change(state)
    checkpoint = make(3)
    checkpoint.state["ledger"] = state
    CheckpointStore(Storage(str(tmp_path))).write(checkpoint)
    assert bool(why_not_once(tmp_path)) == is_found


@pytest.mark.parametrize("number", [2, 6, 50])
def test_partitions_are_of_all_hosts_and_of_all_lengths_beyond_the_lease_too(number):
    cuts = cuts_of(number, seed=0)
    lengths = sorted(cut.for_s for cut in cuts)
    assert (lengths[0], lengths[-1]) == (SHORTEST_S, LONGEST_S)
    assert lengths[0] < LEASE_S < lengths[-1]
    assert {cut.host for cut in cuts} == {0, 1, 2}.intersection((1, 2, 0)[:number])


# real ones


@pytest.fixture
def permitted():
    if reason := why_not():
        pytest.skip(reason)


MEMBER = """
import json, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from raydl.collective.process_group import TorchGroup, is_done
from raydl.collective.key_store import SECRET

place, host, is_first = sys.argv[1], sys.argv[2], sys.argv[3] == "0"
STEP = timedelta(seconds=10)
store, group, work, tensor = None, None, None, None

def form(generation, rank, size):
    global store, group
    if store is None or not is_first:
        store = dist.TCPStore(place, 5001, is_master=is_first, timeout=STEP, wait_for_workers=False)
    group = TorchGroup(rank, size, device="cpu", timeout_s=20.0)
    keys = dist.PrefixStore(str(generation), store)
    keys.set(SECRET, f"of generation {generation}")
    group.connect(keys, host=host)

def start(value):
    global work, tensor
    tensor = torch.full((1000,), float(value))
    work = group.start_allreduce(tensor)

def done(within_s):
    return is_done(work, timedelta(seconds=within_s))

def result():
    try:
        work.wait()
        return tensor[0].item()
    except RuntimeError:
        return "failed"

print("up", flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    print(json.dumps(group.abort() if name == "abort" else globals()[name](*arguments)), flush=True)
"""


class Member:
    """A process in a host, which does what it is told."""

    def __init__(self, hosts, host):
        words = [sys.executable, "-c", MEMBER, hosts.address(0), hosts.address(host), str(host)]
        self.process = hosts.popen(
            host, words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, *words):
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def do(self, *words):
        self.tell(*words)
        return self.answer()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate(timeout=20)


def both(members, *words):
    """Tell both, then hear both; ``RANK`` in the words stands for each one's rank."""
    for rank, member in enumerate(members):
        member.tell(*[rank if word == "RANK" else word for word in words])
    return [member.answer() for member in members]


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_a_sum_that_a_partition_cut_off_ends_nowhere_and_does_not_reach_the_next_generation(
    permitted,
):
    with Hosts(2, mbit=100) as hosts, Member(hosts, 0) as first, Member(hosts, 1) as second:
        members = first, second
        assert [m.process.stdout.readline() for m in members] == ["up\n", "up\n"]
        both(members, "form", 1, "RANK", 2)
        both(members, "start", 1)
        assert both(members, "result") == [2, 2]
        hosts.cut(1)
        both(members, "start", 10)
        assert both(members, "done", 1.5) == [False, False]
        first.do("abort")  # which closes its connections: nobody hears of it
        first.do("form", 2, 0, 1)
        first.do("start", 100)
        assert first.do("result") == 100
        assert second.do("done", 0.5) is False
        hosts.join(1)
        assert second.do("result") == "failed", "it hears that it was left"
        assert first.do("result") == 100
        second.do("abort")
        both(members, "form", 3, "RANK", 2)
        both(members, "start", 1000)
        assert both(members, "result") == [2000, 2000]


def assert_nothing_stale(watched, num_cuts):
    assert watched.stale == []
    assert len(watched.back_s) == num_cuts
    assert len(watched.written) > num_cuts


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600 + 200 * NUMBER)
@pytest.mark.parametrize("method", METHODS)
def test_partitions_of_either_side_write_nothing_stale(permitted, method):
    cuts = cuts_of(max(len(METHODS), NUMBER), seed=1)[METHODS.index(method) :: len(METHODS)]
    with cluster(2, has_master=True, pull_ms=USUAL_PULL_MS) as made:
        assert_nothing_stale(partitioned(made, method, cuts), len(cuts))


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_worker_cut_off_is_lost_and_its_late_message_is_refused_and_counted(permitted):
    """Its host is away, and its node is halted: nobody can end it before what it sends arrives.

    Each sample adds one to a weight of its own, so that a message that counted would be seen.
    """
    watched = Watched()
    with cluster(2, has_master=True, pull_ms=USUAL_PULL_MS) as made:
        words = (
            "--data", counting.write_table(made.folder / "table"), *counting.OPTIONS,
            "--method", "benchmarks.counting:AllProgressByMessages", "--epochs", "1000000",
        )  # fmt: skip
        with Run(made, made.folder / "run", *words) as run:

            def until_said(what):
                run.until(lambda: any(what in line for line in run.said), BACK_S, what, watched)

            run.until_all_train(watched, UP_S)
            node = made.hosts.processes(1).items()
            (raylet,) = [pid for pid, said in node if "/raylet/raylet " in said]
            made.hosts.cut(1)
            os.kill(raylet, signal.SIGSTOP)
            until_said("was lost: it did not answer for")
            run.until(lambda: run.status()["num_workers"] == 1, BACK_S, "one worker", watched)
            made.hosts.join(1)
            until_said("refused a late message that a worker had sent that is no member any more")
            os.kill(raylet, signal.SIGCONT)
            run.stop(watched)
            checkpoint, _ = CheckpointStore(Storage(str(run.run_dir))).read()
    assert watched.refused["messages"] >= 1
    assert watched.stale == []
    assert int(checkpoint.center["counts"].sum().round()) == checkpoint.progress.num_samples > 0
