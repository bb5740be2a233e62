"""Credentials in URIs, removed wherever a person or a file sees one.

A URI may say who asks, and prove it: ``s3://KEY:SECRET@bucket/x``, ``…?sig=…&token=…``. The
storage layer gets a URI as it was given. Everything else shows ``redact`` of it: what is left
names the same place, and opens it where the environment has the credentials.

Removed are user and password before an ``@``, and parameters whose names end as those of secrets
do. A container (``abfss://CONTAINER@account``) and the user of a Hadoop cluster stay, without a
password. The module stands below ``errors.py``, since errors quote URIs, too.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, unquote

_WORD = re.compile(r"://\S*")
"""A URI without its scheme, to the next white space; there may be others in it."""
_HOST = re.compile(r"[^/?#]*")
_BAD_LOGIN = re.compile(r"[^/?#@:\[]*:(?!\d*(?:[/?#]|$))")
"""Begins a host whose port is no number: of a login in which a ``/`` was not encoded."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*$")
_LONGEST_SCHEME = 16
_NAMES_SOMETHING = ("abfs", "abfss", "wasb", "wasbs", "hdfs", "viewfs")
"""Schemes in which the word before the ``@`` is a container or a plain user name."""
_ANONYMOUS = "anonymous"
"""The user of a bucket that asks for none: ``gs://anonymous@bucket``."""
_QUERY = re.compile(r"[?#].*", re.DOTALL)
_HOST_LOGIN = re.compile(r"[^/@\s]*:[^/\s]*@")
"""User and password of a host without a scheme, as in ``endpoint_override``."""
_AFTER_A_URI = re.compile(r"['\"`<>),.:;\]}]*$")
"""Characters that end a sentence or quotation in which a URI comes last."""
_SECRET_NAMES = ("key", "sig", "pass", "auth", "sas")
_SECRET_ENDINGS = (
    "token", "secret", "password", "passwd", "pwd", "signature", "credential", "credentials",
    "accesskey", "accesskeyid", "accessid", "accountkey", "apikey", "privatekey", "secretkey",
    "sharedkey", "authorization",
)  # fmt: skip
"""Of the names of parameters in small letters, without ``-``, ``_`` and ``.``."""
_DEEPEST = 2
"""So many times may one URI be a parameter of another."""


def redact(text: str) -> str:
    """Return a text without the credentials of the URIs in it; all else stays as it is.

    A URI ends at white space. What was redacted once does not change any more.
    """
    before = ""
    while text != before:  # what is left may, rarely, read as a login again
        before, text = text, _redacted(text, 0)
    return text


def redact_values(value: Any) -> Any:
    """Return nested values, as JSON has them, with all texts redacted; keys stay."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        kind = tuple if isinstance(value, tuple) else list
        return kind(redact_values(inner) for inner in value)
    return value


def has_credentials(value: Any) -> bool:
    """Whether a text, or one of nested values, is a URI with credentials, or quotes one."""
    if isinstance(value, str):
        return redact(value) != value
    if isinstance(value, dict):
        return has_credentials(list(value.values()))
    return isinstance(value, (list, tuple)) and any(map(has_credentials, value))


def _redacted(text: str, depth: int) -> str:
    def of_word(match: re.Match[str]) -> str:
        start = match.start()
        before = text[max(0, start - _LONGEST_SCHEME) : start]
        without_logins = ""
        for part in match[0].split("://")[1:]:
            without_logins += f"://{_without_login(before, part)}"
            before = part[-_LONGEST_SCHEME:]
        return _QUERY.sub(lambda query: _without_secrets(query[0], depth), without_logins)

    return _WORD.sub(of_word, text)


def _without_login(before: str, uri: str) -> str:
    """Return what follows the ``://`` without user and password; ``before`` ends in the scheme."""
    host = _HOST.match(uri)
    end = host[0].rfind("@") if host else -1
    if end < 0 and _BAD_LOGIN.match(uri):
        end = uri.rfind("@")
    if end < 0:
        return uri
    name, scheme = uri[:end].partition(":")[0], _SCHEME.search(before)
    is_name = scheme is not None and scheme[0].lower() in _NAMES_SOMETHING
    if name and (is_name or uri[:end] == _ANONYMOUS):
        return f"{name}{uri[end:]}"
    return uri[end + 1 :]


def _without_secrets(query: str, depth: int) -> str:
    """Return a query (and fragment) without secrets; what follows a URI in a sentence stays."""
    words = re.split(r"([?&#])", query)[1:]
    pairs = list(zip(words[::2], words[1::2], strict=True))
    kept, opens, is_secret = "", "", False
    for mark, word in pairs:
        if is_secret and mark != "&":  # a ? or # of the secret, which was not encoded
            continue
        is_secret = _is_secret(word)
        if not is_secret:
            kept += (opens if mark == "&" and opens else mark) + _plain(word, depth)
            opens = ""
        elif mark != "&":  # the next parameter comes to stand there
            opens = mark
    end = _AFTER_A_URI.search(query) if is_secret else None
    return kept + (end[0] if end else "")


def _is_secret(parameter: str) -> bool:
    name, mark, _ = parameter.partition("=")
    plain = re.sub(r"[-_.]", "", unquote(name)).lower()
    return bool(mark) and (plain in _SECRET_NAMES or plain.endswith(_SECRET_ENDINGS))


def _plain(parameter: str, depth: int) -> str:
    """Return a parameter that is no secret itself, without those inside of it."""
    first, *others = parameter.split(";")  # which stands for & in some
    for number, other in enumerate(others):
        if _is_secret(other):
            others = others[:number]
            break
    name, mark, value = ";".join([first, *others]).partition("=")
    decoded = unquote(value)
    inner = _HOST_LOGIN.sub("", decoded, count=1) if _HOST_LOGIN.match(decoded) else decoded
    if depth < _DEEPEST:
        inner = _redacted(inner, depth + 1)
    if inner != decoded:
        value = inner if decoded == value else quote(inner, safe="")
    return f"{name}{mark}{value}"
