"""Every codec, checked by hand, and error feedback."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydl.core.codecs import (
    E3M0,
    BFloat16,
    ChunkTopK,
    Int8Blocks,
    Plain,
    Sign,
    TopK,
    pack,
    parse_codec,
    unpack,
)
from raydl.core.compression import ErrorFeedback, redistribute_residuals
from raydl.errors import ConfigError

CODECS = [
    Plain(),
    BFloat16(),
    *(kind(size) for kind in (Int8Blocks, E3M0, Sign) for size in (1024, 8)),
    Int8Blocks(block_size=7),
    TopK(0.01),
    TopK(0.3),
    ChunkTopK(64),
    ChunkTopK(3, 16),
    ChunkTopK(1, 2),
    ChunkTopK(9, 7),
]
LENGTHS = [0, 1, 5, 1023, 1024, 1025, 3000]
every_codec = pytest.mark.parametrize(
    "codec", CODECS, ids=lambda c: f"{c.name}-{getattr(c, 'block_size', '')}"
)


def vector(length: int, seed: int = 0) -> torch.Tensor:
    """Return values of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-12, 12, (length,), generator=generator)
    return torch.ldexp(torch.randn(length, generator=generator), exponents)


def decode(codec, values: torch.Tensor) -> torch.Tensor:
    """Return the values after encoding and decoding."""
    return codec.decode(codec.encode(values), out=torch.full_like(values, 7.0))


def bits(values: torch.Tensor) -> list[int]:
    return values.view(torch.int32).tolist()


def test_plain_returns_the_same_bits():
    values = torch.tensor([1.5, -0.0, math.inf, math.nan, 1e-45])
    assert bits(decode(Plain(), values)) == bits(values)
    assert Plain().encode(torch.tensor([1.0])).tolist() == [0, 0, 0x80, 0x3F]


def test_bfloat16_rounds_to_nearest_and_ties_to_even():
    ulp = 2.0**-7  # of the numbers from 1 to 2
    values = torch.tensor([1 + 0.4 * ulp, 1 + 0.5 * ulp, 1 + 1.5 * ulp, -1 - 0.6 * ulp])
    assert decode(BFloat16(), values).tolist() == [1.0, 1.0, 1 + 2 * ulp, -1 - ulp]


def test_int8_by_hand_with_a_short_last_block():
    codec = Int8Blocks(block_size=3)  # steps of 2 and of 1
    values = torch.tensor([254.0, -100.9, 3.1, -127.0, 0.4])
    message = codec.encode(values)
    assert message[:8].view(torch.float32).tolist() == [254.0, 127.0]
    assert message[8:].view(torch.int8).tolist() == [127, -50, 2, -127, 0]
    assert decode(codec, values).tolist() == [254.0, -100.0, 4.0, -127.0, 0.0]


def test_int8_keeps_a_block_of_zeros_and_the_greatest_magnitude_of_a_block():
    values = torch.tensor([0.0, -0.0, 3.4e38, 1e38, 1e-45, 0.0, -0.3])
    result = decode(Int8Blocks(block_size=2), values)
    assert result[[0, 1, 2, 4, 5, 6]].tolist() == values[[0, 1, 2, 4, 5, 6]].tolist()
    assert result[3].item() == pytest.approx(1e38, rel=0.02)


def test_e3m0_by_hand():
    """s is 128; a level is 2^-6 to 1 of it, and the limit between two is in the middle."""
    values = torch.tensor([128.0, -96.1, 95.9, 2.0, -3.1, 2.9, 1.01, -0.99, 0.0])
    codec = E3M0(block_size=16)
    message = codec.encode(values)
    assert message[:4].view(torch.float32).tolist() == [128.0]
    assert message[4:].tolist() == [0xF7, 0x16, 0x1A, 0x81, 0x00]  # the first value lowest
    wanted = [128.0, -128.0, 64.0, 2.0, -4.0, 2.0, 2.0, 0.0, 0.0]
    assert decode(codec, values).tolist() == wanted


