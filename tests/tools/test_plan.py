"""The cost model is checked by hand, at its limits, with SC17 and with measured runs."""

import dataclasses
import json
import multiprocessing
import re
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from raydl import cli
from raydl.collective.allreduce import AdaptiveAllreduce, ProcessGroupLink, Reducer, measure_network
from raydl.core.cost_model import FLAT, choose, predict_s
from raydl.errors import ConfigError, UnknownNameError
from raydl.methods import METHODS
from raydl.methods.easgd import Elastic
from raydl.models import MODELS
from raydl.tools.plan import (
    NETWORKS,
    Plan,
    best_period,
    doublings,
    flat_network,
    parse_network,
    predict,
)

SLOW = flat_network(2.0, 0.5)  # 2 s for a message, half a second for a byte
INSTANT = flat_network(0.0, 0.0)
FDR = parse_network("fdr")
LENET_BYTES = 4 * 431_080
SCHEDULES = ("sync", "async", "hogwild", "round_robin")
OVERLAPS = [(s, o) for s in SCHEDULES for o in (False, True) if (s, o) != ("round_robin", True)]


def make_plan(strategy="sync", **settings):
    defaults = {"period": 4, "overlaps": False, "step_s": 3.0, "num_bytes": 8, "batch_size": 10}
    return Plan(strategy=strategy, **{**defaults, **settings})


# worked by hand


def test_a_synchronous_round_by_hand():
    # Doubling among 4: 2 (2 + 8/2) = 12 s; the ring: 6 (2 + 8/4/2) = 18 s. A round: 4 * 3 + 12.
    found = predict(make_plan(), SLOW, 4)
    assert found.algorithm == "recursive-doubling"
    assert (found.exchange_s, found.hidden_s, found.step_s) == (12.0, 0.0, 24 / 4)
    assert (found.communication_share, found.efficiency) == (0.5, 0.5)
    assert found.samples_per_s == 4 * 4 * 10 / 24


def test_overlap_hides_an_exchange_behind_one_gradient_and_no_more():
    found = predict(make_plan(overlaps=True), SLOW, 4)
    assert (found.exchange_s, found.hidden_s, found.step_s) == (12.0, 3.0, 21 / 4)
    short = predict(make_plan(overlaps=True, step_s=50.0), SLOW, 4)
    assert (short.hidden_s, short.step_s, short.efficiency) == (12.0, 50.0, 1.0)


def test_a_single_worker_pays_the_round_trip_to_the_center():
    found = predict(make_plan("async"), SLOW, 1)
    assert (found.algorithm, found.exchange_s) == ("center", 12.0)  # 2 (2 + 8/2)
    assert found.step_s == 24 / 4


def test_the_links_of_the_center_bound_the_messages_of_all_workers():
    # 10 workers send 8 bytes each, at half a second per byte: no round is shorter than 40 s.
    found = predict(make_plan("async"), SLOW, 10)
    assert found.step_s == 40 / 4
    assert found.samples_per_s == 10 * 4 * 10 / 40
    assert predict(make_plan("async"), SLOW, 20).samples_per_s == found.samples_per_s


def test_shards_divide_the_load_of_links_but_not_the_round_trip_of_one_worker():
    halved = make_plan("async", center_shards=2)
    assert predict(halved, SLOW, 20).step_s == 40 / 4
    assert predict(halved, SLOW, 1) == predict(make_plan("async"), SLOW, 1)


def test_with_full_links_overlap_does_not_shorten_a_round():
    found = predict(make_plan("async", overlaps=True), SLOW, 10)
    assert found.hidden_s == 3.0
    assert found.step_s == 40 / 4  # the links limit the round, with and without overlap


