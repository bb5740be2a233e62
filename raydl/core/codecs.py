"""Codecs of exchanged vectors: from float32 to bytes, and back.

The size of a message depends on the number of values alone; its byte order is the machine's. Equal
values give equal bytes. Non-finite values stay non-finite, so that a diverged run is noticed. A
codec keeps no state; error feedback is in ``raydl.core.compression``.

Sources: Seide et al. 2014 (1-bit SGD) and Karimireddy et al. 2019, arXiv 1901.09847 (signs with one
scale); Aji & Heafield 2017, arXiv 1704.05021, and Stich et al. 2018, arXiv 1809.07599 (top-k);
SparseLoCo, arXiv 2508.15706 (top-k of each chunk, 2 bits a value); Streaming DiLoCo, arXiv
2501.18512 (E3M0); after Alistarh et al. 2017, arXiv 1610.02132 (QSGD; int8, without its coin).
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from raydl.config.custom_code import instantiate
from raydl.errors import ConfigError

_SCRATCH = 1 << 20
"""Values that are encoded at a time, so that scratch memory stays at a few MiB."""
_LARGEST_CHUNK = 1 << 24


class Codec(Protocol):
    """Encodes a float32 vector as bytes and decodes it. It keeps no state."""

    name: str
    """The setting that ``parse_codec`` accepts."""

    def num_bytes(self, num_values: int) -> int:
        """Return the exact size of a message in bytes."""

    def encode(self, values: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the message: uint8, shape [num_bytes(n)], on the device of the values."""

    def decode(self, message: Tensor, *, out: Tensor) -> Tensor:
        """Overwrite ``out``, float32, shape [n]; the message may start at any byte."""


class _Cast:
    """Casts each value to another dtype."""

    name: str
    dtype: torch.dtype

    def num_bytes(self, num_values: int) -> int:
        return self.dtype.itemsize * num_values

    def encode(self, values: Tensor, *, out: Tensor | None = None) -> Tensor:
        message = message_for(self, values, out)
        message.view(self.dtype).copy_(values)
        return message

    def decode(self, message: Tensor, *, out: Tensor) -> Tensor:
        return out.copy_(_aligned(self, message, out).view(self.dtype))


class Plain(_Cast):
    """Values without encoding: decodes to the same bits."""

    name, dtype = "none", torch.float32


class BFloat16(_Cast):
    """Values rounded to the nearest bfloat16, ties to even: relative error at most 2^-8."""

    name, dtype = "bf16", torch.bfloat16


