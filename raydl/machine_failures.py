"""Which exceptions are failures of a machine rather than of the code that ran on it."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from raydl.errors import InfrastructureError, RaydlError

_KINDS = {"MemoryError", "OutOfMemoryError", "AcceleratorError", "DistBackendError"}
"""Names of types: torch's are not imported, since they differ between its versions."""
_ERRNOS = frozenset(
    getattr(errno, name)
    for name in (
        "EIO", "ENOSPC", "EDQUOT", "EROFS", "ESTALE", "ENODEV", "ENXIO", "EREMOTEIO", "EUCLEAN",
        "ENOMEM", "EMFILE", "ENFILE", "ENOTCONN", "ENETDOWN", "ENETUNREACH", "ENETRESET",
        "EHOSTDOWN", "EHOSTUNREACH", "ETIMEDOUT", "ECONNREFUSED", "ECONNRESET", "ECONNABORTED",
    )
    if hasattr(errno, name)
)  # fmt: skip
"""What a disk, a file server or a network says when it fails. A file that is missing, or may not
be read, is a mistake instead: a replacement would meet it again."""
_TEXTS = re.compile(
    r"can't allocate memory|not enough memory|CUDA error|CUDNN_STATUS|cuDNN error|CUBLAS_STATUS"
    r"|NCCL error|uncorrectable ECC|hipError"
    r"|AWS Error (NETWORK_CONNECTION|REQUEST_TIMEOUT|SLOW_DOWN|SERVICE_UNAVAILABLE|THROTTLING"
    r"|INTERNAL_FAILURE)|curlCode|Input/output error|Stale file handle|No space left on device",
)
"""In texts of errors that have no type or number of their own: torch's RuntimeError, PyArrow's."""


def failure_of_machine(error: BaseException) -> str:
    """Return in one line how a machine failed; empty: the code that ran there did.

    Args:
        error: with what it was raised from, in the process that raised it: between processes the
            causes are lost.
    """
    for cause in _causes(error):
        if _is_of_machine(cause):
            return str(error) if isinstance(error, RaydlError) else in_one_line(cause)
    return ""


def in_one_line(error: BaseException) -> str:
    """Return the type of an exception, and the first line of what it says.

    Args:
        error: one of raydl's own is a sentence already; one that Ray brings has the original as
            its ``cause``, and a traceback in its text.
    """
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, RaydlError):
        return str(cause)
    return ": ".join([type(cause).__name__, *str(cause).strip().splitlines()[:1]])


def raise_if_of_machine(name: str, error: BaseException) -> None:
    """Raise an InfrastructureError in place of an exception that is a failure of the machine.

    Args:
        name: the process, as in :class:`raydl.errors.InfrastructureError`.
        error: what was raised there.
    """
    problem = failure_of_machine(error)
    if problem:
        raise InfrastructureError(name, problem) from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it was raised from, and so on; each once."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _is_of_machine(error: BaseException) -> bool:
    if any(kind.__name__ in _KINDS for kind in type(error).__mro__):
        return True
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _ERRNOS
    return isinstance(error, (OSError, RuntimeError)) and bool(_TEXTS.search(str(error)))
