"""The methods after DiLoCo, worked by hand for two workers, and against NumPy."""

import dataclasses

import numpy as np
import pytest
import torch
from ensembles import Ensemble, tiny_images
from interruptions import assert_same_bits_after_an_interruption
from mails import NO_BUFFERS, center_of
from scenarios import scenario_config

from raydl.config import ExchangeConfig, MethodConfig, OptimizerConfig, TrainConfig
from raydl.core.codecs import parse_codec
from raydl.core.compression import ErrorFeedback
from raydl.core.exchange import tensor_spans
from raydl.core.reports import Outcome
from raydl.core.rules import Letter, Mail, Now, ReplicaSpan, State, Travelled
from raydl.errors import ConfigError, UnknownNameError
from raydl.methods import resolve
from raydl.methods.cgad import CGAD
from raydl.methods.dc_asgd import DCASGD
from raydl.methods.demo import DeMo, cosine_transform
from raydl.methods.des_loc import DESLOC
from raydl.methods.diloco import RestartedDiLoCo
from raydl.methods.fednova import FedNova
from raydl.methods.heloco import HeLoCo
from raydl.methods.resolve import filled_in
from raydl.methods.scaffold import Scaffold
from raydl.methods.slowmo import SlowMo
from raydl.methods.sparse_loco import SparseLoCo
from raydl.methods.streaming_diloco import StreamingDiLoCo


def replica_at(rule, *values, steps=1, rates=1.0, lr=1.0, samples=1.0):
    """Return a replica of a rule that has taken some steps since its last message."""
    x = torch.tensor(values, dtype=torch.float64)
    vectors = {name: torch.zeros_like(x) for name in rule.keeps}
    return ReplicaSpan(x, x, Travelled(samples, steps, rates), lr, vectors)


def meet(center, *replicas, now=None, lanes=None):
    """Exchange replicas with a center, as a synchronous method does; the replicas land."""
    rule, state = center.rule, center.state
    messages, lanes = [], lanes or rule.lanes
    for replica in replicas:
        out = {lane: torch.empty_like(replica.x) for lane in lanes}
        messages.append(rule.compose(replica, center.weights, state, out))
        replica.sent = {name: values.clone() for name, values in messages[-1].lanes.items()}
    sums = {lane: sum(m.lanes[lane] * m.weight for m in messages) for lane in lanes}
    numbers = {n: sum(m.numbers[n] * m.weight for m in messages) for n in rule.numbers}
    weight = sum(m.weight for m in messages)
    now = now or Now(len(replicas))
    center.apply_(Mail(sums, len(messages), weight, numbers), NO_BUFFERS, now)
    for replica in replicas:
        rule.land_(replica, center.weights, state, now)


def center_at(rule, *values):
    return center_of(rule, torch.tensor(values, dtype=torch.float64))


def test_slowmo_by_hand():
    """Rate 1/2: D = 1 and 3, so u = 2/(1/2) = 4 and c = 10 - 1/2*4 = 8.

    Then D = 0: u = 1/2*4 = 2, and with the rate 1/4 c = 8 - 1/4*2 = 7.5: the step is half as long
    as the rate says, although the momentum was made at another rate.
    """
    center = center_at(SlowMo(1.0, momentum=0.5), 10)
    meet(center, replica_at(center.rule, 9, lr=0.5), replica_at(center.rule, 7, lr=0.5))
    assert center.weights.item() == 8
    meet(center, *(replica_at(center.rule, 8, lr=0.25) for _ in range(2)))
    assert center.weights.item() == 7.5


def test_slowmo_without_a_rate_moves_nothing():
    center = center_at(SlowMo(1.0, momentum=0.5), 10)
    meet(center, replica_at(center.rule, 10, lr=0.0))
    assert center.weights.item() == 10


def test_fednova_by_hand():
    """D = 4 in 4 steps, and 1 in 1 step: mean(a) = 2.5, mean(D/a) = 1, c = 10 - 2.5 = 7.5."""
    center = center_at(FedNova(), 10)
    meet(center, replica_at(center.rule, 6, steps=4), replica_at(center.rule, 9, steps=1))
    assert center.weights.item() == 7.5


