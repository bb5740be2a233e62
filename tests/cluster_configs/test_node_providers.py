"""Ray's launcher creates machines on Google Cloud and Azure, and grants no further rights.

Ray's own providers run here, with mocks of the clouds' libraries, which are not installed.
"""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import yaml
from ray.autoscaler._private.providers import _get_node_provider_cls
from ray.autoscaler._private.util import prepare_config, validate_config
from repository import ROOT

from raydl.errors import ConfigError
from raydl.ray_backend.node_providers.settings import azure_cluster, gcp_cluster

FOLDER = ROOT / "cluster_configs"
PUBLIC_KEY = "ssh-ed25519 AAAA who@where"
OFFICE = "203.0.113.7/32"
MOCKED_MODULES = {
    "gcp": (
        "google_auth_httplib2", "googleapiclient", "googleapiclient.discovery",
        "googleapiclient.errors", "httplib2",
    ),
    "azure": (
        "azure", "azure.common", "azure.common.credentials", "azure.core", "azure.core.exceptions",
        "azure.identity", "azure.mgmt", "azure.mgmt.compute", "azure.mgmt.network",
        "azure.mgmt.resource", "azure.mgmt.resource.resources",
        "azure.mgmt.resource.resources.models",
    ),
}  # fmt: skip
IMPORTED = {
    "gcp": ("ray.autoscaler._private.gcp", "raydl.ray_backend.node_providers.gcp"),
    "azure": ("ray.autoscaler._private._azure", "raydl.ray_backend.node_providers.azure"),
}


@pytest.fixture
def cloud(request, monkeypatch, tmp_path):
    """A cloud's name; its libraries are mocks, and a pair of SSH keys exists."""
    name = request.param
    for module in MOCKED_MODULES[name]:
        monkeypatch.setitem(sys.modules, module, MagicMock())
    unload_modules(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / f".ssh/raydl-{name}-spot.pub").write_text(f"{PUBLIC_KEY}\n")
    yield name
    unload_modules(name)


def unload_modules(cloud):
    for name in [n for n in sys.modules if n.startswith(IMPORTED[cloud])]:
        del sys.modules[name]


def gcp(test):
    return pytest.mark.parametrize("cloud", ["gcp"], indirect=True)(test)


def azure(test):
    return pytest.mark.parametrize("cloud", ["azure"], indirect=True)(test)


def both(test):
    return pytest.mark.parametrize("cloud", ["gcp", "azure"], indirect=True)(test)


def config_of(cloud):
    return yaml.safe_load((FOLDER / f"{cloud}-spot.yaml").read_text())


def bootstrapped(cloud):
    """Return (the provider's class found by Ray, the config that `ray up` uses)."""
    config = prepare_config(config_of(cloud))
    provider = _get_node_provider_cls(config["provider"])
    config = provider.fillout_available_node_types_resources(config)
    validate_config(config)
    return provider, provider.bootstrap_config(config)


def tags(config, name):
    kind = "head" if name == config["head_node_type"] else "worker"
    return {
        "ray-node-type": kind,
        "ray-user-node-type": name,
        "ray-node-name": f"ray-{config['cluster_name']}-{kind}",
    }


# both clouds


@both
def test_the_launcher_creates_no_role_and_no_network(cloud):
    before = prepare_config(config_of(cloud))
    provider, config = bootstrapped(cloud)
    libraries = [sys.modules[name] for name in MOCKED_MODULES[cloud]]
    assert all(m.mock_calls == [] for m in libraries)  # no call to the cloud
    assert config["head_node"] == {}
    assert config["provider"] == before["provider"]
    assert provider.__name__ in before["provider"]["module"]


@both
def test_only_machines_of_the_cluster_have_its_key(cloud):
    _, config = bootstrapped(cloud)
    for node_type in config["available_node_types"].values():
        assert PUBLIC_KEY in json.dumps(node_type["node_config"])
    assert config["auth"]["ssh_private_key"] == f"~/.ssh/raydl-{cloud}-spot"


@both
def test_without_a_public_key_nothing_is_started(cloud, tmp_path):
    (tmp_path / f".ssh/raydl-{cloud}-spot.pub").unlink()
    with pytest.raises(ConfigError, match=r"auth.ssh_private_key has no public key beside it: /"):
        bootstrapped(cloud)


