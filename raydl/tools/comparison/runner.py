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
from raydl.tools.comparison.csv_files import write_curves, write_table
from raydl.tools.comparison.figures import as_dict, chosen, make_rows
from raydl.tools.comparison.hparams import write_hparams
from raydl.tools.comparison.page import comparison_page
from raydl.tools.comparison.report import describe, draw, markdown, print_table, sentence
from raydl.tools.comparison.settings import Comparison, plan, plan_seeds
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
    if len({run.seed for run in runs}) < comparison.seeds and not stopped_by:
        first = len(runs)
        more = plan_seeds(comparison, out, chosen(runs))
        runs += several.prepare(more, out, checks_data=False)
        stopped_by = several.execute(runs, fit, figures=figures, report=report, start=first)
    best = chosen(runs)
    rows = make_rows(best, target)
    draw(best, rows, target, out)
    page = comparison_page(describe(comparison), best, rows, target)
    (out / "comparison.html").write_text(page)
    write_hparams(runs, target)
    report()
    print_table(rows, target)
    status = several.exit_status(runs, stopped_by, out)
    print(
        f"  report:       {out}/comparison.md, comparison.html, comparison.csv, curves.csv\n"
        f"  curves:       tensorboard --logdir {out}  (then #hparams, #custom_scalars)"
    )
    return status


def _write_report(comparison: Comparison, runs: Sequence[Run], out: Path, command: str) -> None:
    """Write the files of the comparison with the runs so far."""
    target, best = comparison.target, chosen(runs)
    rows = make_rows(best, target)
    values = {"target": target, "runs": [as_dict(run, target) for run in runs]}
    several.write_json(out / "comparison.json", command, comparison.base, values)
    write_table(rows, out / "comparison.csv")
    write_curves(runs, out / "curves.csv")
    text = markdown(comparison, runs, rows, out, command)
    (out / "comparison.md").write_text(redact(text))
