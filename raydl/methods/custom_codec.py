"""A codec of the user, ``module:Class``, tried on small vectors before any actor starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raydl.core.codecs import parse_codec
from raydl.errors import ConfigError
from raydl.methods.custom_rule import trial_values

_LENGTHS = (1, 7, 64, 5000)


def try_codec(text: str) -> None:
    """Try the codec of a setting if it is the user's.

    Args:
        text: a setting that ``parse_codec`` accepts.

    Raises:
        ConfigError: if a method is missing or changes its values, a size is wrong, equal values do
            not give equal bytes, another instance decodes otherwise, or the error is larger than
            the vector: error feedback would grow.
        Exception: any exception of the codec's own code.
    """
    codec: Any = parse_codec(text)
    if type(codec).__module__.startswith("raydl."):
        return
    for method in ("num_bytes", "encode", "decode"):
        if not callable(getattr(codec, method, None)):
            raise ConfigError(
                "exchange.compression", f"{text} has no {method}() (docs/algorithms.md)"
            )
    for length in _LENGTHS:
        if problem := _problem_of(codec, parse_codec(text), trial_values(length)):
            raise ConfigError(
                "exchange.compression", f"{text}, tried on {length} values: {problem}"
            )


def _problem_of(codec: Any, other: Any, values: Tensor) -> str:
    """Return what is wrong with a codec, or ''."""
    before, num_bytes = values.clone(), codec.num_bytes(len(values))
    if not isinstance(num_bytes, int) or num_bytes < 0:
        return f"num_bytes() must return a number of bytes, got {num_bytes!r}"
    message: Any = codec.encode(values)
    is_bytes = isinstance(message, Tensor) and message.dtype == torch.uint8
    if not is_bytes or message.shape != (num_bytes,):
        found = (message.dtype, list(message.shape)) if isinstance(message, Tensor) else message
        return f"encode() must return uint8, shape [{num_bytes}] as num_bytes() says, got {found}"
    memory = torch.empty_like(message)
    codec.encode(values, out=memory)
    if not torch.equal(memory, message):
        return "encode() must give equal bytes for equal values, also into out"
    # Sender and receiver have each their own.
    decoded = [torch.full_like(values, junk) for junk in (7.0, float("nan"))]
    for each, out in zip((codec, other), decoded, strict=True):
        each.decode(message, out=out)
    if not torch.equal(*decoded):
        return "decode() must overwrite all of out, and depend on the message alone"
    if not torch.equal(values, before):
        return "encode() must not change the values"
    if float((decoded[0] - values).norm()) > float(values.norm()) * (1 + 1e-6):
        return "it leaves out more than there is, so what error feedback keeps would grow"
    return ""
