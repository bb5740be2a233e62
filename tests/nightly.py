"""Runs what takes too long for ``make test``, and writes the results to ``docs/nightly.md``.

Command:   python tests/nightly.py [PART ...]

Each part is a target of the Makefile. A part that fails does not stop the others. The page keeps
the newest result of each part, so that parts can also be run one by one.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/nightly.md"
PARTS = {
    "test-slow": "the tests that take minutes",
    "soak": "kills, halts and new nodes at random",
    "seeds": "simulated runs with faults at random, with thousands of seeds",
    "fuzz": "damaged data sets of every format",
    "mutants": "changes of the core that tests or types must notice",
}
"""What each part does, by its target of the Makefile."""
_NOT_RUN = "not run yet"
_MOST_TEXT = 160
"""Most characters of a part's last line of output."""
_TOP = """# Nightly tests

`make nightly` runs what takes too long for `make test`, and writes this page;
`make nightly PARTS="soak"` runs one part and keeps the results of the others. A part that fails
does not stop the others.

"""


@dataclass(frozen=True)
class Result:
    """The newest result of a part, as in its row of the page."""

    part: str
    outcome: str = _NOT_RUN
    seconds: str = ""
    date: str = ""
    commit: str = ""
    last_line: str = ""

    def row(self) -> str:
        """Return the row of the page."""
        values = (self.outcome, self.seconds, self.date, self.commit, self.last_line)
        return f"| `make {self.part}` | {' | '.join((PARTS[self.part], *values))} |"


def read_page(text: str) -> dict[str, Result]:
    """Return the results on a page, by part."""
    results = {part: Result(part) for part in PARTS}
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        part = cells[0].removeprefix("`make ").rstrip("`") if cells else ""
        if part in PARTS and len(cells) == 7:
            results[part] = Result(part, *cells[2:])
    return results


def page_of(results: dict[str, Result]) -> str:
    """Return the text of the page."""
    head = ["part", "what it is", "result", "seconds", "date", "commit", "last line"]
    rule = ["---"] * 3 + ["---:"] + ["---"] * 3
    lines = [f"| {' | '.join(cells)} |" for cells in (head, rule)]
    return _TOP + "\n".join([*lines, *(results[part].row() for part in PARTS)]) + "\n"


def run_part(part: str, command: Sequence[str], *, commit: str, today: str) -> Result:
    """Run a command, show its output, and return the result.

    Args:
        part: name of the part.
        command: the command.
        commit: of the sources.
        today: the date.
    """
    began, last_line = time.monotonic(), ""
    with subprocess.Popen(
        command, cwd=ROOT, text=True, errors="replace", stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.strip(" =\n") and not line.startswith("make"):
                last_line = line.strip(" =\n")
    outcome = "passed" if process.returncode == 0 else "**failed**"
    text = last_line[:_MOST_TEXT].replace("|", r"\|")
    return Result(part, outcome, f"{time.monotonic() - began:,.0f}", today, commit, text)


def commit_of_sources() -> str:
    """Return the commit, and whether files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    has_changes = git(
        "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/nightly.md"
    )
    return git("rev-parse", "--short=10", "HEAD") + (" with changes" if has_changes else "")


def main(
    parts: Sequence[str],
    *,
    page: Path = PAGE,
    command_of: Callable[[str], Sequence[str]] = lambda part: ("make", part),
) -> int:
    """Run some parts, or all, and return 1 if one has failed, 2 if there is none of a name."""
    if unknown := [part for part in parts if part not in PARTS]:
        print(f"no part {', '.join(unknown)}; the parts are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    results = read_page(page.read_text() if page.exists() else "")
    commit, today = commit_of_sources(), datetime.datetime.now(datetime.timezone.utc).date()
    chosen = parts or list(PARTS)
    for part in chosen:
        results[part] = run_part(part, command_of(part), commit=commit, today=str(today))
        page.write_text(page_of(results))
    return int(any(results[part].outcome != "passed" for part in chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
