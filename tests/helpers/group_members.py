"""A member of a user's group, without its tensors; tests make Ray actors of subclasses."""

import os
import time

import torch

import raydl
from raydl.errors import ExchangeError


class GroupMember:
    """A user's actor that uses only the group of raydl; a subclass has ``sum``."""

    def __init__(self):
        self.num_sums = 0

    def pid(self):
        return os.getpid()

    def state(self):
        return self.num_sums

    def form(self, members, member, generation, name, **more):
        torch.set_num_threads(1)
        raydl.init_collective_group(members, member, name, generation=generation, **more)
        self.name, self.rank, self.num_sums = name, members.index(member), 0

    def sum_until_it_fails(self):
        """Sum until an error; return the error and the time when it was raised."""
        try:
            while True:
                self.sum()
        except ExchangeError as error:
            return error, time.time()
