"""Workers on a slow link choose another exchange tuning from measured waiting times."""

import dataclasses

import pytest
import torch
from ensembles import Ensemble, linear, tiny_images

from raydl.collective.sync_strategy import COUNTED, SKIPPED, ExchangeProfiler
from raydl.config import ExchangeConfig, MethodConfig, TrainConfig, TrainingConfig
from raydl.core.autotune import (
    ENOUGH,
    HIDDEN_STEP,
    SLACK,
    ExchangeTuning,
    Limits,
    Measured,
    candidates,
    carried_over,
    choose,
    exchange_s,
    share_of_bytes,
    waiting,
)
from raydl.core.center import split_states
from raydl.core.reports import Outcome
from raydl.errors import ConfigError, ExchangeError
from raydl.methods import filled_in, resolve
from raydl.metrics import TimeParts
from raydl.worker.in_process import LocalGroup

PLAIN = ExchangeTuning(10, 0, "none")
STEP_S = 0.02


def measured(seconds, tuning=PLAIN, *, num_workers=2, limits=None):
    """Return the measured times of rounds if an exchange of all parameters takes ``seconds``."""
    limits = limits or Limits()
    share = waiting(tuning, seconds, STEP_S, num_workers, limits)
    in_steps_s = tuning.period * STEP_S
    return Measured(STEP_S, share / (1 - share) * in_steps_s, num_workers)


# the choice


def test_workers_that_hardly_wait_keep_their_tuning():
    assert choose(PLAIN, measured(HIDDEN_STEP * STEP_S), Limits()) is None
    assert choose(PLAIN, Measured(STEP_S, 0.0, 1), Limits()) is None


def test_the_seconds_of_an_exchange_follow_from_the_waiting():
    for tuning in (PLAIN, ExchangeTuning(20, 19, "int8"), ExchangeTuning(10, 3, "bf16")):
        assert exchange_s(tuning, measured(2.0, tuning), Limits()) == pytest.approx(2.0)
    in_parts = ExchangeTuning(10, 1, "none", fragments=2)
    assert exchange_s(in_parts, measured(2.0, in_parts), Limits()) == pytest.approx(2.0)


def test_on_a_link_of_100_mbit_the_delay_is_as_long_as_an_exchange_and_no_longer():
    choice = choose(PLAIN, measured(0.138), Limits(), generation=3)  # LeNet, two hosts
    assert choice.tuning == ExchangeTuning(10, 8, "none")
    enough, too_short = (ExchangeTuning(10, delay, "none") for delay in (8, 7))
    assert waiting(enough, SLACK * 0.138, STEP_S, 2, Limits()) <= ENOUGH
    assert waiting(too_short, SLACK * 0.138, STEP_S, 2, Limits()) > ENOUGH
    assert choice.generation == 3
    assert "138 ms per exchange and 20 ms per step" in choice.reason


def test_on_a_link_of_25_mbit_messages_are_compressed_as_well():
    choice = choose(PLAIN, measured(0.552), Limits())
    assert choice.tuning == ExchangeTuning(10, 8, "int8")


def test_on_the_thinnest_links_period_and_fragments_grow_and_the_delay_does_not():
    choice = choose(PLAIN, measured(1.2), Limits())
    assert choice.tuning == ExchangeTuning(20, 9, "int8", fragments=2)
    choice = choose(PLAIN, measured(1.5), Limits())
    assert choice.tuning == ExchangeTuning(30, 8, "int8", fragments=3)
    assert str(choice.tuning) == "period 30, 3 fragments, delay 8, int8"
    assert str(PLAIN) == "period 10, delay 0"


def test_if_no_tuning_is_enough_the_least_waiting_is_chosen():
    choice = choose(PLAIN, measured(1000.0), Limits())
    assert choice.tuning == ExchangeTuning(100, 9, "int8", fragments=10)
    assert choose(choice.tuning, measured(1000.0, choice.tuning), Limits()) is None