@pytest.mark.parametrize(
    ("cloud", "path", "message"),
    [
        ("gcp", "auth.ssh_private_key", "auth.ssh_private_key must be given"),
        ("gcp", "available_node_types.head.node_config.serviceAccounts", None),
        ("gcp", "available_node_types.cpu-spot.node_config.networkInterfaces", None),
        ("azure", "provider.subscription_id", "provider.subscription_id must be given"),
        ("azure", "available_node_types.head.node_config.azure_arm_parameters.msi", None),
        ("azure", "available_node_types.gpu-spot.node_config.azure_arm_parameters.nsg", None),
        ("azure", "available_node_types.gpu-spot.node_config.azure_arm_parameters.subnet", None),
    ],
    indirect=["cloud"],
)
def test_a_setting_that_the_provider_does_not_create_must_be_given(cloud, path, message):
    config = copy.deepcopy(prepare_config(config_of(cloud)))
    *folders, last = path.split(".")
    place = config
    for name in folders:
        place = place[name]
    del place[last]
    with pytest.raises(ConfigError, match=re.escape(message or f"{path} must be given: this")):
        {"gcp": gcp_cluster, "azure": azure_cluster}[cloud](config)


@pytest.mark.parametrize("cloud", ["gcp", "azure"], indirect=True)
def test_a_provider_is_refused_with_a_ray_that_the_tests_have_not_seen(cloud, monkeypatch):
    monkeypatch.setattr("ray.__version__", "2.61.0")
    with pytest.raises(ConfigError, match=r"provider.module extends a private class of Ray"):
        bootstrapped(cloud)


# Google Cloud


@gcp
def test_a_machine_keeps_its_keys_and_ours_is_added_once(cloud):
    config = prepare_config(config_of(cloud))
    types = config["available_node_types"]
    shared = {"items": [{"key": "ssh-keys", "value": "admin:ssh-rsa BBBB"}]}
    types["cpu-spot"]["node_config"]["metadata"] = shared
    types["gpu-spot"]["node_config"] = types["cpu-spot"][
        "node_config"
    ]  # shared, as with YAML's anchors
    for node_type in gcp_cluster(config)["available_node_types"].values():
        [keys] = [
            item["value"]
            for item in node_type["node_config"]["metadata"]["items"]
            if item["key"] == "ssh-keys"
        ]
        assert keys.count(f"ubuntu:{PUBLIC_KEY}") == 1
    assert keys.splitlines()[0] == "admin:ssh-rsa BBBB"
    assert len(shared["items"][0]["value"].splitlines()) == 1


def inserted(config, name):
    """Return the body of Ray's request to Compute Engine for a node."""
    provider = _get_node_provider_cls(config["provider"])(
        config["provider"], config["cluster_name"]
    )
    build = sys.modules["googleapiclient"].discovery.build
    compute = build.return_value
    compute.instances.return_value.insert.reset_mock()
    compute.zoneOperations.return_value.get.return_value.execute.return_value = {"status": "DONE"}
    provider.create_node(config["available_node_types"][name]["node_config"], tags(config, name), 1)
    [call] = compute.instances.return_value.insert.call_args_list
    return call.kwargs["body"]


@gcp
def test_on_gcp_workers_have_no_public_address_and_a_read_only_role(cloud):
    _, config = bootstrapped(cloud)
    head = inserted(config, "head")
    assert [len(i["accessConfigs"]) for i in head["networkInterfaces"]] == [1]
    for name in ("cpu-spot", "gpu-spot"):
        worker = inserted(config, name)
        assert [set(i) for i in worker["networkInterfaces"]] == [{"subnetwork"}]
        [account] = worker["serviceAccounts"]
        assert account["email"].startswith("raydl-gcp-spot-worker@")
        assert account["scopes"] == ["https://www.googleapis.com/auth/devstorage.read_only"]
    [account] = head["serviceAccounts"]
    assert account["email"].startswith("raydl-gcp-spot-head@")
    assert {s.rpartition("/")[2] for s in account["scopes"]} == {"compute", "devstorage.read_write"}
    assert config["provider"]["use_internal_ips"] is True


@gcp
def test_on_gcp_machines_reject_the_project_s_keys_and_are_shielded(cloud):
    _, config = bootstrapped(cloud)
    for name, node_type in config["available_node_types"].items():
        items = {i["key"]: i["value"] for i in node_type["node_config"]["metadata"]["items"]}
        assert items["block-project-ssh-keys"] == "TRUE"
        assert items["ssh-keys"] == f"ubuntu:{PUBLIC_KEY}"
        shielded = node_type["node_config"]["shieldedInstanceConfig"]
        assert shielded["enableVtpm"] is shielded["enableIntegrityMonitoring"] is True
        # The GPU driver is built at the first start and not signed.
        assert shielded["enableSecureBoot"] is ("GPU" not in node_type["resources"]), name


