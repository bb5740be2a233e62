"""Predictions for preemptible machines follow from the controller and from durations."""

import itertools
import json
import math

import pytest

from raydl import cli
from raydl.cli.spot_planning import Prices
from raydl.errors import ConfigError
from raydl.tools.simulated_group import simulate
from raydl.tools.spot import (
    Fleet,
    Preemption,
    Restarts,
    draw_preemptions,
    predict_restarts,
    simulated_s,
)

METHODS = ["sync-easgd", "async-easgd"]
ROUND_S = 0.5


def speed(num_workers):
    return 100.0 * num_workers


def simulated(fleet, *preemptions, method="sync-easgd", until_s=1000.0):
    return simulate(
        fleet, preemptions, method=method, speed=speed, round_s=ROUND_S, until_s=until_s
    )


def goodput_of(fleet, *preemptions, method="sync-easgd", until_s=1000.0):
    result = simulated(fleet, *preemptions, method=method, until_s=until_s)
    return result.num_samples / until_s / speed(fleet.num_workers)


# the elastic run


@pytest.mark.parametrize("method", METHODS)
def test_without_preemptions_all_samples_count(method):
    result = simulated(Fleet(num_workers=4, spares=1), method=method)
    assert result.num_samples == pytest.approx(400 * 1000)
    assert result.machine_s == pytest.approx(4 * 1000)
    assert result.num_generations == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_lost_machine_costs_its_share_until_its_worker_trains_again(method):
    """By hand: one machine of four is missing for 120 s, then its worker starts within 4 s."""
    fleet = Fleet(num_workers=4, replace_s=120.0, start_s=4.0)
    result = simulated(fleet, Preemption(200.0, 2), method=method)
    lost_s = 1000 - result.num_samples / 400
    pauses_s = 2 * (fleet.detect_s + fleet.join_s) + ROUND_S if method == "sync-easgd" else 0.0
    assert 124 / 4 <= lost_s <= 124 / 4 + pauses_s + 1.0
    assert result.machine_s == pytest.approx(4 * 1000 - 120)
    assert result.num_generations == 3
    assert [line for line in result.events if "preempted" in line] == [
        "w2 was lost: its machine was preempted"
    ]


def test_a_loss_pauses_all_members_of_a_synchronous_run_and_no_other_of_an_asynchronous_one():
    fleet = Fleet(num_workers=4, detect_s=2.0)
    sync, others = (goodput_of(fleet, Preemption(200.0, 2), method=m) for m in METHODS)
    assert others - sync > 3.0 / 1000


@pytest.mark.parametrize("method", METHODS)
def test_a_fixed_number_of_workers_waits_for_the_replacement(method):
    fleet = Fleet(num_workers=4, min_workers=4)
    lost_s = 1000 * (1 - goodput_of(fleet, Preemption(200.0, 2), method=method))
    assert 123 <= lost_s <= 128


@pytest.mark.parametrize("method", METHODS)
def test_a_hot_spare_replaces_a_lost_process_at_once(method):
    kills = [Preemption(100.0 * k, 0) for k in range(1, 9)]
    without, with_spare = (
        goodput_of(
            Fleet(num_workers=4, workers_per_machine=4, replace_s=0.0, start_s=9.0, spares=n),
            *kills,
            method=method,
        )
        for n in (0, 1)
    )
    assert 1 - with_spare < 0.6 * (1 - without)


@pytest.mark.parametrize("method", METHODS)
def test_a_hot_spare_does_not_slow_down_a_run_that_lost_a_machine(method):
    kills = [Preemption(200.0 * k, k % 4) for k in range(1, 4)]
    without, with_spare = (
        goodput_of(Fleet(num_workers=4, spares=n), *kills, method=method) for n in (0, 1)
    )
    assert with_spare > without - 0.01


