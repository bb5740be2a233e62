"""Ray accepts the cluster configs, and their headers are true.

Ray's `prepare_config` fills in the defaults of a cloud, and `validate_config` checks the result
against the schema in Ray's wheel (ray-schema.json) and Ray's own rules; neither needs the library
of a cloud. The function with which Ray's autoscaler reads KubeRay's files, which also calls
`validate_config`, reads ours; a list in this module has the fields of the custom resources.
"""

import copy
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.autoscaler._private.kuberay.node_provider import (
    IN_CLUSTER_CA_CERT_PATH,
    IN_CLUSTER_TOKEN_PATH,
)
from ray.autoscaler._private.util import prepare_config, validate_config
from repository import ROOT

from raydl.cli.commands import COMMANDS
from raydl.cli.options import parse_train
from raydl.launch.spot_notice.__main__ import main as spot_notice
from raydl.launch.submission import HOME_RUNS
from raydl.methods import METHODS

FOLDER = ROOT / "cluster_configs"
CLOUDS = ("aws", "gcp", "azure")
KUBERAY = ("kuberay-rayjob", "kuberay-raycluster")
NAMES = ("local", *(f"{cloud}-spot" for cloud in CLOUDS), *KUBERAY)
SECTIONS = ("Costs", "Start", "Submit", "Watch", "Stop")
GKE_SPOT_S, CONNECTS_S = 15, 5


def text_of(name):
    return (FOLDER / f"{name}.yaml").read_text()


def config_of(name):
    return yaml.safe_load(text_of(name))


def header_of(name):
    """Return the comment lines at the top of a file, without their number signs."""
    lines = []
    for line in text_of(name).splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[2:])
    return lines


def commands_of(name, section=None):
    """Return the commands of a header, or of one of its sections, as lists of words."""
    found, now = [], ""
    for line in header_of(name):
        if heading := re.match(r"(Costs|Once|Start|Submit|Watch|Stop)\b", line):
            now = heading[1]
        if line.startswith("  $ ") and section in (None, now):
            found.append(shlex.split(line.removeprefix("  $ ")))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_header_says_the_costs_and_how_to_start_submit_watch_and_stop(name):
    headings = [w for w in header_of(name) if w.split(",")[0].split(":")[0] in SECTIONS]
    assert tuple(re.match(r"\w+", line)[0] for line in headings) == SECTIONS
    for section in SECTIONS[1:]:
        assert commands_of(name, section), section
    costs = "\n".join(header_of(name)).partition("Costs:")[2]
    assert costs.startswith(" nothing") or "Orders of magnitude: prices change" in costs


def test_every_config_is_tested():
    assert {p.stem for p in FOLDER.glob("*.yaml")} == set(NAMES)


# Ray's checks


