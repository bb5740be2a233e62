"""The settings that a cluster's file must have, since these providers create nothing."""

from __future__ import annotations

import copy
import os
from typing import Any

from raydl.errors import ConfigError
from raydl.ray_backend import ray_version

Cluster = dict[str, Any]
"""The contents of a cluster's file, as Ray's launcher passes them."""

AZURE_OWN = ("msi", "nsg", "subnet")
"""Settings that Ray's Azure provider reads for all nodes; here each node type has its own."""


def gcp_cluster(cluster: Cluster) -> Cluster:
    """Return a cluster on Google Cloud with the public key in each of its node types.

    Raises:
        ConfigError: if raydl was not tested with this version of Ray, a node type has no service
            account or network, or there is no key.
    """
    _check_ray()
    cluster = copy.deepcopy(cluster)
    user, public_key = _ssh(cluster)
    for name, node in _nodes(cluster):
        _need(node, name, ("serviceAccounts", "networkInterfaces"))
        node["metadata"] = _with_key(node.get("metadata", {}), f"{user}:{public_key}")
    return _prepared(cluster)


def azure_cluster(cluster: Cluster) -> Cluster:
    """Return a cluster on Azure with the public key in each of its node types.

    Raises:
        ConfigError: if raydl was not tested with this version of Ray, the provider has no
            subscription, a node type no identity, security group or subnet, or there is no key.
    """
    _check_ray()
    cluster = copy.deepcopy(cluster)
    for key in ("subscription_id", "unique_id"):
        if not cluster["provider"].get(key):
            raise ConfigError(f"provider.{key}", "must be given")
    user, public_key = _ssh(cluster)
    for name, node in _nodes(cluster):
        parameters = node.get("azure_arm_parameters", {})
        _need(parameters, f"{name}.azure_arm_parameters", AZURE_OWN)
        parameters.update(adminUsername=user, publicKey=public_key)
    return _prepared(cluster)


def azure_provider(provider: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """Return the provider's settings with the identity and the network of one node type."""
    parameters = node["azure_arm_parameters"]
    return {**provider, **{key: parameters[key] for key in AZURE_OWN}}


def _check_ray() -> None:
    """Refuse another version of Ray, whose providers may grant or create what these do not."""
    if not ray_version.is_tested():
        raise ConfigError(
            "provider.module",
            f"extends a private class of Ray, which raydl's tests have seen only in "
            f"{' and '.join(ray_version.TESTED)}; install ray=={ray_version.TESTED[-1]} here and "
            f"on the head, or use Ray's own provider, which grants more",
        )


def _with_key(metadata: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a copy of a machine's metadata with one more SSH key, unless it has the key.

    A copy, since node types of a file may share their metadata.
    """
    items = metadata.get("items", [])
    keys = [line for i in items if i["key"] == "ssh-keys" for line in i["value"].splitlines()]
    keys += [] if key in keys else [key]
    others = [i for i in items if i["key"] != "ssh-keys"]
    return {**metadata, "items": [*others, {"key": "ssh-keys", "value": "\n".join(keys)}]}


def _prepared(cluster: Cluster) -> Cluster:
    cluster["head_node"] = {}  # settings for the head only, which Ray's launcher reads
    return cluster


def _nodes(cluster: Cluster) -> list[tuple[str, dict[str, Any]]]:
    """Return (dotted name, settings) of each node type."""
    types = cluster["available_node_types"]
    return [(f"available_node_types.{n}.node_config", t["node_config"]) for n, t in types.items()]


def _need(settings: dict[str, Any], name: str, keys: tuple[str, ...]) -> None:
    for key in keys:
        if not settings.get(key):
            raise ConfigError(f"{name}.{key}", "must be given: this provider makes none")


def _ssh(cluster: Cluster) -> tuple[str, str]:
    """Return (user, public key), read from beside the private key."""
    private = cluster["auth"].get("ssh_private_key")
    if not private:
        raise ConfigError("auth.ssh_private_key", "must be given: this provider makes none")
    path = os.path.expanduser(f"{private}.pub")
    try:
        with open(path) as file:
            public_key = file.read().strip()
    except OSError as error:
        problem = (
            f"has no public key beside it: {path}: {error.strerror}; create both with ssh-keygen"
        )
        raise ConfigError("auth.ssh_private_key", problem) from None
    return cluster["auth"]["ssh_user"], public_key
