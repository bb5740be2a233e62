"""The access that aws-spot.yaml and its CloudFormation stack grant, tested with Ray's AWS provider.

The stack is created in moto, a mock of AWS, and the command of the header fills in its names. Ray's
`bootstrap_aws` prepares the cluster, and its `AWSNodeProvider` starts, labels and ends nodes. Its
requests are then checked against the head's policy, with all conditions, which moto does not check.
"""

import copy
import fnmatch
import json
import re
import subprocess
import urllib.request
from types import SimpleNamespace

import boto3
import pytest
import yaml
from ray.autoscaler._private.aws import config as ray_aws
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler._private.aws.utils import client_cache, resource_cache
from ray.autoscaler._private.docker import docker_start_cmds
from ray.autoscaler._private.util import prepare_config
from repository import ROOT
from s3_server import s3_server

from raydl.storage import Storage

pytestmark = pytest.mark.processes

FILE = ROOT / "cluster_configs/aws-spot.yaml"
TEMPLATE = ROOT / "cluster_configs/aws/access.yaml"
REGION, NAME = "us-west-2", "raydl-aws-spot"
OFFICE = "203.0.113.7/32"


def template():
    return yaml.safe_load(TEMPLATE.read_text())


@pytest.fixture(scope="module")
def aws(tmp_path_factory):
    """A mock of AWS for this module, with fake keys."""
    from moto import mock_aws

    with pytest.MonkeyPatch.context() as patch, mock_aws():
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
            patch.setenv(f"AWS_{name}", "test")
        for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_DEFAULT_REGION", REGION)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # Ray writes a key to ~/.ssh
        patch.chdir(ROOT)
        clear_clients()
        yield SimpleNamespace(
            ec2=boto3.client("ec2"), iam=boto3.client("iam"), cfn=boto3.client("cloudformation")
        )
        clear_clients()


def clear_clients():
    for cache in (resource_cache, client_cache, ray_aws._get_subnets_or_die):
        cache.cache_clear()


def make_stack(aws):
    types = template()["Parameters"]["InstanceTypes"]["Default"]  # moto does not split defaults
    parameters = {"SshFrom": OFFICE, "Bucket": "my-bucket", "InstanceTypes": types}
    aws.cfn.create_stack(
        StackName=NAME,
        TemplateBody=TEMPLATE.read_text(),
        Capabilities=["CAPABILITY_NAMED_IAM"],
        Parameters=[{"ParameterKey": k, "ParameterValue": v} for k, v in parameters.items()],
    )
    [stack] = aws.cfn.describe_stacks(StackName=NAME)["Stacks"]
    assert stack["StackStatus"] == "CREATE_COMPLETE"
    return stack["Outputs"]