def test_fednova_at_equal_steps_is_local_sgd():
    center = center_at(FedNova(), 10)
    meet(center, replica_at(center.rule, 6, steps=5), replica_at(center.rule, 9, steps=5))
    assert center.weights.item() == pytest.approx(7.5)


def test_scaffold_by_hand():
    """Mean gradients 1 and 3 at rate 1/2 for two steps: D = 1 and 3, v_i' = 1 and 3, v = 2.

    The next gradients are corrected by v - v_i, so both workers take the same steps.
    """
    center = center_at(Scaffold(), 10)
    one, other = replica_at(center.rule, 9), replica_at(center.rule, 7)
    meet(center, one, other)
    assert center.weights.item() == 8
    assert [center.state["control"], one["control"], other["control"]] == [2, 1, 3]
    for replica, gradient in ((one, 1.0), (other, 3.0)):
        tilted = torch.tensor([gradient], dtype=torch.float64)
        center.rule.tilt_(tilted, replica, center.state)
        assert tilted.item() == 2
        assert replica.x.item() == 8
    for replica in (one, other):
        replica.x.sub_(2)
    meet(center, one, other)
    assert [center.state["control"], one["control"], other["control"]] == [2, 1, 3]


def test_scaffold_is_right_again_a_round_after_a_worker_is_lost():
    center = center_at(Scaffold(), 10)
    one, other = replica_at(center.rule, 9), replica_at(center.rule, 7)
    meet(center, one, other)
    one.x.sub_(1 - one["control"] + center.state["control"])
    meet(center, one)
    assert center.state["control"] == one["control"] == 1


def test_dc_asgd_by_hand():
    """g = 2/0.5 = 4 from c_i = 10; c is at 9 by now: c - 0.5*(4 + 0.1*16*(9 - 10)) = 7.8."""
    rule = DCASGD(rate=0.1)
    out = {lane: torch.empty(1, dtype=torch.float64) for lane in rule.lanes}
    base = torch.tensor([10.0], dtype=torch.float64)
    message = rule.compose(replica_at(rule, 8, rates=0.5), base, State(), out)
    center = center_at(rule, 9)
    center.apply_(Mail(message.lanes, 1, 1.0, message.numbers), NO_BUFFERS, Now(2))
    assert center.weights.item() == pytest.approx(7.8)


def test_a_center_that_has_not_moved_makes_dc_asgd_async_sgd():
    center = center_at(DCASGD(rate=0.1), 10)
    meet(center, replica_at(center.rule, 8, rates=0.5))
    assert center.weights.item() == 8


def test_restarted_diloco_by_hand():
    """D = 1 always: m = 1, c -= 1.5 ; m = 1.5, c -= 1.75, m = 0 ; m = 1, c -= 1.5."""
    center = center_at(RestartedDiLoCo(1.0, momentum=0.5, every=2), 0)
    moves = []
    for _ in range(3):
        before = center.weights.item()
        meet(center, replica_at(center.rule, before - 1))
        moves.append(before - center.weights.item())
    assert moves == [1.5, 1.75, 1.5]