def test_e3m0_takes_the_nearest_of_its_levels():
    values = torch.cat([torch.tensor([1.0]), vector(1000).tanh()])
    levels = torch.tensor([0.0, *(2.0**-n for n in range(7))])
    levels = torch.cat([levels, -levels])
    nearest = (values[:, None] - levels).abs().amin(1)
    error = (decode(E3M0(), values) - values).abs()
    assert torch.equal(error, nearest)


def test_sign_by_hand_with_a_short_last_block():
    codec, values = Sign(block_size=8), torch.tensor([1.0, -2.0, 3.0] + [0.0] * 5 + [-5.0, 3.0])
    message = codec.encode(values)
    assert message[:8].view(torch.float32).tolist() == [6 / 8, 8 / 2]
    assert message[8:].tolist() == [0b10, 0b1]
    assert decode(codec, values).tolist() == [0.75, -0.75] + [0.75] * 6 + [-4.0, 4.0]


def test_chunk_topk_by_hand():
    codec = ChunkTopK(3, 8)
    values = torch.tensor([0.0, -5.0, 1.0, 3.0, 0.5, 2.0, 0.0, 0.0, 7.0, -8.0])
    message = codec.encode(values)
    means = message[:16].view(torch.float32).tolist()
    assert means == [4.0, 2.0, 8.0, 7.0]  # of the larger and the smaller half of each chunk
    assert len(message) == 16 + 4  # five codes of 3 + 2 bits
    assert decode(codec, values).tolist() == [0, -4, 0, 4, 0, 2, 0, 0, 7, -8]


def test_chunk_topk_takes_the_lower_place_of_equal_magnitudes():
    values = torch.tensor([1.0, -2.0, 2.0, 3.0, 2.0, -2.0])
    assert decode(ChunkTopK(3, 6), values).tolist() == [0, -2.5, 2.0, 2.5, 0.0, 0.0]


def test_chunk_topk_needs_120_bytes_for_the_64_largest_of_4096():
    """12 bits for the place, one for the sign, one for the half, and two means."""
    assert ChunkTopK(64).num_bytes(4096) == 64 * 14 // 8 + 8 == 120
    assert ChunkTopK(64).num_bytes(10 * 4096 + 100) == 8 * 11 + (10 * 64 + 64) * 14 // 8


def test_chunk_topk_encodes_a_vector_of_several_passes_like_its_chunks():
    values, codec = vector(2**20 + 9000), ChunkTopK(5, 64)
    parts = values.split(2**14)
    assert torch.equal(decode(codec, values), torch.cat([decode(codec, part) for part in parts]))