def test_in_round_robin_a_worker_waits_for_all_others():
    # A turn is 4 * 3 s of steps and 12 s of messages; the round of a worker is 5 turns.
    found = predict(make_plan("round_robin"), SLOW, 5)
    assert found.step_s == 5 * 24 / 4
    assert found.communication_share == pytest.approx(1 - 12 / 120)
    alone = predict(make_plan("round_robin"), SLOW, 1)
    assert found.samples_per_s == pytest.approx(alone.samples_per_s)  # more workers are no faster


def test_the_best_period_by_hand():
    # 12 s of exchange are 20% of a round from 48 s of steps on: 16 steps of 3 s.
    assert best_period(make_plan(), SLOW, 4, target=0.2) == 16
    # With overlap one gradient hides 3 s of them: 9 s are 20% of a round with 36 s of steps.
    assert best_period(make_plan(overlaps=True), SLOW, 4, target=0.2) == 12
    # 5 workers: the links need 20 s per round, of which 16 s of steps leave 20% waiting. But the
    # 12 s of a worker's messages need 48 s of steps.
    assert best_period(make_plan("async"), SLOW, 5, target=0.2) == 16


def test_round_robin_has_no_best_period():
    assert best_period(make_plan("round_robin"), SLOW, 4, target=0.5) is None
    assert best_period(make_plan("round_robin"), INSTANT, 1) == 1


def test_numbers_of_workers_double_up_to_the_last():
    assert doublings(4, 4096) == [4 << k for k in range(11)]
    assert doublings(3, 20) == [3, 6, 12, 20]
    assert doublings(5, 5) == [5]
    assert doublings(1, 2) == [1, 2]


# limits and monotonicity


@pytest.mark.parametrize("strategy", ["sync", "async", "hogwild"])
@pytest.mark.parametrize("num_workers", [1, 7, 4096])
def test_a_network_that_costs_nothing_scales_perfectly(strategy, num_workers):
    found = predict(make_plan(strategy), INSTANT, num_workers)
    assert (found.efficiency, found.communication_share, found.exchange_s) == (1.0, 0.0, 0.0)
    assert best_period(make_plan(strategy), INSTANT, num_workers) == 1


def test_one_worker_of_a_synchronous_method_does_not_communicate():
    found = predict(make_plan(), SLOW, 1)
    assert (found.exchange_s, found.communication_share, found.efficiency) == (0.0, 0.0, 1.0)
    assert found.samples_per_s == 10 / 3


def test_in_round_robin_even_a_network_that_costs_nothing_leaves_one_worker_active():
    assert predict(make_plan("round_robin"), INSTANT, 8).efficiency == 1 / 8


@pytest.mark.parametrize(("strategy", "overlaps"), OVERLAPS)
def test_a_worse_network_and_more_workers_never_help(strategy, overlaps):
    plan = make_plan(strategy, overlaps=overlaps, step_s=1e-3, num_bytes=LENET_BYTES)
    networks = [parse_network(name) for name in ("fdr", "qdr", "10gbe-iwarp", "1gbe")]
    for count in (1, 2, 3, 4, 8, 31, 64, 1000):
        shares = [predict(plan, network, count).communication_share for network in networks]
        assert shares == sorted(shares)
    scaling = [predict(plan, FDR, 1 << k).efficiency for k in range(13)]
    assert scaling == sorted(scaling, reverse=True)


@pytest.mark.parametrize("strategy", SCHEDULES)
def test_a_longer_period_and_a_longer_step_never_raise_the_share_of_communication(strategy):
    plan = make_plan(strategy, step_s=1e-3, num_bytes=LENET_BYTES)
    by_period = [
        predict(dataclasses.replace(plan, period=t), FDR, 64).communication_share
        for t in (1, 2, 5, 100)
    ]
    by_step = [
        predict(dataclasses.replace(plan, step_s=t), FDR, 64).communication_share
        for t in (1e-4, 1e-3, 1e-2, 1.0)
    ]
    assert by_period == sorted(by_period, reverse=True)
    assert by_step == sorted(by_step, reverse=True)


