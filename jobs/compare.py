"""Compare training methods: time and samples to a target accuracy, and where the time went.

Command:   python jobs/compare.py --methods sync-easgd,async-easgd --workers 2 --epochs 10 --seeds 2
Expected:  runs/compare-DATE/comparison.md with a table and three charts, comparison.json with the
           figures of every run; both methods reach 94% to 95% after ten epochs of the digits
Time:      50 s, of which 5 s are training: every run starts its own workers
Hardware:  two shared CPU cores; there the 34 runs of --methods all --epochs 40 took 15 minutes

    --methods all | NAME,NAME,module:Class    --samples N | --seconds S | --epochs E
    --seeds 3   --target 0.985   --out DIR    and every option of `raydl train`

If a method fails, the others still run, and the exit status is 1. Repeat the command with --out DIR
to continue a comparison that was stopped. For a Ray job, choose --out on a persistent disk.
"""

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no install

import tyro

from raydl.cli import parse_train
from raydl.errors import RaydlError
from raydl.tools.comparison import Comparison, compare


def parse(arguments: Sequence[str]) -> Comparison:
    """Return the comparison for its own options and those of `raydl train`."""
    own, others = tyro.cli(
        Comparison, args=list(arguments), prog="compare.py", return_unknown_args=True
    )
    return dataclasses.replace(own, base=parse_train(others))


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: 0 after success, 1 if a run failed, 2 for wrong options."""
    try:
        return compare(parse(arguments), command=f"python jobs/compare.py {shlex.join(arguments)}")
    except RaydlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
