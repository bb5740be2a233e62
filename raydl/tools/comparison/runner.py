"""Executes the runs of a comparison, and has them reported.

The runs of all methods with one seed come before those with the next seed: a machine that is slow
for some minutes then slows down every method, not all seeds of one method.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from raydl.text.redaction import redact
from raydl.tools import runs as several
from raydl.tools.comparison.figures import as_dict, make_rows
from raydl.tools.comparison.hparams import write_hparams
from raydl.tools.comparison.report import describe, draw, markdown, print_table, sentence
from raydl.tools.comparison.settings import Comparison, plan
from raydl.tools.runs import Fit, Run


def compare(comparison: Comparison, *, fit: Fit | None = None, command: str = "") -> int:
    """Execute the runs that are not complete yet, report all runs, and return the exit status.

    Args:
        comparison: settings of the comparison.
        fit: trains one run; None: ``raydl.tools.runs.train``.
        command: the command line for the report.

    Returns:
        0 after success, 1 if a run failed, 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        RaydlError: if the settings, the data or the folder cannot be used; no run was started.
    """
    out, target = several.folder_of(comparison.out, "compare"), comparison.target
    runs = several.prepare(plan(comparison, out), out, checks_data=fit is None)
    print(f"{len(runs)} run(s) to {out}: {describe(comparison)}", flush=True)
    report = functools.partial(_write_report, comparison, runs, out, command)
    figures = functools.partial(sentence, target=target)
    stopped_by = several.execute(runs, fit, figures=figures, report=report)
    rows = make_rows(runs, target)
    draw(runs, rows, target, out)
    write_hparams(runs, target)
    report()
    print_table(rows, target)
    status = several.exit_status(runs, stopped_by, out)
    print(
        f"  report:       {out}/comparison.md\n"
        f"  curves:       tensorboard --logdir {out}  (then #hparams, #custom_scalars)"
    )
    return status


def _write_report(comparison: Comparison, runs: Sequence[Run], out: Path, command: str) -> None:
    """Write ``comparison.json`` and ``comparison.md`` with the runs so far."""
    target = comparison.target
    values = {"target": target, "runs": [as_dict(run, target) for run in runs]}
    several.write_json(out / "comparison.json", command, comparison.base, values)
    text = markdown(comparison, runs, make_rows(runs, target), out, command)
    (out / "comparison.md").write_text(redact(text))