@given(st.integers(1, 24), st.lists(st.integers(0, 2**24 - 1), max_size=70))
def test_codes_are_unpacked_as_they_were_packed(bits, numbers):
    codes = torch.tensor([number % 2**bits for number in numbers], dtype=torch.int32)
    packed = torch.full((-(-len(codes) * bits // 8),), 77, dtype=torch.uint8)
    pack(codes, bits, out=packed)
    assert unpack(packed, bits, len(codes)).tolist() == codes.tolist()


def test_topk_by_hand():
    codec, values = TopK(0.4), torch.tensor([1.0, -5.0, 0.5, 3.0, -2.0])
    message = codec.encode(values)
    assert message[:8].view(torch.int32).tolist() == [1, 3]
    assert message[8:].view(torch.float32).tolist() == [-5.0, 3.0]
    assert decode(codec, values).tolist() == [0.0, -5.0, 0.0, 3.0, 0.0]


def test_topk_takes_the_lower_index_of_equal_magnitudes():
    values = torch.tensor([1.0, -2.0, 2.0, 3.0, 2.0, -2.0])
    assert decode(TopK(0.5), values).tolist() == [0.0, -2.0, 2.0, 3.0, 0.0, 0.0]
    assert decode(TopK(0.5), torch.zeros(6)).tolist() == [0.0] * 6
    assert TopK(0.5).encode(torch.zeros(6))[:12].view(torch.int32).tolist() == [0, 1, 2]


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 1.0])
def test_topk_keeps_the_largest(share):
    values = vector(1000)
    result = decode(TopK(share), values)
    kept = result != 0
    assert kept.sum() == 1000 * share
    assert torch.equal(result[kept], values[kept])
    assert share == 1 or values[kept].abs().min() >= values[~kept].abs().max()


@pytest.mark.parametrize("length", LENGTHS)
def test_sizes_are_exact(length):
    blocks = {0: 0, 1: 1, 5: 1, 1023: 1, 1024: 1, 1025: 2, 3000: 3}[length]
    kept = {0: 0, 1: 1, 5: 1, 1023: 11, 1024: 11, 1025: 11, 3000: 30}[length]
    sizes = [4 * length, 2 * length, length + 4 * blocks, 8 * kept]
    codecs = [Plain(), BFloat16(), Int8Blocks(), TopK(0.01)]
    assert [codec.num_bytes(length) for codec in codecs] == sizes


def test_the_share_is_read_as_a_decimal_number():
    assert math.ceil(0.07 * 100) == 8
    assert TopK(0.07).num_bytes(100) == 8 * 7


@every_codec
@pytest.mark.parametrize("length", LENGTHS)
def test_a_message_is_bytes_of_the_stated_size_and_all_of_out_is_overwritten(codec, length):
    values = vector(length)
    before = values.clone()
    message = codec.encode(values)
    assert (message.dtype, message.shape) == (torch.uint8, (codec.num_bytes(length),))
    memory = torch.full_like(message, 77)
    assert codec.encode(values, out=memory) is memory
    assert torch.equal(memory, message)  # the same values also give the same bytes
    assert torch.equal(values, before)
    outs = [torch.full((length,), junk) for junk in (7.0, math.nan)]
    assert all(codec.decode(message, out=out) is out for out in outs)
    assert torch.equal(*outs)


@every_codec
@pytest.mark.parametrize("length", LENGTHS)
def test_a_message_may_start_at_any_byte(codec, length):
    values = vector(length)
    message = codec.encode(values)
    for start in (1, 2, 3, 4):
        gathered = torch.cat([torch.zeros(start, dtype=torch.uint8), message])
        result = codec.decode(gathered[start:], out=torch.empty(length))
        assert torch.equal(result, decode(codec, values))


@pytest.mark.parametrize("length", LENGTHS)
def test_bfloat16_has_a_relative_error_of_one_256th_at_most(length):
    values = vector(length)
    assert ((decode(BFloat16(), values) - values).abs() <= values.abs() * 2**-8).all()


@pytest.mark.parametrize("block_size", [1, 7, 1024, 2**21])
@pytest.mark.parametrize("length", LENGTHS)
def test_int8_has_an_error_of_half_a_step_at_most(length, block_size):
    values = vector(length)
    error = (decode(Int8Blocks(block_size), values) - values).abs()
    for part, off in zip(values.split(block_size), error.split(block_size), strict=True):
        if len(part):
            assert off.max() <= part.abs().max() / 254 * (1 + 1e-4)


def test_int8_encodes_a_vector_of_several_passes_like_its_blocks():
    values, codec = vector(2**21 + 1500), Int8Blocks()
    parts = values.split(2**16)
    assert torch.equal(decode(codec, values), torch.cat([decode(codec, part) for part in parts]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("length", [1, 5, 1025])
@every_codec
def test_non_finite_values_stay_non_finite(codec, length, bad):
    for at in (0, length // 2, length - 1):
        values = vector(length)
        values[at] = bad
        assert codec.encode(values).equal(codec.encode(values.clone()))
        assert not decode(codec, values)[at].isfinite()


def test_int8_spoils_only_the_block_of_a_non_finite_value():
    values = torch.tensor([1.0, math.inf, 127.0, -3.0])
    result = decode(Int8Blocks(block_size=2), values)
    assert result[:2].isnan().all()
    assert result[2:].tolist() == [127.0, -3.0]


@every_codec
def test_all_messages_and_the_residual_sum_to_all_values(codec):
    feedback = ErrorFeedback(codec)
    sent, magnitude, received = torch.zeros(3, 3000, dtype=torch.float64)
    for seed in range(50):
        values = vector(3000, seed)
        message = feedback.encode(values)
        feedback.commit()
        sent += values
        magnitude += values.abs()
        received += codec.decode(message, out=torch.empty(3000))
        assert torch.equal(codec.decode(message, out=torch.empty(3000)), feedback.decoded)
    # Each of 50 messages may round |v + e| <= sum |v| as float32 does.
    assert ((received + feedback.residual - sent).abs() <= 100 * 2**-24 * magnitude).all()
    assert codec.name == "none" or feedback.residual.abs().max() > 0


@given(st.lists(st.integers(-64, 64), min_size=3, max_size=3), st.integers(1, 8))
def test_topk_with_feedback_loses_nothing_of_whole_numbers(numbers, rounds):
    feedback, received = ErrorFeedback(TopK(0.3)), torch.zeros(3)
    for _ in range(rounds):
        feedback.encode(torch.tensor(numbers, dtype=torch.float32))
        feedback.commit()
        received += feedback.decoded
    assert (received + feedback.residual).tolist() == [rounds * n for n in numbers]


def test_the_residual_of_plain_stays_zero():
    feedback = ErrorFeedback(Plain())
    for seed in range(5):
        feedback.encode(vector(100, seed))
        feedback.commit()
        assert feedback.residual.tolist() == [0.0] * 100


def test_a_message_that_counts_half_moves_half_of_what_it_leaves_out():
    """v = (4, 2), m = (4, 0): of each value the receiver has counted s * m."""
    residuals = []
    for share in (0.0, 0.5, 1.0, 2.0):
        feedback = ErrorFeedback(TopK(0.5))
        feedback.encode(torch.tensor([4.0, 2.0]))
        feedback.commit(share)
        residuals.append(feedback.residual.tolist() or [0, 0])
    assert residuals == [[0, 0], [0, 1], [0, 2], [0, 4]]


@every_codec
def test_what_messages_count_and_the_residual_sum_to_all_values_for_any_shares(codec):
    feedback = ErrorFeedback(codec)
    received, sent = torch.zeros(300), torch.zeros(300)
    for seed, share in enumerate([1.0, 0.25, 0.0, 3.0, 1.0, 0.01, 1.5, 0.0, 1.0]):
        values = torch.randn(300, generator=torch.Generator().manual_seed(seed))
        feedback.encode(values, share=float(share > 0))
        feedback.commit(share)
        received += share * feedback.decoded
        sent += share * values
    torch.testing.assert_close(received + feedback.residual, sent, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "codec",
    [TopK(0.1), ChunkTopK(10, 50), Int8Blocks(), E3M0(), Sign(8), BFloat16(), Plain()],
    ids=lambda c: c.name,
)
@pytest.mark.parametrize("share", [0.1, 1.0, 1.9, 2.5, 4.0])
def test_what_is_left_out_does_not_grow_if_a_worker_always_counts_more_than_others(codec, share):
    """A sender of a gradient with most of the samples, round after round."""
    feedback, generator = ErrorFeedback(codec), torch.Generator().manual_seed(0)
    norms = []
    for _ in range(120):
        feedback.encode(torch.randn(100, generator=generator))
        feedback.commit(share)
        norms.append(feedback.norm())
    assert max(norms[60:]) < 3 * max(1.0, *norms[:60])


def test_an_ignored_message_leaves_the_residual_also_in_the_state_after_it():
    feedback = ErrorFeedback(TopK(0.5))
    feedback.encode(torch.tensor([4.0, 2.0]))
    feedback.commit()
    feedback.encode(torch.zeros(2), share=0.0)
    assert feedback.decoded.tolist() == [0, 2]
    assert feedback.sent_state_dict()["residual"].tolist() == [0, 2]
    feedback.commit()
    assert feedback.residual.tolist() == [0, 2]


def test_a_message_without_effect_can_be_forgotten():
    feedback = ErrorFeedback(TopK(0.5))
    feedback.encode(torch.tensor([4.0, 2.0]))
    feedback.message = (3, 7)
    assert feedback.open_norm() == 2
    feedback.discard()
    assert (feedback.message, feedback.is_open, feedback.norm()) == (None, False, 0)
    with pytest.raises(AssertionError, match="commit at most once"):
        feedback.commit()


def test_error_feedback_by_hand():
    feedback = ErrorFeedback(TopK(0.5))
    decoded_and_residual = []
    for _ in range(3):
        feedback.encode(torch.tensor([3.0, 2.0]))
        feedback.commit()
        decoded_and_residual.append((feedback.decoded.tolist(), feedback.residual.tolist()))
    assert decoded_and_residual == [([3, 0], [0, 2]), ([0, 4], [3, 0]), ([6, 0], [0, 2])]


@every_codec
def test_an_encode_without_commit_leaves_the_residual(codec):
    feedback, calm = ErrorFeedback(codec), ErrorFeedback(codec)
    for seed in range(3):
        failed = feedback.encode(vector(300, seed + 100)).clone()
        kept = feedback.residual.clone()
        assert torch.equal(feedback.encode(vector(300, seed + 100)), failed)
        assert torch.equal(feedback.residual, kept)
        assert torch.equal(feedback.encode(vector(300, seed)), calm.encode(vector(300, seed)))
        feedback.commit()
        calm.commit()
        assert torch.equal(feedback.residual, calm.residual)


def test_a_message_is_committed_once():
    feedback = ErrorFeedback(BFloat16())
    with pytest.raises(AssertionError):
        feedback.commit()
    feedback.encode(vector(3))
    feedback.commit()
    with pytest.raises(AssertionError):
        feedback.commit()


@every_codec
def test_a_loaded_state_gives_the_same_messages(codec):
    first, second = ErrorFeedback(codec), ErrorFeedback(codec)
    second.load_state_dict(first.state_dict())  # the state of a codec that was never used
    second.encode(vector(300, 9))
    second.commit()
    for seed in range(4):
        first.encode(vector(300, seed))
        first.commit()
    first.encode(vector(300, 7))  # this message is not in the state
    state = first.state_dict()
    second.load_state_dict(state)
    for seed in range(4, 8):
        assert torch.equal(first.encode(vector(300, seed)), second.encode(vector(300, seed)))
        first.commit()
        second.commit()
    third = ErrorFeedback(codec)
    third.load_state_dict(state)  # later messages did not change it
    assert torch.equal(third.residual, state["residual"])


def test_residuals_are_redistributed_to_other_spans_of_the_same_parameters():
    before = {(0, 200): ErrorFeedback(Int8Blocks()), (200, 300): ErrorFeedback(Int8Blocks())}
    left = torch.zeros(300)
    for (start, stop), feedback in before.items():
        feedback.encode(vector(300)[start:stop])
        feedback.commit()
        left[start:stop] = feedback.residual
    assert left.abs().max() > 0
    after = redistribute_residuals(before, [(0, 100), (100, 300)])
    assert torch.equal(torch.cat([after[0, 100].residual, after[100, 300].residual]), left)
    assert {feedback.codec.name for feedback in after.values()} == {"int8"}
    unused = {(0, 300): ErrorFeedback(Int8Blocks())}
    assert redistribute_residuals(unused, [(0, 100), (100, 300)]) == {}


def test_redistributed_residuals_of_a_worker_that_counts_more_are_sent_in_parts():
    before = ErrorFeedback(BFloat16())
    before.encode(vector(300))
    before.commit(4.0)
    after = redistribute_residuals({(0, 300): before}, [(0, 100), (100, 300)])
    for (start, stop), feedback in after.items():
        feedback.encode(torch.zeros(stop - start))
        expected = before.residual[start:stop] / 4
        torch.testing.assert_close(feedback.decoded, expected, rtol=0.01, atol=0)


def test_a_state_of_another_length_is_refused():
    feedback = ErrorFeedback(Plain())
    feedback.load_state_dict({"residual": torch.zeros(4)})
    with pytest.raises(AssertionError):
        feedback.encode(vector(5))


def test_the_memory_is_allocated_once():
    feedback = ErrorFeedback(Int8Blocks())
    places = set()
    for seed in range(6):
        places.add(feedback.encode(vector(2000, seed)).data_ptr())
        feedback.commit()
        places |= {feedback.residual.data_ptr(), feedback.decoded.data_ptr()}
    assert len(places) == 4  # message, decoded, and two that take turns as the residual


def distance(codec, *, feedback: bool, workers: list[torch.Tensor], lr=0.02, steps=1000) -> float:
    """Return the final distance of gradient descent to the minimum, 1 at the start.

    Each worker has its own target; the minimum is the mean of the targets.
    """
    minimum = torch.stack(workers).mean(0)
    curvature, x = torch.linspace(0.1, 1, len(minimum)), torch.zeros_like(minimum)
    feedbacks = [ErrorFeedback(codec) for _ in workers]
    for _ in range(steps):
        for target, worker in zip(workers, feedbacks, strict=True):
            if not feedback:
                worker.load_state_dict({"residual": torch.zeros(0)})
            worker.encode(curvature * (x - target))
            worker.commit()
        x -= lr * torch.stack([worker.decoded for worker in feedbacks]).mean(0)
    return ((x - minimum).norm() / minimum.norm()).item()


def test_topk_reaches_the_minimum_with_feedback_and_is_slower_without():
    # Without feedback it takes longer: the largest gradients of a single worker shrink.
    target = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert distance(TopK(0.1), feedback=True, workers=[target], lr=0.1) < 1e-4
    assert distance(TopK(0.1), feedback=False, workers=[target], lr=0.1) > 5e-3


@pytest.mark.parametrize(
    ("codec", "near", "far"), [(TopK(0.1), 0.1, 0.9), (Int8Blocks(), 0.04, 0.12)]
)
def test_workers_that_disagree_find_the_minimum_with_feedback_only(codec, near, far):
    # Large gradients cancel in the sum but displace small ones, which do not cancel.
    target = torch.randn(100, generator=torch.Generator().manual_seed(0))
    apart = torch.zeros(100)
    apart[:10] = 100.0
    workers = [target + apart, target - apart]
    assert distance(codec, feedback=True, workers=workers) < near
    assert distance(codec, feedback=False, workers=workers) > far


def test_feedback_needs_a_lower_lr_than_topk_alone():
    # The residual is sent at once, like a gradient that is many steps old.
    target = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert distance(TopK(0.1), feedback=True, workers=[target], lr=0.5, steps=200) > 1
    assert distance(TopK(0.1), feedback=False, workers=[target], lr=0.5, steps=200) < 0.05


@pytest.mark.parametrize("text", ["none", "bf16", "int8", "topk:0.01", "topk:1.0"])
def test_the_name_of_a_codec_is_its_setting(text):
    assert parse_codec(text).name == text


def test_a_setting_is_parsed_to_its_codec():
    kinds = [Plain, BFloat16, Int8Blocks, E3M0, Sign, TopK]
    for text, kind in zip(
        ["none", "bf16", "int8", "e3m0", "sign", "topk:1e-3"], kinds, strict=True
    ):
        assert type(parse_codec(text)) is kind
    assert parse_codec("topk:1").num_bytes(10) == 80
    assert parse_codec("chunk-topk:8").name == "chunk-topk:8/4096"
    assert parse_codec("chunk-topk:8/64").num_bytes(64) == 8 + 8


@pytest.mark.parametrize(
    "text",
    ["", "zip", "topk", "topk:", "topk:0", "topk:1.01", "topk:-1", "topk:nan", "topk:x", "int8:9"],
)
def test_any_other_text_is_refused_with_one_sentence(text):
    with pytest.raises(ConfigError) as caught:
        parse_codec(text)
    assert str(caught.value) == (
        "exchange.compression must be none, bf16, int8, e3m0, sign, topk:SHARE with SHARE in "
        f"(0, 1], chunk-topk:K or chunk-topk:K/CHUNK, or module:Class, got {text!r}"
    )


@pytest.mark.parametrize(
    ("text", "near"),
    [("INT8", "int8"), ("int4", "int8"), ("bfloat16", "bf16"), ("top:0.1", "topk")],
)
def test_the_error_suggests_the_nearest_name(text, near):
    with pytest.raises(ConfigError, match=rf"got '{text}'; did you mean {near}\?$"):
        parse_codec(text)
