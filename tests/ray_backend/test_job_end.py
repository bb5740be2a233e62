"""The answers of Ray's job client and their meaning, without a cluster."""

import http.server
import json
import threading

import pytest
from ray.exceptions import RpcError

from raydl.errors import RaydlError
from raydl.ray_backend import job_client
from raydl.ray_backend import session as ray_session
from raydl.ray_backend.job_end import SILENT, UNKNOWN


class FakeClient:
    """Ray's client of a cluster that answers everything with one error."""

    error = None

    def __init__(self, address):
        if address == "no":
            raise self.error

    def get_address(self):
        return "http://h:8265"

    def get_job_info(self, job_id):
        raise self.error if self.looks is None else self.looks

    def submit_job(self, **options):
        raise self.error

    looks = None


def http_error(code, text):
    return RuntimeError(f"Request failed with status code {code}: {text}.")


@pytest.fixture
def client(monkeypatch):
    """Return a function that makes RayJobs with a client that raises an error."""

    def make(error, looks=None):
        monkeypatch.setattr(FakeClient, "error", error)
        monkeypatch.setattr(FakeClient, "looks", looks)
        monkeypatch.setattr(job_client, "_Client", FakeClient)
        return job_client.RayJobs("yes")

    return make


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (http_error(404, "Job x does not exist"), UNKNOWN),
        (http_error(404, "<html>no such page"), SILENT),
        (http_error(404, "Job y does not exist"), SILENT),
        (http_error(500, "Traceback"), SILENT),
        (ValueError("no JSON"), SILENT),
        (ConnectionError(), SILENT),
    ],
)
def test_only_rays_own_answer_means_that_a_cluster_was_restarted(client, error, status):
    assert client(error).look("x").status == status


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (http_error(500, "No available agent to submit job, please try again later"), "52365"),
        (http_error(500, "Traceback (most recent call last):\n No available agent to submit job"),
         "No available agent to submit job; "),
        (http_error(502, "bad gateway"), "502: bad gateway"),
        (http_error(503, "not yet"), "503: not yet"),
        (http_error(504, "too late"), "504: too late"),
    ],
)  # fmt: skip
def test_a_cluster_that_is_not_ready_yet_is_polled_again_with_its_reason(client, error, why):
    jobs = client(error, http_error(404, "Job x does not exist"))
    assert why in jobs.submit("x", "true")


def test_a_cluster_that_does_not_answer_is_polled_again(client):
    assert client(ConnectionError(), http_error(404, "Job x does not exist")).submit("x", "y") == ""


def test_an_answer_that_is_not_a_job_is_kept_as_the_reason(client):
    jobs = client(http_error(500, "Traceback (most recent call last):\n  File a\nOSError: full"))
    assert jobs.look("x").message == jobs.submit("x", "true") == "OSError: full"


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (
            http_error(400, "Traceback (most recent call last):\n  File a\nValueError: bad pip\n"),
            "rejected the job: ValueError: bad pip",
        ),
        (http_error(413, "<html>"), "or keep data on storage that all nodes can read"),
        (PermissionError(13, "denied", "a.bin"), "denied: 'a.bin'"),
    ],
)
def test_a_refusal_raises_one_sentence_with_the_reason(client, error, end):
    with pytest.raises(RaydlError, match=r"^the cluster rejected the job: ") as caught:
        client(error, http_error(404, "Job x does not exist")).submit("x", "true")
    assert str(caught.value).endswith(end)
    assert "\n" not in str(caught.value)


class Dashboard(http.server.BaseHTTPRequestHandler):
    """Answers as a dashboard does when a client asks for its version."""

    def do_GET(self):
        body = json.dumps({"ray_version": "2.60.0", "version": "4"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def proxy(monkeypatch):
    """Let the environment name a proxy that does not answer."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://user:secret@127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_cluster_on_this_machine_is_reached_without_the_proxy(proxy, host):
    with http.server.HTTPServer(("127.0.0.1", 0), Dashboard) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://{host}:{server.server_port}"
        assert job_client.RayJobs(address).address == address
        server.shutdown()


def test_the_proxy_to_another_machine_that_does_not_answer_is_named(proxy):
    with pytest.raises(RaydlError) as caught:
        job_client.RayJobs("http://head.example:8265")
    said = str(caught.value)
    assert said.startswith("no Ray cluster answers at http://head.example:8265: ")
    assert "went to the proxy http://127.0.0.1:9 of this environment" in said
    assert said.endswith("add head.example to no_proxy")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RpcError("failed to connect"), "no Ray cluster answers at no: failed to connect; give"),
        (KeyError("ray_version"), "the server at no is not a Ray dashboard; give --address"),
        (TypeError("list"), "the server at no is not a Ray dashboard; give --address"),
    ],
)
def test_another_server_at_the_address_is_reported_in_one_sentence(client, error, sentence):
    client(error)
    with pytest.raises(RaydlError) as caught:
        job_client.RayJobs("no")
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("head:8265", "http://head:8265"),
        ("head", "http://head"),
        ("https://head:8265/", "https://head:8265/"),
        ("auto", "auto"),
    ],
)
def test_an_address_without_a_scheme_uses_http(address, url):
    assert ray_session.dashboard_url(address) == url
