"""The jobs of a Ray cluster, over its REST interface; see ``raydl.launch.submission.Jobs``."""

from __future__ import annotations

import logging
import re
from typing import Any

import requests
from ray.exceptions import AuthenticationError, RayError
from ray.job_submission import JobSubmissionClient

from raydl.errors import RaydlError
from raydl.ray_backend.job_end import SILENT, UNKNOWN, JobState

_TIMEOUT_S = (10.0, 120.0)
"""To connect; and to answer, which takes long when a package was sent."""
_NO_ANSWER = (requests.exceptions.RequestException, ConnectionError)
_NO_TOKEN = (
    "the cluster at {} asks for a token, and {}: copy ~/.ray/auth_token from its head to this "
    "machine, or put the token into RAY_AUTH_TOKEN; for a cluster without tokens set "
    "RAY_AUTH_MODE=disabled"
)


_ADDRESS = "give --address http://HEAD:8265, the cluster's dashboard"
_NOT_READY = ("502", "503", "504")
"""Answers of a proxy in front of a dashboard that is not up yet."""
_NO_AGENT = "No available agent to submit job"
"""Answer of a dashboard while the head's agent, which starts the drivers, is not up."""
_ABOUT_AGENT = (
    f"{_NO_AGENT}; it may be starting still, or another Ray on the head's machine holds its port, "
    "52365 unless ray start was given --dashboard-agent-listen-port"
)
_TOO_LARGE = "413"


class _Client(JobSubmissionClient):  # type: ignore[misc]  # Ray has no types here
    """Ray's client, with a bound to every request: its own may wait for ever."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        return super()._do_request(method, endpoint, timeout=_TIMEOUT_S, **options)


class RayJobs:
    """The jobs of one cluster, all of the same runtime environment.

    Args:
        address: the cluster's dashboard, or None for the one that Ray finds.
        runtime_env: of the jobs that are submitted here.

    Raises:
        RaydlError: no cluster answers there, or it asks for another token.
    """

    def __init__(self, address: str | None, runtime_env: dict[str, Any] | None = None) -> None:
        for talkative in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env"):
            logging.getLogger(talkative).setLevel(logging.WARNING)
        self._runtime_env = runtime_env or {}
        where = address or "the address that Ray finds"
        try:
            self._client = _Client(address)
        except AuthenticationError as error:
            raise RaydlError(_NO_TOKEN.format(where, _first_line(error))) from error
        except (KeyError, AttributeError, TypeError) as error:  # JSON, but of something else
            raise RaydlError(f"what answers at {where} is no Ray dashboard; {_ADDRESS}") from error
        except (*_NO_ANSWER, ValueError, RuntimeError, RayError) as error:
            raise RaydlError(
                f"no Ray cluster answers at {where}: {_first_line(error)}; {_ADDRESS}"
            ) from error

    @property
    def address(self) -> str:
        """The URL of the cluster's dashboard."""
        return str(self._client.get_address())

    def submit(self, job_id: str, command: str) -> str | None:
        """Submit a job, unless it is there; return None, or why the cluster has not taken it."""
        state = self.look(job_id)  # an answer to an earlier try may have been lost
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
        except (RuntimeError, ValueError, OSError) as error:
            if _is_not_ready(error):
                return _refusal(error)
            raise RaydlError(f"the cluster did not take the job: {_refusal(error)}") from error
        return None

    def look(self, job_id: str) -> JobState:
        """Return how a job stands."""
        try:
            job = self._client.get_job_info(job_id)
        except _NO_ANSWER:
            return JobState(SILENT)
        except AuthenticationError as error:
            raise RaydlError(_NO_TOKEN.format(self.address, _first_line(error))) from error
        except (RuntimeError, ValueError, TypeError) as error:  # an answer that is no job
            if _code(error) == "404" and f"Job {job_id} does not exist" in str(error):
                return JobState(UNKNOWN)
            return JobState(SILENT, message=_refusal(error))
        return JobState(
            str(job.status), job.driver_exit_code, job.error_type or "", job.message or ""
        )

    def log(self, job_id: str) -> str | None:
        """Return all that a job has printed; None: it can not be read now."""
        try:
            return str(self._client.get_job_logs(job_id))
        except (*_NO_ANSWER, AuthenticationError, RuntimeError, ValueError, TypeError):
            return None


def _code(error: Exception) -> str:
    """Return the status of HTTP that Ray's client, which has no better way, puts into its text."""
    match = re.match(r"Request failed with status code (\d+)", str(error))
    return match[1] if match else ""


def _is_not_ready(error: Exception) -> bool:
    return _code(error) in _NOT_READY or _NO_AGENT in str(error)


def _refusal(error: Exception) -> str:
    """Return in one line what the cluster says: of a traceback its last line, the error."""
    if _code(error) == _TOO_LARGE:
        return (
            "what it would send is larger than the cluster takes at once (413); name what should "
            "stay here in .rayignore, or keep data where all nodes see them"
        )
    if _NO_AGENT in str(error):
        return _ABOUT_AGENT
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" .")]
    return lines[-1].rstrip(".") if "Traceback (" in str(error) else _first_line(error)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