def filled(aws, outputs):
    """Return the config with the stack's names, filled in by sed."""
    [output] = outputs  # the header's command reads the first output
    done = subprocess.run(
        ["sed", output["OutputValue"]], input=FILE.read_text(),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    image = aws.ec2.describe_images()["Images"][0]["ImageId"]
    return yaml.safe_load(done.stdout.replace("ami-00000000000000000", image))


@pytest.fixture(scope="module")
def cluster(aws):
    """(AWS, the config that Ray prepares)."""
    config = filled(aws, make_stack(aws))
    return aws, ray_aws.bootstrap_aws(prepare_config(config))


def node_type(config, name):
    return config["available_node_types"][name]["node_config"]


def start(provider, config, name):
    """Start a node like Ray's launcher and return its id."""
    tags = {
        "ray-node-type": "head" if name == config["head_node_type"] else "worker",
        "ray-user-node-type": name,
        "ray-node-name": f"ray-{NAME}",
        "ray-launch-config": "hash",
        "ray-node-status": "uninitialized",
    }
    [node] = provider.create_node(copy.deepcopy(node_type(config, name)), tags, 1)
    return node


# the stack


def test_cloudformation_accepts_the_template():
    import cfnlint

    found = cfnlint.lint(TEMPLATE.read_text(), regions=[REGION])
    assert [f"{m.linenumber}: {m.message}" for m in found] == []


NARROW = ("203.0.113.7/32", "10.1.0.0/16", "198.51.100.0/24")
WIDE = ("0.0.0.0/0", "10.0.0.0/8", "0.0.0.0/16", "8.8.8.8", "::/0", "203.0.113.7/32,0.0.0.0/0", "")


def test_the_stack_requires_a_bucket_and_a_narrow_network():
    # CloudFormation checks the pattern; moto does not.
    parameters = template()["Parameters"]
    assert not any("Default" in parameters[name] for name in ("SshFrom", "Bucket"))
    pattern = parameters["SshFrom"]["AllowedPattern"]
    assert all(re.search(pattern, network) for network in NARROW)
    assert not any(re.search(pattern, network) for network in WIDE)


def test_the_cluster_accepts_only_ssh_from_one_network(cluster):
    aws, config = cluster
    groups = {
        g["GroupId"]: g["IpPermissions"]
        for g in aws.ec2.describe_security_groups(
            Filters=[{"Name": "vpc-id", "Values": [vpc_of(aws, config)]}]
        )["SecurityGroups"]
        if g["GroupName"] != "default"
    }
    own, ssh = node_type(config, "head")["SecurityGroupIds"]
    assert set(groups) == {own, ssh}  # Ray created none, which would be open to all
    [rule] = groups[ssh]
    assert (rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) == ("tcp", 22, 22)
    assert [r["CidrIp"] for r in rule["IpRanges"]] == [OFFICE]
    [rule] = groups[own]
    assert (rule["IpRanges"], rule.get("Ipv6Ranges", [])) == ([], [])
    assert [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [own]


def vpc_of(aws, config):
    subnet = node_type(config, "head")["SubnetIds"][0]
    return aws.ec2.describe_subnets(SubnetIds=[subnet])["Subnets"][0]["VpcId"]


# the machines


def test_the_header_creates_the_stack_that_the_config_needs():
    text = FILE.read_text()
    deploy = next(line for line in text.splitlines() if "cloudformation deploy" in line)
    given = {word.split("=")[0] for word in deploy.split("--parameter-overrides ")[1].split()}
    needed = {k for k, v in template()["Parameters"].items() if "Default" not in v}
    assert given == needed
    defaults = {k: v.get("Default") for k, v in template()["Parameters"].items()}
    config = yaml.safe_load(text)
    assert defaults["ClusterName"] == config["cluster_name"]
    types = {node_type(config, n)["InstanceType"] for n in ("cpu-spot", "gpu-spot")}
    assert set(defaults["InstanceTypes"].split(",")) == types


def test_a_config_that_is_not_filled_in_starts_nothing(aws):
    before = aws.ec2.describe_instances()["Reservations"]
    with pytest.raises(AssertionError):  # from Ray: no such security group
        ray_aws.bootstrap_aws(prepare_config(yaml.safe_load(FILE.read_text())))
    assert aws.ec2.describe_instances()["Reservations"] == before


def test_workers_have_no_public_address_and_use_a_gateway(head_requests):
    _, config, calls = head_requests
    assert config["provider"]["use_internal_ips"]
    for params in [p for action, p in calls if action == "ec2:RunInstances"]:
        assert "NetworkInterfaces" not in params  # so the subnet decides about the address
        assert params["SubnetId"] in node_type(config, "cpu-spot")["SubnetIds"]
    # From the template: moto does not record this.
    subnets, routes = resources("AWS::EC2::Subnet"), resources("AWS::EC2::Route")
    public = {name for name, subnet in subnets.items() if subnet["MapPublicIpOnLaunch"]}
    assert public == {"HeadSubnet"}
    assert len(subnets) == 1 + len(node_type(config, "cpu-spot")["SubnetIds"])
    table = {
        a["SubnetId"]["Ref"]: a["RouteTableId"]["Ref"]
        for a in resources("AWS::EC2::SubnetRouteTableAssociation").values()
    }
    assert set(table) == set(subnets)
    for name in set(subnets) - public:
        [route] = [r for r in routes.values() if r["RouteTableId"]["Ref"] == table[name]]
        assert "NatGatewayId" in route
        assert "GatewayId" not in route


def resources(kind):
    return {
        name: resource["Properties"]
        for name, resource in template()["Resources"].items()
        if resource["Type"] == kind
    }


def test_every_machine_requires_session_tokens_within_one_hop(head_requests):
    _, config, calls = head_requests
    started = [p for action, p in calls if action == "ec2:RunInstances"]
    for node in [*started, node_type(config, "head")]:
        assert node["MetadataOptions"] == {
            "HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1,
        }  # fmt: skip


def test_one_hop_reaches_ray_s_container_which_shares_the_machine_s_network():
    config = yaml.safe_load(FILE.read_text())["docker"]
    command = docker_start_cmds(
        "ubuntu", config["image"], {}, config["container_name"], config["run_options"], NAME,
        "/home/ray", "docker",
    )  # fmt: skip
    assert re.findall(r"--net\S*", command) == ["--net=host"]


def test_ray_creates_no_role_and_each_node_has_its_own(cluster):
    aws, config = cluster
    roles = {r["RoleName"] for r in aws.iam.list_roles()["Roles"]}
    assert roles == {
        f"{NAME}-head",
        f"{NAME}-worker",
    }  # not ray-autoscaler-v1, which may use all of EC2
    assert config["head_node"] == {}
    profiles = {n: node_type(config, n)["IamInstanceProfile"] for n in ("head", "cpu-spot")}
    assert profiles == {"head": {"Name": f"{NAME}-head"}, "cpu-spot": {"Name": f"{NAME}-worker"}}
    for name in roles:
        [profile] = aws.iam.list_instance_profiles_for_role(RoleName=name)["InstanceProfiles"]
        assert profile["InstanceProfileName"] == name
        assert aws.iam.list_attached_role_policies(RoleName=name)["AttachedPolicies"] == []


# the head's requests and permissions


@pytest.fixture(scope="module")
def head_requests(cluster):
    """(AWS, the config, the requests of the head's Ray to EC2: [(action, parameters)])."""
    aws, config = cluster
    provider = AWSNodeProvider(config["provider"], NAME)
    calls = []

    def note(params, model, **_):
        calls.append((f"ec2:{model.name}", copy.deepcopy(params)))

    for resource in (provider.ec2, provider.ec2_fail_fast):
        resource.meta.client.meta.events.register("provide-client-params.ec2", note)
    for name in ("cpu-spot", "gpu-spot"):
        node = start(provider, config, name)
        provider.non_terminated_nodes({})
        for tag in ("ray-node-status", "ray-runtime-config", "ray-file-mounts-contents"):
            provider.set_node_tags(node, {tag: "x"})
        provider.terminate_nodes([node])
    return aws, config, calls


def policy_of(aws, role):
    [name] = aws.iam.list_role_policies(RoleName=role)["PolicyNames"]
    document = aws.iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]
    if isinstance(document, str):  # moto stores the document of a stack as a Python literal
        document = yaml.safe_load(document)
    return document["Statement"]


def listed(value):
    return value if isinstance(value, list) else [value]


def allowed(statements, action, resource, context=()):
    """Whether a policy of Allow statements permits an action, by the rules of IAM."""
    assert {s["Effect"] for s in statements} == {"Allow"}
    return any(
        action in listed(s["Action"])
        and any(fnmatch.fnmatchcase(resource, r) for r in listed(s["Resource"]))
        and all(holds(op, wanted, dict(context)) for op, wanted in s.get("Condition", {}).items())
        for s in statements
    )


def holds(operator, wanted, context):
    """Whether an operator of a condition holds for all of its keys."""
    tests = {
        "StringEquals": lambda given, values: given in values,
        "ArnEquals": lambda given, values: given in values,
        "BoolIfExists": lambda given, values: given is None or given in values,
        "ForAllValues:StringEquals": lambda given, values: set(given or ()) <= set(values),
    }
    return all(tests[operator](context.get(key), listed(v)) for key, v in wanted.items())


def ours(aws, part):
    """Return the ARN of an EC2 resource in this account."""
    account = boto3.client("sts").get_caller_identity()["Account"]
    return f"arn:aws:ec2:{REGION}:{account}:{part}"


def profile_arn(aws, name):
    profile = aws.iam.get_instance_profile(InstanceProfileName=name)
    return profile["InstanceProfile"]["Arn"]


def context_of(aws, params):
    """Return IAM's context of a machine in a RunInstances request."""
    [specification] = params["TagSpecifications"]
    return {
        **{f"aws:RequestTag/{t['Key']}": t["Value"] for t in specification["Tags"]},
        "ec2:InstanceType": params["InstanceType"],
        "ec2:InstanceMarketType": params["InstanceMarketOptions"]["MarketType"],
        "ec2:MetadataHttpTokens": params["MetadataOptions"]["HttpTokens"],
        "ec2:InstanceProfile": profile_arn(aws, params["IamInstanceProfile"]["Name"]),
    }


def test_the_head_has_exactly_the_rights_of_ray_s_requests(head_requests):
    aws, _, calls = head_requests
    actions = {a for s in policy_of(aws, f"{NAME}-head") for a in listed(s["Action"])}
    assert {a for a in actions if a.startswith("ec2:")} == {action for action, _ in calls}
    assert {a for a in actions if not a.startswith(("ec2:", "s3:"))} == {"iam:PassRole"}


def test_a_policy_names_single_actions_and_where_aws_permits_its_resources(cluster):
    aws, _ = cluster
    for role in (f"{NAME}-head", f"{NAME}-worker"):
        for statement in policy_of(aws, role):
            assert not any("*" in action for action in listed(statement["Action"]))
            if (
                statement["Action"] == "ec2:DescribeInstances"
            ):  # AWS cannot restrict it to resources
                assert statement["Condition"] == {"StringEquals": {"aws:RequestedRegion": REGION}}
            else:
                assert "*" not in listed(statement["Resource"]), statement["Sid"]


def test_the_head_may_start_only_the_workers_of_the_config(head_requests):
    aws, config, calls = head_requests
    policy = policy_of(aws, f"{NAME}-head")
    [public] = node_type(config, "head")["SubnetIds"]
    for params in [p for action, p in calls if action == "ec2:RunInstances"]:
        context = context_of(aws, params)
        parts = [
            f"subnet/{params['SubnetId']}", f"key-pair/{params['KeyName']}", "volume/vol-1",
            "network-interface/eni-1", *(f"security-group/{g}" for g in params["SecurityGroupIds"]),
        ]  # fmt: skip
        assert all(allowed(policy, "ec2:RunInstances", ours(aws, part)) for part in parts)
        image = f"arn:aws:ec2:{REGION}::image/{params['ImageId']}"
        assert allowed(policy, "ec2:RunInstances", image)
        instance = ours(aws, "instance/i-1")
        assert allowed(policy, "ec2:RunInstances", instance, context)
        for wrong in (
            {"aws:RequestTag/ray-cluster-name": "another"},
            {"aws:RequestTag/ray-node-type": "head"},
            {"ec2:InstanceType": "p5.48xlarge"},
            {"ec2:InstanceMarketType": "on-demand"},
            {"ec2:MetadataHttpTokens": "optional"},
            {"ec2:InstanceProfile": profile_arn(aws, f"{NAME}-head")},
        ):
            assert not allowed(policy, "ec2:RunInstances", instance, {**context, **wrong}), wrong
    address = {"ec2:AssociatePublicIpAddress": "true"}
    eni = ours(aws, "network-interface/eni-1")
    assert not allowed(policy, "ec2:RunInstances", eni, address)
    assert not allowed(policy, "ec2:RunInstances", ours(aws, f"subnet/{public}"))
    assert not allowed(policy, "ec2:RunInstances", ours(aws, "security-group/sg-1"))


def test_the_head_may_label_and_end_only_its_own_workers(head_requests):
    aws, _, calls = head_requests
    policy, instance = policy_of(aws, f"{NAME}-head"), ours(aws, "instance/i-1")
    own = {"aws:ResourceTag/ray-cluster-name": NAME, "aws:ResourceTag/ray-node-type": "worker"}
    for params in [p for action, p in calls if action == "ec2:CreateTags"]:
        keys = [tag["Key"] for tag in params["Tags"]]
        assert allowed(policy, "ec2:CreateTags", instance, {**own, "aws:TagKeys": keys})
    assert allowed(policy, "ec2:CreateTags", instance, {"ec2:CreateAction": "RunInstances"})
    assert allowed(policy, "ec2:TerminateInstances", instance, own)
    for others in (
        {},
        {**own, "aws:ResourceTag/ray-cluster-name": "another"},
        {**own, "aws:ResourceTag/ray-node-type": "head"},
    ):
        assert not allowed(policy, "ec2:TerminateInstances", instance, others)
        keys = {"aws:TagKeys": ["ray-node-status"]}
        assert not allowed(policy, "ec2:CreateTags", instance, {**others, **keys})
    claim = {**own, "aws:TagKeys": ["ray-cluster-name"]}
    assert not allowed(policy, "ec2:CreateTags", instance, claim)


def test_the_head_may_pass_only_the_role_of_workers(cluster):
    aws, _ = cluster
    policy = policy_of(aws, f"{NAME}-head")
    role = {n: aws.iam.get_role(RoleName=f"{NAME}-{n}")["Role"]["Arn"] for n in ("head", "worker")}
    to_ec2 = {"iam:PassedToService": "ec2.amazonaws.com"}
    assert allowed(policy, "iam:PassRole", role["worker"], to_ec2)
    assert not allowed(policy, "iam:PassRole", role["head"], to_ec2)
    assert not allowed(
        policy, "iam:PassRole", role["worker"], {"iam:PassedToService": "lambda.amazonaws.com"}
    )


@pytest.mark.parametrize("role", ["head", "worker"])
def test_both_roles_are_for_machines_and_one_bucket(cluster, role):
    aws, _ = cluster
    trusted = aws.iam.get_role(RoleName=f"{NAME}-{role}")["Role"]["AssumeRolePolicyDocument"]
    [statement] = trusted["Statement"]
    assert statement["Principal"] == {"Service": "ec2.amazonaws.com"}
    policy = policy_of(aws, f"{NAME}-{role}")
    of_s3 = [s for s in policy if any(a.startswith("s3:") for a in listed(s["Action"]))]
    assert {r.removesuffix("/*") for s in of_s3 for r in listed(s["Resource"])} == {
        "arn:aws:s3:::my-bucket"
    }
    if role == "worker":
        assert policy == of_s3
        assert {a for s in policy for a in listed(s["Action"])} == {"s3:ListBucket", "s3:GetObject"}


# the permissions of the roles in the bucket, with an S3 server that checks them


@pytest.fixture
def open_as_role(cluster, monkeypatch):
    """A function that opens the bucket as a user with the policy of a role."""
    aws, _ = cluster
    with s3_server() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        s3 = boto3.client("s3", endpoint_url=url)
        s3.create_bucket(
            Bucket="my-bucket", CreateBucketConfiguration={"LocationConstraint": REGION}
        )
        s3.put_object(Bucket="my-bucket", Key="data/digits", Body=b"given")
        users = {}
        for role in ("head", "worker"):
            aws.iam.create_user(UserName=role)
            policy = policy_of(aws, f"{NAME}-{role}")
            of_s3 = [s for s in policy if "Condition" not in s]  # moto cannot read conditions
            document = {"Version": "2012-10-17", "Statement": of_s3}
            aws.iam.put_user_policy(
                UserName=role, PolicyName="its", PolicyDocument=json.dumps(document)
            )
            users[role] = aws.iam.create_access_key(UserName=role)["AccessKey"]

        def open_bucket(role):
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", users[role]["AccessKeyId"])
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", users[role]["SecretAccessKey"])
            return Storage("s3://my-bucket/runs")

        monkeypatch.delenv("AWS_SESSION_TOKEN")
        require_keys(url, b"0")
        yield open_bucket
        require_keys(url, b"inf")


def require_keys(url, after):
    request = urllib.request.Request(
        f"{url}/moto-api/reset-auth", data=after, headers={"Content-Type": "text/plain"}
    )
    urllib.request.urlopen(request, timeout=10).close()


def test_the_head_writes_runs_to_the_bucket_and_a_worker_only_reads_them(open_as_role):
    head = open_as_role("head")
    head.probe("run.storage_path")  # writes and deletes
    head.write_bytes("digits/manifest.json", b"kept")
    worker = open_as_role("worker")
    assert worker.read_bytes("digits/manifest.json") == b"kept"
    assert worker.list_dir("") == ["digits"]
    with pytest.raises(OSError, match="ACCESS_DENIED"):
        worker.write_bytes("digits/manifest.json", b"changed")