@pytest.mark.parametrize("seconds", [0.01, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("num_workers", [2, 16])
@pytest.mark.parametrize("limits", [Limits(), Limits(may_compress=False)])
@pytest.mark.parametrize("now", [PLAIN, ExchangeTuning(10, 0, "none", fragments=2)])
def test_the_first_tuning_that_is_enough_is_chosen(seconds, num_workers, limits, now):
    def share(tuning):
        return waiting(tuning, SLACK * seconds, STEP_S, num_workers, limits)

    rounds = measured(seconds, now, num_workers=num_workers, limits=limits)
    choice = choose(now, rounds, limits)
    found = list(candidates(now, limits))
    taken = choice.tuning if choice else now
    milder = found[: found.index(taken)]
    assert all(share(c) > ENOUGH for c in milder) or share(taken) == min(map(share, found))
    assert all(c.delay < c.period // c.fragments for c in found)
    assert {c.period / c.fragments for c in found} == {now.period / now.fragments}


def test_the_users_settings_are_kept():
    own = ExchangeTuning(10, 2, "bf16")
    for tuning in candidates(own, Limits()):
        assert tuning.compression == "bf16"
        assert tuning.delay >= 2
    for tuning in candidates(PLAIN, Limits(may_compress=False)):
        assert tuning.compression == "none"


def test_no_fragment_is_without_a_parameter():
    fragments = {c.period: c.fragments for c in candidates(PLAIN, Limits(max_fragments=3))}
    assert fragments == {10: 1, 20: 2, 30: 3, 40: 3, 60: 3, 100: 3}


def test_gathered_messages_of_many_workers_save_no_bytes():
    assert share_of_bytes("none", 16) == 1
    assert share_of_bytes("bf16", 2) == pytest.approx(0.5)
    assert share_of_bytes("int8", 8) > 1
    choice = choose(PLAIN, measured(0.552, num_workers=8), Limits())
    assert choice.tuning.compression == "none"


def test_a_codec_that_saves_nothing_among_more_workers_is_replaced_by_the_users():
    chosen = ExchangeTuning(40, 7, "int8", fragments=4)
    assert carried_over(chosen, "none", 2) == chosen
    assert carried_over(chosen, "none", 16) == ExchangeTuning(40, 7, "none", fragments=4)
    assert carried_over(chosen, "bf16", 16) == chosen  # the shorter of two that save no bytes
    assert carried_over(chosen, "int8", 16) == chosen


# measurements


class RoundClock:
    def __init__(self):
        self.now = 0.0
        self.parts = TimeParts()

    def round(self, tuning, waited_s, *, step_s=STEP_S):
        self.now += tuning.period * step_s + waited_s
        self.parts.add("device_device_parameters", waited_s)

    def profiler(self, member, rank=0):
        return ExchangeProfiler(
            member,
            rank,
            generation=1,
            limits=Limits(),
            time_parts=self.parts,
            clock=lambda: self.now,
        )


def test_all_ranks_choose_by_the_slowest_worker_in_the_same_round(pool):
    group = LocalGroup(2, timeout_s=30.0)
    steps, waits = (0.02, 0.01), (0.3, 0.5)

    def run(rank):
        clock, now = RoundClock(), PLAIN
        profiler = clock.profiler(group.member(rank), rank)
        chosen = []
        for number in range(20):
            choice = profiler.next(now, num_steps=now.period, round=number)
            if choice:
                chosen.append((number, choice))
                now = choice.tuning
            clock.round(now, waits[rank] if now == PLAIN else 0.0, step_s=steps[rank])
        return chosen

    first, second = pool.map(run, range(2))
    assert first == second
    [(number, choice)] = first  # the second measurement changes nothing
    assert number == SKIPPED + COUNTED
    expected = choose(PLAIN, Measured(0.02, 0.3, 2), Limits(), generation=1)
    assert choice.tuning == expected.tuning


def test_the_median_ignores_other_traffic_at_the_start():
    clock, now, chosen = RoundClock(), PLAIN, []
    profiler = clock.profiler(LocalGroup(1, timeout_s=1.0).member(0))
    start, later = [9, 9, 5, 5, 0.3, 0.15], [0.3, 0.3, 0.3, 0.3, 0, 0.3]
    for number, waited_s in enumerate([*start, *later, *[0] * 6]):
        clock.round(now, waited_s)
        choice = profiler.next(now, num_steps=now.period, round=number)
        if choice:
            chosen.append(choice.tuning)
            now = choice.tuning
    first = choose(PLAIN, Measured(STEP_S, 0.15, 1), Limits()).tuning
    second = choose(first, Measured(STEP_S, 0.3, 1), Limits()).tuning
    assert chosen == [first, second]


def test_shortened_rounds_are_not_measured():
    clock = RoundClock()
    profiler = clock.profiler(LocalGroup(1, timeout_s=1.0).member(0))
    for number in range(20):
        assert profiler.next(PLAIN, num_steps=3, round=number) is None
        clock.round(PLAIN, 1.0)
    for number in range(SKIPPED + COUNTED - 1):
        assert profiler.next(PLAIN, num_steps=10, round=number) is None
        clock.round(PLAIN, 1.0)
    assert profiler.next(PLAIN, num_steps=10, round=99) is not None


def test_rounds_with_a_pause_for_a_score_are_not_measured():
    clock = RoundClock()
    profiler = clock.profiler(LocalGroup(1, timeout_s=1.0).member(0))
    for number in range(20):
        clock.round(PLAIN, 1.0)
        profiler.skip_round()
        assert profiler.next(PLAIN, num_steps=10, round=number) is None
    for number in range(SKIPPED + COUNTED - 1):
        clock.round(PLAIN, 1.0)
        assert profiler.next(PLAIN, num_steps=10, round=number) is None
    clock.round(PLAIN, 1.0)
    assert profiler.next(PLAIN, num_steps=10, round=99) is not None


# in a run


def limits_of(method, *, model=linear):
    config = dataclasses.replace(auto(), method=MethodConfig(name=method, period="auto"))
    run = Ensemble(config, num_workers=1, images=tiny_images(48), model=model).join()
    return run.workers[0].runner.strategy._profiler._limits


def test_only_weights_overlap_with_a_gradient():
    assert limits_of("sync-easgd").overlap
    assert not limits_of("diloco").overlap
    assert not limits_of("local-sgd").overlap


def test_only_float32_may_be_compressed():
    assert limits_of("sync-easgd").may_compress
    double = lambda *shape: linear(*shape).to(torch.float64)  # noqa: E731
    assert not limits_of("sync-easgd", model=double).may_compress


def auto(**more):
    return TrainConfig(
        method=MethodConfig(name="sync-easgd", period="auto"),
        training=TrainingConfig(batch_size=2, epochs=15),
        **more,
    )


def wait_long(monkeypatch, seconds):
    """Replace each worker's measured waiting time by the next of some seconds."""
    from raydl.collective import sync_strategy as profiler

    real = profiler.ExchangeProfiler._measured

    def found(self, round):
        return dataclasses.replace(real(self, round), step_s=STEP_S, waited_s=seconds.pop(0))

    monkeypatch.setattr(profiler.ExchangeProfiler, "_measured", found)


def test_a_run_continues_with_the_chosen_tuning_and_keeps_it(monkeypatch):
    wait_long(monkeypatch, [0.552] * 2 + [0.0] * 20)
    run = Ensemble(auto(), num_workers=2, images=tiny_images(96)).join()
    assert run.run(rounds=8) == [Outcome.GO_ON] * 2
    for worker in run.workers:
        assert worker.report().choice.tuning == ExchangeTuning(10, 9, "int8")
        assert worker.runner.strategy.exchanges[0].num_bytes < 51 * 4 + 60
    center = [w.center() for w in run.workers]
    assert (center[0].weights == center[1].weights).all()
    assert center[0].tuning == ExchangeTuning(10, 9, "int8")
    again = Ensemble(auto(), num_workers=2, images=tiny_images(96))
    again.join(center[0])
    assert again.workers[0].runner.strategy.next_round(0).delay == 9
    assert again.workers[0].report().choice.tuning == ExchangeTuning(10, 9, "int8")
    assert run.run() == [Outcome.FINISHED] * 2


@pytest.mark.parametrize("method", ["sync-easgd", "diloco"])
def test_a_run_continues_in_the_chosen_fragments(monkeypatch, method):
    wait_long(monkeypatch, [15.0] * 2 + [0.0] * 20)
    config = dataclasses.replace(auto(), method=MethodConfig(name=method, period="auto"))
    run = Ensemble(config, num_workers=2, images=tiny_images(200)).join()
    num_before = len(run.workers[0].runner.strategy.exchanges)
    run.run(rounds=SKIPPED + COUNTED)
    before = [w.center() for w in run.workers]
    run.run(rounds=1)
    for worker in run.workers:
        chosen = worker.report().choice.tuning
        assert chosen.fragments > num_before == 1
        assert len(worker.runner.strategy.exchanges) == chosen.fragments
    after = [w.center() for w in run.workers]
    assert after[0].progress.round == before[0].progress.round + 1
    assert (after[0].weights == after[1].weights).all()
    assert (after[0].weights != before[0].weights).any()
    assert len(flat_states(after[0])) == len(flat_states(before[0])) == (method == "diloco")
    for state in flat_states(after[0]):
        assert state.shape == after[0].weights.shape
    again = Ensemble(config, num_workers=2, images=tiny_images(200))
    again.join(after[0])
    assert len(again.workers[0].runner.strategy.exchanges) == chosen.fragments
    assert run.run() == [Outcome.FINISHED] * 2


def flat_states(center):
    """Return the vectors in the state of a center's optimizer."""
    [whole] = split_states(center.optimizer, [center.weights.size])
    of_whole = whole.get("state", {}).get(0, {})
    return [value for value in of_whole.values() if getattr(value, "ndim", 0)]


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_choice_that_a_worker_misses_changes_nothing(monkeypatch, fragments):
    def lost(self, round):
        raise ExchangeError(round, 1, "w1 is gone")

    config = auto(exchange=ExchangeConfig(fragments=fragments))
    run = Ensemble(config, num_workers=2, images=tiny_images(200)).join()
    run.run(rounds=SKIPPED + COUNTED)
    before = run.workers[0].center()
    replica = run.workers[0].replica.flat.weights.clone()
    monkeypatch.setattr(ExchangeProfiler, "_measured", lost)
    with pytest.raises(ExchangeError):
        run.workers[0].run_round()
    after = run.workers[0].center()
    assert after.progress.round == before.progress.round == SKIPPED + COUNTED
    assert (after.weights == before.weights).all()
    assert (run.workers[0].replica.flat.weights == replica).all()


def test_a_generation_that_continues_without_a_choice_reports_none():
    run = Ensemble(auto(), num_workers=2, images=tiny_images(96)).join()
    run.join(run.workers[0].center())
    assert run.workers[0].report().choice is None


def test_a_resumed_run_with_a_fixed_period_ignores_the_chosen_one():
    config = dataclasses.replace(auto(), method=MethodConfig(name="sync-easgd", period=4))
    run = Ensemble(config, num_workers=2, images=tiny_images(96))
    run.join(dataclasses.replace(run.first, tuning=ExchangeTuning(10, 9, "int8")))
    round = run.workers[0].runner.strategy.next_round(0)
    assert (round.num_steps, round.delay) == (4, 0)


def test_without_auto_nothing_is_measured():
    run = Ensemble(
        TrainConfig(training=TrainingConfig(batch_size=2, epochs=10)),
        num_workers=2, images=tiny_images(96),
    ).join()  # fmt: skip
    run.run()
    assert run.workers[0].report().choice is None
    assert run.newest.tuning is None


# the settings


def test_a_run_that_chooses_is_recorded_as_such():
    config = auto()
    method = resolve(config)
    assert (method.period, method.finds_tuning) == (10, True)
    assert filled_in(config, method).method.period == "auto"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"method": MethodConfig(name="async-easgd", period="auto")},
            "can be auto for sync methods with local steps, not for async-easgd",
        ),
        (
            {"method": MethodConfig(name="sync-sgd", period="auto")},
            "can be auto for sync methods with local steps, not for sync-sgd",
        ),
        (
            {"training": TrainingConfig(deterministic=True)},
            "cannot be auto with training.deterministic",
        ),
        (
            {"method": MethodConfig(name="sync-easgd", period="auto", group_size=2)},
            "cannot be auto with method.group_size",
        ),
    ],
)
def test_a_tuning_that_cannot_be_chosen_is_refused(change, sentence):
    config = dataclasses.replace(auto(), **change)
    with pytest.raises(ConfigError, match=sentence):
        resolve(config)


@pytest.mark.parametrize("period", ["often", "10"])
def test_a_period_is_a_number_or_auto(period):
    with pytest.raises(ConfigError, match="must be a whole number, or auto"):
        MethodConfig(period=period)


def test_a_run_that_may_not_compress_does_not_choose_a_codec(monkeypatch):
    wait_long(monkeypatch, [5.0] * 20)
    config = auto(exchange=ExchangeConfig(packed=False))
    run = Ensemble(config, num_workers=2, images=tiny_images(96)).join()
    run.run(rounds=8)
    assert run.workers[0].report().choice.tuning.compression == "none"
