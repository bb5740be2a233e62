"""With local.yaml a run grows with the autoscaler's nodes, which are removed after the run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from clusters import ClusterRun, free_port
from processes import command_of, kill_with_descendants, processes_that
from ray.util import get_node_ip_address

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

BOUND_S = 100


def start_command(path):
    """Return (environment, words) of the start command in a config's header."""
    [line] = [x for x in path.read_text().splitlines() if "ray start --head" in x]
    words = shlex.split(line.removeprefix("#   $ "))
    settings = list(words[: words.index("ray")])
    return dict(s.split("=", 1) for s in settings), words[words.index("ray") + 1 :]


class LocalCluster:
    """The cluster of local.yaml's start command, on free ports and in its own folder."""

    def __init__(self, config):
        # Not tmp_path: the paths of the sockets in it would be too long.
        self.folder = Path(tempfile.mkdtemp(prefix="raydl-"))
        self.address = f"{get_node_ip_address()}:{free_port()}"
        settings = yaml.safe_load(config.read_text())
        settings["provider"]["gcs_address"] = self.address
        self.config = self.folder / "local.yaml"
        self.config.write_text(yaml.safe_dump(settings))
        self.source = config

    def __enter__(self):
        environment, words = start_command(self.source)
        words = [w if not w.startswith("--autoscaling") else self._option() for w in words]
        host, port = self.address.split(":")
        words += [
            "--node-ip-address", host, "--port", port, "--temp-dir", str(self.folder),
            "--ray-client-server-port", str(free_port()), "--include-dashboard", "false",
            "--min-worker-port", "0", "--max-worker-port", "0",
        ]  # fmt: skip
        ray = Path(sys.executable).with_name("ray")
        subprocess.run([ray, "get-auth-token", "--generate"], check=True, capture_output=True)
        try:
            with (self.folder / "start.log").open("w") as log:
                subprocess.run(
                    [ray, *words], check=True, timeout=BOUND_S, stdout=log, stderr=log,
                    env={**os.environ, **environment},
                )  # fmt: skip
        except BaseException:
            print((self.folder / "start.log").read_text())
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        deadline = time.monotonic() + 30
        while (
            pids := self.processes()
        ):  # repeated: the autoscaler may have started a process meanwhile
            kill_with_descendants(pids)
            assert time.monotonic() < deadline, f"processes remain: {pids}"
            time.sleep(0.1)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _option(self):
        return f"--autoscaling-config={self.config}"

    def processes(self, program=""):
        """Return the processes, of one program or all, whose command names the cluster's folder."""

        def fits(pid):
            words = command_of(pid)
            return any(str(self.folder) in w for w in words) and words[0].endswith(program)

        return processes_that(fits)

    def nodes(self):
        """Return the raylet process of each node."""
        return self.processes("/raylet")

    def until_nodes(self, count):
        """Wait until the cluster has a number of nodes.

        There may be more for a moment: a child of a raylet has its name until it gets another, and
        a superfluous node is removed once it has been idle.
        """
        deadline = time.monotonic() + BOUND_S
        while len(nodes := self.nodes()) != count:
            assert time.monotonic() < deadline, f"{len(nodes)} nodes: {nodes}"
            time.sleep(0.2)


@pytest.mark.slow
def test_a_run_grows_from_one_node_to_three_and_the_nodes_are_removed_after_it(root, tmp_path):
    with LocalCluster(root / "cluster_configs/local.yaml") as local:
        local.until_nodes(1)
        options = ["--model", "origins:model", "--epochs", "100000", "--period", "4"]
        options += ["--workers", "1:3", "--elastic.no-leave-out-slow"]
        with ClusterRun(SimpleNamespace(address=local.address), tmp_path / "run", *options) as run:
            # A second node may have joined by then: one worker starts, or two.
            run.until(lambda: re.search(r"generation 1: w\d.* starts?\n", run.output))
            run.until_training(3)
            local.until_nodes(3)
            run.process.terminate()
            assert run.process.wait(timeout=BOUND_S) == 143, run.output
        local.until_nodes(1)
    assert local.processes() == []