@pytest.mark.parametrize("strategy", ["sync", "async"])
@pytest.mark.parametrize("num_workers", [2, 8, 100])
def test_the_best_period_keeps_the_target_and_one_less_does_not(strategy, num_workers):
    plan = make_plan(strategy, step_s=1e-3, num_bytes=LENET_BYTES)
    gigabit = parse_network("1gbe")
    best = best_period(plan, gigabit, num_workers, target=0.05)
    shares = [
        predict(dataclasses.replace(plan, period=t), gigabit, num_workers).communication_share
        for t in (best - 1, best)
    ]
    assert shares[0] > 0.05 >= shares[1]


@pytest.mark.parametrize(("strategy", "overlaps"), OVERLAPS)
def test_communication_share_and_efficiency_sum_up_to_1(strategy, overlaps):
    for count in (1, 3, 50):
        found = predict(make_plan(strategy, overlaps=overlaps), SLOW, count)
        assert found.communication_share + found.efficiency == pytest.approx(1)
        assert 0 <= found.hidden_s <= found.exchange_s


# SC17. From the paper: the figures of FDR InfiniBand, LeNet, 8 workers, period 1, and the shares of
# 87% and 14%. Derived here from the 14%: the seconds of a step, which the paper does not give.


def sc17_step_s():
    """Return the step time with which LeNet's all-reduce among 8, not hidden, takes 14%."""
    sum_s = choose(LENET_BYTES, range(8), FDR)[1]
    return sum_s * (1 - 0.14) / 0.14


def test_from_original_to_sync_easgd_communication_falls_as_in_sc17():
    settings = {"period": 1, "step_s": sc17_step_s(), "num_bytes": LENET_BYTES}
    original = predict(make_plan("round_robin", **settings), FDR, 8)
    sync = predict(make_plan("sync", **settings), FDR, 8)
    hidden = predict(make_plan("sync", overlaps=True, **settings), FDR, 8)
    assert original.communication_share == pytest.approx(0.87, abs=0.03)  # the model gives 89%
    assert sync.communication_share == pytest.approx(0.14)  # the input
    assert hidden.communication_share == 0.0
    # SC17 measured a speed-up of 5.3; the model leaves out other costs of a step.
    assert sync.samples_per_s / original.samples_per_s == pytest.approx(8.1, abs=0.05)
    assert hidden.samples_per_s / original.samples_per_s == pytest.approx(9.5, abs=0.05)


def test_original_easgd_is_near_87_percent_for_any_step_time():
    for step_s in (2e-3, 1e-2, 1.0):
        plan = make_plan("round_robin", period=1, step_s=step_s, num_bytes=LENET_BYTES)
        assert 0.87 < predict(plan, FDR, 8).communication_share < 0.91


def test_weak_scaling_to_64_nodes_is_beyond_what_sc17_measured():
    # GoogLeNet has some 7 million parameters. From 0.12 s per step on the efficiency is 91.5%, even
    # without overlap; a step takes seconds on a node of Knights Landing.
    googlenet = make_plan(period=1, step_s=0.12, num_bytes=28_000_000)
    assert predict(googlenet, FDR, 64).efficiency > 0.915
    assert predict(dataclasses.replace(googlenet, step_s=0.11), FDR, 64).efficiency < 0.915
    hidden = dataclasses.replace(googlenet, overlaps=True)
    assert predict(hidden, FDR, 64).efficiency == 1.0


# against measured runs


class SlowLink:
    """A link whose messages take at least a + S b seconds, like a slow line."""

    def __init__(self, link, latency_s, seconds_per_byte):
        self.rank, self.num_workers, self.link = link.rank, link.num_workers, link
        self.latency_s, self.seconds_per_byte = latency_s, seconds_per_byte

    def send(self, tensor, to):
        ready = time.perf_counter() + self.latency_s + tensor.nbytes * self.seconds_per_byte
        return Delayed(self.link.send(tensor, to), ready)

    def receive(self, tensor, source):
        return self.link.receive(tensor, source)


