"""The cloud's notice becomes a drain of the Ray node."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from clusters import start_cluster

from raydl.errors import ConfigError
from raydl.launch.spot_notice.__main__ import main
from raydl.launch.spot_notice.clouds import MetadataError, make_source
from raydl.launch.spot_notice.watch import DrainError, drain_by_command, longest_try_s, watch

NOW = 1767225600.0  # 2026-01-01 00:00:00 UTC
TOKEN_TTL = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN = "X-aws-ec2-metadata-token"
AWS_ACTION = "/latest/meta-data/spot/instance-action"
AWS_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
AWS_NOTICE = json.dumps({"action": "terminate", "time": "2026-01-01T00:02:00Z"})
GCP = "/computeMetadata/v1/instance/preempted"
AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


class FakeMetadataService:
    """A metadata service on loopback: it has pages, and requires the header of its cloud."""

    def __init__(self, provider, pages):
        self.provider, self.pages = provider, pages
        self.tokens, self.requests, self.failures = ["first", "second"], [], 0
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply(*service.answer("GET", self.path, self.headers))

            def do_PUT(self):
                self.reply(*service.answer("PUT", self.path, self.headers))

            def reply(self, status, text):
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, method, path, headers):
        self.requests.append((method, path))
        if self.failures:
            self.failures -= 1
            return 503, ""
        if self.provider == "aws" and method == "PUT":
            ok = path == "/latest/api/token" and headers[TOKEN_TTL]
            return (200, self.tokens[0]) if ok else (400, "")
        allowed = {
            "aws": headers[TOKEN] == self.tokens[0],
            "gcp": headers["Metadata-Flavor"] == "Google",
            "azure": headers["Metadata"] == "true",
        }
        if not allowed[self.provider]:
            return 401 if self.provider == "aws" else 403, ""
        return (200, self.pages[path]) if path in self.pages else (404, "")


@contextlib.contextmanager
def metadata_service(provider, pages=()):
    service = FakeMetadataService(provider, dict(pages))
    thread = threading.Thread(target=service.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield service
    finally:
        service.server.shutdown()
        service.server.server_close()
        thread.join(timeout=10)


def azure_events(*resources, kind="Preempt", when="Thu, 01 Jan 2026 00:00:45 GMT"):
    event = {"EventType": kind, "Resources": list(resources), "NotBefore": when}
    return json.dumps({"DocumentIncarnation": 1, "Events": [event]})


BEFORE = {
    "aws": {},
    "gcp": {GCP: "FALSE"},
    "azure": {AZURE_EVENTS: json.dumps({"Events": []}), AZURE_NAME: "worker_3"},
}
NOTICE = {
    "aws": {AWS_ACTION: AWS_NOTICE},
    "gcp": {GCP: "TRUE"},
    "azure": {AZURE_EVENTS: azure_events("worker_2", "worker_3")},
}
LEFT_S = {"aws": 120, "gcp": 30, "azure": 45}


class Run:
    """One call of ``watch``; each wait moves the clock and calls the next function of ``waits``."""

    def __init__(self, source, waits=(), *, drains_refused=0):
        self.waits, self.drains, self.lines = iter(waits), [], []
        self.now, self.refused = NOW, drains_refused
        self.status = watch(
            source, self.drain, poll_s=1.0, clock=lambda: self.now, sleep=self.wait,
            log=self.lines.append,
        )  # fmt: skip

    def drain(self, reason, left_s):
        self.drains.append((reason, left_s))
        if self.refused:
            self.refused -= 1
            raise DrainError("ray drain-node failed: no answer")

    def wait(self, seconds):
        self.now += seconds
        next(self.waits)()


@pytest.mark.parametrize("provider", LEFT_S)
def test_the_node_drains_when_its_cloud_gives_notice_with_the_time_that_is_left(provider):
    with metadata_service(provider, BEFORE[provider]) as service:
        waits = [lambda: None, lambda: None, lambda: service.pages.update(NOTICE[provider])]
        run = Run(make_source(provider, service.url), waits)
    waited = 0 if provider == "gcp" else 3  # gcp names no time: its 30 s count from now
    assert run.status == 0
    assert [left for _, left in run.drains] == [LEFT_S[provider] - waited]
    assert run.lines == [
        f"{run.drains[0][0]}: this machine ends in {LEFT_S[provider] - waited} s",
        f"the node drains, with {LEFT_S[provider] - waited} s left",
    ]


def test_aws_is_polled_with_one_session_token_until_it_expires():
    with metadata_service("aws") as service:
        source = make_source("aws", service.url)
        assert source.notice(NOW) is None
        assert source.notice(NOW) is None
        assert [method for method, _ in service.requests] == ["PUT", "GET", "GET"]
        service.tokens.pop(0)
        with pytest.raises(MetadataError, match="status 401"):
            source.notice(NOW)
        assert source.notice(NOW) is None


def test_the_error_of_a_lost_token_names_the_hop_limit(monkeypatch):
    monkeypatch.setattr("raydl.launch.spot_notice.clouds._ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts a request and answers nothing
        source = make_source("aws", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(MetadataError) as error:
            source.notice(NOW)
    assert "/latest/api/token does not answer: timed out; " in str(error.value)
    assert "set HttpPutResponseHopLimit to 2" in str(error.value)


def test_no_page_of_aws_is_polled_without_a_token():
    with metadata_service("aws") as service:
        service.failures = 2
        source = make_source("aws", service.url)
        for _ in range(2):
            with pytest.raises(MetadataError, match="token answers with status 503"):
                source.notice(NOW)
        assert service.requests == [("PUT", "/latest/api/token")] * 2


def test_an_aws_notice_that_can_not_be_read_is_a_notice_of_two_minutes():
    with metadata_service("aws", {AWS_ACTION: "soon"}) as service:
        assert make_source("aws", service.url).notice(NOW).ends_at == NOW + 120


def test_a_rebalance_recommendation_counts_only_with_its_option():
    page = json.dumps({"noticeTime": "2026-01-01T00:00:00Z"})
    with metadata_service("aws", {AWS_REBALANCE: page}) as service:
        assert make_source("aws", service.url).notice(NOW) is None
        notice = make_source("aws", service.url, rebalance=True).notice(NOW)
        assert (notice.reason, notice.ends_at) == ("rebalance recommendation", NOW + 120)


@pytest.mark.parametrize(
    "events", [azure_events("worker_2"), azure_events("worker_3", kind="Reboot")]
)
def test_azure_events_of_other_machines_and_of_other_kinds_are_none(events):
    with metadata_service("azure", {**BEFORE["azure"], AZURE_EVENTS: events}) as service:
        assert make_source("azure", service.url).notice(NOW) is None


def test_an_azure_event_that_has_begun_has_no_time_and_gets_the_shortest():
    with metadata_service("azure", BEFORE["azure"]) as service:
        service.pages[AZURE_EVENTS] = azure_events("worker_3", when="")
        assert make_source("azure", service.url).notice(NOW).ends_at == NOW + 30


@pytest.mark.parametrize("when", ["soon", "45", 45, ["now"], "2026-01-01T00:00:45Z"])
def test_an_azure_event_whose_time_can_not_be_read_gets_the_shortest(when):
    with metadata_service("azure", BEFORE["azure"]) as service:
        service.pages[AZURE_EVENTS] = azure_events("worker_3", when=when)
        assert make_source("azure", service.url).notice(NOW).ends_at == NOW + 30


@pytest.mark.parametrize("provider", LEFT_S)
def test_failures_of_the_metadata_service_are_logged_once_and_survived(provider):
    with metadata_service(provider, BEFORE[provider]) as service:
        service.failures = 3
        waits = [lambda: None] * 4 + [lambda: service.pages.update(NOTICE[provider])]
        run = Run(make_source(provider, service.url), waits)
    assert run.status == 0
    assert "answers with status 503; polling every 1 s" in run.lines[0]
    assert run.lines[1] == "the metadata service answers again"
    assert len(run.lines) == 4


@pytest.mark.parametrize(("provider", "page"), [("gcp", GCP), ("azure", AZURE_EVENTS)])
def test_an_unexpected_answer_is_an_error_and_no_notice(provider, page):
    with metadata_service(provider, {page: "<html>welcome</html>"}) as service:
        source = make_source(provider, service.url)
        with pytest.raises(MetadataError, match="says '<html>"):
            source.notice(NOW)


def test_an_address_without_a_service_is_a_metadata_error():
    with metadata_service("gcp") as service:
        pass
    with pytest.raises(MetadataError, match="does not answer"):
        make_source("gcp", service.url).notice(NOW)


def test_a_drain_that_fails_is_retried_with_the_remaining_time():
    with metadata_service("gcp", NOTICE["gcp"]) as service:
        run = Run(make_source("gcp", service.url), [lambda: None] * 2, drains_refused=2)
    assert run.status == 0
    assert [left for _, left in run.drains] == [30, 29, 28]


def test_a_drain_that_never_succeeds_is_tried_until_a_minute_past_the_end():
    with metadata_service("gcp", NOTICE["gcp"]) as service:
        run = Run(make_source("gcp", service.url), [lambda: None] * 100, drains_refused=100)
    assert run.status == 1
    assert run.now == NOW + 30 + 59
    assert run.drains[-1] == ("preempted", 1.0)
    assert run.lines[-1] == "ray drain-node failed: no answer; no time is left"


def test_a_machine_whose_clock_is_ahead_still_drains():
    past = json.dumps({"action": "terminate", "time": "2025-12-31T23:59:30Z"})
    with metadata_service("aws", {AWS_ACTION: past}) as service:
        run = Run(make_source("aws", service.url), [lambda: None], drains_refused=1)
    assert run.status == 0
    assert [left for _, left in run.drains] == [1.0, 1.0]


def test_an_attempt_to_drain_leaves_time_for_another():
    assert [longest_try_s(left_s) for left_s in (120, 40, 30, 16, 1)] == [25, 20, 15, 8, 8]


def test_a_drain_that_can_not_start_or_takes_too_long_is_retried(
    monkeypatch,
):
    def no_memory(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "run", no_memory)
    with pytest.raises(DrainError, match=r"cannot be started: .* Cannot allocate memory"):
        drain_by_command("preempted", 30.0)

    def too_long(command, *, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", too_long)
    with pytest.raises(DrainError, match="did not end within 15 s"):
        drain_by_command("preempted", 30.0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--provider", "asw"],
            "--provider has no 'asw'; did you mean aws? known: aws, gcp, azure",
        ),
        (["--provider", "aws", "--poll-s", "0"], "--poll-s must be in [0.1, 10], got 0"),
        (
            ["--provider", "gcp", "--rebalance"],
            "--rebalance is for --provider aws only, got gcp",
        ),
        (
            ["--provider", "gcp", "--metadata-url", "here"],
            "--metadata-url must begin with http:// or https://, got here",
        ),
    ],
)
def test_a_wrong_option_is_refused_in_one_sentence(options, sentence, capsys):
    assert main(options) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_a_wrong_provider_is_an_error_of_the_configuration():
    with pytest.raises(ConfigError):
        make_source("ibm")


def test_the_watch_holds_neither_ray_nor_torch_in_memory():
    code = (
        "import sys; from raydl.launch.spot_notice.__main__ import main; main(['--provider', 'x']);"
        "sys.exit(bool({'ray', 'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == 0


# A drained node without work ends at once: an actor runs on it while the script prints its drain.
BUSY_WORKER = """
import json, ray, time
from raydl.ray_backend import session as ray_session
ray.init(logging_level="ERROR")
@ray.remote(num_cpus=1)
class Worker:
    def begin(self):
        return "working"
