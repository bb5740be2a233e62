"""``python -m raydl.launch.spot_notice``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from raydl.errors import STOPPED, ConfigError
from raydl.launch.spot_notice.clouds import URLS, make_source
from raydl.launch.spot_notice.watch import drain_by_command, watch

_POLL_S = (0.1, 10.0)
"""Limits of ``--poll-s``: 10 s is a third of the shortest notice."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Poll for the notice and drain; return the exit status.

    Args:
        arguments: without the program's name; None for those of this process.
    """
    options = _parser().parse_args(arguments)
    try:
        low, high = _POLL_S
        if not low <= options.poll_s <= high:
            raise ConfigError("--poll-s", f"must be in [{low:g}, {high:g}], got {options.poll_s:g}")
        source = make_source(options.provider, options.metadata_url, rebalance=options.rebalance)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    def drain(reason: str, deadline_s: float) -> None:
        drain_by_command(reason, deadline_s, node_id=options.node_id, address=options.address)

    _log(f"polling {options.provider} every {options.poll_s:g} s for a notice of preemption")
    return watch(source, drain, poll_s=options.poll_s, log=_log)


def _log(sentence: str) -> None:
    print(f"{time.strftime('[%Y-%m-%d %H:%M:%S]')} {sentence}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m raydl.launch.spot_notice",
        description="Drain this machine's Ray node when its cloud gives notice.",
    )
    parser.add_argument("--provider", required=True, help=f"the cloud: {', '.join(URLS)}")
    parser.add_argument("--poll-s", type=float, default=1.0, help="seconds between two polls")
    parser.add_argument("--metadata-url", help="metadata service; default: the cloud's own")
    parser.add_argument("--node-id", help="Ray node, in hex; default: the one of this machine")
    parser.add_argument("--address", help="Ray cluster; default: the one of this machine")
    parser.add_argument(
        "--rebalance", action="store_true", help="aws: also drain at a rebalance recommendation"
    )
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(STOPPED["SIGINT"])
