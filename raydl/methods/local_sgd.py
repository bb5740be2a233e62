"""Local SGD: local steps, then the mean of all replicas."""

from __future__ import annotations

from raydl.methods.outer import Outer


class LocalSGD(Outer):
    """Local steps, then the mean of all replicas.

    D_i = c - x_i ; c <- c - lr*mean(D) ; x_i <- c, where lr = 1 is c <- mean(x_i).
    """

    name, source = "local-sgd", "local SGD, FedAvg"
    outer = (1.0, 0.0)