class _Blocks:
    """Some bits per value, and per block of values a scale s as float32.

    The message is all s, then the levels of all values, packed. A block with a non-finite value
    decodes to non-finite values as a whole.

    Args:
        block_size: values that share one s; the last block may be shorter. Its bits must be whole
            bytes.
    """

    name: str
    bits: int

    def __init__(self, block_size: int = 1024) -> None:
        self.block_size = block_size

    def num_bytes(self, num_values: int) -> int:
        """Return the bytes of all levels, and 4 per block."""
        return -(-num_values * self.bits // 8) + 4 * -(-num_values // self.block_size)

    def encode(self, values: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return all s, then all levels."""
        message = message_for(self, values, out)
        for part, scale, levels in self._groups(values, message):
            rows = pad(part, (0, -len(part) % self.block_size)).view(-1, self.block_size)
            scale.copy_(self._scales(rows, len(part)))
            codes = self._levels(rows, scale[:, None]).view(-1)[: len(part)]
            pack(codes, self.bits, out=levels)
        return message

    def decode(self, message: Tensor, *, out: Tensor) -> Tensor:
        """Return the value of each level, times the s of its block."""
        for part, scale, levels in self._groups(out, _aligned(self, message, out)):
            steps = scale.repeat_interleave(self.block_size)[: len(part)]
            codes = unpack(levels, self.bits, len(part))
            torch.mul(self._values(codes), steps, out=part)
        return out

    def _groups(self, values: Tensor, message: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (values, scales, bytes of the levels) of several blocks at a time."""
        num_blocks = -(-len(values) // self.block_size)
        scales, levels = message[: 4 * num_blocks].view(torch.float32), message[4 * num_blocks :]
        step = max(1, _SCRATCH // self.block_size)
        for block in range(0, num_blocks, step):
            first, last = block * self.block_size, (block + step) * self.block_size
            packed = levels[first * self.bits // 8 : last * self.bits // 8]
            yield values[first:last], scales[block : block + step], packed

    def _scales(self, rows: Tensor, num_values: int) -> Tensor:
        """Return s of each row, shape [rows]: its largest magnitude, NaN if any value is.

        Args:
            rows: the blocks; zeros follow the last value.
            num_values: number of values.
        """
        low, high = rows.aminmax(dim=1)
        return torch.maximum(low.abs(), high.abs())

    def _levels(self, rows: Tensor, scales: Tensor) -> Tensor:
        """Return the level of each value, 0 to 2^bits - 1; ``scales`` has shape [rows, 1]."""
        raise NotImplementedError

    def _values(self, levels: Tensor) -> Tensor:
        """Return the values of levels if s is 1, float32."""
        raise NotImplementedError


class Int8Blocks(_Blocks):
    """One byte per value: q = round(v / s * 127) ; m = q / 127 * s, with an error of at most s/254.

    s is the largest magnitude of the block.
    """

    name, bits = "int8", 8

    def _levels(self, rows: Tensor, scales: Tensor) -> Tensor:
        # Divide first: 127 / s may overflow. NaN becomes q = 0; it comes from 0 / 0 in a block of
        # zeros, or from a block whose s is not finite.
        return (
            (rows / scales).mul_(127).round_().nan_to_num_(nan=0).to(torch.int8).view(torch.uint8)
        )

    def _values(self, levels: Tensor) -> Tensor:
        return levels.view(torch.int8).to(torch.float32).div_(127)


class E3M0(_Blocks):
    """Four bits per value, a sign and three of an exponent: 0, or s times 1, 1/2, ... 1/64.

    s is the largest magnitude of the block. Each value becomes the nearest of these.
    """

    name, bits = "e3m0", 4
    _LARGEST = 7
    """The code of the exponent 0; 0 is the code of the value 0."""

    def _levels(self, rows: Tensor, scales: Tensor) -> Tensor:
        # |v| / s = mantissa * 2^exponent, with a mantissa in [1/2, 1). Below 3/4, the half of
        # 2^exponent is nearer than 2^exponent.
        mantissa, exponent = torch.frexp((rows / scales).abs_().nan_to_num_(nan=0))
        code = exponent + self._LARGEST - (mantissa < 0.75).to(torch.int32)
        # Between 0 and 1/64, the limit is 1/128.
        least = (exponent > -self._LARGEST).to(torch.int32)
        code = torch.where(mantissa == 0, 0, code.clamp(0, self._LARGEST).maximum(least))
        return code + 8 * rows.signbit()

    def _values(self, levels: Tensor) -> Tensor:
        code = (levels & 7).to(torch.float32)
        size = torch.where(code == 0, 0.0, torch.exp2(code - self._LARGEST))
        return torch.where(levels >= 8, -size, size)


class Sign(_Blocks):
    """One bit per value, its sign: m = s or -s, where s is the mean magnitude of the block."""

    name, bits = "sign", 1

    def _scales(self, rows: Tensor, num_values: int) -> Tensor:
        counts = torch.full((len(rows),), self.block_size, device=rows.device)
        counts[-1] = num_values - self.block_size * (len(rows) - 1)
        return rows.abs().sum(dim=1).div_(counts)

    def _levels(self, rows: Tensor, scales: Tensor) -> Tensor:
        return rows.signbit()

    def _values(self, levels: Tensor) -> Tensor:
        return 1.0 - 2.0 * levels.to(torch.float32)


class TopK:
    """The k = max(1, ceil(share * n)) values of largest magnitude; all others become 0.

    NaN ranks above infinities, infinities above numbers; among equal magnitudes the lower index
    is sent. The message is the indices as int32 in ascending order, then their values as float32.
    n < 2^31.

    Args:
        share: in (0, 1], read as a decimal number: 0.07 of 100 is 7, not 8.
    """

    def __init__(self, share: float) -> None:
        self.name, self.share = f"topk:{share}", share

    def num_bytes(self, num_values: int) -> int:
        """Return 8 * k, or 0 for no values."""
        k = math.ceil(Fraction(str(self.share)) * num_values)
        return 8 * min(max(1, k), num_values)

    def encode(self, values: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the indices and the values of the k largest."""
        message = message_for(self, values, out)
        half = len(message) // 2
        k = half // 4
        magnitudes = values.view(torch.int32) & 0x7FFFFFFF  # integers in the same order, NaN last
        # Which of several equal values torch.topk returns is undefined, so only its smallest
        # magnitude is used.
        limit = magnitudes.topk(k, sorted=False).values.amin() if k else 0
        above = (magnitudes > limit).nonzero()[:k, 0]
        equal = (magnitudes == limit).nonzero()[: k - len(above), 0]
        largest = torch.cat([above, equal]).sort().values
        message[:half].view(torch.int32).copy_(largest)
        message[half:].view(torch.float32).copy_(values[largest])
        return message

    def decode(self, message: Tensor, *, out: Tensor) -> Tensor:
        """Return the sent values, and zeros elsewhere."""
        message, half = _aligned(self, message, out), len(message) // 2
        indices, sent = message[:half].view(torch.int32), message[half:].view(torch.float32)
        return out.zero_().index_copy_(0, indices.long(), sent)


class ChunkTopK:
    """Of each chunk the k values of largest magnitude, 2 bits each; all others become 0.

    The bits are the sign, and whether it is of the larger half of the k. Each half is sent as its
    mean magnitude. NaN ranks above infinities, infinities above numbers; among equal magnitudes the
    lower place is sent. The message is the two means of each chunk as float32, then a code per
    value that is sent, packed: its place in the chunk, its sign, its half. With k = 64 of 4096 that
    are 120 bytes instead of 16,384.

    Args:
        k: values of each chunk; of a shorter one at the end all are sent.
        chunk: values of a chunk, 2 or more.
    """

    def __init__(self, k: int, chunk: int = 4096) -> None:
        self.name, self.k, self.chunk = f"chunk-topk:{k}/{chunk}", min(k, chunk), chunk
        self._place_bits = (chunk - 1).bit_length()
        self._bits = self._place_bits + 2

    def num_bytes(self, num_values: int) -> int:
        """Return 8 per chunk, and the bits of the codes."""
        return 8 * -(-num_values // self.chunk) + -(-self._num_sent(num_values) * self._bits // 8)

    def _num_sent(self, num_values: int) -> int:
        whole, rest = divmod(num_values, self.chunk)
        return whole * self.k + min(self.k, rest)

    def encode(self, values: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the means of all chunks, then all codes."""
        message = message_for(self, values, out)
        means, packed = self._parts(message, len(values))
        codes = torch.empty(self._num_sent(len(values)), dtype=torch.int32, device=values.device)
        step = self.chunk * max(1, _SCRATCH // self.chunk)
        for start in range(0, len(values), step):
            part = values[start : start + step]
            whole = len(part) // self.chunk * self.chunk
            row, first = start // self.chunk, start // self.chunk * self.k
            for rows in (part[:whole].view(-1, self.chunk), part[None, whole:]):
                if rows.numel():
                    found = self._codes(rows, means[row : row + len(rows)]).view(-1)
                    codes[first : first + len(found)] = found
                    row, first = row + len(rows), first + len(found)
        pack(codes, self._bits, out=packed)
        return message

    def _codes(self, rows: Tensor, means: Tensor) -> Tensor:
        """Write the two means of each row, shape [rows, 2]; return the codes, [rows, k]."""
        places = torch.arange(rows.shape[1], device=rows.device)
        magnitudes = rows.view(torch.int32) & 0x7FFFFFFF  # integers in the same order, NaN last
        # Which of several equal values torch.topk returns is undefined: no two of these are equal.
        keys = (magnitudes.long() << self._place_bits) + (self.chunk - 1 - places)
        largest = keys.topk(min(self.k, rows.shape[1]), dim=1).values
        chosen = self.chunk - 1 - (largest & ((1 << self._place_bits) - 1))
        sent, half = rows.gather(1, chosen), (chosen.shape[1] + 1) // 2
        means[:, 0] = sent[:, :half].abs().mean(dim=1)
        means[:, 1] = sent[:, half:].abs().sum(dim=1) / max(1, chosen.shape[1] - half)
        is_small = torch.arange(chosen.shape[1], device=rows.device) >= half
        return chosen + (sent.signbit() << self._place_bits) + (is_small << self._place_bits + 1)

    def decode(self, message: Tensor, *, out: Tensor) -> Tensor:
        """Return the means with their signs at the places that were sent, zeros elsewhere."""
        means, packed = self._parts(_aligned(self, message, out), len(out))
        codes = unpack(packed, self._bits, self._num_sent(len(out))).long()
        rows = torch.arange(len(codes), device=out.device) // self.k
        places = rows * self.chunk + (codes & ((1 << self._place_bits) - 1))
        sizes = means[rows, codes >> self._place_bits + 1]
        is_negative = (codes >> self._place_bits & 1).bool()
        return out.zero_().index_copy_(0, places, torch.where(is_negative, -sizes, sizes))

    def _parts(self, message: Tensor, num_values: int) -> tuple[Tensor, Tensor]:
        """Return (means, shape [chunks, 2], packed codes) of a message."""
        start = 8 * -(-num_values // self.chunk)
        return message[:start].view(torch.float32).view(-1, 2), message[start:]


def pack(codes: Tensor, bits: int, *, out: Tensor) -> None:
    """Write the lowest bits of each code, one code after the other, the lowest bit first.

    Args:
        codes: whole numbers of 0 or more, below 2^bits, shape [m].
        bits: bits of a code.
        out: uint8, shape [ceil(m * bits / 8)].
    """
    if bits == 8:
        out.copy_(codes)
        return
    # Codes that share no byte with half of another are joined whole, others bit by bit.
    width = bits if 8 % bits == 0 else 1
    dtype = torch.uint8 if width == bits else torch.int32
    places = torch.arange(0, bits, width, dtype=dtype, device=codes.device)
    within = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
    for start in range(0, len(codes), _SCRATCH // 8):
        some = codes[start : start + _SCRATCH // 8].to(dtype)
        each = (pad(some, (0, -len(some) % 8))[:, None] >> places) & ((1 << width) - 1)
        joined = (each.to(torch.uint8).view(-1, len(within)) << within).sum(1, dtype=torch.uint8)
        part = out[start * bits // 8 :][: -(-len(some) * bits // 8)]
        part.copy_(joined[: len(part)])


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the codes that ``pack`` wrote, shape [count]: uint8 if 8 is a multiple of the bits,
    else int32.
    """
    if bits == 8:
        return packed[:count]
    width = bits if 8 % bits == 0 else 1
    dtype = torch.uint8 if width == bits else torch.int32
    codes = torch.empty(count, dtype=dtype, device=packed.device)
    places = torch.arange(0, bits, width, dtype=dtype, device=packed.device)
    within = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    for start in range(0, count, _SCRATCH // 8):
        part = codes[start : start + _SCRATCH // 8]
        some = packed[start * bits // 8 :][: -(-len(part) * bits // 8)]
        each = ((some[:, None] >> within) & ((1 << width) - 1)).view(-1)
        each = each[: len(part) * len(places)].view(-1, len(places)).to(dtype)
        part.copy_((each << places).sum(1, dtype=dtype))
    return codes


_SIMPLE: dict[str, Codec] = {
    codec.name: codec for codec in (Plain(), BFloat16(), Int8Blocks(), E3M0(), Sign())
}


class SideBySide:
    """Encodes several vectors of equal length, which follow each other in one, one by one.

    Args:
        codec: encodes each of them.
        num_vectors: how many there are.
    """

    def __init__(self, codec: Codec, num_vectors: int) -> None:
        self.name = codec.name
        self._codec = codec
        self._num_vectors = num_vectors

    def num_bytes(self, num_values: int) -> int:
        """Return the exact size of a message in bytes."""
        return self._num_vectors * self._stride(num_values)

    def _stride(self, num_values: int) -> int:
        """Return the bytes from one message to the next, a multiple of four."""
        return -(-self._codec.num_bytes(num_values // self._num_vectors) // 4) * 4

    def encode(self, values: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the messages of all vectors, one after the other."""
        message = message_for(self, values, out)
        size = self._codec.num_bytes(len(values) // self._num_vectors)
        rows = message.view(self._num_vectors, -1)
        rows[:, size:] = 0
        for vector, row in zip(values.view(self._num_vectors, -1), rows, strict=True):
            self._codec.encode(vector, out=row[:size])
        return message

    def decode(self, message: Tensor, *, out: Tensor) -> Tensor:
        """Overwrite ``out`` with all vectors."""
        size = self._codec.num_bytes(len(out) // self._num_vectors)
        rows = message.view(self._num_vectors, -1)
        for vector, row in zip(out.view(self._num_vectors, -1), rows, strict=True):
            self._codec.decode(row[:size], out=vector)
        return out


def side_by_side(codec: Codec, num_vectors: int) -> Codec:
    """Return a codec for messages of several vectors."""
    return codec if num_vectors == 1 else SideBySide(codec, num_vectors)


def parse_codec(text: str) -> Codec:
    """Return the codec of a setting.

    Args:
        text: ``none``, ``bf16``, ``int8``, ``e3m0``, ``sign``, ``topk:SHARE``, ``chunk-topk:K`` or
            ``chunk-topk:K/CHUNK``, or ``module:Class`` for a codec of the user.

    Raises:
        ConfigError: for any other text, or if the class cannot be imported or needs arguments.
    """
    if text in _SIMPLE:
        return _SIMPLE[text]
    name, _, value = text.partition(":")
    with contextlib.suppress(ValueError):
        if name == "topk" and 0 < float(value) <= 1:
            return TopK(float(value))
        k, _, chunk = value.partition("/")
        if name == "chunk-topk" and int(k) >= 1 and 2 <= int(chunk or 4096) <= _LARGEST_CHUNK:
            return ChunkTopK(int(k), int(chunk or 4096))
    known = [*_SIMPLE, "topk", "chunk-topk"]
    if value.isidentifier() and name not in known:
        codec: Any = instantiate("exchange.compression", text)
        codec.name = text
        return codec  # type: ignore[no-any-return]
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"; did you mean {near[0]}?" if near and near[0] != name else ""
    raise ConfigError(
        "exchange.compression",
        f"must be {', '.join(_SIMPLE)}, topk:SHARE with SHARE in (0, 1], chunk-topk:K or "
        f"chunk-topk:K/CHUNK, or module:Class, got {text!r}{hint}",
    )


def message_for(codec: Codec, values: Tensor, out: Tensor | None) -> Tensor:
    """Return ``out``, which must start at a multiple of 4 bytes, or memory for a message."""
    assert values.dtype == torch.float32, values.dtype
    num_bytes = codec.num_bytes(len(values))
    if out is None:
        return torch.empty(num_bytes, dtype=torch.uint8, device=values.device)
    assert out.shape == (num_bytes,), (codec.name, out.shape, num_bytes)
    return out


def _aligned(codec: Codec, message: Tensor, out: Tensor) -> Tensor:
    """Return the message, copied if it is not aligned for a view of four-byte numbers."""
    assert len(message) == codec.num_bytes(len(out)), (codec.name, message.shape, out.shape)
    return message.clone() if message.storage_offset() % 4 else message