@pytest.mark.parametrize("cloud", CLOUDS)
def test_ray_accepts_the_config_of_a_cloud(cloud, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = prepare_config(config_of(f"{cloud}-spot"))
    validate_config(config)
    provider = config["provider"]
    # Our provider replaces Ray's own where that would grant too many rights.
    assert (provider.get("module") or provider["type"]).split(".")[-2:][0] == cloud


def test_ray_accepts_the_local_config():
    # Without prepare_config, which would read defaults that are not in the wheel.
    validate_config(config_of("local"))


def test_ray_rejects_a_mistake_in_a_config(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = config_of("aws-spot")
    config["available_node_types"]["cpu-spot"]["max_worker"] = 3
    with pytest.raises(Exception, match="max_worker"):
        validate_config(prepare_config(config))


@pytest.mark.parametrize("name", KUBERAY)
def test_the_autoscaler_reads_the_worker_types_of_kuberay_files(name):
    resource = {"metadata": {"name": "x", "namespace": "default"}, "spec": cluster_spec(name)}
    config = _derive_autoscaling_config_from_ray_cr(resource)
    types = config["available_node_types"]
    assert types["headgroup"]["resources"]["CPU"] == 0
    assert (types["cpu-spot"]["min_workers"], types["cpu-spot"]["max_workers"]) == (0, 8)
    assert types["gpu-spot"]["resources"]["GPU"] == 1
    assert "GPU" not in types["cpu-spot"]["resources"]
    assert config["idle_timeout_minutes"] == 2


# The clusters


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_head_is_on_demand_without_cpus_and_workers_are_0_or_more_spot_machines(cloud):
    config = config_of(f"{cloud}-spot")
    types = config["available_node_types"]
    head = types.pop(config["head_node_type"])
    assert not is_spot(head)
    assert (head["resources"], head["max_workers"]) == ({"CPU": 0}, 0)
    assert "--num-cpus=0" in config["head_start_ray_commands"][-1]
    assert {name: "GPU" in t["resources"] for name, t in types.items()} == {
        "cpu-spot": False, "gpu-spot": True,
    }  # fmt: skip
    assert all(is_spot(t) and t["min_workers"] == 0 for t in types.values())
    assert sum(t["max_workers"] for t in types.values()) == config["max_workers"]


def test_on_gcp_a_gpu_worker_waits_for_its_driver_with_a_bound():
    types = config_of("gcp-spot")["available_node_types"]
    assert [n for n, t in types.items() if "install-nvidia-driver" in strings_in(t)] == ["gpu-spot"]
    # These commands run before the container starts, in place of those of all nodes.
    assert [n for n, t in types.items() if "initialization_commands" in t] == ["gpu-spot"]
    [wait] = types["gpu-spot"]["initialization_commands"]
    assert re.fullmatch(r"timeout [1-6]00 bash -c 'until nvidia-smi; do sleep 5; done'", wait)


def is_spot(node_type):
    """Whether a node type of a cloud is a spot machine."""
    node = node_type["node_config"]
    return (
        node.get("InstanceMarketOptions", {}).get("MarketType") == "spot"
        or node.get("scheduling", {}).get("provisioningModel") == "SPOT"
        or node.get("azure_arm_parameters", {}).get("priority") == "Spot"
    )


@pytest.mark.parametrize("cloud", CLOUDS)
def test_every_node_requires_the_token_and_has_it(cloud):
    config = config_of(f"{cloud}-spot")
    assert "-e RAY_AUTH_MODE=token" in config["docker"]["run_options"]
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert ["ray", "get-auth-token", "--generate"] in commands_of(f"{cloud}-spot", "Once")


@pytest.mark.parametrize("cloud", CLOUDS)
def test_every_worker_waits_for_the_notice_of_its_own_cloud(cloud, monkeypatch):
    config = config_of(f"{cloud}-spot")
    *_, start, listen = config["worker_start_ray_commands"]
    assert start.startswith("ray start --address=$RAY_HEAD_IP:6379")
    words = listen.split()
    # flock: the launcher may run this again while the first process still waits.
    assert words[:4] == ["nohup", "flock", "--nonblock", "/tmp/spot_notice.lock"]
    assert words[4:7] == ["python", "-m", "raydl.launch.spot_notice"]
    assert words[-1] == "&"
    options = words[7 : words.index(">>")]
    assert options == ["--provider", cloud]
    monkeypatch.setattr("raydl.launch.spot_notice.__main__.watch", lambda *_, **__: 0)
    assert spot_notice(options) == 0


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_files_copied_to_the_nodes_exist_and_are_enough_to_install(cloud):
    config = config_of(f"{cloud}-spot")
    mounts = {k: v for k, v in config["file_mounts"].items() if k.startswith("~/raydl/")}
    for remote, local in mounts.items():
        assert remote == f"~/raydl/{local}"
        assert (ROOT / local).exists(), local
    assert needed_to_install() <= set(mounts.values())


@pytest.mark.parametrize("cloud", CLOUDS)
def test_pip_installs_a_copy_since_root_owns_the_folder_around_the_mounts(cloud):
    assert config_of(f"{cloud}-spot")["setup_commands"] == [
        "rm -rf /tmp/raydl && cp -r ~/raydl /tmp/raydl && "
        "pip install --constraint /tmp/raydl/constraints.txt /tmp/raydl"
    ]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_runs_on_the_heads_disk_are_in_folders_of_its_machine_that_the_containers_user_owns(cloud):
    config = config_of(f"{cloud}-spot")
    mounts = [option.removeprefix("-v ") for option in config["docker"]["head_run_options"]]
    folders = {inside: outside for outside, inside in (mount.split(":") for mount in mounts)}
    assert set(folders) == {"/home/ray/runs", f"/home/ray/{HOME_RUNS}"}
    # Before the container starts: Docker would make root the owner of a folder that is missing.
    words = config["initialization_commands"][-1].split()
    assert words[:3] == ["sudo", "install", "--directory"]
    assert words[3:7] == ["--owner", "1000", "--group", "100"]
    assert words[7:] == list(folders.values())
    for storage, _ in runs_of(f"{cloud}-spot"):
        assert "://" in storage or storage in folders


@pytest.mark.parametrize("page", ["clusters", "jobs"])
def test_the_docs_say_where_kuberays_runs_survive(page):
    [volume] = {storage for name in KUBERAY for storage, _ in runs_of(name)}
    assert f"`--storage-path {volume}`" in (ROOT / f"docs/{page}.md").read_text()


@pytest.mark.parametrize("cloud", CLOUDS)
def test_with_images_of_your_own_the_setup_commands_may_be_empty_as_the_docs_say(
    cloud, monkeypatch
):
    monkeypatch.chdir(ROOT)
    config = config_of(f"{cloud}-spot")
    types = config["available_node_types"]
    # These are all images, so that no node is without raydl.
    assert [n for n, t in types.items() if "worker_image" in t.get("docker", {})] == ["gpu-spot"]
    assert not {"head_image", "worker_image"} & set(config["docker"])
    page = (ROOT / "docs/clusters.md").read_text()
    for name in ("docker.image", "worker_image", "gpu-spot", "setup_commands: []"):
        assert f"`{name}`" in page
    config["setup_commands"] = []
    validate_config(prepare_config(config))


def project(pattern):
    """Return the only match in pyproject.toml of a pattern with one group."""
    [found] = re.findall(pattern, (ROOT / "pyproject.toml").read_text(), re.M)
    return found


def needed_to_install():
    """Return the files that pip needs to build the package."""
    texts = {project(r'^readme = "(.+)"'), project(r'^license-files = \["(.+)"\]')}
    return {"raydl", "pyproject.toml", "constraints.txt", *texts}


def test_the_image_contains_the_files_to_install_and_to_run_a_job():
    dockerfile = (FOLDER / "Dockerfile").read_text()
    copied = {w for line in re.findall(r"^COPY (.+) \S+$", dockerfile, re.M) for w in line.split()}
    copied = {w for w in copied if not w.startswith("--")}
    assert needed_to_install() | {"jobs"} == copied
    for name in copied:
        assert (ROOT / name).exists(), name
    workdir = re.search(r"^WORKDIR (\S+)", dockerfile, re.M)[1]
    entrypoint = config_documents("kuberay-rayjob")["RayJob"]["spec"]["entrypoint"]
    assert entrypoint.split()[1] == f"{workdir}/jobs/train.py"


def test_the_folder_of_the_image_is_created_by_the_user_that_builds_in_it():
    dockerfile = (FOLDER / "Dockerfile").read_text()
    workdir = re.search(r"^WORKDIR (\S+)", dockerfile, re.M)[1]
    assert f"RUN mkdir -p {workdir}\nWORKDIR {workdir}\n" in dockerfile
    built = dockerfile.index("RUN pip install")
    assert not re.search(r"^USER ", dockerfile[:built], re.M)


def test_the_image_runs_as_an_unprivileged_user_whatever_its_base():
    dockerfile = (FOLDER / "Dockerfile").read_text()
    user = re.findall(r"^USER (\S+)", dockerfile, re.M)[-1]
    assert int(user) > 0  # a number, which Kubernetes can check with runAsNonRoot
    for name in KUBERAY:
        for pod in pods_of(name):
            assert pod["securityContext"]["runAsUser"] == int(user)


def test_all_files_name_one_version_of_ray_and_one_of_raydl():
    texts = [(FOLDER / "Dockerfile").read_text(), *map(text_of, NAMES)]
    ray = {v for t in texts for v in re.findall(r"rayproject/ray:([\d.]+)-py311", t)}
    ray |= {v for t in texts for v in re.findall(r'rayVersion: "([\d.]+)"', t)}
    assert len(ray) == 1
    ours = {v for t in texts for v in re.findall(r"my-registry/raydl:([\d.]+)", t)}
    assert ours == {project(r'^version = "(.+)"')}
    oldest = project(r'^    "ray\[default\]>=([\d.]+)",')
    assert ray.pop().startswith(f"{oldest}.")


def test_the_command_of_the_header_fills_in_the_image_of_aws():
    [words] = [w for w in commands_of("aws-spot") if w[0] == "sed" and "ami-" in w[2]]
    _, pattern, _, end = words[2].split("/")
    assert end == ""
    changed = re.sub(pattern, "ami-1234", text_of("aws-spot"), flags=re.M)
    types = yaml.safe_load(changed)["available_node_types"].values()
    assert {t["node_config"]["ImageId"] for t in types} == {"ami-1234"}


# KubeRay's custom resources


def config_documents(name):
    return {d["kind"]: d for d in yaml.safe_load_all(text_of(name))}


def cluster_spec(name):
    documents = config_documents(name)
    if "RayJob" in documents:
        return documents["RayJob"]["spec"]["rayClusterSpec"]
    return documents["RayCluster"]["spec"]


FIELDS = {
    "RayJob": {
        "entrypoint", "submissionMode", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished",
        "rayClusterSpec", "submitterPodTemplate",
    },
    "RayCluster": {
        "rayVersion", "authOptions", "enableInTreeAutoscaling", "autoscalerOptions",
        "headGroupSpec", "workerGroupSpecs",
    },
    "autoscalerOptions": {
        "upscalingMode", "idleTimeoutSeconds", "resources", "securityContext", "volumeMounts",
    },
    "headGroupSpec": {"rayStartParams", "template", "serviceType"},
    "workerGroupSpec": {
        "groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template",
    },
    "pod": {
        "containers", "volumes", "nodeSelector", "tolerations", "securityContext",
        "terminationGracePeriodSeconds", "automountServiceAccountToken",
    },
    "container": {
        "name", "image", "command", "ports", "resources", "volumeMounts", "lifecycle",
        "securityContext",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", KUBERAY)
def test_a_custom_resource_has_only_fields_that_kuberay_knows(name):
    [(kind, resource)] = [(k, d) for k, d in config_documents(name).items() if k.startswith("Ray")]
    assert resource["apiVersion"] == "ray.io/v1"
    assert set(resource["spec"]) == FIELDS[kind]
    spec = cluster_spec(name)
    assert set(spec) == FIELDS["RayCluster"]
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["authOptions"] == {"mode": "token"}
    assert set(spec["autoscalerOptions"]) == FIELDS["autoscalerOptions"]
    assert set(spec["headGroupSpec"]) == FIELDS["headGroupSpec"]
    for group in spec["workerGroupSpecs"]:
        assert set(group) == FIELDS["workerGroupSpec"]
        assert group["minReplicas"] == group["replicas"] == 0 < group["maxReplicas"]


@pytest.mark.parametrize("name", KUBERAY)
def test_pods_have_known_fields_and_strings_as_values(name):
    spec = cluster_spec(name)
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        assert all(isinstance(v, str) for v in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        assert set(pod) <= FIELDS["pod"]
        volumes = {v["name"] for v in pod.get("volumes", ())}
        for container in pod["containers"]:
            assert set(container) <= FIELDS["container"]
            assert {m["name"] for m in container.get("volumeMounts", ())} <= volumes
            assert all(isinstance(w, str) for w in container.get("command", ()))
            for amounts in container["resources"].values():
                assert all(isinstance(amount, str) for amount in amounts.values())


@pytest.mark.parametrize("name", KUBERAY)
def test_workers_are_on_spot_nodes_and_drain_before_their_pod_ends(name):
    for group in cluster_spec(name)["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        assert pod["nodeSelector"] == {"cloud.google.com/gke-spot": "true"}
        assert set(pod["nodeSelector"]) <= {t["key"] for t in pod["tolerations"]}
        shell, _, script = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        drain, _, wait = script.partition(" && ")
        assert shell == "bash"
        left_s = check_ray(shlex.split(drain)[1:])["deadline_remaining_seconds"]
        waits_s = int(wait.removeprefix("sleep "))
        # The command connects to Ray before the deadline counts.
        assert waits_s == left_s <= GKE_SPOT_S - CONNECTS_S
        assert pod["terminationGracePeriodSeconds"] >= GKE_SPOT_S
        page = " ".join((ROOT / "docs/clusters.md").read_text().split())
        assert f"{left_s} seconds left, and waits for them" in page
        assert f"GKE gives a pod on a spot machine {GKE_SPOT_S} seconds" in page


@pytest.mark.parametrize("name", KUBERAY)
def test_runs_are_on_a_volume_that_the_head_and_tensorboard_share(name):
    documents = config_documents(name)
    template = cluster_spec(name)["headGroupSpec"]["template"]
    ray, tensorboard = template["spec"]["containers"]
    [runs] = ray["volumeMounts"]
    [volume] = [v for v in template["spec"]["volumes"] if v["name"] == runs["name"]]
    claim = volume["persistentVolumeClaim"]["claimName"]
    assert documents["PersistentVolumeClaim"]["metadata"]["name"] == claim
    assert ray["volumeMounts"] == tensorboard["volumeMounts"]
    logdir = tensorboard["command"][tensorboard["command"].index("--logdir") + 1]
    assert ray["volumeMounts"][0]["mountPath"] == logdir
    assert {storage for storage, _ in runs_of(name)} == {logdir}


def test_both_kuberay_files_have_the_same_cluster():
    specs = [copy.deepcopy(cluster_spec(name)) for name in KUBERAY]
    for spec in specs:
        del spec["headGroupSpec"]["template"]["spec"]["volumes"][0]  # each file has its own volume
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            del group["template"]["metadata"]
    assert specs[0] == specs[1]


# Access to the clusters. test_aws_access.py and test_node_providers.py test the roles and networks
# of the clouds.


def pods_of(name):
    """Return the specifications of all pods of a KubeRay file."""
    spec = cluster_spec(name)
    templates = [g["template"] for g in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    job = config_documents(name).get("RayJob", {"spec": {}})["spec"]
    templates += [job["submitterPodTemplate"]] if job else []
    return [template["spec"] for template in templates]


def strings_in(value):
    """Return all strings of a document, including keys."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        return [s for v in value for s in strings_in(v)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("name", NAMES)
def test_no_config_names_the_whole_internet(name):
    text = text_of(name)
    assert "0.0.0.0/0" not in text
    assert "::/0" not in text


@pytest.mark.parametrize("cloud", CLOUDS)
def test_workers_of_a_cloud_have_only_internal_addresses_and_the_head_accepts_ssh(cloud):
    config = config_of(f"{cloud}-spot")
    assert config["provider"]["use_internal_ips"] is True
    assert config["provider"]["use_external_head_ip"] is True
    start = check_ray(shlex.split(config["head_start_ray_commands"][-1])[1:])
    assert start["dashboard_host"] in ("127.0.0.1", "localhost")


@pytest.mark.parametrize("name", NAMES)
def test_tensorboard_listens_on_localhost_only_and_is_reached_by_a_forwarded_port(name):
    commands = [w for w in all_commands(name) if w[:1] == ["tensorboard"]]
    if name in KUBERAY:
        containers = cluster_spec(name)["headGroupSpec"]["template"]["spec"]["containers"]
        commands = [c["command"] for c in containers if c["name"] == "tensorboard"]
        # A port of a container may be reached by other pods.
        assert not any(p["containerPort"] == 6006 for c in containers for p in c.get("ports", ()))
    assert len(commands) == 1
    for words in commands:
        assert "--bind_all" not in words
        assert ("127.0.0.1" if name in KUBERAY else None) == options_of(words).get("--host")
    [listener] = re.findall(r"^\| TensorBoard \|.*", (ROOT / "docs/security.md").read_text(), re.M)
    assert "in the pods of `cluster_configs/`, 127.0.0.1 |" in listener
    if name != "local":
        watch = [" ".join(words) for words in commands_of(name, "Watch")]
        assert any("port-forward" in line and "6006" in line for line in watch)


def options_of(words):
    return {w: v for w, v in pairwise(words) if w.startswith("--")}


@pytest.mark.parametrize("name", KUBERAY)
def test_every_pod_is_unprivileged(name):
    for pod in pods_of(name):
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        contexts = [container["securityContext"] for container in pod["containers"]]
        for own in (*contexts, cluster_spec(name)["autoscalerOptions"]["securityContext"]):
            assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert all({"requests", "limits"} <= set(c["resources"]) for c in pod["containers"])


@pytest.mark.parametrize("name", KUBERAY)
def test_only_the_autoscaler_has_a_token_for_kubernetes(name):
    assert all(pod["automountServiceAccountToken"] is False for pod in pods_of(name))
    assert Path(IN_CLUSTER_TOKEN_PATH).parent == Path(IN_CLUSTER_CA_CERT_PATH).parent
    spec = cluster_spec(name)
    [mount] = spec["autoscalerOptions"]["volumeMounts"]
    assert mount["mountPath"] == str(Path(IN_CLUSTER_TOKEN_PATH).parent)
    assert mount["readOnly"] is True
    head, *others = pods_of(name)
    [volume] = [v for v in head["volumes"] if v["name"] == mount["name"]]
    assert {s for source in volume["projected"]["sources"] for s in strings_in(source)} >= {
        Path(IN_CLUSTER_TOKEN_PATH).name, Path(IN_CLUSTER_CA_CERT_PATH).name, "namespace",
    }  # fmt: skip
    for container in (c for pod in (head, *others) for c in pod["containers"]):
        assert mount["name"] not in [m["name"] for m in container.get("volumeMounts", ())]


@pytest.mark.parametrize("name", KUBERAY)
def test_pods_accept_connections_of_their_cluster_and_jobs_from_labeled_pods(name):
    documents, spec = config_documents(name), cluster_spec(name)
    policy = documents["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    own = policy["podSelector"]["matchLabels"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert own.items() <= group["template"]["metadata"]["labels"].items()
    within, jobs = policy["ingress"]
    assert within == {"from": [{"podSelector": {"matchLabels": own}}]}
    assert jobs["ports"] == [{"protocol": "TCP", "port": 8265}]
    operator, submitters = jobs["from"]
    [install] = [w for w in commands_of(name, "Once") if w[0] == "helm"]
    namespace = install[install.index("--namespace") + 1]
    assert operator["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": namespace
    }
    assert operator["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}
    assert set(submitters) == {"podSelector"}  # of this namespace
    [(key, _)] = submitters["podSelector"]["matchLabels"].items()
    assert key not in own
    if "RayJob" in documents:
        template = documents["RayJob"]["spec"]["submitterPodTemplate"]
        assert template["metadata"]["labels"] == submitters["podSelector"]["matchLabels"]


@pytest.mark.parametrize("name", KUBERAY)
def test_nothing_in_a_kuberay_file_is_reachable_from_outside_kubernetes(name):
    documents = config_documents(name)
    assert set(documents) <= {"RayCluster", "RayJob", "PersistentVolumeClaim", "NetworkPolicy"}
    assert cluster_spec(name)["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert not {"hostNetwork", "hostPort", "hostPath", "privileged"} & set(
        strings_in(list(documents.values()))
    )


# The commands of the headers


def check_ray(words):
    """Let Ray parse one of its commands, and return the parsed options."""
    from ray.scripts.scripts import cli as ray_cli  # imports Ray Serve, which takes a second

    command, name = ray_cli, words[0]
    if name == "job":
        command, words = ray_cli.get_command(None, "job"), words[1:]
        name = words[0]
    command = command.get_command(None, name)
    assert command is not None, name
    return command.make_context(name, list(words[1:])).params


def trained_by(words):
    """Return the options of raydl train in a command, or None if it trains nothing."""
    if words[:2] == ["raydl", "submit"]:
        return words[words.index("--") + 1 :]
    scripts = [i for i, w in enumerate(words) if w.endswith("jobs/train.py")]
    return words[scripts[0] + 1 :] if scripts else None


def runs_of(name):
    """Return (storage path, run) of each run that the header or the entrypoint submits."""
    commands = commands_of(name, "Submit")
    if name == "kuberay-rayjob":
        commands.append(shlex.split(config_documents(name)["RayJob"]["spec"]["entrypoint"]))
    options = [trained_by(words) for words in commands]
    configs = [parse_train(o) for o in options if o]
    assert configs
    assert all(c.method.name in METHODS for c in configs)
    assert all(isinstance(c.scaling.num_workers, tuple) for c in configs)
    places = [(c.run.storage_path, Path(c.run.run_dir)) for c in configs]
    return [(storage or str(run.parent), run.name) for storage, run in places]


def all_commands(name):
    """Yield all commands of a header, including those within `ray exec` and `kubectl exec`."""
    for words in commands_of(name):
        plain = [w for i, w in enumerate(words) if not is_setting(words[: i + 1])]
        yield plain
        if plain[:2] == ["ray", "exec"]:
            yield shlex.split(plain[-1])
        if plain[:2] == ["kubectl", "exec"]:
            yield plain[plain.index("--") + 1 :]


def is_setting(words):
    """Whether all of these words are NAME=value settings of the shell."""
    return all(re.match(r"[A-Z_]+=", w) for w in words)


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_header_are_valid(name):
    for words in all_commands(name):
        if words and words[0] == "ray":
            check_ray(words[1:])
        if words and words[0] == "raydl":
            assert words[1] in COMMANDS
        for word in words:
            if file := re.match(r"(?:\$PWD/)?((?:cluster_configs|jobs)/.+)", word):
                assert (ROOT / file[1]).is_file(), word


@pytest.mark.parametrize("name", NAMES)
def test_start_and_stop_name_their_own_file(name):
    own = f"cluster_configs/{name}.yaml"
    files = {w for words in all_commands(name) for w in words if w.endswith(".yaml")}
    clusters = {f for f in (f.rpartition("=")[2] for f in files) if f.count("/") == 1}
    assert clusters == {own}
    assert any(own in " ".join(words) for words in commands_of(name, "Start"))
    if name != "local":
        assert any(own in words for words in commands_of(name, "Stop"))


@pytest.mark.parametrize("name", NAMES)
def test_the_watched_run_is_a_submitted_run(name):
    runs = runs_of(name)
    commands = list(all_commands(name))
    [status] = [w[2] for w in commands if w[:2] == ["raydl", "status"]]
    assert status in {f"{storage}/{run}" for storage, run in runs}
    for logdir in (w[w.index("--logdir") + 1] for w in commands if w[:1] == ["tensorboard"]):
        assert status.startswith(logdir)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("local", "kuberay-rayjob")])
def test_jobs_are_submitted_with_the_token(name):
    lines = [line for line in header_of(name) if "ray job submit" in line]
    assert lines
    assert all(line.startswith("  $ RAY_AUTH_MODE=token ray job submit") for line in lines)


@pytest.mark.parametrize("name", KUBERAY)
def test_the_objects_of_kubectl_commands_are_in_the_file(name):
    documents = config_documents(name)
    [custom] = [d for kind, d in documents.items() if kind.startswith("Ray")]
    own, cluster = custom["metadata"]["name"], custom["kind"] == "RayCluster"
    services = {f"{own}-head-svc"} if cluster else set()
    containers = {
        c["name"] for c in cluster_spec(name)["headGroupSpec"]["template"]["spec"]["containers"]
    }
    for words in (w for w in commands_of(name) if w[0] == "kubectl"):
        for word, after in zip(words, [*words[1:], ""], strict=True):
            if word in ("raycluster", "rayjob"):
                assert (word, after) == (custom["kind"].lower(), own)
            if word.startswith("service/"):
                assert word.removeprefix("service/") in services
            if word == "--container":
                assert after in containers
            if word == "--selector":
                assert after in (
                    f"ray.io/cluster={own}", f"job-name={own}",
                    f"app={own},ray.io/node-type=head",
                )  # fmt: skip


def test_the_stop_command_of_azure_deletes_the_group_of_the_cluster():
    [words] = [w for w in commands_of("azure-spot", "Stop") if w[0] == "az"]
    assert words[-1] == config_of("azure-spot")["provider"]["resource_group"]


def test_the_command_of_the_header_fills_in_the_project_of_gcp():
    [words] = [w for w in commands_of("gcp-spot") if w[0] == "sed"]
    assert words[2].split("/")[1] == config_of("gcp-spot")["provider"]["project_id"]


def test_the_docs_name_every_config_and_a_valid_spot_notice_command(monkeypatch):
    text = (ROOT / "docs/clusters.md").read_text()
    assert set(re.findall(r"`([\w-]+)\.yaml`", text)) == set(NAMES)
    monkeypatch.setattr("raydl.launch.spot_notice.__main__.watch", lambda *_, **__: 0)
    [options] = re.findall(r"^python -m raydl.launch.spot_notice (.+)$", text, re.M)
    assert spot_notice(options.split()) == 0


def test_the_local_cluster_starts_beside_another_ray_and_names_its_ports():
    [start] = [words for words in all_commands("local") if words[:2] == ["ray", "start"]]
    options = check_ray(start[1:])
    assert options["dashboard_agent_listen_port"] == 0  # Ray chooses a free port
    text = " ".join(header_of("local"))
    for option, port in (("port", 6379), ("dashboard_port", 8265)):
        assert options[option] in (None, port), option
        assert str(port) in text


def test_a_job_of_the_local_cluster_has_no_working_directory():
    # Each new node would unpack it over that of the job, and so delete the job's folder.
    [words] = commands_of("local", "Submit")
    assert "--working-dir" not in words
