"""The resources that pending workers need, that the cluster has, and that could be added."""

from types import SimpleNamespace

import pytest
from ray._private.state import state
from ray.core.generated.autoscaler_pb2 import ClusterConfig
from ray.exceptions import RpcError

from raydl.config import ScalingConfig
from raydl.errors import ResourceError
from raydl.ray_backend import cluster
from raydl.ray_backend import session as ray_session
from raydl.ray_backend.cluster import what_is_missing


def test_the_needs_of_pending_workers_and_the_nodes_to_add_are_one_sentence():
    need, have = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 8.0, "memory": 1e9}
    start = "2 more workers with {CPU: 1, GPU: 1} each; the cluster has {CPU: 8, GPU: 0}"
    assert what_is_missing(2, need, have) == start
    types = [("gpu", {"CPU": 4.0, "GPU": 1.0, "memory": 1e9}, 3), ("cpu", {"CPU": 4.0}, 9)]
    assert what_is_missing(2, need, have, types) == (
        f"{start}; the autoscaler can add gpu nodes with {{CPU: 4, GPU: 1}}, 3 in all"
    )
    assert what_is_missing(2, need, have, types[1:]) == (
        f"{start}; no node the autoscaler can add is large enough"
    )
    assert what_is_missing(1, {"tpu": 1.0}, {}).startswith("1 more worker with {tpu: 1};")
    assert what_is_missing(2, need, have, free={"CPU": 2.0}) == f"{start}, free {{CPU: 2, GPU: 0}}"


def test_the_nodes_that_a_worker_avoids_are_named_in_order():
    nodes = [f"{number:04x}" for number in range(64)]
    selector = cluster.worker_options(ScalingConfig(), not_on=set(nodes))["label_selector"]
    assert selector == {"ray.io/node-id": f"!in({','.join(nodes)})"}


@pytest.fixture(autouse=True)
def places(monkeypatch):
    """Fake the process id of an actor in Ray's table: 0 if it is not placed yet."""

    def entry_of(actor_id):
        return {"Pid": int(actor_id, 16), "Address": {"NodeID": "ab12"}}

    monkeypatch.setattr(state, "actor_table", entry_of)


def workers(*process_ids):
    return [SimpleNamespace(_ray_actor_id=pid.to_bytes(4)) for pid in process_ids]


@pytest.mark.parametrize(
    ("process_ids", "num_workers", "sentence"),
    [
        ((), 3, ""),
        ((7, 8, 9), 3, "3 starting workers"),
        ((7, 8, 9), (1, 3), "3 starting workers; 1 is enough"),
        ((7, 0), 2, "1 starting worker and 1 more worker with {CPU: 0.5}; the cluster "
         "has {CPU: 2}, free {CPU: 0}"),
        ((0, 0), (2, 3), "2 more workers with {CPU: 0.5} each; the cluster has {CPU: 2}, "
         "free {CPU: 0}; 2 are enough"),
    ],
)  # fmt: skip
def test_a_placed_worker_is_starting_and_only_the_others_need_resources(
    monkeypatch, process_ids, num_workers, sentence
):
    monkeypatch.setattr(cluster, "_known_to_add", [])
    monkeypatch.setattr(cluster, "nodes_to_add", list)
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(cluster.ray, "available_resources", dict)
    scaling = ScalingConfig(num_workers=num_workers, cpus_per_worker=0.5)
    assert cluster.describe_pending(workers(*process_ids), scaling) == sentence


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_workers": 1, "gpus_per_worker": 1}, "requests 1 worker with {CPU: 1, GPU: 1}, "
         "but this machine has {CPU: 2, GPU: 0}, enough for 0; lower scaling.gpus_per_worker, "
         "or set RAY_ADDRESS=auto if a Ray cluster runs here"),
        ({"num_workers": 3}, "requests 3 workers with {CPU: 1} each, but this machine has "
         "{CPU: 2}, enough for 2; lower scaling.num_workers or scaling.cpus_per_worker, "
         "or set RAY_ADDRESS=auto if a Ray cluster runs here"),
        ({"num_workers": 2}, None),
        ({"num_workers": (2, 9)}, None),
    ],
)  # fmt: skip
def test_too_many_workers_for_a_machine_are_refused_with_the_setting_to_lower(
    monkeypatch, settings, sentence
):
    node = {"Alive": True, "Resources": {"CPU": 2.0, "memory": 1e9}}
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [node, {**node, "Alive": False}])
    if sentence is None:
        cluster.check_room(ScalingConfig(**settings))
        return
    with pytest.raises(ResourceError) as caught:
        cluster.check_room(ScalingConfig(**settings))
    assert str(caught.value) == f"scaling.num_workers {sentence}"


def test_a_cluster_that_does_not_report_its_resources_does_not_end_the_run(monkeypatch):
    def fail():
        raise RpcError("gone")

    monkeypatch.setattr(cluster.ray, "cluster_resources", fail)
    sentence = "2 more workers with {CPU: 1} each; Ray does not report the cluster's resources"
    assert cluster.describe_pending(workers(0, 0), ScalingConfig()) == sentence


def test_nodes_of_an_autoscaler_are_requested_until_they_are_known(monkeypatch):
    answers = iter([RpcError("gone"), [], [("spot", {"CPU": 4.0}, 8)]])

    def answer():
        value = next(answers)
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(cluster, "_known_to_add", [])
    monkeypatch.setattr(cluster, "nodes_to_add", answer)
    monkeypatch.setattr(cluster.ray, "cluster_resources", dict)
    monkeypatch.setattr(cluster.ray, "available_resources", dict)
    sentences = [cluster.describe_pending(workers(0), ScalingConfig()) for _ in range(4)]
    assert ["spot" in sentence for sentence in sentences] == [False, False, True, True]


def test_nodes_that_ray_up_may_start_are_read_on_its_head(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "get_cluster_config", lambda: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ray_session.nodes_to_add() == []
    (tmp_path / "ray_bootstrap_config.yaml").write_text(
        "max_workers: 8\n"
        "head_node_type: head\n"
        "available_node_types:\n"
        "  head: {resources: {CPU: 2}}\n"
        "  spot: {resources: {CPU: 4, GPU: 1}, max_workers: 20}\n"
        "  none: {resources: {CPU: 4}, max_workers: 0}\n"
    )
    assert ray_session.nodes_to_add() == [("spot", {"CPU": 4, "GPU": 1}, 8)]
    (tmp_path / "ray_bootstrap_config.yaml").write_text("- not\n- a cluster\n")
    assert ray_session.nodes_to_add() == []


def test_nodes_that_kubernetes_may_start_are_read_from_ray(monkeypatch):
    config = ClusterConfig()
    config.node_group_configs.add(name="gpu", max_count=-1, resources={"CPU": 4, "GPU": 1})
    config.node_group_configs.add(name="off", max_count=0, resources={"CPU": 4})
    monkeypatch.setattr(state, "get_cluster_config", lambda: config)
    assert ray_session.nodes_to_add() == [("gpu", {"CPU": 4, "GPU": 1}, -1)]
    assert what_is_missing(1, {"GPU": 1.0}, {}, ray_session.nodes_to_add()).endswith(
        "; the autoscaler can add gpu nodes with {CPU: 4, GPU: 1}"
    )