@pytest.mark.parametrize("method", METHODS)
def test_with_notice_the_worker_stays_for_half_of_it_and_is_replaced_sooner(method):
    """The replacement is ordered at the notice, and trains 124 s later."""
    fleet = Fleet(num_workers=4, notice_s=30.0)
    assert fleet.absent_s == 90
    result = simulated(fleet, Preemption(200.0, 2), method=method)
    assert (124 - 15) / 4 <= 1000 - result.num_samples / 400 <= (124 - 15) / 4 + 2
    message = (
        "w2 is on a draining node; it trains on until its replacement is ready, for 15 s at most"
    )
    assert message in result.events
    assert not any("was lost" in line for line in result.events)
    assert result.machine_s == pytest.approx(4 * 1000 - 90)


@pytest.mark.parametrize("method", METHODS)
def test_a_replacement_that_is_up_within_the_notice_costs_next_to_nothing(method):
    fleet = Fleet(num_workers=4, notice_s=120.0, replace_s=40.0)
    result = simulated(fleet, Preemption(200.0, 2), method=method)
    assert 1000 - result.num_samples / 400 < 2
    assert not any("was lost" in line for line in result.events)
    assert result.machine_s == pytest.approx(4 * 1000 + 80), "two machines are paid for meanwhile"


@pytest.mark.parametrize("method", METHODS)
def test_a_machine_with_two_workers_loses_both(method):
    fleet = Fleet(num_workers=4, workers_per_machine=2)
    assert fleet.num_machines == 2
    result = simulated(fleet, Preemption(200.0, 0), method=method)
    assert sum("was lost" in line for line in result.events if line.startswith("w")) == 2
    assert 62 <= 1000 - result.num_samples / 400 <= 66


@pytest.mark.parametrize("method", METHODS)
def test_each_lost_worker_loses_half_a_round_but_no_more_than_it_has_trained(method):
    fleet = Fleet(num_workers=4, workers_per_machine=2)

    def samples(round_s, *preemptions, until_s=210.0):
        return simulate(
            fleet, preemptions, method=method, speed=speed, round_s=round_s, until_s=until_s
        ).num_samples

    short, long = (samples(round_s, Preemption(200.0, 0)) for round_s in (0.5, 40.5))
    assert short - long == pytest.approx(2 * 100 * 20, rel=0.1)
    often = [Preemption(60.0 * k, k % 2) for k in range(1, 20)]
    assert 0 <= samples(1000.0, *often, until_s=1200.0) < samples(1.0, *often, until_s=1200.0)


@pytest.mark.parametrize("method", METHODS)
def test_all_machines_may_be_lost_at_once(method):
    fleet = Fleet(num_workers=3, spares=1)
    result = simulated(fleet, *[Preemption(200.0, machine) for machine in range(3)], method=method)
    assert 120 <= 1000 - result.num_samples / 300 <= 140


@pytest.mark.parametrize("method", METHODS)
def test_hundreds_of_workers_survive_a_storm(method):
    fleet = Fleet(num_workers=300)
    preemptions = draw_preemptions(fleet, 10.0, until_s=20.0, seed=1)
    assert len(preemptions) > 10
    until_s = 300.0
    result = simulated(fleet, *preemptions, method=method, until_s=until_s)
    absent_s = len(preemptions) * (fleet.absent_s + fleet.start_s) / 300
    lost_s = until_s - result.num_samples / speed(300)
    assert absent_s - 1 <= lost_s <= absent_s + (15 if method == "sync-easgd" else 2)


# preemptions