@pytest.mark.parametrize(
    ("progress", "corrected"),
    [
        ((3.0, 4.0), (3.0, 4.0)),  # cos 3/5: as it is
        ((-3.0, 4.0), (-3.0 + 0.5 * 0.6 * (5 / 8) * 0.6 * 5, 4.0)),  # cos -3/5, f = 5/8
        ((0.0, 5.0), (5 * 5 / 34**0.5, 5 * 3 / 34**0.5)),  # cos 0: l = 5/8, u = (5, 3)/8
    ],
)
def test_heloco_turns_progress_by_its_angle_to_the_momentum(progress, corrected):
    """m = (1, 0), h = 3, s = 1/2, d = 1."""
    given = torch.tensor(progress, dtype=torch.float64)
    HeLoCo().correct_(given, torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert given.tolist() == pytest.approx(corrected)


def test_heloco_begins_as_diloco_with_a_part_of_each_message():
    """m = 0, p = 4: D = 4 / 2 = 2, m = 2, c = 10 - 1/2 * (2 + 1/2*2) = 8.5."""
    center = center_at(HeLoCo(0.5, momentum=0.5), 10)
    meet(center, replica_at(center.rule, 6), now=Now(4))
    assert center.weights.item() == 8.5


def test_cgad_by_hand():
    """D = 4, p = 2, so c = 10 - 1/4 * 4/(4 + 1) = 9.8 ; then D = 0: m = 2/3 * 2, v = 16/3 * 4.

    n = 1: m = 2 and v = 4 are corrected by 1 - 1/2 and 1 - 3/4, to 4 and 16.
    n = 2: m = 1 and v = 3 are corrected by 3/4 and 7/16, to 4/3 and 48/7.
    """
    center = center_at(CGAD(0.5, momentum=0.5, second=0.75, eps=1.0), 10)
    meet(center, replica_at(center.rule, 6), now=Now(2))
    assert center.weights.item() == pytest.approx(9.8)
    meet(center, replica_at(center.rule, 9.8), now=Now(2))
    assert center.weights.item() == pytest.approx(9.8 - 0.25 * (4 / 3) / ((48 / 7) ** 0.5 + 1))


def test_progress_counts_the_less_for_cgad_the_older_it_is():
    rule = CGAD(decay=0.1, cutoff=16)
    assert [rule.worth(0), rule.worth(16), rule.worth(100)] == [1, 0, 0]
    assert rule.worth(8) == pytest.approx(0.5 * np.exp(-0.8))
    center = center_at(rule, 10)
    meet(center, replica_at(rule, 6), now=Now(2, staleness=32))
    assert center.weights.item() == 10


def test_the_age_of_progress_is_in_rounds_so_that_many_equal_workers_train():
    """Of 32 equal workers each finds 31 messages of the others: about one round."""
    center = center_at(CGAD(), 10)
    meet(center, replica_at(center.rule, 6), now=Now(32, staleness=31))
    assert center.weights.item() < 10


def test_part_of_a_round_is_part_of_a_step_of_cgad():
    whole, parts = (center_at(CGAD(0.5, eps=1.0), 10) for _ in range(2))
    meet(whole, replica_at(whole.rule, 9))
    for _ in range(2):
        at = parts.weights.item()
        meet(parts, replica_at(parts.rule, at - 1), now=Now(1, share_of_round=0.5))
    moved = [10 - whole.weights.item(), 10 - parts.weights.item()]
    assert moved[1] == pytest.approx(moved[0], rel=0.1)


def adam_after(rounds, **exchange):
    """Train two workers with DES-LOC for some rounds; return how far u and v are apart."""
    exchange = ExchangeConfig(timeout_s=20.0, **exchange)
    config = scenario_config("des-loc", steps=4 * rounds, lr=0.01, period=4, exchange=exchange)
    ensemble = Ensemble(config, num_workers=2, images=tiny_images(600)).join()
    assert ensemble.run() == [Outcome.FINISHED] * 2
    assert ensemble.newest.progress.round == rounds
    states = [worker.replica.state_dict()["optimizer"]["state"] for worker in ensemble.workers]
    return tuple(
        sum(float((one[i][name] - other[i][name]).abs().max()) for i in one)
        for one, other in [states]
        for name in ("exp_avg", "exp_avg_sq")
    )


@pytest.mark.parametrize("exchange", [{}, {"packed": False}, {"resident": False}])
def test_des_loc_averages_u_in_every_third_and_v_in_every_sixth_exchange(exchange):
    apart = {rounds: adam_after(rounds, **exchange) for rounds in (2, 3, 6)}
    assert [gap > 0 for gap in apart[2]] == [True, True]
    assert [gap > 0 for gap in apart[3]] == [False, True]
    assert apart[6] == (0, 0)


def test_the_fragments_of_des_loc_land_at_different_steps():
    assert all(gap > 0 for gap in adam_after(6, fragments=2))


def test_des_loc_by_hand():
    """D = 1 and 3, c = 10 - 2 = 8; u = 2 and 4, so both have 3; v does not travel."""
    center = center_at(DESLOC(), 10)
    replicas = [replica_at(center.rule, x) for x in (9, 7)]
    for replica, u in zip(replicas, (2.0, 4.0), strict=True):
        replica.inner = {
            "exp_avg": torch.tensor([u], dtype=torch.float64),
            "exp_avg_sq": torch.tensor([u], dtype=torch.float64),
        }
    meet(center, *replicas, lanes=center.rule.lanes_at(2))
    assert [replica.x.item() for replica in replicas] == [8, 8]
    assert [replica.inner["exp_avg"].item() for replica in replicas] == [3, 3]
    assert [replica.inner["exp_avg_sq"].item() for replica in replicas] == [2, 4]


def test_des_loc_counts_the_bytes_that_each_round_sends():
    """Rounds of 1, 1, 2, 1, 1 and 3 vectors: nine in six rounds, and what belongs to each."""
    sent = {}
    for method in ("des-loc", "local-sgd"):
        config = scenario_config(method, steps=24, period=4)
        config = dataclasses.replace(config, optimizer=OptimizerConfig(name="adamw", lr=0.01))
        ensemble = Ensemble(config, num_workers=2, images=tiny_images(600)).join()
        ensemble.run()
        sent[method] = ensemble.newest.progress.num_bytes
    vector = 4 * ensemble.flat.num_parameters
    assert sent["des-loc"] - sent["local-sgd"] == 2 * 3 * vector


def test_demo_steps_by_the_sign_of_the_mean_over_those_who_sent_a_place_by_hand():
    """Less than a chunk is not transformed. Place 0: 3 and -1, so +; 1: -2 alone; 2: nobody."""
    center = center_at(DeMo(), 0, 0, 0)
    letters = [
        Letter({"coefficients": torch.tensor(sent, dtype=torch.float64)}, 4.0)
        for sent in ([3.0, 0.0, 0.0], [-1.0, -2.0, 0.0])
    ]
    mail = Mail({"coefficients": torch.zeros(3)}, 2, 8.0, {}, letters)
    center.apply_(mail, NO_BUFFERS, Now(2))
    assert center.weights.tolist() == [-0.5, 0.5, 0]


def test_the_cosine_transform_is_that_of_its_definition_and_its_inverse_undoes_it():
    values = torch.tensor(np.random.default_rng(0).standard_normal(64 * 3 + 5))
    coefficients = cosine_transform(values, out=torch.empty_like(values))
    k, n = np.arange(64)[:, None], np.arange(64)
    waves = np.cos(np.pi * k * (2 * n + 1) / 128) * np.where(k == 0, 1 / 8, 2**0.5 / 8)
    wanted = waves @ values[64:128].numpy()
    assert np.allclose(coefficients[64:128].numpy(), wanted)
    assert torch.equal(coefficients[-5:], values[-5:])
    back = cosine_transform(coefficients, out=torch.empty_like(values), inverse=True)
    assert torch.allclose(back, values)


def test_fednova_counts_a_worker_that_took_no_step_as_one_that_stayed():
    """D = 4 in 4 steps, and no step: mean(a) = 2, mean(D/a) = 1/2, c = 10 - 1."""
    center = center_at(FedNova(), 10)
    meet(center, replica_at(center.rule, 6, steps=4), replica_at(center.rule, 10, steps=0))
    assert center.weights.item() == 9


def test_streaming_diloco_mixes_the_center_into_the_replica_as_it_is_at_landing():
    rule = StreamingDiLoCo(1.0, momentum=0.0, mix=0.25)
    replica, center = replica_at(rule, 4), torch.tensor([8.0], dtype=torch.float64)
    replica.x_sent = torch.tensor([6.0], dtype=torch.float64)
    rule.land_(replica, center, State(), Now(2))
    assert replica.x.item() == 7


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_the_residual_of_sparse_loco_decays(decay):
    """With the largest of two: v = (2, 1) leaves (0, 1); then v = (0.5, 0) + decay * (0, 1)."""
    feedback = ErrorFeedback(parse_codec("topk:0.5"), decay=decay)
    feedback.encode(torch.tensor([2.0, 1.0]))
    feedback.commit()
    assert feedback.residual.tolist() == [0, 1]
    feedback.encode(torch.tensor([0.25, 0.0]))
    assert feedback.decoded.tolist() == [0, decay]
    feedback.commit()
    assert feedback.residual.tolist() == [0.25, 0]


def test_sparse_loco_as_released_averages_each_place_over_its_senders_by_hand():
    """Lengths 3, 4 and 8: the median is 4, so the last is cut to half.

    Place 0: (3 + 4) / 2 = 3.5 ; place 1: 4 / 1 = 4 ; place 2: nobody sent it.
    """
    center = center_at(SparseLoCo(merge="senders"), 0, 0, 0)
    sent = ([3.0, 0.0, 0.0], [4.0, 0.0, 0.0], [0.0, 8.0, 0.0])
    letters = [Letter({"progress": torch.tensor(v, dtype=torch.float64)}, 1.0) for v in sent]
    total = sum(letter.lanes["progress"] for letter in letters)
    center.apply_(Mail({"progress": total}, 3, 3.0, {}, letters), NO_BUFFERS, Now(3))
    assert center.weights.tolist() == [-3.5, -4, 0]


@pytest.mark.parametrize("compression", ["none", "topk:0.5"])
def test_a_rule_without_sums_sees_each_message_on_every_rank(compression):
    exchange = ExchangeConfig(timeout_s=20.0, compression=compression)
    config = scenario_config("sparse-loco", epochs=3, lr=0.05, period=4, exchange=exchange)
    config = dataclasses.replace(
        config, method=dataclasses.replace(config.method, options="merge='senders'")
    )
    ensemble = Ensemble(config, num_workers=3, images=tiny_images(31)).join()
    assert ensemble.run() == [Outcome.FINISHED] * 3
    centers = [worker.runner.center().weights for worker in ensemble.workers]
    assert all(np.array_equal(centers[0], other) for other in centers[1:])
    assert not np.array_equal(centers[0], ensemble.first.weights)


def test_a_rule_that_asks_for_each_message_must_say_so():
    mail = Mail({"progress": torch.ones(1)}, 1, 1.0)
    with pytest.raises(ConfigError, match="asks for each message, so it must set sums = False"):
        mail.each()


def sparse_loco_in_numpy(progress, *, decay, codec):
    """Return what moved the center: e <- b*e + D ; q = Q(e) ; e <- e - q, for one worker."""
    e, moved = np.zeros_like(progress[0]), np.zeros_like(progress[0])
    for d in progress:
        e = decay * e + d
        q = codec.decode(codec.encode(torch.tensor(e)), out=torch.empty(len(e))).numpy()
        e, moved = e - q, moved + q
    return moved


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_sparse_loco_has_the_feedback_of_its_equation(decay):
    random = np.random.default_rng(3)
    progress = random.standard_normal((20, 500)).astype(np.float32)
    codec = parse_codec("chunk-topk:5/100")
    feedback, moved = ErrorFeedback(codec, decay=decay), np.zeros(500, np.float32)
    for d in progress:
        feedback.encode(torch.tensor(d))
        moved += feedback.decoded.numpy()
        feedback.commit()
    wanted = sparse_loco_in_numpy(progress, decay=decay, codec=codec)
    assert np.allclose(moved, wanted, atol=1e-5)
    if decay == 1:
        whole = moved + feedback.residual.numpy()
        assert np.allclose(whole, progress.sum(0), atol=1e-4)


# fragments of whole tensors


@pytest.mark.parametrize(
    ("sizes", "count", "spans"),
    [
        ([4, 4, 4, 4], 2, [(0, 8), (8, 16)]),
        ([10, 1, 1, 10], 2, [(0, 11), (11, 22)]),
        ([100, 1, 1], 3, [(0, 100), (100, 102)]),
        ([7], 4, [(0, 7)]),
        ([3, 5], 1, [(0, 8)]),
    ],
)
def test_fragments_of_whole_tensors_are_about_equal(sizes, count, spans):
    assert tensor_spans(sizes, count) == spans


def test_streaming_diloco_never_cuts_a_tensor():
    exchange = ExchangeConfig(fragments=2, timeout_s=20.0)
    config = scenario_config("streaming-diloco", epochs=2, lr=0.05, period=4, exchange=exchange)
    ensemble = Ensemble(config, num_workers=2, images=tiny_images(31)).join()
    assert ensemble.run() == [Outcome.FINISHED] * 2
    worker = ensemble.workers[0]
    spans = [(e.span.start, e.span.stop) for e in worker.runner.entered().exchanges]
    assert spans == tensor_spans(worker.replica.flat.layer_sizes, 2)
    assert len(spans) == 2


# settings


def method_of(name, *, optimizer=None, exchange=None, **settings):
    return resolve(
        TrainConfig(
            method=MethodConfig(name=name, **settings),
            optimizer=OptimizerConfig(**(optimizer or {})),
            exchange=ExchangeConfig(**(exchange or {})),
        )
    )


def test_the_options_of_a_method_are_its_arguments():
    rule = method_of("sparse-loco", options="decay=0.8").rule
    assert rule.feedback_decay == 0.8
    assert method_of("sparse-loco").rule.feedback_decay == 0.95
    assert method_of("streaming-diloco", options="mix=0").rule.mix == 0
    rule = method_of("restarted-diloco", options="every=3", outer_lr=0.5).rule
    assert (rule.every, rule.lr, rule.momentum, rule.nesterov) == (3, 0.5, 0.9, True)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("sparse-loco", "decay=2", "method.options must have decay from 0 to 1, got 2"),
        ("sparse-loco", "decay='a'", "method.options must have decay from 0 to 1, got 'a'"),
        ("sparse-loco", "k=3", "method.options has no k for sparse-loco; there are decay, merge"),
        ("sparse-loco", "merge='all'", "method.options must have merge as 'mean' or 'senders', g"),
        ("sparse-loco", "lr=3", "method.options must not have lr: set method.outer_lr"),
        ("sync-easgd", "beta=1", "method.options must not have beta: set method.beta"),
        ("sync-easgd", "decay=1", "method.options must be empty for sync-easgd, which has none"),
        ("restarted-diloco", "every=0", "method.options must have every as a whole number of at"),
        ("diloco", "0.5", "method.options must be NAME=VALUE separated by commas"),
    ],
)
def test_an_option_that_a_method_does_not_have_is_refused(name, options, sentence):
    with pytest.raises(ConfigError) as caught:
        method_of(name, options=options)
    assert str(caught.value).startswith(sentence)


