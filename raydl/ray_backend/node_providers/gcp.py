"""The node provider for Google Cloud."""

from __future__ import annotations

from typing import Any

from ray.autoscaler._private.gcp.node_provider import GCPNodeProvider

from raydl.ray_backend.node_providers.settings import gcp_cluster


class GcpNodeProvider(GCPNodeProvider):  # type: ignore[misc]
    """Ray's provider for Google Cloud, without its creation of an account and a key."""

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration of the cluster; see ``gcp_cluster``."""
        return gcp_cluster(cluster_config)
