"""The node provider for Azure."""

from __future__ import annotations

import copy
from typing import Any

from ray.autoscaler._private._azure.node_provider import AzureNodeProvider as RayAzureNodeProvider

from raydl.ray_backend.node_providers.settings import azure_cluster, azure_provider


class AzureNodeProvider(RayAzureNodeProvider):  # type: ignore[misc]
    """Ray's provider for Azure, without its creation of a network and an identity."""

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration of the cluster; see ``azure_cluster``."""
        return azure_cluster(cluster_config)

    def _create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        # Several threads create nodes: each needs the settings of its own node type.
        own = copy.copy(self)
        own.provider_config = azure_provider(self.provider_config, node_config)
        super(AzureNodeProvider, own)._create_node(node_config, tags, count)

    def cleanup_cluster_resources(self) -> None:
        """Keep network and identities, which ``ray down`` would delete: Ray did not create them."""