def test_a_misspelt_option_has_a_suggestion():
    with pytest.raises(UnknownNameError, match="did you mean decay"):
        method_of("sparse-loco", options="deccay=0.5")


def test_a_method_has_its_own_codec_unless_another_is_named():
    assert method_of("sparse-loco").compression == "chunk-topk:64"
    assert method_of("sparse-loco", exchange={"compression": "none"}).compression == "none"
    assert method_of("streaming-diloco").compression == "e3m0"
    assert method_of("diloco").compression == "none"


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, (4, 5)),
        ({"period": 8}, (4, 1)),
        ({"period": 3}, (3, 0)),
        ({"exchange": {"fragments": 2}}, (2, 5)),
        ({"exchange": {"fragments": 1, "delay": 0}}, (1, 0)),
    ],
)
def test_streaming_diloco_has_fragments_and_a_delay_that_fit_its_period(settings, wanted):
    method = method_of("streaming-diloco", **settings)
    assert (method.fragments, method.delay) == wanted


def test_demo_is_not_clipped_since_all_signs_have_the_same_length():
    method = method_of("demo", optimizer={"clip_grad_norm": 5.0})
    assert method.inner.clip_grad_norm is None
    assert method.optimizer.clip_grad_norm == 5, "what the user set is recorded"
    assert method_of("sync-sgd").inner.clip_grad_norm == OptimizerConfig().clip_grad_norm


