"""Removes credentials from URIs before a person or a file sees them.

A URI may hold credentials: ``s3://KEY:SECRET@bucket/x``, ``…?sig=…&token=…``. Only the storage
layer receives a URI unchanged. All else shows ``redact`` of it: the redacted URI names the same
place and can be opened if the environment has the credentials.

``redact`` removes the user and password before an ``@``, and parameters with the name of a secret.
A container (``abfss://CONTAINER@account``) and the user of a Hadoop cluster stay, without a
password. ``errors.py`` imports this module, since errors quote URIs.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, unquote

_URI = re.compile(r"://\S*")
"""A URI without its scheme, up to white space; it may contain other URIs."""
_HOST = re.compile(r"[^/?#]*")
_BAD_LOGIN = re.compile(r"[^/?#@:\[]*:(?!\d*(?:[/?#]|$))")
"""Start of a host whose port is not a number: a login with a ``/`` that is not encoded."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*$")
_LONGEST_SCHEME = 16
_NAME_SCHEMES = ("abfs", "abfss", "wasb", "wasbs", "hdfs", "viewfs")
"""Schemes with a container or a plain user name before the ``@``."""
_ANONYMOUS = "anonymous"
"""User name for a public bucket: ``gs://anonymous@bucket``."""
_QUERY = re.compile(r"[?#].*", re.DOTALL)
_HOST_LOGIN = re.compile(r"[^/@\s]*:[^/\s]*@")
"""User and password of a host without a scheme, as in ``endpoint_override``."""
_AFTER_URI = re.compile(r"['\"`<>),.:;\]}]*$")
"""Punctuation after a URI at the end of a sentence or quotation."""
_SECRET_NAMES = ("key", "sig", "pass", "auth", "sas")
_SECRET_ENDINGS = (
    "token", "secret", "password", "passwd", "pwd", "signature", "credential", "credentials",
    "accesskey", "accesskeyid", "accessid", "accountkey", "apikey", "privatekey", "secretkey",
    "sharedkey", "authorization",
)  # fmt: skip
"""Endings of the names of secret parameters, in lower case, without ``-``, ``_`` and ``.``."""
_MAX_DEPTH = 2
"""How deep URIs may be nested, one as a parameter of another."""


def redact(text: str) -> str:
    """Return a text without the credentials of its URIs; all else is unchanged.

    A URI ends at white space. Redacting twice gives the same text as redacting once.
    """
    before = ""
    while text != before:  # rarely, the rest looks like a login again
        before, text = text, _redacted(text, 0)
    return text


def redact_values(value: Any) -> Any:
    """Return nested values, as in JSON, with all texts redacted; keys are unchanged."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        kind = tuple if isinstance(value, tuple) else list
        return kind(redact_values(inner) for inner in value)
    return value


def has_credentials(value: Any) -> bool:
    """Whether a text, or a text in nested values, holds a URI with credentials."""
    return bool(redact_values(value) != value)


def _redacted(text: str, depth: int) -> str:
    def redact_uri(match: re.Match[str]) -> str:
        start = match.start()
        before = text[max(0, start - _LONGEST_SCHEME) : start]
        without_logins = ""
        for part in match[0].split("://")[1:]:
            without_logins += f"://{_without_login(before, part)}"
            before = part[-_LONGEST_SCHEME:]
        return _QUERY.sub(lambda query: _without_secrets(query[0], depth), without_logins)

    return _URI.sub(redact_uri, text)


def _without_login(before: str, uri: str) -> str:
    """Return a URI without its user and password.

    Args:
        before: the text up to the ``://``; it ends with the scheme.
        uri: the text after the ``://``.
    """
    host = _HOST.match(uri)
    end = host[0].rfind("@") if host else -1
    if end < 0 and _BAD_LOGIN.match(uri):
        end = uri.rfind("@")
    if end < 0:
        return uri
    name, scheme = uri[:end].partition(":")[0], _SCHEME.search(before)
    is_name = scheme is not None and scheme[0].lower() in _NAME_SCHEMES
    if name and (is_name or uri[:end] == _ANONYMOUS):
        return f"{name}{uri[end:]}"
    return uri[end + 1 :]


def _without_secrets(query: str, depth: int) -> str:
    """Return a query (and fragment) without secrets; punctuation after the URI stays."""
    words = re.split(r"([?&#])", query)[1:]
    kept, opening, is_secret = "", "", False
    for mark, word in zip(words[::2], words[1::2], strict=True):
        if is_secret and mark != "&":  # a ? or # inside the secret, not encoded
            continue
        is_secret = _is_secret(word)
        if not is_secret:
            kept += (opening if mark == "&" and opening else mark) + _without_inner(word, depth)
            opening = ""
        elif mark != "&":  # the next parameter follows this mark
            opening = mark
    end = _AFTER_URI.search(query) if is_secret else None
    return kept + (end[0] if end else "")


def _is_secret(parameter: str) -> bool:
    name, mark, _ = parameter.partition("=")
    plain = re.sub(r"[-_.]", "", unquote(name)).lower()
    return bool(mark) and (plain in _SECRET_NAMES or plain.endswith(_SECRET_ENDINGS))


def _without_inner(parameter: str, depth: int) -> str:
    """Return a parameter without the secrets that its value contains."""
    first, *others = parameter.split(";")  # some URIs have ; instead of &
    for number, other in enumerate(others):
        if _is_secret(other):
            others = others[:number]
            break
    name, mark, value = ";".join([first, *others]).partition("=")
    decoded = unquote(value)
    inner = decoded[login.end() :] if (login := _HOST_LOGIN.match(decoded)) else decoded
    if depth < _MAX_DEPTH:
        inner = _redacted(inner, depth + 1)
    if inner != decoded:
        value = inner if decoded == value else quote(inner, safe="")
    return f"{name}{mark}{value}"
