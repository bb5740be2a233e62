"""Network partitions between hosts, and the promises of a run during them."""

import json
import os
import signal
import subprocess
import sys

import pytest
from checkpoints import make_checkpoint as make

from benchmarks import counting
from benchmarks.hosts import Hosts, why_not
from benchmarks.outside import BACK_S, LEASE_S, UP_S, Observed, Run, falls, miscounted
from benchmarks.partitions import LONGEST_S, METHODS, SHORTEST_S, cuts_of, run_partitioned
from benchmarks.ray_on_hosts import USUAL_PULL_MS
from benchmarks.runs_on_hosts import cluster
from raydl.checkpoint.store import CheckpointStore
from raydl.data.ledger import Ledger
from raydl.storage import Storage

NUMBER = int(os.environ.get("RAYDL_PARTITIONS", "6"))
"""Number of partitions in the slow test, over all methods."""


# the checks


def manifest(round, generation, driver_epoch=1, **more):
    return {"round": round, "generation": generation, "driver_epoch": driver_epoch, **more}


def test_a_checkpoint_of_an_earlier_generation_or_driver_or_round_is_found_stale():
    observed = Observed()
    observed.add_manifest("a", manifest(10, 1))
    observed.add_manifest("b", manifest(12, 1))
    observed.add_manifest("c", manifest(11, 2))  # generation 2 continued from an earlier round
    observed.add_manifest("d", manifest(11, 2, 2, copy_of="c"))
    assert observed.stale == []
    for stale in (manifest(20, 1, 2), manifest(30, 5, 1), manifest(10, 2, 2)):
        observed.add_manifest("x", stale)
    assert len(observed.stale) == 3


@pytest.mark.parametrize("is_stale", [False, True])
def test_checkpoints_written_between_two_checks_are_read_in_the_order_of_their_writing(
    tmp_path, is_stale
):
    """A lost center continues from an earlier round in a later generation."""
    written = [("round-0925", manifest(925, 2)), ("round-0912", manifest(912, 5))]
    for at, (name, content) in enumerate(reversed(written) if is_stale else written):
        path = tmp_path / "checkpoints" / name / "manifest.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))
        os.utime(path, (1000 + at, 1000 + at))
    observed = Observed()
    observed.read_manifests(tmp_path)
    observed.read_manifests(tmp_path)
    assert len(observed.written) == 2
    assert bool(observed.stale) == is_stale


def test_a_curve_of_generations_that_falls_is_found():
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
    assert bool(miscounted(tmp_path)) == is_found


@pytest.mark.parametrize("number", [2, 6, 50])
def test_partitions_cut_off_all_hosts_for_times_below_and_above_the_lease(number):
    cuts = cuts_of(number, seed=0)
    lengths = sorted(cut.for_s for cut in cuts)
    assert (lengths[0], lengths[-1]) == (SHORTEST_S, LONGEST_S)
    assert lengths[0] < LEASE_S < lengths[-1]
    assert {cut.host for cut in cuts} == {0, 1, 2}.intersection((1, 2, 0)[:number])


# partitions of hosts


@pytest.fixture
def can_make_hosts():
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


class HostMember:
    """A process in a host that executes commands."""

    def __init__(self, hosts, host):
        words = [sys.executable, "-c", MEMBER, hosts.address(0), hosts.address(host), str(host)]
        self.process = hosts.popen(
            host, words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def send(self, *command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def call(self, *command):
        self.send(*command)
        return self.answer()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate(timeout=20)


def call_both(members, *command):
    """Send both a command, then read both answers; ``RANK`` stands for the rank of each."""
    for rank, member in enumerate(members):
        member.send(*[rank if word == "RANK" else word for word in command])
    return [member.answer() for member in members]


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_a_sum_that_a_partition_cuts_off_completes_nowhere_nor_reaches_the_next_generation(
    can_make_hosts,
):
    with Hosts(2, mbit=100) as hosts, HostMember(hosts, 0) as first, HostMember(hosts, 1) as second:
        members = first, second
        assert [m.process.stdout.readline() for m in members] == ["up\n", "up\n"]
        call_both(members, "form", 1, "RANK", 2)
        call_both(members, "start", 1)
        assert call_both(members, "result") == [2, 2]
        hosts.cut(1)
        call_both(members, "start", 10)
        assert call_both(members, "done", 1.5) == [False, False]
        first.call("abort")  # closes its connections without notice to the other side
        first.call("form", 2, 0, 1)
        first.call("start", 100)
        assert first.call("result") == 100
        assert second.call("done", 0.5) is False
        hosts.join(1)
        assert second.call("result") == "failed", "it notices that the other member has left"
        assert first.call("result") == 100
        second.call("abort")
        call_both(members, "form", 3, "RANK", 2)
        call_both(members, "start", 1000)
        assert call_both(members, "result") == [2000, 2000]


def assert_nothing_stale(observed, num_cuts):
    assert observed.stale == []
    assert len(observed.back_s) == num_cuts
    assert len(observed.written) > num_cuts


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600 + 200 * NUMBER)
@pytest.mark.parametrize("method", METHODS)
def test_partitions_of_either_side_write_nothing_stale(can_make_hosts, method):
    cuts = cuts_of(max(len(METHODS), NUMBER), seed=1)[METHODS.index(method) :: len(METHODS)]
    with cluster(2, has_master=True, pull_ms=USUAL_PULL_MS) as made:
        assert_nothing_stale(run_partitioned(made, method, cuts), len(cuts))


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_worker_cut_off_is_lost_and_its_late_message_is_refused_and_counted(can_make_hosts):
    """Its host is cut off and its node is halted, so nothing can end it before its message arrives.

    Each sample adds one to its own weight, so that an applied message would be seen.
    """
    observed = Observed()
    with cluster(2, has_master=True, pull_ms=USUAL_PULL_MS) as made:
        words = (
            "--data", counting.write_table(made.folder / "table"), *counting.OPTIONS,
            "--method", "benchmarks.counting:AllProgressByMessages", "--epochs", "1000000",
        )  # fmt: skip
        with Run(made, made.folder / "run", *words) as run:

            def wait_for_line(text):
                def is_logged():
                    return any(text in line for line in run.log_lines)

                run.wait_until(is_logged, BACK_S, text, observed)

            run.wait_until_all_train(observed, UP_S)
            node = made.hosts.processes(1).items()
            (raylet,) = [pid for pid, command in node if "/raylet/raylet " in command]
            made.hosts.cut(1)
            os.kill(raylet, signal.SIGSTOP)
            wait_for_line("was lost: it did not answer for")
            run.wait_until(lambda: run.status()["num_workers"] == 1, BACK_S, "one worker", observed)
            made.hosts.join(1)
            wait_for_line("refused a late message from outside the current membership")
            os.kill(raylet, signal.SIGCONT)
            run.stop(observed)
            checkpoint, _ = CheckpointStore(Storage(str(run.run_dir))).read()
    assert observed.refused["messages"] >= 1
    assert observed.stale == []
    assert int(checkpoint.center["counts"].sum().round()) == checkpoint.progress.num_samples > 0