class Delayed:
    """A message that is complete once it has arrived and its delay has passed."""

    def __init__(self, handle, ready):
        self.handle, self.ready = handle, ready

    def wait(self):
        self.handle.wait()
        time.sleep(max(0.0, self.ready - time.perf_counter()))


def gloo(store, rank, num_workers):
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=30)
    return dist.ProcessGroupGloo(store, rank, num_workers, options)


def in_threads(num_workers, act):
    """Return act(link) for each rank of a gloo group over loopback."""
    store, results = dist.HashStore(), [None] * num_workers

    def run(rank):
        link = ProcessGroupLink(gloo(store, rank, num_workers), rank, num_workers)
        results[rank] = act(link)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert None not in results, "a rank failed or hangs"
    return results


@pytest.mark.parametrize("num_workers", [2, 4])
def test_measured_rounds_take_the_predicted_time(num_workers):
    """The prediction uses the network that raydl measures, on a slow line.

    The line is slow and steps sleep, so that CPU time does not matter. A message takes 4 ms plus
    10 ns per byte (100 MB/s), a step 25 ms, a round 2 steps and an all-reduce of 1.7 MB. The
    shortest round counts, since others may be disturbed. With a load of 20 on two cores it was
    within 20%; it may be 50% longer or, if the measurement of the network was disturbed, 30%
    shorter.
    """
    step_s, period = 0.025, 2

    def act(link):
        slow_link = SlowLink(link, 4e-3, 1e-8)
        network = measure_network(slow_link, range(num_workers))
        reducer = AdaptiveAllreduce(slow_link, range(num_workers), "auto")
        weights, times = torch.zeros(LENET_BYTES // 4), {False: [], True: []}
        for overlaps in (False, True) * 8:
            start = time.perf_counter()
            time.sleep((period - 1) * step_s)
            if overlaps:
                work = reducer.start(weights)
                time.sleep(step_s)
            else:
                time.sleep(step_s)
                work = reducer.start(weights)
            work.wait()
            times[overlaps].append(time.perf_counter() - start)
        reducer.close()
        return network, {overlaps: min(found) for overlaps, found in times.items()}

    network, measured = in_threads(num_workers, act)[0]
    assert network.latency_s > 4e-3
    for overlaps, round_s in measured.items():
        plan = make_plan(period=period, overlaps=overlaps, step_s=step_s, num_bytes=LENET_BYTES)
        predicted = predict(plan, network, num_workers)
        assert 0.7 < round_s / (period * predicted.step_s) < 1.5
    assert measured[True] < measured[False]


def measure_sums(rank, folder):
    """Measure as one of 4 ranks; rank 0 writes (predicted, least seconds) by p and algorithm."""
    torch.set_num_threads(1)
    found = {}
    for p in (2, 4):
        if rank >= p:
            continue
        link = ProcessGroupLink(gloo(dist.FileStore(f"{folder}/{p}", p), rank, p), rank, p)
        networks, times = [], {name: [] for name in FLAT}
        tensor = torch.zeros(LENET_BYTES // 4)
        for _ in range(3):  # network and sums are measured alternately, under the same load
            networks.append(measure_network(link, range(p)))
            reducer = Reducer(link, range(p), networks[-1])
            for _ in range(10):
                for name in FLAT:
                    start = time.perf_counter()
                    reducer.allreduce(tensor, algorithm=name)
                    times[name].append(time.perf_counter() - start)
        latency_s = min(n.latency_s for n in networks)
        network = flat_network(latency_s, min(n.seconds_per_byte for n in networks))
        found[p] = {
            name: (predict_s(name, LENET_BYTES, range(p), network), min(times[name]))
            for name in FLAT
        }
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_measured_all_reduces_take_the_predicted_time(tmp_path):
    """Four processes over loopback are predicted within a factor of 8.

    The formulas ignore the CPU, but loopback is limited by it: ranks that share a core do not send
    simultaneously, and additions take time. A disturbed measurement of the network has the opposite
    effect. So the test checks the order of magnitude of the fastest of 30 all-reduces.
    """
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=measure_sums, args=(r, str(tmp_path))) for r in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=200)
    assert [process.exitcode for process in ranks] == [0] * 4
    found = json.loads((tmp_path / "found.json").read_text())
    for p in ("2", "4"):
        for name, (predicted_s, measured_s) in found[p].items():
            print(f"p {p}, {name}: {predicted_s:.2e} s predicted, {measured_s:.2e} s measured")
            assert 1 / 8 < measured_s / predicted_s < 8, (p, name)


