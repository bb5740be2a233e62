"""Codecs as a user writes them, good ones and bad ones."""

import torch


class Halves:
    """Values as float16."""

    def num_bytes(self, num_values):
        return 2 * num_values

    def encode(self, values, *, out=None):
        message = torch.empty(2 * len(values), dtype=torch.uint8) if out is None else out
        message.view(torch.float16).copy_(values)
        return message

    def decode(self, message, *, out):
        return out.copy_(message.clone().view(torch.float16))


class WithArguments(Halves):
    def __init__(self, bits):
        self.bits = bits


class WithoutDecode:
    num_bytes, encode = Halves.num_bytes, Halves.encode


class WrongSize(Halves):
    def num_bytes(self, num_values):
        return 3 * num_values


class Changing(Halves):
    def encode(self, values, *, out=None):
        message = super().encode(values, out=out)
        values.zero_()
        return message


class Counting(Halves):
    """Gives other bytes each time."""

    count = 0

    def encode(self, values, *, out=None):
        self.count += 1
        return super().encode(values * self.count, out=out)


class Remembering(Halves):
    """Decodes by what this instance has encoded."""

    scale = 1.0

    def encode(self, values, *, out=None):
        self.scale = 2.0
        return super().encode(values / 2, out=out)

    def decode(self, message, *, out):
        return super().decode(message, out=out).mul_(self.scale)


class Growing(Halves):
    def decode(self, message, *, out):
        return super().decode(message, out=out).mul_(3)