GCLOUD = """
import json, pathlib, sys
words, folder = sys.argv[1:], pathlib.Path({folder!r})
verbs = ("create", "update", "delete", "undelete", "describe")
verb = next((word for word in words if word in verbs), None)
if verb is not None:
    state = folder / "state"
    there, deleted_roles = json.loads(state.read_text()) if state.exists() else ([], [])
    at = words.index(verb)
    kind, name = " ".join(words[3:at]), words[at + 1].partition("@")[0]
    is_there = [kind, name] in there
    if verb == "create" and (is_there or name in deleted_roles):
        sys.exit(f"{{kind}} {{name}} already exists")
    if verb == "undelete" and name not in deleted_roles:
        sys.exit(f"{{kind}} {{name}} is not deleted")
    if verb in ("update", "delete", "describe") and not is_there:
        sys.exit(f"{{kind}} {{name}} not found")
    if verb in ("create", "undelete"):
        there.append([kind, name])
    if verb == "undelete":
        deleted_roles.remove(name)
    if verb == "delete":  # the NAT with its router
        there = [[k, n] for k, n in there if n != name or not k.startswith(kind)]
        deleted_roles += [name] if kind == "iam roles" else []
    state.write_text(json.dumps([there, deleted_roles]))
if verb != "describe":
    print(json.dumps(words), file=open(folder / "changes", "a"))
"""
"""A fake gcloud that keeps the existing resources and the roles that were deleted, whose ids are
blocked. It records the arguments of changes."""