# invalid plans


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"step_s": 0.0}, "step_s must be a positive number of seconds, got 0.0"),
        ({"step_s": float("nan")}, "step_s must be a positive number of seconds, got nan"),
        ({"period": 0}, "period must be 1 or more, got 0"),
        ({"num_bytes": 0}, "num_bytes must be 1 or more, got 0"),
        ({"strategy": "rounds"}, "strategy has no 'rounds'; did you mean round_robin?"),
        ({"center_shards": 2}, "center_shards must be 1 with the strategy sync, where every rank"),
        (
            {"strategy": "round_robin", "overlaps": True},
            "overlaps must be False with the strategy round_robin, where only one worker is active",
        ),
    ],
)
def test_an_invalid_plan_is_refused(settings, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        make_plan(**settings)


@pytest.mark.parametrize("text", ["1,2,3", "a,b", "1e-6,-1", "inf,1", "nan,1", ","])
def test_a_network_is_a_name_or_two_numbers(text):
    assert parse_network("1e-6,2e-10") == flat_network(1e-6, 2e-10)
    with pytest.raises(ConfigError, match="network must be a name or LATENCY_S,SECONDS_PER_BYTE"):
        parse_network(text)


def test_an_unknown_network_is_refused_with_suggestions():
    with pytest.raises(UnknownNameError, match="network has no '11gbe'; did you mean 1gbe"):
        parse_network("11gbe")


# the command


def run_plan(*options):
    return cli.main(["plan", "--step-s", "0.004", *options])


def test_the_command_prints_a_table_and_a_picture(capsys):
    assert run_plan("--workers", "4:4096", "--method", "sync-sgd,original-easgd") == 0
    text = capsys.readouterr().out
    assert "lenet: 431,080 parameters, 1.72 MB a message" in text
    assert "sync-sgd, period 1; summed by ring from 4 workers" in text
    assert re.search(r"^ *4,096 .* [\d.]+% +[\d,]+ +[\d.]+% +[\d,]+$", text, flags=re.M)
    assert re.search(r"^ *4 #+\.+ +[\d.]+%$", text, flags=re.M)
    assert max(map(len, text.splitlines())) <= 100


def test_a_method_sends_as_many_bytes_as_its_codec_and_its_lanes_say(capsys):
    assert (
        run_plan("--workers", "2:8", "--method", "diloco,sparse-loco,scaffold,des-loc,dc-asgd") == 0
    )
    text = capsys.readouterr().out
    assert "\ndiloco, period 50; summed by" in text
    # of 431,080 values 64 of each 4,096 are sent, with 2 + 12 bits each
    assert "\nsparse-loco, period 30, 0.0127 MB a message; gathered" in text
    assert "\nscaffold, period 10, 3.45 MB a message; summed by" in text
    assert "\ndes-loc, period 10, 2.59 MB a message; summed by" in text
    assert "\ndc-asgd, period 1, 2.59 MB a message\n" in text


def test_gathered_messages_cost_a_message_from_each_other_worker():
    plan = make_plan(is_gathered=True, num_bytes=4, overlaps=False)
    assert predict(plan, SLOW, 5).exchange_s == 4 * (2.0 + 4 * 0.5)
    assert predict(plan, SLOW, 1).exchange_s == 0


def test_a_plan_in_which_nobody_waits_says_so_in_place_of_equal_bars(capsys):
    assert cli.main(["plan", "--step-s", "1", "--workers", "2:8"]) == 0
    text = capsys.readouterr().out
    assert "no worker waits: its exchanges pass while it computes gradients" in text
    assert "####" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ("9.994e-7", "0.999 us"), ("0.000613", "613 us"), ("0.0009997", "1 ms"),
        ("0.0009995", "999 us"), ("0.004384", "4.38 ms"), ("0.99996", "1 s"), ("61.25", "61.2 s"),
        ("999.7", "1,000 s"), ("12345", "12,345 s"),
    ],
)  # fmt: skip
def test_seconds_are_rounded_before_their_unit_is_chosen(seconds, text, capsys):
    assert cli.main(["plan", "--workers", "2", "--step-s", seconds]) == 0
    assert f"a local step of 64 samples: {text} (as given)" in capsys.readouterr().out


