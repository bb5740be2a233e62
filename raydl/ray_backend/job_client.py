"""The jobs of a Ray cluster, over its REST interface; see ``raydl.launch.submission.Jobs``."""

from __future__ import annotations

import ipaddress
import logging
import re
from typing import Any
from urllib.parse import urlsplit

import requests
from ray.exceptions import AuthenticationError, RayError
from ray.job_submission import JobSubmissionClient

from raydl.errors import RaydlError
from raydl.ray_backend.job_end import SILENT, UNKNOWN, JobState
from raydl.text.redaction import redact

_TIMEOUT_S = (10.0, 120.0)
"""Time-outs to connect, and to answer, in seconds. An upload takes long to answer."""
_NO_ANSWER = (requests.exceptions.RequestException, ConnectionError)
_NO_TOKEN = (
    "the cluster at {} requires a token, and {}: copy ~/.ray/auth_token from its head to this "
    "machine, or put the token into RAY_AUTH_TOKEN; for a cluster without tokens set "
    "RAY_AUTH_MODE=disabled"
)
_ADDRESS = "give --address http://HEAD:8265, the cluster's dashboard"
_NOT_READY = ("502", "503", "504")
"""Statuses of a proxy before the dashboard behind it has started."""
_NO_AGENT = "No available agent to submit job"
"""Answer of a dashboard before the head's agent, which starts drivers, has started."""


class _Client(JobSubmissionClient):  # type: ignore[misc]  # Ray has no types here
    """Ray's client with time-outs: without them, a request may wait forever.

    This machine is reached without the proxy of the environment, which cannot reach it.
    """

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        host = urlsplit(self.get_address()).hostname or ""
        proxies = {"no_proxy": host} if _is_loopback(host) else {}
        return super()._do_request(method, endpoint, timeout=_TIMEOUT_S, proxies=proxies, **options)


class RayJobs:
    """The jobs of one cluster, with one runtime environment.

    Args:
        address: the cluster's dashboard; None: the one that Ray finds.
        runtime_env: the runtime environment of submitted jobs.

    Raises:
        RaydlError: if no cluster answers at the address, or it rejects the token.
    """

    def __init__(self, address: str | None, runtime_env: dict[str, Any] | None = None) -> None:
        for verbose in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env"):
            logging.getLogger(verbose).setLevel(logging.WARNING)
        self._runtime_env = runtime_env or {}
        where = address or "the address that Ray finds"
        try:
            self._client = _Client(address)
        except AuthenticationError as error:
            raise RaydlError(_NO_TOKEN.format(where, _first_line(error))) from error
        except (KeyError, AttributeError, TypeError) as error:  # JSON of another service
            raise RaydlError(f"the server at {where} is not a Ray dashboard; {_ADDRESS}") from error
        except (*_NO_ANSWER, ValueError, RuntimeError, RayError) as error:
            raise RaydlError(
                f"no Ray cluster answers at {where}: {_first_line(error)}; "
                f"{_proxy_to(address) or _ADDRESS}"
            ) from error

    @property
    def address(self) -> str:
        """The URL of the cluster's dashboard."""
        return str(self._client.get_address())

    def submit(self, job_id: str, command: str) -> str | None:
        """Submit a job, unless the cluster has it; return None, or why the cluster is not ready.

        Raises:
            RaydlError: if the cluster refuses the job or the token.
        """
        state = self.look(job_id)  # the answer to an earlier request may have been lost
        if state.status != UNKNOWN:
            return state.message if state.status == SILENT else None
        try:
            self._client.submit_job(
                entrypoint=command, submission_id=job_id, runtime_env=self._runtime_env
            )
        except _NO_ANSWER:
            return ""
        except AuthenticationError as error:
            raise RaydlError(_NO_TOKEN.format(self.address, _first_line(error))) from error
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            if _code(error) in _NOT_READY or _NO_AGENT in str(error):
                return _refusal(error)
            raise RaydlError(f"the cluster rejected the job: {_refusal(error)}") from error
        return None

    def look(self, job_id: str) -> JobState:
        """Return the state of a job.

        Raises:
            RaydlError: if the cluster rejects the token.
        """
        try:
            job = self._client.get_job_info(job_id)
        except _NO_ANSWER:
            return JobState(SILENT)
        except AuthenticationError as error:
            raise RaydlError(_NO_TOKEN.format(self.address, _first_line(error))) from error
        except (RuntimeError, ValueError, TypeError) as error:  # the answer is not a job
            if _code(error) == "404" and f"Job {job_id} does not exist" in str(error):
                return JobState(UNKNOWN)
            return JobState(SILENT, message=_refusal(error))
        return JobState(
            str(job.status), job.driver_exit_code, job.error_type or "", job.message or ""
        )

    def log(self, job_id: str) -> str | None:
        """Return the output of a job, or None if it cannot be read now."""
        try:
            return str(self._client.get_job_logs(job_id))
        except (*_NO_ANSWER, AuthenticationError, RuntimeError, ValueError, TypeError):
            return None


def _is_loopback(host: str) -> bool:
    """Whether a host is this machine by its name or address."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _proxy_to(address: str | None) -> str:
    """Return the end of a sentence that names the proxy to an address, or an empty text."""
    host = urlsplit(address or "").hostname or ""
    proxies = requests.utils.get_environ_proxies(address or "")
    proxy = requests.utils.select_proxy(address or "", proxies)
    if not proxy or not host or _is_loopback(host):
        return ""
    return (
        f"the request went to the proxy {redact(proxy)} of this environment: if {host} is reached "
        f"without it, add {host} to no_proxy"
    )


def _code(error: Exception) -> str:
    """Return the HTTP status from the text of Ray's error, its only place, or ""."""
    match = re.match(r"Request failed with status code (\d+)", str(error))
    return match[1] if match else ""


def _refusal(error: Exception) -> str:
    """Return one line of the cluster's message: of a traceback the last, which is the error."""
    if _code(error) == "413":
        return (
            "the upload is larger than the cluster accepts (413); list files to leave out in "
            ".rayignore, or keep data on storage that all nodes can read"
        )
    if _NO_AGENT in str(error):
        return (
            f"{_NO_AGENT}; it may still be starting, or another Ray on the head's machine uses its "
            "port, 52365 unless ray start has --dashboard-agent-listen-port"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" .")]
    return lines[-1].rstrip(".") if "Traceback (" in str(error) else _first_line(error)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