def test_demo_needs_all_gradients_since_it_moves_whole_chunks():
    assert method_of("demo", optimizer={"momentum": 0.0}).needs_all_gradients
    plain = {"momentum": 0.0, "weight_decay": 0.0}
    assert not method_of("sync-sgd", optimizer=plain).needs_all_gradients


def test_the_settings_that_a_run_records_fit_another_period():
    """The fragments and the delay of streaming-diloco are not recorded: they follow the period."""
    config = TrainConfig(method=MethodConfig(name="streaming-diloco"))
    recorded = filled_in(config, resolve(config))
    again = dataclasses.replace(recorded, method=MethodConfig(name="streaming-diloco", period=16))
    assert (resolve(again).fragments, resolve(again).delay) == (4, 3)


def own_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def test_a_users_function_may_make_the_optimizer_of_des_loc():
    config = TrainConfig(method=MethodConfig(name="des-loc"))
    assert resolve(config, own_optimizer=own_adamw).rule.inner == ("exp_avg", "exp_avg_sq")


def test_other_methods_have_neither_fragments_nor_delay():
    method = method_of("diloco")
    assert (method.fragments, method.delay) == (1, 0)


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("dc-asgd", {"exchange": {"compression": "int8"}}, "exchange.compression must be none fo"),
        ("scaffold", {"optimizer": {"name": "adamw"}}, "optimizer.name must be sgd for scaffold"),
        ("scaffold", {"optimizer": {"momentum": 0.9}}, "optimizer.momentum must be 0 for scaffo"),
        (
            "des-loc",
            {"optimizer": {"name": "sgd", "momentum": 0.9}},
            "optimizer.name must be an optimizer with exp_avg and exp_avg_sq in its state for ",
        ),
        (
            "des-loc",
            {"optimizer": {"name": "muon"}},
            "optimizer.name must be an optimizer with exp",
        ),
        ("des-loc", {"exchange": {"compression": "int8"}}, "exchange.compression must be none for"),
    ],
)
def test_settings_that_a_method_cannot_bear_are_refused(name, settings, sentence):
    with pytest.raises(ConfigError) as caught:
        method_of(name, **settings)
    assert str(caught.value).startswith(sentence)


