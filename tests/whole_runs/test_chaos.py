"""Random faults on hosts: their injection, their counts, and their effects on runs."""

import os
import random
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import chaos
from benchmarks import storm as storm_module
from benchmarks.chaos import RULES, growth, run_in_storm
from benchmarks.counting import MOST_OUT
from benchmarks.hosts import why_not
from benchmarks.runs_on_hosts import UNLIMITED_MBIT
from benchmarks.storm import KINDS, Outcome, Storm, is_halted

SECONDS = float(os.environ.get("RAYDL_CHAOS_S", "150"))
"""Seconds of faults in the slow test, for each method."""
MB = 1 << 20


# counts and limits


def test_refusals_that_a_killed_driver_had_logged_are_counted():
    outcome = Outcome()
    outcome.add_refused(
        [
            "[0:38] refused a late message from outside the current membership: it changed nothing",
            "[1:02] refused 1,234 late messages from outside the current membership",
            "[1:03] refused a late snapshot from an earlier generation: it changed nothing",
            "[1:04] generation 7: w3 joins",
        ]
    )
    outcome.add_refused(["[0:10] refused 2 late snapshots from an earlier generation"])
    assert outcome.refused == {"messages": 1234, "snapshots": 3}


def test_the_first_third_of_a_process_is_ignored_in_the_growth_of_memory():
    memory = [(float(s), MB * (100 if s < 60 else 200 if s < 170 else 230)) for s in range(181)]
    assert growth(memory) == pytest.approx(1.15)
    assert growth(memory[:110]) is None, "too short"
    assert growth([]) is None


def test_a_loss_may_miscount_unfinished_samples_by_messages_but_none_in_rounds():
    outcome = Outcome(num_rejoined=1, num_out=3 * MOST_OUT)
    outcome.hits.update(["cut", "kill"])
    met = {
        rule: {f.name: f.is_met for f in chaos.figures_of(rule, outcome)}[
            f"chaos.{rule}.samples-out"
        ]
        for rule in RULES
    }
    assert met == {"sync": False, "async": True}
    outcome.num_out += 1
    figures = {f.name: f for f in chaos.figures_of("async", outcome)}
    assert figures["chaos.async.samples-out"].is_met is False


@pytest.mark.parametrize("kind", ["stale", "ended", "num_left", "growth"])
def test_a_run_that_breaks_a_promise_misses_its_figure(kind):
    outcome = Outcome(**{kind: 1 if kind == "num_left" else [1.3]})
    assert [f.is_met for f in chaos.figures_of("sync", outcome)].count(False) == 1


# faults


class FakeHosts:
    """Four hosts with a table of processes; all calls are recorded."""

    number = 4

    def __init__(self, processes):
        self.calls = []
        self._named = processes

    def __getattr__(self, name):
        return lambda *words: self.calls.append((name, *words))

    def processes(self, host):
        return dict(self._named.get(host, {}))


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(storm_module.time, "monotonic", lambda: clock.now)
    return clock


def storm_on(processes, resume=None):
    hosts, outcome = FakeHosts(processes), Outcome()
    storm = Storm(SimpleNamespace(hosts=hosts), outcome, random.Random(1), resume)
    return storm, hosts, outcome


def test_a_fault_counts_only_if_it_hits_something():
    storm, _, outcome = storm_on({})
    for kind in ("kill", "halt", "center", "node", "driver"):
        assert storm.inject(kinds={kind: 1}) == ""
    assert outcome.hits == {}
    assert storm.inject(kinds={"cut": 1})
    assert outcome.hits == {"cut": 1}


def test_lasting_faults_end_in_time_or_with_the_storm(clock):
    storm, hosts, _ = storm_on({host: {10 + host: "/x/raylet/raylet "} for host in range(4)})
    assert "Mbit/s" in storm.inject(kinds={"thin": 1})
    assert "cut off" in storm.inject(kinds={"cut": 1})
    (_, mbit), (_, host) = hosts.calls
    assert mbit <= 10
    clock.now = 1.0
    storm.tick()
    assert len(hosts.calls) == 2
    clock.now = 61.0
    storm.tick()
    assert sorted(hosts.calls[2:]) == [("join", host), ("limit", UNLIMITED_MBIT)]
    storm.inject(kinds={"cut": 1})
    storm.end_all()
    assert hosts.calls[-1][0] == "join"


def test_a_host_that_is_cut_off_is_not_cut_off_again(clock):
    storm, hosts, outcome = storm_on({})
    for _ in range(100):
        storm.inject(kinds={"cut": 1})
    assert sorted(hosts.calls) == [("cut", host) for host in range(4)]
    assert outcome.hits["cut"] == 4


def test_a_worker_is_halted_for_some_time_or_for_good(clock, sleeper, monkeypatch):
    storm, _, outcome = storm_on({2: {sleeper.pid: "ray::WorkerActor.run"}})
    monkeypatch.setattr(storm, "_start_nodes", lambda: None)
    done = set()
    for _ in range(20):
        done.add(storm.inject(kinds={"halt": 1}).rpartition(" halted for ")[2] == "good")
        os.waitpid(sleeper.pid, os.WUNTRACED)
        assert is_halted(sleeper.pid)
        clock.now += 100
        storm.tick()
        os.kill(sleeper.pid, signal.SIGCONT)
    assert done == {True, False}
    assert outcome.hits["halt"] == 20


def test_ended_nodes_restart_on_hosts_that_reach_the_head(clock, monkeypatch, tmp_path):
    started = []
    storm, _, outcome = storm_on({2: {12: "/x/raylet/raylet --head"}})
    storm._made.folder, storm._made.environment = tmp_path, {}

    def join(hosts, host, folder, environment):
        started.append(host)
        return SimpleNamespace(poll=lambda: None)

    monkeypatch.setattr(storm_module, "join_ray", join)
    storm._cut.add(0)
    storm.tick()
    assert started == []
    storm._cut = {1}
    clock.now = 10.0
    storm.tick()
    assert started == [3]
    storm._cut.clear()
    clock.now = 20.0
    storm.tick()
    assert started == [3, 1], "3 is being started, 2 is up"
    assert outcome.num_rejoined == 2


def test_the_same_seed_gives_the_same_faults(clock):
    def injected_calls():
        storm, hosts, _ = storm_on({})
        for _ in range(50):
            storm.inject(kinds=KINDS)
            clock.now += 30
            storm._nodes_at = clock.now + 100
            storm.tick()
        return hosts.calls

    assert injected_calls() == injected_calls()


# a storm


@pytest.fixture
def can_make_hosts():
    if reason := why_not():
        pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900 + 4 * SECONDS)
@pytest.mark.parametrize("rule", RULES)
def test_a_storm_over_hosts_loses_no_sample_and_writes_nothing_stale(can_make_hosts, rule):
    outcome = run_in_storm(rule, seed=2, seconds=SECONDS)
    assert outcome.hits.total() >= 4
    assert outcome.stale == outcome.ended == []
    missed = [figure for figure in chaos.figures_of(rule, outcome) if figure.is_met is False]
    assert missed == []