worker = Worker.remote()
print(ray.get(worker.begin.remote(), timeout=100), flush=True)
end = time.monotonic() + 100
while not (nodes := ray_session.draining_nodes()) and time.monotonic() < end:
    time.sleep(0.05)
print(json.dumps(nodes), flush=True)
"""


@contextlib.contextmanager
def busy_worker():
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY_WORKER], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "working\n"
        yield process.stdout
    finally:
        process.kill()
        process.wait(timeout=10)
        process.stdout.close()


def test_the_node_and_the_cluster_may_be_named(monkeypatch):
    calls = []

    def run(command, *, env, **_):
        calls.append((command, env))

    monkeypatch.setattr(subprocess, "run", run)
    with metadata_service("gcp", NOTICE["gcp"]) as service:
        options = ["--provider", "gcp", "--metadata-url", service.url]
        assert main([*options, "--node-id", "c0ffee", "--address", "10.0.0.1:6379"]) == 0
    [(command, environment)] = calls
    assert command[-4:] == ["--node-id", "c0ffee", "--address", "10.0.0.1:6379"]
    assert environment["RAY_ADDRESS"] == "10.0.0.1:6379"


@pytest.mark.cluster
def test_the_notice_drains_the_node_of_a_real_cluster(monkeypatch):
    """Without ``--node-id`` it finds its own node, the only one on this machine."""
    with start_cluster(1) as cluster, metadata_service("gcp", NOTICE["gcp"]) as service:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        command = [
            sys.executable, "-m", "raydl.launch.spot_notice", "--provider", "gcp",
            "--metadata-url", service.url,
        ]  # fmt: skip
        with busy_worker() as output:
            begin = time.time()
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "the node drains, with" in done.stdout  # 30 s, unless the node answered late
            [(drained, ends_at_ms)] = json.loads(output.readline()).items()
        assert drained == cluster.head_node.node_id
        assert begin + 28 <= ends_at_ms / 1000 <= time.time() + 30