def run_access(tmp_path, *arguments):
    """Run access.sh with a fake gcloud; return its result, and the arguments of changes."""
    script, record = tmp_path / "gcloud", tmp_path / "changes"
    record.unlink(missing_ok=True)
    script.write_text(f"#!{sys.executable} -IS\n{GCLOUD.format(folder=str(tmp_path))}")
    script.chmod(0o755)
    done = subprocess.run(
        ["sh", FOLDER / "gcp/access.sh", *arguments], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    lines = record.read_text().splitlines() if record.exists() else []
    return done, [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "network", ["0.0.0.0/0", "10.0.0.0/8", "8.8.8.8", "::/0", "1.2.3.4/32,0.0.0.0/0", ""]
)
def test_gcp_access_is_not_created_for_a_network_that_is_too_wide(tmp_path, network):
    done, commands = run_access(tmp_path, "my-project", "my-bucket", network)
    assert (done.returncode, commands) == (2, [])
    assert done.stderr.rstrip().endswith(f"like 203.0.113.7/32, got {network}".rstrip())


def test_gcp_access_requires_the_network_of_ssh(tmp_path):
    done, commands = run_access(tmp_path, "my-project", "my-bucket")
    assert (done.returncode, commands) == (2, [])
    assert done.stderr.startswith("usage: ")


def options_of(words):
    """Return the --name value pairs of a command."""
    return {w: v for w, v in pairwise(words) if w.startswith("--")}


@pytest.fixture(scope="module")
def gcp_access(tmp_path_factory):
    """A folder of the fake gcloud after access.sh, and the commands, as lists of words."""
    folder = tmp_path_factory.mktemp("gcloud")
    done, commands = run_access(folder, "my-project", "my-bucket", OFFICE)
    assert done.returncode == 0, done.stderr
    return folder, commands


@pytest.fixture
def access_commands(gcp_access):
    return gcp_access[1]


@pytest.fixture
def has_access(gcp_access, tmp_path):
    """Let ``tmp_path`` be a folder of the fake gcloud after access.sh."""
    shutil.copy(gcp_access[0] / "state", tmp_path)


def test_on_gcp_the_head_accepts_ssh_from_one_network_and_nodes_accept_each_other(access_commands):
    rules = {
        w[w.index("create") + 1]: options_of(w) for w in access_commands if "firewall-rules" in w
    }
    head, worker = (
        f"raydl-gcp-spot-{n}@my-project.iam.gserviceaccount.com" for n in ("head", "worker")
    )
    ssh, nodes = rules.pop("raydl-gcp-spot-ssh"), rules.pop("raydl-gcp-spot-nodes")
    assert not rules
    assert (ssh["--allow"], ssh["--source-ranges"]) == ("tcp:22", OFFICE)
    assert ssh["--target-service-accounts"] == head
    assert (
        nodes["--source-service-accounts"]
        == nodes["--target-service-accounts"]
        == f"{head},{worker}"
    )
    assert "--source-ranges" not in nodes
    assert not any("0.0.0.0" in word for words in access_commands for word in words)


def test_gcp_roles_are_bound_to_resources_of_the_cluster(access_commands):
    bound = [
        (*w[w.index("add-iam-policy-binding") - 1 :][:3:2], options_of(w))
        for w in access_commands if "add-iam-policy-binding" in w
    ]  # fmt: skip
    found = {
        (kind, name, o["--member"].split(":")[1].split("@")[0], o["--role"].rpartition("/")[2])
        for kind, name, o in bound
    }
    assert found == {
        ("subnets", "raydl-gcp-spot", "raydl-gcp-spot-head", "raydlGcpSpotSubnet"),
        ("projects", "my-project", "raydl-gcp-spot-head", "raydlGcpSpotLook"),
        ("projects", "my-project", "raydl-gcp-spot-head", "raydlGcpSpotHead"),
        ("service-accounts", "raydl-gcp-spot-worker@my-project.iam.gserviceaccount.com",
         "raydl-gcp-spot-head", "iam.serviceAccountUser"),
        ("buckets", "gs://my-bucket", "raydl-gcp-spot-head", "storage.objectUser"),
        ("buckets", "gs://my-bucket", "raydl-gcp-spot-worker", "storage.objectViewer"),
    }  # fmt: skip


@gcp
def test_gcp_s_head_may_change_only_machines_with_names_of_its_workers(cloud, access_commands):
    [condition] = {
        options_of(w)["--condition"]
        for w in access_commands
        if "projects" in w and "raydlGcpSpotHead" in options_of(w).get("--role", "")
    }
    expression = condition.partition("expression=")[2]
    assert "," not in expression  # gcloud would end the expression there
    places = re.findall(r"resource\.name\.startsWith\('([^']+)'\)", expression)
    assert expression == " || ".join(f"resource.name.startsWith('{p}')" for p in places)
    _, config = bootstrapped(cloud)
    zone = f"projects/my-project/zones/{config['provider']['availability_zone']}"
    for name in ("cpu-spot", "gpu-spot"):
        machine = inserted(config, name)["name"]
        assert all(f"{zone}/{p.split('/')[-2]}/{machine}".startswith(p) for p in places)
    others = [f"{zone}/instances/{n}" for n in ("database", inserted(config, "head")["name"])]
    assert not any(o.startswith(p) for o in others for p in places)


def test_gcp_s_roles_name_single_permissions(access_commands):
    created = [w for w in access_commands if w[3:6] == ["iam", "roles", "create"]]
    files = [Path(options_of(w)["--file"]) for w in created]
    assert {f.name for f in files} == {p.name for p in (FOLDER / "gcp").glob("*-role.yaml")}
    granted = {p for f in files for p in yaml.safe_load(f.read_text())["includedPermissions"]}
    assert not any("*" in p for p in granted)
    assert not any(
        word in p for p in granted
        for word in ("External", "osLogin", "setIamPolicy", "actAs", "projects.", "firewalls")
    )  # fmt: skip


def existing(tmp_path):
    """Return the existing resources of the fake gcloud, as (kind, name)."""
    return sorted(tuple(each) for each in json.loads((tmp_path / "state").read_text())[0])


ROLES = [("iam roles", f"raydlGcpSpot{name}") for name in ("Head", "Look", "Subnet")]


@pytest.mark.usefixtures("has_access")
def test_gcp_access_deletes_all_that_it_created_but_the_roles(tmp_path):
    """Google Cloud blocks the id of a deleted role for weeks: access.sh could not create it."""
    assert existing(tmp_path) == [
        ("compute firewall-rules", "raydl-gcp-spot-nodes"),
        ("compute firewall-rules", "raydl-gcp-spot-ssh"),
        ("compute networks", "raydl-gcp-spot"),
        ("compute networks subnets", "raydl-gcp-spot"),
        ("compute routers", "raydl-gcp-spot"),
        ("compute routers nats", "raydl-gcp-spot"),
        *ROLES,
        ("iam service-accounts", "raydl-gcp-spot-head"),
        ("iam service-accounts", "raydl-gcp-spot-worker"),
    ]
    done, deleted = run_access(tmp_path, "--delete", "my-project", "my-bucket")
    assert done.returncode == 0
    assert existing(tmp_path) == ROLES
    unbound = [options_of(w)["--role"] for w in deleted if "remove-iam-policy-binding" in w]
    assert [role.rpartition("/")[2] for role in unbound] == [
        "storage.objectUser", "storage.objectViewer", "raydlGcpSpotLook", "raydlGcpSpotHead",
    ]  # fmt: skip


@pytest.mark.usefixtures("has_access")
def test_gcp_access_may_be_created_again_after_it_was_deleted(tmp_path):
    before = existing(tmp_path)
    run_access(tmp_path, "--delete", "my-project", "my-bucket")
    done, again = run_access(tmp_path, "my-project", "my-bucket", OFFICE)
    assert done.returncode == 0, done.stderr
    assert existing(tmp_path) == before
    assert [w[6] for w in again if w[3:6] == ["iam", "roles", "update"]] == [
        "raydlGcpSpotSubnet", "raydlGcpSpotLook", "raydlGcpSpotHead",
    ]  # fmt: skip


@pytest.mark.usefixtures("has_access")
def test_gcp_access_that_exists_is_updated(tmp_path, access_commands):
    before = existing(tmp_path)
    done, again = run_access(tmp_path, "my-project", "my-bucket", "198.51.100.0/24")
    assert done.returncode == 0, done.stderr
    assert existing(tmp_path) == before
    (ssh,) = [options_of(w) for w in again if "firewall-rules" in w]
    assert ssh["--source-ranges"] == "198.51.100.0/24"
    assert [w for w in again if "add-iam-policy-binding" in w] == [
        w for w in access_commands if "add-iam-policy-binding" in w
    ]


def test_gcp_access_restores_roles_that_were_deleted(tmp_path):
    names = [name for _, name in ROLES]
    (tmp_path / "state").write_text(json.dumps([[], names]))
    done, _ = run_access(tmp_path, "my-project", "my-bucket", OFFICE)
    assert done.returncode == 0, done.stderr
    assert set(ROLES) < set(existing(tmp_path))


# Azure


def deployed(config, name):
    """Return the parameters of the deployment with which Ray starts a node."""
    provider_class = _get_node_provider_cls(config["provider"])
    module = sys.modules[provider_class.__mro__[1].__module__]
    module.get_cloud_from_metadata_requests = lambda: "azure"
    provider = provider_class(config["provider"], config["cluster_name"])
    create = provider.resource_client.deployments.create_or_update
    create.reset_mock()
    provider.create_node(config["available_node_types"][name]["node_config"], tags(config, name), 1)
    [call] = create.call_args_list
    assert provider.provider_config == config["provider"]
    given = call.kwargs["parameters"]["properties"]
    values = {k: v["value"] for k, v in given["parameters"].items()}
    assert set(values) <= set(given["template"]["parameters"])
    return values


@azure
def test_on_azure_workers_have_no_public_address_and_their_own_identity(cloud):
    _, config = bootstrapped(cloud)
    head = deployed(config, "head")
    assert head["provisionPublicIp"] is True
    assert (head["msi"], head["nsg"]) == ("identity-of-the-head", "group-of-the-head")
    for name in ("cpu-spot", "gpu-spot"):
        worker = deployed(config, name)
        assert worker["provisionPublicIp"] is False
        assert (worker["msi"], worker["nsg"]) == ("identity-of-workers", "group-of-workers")
        assert worker["subnet"] == head["subnet"] == "subnet-of-the-cluster"


@azure
def test_on_azure_ray_down_keeps_the_network_and_the_identities(cloud):
    provider_class, config = bootstrapped(cloud)
    module = sys.modules[provider_class.__mro__[1].__module__]
    module.get_cloud_from_metadata_requests = lambda: "azure"
    provider = provider_class(config["provider"], config["cluster_name"])
    for client in (provider.resource_client, provider.network_client):
        client.reset_mock()
    provider.cleanup_cluster_resources()
    assert provider.resource_client.mock_calls == provider.network_client.mock_calls == []


def access():
    return json.loads((FOLDER / "azure/access.json").read_text())


def azure_resources(kind):
    found = [r for r in access()["resources"] if r["type"].endswith(f"/{kind}")]
    return {r["name"].rpartition("'-")[2].removesuffix("')]"): r["properties"] for r in found}


def test_azure_access_requires_the_network_of_ssh():
    parameter = access()["parameters"]["sshFrom"]
    assert "defaultValue" not in parameter
    assert all(len(w) < parameter["minLength"] for w in ("*", "Any", "Internet", "0.0.0.0/0"))
    assert parameter["minLength"] <= len("1.2.3.4/32")
    assert len("255.255.255.255/32") <= parameter["maxLength"]


def opened_to_ssh(network):
    """Evaluate the template's expression, which is also one of Python."""
    functions = {
        "concat": lambda *parts: "".join(parts), "int": int, "max": max, "split": str.split,
        "string": str, "parameters": {"sshFrom": network}.__getitem__,
    }  # fmt: skip
    expression = access()["variables"]["sshFrom"]
    return eval(expression.removeprefix("[").removesuffix("]"), functions)


@pytest.mark.parametrize(
    ("given", "opened"),
    [
        ("203.0.113.7/32", "203.0.113.7/32"),
        ("203.0.0.0/16", "203.0.0.0/16"),
        ("128.0.0.0/1", "128.0.0.0/16"),
        ("0.0.0.0/00", "0.0.0.0/16"),
    ],
)
def test_on_azure_ssh_is_opened_to_65536_addresses_at_most(given, opened):
    assert opened_to_ssh(given) == opened


@pytest.mark.parametrize("value", ["AzureCloud", "VirtualNetwork", "AzureCloud/", "10.0.0.0/all"])
def test_on_azure_a_value_that_is_no_network_is_refused(value):
    with pytest.raises((IndexError, ValueError)):
        opened_to_ssh(value)


def test_on_azure_the_head_accepts_ssh_from_one_network_and_nodes_accept_each_other():
    variables = access()["variables"]

    def rules(name):
        given = azure_resources("networkSecurityGroups")[name]["securityRules"]
        named = [variables[re.search(r"'(\w+)'", r)[1]] if isinstance(r, str) else r for r in given]
        return sorted((r["properties"] for r in named), key=lambda r: r["priority"])

    def opened(name):
        *opened, last = rules(name)
        assert (last["access"], last["sourceAddressPrefix"]) == ("Deny", "*")
        assert (
            last["priority"] == 4096
        )  # the last priority before Azure's default rules, which allow the whole network
        return [(r["sourceAddressPrefix"], r["destinationPortRange"]) for r in opened]

    within = ("[variables('subnetPrefix')]", "*")
    assert opened("worker") == [within]
    assert opened("head") == [("[variables('sshFrom')]", "22"), within]


def test_azure_s_head_may_start_machines_without_public_addresses_and_assign_one_identity():
    definitions = [r for r in access()["resources"] if r["type"].endswith("/roleDefinitions")]
    [permission] = definitions[0]["properties"]["permissions"]
    assert len(definitions) == 1
    assert not any("*" in a for a in permission["actions"])
    changed = {a.rpartition("/")[0] for a in permission["actions"] if a.endswith("/write")}
    assert changed == {
        "Microsoft.Compute/disks", "Microsoft.Compute/virtualMachines",
        "Microsoft.Network/networkInterfaces", "Microsoft.Resources/deployments",
    }  # fmt: skip
    assert definitions[0]["properties"]["assignableScopes"] == ["[resourceGroup().id]"]
    assigned = [r for r in access()["resources"] if r["type"].endswith("/roleAssignments")]
    assert len(assigned) == 2
    assert all("variables('head')" in r["properties"]["principalId"] for r in assigned)
    of_group, of_identity = sorted(assigned, key=lambda r: "scope" in r)
    assert "roleDefinitions', variables('headRole')" in of_group["properties"]["roleDefinitionId"]
    assert of_identity["scope"].endswith("parameters('clusterName'), '-worker')]")
    assert "identityOperator" in of_identity["properties"]["roleDefinitionId"]
    built_in = "b24988ac-6180-42a0-ab88-20f7382dd24c"  # Contributor, assigned by Ray's provider
    assert built_in not in json.dumps(access())


def test_azure_workers_reach_the_internet_only_through_a_gateway():
    [network] = [r for r in access()["resources"] if r["type"].endswith("/virtualNetworks")]
    [subnet] = network["properties"]["subnets"]
    assert subnet["properties"]["defaultOutboundAccess"] is False
    assert "natGateways" in subnet["properties"]["natGateway"]["id"]


def test_the_command_of_the_header_fills_in_the_names_of_azure():
    text = (FOLDER / "azure-spot.yaml").read_text()
    value = access()["outputs"]["fill"]["value"]
    placeholders = set(re.findall(r"s\|([\w-]+)\|", value))
    body = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    used = set(re.findall(r"[\w-]+-of-(?:the-head|workers|the-cluster)\b", body))
    assert placeholders == used
