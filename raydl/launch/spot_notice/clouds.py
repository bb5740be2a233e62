"""Polls each cloud's metadata service for the notice that a spot machine will be preempted."""

from __future__ import annotations

import email.utils
import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from raydl.errors import ConfigError, RaydlError, UnknownNameError

_ANSWER_S = 5.0
"""Time-out of a request to a metadata service, in seconds."""
_TOKEN_S = 21600
"""Lifetime of an AWS session token in seconds, the longest that AWS allows."""
_AWS_S, _GCP_S, _AZURE_S = 120.0, 30.0, 30.0
"""Seconds that each cloud guarantees between notice and preemption."""


class MetadataError(RaydlError):
    """The metadata service did not answer, or its answer has another form."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """The notice that this machine will be preempted.

    Args:
        reason: the cloud's reason.
        ends_at: time of the preemption, in seconds of Unix time.
    """

    reason: str
    ends_at: float


class Source(Protocol):
    """Source of the notice that this machine will be preempted."""

    def notice(self, now: float) -> Notice | None:
        """Return the notice, or None if there is none.

        Args:
            now: Unix time in seconds.

        Raises:
            MetadataError: the metadata service gave no usable answer.
        """


class Metadata:
    """The metadata service of this machine.

    Args:
        url: its address, without a path.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        # Without a proxy, for which the address would be its own machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def send_request(
        self, path: str, headers: dict[str, str], *, method: str = "GET"
    ) -> tuple[int, str]:
        """Return (HTTP status, text).

        Raises:
            MetadataError: the service did not answer.
        """
        request = urllib.request.Request(self._url + path, headers=headers, method=method)
        try:
            with self._opener.open(request, timeout=_ANSWER_S) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, ""
        except (OSError, http.client.HTTPException) as error:
            raise MetadataError(f"{self._url}{path} does not answer: {error}") from None

    def get(self, path: str, headers: dict[str, str]) -> str:
        """Return the text of a page.

        Raises:
            MetadataError: the service did not answer, or the status is not 200.
        """
        status, text = self.send_request(path, headers)
        if status != 200:
            raise MetadataError(f"{self._url}{path} answers with status {status}")
        return text


class Aws:
    """EC2: a page that does not exist before the notice.

    Args:
        metadata: the metadata service.
        rebalance: accept a rebalance recommendation, which may come long before, as a notice.
    """

    def __init__(self, metadata: Metadata, *, rebalance: bool = False) -> None:
        self._metadata = metadata
        self._pages = {"spot/instance-action": _aws_action}
        if rebalance:
            self._pages["events/recommendations/rebalance"] = _aws_rebalance
        self._token = ""

    def notice(self, now: float) -> Notice | None:
        """Return the notice, if there is one; see ``Source``."""
        for page, read in self._pages.items():
            text = self._get(f"/latest/meta-data/{page}")
            if text is not None:
                return read(text, now)
        return None

    def _get(self, path: str) -> str | None:
        if not self._token:
            self._token = self._new_token()
        status, text = self._metadata.send_request(path, {"X-aws-ec2-metadata-token": self._token})
        if status in (200, 404):
            return text if status == 200 else None
        self._token = ""  # 401: the token has expired
        raise MetadataError(f"{path} answers with status {status}")

    def _new_token(self) -> str:
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
        path = "/latest/api/token"
        try:
            status, text = self._metadata.send_request(path, ttl, method="PUT")
        except MetadataError as error:
            # The answer has a hop limit: beyond it, the answer is dropped silently.
            hint = "in a container with a network of its own, set HttpPutResponseHopLimit to 2"
            raise MetadataError(f"{error}; {hint}, or use the machine's network") from None
        if status != 200:
            raise MetadataError(f"{path} answers with status {status}")
        return text


def _aws_action(text: str, now: float) -> Notice:
    try:
        action = json.loads(text)
        time = datetime.fromisoformat(action["time"].replace("Z", "+00:00"))
        return Notice(reason=f"spot {action['action']}", ends_at=time.timestamp())
    except (ValueError, KeyError, TypeError, AttributeError):
        # The page exists, so the machine will be preempted, whatever the page says.
        return Notice(reason="spot notice", ends_at=now + _AWS_S)


def _aws_rebalance(text: str, now: float) -> Notice:
    return Notice(reason="rebalance recommendation", ends_at=now + _AWS_S)


class Gcp:
    """Compute Engine: a page that says TRUE or FALSE.

    Args:
        metadata: the metadata service.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def notice(self, now: float) -> Notice | None:
        """Return the notice, if there is one; see ``Source``."""
        path = "/computeMetadata/v1/instance/preempted"
        text = self._metadata.get(path, {"Metadata-Flavor": "Google"}).strip()
        if text not in ("TRUE", "FALSE"):
            raise MetadataError(f"{path} says {text[:80]!r}, neither TRUE nor FALSE")
        return Notice(reason="preempted", ends_at=now + _GCP_S) if text == "TRUE" else None


class Azure:
    """Azure: a list of events of this machine and of others in its set.

    Args:
        metadata: the metadata service.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._name = ""

    def notice(self, now: float) -> Notice | None:
        """Return the notice, if there is one; see ``Source``."""
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        text = self._metadata.get(path, {"Metadata": "true"})
        try:
            events = [e for e in json.loads(text)["Events"] if e["EventType"] == "Preempt"]
            events = [e for e in events if self._own_name() in e["Resources"]]
            if not events:
                return None
            return Notice(reason="preempt event", ends_at=_not_before(events[0], now))
        except (ValueError, KeyError, TypeError):
            raise MetadataError(f"{path} says {text[:80]!r}, no list of events") from None

    def _own_name(self) -> str:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        self._name = self._name or self._metadata.get(path, {"Metadata": "true"}).strip()
        return self._name


def _not_before(event: dict[str, Any], now: float) -> float:
    """Return the start of an event, in seconds of Unix time."""
    try:
        return email.utils.parsedate_to_datetime(event["NotBefore"]).timestamp()
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        # The time is empty once the event has begun.
        return now + _AZURE_S


URLS = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
"""Address of each cloud's metadata service."""


def make_source(provider: str, url: str | None = None, *, rebalance: bool = False) -> Source:
    """Return the source of notices for this machine.

    Args:
        provider: ``aws``, ``gcp`` or ``azure``.
        url: address of the metadata service; None for the cloud's own.
        rebalance: on AWS, accept a rebalance recommendation as a notice.

    Raises:
        ConfigError: the provider is unknown, or does not have the option.
    """
    if provider not in URLS:
        raise UnknownNameError("--provider", provider, URLS)
    if rebalance and provider != "aws":
        raise ConfigError("--rebalance", f"is for --provider aws only, got {provider}")
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError("--metadata-url", f"must begin with http:// or https://, got {url}")
    metadata = Metadata(url or URLS[provider])
    if provider == "aws":
        return Aws(metadata, rebalance=rebalance)
    return Gcp(metadata) if provider == "gcp" else Azure(metadata)
