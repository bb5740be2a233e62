"""Synchronous methods under churn: promises that hold when workers join, leave, die or are late."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from ensembles import tiny_images
from histories import COUNTING, AllProgress, History, assert_same, config, counting, num_counted
from hypothesis import given, settings
from hypothesis import strategies as st

from raydl.core.reports import Outcome
from raydl.errors import ExchangeError
from raydl.worker.in_process import LocalGroup

# the same bits

CASES = {
    "sync-easgd": config("sync-easgd", period=3),
    "sync-easgd, no overlap": config("sync-easgd", exchange={"overlap": False}),
    "sync-easgd, dynamic": config("sync-easgd", dynamic_weights=True),
    "sync-easgd, layer by layer": config("sync-easgd", exchange={"packed": False}),
    "sync-easgd, bf16": config("sync-easgd", exchange={"compression": "bf16"}),
    "sync-easgd, fragments": config("sync-easgd", period=4, exchange={"fragments": 2, "delay": 1}),
    "sync-easgd, adamw": config("sync-easgd", optimizer={"name": "adamw"}),
    "sync-measgd": config("sync-measgd"),
    "sync-sgd": config("sync-sgd", period=1),
    "sync-sgd, topk": config("sync-sgd", exchange={"compression": "topk:0.2"}),
    "sync-sgd, fragments": config(
        "sync-sgd", optimizer={"lr": 0.1, "clip_grad_norm": None}, exchange={"fragments": 2}
    ),
    "sync-sgd, adamw in fragments": config(
        "sync-sgd", optimizer={"name": "adamw", "clip_grad_norm": None}, exchange={"fragments": 2}
    ),
    "sync-msgd": config("sync-msgd"),
    "local-sgd": config("local-sgd"),
    "local-sgd, int8": config("local-sgd", exchange={"compression": "int8"}),
    "local-sgd, momentum": config("local-sgd", optimizer={"lr": 0.1, "momentum": 0.9}),
    "diloco": config("diloco"),
    "diloco, staged": config("diloco", exchange={"resident": False}),
    "streaming diloco": config("diloco", period=4, exchange={"fragments": 2, "delay": 1}),
    "streaming diloco, int8": config(
        "diloco", period=4, exchange={"fragments": 2, "compression": "int8"}
    ),
    "streaming-diloco": config("streaming-diloco", period=4, exchange={"fragments": 2, "delay": 1}),
    "restarted-diloco": config("restarted-diloco", options="every=2"),
    "muloco": config("muloco", optimizer={"lr": 0.01}),
    "sparse-loco": config("sparse-loco", exchange={"compression": "chunk-topk:3/16"}),
    "sparse-loco, as released": config("sparse-loco", options="merge='senders'"),
    "slowmo": config("slowmo"),
    "fednova": config("fednova"),
    "scaffold": config("scaffold"),
    "scaffold, staged": config("scaffold", exchange={"resident": False}),
    "scaffold, fragments": config("scaffold", period=4, exchange={"fragments": 2, "delay": 1}),
    "scaffold, int8": config("scaffold", exchange={"compression": "int8"}),
    "scaffold, layer by layer": config("scaffold", exchange={"packed": False}),
    "qsr": config("qsr", options="growth=0.2", optimizer={"lr": 0.1, "lr_schedule": "linear"}),
    "post-local-sgd": config("post-local-sgd"),
    "des-loc": config("des-loc", optimizer={"lr": 0.01}),
    "des-loc, layer by layer": config("des-loc", exchange={"packed": False}),
    "des-loc, staged fragments": config(
        "des-loc", period=4, exchange={"fragments": 2, "delay": 1, "resident": False}
    ),
    "des-loc, all in each exchange": config(
        "des-loc",
        period=4,
        options="first=1,second=1",
        optimizer={"lr": 0.01, "options": "betas=(0.9, 0.5)"},
        exchange={"fragments": 2},
    ),
    "demo": config("demo", optimizer={"lr": 0.01}),
}


def eventful(case, **more):
    """Return a history in which workers are lost, join, are left out, late, absent and return."""
    history = History(case, **more)
    last = history.job.method.period - 1
    history.train("w0", "w1", "w2", rounds=2)
    history.train("w0", "w1", "w2", lost={"w0": (1, last)})
    history.train("w1", "w2", "w3", rounds=1)
    history.train("w1", "w2", "w3", late={"w1": (0, last)})
    history.train("w2", "w3", rounds=1)
    history.train("w2", "w3", "w1", missed={"w3": (0, 0)})
    history.train("w2", "w1", rounds=1)
    history.end("w1", "w2", "w3")
    return history


@functools.cache
def first_history(name):
    """Return the eventful history of a case, which several tests share."""
    return eventful(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_the_same_history_gives_the_same_bits(name):
    first, second = first_history(name), eventful(CASES[name])
    assert set(first.workers) == {"w1", "w2", "w3"}
    assert_same(first.bits(), second.bits())


@pytest.mark.parametrize("name", CASES)
def test_every_sample_reaches_a_completed_exchange_once_an_epoch(name):
    first_history(name).assert_every_sample_once_an_epoch()


@pytest.mark.parametrize("name", ["diloco", "sync-sgd"])
def test_replicas_that_follow_the_center_equal_it_at_the_end(name):
    history = first_history(name)
    for worker_id in history.workers:
        assert_same(history.weights(worker_id).numpy(), history.snapshot.weights)


# every sample once


@pytest.mark.parametrize("rule", COUNTING.values(), ids=COUNTING)
@pytest.mark.parametrize("place", [(0, 0), (0, 1), (1, 0), (2, 1)])
@pytest.mark.parametrize("num_workers", [2, 3, 6])
def test_the_center_counts_each_sample_once_an_epoch_when_one_is_lost(rule, place, num_workers):
    history = counting(rule, num_samples=50)
    members = [f"w{i}" for i in range(num_workers)]
    history.train(*members, lost={"w0": place})
    history.end(*members[1:], "w9")
    assert (history.snapshot.weights == 3).all()
    history.assert_every_sample_once_an_epoch()


@pytest.mark.parametrize("rule", COUNTING.values(), ids=COUNTING)
def test_the_center_counts_each_sample_once_an_epoch_when_one_is_left_out(rule):
    history = counting(rule)
    history.train("w0", "w1", "w2", late={"w1": (1, 0)})
    history.train("w0", "w2", rounds=2)
    history.end("w0", "w1", "w2")
    assert (history.snapshot.weights == 3).all()


@pytest.mark.parametrize("rule", COUNTING.values(), ids=COUNTING)
def test_a_worker_that_is_lost_while_left_out_returns_its_samples(rule):
    history = counting(rule)
    history.train("w0", "w1", "w2", late={"w1": (1, 0)})
    history.train("w0", "w2", rounds=1)
    history.remove_worker("w1")
    history.end("w0", "w2")
    assert (history.snapshot.weights == 3).all()


@pytest.mark.parametrize("rule", COUNTING.values(), ids=COUNTING)
def test_consecutive_broken_exchanges_neither_lose_nor_double_samples(rule):
    history = counting(rule)
    for lost in ("w0", "w1", "w2"):
        others = [w for w in ("w0", "w1", "w2", "w3") if w >= lost]
        history.train(*others, lost={lost: (0, 1)})
    history.end("w3")
    assert (history.snapshot.weights == 3).all()


@pytest.mark.parametrize(
    ("rule", "fragments", "missed"),
    [(AllProgress(), 1, (0, 0)), (AllProgress(), 2, (0, 1)), (COUNTING["gradients"], 1, (0, 0))],
    ids=["progress", "progress in fragments", "gradients"],
)
def test_the_residuals_of_a_worker_that_missed_a_sum_are_those_after_its_message(
    rule, fragments, missed
):
    exchange = {"compression": "topk:0.05", "fragments": fragments}
    history = counting(rule, num_samples=60, exchange=exchange)
    history.train("w0", "w1", "w2", rounds=2)
    history.train("w0", "w1", "w2", missed={"w1": missed})
    history.end("w0", "w1", "w2")
    total, num_left = total_count(history), 0
    # A gradient leaves out a part of the mean over its samples: two steps of two in each message.
    num_samples = 1 if rule.takes_steps else 4
    for worker in history.workers.values():
        for (start, stop), feedback in worker.runner.feedback.items():
            # messages are negative counts
            total[start:stop] -= feedback.residual.numpy() * num_samples
            num_left += int(feedback.residual.count_nonzero())
    assert num_left
    assert total == pytest.approx(np.full(60, 3.0))


@pytest.mark.parametrize(
    ("exchange", "missed"),
    [({"fragments": 2}, (0, 1)), ({"delay": 2}, (0, 0)), ({"fragments": 3, "delay": 1}, (1, 2))],
)
def test_a_worker_that_missed_the_last_sum_keeps_its_progress_since_the_messages(exchange, missed):
    history = counting(AllProgress(), num_samples=60, period=6, exchange=exchange)
    history.train("w0", "w1", "w2", rounds=1)
    history.train("w0", "w1", "w2", missed={"w1": missed})
    history.end("w0", "w1", "w2")
    assert (total_count(history) == 3).all()
    history.assert_every_sample_once_an_epoch()


def test_of_two_copies_of_a_round_the_one_with_more_claims_continues():
    history = History(config("sync-easgd", period=2), images=tiny_images(40))
    history.train("w0", "w1", "w2", lost={"w2": (1, 0)})  # w0 and w1 keep their claims
    history.train("w0", "w1", missed={"w0": (0, -1)})  # w1 enters the next round
    ages = {w: history.workers[w].copy_age for w in ("w0", "w1")}
    assert ages["w0"][0] == ages["w1"][0]
    assert ages["w0"] < ages["w1"]
    claimed = [worker_id for worker_id, _, _ in history.snapshot.ledger["claimed"]]
    assert (claimed.count("w0"), claimed.count("w1")) == (2, 2)
    history.end("w0", "w1")
    history.assert_every_sample_once_an_epoch()


def test_samples_of_a_round_that_broke_early_are_trained_by_other_workers():
    """With fragments a round may break before its last step."""
    history = counting(AllProgress(), num_samples=100, period=4, exchange={"fragments": 2})
    history.train("w0", "w1", "w2", late={"w0": (1, 1)})  # the others reach step 1 of 4
    assert len(history.batches["w1"].open) == 4
    history.end("w0", "w1", "w2")
    history.assert_every_sample_once_an_epoch()
    assert (total_count(history) == 3).all()


def total_count(history):
    """Return the counts of the center plus those that the replicas have yet to send."""
    center = history.snapshot.weights
    open_ = [history.weights(w).numpy() - center for w in history.workers]
    return center + sum(open_)


KINDS = ["calm", "lost", "late", "missed", "join", "stand by"]


def lists_of_events(*kinds):
    """Return a strategy for lists of (event, number of a worker, round, step)."""
    places = st.integers(0, 5), st.integers(0, 2), st.integers(0, 1)
    return st.lists(st.tuples(st.sampled_from(kinds), *places), max_size=6)


def play(history, num_workers, events):
    """Apply events to a history, then train to the end with the remaining workers."""
    here, aside = [f"w{i}" for i in range(num_workers)], []
    for number, (event, choice, round, step) in enumerate(events):
        here += [w for w in (*history.absent, *aside) if w not in here and (choice + number) % 2]
        aside = [w for w in aside if w not in here]
        chosen, trouble = here[choice % len(here)], {}
        if event in ("lost", "late", "missed") and len(here) > 1:
            trouble = {event: {chosen: (round, 0 if event == "missed" else step)}}
        elif event == "missed counts":
            trouble = {"missed": {chosen: (0, -1)}}
        end = history.train(*here, rounds=3 if trouble else 1, **trouble)
        if set(end.outcomes.values()) & {Outcome.FINISHED, Outcome.REGROUP}:
            break
        if (event in ("lost", "late") and trouble) or (event == "stand by" and len(here) > 1):
            here.remove(chosen)
            aside += [chosen] if event == "stand by" else []
        elif event == "join":
            here.append(f"w{num_workers + number}")
    if (history.snapshot.progress.num_samples // history.images.num_samples) < 3:
        history.end(*dict.fromkeys([*here, *aside, *history.absent]))


@settings(max_examples=25, database=None)
@given(
    rule=st.sampled_from(list(COUNTING)),
    num_workers=st.integers(1, 6),
    events=lists_of_events(*KINDS, "missed counts"),
)
def test_after_any_events_the_center_counts_each_sample_once_an_epoch(rule, num_workers, events):
    torch.set_num_threads(1)
    history = counting(COUNTING[rule], num_samples=40)
    play(history, num_workers, events)
    assert (history.snapshot.weights == 3).all()


@settings(max_examples=15, database=None)
@given(
    method=st.sampled_from(["sync-easgd", "sync-msgd", "diloco"]),
    fragments=st.integers(1, 2),
    num_workers=st.integers(1, 4),
    events=lists_of_events(*KINDS, "missed counts"),
)
def test_after_any_events_each_sample_is_trained_once_an_epoch(
    method, fragments, num_workers, events
):
    torch.set_num_threads(1)
    optimizer = {"lr": 0.1, "clip_grad_norm": None}
    case = config(method, exchange={"fragments": fragments}, optimizer=optimizer)
    history = History(case, images=tiny_images(40))
    play(history, num_workers, events)
    history.assert_every_sample_once_an_epoch()


# a worker that is a round behind


@pytest.mark.parametrize("rule", COUNTING.values(), ids=COUNTING)
def test_a_worker_that_missed_a_sum_continues_from_the_newest_copy_and_counts_once(rule):
    history = counting(rule)
    end = history.train("w0", "w1", "w2", missed={"w1": (1, 0)})
    assert set(end.outcomes.values()) == {Outcome.BROKEN}
    assert {w: history.workers[w].round for w in history.workers} == {"w0": 2, "w1": 1, "w2": 2}
    assert num_counted(history) == 24  # 2 rounds of 3 workers, 2 steps, 2 samples
    history.train("w0", "w1", "w2", rounds=1)
    history.end("w0", "w1", "w2")
    assert (history.snapshot.weights == 3).all()


@pytest.mark.parametrize("survivors", [("w0", "w1"), ("w1", "w0"), ("w1",)])
def test_a_worker_that_missed_a_sum_may_be_rank_0_or_alone_afterwards(survivors):
    history = counting(AllProgress())
    history.train("w0", "w1", "w2", missed={"w1": (0, 0)})
    for gone in {"w0", "w1", "w2"} - set(survivors):
        history.remove_worker(gone)
    history.end(*survivors)
    assert (history.snapshot.weights == 3).all()


def test_a_replica_that_sends_weights_does_not_change_when_it_missed_a_sum():
    history = History(config("sync-measgd"))
    history.train("w0", "w1", missed={"w1": (1, 0)})
    before = history.workers["w1"].replica.state_dict()
    history.train("w0", "w1", rounds=0)
    assert_same(history.workers["w1"].replica.state_dict(), before)


def test_progress_by_hand_when_a_worker_is_left_out_and_rejoins():
    """Two of three continue; x <- c_new + (x - c_old) keeps the progress of the absent one."""
    history = counting(AllProgress())
    history.train("w0", "w1", "w2", late={"w1": (0, 0)})
    assert num_counted(history) == 0
    own = history.weights("w1")
    assert own.sum() == 4  # 2 steps of 2 samples, alone
    history.train("w0", "w2", rounds=1)
    assert num_counted(history) == 16  # 2 workers, this round and the broken one
    center = torch.tensor(history.snapshot.weights)
    history.train("w0", "w1", "w2", rounds=0)
    assert_same(history.weights("w1"), center + own)
    history.train("w0", "w1", "w2", rounds=1)
    assert num_counted(history) == 31  # 5 remaining samples of the epoch and 6 of the next


def test_a_worker_that_stood_by_starts_at_the_current_center():
    history = counting(AllProgress())
    history.train("w0", "w1", rounds=1)
    history.train("w0", rounds=2)
    history.train("w0", "w1", rounds=0)
    assert_same(history.weights("w1").numpy(), history.snapshot.weights)


# newcomers


@pytest.mark.parametrize("method", ["sync-easgd", "diloco", "sync-msgd"])
def test_a_newcomer_starts_at_the_center(method):
    history = History(config(method))
    history.train("w0", "w1", rounds=2)
    history.train("w0", "w1", "w2", rounds=0)
    assert_same(history.weights("w2").numpy(), history.snapshot.weights)


def test_a_newcomer_with_the_state_of_a_leaver_starts_as_its_replica():
    history = History(config("sync-measgd"))
    history.train("w0", "w1", rounds=2)
    left = history.workers["w1"].pop_kept(0)
    history.train("w0", rounds=1)
    history.train("w0", "w2", rounds=0, states={"w2": left})
    assert_same(history.workers["w2"].replica.state_dict(), left["replica"])
    history.end("w0", "w2")


# the end of a run


@pytest.mark.parametrize("method", ["sync-easgd", "diloco", "sync-sgd"])
def test_all_workers_count_the_steps_of_completed_rounds_alike(method):
    history = History(config(method, steps=9))
    history.train("w0", "w1", "w2", lost={"w0": (1, 1)})
    history.train("w1", "w2", "w3", rounds=1)
    history.end("w1", "w2", "w3", "w4")
    assert history.snapshot.progress.local_step == 9
    assert {worker.center().progress.local_step for worker in history.workers.values()} == {9}
    assert history.snapshot.progress.round == 5  # of 2, 2, 2, 2 and 1 steps


def test_seconds_end_the_run_for_all_after_the_same_round():
    history = History(config("sync-easgd", seconds=0.3))
    history.train("w0", "w1", "w2", lost={"w0": (1, 1)})
    history.end("w1", "w2", "w3")
    assert history.snapshot.progress.seconds >= 0.3
    assert len({worker.round for worker in history.workers.values()}) == 1


@pytest.mark.parametrize("is_back", [True, False])
def test_samples_that_only_an_absent_worker_can_finish_end_the_generation(is_back):
    history = counting(AllProgress(), num_samples=24)
    history.train("w0", "w1", "w2", rounds=5)
    history.train("w0", "w1", "w2", late={"w1": (0, 0)})  # the last round of the run
    end = history.train("w0", "w2")
    assert end.outcome is Outcome.REGROUP
    assert num_counted(history) == 68
    num_rounds = history.snapshot.progress.round
    assert history.train("w0", "w2").outcome is Outcome.REGROUP
    assert history.snapshot.progress.round == num_rounds + 1  # one exchange without a step
    if is_back:
        history.end("w0", "w1", "w2")
    else:
        history.remove_worker("w1")
        history.end("w0", "w2")
    assert (history.snapshot.weights == 3).all()


def test_progress_left_by_a_break_at_the_end_is_sent_in_an_exchange_without_steps():
    history = counting(AllProgress(), num_samples=24)
    history.train("w0", "w1", "w2", rounds=5)
    history.train("w0", "w1", "w2", missed={"w1": (0, 0), "w0": (0, 0), "w2": (0, 0)})
    history.end("w0", "w1", "w2")
    assert (history.snapshot.weights == 3).all()


# numbers of workers


@pytest.mark.parametrize("rule", COUNTING.values(), ids=COUNTING)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5, 6])
def test_one_worker_and_many_survive_a_sum_that_no_member_received(rule, num_workers):
    history = counting(rule, num_samples=60)
    members = [f"w{i}" for i in range(num_workers)]
    history.train(*members, missed=dict.fromkeys(members, (1, 0)))
    assert history.snapshot.progress.round == 1
    history.end(*members)
    assert (history.snapshot.weights == 3).all()


def test_when_a_member_leaves_a_group_the_waiting_members_fail_at_once():
    group = LocalGroup(2, timeout_s=30.0)
    first, second = group.member(0), group.member(1)
    whole = first.start_allreduce(torch.ones(1), round=0)
    second.start_allreduce(torch.ones(1), round=0)
    second.close()
    whole.wait()  # rank 1 had contributed before it left
    with pytest.raises(ExchangeError, match="rank 1 left the group"):
        first.start_allreduce(torch.ones(1), round=1).wait()
    with pytest.raises(ExchangeError, match="rank 1 left the group"):
        second.start_allreduce(torch.ones(1), round=1).wait()
