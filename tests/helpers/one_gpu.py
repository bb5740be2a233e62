"""NCCL among processes that share one GPU.

NCCL refuses two ranks of one host on the same GPU. So each process says that it is a host of its
own, and they sum over sockets, as between machines.
"""

import os

from raydl.models import find


def own_host(name):
    """Return the environment of a process that NCCL takes for a host of its own."""
    return {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo"}


def lenet(image_shape, num_classes):
    """Return a LeNet; the process that builds it is a host of its own."""
    os.environ |= own_host(str(os.getpid()))
    return find("lenet")(image_shape, num_classes)