def test_preemptions_follow_from_the_seed_and_have_the_rate():
    fleet = Fleet(num_workers=50)
    first, again, other = (
        draw_preemptions(fleet, 0.5, until_s=36_000, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first == sorted(first)
    up_h = 50 * 10 / (1 + 0.5 * 120 / 3600)
    assert len(first) == pytest.approx(0.5 * up_h, rel=0.2)
    assert draw_preemptions(fleet, 0.0, until_s=36_000, seed=1) == []


def test_a_machine_is_not_preempted_again_before_it_is_replaced():
    drawn = draw_preemptions(Fleet(num_workers=1, replace_s=600.0), 60.0, until_s=86_400, seed=0)
    times = [preemption.at_s for preemption in drawn]
    assert len(times) > 50
    assert all(b - a > 600 for a, b in itertools.pairwise(times))


def test_the_simulated_time_is_for_two_hundred_preemptions_within_bounds():
    assert simulated_s(Fleet(num_workers=100), 1.0) == 7200
    assert simulated_s(Fleet(num_workers=10_000), 10.0) == 1800
    assert simulated_s(Fleet(num_workers=1), 0.001) == 14 * 86_400


# training that restarts


def test_a_restart_loses_what_came_after_the_checkpoint_and_waits_for_all_machines():
    """By hand: 250 s are 4 intervals of 50 s, each with 1 s for the checkpoint, and 46 s."""
    fleet, restarts = Fleet(num_workers=4), Restarts(checkpoint_s=50.0, restart_s=10.0)
    prediction = predict_restarts(
        fleet, [Preemption(250.0, 2)], restarts=restarts, speed=speed, until_s=1000.0
    )
    trained_s = 200 + (1000 - 250 - 120 - 10) * 50 / 51
    assert prediction.goodput == pytest.approx(trained_s / 1000)
    assert prediction.samples_per_s == pytest.approx(400 * trained_s / 1000)
    assert prediction.num_machines == pytest.approx(4 - 0.12)


def test_a_preemption_during_a_restart_delays_it():
    fleet, restarts = Fleet(num_workers=4), Restarts(checkpoint_s=50.0)
    lost = [Preemption(250.0, 2), Preemption(300.0, 1)]
    one, two = (
        predict_restarts(fleet, lost[:n], restarts=restarts, speed=speed, until_s=1000.0)
        for n in (1, 2)
    )
    assert one.goodput - two.goodput == pytest.approx(50 / 1000 * 50 / 51)


def test_the_best_interval_of_checkpoints_is_that_of_youngs_formula():
    assert Restarts(write_s=2.0).interval_s(900.0) == 60.0
    fleet = Fleet(num_workers=16)
    until_s = simulated_s(fleet, 0.5)
    preemptions = draw_preemptions(fleet, 0.5, until_s=until_s, seed=0)

    def goodput(checkpoint_s):
        restarts = Restarts(checkpoint_s=checkpoint_s)
        return predict_restarts(
            fleet, preemptions, restarts=restarts, speed=speed, until_s=until_s
        ).goodput

    assert goodput(None) > max(goodput(3.0), goodput(300.0))
    assert goodput(None) > max(map(goodput, (10.0, 20.0, 40.0, 80.0))) - 0.01


def test_without_preemptions_restarting_training_writes_no_checkpoint():
    fleet = Fleet(num_workers=4)
    prediction = predict_restarts(fleet, [], restarts=Restarts(), speed=speed, until_s=1000.0)
    assert (prediction.goodput, prediction.num_machines) == (1.0, 4.0)


# hours and cost


def test_hours_and_cost_are_for_the_given_samples():
    prediction = simulated(Fleet(num_workers=4), until_s=500.0).prediction
    assert prediction.goodput == pytest.approx(1.0)
    assert prediction.hours(400 * 3600) == pytest.approx(1.0)
    assert prediction.cost(400 * 3600, 2.5) == pytest.approx(10.0)


def test_a_price_per_hour_is_the_mean_over_the_run():
    prices = Prices(spot=(1.0, 2.0, 6.0))
    assert prices.mean_spot(1.0) == 1.0
    assert prices.mean_spot(1.5) == pytest.approx(2.0 / 1.5)
    assert prices.mean_spot(3.0) == pytest.approx(3.0)
    assert prices.mean_spot(4.0) == pytest.approx(10.0 / 4)
    assert prices.mean_spot(math.inf) == 1.0


# the command

COMMAND = ["plan", "--step-s", "0.05", "--workers", "8", "--preemptions", "0.5"]


def prices_at(folder, text):
    path = folder / "prices.json"
    path.write_text(text)
    return str(path)


def test_the_command_compares_elastic_training_with_restarts(tmp_path, capsys):
    price = prices_at(tmp_path, '{"spot": 0.3, "on_demand": 1.0}')
    options = [*COMMAND, "--samples", "1000000000", "--price", price]
    assert cli.main([*options, "--json"]) == 0
    [on_spot] = json.loads(capsys.readouterr().out)["methods"][0]["on_spot"]
    assert on_spot["num_preemptions"] > 100
    training = on_spot["training"]
    assert 1 > training["elastic"]["goodput"] > training["restarts"]["goodput"]
    elastic = training["elastic"]
    assert elastic["cost"] == pytest.approx(elastic["hours"] * elastic["num_machines"] * 0.3)
    assert training["on demand"]["cost"] == pytest.approx(training["on demand"]["hours"] * 8 * 1.0)
    assert cli.main(options) == 0
    text = capsys.readouterr().out
    assert "on machines with 0.5 preemptions per hour each, replaced after 120 s" in text
    [row] = [line.split() for line in text.splitlines() if " elastic " in line]
    assert row[:3] == ["8", "elastic", f"{elastic['goodput']:.1%}"]
    assert row[-1] == f"{elastic['cost']:,.2f}"


def test_without_samples_and_prices_the_table_has_the_goodput_alone(capsys):
    assert cli.main([*COMMAND, "--spot.replace-s", "0"]) == 0
    text = capsys.readouterr().out
    assert "which stays: one of its processes is lost" in text
    [head] = [line.split() for line in text.splitlines() if line.startswith("workers  training")]
    assert head == ["workers", "training", "goodput", "samples/s", "machines"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--preemptions", "-1"], "preemptions must be 0 or more per machine and hour, got -1.0"),
        (["--spares", "-1"], "spares must be 0 or more, got -1"),
        (["--spot.min-workers", "0"], "min_workers must be 1 or more, got 0"),
        (["--spot.workers-per-machine", "0"], "workers_per_machine must be 1 or more, got 0"),
        (["--spot.replace-s", "-1"], "replace_s must be a number of seconds, 0 or more, got -1.0"),
        (["--spot.start-s", "0"], "start_s must be a positive number of seconds, got 0.0"),
        (["--spot.checkpoint-s", "0"], "checkpoint_s must be a positive number of seconds"),
        (["--spot.restart-s", "-1"], "restart_s must be 0 or more, got -1.0"),
        (["--samples", "0"], "samples must be 1 or more, got 0"),
        (["--price", "nothing.json"], "price nothing.json cannot be read as JSON: "),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(capsys, options, sentence):
    assert cli.main([*COMMAND, *options]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ['{"spot": -1}', '{"spot": []}', "[]", "{}", '{"spot": 1, "x": 2}', '{"spot": true}']
)
def test_wrong_prices_are_refused_in_one_sentence(tmp_path, capsys, text):
    price = prices_at(tmp_path, text)
    assert cli.main([*COMMAND, "--samples", "9", "--price", price]) == 2
    assert 'must hold {"spot": PRICE, or a list of one per hour' in capsys.readouterr().err


def test_prices_need_a_number_of_samples(tmp_path, capsys):
    assert cli.main([*COMMAND, "--price", prices_at(tmp_path, '{"spot": 1}')]) == 2
    assert "price needs --samples: the cost is that of a whole run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--spares", "1"],
        ["--samples", "9"],
        ["--price", "x.json"],
        ["--spot.replace-s", "600"],
    ],
)
def test_options_without_a_rate_are_refused(capsys, options):
    assert cli.main([*COMMAND[:-2], *options]) == 2
    assert "must be given only with --preemptions" in capsys.readouterr().err


def test_a_fleet_refuses_wrong_sizes():
    with pytest.raises(ConfigError, match=r"min_workers must be in 1\.\.2, got 3"):
        Fleet(num_workers=2, min_workers=3)