# what it is for


def losses_on_skewed_quadratics(rule, *, rounds=200, steps=10, lr=0.05):
    """Return the distance of the center from the optimum of two quadratics of other curvature."""
    optimum = (1.0 * 4.0 + 9.0 * -1.0) / 10.0  # of 1/2*(x - 4)^2 + 9/2*(x + 1)^2
    center = center_at(rule, 0)
    replicas = [replica_at(rule, 0, rates=steps * lr, lr=lr) for _ in range(2)]
    for _ in range(rounds):
        for replica, curvature, minimum in zip(replicas, (1.0, 9.0), (4.0, -1.0), strict=True):
            for _ in range(steps):
                gradient = curvature * (replica.x - minimum)
                rule.tilt_(gradient, replica, center.state)
                replica.x.sub_(gradient, alpha=lr)
        meet(center, *replicas)
    return abs(center.weights.item() - optimum)


def test_scaffold_finds_the_optimum_where_local_sgd_stops_beside_it():
    from raydl.methods.local_sgd import LocalSGD

    assert losses_on_skewed_quadratics(LocalSGD()) > 0.1
    assert losses_on_skewed_quadratics(Scaffold()) < 1e-6


@pytest.mark.parametrize(
    "method",
    [
        "sparse-loco",
        "streaming-diloco",
        "restarted-diloco",
        "slowmo",
        "fednova",
        "scaffold",
        "demo",
        "des-loc",
    ],
)
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path, method):
    exchange = ExchangeConfig(fragments=2, delay=1, timeout_s=20.0)
    config = scenario_config(method, epochs=6, lr=0.05, period=4, exchange=exchange)
    assert_same_bits_after_an_interruption(config, tmp_path)


def test_a_replica_that_starts_over_forgets_what_it_keeps():
    config = scenario_config("scaffold", epochs=2, lr=0.05, period=4)
    ensemble = Ensemble(config, num_workers=2, images=tiny_images(31)).join()
    ensemble.run()
    replica = ensemble.workers[1].replica
    assert replica.state_dict()["vectors"]["control"].any()
    replica.start_over(replica.flat.weights.clone(), replica.flat.buffers.clone())
    assert not replica.state_dict()["vectors"]["control"].any()