@pytest.mark.parametrize("method", METHODS)
def test_every_named_method_can_be_planned(method, capsys):
    assert run_plan("--workers", "8", "--method", method) == 0
    assert f"\n{method}, period " in capsys.readouterr().out


class InTurn(Elastic):
    """A custom rule whose workers exchange in rank order."""

    strategy = "round_robin"


def test_a_users_rule_in_round_robin_is_planned_without_overlap(capsys):
    assert run_plan("--workers", "8", "--method", f"{__name__}:InTurn", "--json") == 0
    [found] = json.loads(capsys.readouterr().out)["methods"]
    assert (found["strategy"], found["overlaps"]) == ("round_robin", False)


def test_the_command_prints_json(capsys):
    options = ("--method", "sync-easgd,async-sgd", "--workers", "2:4", "--network", "1e-5,1e-9")
    assert run_plan(*options, "--center-shards", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["network"] == {
        "name": "1e-5,1e-9", "latency_s": 1e-5, "seconds_per_byte": 1e-9
    }  # fmt: skip
    sync, by_messages = found["methods"]
    assert (sync["strategy"], sync["overlaps"], sync["center_shards"]) == ("sync", True, 1)
    assert (by_messages["strategy"], by_messages["overlaps"]) == ("async", False)
    assert by_messages["center_shards"] == 2
    plan = make_plan(
        period=10, overlaps=True, step_s=0.004, num_bytes=LENET_BYTES, batch_size=64
    )  # fmt: skip
    for row, count in zip(sync["predictions"], (2, 4), strict=True):
        expected = predict(plan, flat_network(1e-5, 1e-9), count)
        assert row == {**dataclasses.asdict(expected), "best_period": 1}


def test_without_a_given_time_a_step_is_measured_here(capsys):
    options = ["--model", "mlp", "--data-shape", "1x4x4", "--classes", "3", "--batch-size", "2"]
    assert cli.main(["plan", "--workers", "2", "--json", *options]) == 0
    workload = json.loads(capsys.readouterr().out)["workload"]
    assert workload["is_step_measured"]
    assert 0 < workload["step_s"] < 1
    assert workload["parameters"] == 16 * 256 + 256 + 256 * 256 + 256 + 256 * 3 + 3


def test_a_language_model_is_planned_with_the_texts_that_it_was_made_for(capsys):
    options = ["--model", "gpt-nano", "--workers", "2", "--batch-size", "1", "--json"]
    workloads = []
    for more in ([], ["--data-shape", "16", "--classes", "50"]):
        assert cli.main(["plan", *options, *more]) == 0
        workloads.append(json.loads(capsys.readouterr().out)["workload"])
    own, smaller = workloads
    assert own["parameters"] == MODELS["gpt-nano"].num_parameters
    assert smaller["parameters"] < own["parameters"]
    assert 0 < smaller["step_s"] < 1


def test_a_users_network_needs_only_its_size_and_step_time(capsys):
    assert run_plan("--parameters", "7000000", "--workers", "64", "--json") == 0
    workload = json.loads(capsys.readouterr().out)["workload"]
    assert (workload["num_bytes"], workload["step_s"]) == (28_000_000, 0.004)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--workers", "many"], "workers must be N or FROM:TO, got many"),
        (["--workers", "8:4"], "workers must be FROM:TO with 1 <= FROM <= TO, got 8:4"),
        (["--workers", "0"], "workers must be 1 or more, got 0"),
        (["--network", "token-ring"], "network has no 'token-ring';"),
        (["--method", "sync-egsd"], "method.name has no 'sync-egsd'; did you mean sync-easgd"),
        (["--model", "lnet"], "model has no 'lnet'; did you mean lenet"),
        (["--model", "lenet", "--data-shape", "1x2x2"], "model lenet: needs images of 4x4"),
        (["--data-shape", "28x28"], "data_shape must be CHANNELSxHEIGHTxWIDTH as in 1x28x28"),
        (["--parameters", "1000"], "step_s must be given with --parameters"),
        (["--step-s", "-1"], "step_s must be a positive number of seconds, got -1.0"),
        (["--target", "1"], "target must be in (0, 1), got 1.0"),
        (["--batch-size", "0"], "batch_size must be 1 or more, got 0"),
        (["--period", "0"], "method.period must be 1 or more, got 0"),
        (["--out", "plan.txt"], "out must end in .png, .svg, .pdf, got plan.txt"),
        (
            ["--out", "no/such/plan.png"],
            "out must be in a folder that exists, got no/such/plan.png",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_wrong_options_give_one_sentence(capsys, options, sentence):
    has_step = "--step-s" in options or "--parameters" in options
    arguments = options if has_step else [*options, "--step-s", "0.01"]
    assert cli.main(["plan", *arguments]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"error: {sentence}")
    assert text.count("\n") == 1


def test_a_picture_is_drawn(tmp_path, capsys):
    out = tmp_path / "plan.png"
    assert run_plan("--workers", "2:8", "--method", "sync-sgd,async-sgd", "--out", str(out)) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert f"chart: {out}" in capsys.readouterr().out


@pytest.mark.processes
def test_planning_needs_no_ray_and_its_formulas_need_no_torch():
    code = (
        "import raydl.tools.plan, sys; assert not {'ray', 'torch'} & set(sys.modules);"
        "import raydl.cli;"
        "assert raydl.cli.main(['plan', '--step-s', '1', '--workers', '2']) == 0;"
        "assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


def test_every_network_is_in_the_docs_with_its_figures(root):
    text = (root / "docs/planning_in_detail.md").read_text()
    rows = re.findall(
        r"^\| `([\w-]+)` \| ([\d.]+) us \| ([\d.]+) ns \| (.+?) \| .+ \|$", text, re.M
    )
    documented = {name: (latency, byte, what) for name, latency, byte, what in rows}
    assert documented == {
        name: (f"{n.latency_s * 1e6:.3g}", f"{n.seconds_per_byte * 1e9:.3g}", n.sentence)
        for name, n in NETWORKS.items()
    }


def test_the_commands_of_the_planning_page_are_valid(root, capsys):
    pages = ("docs/planning.md", "docs/planning_in_detail.md")
    text = "".join((root / page).read_text() for page in pages)
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    commands = [line.split() for line in lines if line.startswith("raydl plan")]
    assert commands
    for command in commands:
        step = [] if "--step-s" in command else ["--step-s", "0.01"]
        out = command.index("--out") if "--out" in command else len(command)
        assert cli.main([*command[1:out], *step]) == 0
    capsys.readouterr()
